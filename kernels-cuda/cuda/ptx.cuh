// Functions for PTX instructions, and the integer types of all kernels.
//
// No kernel includes a CUDA header, so that the run-time compiler alone suffices to build them. Pointers into shared
// memory are 32-bit addresses of the shared window. Sources: PTX ISA, the sections on `cp.async`, `ldmatrix`, `mma`
// (fragment figures), `lop3`, `prmt`, `cvt`.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef int i32;
typedef long long i64;

#define INLINE __device__ __forceinline__

// Number types, as values of macros. The first three have the same numbers as in src/float.rs.
enum { F16 = 0, BF16 = 1, F32 = 2, S8 = 3, PROGRESSIVE = 4, INTEGER = 5, E2M1 = 6, E4M3 = 7, E8M0 = 8 };

constexpr u32 ALL_LANES = 0xffffffffu;

INLINE u32 shared_address(const void *pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// ---- Copies from global to shared memory that bypass registers

// Both addresses are multiples of 16.
INLINE void copy_async_16(u32 to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// The first `valid` bytes are read from memory; the others become zero.
INLINE void copy_async_16(u32 to, const void *from, u32 valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
}

// Ends a group of copies, which may be empty.
INLINE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the `PENDING` most recent groups of this thread are incomplete.
template <int PENDING> INLINE void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- Fragments

// Loads four matrices of 8 rows of 16 bytes; lane `8 i + r` gives the address of row `r` of matrix `i`. Of each matrix,
// lane `l` gets the four bytes at `4 (l % 4)` of row `l / 4`.
INLINE void load_matrices_4(u32 (&to)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}

// Computes d += a · b in f32: a is [16, 16], b is [16, 8], d is [16, 8]. The registers of lane `4 g + t` hold
//   a: rows g, g + 8, g, g + 8; columns 2 t and 2 t + 1 in the first two registers, 2 t + 8 and 2 t + 9 in the others
//   b: rows 2 t and 2 t + 1 in the first register, 2 t + 8 and 2 t + 9 in the second; column g
//   d: row g in the first two registers, row g + 8 in the others; columns 2 t and 2 t + 1
// Integers: a is [16, 32], b is [32, 8], and a register holds four integers instead of two floats.
#define MMA(NAME, SHAPE_AND_TYPES, NUMBER, CONSTRAINT)                                                                     \
    INLINE void NAME(NUMBER(&d)[4], const u32(&a)[4], u32 b0, u32 b1) {                                                    \
        asm volatile("mma.sync.aligned." SHAPE_AND_TYPES " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                     : "+" CONSTRAINT(d[0]), "+" CONSTRAINT(d[1]), "+" CONSTRAINT(d[2]), "+" CONSTRAINT(d[3])              \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                      \
    }

MMA(mma_f16, "m16n8k16.row.col.f32.f16.f16.f32", float, "f")
MMA(mma_bf16, "m16n8k16.row.col.f32.bf16.bf16.f32", float, "f")
MMA(mma_s8_s8, "m16n8k32.row.col.s32.s8.s8.s32", i32, "r")
MMA(mma_u8_s8, "m16n8k32.row.col.s32.u8.s8.s32", i32, "r")
#undef MMA

// Transposes an [8, 8] matrix of 16-bit numbers, of which a lane holds two neighbouring elements of row `lane / 4`.
INLINE u32 transpose_8x8(u32 a) {
    u32 out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(a));
    return out;
}

// ---- Bits

// (word & MASK) | BITS in one instruction.
template <u32 MASK, u32 BITS> INLINE u32 and_or(u32 word) {
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(word), "n"(MASK), "n"(BITS));
    return out;
}

// (word & MASK) | bits in one instruction.
template <u32 MASK> INLINE u32 and_or(u32 word, u32 bits) {
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(word), "n"(MASK), "r"(bits));
    return out;
}

// Rotates to the right by 0 < BY < 32.
template <int BY> INLINE u32 rotate_right(u32 word) {
    u32 out;
    asm("shf.r.wrap.b32 %0, %1, %1, %2;" : "=r"(out) : "r"(word), "n"(BY));
    return out;
}

// Selects four of the eight bytes of `low` (0 to 3) and `high` (4 to 7); nibble `i` of SELECT selects byte `i` of the
// result.
template <u32 SELECT> INLINE u32 permute_bytes(u32 low, u32 high) {
    u32 out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "n"(SELECT));
    return out;
}

// Adds the four signed bytes of a word to `to`.
INLINE i32 add_bytes(u32 word, i32 to) {
    i32 out;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(word), "r"(0x01010101u), "r"(to));
    return out;
}

// ---- Reductions over a warp

INLINE u32 largest_of_lanes(u32 word) {
    u32 out;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(out) : "r"(word));
    return out;
}

INLINE i32 sum_of_lanes(i32 word) {
    i32 out;
    asm volatile("redux.sync.add.s32 %0, %1, 0xffffffff;" : "=r"(out) : "r"(word));
    return out;
}

// ---- Numbers

INLINE float float_of_f16(u16 bits) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
    return out;
}

INLINE float float_of_bf16(u16 bits) { return __uint_as_float((u32)bits << 16); }

// Rounds to nearest, ties to even.
INLINE u16 f16_of_float(float value) {
    u16 out;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(value));
    return out;
}

// Rounds down to f16; the next function rounds up.
INLINE u16 f16_below(float value) {
    u16 out;
    asm("cvt.rm.f16.f32 %0, %1;" : "=h"(out) : "f"(value));
    return out;
}

INLINE u16 f16_above(float value) {
    u16 out;
    asm("cvt.rp.f16.f32 %0, %1;" : "=h"(out) : "f"(value));
    return out;
}

INLINE u16 bf16_of_float(float value) {
    u16 out;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(value));
    return out;
}

// Converts two numbers; `low` is in the lower half.
INLINE u32 f16_pair(float low, float high) {
    u32 out;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

INLINE u32 bf16_pair(float low, float high) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

// Multiplies two bf16, which may be subnormal, by the bf16 whose bits are BY; zeros keep their sign.
template <u32 BY> INLINE u32 times_bf16_pair(u32 pair) {
    u32 out;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(pair), "r"(BY * 0x10001u), "r"(0x80008000u));
    return out;
}

// a · b + c with one rounding, even if contraction is disabled elsewhere.
INLINE float fused(float a, float b, float c) {
    float out;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(out) : "f"(a), "f"(b), "f"(c));
    return out;
}

// 2^x with a relative error of 2^-22; 0 for minus infinity.
INLINE float exp2_approx(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

// log2(x) with an error of 2^-22, absolute near 1 and relative elsewhere.
INLINE float log2_approx(float x) {
    float out;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

// ---- Between threads

// A thread that sees a write of this thread after the fence also sees its writes before it.
INLINE void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Adds to a word and returns its previous value.
INLINE u32 add_device(u32 *address, u32 value) {
    u32 before;
    asm volatile("atom.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
    return before;
}

// Loads that bypass the L1 cache, which is not coherent between multiprocessors.
INLINE uint2 load_past_first_cache(const void *from) {
    uint2 out;
    asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(out.x), "=r"(out.y) : "l"(from) : "memory");
    return out;
}
