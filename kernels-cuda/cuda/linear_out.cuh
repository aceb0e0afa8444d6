// From a warp's sums to results in memory: chunks of other blocks are added, fragments become rows, scales and bias come in.
//
// A part of linear.cu, whose constants and arguments it uses.
#pragma once

// One result from the sum over k, whose bits these are.
INLINE float finish(const Arguments &p, u32 bits, u32 token, u32 row) {
    float value;
    if (WHOLE) {
        i32 whole = (i32)bits >> SHIFT;
        if (X_ZERO) whole -= p.x_zero * p.row_sums[row];
        value = (float)whole;
        // As a fused sum with zero: a product of zero is +0.
        value = TWO_LEVELS ? value * p.row_scales[row] : fused(value, p.row_scales[row], 0.0f);
    } else {
        value = __uint_as_float(bits);
        if (GROUP == 0) value *= p.row_scales[row];
    }
    if (FLOAT) return p.bias ? value + p.bias[row] : value;
    float scale = p.x_scales[token];
    return p.bias ? fused(value, scale, p.bias[row]) : value * scale;
}

INLINE void store(const Arguments &p, u64 at, float value) {
    if (OUTPUT == F32) ((float *)p.out)[at] = value;
    else if (OUTPUT == F16) ((u16 *)p.out)[at] = f16_of_float(value);
    else ((u16 *)p.out)[at] = bf16_of_float(value);
}

INLINE u32 bits_of(float value) { return __float_as_uint(value); }
INLINE u32 bits_of(i32 value) { return (u32)value; }
INLINE float sum_of(float, u32 a, u32 b) { return __uint_as_float(a) + __uint_as_float(b); }
INLINE i32 sum_of(i32, u32 a, u32 b) { return (i32)(a + b); }

// Turns fragments into rows through shared memory, and writes what is inside the matrix.
INLINE void write_out(const Arguments &p, u8 *shared, const total_t (&totals)[ROW_TILES][TOKEN_TILES][4], u32 row, u32 token,
                      u32 row_warp, u32 token_warp, u32 lane) {
    u32 *turn = (u32 *)shared;
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
        for (int t = 0; t < TOKEN_TILES; t++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 column = (row_warp * ROW_TILES + r) * 16 + lane / 4 + i / 2 * 8;
                u32 line = (token_warp * TOKEN_TILES + t) * 8 + lane % 4 * 2 + i % 2;
                turn[line * OUT_STRIDE + column] = bits_of(totals[r][t][i]);
            }
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < TOKENS * ROWS; i += THREADS) {
        u32 line = i / ROWS, column = i % ROWS;
        if (token + line < p.m && row + column < p.n) {
            u64 at = (u64)(token + line) * p.out_stride + row + column;
            store(p, at, finish(p, turn[line * OUT_STRIDE + column], token + line, row + column));
        }
    }
}

// Adds the chunks of all blocks of this tile in order; true in the block that arrives last, which has the sums.
INLINE bool join_chunks(const Arguments &p, u8 *shared, total_t (&totals)[ROW_TILES][TOKEN_TILES][4], u32 tile, u32 chunk,
                        u32 tokens, u32 warp, u32 token_warp, u32 lane) {
    constexpr u32 VECTORS = ROW_TILES * TOKEN_TILES;
    // Vector `i` of a chunk: [warp][token pair][row] of sixteen bytes; pairs of tokens that are not there are left out.
    const u32 place = warp * 32 + lane % 4 * 8 + lane / 4;
    u32 *all = p.partials + (u64)tile * p.chunks * VECTORS * THREADS * 4;
    u32 *own = all + (u64)chunk * VECTORS * THREADS * 4;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
        for (int t = 0; t < TOKEN_TILES; t++) {
            if ((token_warp * TOKEN_TILES + t) * 8 + lane % 4 * 2 >= tokens) continue;
            total_t(&v)[4] = totals[r][t];
            uint4 four = make_uint4(bits_of(v[0]), bits_of(v[1]), bits_of(v[2]), bits_of(v[3]));
            *(uint4 *)(own + ((r * TOKEN_TILES + t) * THREADS + place) * 4) = four;
        }
    }
    fence_device();
    __syncthreads();
    u32 *last = (u32 *)shared;
    if (threadIdx.x == 0) {
        // The last one's turns it to zero again, for the next launch.
        *last = atomicInc(p.tickets + tile, p.chunks - 1) == p.chunks - 1;
    }
    __syncthreads();
    if (!*last) return false;
    fence_device();
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
        for (int t = 0; t < TOKEN_TILES; t++) {
            if ((token_warp * TOKEN_TILES + t) * 8 + lane % 4 * 2 >= tokens) continue;
            total_t(&v)[4] = totals[r][t];
            const u32 *from = all + ((r * TOKEN_TILES + t) * THREADS + place) * 4;
            uint4 sum = load_past_first_cache(from);
            for (u32 c = 1; c < p.chunks; c++) {
                from += VECTORS * THREADS * 4;
                uint4 next = load_past_first_cache(from);
                total_t kind = 0;
                sum.x = bits_of(sum_of(kind, sum.x, next.x));
                sum.y = bits_of(sum_of(kind, sum.y, next.y));
                sum.z = bits_of(sum_of(kind, sum.z, next.z));
                sum.w = bits_of(sum_of(kind, sum.w, next.w));
            }
            const u32 bits[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] = WHOLE ? (total_t)(i32)bits[i] : (total_t)__uint_as_float(bits[i]);
        }
    }
    return true;
}
