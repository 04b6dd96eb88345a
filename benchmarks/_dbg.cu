// Best-first tree build, one block a sequence. See tree_build_cuda.py for the method.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define NEG_INF (__int_as_float(0xff800000))
#define BUCKETS 256       // of the cost histogram
#define BUCKET_BITS 8
#define CAPACITY 4096     // prefixes that the search may collect
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

// A score that at least `budget` prefixes reach, or -inf where no such score is known. Costs relative to the greedy path
// are rounded up to buckets, so a prefix counted in a bucket really scores at least what the bucket says.
__device__ float lower_bound_score(const float* lp, int k, int max_depth, int budget, int ranks, int* counts, u32* quantum,
                                   int* result) {
    const int tid = threadIdx.x, threads = blockDim.x;
    int *current = counts, *next = counts + BUCKETS, *total = counts + 2 * BUCKETS;
    for (float width = 0.125f; width <= 8.0f; width *= 8.0f) {
        for (int i = tid; i < BUCKETS; i += threads) {
            current[i] = i == 0;
            total[i] = 0;
        }
        for (int i = tid; i < max_depth * ranks; i += threads) {
            int depth = i / ranks, rank = i % ranks;
            float top = lp[depth * k], value = lp[depth * k + rank];
            float cost = value > NEG_INF ? ceilf((top - value) / width) : 1e9f;
            quantum[i] = cost < (float)BUCKETS ? (u32)cost : BUCKETS;
        }
        __syncthreads();
        float greedy = 0.0f;
        for (int depth = 0; depth < max_depth; depth++) {
            greedy += lp[depth * k];
            float base = ceilf(-greedy / width);
            if (!(base < (float)BUCKETS)) break;  // deeper prefixes cost more still
            for (int c = tid; c < BUCKETS; c += threads) {
                int sum = 0;
#pragma unroll 8
                for (int rank = 0; rank < ranks; rank++) {
                    u32 q = quantum[depth * ranks + rank];
                    if (q <= (u32)c) sum += current[c - q];
                }
                sum = sum < 65536 ? sum : 65536;
                next[c] = sum;
                int bucket = (int)base + c;
                if (bucket < BUCKETS) total[bucket] += sum;  // this thread's own bucket at this depth
            }
            __syncthreads();
            int* swap = current;
            current = next;
            next = swap;
        }
        if (tid < 32) {
            int sums[BUCKETS / 32], sum = 0;
            for (int i = 0; i < BUCKETS / 32; i++) sums[i] = sum += total[tid * (BUCKETS / 32) + i];
            int below = sum;
            for (int step = 1; step < 32; step *= 2) {
                int other = __shfl_up_sync(FULL, below, step);
                if (tid >= step) below += other;
            }
            below -= sum;
            int found = BUCKETS;
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
        if (found < BUCKETS) return -(float)found * width * (1.0f + 1e-5f) - 1e-5f;
    }
    return NEG_INF;
}

// Warp 0 collects every prefix that scores at least `bound`. A prefix that more than `budget` others are sure to precede
// is left out too: with rank tuple (r1 .. rd), each tuple that is nowhere larger comes first, and so do their beginnings.
// Returns the number of entries, the root included, or 0 where there is no room.
__device__ int collect(const float* lp, int k, int max_depth, int budget, float bound, float* score, u32* entry,
                       u32* dominating) {
    const int lane = threadIdx.x;
    const u32 lower = (1u << lane) - 1;
    int head = 0, tail = 1;
    while (head < tail) {
        // The root alone is expanded by all lanes, a rank each; else each lane expands its own prefix rank by rank.
        const bool is_root = head == 0;
        const int index = is_root ? 0 : head + lane, end = head + 32 < tail ? head + 32 : tail;
        const bool has = index < end;
        const u32 own = has ? entry[index] : 0;
        const float base = has ? score[index] : NEG_INF;
        const u32 dom = has ? dominating[index] : 1;
        const int depth = DEPTH(own);
        const int product = dom & 0xffff, preceding = dom >> 16;
        int limit = has && depth < max_depth ? (budget - preceding) / product : 0;
        if (limit > k) limit = k;
        const float* row = lp + (depth < max_depth ? depth : 0) * k;
        const int stride = is_root ? 32 : 1;
        for (int first = is_root ? lane : 0;; first += 4 * stride) {
            u32 votes = 0;
#pragma unroll
            for (int u = 0; u < 4; u++) {
                int rank = first + u * stride;
                float sum = rank < limit ? base + row[rank] : NEG_INF;
                bool take = sum > NEG_INF && sum >= bound;
                votes = __ballot_sync(FULL, take);
                int at = tail + __popc(votes & lower);
                if (take && at < CAPACITY) {
                    score[at] = sum;
                    entry[at] = PACK(index, depth + 1, rank);
                    int p = product * (rank + 1);
                    dominating[at] = (u32)(preceding + p) << 16 | (u32)p;
                }
                tail += __popc(votes);
            }
            if (tail > CAPACITY) return 0;
            if (votes == 0) break;  // scores fall with the rank: no lane has more
        }
        __syncwarp();
        head = end;
    }
    return tail;
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

__device__ u32 descending_bits(float value) {  // smaller for larger values
    u32 bits = __float_as_uint(value);
    return (bits >> 31) ? bits : ~bits & 0x7fffffffu;
}

// Sorts entries 1 .. n by (score, depth, rank tuple) into order[0 .. n-1].
__device__ void sort_large(const float* score, const u32* entry, int n, u64* keys, u32* order) {
    const int tid = threadIdx.x, threads = blockDim.x;
    int size = 1;
    while (size < n) size *= 2;
    for (int i = tid; i < size; i += threads)
        keys[i] = i < n ? (u64)descending_bits(score[i + 1] + 0.0f) << 32 | DEPTH(entry[i + 1]) << 16 | (u32)(i + 1) : ~0ull;
    __syncthreads();
    for (int width = 2; width <= size; width *= 2)
        for (int stride = width / 2; stride > 0; stride /= 2) {
            for (int i = tid; i < size / 2; i += threads) {
                int low = 2 * i - (i & (stride - 1)), high = low + stride;
                u64 a = keys[low], b = keys[high];
                if ((a > b) == ((low & width) == 0)) {
                    keys[low] = b;
                    keys[high] = a;
                }
            }
            __syncthreads();
        }
    // Where score and depth are equal, the entries' numbers do not follow the rank tuples: count within the run.
    for (int i = tid; i < n; i += threads) {
        u64 group = keys[i] >> 16;
        int start = i, place = 0;
        while (start > 0 && keys[start - 1] >> 16 == group) start--;
        u32 own = (u32)keys[i] & 0xffff;
        for (int j = start; j < n && keys[j] >> 16 == group; j++)
            if (j != i && before(score, entry, (u32)keys[j] & 0xffff, own)) place++;
        order[start + place] = own;
    }
    __syncthreads();
}

__device__ void sort_small(const float* score, const u32* entry, int n, u32* order) {
    for (int i = threadIdx.x + 1; i <= n; i += blockDim.x) {
        float own = score[i];
        int place = 0, equal = 0;
#pragma unroll 4
        for (int j = 1; j <= n; j++) {
            place += score[j] > own;
            equal += score[j] == own;
        }
        if (equal > 1)
            for (int j = 1; j <= n; j++)
                if (j != i && score[j] == own && before(score, entry, j, i)) place++;
        order[place] = i;
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
                                      int depths, int k, int budget, int dp_ranks) {
    extern __shared__ __align__(16) unsigned char shared[];
    u64* keys = (u64*)shared;                        // CAPACITY; before the sort: histograms and quanta
    float* score = (float*)(keys + CAPACITY);        // CAPACITY
    u32* entry = (u32*)(score + CAPACITY);           // CAPACITY
    u32* dominating = entry + CAPACITY;              // CAPACITY; after the search: order
    float* lp = (float*)(dominating + CAPACITY);     // depths * k
    __shared__ int found, result;
    long long t0=clock64(), tA,tB,tC,tD;

    const int tid = threadIdx.x, threads = blockDim.x, rows = budget + 1;
    const i64 sequence = blockIdx.x;
    const float* own_lp = log_probs + sequence * depths * k;
    i64 allowed = max_depths[sequence];
    const int max_depth = allowed < 0 ? 0 : allowed < depths ? (int)allowed : depths;
    for (int i = tid; i < max_depth * k; i += threads) lp[i] = own_lp[i];
    if (tid == 0) {
        score[0] = 0.0f;
        entry[0] = PACK(0, 0, 0);
        dominating[0] = 1;  // product 1, nothing before it
    }
    __syncthreads();

    tA=clock64();
    float bound = lower_bound_score(lp, k, max_depth, budget, dp_ranks < k ? dp_ranks : k, (int*)keys, (u32*)keys + 3 * BUCKETS,
                                    &result);
    tB=clock64();
    unsigned char* seen = ancestors + sequence * rows * rows;
    if (tid < 32) {
        int n = collect(lp, k, max_depth, budget, bound, score, entry, dominating);
        if (tid == 0) found = n - 1;
    }
    if (threads == 32 || tid >= 32) fill_zero(seen, (i64)rows * rows, threads == 32 ? tid : tid - 32, threads == 32 ? 32 : threads - 32);
    __syncthreads();

    int n = found; tC=clock64();
    u32* order = dominating;
    if (n < 0 || (n < budget && bound > NEG_INF)) {
        if (tid == 0) {
            u32* heap = (u32*)keys;
            n = heap_search(lp, k, max_depth, budget, score, entry, heap);
            for (int i = 0; i < n; i++) order[i] = heap[2048 + i];
            result = n;  // not `found`: other threads may still be reading that
        }
        __syncthreads();
        n = result;
    } else if (n <= 256) {
        sort_small(score, entry, n, order);
    } else {
        sort_large(score, entry, n, keys, order);
    }

    tD=clock64(); int nf=n;
    if (n > budget) n = budget;
    u32* row_of = (u32*)keys;
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
    __syncthreads(); if(tid==0){scores[out]=tA-t0;scores[out+1]=tB-tA;scores[out+2]=tC-tB;scores[out+3]=tD-tC;scores[out+4]=clock64()-tD;scores[out+5]=nf;scores[out+6]=bound;}
}
