// The work of a warp on a tile of 16 tokens in shared memory, for up to 16 query heads of a key-value head:
//
//   S = K Q^T    [16 tokens, 8 heads], codes directly from the row
//   p            from S, with the token's scale and zero point and the sums of q, in f32
//   O^T += V^T P [16 features, 8 heads], with the token's scale multiplied into P before it is rounded to f16
//
// Codes become f16 without a subtraction: in bits 2 to 5 of an f16 with the exponent of 256, a code gives 256 + code;
// in bits 6 to 9 with the exponent of 16, it gives 16 + code; and a byte with the exponent of 1024 gives 1024 + code.
// The offsets are corrected in f32: S starts at -sum(offset · q), and from O the offset times the sum of the rounded P
// is subtracted. A value is v = scale (code - CENTRE) + (zero + CENTRE scale); only the first term is multiplied by the
// rounded P.
#pragma once
#include "kv_layout.cuh"

constexpr int HEADS = 8 * HEAD_TILES;
constexpr int KEY_STEPS = DIM / 16;
constexpr int OUT_TILES = DIM / 16;
// The offsets of even and of odd pairs of codes in a half word.
constexpr float OFFSET_EVEN = KV_BITS == 4 ? 256.0f : KV_BITS == 8 ? 1024.0f : 0.0f;
constexpr float OFFSET_ODD = KV_BITS == 4 ? 16.0f : OFFSET_EVEN;
constexpr float CENTRE = KV_BITS == 4 ? 8.0f : KV_BITS == 8 ? 128.0f : 0.0f;
// P may grow to 2^GROWTH before a new reference is chosen.
constexpr float GROWTH = 6.0f;
// The largest value scale times the unit of P is below this. Times 2^GROWTH, it is below the largest f16.
constexpr float SCALE_LIMIT = 512.0f;
constexpr float HALVES_SCALE = 256.0f;
constexpr float LOWEST = -1e30f;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

INLINE float minus_infinity() { return __int_as_float(0xff800000); }

// ------------------------------------------------------------------------------------------------ codes to halves

// Words that a lane reads from a row of keys, and per load.
constexpr int KEY_WORDS = ROW_WORDS / 4;
constexpr int KEY_WIDE = KEY_WORDS % 4 == 0 ? 4 : KEY_WORDS % 2 == 0 ? 2 : 1;
// Words that a lane reads from a row of values, and per load, and whether half a word is left over.
constexpr int VALUE_WORDS = ROW_WORDS / 8;
constexpr int VALUE_WIDE = VALUE_WORDS % 4 == 0 ? 4 : VALUE_WORDS % 2 == 0 ? 2 : 1;
constexpr bool VALUE_TAIL = ROW_WORDS % 8 == 4;
// Output tiles (of 16 features) to which a word contributes.
constexpr int WORD_TILES = PACK / 2;

