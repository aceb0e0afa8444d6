//! The interface as a C caller uses it: results are correct, and every invalid call that can be detected gives a
//! status.

mod common;
mod misuse;
mod values;
