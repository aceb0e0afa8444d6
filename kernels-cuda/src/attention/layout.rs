//! Pages of the cache on the GPU: tiles of 16 tokens of one key-value head, in the order in which warps read them.
//!
//! ```text
//! page:  [page_tokens / 16 tiles] of one key-value head; the strides of a launch state where each head begins
//! tile:  key rows      [16][row_bytes]
//!        value rows    [16][row_bytes]
//!        key grids     [16] of { f16 scale, f16 zero }        not for f16 pages
//!        value grids   [16] of { f16 scale, f16 zero }        not for f16 pages
//!
//! row_bytes = dim · bits / 8, dim = head_dim rounded up to a multiple of 32, codes beyond head_dim 0
//! tile_bytes = 4 · dim · bits + 128 (f16: 64 · dim), a multiple of 128
//!
//! bytes per token and head, keys and values:  kv4 dim + 8,  kv8 2 · dim + 8,  f16 4 · dim
//! ```
//!
//! A tile is contiguous, so that a warp copies it as one run of 16-byte chunks. 64 tokens with 4 bits and 128 features
//! take 8.7 KB.
//!
//! A row holds its features in natural order; a word holds 8, 4 or 2 of them:
//!
//! ```text
//! 4 bits:  half h of the word, 4 bits at 4·i:  code of feature 2·i + h;  each half is then rotated left by 2
//! 8 bits:  byte i: code of feature i
//! f16:     half i: feature i
//! ```
//!
//! After the rotation, the lowest bit of a 4-bit code is at a position where it counts one in an f16. So one
//! instruction without a shift extracts two features of one token (keys) or one feature of two tokens (values) from a
//! word.
//!
//! The rows of tokens and the blocks within a row are permuted ([`KvPageLayout::key_word`],
//! [`KvPageLayout::value_word`]), so that loads of the decode kernel have no bank conflicts in shared memory.
//! `cuda/kv_layout.cuh` has the same rules for the kernels.

use half::f16;
use quant_kernels_cpu::KernelError;
use quant_kernels_cpu::attention::{HeadGrid, KvType, dequantize_head, quantize_head};

/// Tokens per tile.
pub const TILE_TOKENS: usize = 16;
/// The maximum `head_dim` that the kernels support.
pub const MAX_HEAD_DIM: usize = 256;
/// Maximum number of tokens per page.
pub const MAX_PAGE_TOKENS: usize = 1024;
/// Increase this whenever the order of bytes changes.
const VERSION: u64 = 1;

/// The layout of a page of one key-value head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvPageLayout {
    kind: KvType,
    head_dim: usize,
    page_tokens: usize,
}

impl KvPageLayout {
    /// Creates the layout of pages of `page_tokens` tokens, 16 times a power of two and at most 1024, for heads of
    /// `head_dim` features, a multiple of 16 and at most 256.
    ///
    /// # Errors
    /// When a number is not supported.
    pub fn new(kind: KvType, head_dim: usize, page_tokens: usize) -> Result<Self, KernelError> {
        if head_dim == 0 || !head_dim.is_multiple_of(16) || head_dim > MAX_HEAD_DIM {
            return Err(KernelError::Scheme("head_dim must be a multiple of 16 from 16 to 256"));
        }
        if !(TILE_TOKENS..=MAX_PAGE_TOKENS).contains(&page_tokens) || !page_tokens.is_power_of_two() {
            return Err(KernelError::Scheme("the page size must be a power of two from 16 to 1024 tokens"));
        }
        Ok(Self { kind, head_dim, page_tokens })
    }

    /// The type of the stored keys and values.
    pub fn kind(&self) -> KvType {
        self.kind
    }

    /// The number of features of a head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// The number of tokens per page.
    pub fn page_tokens(&self) -> usize {
        self.page_tokens
    }

    /// Binary logarithm of the number of tiles per page.
    pub fn page_shift(&self) -> u32 {
        (self.page_tokens / TILE_TOKENS).trailing_zeros()
    }

    /// The number of features per row, including padding.
    pub fn dim(&self) -> usize {
        self.head_dim.next_multiple_of(32)
    }

