//! Pages of the cache: 64 tokens of one key-value head, in the order in which the kernels read them.
//!
//! ```text
//! page:  key codes     [4 panels of 16 tokens][head_dim / 8 steps] of 64 bytes (4 bits) or 128 bytes (8 bits)
//!        key scales    [64] f16
//!        key zeros     [64] f16
//!        value scales  [64] f16, here because they are read before any value
//!        value zeros   [64] f16
//!        value codes   [head_dim / 16 panels of 16 features][8 steps of 8 tokens], with steps of the same size
//!
//! step, 4 bits:  byte 4·r + i = code(r, i) | code(r, i + 4) << 4      r < 16, i < 4
//! step, 8 bits:  byte 4·r + i = code(r, i), byte 64 + 4·r + i = code(r, i + 4)
//!
//! f16:   keys [4 panels][head_dim][16 tokens], values [head_dim / 16 panels][64 tokens][16 features]
//! ```
//!
//! A step has the format of packed weights ([`Layout`](crate::Layout)). For keys, its rows are tokens and its columns
//! features; for values, its rows are features and its columns tokens. With 4 bits, appending a token writes four bytes
//! per step of the keys, and half a byte per feature of the values.

use half::f16;

use super::grid::{HeadGrid, check_values, dequantize_head, quantize_head};
use crate::layout::{PANEL_ROWS, STEP};
use crate::{KernelError, LINE};

/// Tokens per page.
pub const PAGE_TOKENS: usize = 64;
/// The maximum number of features per head.
pub const MAX_HEAD_DIM: usize = 512;
/// The version of the layout; it increases whenever the order of bytes changes.
const VERSION: u64 = 1;

/// The format of the keys and values in a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvType {
    /// 4-bit codes, with one grid per token and head.
    Kv4,
    /// 8-bit codes, with one grid per token and head.
    Kv8,
    /// f16, without quantization.
    F16,
}

impl KvType {
    /// The name in benchmarks and messages: `kv4`, `kv8` or `f16`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kv4 => "kv4",
            Self::Kv8 => "kv8",
            Self::F16 => "f16",
        }
    }
}

/// The layout of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLayout {
    kind: KvType,
    head_dim: usize,
}

impl KvLayout {
    /// Creates the layout of pages for heads of `head_dim` features.
    ///
    /// # Errors
    /// When `head_dim` is not a multiple of 16 from 16 to 512.
    pub fn new(kind: KvType, head_dim: usize) -> Result<Self, KernelError> {
        if head_dim == 0 || !head_dim.is_multiple_of(PANEL_ROWS) || head_dim > MAX_HEAD_DIM {
            return Err(KernelError::Scheme("head_dim must be a multiple of 16 from 16 to 512"));
        }
        Ok(Self { kind, head_dim })
    }

    /// The format of the keys and values.
    pub fn kind(&self) -> KvType {
        self.kind
    }

    /// Features per head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Bits per stored value: 4, 8 or 16.
    pub fn bits(&self) -> usize {
        match self.kind {
            KvType::Kv4 => 4,
            KvType::Kv8 => 8,
            KvType::F16 => 16,
        }
    }

    /// Bytes per page: a multiple of [`LINE`], less than 2¹⁸.
    pub fn page_bytes(&self) -> usize {
        self.values_at() + self.code_bytes()
    }

