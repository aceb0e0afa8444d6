// Attention of one query a sequence on the paged cache: the read half.
//
//   score_t = scale · q · k_t,   out = sum_t p_t v_t / sum_t p_t,   lse = ln sum_t exp(score_t),   p_t = exp(score_t - max)
//
// A warp takes tiles of 16 tokens, one after another; nothing but the ring of tiles that it copies ahead for itself is
// waited for, and warps meet once, at the end. Per tile:
//
//   S = K Q^T    [16 tokens, 8 heads], codes straight from the row: one wide load a lane and row
//   p            from S with the token's scale and zero and the sums of q, in f32
//   O^T += V^T P [16 features, 8 heads], with the token's scale folded into P before it is rounded to f16
//
// Codes become halves without a subtraction: a code in bits 2 to 5 under the exponent of 256 is 256 + code, in bits 6 to
// 9 under that of 16 it is 16 + code, a byte under that of 1024 is 1024 + code. What was added is taken away once, in
// f32: from S by starting at -sum(offset · q), from O with the sum of the rounded P. The rest of v's grid is
// v = scale (code - CENTRE) + (zero + CENTRE scale), of which only the first part meets the rounded P.
//
// A sequence is cut into splits by a rule of its number of tokens alone; the last block of a sequence and head to finish
// joins them in order. So a result depends on nothing beside its own sequence.
//
// Macros: KV_BITS, HEAD_DIM (kv_layout.cuh); QUERY_TYPE 0 f16, 1 bf16; OUT_TYPE 0 f16, 1 bf16, 2 f32; HEAD_TILES 1 or 2:
// query heads of a block in eights; WARPS; STAGES of the ring; MAX_SPLITS and MIN_SPLIT, tokens, a multiple of 64;
// MIN_BLOCKS a multiprocessor, which bounds registers.
#include "kv_layout.cuh"

#if OUT_TYPE == 2
typedef float Out;
#else
typedef u16 Out;
#endif

constexpr int THREADS = 32 * WARPS;
constexpr int HEADS = 8 * HEAD_TILES;
constexpr int KEY_STEPS = DIM / 16;
constexpr int OUT_TILES = DIM / 16;
// What codes are too large by, for even and odd pairs of codes of a half word.
constexpr float OFFSET_EVEN = KV_BITS == 4 ? 256.0f : KV_BITS == 8 ? 1024.0f : 0.0f;
constexpr float OFFSET_ODD = KV_BITS == 4 ? 16.0f : OFFSET_EVEN;
constexpr float CENTRE = KV_BITS == 4 ? 8.0f : KV_BITS == 8 ? 128.0f : 0.0f;
// P may grow to 2^GROWTH before the maximum that it is relative to is taken anew.
constexpr float GROWTH = 6.0f;
// The largest value scale, as P has it folded in, is from 2^7 when chosen to below 2^9: with 2^GROWTH less than 65504.
constexpr float SCALE_LIMIT = 512.0f;
constexpr float HALVES_SCALE = 256.0f;
constexpr float LOWEST = -1e30f;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

// Rows of features where warps and splits meet.
constexpr int MEET_STRIDE = DIM + 4;
extern __shared__ __align__(128) u8 shared[];

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// ------------------------------------------------------------------------------------------------ codes to halves

// Words of a lane in a row of keys, and how many are loaded at once.
constexpr int KEY_WORDS = ROW_WORDS / 4;
constexpr int KEY_WIDE = KEY_WORDS % 4 == 0 ? 4 : KEY_WORDS % 2 == 0 ? 2 : 1;
// The same of values, and the half word beyond, where rows of 4 bits are an odd number of 32 features.
constexpr int VALUE_WORDS = ROW_WORDS / 8;
constexpr int VALUE_WIDE = VALUE_WORDS % 4 == 0 ? 4 : VALUE_WORDS % 2 == 0 ? 2 : 1;
constexpr bool VALUE_TAIL = ROW_WORDS % 8 == 4;
// Output tiles of 16 features that a word of a lane belongs to.
constexpr int WORD_TILES = PACK / 2;

