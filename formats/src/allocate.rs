//! Allocates buffers whose sizes come from files or plans, and returns an error if memory is too little. `Vec` would
//! end the process.

use std::fmt::Display;

use crate::{Error, Result};

/// Returns `count` zeros. `what` names the buffer in the message.
///
/// # Errors
/// [`Error::Memory`] if they cannot be allocated.
///
/// ```
/// use quant_formats::allocate::zeros;
///
/// assert_eq!(zeros::<f32>(3, "the example")?, [0.0; 3]);
/// assert!(zeros::<f32>(usize::MAX / 2, "the example").is_err());
/// # Ok::<(), quant_formats::Error>(())
/// ```
pub fn zeros<T: Clone + Default>(count: usize, what: impl Display) -> Result<Vec<T>> {
    let mut values = Vec::new();
    grow(&mut values, count, what)?;
    Ok(values)
}

/// Sets the length of a buffer; added elements are zeros. On an error, the buffer is unchanged.
///
/// # Errors
/// As [`zeros`].
pub fn grow<T: Clone + Default>(values: &mut Vec<T>, len: usize, what: impl Display) -> Result<()> {
    let added = len.saturating_sub(values.len());
    values.try_reserve_exact(added).map_err(|_| failed::<T>(added, what))?;
    values.resize(len, T::default());
    Ok(())
}

/// Returns an empty vector with room for `count` elements.
///
/// # Errors
/// As [`zeros`].
pub fn room<T>(count: usize, what: impl Display) -> Result<Vec<T>> {
    let mut values = Vec::new();
    values.try_reserve_exact(count).map_err(|_| failed::<T>(count, what))?;
    Ok(values)
}

/// Collects `count` values, for which memory is reserved first.
///
/// # Errors
/// As [`zeros`].
pub(crate) fn collected<T>(
    count: usize,
    values: impl IntoIterator<Item = T>,
    what: impl Display,
) -> Result<Vec<T>> {
    let mut collected = room(count, what)?;
    collected.extend(values);
    Ok(collected)
}

fn failed<T>(count: usize, what: impl Display) -> Error {
    Error::Memory {
        what: what.to_string(),
        bytes: Some((count as u64).saturating_mul(size_of::<T>() as u64)),
    }
}
