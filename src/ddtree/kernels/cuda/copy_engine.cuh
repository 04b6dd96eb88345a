// Tiles of a matrix that the copy engine brings into shared memory, and the barriers that say when they are there and
// when their place is free again. Tests bring their own versions for the CPU.

#ifndef CUDA_ON_CPU
struct __align__(64) TensorMap { u64 words[16]; };  // made by the driver: where a matrix lies and what a box of it is

__device__ __forceinline__ void make_barrier(u64* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// Lets the copy engine see barriers that this thread has made.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Arrives, and has the barrier wait for so many bytes as well.
__device__ __forceinline__ void expect_bytes(u64* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}
// Waits for the end of the barrier's phase of this parity. With PATIENCE_MS a wait that does not end ends the program.
__device__ __forceinline__ void await_phase(u64* barrier, int parity) {
#ifdef PATIENCE_MS
    const u64 start = nanoseconds();
#endif
    u32 done = 0;
    while (true) {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
                     "selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
        if (done) return;
#ifdef PATIENCE_MS
        if (nanoseconds() - start > PATIENCE_MS * 1000000ull) asm volatile("trap;");
#endif
    }
}
__device__ __forceinline__ void fetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// What is read once shall not push out of the L2 cache what all blocks read.
__device__ __forceinline__ u64 read_once() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ u64 read_often() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// The box at (k, row), 128 bytes a row, swizzled; its bytes count at `barrier`.
__device__ __forceinline__ void copy_box(u8* to, const TensorMap& map, int k, int row, u64* barrier, u64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3}], [%4], %5;"
                 :
                 : "r"(shared_address(to)), "l"(&map), "r"(k), "r"(row), "r"(shared_address(barrier)), "l"(policy)
                 : "memory");
}
__device__ __forceinline__ u8* align_1024(u8* place) { return place + (-shared_address(place) & 1023); }
// Read past L1, which may hold what stood there before this kernel's wait.
__device__ __forceinline__ uint4 load_late(const void* from) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}
#endif
