//! AutoAWQ `gemm`: the format that vLLM, SGLang and transformers read as `awq`.
//!
//! Four bits, one group size for the whole model, scales in F16, always a zero point. `docs/formats/awq.md` draws the
//! bytes.

mod layout;
mod reader;

use serde_json::{Value, json};

use super::loaders::{LoaderRule, VLLM};
use super::{Container, ModuleSchemes, PackedReader};
use crate::checkpoint::{Dtype, TensorSpec};
use crate::quantize::QuantizedTensor;
use crate::scheme::{Granularity, LinearScheme};
use crate::{Error, Result};

/// `quant_method`.
const METHOD: &str = "awq";
/// `version`: the only layout that engines still support.
const VERSION: &str = "gemm";
const BITS: u8 = 4;
/// The module that loaders always leave float.
const HEAD: &str = "lm_head";
/// Outputs whose codes share a word; the number of rows must be a multiple of it.
const ROWS_PER_WORD: usize = 8;
/// Group sizes that vLLM's fast kernels support.
const MARLIN_GROUPS: [usize; 3] = [32, 64, 128];

static LOADER_RULES: &[LoaderRule] = &[
    LoaderRule::computed(&[VLLM], |schemes| match schemes.quantized.first() {
        Some((_, LinearScheme { granularity: Granularity::Group(size), .. }))
            if !MARLIN_GROUPS.contains(size) =>
        {
            vec![format!("vLLM's fast kernels support groups of 32, 64 and 128, not {size}")]
        }
        _ => Vec::new(),
    }),
    LoaderRule::new(
        &[VLLM],
        |schemes| schemes.float.len() > 1,
        "engines match the entries of `modules_to_not_convert` anywhere in a name, and vLLM requires linears that \
        it fuses (queries, keys and values; gate and up) to be all quantized or all float",
    ),
];

/// The format that vLLM, SGLang and transformers read as `awq`.
#[derive(Debug, Clone, Copy)]
pub struct AutoAwq;

impl Container for AutoAwq {
    fn name(&self) -> &'static str {
        METHOD
    }

    fn summary(&self) -> &'static str {
        "AutoAWQ (gemm), for vLLM, SGLang and transformers: 4 bits, one group size, asymmetric by default"
    }

    fn symmetric_by_default(&self, _bits: u8) -> bool {
        false
    }

    fn scale_dtype(&self, _scheme: LinearScheme, _weight: Dtype) -> Dtype {
        Dtype::F16
    }

    fn keeps_activations(&self) -> bool {
        false
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

    /// All linears must have one scheme, because the configuration can hold only one. Head and embedding stay float,
    /// because loaders do not support them quantized. The name of a quantized linear must not contain that of a module
    /// outside the decoder, which would make it float.
    fn check(&self, schemes: &ModuleSchemes<'_>) -> Result<()> {
        let named_head = schemes.quantized.iter().any(|(module, _)| *module == HEAD).then_some(HEAD);
        let head = schemes.head.or(named_head);
        if let Some(outside) = schemes
            .outside()
            .iter()
            .find(|outside| schemes.quantized.iter().any(|(module, _)| module.contains(outside.as_str())))
        {
            return Err(Error::usage(
                format!(
                    "engines would treat some quantized linears as float: the {METHOD} format lists \
                    `{outside}` as float, and engines match this name anywhere in the name of a linear"
                ),
                "write ‹format=compressed-tensors›",
            ));
        }
        let head = head.map(|head| format!("`{head}`"));
        if let Some(module) = head.or(schemes.embedding.map(|_| "the embedding".to_owned())) {
            return Err(Error::usage(
                format!("{module} cannot be quantized in the {METHOD} format, because engines keep it float"),
                "leave it float, or write ‹format=compressed-tensors›",
            ));
        }
        let Some((first, scheme)) = schemes.quantized.first() else { return Ok(()) };
        match schemes.quantized.iter().find(|(_, other)| other != scheme) {
            None => Ok(()),
            Some((module, other)) => Err(Error::usage(
                format!(
                    "`{module}` has the scheme {other}, but `{first}` has {scheme}; the {METHOD} format \
                    needs one scheme for all modules"
                ),
                "use one scheme, leave modules float with ‹ignore›, or write ‹format=compressed-tensors›",
            )),
        }
    }

    fn quantization_config(&self, schemes: &ModuleSchemes<'_>) -> Value {
        let group_size = match schemes.quantized.first().map(|(_, scheme)| scheme.granularity) {
            Some(Granularity::Group(size)) => json!(size),
            _ => json!(-1),
        };
        let mut float = schemes.all_names(&schemes.float);
        // Some loaders match from the start of a name, and have these modules below `model.`.
        float.extend(schemes.outside().iter().flat_map(|module| [module.clone(), format!("model.{module}")]));
        json!({
            "quant_method": METHOD,
            "bits": BITS,
            "group_size": group_size,
            "zero_point": true,
            "version": VERSION,
            "modules_to_not_convert": float,
        })
    }

    fn loader_rules(&self) -> &'static [LoaderRule] {
        LOADER_RULES
    }

    fn reader(&self, quantization_config: &Value) -> Result<Option<Box<dyn PackedReader>>, String> {
        Ok(reader::Reader::new(quantization_config)?.map(|r| Box::new(r) as Box<dyn PackedReader>))
    }
}
