// A linear layer on packed weights: y[m, n] = Σ_k x[m, k] ŵ[n, k] + bias[n].
//
// The same source serves W4A16, W8A16, W8A8, W4A8, and FP4 and FP8 weights with float activations. Macros:
//
//   ACTIVATION   F16, BF16 or S8: type of `x`; sums are f32, with S8 integers
//   CODES        INTEGER, or a floating-point format, which has no zero points: E2M1, E4M3
//   CODE_BITS    4 or 8
//   GROUP        features that share a scale: 32, 64 or 128, with floating-point codes also 16; 0: a whole row
//   SCALE        type of group scales: F16, BF16 or F32; PROGRESSIVE: u8, with an additional f32 per row; only with
//                floating-point codes: E8M0, or E4M3 with an additional f32 per row that holds 256 / global
//   ZEROS        1: each group (with GROUP 0 each row) has a zero point; 0: `middle` is the zero point of all
//   X_ZERO       1: integer activations have a zero point, the same for all tokens
//   OUTPUT       F16, BF16 or F32
//   ROW_WARPS, ROW_TILES, TOKEN_WARPS, TOKEN_TILES, STAGES, BLOCKS   the shape of a block: warps along
//                output features and 16-row tiles per warp, warps along tokens and 8-token tiles per warp, depth of
//                the ring, intended number of blocks per multiprocessor
//   CHUNKS       how chunks of k are computed. BLOCKS_EACH: each by a block. REGISTERS, SHARED: by one block, one after
//                another; it keeps the sum of those before in registers or in shared memory
//   EXPERTS      1: the kernel `linear_experts`, which multiplies each row by the weights of one of several experts
//                (linear_experts.cuh); 0: the kernel `linear`
//   GATE         UNGATED, or with EXPERTS the function that combines the results of two matrices, gate and up: SILU,
//                GELU_TANH or CLAMPED (gates.cuh). A block computes both for the same features
//
// Weights are the A operand of `mma`, tokens its columns: eight tokens fill a tile. A block steps along k in tiles
// of 128 features. Codes, activations and scales of each tile are copied to a ring in shared memory, STAGES − 1
// tiles in advance (linear_ring.cuh). Codes are in the order that lanes need (src/layout.rs), and activations are
// swizzled for `ldmatrix`. If sums Σ x of each group are needed, `mma` with a matrix of ones computes them for the tile
// after the current one. Σ x is multiplied by the negated sum of the zero point and the offset of the dequantization
// (dequantize.cuh), as the initial value of the group's accumulators; if integers are summed over all of k, this is
// done at the end (linear_tile.cuh).
//
// Chunks: k is cut into `chunks` runs of whole tiles, whose number depends only on the shape of the weights. A chunk is
// summed from zero, and chunks are added in order, c₀ + c₁ + …: by a block that computes all of them, or by the last of
// several blocks to arrive (linear_out.cuh). So a row's result is bit-identical for any other rows, any number of rows
// and any shape of the block.
#include "dequantize.cuh"
#include "gates.cuh"

constexpr bool FLOAT = ACTIVATION != S8;
constexpr bool TWO_LEVELS = SCALE == PROGRESSIVE;
// Whether integers are summed over all of k, which is exact.
constexpr bool WHOLE = !FLOAT && (GROUP == 0 || TWO_LEVELS);
// Whether codes are stored minus their zero point, as signed numbers. Sums of activations are then not needed.
constexpr bool SIGNED = !FLOAT && !ZEROS && !TWO_LEVELS;
constexpr bool SUMS = CODES == INTEGER && !SIGNED;
// With few tokens, every warp computes the sums itself, from the fragments that it multiplies anyway. With many, one
// warp computes those of a tile of tokens for all.
constexpr bool OWN_SUMS = SUMS && TOKEN_WARPS == 1, SHARED_SUMS = SUMS && !OWN_SUMS;
// The factor of the results: f16 fragments hold the values of the codes divided by it.
constexpr float UNIT = ACTIVATION != F16 || CODES == INTEGER ? 1.0f : CODES == E2M1 ? 16384.0f : 256.0f;
static_assert(CODES == INTEGER || (FLOAT && !ZEROS), "floating-point codes have no zeros, and meet floats");
constexpr int SHIFT = SIGNED && CODE_BITS == 4 ? 4 : 0;

