// Attention of packed query rows over paged keys, split over the key groups of a cluster of blocks.
//
// A cluster owns one tile of packed rows (row * GROUPS + query head) of one key head of one sequence. Its CLUSTER
// blocks hold WARPS_K key groups each, every one an online softmax over its own stretch of the keys, WARPS_M warps side
// by side over the tile's rows. When a group is done it pushes its part into the other blocks' shared memory, each
// block taking HEAD_DIM / CLUSTER columns; after one cluster barrier every block puts its columns together and writes
// them.
//
// Compile with HEAD_DIM (64 or 128), GROUPS, CLUSTER (at most HEAD_DIM / 8), WARPS_K, WARPS_M, ROWS_16 (16-row tiles a
// warp holds), KEYS (keys a step, a multiple of 16), STAGES (2 or more), PART_ROWS (of a tile, at most so many exist),
// PARTS (threads that share one output pair), WIDE (1: wgmma; wants HEAD_DIM 128, WARPS_M a multiple of 4, ROWS_16 1
// and KEYS 64), EARLY (1: what is committed, and where, is older than the kernel before, so that it may be read while
// that still runs).

typedef unsigned int u32;
typedef unsigned char u8;
typedef unsigned short bf16;
typedef unsigned long long u64;
typedef long long i64;

#define NEG_INF (__int_as_float(0xff800000))
#define FULL 0xffffffffu
#define WARP_ROWS (16 * ROWS_16)
#define TILE_ROWS (WARP_ROWS * WARPS_M)
#define GROUP_THREADS (32 * WARPS_M)
#define THREADS (GROUP_THREADS * WARPS_K)
#define KEY_GROUPS (CLUSTER * WARPS_K)
#if WIDE && (HEAD_DIM != 128 || KEYS != 64 || ROWS_16 != 1 || WARPS_M % 4)
#error "wgmma does not serve this tiling"
#endif
#define PIECES (HEAD_DIM / 8)  // 16-byte pieces of a key; also 8-column tiles of the output
#define COLUMNS (HEAD_DIM / CLUSTER)
#define STEP_BYTES (KEYS * HEAD_DIM * 2)  // keys, or values, of one step
#define PART_STRIDE (PART_ROWS * COLUMNS + 8)  // floats; the pad spreads the groups over the banks
#define LEEWAY 8.0f  // a power of 2
#define WEIGHT_STRIDE (PART_ROWS + 1)

#include "hopper.cuh"
#include "attention_products.cuh"

__device__ __forceinline__ void group_sync(int group) {
    if (WARPS_M == 1)
        __syncwarp();
    else
        meet_group(group, GROUP_THREADS);
}

// Starts copying KEYS rows of a cache, of which `left` exist; `base` holds the slot of the lane's 16 keys, `cache`
// points at the thread's piece of slot 0.
__device__ __forceinline__ void copy_step(u8* to, const u8* cache, int base, int left, u32 slot_bytes, int thread) {
    const int keys_a_turn = GROUP_THREADS / PIECES, turns = (KEYS + keys_a_turn - 1) / keys_a_turn;
    const int own_key = thread / PIECES, piece = thread % PIECES;
    if (left >= KEYS) {
#pragma unroll
        for (int i = 0; i < turns; i++) {
            int key = i * keys_a_turn + own_key;
            u32 slot = __shfl_sync(FULL, base, key / 16) + key % 16;
            if (KEYS % keys_a_turn == 0 || key < KEYS)
                copy_16(to + place_of(key, piece), cache + (u64)slot * slot_bytes, true);
        }
    } else {  // the last step
#pragma unroll 1
        for (int i = 0; i < turns; i++) {
            int key = i * keys_a_turn + own_key;
            u32 slot = __shfl_sync(FULL, base, key / 16) + key % 16;
            const bool there = key < left;
            if (key < KEYS) copy_16(to + place_of(key, piece), cache + (there ? (u64)slot * slot_bytes : 0), there);
        }
    }
}

__device__ __forceinline__ u32 first_bits(int n) { return n <= 0 ? 0 : n >= 32 ? FULL : (1u << n) - 1; }

