// Packs logical codes, scales and zero points on the device, to the same bytes as src/layout/pack.rs.
//
// Macros: CODES (INTEGER, E2M1, E4M3), CODE_BITS (4, 8), ORDER_FLOAT (1: for float activations), SIGNED (1: codes are
// stored minus `middle`), GROUP (16, 32, 64, 128: features of a tile that share parameters; 0: a row is one group),
// SCALE (F16, BF16, F32, PROGRESSIVE, E4M3, E8M0), ZEROS, SUMS.
//
// Values that the packer on the CPU rejects set `*fault` to 1. A matrix is packed only once, so plain loads are fast
// enough.
#include "dequantize.cuh"

constexpr int TILE_K = 128;
constexpr int TILE_BYTES = 16 * TILE_K * CODE_BITS / 8;
constexpr int GROUPS = GROUP == 0 ? 0 : TILE_K / (GROUP == 0 ? 1 : GROUP);
constexpr int SCALE_BYTES = SCALE == PROGRESSIVE || SCALE == E4M3 || SCALE == E8M0 ? 1 : SCALE == F32 ? 4 : 2;
constexpr int ZEROS_AT = 16 * GROUPS * SCALE_BYTES;
constexpr int SUMS_AT = ZEROS_AT + (ZEROS ? GROUPS * 2 * CODE_BITS : 0);
constexpr bool GROUP_SUMS = SUMS && GROUP != 0 && SCALE != PROGRESSIVE;
constexpr int END = SUMS_AT + (GROUP_SUMS ? 64 * GROUPS : 0);
constexpr int PARAMETER_BYTES = (END + 15) / 16 * 16;
constexpr u32 MASK = CODE_BITS == 4 ? 15 : 255;

struct Weights {
    // codes [n, k], one code per byte; scales [n, groups], f32 or u8; channels [n], for E4M3 scales [1]; zeros [n,
    // groups].
    const u8 *codes, *scales;
    const float *channels;
    const u8 *zeros;
    u32 *fault;
    u32 n, k, group_size, middle, most;
};

INLINE i32 zero_of(const Weights &w, u32 row, u32 group) {
    return ZEROS ? (i32)w.zeros[(u64)row * (w.k / w.group_size) + group] : (i32)w.middle;
}

// The stored form of a code; 0 outside the matrix.
INLINE u32 stored(const Weights &w, u32 row, u32 feature) {
    if (row >= w.n || feature >= w.k) return 0;
    u32 code = w.codes[(u64)row * w.k + feature];
    if (code > w.most || (CODES == E4M3 && (code & 127) == 127)) *w.fault = 1;
    if (!SIGNED) return code & MASK;
    if (code - w.middle + (MASK + 1) / 2 > MASK) *w.fault = 1;
    return code - w.middle & MASK;
}

// One thread per 16 bytes of codes. Grid: enough blocks of 256.
extern "C" __global__ void __launch_bounds__(256)
    pack_codes(const u8 *codes, u32 *fault, u8 *out, u32 n, u32 k, u32 middle, u32 most) {
    const Weights w = {codes, 0, 0, 0, fault, n, k, 1, middle, most};
    const u32 tiles = (k + TILE_K - 1) / TILE_K;
    const u64 at = (u64)blockIdx.x * 256 + threadIdx.x;
    const u64 tile = at / (TILE_BYTES / 16);
    if (tile >= (u64)((n + 15) / 16) * tiles) return;
    const u32 chunk = (u32)(at % (TILE_BYTES / 16)), lane = chunk % 32;
    const u32 row = (u32)(tile / tiles) * 16 + lane / 4, feature = (u32)(tile % tiles) * TILE_K, t = lane % 4;
    u32 words[4];
#pragma unroll
    for (u32 b = 0; b < 4; b++) {
        const u32 i = chunk / 32 * 4 + b;
        u32 word = 0;
        if (ORDER_FLOAT && CODE_BITS == 4) {
#pragma unroll
            for (u32 field = 0; field < 8; field++) {
                u32 f = feature + 16 * i + field / 2 % 2 * 8 + 2 * t + field / 4;
                u32 code = stored(w, row + field % 2 * 8, f);
                word |= CODES == E2M1 ? place_of_e2m1(code, field % 4, field / 4) : code << (4 * field);
            }
            if (CODES == INTEGER) word = word << 2 | word >> 30;
        } else if (ORDER_FLOAT) {
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                u32 code = stored(w, row + j / 2 * 8, feature + 16 * (i / 2) + i % 2 * 8 + 2 * t + j % 2);
                word |= CODES == E4M3 ? place_of_e4m3(code, j / 2, j % 2) : code << (8 * j);
            }
        } else if (CODE_BITS == 4) {
#pragma unroll
            for (u32 j = 0; j < 8; j++)
                word |= stored(w, row + i % 2 * 8, feature + 32 * (i / 2) + j % 2 * 16 + 4 * t + j / 2) << (4 * j);
        } else {
#pragma unroll
            for (u32 j = 0; j < 4; j++)
                word |= stored(w, row + i % 2 * 8, feature + 32 * (i / 4) + i / 2 % 2 * 16 + 4 * t + j) << (8 * j);
        }
        words[b] = word;
    }
    *(uint4 *)(out + at * 16) = make_uint4(words[0], words[1], words[2], words[3]);
}

