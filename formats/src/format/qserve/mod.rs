//! QServe (Lin et al., MLSys 2025): 4-bit weights with 8-bit activations, in the order in which its kernels load them.
//!
//! This is the only format that keeps both levels of scales of progressive groups. It also supports 4 and 8 bits with a
//! scale per row. All linears have one scheme; scales are F16. `docs/formats/qserve.md` draws the bytes.

mod layout;
mod manifest;
mod reader;

use serde_json::Value;

use super::{Container, LoaderRule, ModuleSchemes, PackedReader};
use crate::checkpoint::{Dtype, TensorSpec};
use crate::quantize::QuantizedTensor;
use crate::scheme::LinearScheme;
use crate::{Error, Result};
use layout::Kind;

/// The name that `--format` takes.
const METHOD: &str = "qserve";
/// `quant_method`: SGLang's name for it.
const QUANT_METHOD: &str = "qoq";
/// The only group size.
const GROUP: usize = 128;
/// Outputs and inputs per tile; both dimensions must be multiples of it.
const TILE: usize = 32;
/// The module that loaders always leave float.
const HEAD: &str = "lm_head";

/// The format of QServe's kernels, which SGLang reads as `qoq`.
#[derive(Debug, Clone, Copy)]
pub struct QServe;

impl Container for QServe {
    fn name(&self) -> &'static str {
        METHOD
    }

    fn quant_method(&self) -> &'static str {
        QUANT_METHOD
    }

    fn summary(&self) -> &'static str {
        "QServe's W4A8 with group and row scales, in the memory order of its kernels; no current engine \
        loads it"
    }

    fn symmetric_by_default(&self, bits: u8) -> bool {
        bits == Kind::Bytes.bits()
    }

    fn scale_dtype(&self, _scheme: LinearScheme, _weight: Dtype) -> Dtype {
        Dtype::F16
    }

    fn keeps_levels(&self) -> bool {
        true
    }

    fn loses(&self, scheme: LinearScheme, _scale_dtype: Dtype) -> Vec<String> {
        match Kind::of(scheme) {
            Some(Kind::Channel) => vec![
                "the products of zero points and scales are stored in F16: quant recovers the zero points \
                exactly, but QServe's kernels use the rounded products, whose relative error is up to 2^-11"
                    .to_owned(),
            ],
            _ => Vec::new(),
        }
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

    /// All linears must have one scheme, because loaders read only one.
    fn check(&self, schemes: &ModuleSchemes<'_>) -> Result<()> {
        if schemes.wrapper.is_some() {
            return Err(Error::usage(
                format!("the {METHOD} format supports text models only"),
                "write ‹format=compressed-tensors›",
            ));
        }
        let named_head = schemes.quantized.iter().any(|(module, _)| *module == HEAD).then_some(HEAD);
        let head = schemes.head.or(named_head).map(|head| format!("`{head}`"));
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
        manifest::quantization_config(schemes)
    }

    fn companion_files(&self, schemes: &ModuleSchemes<'_>) -> Vec<(&'static str, Value)> {
        vec![(manifest::FILE, manifest::manifest(schemes))]
    }

    fn loader_rules(&self) -> &'static [LoaderRule] {
        manifest::LOADER_RULES
    }

    fn reader(&self, quantization_config: &Value) -> Result<Option<Box<dyn PackedReader>>, String> {
        Ok(reader::Reader::new(quantization_config)?.map(|r| Box::new(r) as Box<dyn PackedReader>))
    }
}