template <int WIDE>
__device__ __forceinline__ void load_words(u32* words, const u32* from) {
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

// The feature of a lane's `e`th element of a row, a multiple of a pair: lanes take turns of `wide` words.
__device__ __forceinline__ constexpr int feature_of(int e, int lane, int lanes, int wide) {
    const int run = wide * PACK;
    return (e / run * lanes + lane) * run + e % run;
}

// One word of a row: pairs of neighbouring features as halves.
__device__ __forceinline__ void spread_keys(u32 word, u32 (&pairs)[PACK / 2]) {
#if KV_BITS == 4
    const u32 turned = permute<0x2301>(word, 0);
    pairs[0] = mask_or<0x003c003c, 0x5c005c00>(word);
    pairs[1] = mask_or<0x03c003c0, 0x4c004c00>(word);
    pairs[2] = mask_or<0x003c003c, 0x5c005c00>(turned);
    pairs[3] = mask_or<0x03c003c0, 0x4c004c00>(turned);
#elif KV_BITS == 8
    pairs[0] = permute<0x4140>(word, 0x64646464);
    pairs[1] = permute<0x4342>(word, 0x64646464);
#else
    pairs[0] = word;
#endif
}

#if KV_BITS == 4
// The low halves (HIGH: the high ones) of one word of two tokens: of four features, both tokens' codes as halves.
template <bool HIGH>
__device__ __forceinline__ void spread_halves(u32 first, u32 second, u32 (&out)[4]) {
    const u32 straight = permute<HIGH ? 0x7632 : 0x5410>(first, second);
    const u32 turned = permute<HIGH ? 0x6723 : 0x4501>(first, second);
    out[0] = mask_or<0x003c003c, 0x5c005c00>(straight);
    out[1] = mask_or<0x03c003c0, 0x4c004c00>(straight);
    out[2] = mask_or<0x003c003c, 0x5c005c00>(turned);
    out[3] = mask_or<0x03c003c0, 0x4c004c00>(turned);
}
#endif

// One word of a row of two tokens: feature by feature, both tokens' codes as halves.
__device__ __forceinline__ void spread_values(u32 first, u32 second, u32 (&out)[PACK]) {
#if KV_BITS == 4
    u32 even[4], odd[4];
    spread_halves<false>(first, second, even);
    spread_halves<true>(first, second, odd);
#pragma unroll
    for (int i = 0; i < 4; ++i) out[2 * i] = even[i], out[2 * i + 1] = odd[i];
#elif KV_BITS == 8
    const u32 low = permute<0x5410>(first, second), high = permute<0x7632>(first, second);
    out[0] = permute<0x4240>(low, 0x64646464);
    out[1] = permute<0x4341>(low, 0x64646464);
    out[2] = permute<0x4240>(high, 0x64646464);
    out[3] = permute<0x4341>(high, 0x64646464);
#else
    out[0] = permute<0x5410>(first, second);
    out[1] = permute<0x7632>(first, second);
#endif
}

// The feature of row `g` (or `g + 8`, `half` 1) of an output tile.
__device__ __forceinline__ int out_feature(int tile, int half, int g) {
    constexpr int WHOLE = VALUE_WORDS * WORD_TILES;
    if (!VALUE_TAIL || tile < WHOLE) return feature_of(2 * tile + half, g, 8, VALUE_WIDE);
    // Two lanes share a word of the tail; the even features are in its low half.
    return 8 * PACK * VALUE_WORDS + 8 * (g / 2) + 2 * (2 * (tile - WHOLE) + half) + g % 2;
}

// What the codes of a row of an output tile are too large by.
__device__ __forceinline__ constexpr float out_offset(int tile, int half) {
    constexpr int WHOLE = VALUE_WORDS * WORD_TILES;
    const bool odd = VALUE_TAIL && tile >= WHOLE ? half : tile & 1;
    return odd ? OFFSET_ODD : OFFSET_EVEN;
}

// ------------------------------------------------------------------------------------------------------ a warp's work

struct State {
    float out[HEAD_TILES][OUT_TILES][4];
    // Sums of the rounded P, as the tensor cores see them.
    float rounded[HEAD_TILES][4];
    // Of heads 2 t and 2 t + 1, over the tokens of this lane: sums of p, and of p (zero + CENTRE scale).
    float total[HEAD_TILES][2], middle[HEAD_TILES][2];
    // What p is relative to, in units of log2.
    float reference[HEAD_TILES][2];
    // What value scales are multiplied with: a power of two.
    float unit;
    float largest_scale;
};

struct Queries {
    // Fragments: k runs along the features as a lane has them in a row of keys.
    u32 fragment[HEAD_TILES][KEY_STEPS][2];
    // scale · log2 e of heads 2 t and 2 t + 1, the sums of q times that, and the negated sums of offset · q.
    float scale[HEAD_TILES][2], sum[HEAD_TILES][2], start[HEAD_TILES][2];
};

// The queries of heads `first` to `first + HEADS` of which `count` exist; halves, of bf16 times a power of two that
// makes the largest of a head 2^14 to 2^15.
__device__ __forceinline__ void load_queries(Queries& queries, const u16* query, u32 first, u32 count, float scale,
                                             u32 g, u32 t) {
#pragma unroll
    for (int tile = 0; tile < HEAD_TILES; ++tile) {
        const u32 head = 8 * tile + g;
        const u16* row = query + static_cast<u64>(first + head) * HEAD_DIM;
        ushort4 raw[KEY_STEPS];
#if QUERY_TYPE == 1
        float largest = 0.0f;
#endif
#pragma unroll
        for (int step = 0; step < KEY_STEPS; ++step) {
            const int feature = feature_of(4 * step, t, 4, KEY_WIDE);
            raw[step] = make_ushort4(0, 0, 0, 0);
            if (head < count && feature < HEAD_DIM) raw[step] = *reinterpret_cast<const ushort4*>(row + feature);
#if QUERY_TYPE == 1
            largest = fmaxf(fmaxf(largest, fabsf(bf16_to_f32(raw[step].x))), fabsf(bf16_to_f32(raw[step].y)));
            largest = fmaxf(fmaxf(largest, fabsf(bf16_to_f32(raw[step].z))), fabsf(bf16_to_f32(raw[step].w)));
#endif
        }
        float back = 1.0f;
#if QUERY_TYPE == 1
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 2));
        // Biased exponents; the inverse of 2^(e - 127 - 14) is 2^(127 + 14 - e). Kept where both are normal numbers.
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
            u32 low = pack_f16(bf16_to_f32(raw[step].x) * forth, bf16_to_f32(raw[step].y) * forth);
            u32 high = pack_f16(bf16_to_f32(raw[step].z) * forth, bf16_to_f32(raw[step].w) * forth);
#else
            u32 low = raw[step].x | static_cast<u32>(raw[step].y) << 16;
            u32 high = raw[step].z | static_cast<u32>(raw[step].w) << 16;
#endif
            queries.fragment[tile][step][0] = low;
            queries.fragment[tile][step][1] = high;
            if (HAS_GRIDS) {
                mma_f16(sums, ONES, ONES, ONES, ONES, low, high);
                mma_f16(starts, EVEN, EVEN, ODD, ODD, low, high);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            // Column 2 t + i is the head that lanes 4 (2 t + i) and on have loaded.
            queries.scale[tile][i] = scale * LOG2_E * __shfl_sync(ALL_LANES, back, 4 * (2 * t + i));
            queries.sum[tile][i] = sums[i] * queries.scale[tile][i];
            queries.start[tile][i] = starts[i];
        }
    }
}

