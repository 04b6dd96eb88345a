// A tree put in order and written out. Included by tree_build.cu.

#define BINS 128  // of the sort: four a lane

__device__ void fill_zero(unsigned char* begin, int n, int tid, int threads) {
    int lead = (int)(16 - ((u64)begin & 15) & 15);
    if (lead > n) lead = n;
    const int wide = (n - lead) / 16;
    for (int i = tid; i < lead; i += threads) begin[i] = 0;
    struct alignas(16) Wide { u64 a, b; };
    for (int i = tid; i < wide; i += threads) ((Wide*)(begin + lead))[i] = Wide{0, 0};
    for (int i = lead + wide * 16 + tid; i < n; i += threads) begin[i] = 0;
}

__device__ i64 token_of(u32 prefix, const i64* ids, int k) { return ids[(DEPTH(prefix) - 1) * k + RANK(prefix)]; }

struct Tree {  // where a sequence's goes
    i64 *tokens, *parents, *depths;
    float* scores;
    unsigned char* seen;
    int rows;
};

__device__ void write_row(const Tree& tree, int row, i64 token, i64 parent, i64 depth, float score) {
    unsigned char* line = tree.seen + (i64)row * tree.rows;
    line[row] = 1;
    line[0] = 1;
    tree.tokens[row] = token;
    tree.parents[row] = parent;
    tree.depths[row] = depth;
    tree.scores[row] = score;
}

__device__ void write_node(const Tree& tree, int row, i64 token, const float* score, const u32* entry,
                           const u32* row_of, u32 at) {
    const u32 own = entry[at];
    unsigned char* line = tree.seen + (i64)row * tree.rows;
    for (u32 above = PARENT(own); above != 0; above = PARENT(entry[above])) line[row_of[above]] = 1;
    write_row(tree, row, token, row_of[PARENT(own)], DEPTH(own), score[at]);
}

// Puts entries 1 .. n, at most EACH a thread, in the order of (score, depth, rank tuple) and writes the first `budget`:
// by bins of the score, then by counting within a bin. No entry scores less than `least`; bins are finer towards it, as
// there are more prefixes of worse scores. `bins` are 0 before.
template <int EACH>
__device__ void sort_and_write(const Tree& tree, const i64* ids, int k, const float* score, const u32* entry, int n,
                               int budget, float least, u32* bins, float* binned, u32* members, u32* row_of) {
    const int lane = threadIdx.x & 31, mine = threadIdx.x + 1;
    const float scale = least < -1e-30f ? 1.0f / least : 0.0f;
    float own[EACH];
    i64 token;
    u32 bin[EACH], at[EACH], first[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int i = mine + e * THREADS;
        own[e] = 0.0f, bin[e] = 0;
        if (i > n) continue;
        own[e] = score[i];
        const float part = own[e] * scale, squared = part * part;
        bin[e] = (u32)(squared * squared * (BINS - 0.5f));
        if (bin[e] >= BINS) bin[e] = BINS - 1;
        at[e] = atomicAdd(&bins[bin[e]], 1u);
        if (EACH == 1) token = token_of(entry[i], ids, k);  // asked for before it is known to be needed
    }
    __syncthreads();
    const uint4 filled = ((const uint4*)bins)[lane];  // every warp adds them up for itself
    const u32 four = filled.x + filled.y + filled.z + filled.w;
    u32 sum = four;
    for (int step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(FULL, sum, step);
        if (lane >= step) sum += other;
    }
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int i = mine + e * THREADS;
        first[e] = __shfl_sync(FULL, sum - four, bin[e] / 4);
        for (u32 j = 0; j < 3; j++)
            if (j < bin[e] % 4) first[e] += bins[bin[e] / 4 * 4 + j];
        if (i > n) continue;
        at[e] += first[e];
        binned[at[e]] = own[e];
        members[at[e]] = i;
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int i = mine + e * THREADS;
        if (i > n) continue;
        u32 place = first[e], equals = 0;
        const u32 end = place < (u32)budget ? place + bins[bin[e]] : 0;
        for (u32 j = first[e]; j < end; j += 4)
#pragma unroll
            for (u32 ahead = 0; ahead < 4; ahead++) {
                const float other = j + ahead < end ? binned[j + ahead] : NEG_INF;
                place += other > own[e];
                equals += other == own[e];
            }
        if (equals > 1)
            for (u32 j = first[e]; j < end; j++)
                if (binned[j] == own[e] && j != at[e]) place += before(score, entry, members[j], i);
        at[e] = place;
        if (place < (u32)budget) row_of[i] = place + 1;
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int i = mine + e * THREADS;
        if (i > n || at[e] >= (u32)budget) continue;
        if (EACH > 1) token = token_of(entry[i], ids, k);
        write_node(tree, at[e] + 1, token, score, entry, row_of, i);
    }
}
