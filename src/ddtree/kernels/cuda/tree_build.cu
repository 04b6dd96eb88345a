// Best-first tree build, one block a sequence. See tree_build_cuda.py for the method.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define NEG_INF (__int_as_float(0xff800000))
#define BUCKETS 256   // of the cost histogram
#define WIDTH 0.125f  // of a bucket, in nats; eight times as wide where that does not reach far enough
#define BINS 1024     // of the sort
#define CAPACITY 4096  // prefixes that the search may collect
#define FULL 0xffffffffu

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

// About the score of the last of the `budget` best prefixes, from counts of prefixes by cost, convolved depth by depth
// (costs relative to the greedy path, rounded to buckets, of the first `ranks` of each depth, a multiple of 16); -inf where
// there are not so many. An estimate: the caller checks.
__device__ float estimate_last_score(const float* lp, int k, int max_depth, int budget, int ranks, int* counts,
                                     int* quantum, int* result) {
    const int tid = threadIdx.x, threads = blockDim.x;
    // Before each array of counts stand as many zeros, so that what lies outside needs no test.
    int *current = counts + BUCKETS, *next = counts + 3 * BUCKETS, *total = counts + 4 * BUCKETS;
    for (float width = WIDTH; width <= 64 * WIDTH; width *= 8.0f) {
        for (int i = tid; i < 5 * BUCKETS; i += threads) counts[i] = i == BUCKETS;
        for (int i = tid; i < max_depth * ranks; i += threads) {
            int depth = i / ranks, rank = i % ranks;
            float top = lp[depth * k], value = rank < k ? lp[depth * k + rank] : NEG_INF;
            float cost = value > NEG_INF ? (top - value) / width + 0.5f : 1e9f;
            quantum[i] = cost < (float)BUCKETS ? (int)cost : BUCKETS;
        }
        __syncthreads();
        float greedy = 0.0f;
        for (int depth = 0; depth < max_depth; depth++) {
            greedy += lp[depth * k];
            float base = 0.5f - greedy / width;
            if (!(base < (float)BUCKETS)) break;  // deeper prefixes cost more still
            if (tid < BUCKETS) {
                int sum = 0;
#pragma unroll 16
                for (int rank = 0; rank < ranks; rank++) sum += current[tid - quantum[depth * ranks + rank]];
                sum = sum < 65536 ? sum : 65536;
                next[tid] = sum;
                int bucket = (int)base + tid;
                if (bucket < BUCKETS) total[bucket] += sum;  // no other thread's at this depth
            }
            __syncthreads();
            int* swap = current;
            current = next;
            next = swap;
        }
        if (tid < 32) {
            int sums[BUCKETS / 32], sum = 0;
#pragma unroll
            for (int i = 0; i < BUCKETS / 32; i++) sums[i] = sum += total[tid * (BUCKETS / 32) + i];
            int below = sum;
            for (int step = 1; step < 32; step *= 2) {
                int other = __shfl_up_sync(FULL, below, step);
                if (tid >= step) below += other;
            }
            below -= sum;
            int found = BUCKETS;
#pragma unroll
            for (int i = BUCKETS / 32 - 1; i >= 0; i--)
                if (below + sums[i] >= budget) found = tid * (BUCKETS / 32) + i;
            for (int step = 16; step > 0; step /= 2) {
                int other = __shfl_down_sync(FULL, found, step);
                found = other < found ? other : found;
            }
            if (tid == 0) *result = found;
        }
        __syncthreads();
        int found = *result;
        __syncthreads();
        current = counts + BUCKETS;
        next = counts + 3 * BUCKETS;
        if (found < BUCKETS) return -(float)(found + 1) * width;
    }
    return NEG_INF;
}

