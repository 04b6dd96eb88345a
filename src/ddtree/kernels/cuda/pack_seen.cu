// The rows that each row of a pass sees, as bits: made once, read by every layer's attention.

typedef unsigned int u32;
typedef unsigned char u8;
typedef long long i64;

#define FULL 0xffffffffu

// Packs the bool matrix [batch * rows, rows] into bits, 32 columns a word: a warp makes a word.
extern "C" __global__ void __launch_bounds__(256) pack_seen(const u8* sees, u32* seen, int total, int rows) {
    const int words = (rows + 31) / 32, word = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (word >= total) return;
    const int column = word % words * 32 + lane;
    u32 bits = __ballot_sync(FULL, column < rows && sees[(i64)(word / words) * rows + min(column, rows - 1)] != 0);
    if (lane == 0) seen[word] = bits;
}
