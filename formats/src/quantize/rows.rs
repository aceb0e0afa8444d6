//! The input of the quantizers: rows of a weight, widened one at a time, and the errors that they can cause.

use std::path::PathBuf;

use super::grid::GridError;
use crate::checkpoint::Dtype;
use crate::error::Indivisible;
use crate::scheme::LinearScheme;
use crate::wording::counted;
use crate::{Error, Result, allocate};

/// Rows of a weight `[rows, k]`, row-major. A weight in a file needs no copy in `f32`.
#[derive(Debug, Clone, Copy)]
pub enum SourceRows<'a> {
    /// Little-endian bytes of elements of this type: F16, BF16 or F32.
    Bytes(&'a [u8], Dtype),
    /// Values.
    Floats(&'a [f32]),
}

impl SourceRows<'_> {
    /// Returns the number of rows of `columns` values.
    ///
    /// # Errors
    /// [`RowsError::Layout`] when the values are not complete rows, or the dtype does not widen.
    pub fn count(&self, columns: usize) -> Result<usize, RowsError> {
        let (len, row) = match self {
            Self::Bytes(_, dtype) if !dtype.is_weight_float() => {
                return Err(RowsError::Layout(format!("{dtype} weights cannot be converted to F32")));
            }
            Self::Bytes(bytes, dtype) => (bytes.len(), columns * dtype.size()),
            Self::Floats(values) => (values.len(), columns),
        };
        if row == 0 || len % row != 0 {
            return Err(RowsError::Layout(format!(
                "a length of {len} is not a multiple of the row length {row}"
            )));
        }
        Ok(len / row)
    }

    /// Widens row `row`, which must exist, into `out`, which has the length of a row.
    #[inline(always)]
    pub fn load(&self, row: usize, out: &mut [f32]) {
        let k = out.len();
        match self {
            Self::Bytes(bytes, dtype) => {
                let size = k * dtype.size();
                dtype.widen(&bytes[row * size..(row + 1) * size], out);
            }
            Self::Floats(values) => out.copy_from_slice(&values[row * k..(row + 1) * k]),
        }
    }
}

/// The reason why rows could not be quantized. Positions are relative to the given rows.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RowsError {
    /// Weights are NaN or infinite.
    #[error("{}, the first at index {first_index}", counted(*count as usize, "non-finite value"))]
    NonFinite {
        /// Number of non-finite weights.
        count: u64,
        /// Index of the first non-finite weight, in row-major order.
        first_index: u64,
    },
    /// A group has no grid: its weights are not finite, or its scale overflows the scale dtype.
    #[error("row {row}, group {group}: {source}")]
    Grid {
        /// The row.
        row: usize,
        /// Index of the group in the row.
        group: usize,
        /// A description of the failure.
        source: GridError,
    },
    /// The group size does not divide the rows' width.
    #[error("the group size {group_size} does not divide the width {columns}")]
    Indivisible {
        /// The width.
        columns: usize,
        /// The group size.
        group_size: usize,
    },
    /// The scheme or scale dtype is not supported.
    #[error("{0}")]
    Scheme(String),
    /// Slices have inconsistent lengths: an error of the caller.
    #[error("{0}")]
    Layout(String),
    /// There is too little memory for the codes or scales.
    #[error("not enough memory for {bytes} bytes of codes and scales")]
    Memory {
        /// The size of the buffer.
        bytes: u64,
    },
}

impl RowsError {
    /// Converts the error to the position in a tensor in which `first_row` rows of `columns` precede these rows.
    pub fn shifted(self, first_row: usize, columns: usize) -> Self {
        match self {
            Self::NonFinite { count, first_index } => {
                Self::NonFinite { count, first_index: first_index + first_row as u64 * columns as u64 }
            }
            Self::Grid { row, group, source } => Self::Grid { row: row + first_row, group, source },
            other => other,
        }
    }

    /// Converts the error to an [`Error`] that names the tensor. `file` is the shard that holds it, if known.
    pub fn within(self, tensor: &str, file: Option<PathBuf>) -> Error {
        let tensor = tensor.to_owned();
        match (self, file) {
            (Self::NonFinite { count, first_index }, Some(path)) => {
                Error::NonFinite { path, tensor, count, first_index }
            }
            (e @ (Self::NonFinite { .. } | Self::Grid { .. }), _) => {
                Error::Numeric { tensor, reason: e.to_string() }
            }
            (Self::Indivisible { columns, group_size }, _) => {
                Error::GroupSizeDoesNotDivide(vec![Indivisible { tensor, columns, group_size }])
            }
            (e @ Self::Scheme(_), _) => {
                Error::usage(format!("tensor `{tensor}`: {e}"), "choose a different ‹scheme›")
            }
            (Self::Memory { bytes }, _) => {
                Error::Memory { what: format!("the codes and scales of `{tensor}`"), bytes: Some(bytes) }
            }
            (e @ Self::Layout(_), _) => Error::Internal(format!("tensor `{tensor}`: {e}")),
        }
    }
}

/// Returns `count` zeros.
///
/// # Errors
/// [`RowsError::Memory`].
pub fn zeroed<T: Clone + Default>(count: usize) -> Result<Vec<T>, RowsError> {
    let bytes = (count as u64).saturating_mul(size_of::<T>() as u64);
    allocate::zeros(count, "").map_err(|_| RowsError::Memory { bytes })
}

/// Returns the group size of a scheme in rows of this width, or [`RowsError::Indivisible`] if it does not divide the
/// width.
pub fn group_size(scheme: LinearScheme, columns: usize) -> Result<usize, RowsError> {
    let group_size = scheme.granularity.group_size(columns);
    if group_size == 0 || !columns.is_multiple_of(group_size) {
        return Err(RowsError::Indivisible { columns, group_size });
    }
    Ok(group_size)
}
