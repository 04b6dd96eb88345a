// The two products of attention, rows with a step's keys and weights with its values: by single warps, or (WIDE) by
// warpgroups. Part of tree_attention.cu, which says what the macros are.

// Where a step's 16-byte pieces lie: 64 columns of all keys, then the other 64; 128 bytes a key, its pieces swizzled by
// the key's number, so that eight keys' pieces of one column are in different banks (wgmma's 128-byte swizzle).
__device__ __forceinline__ int place_of(int key, int piece) {
    return piece / 8 * (KEYS * 128) + key * 128 + ((piece % 8) ^ (key % 8)) * 16;
}

#if WIDE && !defined(CUDA_ON_CPU)
// The same by warpgroups: four warps' rows against operands read straight from shared memory (sm_90a only).
__device__ __forceinline__ void wide_keys(float (&c)[8][4], const u32 (&a)[4], u64 b, int add) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, 0; "
        "}"
        : FOUR(c[0]), FOUR(c[1]), FOUR(c[2]), FOUR(c[3]), FOUR(c[4]), FOUR(c[5]), FOUR(c[6]), FOUR(c[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
__device__ __forceinline__ void wide_values(float (&c)[16][4], const u32 (&a)[4], u64 b, int add) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0; "
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
        "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
        "%62, %63}, {%64, %65, %66, %67}, %68, p, 1, 1, 1; "
        "}"
        : FOUR(c[0]), FOUR(c[1]), FOUR(c[2]), FOUR(c[3]), FOUR(c[4]), FOUR(c[5]), FOUR(c[6]), FOUR(c[7]),
          FOUR(c[8]), FOUR(c[9]), FOUR(c[10]), FOUR(c[11]), FOUR(c[12]), FOUR(c[13]), FOUR(c[14]), FOUR(c[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
template <int N> __device__ __forceinline__ void hold_operands(u32 (&a)[N][1][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
        asm volatile("" : "+r"(a[n][0][0]), "+r"(a[n][0][1]), "+r"(a[n][0][2]), "+r"(a[n][0][3])::"memory");
}
__device__ __forceinline__ void start_keys(float (&s)[1][8][4], const u32 (&q)[1][HEAD_DIM / 16][4], const u8* keys) {
    hold(s[0]);
    begin_products();
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++)
        wide_keys(s[0], q[0][k], describe(keys + k / 4 * (KEYS * 128) + k % 4 * 32, 16), k > 0);
}
__device__ __forceinline__ void start_values(float (&acc)[1][PIECES][4], const u32 (&p)[4][1][4], const u8* values) {
    hold(acc[0]);
    begin_products();
#pragma unroll
    for (int j = 0; j < 4; j++) wide_values(acc[0], p[j][0], describe(values + j * 2048, KEYS * 128), 1);
}
#else
// Scores of the rows (left operands q) with a step's keys, added to s.
__device__ __forceinline__ void multiply_keys(float (&s)[ROWS_16][KEYS / 8][4],
                                              const u32 (&q)[ROWS_16][HEAD_DIM / 16][4], const u8* keys) {
    const int matrix = threadIdx.x % 32 / 8, row = threadIdx.x % 8;
    u32 b[2][KEYS / 16][4];  // the next operands are on their way while these are multiplied
    auto load = [&](int k) {
#pragma unroll
        for (int j = 0; j < KEYS / 16; j++)
            load_matrices(b[k % 2][j], keys + place_of(j * 16 + matrix / 2 * 8 + row, k * 2 + matrix % 2));
    };
    load(0);
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++) {
        if (k + 1 < HEAD_DIM / 16) load(k + 1);
#pragma unroll
        for (int j = 0; j < KEYS / 16; j++)
#pragma unroll
            for (int i = 0; i < ROWS_16; i++) {
                multiply(s[i][2 * j], q[i][k], b[k % 2][j][0], b[k % 2][j][1]);
                multiply(s[i][2 * j + 1], q[i][k], b[k % 2][j][2], b[k % 2][j][3]);
            }
    }
}

// The weighted values of a step, added to acc; p are the weights as left operands.
__device__ __forceinline__ void multiply_values(float (&acc)[ROWS_16][PIECES][4], const u32 (&p)[KEYS / 16][ROWS_16][4],
                                                const u8* values) {
    const int matrix = threadIdx.x % 32 / 8, row = threadIdx.x % 8;
    const int bunch = 4, bunches = PIECES / 2 / bunch;
    u32 b[2][bunch][4];
    auto load = [&](int at) {
#pragma unroll
        for (int n = 0; n < bunch; n++)
            load_transposed(b[at % 2][n], values + place_of(at / bunches * 16 + matrix % 2 * 8 + row,
                                                            (at % bunches * bunch + n) * 2 + matrix / 2));
    };
    load(0);
#pragma unroll
    for (int at = 0; at < KEYS / 16 * bunches; at++) {
        if (at + 1 < KEYS / 16 * bunches) load(at + 1);
#pragma unroll
        for (int n = 0; n < bunch; n++)
#pragma unroll
            for (int i = 0; i < ROWS_16; i++) {
                const int column = (at % bunches * bunch + n) * 2;
                multiply(acc[i][column], p[at / bunches][i], b[at % 2][n][0], b[at % 2][n][1]);
                multiply(acc[i][column + 1], p[at / bunches][i], b[at % 2][n][2], b[at % 2][n][3]);
            }
    }
}

#ifdef CUDA_ON_CPU  // tests go through the wide steps with these products, each as late as it may be
template <int N> __device__ void hold_operands(u32 (&)[N][1][4]) {}
__device__ void start_keys(float (&s)[ROWS_16][KEYS / 8][4], const u32 (&q)[ROWS_16][HEAD_DIM / 16][4],
                           const u8* keys) {
    multiply_later([&s, &q, keys] {
        for (auto& four : s[0]) four[0] = four[1] = four[2] = four[3] = 0.0f;
        multiply_keys(s, q, keys);
    });
}
__device__ void start_values(float (&acc)[ROWS_16][PIECES][4], const u32 (&p)[KEYS / 16][ROWS_16][4],
                             const u8* values) {
    multiply_later([&acc, &p, values] { multiply_values(acc, p, values); });
}
#endif
#endif
