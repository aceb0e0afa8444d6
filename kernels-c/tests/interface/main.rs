//! The interface as a C caller has it: what it gives, and that every wrong call it can see is a status.

mod common;
mod misuse;
mod values;
