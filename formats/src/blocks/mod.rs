//! Block types: rows of weights in blocks of 32, 64 or 256, each with its own scales, as in ggml's files; also plain
//! floats.
//!
//! A block type is data ([`BlockType`]): its name and id, the size of a block, and functions that encode and decode
//! rows. [`BlockType::encode`] uses the reference search. Except in two cases that `docs/formats/gguf.md` describes, its
//! bytes equal those of llama.cpp's quantizer, which computes in scalar `f32` in the same order.
//! [`BlockType::encode_refined`] uses this crate's own search. `docs/formats/gguf.md` draws the blocks.

mod block;
mod codebook;
mod f16_bits;
mod floats;
mod fp4;
mod grid;
mod iq4;
mod kernels;
mod minimum_blocks;
mod q2_k;
mod q3_k;
mod q4_k;
mod q5_k;
mod q6_k;
mod q8_0;
mod refine;
mod scales_6bit;
mod search;
mod ternary;
#[cfg(test)]
mod tests;
mod thirty_two;

pub use fp4::repack_mxfp4;
pub use thirty_two::pack_q4_0;

pub use codebook::{IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS};
pub use floats::{BF16, F16, F32};
pub use fp4::{MXFP4, NVFP4};
pub use iq4::{IQ4_NL, IQ4_XS};
pub use q2_k::Q2_K;
pub use q3_k::Q3_K;
pub use q4_k::Q4_K;
pub use q5_k::Q5_K;
pub use q6_k::Q6_K;
pub use q8_0::Q8_0;
pub use ternary::{TQ1_0, TQ2_0};
pub use thirty_two::{Q4_0, Q4_1, Q5_0, Q5_1};

/// Elements of a super-block.
const SUPER: usize = 256;

/// A storage type for rows of weights.
pub struct BlockType {
    /// The name, as ggml prints it: `Q4_K`.
    pub name: &'static str,
    /// The type's id in a GGUF file.
    pub id: u32,
    /// Elements per block; the length of a row is a multiple of this.
    pub elements: usize,
    /// Bytes per block.
    pub bytes: usize,
    /// Whether llama.cpp encodes the tensors of blocks only with an importance matrix. Without one, the result is poor.
    pub needs_importance: bool,
    /// Whether an importance matrix, if there is one, is passed to the search. The reference search ignores it for some
    /// of these types.
    pub uses_importance: bool,
    /// The type that llama.cpp uses instead for rows whose length is not a multiple of `elements`.
    pub fallback: Option<&'static BlockType>,
    /// The values that a block can represent; `None` if codes are not chosen element by element.
    grid: Option<&'static grid::Grid>,
    encode: Encode,
    decode: Decode,
}

/// The search for scales and minimums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BlockSearch {
    /// Chooses the scales, factors and minimums of a block together, for a smaller error of the stored values.
    #[default]
    Refined,
    /// The search of llama.cpp, byte for byte.
    Reference,
}

/// Encodes one row: values, the importance of each (all nonnegative), and the bytes to fill.
type Encode = fn(&[f32], Option<&[f32]>, &mut [u8]);
type Decode = fn(&[u8], &mut [f32]);

impl std::fmt::Debug for BlockType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl PartialEq for BlockType {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl Eq for BlockType {}

/// The types that this version reads and writes.
pub static BLOCK_TYPES: &[&BlockType] = &[
    &F32, &F16, &BF16, &Q8_0, &Q4_0, &Q4_1, &Q5_0, &Q5_1, &Q2_K, &Q3_K, &Q4_K, &Q5_K, &Q6_K, &IQ2_XXS,
    &IQ2_XS, &IQ2_S, &IQ3_XXS, &IQ3_S, &IQ4_NL, &IQ4_XS, &TQ1_0, &TQ2_0, &MXFP4, &NVFP4,
];

/// Names of types that ggml defines but this version does not read, by id, for messages.
const UNSUPPORTED: [(u32, &str); 11] = [
    (9, "Q8_1"),
    (15, "Q8_K"),
    (19, "IQ1_S"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (41, "Q1_0"),
    (42, "Q2_0"),
];

/// Returns the type of that name, ignoring case.
///
/// ```
/// use quant_formats::blocks::block_type;
///
/// let q8 = block_type("q8_0").unwrap();
/// assert_eq!((q8.elements, q8.bytes), (32, 34));
/// assert_eq!(q8.row_bytes(4096), Some(4352));
/// assert!(block_type("q9_9").is_none());
/// ```
pub fn block_type(name: &str) -> Option<&'static BlockType> {
    BLOCK_TYPES.iter().copied().find(|t| t.name.eq_ignore_ascii_case(name))
}

/// Returns the type of that id.
pub fn block_type_of(id: u32) -> Option<&'static BlockType> {
    BLOCK_TYPES.iter().copied().find(|t| t.id == id)
}

