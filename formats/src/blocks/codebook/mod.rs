//! IQ2 and IQ3: signs, and magnitudes that are looked up in groups of eight or four in a code book.
//!
//! A block has 256 elements, a scale `d` and a 4-bit factor per 16 or 32 elements. An element is `±scale·m`, with the
//! magnitude `m` from the code book. In IQ2_XXS, IQ2_XS and IQ3_XXS, eight signs are stored in seven bits, because their
//! number of negative ones is even. The bytes of a block are, after `d`:
//!
//! | type | fields |
//! |---|---|
//! | IQ2_XXS | for every 32 elements: four indices of 8 bits; then a word with four times 7 signs and the factor |
//! | IQ2_XS | for every 8 elements: 9 bits of index, 7 signs; then the factors, two per byte |
//! | IQ2_S | low 8 bits of all indices; signs; high 2 bits of the indices; factors |
//! | IQ3_XXS | 64 indices of 8 bits; for every 32 elements, a word with four times 7 signs and the factor |
//! | IQ3_S | low 8 bits of all indices; their high bits; signs; factors |

mod points;
mod refine;
mod search;
mod tables;
#[cfg(test)]
mod tests;

use std::sync::LazyLock;

use points::Points;

use super::search::mean_square;
use super::{BlockType, IQ4_NL, SUPER, f16_bits};

/// 2.0625 bits, code book of 256 points.
pub static IQ2_XXS: BlockType = BlockType {
    name: "IQ2_XXS",
    id: 16,
    bytes: 66,
    encode: |row, importance, out| encode(&XXS_2, row, importance, out),
    decode: |bytes, out| decode(&XXS_2, bytes, out),
    ..COMMON
};

/// 2.3125 bits, code book of 512 points.
pub static IQ2_XS: BlockType = BlockType {
    name: "IQ2_XS",
    id: 17,
    bytes: 74,
    encode: |row, importance, out| encode(&XS_2, row, importance, out),
    decode: |bytes, out| decode(&XS_2, bytes, out),
    ..COMMON
};

/// 2.5625 bits, code book of 1024 points.
pub static IQ2_S: BlockType = BlockType {
    name: "IQ2_S",
    id: 22,
    bytes: 82,
    encode: |row, importance, out| encode(&S_2, row, importance, out),
    decode: |bytes, out| decode(&S_2, bytes, out),
    ..COMMON
};

/// 3.0625 bits, code book of 256 points.
pub static IQ3_XXS: BlockType = BlockType {
    name: "IQ3_XXS",
    id: 18,
    bytes: 98,
    encode: |row, importance, out| encode(&XXS_3, row, importance, out),
    decode: |bytes, out| decode(&XXS_3, bytes, out),
    ..COMMON
};

/// 3.4375 bits, code book of 512 points.
pub static IQ3_S: BlockType = BlockType {
    name: "IQ3_S",
    id: 21,
    bytes: 110,
    needs_importance: false,
    encode: |row, importance, out| encode(&S_3, row, importance, out),
    decode: |bytes, out| decode(&S_3, bytes, out),
    ..COMMON
};

const COMMON: BlockType = BlockType {
    name: "",
    id: 0,
    elements: SUPER,
    bytes: 0,
    needs_importance: true,
    uses_importance: true,
    fallback: Some(&IQ4_NL),
    grid: None,
    encode: |_, _, _| {},
    decode: |_, _| {},
};

/// How a type stores a block, and its settings of the reference search.
struct Form {
    points: &'static LazyLock<Points>,
    magnitudes: &'static [u8],
    /// Elements per factor.
    part: usize,
    /// Whether the number of negative signs of eight elements is even.
    even_signs: bool,
    /// The scale of a part with this `d` and factor.
    scale: fn(f32, u8) -> f32,
    unpack: fn(&[u8], &mut Fields),
    pack: fn(&Fields, &mut [u8]),
    search: search::Settings,
}

/// The fields of a block, except `d`.
#[derive(Clone)]
struct Fields {
    /// Factors of 4 bits; types with 32 elements per factor use eight.
    factors: [u8; 16],
    /// Eight signs each, the first in the lowest bit; 1 is negative.
    signs: [u8; 32],
    /// Indices of points; IQ2 uses 32.
    indices: [u16; 64],
}

impl Fields {
    const ZERO: Self = Self { factors: [0; 16], signs: [0; 32], indices: [0; 64] };
}

const LEVELS_2: &[u8] = &[8, 25, 43];

