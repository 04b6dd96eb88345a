// Runs a CUDA kernel on the CPU, cluster after cluster of blocks, each thread a fiber: enough to test what a kernel
// computes. `__shared__` variables belong to all blocks, so kernels in clusters must keep to dynamic shared memory.
#define CUDA_ON_CPU
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n)
#define __shared__ static
#define __forceinline__ inline

struct Index3 { int x, y, z; };
struct int4 { int x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };
struct Fiber { ucontext_t context; std::vector<char> stack; Index3 index; int block; bool done; };
static std::vector<Fiber> fibers;
static int current;
static ucontext_t scheduler;
static Index3 gridDim, blockDim;
static std::function<void()> body;

struct Meeting { int arrived = 0; unsigned generation = 0; };
struct Aligned {  // as dynamic shared memory is
    typedef char value_type;
    template <class> struct rebind { typedef Aligned other; };
    char* allocate(size_t size) { return (char*)aligned_alloc(1024, (size + 1023) / 1024 * 1024); }
    void deallocate(char* place, size_t) { free(place); }
    bool operator==(const Aligned&) const { return true; }
    bool operator!=(const Aligned&) const { return false; }
};
struct Block {
    Index3 index;
    std::vector<char, Aligned> shared;
    Meeting meeting, warp_meeting[32], named_meeting[16];
    uint64_t lanes[32][32];
};
static std::vector<Block> blocks;  // of the cluster that runs
static Meeting cluster_meeting;
#define threadIdx (fibers[current].index)
#define own_block (blocks[fibers[current].block])
#define blockIdx (own_block.index)
#define dynamic_shared (own_block.shared)

static void meet(Meeting& meeting, int expected) {
    unsigned mine = meeting.generation;
    if (++meeting.arrived == expected) {
        meeting.arrived = 0;
        meeting.generation++;
    }
    while (meeting.generation == mine) swapcontext(&fibers[current].context, &scheduler);
}
static int alive() {
    int n = 0;
    for (auto& fiber : fibers) n += !fiber.done && fiber.block == fibers[current].block;
    return n;
}
static void __syncthreads() { meet(own_block.meeting, alive()); }
static int tally;
static int __syncthreads_count(bool value) {
    __syncthreads();
    tally = 0;
    __syncthreads();
    tally += value;
    __syncthreads();
    return tally;
}
static void __syncwarp() { meet(own_block.warp_meeting[threadIdx.x / 32], 32); }
static void __threadfence() {}
template <class T> static T exchange(T value, int lane) {
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    int warp = threadIdx.x / 32;
    own_block.lanes[warp][threadIdx.x % 32] = bits;
    __syncwarp();
    bits = own_block.lanes[warp][lane & 31];
    __syncwarp();
    memcpy(&value, &bits, sizeof(T));
    return value;
}
template <class T> static T __shfl_sync(unsigned, T value, int lane) { return exchange(value, lane); }
template <class T> static T __shfl_xor_sync(unsigned, T value, int mask) { return exchange(value, (threadIdx.x % 32) ^ mask); }
template <class T> static T __shfl_up_sync(unsigned, T value, int by) {
    int lane = threadIdx.x % 32;
    return exchange(value, lane >= by ? lane - by : lane);
}
template <class T> static T __shfl_down_sync(unsigned, T value, int by) {
    int lane = threadIdx.x % 32;
    return exchange(value, lane + by < 32 ? lane + by : lane);
}
static unsigned __ballot_sync(unsigned, bool value) {
    int warp = threadIdx.x / 32;
    own_block.lanes[warp][threadIdx.x % 32] = value;
    __syncwarp();
    unsigned votes = 0;
    for (int lane = 0; lane < 32; lane++) votes |= (unsigned)own_block.lanes[warp][lane] << lane;
    __syncwarp();
    return votes;
}
static int __popc(unsigned value) { return __builtin_popcount(value); }
template <class T> static T atomicAdd(T* place, T value) { T old = *place; *place += value; return old; }
template <class T> static T atomicMax(T* place, T value) { T old = *place; if (value > old) *place = value; return old; }
template <class T> static T max(T a, T b) { return a > b ? a : b; }
static float __int_as_float(unsigned bits) { float f; memcpy(&f, &bits, 4); return f; }
static float __uint_as_float(unsigned bits) { return __int_as_float(bits); }
static unsigned __float_as_uint(float f) { unsigned bits; memcpy(&bits, &f, 4); return bits; }
struct float2 { float x, y; };
static float2 make_float2(float x, float y) { return {x, y}; }
static float rsqrtf(float x) { return 1.0f / sqrtf(x); }

// What layer_products.cu does by instructions that C++ has no name for.
static unsigned bf16_bits(float f) {
    unsigned bits = __float_as_uint(f);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static unsigned pack_bf16(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }
static float half_of(unsigned both, int which);
static unsigned multiply_pairs(unsigned a, unsigned b) {
    return pack_bf16(half_of(a, 0) * half_of(b, 0), half_of(a, 1) * half_of(b, 1));
}
static float half_of(unsigned both, int which) { return __uint_as_float(which ? both & 0xffff0000u : both << 16); }
template <class T> static T load_fresh(const T* from) { return *from; }
static void let_next_start() {}
static void wait_for_inputs() {}

static void enter() {
    body();
    fibers[current].done = true;
    swapcontext(&fibers[current].context, &scheduler);
}
static void run_grid(Index3 grid, int threads, int shared_bytes, int cluster, std::function<void()> kernel) {
    body = kernel;
    gridDim = grid;
    blockDim = {threads, 1, 1};
    for (int first = 0; first < grid.x * grid.y * grid.z; first += cluster) {
        blocks.resize(cluster);
        fibers.resize(threads * cluster);
        for (int i = 0; i < threads * cluster; i++) {
            int block = first + i / threads;
            blocks[i / threads].index = {block % grid.x, block / grid.x % grid.y, block / (grid.x * grid.y)};
            if (i % threads == 0) blocks[i / threads].shared.assign(shared_bytes + 16, (char)0xFF);  // NaN
            Fiber& fiber = fibers[i];
            fiber.done = false;
            fiber.index = {i % threads, 0, 0};
            fiber.block = i / threads;
            fiber.stack.resize(64 * 1024);
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.data();
            fiber.context.uc_stack.ss_size = fiber.stack.size();
            fiber.context.uc_link = nullptr;
            makecontext(&fiber.context, enter, 0);
        }
        for (int left = threads * cluster; left > 0;) {
            left = 0;
            for (current = 0; current < threads * cluster; current++)
                if (!fibers[current].done) {
                    swapcontext(&scheduler, &fibers[current].context);
                    left += !fibers[current].done;
                }
        }
    }
}

#include "tensor_core_on_cpu.h"
