// Runs a CUDA kernel on the CPU, cluster after cluster of blocks, each thread a fiber: enough to test what a kernel
// computes. `__shared__` variables belong to all blocks, so kernels in clusters must keep to dynamic shared memory.
// Luck, from a seed, says which warp goes on and how far, so that a kernel that needs a barrier and has none fails.
#define CUDA_ON_CPU
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <string>
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
struct Fiber {
    ucontext_t start;
    jmp_buf place;  // where it gave way: swapcontext would ask the system each time
    std::vector<char> stack;
    Index3 index;
    int block;
    bool started, done;
    std::function<bool()> may_go_on;  // empty: it may
};
static std::vector<Fiber> fibers;
static int current;
static jmp_buf scheduler;
static std::mt19937 luck;
static std::string fault;  // what ended the grid before its time
static Index3 gridDim, blockDim;
static std::function<void()> body;

static void give_way() {
    if (!_setjmp(fibers[current].place)) _longjmp(scheduler, 1);
}
template <class Test> static void wait_until(Test test) {
    if (test()) return;
    fibers[current].may_go_on = test;
    give_way();
}
static void fail(const std::string& what) {
    fault = what;
    give_way();  // for ever
}
static bool toss() { return luck() & 1; }

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
    int alive, tally;  // threads that have not ended; and those that voted for something
};
static std::vector<Block> blocks;  // of the cluster that runs
static Meeting cluster_meeting;
#define threadIdx (fibers[current].index)
#define own_block (blocks[fibers[current].block])
#define blockIdx (own_block.index)
#define dynamic_shared (own_block.shared)

static void end_meeting(Meeting& meeting) {
    meeting.arrived = 0;
    meeting.generation++;
}
static void meet(Meeting& meeting, int expected) {
    unsigned mine = meeting.generation;
    if (++meeting.arrived == expected) end_meeting(meeting);
    Meeting* place = &meeting;
    wait_until([=] { return place->generation != mine; });
}
static void __syncthreads() { meet(own_block.meeting, own_block.alive); }
static int __syncthreads_count(bool value) {
    __syncthreads();
    own_block.tally = 0;
    __syncthreads();
    own_block.tally += value;
    __syncthreads();
    return own_block.tally;
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

// What the kernel before has yet to write while this one has been started early.
struct LateInput { void* place; std::vector<char> contents; };
static std::vector<LateInput> late_inputs;
extern "C" void hold_back(void* place, size_t bytes) {
    late_inputs.push_back({place, std::vector<char>((char*)place, (char*)place + bytes)});
    memset(place, 0xFF, bytes);  // NaN
}
static void wait_for_inputs() {
    for (auto& input : late_inputs) memcpy(input.place, input.contents.data(), input.contents.size());
    late_inputs.clear();
}

#include "tensor_core_on_cpu.h"

static void enter() {
    body();
    fibers[current].done = true;
    Block& block = own_block;  // threads that have ended are not waited for, nor may a block that has be read
    block.alive--;
    if (block.alive == 0) block.shared.assign(block.shared.size(), (char)0xFF);
    else if (block.meeting.arrived == block.alive) end_meeting(block.meeting);
    give_way();
}
static bool go_on(int thread) {
    Fiber& fiber = fibers[thread];
    if (fiber.done || fiber.may_go_on && !fiber.may_go_on()) return false;
    fiber.may_go_on = nullptr;
    current = thread;
    if (!_setjmp(scheduler)) {
        if (fiber.started) _longjmp(fiber.place, 1);
        fiber.started = true;
        setcontext(&fiber.start);
    }
    return true;
}
// Lets every thread of a warp go on until it has to wait, so often as `turns` says or until none can.
static bool go_on_in_warp(int first, int last, int turns) {
    bool any = false;
    for (bool moved = true; moved && turns > 0 && fault.empty(); turns--) {
        moved = false;
        int size = last - first, start = luck() % size;
        for (int i = 0; i < size && fault.empty(); i++) moved |= go_on(first + (start + i) % size);
        any |= moved;
    }
    return any;
}
static void prepare_cluster(int first, int cluster, int threads, int shared_bytes) {
    blocks.clear();
    blocks.resize(cluster);
    fibers.resize(threads * cluster);
    cluster_meeting = {};
    for (int i = 0; i < cluster; i++) {
        int at = first + i;
        blocks[i].index = {at % gridDim.x, at / gridDim.x % gridDim.y, at / (gridDim.x * gridDim.y)};
        blocks[i].shared.assign(shared_bytes + 16, (char)0xFF);  // NaN
        blocks[i].alive = threads;
    }
    for (int i = 0; i < threads * cluster; i++) {
        Fiber& fiber = fibers[i];
        fiber.started = fiber.done = false;
        fiber.may_go_on = nullptr;
        fiber.index = {i % threads, 0, 0};
        fiber.block = i / threads;
        fiber.stack.resize(64 * 1024);
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = fiber.stack.data();
        fiber.start.uc_stack.ss_size = fiber.stack.size();
        fiber.start.uc_link = nullptr;
        makecontext(&fiber.start, enter, 0);
    }
}
// Until every thread has ended or none can go on, which is a fault.
static void run_cluster(int threads) {
    int warps = (threads + 31) / 32, all = warps * (int)blocks.size();
    auto left = [] {
        int n = 0;
        for (auto& block : blocks) n += block.alive;
        return n;
    };
    while (left() > 0 && fault.empty()) {
        bool any = false;
        int start = luck() % all, turns = 1 << luck() % 12;
        for (int i = 0; i < all && !any; i++) {
            int at = (start + i) % all, block = at / warps, first = at % warps * 32;
            int last = first + 32 < threads ? first + 32 : threads;
            any = go_on_in_warp(block * threads + first, block * threads + last, turns);
        }
        if (!any)
            for (auto& fiber : fibers)
                if (!fiber.done && fault.empty())
                    fault = "thread " + std::to_string(fiber.index.x) + " of block " +
                            std::to_string(blocks[fiber.block].index.x) + " waits for ever";
    }
}
// What went wrong, or nothing.
static const char* run_grid(Index3 grid, int threads, int shared_bytes, int cluster, int seed,
                            std::function<void()> kernel) {
    body = kernel;
    gridDim = grid;
    blockDim = {threads, 1, 1};
    luck.seed(seed);
    fault.clear();
    for (int first = 0; first < grid.x * grid.y * grid.z && fault.empty(); first += cluster) {
        prepare_cluster(first, cluster, threads, shared_bytes);
        under_way.assign(threads * cluster, {});
        late_copies.clear();
        run_cluster(threads);
    }
    if (!late_inputs.empty() && fault.empty()) fault = "no thread waited for its inputs";
    wait_for_inputs();
    return fault.empty() ? nullptr : fault.c_str();
}
