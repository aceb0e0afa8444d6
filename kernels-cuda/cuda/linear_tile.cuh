// The work of a warp on a tile of 128 features in shared memory: codes are converted to fragments, products are added
// to the sums of a group, and these sums are scaled and added to the sums of a part of k.
//
// Part of linear.cu, whose constants and arguments it uses.
#pragma once

INLINE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (ACTIVATION == F16) mma_f16(d, a, b0, b1);
    else mma_bf16(d, a, b0, b1);
}

INLINE void multiply(i32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (SIGNED) mma_s8_s8(d, a, b0, b1);
    else mma_u8_s8(d, a, b0, b1);
}

// Loads the fragments of the activations of 8 tokens for two neighbouring steps.
INLINE void load_tokens(u32 (&b)[4], u32 x, u32 token_tile, u32 pair, u32 lane) {
    u32 row = token_tile * 8 + lane % 8, chunk = 4 * pair + lane / 8;
    load_matrices_4(b, x + row * X_ROW + (chunk ^ row % 8) * 16);
}

// The A fragment of a matrix of ones, whose product with activations has their sums in every row. In a lane, the first
// two values are the sums of tokens 2 (lane % 4) and 2 (lane % 4) + 1.
constexpr u32 ONE = ACTIVATION == F16 ? 0x3c003c00 : ACTIVATION == BF16 ? 0x3f803f80 : 0x01010101;

// Computes the sums of the activations of a slot per group and token, and writes them to `sums`.
INLINE void sum_tokens(u32 slot, partial_t *sums, u32 warp, u32 lane) {
    const u32 ones[4] = {ONE, ONE, ONE, ONE};
#pragma unroll
    for (u32 tile = warp; tile < TOKENS / 8; tile += WARPS) {
        partial_t sum[4];
#pragma unroll
        for (int pair = 0; pair < STEPS / 2; pair++) {
            u32 b[4];
            load_tokens(b, slot + X_AT, tile, pair, lane);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int step = 2 * pair + half;
                if (step % GROUP_STEPS == 0) sum[0] = sum[1] = sum[2] = sum[3] = 0;
                multiply(sum, ones, b[2 * half], b[2 * half + 1]);
                // All rows of the product are equal. In its first row, lane t holds tokens 2 t and 2 t + 1.
                if (step % GROUP_STEPS == GROUP_STEPS - 1 && lane < 4) {
                    partial_t *to = sums + step / GROUP_STEPS * TOKENS + tile * 8 + 2 * lane;
                    to[0] = sum[0];
                    to[1] = sum[1];
                }
            }
        }
    }
}

// A row's scale within a group, as a float.
INLINE float scale_of(const u8 *at) {
    if (SCALE == F32) return *(const float *)at;
    u16 bits = *(const u16 *)at;
    return SCALE == F16 ? float_of_f16(bits) : float_of_bf16(bits);
}

// Returns the scale that a byte encodes; for E4M3, 2⁻⁸ times the scale, which the row's factor corrects.
INLINE float scale_of_byte(u32 byte) {
    if (SCALE == E4M3) return float_of_f16((u16)(byte << 7));
    // The smallest E8M0 scale is subnormal in f32.
    return __uint_as_float(max(byte << 23, 1u << 22));
}

// Scales and zero points of the two rows of a lane in a 16-row tile, and derived values.
struct Group {
    float scale[2];
    // The factor of Σ x: for floats −(offset + zero), for integers −zero.
    partial_t less[2];
    // Used only for progressive weights.
    u32 factor[2], shift[2];
    // Σ (q − z) of the weights, if activations have a zero point.
    i32 sum[2];
};

INLINE void less_of(Group &to, int half, u32 zero) {
    if (FLOAT) {
        float offset = half == 0 ? code_offset<ACTIVATION, CODE_BITS, 0>() : code_offset<ACTIVATION, CODE_BITS, 1>();
        to.less[half] = (partial_t)(-(offset + (float)zero));
    } else {
        to.less[half] = (partial_t)-(i32)zero;
    }
}

