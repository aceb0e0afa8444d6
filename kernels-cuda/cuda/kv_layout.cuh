// The layout of a tile of the cache: 16 tokens of one key-value head. src/attention/layout.rs has the same numbers.
//
//   tile = key rows, value rows [16][DIM · KV_BITS / 8 bytes], key grids, value grids [16] of { f16 scale, f16 zero }
//
// Rows hold features in natural order, DIM / (32 / KV_BITS) words. Tokens and blocks of words are permuted so that the
// loads of attention_decode.cu have no bank conflicts. KV_BITS: 4, 8, or 16 for f16, which has no grids. HEAD_DIM: a
// multiple of 16; rows are padded to a multiple of 32.
#pragma once
#include "ptx.cuh"

constexpr int DIM = (HEAD_DIM + 31) / 32 * 32;
constexpr int TILE_TOKENS = 16;
constexpr int ROW_WORDS = DIM * KV_BITS / 32;
constexpr int ROW_BYTES = 4 * ROW_WORDS;
constexpr int PACK = 32 / KV_BITS;
constexpr int VALUES_AT = TILE_TOKENS * ROW_BYTES;
constexpr int KEY_GRIDS_AT = 2 * VALUES_AT;
constexpr int VALUE_GRIDS_AT = KEY_GRIDS_AT + 4 * TILE_TOKENS;
constexpr bool HAS_GRIDS = KV_BITS != 16;
constexpr int TILE_BYTES = HAS_GRIDS ? VALUE_GRIDS_AT + 4 * TILE_TOKENS : KEY_GRIDS_AT;

static_assert(HEAD_DIM > 0 && HEAD_DIM % 16 == 0 && HEAD_DIM <= 256, "HEAD_DIM is a multiple of 16 up to 256");
static_assert(KV_BITS == 4 || KV_BITS == 8 || KV_BITS == 16, "KV_BITS is 4, 8 or 16");

// If the size of a key row is a multiple of 128 bytes, every second row has the halves of each 128 bytes swapped, so
// that 8 lanes, four in each of two rows, access all banks.
constexpr int KEY_EXCHANGE = ROW_WORDS % 32 == 0 ? 16 : 0;

INLINE constexpr int key_word(int token, int word) {
    return token * ROW_WORDS + (word ^ (token & 1) * KEY_EXCHANGE);
}

// A load reads 32 contiguous bytes of the value rows of four tokens, which are 2 apart. Rows and blocks of 32 bytes are
// permuted for it if the row size allows.
constexpr bool VALUE_ROWS_PERMUTED = ROW_WORDS % 8 == 0;
constexpr int VALUE_EXCHANGE = ROW_WORDS % 32 == 0 ? 3 : ROW_WORDS % 16 == 0 ? 2 : 0;

INLINE constexpr int value_row(int token) {
    return VALUE_ROWS_PERMUTED ? (token & 8) | (token & 1) << 2 | (token >> 1 & 3) : token;
}

// The mask with which the block numbers of a row are XORed.
INLINE constexpr int value_exchange(int row) {
    return VALUE_EXCHANGE == 3 ? row & 3 : VALUE_EXCHANGE == 2 ? row >> 1 & 1 : 0;
}

INLINE constexpr int value_word(int token, int word) {
    return value_row(token) * ROW_WORDS + (word ^ value_exchange(value_row(token)) << 3);
}

// The inverse of value_row.
INLINE constexpr int value_token(int row) {
    return VALUE_ROWS_PERMUTED ? (row & 8) | (row & 3) << 1 | (row >> 2 & 1) : row;
}
