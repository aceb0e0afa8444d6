//! Values that a race keeps for a long time, in the precision in which they are used, in memory or in a file.

use half::bf16;
use half::slice::HalfFloatSliceExt;

use crate::calibrate::{Spill, SpillFile};
use crate::{Result, allocate};

const SAMPLE: &str = "a sample of inputs";

const BUFFER: usize = 1 << 20;

/// A list of values, kept in `f32` or rounded to bfloat16 (half to even).
#[derive(Debug)]
pub(super) enum StoredValues {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    Spilled(SpilledRows),
}

#[derive(Debug)]
pub(super) struct SpilledRows {
    file: SpillFile,
    written: u64,
    pending: Vec<u8>,
    rounded: bool,
}

impl StoredValues {
    /// An empty list, in a file if `spill` is given, otherwise in memory with capacity for `values`.
    pub(super) fn new(rounded: bool, values: usize, spill: Option<&Spill>) -> Result<Self> {
        Ok(match spill {
            Some(spill) => {
                let (file, pending) = (spill.file()?, Vec::new());
                Self::Spilled(SpilledRows { file, written: 0, pending, rounded })
            }
            None if rounded => Self::Bf16(allocate::room(values, SAMPLE)?),
            None => Self::F32(allocate::room(values, SAMPLE)?),
        })
    }

    pub(super) fn rounded(values: &[f32]) -> Result<Self> {
        let mut rows = allocate::zeros(values.len(), SAMPLE)?;
        rows.convert_from_f32_slice(values);
        Ok(Self::Bf16(rows))
    }

    pub(super) fn extend(&mut self, values: &[f32]) -> Result<()> {
        match self {
            Self::F32(all) => all.extend_from_slice(values),
            Self::Bf16(all) => {
                let before = all.len();
                all.resize(before + values.len(), bf16::ZERO);
                all[before..].convert_from_f32_slice(values);
            }
            Self::Spilled(all) => return all.extend(values),
        }
        Ok(())
    }

    /// Appends row `index` of `width` values to `out`.
    pub(super) fn copy_row(&self, index: usize, width: usize, out: &mut Vec<f32>) -> Result<()> {
        let row = index * width..(index + 1) * width;
        match self {
            Self::F32(all) => out.extend_from_slice(&all[row]),
            Self::Bf16(all) => out.extend(all[row].iter().map(|v| v.to_f32())),
            Self::Spilled(all) => return all.copy(row.start, width, out),
        }
        Ok(())
    }

    pub(super) fn to_vec(&self) -> Result<Vec<f32>> {
        let mut values = Vec::new();
        match self {
            Self::F32(all) => values.clone_from(all),
            Self::Bf16(all) => values.extend(all.iter().map(|v| v.to_f32())),
            Self::Spilled(all) => {
                let bytes = all.written as usize + all.pending.len();
                all.copy(0, bytes / all.size(), &mut values)?;
            }
        }
        Ok(values)
    }
}

impl SpilledRows {
    fn size(&self) -> usize {
        if self.rounded { 2 } else { 4 }
    }

    fn extend(&mut self, values: &[f32]) -> Result<()> {
        match self.rounded {
            true => self.pending.extend(values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes())),
            false => self.pending.extend(values.iter().flat_map(|v| v.to_le_bytes())),
        }
        if self.pending.len() >= BUFFER {
            self.file.write(self.written, &self.pending)?;
            self.written += self.pending.len() as u64;
            self.pending.clear();
        }
        Ok(())
    }

    fn copy(&self, at: usize, count: usize, out: &mut Vec<f32>) -> Result<()> {
        let start = (at * self.size()) as u64;
        let mut bytes = vec![0; count * self.size()];
        let in_file = self.written.saturating_sub(start).min(bytes.len() as u64) as usize;
        let (filed, pending) = bytes.split_at_mut(in_file);
        if !filed.is_empty() {
            self.file.read(start, filed)?;
        }
        if !pending.is_empty() {
            let from = (start + in_file as u64 - self.written) as usize;
            pending.copy_from_slice(&self.pending[from..from + pending.len()]);
        }
        match self.rounded {
            true => out.extend(bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32())),
            false => out.extend(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spilled_rows_are_the_same() {
        let directory = tempfile::tempdir().unwrap();
        let spill = Spill::new(directory.path(), 0);
        let width = 1000;
        for rounded in [false, true] {
            let mut memory = StoredValues::new(rounded, 0, None).unwrap();
            let mut file = StoredValues::new(rounded, 0, Some(&spill)).unwrap();
            let count = BUFFER / 2 / width + 300;
            for row in 0..count {
                let values: Vec<f32> = (0..width).map(|i| (row * width + i) as f32 * 0.37 - 1e4).collect();
                memory.extend(&values).unwrap();
                file.extend(&values).unwrap();
            }
            for row in [0, 1, BUFFER / 4 / width, BUFFER / 2 / width, count - 1] {
                let [mut a, mut b] = [Vec::new(), Vec::new()];
                memory.copy_row(row, width, &mut a).unwrap();
                file.copy_row(row, width, &mut b).unwrap();
                assert_eq!(a, b, "row {row}, rounded {rounded}");
            }
            assert_eq!(memory.to_vec().unwrap(), file.to_vec().unwrap());
        }
    }
}