template <int WIDE>
INLINE void load_words(u32* words, const u32* from) {
    if constexpr (WIDE == 4) {
        const uint4 v = *reinterpret_cast<const uint4*>(from);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else if constexpr (WIDE == 2) {
        const uint2 v = *reinterpret_cast<const uint2*>(from);
        words[0] = v.x, words[1] = v.y;
    } else {
        words[0] = from[0];
    }
}

// The feature of a lane's `e`th element of a row, `e` even. Lanes take turns to read runs of `wide` words.
INLINE constexpr int feature_of(int e, int lane, int lanes, int wide) {
    const int run = wide * PACK;
    return (e / run * lanes + lane) * run + e % run;
}

// Converts one word of a row to pairs of neighbouring features in f16.
INLINE void spread_keys(u32 word, u32 (&pairs)[PACK / 2]) {
#if KV_BITS == 4
    const u32 swapped = permute_bytes<0x2301>(word, 0);
    pairs[0] = and_or<0x003c003c, 0x5c005c00>(word);
    pairs[1] = and_or<0x03c003c0, 0x4c004c00>(word);
    pairs[2] = and_or<0x003c003c, 0x5c005c00>(swapped);
    pairs[3] = and_or<0x03c003c0, 0x4c004c00>(swapped);
#elif KV_BITS == 8
    pairs[0] = permute_bytes<0x4140>(word, 0x64646464);
    pairs[1] = permute_bytes<0x4342>(word, 0x64646464);
#else
    pairs[0] = word;
#endif
}

#if KV_BITS == 4
// Converts the low halves (HIGH: the high halves) of the same word of two tokens: four features, each as a pair of f16
// with the codes of both tokens.
template <bool HIGH>
INLINE void spread_halves(u32 first, u32 second, u32 (&out)[4]) {
    const u32 straight = permute_bytes<HIGH ? 0x7632 : 0x5410>(first, second);
    const u32 swapped = permute_bytes<HIGH ? 0x6723 : 0x4501>(first, second);
    out[0] = and_or<0x003c003c, 0x5c005c00>(straight);
    out[1] = and_or<0x03c003c0, 0x4c004c00>(straight);
    out[2] = and_or<0x003c003c, 0x5c005c00>(swapped);
    out[3] = and_or<0x03c003c0, 0x4c004c00>(swapped);
}
#endif

// Converts the same word of two tokens: each feature becomes a pair of f16.
INLINE void spread_values(u32 first, u32 second, u32 (&out)[PACK]) {
#if KV_BITS == 4
    u32 even[4], odd[4];
    spread_halves<false>(first, second, even);
    spread_halves<true>(first, second, odd);
#pragma unroll
    for (int i = 0; i < 4; ++i) out[2 * i] = even[i], out[2 * i + 1] = odd[i];
#elif KV_BITS == 8
    const u32 low = permute_bytes<0x5410>(first, second), high = permute_bytes<0x7632>(first, second);
    out[0] = permute_bytes<0x4240>(low, 0x64646464);
    out[1] = permute_bytes<0x4341>(low, 0x64646464);
    out[2] = permute_bytes<0x4240>(high, 0x64646464);
    out[3] = permute_bytes<0x4341>(high, 0x64646464);
#else
    out[0] = permute_bytes<0x5410>(first, second);
    out[1] = permute_bytes<0x7632>(first, second);
#endif
}

// The feature of row `g` of an output tile; with `half` 1, of row `g + 8`.
INLINE int out_feature(int tile, int half, int g) {
    constexpr int WHOLE = VALUE_WORDS * WORD_TILES;
    if (!VALUE_TAIL || tile < WHOLE) return feature_of(2 * tile + half, g, 8, VALUE_WIDE);
    // In the remaining half words, two lanes share a word, whose low half holds the even features.
    return 8 * PACK * VALUE_WORDS + 8 * (g / 2) + 2 * (2 * (tile - WHOLE) + half) + g % 2;
}

INLINE constexpr float out_offset(int tile, int half) {
    constexpr int WHOLE = VALUE_WORDS * WORD_TILES;
    const bool odd = VALUE_TAIL && tile >= WHOLE ? half : tile & 1;
    return odd ? OFFSET_ODD : OFFSET_EVEN;
}

// ------------------------------------------------------------------------------------------------------ a warp's work

struct State {
    float out[HEAD_TILES][OUT_TILES][4];
    // Sums of the rounded P, accumulated by the tensor cores.
    float rounded[HEAD_TILES][4];
    // For heads 2 t and 2 t + 1, over the tokens of this lane: sums of p, and of p (zero + CENTRE scale).
    float total[HEAD_TILES][2], middle[HEAD_TILES][2];
    // The reference, a logarithm to base 2, is subtracted from scores.
    float reference[HEAD_TILES][2];
    // The factor of value scales: a power of two.
    float unit;
};

struct Queries {
    // The B fragments of the queries, with features in the order in which a lane reads a row of keys.
    u32 fragment[HEAD_TILES][KEY_STEPS][2];
    // For heads 2 t and 2 t + 1: scale · log2 e, the sum of q times that, and -sum(offset · q).
    float scale[HEAD_TILES][2], sum[HEAD_TILES][2], start[HEAD_TILES][2];
};

// The first words that a lane reads from a tile; other loads are at fixed offsets.
struct Place {
    u32 g, t;
    // Even and odd wide loads of keys, which differ if the halves of 128 bytes are swapped.
    u32 keys[2];
    u32 values;
};

INLINE Place place_of(u32 lane) {
    Place place;
    place.g = lane / 4;
    place.t = lane % 4;
    place.keys[0] = key_word(place.g, place.t * KEY_WIDE);
    place.keys[1] = key_word(place.g, 4 * KEY_WIDE + place.t * KEY_WIDE);
    place.values = VALUES_AT / 4 + value_word(2 * place.t, place.g * VALUE_WIDE);
    return place;
}

// The distance in words from the row of token 2 t to that of 2 t + 1, 2 t + 8 or 2 t + 9 (`k` is 1 to 3), which does
// not depend on t.
INLINE constexpr int value_step(int k) {
    return (value_row((k & 1) + 8 * (k >> 1)) - value_row(0)) * ROW_WORDS;
}

// Loads the queries of a block's columns from `row_of(column)`, or zeros if it returns null. Before bf16 is converted
// to f16, a power of two per column brings it into the range of f16.
template <typename RowOf>
INLINE void load_queries(Queries& queries, float scale, const Place& place, const RowOf& row_of) {
    const u32 t = place.t;
#pragma unroll
    for (int tile = 0; tile < HEAD_TILES; ++tile) {
        const u16* row = row_of(8 * tile + place.g);
        ushort4 raw[KEY_STEPS];
#if QUERY_TYPE == 1
        float largest = 0.0f;
#endif
#pragma unroll
        for (int step = 0; step < KEY_STEPS; ++step) {
            const int feature = feature_of(4 * step, t, 4, KEY_WIDE);
            raw[step] = make_ushort4(0, 0, 0, 0);
            if (row != nullptr && feature < HEAD_DIM) raw[step] = *reinterpret_cast<const ushort4*>(row + feature);
#if QUERY_TYPE == 1
            largest = fmaxf(fmaxf(largest, fabsf(float_of_bf16(raw[step].x))), fabsf(float_of_bf16(raw[step].y)));
            largest = fmaxf(fmaxf(largest, fabsf(float_of_bf16(raw[step].z))), fabsf(float_of_bf16(raw[step].w)));
#endif
        }
        float back = 1.0f;
#if QUERY_TYPE == 1
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 2));
        // Biased exponents: the factor is 2^(127 + 14 - e) and its inverse 2^(e - 127 - 14). Both must be normal
        // numbers.
        int exponent = static_cast<int>(__float_as_uint(largest) >> 23);
        exponent = min(max(exponent, 16), 254);
        back = __uint_as_float(static_cast<u32>(exponent - 14) << 23);
        const float forth = __uint_as_float(static_cast<u32>(254 + 14 - exponent) << 23);
#endif
        float sums[4] = {}, starts[4] = {};
        constexpr u32 ONES = 0x3c003c00;
        constexpr u32 EVEN = KV_BITS == 4 ? 0xdc00dc00 : 0xe400e400, ODD = KV_BITS == 4 ? 0xcc00cc00 : EVEN;
#pragma unroll
        for (int step = 0; step < KEY_STEPS; ++step) {
#if QUERY_TYPE == 1
            u32 low = f16_pair(float_of_bf16(raw[step].x) * forth, float_of_bf16(raw[step].y) * forth);
            u32 high = f16_pair(float_of_bf16(raw[step].z) * forth, float_of_bf16(raw[step].w) * forth);
#else
            u32 low = raw[step].x | static_cast<u32>(raw[step].y) << 16;
            u32 high = raw[step].z | static_cast<u32>(raw[step].w) << 16;
#endif
            queries.fragment[tile][step][0] = low;
            queries.fragment[tile][step][1] = high;
            if (HAS_GRIDS) {
                mma_f16(sums, {ONES, ONES, ONES, ONES}, low, high);
                mma_f16(starts, {EVEN, EVEN, ODD, ODD}, low, high);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            // The factor of column 2 t + i is in lanes 4 (2 t + i) to 4 (2 t + i) + 3, which loaded that column.
            queries.scale[tile][i] = scale * LOG2_E * __shfl_sync(ALL_LANES, back, 4 * (2 * t + i));
            queries.sum[tile][i] = sums[i] * queries.scale[tile][i];
            queries.start[tile][i] = starts[i];
        }
    }
}