__device__ __forceinline__ void score_tile(float (&scores)[HEAD_TILES][4], const Queries& queries, const u32* keys,
                                           u32 g, u32 t) {
    u32 words[2][KEY_WORDS];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < KEY_WORDS; i += KEY_WIDE)
            load_words<KEY_WIDE>(&words[half][i], keys + key_word(g + 8 * half, 4 * i + t * KEY_WIDE));
#pragma unroll
    for (int tile = 0; tile < HEAD_TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[tile][i] = queries.start[tile][i & 1];
    // Two pairs of features make a step of mma.
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
                mma_f16(scores[tile], low[2 * j], high[2 * j], low[2 * j + 1], high[2 * j + 1], query[0], query[1]);
            }
    }
}

// Takes references anew from what has been seen up to this tile; sums become relative to them.
__device__ __forceinline__ void rescale(State& state, const float (&scores)[HEAD_TILES][4], float value_scale) {
    float unit = 1.0f;
    if (HAS_GRIDS) {
        float largest = fmaxf(state.largest_scale, value_scale);
        for (int step = 4; step < 32; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, step));
        state.largest_scale = largest;
        // Biased exponents: unit · largest is from 2^7 to below 2^8. Of no scale but 0 anything will do.
        const int exponent = static_cast<int>(__float_as_uint(largest) >> 23);
        const float chosen = largest > 0.0f ? __uint_as_float(static_cast<u32>(254 + 7 - exponent) << 23) : state.unit;
        unit = chosen / state.unit;
        state.unit = chosen;
    }
