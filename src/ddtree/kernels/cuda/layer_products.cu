// The matrix products of a decoder layer for few rows, each with what stands before and after it, in one launch.
//
// Fixed at compile time: KERNEL, the one that is wanted (0 add_linear, 1 feed_forward_input, 2 attend_input); K
// (numbers a row), TILES (tiles of 8 weight rows that a block takes), ROW_TILES (tiles of 8 input rows that it takes),
// WARPS, and HEAD_DIM for attend_input.
//
// The warps of a block split K. Each copies its stretch of the weights into shared memory before the kernel waits for
// the one before it (programmatic dependent launch), so that a chain of these kernels hardly waits for weights. Input
// rows go from L2 into registers and are multiplied by mma.m16n8k16; the warps' sums meet in shared memory. In which
// order a row's numbers are added depends on K and WARPS alone: a row's result is the same with any other rows.

typedef unsigned short u16;
typedef unsigned u32;
typedef long long i64;

#define THREADS (WARPS * 32)
#ifndef HEAD_DIM
#define HEAD_DIM COLUMNS
#endif
constexpr int PIECES = K / 32;                        // a piece is 32 numbers of a row, 8 for each lane of a quad
constexpr int EACH = (PIECES + WARPS - 1) / WARPS;    // pieces of a warp
constexpr int COLUMNS = 8 * TILES, ROWS = 8 * ROW_TILES;
constexpr int SUMS = TILES * ROWS * 8;                // sums of one warp, as [tile][row][column % 8]
constexpr int SQUARES_AT = WARPS * SUMS;              // in shared memory, in floats: sums of squares [warp][row],
constexpr int NORM_AT = SQUARES_AT + WARPS * ROWS;    // weights of the norm, and
constexpr int WEIGHTS_AT = NORM_AT + K / 2;           // those of the product, [warp][piece][tile][lane] by 16 bytes

#ifndef CUDA_ON_CPU  // what only the GPU has; tests bring their own for the CPU
// c += a b for a 16 x 16, b 16 x 8 in bf16.
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
// Copies 16 bytes into shared memory behind the program's back, zeros where there is nothing to read. (Loads into
// registers are moved behind the wait by the compiler.)
__device__ __forceinline__ void copy_16(void* to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from),
                 "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
// Products of two pairs, each rounded once.
__device__ __forceinline__ u32 multiply_pairs(u32 a, u32 b) {
    u32 both;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(both) : "r"(a), "r"(b), "r"(0x80008000u));  // less than nothing added
    return both;
}
// What earlier kernels wrote is read past L1, which may hold what stood there before this kernel's wait.
__device__ __forceinline__ uint4 load_fresh(const uint4* from) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ u32 load_fresh(const u32* from) {
    u32 v;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#endif

__device__ __forceinline__ float low(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high(u32 both) { return __uint_as_float(both & 0xffff0000u); }

// Two numbers after a norm, rounded before they are scaled, as the twin rounds.
__device__ __forceinline__ u32 scaled(u32 both, float factor, u32 weight) {
    return multiply_pairs(pack_bf16(low(both) * factor, high(both) * factor), weight);
}
__device__ __forceinline__ float square_sum(u32 both) { return low(both) * low(both) + high(both) * high(both); }

// Leaves in `sums` each warp's part of x times weight, and meets. `x` starts at the block's first row, `rows` of which
// exist; `norm` scales normed inputs. `weight_row(column)` says which row of `weight` makes a column of the block;
// `meanwhile()` runs while the inputs are on their way.
template <bool NORMED, class WeightRow, class Meanwhile>
__device__ __forceinline__ void multiply_rows(float* sums, const uint4* x, int rows, const uint4* norm, float eps,
                                         const uint4* weight, WeightRow weight_row, Meanwhile meanwhile) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    constexpr int LOADS = K / 8;  // 16 bytes each
    const uint4 zero = {0, 0, 0, 0};
    uint4* norm_kept = (uint4*)(sums + NORM_AT) + (warp * EACH * 4 + t);
    uint4* kept = (uint4*)(sums + WEIGHTS_AT) + warp * EACH * TILES * 32 + threadIdx.x % 32;  // a lane reads its own
    uint4 in[EACH][ROW_TILES];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int piece = warp * EACH + i;
        const bool inside = PIECES % WARPS == 0 || piece < PIECES;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            copy_16(kept + (i * TILES + tile) * 32,
                    weight + (i64)weight_row(8 * tile + g) * LOADS + (inside ? piece * 4 + t : 0), inside);
        if (NORMED && g == 0 && inside) copy_16(norm_kept + i * 4, norm + piece * 4 + t, true);
    }
    close_copies();
    wait_for_inputs();
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int piece = warp * EACH + i, row = 8 * r + g;  // a row that is not there is one that is, unused
            in[i][r] = zero;
            if (PIECES % WARPS == 0 || piece < PIECES)
                in[i][r] = load_fresh(x + (row < rows ? row : rows - 1) * LOADS + piece * 4 + t);
        }
    meanwhile();
    await_copies<0>();

    if (NORMED) {
        float* squares = sums + SQUARES_AT;
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
            float sum = 0;
#pragma unroll
            for (int i = 0; i < EACH; i++)
                sum += square_sum(in[i][r].x) + square_sum(in[i][r].y) + square_sum(in[i][r].z) +
                       square_sum(in[i][r].w);
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (t == 0) squares[warp * ROWS + 8 * r + g] = sum;
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
            float sum = 0;
#pragma unroll
            for (int other = 0; other < WARPS; other += 4)
                if (other + 3 < WARPS || other + t < WARPS) sum += squares[(other + t) * ROWS + 8 * r + g];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const float factor = rsqrtf(sum / K + eps);
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                if (PIECES % WARPS && warp * EACH + i >= PIECES) continue;
                const uint4 by = norm_kept[i * 4];
                in[i][r].x = scaled(in[i][r].x, factor, by.x);
                in[i][r].y = scaled(in[i][r].y, factor, by.y);
                in[i][r].z = scaled(in[i][r].z, factor, by.z);
                in[i][r].w = scaled(in[i][r].w, factor, by.w);
            }
        }
    }

    // A lane's 8 numbers stand where the instruction wants two pairs of one k16 step and two of the next: the same
    // reordering of K on both sides, which a sum does not see.
