//! Floating-point codes and scales as files hold them, checked when they are read.

use crate::checkpoint::TensorSource;
use crate::scheme::FloatFormat;
use crate::{Error, Result};

/// A scale of a whole tensor or of all inputs: positive, with a finite inverse.
///
/// # Errors
/// When it is not, or cannot be read.
pub(super) fn read_positive(source: &dyn TensorSource, name: &str) -> Result<f32> {
    let scale = source.read_f32(name)?.first().copied().unwrap_or(f32::NAN);
    if scale > 0.0 && scale.is_finite() && (1.0 / scale).is_finite() {
        return Ok(scale);
    }
    Err(Error::UnsupportedQuantization {
        path: source.location(name),
        reason: format!("tensor `{name}` is {scale}, which is not a scale"),
    })
}

/// Codes of a floating-point format, one per byte, all of which are numbers.
///
/// # Errors
/// [`Error::NonFinite`] where one is not.
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
