//! The interface as a C caller uses it: results, and that every wrong call that can be detected gives a status.

mod common;
mod misuse;
mod values;
