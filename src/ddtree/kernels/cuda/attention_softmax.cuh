// The softmax of one step, with what it changes of the steps before. Part of tree_attention.cu, which says what the
// macros are.

// The weights of a step's scores, in their place; what the lane's rows have seen so far changes with them: the
// softmax's base (some earlier maximum that no score exceeds by more than LEEWAY, so that it seldom moves) and the
// lane's share of the weights' sum. `shrink` tells how much older sums shrink; true if they do.
template <bool MASKED>
__device__ __forceinline__ bool soften(float (&s)[ROWS_16][KEYS / 8][4], const u32 (&visible)[ROWS_16][2][KEYS / 16],
                                       float (&largest)[ROWS_16][2], float (&weight)[ROWS_16][2],
                                       float (&shrink)[ROWS_16][2], float scale_log2) {
    const int t = threadIdx.x % 4;
    bool moved = false;
#pragma unroll
    for (int i = 0; i < ROWS_16; i++) {
        float top[2][2], sum[2][2] = {}, base[2];  // by half of the rows and even or odd key: shorter chains
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float& score = s[i][n][e];
                if (MASKED && !(visible[i][e / 2][n / 2] >> (n % 2 * 8 + t * 2 + e % 2) & 1)) score = NEG_INF;
                top[e / 2][e % 2] = n == 0 ? score : fmaxf(top[e / 2][e % 2], score);
            }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float most = fmaxf(top[half][0], top[half][1]);
            most = fmaxf(most, __shfl_xor_sync(FULL, most, 1));
            most = fmaxf(most, __shfl_xor_sync(FULL, most, 2)) * scale_log2;
            const bool moves = most > largest[i][half] + LEEWAY;
            shrink[i][half] = moves ? power_of_2(largest[i][half] - most) : 1.0f;
            if (moves) largest[i][half] = most;
            moved |= moves;
            base[half] = largest[i][half] == NEG_INF ? 0.0f : largest[i][half];  // nothing seen yet: no NaN
        }
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                s[i][n][e] = power_of_2(s[i][n][e] * scale_log2 - base[e / 2]);
                sum[e / 2][e % 2] += s[i][n][e];
            }
#pragma unroll
        for (int half = 0; half < 2; half++)
            weight[i][half] = weight[i][half] * shrink[i][half] + (sum[half][0] + sum[half][1]);
    }
    return __any_sync(FULL, moved);
}

__device__ __forceinline__ void scale_rows(float (&acc)[ROWS_16][PIECES][4], const float (&by)[ROWS_16][2]) {
#pragma unroll
    for (int i = 0; i < ROWS_16; i++)
#pragma unroll
        for (int n = 0; n < PIECES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) acc[i][n][e] *= by[i][e / 2];
}

// Weights as left operands.
__device__ __forceinline__ void pack_weights(u32 (&p)[KEYS / 16][ROWS_16][4], const float (&s)[ROWS_16][KEYS / 8][4]) {
#pragma unroll
    for (int j = 0; j < KEYS / 16; j++)
#pragma unroll
        for (int i = 0; i < ROWS_16; i++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                p[j][i][e] = pack_bf16(s[i][2 * j + e / 2][e % 2 * 2], s[i][2 * j + e / 2][e % 2 * 2 + 1]);
}
