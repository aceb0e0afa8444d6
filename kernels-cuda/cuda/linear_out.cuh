// Adds the chunks of other blocks, reorders fragments to rows, applies scales and bias, and writes the results.
//
// Part of linear.cu, whose constants and arguments it uses.
#pragma once

// Computes one result from the bits of its sum over k.
INLINE float finish(const Arguments &p, u32 bits, u32 token, u32 row) {
    float value;
    if (WHOLE) {
        i32 whole = (i32)bits >> SHIFT;
        if (X_ZERO) whole -= p.x_zero * p.row_sums[row];
        value = (float)whole;
        // An FMA with +0, so that a zero product is +0 and never −0.
        value = TWO_LEVELS ? value * p.row_scales[row] : fused(value, p.row_scales[row], 0.0f);
    } else {
        value = __uint_as_float(bits);
        if (UNIT != 1.0f) value *= UNIT;
        if (GROUP == 0 || SCALE == E4M3) value *= p.row_scales[row];
    }
    if (FLOAT) return p.bias ? value + p.bias[row] : value;
    float scale;
    if (EXPERTS) {
        const u32 from = token_of(p, token);
        scale = from == NO_TOKEN ? 0.0f : p.x_scales[from];
    } else {
        scale = p.x_scales[token];
    }
    return p.bias ? fused(value, scale, p.bias[row]) : value * scale;
}

INLINE void store(const Arguments &p, u64 at, float value) {
    if (OUTPUT == F32) ((float *)p.out)[at] = value;
    else if (OUTPUT == F16) ((u16 *)p.out)[at] = f16_of_float(value);
    else ((u16 *)p.out)[at] = bf16_of_float(value);
}

INLINE u32 bits_of(float value) { return __float_as_uint(value); }
INLINE u32 bits_of(i32 value) { return (u32)value; }
INLINE total_t total_of(u32 bits) { return WHOLE ? (total_t)(i32)bits : (total_t)__uint_as_float(bits); }

// Reorders fragments to rows through shared memory, combines those of gate and up, and stores results inside the
// matrix.
INLINE void write_out(const Arguments &p, u8 *shared, const Fragments &totals, u32 row, u32 token,
                      u32 row_warp, u32 token_warp, u32 lane) {
    u32 *turn = (u32 *)shared;
#if EXPERTS
    const Arguments up = GATED ? read_again(p, 1) : p;
#endif
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
    for (u32 i = threadIdx.x; i < TOKENS * FEATURES; i += THREADS) {
        u32 line = i / FEATURES, column = i % FEATURES;
        if (token + line < p.m && row + column < p.n) {
            const u32 *sum = turn + line * OUT_STRIDE + column;
            float value = finish(p, sum[0], token + line, row + column);
#if EXPERTS
            if constexpr (GATED)
                value = gated<GATE>(value, finish(up, sum[FEATURES], token + line, row + column), p.alpha, p.limit);
#endif
            u32 to = token + line;
            if (EXPERTS) {
                to += p.first;
                if (p.factors) value *= p.factors[to];
            }
            store(p, (u64)to * p.out_stride + row + column, value);
        }
    }
}

// Adds the chunks of all blocks of this tile in order. Returns true in the block that arrives last, which has the sums.
// It reads the chunks of the others from the workspace: [chunk][fragment][warp][token][row of 8] of the bits of two
// rows.
//
// There are two tickets: the number of blocks that have arrived, and the number that have written. The last block to
// arrive waits for those that are still writing. They are already running and never wait, so there is no deadlock.
INLINE bool join_chunks(const Arguments &p, u8 *shared, Fragments &totals, u32 tile, u32 chunk, u32 tokens, u32 warp,
                        u32 token_warp, u32 lane) {
    // The number of pairs of values per fragment of all warps, and per chunk.
    constexpr u32 PAIRS = 64 * WARPS, CHUNK = ROW_TILES * TOKEN_TILES * PAIRS;
    u32 *arrived = p.tickets + 2 * tile, *written = arrived + 1, *others = (u32 *)shared;
    if (threadIdx.x == 0) *others = atomicInc(arrived, p.chunks - 1);
    __syncthreads();
    const bool is_last = *others == p.chunks - 1;
    // This lane's first pair, for its first token; the second token is 8 pairs further.
    u32 *all = p.partials + 2 * ((u64)tile * p.chunks * CHUNK + warp * 64 + lane % 4 * 16 + lane / 4);
    if (!is_last) {
        u32 *own = all + 2 * (u64)chunk * CHUNK;
#pragma unroll
        for (int i = 0; i < ROW_TILES * TOKEN_TILES; i++) {
#pragma unroll
            for (int second = 0; second < 2; second++) {
                if ((token_warp * TOKEN_TILES + i % TOKEN_TILES) * 8 + lane % 4 * 2 + second >= tokens) continue;
                const total_t(&v)[4] = totals[i / TOKEN_TILES][i % TOKEN_TILES];
                *(uint2 *)(own + 2 * (i * PAIRS + 8 * second)) = make_uint2(bits_of(v[second]), bits_of(v[second + 2]));
            }
        }
        // After the barrier, a fence by one thread is enough for the whole block.
        __syncthreads();
        if (threadIdx.x == 0) {
            fence_device();
            add_device(written, 1);
        }
        return false;
    }
    if (threadIdx.x == 0) {
        while (add_device(written, 0) != p.chunks - 1) {
        }
        fence_device();
        // For the next launch; `arrived` has wrapped around to zero.
        *written = 0;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ROW_TILES * TOKEN_TILES; i++) {
#pragma unroll
        for (int second = 0; second < 2; second++) {
            if ((token_warp * TOKEN_TILES + i % TOKEN_TILES) * 8 + lane % 4 * 2 + second >= tokens) continue;
            total_t &upper = totals[i / TOKEN_TILES][i % TOKEN_TILES][second];
            total_t &lower = totals[i / TOKEN_TILES][i % TOKEN_TILES][second + 2];
            const uint2 own = make_uint2(bits_of(upper), bits_of(lower));
            const u32 *from = all + 2 * (i * PAIRS + 8 * second);
            for (u32 c = 0; c < p.chunks; c++) {
                const uint2 next = c == chunk ? own : load_past_first_cache(from + 2 * (u64)c * CHUNK);
                upper = c == 0 ? total_of(next.x) : upper + total_of(next.x);
                lower = c == 0 ? total_of(next.y) : lower + total_of(next.y);
            }
        }
    }
    return true;
}