INLINE void score_tile(float (&scores)[HEAD_TILES][4], const Queries& queries, const u32* tile,
                                           const Place& place) {
    u32 words[2][KEY_WORDS];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < KEY_WORDS; i += KEY_WIDE) {
            const int odd = KEY_EXCHANGE ? i / KEY_WIDE % 2 : 0;
            const u32* from = tile + place.keys[odd] + 4 * (i - odd * KEY_WIDE) + 8 * half * ROW_WORDS;
            load_words<KEY_WIDE>(&words[half][i], from);
        }
#pragma unroll
    for (int tile = 0; tile < HEAD_TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[tile][i] = queries.start[tile][i & 1];
    // A step of mma multiplies two pairs of features per lane.
    constexpr int STEP_WORDS = PACK == 2 ? 2 : 1;
#pragma unroll
    for (int i = 0; i < KEY_WORDS; i += STEP_WORDS) {
        u32 pairs[2][STEP_WORDS][PACK / 2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < STEP_WORDS; ++j) spread_keys(words[half][i + j], pairs[half][j]);
        const u32* low = &pairs[0][0][0];
        const u32* high = &pairs[1][0][0];
        constexpr int STEPS = STEP_WORDS * PACK / 4;
#pragma unroll
        for (int j = 0; j < STEPS; ++j)
#pragma unroll
            for (int tile = 0; tile < HEAD_TILES; ++tile) {
                const u32(&query)[2] = queries.fragment[tile][i / STEP_WORDS * STEPS + j];
                mma_f16(scores[tile], {low[2 * j], high[2 * j], low[2 * j + 1], high[2 * j + 1]}, query[0], query[1]);
            }
    }
}