constexpr int WARPS = ROW_WARPS * TOKEN_WARPS, THREADS = 32 * WARPS;
enum { BLOCKS_EACH = 0, REGISTERS = 1, SHARED = 2 };
constexpr bool SERIAL = CHUNKS != BLOCKS_EACH;
constexpr int ROW_BLOCKS = ROW_WARPS * ROW_TILES;
constexpr int ROWS = 16 * ROW_BLOCKS;
constexpr int TOKENS = 8 * TOKEN_WARPS * TOKEN_TILES;
// The number of matrices of an expert. Each has the same number of the block's row tiles: those of the gate come first.
constexpr bool GATED = GATE != UNGATED;
constexpr int MATRICES = GATED ? 2 : 1;
constexpr int MATRIX_BLOCKS = ROW_BLOCKS / MATRICES, FEATURES = ROWS / MATRICES;
static_assert(!GATED || EXPERTS, "only experts have gates");
static_assert(ROW_WARPS % MATRICES == 0, "a warp computes rows of one matrix");
constexpr int TILE_K = 128;
// Bytes of a token's activations in a tile, and steps of `mma` in it, of 32 bytes each.
constexpr int X_ROW = FLOAT ? 2 * TILE_K : TILE_K;
constexpr int STEPS = X_ROW / 32;
constexpr int GROUPS = GROUP == 0 ? 1 : TILE_K / GROUP;
constexpr int GROUP_STEPS = STEPS / GROUPS;
constexpr int TILE_BYTES = 16 * TILE_K * CODE_BITS / 8;
// Parameters of a tile: the scales, zero points and sums of weights of its groups.
constexpr bool SCALE_BYTE = TWO_LEVELS || SCALE == E4M3 || SCALE == E8M0;
constexpr int SCALE_BYTES = GROUP == 0 ? 0 : SCALE_BYTE ? 1 : SCALE == F32 ? 4 : 2;
constexpr int ZERO_BYTES = GROUP == 0 || !ZEROS ? 0 : 2 * CODE_BITS;
constexpr bool GROUP_SUMS = X_ZERO && !WHOLE;
constexpr int ZEROS_AT = 16 * GROUPS * SCALE_BYTES;
constexpr int SUMS_AT = ZEROS_AT + GROUPS * ZERO_BYTES;
constexpr int PARAMETER_BYTES = (SUMS_AT + (GROUP_SUMS ? 64 * GROUPS : 0) + 15) / 16 * 16;

constexpr int X_AT = ROW_BLOCKS * TILE_BYTES;
constexpr int PARAMETERS_AT = X_AT + TOKENS * X_ROW;
constexpr int STAGE_BYTES = PARAMETERS_AT + ROW_BLOCKS * PARAMETER_BYTES;
// The ring is followed by the sums of activations of two tiles.
constexpr int X_SUMS_AT = STAGES * STAGE_BYTES;
// With SHARED, the kept sums are next, as fragments: [row tile · token tile][thread].
constexpr int KEPT_AT = (X_SUMS_AT + (SHARED_SUMS ? 2 * GROUPS * TOKENS * 4 : 0) + 127) / 128 * 128;
// Four padding words avoid bank conflicts when results are reordered from fragments to rows.
constexpr int OUT_STRIDE = ROWS + 4;

template <bool IS_FLOAT> struct Partial { typedef float type; };
template <> struct Partial<false> { typedef i32 type; };
typedef Partial<FLOAT>::type partial_t;
// The type of a chunk's sums: integers if they are summed over all of k.
typedef Partial<!WHOLE>::type total_t;

// The sums of the chunks that a warp has computed, as fragments.
typedef total_t Fragments[ROW_TILES][TOKEN_TILES][4];

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
    // Only with EXPERTS, where the arguments above are those of one expert. Its first row is `first`; row `r` of all has
    // the activations of token `token_of[r]` of `tokens`, and its results are multiplied by `factors[r]`. `block` is the
    // number of this block among those of the expert.
    const u32 *token_of;
    const float *factors;
    u32 first, tokens, block;
    const struct Expert *experts;
    const u32 *starts;
    u32 expert, all_rows;
    // Only with GATE: the up projection; the arguments above are those of the gate.
    const u8 *up_codes, *up_parameters, *up_row_zeros;
    float alpha, limit;
};

#include "linear_experts.cuh"
#include "linear_ring.cuh"
#include "linear_tile.cuh"
#include "linear_out.cuh"

// Token tiles whose blocks run concurrently, so that the weights they share are read from memory once.
constexpr u32 NEIGHBOURS = 8;

