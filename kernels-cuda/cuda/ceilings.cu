// Measures the limits of a device, relative to which results of kernels are reported: bytes read and copied per second,
// products per second on tensor cores, and the time of a launch.
//
// Macro:
//   PRODUCT    type of the operands in `products`: 0 f16, 1 bf16, 2 s8

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int THREADS = 512;
// The number of 16-byte vectors that a thread loads before it uses the first.
constexpr int FLIGHT = 8;

__device__ __forceinline__ uint4 load(const uint4 *from) {
    uint4 out;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
                 : "l"(from));
    return out;
}

// Reads `vectors` of 16 bytes, a multiple of THREADS · FLIGHT. The condition of the store, which is almost never true,
// depends on all of them, so that the compiler cannot skip the reads.
extern "C" __global__ void __launch_bounds__(THREADS) stream_read(const uint4 *from, u64 vectors, u32 *to) {
    u32 all = 0;
    for (u64 block = blockIdx.x; block < vectors / (THREADS * FLIGHT); block += gridDim.x) {
        uint4 words[FLIGHT];
#pragma unroll
        for (int i = 0; i < FLIGHT; i++) words[i] = load(from + (block * FLIGHT + i) * THREADS + threadIdx.x);
#pragma unroll
        for (int i = 0; i < FLIGHT; i++) all ^= words[i].x ^ words[i].y ^ words[i].z ^ words[i].w;
    }
    if (all == 0x12345678) to[0] = all;
}

// Copies `vectors` of 16 bytes, a multiple of THREADS · FLIGHT.
extern "C" __global__ void __launch_bounds__(THREADS) stream_copy(const uint4 *from, u64 vectors, uint4 *to) {
    for (u64 block = blockIdx.x; block < vectors / (THREADS * FLIGHT); block += gridDim.x) {
        uint4 words[FLIGHT];
#pragma unroll
        for (int i = 0; i < FLIGHT; i++) words[i] = load(from + (block * FLIGHT + i) * THREADS + threadIdx.x);
#pragma unroll
        for (int i = 0; i < FLIGHT; i++) to[(block * FLIGHT + i) * THREADS + threadIdx.x] = words[i];
    }
}

extern "C" __global__ void nothing() {}

// The number of independent sums per warp.
constexpr int CHAINS = 8;

// Computes `rounds` times CHAINS products per warp, with all operands in registers.
extern "C" __global__ void __launch_bounds__(THREADS) products(u32 rounds, u32 seed, u32 *to) {
    u32 a[4], b[2], sums[CHAINS][4];
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = (threadIdx.x * 7 + i + seed) & 0x03030303;
#pragma unroll
    for (int i = 0; i < 2; i++) b[i] = (threadIdx.x * 5 + i + seed) & 0x03030303;
#pragma unroll
    for (int c = 0; c < CHAINS; c++)
#pragma unroll
        for (int i = 0; i < 4; i++) sums[c][i] = 0;
#pragma unroll 4
    for (u32 round = 0; round < rounds; round++) {
#pragma unroll
        for (int c = 0; c < CHAINS; c++) {
            u32 *d = sums[c];
#if PRODUCT == 0
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                         "{%0, %1, %2, %3};"
                         : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#elif PRODUCT == 1
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                         "{%0, %1, %2, %3};"
                         : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
            asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                         "{%0, %1, %2, %3};"
                         : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
        }
    }
    u32 all = 0;
#pragma unroll
    for (int c = 0; c < CHAINS; c++)
#pragma unroll
        for (int i = 0; i < 4; i++) all ^= sums[c][i];
    if (all == 0x12345678) to[0] = all;
}