// Chooses new references or a new unit if this tile exceeds the limits of the current ones, and rescales the sums.
// References are chosen per head, so that no head's result depends on another.
INLINE void rescale(State& state, const float (&scores)[HEAD_TILES][4], float value_scale) {
    float unit = 1.0f;
    if (HAS_GRIDS) {
        float largest = value_scale;
        for (int step = 4; step < 32; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, step));
        if (largest * state.unit >= SCALE_LIMIT) {
            // chosen · largest is at least 2^7 and below 2^8.
            const u32 exponent = __float_as_uint(largest) >> 23;
            const float chosen = __uint_as_float((254 + 7 - exponent) << 23);
            unit = chosen / state.unit;
            state.unit = chosen;
        }
    }
#pragma unroll
    for (int tile = 0; tile < HEAD_TILES; ++tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float highest = fmaxf(scores[tile][i], scores[tile][i + 2]);
            for (int step = 4; step < 32; step *= 2)
                highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, step));
            if (!(highest - state.reference[tile][i] > GROWTH)) highest = state.reference[tile][i];
            const float factor = exp2_approx(state.reference[tile][i] - highest);
            state.reference[tile][i] = highest;
            state.total[tile][i] *= factor;
            state.middle[tile][i] *= factor;
            const float both = factor * unit;
            state.rounded[tile][i] *= both;
            state.rounded[tile][i + 2] *= both;
#pragma unroll
            for (int j = 0; j < OUT_TILES; ++j) {
                state.out[tile][j][i] *= both;
                state.out[tile][j][i + 2] *= both;
            }
        }
    }
}

// Multiplies one output tile of 16 features: `low` and `high` are rows g and g + 8 for tokens 2 t and 2 t + 1; `low_8`
// and `high_8` are for tokens 2 t + 8 and 2 t + 9.
INLINE void add_values(State& state, const u32 (&weights)[HEAD_TILES][2], int tile, u32 low,
                                           u32 high, u32 low_8, u32 high_8) {
#pragma unroll
    for (int heads = 0; heads < HEAD_TILES; ++heads)
        mma_f16(state.out[heads][tile], {low, high, low_8, high_8}, weights[heads][0], weights[heads][1]);
}

