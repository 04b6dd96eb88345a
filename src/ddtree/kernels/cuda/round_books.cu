// The books of a round: where rows stand, what a commit moves, and the taps that are kept.

typedef unsigned short u16;
typedef long long i64;

// Block (row, sequence), one thread a rotated pair of numbers.
extern "C" __global__ void place_rows(const i64* base, const i64* depths, const i64* valid, const i64* block_table,
                                      const float* frequencies, i64* slots, float* cos_out, float* sin_out, int rows,
                                      int table_stride, int page_tokens, int half, int per_row, float scale) {
    const int row = blockIdx.x, sequence = blockIdx.y, pair = threadIdx.x;
    const i64 place = (i64)sequence * rows + row, first = base[sequence];
    if (pair == 0) {
        const i64 token = first + row;
        const bool kept = !valid || row < valid[sequence];
        const i64 page = kept ? block_table[(i64)sequence * table_stride + token / page_tokens] : 0;
        slots[place] = kept ? page * page_tokens + token % page_tokens : 0;
    }
    if (pair < half) {
        const float angle = (float)(first + depths[place]) * frequencies[per_row ? place * half + pair : pair];
        cos_out[place * half + pair] = cosf(angle) * scale;
        sin_out[place * half + pair] = sinf(angle) * scale;
    }
}

// One block a sequence, one thread a step of the path.
extern "C" __global__ void advance(const i64* path_rows, const i64* accepted, const i64* tokens, const i64* next_roots,
                                   const i64* row_slots, const i64* block_table, const i64* seats, i64* committed,
                                   i64* roots, i64* pending, i64* source, i64* target, i64* packed, int steps, int rows,
                                   int table_stride, int page_tokens) {
    const int sequence = blockIdx.x, step = threadIdx.x;
    const i64 seat = seats[sequence], n = accepted[sequence], first = committed[seat];
    if (step < steps) {
        const i64 place = (i64)sequence * steps + step, token = first + step;
        source[place] = row_slots[(i64)sequence * rows + path_rows[place]];
        target[place] = step <= n ? block_table[(i64)sequence * table_stride + token / page_tokens] * page_tokens +
                                        token % page_tokens
                                  : 0;
        packed[(i64)sequence * (steps + 1) + 1 + step] = tokens[place];
    }
    __syncthreads();  // everybody has read the old length
    if (step == 0) {
        packed[(i64)sequence * (steps + 1)] = n;
        committed[seat] = first + n + 1;
        roots[seat] = next_roots[sequence];
        if (pending) pending[seat] = n + 1;
    }
}

// Block (step, sequence): one row of taps, in pieces of 16 bytes.
extern "C" __global__ void keep_taps(int4* kept, const i64* seats, const int4* taps, const i64* path_rows, int steps,
                                     int kept_steps, int rows, int pieces) {
    const int step = blockIdx.x, sequence = blockIdx.y;
    const i64 row = path_rows[(i64)sequence * steps + step];
    const int4* from = taps + ((i64)sequence * rows + row) * pieces;
    int4* to = kept + (seats[sequence] * kept_steps + step) * pieces;
    for (int i = threadIdx.x; i < pieces; i += blockDim.x) to[i] = from[i];
}

// One block a sequence: its row of the block table, and six numbers: committed, root, prompt tokens, injected, pending, room.
extern "C" __global__ void take_seats(const i64* slots, const i64* block_table, i64* committed, const i64* roots,
                                      const i64* prompt_tokens, i64* pending, const float* sharpness, i64* table,
                                      i64* numbers, float* own_sharpness, int batch, int pages, int spare,
                                      int max_model_len) {
    const int sequence = blockIdx.x;
    const i64 slot = slots[sequence];
    for (int page = threadIdx.x; page < pages; page += blockDim.x)
        table[(i64)sequence * pages + page] = block_table[slot * pages + page];
    if (threadIdx.x == 0) {
        if (slot == spare) committed[slot] = pending[slot] = 0;  // by every block that has it: all write the same
        const i64 taken = slot == spare ? 0 : committed[slot], waiting = slot == spare ? 0 : pending[slot];
        const i64 room = max_model_len - 2 - taken;
        numbers[sequence] = taken;
        numbers[batch + sequence] = roots[slot];
        numbers[2 * batch + sequence] = prompt_tokens[slot];
        numbers[3 * batch + sequence] = taken - waiting;
        numbers[4 * batch + sequence] = waiting;
        numbers[5 * batch + sequence] = room < 0 ? 0 : room;
        own_sharpness[sequence] = sharpness[slot];
    }
}

// Block (row, sequence): the row of the table that its token names.
extern "C" __global__ void embed_rows(const int4* table, const i64* tokens, int4* out, int rows, int given, int filler,
                                      int pieces) {
    const int row = blockIdx.x, sequence = blockIdx.y;
    const i64 token = row < given ? tokens[(i64)sequence * given + row] : filler;
    for (int i = threadIdx.x; i < pieces; i += blockDim.x)
        out[((i64)sequence * rows + row) * pieces + i] = table[token * pieces + i];
}

// Copies numbers to memory of the host, in which the device writes as in its own.
extern "C" __global__ void hand_over(const i64* from, i64* to, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = from[i];
}