    /// Bits per stored value: 4, 8 or 16.
    pub fn bits(&self) -> usize {
        match self.kind {
            KvType::Kv4 => 4,
            KvType::Kv8 => 8,
            KvType::F16 => 16,
        }
    }

    /// Bytes of the keys, or of the values, of a token and head.
    pub fn row_bytes(&self) -> usize {
        self.dim() * self.bits() / 8
    }

    /// The size of a tile in bytes: a multiple of 128.
    pub fn tile_bytes(&self) -> usize {
        2 * TILE_TOKENS * self.row_bytes() + if self.has_grids() { 8 * TILE_TOKENS } else { 0 }
    }

    /// The size of a page of one head in bytes: a multiple of 128.
    pub fn page_bytes(&self) -> usize {
        self.page_tokens / TILE_TOKENS * self.tile_bytes()
    }

    /// An id of the order of bytes, which does not depend on the number of tokens per page.
    pub fn id(&self) -> u64 {
        let words = [VERSION, TILE_TOKENS as u64, self.bits() as u64, self.head_dim as u64];
        // FNV-1a, with an initial value of its own.
        words.into_iter().flat_map(u64::to_le_bytes).fold(0x9ae1_6a3b_2f90_404f, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        })
    }

    /// Whether there is a grid per token and head: true except for f16.
    pub fn has_grids(&self) -> bool {
        self.kind != KvType::F16
    }

    /// The position, in words, of word `word` of the row of `token` (below 16) among the key rows of a tile.
    pub fn key_word(&self, token: usize, word: usize) -> usize {
        let words = self.row_bytes() / 4;
        // See `cuda/kv_layout.cuh`.
        let exchange = if words.is_multiple_of(32) { 16 } else { 0 };
        token * words + (word ^ ((token & 1) * exchange))
    }

    /// The position, in words, of word `word` of the row of `token` (below 16) among the value rows of a tile.
    pub fn value_word(&self, token: usize, word: usize) -> usize {
        let words = self.row_bytes() / 4;
        // See `cuda/kv_layout.cuh`.
        let row = match words.is_multiple_of(8) {
            true => (token & 8) | (token & 1) << 2 | (token >> 1 & 3),
            false => token,
        };
        let block = match words {
            _ if words.is_multiple_of(32) => row & 3,
            _ if words.is_multiple_of(16) => row >> 1 & 1,
            _ => 0,
        };
        row * words + (word ^ (block << 3))
    }

    /// Stores a token in `slot` of a page: `key` and `value` are `[head_dim]`. The append kernel writes the same bytes.
    ///
    /// # Errors
    /// When a length is wrong, the page has no such slot, or [`quantize_head`] rejects the values (also for f16 pages).
    /// On error, nothing is written.
    pub fn write(&self, page: &mut [u8], slot: usize, key: &[f32], value: &[f32]) -> Result<(), KernelError> {
        self.check(page.len(), slot, key.len(), value.len())?;
        let bits = if self.kind == KvType::Kv4 { 4 } else { 8 };
        let mut codes = [[0_u8; MAX_HEAD_DIM]; 2];
        let [key_codes, value_codes] = &mut codes;
        let grids = [
            quantize_head(key, bits, &mut key_codes[..self.head_dim])?,
            quantize_head(value, bits, &mut value_codes[..self.head_dim])?,
        ];
        for (part, x) in [key, value].into_iter().enumerate() {
            let is_value = part == 1;
            for (feature, &code) in codes[part][..self.dim()].iter().enumerate() {
                let number = match self.kind {
                    KvType::F16 => x.get(feature).map_or(0, |&x| f16::from_f32(x).to_bits()),
                    _ => u16::from(code),
                };
                self.set(page, slot, is_value, feature, number);
            }
            if self.has_grids() {
                let at = self.grid_at(slot, is_value);
                page[at..at + 2].copy_from_slice(&grids[part].scale.to_le_bytes());
                page[at + 2..at + 4].copy_from_slice(&grids[part].zero.to_le_bytes());
            }
        }
        Ok(())
    }

    /// Reads a token as floats: the result of [`dequantize_head`], or the stored f16 values.
    ///
    /// # Errors
    /// When a length is wrong, or the page has no such slot.
    pub fn read(
        &self,
        page: &[u8],
        slot: usize,
        key: &mut [f32],
        value: &mut [f32],
    ) -> Result<(), KernelError> {
        self.check(page.len(), slot, key.len(), value.len())?;
        for (is_value, out) in [(false, key), (true, value)] {
            let mut codes = [0; MAX_HEAD_DIM];
            for (feature, out) in out.iter_mut().enumerate() {
                let number = self.get(page, slot, is_value, feature);
                *out = f16::from_bits(number).to_f32();
                codes[feature] = number as u8;
            }
            if self.has_grids() {
                dequantize_head(&codes[..out.len()], self.grid(page, slot, is_value), out)?;
            }
        }
        Ok(())
    }

    /// `slot` must be in the page.
    fn grid(&self, page: &[u8], slot: usize, is_value: bool) -> HeadGrid {
        let at = self.grid_at(slot, is_value);
        let half = |at: usize| f16::from_le_bytes([page[at], page[at + 1]]);
        HeadGrid { scale: half(at), zero: half(at + 2) }
    }

    fn grid_at(&self, slot: usize, is_value: bool) -> usize {
        let part = 2 * TILE_TOKENS * self.row_bytes() + if is_value { 4 * TILE_TOKENS } else { 0 };
        slot / TILE_TOKENS * self.tile_bytes() + part + 4 * (slot % TILE_TOKENS)
    }

    /// The offset of the word that holds a feature, in bytes.
    fn word_at(&self, slot: usize, is_value: bool, feature: usize) -> usize {
        let (tile, token) = (slot / TILE_TOKENS, slot % TILE_TOKENS);
        let word = feature * self.bits() / 32;
        tile * self.tile_bytes()
            + match is_value {
                false => 4 * self.key_word(token, word),
                true => TILE_TOKENS * self.row_bytes() + 4 * self.value_word(token, word),
            }
    }

    /// The offset in bytes of the half word that holds a feature, and the position of its code in the half word before
    /// the rotation.
    fn half_at(&self, slot: usize, is_value: bool, feature: usize) -> (usize, usize) {
        let word = self.word_at(slot, is_value, feature);
        match self.kind {
            KvType::Kv4 => (word + 2 * (feature % 2), feature % 8 / 2 * 4),
            KvType::Kv8 => (word + feature % 4 / 2 * 2, feature % 2 * 8),
            KvType::F16 => (word + 2 * (feature % 2), 0),
        }
    }

    fn rotation(&self) -> u32 {
        if self.kind == KvType::Kv4 { 2 } else { 0 }
    }

    fn set(&self, page: &mut [u8], slot: usize, is_value: bool, feature: usize, number: u16) {
        let (at, bit) = self.half_at(slot, is_value, feature);
        let mask = (0xffff_u32 >> (16 - self.bits()) << bit) as u16;
        let half = u16::from_le_bytes([page[at], page[at + 1]]).rotate_right(self.rotation());
        let half = (half & !mask | number << bit).rotate_left(self.rotation());
        page[at..at + 2].copy_from_slice(&half.to_le_bytes());
    }

    fn get(&self, page: &[u8], slot: usize, is_value: bool, feature: usize) -> u16 {
        let (at, bit) = self.half_at(slot, is_value, feature);
        let half = u16::from_le_bytes([page[at], page[at + 1]]).rotate_right(self.rotation());
        half >> bit & (0xffff_u32 >> (16 - self.bits())) as u16
    }

    fn check(&self, page: usize, slot: usize, key: usize, value: usize) -> Result<(), KernelError> {
        let lengths =
            [("page", self.page_bytes(), page), ("key", self.head_dim, key), ("value", self.head_dim, value)];
        for (what, expected, got) in lengths {
            if expected != got {
                return Err(KernelError::Length { what, expected, got });
            }
        }
        if slot >= self.page_tokens {
            return Err(KernelError::Mismatch {
                what: "slot numbers must be less than",
                expected: self.page_tokens,
                got: slot,
            });
        }
        Ok(())
    }
}
