//! Statuses and error messages.

use core::ffi::c_char;
use core::fmt::{self, Display, Write};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use quant_kernels_cpu::{KernelError, ViewError};

use crate::memory::{Scope, fields};

/// The outcome of a call. The meaning of a number never changes.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum qz1_status {
    /// The call succeeded.
    Ok = 0,
    /// A length does not match the shape.
    Length = 1,
    /// A shape or sum overflows or exceeds a limit, or a key or value is beyond the range of f16.
    TooLarge = 2,
    /// No kernel supports the scheme, type or value.
    Scheme = 3,
    /// Two operands do not match.
    Mismatch = 4,
    /// The layout is invalid, or the packed bytes have a different layout.
    LayoutId = 5,
    /// The instruction set is unknown, or the processor lacks it.
    Isa = 6,
    /// The library cannot construct a Hadamard matrix of this size.
    Order = 7,
    /// Memory allocation failed.
    Memory = 8,
    /// A required pointer is null.
    Null = 32,
    /// A pointer, a device address or a stride is not a multiple of its alignment.
    Misaligned = 33,
    /// A structure has a size that no version of it has, sets fields that this library does not know, or has a reserved
    /// field that is not 0.
    StructSize = 34,
    /// Memory that is written overlaps other memory of the call.
    Overlap = 35,
    /// The caller's `for_each` did not call each number exactly once.
    ForEach = 36,
    /// An internal error of the library; outputs may be partly written.
    Internal = 37,
    /// A checkpoint cannot be opened or read, or does not contain the linear layer.
    Checkpoint = 38,
    /// The CUDA driver, a device or the run-time compiler (NVRTC) is missing.
    CudaMissing = 64,
    /// No CUDA context is current on the calling thread.
    CudaContext = 65,
    /// The device is older than every architecture that the kernels support.
    CudaDevice = 66,
    /// The CUDA driver or the run-time compiler reported an error.
    CudaFailed = 67,
}

/// The destination of a call's error message. The text is written at the very end of the call, and is empty if the
/// status is 0. It is left unchanged if the message structure itself is invalid, or if the text overlaps other memory
/// of the call.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qz1_message {
    /// `sizeof(qz1_message)`
    pub struct_size: u32,
    /// 0
    pub reserved: u32,
    /// Receives UTF-8 text that ends with a zero byte, truncated to the capacity.
    pub text: *mut c_char,
    /// Bytes available at `text`.
    pub capacity: usize,
}

fields!(qz1_message, capacity, reserved);

/// The reason why a call fails. It holds no heap memory, so that it can be reported when memory is exhausted.
pub(crate) struct Fault {
    status: qz1_status,
    reason: Reason,
}

enum Reason {
    Text(&'static str),
    Part(&'static str, &'static str),
    Misaligned(&'static str, usize),
    Elements(&'static str, usize),
    Isa(u32),
    Kernel(KernelError),
    View(ViewError),
    #[cfg(feature = "cuda")]
    Cuda(quant_kernels_cuda::Error),
    #[cfg(feature = "checkpoints")]
    Checkpoint(Box<quant_formats::Error>),
    Panic(Box<dyn Any + Send>),
}

impl Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => f.write_str(text),
            Self::Part(what, why) => write!(f, "{what}: {why}"),
            Self::Misaligned(what, to) => write!(f, "{what}: not aligned to {to} bytes"),
            Self::Elements(what, len) => write!(f, "{what}: {len} elements exceed the address space"),
            Self::Isa(isa) => write!(f, "unknown instruction set {isa}"),
            Self::Kernel(error) => error.fmt(f),
            Self::View(error) => error.fmt(f),
            #[cfg(feature = "cuda")]
            Self::Cuda(error) => error.fmt(f),
            #[cfg(feature = "checkpoints")]
            Self::Checkpoint(error) => error.fmt(f),
            Self::Panic(with) => {
                let text = with.downcast_ref::<&str>().copied();
                let text = text.or_else(|| with.downcast_ref::<String>().map(String::as_str));
                write!(f, "internal error: {}", text.unwrap_or("the library panicked"))
            }
        }
    }
}

impl Fault {
    pub(crate) fn new(status: qz1_status, text: &'static str) -> Self {
        Self { status, reason: Reason::Text(text) }
    }

    pub(crate) fn part(status: qz1_status, what: &'static str, why: &'static str) -> Self {
        Self { status, reason: Reason::Part(what, why) }
    }

    pub(crate) fn misaligned(what: &'static str, to: usize) -> Self {
        Self { status: qz1_status::Misaligned, reason: Reason::Misaligned(what, to) }
    }

    pub(crate) fn elements(what: &'static str, len: usize) -> Self {
        Self { status: qz1_status::TooLarge, reason: Reason::Elements(what, len) }
    }

    pub(crate) fn isa(isa: u32) -> Self {
        Self { status: qz1_status::Isa, reason: Reason::Isa(isa) }
    }

    #[cfg(any(test, feature = "cuda"))]
    pub(crate) fn status(&self) -> qz1_status {
        self.status
    }
}

