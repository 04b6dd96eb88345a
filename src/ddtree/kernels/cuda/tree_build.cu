// Best-first tree build, one block of THREADS a sequence. See tree_build_cuda.py for the method.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define NEG_INF (__int_as_float(0xff800000))
#define REACH 16.0f    // of the counts by cost, in nats; 8 and 64 times as far where that is not enough
#define CAPACITY 4096  // prefixes that the search may collect
#define MOST (CAPACITY / THREADS)  // of them a thread
#define FULL 0xffffffffu

#include "tree_build_estimate.cuh"

// A prefix: its parent's entry (13 bits), its depth (5), the rank of its last token (10). Entry 0 is the root.
#define PACK(parent, depth, rank) ((u32)(parent) << 15 | (u32)(depth) << 10 | (u32)(rank))
#define PARENT(p) ((p) >> 15)
#define DEPTH(p) ((p) >> 10 & 31)
#define RANK(p) ((p) & 1023)

// Whether prefix a stands before prefix b: better score, lower depth, lower rank tuple.
__device__ bool before(const float* score, const u32* entry, u32 a, u32 b) {
    if (score[a] != score[b]) return score[a] > score[b];
    u32 ea = entry[a], eb = entry[b];
    if (DEPTH(ea) != DEPTH(eb)) return DEPTH(ea) < DEPTH(eb);
    while (PARENT(ea) != PARENT(eb)) {  // same depth: they meet at the root at the latest
        ea = entry[PARENT(ea)];
        eb = entry[PARENT(eb)];
    }
    return RANK(ea) < RANK(eb);
}

// Collects every prefix that scores at least `bound`, depth by depth, a lane a rank; a warp takes one prefix or, where
// a depth has many, four. A prefix that `budget` others are sure to precede is left out too: with rank tuple
// (r1 .. rd), each tuple that is nowhere larger comes first, and so do their beginnings. `level_counts` are 0 before.
// Returns the number of entries, the root included, or 0 where there is no room.
__device__ int collect(const float* lp, int k, int max_depth, int budget, float bound, float* score, u32* entry,
                       u32* dominating, int* level_counts) {
    const int lane = threadIdx.x & 31, warps = THREADS / 32, warp = __shfl_sync(FULL, threadIdx.x >> 5, lane);
    const u32 lower = (1u << lane) - 1;
    int begin = 0, end = 1;
    for (int depth = 0; depth < max_depth && begin < end; depth++) {
        const float* row = lp + depth * k;
        const bool many = end - begin > warps;
        const int at_once = many ? 4 : 1, lanes = many ? 8 : 32, least_rank = many ? lane & 7 : lane;
        const u32 last_lanes = many ? 0x80808080u : 0x80000000u;
        for (int index = begin + warp * at_once + (many ? lane >> 3 : 0), from = index - lane / lanes; from < end;
             index += warps * at_once, from += warps * at_once) {
            const bool live = index < end;
            const float base = live ? score[index] : NEG_INF;
            const u32 own = live ? dominating[index] : 0;
            const int product = own & 0xffff, preceding = own >> 16;
            for (int rank = least_rank;; rank += lanes) {
                const int p = product * (rank + 1);
                const float sum = base + (rank < k ? row[rank] : NEG_INF);
                const bool take = (sum > NEG_INF) & (sum >= bound) & (preceding + p <= budget);
                const u32 votes = __ballot_sync(FULL, take);
                if (votes == 0) break;
                const int taken = __popc(votes), earlier = __popc(votes & lower);
                int at = 0;
                if (lane == 0) at = atomicAdd(&level_counts[depth], taken);
                at = end + __shfl_sync(FULL, at, 0) + earlier;
                if (take && at < CAPACITY) {
                    score[at] = sum;
                    entry[at] = PACK(index, depth + 1, rank);
                    dominating[at] = (u32)(preceding + p) << 16 | (u32)p;
                }
                if ((votes & last_lanes) == 0) break;  // scores fall with the rank: no prefix has more
            }
        }
        __syncthreads();
        begin = end;
        end += level_counts[depth];
        if (end > CAPACITY) return 0;
    }
    return end;
}