static XXS_2: Form = Form {
    points: &points::IQ2_XXS,
    magnitudes: LEVELS_2,
    part: 32,
    even_signs: true,
    scale: quarter,
    unpack: |block, fields| {
        for (j, words) in block.chunks_exact(8).enumerate() {
            let indices = fields.indices[4 * j..][..4].iter_mut();
            indices.zip(words).for_each(|(index, byte)| *index = u16::from(*byte));
            get_word(fields, j, &words[4..]);
        }
    },
    pack: |fields, block| {
        for (j, words) in block.chunks_exact_mut(8).enumerate() {
            let indices = &fields.indices[4 * j..][..4];
            words.iter_mut().zip(indices).for_each(|(byte, index)| *byte = *index as u8);
            put_word(fields, j, &mut words[4..]);
        }
    },
    search: search::IQ2_XXS,
};

static XS_2: Form = Form {
    points: &points::IQ2_XS,
    magnitudes: LEVELS_2,
    part: 16,
    even_signs: true,
    scale: quarter,
    unpack: |block, fields| {
        let (codes, factors) = block.split_at(64);
        for (g, code) in codes.chunks_exact(2).enumerate() {
            let code = u16::from_le_bytes([code[0], code[1]]);
            fields.indices[g] = code & 511;
            fields.signs[g] = with_parity((code >> 9) as u8);
        }
        get_factors(fields, factors);
    },
    pack: |fields, block| {
        let (codes, factors) = block.split_at_mut(64);
        for (g, code) in codes.chunks_exact_mut(2).enumerate() {
            let signs = u16::from(fields.signs[g] & 127);
            code.copy_from_slice(&(fields.indices[g] | signs << 9).to_le_bytes());
        }
        put_factors(fields, factors);
    },
    search: search::IQ2_XS,
};

static S_2: Form = Form {
    points: &points::IQ2_S,
    magnitudes: LEVELS_2,
    part: 16,
    even_signs: false,
    scale: quarter,
    unpack: |block, fields| {
        for g in 0..32 {
            let high = u16::from(block[64 + g / 4] >> (2 * (g % 4)) & 3);
            fields.indices[g] = u16::from(block[g]) | high << 8;
        }
        fields.signs.copy_from_slice(&block[32..64]);
        get_factors(fields, &block[72..]);
    },
    pack: |fields, block| {
        block[64..72].fill(0);
        for g in 0..32 {
            block[g] = fields.indices[g] as u8;
            block[64 + g / 4] |= ((fields.indices[g] >> 8) as u8) << (2 * (g % 4));
        }
        block[32..64].copy_from_slice(&fields.signs);
        put_factors(fields, &mut block[72..]);
    },
    search: search::IQ2_S,
};

static XXS_3: Form = Form {
    points: &points::IQ3_XXS,
    magnitudes: &[4, 12, 20, 28, 36, 44, 52, 62],
    part: 32,
    even_signs: true,
    scale: |d, factor| d * (0.5 + f32::from(factor)) * 0.5,
    unpack: |block, fields| {
        let (indices, words) = block.split_at(64);
        fields.indices.iter_mut().zip(indices).for_each(|(index, byte)| *index = u16::from(*byte));
        words.chunks_exact(4).enumerate().for_each(|(j, word)| get_word(fields, j, word));
    },
    pack: |fields, block| {
        let (indices, words) = block.split_at_mut(64);
        indices.iter_mut().zip(fields.indices).for_each(|(byte, index)| *byte = index as u8);
        words.chunks_exact_mut(4).enumerate().for_each(|(j, word)| put_word(fields, j, word));
    },
    search: search::IQ3_XXS,
};

static S_3: Form = Form {
    points: &points::IQ3_S,
    magnitudes: &[1, 3, 5, 7, 9, 11, 13, 15],
    part: 32,
    even_signs: false,
    scale: |d, factor| d * f32::from(1 + 2 * factor),
    unpack: |block, fields| {
        for (g, index) in fields.indices.iter_mut().enumerate() {
            *index = u16::from(block[g]) | u16::from(block[64 + g / 8] >> (g % 8) & 1) << 8;
        }
        fields.signs.copy_from_slice(&block[72..104]);
        get_factors(fields, &block[104..]);
    },
    pack: |fields, block| {
        block[64..72].fill(0);
        for (g, index) in fields.indices.iter().enumerate() {
            block[g] = *index as u8;
            block[64 + g / 8] |= ((index >> 8) as u8) << (g % 8);
        }
        block[72..104].copy_from_slice(&fields.signs);
        put_factors(fields, &mut block[104..]);
    },
    search: search::IQ3_S,
};

