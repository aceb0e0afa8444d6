//! Floating-point codes and scales in files, validated when they are read.

use crate::allocate::collected;
use crate::checkpoint::{Dtype, TensorSource, require_finite};
use crate::scheme::FloatFormat;
use crate::{Error, Result};

/// Reads the single scale of a tensor or of all inputs. It must be positive, with a finite inverse.
///
/// # Errors
/// When the scale is invalid or cannot be read.
pub fn read_positive(source: &dyn TensorSource, name: &str) -> Result<f32> {
    let scale = source.read_f32(name)?.first().copied().unwrap_or(f32::NAN);
    if scale > 0.0 && scale.is_finite() && (1.0 / scale).is_finite() {
        return Ok(scale);
    }
    Err(Error::UnsupportedQuantization {
        path: source.location(name),
        reason: format!("tensor `{name}` is {scale}; a scale and its reciprocal must be positive and finite"),
    })
}

/// Reads codes of a floating-point format, one per byte.
///
/// # Errors
/// [`Error::NonFinite`] when a code is NaN or infinite.
pub(super) fn read_numbers(source: &dyn TensorSource, name: &str, format: FloatFormat) -> Result<Vec<u8>> {
    let codes = source.read(name)?;
    let is_bad = |code: &&u8| !format.is_number(**code);
    match codes.iter().position(|code| is_bad(&code)) {
        None => Ok(codes),
        Some(first) => Err(Error::NonFinite {
            path: source.location(name),
            tensor: name.to_owned(),
            count: codes.iter().filter(is_bad).count() as u64,
            first_index: first as u64,
        }),
    }
}

/// Converts E4M3 group scales to `f32` and divides each by the global scale.
///
/// # Errors
/// When one is NaN or negative.
pub(super) fn read_group_scales(source: &dyn TensorSource, name: &str, global: f32) -> Result<Vec<f32>> {
    let codes = read_numbers(source, name, FloatFormat::E4m3)?;
    let values = codes.iter().map(|&code| FloatFormat::E4m3.value(code) / global);
    let scales = collected(codes.len(), values, "the scales of a weight")?;
    require_finite(source.location(name), name, &scales)?;
    require_no_sign(source, name, &scales)?;
    Ok(scales)
}

/// Fails if a group scale is negative, because some kernels ignore the sign.
///
/// # Errors
/// [`Error::UnsupportedQuantization`].
pub(super) fn require_no_sign(source: &dyn TensorSource, name: &str, scales: &[f32]) -> Result<()> {
    let Some(negative) = scales.iter().position(|s| s.is_sign_negative()) else { return Ok(()) };
    Err(Error::UnsupportedQuantization {
        path: source.location(name),
        reason: format!("tensor `{name}` has a negative scale, {}, at index {negative}", scales[negative]),
    })
}

/// Returns the dimensions of a matrix, each multiplied by `times`, or `None` if there is no tensor of that name and
/// dtype.
///
/// # Errors
/// [`Error::UnsupportedQuantization`] when it is not a matrix, or its size overflows.
pub(super) fn matrix(
    source: &dyn TensorSource,
    name: &str,
    dtype: Dtype,
    times: [usize; 2],
) -> Result<Option<[usize; 2]>> {
    let Some(info) = source.info(name).filter(|info| info.dtype == dtype) else { return Ok(None) };
    if let [rows, columns] = info.shape[..]
        && let (Some(rows), Some(columns)) = (rows.checked_mul(times[0]), columns.checked_mul(times[1]))
        && rows.checked_mul(columns).is_some()
    {
        return Ok(Some([rows, columns]));
    }
    Err(Error::UnsupportedQuantization {
        path: source.location(name),
        reason: format!("tensor `{name}` has shape {:?}, expected a matrix of codes", info.shape),
    })
}
