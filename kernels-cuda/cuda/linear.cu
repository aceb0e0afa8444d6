// A linear layer on packed weights: y[m, n] = Σ_k x[m, k] ŵ[n, k] + bias[n].
//
// One text serves W4A16, W8A16, W8A8 and W4A8; what differs is chosen by these macros:
//
//   ACTIVATION   F16, BF16 or S8: what `x` holds; sums are in f32, of S8 in whole numbers
//   CODE_BITS    4 or 8
//   GROUP        32, 64 or 128 features share a scale; 0: all of a row
//   SCALE        F16, BF16, F32: type of the scales of groups; PROGRESSIVE: u8, below an f32 of the row
//   ZEROS        1: each group (of GROUP 0 each row) has a zero; 0: `middle` is the zero of all
//   X_ZERO       1: whole-number activations have a zero, the same for all tokens
//   OUTPUT       F16, BF16 or F32
//   ROW_WARPS, ROW_TILES, TOKEN_WARPS, TOKEN_TILES, STAGES, BLOCKS   the shape of a block: warps along
//                output features and 16-row tiles of each, warps along tokens and 8-token tiles of each, depth of the
//                ring, blocks that a multiprocessor should hold
//   SERIAL       1: a block takes all chunks of k, one after the other; 0: one chunk
//
// Weights are `mma`'s A operand, tokens its columns: eight tokens fill a tile. A block walks along k in tiles of 128
// features; each tile's codes, activations and scales land in a ring in shared memory, STAGES − 1 ahead. Codes lie as a
// lane needs them (src/layout.rs), activations swizzled for `ldmatrix`. Of the tile behind the current one
// the sums Σ x of each group are made, by `mma` with a matrix of ones, dealt out over the warps: a grid's zeros and the
// offset of the dequantization (dequantize.cuh) are multiplied with them, once a group, as the value that the
// group's accumulators start from; where whole numbers are summed over all of k, once at its end.
//
// Chunks: k is cut into `chunks` runs of whole tiles, a number that depends on the weights' shape alone. Each is summed
// from zero, and chunks are added in order, by one block or by the last of several to arrive; so a row's bits
// depend neither on the rows beside it, nor on their number, nor on the shape of the block.
#include "dequantize.cuh"

constexpr bool FLOAT = ACTIVATION != S8;
constexpr bool TWO_LEVELS = SCALE == PROGRESSIVE;
// Whole numbers that are summed over all of k: they join exactly, in any order.
constexpr bool WHOLE = !FLOAT && (GROUP == 0 || TWO_LEVELS);
// Codes less their zero, as signed numbers: nothing is too much, and sums of activations are not needed.
constexpr bool SIGNED = !FLOAT && !ZEROS && !TWO_LEVELS;
constexpr bool SUMS = !SIGNED;
constexpr int SHIFT = SIGNED && CODE_BITS == 4 ? 4 : 0;

constexpr int WARPS = ROW_WARPS * TOKEN_WARPS;
constexpr int THREADS = 32 * WARPS;
constexpr int ROW_BLOCKS = ROW_WARPS * ROW_TILES;
constexpr int ROWS = 16 * ROW_BLOCKS;
constexpr int TOKENS = 8 * TOKEN_WARPS * TOKEN_TILES;
constexpr int TILE_K = 128;
// Bytes of a tile of a token's activations, and steps of `mma` in it, of 32 bytes each.
constexpr int X_ROW = FLOAT ? 2 * TILE_K : TILE_K;
constexpr int STEPS = X_ROW / 32;
constexpr int GROUPS = GROUP == 0 ? 1 : TILE_K / GROUP;
constexpr int GROUP_STEPS = STEPS / GROUPS;
constexpr int TILE_BYTES = 16 * TILE_K * CODE_BITS / 8;
// What stands beside a tile: scales, zeros and sums of weights of its groups.
constexpr int SCALE_BYTES = GROUP == 0 ? 0 : TWO_LEVELS ? 1 : SCALE == F32 ? 4 : 2;
constexpr int ZERO_BYTES = GROUP == 0 || !ZEROS ? 0 : 2 * CODE_BITS;
constexpr bool GROUP_SUMS = X_ZERO && !WHOLE;
constexpr int ZEROS_AT = 16 * GROUPS * SCALE_BYTES;
constexpr int SUMS_AT = ZEROS_AT + GROUPS * ZERO_BYTES;
constexpr int PARAMETER_BYTES = (SUMS_AT + (GROUP_SUMS ? 64 * GROUPS : 0) + 15) / 16 * 16;

