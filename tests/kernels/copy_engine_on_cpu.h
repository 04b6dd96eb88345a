// What copy_engine.cuh, warpgroups.cuh and warpgroup_products.cuh do, in plain C++ for fibers. Half of the copies are there at once, so
// that a kernel that fills too soon overwrites what is still read; the others only while some thread waits, one at a
// time in any order, so that a kernel that does not wait reads what was there before.

#define __grid_constant__
typedef unsigned long long Wide;
struct float4 { float x, y, z, w; };

struct TensorMap {  // as CpuDriver in cuda_on_cpu.py lays it out, in place of the driver's secret
    const char* start;
    Wide numbers, rows, row_bytes;  // numbers of two bytes
    unsigned box_numbers, box_rows, swizzle, filler;
    Wide rest[10];
};
struct Barrier { unsigned short arrivals, missing; int bytes_and_phase; };  // bytes awaited, twice, plus the phase
static_assert(sizeof(TensorMap) == 128 && sizeof(Barrier) == 8);

static unsigned char* align_1024(unsigned char* place) { return place + (-(uintptr_t)place & 1023); }
// Addresses are counted from the block's first aligned byte: the swizzle goes by their bits.
static unsigned char* shared_start(int block) { return align_1024((unsigned char*)blocks[block].shared.data()); }
static unsigned shared_address(const void* place) {
    return (unsigned)((const unsigned char*)place - shared_start(fibers[current].block));
}
static unsigned swizzle_128(unsigned address) { return address ^ (address >> 7 & 7) << 4; }

static void end_phase_if_done(Barrier& barrier) {
    if (barrier.missing == 0 && barrier.bytes_and_phase >> 1 == 0) {
        barrier.bytes_and_phase ^= 1;
        barrier.missing = barrier.arrivals;
    }
}
static void make_barrier(Wide* barrier, int arrivals) {
    *(Barrier*)barrier = {(unsigned short)arrivals, (unsigned short)arrivals, 0};
}
static void publish_barriers() {}
static void arrive_once(Barrier& barrier) {
    if (barrier.missing == 0) fail("one arrival too many");
    barrier.missing--;
    end_phase_if_done(barrier);
}
static void expect_bytes(Wide* barrier, int bytes) {
    ((Barrier*)barrier)->bytes_and_phase += 2 * bytes;
    arrive_once(*(Barrier*)barrier);
}
static void arrive(Wide* barrier) {
    arrive_once(*(Barrier*)barrier);
    give_way();  // whoever waited may be faster
}
static void await_phase(Wide* place, int parity) {
    Barrier* barrier = (Barrier*)place;
    auto is_over = [=] { return (barrier->bytes_and_phase & 1) != parity; };
    while (!is_over()) {
        wait_until([=] { return is_over() || !late_copies.empty(); });
        if (is_over()) return;
        std::swap(late_copies[luck() % late_copies.size()], late_copies.back());
        auto copy = late_copies.back();
        late_copies.pop_back();
        copy();
    }
}
static void fetch_map(const TensorMap&) {}
static Wide read_once() { return 0; }
static Wide read_often() { return 0; }

static void copy_box_now(int block, unsigned at, TensorMap map, int k, int row, Barrier* barrier) {
    if (map.swizzle != 3 || map.box_numbers != 64 || at % 1024)
        fail("a box is not 128 bytes wide, swizzled and aligned");
    for (unsigned r = 0; r < map.box_rows; r++)
        for (unsigned i = 0; i < map.box_numbers; i++) {
            bool there = row + r < map.rows && k + i < map.numbers;
            unsigned short value = 0;
            if (there) memcpy(&value, map.start + (row + r) * map.row_bytes + (k + i) * 2, 2);
            memcpy(shared_start(block) + swizzle_128(at + r * 128 + i * 2), &value, 2);
        }
    barrier->bytes_and_phase -= 2 * (int)(map.box_rows * map.box_numbers * 2);
    end_phase_if_done(*barrier);
}
static void copy_box(unsigned char* to, const TensorMap& map, int k, int row, Wide* barrier, Wide) {
    int block = fibers[current].block;
    unsigned at = shared_address(to);
    auto copy = [=] { copy_box_now(block, at, map, k, row, (Barrier*)barrier); };
    if (toss()) copy();
    else late_copies.push_back(copy);
}
static uint4 load_late(const void* from) { return *(const uint4*)from; }

// The number at (row, k) of the operand that a descriptor names: 8 rows are 1024 bytes in the 128-byte swizzle, which
// is by address bits.
static float operand(Wide descriptor, int row, int k) {
    unsigned start = (descriptor & 0x3fff) << 4, from_8_to_8 = (descriptor >> 32 & 0x3fff) << 4;
    if (descriptor >> 62 != 1) fail("the swizzle is not that of 128 bytes");
    unsigned at = swizzle_128(start + row / 8 * from_8_to_8 + row % 8 * 128 + k * 2);
    unsigned short bits;
    memcpy(&bits, shared_start(fibers[current].block) + at, 2);
    return half_of(bits, 0);
}
static Wide describe(const unsigned char* place) {
    return (Wide)(shared_address(place) >> 4 & 0x3fff) | 1ull << 16 | (Wide)(1024 >> 4) << 32 | 1ull << 62;
}
template <int N> static void multiply_16(float (&c)[N][4], Wide a, Wide b) {
    int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    multiply_later([=, &c] {
        for (int upper = 0; upper < 2; upper++)
            for (int k = 0; k < 16; k++) {
                float weight = operand(a, 16 * warp + 8 * upper + g, k);
                for (int n = 0; n < N; n++)
                    for (int i = 0; i < 2; i++) c[n][2 * upper + i] += weight * operand(b, 8 * n + 2 * q + i, k);
            }
    });
}
template <int N> static void hold(float (&)[N][4]) {}
static void begin_products() {}