// Which of 16 keys from `at` on (counted from the sequence's first row) a row sees.
__device__ __forceinline__ u32 seen_keys(const u32* seen, const i64* depths, i64 row, i64 first_row, int rows,
                                         int depth, int at, int context_window, int sliding_window) {
    u32 bits = 0;
    if (at > -16) {
        if (rows == 1) {
            bits = at <= 0 && ((const u8*)seen)[row] ? 1u << -at : 0;  // not packed
        } else {
            const int words = (rows + 31) / 32, word = at >> 5;
            const u32* own = seen + row * words;
            u32 low = word >= 0 && word < words ? own[word] : 0;
            u32 high = word + 1 >= 0 && word + 1 < words ? own[word + 1] : 0;
            bits = __funnelshift_r(low, high, at & 31);
        }
        if (depth >= sliding_window)  // rows are at least at depth 0, so other rows are never too far away
#pragma unroll 1
            for (int i = 0; i < 16; i++)
                if (bits >> i & 1 && at + i >= 0 &&
                    depth - (int)depths[first_row + min(at + i, rows - 1)] >= sliding_window)
                    bits &= ~(1u << i);
    }
    const int oldest = max(-context_window, depth - sliding_window + 1);
    return bits | (first_bits(-at) & ~first_bits(oldest - at));
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS)
    tree_attention(const bf16* query, const bf16* keys, const bf16* values, u32* out, const i64* block_table,
                   const int* committed, const i64* depths, const u32* seen, int rows, int kv_heads, int pages,
                   int page_shift, float scale_log2, int context_window, int sliding_window) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const int rank = blockIdx.x % CLUSTER, tile = blockIdx.x / CLUSTER, head = blockIdx.y, sequence = blockIdx.z;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_m = warp % WARPS_M, warp_k = warp / WARPS_M;
    const int group = rank * WARPS_K + warp_k;
    if (CLUSTER > 1) cluster_arrive();  // awaited before anything is pushed: the others must have started
    if (!EARLY) wait_for_inputs();

    const int n_context = committed[2 * sequence];  // the low half of an int64
    const int end = n_context + rows;
    const int first = max(0, max(n_context - context_window, n_context - sliding_window + 1)) & ~15;
    const int steps = (end - first + KEYS - 1) / KEYS, each = (steps + KEY_GROUPS - 1) / KEY_GROUPS;
    const int step_0 = min(group * each, steps), n_steps = min(each, steps - step_0);
    const int thread = threadIdx.x % GROUP_THREADS;
    const u32 slot_bytes = kv_heads * HEAD_DIM * 2;
    const i64* table = block_table + (i64)sequence * pages;
    const u8* own_keys = (const u8*)(keys + head * HEAD_DIM + thread % PIECES * 8);
    const u8* own_values = (const u8*)(values + head * HEAD_DIM + thread % PIECES * 8);
    u8* stages = shared + warp_k * (STAGES * 2 * STEP_BYTES);

    // The lane's 16 keys of a step begin at this slot (16 keys share a page).
    auto base_of = [&](int step) {
        int position = first + (step_0 + step) * KEYS + lane % (KEYS / 16) * 16;
        if (step >= n_steps || position >= end) return 0;
        return ((int)table[position >> page_shift] << page_shift) + (position & ((1 << page_shift) - 1));
    };
    auto start_step = [&](int step, int base) {
        if (step < n_steps) {
            u8* to = stages + step % STAGES * (2 * STEP_BYTES);
            int left = end - first - (step_0 + step) * KEYS;
            copy_step(to, own_keys, base, left, slot_bytes, thread);
            close_copies();
            copy_step(to + STEP_BYTES, own_values, base, left, slot_bytes, thread);
            close_copies();
        } else {
            close_copies();
            close_copies();
        }
    };
    int bases[STAGES];
#pragma unroll
    for (int i = 0; i < STAGES; i++) bases[i] = base_of(i);
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        // Committed keys are older than the kernel before this one; the rows' own keys and the queries are its work.
        if (EARLY && first + (step_0 + i + 1) * KEYS > n_context) wait_for_inputs();
        start_step(i, bases[i]);
    }
    if (EARLY) wait_for_inputs();
    let_next_start();
    int next_base = bases[STAGES - 1];

    // The lane's rows of the tile: place, depth, and the query as left operands.
    const int g = lane / 4, t = lane % 4;
    const i64 first_row = (i64)sequence * rows;
    int depth[ROWS_16][2], row[ROWS_16][2];
    u32 q[ROWS_16][HEAD_DIM / 16][4];
