//! What a call returns, and how it says why.

use core::ffi::c_char;
use std::panic::{AssertUnwindSafe, catch_unwind};

use quant_kernels_cpu::{KernelError, ViewError};

use crate::memory::{self, Fields};

/// What became of a call. The numbers keep their meaning.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum qz1_status {
    /// Done.
    Ok = 0,
    /// Memory has another length than the shape says.
    Length = 1,
    /// A shape or sum beyond the numbers of this machine.
    TooLarge = 2,
    /// A scheme, type or value that no kernel takes.
    Scheme = 3,
    /// Two operands that do not belong together.
    Mismatch = 4,
    /// A layout that is none, or packed bytes of another.
    LayoutId = 5,
    /// The processor lacks the instructions that were asked for.
    Isa = 6,
    /// A size for which there is no Hadamard matrix here.
    Order = 7,
    /// A pointer is null that must not be.
    Null = 32,
    /// A pointer is not aligned to its type.
    Misaligned = 33,
    /// A structure is smaller than any version of it, or has fields that this library does not know.
    StructSize = 34,
    /// Memory that is written overlaps other memory of the call.
    Overlap = 35,
    /// The caller's `for_each` did not call each number once.
    ForEach = 36,
    /// The library failed, which is its fault; what was to be written may be written in part.
    Internal = 37,
}

/// Where a call may say what is wrong.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qz1_message {
    /// `sizeof(qz1_message)`
    pub struct_size: u32,
    /// 0
    pub reserved: u32,
    /// Gets UTF-8 that ends with a zero byte, cut where it is longer.
    pub text: *mut c_char,
    /// Bytes at `text`.
    pub capacity: usize,
}

impl Fields for qz1_message {}

/// Why a call is refused.
pub(crate) struct Fault {
    status: qz1_status,
    text: String,
}

impl Fault {
    pub(crate) fn new(status: qz1_status, text: impl Into<String>) -> Self {
        Self { status, text: text.into() }
    }
}

impl From<KernelError> for Fault {
    fn from(error: KernelError) -> Self {
        let status = match error.code() {
            1 => qz1_status::Length,
            2 => qz1_status::TooLarge,
            3 => qz1_status::Scheme,
            4 => qz1_status::Mismatch,
            5 => qz1_status::LayoutId,
            6 => qz1_status::Isa,
            7 => qz1_status::Order,
            // An error that is newer than this list.
            _ => qz1_status::Scheme,
        };
        Self::new(status, error.to_string())
    }
}

impl From<ViewError> for Fault {
    fn from(error: ViewError) -> Self {
        let status = match error {
            ViewError::Bits(_) => qz1_status::Scheme,
            ViewError::GroupSize { .. } => qz1_status::Mismatch,
            _ => qz1_status::Length,
        };
        Self::new(status, error.to_string())
    }
}

/// Runs a call: its outcome as a status, its reason in the message.
pub(crate) fn call(message: *const qz1_message, body: impl FnOnce() -> Result<(), Fault>) -> qz1_status {
    // What a panic leaves behind is the caller's memory and handles, which hold any values.
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        // A message that cannot be written to is refused before anything is done.
        // SAFETY: the caller of the C function vouches for it.
        let to = unsafe { memory::text(message) }?;
        Ok((to, body()))
    }));
    let fault = match outcome {
        Ok(Ok((to, result))) => match result {
            Ok(()) => return qz1_status::Ok,
            Err(fault) => {
                write(to, &fault.text);
                fault
            }
        },
        Ok(Err(fault)) => fault,
        Err(_) => Fault::new(qz1_status::Internal, ""),
    };
    fault.status
}

/// Cuts at a character, and ends with a zero byte.
fn write(to: Option<&mut [u8]>, text: &str) {
    let Some(to) = to.filter(|to| !to.is_empty()) else { return };
    let end = (0..to.len().min(text.len() + 1)).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(0);
    to[..end].copy_from_slice(&text.as_bytes()[..end]);
    to[end] = 0;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_cut_at_characters() {
        let cut = |len| {
            let mut to = vec![0xff; len];
            write(Some(&mut to), "añb");
            to
        };
        assert!(cut(0).is_empty());
        assert_eq!(cut(1), [0]);
        assert_eq!(cut(2), [b'a', 0]);
        assert_eq!(cut(3), [b'a', 0, 0xff]);
        assert_eq!(cut(4), [b'a', 0xc3, 0xb1, 0]);
        assert_eq!(cut(6), [b'a', 0xc3, 0xb1, b'b', 0, 0xff]);
    }

    #[test]
    fn panics_are_a_status() {
        assert_eq!(call(core::ptr::null(), || panic!("on purpose")), qz1_status::Internal);
    }
}
