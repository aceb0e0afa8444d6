// Merges results of the same queries on different tokens, for any number of parts, in order.
//
//   out = sum_i w_i out_i / sum_i w_i,   lse = max + ln sum_i w_i,   w_i = exp(lse_i - max)
//
// Macro: OUT_TYPE 0 f16, 1 bf16, 2 f32.
#include "ptx.cuh"

#if OUT_TYPE == 2
typedef float Out;
#else
typedef u16 Out;
#endif

constexpr int THREADS = 128;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

// sums  f32 [parts][rows][head_dim];  logs f32 [parts][rows], natural logarithms, minus infinity for a part without
// tokens
// out   [rows][head_dim];  lse [rows], may be null. A row without tokens in any part gets zeros and lse minus infinity.
// Grid: one thread per value of `out`, 128 per block.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_merge(const float* __restrict__ sums, const float* __restrict__ logs, Out* __restrict__ out,
                    float* __restrict__ lse, u32 parts, u32 rows, u32 head_dim) {
    const u64 item = static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x;
    const u64 items = static_cast<u64>(rows) * head_dim;
    if (item >= items) return;
    const u64 row = item / head_dim;
    const float none = __int_as_float(0xff800000);
    float highest = none;
    for (u32 i = 0; i < parts; ++i) highest = fmaxf(highest, logs[i * static_cast<u64>(rows) + row]);
    float sum = 0.0f, total = 0.0f;
    for (u32 i = 0; i < parts; ++i) {
        const float log = logs[i * static_cast<u64>(rows) + row];
        if (log == none) continue;
        // NaN in a part makes the result NaN.
        const float weight = exp2_approx((log - highest) * LOG2_E);
        sum = fmaf(weight, sums[i * items + item], sum);
        total += weight;
    }
    const float joined = total == 0.0f ? 0.0f : sum / total;
#if OUT_TYPE == 0
    out[item] = f16_of_float(joined);
#elif OUT_TYPE == 1
    out[item] = bf16_of_float(joined);
#else
    out[item] = joined;
#endif
    if (lse != nullptr && item % head_dim == 0) lse[row] = total == 0.0f ? none : highest + log2_approx(total) * LN_2;
}
