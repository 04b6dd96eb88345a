// Attention of packed query rows over paged keys, split over the key groups of a cluster of blocks.
//
// A cluster owns one tile of packed rows (row * GROUPS + query head) of one key head of one sequence. Its CLUSTER
// blocks hold WARPS_K key groups each, every one an online softmax over its own stretch of the keys, WARPS_M warps side
// by side over the tile's rows. When its groups are done, a block puts their parts together in its shared memory, and
// then every block of the cluster an equal share of the tile from all blocks' parts.
//
// Compile with HEAD_DIM (64 or 128), GROUPS, CLUSTER, WARPS_K, WARPS_M, ROWS_16 (16-row tiles a warp holds), KEYS (keys
// a step, a multiple of 16), STAGES (2 or more), PART_ROWS (of a tile, at most so many exist), WIDE (1: multiply by
// wgmma what the copy engine brings; wants HEAD_DIM 128, WARPS_M a multiple of 4, ROWS_16 1, KEYS 64 and at most 8
// STAGES).

typedef unsigned int u32;
typedef unsigned char u8;
typedef unsigned short u16;
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
#if WIDE && (HEAD_DIM != 128 || KEYS != 64 || ROWS_16 != 1 || WARPS_M % 4 || STAGES > 8)
#error "wgmma does not serve this tiling"
#endif
#define PIECES (HEAD_DIM / 8)  // 16-byte pieces of a key; also 8-column tiles of the output
#define STEP_BYTES (KEYS * HEAD_DIM * 2)  // keys, or values, of one step
#define LEEWAY 8.0f  // a power of 2
#define QUADS (HEAD_DIM / 4)  // of a row of a part
#define ROW_FLOATS (HEAD_DIM + 16)  // from row to row of a part: two rows' stores are in different banks
#define STAGES_BYTES (WARPS_K * STAGES * 2 * STEP_BYTES)
#define PARTS_BYTES (WARPS_K * PART_ROWS * ROW_FLOATS * 4)
#define WEIGHTS_AT (STAGES_BYTES > PARTS_BYTES ? STAGES_BYTES : PARTS_BYTES)  // parts take the stages' place
#define BARRIERS_AT (KEY_GROUPS == 1 ? STAGES_BYTES : WEIGHTS_AT + (WARPS_K + 1) * PART_ROWS * 8)

#include "hopper.cuh"
#include "copy_engine.cuh"
#include "warpgroups.cuh"
#include "attention_products.cuh"
#include "attention_keys.cuh"
#include "attention_softmax.cuh"
#include "attention_parts.cuh"

