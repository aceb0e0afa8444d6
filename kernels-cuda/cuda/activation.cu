// Quantizes activation rows to 8-bit integers: plain rows, their RMSNorm, or silu(gate) · up.
//
// The codes are defined by the CPU kernels' `activation`: per token `s = max |x| / 127`, `a = round(x · (127 / max
// |x|))`, half to even; static `a = clamp(round(x · (1 / s)) + a₀, −128, 127)`; a row that contains NaN or an infinity
// has the scale NaN and codes of zero. For plain rows and silu(gate) · up, results are bit-identical to the CPU's. The
// sum of squares of a norm is added in a different order.
//
// A block processes one row. It reads the row once and keeps it in registers as f32; rows that do not fit are read
// again. Which threads process which values does not depend on the number of rows, so a row's result does not depend on
// the other rows.
//
// Macros:
//   SOURCE     PLAIN, NORM, NORM_RESIDUAL or SILU_MUL
//   ELEMENT    F32, F16 or BF16: type of activations and residual
//   WEIGHT     F32, F16 or BF16: type of the norm's weight
//   STATIC     0: a scale per row. 1: one scale and zero point for all rows
//   GROUP      which sums of codes are computed: 0: per row only; 32, 64, 128: also per group of this many features;
//              1: also per group of `group` features, a multiple of 32
//   ALIGNED    1: addresses and strides are multiples of 16 bytes. 0: values are read one at a time
//   THREADS    per block: a power of two from 64 to 1024
//   HELD       values per thread that are kept in registers: 16 or 32; 0: rows of any width, which are not kept

#include "ptx.cuh"
#include "gates.cuh"

enum { PLAIN, NORM, NORM_RESIDUAL, SILU_MUL };

constexpr bool NORMS = SOURCE == NORM || SOURCE == NORM_RESIDUAL;
constexpr bool ADDS = SOURCE == NORM_RESIDUAL;
constexpr int WARPS = THREADS / 32;
// Values in a vector of 16 bytes.
constexpr int VECTOR = ELEMENT == F32 ? 4 : 8;
// Vectors that a thread keeps in registers.
constexpr int VECTORS = HELD / VECTOR;
constexpr int SEGMENT_LANES = 32 / VECTOR;
// Features whose codes are summed by neighbouring lanes.
constexpr int WIDTH = GROUP > 1 ? GROUP : 32;
// Minimum number of blocks per multiprocessor, which bounds the registers per thread.
constexpr int MIN_BLOCKS = 1024 / THREADS;
// Adding this to a number within ±2²² rounds it half to even; the low bits of the sum are then the integer.
constexpr float ROUNDING = 12582912.0f;
// Rows whose largest magnitude is below this count as zero, since 127 / max |x| could overflow.
constexpr float SMALLEST = 1e-36f;

static_assert(THREADS >= 64 && THREADS <= 1024 && (THREADS & (THREADS - 1)) == 0, "THREADS");
static_assert(GROUP == 0 || GROUP == 1 || GROUP == 32 || GROUP == 64 || GROUP == 128, "GROUP");
static_assert(HELD == 0 || HELD == 16 || HELD == 32, "HELD");

#include "values.cuh"

typedef Type<ELEMENT>::word element_t;
typedef Type<WEIGHT>::word weight_t;

struct Row {
    const element_t *x;
    const element_t *up;
    element_t *residual;
    const weight_t *weight;
    int k;
};

INLINE u32 low_bytes(u32 a, u32 b, u32 c, u32 d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

INLINE void store_rounded(float (&values)[VECTOR], element_t *to, int at, int k) {
    store<ELEMENT>(values, to, at, k);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) values[i] = widen<ELEMENT>(narrow<ELEMENT>(values[i]));
}

// The first read of VECTOR values of the row. A residual is added and stored.
INLINE void first(float (&values)[VECTOR], const Row &row, int at) {
    if (at >= row.k) {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) values[i] = 0.0f;
        return;
    }
    load<ELEMENT>(values, row.x, at, row.k);
    if constexpr (ADDS) {
        float before[VECTOR];
        load<ELEMENT>(before, row.residual, at, row.k);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) values[i] = values[i] + before[i];
        store_rounded(values, row.residual, at, row.k);
    }
    if constexpr (SOURCE == SILU_MUL) {
        float up[VECTOR];
        load<ELEMENT>(up, row.up, at, row.k);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) values[i] = silu(values[i]) * up[i];
    }
}

// For rows that are not kept in registers. A residual was stored by this same thread.
INLINE void again(float (&values)[VECTOR], const Row &row, int at) {
    if constexpr (ADDS) {
        load<ELEMENT>(values, row.residual, at < row.k ? at : row.k, row.k);
    } else {
        first(values, row, at);
    }
}

