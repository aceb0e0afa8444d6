// Rows of f32, f16 or bf16 values, read and written as f32.
//
// Part of activation.cu and experts_sum.cu, whose constants VECTOR and ALIGNED it uses.
#pragma once

template <int TYPE> struct Type {
    typedef u16 word;
};
template <> struct Type<F32> {
    typedef float word;
};

template <int TYPE, typename Word> INLINE float widen(Word bits) {
    if constexpr (TYPE == F32)
        return bits;
    else if constexpr (TYPE == F16)
        return float_of_f16(bits);
    else
        return float_of_bf16(bits);
}

template <int TYPE> INLINE auto narrow(float value) {
    if constexpr (TYPE == F32)
        return value;
    else if constexpr (TYPE == F16)
        return f16_of_float(value);
    else
        return bf16_of_float(value);
}

// Reads VECTOR values from index `at` on as f32; values beyond `k` are zero.
template <int TYPE, typename Word> INLINE void load(float (&to)[VECTOR], const Word *from, int at, int k) {
    constexpr int WORDS = VECTOR * sizeof(Word) / 4;
    if (ALIGNED && at + VECTOR <= k) {
        u32 words[WORDS];
#pragma unroll
        for (int i = 0; i < WORDS; i += 4) *(uint4 *)(words + i) = *(const uint4 *)((const u32 *)(from + at) + i);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            if constexpr (TYPE == F32)
                to[i] = __uint_as_float(words[i]);
            else if constexpr (TYPE == BF16)
                to[i] = __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
            else
                to[i] = float_of_f16((u16)(words[i / 2] >> (i % 2 * 16)));
        }
    } else {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) to[i] = at + i < k ? widen<TYPE>(from[at + i]) : 0.0f;
    }
}

// Rounds VECTOR values and stores them from index `at` on; values beyond `k` are left out.
template <int TYPE, typename Word> INLINE void store(const float (&values)[VECTOR], Word *to, int at, int k) {
    constexpr int WORDS = VECTOR * sizeof(Word) / 4;
    Word rounded[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; i++) rounded[i] = narrow<TYPE>(values[i]);
    if (ALIGNED && at + VECTOR <= k) {
        u32 words[WORDS];
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            if constexpr (TYPE == F32)
                words[i] = __float_as_uint(rounded[i]);
            else
                words[i] = (u32)rounded[2 * i] | (u32)rounded[2 * i + 1] << 16;
        }
        if constexpr (WORDS == 2) {
            *(uint2 *)(to + at) = make_uint2(words[0], words[1]);
        } else {
#pragma unroll
            for (int i = 0; i < WORDS; i += 4)
                *(uint4 *)((u32 *)(to + at) + i) = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < VECTOR; i++)
            if (at + i < k) to[at + i] = rounded[i];
    }
}
