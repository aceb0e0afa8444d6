// Attention of the last queries of each sequence, usually one, on the paged cache.
//
//   score_t = scale · q · k_t,   out = sum_t p_t v_t / sum_t p_t,   lse = ln sum_t exp(score_t),   p_t = exp(score_t - max)
//
// A warp processes tiles of 16 tokens, one after another (attention_tile.cuh), from its own ring of prefetched tiles.
// Warps synchronize only at the end.
//
// A sequence is cut into splits by a rule that depends only on its number of tokens. A block computes a split, and the
// last to finish merges them in order. So a result depends only on its own sequence.
//
// Macros: KV_BITS, HEAD_DIM (kv_layout.cuh); QUERY_TYPE 0 f16, 1 bf16; OUT_TYPE 0 f16, 1 bf16, 2 f32; HEAD_TILES 1 or
// 2: number of tiles of eight query heads per block; WARPS; STAGES: depth of the ring; MAX_SPLITS: maximum number of
// splits; MIN_SPLIT: minimum number of tokens per split, a multiple of 64; MIN_BLOCKS: minimum number of blocks per
// multiprocessor, which bounds registers.
#include "attention_tile.cuh"

#if OUT_TYPE == 2
typedef float Out;
#else
typedef u16 Out;
#endif

constexpr int THREADS = 32 * WARPS;
constexpr int MEET_STRIDE = DIM + 4;
extern __shared__ __align__(128) u8 shared[];

// ------------------------------------------------------------------------------------------------------------- copies

constexpr int CHUNKS = TILE_BYTES / 16;

// Copies a tile; `to` and `from` are the addresses of this lane's first chunk.
INLINE void copy_tile(u32 to, const u8* from, u32 lane) {
#pragma unroll
    for (int i = 0; i < CHUNKS; i += 32)
        if (i + 32 <= CHUNKS || static_cast<int>(lane) < CHUNKS - i) copy_async_16(to + 16 * i, from + 16 * i);
}

// Copies the rows of tokens from `skipped` to below `valid` of a tile, and the grids before `valid`. Other rows become
// zeros and are not read.
INLINE void copy_part_of_tile(u32 to, const u8* from, int skipped, int valid, u32 lane) {
    constexpr int ROW_CHUNKS = ROW_BYTES / 16;
#pragma unroll 1
    for (int i = 0; i + static_cast<int>(lane) < CHUNKS; i += 32) {
        const int chunk = i + static_cast<int>(lane), row = chunk / ROW_CHUNKS;
        const int token = row < TILE_TOKENS ? row : value_token(row - TILE_TOKENS);
        int bytes = token >= skipped && token < valid ? 16 : 0;
        // A 16-byte chunk holds the grids of four tokens.
        if (row >= 2 * TILE_TOKENS)
            bytes = min(max(4 * (valid - (chunk - 2 * TILE_TOKENS * ROW_CHUNKS) % 4 * 4), 0), 16);
        copy_async_16(to + 16 * i, from + 16 * i, bytes);
    }
}

// ------------------------------------------------------------------------------------------------------------- splits

INLINE u32 split_tokens(u32 tokens) {
    const u32 even = (tokens + MAX_SPLITS - 1) / MAX_SPLITS;
    return max((even + 63) / 64 * 64, static_cast<u32>(MIN_SPLIT));
}

INLINE void store(Out* out, float x) {
#if OUT_TYPE == 0
    *out = f16_of_float(x);
#elif OUT_TYPE == 1
    *out = bf16_of_float(x);
#else
    *out = x;
#endif
}

// The reference and total of a block's sums, from which they are merged.
struct Part {
    float reference, total;
};

