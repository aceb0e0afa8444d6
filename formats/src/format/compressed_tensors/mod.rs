//! compressed-tensors, the format that vLLM, SGLang and transformers read. `docs/formats/compressed-tensors.md` draws
//! the bytes.

mod config;
mod floats;
mod group;
mod layout;
mod object;
mod reader;
mod rules;

use serde_json::Value;

use super::{Container, LoaderRule, ModuleSchemes, PackedReader};
use crate::Result;
use crate::checkpoint::{Dtype, TensorSpec};
use crate::quantize::QuantizedTensor;
use crate::scheme::{CachePart, LinearScheme};

/// `quant_method`.
const METHOD: &str = "compressed-tensors";
/// `format` of a checkpoint whose groups have different formats.
const MIXED: &str = "mixed-precision";
/// The only `quantization_status` that means "the tensors are packed".
const STATUS: &str = "compressed";
/// The class that loaders replace by quantized linears.
const LINEAR: &str = "Linear";
/// The class that loaders replace by quantized embeddings.
const EMBEDDING: &str = "Embedding";
/// The `scale_dtype` of E4M3 scales.
const E4M3_SCALES: &str = "torch.float8_e4m3fn";
/// The `scale_dtype` of exponents.
const E8M0_SCALES: &str = "torch.uint8";
/// Prefix of a target or ignored name that is a regular expression.
const REGEX: &str = "re:";

/// The format that vLLM, SGLang and transformers read.
#[derive(Debug, Clone, Copy)]
pub struct CompressedTensors;

impl Container for CompressedTensors {
    fn name(&self) -> &'static str {
        METHOD
    }

    fn summary(&self) -> &'static str {
        "for vLLM, SGLang and transformers: all schemes; progressive scales are merged into one scale per group"
    }

    fn layout(
        &self,
        module: &str,
        shape: [usize; 2],
        scheme: LinearScheme,
        scale_dtype: Dtype,
    ) -> Result<Vec<TensorSpec>> {
        layout::layout(module, shape, scheme, scale_dtype)
    }

    fn pack(&self, module: &str, tensor: &QuantizedTensor) -> Result<Vec<(TensorSpec, Vec<u8>)>> {
        layout::pack(module, tensor)
    }

    fn cache_scale(&self, linear: &str, part: CachePart) -> Option<TensorSpec> {
        Some(TensorSpec::new(part.of_attention(linear), Dtype::F32, [1]))
    }

    fn quantization_config(&self, schemes: &ModuleSchemes<'_>) -> Value {
        config::quantization_config(schemes)
    }

    fn loader_rules(&self) -> &'static [LoaderRule] {
        rules::RULES
    }

    fn reader(&self, quantization_config: &Value) -> Result<Option<Box<dyn PackedReader>>, String> {
        Ok(reader::Reader::new(quantization_config)?.map(|r| Box::new(r) as Box<dyn PackedReader>))
    }
}
