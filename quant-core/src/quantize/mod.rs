//! Float weights become codes, scales and zeros; no packing yet.

mod tensor;

pub use tensor::QuantizedTensor;
