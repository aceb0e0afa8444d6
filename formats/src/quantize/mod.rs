//! Quantizes float weights to codes, scales and zero points, without packing, and rounds inputs for schemes with
//! quantized activations. Methods that need a calibration text are in `quant-core`.

pub mod activations;
mod error_stats;
pub mod grid;
mod mx_to_nv;
pub mod progressive;
mod rows;
pub mod rtn;
mod shared;
mod tensor;

pub use activations::{InputGrid, fp8_static_scale, nvfp4_input_scale, static_grid};
pub use error_stats::ErrorStats;
pub use mx_to_nv::ScaleExponents;
pub use progressive::Levels;
pub use rows::{RowsError, SourceRows, group_size, zeroed};
pub use rtn::{
    QuantizedRows, fake_quantize, fake_quantize_group, fake_quantize_within, quantize_rows, quantize_rtn,
    quantize_tensor, quantize_within, row_scales,
};
pub use shared::{ScaleContext, ScaleSearch, SharedExtents, SharedScales};
pub use tensor::{QuantizedTensor, restore_input_order};