/// Returns the name of a type that this version does not read.
pub fn unread_type(id: u32) -> Option<&'static str> {
    UNSUPPORTED.iter().find(|(known, _)| *known == id).map(|(_, name)| *name)
}

impl BlockType {
    /// Returns the bytes of a row of `elements` elements, or `None` if `elements` is not a multiple of the block
    /// length.
    pub fn row_bytes(&self, elements: usize) -> Option<usize> {
        if !elements.is_multiple_of(self.elements) {
            return None;
        }
        (elements / self.elements).checked_mul(self.bytes)
    }

    /// Bits per weight.
    pub fn bits_per_weight(&self) -> f64 {
        self.bytes as f64 * 8.0 / self.elements as f64
    }

    /// Whether elements are plain floats, without a shared scale.
    pub fn is_float(&self) -> bool {
        self.elements == 1
    }

    /// The nominal bits of a code, without scales: the number in the type's name. `None` for floats.
    ///
    /// ```
    /// use quant_formats::blocks::{F16, IQ2_XXS, Q4_K};
    ///
    /// assert_eq!([&Q4_K, &IQ2_XXS, &F16].map(|kind| kind.code_bits()), [Some(4), Some(2), None]);
    /// ```
    pub fn code_bits(&self) -> Option<u8> {
        let digit = self.name.chars().find_map(|c| c.to_digit(10));
        digit.filter(|_| !self.is_float()).and_then(|bits| bits.try_into().ok())
    }

    /// Encodes a row with the [reference](BlockSearch::Reference) search. `importance`, which must be nonnegative,
    /// weights the squared error of each element; only its ratios within a row matter. Floats, Q8_0, the ternary types
    /// and the 4-bit floats ignore it.
    ///
    /// # Panics
    /// When the lengths are inconsistent; see [`row_bytes`](Self::row_bytes).
    pub fn encode(&self, row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
        assert_eq!(Some(out.len()), self.row_bytes(row.len()), "bytes of a {} row", self.name);
        if let Some(importance) = importance {
            assert_eq!(importance.len(), row.len(), "importance of a {} row", self.name);
        }
        (self.encode)(row, importance, out);
    }

    /// Encodes a row with a given search.
    ///
    /// # Panics
    /// See [`encode`](Self::encode).
    pub fn encode_by(&self, search: BlockSearch, row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
        match search {
            BlockSearch::Refined => self.encode_refined(row, importance, out),
            BlockSearch::Reference => self.encode(row, importance, out),
        }
    }

    /// Encodes a row with scales from this crate's own search, which usually gives a smaller error than
    /// [`encode`](Self::encode). It minimizes `Σ importance·(σ² + value²)^¼·(value − stored)²`, with the mean square
    /// `σ²` of the row. Without `importance`, every element has an importance of 1. Floats need no search.
    ///
    /// # Panics
    /// See [`encode`](Self::encode).
    pub fn encode_refined(&self, row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
        assert_eq!(Some(out.len()), self.row_bytes(row.len()), "bytes of a {} row", self.name);
        if let Some(importance) = importance {
            assert_eq!(importance.len(), row.len(), "importance of a {} row", self.name);
        }
        let Some(grid) = self.grid else {
            if !codebook::encode_refined(self, row, importance, out) {
                (self.encode)(row, importance, out);
            }
            return;
        };
        refine::row(grid, row, importance, self.elements, |block, fields| {
            (grid.pack)(fields, &mut out[block * self.bytes..][..self.bytes]);
        });
    }

    /// Decodes the bytes of a row.
    ///
    /// # Panics
    /// See [`encode`](Self::encode).
    pub fn decode(&self, bytes: &[u8], out: &mut [f32]) {
        assert_eq!(Some(bytes.len()), self.row_bytes(out.len()), "bytes of a {} row", self.name);
        (self.decode)(bytes, out);
    }
}
