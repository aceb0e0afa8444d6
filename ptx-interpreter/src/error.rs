//! Errors in PTX text and launches, and faults of kernels.

use std::fmt;

/// A result with this crate's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error while reading or running a kernel.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The text is not PTX that this crate can parse.
    #[error("PTX line {line}: {message}")]
    Parse {
        /// Line of the text, from 1.
        line: u32,
        /// The error at that line.
        message: String,
    },
    /// The module has no such kernel.
    #[error("no kernel `{kernel}` in the module: it has {present}")]
    NoKernel {
        /// The requested name.
        kernel: String,
        /// The names of its kernels.
        present: String,
    },
    /// The launch does not match the kernel.
    #[error("cannot launch `{kernel}`: {message}")]
    Launch {
        /// The kernel.
        kernel: String,
        /// A description of the mismatch.
        message: String,
    },
    /// The host accessed a buffer that does not exist, is too short, or has bytes that were never written.
    #[error("memory: {message}")]
    Memory {
        /// The reason.
        message: String,
    },
    /// The kernel has a fault.
    #[error("{0}")]
    Fault(Box<Fault>),
}

/// The kind of a kernel's fault.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum FaultKind {
    /// An access to an address outside every buffer, or beyond shared or local memory.
    OutOfBounds,
    /// An access to an address that is not a multiple of the size of the access.
    Misaligned,
    /// A read of bytes that were never written.
    Uninitialised,
    /// An access to bytes of an asynchronous copy for which the copying thread has not waited.
    InFlight,
    /// A read of copied bytes by another lane of the warp without a `bar.warp.sync` after the wait.
    NotVisible,
    /// Two warps of a block accessed the same shared bytes without a barrier in between, and at least one wrote.
    SharedRace,
    /// Accesses to the same global bytes are not ordered: between blocks by an atomic, or between warps of a block by a
    /// barrier.
    GlobalRace,
    /// Not all threads reached the same barrier, or its parameters are invalid.
    BarrierDivergence,
    /// The lanes that take part in a warp-wide instruction do not match its mask or its source lanes.
    WarpDivergence,
    /// The launch executed more instructions than the options allow.
    Runaway,
    /// An instruction that this crate does not support.
    Unsupported(String),
    /// The kernel executed `trap`.
    Trap,
}

/// A fault of a kernel, and where it occurred.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The kind of fault.
    pub kind: FaultKind,
    /// The kernel's name.
    pub kernel: String,
    /// Line of the PTX text, from 1.
    pub line: u32,
    /// The instruction's opcode.
    pub opcode: String,
    /// The block.
    pub block: [u32; 3],
    /// The warp within its block.
    pub warp: u32,
    /// The lane within its warp, if a single lane caused the fault.
    pub lane: Option<u32>,
    /// The buffer, or `shared` or `local`.
    pub buffer: Option<String>,
    /// The offset in the buffer in bytes; for an address outside every buffer, the address.
    pub offset: u64,
    /// Details, such as the other access of a race.
    pub detail: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match &self.kind {
            FaultKind::OutOfBounds => "out of bounds",
            FaultKind::Misaligned => "misaligned",
            FaultKind::Uninitialised => "read of uninitialised bytes",
            FaultKind::InFlight => "access to bytes of a copy in flight",
            FaultKind::NotVisible => "read of another lane's copy without a warp barrier",
            FaultKind::SharedRace => "race in shared memory",
            FaultKind::GlobalRace => "race in global memory",
            FaultKind::BarrierDivergence => "barrier divergence",
            FaultKind::WarpDivergence => "warp divergence",
            FaultKind::Runaway => "runaway",
            FaultKind::Unsupported(_) => "unsupported instruction",
            FaultKind::Trap => "trap",
        };
        write!(f, "{what}: kernel `{}`, PTX line {}, {}", self.kernel, self.line, self.opcode)?;
        let [x, y, z] = self.block;
        write!(f, ", block ({x}, {y}, {z}), warp {}", self.warp)?;
        if let Some(lane) = self.lane {
            write!(f, ", lane {lane}")?;
        }
        if let Some(buffer) = &self.buffer {
            write!(f, ", {buffer}+{}", self.offset)?;
        } else if self.kind == FaultKind::OutOfBounds {
            write!(f, ", address {:#x}", self.offset)?;
        }
        if !self.detail.is_empty() {
            write!(f, ": {}", self.detail)?;
        }
        Ok(())
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        Self::Fault(Box::new(fault))
    }
}
