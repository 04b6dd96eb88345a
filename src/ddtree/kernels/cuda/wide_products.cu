// Products of a few rows with a large weight, which is read once, at the speed of memory.
//
// Fixed at compile time: ROWS (rows of x, in eights; EIGHTS = ROWS / 8), TILES (tiles of 64 weight rows that a block
// takes, one for each of its warpgroups), BOXES (boxes of 64 numbers of the inner axis a step), STAGES (steps on their
// way at a time), GATED (half of a block's weight rows are gates, half their ups) and CLUSTER (blocks with the same
// columns that are joined: together they have all stretches of the inner axis; 1 where blocks have nothing in common).
//
// One more warp has the copy engine fill the stages; weights, which no kernel writes, already while the kernel before
// this one still runs. Weights are the first operand of the tensor cores, which takes 64 rows, x the second, which
// takes as many as there are. A block multiplies a stretch of the inner axis; where there are several, their sums are
// added in ascending order: at the end of this kernel where they are joined, else by the kernel behind it, to which
// `sums` [stretch][row][column] go.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned u32;
typedef long long i64;
typedef unsigned long long u64;

#include "hopper.cuh"
#include "copy_engine.cuh"
#include "warpgroups.cuh"
#include "warpgroup_products.cuh"

constexpr int COLUMNS = 64 * TILES, WIDTH = GATED ? COLUMNS / 2 : COLUMNS;  // weight rows, and columns of the result
constexpr int WEIGHT_BOX = COLUMNS * 128, X_BOX = ROWS * 128;                // 128 bytes are 64 numbers of a row
constexpr int STAGE = BOXES * (WEIGHT_BOX + X_BOX);
constexpr int LINE = COLUMNS + 4;  // floats from row to row of the finished sums: all banks take part in a store
constexpr int SUMS_BYTES = ROWS * LINE * 4, STAGES_BYTES = STAGES * STAGE;
constexpr int BARRIERS_AT = SUMS_BYTES > STAGES_BYTES ? SUMS_BYTES : STAGES_BYTES;  // sums take the stages' place
constexpr int WORKERS = TILES * 128, THREADS = WORKERS + 32;
constexpr bool JOINED = CLUSTER > 1;

__device__ __forceinline__ float low(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high(u32 both) { return __uint_as_float(both & 0xffff0000u); }
__device__ __forceinline__ u32 open_gate(u32 gate, u32 up) {  // silu(gate) * up, rounded as the twin rounds
    const u32 open = pack_bf16(low(gate) / (1.0f + expf(-low(gate))), high(gate) / (1.0f + expf(-high(gate))));
    return pack_bf16(low(open) * low(up), high(open) * high(up));
}

struct Stage { int at, parity; };
__device__ __forceinline__ void advance(Stage& stage) {
    if (++stage.at == STAGES) {
        stage.at = 0;
        stage.parity ^= 1;
    }
}

// The one thread that copies: `steps` steps from `first` on.
__device__ __forceinline__ void fill_stages(u8* stages, u64* full, u64* empty, const TensorMap& weight,
                                            const TensorMap& x, int column, int first, int steps, int middle) {
    const u64 once = read_once(), often = read_often();
    auto copy_weights = [&](int step, int at) {
        u8* to = stages + at * STAGE;
        expect_bytes(full + at, STAGE);
        for (int box = 0; box < BOXES; box++, to += WEIGHT_BOX) {
            const int k = ((first + step) * BOXES + box) * 64;
            copy_box(to, weight, k, column, full + at, once);
            if (GATED) copy_box(to + WEIGHT_BOX / 2, weight, k, middle + column, full + at, once);
        }
    };
    auto copy_x = [&](int step, int at) {
        u8* to = stages + at * STAGE + BOXES * WEIGHT_BOX;
        for (int box = 0; box < BOXES; box++, to += X_BOX) {
            const int k = ((first + step) * BOXES + box) * 64;
            copy_box(to, x, k, 0, full + at, often);
        }
    };
    const int ahead = steps < STAGES ? steps : STAGES;
    for (int step = 0; step < ahead; step++) copy_weights(step, step);
    wait_for_inputs();
    for (int step = 0; step < ahead; step++) copy_x(step, step);
    Stage stage = {0, 0};
    for (int step = ahead; step < steps; step++) {
        await_phase(empty + stage.at, stage.parity);
        copy_weights(step, stage.at);
        copy_x(step, stage.at);
        advance(stage);
    }
}

// Of one warpgroup: its 64 columns of all steps, added to acc.
__device__ __forceinline__ void multiply_stages(float (&acc)[ROWS / 8][4], const u8* stages, u64* full, u64* empty,
                                                int steps) {
    const int group = threadIdx.x / 128;
    Stage stage = {0, 0};
    for (int step = 0; step < steps; step++) {
        const u8* weights = stages + stage.at * STAGE + group * 8192;
        const u8* rows = stages + stage.at * STAGE + BOXES * WEIGHT_BOX;
        await_phase(full + stage.at, stage.parity);
        hold(acc);
        begin_products();
#pragma unroll
        for (int k = 0; k < 4 * BOXES; k++)
            multiply_16(acc, describe(weights + k / 4 * WEIGHT_BOX + k % 4 * 32),
                        describe(rows + k / 4 * X_BOX + k % 4 * 32));
        close_products();
        await_products<0>();
        hold(acc);
        if (threadIdx.x % 32 == 0) arrive(empty + stage.at);
        advance(stage);
    }
}

// Sums from the registers of the tensor cores into lines of columns.
__device__ __forceinline__ void lay_out(float* lines, const float (&acc)[ROWS / 8][4]) {
    const int column = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, row = threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) lines[(8 * j + row + i % 2) * LINE + column + i / 2 * 8] = acc[j][i];
}