    /// An id of the order of bytes, computed from everything that affects it.
    pub fn id(&self) -> u64 {
        let words = [VERSION, PAGE_TOKENS as u64, self.bits() as u64, self.head_dim as u64];
        // FNV-1a, with a different initial value from that of packed weights.
        words.into_iter().flat_map(u64::to_le_bytes).fold(0x6c62_272e_07bb_0142, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        })
    }

    /// The size in bytes of the codes (or f16) of a page's keys, which is also that of its values.
    fn code_bytes(&self) -> usize {
        PAGE_TOKENS * self.head_dim * self.bits() / 8
    }

    pub(crate) fn step_bytes(&self) -> usize {
        PANEL_ROWS * STEP * self.bits() / 8
    }

    /// The offset of the scales of keys or of values.
    pub(crate) fn scales_at(&self, is_key: bool) -> usize {
        self.code_bytes() + if is_key { 0 } else { 4 * PAGE_TOKENS }
    }

    pub(crate) fn zeros_at(&self, is_key: bool) -> usize {
        self.scales_at(is_key) + 2 * PAGE_TOKENS
    }

    /// The offset of the codes (or f16) of values.
    pub(crate) fn values_at(&self) -> usize {
        let grids = if self.kind == KvType::F16 { 0 } else { 8 * PAGE_TOKENS };
        debug_assert!((self.code_bytes() + grids).is_multiple_of(LINE));
        self.code_bytes() + grids
    }

    /// Stores a token in `slot` of a page: `key` and `value` are `[head_dim]`. Other slots are unchanged.
    ///
    /// # Errors
    /// When a length is wrong, the page has no such slot, or [`quantize_head`] rejects the values (for f16 caches too).
    /// On error, nothing is written.
    pub fn write(&self, page: &mut [u8], slot: usize, key: &[f32], value: &[f32]) -> Result<(), KernelError> {
        self.check(page.len(), slot, key.len(), value.len())?;
        check_values(key)?;
        check_values(value)?;
        for (x, is_key) in [(key, true), (value, false)] {
            if self.kind == KvType::F16 {
                for (i, &x) in x.iter().enumerate() {
                    let at = self.half_at(slot, i, is_key);
                    page[at..at + 2].copy_from_slice(&f16::from_f32(x).to_le_bytes());
                }
                continue;
            }
            let mut codes = [0; MAX_HEAD_DIM];
            let codes = &mut codes[..self.head_dim];
            let grid = quantize_head(x, self.bits() as u32, codes)?;
            for (at, v) in [(self.scales_at(is_key), grid.scale), (self.zeros_at(is_key), grid.zero)] {
                page[at + 2 * slot..][..2].copy_from_slice(&v.to_le_bytes());
            }
            let at = self.values_at();
            if is_key {
                self.write_key(page, slot, codes);
            } else {
                self.write_value(&mut page[at..], slot, codes);
            }
        }
        Ok(())
    }

    /// Writes the key of a token: one row of each step, so only whole bytes change.
    fn write_key(&self, part: &mut [u8], slot: usize, codes: &[u8]) {
        for (s, step) in codes.chunks_exact(STEP).enumerate() {
            let at = (slot / PANEL_ROWS * (self.head_dim / STEP) + s) * self.step_bytes();
            let at = at + slot % PANEL_ROWS * 4;
            for i in 0..4 {
                if self.kind == KvType::Kv4 {
                    part[at + i] = step[i] | step[i + 4] << 4;
                } else {
                    part[at + i] = step[i];
                    part[at + 64 + i] = step[i + 4];
                }
            }
        }
    }

    /// Writes the value of a token: one column of each step, so with 4 bits only half of each byte changes.
    fn write_value(&self, part: &mut [u8], slot: usize, codes: &[u8]) {
        let place = slot % STEP;
        for (panel, codes) in codes.chunks_exact(PANEL_ROWS).enumerate() {
            let at = (panel * (PAGE_TOKENS / STEP) + slot / STEP) * self.step_bytes() + place % 4;
            for (r, &code) in codes.iter().enumerate() {
                match (self.kind, place / 4) {
                    (KvType::Kv4, 0) => part[at + 4 * r] = part[at + 4 * r] & 0xf0 | code,
                    (KvType::Kv4, _) => part[at + 4 * r] = part[at + 4 * r] & 0x0f | code << 4,
                    (_, half) => part[at + 64 * half + 4 * r] = code,
                }
            }
        }
    }

    fn half_at(&self, slot: usize, i: usize, is_key: bool) -> usize {
        let (rows, place) = match is_key {
            true => (slot / PANEL_ROWS * self.head_dim + i, slot % PANEL_ROWS),
            false => (i / PANEL_ROWS * PAGE_TOKENS + slot, i % PANEL_ROWS),
        };
        2 * (rows * PANEL_ROWS + place) + if is_key { 0 } else { self.values_at() }
    }

    /// Reads the token in `slot` of a page back as floats: the results of [`dequantize_head`], or the stored f16.
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
        for (out, is_key) in [(key, true), (value, false)] {
            let half = |at: usize| f16::from_le_bytes([page[at], page[at + 1]]);
            if self.kind == KvType::F16 {
                let halves = (0..out.len()).map(|i| half(self.half_at(slot, i, is_key)).to_f32());
                out.iter_mut().zip(halves).for_each(|(out, v)| *out = v);
                continue;
            }
            let grid = HeadGrid {
                scale: half(self.scales_at(is_key) + 2 * slot),
                zero: half(self.zeros_at(is_key) + 2 * slot),
            };
            let part = if is_key { page } else { &page[self.values_at()..] };
            let mut codes = [0; MAX_HEAD_DIM];
            let codes = &mut codes[..self.head_dim];
            for (i, code) in codes.iter_mut().enumerate() {
                let (panel, steps, row, along) = match is_key {
                    true => (slot / PANEL_ROWS, self.head_dim / STEP, slot % PANEL_ROWS, i),
                    false => (i / PANEL_ROWS, PAGE_TOKENS / STEP, i % PANEL_ROWS, slot),
                };
                let at = (panel * steps + along / STEP) * self.step_bytes() + 4 * row + along % 4;
                let half = along % STEP / 4;
                *code = match self.kind {
                    KvType::Kv4 => part[at] >> (4 * half) & 0x0f,
                    _ => part[at + 64 * half],
                };
            }
            dequantize_head(codes, grid, out)?;
        }
        Ok(())
    }

    fn check(&self, page: usize, slot: usize, key: usize, value: usize) -> Result<(), KernelError> {
        KernelError::length("page", self.page_bytes(), page)?;
        KernelError::length("key", self.head_dim, key)?;
        KernelError::length("value", self.head_dim, value)?;
        if slot >= PAGE_TOKENS {
            return Err(KernelError::Mismatch {
                what: "slot numbers must be less than",
                expected: PAGE_TOKENS,
                got: slot,
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_read_as_written_and_leave_others_alone() {
        for kind in [KvType::Kv4, KvType::Kv8, KvType::F16] {
            for d in [16, 48, 128] {
                let layout = KvLayout::new(kind, d).unwrap();
                let mut page = vec![0xff; layout.page_bytes()];
                let row = |slot: usize, by: usize| -> Vec<f32> {
                    (0..d).map(|i| ((i * by + slot * 31) % 97) as f32 / 8.0 - 5.0).collect()
                };
                for slot in (0..PAGE_TOKENS).rev().chain([5]) {
                    layout.write(&mut page, slot, &row(slot, 7), &row(slot, 11)).unwrap();
                }
                for slot in 0..PAGE_TOKENS {
                    let (mut key, mut value) = (vec![0.0; d], vec![0.0; d]);
                    layout.read(&page, slot, &mut key, &mut value).unwrap();
                    for (got, by) in [(key, 7), (value, 11)] {
                        let mut expected = row(slot, by);
                        if kind != KvType::F16 {
                            let mut codes = vec![0; d];
                            let grid =
                                quantize_head(&row(slot, by), layout.bits() as u32, &mut codes).unwrap();
                            dequantize_head(&codes, grid, &mut expected).unwrap();
                        }
                        assert_eq!(got, expected, "{kind:?} {d} {slot}");
                    }
                }
            }
        }
    }

    #[test]
    fn sizes_and_names() {
        let bytes = |kind| KvLayout::new(kind, 128).unwrap().page_bytes();
        // Bytes per token and head, for the key and again for the value: 64 + 4, 128 + 4, and 256.
        assert_eq!([KvType::Kv4, KvType::Kv8, KvType::F16].map(bytes), [64 * 136, 64 * 264, 64 * 512]);
        let id = |kind, d| KvLayout::new(kind, d).unwrap().id();
        let ids = [id(KvType::Kv4, 128), id(KvType::Kv8, 128), id(KvType::F16, 128), id(KvType::Kv4, 64)];
        assert!((0..4).all(|i| (0..i).all(|j| ids[i] != ids[j])));
        for d in [0, 8, 24, 528] {
            assert_eq!(KvLayout::new(KvType::Kv4, d).unwrap_err().code(), 3);
        }
    }

    #[test]
    fn misuse_writes_nothing() {
        let layout = KvLayout::new(KvType::Kv4, 16).unwrap();
        let mut page = vec![7; layout.page_bytes()];
        let (good, mut bad) = ([1.0; 16], [1.0; 16]);
        bad[3] = f32::NAN;
        let mut code =
            |slot, key: &[f32], value: &[f32]| layout.write(&mut page, slot, key, value).unwrap_err().code();
        assert_eq!([code(64, &good, &good), code(0, &good[1..], &good), code(0, &good, &bad)], [4, 1, 3]);
        assert!(page.iter().all(|&b| b == 7));
        assert_eq!(layout.write(&mut page[1..], 0, &good, &good).unwrap_err().code(), 1);
        assert_eq!(layout.read(&page, 0, &mut [0.0; 15], &mut [0.0; 16]).unwrap_err().code(), 1);
    }
}
