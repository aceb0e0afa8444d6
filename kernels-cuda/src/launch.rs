//! A kernel's launch: its shape and arguments, as plain data.

use quant_kernels_cpu::KernelError;

/// One argument of a kernel, by value; addresses are [`U64`](Self::U64).
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Argument {
    /// 8 bytes.
    U64(u64),
    /// 4 bytes, of signed numbers too.
    U32(u32),
    /// 4 bytes.
    F32(f32),
}

/// Blocks and threads. Where a number of blocks is 0 there is nothing to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchShape {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: u32,
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
}

/// Bytes on a device that belong to the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Where they begin.
    pub address: u64,
    /// How many there are.
    pub bytes: u64,
}

impl Region {
    /// What is not there.
    pub const NONE: Self = Self { address: 0, bytes: 0 };

    /// Fails unless there are so many bytes, at a multiple of `align`.
    ///
    /// # Errors
    /// When there are not.
    pub fn require(self, what: &'static str, bytes: usize, align: usize) -> Result<(), KernelError> {
        let there = usize::try_from(self.bytes).unwrap_or(usize::MAX);
        if there < bytes {
            return Err(KernelError::Length { what, expected: bytes, got: there });
        }
        if bytes > 0 && (self.address == 0 || !self.address.is_multiple_of(align as u64)) {
            return Err(KernelError::Scheme(
                "an address that is none, or no multiple of what its type needs",
            ));
        }
        Ok(())
    }
}