// Eight columns of a row, summed over the joined blocks' stretches, with their bias.
__device__ __forceinline__ void take(float (&sum)[8], const float* from, const u16* bias) {
#pragma unroll
    for (int rank = 0; rank < CLUSTER; rank++)
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            const float4* own = (const float4*)(from + i);
            const float4 part = JOINED ? pull(own, rank) : *own;
            sum[i] = rank ? sum[i] + part.x : part.x;
            sum[i + 1] = rank ? sum[i + 1] + part.y : part.y;
            sum[i + 2] = rank ? sum[i + 2] + part.z : part.z;
            sum[i + 3] = rank ? sum[i + 3] + part.w : part.w;
        }
    if (bias)
        for (int i = 0; i < 8; i++) sum[i] += low(bias[i]);
}
__device__ __forceinline__ uint4 pack(const float (&v)[8]) {
    return {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7])};
}

// Bias, gate and residual stream; `tap` keeps the new stream as well. Pointers that are null say what there is not.
// Blocks that have been joined take turns.
__device__ __forceinline__ void finish(const float* lines, const u16* bias, u16* out, u16* tap, int first_column,
                                       int rows, int columns, int adds, int tap_stride) {
    const int width = GATED ? columns / 2 : columns, turn = JOINED ? blockIdx.x : 0;
    for (int i = threadIdx.x + turn * THREADS; i < rows * (WIDTH / 8); i += THREADS * CLUSTER) {
        const int row = i / (WIDTH / 8), at = i % (WIDTH / 8) * 8, column = first_column + at;
        u16* to = out + (i64)row * width + column;
        float sum[8];
        take(sum, lines + row * LINE + at, bias ? bias + column : nullptr);
        if (adds) {
            const uint4 before = load_late(to);
            const u32 pairs[4] = {before.x, before.y, before.z, before.w};
            for (int j = 0; j < 4; j++) {
                sum[2 * j] += low(pairs[j]);
                sum[2 * j + 1] += high(pairs[j]);
            }
        }
        uint4 result = pack(sum);
        if (GATED) {
            float ups[8];
            take(ups, lines + row * LINE + WIDTH + at, bias ? bias + width + column : nullptr);
            const uint4 up = pack(ups);
            result = {open_gate(result.x, up.x), open_gate(result.y, up.y), open_gate(result.z, up.z),
                      open_gate(result.w, up.w)};
        }
        *(uint4*)to = result;
        if (tap) *(uint4*)(tap + (i64)row * tap_stride + column) = result;
    }
}

__device__ __forceinline__ void keep_sums(float* to, const float* lines, int rows, int columns) {
    for (int i = threadIdx.x; i < rows * (COLUMNS / 4); i += THREADS) {
        const int row = i / (COLUMNS / 4), at = i % (COLUMNS / 4) * 4;
        *(float4*)(to + (i64)row * columns + at) = *(const float4*)(lines + row * LINE + at);
    }
}

__device__ __forceinline__ void meet_cluster() {
    cluster_arrive();
    cluster_wait();
}

// `weight` is cut into boxes of WIDTH rows, `x` of ROWS. A step is 64 * BOXES numbers, a stretch `stretch` steps, the
// last what is left. Grid (columns / COLUMNS, stretches), the other way round if JOINED.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS)
wide_product(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, const u16* bias, u16* out,
             float* sums, u16* tap, int rows, int columns, int steps, int stretch, int adds, int tap_stride,
             int calls_late) {
    extern __shared__ __align__(1024) u8 memory[];
    u8* stages = align_1024(memory);
    u64 *full = (u64*)(stages + BARRIERS_AT), *empty = full + STAGES;
    const int column = (JOINED ? blockIdx.y : blockIdx.x) * WIDTH, first = (JOINED ? blockIdx.x : blockIdx.y) * stretch;
    const int own = steps - first < stretch ? steps - first : stretch;
    if (threadIdx.x == WORKERS) {
        fetch_map(weight);
        fetch_map(x);
        for (int i = 0; i < STAGES; i++) {
            make_barrier(full + i, 1);
            make_barrier(empty + i, TILES * 4);  // warps that multiply
        }
        publish_barriers();
    }
    if (!calls_late) let_next_start();
    __syncthreads();
    if (threadIdx.x >= WORKERS) {
        if (threadIdx.x == WORKERS) fill_stages(stages, full, empty, weight, x, column, first, own, columns / 2);
        __syncwarp();
    } else {
        float acc[ROWS / 8][4] = {};
        multiply_stages(acc, stages, full, empty, own);
        meet_group(0, WORKERS);  // all have read what the sums overwrite
        lay_out((float*)stages, acc);
    }
    if (calls_late) let_next_start();
    if (JOINED) meet_cluster();
    else __syncthreads();
    wait_for_inputs();  // long over; every thread is to see it
    if (sums) keep_sums(sums + (i64)blockIdx.y * rows * columns + column, (const float*)stages, rows, columns);
    else finish((const float*)stages, bias, out, tap, column, rows, columns, adds, tap_stride);
    if (JOINED) meet_cluster();  // none ends while others may read its sums
}