#[cfg(feature = "checkpoints")]
impl From<quant_formats::Error> for Fault {
    fn from(error: quant_formats::Error) -> Self {
        let status = match error {
            quant_formats::Error::Memory { .. } => qz1_status::Memory,
            _ => qz1_status::Checkpoint,
        };
        Self { status, reason: Reason::Checkpoint(Box::new(error)) }
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
            8 => qz1_status::Memory,
            // `KernelError` is non-exhaustive.
            _ => qz1_status::Scheme,
        };
        Self { status, reason: Reason::Kernel(error) }
    }
}

impl From<ViewError> for Fault {
    fn from(error: ViewError) -> Self {
        let status = match error {
            ViewError::Bits(_) | ViewError::Scales => qz1_status::Scheme,
            ViewError::GroupSize { .. } | ViewError::SuperBlocks { .. } => qz1_status::Mismatch,
            ViewError::TooLarge(_) => qz1_status::TooLarge,
            _ => qz1_status::Length,
        };
        Self { status, reason: Reason::View(error) }
    }
}

#[cfg(feature = "cuda")]
impl From<quant_kernels_cuda::Error> for Fault {
    fn from(error: quant_kernels_cuda::Error) -> Self {
        use quant_kernels_cuda::Error as E;
        let status = match error {
            E::DriverMissing
            | E::FunctionMissing { .. }
            | E::NoDevice
            | E::NvrtcMissing
            | E::NvrtcNamed { .. } => qz1_status::CudaMissing,
            E::NoContext => qz1_status::CudaContext,
            E::DeviceTooOld { .. } => qz1_status::CudaDevice,
            _ => qz1_status::CudaFailed,
        };
        Self { status, reason: Reason::Cuda(error) }
    }
}

/// Runs a call: returns the outcome as a status, and writes the reason to the message.
pub(crate) fn call(
    message: *const qz1_message,
    body: impl FnOnce(&Scope) -> Result<(), Fault>,
) -> qz1_status {
    let scope = Scope::new();
    // If the message cannot be written to, fail before anything else is done.
    // SAFETY: the caller upholds the pointer contract.
    let (at, capacity) = match unsafe { scope.text(message) } {
        Ok(text) => text,
        Err(fault) => return fault.status,
    };
    // A panic can leave only the caller's memory and handles half-written, and these are valid with any values.
    let outcome = catch_unwind(AssertUnwindSafe(|| body(&scope)));
    let outcome = outcome
        .unwrap_or_else(|with| Err(Fault { status: qz1_status::Internal, reason: Reason::Panic(with) }));
    if capacity > 0 && scope.text_is_apart() {
        let mut text = Text { at, capacity, len: 0, is_full: false };
        if let Err(fault) = &outcome {
            let _ = write!(text, "{}", fault.reason);
        }
        // SAFETY: `len` is below the capacity, which the pointer contract covers.
        unsafe { text.at.add(text.len).write(0) };
    }
    outcome.map_or_else(|fault| fault.status, |()| qz1_status::Ok)
}

/// The caller's memory for a text, with room for a zero byte. It is written through a pointer, because it may be
/// uninitialized.
struct Text {
    at: *mut u8,
    capacity: usize,
    len: usize,
    is_full: bool,
}

impl Write for Text {
    /// Truncates the text at a character boundary.
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if self.is_full {
            return Ok(());
        }
        let room = self.capacity - 1 - self.len;
        self.is_full = text.len() > room;
        let end = (0..=room.min(text.len())).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(0);
        // SAFETY: the range is within the capacity, which the pointer contract covers; nothing borrows it now.
        unsafe { self.at.add(self.len).copy_from_nonoverlapping(text.as_ptr(), end) };
        self.len += end;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_message(to: &mut [u8], body: impl FnOnce(&Scope) -> Result<(), Fault>) -> qz1_status {
        let (struct_size, text) = (size_of::<qz1_message>() as u32, to.as_mut_ptr().cast());
        call(&qz1_message { struct_size, reserved: 0, text, capacity: to.len() }, body)
    }

    #[test]
    fn messages_are_cut_at_characters() {
        let cut = |len, why| {
            let mut to = vec![0xff; len];
            assert_eq!(
                with_message(&mut to, |_| Err(Fault::part(qz1_status::Null, "añ", why))),
                qz1_status::Null
            );
            to
        };
        assert!(cut(0, "b").is_empty());
        assert_eq!(cut(1, "b"), [0]);
        assert_eq!(cut(2, "b"), [b'a', 0]);
        // After a truncation, nothing more is written, even if it would fit.
        assert_eq!(cut(3, ""), [b'a', 0, 0xff]);
        assert_eq!(cut(4, "b"), [b'a', 0xc3, 0xb1, 0]);
        assert_eq!(cut(8, "b"), [b'a', 0xc3, 0xb1, b':', b' ', b'b', 0, 0xff]);
    }

    #[test]
    fn every_call_writes_a_text() {
        let mut to = [0xff; 40];
        assert_eq!(with_message(&mut to, |_| Ok(())), qz1_status::Ok);
        assert_eq!(to[..2], [0, 0xff]);
        assert_eq!(with_message(&mut to, |_| panic!("on purpose")), qz1_status::Internal);
        assert_eq!(&to[..27], b"internal error: on purpose\0");
        let what = 7;
        assert_eq!(with_message(&mut to, |_| panic!("of {what}")), qz1_status::Internal);
        assert_eq!(&to[..21], b"internal error: of 7\0");
        assert_eq!(call(core::ptr::null(), |_| panic!("on purpose")), qz1_status::Internal);
    }
}