#pragma unroll
    for (int tile = 0; tile < HEAD_TILES; ++tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float highest = fmaxf(scores[tile][i], scores[tile][i + 2]);
            for (int step = 4; step < 32; step *= 2)
                highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, step));
            highest = fmaxf(highest, state.reference[tile][i]);
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

// One output tile of 16 features: `low` and `high` are rows g and g + 8 for tokens 2 t and 2 t + 1, then for 8 more.
__device__ __forceinline__ void add_values(State& state, const u32 (&weights)[HEAD_TILES][2], int tile, u32 low,
                                           u32 high, u32 low_8, u32 high_8) {
#pragma unroll
    for (int heads = 0; heads < HEAD_TILES; ++heads)
        mma_f16(state.out[heads][tile], low, high, low_8, high_8, weights[heads][0], weights[heads][1]);
}

__device__ __forceinline__ void sum_values(State& state, const u32 (&weights)[HEAD_TILES][2], const u32* values, u32 g,
                                           u32 t) {
    constexpr u32 ONES = 0x3c003c00;
    if (HAS_GRIDS)
#pragma unroll
        for (int heads = 0; heads < HEAD_TILES; ++heads)
            mma_f16(state.rounded[heads], ONES, ONES, ONES, ONES, weights[heads][0], weights[heads][1]);
    // Tokens 2 t, 2 t + 1, 2 t + 8, 2 t + 9.
#pragma unroll
    for (int i = 0; i < VALUE_WORDS; i += VALUE_WIDE) {
        u32 words[4][VALUE_WIDE];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const u32 token = 2 * t + (k & 1) + 8 * (k >> 1);
            load_words<VALUE_WIDE>(words[k], values + value_word(token, 8 * i + g * VALUE_WIDE));
        }
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
        for (int k = 0; k < 4; ++k) {
            const u32 token = 2 * t + (k & 1) + 8 * (k >> 1);
            half[k] = reinterpret_cast<const u16*>(values + value_word(token, 8 * VALUE_WORDS))[g];
        }
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

// A tile that lies in shared memory; tokens from `seen_from` to below `seen_to` of its 16 are seen.
__device__ __forceinline__ void attend_tile(State& state, const Queries& queries, const u8* tile, int seen_from,
                                            int seen_to, u32 g, u32 t) {
    float scores[HEAD_TILES][4];
    score_tile(scores, queries, reinterpret_cast<const u32*>(tile), g, t);
    float key_scale[2] = {1.0f, 1.0f}, key_zero[2] = {}, value_scale[2] = {}, middle[2] = {};
    if (HAS_GRIDS) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 key = reinterpret_cast<const u32*>(tile + KEY_GRIDS_AT)[g + 8 * half];
            const u32 value = reinterpret_cast<const u32*>(tile + VALUE_GRIDS_AT)[g + 8 * half];
            key_scale[half] = f16_to_f32(static_cast<u16>(key));
            key_zero[half] = f16_to_f32(static_cast<u16>(key >> 16));
            value_scale[half] = f16_to_f32(static_cast<u16>(value));
            middle[half] = fmaf(value_scale[half], CENTRE, f16_to_f32(static_cast<u16>(value >> 16)));
        }
    }
    float surplus = minus_infinity();
#pragma unroll
    for (int heads = 0; heads < HEAD_TILES; ++heads)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float score = scores[heads][i] * queries.scale[heads][i & 1];
            if (HAS_GRIDS) score = fmaf(key_zero[i >> 1], queries.sum[heads][i & 1], key_scale[i >> 1] * score);
            scores[heads][i] = score;
        }
    if (seen_from > 0 || seen_to < TILE_TOKENS) {
#pragma unroll
        for (int heads = 0; heads < HEAD_TILES; ++heads)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int token = static_cast<int>(g) + 8 * (i >> 1);
                if (token < seen_from || token >= seen_to) {
                    scores[heads][i] = minus_infinity();
                    value_scale[i >> 1] = 0.0f;
                    middle[i >> 1] = 0.0f;
                }
            }
    }
