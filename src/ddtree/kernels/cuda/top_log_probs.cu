// The k most likely tokens of each row, its logits multiplied by the sequence's `sharpness` (by 1 if null). Blocks of a row
// take one chunk of the vocabulary each; the last to finish merges.
// Compile with LOGIT_BF16 0 or 1 and PER_THREAD, the logits a thread holds.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef long long i64;

#define NEG_INF (__int_as_float(0xff800000))
#define FULL 0xffffffffu
#define THREADS 256
#define WARPS (THREADS / 32)
#define LIST 1024  // candidates that are sorted at once

#if LOGIT_BF16
typedef u16 logit_t;
__device__ float read_logit(logit_t value) { return __uint_as_float((u32)value << 16); }
#else
typedef float logit_t;
__device__ float read_logit(logit_t value) { return value; }
#endif

// Unsigned bits in the order of the floats; every float is above 0.
__device__ u32 ordered(float value) {
    u32 bits = __float_as_uint(value);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ float unordered(u32 bits) { return __uint_as_float(bits >> 31 ? bits & 0x7fffffffu : ~bits); }

__device__ float block_max(float value, float* scratch) {
    for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(FULL, value, step));
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    value = scratch[0];
    for (int i = 1; i < WARPS; i++) value = fmaxf(value, scratch[i]);
    return value;
}
__device__ float block_sum(float value, float* scratch) {
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(FULL, value, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    value = scratch[0];
    for (int i = 1; i < WARPS; i++) value += scratch[i];
    return value;
}
__device__ int block_count(int value, int* scratch) {
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(FULL, value, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    value = scratch[0];
    for (int i = 1; i < WARPS; i++) value += scratch[i];
    return value;
}

// Sorts list[0 .. size-1], size a power of 2, largest first.
__device__ void sort_down(u64* list, int size) {
    for (int width = 2; width <= size; width *= 2)
        for (int stride = width / 2; stride > 0; stride /= 2) {
            __syncthreads();
            for (int i = threadIdx.x; i < size / 2; i += THREADS) {
                int low = 2 * i - (i & (stride - 1)), high = low + stride;
                u64 a = list[low], b = list[high];
                if ((a < b) == ((low & width) == 0)) {
                    list[low] = b;
                    list[high] = a;
                }
            }
        }
    __syncthreads();
}

// The k largest of the block's keys (n a thread, 0 where there is none), sorted into list, zeros behind them. `bound` is
// a value of upper key halves that at least k keys reach, or 0.
template <int N>
__device__ void select(const u64 (&keys)[N], u32 bound, int k, u64* list, int* scratch) {
    __shared__ int used;
    u64 least = (u64)bound << 32;
    for (int exact = 0;; exact++) {
        __syncthreads();
        if (threadIdx.x == 0) used = 0;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < N; i++)
            if (keys[i] >= least && keys[i] != 0) {
                int at = atomicAdd(&used, 1);
                if (at < LIST) list[at] = keys[i];
            }
        __syncthreads();
        if (used <= LIST || exact) break;
        // Too many equals: the k-th largest whole key, bit by bit. Keys are unique, so exactly k reach it.
        least = 0;
        for (int bit = 63; bit >= 0; bit--) {
            u64 trial = least | 1ull << bit;
            int count = 0;
#pragma unroll
            for (int i = 0; i < N; i++) count += keys[i] >= trial;
            if (block_count(count, scratch) >= k) least = trial;
        }
    }
    if (used <= THREADS) {  // each thread counts what is larger than its own key
        const int n = used;
        const u64 own = threadIdx.x < n ? list[threadIdx.x] : 0;
        int place = 0;
#pragma unroll 8
        for (int i = 0; i < n; i++) place += list[i] > own;
        __syncthreads();
        if (threadIdx.x < n) list[place] = own;
        for (int i = n + threadIdx.x; i < k; i += THREADS) list[i] = 0;
        __syncthreads();
        return;
    }
    int size = 1;
    while (size < used || size < k) size *= 2;
    for (int i = used + threadIdx.x; i < size; i += THREADS) list[i] = 0;
    sort_down(list, size);
}

// About the k-th largest of the threads' `own`: a value that at least k of them reach, or 0. Sixteen bits are enough: what
// lies between is sorted out afterwards.
__device__ u32 kth_largest(u32 own, int k) {
    u32 least = 0;
    for (int bit = 31; bit >= 16; bit--) {
        u32 trial = least | 1u << bit;
        if (__syncthreads_count(own >= trial) >= k) least = trial;
    }
    return least;
}

#define MERGE_PER_THREAD (32 * MAX_K / THREADS)

extern "C" __global__ void __launch_bounds__(THREADS)
    top_log_probs(const logit_t* logits, const float* sharpness, float* log_probs, i64* ids, u64* partial_keys,
                  float2* partial_sums, u32* arrived, int vocab, int k, int row_stride, int depths) {
    __shared__ u64 list[LIST];
    __shared__ float scratch[WARPS];
    __shared__ int is_last;
    const int tid = threadIdx.x, chunk = blockIdx.x, chunks = gridDim.x, row = blockIdx.y;
    const logit_t* own = logits + (i64)row * row_stride;
    const float sharp = sharpness ? sharpness[row / depths] : 1.0f;

    u64 keys[PER_THREAD];
    float values[PER_THREAD], largest = NEG_INF;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        int token = chunk * THREADS * PER_THREAD + i * THREADS + tid;
        bool inside = token < vocab;
        values[i] = inside ? read_logit(own[token]) + 0.0f : NEG_INF;  // adding 0 turns -0 into 0, its equal
        keys[i] = inside ? (u64)ordered(values[i]) << 32 | ~(u32)token : 0;
        largest = fmaxf(largest, values[i]);
    }
    bool any = chunk * THREADS * PER_THREAD + tid < vocab;
    float top = block_max(largest, scratch), sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) sum += values[i] > NEG_INF ? expf((values[i] - top) * sharp) : 0.0f;
    sum = block_sum(sum, scratch);

    // The k-th best of the threads' own best is reached by k logits at least, and by few more.
    u32 bound = kth_largest(any ? ordered(largest) : 0, k);
    select(keys, bound, k, list, (int*)scratch);
    u64* place = partial_keys + ((i64)row * chunks + chunk) * k;
    for (int i = tid; i < k; i += THREADS) place[i] = list[i];
    if (tid == 0) partial_sums[(i64)row * chunks + chunk] = make_float2(top, sum);

    __threadfence();
    __syncthreads();
    if (tid == 0) is_last = atomicAdd(&arrived[row], 1u) == chunks - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    if (tid == 0) arrived[row] = 0;

    const volatile float2* sums = partial_sums + (i64)row * chunks;
    const int lane = tid % 32;  // there are at most 32 chunks; each warp adds them up
    const float chunk_top = lane < chunks ? sums[lane].x : NEG_INF, chunk_sum = lane < chunks ? sums[lane].y : 0.0f;
    top = chunk_top;
    for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(FULL, top, step));
    sum = chunk_top > NEG_INF ? chunk_sum * expf((chunk_top - top) * sharp) : 0.0f;
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(FULL, sum, step);
    const float log_sum = top * sharp + logf(sum);

    if (chunks > 1) {
        u64 merged[MERGE_PER_THREAD];
        const volatile u64* all = partial_keys + (i64)row * chunks * k;
        u32 best = 0, floor_of_chunks = 0;
#pragma unroll
        for (int i = 0; i < MERGE_PER_THREAD; i++) {
            int at = i * THREADS + tid;
            merged[i] = at < chunks * k ? all[at] : 0;
            u32 upper = (u32)(merged[i] >> 32);
            best = upper > best ? upper : best;
        }
        if (lane < chunks) floor_of_chunks = (u32)(all[lane * k + k - 1] >> 32);
        for (int step = 16; step > 0; step /= 2) {
            u32 other = __shfl_xor_sync(FULL, floor_of_chunks, step);
            floor_of_chunks = other > floor_of_chunks ? other : floor_of_chunks;
        }
        bound = kth_largest(best, k);
        bound = bound > floor_of_chunks ? bound : floor_of_chunks;
        select(merged, bound, k, list, (int*)scratch);
    }
    for (int i = tid; i < k; i += THREADS) {
        u64 key = list[i];
        log_probs[(i64)row * k + i] = fminf(unordered((u32)(key >> 32)) * sharp - log_sum, 0.0f);
        ids[(i64)row * k + i] = (i64)~(u32)key & 0xffffffffll;
    }
}
