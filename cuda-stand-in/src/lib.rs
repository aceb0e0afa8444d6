//! A CUDA driver without a GPU, for the tests of what calls the driver: contexts, memory, modules, launches, events.
//!
//! Built as a library of the driver's name, it is found in the driver's place. Memory is the host's; a launch runs on the
//! PTX interpreter, on copies of the allocations that its arguments point into, and fails where the interpreter finds a
//! fault. There is one device, newer than all architectures that kernels are compiled for, so that it takes PTX; nothing
//! runs side by side, and no time passes but the interpreter's own.
//!
//! Only what is called is here, by the rules of the driver's interface; a call out of order is an error as there.
#![allow(unsafe_code, reason = "functions that are called as the driver's, with its callers' pointers")]
#![allow(missing_docs, reason = "the driver's functions, as its reference describes them")]

mod calls;
mod device;
mod parameters;

pub use calls::*;