// A column of a product is one query head of one query. The queries are those of the `queries` last tokens of the list,
// in order; each sees no tokens after its own. The columns of a key-value head are [queries][group], and a block
// processes up to HEADS of them.
//
// query   [sequences · queries] rows `query_stride` elements apart, [kv_heads · group][HEAD_DIM], 8-byte aligned
// pages   tiles at page · page_stride + kv head · head_stride bytes, multiples of 16
// table   page numbers in order: table[sequence · table_stride + kv head · table_head_stride + i]
// tokens, first  number of tokens of the list, and how many at its beginning are not seen: [sequence · count_stride +
//         kv head · count_head_stride]; `first` may be null
// out     [rows][HEAD_DIM], rows as those of queries by heads;  lse [rows], natural logarithm, may be null
// sums    f32 [rows][max_splits][HEAD_DIM];  parts [rows][max_splits]
// tickets [sequences][kv_heads · column blocks], 0 before the first launch and after each launch
// Grid: (max_splits, kv_heads · column blocks, sequences), where max_splits is at least the number of splits of the
// longest sequence.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    attention_decode(const u16* __restrict__ query, const u8* __restrict__ pages, const u32* __restrict__ table,
                     const u32* __restrict__ tokens, const u32* __restrict__ first, Out* __restrict__ out,
                     float* __restrict__ lse, float* sums, Part* parts, u32* tickets, u64 page_stride, u64 head_stride,
                     u64 query_stride, u32 table_stride, u32 table_head_stride, u32 count_stride,
                     u32 count_head_stride, u32 page_shift, u32 kv_heads, u32 group, u32 queries, float scale) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 max_splits = gridDim.x, split = blockIdx.x, sequence = blockIdx.z;
    const u32 column_blocks = gridDim.y / kv_heads, kv_head = blockIdx.y / column_blocks;
    const u32 first_column = blockIdx.y % column_blocks * HEADS;
    const u32 columns = min(queries * group - first_column, static_cast<u32>(HEADS));
    const auto row_of = [&](u32 column) {
        const u32 at = first_column + column;
        return (static_cast<u64>(sequence) * queries + at / group) * (kv_heads * group) + kv_head * group + at % group;
    };

    const u64 count_at = static_cast<u64>(sequence) * count_stride + static_cast<u64>(kv_head) * count_head_stride;
    const u32 n = tokens[count_at];
    const u32 unseen = first == nullptr ? 0 : first[count_at];
    const u32 step = split_tokens(n);
    // If a list is longer than planned, its last tokens are ignored; otherwise blocks would wait for splits without a
    // block.
    const u32 splits = min(max((n + step - 1) / step, 1u), max_splits);
    if (split >= splits) return;

    // The number of tokens up to the last one that a column sees.
    const auto seen_by = [&](u32 column) {
        return max(static_cast<int>(n) - static_cast<int>(queries - 1 - (first_column + column) / group), 0);
    };
    const u32 begin_token = split * step;
    const u32 end_token = min(min(begin_token + step, n), static_cast<u32>(seen_by(columns - 1)));
    // All columns see all tokens up to here.
    const u32 whole_to = min(end_token, static_cast<u32>(seen_by(0)));
    const u32 begin = max(begin_token, unseen) / TILE_TOKENS, end = (end_token + TILE_TOKENS - 1) / TILE_TOKENS;
    const u32* list = table + static_cast<u64>(sequence) * table_stride + static_cast<u64>(kv_head) * table_head_stride;
    const u32 mine = begin + warp < end ? (end - begin - warp + WARPS - 1) / WARPS : 0;

    // All columns see all tokens of this warp's tiles `whole_from` to `whole_from + whole_count - 1`.
    const u32 whole_from = mine > 0 && unseen > (begin + warp) * TILE_TOKENS ? 1 : 0;
    const u32 whole_tiles = whole_to / TILE_TOKENS;
    const u32 whole_end = begin + warp < whole_tiles ? (whole_tiles - begin - warp + WARPS - 1) / WARPS : 0;
    const u32 whole_count = max(whole_end, whole_from) - whole_from;
    const auto is_whole = [&](u32 i) { return i - whole_from < whole_count; };
    const auto start_of = [&](u32 i) { return static_cast<int>((begin + warp + i * WARPS) * TILE_TOKENS); };

    u32* ring = reinterpret_cast<u32*>(shared) + warp * (STAGES * TILE_BYTES / 4);
    const u32 to_ring = shared_address(ring) + 16 * lane;
    const u8* from_pages = pages + kv_head * head_stride + 16 * lane;
    const u32 page_mask = (1u << page_shift) - 1;
    // The next tile to copy and its page number, which is loaded one iteration ahead.
    u32 next = begin + warp;
    u32 page = mine > 0 ? list[next >> page_shift] : 0;
    const auto copy = [&](u32 i, u32 slot) {
        const u8* from = from_pages + page * page_stride + (next & page_mask) * TILE_BYTES;
        const u32 to = to_ring + slot * TILE_BYTES;
        if (is_whole(i))
            copy_tile(to, from, lane);
        else
            copy_part_of_tile(to, from, static_cast<int>(unseen) - start_of(i), static_cast<int>(end_token) - start_of(i),
                              lane);
        next += WARPS;
        if (i + 1 < mine) page = list[next >> page_shift];
    };