constexpr int X_AT = ROW_BLOCKS * TILE_BYTES;
constexpr int PARAMETERS_AT = X_AT + TOKENS * X_ROW;
constexpr int STAGE_BYTES = PARAMETERS_AT + ROW_BLOCKS * PARAMETER_BYTES;
// Behind the ring: sums of activations of two tiles.
constexpr int X_SUMS_AT = STAGES * STAGE_BYTES;
// A token's row while results turn from fragments to rows: four words more keep the banks apart.
constexpr int OUT_STRIDE = ROWS + 4;

template <bool IS_FLOAT> struct Partial { typedef float type; };
template <> struct Partial<false> { typedef i32 type; };
typedef Partial<FLOAT>::type partial_t;
// What a chunk gives: whole numbers where they are summed over all of k.
typedef Partial<!WHOLE>::type total_t;

struct Arguments {
    const u8 *codes, *parameters;
    const float *row_scales;
    const u8 *row_zeros;
    const i32 *row_sums;
    const u8 *x;
    const float *x_scales, *bias;
    void *out;
    u32 *partials, *tickets;
    u32 m, n, k, x_stride, out_stride, chunks, middle;
    i32 x_zero;
};

INLINE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (ACTIVATION == F16) mma_f16(d, a, b0, b1);
    else mma_bf16(d, a, b0, b1);
}

INLINE void multiply(i32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (SIGNED) mma_s8_s8(d, a, b0, b1);
    else mma_u8_s8(d, a, b0, b1);
}

// A thread's share of what is copied for a tile: always the same places of a slot, of which it keeps the first; the others
// are whole rows further.
struct Copies {
    const u8 *codes, *parameters, *x;
    // Bytes between this thread's chunks of codes, and of activations.
    u64 codes_step, x_step;
    // 16-row tiles and tokens from this thread's first to the end of the matrix, and bytes of a token from its chunk on.
    i32 row_blocks, tokens, left;
};

constexpr int CODES_CHUNKS = TILE_BYTES / 16, X_CHUNKS = X_ROW / 16, PARAMETER_CHUNKS = PARAMETER_BYTES / 16;
constexpr int CODES_BLOCKS = THREADS / CODES_CHUNKS, X_ROWS = THREADS / X_CHUNKS;
static_assert(THREADS % CODES_CHUNKS == 0 && ROW_BLOCKS % CODES_BLOCKS == 0, "threads fill whole tiles of codes");
static_assert(X_ROWS % 8 == 0, "a thread's chunks of activations share a place in the swizzle");

INLINE Copies first_copies(const Arguments &p, u32 tile, u32 tiles, u32 row_block, u32 token) {
    const u32 thread = threadIdx.x, element = FLOAT ? 2 : 1;
    const u32 block = row_block + thread / CODES_CHUNKS, row = token + thread / X_CHUNKS, chunk = thread % X_CHUNKS;
    Copies to;
    to.row_blocks = (i32)((p.n + 15) / 16);
    to.codes = p.codes + ((u64)block * tiles + tile) * TILE_BYTES + thread % CODES_CHUNKS * 16;
    to.codes_step = (u64)CODES_BLOCKS * tiles * TILE_BYTES;
    to.parameters = p.parameters + ((u64)row_block * tiles + tile) * PARAMETER_BYTES;
    to.x = p.x + ((u64)row * p.x_stride + (u64)tile * TILE_K) * element + chunk * 16;
    to.x_step = (u64)X_ROWS * p.x_stride * element;
    to.row_blocks -= (i32)block;
    to.tokens = (i32)p.m - (i32)row;
    to.left = ((i32)p.k - (i32)(tile * TILE_K)) * (i32)element - (i32)chunk * 16;
    return to;
}