INLINE void scale_by_norm(float (&values)[VECTOR], const Row &row, int at, float factor) {
    if (at >= row.k) return;
    float weight[VECTOR];
    load<WEIGHT>(weight, row.weight, at, row.k);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) values[i] = values[i] * factor * weight[i];
}

INLINE float square_sum(const float (&values)[VECTOR], float to) {
#pragma unroll
    for (int i = 0; i < VECTOR; i++) to = fmaf(values[i], values[i], to);
    return to;
}

// The bits of magnitudes have the same order as the magnitudes; values that are not finite are above all others.
INLINE u32 largest_of(const float (&values)[VECTOR], u32 to) {
#pragma unroll
    for (int i = 0; i < VECTOR; i++) to = max(to, __float_as_uint(values[i]) & 0x7fffffffu);
    return to;
}

// Reductions of one word per lane over a warp, in one instruction if there is one. `NONE` is the neutral element.
struct Largest {
    static constexpr u32 NONE = 0;
    INLINE static u32 join(u32 word) { return largest_of_lanes(word); }
};
struct WholeSum {
    static constexpr u32 NONE = 0;
    INLINE static u32 join(u32 word) { return (u32)sum_of_lanes((i32)word); }
};
// The order of additions is fixed, and all lanes get bit-identical sums.
struct FloatSum {
    static constexpr u32 NONE = 0;
    INLINE static u32 join(u32 word) {
        float sum = __uint_as_float(word);
#pragma unroll
        for (int apart = 1; apart < 32; apart *= 2) sum = sum + __shfl_xor_sync(ALL_LANES, sum, apart);
        return __float_as_uint(sum);
    }
};

// All lanes get the result.
template <int LANES> INLINE int sum_lanes(int sum) {
#pragma unroll
    for (int apart = 1; apart < LANES; apart *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, apart);
    return sum;
}

// Reduces one word per thread over a block. `slots` has one word per warp.
template <typename How> INLINE u32 join_block(u32 word, u32 *slots) {
    const u32 lane = threadIdx.x % 32;
    word = How::join(word);
    if (lane == 0) slots[threadIdx.x / 32] = word;
    __syncthreads();
    return How::join(lane < WARPS ? slots[lane] : How::NONE);
}

struct Grid {
    float inverse;
    float low;
    float high;
    u32 zero;
    // A mask for codes: all bits set, or 0 if the row is not finite.
    u32 keep;
};

INLINE u32 code(float value, const Grid &grid) {
    float scaled = value * grid.inverse;
    // Clamping before rounding is equivalent, because the bounds are integers. They apply without the zero point.
    if (STATIC) scaled = fminf(fmaxf(scaled, grid.low), grid.high);
    u32 bits = __float_as_uint(scaled + ROUNDING);
    return STATIC ? bits + grid.zero : bits;
}

// Quantizes VECTOR values, stores their codes, and returns the sum of the codes.
INLINE int quantize(const float (&values)[VECTOR], const Grid &grid, u8 *codes, int at, int k) {
    if (at >= k) return 0;
    u32 words[VECTOR / 4];
    int sum = 0;
#pragma unroll
    for (int i = 0; i < VECTOR / 4; i++)
        words[i] = low_bytes(code(values[4 * i], grid), code(values[4 * i + 1], grid), code(values[4 * i + 2], grid),
                             code(values[4 * i + 3], grid)) &
                   grid.keep;
    if (at + VECTOR <= k) {
        if constexpr (VECTOR == 8)
            *(uint2 *)(codes + at) = make_uint2(words[0], words[1]);
        else
            *(u32 *)(codes + at) = words[0];
    } else {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            if (at + i < k)
                codes[at + i] = (u8)(words[i / 4] >> (i % 4 * 8));
            else
                words[i / 4] &= ~(0xffu << (i % 4 * 8));
        }
    }
#pragma unroll
    for (int i = 0; i < VECTOR / 4; i++) sum = add_bytes(words[i], sum);
    return sum;
}

// Sums the codes of a group that is a run of neighbouring lanes, else those of a segment of 32 features. All lanes must
// call this.
INLINE void add_up(int sum, int at, int k, int *sums, int *segments) {
    if constexpr (GROUP > 1) {
        constexpr int LANES = WIDTH / VECTOR;
        sum = sum_lanes<LANES>(sum);
        if (at < k && threadIdx.x % LANES == 0) sums[at / WIDTH] = sum;
    } else if constexpr (GROUP == 1) {
        sum = sum_lanes<SEGMENT_LANES>(sum);
        if (at < k && threadIdx.x % SEGMENT_LANES == 0) segments[at / 32] = sum;
    }
}