__device__ __forceinline__ void group_sync(int group) {
    if (WARPS_M == 1)
        __syncwarp();
    else
        meet_group(group, GROUP_THREADS);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    tree_attention(const bf16* query, const __grid_constant__ Cache keys, const __grid_constant__ Cache values,
                   u32* out, const i64* block_table, const int* committed, const i64* depths, const u32* seen, int rows,
                   int kv_heads, int pages, int page_shift, float scale_log2, int context_window, int sliding_window) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const int rank = blockIdx.x % CLUSTER, tile = blockIdx.x / CLUSTER, head = blockIdx.y, sequence = blockIdx.z;
    const int lane = threadIdx.x % 32, warp = __shfl_sync(FULL, threadIdx.x / 32, 0), warp_m = warp % WARPS_M;
    const int warp_k = warp / WARPS_M, thread = threadIdx.x % GROUP_THREADS;
    u8* stages = shared + warp_k * (STAGES * 2 * STEP_BYTES);
    wait_for_inputs();
    const int n_context = committed[2 * sequence];  // the low half of an int64
#if WIDE
    Barriers& barriers = ((Barriers*)(shared + BARRIERS_AT))[warp_k];
    if (thread == 0) {
        fetch_map(keys);
        fetch_map(values);
        for (int i = 0; i < 2 * STAGES; i++) {
            make_barrier(&barriers.full[0][0] + i, 1);
            make_barrier(&barriers.free[0][0] + i, WARPS_M);
        }
        publish_barriers();
    }
    __syncthreads();
#endif
    const int end = n_context + rows;
    const int first = max(0, max(n_context - context_window, n_context - sliding_window + 1)) & (WIDE ? -KEYS : -16);
    const int steps = (end - first + KEYS - 1) / KEYS, each = (steps + KEY_GROUPS - 1) / KEY_GROUPS;
    const int step_0 = min((rank * WARPS_K + warp_k) * each, steps);
    const Stretch stretch = {block_table + (i64)sequence * pages, page_shift, first + step_0 * KEYS, end,
                             min(each, steps - step_0)};
    const int n_steps = stretch.steps;
#if WIDE
    const int which = warp_m % 2;  // the first warp brings keys, the second values
    Filler filler = {which ? values : keys, stretch, stages + which * STEP_BYTES, barriers.full[which],
                     barriers.free[which], head * HEAD_DIM, 0};
    if (warp_m < 2)
        for (int step = 0; step < min(STAGES, n_steps); step++) filler.bring(step);
#else
    const u32 slot_bytes = kv_heads * HEAD_DIM * 2;
    const u8* own_keys = (const u8*)(keys + head * HEAD_DIM + thread % PIECES * 8);
    const u8* own_values = (const u8*)(values + head * HEAD_DIM + thread % PIECES * 8);
    auto base_of = [&](int step) { return stretch.slot(step, lane % (KEYS / 16) * 16); };  // of the lane's 16 keys
    auto start_step = [&](int step, int base) {
        if (step < n_steps) {
            u8* to = stages + step % STAGES * (2 * STEP_BYTES);
            copy_step(to, own_keys, base, stretch.left(step), slot_bytes, thread);
            close_copies();
            copy_step(to + STEP_BYTES, own_values, base, stretch.left(step), slot_bytes, thread);
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
    for (int i = 0; i < STAGES - 1; i++) start_step(i, bases[i]);
    int next_base = bases[STAGES - 1];
#endif
    let_next_start();

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

    float largest[ROWS_16][2], weight[ROWS_16][2], shrink[ROWS_16][2], acc[ROWS_16][PIECES][4];
#pragma unroll
    for (int i = 0; i < ROWS_16; i++) {
        largest[i][0] = largest[i][1] = NEG_INF;
        weight[i][0] = weight[i][1] = 0.0f;
#pragma unroll
        for (int n = 0; n < PIECES; n++) acc[i][n][0] = acc[i][n][1] = acc[i][n][2] = acc[i][n][3] = 0.0f;
    }

    // Where every key is committed and inside all windows, nothing is masked.
    u32 visible[ROWS_16][2][KEYS / 16];
    bool masked = false;
    auto look = [&](int step) {
        const int at = stretch.begin + step * KEYS - n_context;  // counted from the first row
        masked = at + KEYS > 0 || at < -context_window || at < rows - sliding_window;
        if (masked)
#pragma unroll
            for (int i = 0; i < ROWS_16; i++)
#pragma unroll
                for (int half = 0; half < 2; half++)
#pragma unroll
                    for (int j = 0; j < KEYS / 16; j++)
                        visible[i][half][j] = seen_keys(seen, depths, first_row + row[i][half], first_row, rows,
                                                        depth[i][half], at + j * 16, context_window, sliding_window);
    };
    auto weigh = [&](float (&s)[ROWS_16][KEYS / 8][4]) {
        return masked ? soften<true>(s, visible, largest, weight, shrink, scale_log2)
                      : soften<false>(s, visible, largest, weight, shrink, scale_log2);
    };
    float s[ROWS_16][KEYS / 8][4];
    u32 p[KEYS / 16][ROWS_16][4];
#if WIDE
    // The products with a step's values run beside the next step's softmax. A stage is filled anew when all warps have
    // told that they are done with it.
    auto release = [&](u64* barrier) { if (lane == 0) arrive(barrier); };
    auto stage_of = [&](int step) { return stages + step % STAGES * (2 * STEP_BYTES); };
    auto start_scores = [&](int step) {
        await_phase(&barriers.full[0][step % STAGES], step / STAGES & 1);
        start_keys(s, q, stage_of(step));
        close_products();
    };
    auto end_scores = [&](int step) {
        hold(s[0]);
        release(&barriers.free[0][step % STAGES]);
    };
    auto start_sums = [&](int step) {
        await_phase(&barriers.full[1][step % STAGES], step / STAGES & 1);
        u8* v_step = stage_of(step) + STEP_BYTES;
        if (stretch.left(step) < KEYS) clear_values(v_step, stretch.left(step), warp_k);
        start_values(acc, p, v_step);
        close_products();
    };
    auto refill = [&](int step) {  // where this step's keys were, and the values of the step before
        const int next = step + STAGES - warp_m;
        if (warp_m < 2 && next >= STAGES && next < n_steps) filler.bring(next);
    };
    if (n_steps > 0) {
        look(0);
        start_scores(0);
        await_products<0>();
        end_scores(0);
        weigh(s);
        pack_weights(p, s);
        for (int step = 0; step + 1 < n_steps; step++) {
            start_scores(step + 1);
            start_sums(step);
            refill(step);
            look(step + 1);
            await_products<1>();
            end_scores(step + 1);
            const bool moved = weigh(s);
            await_products<0>();
            hold(acc[0]);
            hold_operands(p);
            release(&barriers.free[1][step % STAGES]);
            if (moved) scale_rows(acc, shrink);
            pack_weights(p, s);
        }
        start_sums(n_steps - 1);
        await_products<0>();
        hold(acc[0]);
    }
#else
    for (int step = 0; step < n_steps; step++) {
        const u8* k_step = stages + step % STAGES * (2 * STEP_BYTES);
        look(step);
        const int new_base = base_of(step + STAGES);
        if (WARPS_M == 1)
            await_copies<2 * STAGES - 3>();  // the keys only
        else
            await_copies<2 * STAGES - 4>();
        group_sync(warp_k);  // everyone's copies are there, and everyone is done with the step before
        start_step(step + STAGES - 1, next_base);
        next_base = new_base;

#pragma unroll
        for (int i = 0; i < ROWS_16; i++)
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) s[i][n][0] = s[i][n][1] = s[i][n][2] = s[i][n][3] = 0.0f;
        multiply_keys(s, q, k_step);
        if (weigh(s) && step > 0) scale_rows(acc, shrink);
        if (WARPS_M == 1) {
            await_copies<2 * STAGES - 2>();
            __syncwarp();
        }
        pack_weights(p, s);
        multiply_values(acc, p, k_step + STEP_BYTES);
    }
#endif

    const int own_rows = min(TILE_ROWS, rows * GROUPS - tile * TILE_ROWS);  // of the tile, that exist
    auto store = [&](int own, int column, float x, float y) {
        const int packed = tile * TILE_ROWS + own;
        const i64 place = ((first_row + packed / GROUPS) * kv_heads + head) * GROUPS + packed % GROUPS;
        out[(place * HEAD_DIM + column) / 2] = pack_bf16(x, y);
    };
    // In a part, columns 2t, 2t + 1, 2t + 8 and 2t + 9 of 16, which a lane holds, stand side by side: its quads.
    float* parts = (float*)shared;
    float2* weights = (float2*)(shared + WEIGHTS_AT);
    if (KEY_GROUPS > 1) meet_group(WARPS_K, THREADS);  // no stage is needed any more
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
                    store(own, n * 8 + t * 2, acc[i][n][half * 2] * share, acc[i][n][half * 2 + 1] * share);
                continue;
            }
            const int place = warp_k * PART_ROWS + own;
            if (t == 0) weights[place] = make_float2(largest[i][half], total);
#pragma unroll
            for (int n = 0; n < PIECES; n += 2)
                *(float4*)(parts + place * ROW_FLOATS + n * 8 + t * 4) =
                    float4{acc[i][n][half * 2], acc[i][n][half * 2 + 1], acc[i][n + 1][half * 2],
                           acc[i][n + 1][half * 2 + 1]};
        }
    if (KEY_GROUPS == 1) return;

    auto finish = [&](int item, const Part& all) {
        const float share = all.weight.y > 0.0f ? 1.0f / all.weight.y : 0.0f;
        const int quad = item % QUADS, column = quad / 4 * 16 + quad % 4 * 2;
        store(item / QUADS, column, all.sum.x * share, all.sum.y * share);
        store(item / QUADS, column + 8, all.sum.z * share, all.sum.w * share);
    };
    const int items = own_rows * QUADS;
    auto sum_of = [&](int item, int part) {
        return (float4*)(parts + (part * PART_ROWS + item / QUADS) * ROW_FLOATS) + item % QUADS;
    };
    if (WARPS_K > 1) {
        meet_group(WARPS_K, THREADS);
        put_items_together<WARPS_K, WARPS_K <= 2 ? 4 : 1>(
            0, items,
            [&](int item, int i) { return Part{*sum_of(item, i), weights[i * PART_ROWS + item / QUADS]}; },
            [&](int item, const Part& all) {
                if (CLUSTER == 1) return finish(item, all);
                *sum_of(item, 0) = all.sum;
                if (item % QUADS == 0) weights[WARPS_K * PART_ROWS + item / QUADS] = all.weight;
            });
    }
    if (CLUSTER == 1) return;
    __syncwarp();
    cluster_arrive_shared();
    cluster_wait();
    const int share = (items + CLUSTER - 1) / CLUSTER, last = min((rank + 1) * share, items);
    const float2* block_weights = weights + (WARPS_K > 1 ? WARPS_K * PART_ROWS : 0);
    put_items_together<CLUSTER, CLUSTER <= 4 ? 2 : 1>(
        rank * share, last,
        [&](int item, int i) {
            return Part{pull((const float4*)sum_of(item, 0), i), pull(block_weights + item / QUADS, i)};
        },
        finish);
    __syncwarp();
    cluster_arrive_bare();
    cluster_wait();  // others may still read from here
}