INLINE void compute_tile(const Arguments &p) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 m = p.m, n = p.n, k = p.k, chunks = p.chunks;
    // The broadcast tells the compiler that the value is the same in all lanes.
    const u32 warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const u32 row_warp = warp % ROW_WARPS, token_warp = warp / ROW_WARPS;
    // Consecutive blocks process NEIGHBOURS token tiles of one row tile, then the same token tiles of the next row
    // tile, and so on.
    const u32 row_tiles = (n + FEATURES - 1) / FEATURES, token_tiles = (m + TOKENS - 1) / TOKENS;
    const u32 block = EXPERTS ? p.block : blockIdx.x;
    const u32 band = block / (NEIGHBOURS * row_tiles), in_band = block % (NEIGHBOURS * row_tiles);
    const u32 neighbours = min(NEIGHBOURS, token_tiles - band * NEIGHBOURS);
    const u32 row_block = in_band / neighbours * MATRIX_BLOCKS;
    const u32 token = (band * NEIGHBOURS + in_band % neighbours) * TOKENS;
    const u32 tiles = (k + TILE_K - 1) / TILE_K;
    const u32 length = (tiles + chunks - 1) / chunks;
    const u32 begin = SERIAL ? 0 : blockIdx.y * length;
    const u32 end = SERIAL ? tiles : min(begin + length, tiles);
    const u32 ring = shared_address(shared);
    partial_t *x_sums = (partial_t *)(shared + X_SUMS_AT);
    float4 *kept = (float4 *)(shared + KEPT_AT) + threadIdx.x;

    Group rows[ROW_TILES];
    if (GROUP == 0 && SUMS) {
        const bool is_up = GATED && row_warp >= ROW_WARPS / 2;
        const u32 first = row_block * 16 - (is_up ? FEATURES : 0);
        const u8 *zeros = is_up ? p.up_row_zeros : p.row_zeros;
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 row = first + (row_warp * ROW_TILES + r) * 16 + lane / 4 + 8 * half;
                u32 zero = p.middle;
                // Rows are padded to a multiple of sixteen.
                if (ZEROS) zero = row < (n + 15) / 16 * 16 ? zeros[row] : 0;
                less_of(rows[r], half, zero);
            }
        }
    }

    Sums sums;
    // With REGISTERS, the sums of the chunks before the current one.
    Fragments totals;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
        for (int t = 0; t < TOKEN_TILES; t++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sums.group[r][t][i] = 0;
                sums.part[r][t][i] = 0.0f;
            }
        }
    }
#pragma unroll
    for (int t = 0; t < TOKEN_TILES; t++) sums.x[t][0] = sums.x[t][1] = sums.x[t][2] = sums.x[t][3] = 0;

    Copies copies = first_copies(p, begin, tiles, row_block, token);
#pragma unroll
    for (u32 s = 0; s < STAGES - 1; s++) {
        if (begin + s < end) copy_tile(p, copies, ring + s * STAGE_BYTES, tiles);
        copy_async_commit();
    }
    if (SHARED_SUMS) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        sum_tokens(ring, x_sums, warp, lane);
    }
    u32 slot = 0, left = length;
    bool is_first_chunk = true;
    for (u32 tile = begin; tile < end; tile++) {
        // After the barrier, all copies of this tile have arrived (and of the next one, if sums are computed), the sums
        // of this tile are written, and no thread still reads the slot of the previous tile.
        copy_async_wait<STAGES - 2 - (SHARED_SUMS ? 1 : 0)>();
        __syncthreads();
        const u32 refill = slot == 0 ? STAGES - 1 : slot - 1;
        if (tile + STAGES - 1 < end) copy_tile(p, copies, ring + refill * STAGE_BYTES, tiles);
        copy_async_commit();
        const u32 next = slot == STAGES - 1 ? 0 : slot + 1;
        const u32 odd = (tile - begin) & 1;
        if (SHARED_SUMS && tile + 1 < end)
            sum_tokens(ring + next * STAGE_BYTES, x_sums + (odd ^ 1) * GROUPS * TOKENS, warp, lane);
        multiply_tile(p, sums, shared + slot * STAGE_BYTES, x_sums + odd * GROUPS * TOKENS, rows, row_warp, token_warp, lane);
        slot = next;
        if (SERIAL && !WHOLE && --left == 0 && tile + 1 < end) {
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
                for (int t = 0; t < TOKEN_TILES; t++) {
                    float(&part)[4] = sums.part[r][t];
                    if (CHUNKS == SHARED) {
                        float4 &to = kept[(r * TOKEN_TILES + t) * THREADS];
                        const float4 from = to, own = make_float4(part[0], part[1], part[2], part[3]);
                        to = is_first_chunk ? own : make_float4(from.x + own.x, from.y + own.y, from.z + own.z, from.w + own.w);
                    }
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        total_t &total = totals[r][t][i];
                        if (CHUNKS == REGISTERS) total = is_first_chunk ? (total_t)part[i] : total + (total_t)part[i];
                        part[i] = 0.0f;
                    }
                }
            }
            is_first_chunk = false;
            left = length;
        }
    }
    copy_async_wait<0>();
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
        for (int t = 0; t < TOKEN_TILES; t++) {
            const float4 before = CHUNKS == SHARED ? kept[(r * TOKEN_TILES + t) * THREADS] : float4();
            const float shared_total[4] = {before.x, before.y, before.z, before.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                total_t &total = totals[r][t][i];
                if (WHOLE) {
                    i32 whole = (i32)sums.group[r][t][i];
                    if (SUMS) whole += (TWO_LEVELS ? -128 : (i32)rows[r].less[i / 2]) * (i32)sums.x[t][i % 2];
                    total = (total_t)whole;
                } else if (SERIAL) {
                    total = (CHUNKS == SHARED ? (total_t)shared_total[i] : total) + (total_t)sums.part[r][t][i];
                } else {
                    total = (total_t)sums.part[r][t][i];
                }
            }
        }
    }