// Fills a slot of the ring, and goes on to the next tile. What is outside the matrix becomes zero and is not read.
INLINE void copy_tile(const Arguments &p, Copies &from, u32 slot, u32 tiles) {
    const u32 thread = threadIdx.x;
#pragma unroll
    for (int i = 0; i < ROW_BLOCKS / CODES_BLOCKS; i++) {
        bool there = i * CODES_BLOCKS < from.row_blocks;
        const u8 *codes = there ? from.codes + i * from.codes_step : p.codes;
        copy_async_16(slot + (i * THREADS + thread) * 16, codes, there ? 16 : 0);
    }
    from.codes += TILE_BYTES;
    const u32 row = thread / X_CHUNKS, place = thread % X_CHUNKS ^ row % 8;
    const i32 valid = max(min(from.left, 16), 0);
#pragma unroll
    for (int i = 0; i < (TOKENS + X_ROWS - 1) / X_ROWS; i++) {
        // More threads than chunks: the last ones have none.
        if (TOKENS < X_ROWS && row >= TOKENS) break;
        bool there = i * X_ROWS < from.tokens && valid > 0;
        const u8 *x = there ? from.x + i * from.x_step : p.x;
        copy_async_16(slot + X_AT + (row + i * X_ROWS) * X_ROW + place * 16, x, there ? valid : 0);
    }
    from.x += X_ROW;
    from.left -= X_ROW;
    if (PARAMETER_BYTES > 0) {
#pragma unroll
        for (int i = 0; i < (ROW_BLOCKS * PARAMETER_CHUNKS + THREADS - 1) / THREADS; i++) {
            const i32 at = i * THREADS + (i32)thread;
            if (at >= ROW_BLOCKS * PARAMETER_CHUNKS) break;
            const i32 block = at / (PARAMETER_CHUNKS > 0 ? PARAMETER_CHUNKS : 1);
            bool there = block - (i32)(thread / CODES_CHUNKS) < from.row_blocks;
            u64 offset = (u64)block * tiles * PARAMETER_BYTES + (at - block * PARAMETER_CHUNKS) * 16;
            const u8 *parameters = there ? from.parameters + offset : p.parameters;
            copy_async_16(slot + PARAMETERS_AT + at * 16, parameters, there ? 16 : 0);
        }
        from.parameters += PARAMETER_BYTES;
    }
}

// The fragments of two neighbouring steps of the activations of 8 tokens.
INLINE void load_tokens(u32 (&b)[4], u32 x, u32 token_tile, u32 pair, u32 lane) {
    u32 row = token_tile * 8 + lane % 8, chunk = 4 * pair + lane / 8;
    load_matrices_4(b, x + row * X_ROW + (chunk ^ row % 8) * 16);
}