#pragma unroll
    for (int i = 0; i < ROWS_16; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int packed = tile * TILE_ROWS + warp_m * WARP_ROWS + i * 16 + half * 8 + g;
            row[i][half] = min(packed / GROUPS, rows - 1);
            depth[i][half] = (int)depths[first_row + row[i][half]];
            const i64 place = ((first_row + row[i][half]) * kv_heads + head) * GROUPS + packed % GROUPS;
            const bf16* from = query + place * HEAD_DIM;
#pragma unroll
            for (int k = 0; k < HEAD_DIM / 16; k++) {
                q[i][k][half] = *(const u32*)(from + k * 16 + t * 2);
                q[i][k][half + 2] = *(const u32*)(from + k * 16 + t * 2 + 8);
            }
        }

    float largest[ROWS_16][2], weight[ROWS_16][2], acc[ROWS_16][PIECES][4];
#pragma unroll
    for (int i = 0; i < ROWS_16; i++) {
        largest[i][0] = largest[i][1] = NEG_INF;
        weight[i][0] = weight[i][1] = 0.0f;
#pragma unroll
        for (int n = 0; n < PIECES; n++) acc[i][n][0] = acc[i][n][1] = acc[i][n][2] = acc[i][n][3] = 0.0f;
    }

    for (int step = 0; step < n_steps; step++) {
        const u8* k_step = stages + step % STAGES * (2 * STEP_BYTES);
        const u8* v_step = k_step + STEP_BYTES;
        const int at = first + (step_0 + step) * KEYS - n_context;  // counted from the first row
        // Where every key is committed and inside all windows, nothing is masked.
        const bool masked = at + KEYS > 0 || at < -context_window || at < rows - sliding_window;
        u32 visible[ROWS_16][2][KEYS / 16];
        if (masked)
#pragma unroll
            for (int i = 0; i < ROWS_16; i++)
#pragma unroll
                for (int half = 0; half < 2; half++)
#pragma unroll
                    for (int j = 0; j < KEYS / 16; j++)
                        visible[i][half][j] = seen_keys(seen, depths, first_row + row[i][half], first_row, rows,
                                                        depth[i][half], at + j * 16, context_window, sliding_window);
        const int new_base = base_of(step + STAGES);
        if (WARPS_M == 1)
            await_copies<2 * STAGES - 3>();  // the keys only
        else
            await_copies<2 * STAGES - 4>();
        if (WIDE) publish_copies();
        group_sync(warp_k);  // everyone's copies are there, and everyone is done with the step before
        start_step(step + STAGES - 1, next_base);
        next_base = new_base;

        float s[ROWS_16][KEYS / 8][4];
#pragma unroll
        for (int i = 0; i < ROWS_16; i++)
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) s[i][n][0] = s[i][n][1] = s[i][n][2] = s[i][n][3] = 0.0f;
        multiply_keys(s, q, k_step);

        // The softmax's base is some earlier maximum that no score exceeds by more than LEEWAY: so it seldom moves.
        float shrink[ROWS_16][2];
        bool moved = false;
#pragma unroll
        for (int i = 0; i < ROWS_16; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float top = NEG_INF;
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float& score = s[i][n][half * 2 + e];
                        if (masked && !(visible[i][half][n / 2] >> (n % 2 * 8 + t * 2 + e) & 1)) score = NEG_INF;
                        top = fmaxf(top, score);
                    }
                top = fmaxf(top, __shfl_xor_sync(FULL, top, 1));
                top = fmaxf(top, __shfl_xor_sync(FULL, top, 2)) * scale_log2;
                const bool moves = top > largest[i][half] + LEEWAY;
                shrink[i][half] = moves ? power_of_2(largest[i][half] - top) : 1.0f;
                if (moves) largest[i][half] = top;
                moved |= moves;
                const float base = largest[i][half] == NEG_INF ? 0.0f : largest[i][half];  // nothing seen yet: no NaN
                float sum = 0.0f;
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float& score = s[i][n][half * 2 + e];
                        score = power_of_2(score * scale_log2 - base);
                        sum += score;
                    }
                weight[i][half] = weight[i][half] * shrink[i][half] + sum;  // the lane's share; summed at the end
            }
        if (step > 0 && __any_sync(FULL, moved))
#pragma unroll
            for (int i = 0; i < ROWS_16; i++)
#pragma unroll
                for (int n = 0; n < PIECES; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) acc[i][n][e] *= shrink[i][e / 2];
        if (WARPS_M == 1) {
            await_copies<2 * STAGES - 2>();
            __syncwarp();
        }
        u32 p[KEYS / 16][ROWS_16][4];
#pragma unroll
        for (int j = 0; j < KEYS / 16; j++)
