//! What can be missing or fail on the way to a GPU.

use crate::compile::Architecture;

/// The result of every fallible function of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failure on the way to a GPU.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The driver's library is not installed, or not on the loader's path.
    #[error("CUDA driver library not found (libcuda.so, nvcuda.dll): install the NVIDIA driver")]
    DriverMissing,
    /// A library of that name loads, but lacks what every version of it has.
    #[error("{library} lacks the function `{function}`: it is damaged, or a stub")]
    FunctionMissing {
        /// The library.
        library: &'static str,
        /// What it should export.
        function: &'static str,
    },
    /// The driver answered with an error.
    #[error("CUDA driver: cannot {action}: {reason}")]
    Driver {
        /// What was attempted.
        action: &'static str,
        /// The driver's words.
        reason: String,
    },
    /// There is a driver, but no GPU that it shows us.
    #[error("no CUDA device: none is present, or CUDA_VISIBLE_DEVICES hides it")]
    NoDevice,
    /// The calling thread has no context.
    #[error("no CUDA context is current on this thread: make one current before asking for kernels")]
    NoContext,
    /// No kernel is compiled for such a device.
    #[error("a CUDA device of compute capability {major}.{minor}: kernels need 8.0 or later")]
    DeviceTooOld {
        /// Of its compute capability.
        major: u32,
        /// Of its compute capability.
        minor: u32,
    },
    /// Operands that no kernel takes.
    #[error(transparent)]
    Operands(#[from] quant_kernels_cpu::KernelError),
    /// A launch that no device could take.
    #[error("cannot launch a kernel: {0}")]
    Launch(&'static str),
    /// The run-time compiler failed at something other than a kernel's text.
    #[error("CUDA run-time compiler: cannot {action}: {reason}")]
    Nvrtc {
        /// What was attempted.
        action: &'static str,
        /// Its words.
        reason: String,
    },
    /// The run-time compiler refused a kernel.
    #[error(
        "cannot compile {variant} for {architecture}: {log}\nAn older compiler does not know newer devices: take CUDA 13.0 or \
         later; otherwise please report this"
    )]
    Compile {
        /// The kernel.
        variant: String,
        /// What it was compiled for.
        architecture: Architecture,
        /// What the compiler said.
        log: String,
    },
    /// The run-time compiler is not installed, or not on the loader's path.
    #[error(
        "CUDA run-time compiler not found (libnvrtc.so, nvrtc64_*.dll): install the CUDA toolkit, or the Python package \
         nvidia-cuda-nvrtc, and let QUANT_NVRTC name the directory of its library"
    )]
    NvrtcMissing,
    /// The run-time compiler is not where it is said to be.
    #[error("CUDA run-time compiler: QUANT_NVRTC is {path}, but: {reason}")]
    NvrtcNamed {
        /// What the environment says.
        path: String,
        /// Why it is invalid.
        reason: String,
    },
    /// The driver does not take an image.
    #[error(
        "the CUDA driver does not load {variant} for {architecture}: {reason}\nA driver older than the compiler may not know its \
         images: update the driver, or let QUANT_NVRTC name an older compiler"
    )]
    Load {
        /// The kernel.
        variant: String,
        /// What it was compiled for.
        architecture: Architecture,
        /// The driver's words.
        reason: String,
    },
}