// Sums of the activations of a slot, a group and token each, into `sums`.
INLINE void sum_tokens(u32 slot, partial_t *sums, u32 warp, u32 lane) {
    const u32 one = ACTIVATION == F16 ? 0x3c003c00 : ACTIVATION == BF16 ? 0x3f803f80 : 0x01010101;
    const u32 ones[4] = {one, one, one, one};
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
                // All rows are the same; the first has tokens 2 t and 2 t + 1 in lane t.
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

// Scales and zeros of the two rows of a lane in a 16-row tile, and what fragments need of them.
struct Group {
    float scale[2];
    // Float: − (offset + zero). Whole numbers: − zero.
    partial_t less[2];
    // Progressive.
    u32 factor[2], shift[2];
    // Σ (q − z) of the weights, for a zero of the activations.
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
    if (TWO_LEVELS || SCALE == F16 || SCALE == BF16) {
        // Both rows with one load.
        words = TWO_LEVELS ? (u32) * (const u16 *)scales : *(const u32 *)scales;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 zero = !ZEROS ? middle : CODE_BITS == 4 ? both >> 4 * half & 15 : both >> 8 * half & 255;
        if (TWO_LEVELS) {
            to.factor[half] = words >> 8 * half & 255;
            to.shift[half] = 0x80808080u - zero * to.factor[half] * 0x01010101u;
        } else {
            if (SCALE == F32) to.scale[half] = scale_of(scales + 4 * half);
            else if (SCALE == F16) to.scale[half] = float_of_f16((u16)(words >> 16 * half));
            else to.scale[half] = float_of_bf16((u16)(words >> 16 * half));
            less_of(to, half, zero);
        }
        if (GROUP_SUMS) to.sum[half] = ((const i32 *)(parameters + SUMS_AT + group * 64))[2 * pair + half];
    }
}

// Words of a lane that two neighbouring steps take.
constexpr int PAIR_WORDS = FLOAT ? (CODE_BITS == 4 ? 2 : 4) : (CODE_BITS == 4 ? 4 : 8);

// Pairs of steps whose instructions mix. Of small groups so many parameters come early that registers run short.
constexpr int UNROLL = FLOAT && (GROUP == 32 || GROUP == 64) ? 2 : STEPS / 2;

// The A fragment of step `half` of a pair of steps.
INLINE void fragment(u32 (&a)[4], const u32 *words, int half, const Group &group) {
    const u32 *w = words + half * (PAIR_WORDS / 2);
    if (FLOAT && CODE_BITS == 4) {
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

// The running sums of a warp: of a group (or, of whole numbers over all of k, of the chunk), of the chunk, and of the
// chunks before it. What a variant does not use, the compiler drops.
struct Sums {
    partial_t part[ROW_TILES][TOKEN_TILES][4];
    float chunk[ROW_TILES][TOKEN_TILES][4];
    // Of whole numbers: sums of activations over the chunk, of tokens 2 t and 2 t + 1.
    i32 x[TOKEN_TILES][2];
};

// Multiplies one tile of 128 features.
INLINE void multiply_tile(const Arguments &p, Sums &sums, const u8 *slot, const partial_t *x_sums, const Group (&rows)[ROW_TILES],
                          u32 row_warp, u32 token_warp, u32 lane) {
    const u32 x = shared_address(slot) + X_AT;
    const u8 *codes = slot + row_warp * ROW_TILES * TILE_BYTES + lane * 16;
    const u8 *parameters = slot + PARAMETERS_AT + row_warp * ROW_TILES * PARAMETER_BYTES;
    Group groups[ROW_TILES];
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) groups[r] = rows[r];
    u32 words[ROW_TILES][PAIR_WORDS < 4 ? 4 : PAIR_WORDS];
#pragma unroll UNROLL
    for (int pair = 0; pair < STEPS / 2; pair++) {
        // Sixteen bytes at a time; where a pair of steps takes eight, the next pair finds the other eight here.
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
                // Where a group is one step long, the pair has two.
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
                partial_t sum[2] = {0, 0};
                if (SUMS && step % GROUP_STEPS == 0) {
                    const partial_t *from =
                        x_sums + step / GROUP_STEPS * TOKENS + (token_warp * TOKEN_TILES + t) * 8 + 2 * (lane % 4);
                    if (FLOAT) {
                        float2 two = *(const float2 *)from;
                        sum[0] = (partial_t)two.x;
                        sum[1] = (partial_t)two.y;
                    } else {
                        int2 two = *(const int2 *)from;
                        sum[0] = (partial_t)two.x;
                        sum[1] = (partial_t)two.y;
                    }
                    if (WHOLE) {
                        sums.x[t][0] += (i32)sum[0];
                        sums.x[t][1] += (i32)sum[1];
                    }
                }
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++) {
                    const Group &group = GROUP_STEPS == 1 && half == 1 ? second[r] : groups[r];
                    partial_t(&part)[4] = sums.part[r][t];
                    if (!WHOLE && step % GROUP_STEPS == 0) {
#pragma unroll
                        for (int i = 0; i < 4; i++) part[i] = SUMS ? group.less[i / 2] * sum[i % 2] : 0;
                    }
                    multiply(part, a[half][r], b[2 * half], b[2 * half + 1]);
                    if (!WHOLE && step % GROUP_STEPS == GROUP_STEPS - 1) {
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            float &to = sums.chunk[r][t][i];
                            if (FLOAT) {
                                to = GROUP == 0 ? to + (float)part[i] : fused(group.scale[i / 2], (float)part[i], to);
                            } else {
                                i32 whole = (i32)part[i] >> SHIFT;
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

#include "linear_out.cuh"

// Token tiles whose blocks run side by side: what they share of the weights is read from memory once.
constexpr u32 NEIGHBOURS = 8;

// Grid: [row tiles · token tiles, chunks (1 if SERIAL)]; see src/linear.rs for sizes of memory.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    linear(const u8 *codes, const u8 *parameters, const float *row_scales, const u8 *row_zeros, const i32 *row_sums,
           const u8 *x, const float *x_scales, const float *bias, void *out, u32 *partials, u32 *tickets, u32 m, u32 n, u32 k,
           u32 x_stride, u32 out_stride, u32 chunks, u32 middle, i32 x_zero) {
    const Arguments p = {codes, parameters, row_scales, row_zeros, row_sums, x, x_scales, bias, out, partials, tickets,
                         m,     n,          k,          x_stride,  out_stride, chunks, middle, x_zero};
    extern __shared__ __align__(128) u8 shared[];
    // From lane 0, so that the compiler knows it to be the same in all lanes.
    const u32 warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const u32 row_warp = warp % ROW_WARPS, token_warp = warp / ROW_WARPS;
    // Blocks go through NEIGHBOURS token tiles of a row tile, then through the row tiles, then through further tokens.
    const u32 row_tiles = (n + ROWS - 1) / ROWS, token_tiles = (m + TOKENS - 1) / TOKENS;
    const u32 band = blockIdx.x / (NEIGHBOURS * row_tiles), in_band = blockIdx.x % (NEIGHBOURS * row_tiles);
    const u32 neighbours = min(NEIGHBOURS, token_tiles - band * NEIGHBOURS);
    const u32 row_block = in_band / neighbours * ROW_BLOCKS;
    const u32 token = (band * NEIGHBOURS + in_band % neighbours) * TOKENS;
    const u32 tiles = (k + TILE_K - 1) / TILE_K;
    const u32 length = (tiles + chunks - 1) / chunks;
    const u32 begin = SERIAL ? 0 : blockIdx.y * length;
    const u32 end = SERIAL ? tiles : min(begin + length, tiles);
    const u32 ring = shared_address(shared);
    partial_t *x_sums = (partial_t *)(shared + X_SUMS_AT);

    Group rows[ROW_TILES];
    if (GROUP == 0 && SUMS) {
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 row = (row_block + row_warp * ROW_TILES + r) * 16 + lane / 4 + 8 * half;
                u32 zero = middle;
                // Rows are filled up to sixteen.
                if (ZEROS) zero = row < (n + 15) / 16 * 16 ? row_zeros[row] : 0;
                less_of(rows[r], half, zero);
            }
        }
    }

    Sums sums;
    total_t totals[ROW_TILES][TOKEN_TILES][4];
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
        for (int t = 0; t < TOKEN_TILES; t++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sums.part[r][t][i] = 0;
                sums.chunk[r][t][i] = 0.0f;
            }
        }
    }
#pragma unroll
    for (int t = 0; t < TOKEN_TILES; t++) sums.x[t][0] = sums.x[t][1] = 0;

    Copies copies = first_copies(p, begin, tiles, row_block, token);
#pragma unroll
    for (u32 s = 0; s < STAGES - 1; s++) {
        if (begin + s < end) copy_tile(p, copies, ring + s * STAGE_BYTES, tiles);
        copy_async_commit();
    }
    if (SUMS) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        sum_tokens(ring, x_sums, warp, lane);
    }
    u32 slot = 0, in_chunk = 0;
    bool first_chunk = true;
    for (u32 tile = begin; tile < end; tile++) {
        // This tile is there, and where sums are made the next one too. Behind the barrier it is so for all threads, the
        // sums of this tile are written, and nobody reads the slot of the tile before.
        copy_async_wait<STAGES - 2 - (SUMS ? 1 : 0)>();
        __syncthreads();
        const u32 refill = slot == 0 ? STAGES - 1 : slot - 1;
        if (tile + STAGES - 1 < end) copy_tile(p, copies, ring + refill * STAGE_BYTES, tiles);
        copy_async_commit();
        const u32 next = slot == STAGES - 1 ? 0 : slot + 1;
        const u32 odd = (tile - begin) & 1;
        if (SUMS && tile + 1 < end)
            sum_tokens(ring + next * STAGE_BYTES, x_sums + (odd ^ 1) * GROUPS * TOKENS, warp, lane);
        multiply_tile(p, sums, shared + slot * STAGE_BYTES, x_sums + odd * GROUPS * TOKENS, rows, row_warp, token_warp, lane);
        slot = next;
        in_chunk++;
        if (SERIAL && !WHOLE && (in_chunk == length || tile + 1 == end)) {
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
                for (int t = 0; t < TOKEN_TILES; t++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        total_t &total = totals[r][t][i];
                        total = first_chunk ? (total_t)sums.chunk[r][t][i] : total + (total_t)sums.chunk[r][t][i];
                        sums.chunk[r][t][i] = 0.0f;
                    }
                }
            }
            first_chunk = false;
            in_chunk = 0;
        }
    }
    copy_async_wait<0>();
    if (!SERIAL || WHOLE) {
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
            for (int t = 0; t < TOKEN_TILES; t++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    if (WHOLE) {
                        i32 whole = (i32)sums.part[r][t][i];
                        if (SUMS) whole += (TWO_LEVELS ? -128 : (i32)rows[r].less[i / 2]) * sums.x[t][i % 2];
                        totals[r][t][i] = (total_t)whole;
                    } else {
                        totals[r][t][i] = (total_t)sums.chunk[r][t][i];
                    }
                }
            }
        }
    }
    if (!SERIAL && chunks > 1) {
        const u32 tokens = min(m - token, (u32)TOKENS);
        __syncthreads();
        if (!join_chunks(p, shared, totals, blockIdx.x, blockIdx.y, tokens, warp, token_warp, lane)) return;
    }
    write_out(p, shared, totals, row_block * 16, token, row_warp, token_warp, lane);
}