INLINE void sum_values(State& state, const u32 (&weights)[HEAD_TILES][2], const u32* tile,
                                           const Place& place) {
    constexpr u32 ONES = 0x3c003c00;
    if (HAS_GRIDS)
#pragma unroll
        for (int heads = 0; heads < HEAD_TILES; ++heads)
            mma_f16(state.rounded[heads], {ONES, ONES, ONES, ONES}, weights[heads][0], weights[heads][1]);
#pragma unroll
    for (int i = 0; i < VALUE_WORDS; i += VALUE_WIDE) {
        u32 words[4][VALUE_WIDE];
#pragma unroll
        for (int k = 0; k < 4; ++k) load_words<VALUE_WIDE>(words[k], tile + place.values + 8 * i + value_step(k));
#pragma unroll
        for (int j = 0; j < VALUE_WIDE; ++j) {
            u32 near[PACK], far[PACK];
            spread_values(words[0][j], words[1][j], near);
            spread_values(words[2][j], words[3][j], far);
#pragma unroll
            for (int k = 0; k < WORD_TILES; ++k)
                add_values(state, weights, (i + j) * WORD_TILES + k, near[2 * k], near[2 * k + 1], far[2 * k],
                           far[2 * k + 1]);
        }
    }
#if KV_BITS == 4
    if constexpr (VALUE_TAIL) {
        u32 half[4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
            half[k] = reinterpret_cast<const u16*>(tile + VALUES_AT / 4 + 2 * place.t * ROW_WORDS + 8 * VALUE_WORDS +
                                                   value_step(k))[place.g];
        u32 near[4], far[4];
        spread_halves<false>(half[0], half[1], near);
        spread_halves<false>(half[2], half[3], far);
#pragma unroll
        for (int k = 0; k < 2; ++k)
            add_values(state, weights, VALUE_WORDS * WORD_TILES + k, near[2 * k], near[2 * k + 1], far[2 * k],
                       far[2 * k + 1]);
    }
#endif
}

// For columns 2 t and 2 t + 1 of each tile of eight, the number of tokens up to the last one that the column sees.
struct Limits {
    int seen[HEAD_TILES][2];
};

// Processes a tile in shared memory whose first token is token `start` of the list. If it is not `whole`, columns see
// only tokens from `unseen` to below `end`, and each column only those below its limit.
INLINE void attend_tile(State& state, const Queries& queries, const u32* tile, const Place& place,
                                            bool whole, const Limits& limits, int unseen, int end, int start) {
    float scores[HEAD_TILES][4];
    score_tile(scores, queries, tile, place);
    float key_scale[2] = {1.0f, 1.0f}, key_zero[2] = {}, value_scale[2] = {}, middle[2] = {};
    if (HAS_GRIDS) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 key = tile[KEY_GRIDS_AT / 4 + place.g + 8 * half];
            const u32 value = tile[VALUE_GRIDS_AT / 4 + place.g + 8 * half];
            key_scale[half] = float_of_f16(static_cast<u16>(key));
            key_zero[half] = float_of_f16(static_cast<u16>(key >> 16));
            value_scale[half] = float_of_f16(static_cast<u16>(value));
            middle[half] = fmaf(value_scale[half], CENTRE, float_of_f16(static_cast<u16>(value >> 16)));
        }
    }
#pragma unroll
    for (int heads = 0; heads < HEAD_TILES; ++heads)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float score = scores[heads][i] * queries.scale[heads][i & 1];
            if (HAS_GRIDS) score = fmaf(key_zero[i >> 1], queries.sum[heads][i & 1], key_scale[i >> 1] * score);
            scores[heads][i] = score;
        }
    if (!whole) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int token = start + static_cast<int>(place.g) + 8 * half;
            const bool exists = token >= unseen && token < end;
            if (!exists) value_scale[half] = middle[half] = 0.0f;
#pragma unroll
            for (int heads = 0; heads < HEAD_TILES; ++heads)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    if (!exists || token >= limits.seen[heads][i]) scores[heads][2 * half + i] = minus_infinity();
        }
    }
    float beyond[HEAD_TILES][4], surplus = minus_infinity();
#pragma unroll
    for (int heads = 0; heads < HEAD_TILES; ++heads)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            beyond[heads][i] = scores[heads][i] - state.reference[heads][i & 1];
            surplus = fmaxf(surplus, beyond[heads][i]);
        }
    const float larger = fmaxf(value_scale[0], value_scale[1]);
    const bool outgrown = surplus > GROWTH || (HAS_GRIDS && larger * state.unit >= SCALE_LIMIT);
    if (__any_sync(ALL_LANES, outgrown)) {
        rescale(state, scores, larger);
#pragma unroll
        for (int heads = 0; heads < HEAD_TILES; ++heads)
#pragma unroll
            for (int i = 0; i < 4; ++i) beyond[heads][i] = scores[heads][i] - state.reference[heads][i & 1];
    }

    u32 weights[HEAD_TILES][2];
    float fold[2] = {HALVES_SCALE, HALVES_SCALE};
    if (HAS_GRIDS) fold[0] = value_scale[0] * state.unit, fold[1] = value_scale[1] * state.unit;
#pragma unroll
    for (int heads = 0; heads < HEAD_TILES; ++heads) {
        float p[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            p[i] = exp2_approx(beyond[heads][i]);
            state.total[heads][i & 1] += p[i];
            if (HAS_GRIDS) state.middle[heads][i & 1] = fmaf(p[i], middle[i >> 1], state.middle[heads][i & 1]);
        }
        // From [tokens, heads] to [heads, tokens], as the second product reads P.
        weights[heads][0] = transpose_8x8(f16_pair(p[0] * fold[0], p[1] * fold[0]));
        weights[heads][1] = transpose_8x8(f16_pair(p[2] * fold[1], p[3] * fold[1]));
    }
    sum_values(state, weights, tile, place);
}