#pragma unroll
    for (int heads = 0; heads < HEAD_TILES; ++heads)
#pragma unroll
        for (int i = 0; i < 4; ++i) surplus = fmaxf(surplus, scores[heads][i] - state.reference[heads][i & 1]);
    const float larger = fmaxf(value_scale[0], value_scale[1]);
    const bool outgrown = surplus > GROWTH || (HAS_GRIDS && larger * state.unit >= SCALE_LIMIT);
    if (__any_sync(ALL_LANES, outgrown)) rescale(state, scores, larger);

    u32 weights[HEAD_TILES][2];
    float fold[2] = {HALVES_SCALE, HALVES_SCALE};
    if (HAS_GRIDS) fold[0] = value_scale[0] * state.unit, fold[1] = value_scale[1] * state.unit;
#pragma unroll
    for (int heads = 0; heads < HEAD_TILES; ++heads) {
        float p[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            p[i] = exp2_approx(scores[heads][i] - state.reference[heads][i & 1]);
            state.total[heads][i & 1] += p[i];
            if (HAS_GRIDS) state.middle[heads][i & 1] = fmaf(p[i], middle[i >> 1], state.middle[heads][i & 1]);
        }
        // [tokens, heads] as the scores lie becomes [heads, tokens], which is how the second product reads P.
        weights[heads][0] = transpose_8x8(pack_f16(p[0] * fold[0], p[1] * fold[0]));
        weights[heads][1] = transpose_8x8(pack_f16(p[2] * fold[1], p[3] * fold[1]));
    }
    sum_values(state, weights, reinterpret_cast<const u32*>(tile + VALUES_AT), g, t);
}

// ------------------------------------------------------------------------------------------------------------- copies

// Copies rows of tokens from `skipped` to below `valid` of a tile, and grids up to there; other rows become zeros and are
// not read, so that they may hold anything.
__device__ __forceinline__ void copy_tile(u32 to, const u8* from, int skipped, int valid, u32 lane) {
    constexpr int CHUNKS = TILE_BYTES / 16, ROW_CHUNKS = ROW_BYTES / 16;
    to += 16 * lane;
    from += 16 * lane;
    if (skipped <= 0 && valid >= TILE_TOKENS) {
#pragma unroll
        for (int i = 0; i < CHUNKS; i += 32)
            if (i + 32 <= CHUNKS || i + lane < CHUNKS) copy_async_16(to + 16 * i, from + 16 * i);
        return;
    }
#pragma unroll 1
    for (int i = 0; i + static_cast<int>(lane) < CHUNKS; i += 32) {
        const int chunk = i + static_cast<int>(lane), row = chunk / ROW_CHUNKS;
        const int token = row < TILE_TOKENS ? row : value_token(row - TILE_TOKENS);
        int bytes = token >= skipped && token < valid ? 16 : 0;
        // A chunk of grids is of four tokens.
        if (row >= 2 * TILE_TOKENS)
            bytes = min(max(4 * (valid - (chunk - 2 * TILE_TOKENS * ROW_CHUNKS) % 4 * 4), 0), 16);
        copy_async_part(to + 16 * i, from + 16 * i, bytes);
    }
}

// ------------------------------------------------------------------------------------------------------------- splits

__device__ __forceinline__ u32 split_tokens(u32 tokens) {
    const u32 even = (tokens + MAX_SPLITS - 1) / MAX_SPLITS;
    return max((even + 63) / 64 * 64, static_cast<u32>(MIN_SPLIT));
}

__device__ __forceinline__ void store(Out* out, float x) {
#if OUT_TYPE == 0
    *out = f32_to_f16(x);
#elif OUT_TYPE == 1
    *out = f32_to_bf16(x);
#else
    *out = x;
#endif
}

// What blocks leave for the one that joins them.
struct Part {
    float reference, total;
};

