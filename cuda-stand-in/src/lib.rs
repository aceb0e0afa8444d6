//! A CUDA driver without a GPU, for tests of code that calls the driver: contexts, memory, modules, launches, events.
//!
//! It is built as a library with the driver's name, and loaded instead of the driver. Memory is host memory; a launch
//! runs on the PTX interpreter, on copies of the allocations that its arguments point into, and fails if the
//! interpreter finds a fault. There is one device. Its compute capability, 10.0, is that of none of the architectures
//! that kernels are compiled for, so that kernels are loaded as PTX. Launches run synchronously, and time is not
//! modeled.
//!
//! Only the functions that the tests need are implemented. They follow the rules of the driver's interface; a call in
//! the wrong order returns the same error as the driver.
#![allow(unsafe_code, reason = "functions that are called as the driver's, with its callers' pointers")]
#![allow(missing_docs, reason = "the driver's functions, as its reference describes them")]

mod calls;
mod device;
mod parameters;

pub use calls::*;
