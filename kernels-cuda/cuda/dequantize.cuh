// Converts packed codes in shared memory to the A fragments of `mma`.
//
// Floats: a code `q` of 4 bits is inserted into the mantissa of a float at the position where its lowest bit has the
// value 1, so a fragment holds `offset + q` without a subtraction or multiplication. The excess, `offset · Σ x`, is
// subtracted together with the zero point:
//
//     Σ (q − z) x  =  Σ (offset + q) x  −  (offset + z) Σ x
//
// f16: 256 + q if the code is at bits 2 to 5 of a half word, 16 + q at bits 6 to 9. Two fields come from the word, and
// the other two after a rotation by 8: 5 instructions for 8 weights. The fields of row `r` are at bits 2 and 10, those
// of row `r + 8` at bits 6 and 14, so each row has one offset. bf16: 32 + q at bits 2 to 5, with a rotation for each
// field except the first: 7 instructions for 8 weights.
//
// Integers: nibbles become bytes by an AND, after a shift for the upper ones: 3 instructions for 8 weights. Progressive
// weights become `128 + (q − z) s` by one multiplication and one addition for four bytes. Bytes cannot carry into each
// other, because the packer rejects values outside 0 to 255.
//
// Floating-point codes: sign, exponent and mantissa are moved to their positions in a wider format, whose subnormal
// numbers then represent those of the code. This changes the value by a power of two, the difference of the exponent
// biases. For f16, the results are multiplied by its inverse once (`UNIT`). For bf16, products would leave the range of
// f32, so the fragments are multiplied instead. Codes are stored so that one or two masks after a rotation give a pair.
// For 8 weights this takes 11 instructions with E2M1 (17 for bf16), and 10 with E4M3 (18 for bf16).
#pragma once
#include "ptx.cuh"

// The offset that fragments of codes with 4 or 8 bits contain, for rows r (HALF 0) and r + 8 (HALF 1).
template <int ACTIVATION, int BITS, int HALF> INLINE float code_offset() {
    if (BITS == 4) return ACTIVATION == F16 ? (HALF == 0 ? 256.0f : 16.0f) : 32.0f;
    return ACTIVATION == F16 ? 1024.0f : -128.0f;
}

// Converts one word to the fragment of a step of 16 features.
INLINE void fragment_f16_u4(u32 (&a)[4], u32 word) {
    u32 rotated = rotate_right<8>(word);
    a[0] = and_or<0x003c003c, 0x5c005c00>(word);
    a[1] = and_or<0x03c003c0, 0x4c004c00>(word);
    a[2] = and_or<0x003c003c, 0x5c005c00>(rotated);
    a[3] = and_or<0x03c003c0, 0x4c004c00>(rotated);
}

INLINE void fragment_bf16_u4(u32 (&a)[4], u32 word) {
    a[0] = and_or<0x003c003c, 0x42004200>(word);
    a[1] = and_or<0x003c003c, 0x42004200>(rotate_right<4>(word));
    a[2] = and_or<0x003c003c, 0x42004200>(rotate_right<8>(word));
    a[3] = and_or<0x003c003c, 0x42004200>(rotate_right<12>(word));
}

// The positions of magnitude and sign in a word, which the sign may wrap around. They depend on the field, and on
// whether the feature is odd.
INLINE u32 place_of_e2m1(u32 code, u32 field, u32 odd) {
    const u32 magnitude = field == 0 ? 9 : field == 1 ? 12 : field == 2 ? 3 : 6;
    const u32 sign = field == 0 ? 15 : field == 1 ? 18 : field == 2 ? 16 : 17;
    return (code & 7) << (magnitude + 16 * odd) | (code >> 3) << ((sign + 16 * odd) % 32);
}

INLINE u32 place_of_e4m3(u32 code, u32 below, u32 odd) {
    return (code & 127) << ((below ? 0 : 7) + 16 * odd) | (code >> 7) << ((below ? 14 : 15) + 16 * odd);
}

constexpr u32 SIGNS = 0x80008000;

