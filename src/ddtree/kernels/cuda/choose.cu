// The best token of each row, after temperature and Gumbel noise where the sequence samples. Blocks of a row take one
// chunk of the vocabulary each; the last to finish compares. Compile with LOGIT_BF16 0 or 1 and SAMPLED 0 or 1.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef long long i64;

#define FULL 0xffffffffu
#define THREADS 256
#define POSITION_STRIDE 0x9E3779B9u
#define SECOND_KEY 0x6A09E667u

#if LOGIT_BF16
typedef u16 logit_t;
__device__ float read_logit(logit_t value) { return __uint_as_float((u32)value << 16); }
#else
typedef float logit_t;
__device__ float read_logit(logit_t value) { return value; }
#endif

__device__ u32 ordered(float value) {
    u32 bits = __float_as_uint(value + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The bits and the float steps of ddtree.kernels.noise.
__device__ u32 mix(u32 bits) {
    bits ^= bits >> 16;
    bits *= 0x7FEB352Du;
    bits ^= bits >> 15;
    bits *= 0x846CA68Bu;
    return bits ^ bits >> 16;
}
__device__ float gumbel(u32 row_key, u32 second_key, u32 token) {
    u32 bits = mix(mix(token * POSITION_STRIDE + row_key) ^ second_key) ^ 0x80000000u;
    float uniform = (float)(((double)bits + 0.5) * 2.3283064365386963e-10);  // 2**-32
    uniform = fminf(uniform, 0.999999940395355224609375f);                   // 1 - 2**-24
    return -logf(-log1pf(-uniform));
}

extern "C" __global__ void __launch_bounds__(THREADS)
    choose(const logit_t* logits, const float* temperatures, const int* seed_keys, const i64* committed, const i64* depths,
           i64* chosen, u64* partial, u32* arrived, int vocab, int rows, int per_block, int is_scaled) {
    __shared__ u64 best_of[THREADS / 32];
    __shared__ int is_last;
    const int tid = threadIdx.x, chunks = gridDim.x, row = blockIdx.y;
    const logit_t* own = logits + (i64)row * vocab;
    const int first = blockIdx.x * per_block, stop = first + per_block < vocab ? first + per_block : vocab;
    u64 best = 0;
#if SAMPLED
    const int sequence = row / rows;
    const float temperature = temperatures[sequence];
    const bool samples = temperature > 0.0f;
    const float divisor = samples && !is_scaled ? temperature : 1.0f;
    u32 row_key = mix((u32)(committed[sequence] + depths[row] + 1) * POSITION_STRIDE + (u32)seed_keys[sequence]);
    u32 second_key = mix(row_key ^ SECOND_KEY);
#endif
#pragma unroll 8
    for (int token = first + tid; token < stop; token += THREADS) {
        float value = read_logit(own[token]);
#if SAMPLED
        if (samples) value = value / divisor + gumbel(row_key, second_key, token);
#endif
        u64 key = (u64)ordered(value) << 32 | ~(u32)token;  // equal scores: the lower token
        best = key > best ? key : best;
    }
    for (int step = 16; step > 0; step /= 2) {
        u64 other = __shfl_xor_sync(FULL, best, step);
        best = other > best ? other : best;
    }
    if (tid % 32 == 0) best_of[tid / 32] = best;
    __syncthreads();
    if (tid == 0) {
        for (int i = 1; i < THREADS / 32; i++) best = best_of[i] > best ? best_of[i] : best;
        ((volatile u64*)partial)[(i64)row * chunks + blockIdx.x] = best;
        __threadfence();
        is_last = atomicAdd(&arrived[row], 1u) == chunks - 1;
    }
    __syncthreads();
    if (!is_last || tid >= 32) return;
    __threadfence();
    const volatile u64* parts = partial + (i64)row * chunks;
    best = 0;
    for (int i = tid; i < chunks; i += 32) {
        u64 other = parts[i];
        best = other > best ? other : best;
    }
    for (int step = 16; step > 0; step /= 2) {
        u64 other = __shfl_xor_sync(FULL, best, step);
        best = other > best ? other : best;
    }
    if (tid == 0) {
        arrived[row] = 0;
        chosen[row] = (i64)(~(u32)best);
    }
}
