//! Builds the rows of a file's tensors from tensors of the checkpoint.

use std::ops::Range;

use super::factors::RowFactors;
use crate::model::Model;
use crate::{Error, Result};

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Source {
    /// Concatenated tensors of the checkpoint: one, or one per expert.
    Stored { tensors: Vec<String>, view: View },
    /// Values derived from the configuration.
    Values(Vec<f32>),
    /// A weight that is already quantized and whose codes are kept.
    Codes { modules: Vec<String>, order: RowOrder },
    /// A weight in blocks of MXFP4 whose codes are kept, by the names of the tensors of float values.
    Blocks { tensors: Vec<String> },
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct View {
    pub(super) order: RowOrder,
    /// The order of the elements in each row.
    pub(super) columns: RowOrder,
    pub(super) change: Change,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Change {
    None,
    Add(f32),
    /// `x` becomes `−eˣ`.
    Decay,
    /// Each row is multiplied by a factor.
    Multiply(RowFactors),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RowOrder {
    AsStored,
    /// In each head of `head` rows, rows of the first and second half alternate.
    Paired {
        head: usize,
    },
    /// Starting with row `first`, the tensor consists of heads of `width` rows, stored in `groups` groups of `repeat`
    /// heads. The file has the first heads of all groups, then the second heads of all groups, and so on.
    Tiled {
        first: usize,
        groups: usize,
        repeat: usize,
        width: usize,
    },
    /// Rows are selected from each of the `periods` periods of `period` rows. The file has the rows of the first of
    /// `parts` (start and length within a period) for all periods, then those of the next part.
    Parts {
        period: usize,
        periods: usize,
        parts: [[usize; 2]; 3],
    },
    /// As [`Parts`](Self::Parts), with one part, whose rows are then ordered as in [`Paired`](Self::Paired).
    PairedPart {
        period: usize,
        periods: usize,
        part: [usize; 2],
        head: usize,
    },
    /// The first `width` rows of each period of `period` rows become the columns of a matrix with `depth` rows.
    Transposed {
        period: usize,
        width: usize,
        depth: usize,
    },
    /// A vector becomes a matrix whose rows have `width` elements.
    Folded {
        width: usize,
    },
}

impl View {
    pub(super) const AS_STORED: Self =
        Self { order: RowOrder::AsStored, columns: RowOrder::AsStored, change: Change::None };

    pub(super) fn of(order: RowOrder) -> Self {
        Self { order, ..Self::AS_STORED }
    }

    pub(super) fn times(self, factor: f32) -> Self {
        let change = if factor == 1.0 { Change::None } else { Change::Multiply(RowFactors::all(factor)) };
        Self { change, ..self }
    }

    pub(super) fn plus(self, shift: f32) -> Self {
        let change = if shift == 0.0 { Change::None } else { Change::Add(shift) };
        Self { change, ..self }
    }
}

impl Change {
    /// From checkpoint values to file values. `row` is the stored row of the values.
    fn apply(self, row: usize, values: &mut [f32]) {
        match self {
            Self::None => {}
            Self::Add(shift) => values.iter_mut().for_each(|v| *v += shift),
            Self::Decay => values.iter_mut().for_each(|v| *v = -f64::from(*v).exp() as f32),
            Self::Multiply(factors) => values.iter_mut().for_each(|v| *v *= factors.of_row(row)),
        }
    }

    /// From file values to checkpoint values.
    pub(super) fn undo(self, row: usize, values: &mut [f32]) {
        match self {
            Self::None => {}
            Self::Add(shift) => values.iter_mut().for_each(|v| *v -= shift),
            Self::Decay => values.iter_mut().for_each(|v| *v = (-f64::from(*v)).ln() as f32),
            Self::Multiply(factors) => values.iter_mut().for_each(|v| *v /= factors.of_row(row)),
        }
    }
}

impl RowOrder {
    pub(super) fn count(self, rows: usize) -> usize {
        match self {
            Self::AsStored | Self::Paired { .. } | Self::Tiled { .. } => rows,
            Self::Folded { width } => rows / width.max(1),
            Self::PairedPart { periods, part, .. } => periods * part[1],
            Self::Parts { periods, parts, .. } => periods * parts.iter().map(|part| part[1]).sum::<usize>(),
            Self::Transposed { period, depth, .. } => rows / period.max(1) * depth,
        }
    }

    /// The stored row at place `row` in the file; meaningless for a transposed matrix.
    pub(super) fn stored(self, row: usize) -> usize {
        match self {
            Self::AsStored | Self::Transposed { .. } | Self::Folded { .. } => row,
            Self::Paired { head } => {
                let (first, within) = (row - row % head, row % head);
                first + within % 2 * (head / 2) + within / 2
            }
            Self::Tiled { first, .. } if row < first => row,
            Self::Tiled { first, groups, repeat, width } => {
                let (head, within) = ((row - first) / width, (row - first) % width);
                first + (head % groups * repeat + head / groups) * width + within
            }
            Self::PairedPart { period, periods, part, head } => {
                let parts = Self::Parts { period, periods, parts: [part, [0, 0], [0, 0]] };
                parts.stored(Self::Paired { head }.stored(row))
            }
            Self::Parts { period, periods, parts } => {
                let mut left = row;
                for [start, width] in parts {
                    if left < periods * width {
                        return left / width * period + start + left % width;
                    }
                    left -= periods * width;
                }
                row
            }
        }
    }

    /// The place of a stored row in the file, if it has one.
    pub(super) fn place(self, stored: usize) -> Option<usize> {
        match self {
            Self::AsStored | Self::Folded { .. } => Some(stored),
            Self::Paired { head } => {
                let (first, within) = (stored - stored % head, stored % head);
                let half = head / 2;
                Some(first + within % half * 2 + within / half)
            }
            Self::Tiled { first, .. } if stored < first => Some(stored),
            Self::Tiled { first, groups, repeat, width } => {
                let (head, within) = ((stored - first) / width, (stored - first) % width);
                Some(first + (head % repeat * groups + head / repeat) * width + within)
            }
            Self::PairedPart { period, periods, part, head } => {
                let parts = Self::Parts { period, periods, parts: [part, [0, 0], [0, 0]] };
                Self::Paired { head }.place(parts.place(stored)?)
            }
            Self::Parts { period, periods, parts } => {
                let (which, within) = (stored / period, stored % period);
                let mut before = 0;
                for [start, width] in parts {
                    if (start..start + width).contains(&within) {
                        return Some(before + which * width + within - start);
                    }
                    before += periods * width;
                }
                None
            }
            Self::Transposed { .. } => None,
        }
    }
}

/// Reads a range of the file's rows, with `columns` values each, from one stored tensor.
pub(super) fn read_rows(
    model: &Model,
    tensor: &str,
    view: View,
    rows: Range<usize>,
    columns: usize,
) -> Result<Vec<f32>> {
    let source = model.source();
    let dtype = source.require(tensor)?.dtype;
    let mut values = vec![0.0; rows.len() * columns];
    if let RowOrder::Transposed { period, width, depth } = view.order {
        let mut bytes = vec![0; width * depth * dtype.size()];
        let (mut block, mut known) = (vec![0.0; width * depth], None);
        for (row, out) in rows.clone().zip(values.chunks_exact_mut(columns)) {
            let (which, within) = (row / depth, row % depth);
            if known != Some(which) {
                source.read_range(tensor, (which * period * depth * dtype.size()) as u64, &mut bytes)?;
                dtype.widen(&bytes, &mut block);
                known = Some(which);
            }
            out.iter_mut().enumerate().for_each(|(c, v)| *v = block[c * depth + within]);
        }
    } else {
        let row_bytes = columns * dtype.size();
        let mut bytes = vec![0; values.len() * dtype.size()];
        match view.order {
            RowOrder::AsStored => source.read_range(tensor, (rows.start * row_bytes) as u64, &mut bytes)?,
            order => {
                for (row, out) in rows.clone().zip(bytes.chunks_exact_mut(row_bytes)) {
                    source.read_range(tensor, (order.stored(row) * row_bytes) as u64, out)?;
                }
            }
        }
        dtype.widen(&bytes, &mut values);
    }
    crate::checkpoint::require_finite(source.location(tensor), tensor, &values)
        .map_err(|e| crate::checkpoint::non_finite_in_whole(source.as_ref(), dtype, e))?;
    if view.columns != RowOrder::AsStored {
        let mut row = vec![0.0; columns];
        for values in values.chunks_exact_mut(columns) {
            row.copy_from_slice(values);
            values.iter_mut().enumerate().for_each(|(c, v)| *v = row[view.columns.stored(c)]);
        }
    }
    for (row, values) in rows.zip(values.chunks_exact_mut(columns.max(1))) {
        view.change.apply(view.order.stored(row), values);
    }
    Ok(values)
}

/// The shape of a stored tensor as `[rows, columns]` in the file. A vector is a row, or a column if its elements are
/// reordered.
pub(super) fn matrix(shape: &[usize], view: View) -> Result<[usize; 2]> {
    match (shape, view.order) {
        ([rows, _], RowOrder::Transposed { width, .. }) => Ok([view.order.count(*rows), width]),
        ([columns], RowOrder::AsStored) => Ok([1, *columns]),
        ([elements], RowOrder::Folded { width }) => Ok([view.order.count(*elements), width]),
        ([rows], order) => Ok([order.count(*rows), 1]),
        // A convolution has a dimension of size 1, because it does not mix channels.
        ([rows, columns] | [rows, 1, columns], order) => Ok([order.count(*rows), *columns]),
        _ => Err(Error::Internal(format!("a stored tensor has the shape {shape:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_of_a_bias_are_permuted_like_rows() {
        let view = View::of(RowOrder::Paired { head: 6 });
        assert_eq!(matrix(&[12], view).unwrap(), [12, 1]);
        assert_eq!(matrix(&[12], View::AS_STORED).unwrap(), [1, 12]);
        assert_eq!(matrix(&[12, 5], view).unwrap(), [12, 5]);
        assert_eq!(matrix(&[12, 1, 5], View::AS_STORED).unwrap(), [12, 5]);
        assert!(matrix(&[2, 12, 5], view).is_err());
        assert_eq!(matrix(&[12], View::of(RowOrder::Folded { width: 1 })).unwrap(), [12, 1]);
        assert_eq!(matrix(&[12], View::of(RowOrder::Folded { width: 4 })).unwrap(), [3, 4]);
        let transposed = View::of(RowOrder::Transposed { period: 6, width: 4, depth: 5 });
        assert_eq!(matrix(&[12, 5], transposed).unwrap(), [10, 4]);
    }

    #[test]
    fn rows_of_halves_are_interleaved_and_restored() {
        let order = RowOrder::Paired { head: 6 };
        let places: Vec<usize> = (0..12).map(|row| order.stored(row)).collect();
        assert_eq!(places, [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]);
        for row in 0..12 {
            assert_eq!(order.place(order.stored(row)), Some(row));
        }
    }

    #[test]
    fn heads_of_groups_come_by_their_places_and_go_back() {
        // Two rows that stay in place, then 2 groups of 3 heads with 2 rows each.
        let order = RowOrder::Tiled { first: 2, groups: 2, repeat: 3, width: 2 };
        let stored: Vec<usize> = (0..14).map(|row| order.stored(row)).collect();
        assert_eq!(stored, [0, 1, 2, 3, 8, 9, 4, 5, 10, 11, 6, 7, 12, 13]);
        for row in 0..14 {
            assert_eq!(order.place(order.stored(row)), Some(row));
        }
    }

    #[test]
    fn parts_of_periods_are_brought_together_and_found_again() {
        let order = RowOrder::Parts { period: 6, periods: 2, parts: [[3, 1], [0, 2], [0, 0]] };
        assert_eq!(order.count(12), 6);
        let stored: Vec<usize> = (0..6).map(|row| order.stored(row)).collect();
        assert_eq!(stored, [3, 9, 0, 1, 6, 7]);
        for row in 0..6 {
            assert_eq!(order.place(order.stored(row)), Some(row));
        }
        assert_eq!((order.place(2), order.place(10)), (None, None));
    }

    #[test]
    fn one_part_of_periods_has_its_heads_interleaved() {
        let order = RowOrder::PairedPart { period: 6, periods: 2, part: [2, 4], head: 4 };
        assert_eq!(order.count(12), 8);
        let stored: Vec<usize> = (0..8).map(|row| order.stored(row)).collect();
        assert_eq!(stored, [2, 4, 3, 5, 8, 10, 9, 11]);
        for row in 0..8 {
            assert_eq!(order.place(order.stored(row)), Some(row));
        }
        assert_eq!((order.place(1), order.place(6)), (None, None));
    }

    #[test]
    fn changes_are_undone() {
        for change in [Change::None, Change::Add(1.0), Change::Decay, Change::Multiply(RowFactors::all(0.3))]
        {
            let mut values = [0.25, -3.5, 1.75];
            change.apply(3, &mut values);
            change.undo(3, &mut values);
            for (found, expected) in values.iter().zip([0.25, -3.5, 1.75]) {
                assert!((found - expected).abs() < 1e-6, "{change:?}: {found}");
            }
        }
    }
}
