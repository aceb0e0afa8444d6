//! Rows of a tensor of the file, made of tensors of the checkpoint.

use std::ops::Range;

use crate::model::Model;
use crate::{Error, Result};

/// Where the values of a tensor of the file come from.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Source {
    /// Tensors of the checkpoint one after the other: one, or one of each expert.
    Stored { tensors: Vec<String>, order: RowOrder, shift: f32 },
    /// Values that the configuration implies.
    Values(Vec<f32>),
    /// A weight that is quantized already and whose codes are kept.
    Codes { modules: Vec<String>, order: RowOrder },
}

/// In which order a tensor's rows come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RowOrder {
    AsStored,
    /// Of every `head` rows, those of the first half and those of the second take turns.
    Paired {
        head: usize,
    },
}

impl RowOrder {
    /// The stored row that comes at place `row`.
    pub(super) fn stored(self, row: usize) -> usize {
        match self {
            Self::AsStored => row,
            Self::Paired { head } => {
                let (first, within) = (row - row % head, row % head);
                first + within % 2 * (head / 2) + within / 2
            }
        }
    }

    /// The place at which a stored row comes.
    pub(super) fn place(self, stored: usize) -> usize {
        match self {
            Self::AsStored => stored,
            Self::Paired { head } => {
                let (first, within) = (stored - stored % head, stored % head);
                let half = head / 2;
                first + within % half * 2 + within / half
            }
        }
    }
}

/// The values of some rows of one stored tensor `[rows, columns]`, in the order of the file.
pub(super) fn read_rows(
    model: &Model,
    tensor: &str,
    order: RowOrder,
    shift: f32,
    rows: Range<usize>,
    columns: usize,
) -> Result<Vec<f32>> {
    let source = model.source();
    let dtype = source.require(tensor)?.dtype;
    let row_bytes = columns * dtype.size();
    let mut bytes = vec![0; rows.len() * row_bytes];
    match order {
        RowOrder::AsStored => source.read_range(tensor, (rows.start * row_bytes) as u64, &mut bytes)?,
        RowOrder::Paired { .. } => {
            for (row, out) in rows.clone().zip(bytes.chunks_exact_mut(row_bytes)) {
                source.read_range(tensor, (order.stored(row) * row_bytes) as u64, out)?;
            }
        }
    }
    let mut values = vec![0.0; rows.len() * columns];
    dtype.widen(&bytes, &mut values);
    crate::checkpoint::require_finite(source.location(tensor), tensor, &values)
        .map_err(|e| crate::checkpoint::non_finite_in_whole(source.as_ref(), dtype, e))?;
    if shift != 0.0 {
        values.iter_mut().for_each(|v| *v += shift);
    }
    Ok(values)
}

/// The shape of a stored tensor as rows and columns. A vector is a row, or a column where its elements change places.
pub(super) fn matrix(shape: &[usize], order: RowOrder) -> Result<[usize; 2]> {
    match *shape {
        [rows] if order != RowOrder::AsStored => Ok([rows, 1]),
        [columns] => Ok([1, columns]),
        [rows, columns] => Ok([rows, columns]),
        _ => Err(Error::Internal(format!("a stored tensor of shape {shape:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_of_a_bias_take_turns_as_rows_do() {
        let order = RowOrder::Paired { head: 6 };
        assert_eq!(matrix(&[12], order).unwrap(), [12, 1]);
        assert_eq!(matrix(&[12], RowOrder::AsStored).unwrap(), [1, 12]);
        assert_eq!(matrix(&[12, 5], order).unwrap(), [12, 5]);
        assert!(matrix(&[2, 12, 5], order).is_err());
    }

    #[test]
    fn rows_of_halves_take_turns_and_go_back() {
        let order = RowOrder::Paired { head: 6 };
        let places: Vec<usize> = (0..12).map(|row| order.stored(row)).collect();
        assert_eq!(places, [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]);
        for row in 0..12 {
            assert_eq!(order.place(order.stored(row)), row);
        }
    }
}
