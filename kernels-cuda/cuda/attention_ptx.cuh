// What the attention kernels need of PTX, one function an instruction. No header of the toolkit is used, so that the
// run-time compiler alone suffices.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 ALL_LANES = 0xffffffffu;

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes.
__device__ __forceinline__ void copy_async_16(u32 shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// Copies 16 bytes; of the source only `bytes` are read, the rest becomes zero.
__device__ __forceinline__ void copy_async_part(u32 shared, const void* global, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `PENDING` groups of this thread are under way.
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// d += a · b: a is [16, 16] f16, b is [16, 8] f16, d is [16, 8] f32. Lane `4 g + t` holds
//   a: rows g, g + 8, g, g + 8; columns 2 t and 2 t + 1, in the last two 8 more
//   b: rows 2 t and 2 t + 1, then 8 more; column g
//   d: row g, columns 2 t and 2 t + 1; then row g + 8
__device__ __forceinline__ void mma_f16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// An [8, 8] matrix of halves, of which a lane holds two neighbours of row `lane / 4`, becomes its transpose.
__device__ __forceinline__ u32 transpose_8x8(u32 a) {
    u32 d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}

// (a & MASK) | BITS in one instruction.
template <u32 MASK, u32 BITS>
__device__ __forceinline__ u32 mask_or(u32 a) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "n"(MASK), "n"(BITS));
    return d;
}

// Four bytes chosen from the eight of `a` (0 to 3) and `b` (4 to 7), the lowest by the lowest digit.
template <u32 CHOICE>
__device__ __forceinline__ u32 permute(u32 a, u32 b) {
    u32 d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "n"(CHOICE));
    return d;
}

__device__ __forceinline__ float f16_to_f32(u16 x) {
    float d;
    asm("cvt.f32.f16 %0, %1;" : "=f"(d) : "h"(x));
    return d;
}

__device__ __forceinline__ float bf16_to_f32(u16 x) { return __uint_as_float(static_cast<u32>(x) << 16); }

__device__ __forceinline__ u16 f32_to_f16(float x) {
    u16 d;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d) : "f"(x));
    return d;
}

// The largest f16 that is not above.
__device__ __forceinline__ u16 f32_to_f16_down(float x) {
    u16 d;
    asm("cvt.rm.f16.f32 %0, %1;" : "=h"(d) : "f"(x));
    return d;
}

// The smallest f16 that is not below.
__device__ __forceinline__ u16 f32_to_f16_up(float x) {
    u16 d;
    asm("cvt.rp.f16.f32 %0, %1;" : "=h"(d) : "f"(x));
    return d;
}

__device__ __forceinline__ u16 f32_to_bf16(float x) {
    u16 d;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(d) : "f"(x));
    return d;
}

// Two floats as halves, `low` in the low half.
__device__ __forceinline__ u32 pack_f16(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

// 2^x, within 2^-22 of itself; 0 of minus infinity.
__device__ __forceinline__ float exp2_approx(float x) {
    float d;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
    return d;
}

// log2(x), within 2^-22 near 1 and of itself elsewhere.
__device__ __forceinline__ float log2_approx(float x) {
    float d;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
    return d;
}

// What this thread wrote before is seen by who sees what it writes after, on the whole device.
__device__ __forceinline__ void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

__device__ __forceinline__ u32 add_device(u32* address, u32 value) {
    u32 before;
    asm volatile("atom.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
    return before;
}