// query   [sequences] rows `query_stride` elements apart, [kv_heads · group][HEAD_DIM], 8-byte aligned
// pages   tiles at page · page_stride + kv head · head_stride bytes, multiples of 16
// table   page numbers in order: table[sequence · table_stride + kv head · table_head_stride + i]
// tokens, first  tokens of the list, and tokens at its beginning that are not seen: [sequence · count_stride +
//         kv head · count_head_stride]; `first` may be null
// out     [sequences][kv_heads · group][HEAD_DIM];  lse [sequences][kv_heads · group], natural logarithm, may be null
// sums    f32 [sequences][kv_heads · group][max_splits][HEAD_DIM];  parts [sequences][kv_heads · group][max_splits]
// tickets [sequences][kv_heads · head blocks], 0 before the first launch, and again after each
// Grid: (max_splits, kv_heads · head blocks, sequences), max_splits at least what the longest sequence is cut into.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    attention_decode(const u16* __restrict__ query, const u8* __restrict__ pages, const u32* __restrict__ table,
                     const u32* __restrict__ tokens, const u32* __restrict__ first, Out* __restrict__ out,
                     float* __restrict__ lse, float* sums, Part* parts, u32* tickets, u64 page_stride, u64 head_stride,
                     u64 query_stride, u32 table_stride, u32 table_head_stride, u32 count_stride,
                     u32 count_head_stride, u32 page_shift, u32 kv_heads, u32 group, float scale) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const u32 max_splits = gridDim.x, split = blockIdx.x, sequence = blockIdx.z;
    const u32 head_blocks = gridDim.y / kv_heads, kv_head = blockIdx.y / head_blocks;
    const u32 within = blockIdx.y % head_blocks * HEADS;
    const u32 heads = min(group - within, static_cast<u32>(HEADS));
    const u32 first_head = kv_head * group + within, query_heads = kv_heads * group;

    const u64 count_at = static_cast<u64>(sequence) * count_stride + static_cast<u64>(kv_head) * count_head_stride;
    const u32 n = tokens[count_at];
    const u32 unseen = first == nullptr ? 0 : first[count_at];
    const u32 step = split_tokens(n);
    const u32 splits = max((n + step - 1) / step, 1u);
    if (split >= splits) return;

    const u32 begin_token = split * step, end_token = min(begin_token + step, n);
    const u32 begin = max(begin_token, unseen) / TILE_TOKENS, end = (end_token + TILE_TOKENS - 1) / TILE_TOKENS;
    const u32* list = table + static_cast<u64>(sequence) * table_stride + static_cast<u64>(kv_head) * table_head_stride;
    const u8* head_pages = pages + kv_head * head_stride;
    const u32 mine = begin + warp < end ? (end - begin - warp + WARPS - 1) / WARPS : 0;

    u8* ring = shared + warp * (STAGES * TILE_BYTES);
    const u32 ring_address = shared_address(ring);
    // The number of the page of the next tile to copy is asked for one tile ahead.
    u32 page = mine > 0 ? list[begin + warp >> page_shift] : 0;
    const auto copy = [&](u32 i) {
        const u32 tile = begin + warp + i * WARPS;
        const u8* from = head_pages + page * page_stride +
                         static_cast<u64>(tile & ((1u << page_shift) - 1)) * TILE_BYTES;
        const int start = static_cast<int>(tile * TILE_TOKENS);
        copy_tile(ring_address + i % STAGES * TILE_BYTES, from, static_cast<int>(unseen) - start,
                  static_cast<int>(end_token) - start, lane);
        if (i + 1 < mine) page = list[tile + WARPS >> page_shift];
    };
#pragma unroll
    for (u32 i = 0; i < STAGES - 1; ++i) {
        if (i < mine) copy(i);
        copy_async_commit();
    }

    Queries queries;
    load_queries(queries, query + sequence * query_stride, first_head, heads, scale, g, t);
    State state = {};
    // Any scale but 0 outgrows this, so the first tile chooses.
    state.unit = __uint_as_float((127u + 60u) << 23);
#pragma unroll
    for (int i = 0; i < 2 * HEAD_TILES; ++i) state.reference[i / 2][i % 2] = LOWEST;

    for (u32 i = 0; i < mine; ++i) {
        copy_async_wait<STAGES - 2>();
        // All lanes' copies of this tile are there, and all lanes are done with the tile before.
        __syncwarp();
        if (i + STAGES - 1 < mine) copy(i + STAGES - 1);
        copy_async_commit();
        const u32 tile = begin + warp + i * WARPS;
        const int seen_from = static_cast<int>(unseen) - static_cast<int>(tile * TILE_TOKENS);
        const int seen_to = static_cast<int>(end_token) - static_cast<int>(tile * TILE_TOKENS);
        attend_tile(state, queries, ring + i % STAGES * TILE_BYTES, seen_from, seen_to, g, t);
    }
    copy_async_wait<0>();

    // Warps meet: [warp][head][feature] sums, then what they are relative to, over the ring.
    __syncthreads();
    float* meet = reinterpret_cast<float*>(shared);
    Part* meet_parts = reinterpret_cast<Part*>(meet + WARPS * HEADS * MEET_STRIDE);
    const float inverse = HAS_GRIDS ? 1.0f / state.unit : 1.0f / HALVES_SCALE;