#pragma unroll 1
    for (u32 i = 0; i < STAGES - 1; ++i) {
        if (i < mine) copy(i, i);
        copy_async_commit();
    }

    const Place place = place_of(lane);
    Queries loaded;
    load_queries(loaded, scale, place, [&](u32 column) -> const u16* {
        if (column >= columns) return nullptr;
        const u32 at = first_column + column;
        return query + (static_cast<u64>(sequence) * queries + at / group) * query_stride +
               (kv_head * group + at % group) * HEAD_DIM;
    });
    Limits limits;
#pragma unroll
    for (int i = 0; i < 2 * HEAD_TILES; ++i)
        limits.seen[i / 2][i % 2] = seen_by(min(8 * (i / 2) + 2 * place.t + i % 2, columns - 1));
    State state = {};
    // The first tile chooses a new unit, because every scale except 0 exceeds the limit with this one.
    state.unit = __uint_as_float((127u + 60u) << 23);
#pragma unroll
    for (int i = 0; i < 2 * HEAD_TILES; ++i) state.reference[i / 2][i % 2] = LOWEST;

    u32 slot = 0;
#pragma unroll 1
    for (u32 i = 0; i < mine; ++i) {
        copy_async_wait<STAGES - 2>();
        // All lanes' copies of this tile have arrived, and all lanes have finished with the previous tile.
        __syncwarp();
        if (i + STAGES - 1 < mine) copy(i + STAGES - 1, slot == 0 ? STAGES - 1 : slot - 1);
        copy_async_commit();
        attend_tile(state, loaded, ring + slot * (TILE_BYTES / 4), place, is_whole(i), limits,
                    static_cast<int>(unseen), static_cast<int>(end_token), start_of(i));
        slot = slot == STAGES - 1 ? 0 : slot + 1;
    }
    copy_async_wait<0>();

    // The warps' results are combined in the memory of the ring: [warp][head][feature] sums, then references and
    // totals.
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
            const u32 head = 8 * tile + 2 * place.t + i;
            if (place.g == 0) {
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
                    float sum = state.out[tile][j][2 * half + i];
                    if (HAS_GRIDS) sum = fmaf(-(out_offset(j, half) + CENTRE), state.rounded[tile][i], sum);
                    row[out_feature(j, half, place.g)] = fmaf(sum, inverse, middle);
                }
        }
    __syncthreads();

    for (u32 item = threadIdx.x; item < columns * HEAD_DIM; item += THREADS) {
        const u32 head = item / HEAD_DIM, feature = item % HEAD_DIM;
        const u64 row = row_of(head);
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
            store(out + row * HEAD_DIM + feature, total == 0.0f ? 0.0f : sum / total);
            if (lse != nullptr && feature == 0)
                lse[row] = total == 0.0f ? minus_infinity() : (highest + log2_approx(total)) * LN_2;
        } else {
            const u64 at = row * max_splits + split;
            sums[at * HEAD_DIM + feature] = sum;
            if (feature == 0) {
                parts[at].reference = highest;
                parts[at].total = total;
            }
        }
    }
    if (splits == 1) return;

    // The last block to arrive merges the splits, in order. After the barrier, fences by one thread are enough for the
    // whole block.
    __syncthreads();
    u32* is_joiner = reinterpret_cast<u32*>(shared);
    u32* ticket = tickets + static_cast<u64>(sequence) * gridDim.y + blockIdx.y;
    if (threadIdx.x == 0) {
        fence_device();
        const bool is_last = add_device(ticket, 1) == splits - 1;
        fence_device();
        if (is_last) *ticket = 0;
        *is_joiner = is_last;
    }
    __syncthreads();
    if (*is_joiner == 0) return;
    for (u32 item = threadIdx.x; item < columns * HEAD_DIM; item += THREADS) {
        const u32 head = item / HEAD_DIM, feature = item % HEAD_DIM;
        const u64 row = row_of(head), at = row * max_splits;
        float highest = LOWEST;
        for (u32 s = 0; s < splits; ++s) highest = fmaxf(highest, parts[at + s].reference);
        float sum = 0.0f, total = 0.0f;
        for (u32 s = 0; s < splits; ++s) {
            const float factor = exp2_approx(parts[at + s].reference - highest);
            sum = fmaf(factor, sums[(at + s) * HEAD_DIM + feature], sum);
            total = fmaf(factor, parts[at + s].total, total);
        }
        store(out + row * HEAD_DIM + feature, total == 0.0f ? 0.0f : sum / total);
        if (lse != nullptr && feature == 0)
            lse[row] = total == 0.0f ? minus_infinity() : (highest + log2_approx(total)) * LN_2;
    }
}
