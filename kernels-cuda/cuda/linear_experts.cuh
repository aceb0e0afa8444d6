// The experts of a layer: finds the expert of a block, and the activations of its rows.
//
// The rows of results are sorted by expert: expert `e` has rows starts[e] to starts[e + 1]. These numbers are in device
// memory, since the routing computes them there, so the host plans a grid for the largest possible number of tiles.
// Each expert's rows begin a new tile, and an expert without rows has none. A block counts the tiles of the experts
// before its own.
//
// Part of linear.cu, whose constants and arguments it uses.
#pragma once

// The sections of an expert's packed weights, and its bias or null. With GATE, an expert has two of these: gate and up.
// src/linear/experts.rs writes the same fields.
struct __align__(16) Expert {
    const u8 *codes, *parameters;
    const float *row_scales;
    const u8 *row_zeros;
    const i32 *row_sums;
    const float *bias;
};

// The expert of a block, its first row and number of rows, and its first token tile.
struct Place {
    u32 expert, first, rows, tile;
};

// An index that no token has.
constexpr u32 NO_TOKEN = 0xffffffffu;

// Tells the compiler that an address that was read from memory is in global memory.
template <class T> INLINE const T *global(const T *address) {
    return (const T *)__cvta_global_to_generic(__cvta_generic_to_global(address));
}

// Numbers in `starts` beyond the last planned row are reduced to it, so that no memory after it is accessed.
INLINE void rows_of(Place &to, const u32 *starts, u32 expert, u32 rows) {
    to.first = min(starts[expert], rows);
    to.rows = max(min(starts[expert + 1], rows), to.first) - to.first;
}

// Finds the expert of a token tile. Returns false if there are fewer tiles. Called by whole warps, all of which get the
// same result.
INLINE bool find_expert(Place &to, const u32 *starts, u32 experts, u32 rows, u32 tile, u32 lane) {
    // A lane counts the tiles of `each` consecutive experts.
    const u32 each = (experts + 31) / 32, begin = lane * each, end = min(begin + each, experts);
    u32 own = 0;
#pragma unroll 4
    for (u32 e = begin; e < end; e++) {
        rows_of(to, starts, e, rows);
        own += (to.rows + TOKENS - 1) / TOKENS;
    }
    u32 upto = own;
#pragma unroll
    for (u32 apart = 1; apart < 32; apart *= 2) {
        const u32 before = __shfl_sync(ALL_LANES, upto, lane - apart);
        if (lane >= apart) upto += before;
    }
    const u32 owner = sum_of_lanes(upto <= tile);
    if (owner == 32) return false;
    to.expert = owner * each;
    to.tile = __shfl_sync(ALL_LANES, upto - own, owner);
    for (;; to.expert++) {
        rows_of(to, starts, to.expert, rows);
        const u32 tiles = (to.rows + TOKENS - 1) / TOKENS;
        if (tile - to.tile < tiles) return true;
        to.tile += tiles;
    }
}

// The arguments for the end of a block and a matrix of its expert. The addresses and numbers of the expert are read
// again, so that they occupy no registers before.
INLINE Arguments read_again(const Arguments &p, u32 matrix) {
    const Expert &expert = p.experts[MATRICES * p.expert + matrix];
    Arguments end = p;
    end.row_scales = global(expert.row_scales);
    end.row_sums = global(expert.row_sums);
    end.bias = global(expert.bias);
    Place place;
    rows_of(place, p.starts, p.expert, p.all_rows);
    end.first = place.first;
    end.m = place.rows;
    return end;
}

// The token of a row of the expert, or NO_TOKEN, which stands for activations of zero.
INLINE u32 token_of(const Arguments &p, u32 row) {
    const u32 at = p.first + row, token = p.token_of ? p.token_of[at] : at;
    return token < p.tokens ? token : NO_TOKEN;
}
