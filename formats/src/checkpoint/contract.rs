//! Checks of arguments that every sink shares.

use std::collections::BTreeSet;

use super::TensorSpec;
use super::header::MAX_RANK;
use super::names::{name_fault, printable};
use crate::{Error, Result};

/// Checks that names are valid and distinct, and that this crate's reader accepts the shapes.
///
/// # Errors
/// [`Error::Internal`]: specs come from the caller, not from a file.
pub fn check_specs(specs: &[TensorSpec]) -> Result<()> {
    let mut names = BTreeSet::new();
    for TensorSpec { name, info } in specs {
        let fault = |reason: &str| Error::Internal(format!("output tensor `{}` {reason}", printable(name)));
        if let Some(reason) = name_fault(name) {
            return Err(fault(reason));
        }
        if name == "__metadata__" {
            return Err(fault("has a reserved name"));
        }
        if info.shape.len() > MAX_RANK {
            return Err(fault("has too many dimensions"));
        }
        let max = info.shape.iter().try_fold(info.dtype.size(), |size, &dim| size.checked_mul(dim.max(1)));
        if max.is_none() {
            return Err(fault("has a size that overflows"));
        }
        if info.dtype.byte_len(info.elements() as u64).is_none() {
            return Err(fault("does not fill whole bytes"));
        }
        if !names.insert(name) {
            return Err(fault("was declared twice"));
        }
    }
    Ok(())
}

/// Checks that the next part of a tensor continues the previous one and stays within the tensor.
///
/// # Errors
/// [`Error::Internal`] naming the tensor.
pub(crate) fn check_part(name: &str, len: u64, written: u64, offset: u64, part: usize) -> Result<()> {
    if offset != written {
        return Err(Error::Internal(format!(
            "tensor `{name}`: got a part for byte {offset}, expected byte {written}"
        )));
    }
    if part as u64 > len - written {
        return Err(Error::Internal(format!(
            "tensor `{name}`: {part} bytes at offset {offset} exceed its {len} bytes"
        )));
    }
    Ok(())
}

pub(crate) fn unknown(name: &str) -> Error {
    Error::Internal(format!("tensor `{}` is not part of the output", printable(name)))
}

pub(crate) fn incomplete(names: &[&str]) -> Error {
    let some = names.iter().take(4).copied().collect::<Vec<_>>().join(", ");
    Error::Internal(format!("output tensors are incomplete ({}): {some}", names.len()))
}
