//! Errors of this crate.

use crate::compile::GpuArchitecture;

/// A result with this crate's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The driver's library is not installed, or not on the loader's path.
    #[error("CUDA driver library not found (libcuda.so, nvcuda.dll): install the NVIDIA driver")]
    DriverMissing,
    /// A library lacks a function that this crate needs.
    #[error("{library} has no function `{function}`: the library is damaged or a stub")]
    FunctionMissing {
        /// The library.
        library: &'static str,
        /// The missing function.
        function: &'static str,
    },
    /// The driver returned an error.
    #[error("CUDA driver: cannot {action}: {reason}")]
    Driver {
        /// The operation that was attempted.
        action: &'static str,
        /// The driver's message.
        reason: String,
    },
    /// There is a driver, but no GPU that is visible to this process.
    #[error(
        "no CUDA device is visible: check that a GPU is present and that CUDA_VISIBLE_DEVICES does not hide it"
    )]
    NoDevice,
    /// No context is current on the calling thread.
    #[error("no CUDA context is current on this thread: make one current before requesting kernels")]
    NoContext,
    /// The device is older than every supported architecture.
    #[error("the CUDA device has compute capability {major}.{minor}; kernels need 8.0 or later")]
    DeviceTooOld {
        /// The major version of its compute capability.
        major: u32,
        /// The minor version of its compute capability.
        minor: u32,
    },
    /// Operands that the kernels do not support.
    #[error(transparent)]
    Operands(#[from] quant_kernels_cpu::KernelError),
    /// A launch that is not supported.
    #[error("cannot launch a kernel: {0}")]
    Launch(&'static str),
    /// The run-time compiler failed, but not because of a kernel's source.
    #[error("CUDA run-time compiler: cannot {action}: {reason}")]
    Nvrtc {
        /// The operation that was attempted.
        action: &'static str,
        /// The compiler's message.
        reason: String,
    },
    /// The run-time compiler rejected a kernel.
    #[error(
        "cannot compile {variant} for {architecture}: {log}\nA compiler that is older than the device may \
        not support it: use CUDA 13.0 or later. If it still fails, please report this"
    )]
    Compile {
        /// The kernel.
        variant: String,
        /// The architecture that it was compiled for.
        architecture: GpuArchitecture,
        /// The compiler's log.
        log: String,
    },
    /// The run-time compiler is not installed, or not on the loader's path.
    #[error(
        "CUDA run-time compiler not found (libnvrtc.so, nvrtc64_*.dll): install the CUDA toolkit, or the \
        Python package nvidia-cuda-nvrtc, and set QUANT_NVRTC to the directory of its library"
    )]
    NvrtcMissing,
    /// The run-time compiler cannot be loaded from the path in `QUANT_NVRTC`.
    #[error("CUDA run-time compiler: QUANT_NVRTC is set to {path}, but {reason}")]
    NvrtcNamed {
        /// The value of `QUANT_NVRTC`.
        path: String,
        /// The reason, such as the loader's message.
        reason: String,
    },
    /// The driver rejected an image.
    #[error(
        "the CUDA driver cannot load {variant} for {architecture}: {reason}\nA driver that is older than \
        the compiler may not support its images: update the driver, or set QUANT_NVRTC to an older NVRTC \
        library"
    )]
    Load {
        /// The kernel.
        variant: String,
        /// The architecture that it was compiled for.
        architecture: GpuArchitecture,
        /// The driver's message.
        reason: String,
    },
}