// One thread for the parameters of rows r and r + 8 in a tile. Grid: enough blocks of 256.
extern "C" __global__ void __launch_bounds__(256)
    pack_parameters(const u8 *codes, const u8 *scales, const u8 *zeros, u32 *fault, u8 *out, u32 n, u32 k, u32 group_size,
                    u32 middle, u32 most) {
    const Weights w = {codes, scales, 0, zeros, fault, n, k, group_size, middle, most};
    const u32 tiles = (k + TILE_K - 1) / TILE_K, groups = k / group_size;
    const u64 at = (u64)blockIdx.x * 256 + threadIdx.x;
    const u64 tile = at / 8;
    if (tile >= (u64)((n + 15) / 16) * tiles) return;
    const u32 pair = (u32)(at % 8);
    u8 *block = out + tile * PARAMETER_BYTES;
    if (pair == 0) {
        for (int i = END; i < PARAMETER_BYTES; i++) block[i] = 0;
    }
    for (int slot = 0; slot < GROUPS; slot++) {
        const u32 first = (u32)(tile % tiles) * TILE_K + slot * GROUP;
        u32 both = 0;
        for (int half = 0; half < 2; half++) {
            const u32 row = (u32)(tile / tiles) * 16 + pair + 8 * half, place = slot * 16 + 2 * pair + half;
            const bool there = row < n && first < k;
            const u64 group = (u64)row * groups + first / group_size;
            i32 zero = there ? zero_of(w, row, first / group_size) : 0;
            if (CODES == INTEGER && there && (u32)zero > most) *fault = 1;
            if (SCALE == PROGRESSIVE || SCALE == E4M3) {
                block[place] = there ? scales[group] : 0;
                // These codes are NaN or negative.
                if (SCALE == E4M3 && there && scales[group] >= 127) *fault = 1;
            } else if (SCALE == E8M0) {
                const u32 bits = there ? __float_as_uint(((const float *)scales)[group]) : 1u << 22;
                if (max(bits >> 23 << 23, 1u << 22) != bits || bits >> 23 >= 255) *fault = 1;
                block[place] = (u8)(bits >> 23);
            } else {
                float scale = there ? ((const float *)scales)[group] : 0.0f;
                if (SCALE == F32) {
                    ((float *)block)[place] = scale;
                } else {
                    const u16 bits = SCALE == F16 ? f16_of_float(scale) : bf16_of_float(scale);
                    const float kept = SCALE == F16 ? float_of_f16(bits) : float_of_bf16(bits);
                    if (__float_as_uint(kept) != __float_as_uint(scale)) *fault = 1;
                    ((u16 *)block)[place] = bits;
                }
            }
            both |= (u32)zero << (CODE_BITS * half);
            if (SCALE == PROGRESSIVE || GROUP_SUMS) {
                i32 sum = 0;
                for (u32 f = first; there && f < first + GROUP && f < k; f++) {
                    i32 code = (i32)w.codes[(u64)row * k + f] - zero;
                    sum += code;
                    if (SCALE == PROGRESSIVE) {
                        i32 whole = code * (i32)scales[group];
                        if (whole < -128 || whole > 127) *fault = 1;
                    }
                }
                if (GROUP_SUMS) ((i32 *)(block + SUMS_AT))[place] = sum;
            }
        }
        if (ZEROS && CODE_BITS == 4) block[ZEROS_AT + slot * 8 + pair] = (u8)both;
        if (ZEROS && CODE_BITS == 8) ((u16 *)(block + ZEROS_AT))[slot * 8 + pair] = (u16)both;
    }
}

// One warp for the parameters of a row. Rows are padded to a multiple of 16. Grid: a block of 128 threads per 4 rows.
extern "C" __global__ void __launch_bounds__(128)
    pack_rows(const u8 *codes, const u8 *scales, const float *channels, const u8 *zeros, u32 *fault, float *row_scales,
              u8 *row_zeros, i32 *row_sums, u32 n, u32 k, u32 group_size, u32 middle, u32 most) {
    const Weights w = {codes, scales, channels, zeros, fault, n, k, group_size, middle, most};
    const u32 row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32, groups = k / group_size;
    const bool there = row < n;
    if (SUMS && (GROUP == 0 || SCALE == PROGRESSIVE)) {
        u32 sum = 0;
        for (u32 f = lane; there && f < k; f += 32) {
            i32 code = (i32)codes[(u64)row * k + f] - zero_of(w, row, f / group_size);
            sum += (u32)(code * (SCALE == PROGRESSIVE ? (i32)scales[(u64)row * groups + f / group_size] : 1));
        }
#pragma unroll
        for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
        if (lane == 0) row_sums[row] = (i32)sum;
    }
    if (lane != 0) return;
    if (SCALE == E4M3) {
        // The kernel multiplies by 256 / `global`, which is stored in front of it.
        const float global = channels[0], factor = 256.0f / global;
        // `global` must be positive and finite, and the factor a normal number.
        const u32 exponent = __float_as_uint(factor) >> 23;
        const bool fits = global > 0.0f && global < __uint_as_float(0x7f800000) && exponent > 0 && exponent < 255;
        if (!fits && row == 0) *fault = 1;
        row_scales[row] = there ? factor : 0.0f;
        row_scales[(n + 15) / 16 * 16 + row] = there ? global : 0.0f;
    }
    if (SCALE == PROGRESSIVE) row_scales[row] = there ? channels[row] : 0.0f;
    else if (GROUP == 0) row_scales[row] = there ? ((const float *)scales)[row] : 0.0f;
    if (GROUP == 0 && ZEROS) {
        u32 zero = there ? zeros[row] : 0;
        if (zero > most) *fault = 1;
        row_zeros[row] = (u8)zero;
    }
}