#if EXPERTS
    const Arguments again = read_again(p, 0);
#else
    const Arguments &again = p;
#endif
    // Shared memory is free for other data from here on.
    __syncthreads();
    if (!SERIAL && chunks > 1) {
        const u32 tokens = min(again.m - token, (u32)TOKENS);
        if (!join_chunks(again, shared, totals, blockIdx.x, blockIdx.y, tokens, warp, token_warp, lane)) return;
    }
    write_out(again, shared, totals, row_block * 16, token, row_warp, token_warp, lane);
}

// Grid: [row tiles · token tiles, chunks (1 if SERIAL)]; src/linear/plan.rs computes the sizes of the buffers.
#if !EXPERTS
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    linear(const u8 *codes, const u8 *parameters, const float *row_scales, const u8 *row_zeros, const i32 *row_sums,
           const u8 *x, const float *x_scales, const float *bias, void *out, u32 *partials, u32 *tickets, u32 m, u32 n, u32 k,
           u32 x_stride, u32 out_stride, u32 chunks, u32 middle, i32 x_zero) {
    const Arguments p = {codes, parameters, row_scales, row_zeros, row_sums, x, x_scales, bias, out, partials, tickets,
                         m,     n,          k,          x_stride,  out_stride, chunks, middle, x_zero};
    compute_tile(p);
}
#else
// The grid has blocks for as many tiles as there can be; those beyond the last tile return at once.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    linear_experts(const Expert *experts, const u32 *starts, const u32 *token_of, const float *factors, const u8 *x,
                   const float *x_scales, void *out, u32 *partials, u32 *tickets, u32 count, u32 rows, u32 tokens, u32 n,
                   u32 k, u32 x_stride, u32 out_stride, u32 chunks, u32 middle, i32 x_zero, float alpha, float limit) {
    const u32 row_tiles = (n + FEATURES - 1) / FEATURES;
    Place place;
    if (!find_expert(place, starts, count, rows, blockIdx.x / row_tiles, threadIdx.x % 32)) return;
    const Expert &expert = experts[MATRICES * place.expert], &up = experts[MATRICES * place.expert + MATRICES - 1];
    // What only the end needs is read there.
    const Arguments p = {global(expert.codes),
                         global(expert.parameters),
                         0,
                         global(expert.row_zeros),
                         0,
                         x,
                         x_scales,
                         0,
                         out,
                         partials,
                         tickets,
                         place.rows,
                         n,
                         k,
                         x_stride,
                         out_stride,
                         chunks,
                         middle,
                         x_zero,
                         token_of,
                         factors,
                         place.first,
                         tokens,
                         blockIdx.x - place.tile * row_tiles,
                         experts,
                         starts,
                         place.expert,
                         rows,
                         global(up.codes),
                         global(up.parameters),
                         global(up.row_zeros),
                         alpha,
                         limit};
    compute_tile(p);
}
#endif
