// c += a b of one warpgroup: a are 64 rows, b ROWS rows of 16 numbers, both in shared memory under the 128-byte swizzle.
// A thread holds, by 8 rows of b, rows 2q and 2q + 1 with its row g of its warp's 16 rows of a, then with row g + 8.

#ifndef CUDA_ON_CPU
// Operands 0 and 1 are the descriptors, so that the sums have the same numbers whatever ROWS is.
#define NAMES_1 "%2, %3, %4, %5"
#define NAMES_2 NAMES_1 ", %6, %7, %8, %9"
#define NAMES_3 NAMES_2 ", %10, %11, %12, %13"
#define NAMES_4 NAMES_3 ", %14, %15, %16, %17"
#define NAMES_5 NAMES_4 ", %18, %19, %20, %21"
#define NAMES_6 NAMES_5 ", %22, %23, %24, %25"
#define NAMES_7 NAMES_6 ", %26, %27, %28, %29"
#define NAMES_8 NAMES_7 ", %30, %31, %32, %33"
#define NAMES_9 NAMES_8 ", %34, %35, %36, %37"
#define NAMES_10 NAMES_9 ", %38, %39, %40, %41"
#define NAMES_11 NAMES_10 ", %42, %43, %44, %45"
#define NAMES_12 NAMES_11 ", %46, %47, %48, %49"
#define NAMES_13 NAMES_12 ", %50, %51, %52, %53"
#define NAMES_14 NAMES_13 ", %54, %55, %56, %57"
#define NAMES_15 NAMES_14 ", %58, %59, %60, %61"
#define NAMES_16 NAMES_15 ", %62, %63, %64, %65"
#define NAMES_17 NAMES_16 ", %66, %67, %68, %69"
#define SUMS_1 FOUR(c[0])
#define SUMS_2 SUMS_1, FOUR(c[1])
#define SUMS_3 SUMS_2, FOUR(c[2])
#define SUMS_4 SUMS_3, FOUR(c[3])
#define SUMS_5 SUMS_4, FOUR(c[4])
#define SUMS_6 SUMS_5, FOUR(c[5])
#define SUMS_7 SUMS_6, FOUR(c[6])
#define SUMS_8 SUMS_7, FOUR(c[7])
#define SUMS_9 SUMS_8, FOUR(c[8])
#define SUMS_10 SUMS_9, FOUR(c[9])
#define SUMS_11 SUMS_10, FOUR(c[10])
#define SUMS_12 SUMS_11, FOUR(c[11])
#define SUMS_13 SUMS_12, FOUR(c[12])
#define SUMS_14 SUMS_13, FOUR(c[13])
#define SUMS_15 SUMS_14, FOUR(c[14])
#define SUMS_16 SUMS_15, FOUR(c[15])
#define SUMS_17 SUMS_16, FOUR(c[16])
#define PASTE(a, b) a##b
#define JOIN(a, b) PASTE(a, b)
#define TEXT(a) #a
#define TEXT_OF(a) TEXT(a)
__device__ __forceinline__ void multiply_16(float (&c)[ROWS / 8][4], u64 a, u64 b) {
    asm volatile("{ .reg .pred p; setp.eq.b32 p, 0, 0; "
                 "wgmma.mma_async.sync.aligned.m64n" TEXT_OF(ROWS) "k16.f32.bf16.bf16 "
                 "{" JOIN(NAMES_, EIGHTS) "}, %0, %1, p, 1, 1, 0, 0; }"
                 : "+l"(a), "+l"(b), JOIN(SUMS_, EIGHTS));
}
#endif
