//! Kernel launches: their shape and arguments as plain data, and launching on a stream.
//!
//! A launch uses the caller's stream and pointers. It allocates nothing, does not synchronize, and can be captured into
//! a graph.

use std::ffi::c_void;
use std::ptr;

use cudarc::driver::sys;
use quant_kernels_cpu::KernelError;

use crate::device::{Kernel, checked};
use crate::{Error, Result};

/// One argument of a kernel, by value; addresses are [`U64`](Self::U64).
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Argument {
    /// 8 bytes.
    U64(u64),
    /// 4 bytes, also of signed numbers.
    U32(u32),
    /// 4 bytes.
    F32(f32),
}

/// The number of blocks and threads. If any dimension of the grid is 0, nothing is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchShape {
    /// Blocks along x, y and z.
    pub grid: [u32; 3],
    /// Threads per block.
    pub block: u32,
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
}

/// Device memory that belongs to the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// The address of the first byte.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u64,
}

impl Region {
    /// An absent region.
    pub const NONE: Self = Self { address: 0, bytes: 0 };

    /// Checks that the region has at least `bytes` bytes and that its address is a multiple of `align`.
    ///
    /// # Errors
    /// When the region is too short, null or misaligned.
    pub fn require(self, what: &'static str, bytes: usize, align: usize) -> Result<(), KernelError> {
        let there = usize::try_from(self.bytes).unwrap_or(usize::MAX);
        if there < bytes {
            return Err(KernelError::Length { what, expected: bytes, got: there });
        }
        if self.address.checked_add(bytes as u64).is_none() {
            return Err(KernelError::TooLarge("a memory region"));
        }
        if bytes > 0 && (self.address == 0 || !self.address.is_multiple_of(align as u64)) {
            return Err(KernelError::Scheme("an address is null or misaligned"));
        }
        Ok(())
    }
}

/// A stream of the caller: the driver's handle, as `CUstream` or `cudaStream_t`; null is the default stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream(pub *mut c_void);

impl Stream {
    /// The context's default stream.
    pub const DEFAULT: Self = Self(ptr::null_mut());
}

const MAX_ARGUMENTS: usize = 32;

impl Argument {
    /// A pointer to the value in `self`.
    fn value(&self) -> *mut c_void {
        match self {
            Self::U64(value) => ptr::from_ref(value).cast_mut().cast(),
            Self::U32(value) => ptr::from_ref(value).cast_mut().cast(),
            Self::F32(value) => ptr::from_ref(value).cast_mut().cast(),
        }
    }
}

fn pointers(arguments: &[Argument]) -> Result<[*mut c_void; MAX_ARGUMENTS]> {
    let mut out = [ptr::null_mut(); MAX_ARGUMENTS];
    let some = out.get_mut(..arguments.len()).ok_or(Error::Launch("too many arguments"))?;
    some.iter_mut().zip(arguments).for_each(|(to, argument)| *to = argument.value());
    Ok(out)
}

impl LaunchShape {
    /// Fails if no device supports the shape, or if it has more shared memory than the kernel was loaded with.
    fn check(&self, shared_of_kernel: u32) -> Result<()> {
        let [x, y, z] = self.grid;
        if x > i32::MAX as u32 || y > 65_535 || z > 65_535 {
            return Err(Error::Launch("the grid is too large"));
        }
        if self.block == 0 || self.block > 1024 {
            return Err(Error::Launch("blocks must have 1 to 1024 threads"));
        }
        if self.shared_bytes > shared_of_kernel {
            return Err(Error::Launch("blocks request more shared memory than the kernel was loaded with"));
        }
        Ok(())
    }
}

impl Kernel {
    /// Launches the kernel on a stream of the context that it was loaded into, which must be current. Does nothing if
    /// there are no blocks.
    ///
    /// # Errors
    /// When the shape is invalid, or the driver returns an error. Errors on the device are reported by later calls.
    ///
    /// # Safety
    /// The arguments must match the kernel's parameters in number, order and size. They must point to device memory of
    /// the lengths that the kernel expects, which stays allocated until the launch has finished. The stream must belong
    /// to the context.
    pub unsafe fn launch(&self, shape: &LaunchShape, arguments: &[Argument], stream: Stream) -> Result<()> {
        shape.check(self.shared_bytes)?;
        if shape.grid.contains(&0) {
            return Ok(());
        }
        let mut pointers = pointers(arguments)?;
        let [x, y, z] = shape.grid;
        // SAFETY: the kernel is loaded; the caller guarantees that the arguments match the kernel and that the stream
        // belongs to the context. The driver copies the arguments before it returns.
        let launched = unsafe {
            sys::cuLaunchKernel(
                self.function,
                x,
                y,
                z,
                shape.block,
                1,
                1,
                shape.shared_bytes,
                stream.0.cast(),
                pointers.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        checked("launch a kernel", launched)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_pointed_to() {
        let arguments = [Argument::U64(u64::MAX - 1), Argument::U32(7), Argument::F32(-0.5)];
        let pointers = pointers(&arguments).unwrap();
        // SAFETY: each pointer points to the value of a live argument of that type.
        let values =
            unsafe { (*pointers[0].cast::<u64>(), *pointers[1].cast::<u32>(), *pointers[2].cast::<f32>()) };
        assert_eq!(values, (u64::MAX - 1, 7, -0.5));
        assert!(pointers[3..].iter().all(|p| p.is_null()));
        assert!(super::pointers(&[Argument::U32(0); MAX_ARGUMENTS]).is_ok());
        assert!(super::pointers(&[Argument::U32(0); MAX_ARGUMENTS + 1]).is_err());
    }

    #[test]
    fn shapes_that_no_device_takes_are_refused() {
        let good = LaunchShape { grid: [1 << 20, 65_535, 1], block: 1024, shared_bytes: 4096 };
        assert_eq!(good.check(4096), Ok(()));
        for bad in [
            LaunchShape { grid: [1 << 31, 1, 1], ..good },
            LaunchShape { grid: [1, 65_536, 1], ..good },
            LaunchShape { grid: [1, 1, 65_536], ..good },
            LaunchShape { block: 0, ..good },
            LaunchShape { block: 1025, ..good },
            LaunchShape { shared_bytes: 4097, ..good },
        ] {
            assert!(matches!(bad.check(4096), Err(Error::Launch(_))), "{bad:?}");
        }
    }

    #[test]
    fn regions_are_long_and_straight_enough() {
        let region = Region { address: 64, bytes: 10 };
        assert!(region.require("x", 10, 16).is_ok());
        assert!(region.require("x", 11, 16).is_err());
        assert!(Region { address: 72, ..region }.require("x", 10, 16).is_err());
        assert!(Region { address: 0, ..region }.require("x", 1, 1).is_err());
        assert!(Region::NONE.require("x", 0, 16).is_ok());
        assert!(Region { address: 0, bytes: u64::MAX }.require("x", 0, 16).is_ok());
    }
}