// The oracle's own heap, by one thread: right for any input, used where `collect` had no room (masses of equal scores).
__device__ int heap_search(const float* lp, int k, int max_depth, int budget, float* score, u32* entry, u32* heap) {
    int entries = 1, size = 0, stored = 1;  // entries 1 .. stored-1 are offered prefixes; the chosen ones stand apart
    u32* chosen = heap + 2048;
    for (int n = 0; n <= budget; n++) {
        u32 popped = 0;
        if (n > 0) {
            if (size == 0) break;
            popped = heap[0];
            u32 last = heap[--size];
            int at = 0;
            for (int child; (child = 2 * at + 1) < size; at = child) {
                if (child + 1 < size && before(score, entry, heap[child + 1], heap[child])) child++;
                if (!before(score, entry, heap[child], last)) break;
                heap[at] = heap[child];
            }
            heap[at] = last;
            chosen[entries - 1] = popped;
            entries++;
        }
        for (int which = 0; which < 2; which++) {  // the next sibling, then the first child
            if (n == 0 && which == 0) continue;
            u32 own = entry[popped];
            u32 parent = which == 0 ? PARENT(own) : popped;
            int depth = which == 0 ? (int)DEPTH(own) : (int)DEPTH(own) + 1;
            int rank = which == 0 ? (int)RANK(own) + 1 : 0;
            if (depth > max_depth || rank >= k) continue;
            float sum = score[parent] + lp[(depth - 1) * k + rank];
            if (!(sum > NEG_INF)) continue;
            u32 fresh = stored++;
            score[fresh] = sum;
            entry[fresh] = PACK(parent, depth, rank);
            int at = size++;
            while (at > 0 && before(score, entry, fresh, heap[(at - 1) / 2])) {
                heap[at] = heap[(at - 1) / 2];
                at = (at - 1) / 2;
            }
            heap[at] = fresh;
        }
    }
    return entries - 1;
}

#include "tree_build_write.cuh"