// Converts E2M1 codes to f16: their values times 2⁻¹⁴.
INLINE void fragment_f16_e2m1(u32 (&a)[4], u32 word) {
    a[0] = word & 0x8e008e00;
    a[1] = rotate_right<3>(word) & 0x8e008e00;
    a[2] = and_or<0x0e000e00>(rotate_right<26>(word), rotate_right<1>(word) & SIGNS);
    a[3] = and_or<0x0e000e00>(rotate_right<29>(word), rotate_right<2>(word) & SIGNS);
}

// Converts E2M1 codes to bf16: their exact values.
INLINE void fragment_bf16_e2m1(u32 (&a)[4], u32 word) {
    u32 by_3 = rotate_right<3>(word);
    a[0] = and_or<0x01c001c0>(by_3, word & SIGNS);
    a[1] = and_or<0x01c001c0>(rotate_right<6>(word), by_3 & SIGNS);
    a[2] = and_or<0x01c001c0>(rotate_right<29>(word), rotate_right<1>(word) & SIGNS);
    a[3] = and_or<0x01c001c0>(word, rotate_right<2>(word) & SIGNS);
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = times_bf16_pair<0x7e80>(a[i]);
}

// Converts four E4M3 codes to two pairs of f16: their values times 2⁻⁸.
INLINE void pairs_f16_e4m3(u32 &first, u32 &second, u32 word) {
    first = word & 0xbf80bf80;
    second = and_or<0x3f803f80>(rotate_right<25>(word), rotate_right<31>(word) & SIGNS);
}

// Converts four E4M3 codes to two pairs of bf16: their exact values.
INLINE void pairs_bf16_e4m3(u32 &first, u32 &second, u32 word) {
    first = times_bf16_pair<0x7b80>(and_or<0x07f007f0>(rotate_right<3>(word), word & SIGNS));
    second = times_bf16_pair<0x7b80>(and_or<0x07f007f0>(rotate_right<28>(word), rotate_right<31>(word) & SIGNS));
}

// Converts four bytes to two pairs of f16, 1024 + q, by placing each byte in the mantissa of 1024.
INLINE void pairs_f16_u8(u32 &first, u32 &second, u32 word) {
    first = permute_bytes<0x4140>(word, 0x64646464);
    second = permute_bytes<0x4342>(word, 0x64646464);
}

// Converts four bytes to two pairs of bf16, q − 128, which is exact. Goes through 2²³ + q in f32, because bf16 has too
// few bits for a byte.
INLINE void pairs_bf16_u8(u32 &first, u32 &second, u32 word) {
    const float centre = 8388608.0f + 128.0f;
    float q0 = __uint_as_float(permute_bytes<0x7650>(word, 0x4b000000)) - centre;
    float q1 = __uint_as_float(permute_bytes<0x7651>(word, 0x4b000000)) - centre;
    float q2 = __uint_as_float(permute_bytes<0x7652>(word, 0x4b000000)) - centre;
    float q3 = __uint_as_float(permute_bytes<0x7653>(word, 0x4b000000)) - centre;
    first = bf16_pair(q0, q1);
    second = bf16_pair(q2, q3);
}

// Converts two words to the fragment of a step of 32 features: the lower nibbles are the first 16 features.
INLINE void fragment_u8_u4(u32 (&a)[4], u32 row, u32 below) {
    a[0] = row & 0x0f0f0f0f;
    a[1] = below & 0x0f0f0f0f;
    a[2] = row >> 4 & 0x0f0f0f0f;
    a[3] = below >> 4 & 0x0f0f0f0f;
}

// Converts signed nibbles in the same order, to bytes of sixteen times the code.
INLINE void fragment_s8_s4(u32 (&a)[4], u32 row, u32 below) {
    a[0] = row << 4 & 0xf0f0f0f0;
    a[1] = below << 4 & 0xf0f0f0f0;
    a[2] = row & 0xf0f0f0f0;
    a[3] = below & 0xf0f0f0f0;
}

// Computes 128 + (q − z) s for four bytes; `shift` is `0x80808080 − z s · 0x01010101`.
INLINE u32 progressive(u32 codes, u32 scale, u32 shift) { return codes * scale + shift; }