fn quarter(d: f32, factor: u8) -> f32 {
    d * (0.5 + f32::from(factor)) * 0.25
}

fn with_parity(signs: u8) -> u8 {
    signs & 127 | ((signs & 127).count_ones() as u8 & 1) << 7
}

/// Reads the signs and the factor of 32 elements from a word.
fn get_word(fields: &mut Fields, j: usize, bytes: &[u8]) {
    let word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    for (l, signs) in fields.signs[4 * j..][..4].iter_mut().enumerate() {
        *signs = with_parity((word >> (7 * l)) as u8);
    }
    fields.factors[j] = (word >> 28) as u8;
}

fn put_word(fields: &Fields, j: usize, bytes: &mut [u8]) {
    let signs = fields.signs[4 * j..][..4].iter().enumerate();
    let signs = signs.fold(0, |word, (l, signs)| word | u32::from(signs & 127) << (7 * l));
    bytes.copy_from_slice(&(signs | u32::from(fields.factors[j]) << 28).to_le_bytes());
}

/// Reads factors, two per byte.
fn get_factors(fields: &mut Fields, bytes: &[u8]) {
    for (pair, byte) in fields.factors.chunks_exact_mut(2).zip(bytes) {
        pair.copy_from_slice(&[byte & 15, byte >> 4]);
    }
}

fn put_factors(fields: &Fields, bytes: &mut [u8]) {
    for (pair, byte) in fields.factors.chunks_exact(2).zip(bytes) {
        *byte = pair[0] | pair[1] << 4;
    }
}

fn decode(form: &Form, bytes: &[u8], out: &mut [f32]) {
    let book = form.points.book;
    let group = book.elements();
    let block_bytes = bytes.len() / (out.len() / SUPER).max(1);
    let mut fields = Fields::ZERO;
    for (block, out) in bytes.chunks_exact(block_bytes.max(1)).zip(out.chunks_exact_mut(SUPER)) {
        let d = f16_bits::get(block, 0);
        (form.unpack)(&block[2..], &mut fields);
        for (g, out) in out.chunks_exact_mut(group).enumerate() {
            let first = g * group;
            let scale = (form.scale)(d, fields.factors[first / form.part]);
            let point = book.points[usize::from(fields.indices[g])];
            let signs = fields.signs[first / 8] >> (first % 8);
            for (i, out) in out.iter_mut().enumerate() {
                let value = scale * f32::from(form.magnitudes[book.level(point, i)]);
                *out = if signs >> i & 1 == 1 { -value } else { value };
            }
        }
    }
}

static FORMS: [(&BlockType, &Form); 5] =
    [(&IQ2_XXS, &XXS_2), (&IQ2_XS, &XS_2), (&IQ2_S, &S_2), (&IQ3_XXS, &XXS_3), (&IQ3_S, &S_3)];

/// Encodes a row by this crate's own search, with the weight of each element; false if the type is not of this module.
pub(super) fn encode_refined(
    kind: &BlockType,
    row: &[f32],
    importance: Option<&[f32]>,
    out: &mut [u8],
) -> bool {
    let Some((_, form)) = FORMS.iter().find(|(known, _)| *known == kind) else { return false };
    let sigma2 = mean_square(row);
    let blocks = row.chunks_exact(SUPER).zip(out.chunks_exact_mut(kind.bytes));
    for (b, (x, block)) in blocks.enumerate() {
        let importance = importance.map(|importance| &importance[SUPER * b..][..SUPER]);
        let mut weights = [0.0; SUPER];
        for (e, (w, x)) in weights.iter_mut().zip(x).enumerate() {
            *w = (sigma2 + x * x).sqrt().sqrt() * importance.map_or(1.0, |importance| importance[e]);
        }
        let (d, fields) = refine::block(form, x, &weights, search::block(form, x, importance));
        f16_bits::put(block, 0, d);
        (form.pack)(&fields, &mut block[2..]);
    }
    true
}

fn encode(form: &Form, row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    let block_bytes = out.len() / (row.len() / SUPER).max(1);
    let blocks = row.chunks_exact(SUPER).zip(out.chunks_exact_mut(block_bytes.max(1)));
    for (b, (x, block)) in blocks.enumerate() {
        let importance = importance.map(|importance| &importance[SUPER * b..][..SUPER]);
        let (d, fields) = search::block(form, x, importance);
        f16_bits::put(block, 0, d);
        (form.pack)(&fields, &mut block[2..]);
    }
}
