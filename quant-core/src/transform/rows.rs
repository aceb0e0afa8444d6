//! Values that a race keeps for a long time, in the precision in which they are used.

use half::bf16;
use half::slice::HalfFloatSliceExt;

/// A list of values, kept in `f32` or rounded to bfloat16 (half to even).
#[derive(Debug)]
pub(super) enum Rows {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

impl Rows {
    /// An empty list with this capacity.
    pub(super) fn with_capacity(rounded: bool, values: usize) -> Self {
        match rounded {
            true => Self::Bf16(Vec::with_capacity(values)),
            false => Self::F32(Vec::with_capacity(values)),
        }
    }

    /// A list of these values, rounded to bfloat16.
    pub(super) fn rounded(values: &[f32]) -> Self {
        let mut rows = Self::with_capacity(true, values.len());
        rows.extend(values);
        rows
    }

    /// Appends values.
    pub(super) fn extend(&mut self, values: &[f32]) {
        match self {
            Self::F32(all) => all.extend_from_slice(values),
            Self::Bf16(all) => {
                let before = all.len();
                all.resize(before + values.len(), bf16::ZERO);
                all[before..].convert_from_f32_slice(values);
            }
        }
    }

    /// Appends row `index` of `width` values to `out`.
    pub(super) fn copy_row(&self, index: usize, width: usize, out: &mut Vec<f32>) {
        let row = index * width..(index + 1) * width;
        match self {
            Self::F32(all) => out.extend_from_slice(&all[row]),
            Self::Bf16(all) => out.extend(all[row].iter().map(|v| v.to_f32())),
        }
    }

    /// All values.
    pub(super) fn to_vec(&self) -> Vec<f32> {
        match self {
            Self::F32(all) => all.clone(),
            Self::Bf16(all) => all.iter().map(|v| v.to_f32()).collect(),
        }
    }
}