#pragma unroll
            for (int i = 0; i < ROWS_16; i++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    p[j][i][e] = pack_bf16(s[i][2 * j + e / 2][e % 2 * 2], s[i][2 * j + e / 2][e % 2 * 2 + 1]);
        multiply_values(acc, p, v_step);
    }

    const int own_rows = min(TILE_ROWS, rows * GROUPS - tile * TILE_ROWS);  // of the tile, that exist
    auto store = [&](int packed, int column, float x, float y) {
        i64 place = ((first_row + packed / GROUPS) * kv_heads + head) * GROUPS + packed % GROUPS;
        out[(place * HEAD_DIM + column) / 2] = pack_bf16(x, y);
    };
    float* parts = (float*)(shared + WARPS_K * STAGES * 2 * STEP_BYTES);
    float2* weights = (float2*)(parts + KEY_GROUPS * PART_STRIDE);
    if (CLUSTER > 1) cluster_wait();
#pragma unroll
    for (int i = 0; i < ROWS_16; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int own = warp_m * WARP_ROWS + i * 16 + half * 8 + g;
            float total = weight[i][half];
            total += __shfl_xor_sync(FULL, total, 1);
            total += __shfl_xor_sync(FULL, total, 2);
            if (own >= own_rows) continue;
            if (KEY_GROUPS == 1) {
                const float share = total > 0.0f ? 1.0f / total : 0.0f;
#pragma unroll
                for (int n = 0; n < PIECES; n++)
                    store(tile * TILE_ROWS + own, n * 8 + t * 2, acc[i][n][half * 2] * share,
                          acc[i][n][half * 2 + 1] * share);
                continue;
            }
            float2* to = weights + group * WEIGHT_STRIDE + own;
            for (int r = t; r < CLUSTER; r += 4)
                if (CLUSTER > 1)
                    push(to, r, largest[i][half], total);
                else
                    *to = make_float2(largest[i][half], total);
            if (n_steps > 0)
#pragma unroll
                for (int n = 0; n < PIECES; n++) {
                    float2* place = (float2*)(parts + group * PART_STRIDE + own * COLUMNS + n * 8 % COLUMNS + t * 2);
                    if (CLUSTER > 1)
                        push(place, n * 8 / COLUMNS, acc[i][n][half * 2], acc[i][n][half * 2 + 1]);
                    else
                        *place = make_float2(acc[i][n][half * 2], acc[i][n][half * 2 + 1]);
                }
        }
    if (KEY_GROUPS == 1) return;
    if (CLUSTER > 1) {
        cluster_arrive();
        cluster_wait();
    } else {
        __syncthreads();
    }

    // PARTS threads share a pair of columns of a row, each taking every PARTS-th group.
    const int part = threadIdx.x % PARTS;
    for (int start = 0; start < own_rows * (COLUMNS / 2); start += THREADS / PARTS) {  // as often for all: lanes meet
        const int item = start + threadIdx.x / PARTS, own = min(item / (COLUMNS / 2), own_rows - 1);
        const int column = item % (COLUMNS / 2) * 2;
        float top = NEG_INF;
#pragma unroll
        for (int other = part; other < KEY_GROUPS; other += PARTS)
            top = fmaxf(top, weights[other * WEIGHT_STRIDE + own].x);
#pragma unroll
        for (int by = 1; by < PARTS; by *= 2) top = fmaxf(top, __shfl_xor_sync(FULL, top, by));
        float x = 0.0f, y = 0.0f, total = 0.0f;
#pragma unroll
        for (int other = part; other < KEY_GROUPS; other += PARTS) {
            float2 own_weight = weights[other * WEIGHT_STRIDE + own];
            if (own_weight.x == NEG_INF) continue;  // nothing seen; its part may never have been written
            float2 piece = *(const float2*)(parts + other * PART_STRIDE + own * COLUMNS + column);
            float share = power_of_2(own_weight.x - top);
            x += piece.x * share;
            y += piece.y * share;
            total += own_weight.y * share;
        }
#pragma unroll
        for (int by = 1; by < PARTS; by *= 2) {
            x += __shfl_xor_sync(FULL, x, by);
            y += __shfl_xor_sync(FULL, y, by);
            total += __shfl_xor_sync(FULL, total, by);
        }
        const float share = total > 0.0f ? 1.0f / total : 0.0f;
        if (part == 0 && item < own_rows * (COLUMNS / 2))
            store(tile * TILE_ROWS + own, rank * COLUMNS + column, x * share, y * share);
    }
}
