//! A CUDA driver without a GPU, for tests of code that calls the driver: contexts, memory, modules, launches, events.
//!
//! It is a library with the driver's name, loaded instead of the driver. A launch runs on the PTX interpreter, on
//! copies of the allocations that its arguments and addresses in these point into, and fails if the interpreter finds a
//! fault. There is one device. Kernels are compiled for no architecture with its compute capability, 10.0, so they are
//! loaded as PTX. Launches run synchronously, and time is not modeled.
//!
//! Only the functions that the tests need are implemented.
#![allow(unsafe_code, reason = "functions that are called as the driver's, with its callers' pointers")]
#![allow(missing_docs, reason = "the driver's functions, as its reference describes them")]

mod calls;
mod device;
mod parameters;

pub use calls::*;