#pragma unroll
    for (int m = 0; m < ROW_TILES; m += 2)
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            float sum[4] = {0, 0, 0, 0};
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const uint4 above = in[i][m], below = m + 1 < ROW_TILES ? in[i][m + 1 < ROW_TILES ? m + 1 : m] : zero;
                const uint4 w = kept[(i * TILES + tile) * 32];
                const u32 first[4] = {above.x, below.x, above.y, below.y};
                const u32 second[4] = {above.z, below.z, above.w, below.w};
                multiply(sum, first, w.x, w.y);
                multiply(sum, second, w.z, w.w);
            }
            float* to = sums + warp * SUMS + (tile * ROWS + 8 * m + g) * 8 + 2 * t;
            *(float2*)to = make_float2(sum[0], sum[1]);
            if (m + 1 < ROW_TILES) *(float2*)(to + 64) = make_float2(sum[2], sum[3]);
        }
    __syncthreads();
}

// The product at `row` and the two columns from `column` on, rounded.
__device__ __forceinline__ u32 product(const float* sums, int row, int column, const u16* bias, int bias_at) {
    const float* from = sums + (column / 8 * ROWS + row) * 8 + column % 8;
    float first = 0, second = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) {
        const float2 part = *(const float2*)(from + warp * SUMS);
        first += part.x;
        second += part.y;
    }
    if (bias) {
        first += low(bias[bias_at]);
        second += low(bias[bias_at + 1]);
    }
    return pack_bf16(first, second);
}

// stream += x weight^T + bias, kept in `tap` too where there is one. Grid (columns / COLUMNS, rows / ROWS).
extern "C" __global__ void __launch_bounds__(THREADS)
add_linear(const uint4* x, const uint4* weight, const u16* bias, u16* stream, u16* tap, int rows, int columns,
           int tap_stride) {
    if (KERNEL != 0) return;  // compiles to nothing
    extern __shared__ __align__(16) float sums[];
    const int first_row = blockIdx.y * ROWS, first_column = blockIdx.x * COLUMNS;
    const int row = threadIdx.x / (COLUMNS / 2), column = threadIdx.x % (COLUMNS / 2) * 2;
    const bool mine = row < ROWS && first_row + row < rows;
    u32* place = (u32*)(stream + (i64)(first_row + row) * columns + first_column + column);
    u32 before = 0;
    let_next_start();
    multiply_rows<false>(
        sums, x + (i64)first_row * (K / 8), rows - first_row, nullptr, 0.0f, weight,
        [&](int c) { return first_column + c; }, [&] { if (mine) before = load_fresh(place); });
    if (!mine) return;
    const u32 delta = product(sums, row, column, bias, first_column + column);
    const u32 after = pack_bf16(low(before) + low(delta), high(before) + high(delta));
    *place = after;
    if (tap) *(u32*)(tap + (i64)(first_row + row) * tap_stride + first_column + column) = after;
}

