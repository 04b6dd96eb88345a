// What all products by warpgroups (wgmma) have in common: how they name operands in shared memory, and how they are
// begun, closed and awaited. Tests bring their own versions for the CPU.

#ifndef CUDA_ON_CPU
#define FOUR(x) "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
// Matrix descriptor: 128-byte swizzle, 1024 bytes from 8 rows to the next 8; `across` bytes to the next 64 columns.
__device__ __forceinline__ u64 describe(const u8* place, int across = 16) {
    return (u64)(shared_address(place) >> 4 & 0x3fff) | (u64)(across >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}
// Holds the compiler from touching sums while products are under way.
template <int N> __device__ __forceinline__ void hold(float (&c)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++) asm volatile("" : FOUR(c[n])::"memory");
}
// Products are under way until they are awaited: neither sums nor left operands may be touched meanwhile. They end in
// the order in which they were closed.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void close_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
#endif
