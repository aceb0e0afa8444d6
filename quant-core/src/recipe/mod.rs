//! What the user asked for, and what each tensor therefore gets.

mod scheme;

pub use scheme::{Granularity, WeightScheme};
