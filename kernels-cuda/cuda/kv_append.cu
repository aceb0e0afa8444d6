// Quantizes keys and values and stores them in the pages of a cache.
//
// A few lanes share the row of keys or of values of one token and head. They find its minimum and maximum, and from
// these the grid. The grid is bit-identical to that of `quantize_head` of kernels-cpu.
//
//   zero  = f16 rounded down (min x),  scale = f16 rounded up ((max x - zero) / levels)
//   code  = round half to even ((x - zero) / scale), 0 where scale is 0
//
// Macros: KV_BITS, HEAD_DIM (kv_layout.cuh), INPUT_TYPE 0 f16, 1 bf16, 2 f32.
#include "kv_layout.cuh"

#if INPUT_TYPE == 2
typedef float Input;
#else
typedef u16 Input;
#endif

constexpr int THREADS = 128;
constexpr int SHARE = 8;
constexpr int LANES = DIM <= 64 ? 8 : DIM <= 128 ? 16 : 32;
constexpr int SHARE_WORDS = SHARE / PACK;
constexpr u32 SKIPPED = 0xffffffffu;
constexpr float LARGEST = 65504.0f;

INLINE float widen(Input x) {
#if INPUT_TYPE == 0
    return float_of_f16(x);
#elif INPUT_TYPE == 1
    return float_of_bf16(x);
#else
    return x;
#endif
}

struct alignas(16) Share {
    Input x[SHARE];
};

#if KV_BITS == 4
// Packs eight 4-bit codes: even features in the low half of the word, odd ones in the high half, each half rotated left
// by 2 bits, as the decode kernel needs them (attention_tile.cuh).
INLINE u32 pack_4(const u32 (&code)[SHARE]) {
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) word |= code[2 * i] << (4 * i) | code[2 * i + 1] << (16 + 4 * i);
    return (word << 2 & 0xfffcfffcu) | (word >> 14 & 0x00030003u);
}
#endif

// keys, values  [tokens][kv_heads][HEAD_DIM], tokens `key_stride` or `value_stride` elements apart, 16-byte aligned
// sequence, position  [tokens]: where each token is stored; tokens with the position 2^32 - 1 are skipped
// table         [sequences][table_stride] page numbers; a page holds 2^page_shift tiles
// refused       counts rows that contain NaN or a magnitude above 65504, which is clamped when stored; may be null
// Grid: 128 / LANES rows per block. For each token and head there are a row of keys and a row of values.
extern "C" __global__ void __launch_bounds__(THREADS)
    kv_append(const Input* __restrict__ keys, const Input* __restrict__ values, const u32* __restrict__ sequence,
              const u32* __restrict__ position, const u32* __restrict__ table, u8* __restrict__ pages,
              u32* __restrict__ refused, u64 page_stride, u64 head_stride, u64 key_stride, u64 value_stride,
              u32 tokens, u32 kv_heads, u32 table_stride, u32 page_count, u32 page_shift) {
    const u32 row = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
    const u32 lane = threadIdx.x % LANES;
    const u32 token = row / (2 * kv_heads);
    const bool is_value = row & 1;
    const u32 head = row / 2 % kv_heads;
    // The whole warp takes part in the exchanges below, even lanes without a row.
    bool wanted = token < tokens;
    u32 at = 0, page = 0;
    if (wanted) {
        at = position[token];
        wanted = at != SKIPPED;
    }
    if (wanted) {
        page = table[static_cast<u64>(sequence[token]) * table_stride + (at / TILE_TOKENS >> page_shift)];
        wanted = page < page_count;
    }

    const bool holds = wanted && lane * SHARE < HEAD_DIM;
    float x[SHARE];
    float low = __int_as_float(0x7f800000), high = -low;
    bool bad = false;
    if (holds) {
        const u64 offset = static_cast<u64>(token) * (is_value ? value_stride : key_stride) +
                           static_cast<u64>(head) * HEAD_DIM + lane * SHARE;
        const Share share = *reinterpret_cast<const Share*>((is_value ? values : keys) + offset);
#pragma unroll
        for (int i = 0; i < SHARE; ++i) {
            const float v = widen(share.x[i]);
            bad = bad || !(fabsf(v) <= LARGEST);
            x[i] = fminf(fmaxf(v, -LARGEST), LARGEST);
            low = fminf(low, x[i]);
            high = fmaxf(high, x[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < SHARE; ++i) x[i] = 0.0f;
    }
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
        low = fminf(low, __shfl_xor_sync(ALL_LANES, low, step));
        high = fmaxf(high, __shfl_xor_sync(ALL_LANES, high, step));
        bad = __shfl_xor_sync(ALL_LANES, static_cast<int>(bad), step) || bad;
    }
    if (!wanted || lane * SHARE >= DIM) return;
    if (bad && lane == 0 && refused != nullptr) add_device(refused, 1);

    const u32 tile = at / TILE_TOKENS & ((1u << page_shift) - 1);
    const u32 slot = at % TILE_TOKENS;
    u8* base = pages + page * page_stride + head * head_stride + static_cast<u64>(tile) * TILE_BYTES;
    const u32 word = lane * SHARE_WORDS;
    u32* codes = reinterpret_cast<u32*>(base) +
                 (is_value ? VALUES_AT / 4 + value_word(slot, word) : key_word(slot, word));
#if KV_BITS == 16
    uint4 halves;
    halves.x = f16_pair(x[0], x[1]);
    halves.y = f16_pair(x[2], x[3]);
    halves.z = f16_pair(x[4], x[5]);
    halves.w = f16_pair(x[6], x[7]);
    *reinterpret_cast<uint4*>(codes) = halves;
#else
    // 1.5 · 2^23: adding it to a number below 2^22 rounds the number half to even.
    constexpr float ROUND = 12582912.0f;
    // Adding 0.0 changes -0.0 to 0.0.
    const u16 zero = f16_below(__fadd_rn(low, 0.0f));
    const float from = float_of_f16(zero);
    const float even = __fdiv_rn(__fsub_rn(high, from), KV_BITS == 4 ? 15.0f : 255.0f);
    const u16 scale = f16_above(__fadd_rn(even, 0.0f));
    const float step = float_of_f16(scale);
    u32 code[SHARE];
#pragma unroll
    for (int i = 0; i < SHARE; ++i) {
        const float rounded = __fadd_rn(__fdiv_rn(__fsub_rn(x[i], from), step), ROUND);
        code[i] = holds && step != 0.0f ? __float_as_uint(rounded) & 0xff : 0;
    }
#if KV_BITS == 4
    codes[0] = pack_4(code);
#else
    uint2 packed;
    packed.x = code[0] | code[1] << 8 | code[2] << 16 | code[3] << 24;
    packed.y = code[4] | code[5] << 8 | code[6] << 16 | code[7] << 24;
    *reinterpret_cast<uint2*>(codes) = packed;
#endif
    if (lane == 0) {
        u32* grids = reinterpret_cast<u32*>(base + (is_value ? VALUE_GRIDS_AT : KEY_GRIDS_AT));
        grids[slot] = scale | static_cast<u32>(zero) << 16;
    }
#endif
}
