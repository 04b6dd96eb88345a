// What trees promised and held by budget; a block for a sequence, a thread for a depth, one more for the accepted path.

typedef long long i64;

#define UNIT 16777216.0f  // ddtree.kernels.forecast.UNIT

extern "C" __global__ void forecast(const float* scores, const i64* depths, const i64* path, const i64* accepted,
                                    i64* told, int rows, int steps, int n_cuts, int n_depths, int cut0, int cut1,
                                    int cut2, int cut3, int cut4, int cut5, int cut6, int cut7) {
    const int cuts[8] = {cut0, cut1, cut2, cut3, cut4, cut5, cut6, cut7};
    const int sequence = blockIdx.x, depth = threadIdx.x;
    if (depth > n_depths) return;
    const float* own_scores = scores + (i64)sequence * rows;
    const i64* own_depths = depths + (i64)sequence * rows;
    const i64* own_path = path + (i64)sequence * steps;
    i64* out = told + (i64)sequence * n_cuts * (n_depths + 1) + depth;
    const int length = (int)accepted[sequence];
    float sum = 0.0f;
    int row = 1;
#pragma unroll
    for (int cut = 0; cut < 8; cut++) {
        if (cut >= n_cuts) break;
        if (depth < n_depths) {
            for (; row <= cuts[cut] && row < rows; row++)
                if (own_depths[row] == depth + 1) sum += expf(own_scores[row]);
            out[cut * (n_depths + 1)] = (i64)(sum * UNIT);
        } else {
            int held = 0;
            for (int step = 1; step <= length; step++) held += own_path[step] <= cuts[cut];
            out[cut * (n_depths + 1)] = held;
        }
    }
}
