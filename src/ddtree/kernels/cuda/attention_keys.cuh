// The keys that a key group goes through: where they lie, how they get into its stages, and which of them a row sees.
// Part of tree_attention.cu, which says what the macros are.

#if WIDE
typedef TensorMap Cache;
#else
typedef const bf16* Cache;
#endif

// The keys that a group goes through, `steps` steps of KEYS from position `begin` on, and where they lie.
struct Stretch {
    const i64* table;
    int page_shift, begin, end, steps;
    __device__ __forceinline__ int left(int step) const { return end - begin - step * KEYS; }
    // The slot of a key of a step; 0 behind the last. 16 keys share a page.
    __device__ __forceinline__ int slot(int step, int key) const {
        const int position = begin + step * KEYS + key;
        if (step >= steps || position >= end) return 0;
        return ((int)table[position >> page_shift] << page_shift) + (position & ((1 << page_shift) - 1));
    }
};

#if WIDE
struct Barriers { u64 full[2][STAGES], free[2][STAGES]; };  // of a key group: of keys, and of values

// Brings one of a group's caches, keys or values, into its stages by the copy engine: the work of one warp.
struct Filler {
    const Cache& cache;
    const Stretch& stretch;
    u8* to;
    u64 *full, *free;
    int column, slots;  // a lane holds the slot of 16 keys, the warp those of 8 steps
    __device__ __forceinline__ void bring(int step) {
        const int lane = threadIdx.x % 32, lanes = KEYS / 16, stage = step % STAGES;
        const int box_keys = min(1 << stretch.page_shift, KEYS);
        const int there = min(stretch.left(step) + box_keys - 1 & -box_keys, KEYS);
        if (step % (32 / lanes) == 0) slots = stretch.slot(step + lane / lanes, lane % lanes * 16);
        const int slot = __shfl_sync(FULL, slots, step * lanes % 32 + lane % lanes);
        if (lane == 0) {
            if (step >= STAGES) await_phase(free + stage, step / STAGES - 1 & 1);
            expect_bytes(full + stage, there * HEAD_DIM * 2);
        }
        __syncwarp();
        if (lane * 16 < there && lane * 16 % box_keys == 0)
#pragma unroll
            for (int half = 0; half < HEAD_DIM / 64; half++)
                copy_box(to + stage * (2 * STEP_BYTES) + half * (KEYS * 128) + lane * 2048, cache, column + half * 64,
                         slot, full + stage, read_often());
        __syncwarp();
    }
};

// Zeros in place of a step's values behind the last: a page may hold anything there, and 0 * NaN is NaN.
__device__ __forceinline__ void clear_values(u8* values, int from, int group) {
    const int thread = threadIdx.x % GROUP_THREADS;
    for (int i = from * PIECES + thread; i < KEYS * PIECES; i += GROUP_THREADS)
        *(uint4*)(values + place_of(i / PIECES, i % PIECES)) = uint4{0, 0, 0, 0};
    publish_copies();
    meet_group(group, GROUP_THREADS);
}
#else
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
#endif

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
