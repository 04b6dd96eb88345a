// Key groups' parts of the same rows put together. Part of tree_attention.cu, which says what the macros are.

// N parts of four columns of a row as one, in the order of the parts.
struct Part { float4 sum; float2 weight; };  // weight: the softmax's base, and the weights' sum
template <int N> __device__ __forceinline__ Part put_together(const Part (&parts)[N]) {
    float top = NEG_INF;
#pragma unroll
    for (int i = 0; i < N; i++) top = fmaxf(top, parts[i].weight.x);
    const float base = top == NEG_INF ? 0.0f : top;
    Part all = {{0.0f, 0.0f, 0.0f, 0.0f}, {top, 0.0f}};
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float share = power_of_2(parts[i].weight.x - base);
        all.sum.x += parts[i].sum.x * share;
        all.sum.y += parts[i].sum.y * share;
        all.sum.z += parts[i].sum.z * share;
        all.sum.w += parts[i].sum.w * share;
        all.weight.y += parts[i].weight.y * share;
    }
    return all;
}

// The block's threads put N parts together, item by item (four columns of a row) from `first` up to `last`; BATCH items
// at a time, so that the loads of one do not wait for another's.
template <int N, int BATCH, class Take, class Give>
__device__ __forceinline__ void put_items_together(int first, int last, Take take, Give give) {
    for (int start = first + threadIdx.x; start < last; start += BATCH * THREADS) {
        Part parts[BATCH][N];
#pragma unroll
        for (int b = 0; b < BATCH; b++)
#pragma unroll
            for (int i = 0; i < N; i++)
                if (start + b * THREADS < last) parts[b][i] = take(start + b * THREADS, i);
#pragma unroll
        for (int b = 0; b < BATCH; b++)
            if (start + b * THREADS < last) give(start + b * THREADS, put_together(parts[b]));
    }
}