INLINE void load_group(Group &to, const u8 *parameters, int group, u32 lane, u32 middle) {
    const u32 pair = lane / 4;
    const u8 *scales = parameters + group * 16 * SCALE_BYTES + pair * 2 * SCALE_BYTES;
    const u8 *zeros = parameters + ZEROS_AT + group * ZERO_BYTES;
    u32 both = 0;
    if (ZEROS) both = CODE_BITS == 4 ? (u32)zeros[pair] : (u32)((const u16 *)zeros)[pair];
    u32 words = 0;
    if (SCALE_BYTE || SCALE == F16 || SCALE == BF16) {
        words = SCALE_BYTE ? (u32) * (const u16 *)scales : *(const u32 *)scales;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 zero = !ZEROS ? middle : CODE_BITS == 4 ? both >> 4 * half & 15 : both >> 8 * half & 255;
        if (TWO_LEVELS) {
            to.factor[half] = words >> 8 * half & 255;
            to.shift[half] = 0x80808080u - zero * to.factor[half] * 0x01010101u;
        } else {
            if (SCALE_BYTE) to.scale[half] = scale_of_byte(words >> 8 * half & 255);
            else if (SCALE == F32) to.scale[half] = scale_of(scales + 4 * half);
            else if (SCALE == F16) to.scale[half] = float_of_f16((u16)(words >> 16 * half));
            else to.scale[half] = float_of_bf16((u16)(words >> 16 * half));
            if (CODES == INTEGER) less_of(to, half, zero);
        }
        if (GROUP_SUMS) to.sum[half] = ((const i32 *)(parameters + SUMS_AT + group * 64))[2 * pair + half];
    }
}

// The number of words per lane for two neighbouring steps.
constexpr int PAIR_WORDS = FLOAT ? (CODE_BITS == 4 ? 2 : 4) : (CODE_BITS == 4 ? 4 : 8);

// Pairs of steps that are unrolled, so that their instructions interleave. Fewer for small groups, whose parameters
// occupy registers.
constexpr int UNROLL = FLOAT && GROUP != 0 && GROUP <= 64 ? 2 : !FLOAT && GROUP == 32 && SERIAL ? 1 : STEPS / 2;

INLINE void fragment(u32 (&a)[4], const u32 *words, int half, const Group &group) {
    const u32 *w = words + half * (PAIR_WORDS / 2);
    if (CODES == E2M1) {
        if (ACTIVATION == F16) fragment_f16_e2m1(a, w[0]);
        else fragment_bf16_e2m1(a, w[0]);
    } else if (CODES == E4M3) {
        if (ACTIVATION == F16) {
            pairs_f16_e4m3(a[0], a[1], w[0]);
            pairs_f16_e4m3(a[2], a[3], w[1]);
        } else {
            pairs_bf16_e4m3(a[0], a[1], w[0]);
            pairs_bf16_e4m3(a[2], a[3], w[1]);
        }
    } else if (FLOAT && CODE_BITS == 4) {
        if (ACTIVATION == F16) fragment_f16_u4(a, w[0]);
        else fragment_bf16_u4(a, w[0]);
    } else if (FLOAT) {
        if (ACTIVATION == F16) {
            pairs_f16_u8(a[0], a[1], w[0]);
            pairs_f16_u8(a[2], a[3], w[1]);
        } else {
            pairs_bf16_u8(a[0], a[1], w[0]);
            pairs_bf16_u8(a[2], a[3], w[1]);
        }
    } else if (CODE_BITS == 4) {
        if (SIGNED) fragment_s8_s4(a, w[0], w[1]);
        else fragment_u8_u4(a, w[0], w[1]);
        if (TWO_LEVELS) {
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = progressive(a[i], group.factor[i % 2], group.shift[i % 2]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = w[i];
    }
}

// The running sums of a warp: of a group (or of all tiles, if integers are summed over all of k), and of the current
// part of k.
struct Sums {
    partial_t group[ROW_TILES][TOKEN_TILES][4];
    float part[ROW_TILES][TOKEN_TILES][4];
    // For integers: sums of activations of tokens 2 t and 2 t + 1, as the product with a matrix of ones.
    partial_t x[TOKEN_TILES][4];
};

INLINE void multiply_tile(const Arguments &p, Sums &sums, const u8 *slot, const partial_t *x_sums, const Group (&rows)[ROW_TILES],
                          u32 row_warp, u32 token_warp, u32 lane) {
    const u32 x = shared_address(slot) + X_AT;
    const u32 ones[4] = {ONE, ONE, ONE, ONE};
    const u8 *codes = slot + row_warp * ROW_TILES * TILE_BYTES + lane * 16;
    const u8 *parameters = slot + PARAMETERS_AT + row_warp * ROW_TILES * PARAMETER_BYTES;
    Group groups[ROW_TILES];
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) groups[r] = rows[r];
    u32 words[ROW_TILES][PAIR_WORDS < 4 ? 4 : PAIR_WORDS];
#pragma unroll UNROLL
    for (int pair = 0; pair < STEPS / 2; pair++) {
        // Sixteen bytes at a time, for one or two pairs of steps.
        if (PAIR_WORDS >= 4 || pair % 2 == 0) {
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
                for (int c = 0; c < (PAIR_WORDS + 3) / 4; c++) {
                    const int chunk = pair * PAIR_WORDS / 4 + c;
                    uint4 four = *(const uint4 *)(codes + r * TILE_BYTES + chunk * 512);
                    words[r][4 * c] = four.x;
                    words[r][4 * c + 1] = four.y;
                    words[r][4 * c + 2] = four.z;
                    words[r][4 * c + 3] = four.w;
                }
            }
        }
        u32 a[2][ROW_TILES][4];
        Group second[ROW_TILES];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int step = 2 * pair + half;
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
                // If a group is only one step long, the pair of steps belongs to two groups.
                Group &group = GROUP_STEPS == 1 && half == 1 ? second[r] : groups[r];
                if (GROUP != 0 && step % GROUP_STEPS == 0)
                    load_group(group, parameters + r * PARAMETER_BYTES, step / GROUP_STEPS, lane, p.middle);
                const int first = PAIR_WORDS < 4 ? pair % 2 * PAIR_WORDS : 0;
                fragment(a[half][r], &words[r][first], half, group);
            }
        }
