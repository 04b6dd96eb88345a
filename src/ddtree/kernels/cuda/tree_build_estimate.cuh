// About what the last of a tree's best prefixes costs, from counts of prefixes by cost. Included by tree_build.cu.
// RANKS of each depth are counted, a multiple of 32: fewer are faster, more are closer.

#define BUCKETS 64  // of cost, a multiple of 64
#define PAIRS (BUCKETS / 64)  // of buckets a lane
#define COUNT_WORDS (2 * BUCKETS + 1)
#define COUNT_LIMIT 1900u  // of prefixes in a bucket: 33 times as many fit 16 bits
#define OUT_OF_REACH shift_by(BUCKETS)

__device__ int warp_sum(int value) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(FULL, value);
#else
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(FULL, value, step);
    return value;
#endif
}

// Counts of prefixes by cost are kept in 16 bits, two of neighbouring buckets a word, and twice, the second time one
// bucket later, so that the pair which stands any number of buckets before a pair is a word of one of them. Before each
// stand as many zeros: [zeros, counts, zeros, later counts, one word more]. From a pair's word to one so many buckets
// before it:
__device__ int shift_by(int buckets) { return (buckets & 1) * BUCKETS - (buckets >> 1); }

// What `count_by_cost` needs: costs relative to the greedy path, in buckets of 1 / `scale` nats (`shifts`), and the
// greedy path's own to each depth (`bases`). Of the counts the root's is 1, at cost 0.
__device__ void prepare_costs(const float* lp, int k, int max_depth, float scale, u32* counts, int* shifts,
                              int* bases) {
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, warps = THREADS / 32;
    for (int i = tid; i < COUNT_WORDS; i += THREADS)
        counts[i] = i == BUCKETS / 2 ? 1 : i == BUCKETS / 2 + BUCKETS ? 1u << 16 : 0;
    for (int depth = warp; depth < max_depth; depth += warps)
        for (int rank = lane; rank < RANKS; rank += 32) {
            const float cost = rank < k ? (lp[depth * k] - lp[depth * k + rank]) * scale + 0.5f : (float)BUCKETS;
            const bool within = cost < (float)BUCKETS;  // not where it is NaN, the difference of infinities
            shifts[depth * RANKS + rank] = shift_by(within ? (int)cost : BUCKETS);
        }
    if (warp == warps - 1) {
        float greedy = lane < max_depth ? lp[lane * k] : 0.0f;
        for (int step = 1; step < 32; step *= 2) {
            const float other = __shfl_up_sync(FULL, greedy, step);
            if (lane >= step) greedy += other;
        }
        const float base = 0.5f - greedy * scale;
        bases[lane] = lane < max_depth && base < (float)BUCKETS ? (int)base : BUCKETS;
    }
}

__device__ void read_ahead(int4* by, const int* shifts) {  // of 32 ranks
#pragma unroll
    for (int four = 0; four < 8; four++) by[four] = ((const int4*)shifts)[four];
}

// The bucket that holds the last of the `budget` best prefixes, or BUCKETS: counts by cost, convolved depth by depth,
// by one warp. A count stops at COUNT_LIMIT, more than any budget.
__device__ int count_by_cost(int budget, u32* counts, const int* shifts, const int* bases) {
    const int lane = threadIdx.x & 31;
    u32* own = counts + BUCKETS / 2 + lane;  // this lane's pair of buckets; others follow 32 words apart
    int even[PAIRS], odd[PAIRS];  // prefixes of all depths in this lane's buckets
#pragma unroll
    for (int i = 0; i < PAIRS; i++) even[i] = odd[i] = 0;
    const u32* from = own + OUT_OF_REACH;  // where the last depth's prefixes in this lane's buckets are counted
    int4 by[8];
    read_ahead(by, shifts);
    for (int depth = 0, base = bases[0]; base < BUCKETS; depth++) {
        const int next_base = bases[depth + 1];  // BUCKETS after the last
        u32 last[PAIRS], sums[PAIRS] = {};
#pragma unroll
        for (int i = 0; i < PAIRS; i++) last[i] = from[32 * i];
        bool more = true;
        for (int first = 32; more; first += 32) {
#pragma unroll
            for (int four = 0; four < 8; four++)
#pragma unroll
                for (int i = 0; i < PAIRS; i++)
                    sums[i] += own[32 * i + by[four].x] + own[32 * i + by[four].y] + own[32 * i + by[four].z] +
                               own[32 * i + by[four].w];
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                const u32 low = sums[i] & 0xffff, high = sums[i] >> 16;
                sums[i] = (low < COUNT_LIMIT ? low : COUNT_LIMIT) | (high < COUNT_LIMIT ? high : COUNT_LIMIT) << 16;
            }
            more = first < RANKS && shifts[depth * RANKS + first] != OUT_OF_REACH;  // costs rise with the rank
            read_ahead(by, shifts + (more ? depth * RANKS + first : (depth + 1) * RANKS));
        }
        int preceding = 0;  // prefixes of lower depths in the buckets before any of this depth
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const int bucket = 2 * (lane + 32 * i);
            even[i] += last[i] & 0xffff;
            odd[i] += last[i] >> 16;
            preceding += (bucket < base ? even[i] : 0) + (bucket + 1 < base ? odd[i] : 0);
        }
        if (warp_sum(preceding) >= budget) {  // this depth and deeper ones come too late
            from = own + OUT_OF_REACH;
            break;
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            unsigned short* later = (unsigned short*)(own + 32 * i + BUCKETS) + 1;
            own[32 * i] = sums[i];
            later[0] = (unsigned short)sums[i];
            later[1] = (unsigned short)(sums[i] >> 16);
        }
        __syncwarp();
        from = own + shift_by(base);
        base = next_base;
    }
    int found = 0, before_these = 0;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const u32 last = from[32 * i];
        even[i] += last & 0xffff;
        odd[i] += last >> 16;
        int sum = even[i] + odd[i];
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(FULL, sum, step);
            if (lane >= step) sum += other;
        }
        sum += before_these;
        found += __popc(__ballot_sync(FULL, sum - odd[i] < budget)) + __popc(__ballot_sync(FULL, sum < budget));
        before_these = __shfl_sync(FULL, sum, 31);
    }
    return found;
}