// silu(gate) * up of the normed stream. Weight: `middle` rows of gate, then of up. Grid (middle / (COLUMNS / 2),
// rows / ROWS): a block's first half of columns is gates, its second their ups.
extern "C" __global__ void __launch_bounds__(THREADS)
feed_forward_input(const uint4* stream, const uint4* norm, const uint4* weight, const u16* bias, u16* gated, int rows,
                   int middle, float eps) {
    if (KERNEL != 1) return;  // compiles to nothing
    extern __shared__ __align__(16) float sums[];
    constexpr int HALF = COLUMNS / 2;
    const int first_row = blockIdx.y * ROWS, first_column = blockIdx.x * HALF;
    const int row = threadIdx.x / (HALF / 2), column = threadIdx.x % (HALF / 2) * 2;
    let_next_start();
    multiply_rows<true>(
        sums, stream + (i64)first_row * (K / 8), rows - first_row, norm, eps, weight,
        [&](int c) { return first_column + (c < HALF ? c : middle + c - HALF); }, [] {});
    if (row >= ROWS || first_row + row >= rows) return;
    const u32 gate = product(sums, row, column, bias, first_column + column);
    const u32 up = product(sums, row, HALF + column, bias, middle + first_column + column);
    const u32 open = pack_bf16(low(gate) / (1.0f + expf(-low(gate))), high(gate) / (1.0f + expf(-high(gate))));
    *(u32*)(gated + (i64)(first_row + row) * middle + first_column + column) =
        pack_bf16(low(open) * low(up), high(open) * high(up));
}

// Queries, keys and values of the normed stream; heads normed where there are weights for that (a block then has all
// of a head), queries and keys rotated, keys and values written to their slots. Grid (heads * HEAD_DIM / COLUMNS,
// rows / ROWS): a block's first half of columns is a stretch of a head's first half, its second what that turns with.
extern "C" __global__ void __launch_bounds__(THREADS)
attend_input(const uint4* stream, const uint4* norm, const uint4* weight, const u16* bias, const u16* q_norm,
             const u16* k_norm, const u32* cos, const u32* sin, u16* cache, const u32* slots, u16* query, int rows,
             int heads, int kv_heads, int all_slots, float eps) {
    if (KERNEL != 2) return;  // compiles to nothing
    extern __shared__ __align__(16) float sums[];
    constexpr int HALF = COLUMNS / 2, CHUNKS = HEAD_DIM / COLUMNS;
    const int first_row = blockIdx.y * ROWS, head = blockIdx.x / CHUNKS, first_d = blockIdx.x % CHUNKS * HALF;
    const int row = threadIdx.x / (HALF / 2), column = threadIdx.x % (HALF / 2) * 2;
    const int d = first_d + column, full_row = first_row + row;
    const bool mine = row < ROWS && full_row < rows, turns = head < heads + kv_heads;
    const u16* own_norm = head < heads ? q_norm : turns ? k_norm : nullptr;
    u32 own_scale[2];
    float c[2] = {1, 1}, s[2] = {0, 0};
    i64 slot = 0;
    let_next_start();
    multiply_rows<true>(
        sums, stream + (i64)first_row * (K / 8), rows - first_row, norm, eps, weight,
        [&](int n) { return head * HEAD_DIM + first_d + (n < HALF ? n : HEAD_DIM / 2 + n - HALF); },
        [&] {
            if (own_norm)
                for (int i = 0; i < 2; i++) own_scale[i] = load_fresh((const u32*)(own_norm + d + i * HEAD_DIM / 2));
            if (!mine) return;
            if (turns)
                for (int i = 0; i < 2; i++) {
                    c[i] = __uint_as_float(load_fresh(cos + (i64)full_row * (HEAD_DIM / 2) + d + i));
                    s[i] = __uint_as_float(load_fresh(sin + (i64)full_row * (HEAD_DIM / 2) + d + i));
                }
            slot = load_fresh(slots + 2 * full_row) | (i64)load_fresh(slots + 2 * full_row + 1) << 32;
        });
    const int at = head * HEAD_DIM + d, inside = row < ROWS ? row : 0;
    u32 first = product(sums, inside, column, bias, at);
    u32 second = product(sums, inside, HALF + column, bias, at + HEAD_DIM / 2);
    if (own_norm) {
        float sum = square_sum(first) + square_sum(second);
#pragma unroll
        for (int by = 1; by < HALF / 2; by *= 2) sum += __shfl_xor_sync(~0u, sum, by);
        const float factor = rsqrtf(sum / HEAD_DIM + eps);
        first = scaled(first, factor, own_scale[0]);
        second = scaled(second, factor, own_scale[1]);
    }
    if (!mine) return;
    if (turns) {
        const u32 plain = first;
        first = pack_bf16(low(first) * c[0] - low(second) * s[0], high(first) * c[1] - high(second) * s[1]);
        second = pack_bf16(low(second) * c[0] + low(plain) * s[0], high(second) * c[1] + high(plain) * s[1]);
    }
    u16* to = head < heads ? query + ((i64)full_row * heads + head) * HEAD_DIM
                           : cache + ((slot + (turns ? 0 : all_slots)) * kv_heads + (head - heads) % kv_heads) * HEAD_DIM;
    *(u32*)(to + d) = first;
    *(u32*)(to + d + HEAD_DIM / 2) = second;
}