#pragma unroll
    for (int tile = 0; tile < HEAD_TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float total = state.total[tile][i], middle = state.middle[tile][i];
            for (int step = 4; step < 32; step *= 2) {
                total += __shfl_xor_sync(ALL_LANES, total, step);
                middle += __shfl_xor_sync(ALL_LANES, middle, step);
            }
            const u32 head = 8 * tile + 2 * t + i;
            if (g == 0) {
                Part part;
                part.reference = state.reference[tile][i];
                part.total = total;
                meet_parts[warp * HEADS + head] = part;
            }
            float* row = meet + (warp * HEADS + head) * MEET_STRIDE;
#pragma unroll
            for (int j = 0; j < OUT_TILES; ++j)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float surplus = (out_offset(j, half) + CENTRE) * state.rounded[tile][i];
                    const float sum = HAS_GRIDS ? state.out[tile][j][2 * half + i] - surplus
                                                : state.out[tile][j][2 * half + i];
                    row[out_feature(j, half, g)] = fmaf(sum, inverse, middle);
                }
        }
    __syncthreads();

    const u64 row_base = static_cast<u64>(sequence) * query_heads + first_head;
    for (u32 item = threadIdx.x; item < heads * HEAD_DIM; item += THREADS) {
        const u32 head = item / HEAD_DIM, feature = item % HEAD_DIM;
        float highest = LOWEST;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) highest = fmaxf(highest, meet_parts[w * HEADS + head].reference);
        float sum = 0.0f, total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const Part part = meet_parts[w * HEADS + head];
            const float factor = exp2_approx(part.reference - highest);
            sum = fmaf(factor, meet[(w * HEADS + head) * MEET_STRIDE + feature], sum);
            total = fmaf(factor, part.total, total);
        }
        if (splits == 1) {
            store(out + (row_base + head) * HEAD_DIM + feature, total == 0.0f ? 0.0f : sum / total);
            if (lse != nullptr && feature == 0)
                lse[row_base + head] = total == 0.0f ? minus_infinity() : (highest + log2_approx(total)) * LN_2;
        } else {
            const u64 at = (row_base + head) * max_splits + split;
            sums[at * HEAD_DIM + feature] = sum;
            if (feature == 0) {
                parts[at].reference = highest;
                parts[at].total = total;
            }
        }
    }
    if (splits == 1) return;

    // The last block to arrive joins the splits, in order.
    fence_device();
    __syncthreads();
    u32* last = reinterpret_cast<u32*>(shared);
    u32* ticket = tickets + static_cast<u64>(sequence) * gridDim.y + blockIdx.y;
    if (threadIdx.x == 0) {
        const bool is_last = add_device(ticket, 1) == splits - 1;
        if (is_last) *ticket = 0;
        *last = is_last;
    }
    __syncthreads();
    if (*last == 0) return;
    fence_device();
    for (u32 item = threadIdx.x; item < heads * HEAD_DIM; item += THREADS) {
        const u32 head = item / HEAD_DIM, feature = item % HEAD_DIM;
        const u64 at = (row_base + head) * max_splits;
        float highest = LOWEST;
        for (u32 s = 0; s < splits; ++s) highest = fmaxf(highest, parts[at + s].reference);
        float sum = 0.0f, total = 0.0f;
        for (u32 s = 0; s < splits; ++s) {
            const float factor = exp2_approx(parts[at + s].reference - highest);
            sum = fmaf(factor, sums[(at + s) * HEAD_DIM + feature], sum);
            total = fmaf(factor, parts[at + s].total, total);
        }
        store(out + (row_base + head) * HEAD_DIM + feature, total == 0.0f ? 0.0f : sum / total);
        if (lse != nullptr && feature == 0)
            lse[row_base + head] = total == 0.0f ? minus_infinity() : (highest + log2_approx(total)) * LN_2;
    }
}