// x, up, residual: [m, stride] of ELEMENT, strides in elements; weight: [k] of WEIGHT.
// codes: [m, code_stride]; the stride and the address are multiples of 16 bytes.
// scales: [m]; with STATIC each is the given scale, or NaN.
// count: the number of rows, which may be less than m; null if it is m.
// row_sums: [m], may be null; group_sums: [m, ⌈k / group⌉], may be null if GROUP is 0.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    activation(const element_t *x, const element_t *up, element_t *residual, const weight_t *weight, u8 *codes, float *scales,
               int *row_sums, int *group_sums, u64 x_stride, u64 up_stride, u64 residual_stride, u64 code_stride, int k,
               int group, float eps, float static_scale, int static_zero, const u32 *count) {
    extern __shared__ int segments[];
    __shared__ u32 slots[3][WARPS];
    const u64 r = blockIdx.x;
    if (count != nullptr && r >= *count) return;
    const Row row = {x + r * x_stride, SOURCE == SILU_MUL ? up + r * up_stride : nullptr,
                     ADDS ? residual + r * residual_stride : nullptr, weight, k};
    const int begin = (int)threadIdx.x * VECTOR;
    constexpr int STEP = THREADS * VECTOR;
    float held[VECTORS > 0 ? VECTORS : 1][VECTOR];

    float squares = 0.0f;
    u32 largest = 0;
    if constexpr (HELD > 0) {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            first(held[i], row, begin + i * STEP);
            if constexpr (NORMS)
                squares = square_sum(held[i], squares);
            else
                largest = largest_of(held[i], largest);
        }
    } else {
        for (int at = begin; at < k; at += STEP) {
            first(held[0], row, at);
            if constexpr (NORMS)
                squares = square_sum(held[0], squares);
            else
                largest = largest_of(held[0], largest);
        }
    }

    float factor = 1.0f;
    if constexpr (NORMS) {
        squares = __uint_as_float(join_block<FloatSum>(__float_as_uint(squares), slots[0]));
        // True for all finite sums, false for infinities and NaN.
        factor = squares < __uint_as_float(0x7f800000u)
                     ? __fdiv_rn(1.0f, __fsqrt_rn(__fdiv_rn(squares, (float)k) + eps))
                     : __uint_as_float(0x7fffffffu);
        if constexpr (HELD > 0) {
#pragma unroll
            for (int i = 0; i < VECTORS; i++) {
                scale_by_norm(held[i], row, begin + i * STEP, factor);
                largest = largest_of(held[i], largest);
            }
        } else {
            for (int at = begin; at < k; at += STEP) {
                again(held[0], row, at);
                scale_by_norm(held[0], row, at, factor);
                largest = largest_of(held[0], largest);
            }
        }
    }

    largest = join_block<Largest>(largest, slots[1]);
    const float most = __uint_as_float(largest);
    const bool finite = largest < 0x7f800000u;
    float scale = 0.0f;
    Grid grid = {0.0f, 0.0f, 0.0f, 0, finite ? 0xffffffffu : 0};
    if constexpr (STATIC) {
        scale = static_scale;
        grid.inverse = __fdiv_rn(1.0f, static_scale);
        grid.low = (float)(-128 - static_zero);
        grid.high = (float)(127 - static_zero);
        grid.zero = (u32)static_zero;
    } else if (most >= SMALLEST) {
        scale = __fdiv_rn(most, 127.0f);
        grid.inverse = __fdiv_rn(127.0f, most);
    }
    if (threadIdx.x == 0) scales[r] = finite ? scale : __uint_as_float(0x7fffffffu);

    u8 *row_codes = codes + r * code_stride;
    const int width = GROUP == 1 ? group : WIDTH;
    const int groups = (int)(((u32)k + (u32)width - 1) / (u32)width);
    int *sums = GROUP > 0 ? group_sums + r * groups : nullptr;
    int total = 0;
    if constexpr (HELD > 0) {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            int sum = quantize(held[i], grid, row_codes, begin + i * STEP, k);
            total += sum;
            add_up(sum, begin + i * STEP, k, sums, segments);
        }
    } else {
        // Summing needs all lanes of the warp.
        for (int base = 0; base < k; base += STEP) {
            int at = base + begin;
            again(held[0], row, at);
            if constexpr (NORMS) scale_by_norm(held[0], row, at, factor);
            int sum = quantize(held[0], grid, row_codes, at, k);
            total += sum;
            add_up(sum, at, k, sums, segments);
        }
    }
    if (row_sums != nullptr) {
        total = (int)join_block<WholeSum>((u32)total, slots[2]);
        if (threadIdx.x == 0) row_sums[r] = total;
    }
    if constexpr (GROUP == 1) {
        __syncthreads();
        // Lanes read neighbouring words, so there are no bank conflicts.
        const int lane = threadIdx.x % 32, each = group / 32, all = (k + 31) / 32;
        for (int g = threadIdx.x / 32; g < groups; g += WARPS) {
            int sum = 0;
            for (int i = lane; i < each; i += 32)
                if (g * each + i < all) sum += segments[g * each + i];
            sum = (int)WholeSum::join((u32)sum);
            if (lane == 0) sums[g] = sum;
        }
    }
}