#pragma unroll
        for (int t = 0; t < TOKEN_TILES; t++) {
            u32 b[4];
            load_tokens(b, x, token_warp * TOKEN_TILES + t, pair, lane);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int step = 2 * pair + half;
                const bool is_first = step % GROUP_STEPS == 0, is_last = step % GROUP_STEPS == GROUP_STEPS - 1;
                partial_t(&sum)[4] = sums.x[t];
                if (OWN_SUMS) {
                    if (!WHOLE && is_first) sum[0] = sum[1] = sum[2] = sum[3] = 0;
                    multiply(sum, ones, b[2 * half], b[2 * half + 1]);
                } else if (SUMS && is_last) {
                    const partial_t *from =
                        x_sums + step / GROUP_STEPS * TOKENS + (token_warp * TOKEN_TILES + t) * 8 + 2 * (lane % 4);
                    partial_t two[2];
                    if (FLOAT) {
                        float2 both = *(const float2 *)from;
                        two[0] = (partial_t)both.x;
                        two[1] = (partial_t)both.y;
                    } else {
                        int2 both = *(const int2 *)from;
                        two[0] = (partial_t)both.x;
                        two[1] = (partial_t)both.y;
                    }
#pragma unroll
                    for (int i = 0; i < 2; i++) sum[i] = WHOLE ? sum[i] + two[i] : two[i];
                }
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++) {
                    const Group &group = GROUP_STEPS == 1 && half == 1 ? second[r] : groups[r];
                    partial_t(&in_group)[4] = sums.group[r][t];
                    if (!WHOLE && is_first) in_group[0] = in_group[1] = in_group[2] = in_group[3] = 0;
                    multiply(in_group, a[half][r], b[2 * half], b[2 * half + 1]);
                    if (!WHOLE && is_last) {
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            float &to = sums.part[r][t][i];
                            if (FLOAT) {
                                float value = (float)in_group[i];
                                if (SUMS) value = fused((float)group.less[i / 2], (float)sum[i % 2], value);
                                to = GROUP == 0 ? to + value : fused(group.scale[i / 2], value, to);
                            } else {
                                i32 whole = (i32)in_group[i] >> SHIFT;
                                if (SUMS) whole += (i32)group.less[i / 2] * (i32)sum[i % 2];
                                if (GROUP_SUMS) whole -= p.x_zero * group.sum[i / 2];
                                to = fused((float)whole, group.scale[i / 2], to);
                            }
                        }
                    }
                }
            }
        }
    }
}