// Collects every prefix that scores at least `bound`, depth by depth, a warp a prefix and a lane a rank. A prefix that
// `budget` others are sure to precede is left out too: with rank tuple (r1 .. rd), each tuple that is nowhere larger comes
// first, and so do their beginnings. Returns the number of entries, the root included, or 0 where there is no room.
__device__ int collect(const float* lp, int k, int max_depth, int budget, float bound, float* score, u32* entry,
                       u32* dominating, int* level_counts) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const u32 lower = (1u << lane) - 1;
    __syncthreads();  // an earlier search's counts have been read
    if (threadIdx.x < 32) level_counts[lane] = 0;
    __syncthreads();
    int begin = 0, end = 1;
    for (int depth = 0; depth < max_depth && begin < end; depth++) {
        const float* row = lp + depth * k;
        for (int index = begin + warp; index < end; index += warps) {
            const float base = score[index];
            const int product = dominating[index] & 0xffff, preceding = dominating[index] >> 16;
            int limit = (int)((float)(budget - preceding) / (float)product);  // exact: all below 2048
            if (limit > k) limit = k;
            for (int first = 0; first < limit; first += 32) {
                const int rank = first + lane;
                const float sum = rank < limit ? base + row[rank] : NEG_INF;
                const bool take = sum > NEG_INF && sum >= bound;
                const u32 votes = __ballot_sync(FULL, take);
                if (votes == 0) break;
                int at = lane == 0 ? atomicAdd(&level_counts[depth], __popc(votes)) : 0;
                at = end + __shfl_sync(FULL, at, 0) + __popc(votes & lower);
                if (take && at < CAPACITY) {
                    score[at] = sum;
                    entry[at] = PACK(index, depth + 1, rank);
                    const int p = product * (rank + 1);
                    dominating[at] = (u32)(preceding + p) << 16 | (u32)p;
                }
                if (votes != FULL) break;  // scores fall with the rank
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
    int entries = 1, size = 0, stored = 1;  // entries 1 .. stored-1 are offered prefixes; chosen ones are listed in `heap`'s end
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

// Puts entries 1 .. n in the order of (score, depth, rank tuple) and keeps the first `budget`: by bins of the score, then
// by counting within a bin. `scratch` holds 2 * BINS + n words; no entry scores less than `least`.
__device__ void sort_entries(const float* score, const u32* entry, int n, int budget, float least, u32* order,
                             u32* scratch, u32* warp_sums) {
    const int tid = threadIdx.x, threads = blockDim.x, lane = tid & 31, warp = tid >> 5;
    u32 *first = scratch, *filled = scratch + BINS, *members = scratch + 2 * BINS;
    const float scale = least < 0.0f ? (float)(BINS - 1) / -least : 0.0f;
    for (int i = tid; i < 2 * BINS; i += threads) scratch[i] = 0;
    __syncthreads();
    for (int i = tid + 1; i <= n; i += threads) atomicAdd(&first[(int)(-score[i] * scale)], 1u);
    __syncthreads();
    const int own = BINS / threads;  // neighbouring bins a thread adds up: 1 or 2
    u32 a = first[tid * own], b = own > 1 ? first[tid * own + 1] : 0, sum = a + b;
    for (int step = 1; step < 32; step *= 2) {
        u32 other = __shfl_up_sync(FULL, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    u32 before_warp = lane < warp ? warp_sums[lane] : 0;
    for (int step = 16; step > 0; step /= 2) before_warp += __shfl_xor_sync(FULL, before_warp, step);
    const u32 start = before_warp + sum - a - b;
    first[tid * own] = start;
    if (own > 1) first[tid * own + 1] = start + a;
    __syncthreads();
    for (int i = tid + 1; i <= n; i += threads) {
        const int bin = (int)(-score[i] * scale);
        members[first[bin] + atomicAdd(&filled[bin], 1u)] = i;
    }
    __syncthreads();
    for (int i = tid; i < n; i += threads) {
        const u32 mine = members[i];
        const int bin = (int)(-score[mine] * scale);
        const u32 from = first[bin], to = from + filled[bin];
        u32 place = from;
        if (place >= (u32)budget) continue;
        for (u32 j = from; j < to; j++) place += j != (u32)i && before(score, entry, members[j], mine);
        if (place < (u32)budget) order[place] = mine;
    }
    __syncthreads();
}

__device__ void fill_zero(unsigned char* begin, i64 n, int tid, int threads) {
    i64 lead = (i64)((16 - ((u64)begin & 15)) & 15);
    if (lead > n) lead = n;
    i64 wide = (n - lead) / 16;
    for (i64 i = tid; i < lead; i += threads) begin[i] = 0;
    struct alignas(16) Wide { u64 a, b; };
    for (i64 i = tid; i < wide; i += threads) ((Wide*)(begin + lead))[i] = Wide{0, 0};
    for (i64 i = lead + wide * 16 + tid; i < n; i += threads) begin[i] = 0;
}

extern "C" __global__ void build_tree(const float* log_probs, const i64* token_ids, const i64* roots, const i64* max_depths,
                                      i64* tokens, i64* parents, i64* depths_out, float* scores, unsigned char* ancestors,
                                      int depths, int k, int budget, int ranks, int clear) {
    extern __shared__ __align__(16) unsigned char shared[];
    u32* scratch = (u32*)shared;                // 2 * CAPACITY: histograms, the sort's bins, the heap, rows of entries
    float* score = (float*)(scratch + 2 * CAPACITY);  // CAPACITY
    u32* entry = (u32*)(score + CAPACITY);      // CAPACITY
    u32* dominating = entry + CAPACITY;         // CAPACITY; after the search: order
    float* lp = (float*)(dominating + CAPACITY);  // depths * k
    __shared__ int result, level_counts[32];
    __shared__ u32 worst;

    const int tid = threadIdx.x, threads = blockDim.x, rows = budget + 1;
    const i64 sequence = blockIdx.x;
    const float* own_lp = log_probs + sequence * depths * k;
    const i64 allowed = max_depths[sequence];
    const int max_depth = allowed < 0 ? 0 : allowed < depths ? (int)allowed : depths;
    for (int i = tid; i < max_depth * k; i += threads) lp[i] = own_lp[i];
    unsigned char* seen = ancestors + sequence * rows * rows;
    if (clear) fill_zero(seen, (i64)rows * rows, tid, threads);
    if (tid == 0) {
        score[0] = 0.0f;
        entry[0] = PACK(0, 0, 0);
        dominating[0] = 1;  // product 1, nothing before it
        worst = 0;
    }
    __syncthreads();

    float bound = estimate_last_score(lp, k, max_depth, budget, ranks, (int*)scratch, (int*)scratch + 5 * BUCKETS, &result);
    int n = -1;
    float step = 4 * WIDTH;
    for (int attempt = 0, last = 0; attempt < 8; attempt++) {
        n = collect(lp, k, max_depth, budget, bound, score, entry, dominating, level_counts) - 1;
        if (n >= budget || bound == NEG_INF) break;
        const int way = n < 0 ? 1 : -1;  // too many for the room, or too few: the estimate was off
        step = last == 0 ? step : way == last ? 2 * step : 0.5f * step;
        bound = fminf(bound + way * step, 0.0f);
        last = way;
    }

    u32* order = dominating;
    if (n < 0 || (n < budget && bound > NEG_INF)) {
        if (tid == 0) {
            n = heap_search(lp, k, max_depth, budget, score, entry, scratch);
            for (int i = 0; i < n; i++) order[i] = scratch[2048 + i];
            result = n;
        }
        __syncthreads();
        n = result;
    } else {
        float least = bound;
        if (bound == NEG_INF) {
            u32 own = 0;  // bits of a score without its sign: larger for worse scores
            for (int i = tid + 1; i <= n; i += threads) own = max(own, __float_as_uint(score[i]) & 0x7fffffffu);
            atomicMax(&worst, own);
            __syncthreads();
            least = -__uint_as_float(worst);
        }
        sort_entries(score, entry, n, budget, least, order, scratch, (u32*)level_counts);
    }

    if (n > budget) n = budget;
    u32* row_of = scratch;
    if (tid == 0) row_of[0] = 0;
    for (int i = tid; i < n; i += threads) row_of[order[i]] = i + 1;
    __syncthreads();
    const i64 out = sequence * rows;
    for (int row = tid; row < rows; row += threads) {
        i64 token = 0, parent = 0, depth = 0;
        float value = NEG_INF;
        unsigned char* line = seen + (i64)row * rows;
        if (row == 0) {
            token = roots[sequence];
            value = 0.0f;
        } else if (row <= n) {
            u32 at = order[row - 1], own = entry[at];
            depth = DEPTH(own);
            parent = row_of[PARENT(own)];
            token = token_ids[(sequence * depths + depth - 1) * k + RANK(own)];
            value = score[at];
            for (u32 above = PARENT(own); above != 0; above = PARENT(entry[above])) line[row_of[above]] = 1;
        }
        line[row] = 1;
        line[0] = 1;
        tokens[out + row] = token;
        parents[out + row] = parent;
        depths_out[out + row] = depth;
        scores[out + row] = value;
    }
}