// An address in shared memory as if it were each thread's own: the compiler would work a common one out anew, and
// slowly, at each access, and would gather a warp's atomics there in a roundabout way.
__device__ unsigned char* as_own(unsigned char* place) {
#ifdef CUDA_ON_CPU
    return place;
#else
    const u32 address = __shfl_sync(FULL, (u32)__cvta_generic_to_shared(place), threadIdx.x);
    return (unsigned char*)__cvta_shared_to_generic(address);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
build_tree(const float* __restrict__ log_probs, const i64* __restrict__ token_ids, const i64* __restrict__ roots,
           const i64* __restrict__ max_depths, i64* tokens, i64* parents, i64* depths_out, float* scores,
           unsigned char* ancestors, int depths, int k, int budget, int clear) {
    extern __shared__ __align__(16) unsigned char shared[];
    u32* scratch = (u32*)as_own(shared);        // 2 * CAPACITY: counts, the sort's bins, the heap; last rows of entries
    float* score = (float*)(scratch + 2 * CAPACITY);  // CAPACITY
    u32* entry = (u32*)(score + CAPACITY);      // CAPACITY
    u32* dominating = entry + CAPACITY;         // CAPACITY; after the search: entries in order
    u32* bins = dominating + CAPACITY;          // BINS
    int *level_counts = (int*)(bins + BINS), *bases = level_counts + 32;  // 32 each
    int *result = bases + 32, *worst = result + 1;
    float* lp = (float*)(result + 4);           // depths * k

    const int tid = threadIdx.x, rows = budget + 1;
    const i64 sequence = blockIdx.x, out = sequence * rows;
    const float* own_lp = log_probs + sequence * depths * k;
    const i64* own_ids = token_ids + sequence * depths * k;
    const i64 allowed = max_depths[sequence], root = tid == 0 ? roots[sequence] : 0;
    for (int i = tid; i < depths * k; i += 4 * THREADS) {
        float some[4];  // all asked for before the first is waited for
#pragma unroll
        for (int j = 0; j < 4; j++) some[j] = i + j * THREADS < depths * k ? own_lp[i + j * THREADS] : 0.0f;
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (i + j * THREADS < depths * k) lp[i + j * THREADS] = some[j];
    }
    const int max_depth = allowed < 0 ? 0 : allowed < depths ? (int)allowed : depths;
    const Tree tree = {tokens + out, parents + out, depths_out + out, scores + out, ancestors + out * rows, rows};
    if (tid < BINS) bins[tid] = 0;
    if (tid < 32) level_counts[tid] = 0;
    if (tid == 0) {
        score[0] = 0.0f;
        entry[0] = PACK(0, 0, 0);
        dominating[0] = 1;  // product 1, nothing before it
        *worst = 0;
    }
    __syncthreads();

    // About what the last of the `budget` best prefixes scores; the search finds out whether that was too high.
    float bound = NEG_INF;
    int* shifts = (int*)scratch + (COUNT_WORDS + 3) / 4 * 4;
    float width = REACH / BUCKETS, scale = BUCKETS / REACH;
    for (int attempt = 0; attempt < 3; attempt++, width *= 8.0f, scale *= 0.125f) {
        prepare_costs(lp, k, max_depth, scale, scratch, shifts, bases);
        __syncthreads();
        if (tid < 32) {
            const int found = count_by_cost(budget, scratch, shifts, bases);
            if (tid == 0) *result = found;
        } else if (clear && attempt == 0) {
            fill_zero(tree.seen, rows * rows, tid - 32, THREADS - 32);
        }
        __syncthreads();
        if (*result < BUCKETS) {
            bound = -(float)(*result + 1) * width;
            break;
        }
    }
    int n = -1;
    float step = 0.5f;
    for (int attempt = 0, last = 0; attempt < 8; attempt++) {
        n = collect(lp, k, max_depth, budget, bound, score, entry, dominating, level_counts) - 1;
        if (n >= budget || bound == NEG_INF) break;
        const int way = n < 0 ? 1 : -1;  // too many for the room, or too few: the estimate was off
        step = last == 0 ? step : way == last ? 2 * step : 0.5f * step;
        bound = fminf(bound + way * step, 0.0f);
        last = way;
        __syncthreads();  // the counts have been read
        if (tid < 32) level_counts[tid] = 0;
        __syncthreads();
    }

    u32 *order = dominating, *row_of = scratch + CAPACITY;
    if (tid == 0) row_of[0] = 0;
    if (n < 0 || (n < budget && bound > NEG_INF)) {
        if (tid == 0) {
            n = heap_search(lp, k, max_depth, budget, score, entry, scratch);
            for (int i = 0; i < n; i++) row_of[order[i] = scratch[2048 + i]] = i + 1;
            *result = n;
        }
        __syncthreads();
        n = *result;
        for (int i = tid; i < n; i += THREADS)
            write_node(tree, i + 1, token_of(entry[order[i]], own_ids, k), score, entry, row_of, order[i]);
    } else {
        float least = bound;
        if (bound == NEG_INF) {
            int own = 0;  // bits of a score without its sign: larger for worse scores
            for (int i = tid + 1; i <= n; i += THREADS) own = max(own, (int)(__float_as_uint(score[i]) & 0x7fffffffu));
            atomicMax(worst, own);
            __syncthreads();
            least = -__int_as_float(*worst);
        }
        float* binned = (float*)scratch;
        if (n <= THREADS)
            sort_and_write<1>(tree, own_ids, k, score, entry, n, budget, least, bins, binned, order, row_of);
        else
            sort_and_write<MOST>(tree, own_ids, k, score, entry, n, budget, least, bins, binned, order, row_of);
        if (n > budget) n = budget;
    }
    if (tid == 0) write_row(tree, 0, root, 0, 0, 0.0f);
    for (int row = n + 1 + tid; row < rows; row += THREADS) write_row(tree, row, 0, 0, 0, NEG_INF);
}
