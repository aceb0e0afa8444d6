//! Dense weights of bf16, which have no codes.

use std::ops::Range;

use half::{bf16, f16};

use super::{LINE, Layout, PANEL_ROWS, STEP, ScaleType};
use crate::KernelError;

pub(super) const DENSE_BITS: usize = 16;

/// Where a step of dense bf16 has a feature: the number of its line, and whether it is in the high half of the words.
pub(crate) const fn dense_place(feature: usize) -> (usize, bool) {
    (feature % 2 * 2 + feature / 4, feature / 2 % 2 == 1)
}

/// The offset of a weight in a step of dense bf16.
pub(super) fn dense_at(row: usize, feature: usize) -> usize {
    let (line, high) = dense_place(feature);
    LINE * line + 4 * (row % PANEL_ROWS) + 2 * usize::from(high)
}

impl Layout {
    /// The layout of dense weights of bf16.
    ///
    /// # Errors
    /// When the matrix is empty, or its packed size overflows.
    pub fn bf16(shape: [usize; 2]) -> Result<Self, KernelError> {
        shape[1].checked_mul(4 * PANEL_ROWS).ok_or(KernelError::TooLarge("the packed matrix"))?;
        Self::with_codes(shape, DENSE_BITS, shape[1], ScaleType::F16, Some(0), None, false)
    }

    /// Whether these are dense weights of bf16, without codes.
    pub fn is_bf16(&self) -> bool {
        self.code_bits == DENSE_BITS
    }

    /// Packs a range of panels of dense weights, `[n, k]` row-major, into `out`, which has exactly their size.
    ///
    /// # Errors
    /// When the layout is not that of bf16, `panels` is out of range, or a length is wrong.
    pub fn pack_bf16(
        &self,
        weight: &[bf16],
        panels: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), KernelError> {
        if !self.is_bf16() {
            return Err(KernelError::Scheme("the layout is not that of bf16 weights"));
        }
        KernelError::panels(&panels, self.panels())?;
        let expected = self.n.checked_mul(self.k).ok_or(KernelError::TooLarge("the matrix"))?;
        KernelError::length("weights", expected, weight.len())?;
        KernelError::length("packed panels", panels.len() * self.panel_bytes, out.len())?;
        out.fill(0);
        for (panel, bytes) in panels.zip(out.chunks_exact_mut(self.panel_bytes)) {
            let rows = weight.chunks_exact(self.k).skip(panel * PANEL_ROWS).take(PANEL_ROWS);
            for (r, row) in rows.enumerate() {
                for (s, step) in row.chunks(STEP).enumerate() {
                    for (feature, value) in step.iter().enumerate() {
                        let at = self.step_at(s) + dense_at(r, feature);
                        bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
                    }
                }
                let at = self.scales_at() + 2 * r;
                bytes[at..at + 2].copy_from_slice(&f16::ONE.to_le_bytes());
            }
        }
        Ok(())
    }
}
