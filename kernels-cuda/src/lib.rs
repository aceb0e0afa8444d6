//! Kernels that multiply activations with quantized weights on NVIDIA GPUs: the host side.
//!
//! There are no kernels yet. What there is tells, on any machine and without panicking, whether
//! kernels could be compiled and run: CUDA's libraries are loaded when first used, so this crate
//! builds, and its callers start, where there are none.
#![deny(unsafe_op_in_unsafe_fn)]

pub mod attention;
pub mod compile;
mod error;
mod libraries;

pub use error::{Error, Result};
pub use libraries::{device_count, driver_available, nvrtc_available, require_device, require_nvrtc};
