// Walking a tree by the target's choices, one block a sequence.

typedef long long i64;
#define NEG_INF (__int_as_float(0xff800000))

extern "C" __global__ void walk_tree(const i64* tokens, const i64* parents, const float* scores, const i64* choices,
                                     i64* path, i64* accepted, i64* path_tokens, i64* roots, int rows, int depths) {
    extern __shared__ int shared[];
    int *next = shared, *choice = shared + rows;  // the accepted child of each row; the target's choice after it
    const i64 base = (i64)blockIdx.x * rows;
    for (int row = threadIdx.x; row < rows; row += blockDim.x) {
        next[row] = 0;  // the root is nobody's child
        choice[row] = (int)choices[base + row];
    }
    __syncthreads();
    for (int row = threadIdx.x + 1; row < rows; row += blockDim.x) {
        int parent = (int)parents[base + row];
        // Siblings carry different tokens, so at most one child of a row is accepted.
        if (scores[base + row] > NEG_INF && choice[parent] == (int)tokens[base + row]) next[parent] = row;
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    const i64 out = (i64)blockIdx.x * (depths + 1);
    int row = 0, count = 0;
    for (int step = 0; step <= depths; step++) {
        path[out + step] = row;
        path_tokens[out + step] = choice[row];
        int child = step < depths ? next[row] : 0;
        if (child != 0) {
            row = child;
            count++;
        }
    }
    accepted[blockIdx.x] = count;
    roots[blockIdx.x] = choice[row];
}
