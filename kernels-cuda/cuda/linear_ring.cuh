// The copies that fill a slot of the ring: codes, activations and parameters of a tile.
//
// Part of linear.cu, whose constants and arguments it uses.
#pragma once

constexpr int CODES_CHUNKS = TILE_BYTES / 16, X_CHUNKS = X_ROW / 16, PARAMETER_CHUNKS = PARAMETER_BYTES / 16;
constexpr int CODES_BLOCKS = THREADS / CODES_CHUNKS, X_ROWS = THREADS / X_CHUNKS;
constexpr int X_COPIES = (TOKENS + X_ROWS - 1) / X_ROWS;
static_assert(THREADS % CODES_CHUNKS == 0 && ROW_BLOCKS % CODES_BLOCKS == 0, "threads fill whole tiles of codes");
static_assert(MATRIX_BLOCKS % CODES_BLOCKS == 0, "a copy by all threads is of one matrix");
static_assert(X_ROWS % 8 == 0, "a thread's chunks of activations share a place in the swizzle");

// A thread's share of the copies for a tile: the first copy of each kind. Further ones are whole rows apart.
struct Copies {
    const u8 *codes, *parameters, *x;
    // Distances in bytes between this thread's chunks.
    u64 codes_step, x_step;
    // The remainder of the matrix, from this thread's first chunk: 16-row tiles, tokens, and bytes of a token.
    i32 row_blocks, tokens, left;
    // With GATE, the distances in bytes from the gate's codes and parameters to those of the up projection.
    u64 up_codes, up_parameters;
    // With EXPERTS, `x` is the place in the first token, and these are the tokens of this thread's chunks.
    u32 token_of[X_COPIES];
};

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
    to.up_codes = GATED ? (u64)p.up_codes - (u64)p.codes : 0;
    to.up_parameters = GATED ? (u64)p.up_parameters - (u64)p.parameters : 0;
    to.row_blocks -= (i32)block;
    to.tokens = (i32)p.m - (i32)row;
    to.left = ((i32)p.k - (i32)(tile * TILE_K)) * (i32)element - (i32)chunk * 16;
    if (EXPERTS) {
        to.x = p.x + (u64)tile * X_ROW + chunk * 16;
#pragma unroll
        for (int i = 0; i < X_COPIES; i++)
            to.token_of[i] = i * X_ROWS < to.tokens ? token_of(p, row + i * X_ROWS) : NO_TOKEN;
    }
    return to;
}

// Fills a slot of the ring, and advances to the next tile. Data outside the matrix becomes zero and is not read.
INLINE void copy_tile(const Arguments &p, Copies &from, u32 slot, u32 tiles) {
    const u32 thread = threadIdx.x;
#pragma unroll
    for (int i = 0; i < ROW_BLOCKS / CODES_BLOCKS; i++) {
        // The number of the copy among those of its matrix.
        const int own = i % (MATRIX_BLOCKS / CODES_BLOCKS);
        bool there = own * CODES_BLOCKS < from.row_blocks;
        const u64 offset = own * from.codes_step + (i == own ? 0 : from.up_codes);
        const u8 *codes = there ? from.codes + offset : EXPERTS ? p.x : p.codes;
        copy_async_16(slot + (i * THREADS + thread) * 16, codes, there ? 16 : 0);
    }
    from.codes += TILE_BYTES;
    const u32 row = thread / X_CHUNKS, place = thread % X_CHUNKS ^ row % 8;
    const i32 valid = max(min(from.left, 16), 0);
#pragma unroll
    for (int i = 0; i < X_COPIES; i++) {
        if (TOKENS < X_ROWS && row >= TOKENS) break;
        bool there = i * X_ROWS < from.tokens && valid > 0;
        u64 offset = i * from.x_step;
        if (EXPERTS) {
            there = from.token_of[i] != NO_TOKEN && valid > 0;
            offset = (u64)from.token_of[i] * (p.x_stride * (FLOAT ? 2 : 1));
        }
        const u8 *x = there ? from.x + offset : p.x;
        copy_async_16(slot + X_AT + (row + i * X_ROWS) * X_ROW + place * 16, x, there ? valid : 0);
    }
    from.x += X_ROW;
    from.left -= X_ROW;
    if (PARAMETER_BYTES > 0) {
#pragma unroll
        for (int i = 0; i < (ROW_BLOCKS * PARAMETER_CHUNKS + THREADS - 1) / THREADS; i++) {
            const i32 at = i * THREADS + (i32)thread;
            if (at >= ROW_BLOCKS * PARAMETER_CHUNKS) break;
            i32 block = at / (PARAMETER_CHUNKS > 0 ? PARAMETER_CHUNKS : 1);
            u64 offset = (at - block * PARAMETER_CHUNKS) * 16;
            if (GATED && block >= MATRIX_BLOCKS) {
                block -= MATRIX_BLOCKS;
                offset += from.up_parameters;
            }
            offset += (u64)block * tiles * PARAMETER_BYTES;
            bool there = block - (i32)(thread / CODES_CHUNKS) < from.row_blocks;
            const u8 *parameters = there ? from.parameters + offset : EXPERTS ? p.x : p.parameters;
            copy_async_16(slot + PARAMETERS_AT + at * 16, parameters, there ? 16 : 0);
        }
        from.parameters += PARAMETER_BYTES;
    }
}
