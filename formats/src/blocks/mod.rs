//! Block types: rows of weights in blocks of 32 or 256, each with its own scales, as ggml's files hold them.
//!
//! A block type is data ([`BlockType`]): name, id, length and bytes of a block, and two functions. Each type's
//! arithmetic stands in a file of its own. Encoding is the reference search: the bytes are those of llama.cpp's own
//! quantizer, which a scalar `f32` computation in the same order gives. `docs/formats/gguf.md` draws the blocks.

mod block;
mod f16_bits;
mod floats;
mod fp4;
mod grid;
mod iq4;
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

/// How rows of weights are stored.
pub struct BlockType {
    /// As ggml prints it: `Q4_K`.
    pub name: &'static str,
    /// The number that stands for it in a GGUF file.
    pub id: u32,
    /// Elements of a block; a row is a whole number of blocks.
    pub elements: usize,
    /// Bytes of a block.
    pub bytes: usize,
    /// Whether it is only usable with an importance matrix.
    pub needs_importance: bool,
    /// Whether an importance matrix changes the result.
    pub uses_importance: bool,
    /// What llama.cpp writes in place of it for rows that are no whole number of blocks.
    pub fallback: Option<&'static BlockType>,
    /// What a block can hold; `None` of floats.
    grid: Option<&'static grid::Grid>,
    encode: Encode,
    decode: Decode,
}

/// How scales and minimums are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Search {
    /// Scales, factors and minimums of a block chosen together, for less error of what is stored.
    #[default]
    Refined,
    /// As llama.cpp does, byte for byte.
    Reference,
}

/// Encodes one row: values, the importance of each (all positive or zero), and the bytes to fill.
type Encode = fn(&[f32], Option<&[f32]>, &mut [u8]);
/// Decodes one row.
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

/// The types that this version writes and reads.
pub static BLOCK_TYPES: &[&BlockType] = &[
    &F32, &F16, &BF16, &Q8_0, &Q4_0, &Q4_1, &Q5_0, &Q5_1, &Q2_K, &Q3_K, &Q4_K, &Q5_K, &Q6_K, &IQ4_NL,
    &IQ4_XS, &TQ1_0, &TQ2_0, &MXFP4, &NVFP4,
];

/// Names of types that ggml defines and this version does not read, by their ids, for messages.
const UNREAD: [(u32, &str); 16] = [
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (41, "Q1_0"),
    (42, "Q2_0"),
];

/// The type of that name, in any case.
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

/// The type of that id in a file.
pub fn block_type_of(id: u32) -> Option<&'static BlockType> {
    BLOCK_TYPES.iter().copied().find(|t| t.id == id)
}

/// The name of a type that this version does not read.
pub fn unread_type(id: u32) -> Option<&'static str> {
    UNREAD.iter().find(|(known, _)| *known == id).map(|(_, name)| *name)
}

impl BlockType {
    /// Bytes of a row of so many elements; `None` unless it is a whole number of blocks.
    pub fn row_bytes(&self, elements: usize) -> Option<usize> {
        if !elements.is_multiple_of(self.elements) {
            return None;
        }
        (elements / self.elements).checked_mul(self.bytes)
    }

    /// Bits of a weight.
    pub fn bits_per_weight(&self) -> f64 {
        self.bytes as f64 * 8.0 / self.elements as f64
    }

    /// Whether elements are floats of their own, without a scale in common.
    pub fn is_float(&self) -> bool {
        self.elements == 1
    }

    /// Encodes a row. `importance` weighs the squared error of each element, and only its ratios within a row matter.
    ///
    /// # Panics
    /// When the lengths do not agree: [`row_bytes`](Self::row_bytes) says what they must be.
    pub fn encode(&self, row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
        assert_eq!(Some(out.len()), self.row_bytes(row.len()), "bytes of a {} row", self.name);
        if let Some(importance) = importance {
            assert_eq!(importance.len(), row.len(), "importance of a {} row", self.name);
        }
        (self.encode)(row, importance, out);
    }

    /// Encodes a row by a search.
    ///
    /// # Panics
    /// As [`encode`](Self::encode).
    pub fn encode_by(&self, search: Search, row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
        match search {
            Search::Refined => self.encode_refined(row, importance, out),
            Search::Reference => self.encode(row, importance, out),
        }
    }

    /// Encodes a row with scales found by our own search, which leaves less error than [`encode`](Self::encode).
    /// What it minimizes is `Σ importance·(σ² + value²)^¼·(value − stored)²`, with the mean square `σ²` of the row;
    /// without an importance, that of all elements is 1.
    ///
    /// # Panics
    /// As [`encode`](Self::encode).
    pub fn encode_refined(&self, row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
        let Some(grid) = self.grid else { return self.encode(row, importance, out) };
        assert_eq!(Some(out.len()), self.row_bytes(row.len()), "bytes of a {} row", self.name);
        if let Some(importance) = importance {
            assert_eq!(importance.len(), row.len(), "importance of a {} row", self.name);
        }
        refine::row(grid, row, importance, self.elements, |block, fields| {
            (grid.pack)(fields, &mut out[block * self.bytes..][..self.bytes]);
        });
    }

    /// The values that a row's bytes stand for.
    ///
    /// # Panics
    /// As [`encode`](Self::encode).
    pub fn decode(&self, bytes: &[u8], out: &mut [f32]) {
        assert_eq!(Some(bytes.len()), self.row_bytes(out.len()), "bytes of a {} row", self.name);
        (self.decode)(bytes, out);
    }
}
