// Adds the results of each token's experts.
//
// Macros:
//   ELEMENT    F32, F16 or BF16: type of rows
//   OUTPUT     F32, F16 or BF16: type of sums
//   ALIGNED    1: addresses and strides are multiples of 16 bytes. 0: values are read one at a time

#include "ptx.cuh"

constexpr int THREADS = 128;
// Values in a vector of 16 bytes.
constexpr int VECTOR = ELEMENT == F32 ? 4 : 8;
#include "values.cuh"

typedef Type<ELEMENT>::word element_t;
typedef Type<OUTPUT>::word output_t;

// out[t, i] = Σ_j factors[r] · x[r, i] with r = row_of[t, j], in the order of j. Each term is rounded before it is
// added. Indices that no row has are left out. Grid: [tokens, ⌈n / (THREADS · VECTOR)⌉].
//
// x: [rows, n], rows `x_stride` apart; row_of: [tokens, terms]; factors: [rows], or null; out: [tokens, n], rows
// `out_stride` apart
extern "C" __global__ void __launch_bounds__(THREADS)
    sum_experts(const element_t *x, const u32 *row_of, const float *factors, output_t *out, u32 rows, u32 terms, int n,
                u64 x_stride, u64 out_stride) {
    const u64 token = blockIdx.x;
    const int at = (int)(blockIdx.y * THREADS + threadIdx.x) * VECTOR;
    if (at >= n) return;
    float sum[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; i++) sum[i] = 0.0f;
#pragma unroll 4
    for (u32 j = 0; j < terms; j++) {
        const u32 row = row_of[token * terms + j];
        if (row >= rows) continue;
        float term[VECTOR];
        load<ELEMENT>(term, x + row * x_stride, at, n);
        if (factors) {
#pragma unroll
            for (int i = 0; i < VECTOR; i++) term[i] = term[i] * factors[row];
        }
#pragma unroll
        for (int i = 0; i < VECTOR; i++) sum[i] = sum[i] + term[i];
    }
    store<OUTPUT>(sum, out + token * out_stride, at, n);
}
