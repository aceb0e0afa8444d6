//! Float weights become codes, scales and zeros; no packing yet. And inputs become integers where a scheme asks
//! for it: [`activations`].
//!
//! [`grid`] is the arithmetic of one group, [`progressive`] that of groups on integers, [`rtn`] runs them over
//! matrices, [`gptq`] lets weights make up for each other's rounding, and [`ErrorStats`] measures what it cost.

pub mod activations;
mod error_stats;
pub mod gptq;
pub mod grid;
pub mod progressive;
mod rows;
pub mod rtn;
mod tensor;

pub use activations::{InputGrid, static_grid};
pub use error_stats::ErrorStats;
pub use progressive::Levels;
pub use rows::{Rows, RowsError};
pub use rtn::{
    QuantizedRows, fake_quantize, fake_quantize_group, quantize_rows, quantize_rtn, quantize_tensor,
    row_scales,
};
pub use tensor::QuantizedTensor;
