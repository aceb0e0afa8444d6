//! compressed-tensors `pack-quantized`.

use serde_json::Value;

use super::{Container, ModuleSchemes, PackedReader};
use crate::Result;
use crate::checkpoint::{Dtype, TensorSpec};
use crate::quantize::QuantizedTensor;
use crate::recipe::WeightScheme;

/// The container that vLLM, SGLang and transformers read.
#[derive(Debug, Clone, Copy)]
pub struct CompressedTensors;

impl Container for CompressedTensors {
    fn name(&self) -> &'static str {
        "compressed-tensors"
    }
    fn summary(&self) -> &'static str {
        "stub"
    }
    fn layout(&self, _: &str, _: [usize; 2], _: WeightScheme, _: Dtype) -> Result<Vec<TensorSpec>> {
        Ok(Vec::new())
    }
    fn pack(&self, _: &str, _: &QuantizedTensor) -> Result<Vec<(TensorSpec, Vec<u8>)>> {
        Ok(Vec::new())
    }
    fn quantization_config(&self, _: &ModuleSchemes<'_>) -> Value {
        Value::Null
    }
    fn warnings(&self, _: &ModuleSchemes<'_>) -> Vec<String> {
        Vec::new()
    }
    fn reader(&self, _: &Value) -> Result<Option<Box<dyn PackedReader>>, String> {
        Ok(None)
    }
}
