// What trees promised and held by budget, behind what the round tells anyway; a block for a sequence. A thread adds up
// one depth (or, last, the accepted nodes) over the nodes between two cuts, then the sums of all cuts up to its own.

typedef long long i64;

#define UNIT 16777216.0f  // ddtree.kernels.forecast.UNIT
#define CUTS 8
#define MOST_ROWS 1025
#define MOST_DEPTHS 63

extern "C" __global__ void forecast(const float* scores, const i64* depths, const i64* path, const i64* accepted,
                                    const i64* packed, i64* told, int rows, int steps, int n_packed, int n_cuts,
                                    int n_depths, int cut0, int cut1, int cut2, int cut3, int cut4, int cut5, int cut6,
                                    int cut7) {
    __shared__ float probability[MOST_ROWS], sums[CUTS * (MOST_DEPTHS + 1)];
    __shared__ unsigned char depth_of[MOST_ROWS];
    __shared__ int taken[MOST_DEPTHS + 1];
    const int cuts[CUTS] = {cut0, cut1, cut2, cut3, cut4, cut5, cut6, cut7};
    const int sequence = blockIdx.x, tid = threadIdx.x, threads = blockDim.x, columns = n_depths + 1;
    const int band = tid / columns, depth = tid % columns;
    int from = 0, to = 0, last = 0;
#pragma unroll
    for (int i = 0; i < CUTS; i++) {
        if (i == band) to = cuts[i];
        if (i == band - 1) from = cuts[i];
        if (i < n_cuts) last = cuts[i];
    }
    if (last > rows - 1) last = rows - 1;
    const int length = (int)accepted[sequence];
    for (int row = 1 + tid; row <= last; row += threads) {
        probability[row] = expf(scores[(i64)sequence * rows + row]);  // 0 for dead rows
        depth_of[row] = (unsigned char)depths[(i64)sequence * rows + row];
    }
    for (int step = 1 + tid; step <= length; step += threads) taken[step] = (int)path[(i64)sequence * steps + step];
    i64* out = told + (i64)sequence * (n_packed + n_cuts * columns);
    for (int i = tid; i < n_packed; i += threads) out[i] = packed[(i64)sequence * n_packed + i];
    __syncthreads();
    float sum = 0.0f;
    if (band < n_cuts && depth < n_depths) {
        if (to > last) to = last;
#pragma unroll 8
        for (int row = from + 1; row <= to; row++) sum += depth_of[row] == depth + 1 ? probability[row] : 0.0f;
    } else if (band < n_cuts) {
        for (int step = 1; step <= length; step++) sum += from < taken[step] && taken[step] <= to ? 1.0f : 0.0f;
    }
    if (band < n_cuts) sums[tid] = sum;
    __syncthreads();
    if (band >= n_cuts) return;
    sum = 0.0f;
    for (int i = 0; i <= band; i++) sum += sums[i * columns + depth];
    out[n_packed + tid] = depth < n_depths ? (i64)(sum * UNIT) : (i64)sum;
}
