//! Quantized checkpoints in candle's [`QMatMul`], on CPUs.
//!
//! candle's quantized models multiply by [`QTensor`]s, whose types are those of GGUF files. This crate makes `QTensor`s
//! of the linears of AWQ, GPTQ, compressed-tensors, ModelOpt, QServe and FP8 checkpoints, and of gpt-oss. Their weights
//! stay packed, and the kernels of `quant-kernels-cpu` multiply by them, so code on `QMatMul` or on
//! `candle_transformers::quantized_nn::Linear` does not change.
//!
//! ```
//! use std::sync::Arc;
//!
//! use candle_core::{Device, Module, Tensor};
//! use quant_candle::{Checkpoint, Rayon, Runner};
//! # use quant_formats::checkpoint::{Dtype, MemorySource};
//! use quant_formats::format::QuantizedCheckpoint;
//! # use quant_formats::format::{AutoAwq, Container, ModuleSchemes};
//! # use quant_formats::quantize::quantize_rtn;
//!
//! # let weight: Vec<f32> = (0..16 * 64).map(|i| (i as f32 * 0.7).sin()).collect();
//! # let scheme = "w4a16-g32-asym".parse()?;
//! # let rounded = quantize_rtn("proj", &weight, [16, 64], scheme, Dtype::F16, None)?;
//! # let mut source = MemorySource::new();
//! # for (spec, bytes) in AutoAwq.pack("proj", &rounded)? {
//! #     source.insert(&spec.name, spec.info.dtype, spec.info.shape.clone(), bytes)?;
//! # }
//! # let schemes = ModuleSchemes { quantized: vec![("proj", scheme)], ..Default::default() };
//! # let settings = AutoAwq.quantization_config(&schemes);
//! # let opened = QuantizedCheckpoint::new(Arc::new(source), "config.json".as_ref(), &settings)?;
//! // From a directory: Checkpoint::open(path, &runner).
//! let checkpoint = Checkpoint::new(opened, &Runner::new(Rayon));
//! let proj = checkpoint.qmatmul("proj")?; // [16, 64]
//! let y = proj.forward(&Tensor::ones((1, 3, 64), candle_core::DType::F32, &Device::Cpu)?)?;
//! assert_eq!(y.dims(), [1, 3, 16]);
//! # let exact: f32 = rounded.dequantize()?[..64].iter().sum();
//! # assert!((y.flatten_all()?.to_vec1::<f32>()?[0] - exact).abs() < 1e-3);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `quant_kernels_cpu::candle::QuantizedLinear` is a module for code that is written for it: it keeps the bias, and
//! packs an input once for several linears.
#![forbid(unsafe_code)]

mod floats;
pub mod llama;
mod packed;

use std::path::Path;
use std::sync::Arc;

use candle_core::quantized::{QMatMul, QStorage, QTensor};
use candle_core::{DType, Device, Error, Result, Tensor};
use candle_nn::VarBuilder;
use quant_formats::checkpoint::Dtype;
use quant_formats::format::QuantizedCheckpoint;
use quant_formats::quantize::QuantizedTensor;
use quant_kernels_cpu::PackedLinear;
pub use quant_kernels_cpu::candle::Runner;
pub use quant_kernels_cpu::{Parallel, Rayon, Serial};

use self::floats::Floats;
use self::packed::{Columns, PackedType};

/// A quantized checkpoint whose linears are made into [`QTensor`]s. Clones share the opened files.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    quantized: Arc<QuantizedCheckpoint>,
    runner: Runner,
}

impl Checkpoint {
    /// Opens a model directory. All linears share the threads and memory of `runner`. Headers are checked; no weight
    /// is read.
    ///
    /// # Errors
    /// See [`QuantizedCheckpoint::open`].
    pub fn open(path: &Path, runner: &Runner) -> quant_formats::Result<Self> {
        Ok(Self::new(QuantizedCheckpoint::open(path)?, runner))
    }

    /// Uses a checkpoint that is already open.
    pub fn new(quantized: QuantizedCheckpoint, runner: &Runner) -> Self {
        Self { quantized: Arc::new(quantized), runner: runner.clone() }
    }

    /// The checkpoint: its configuration, its quantized linears and all its tensors.
    pub fn quantized(&self) -> &QuantizedCheckpoint {
        &self.quantized
    }

    /// Reads a quantized linear, such as `model.layers.0.mlp.down_proj`, as [`qtensor`] does.
    ///
    /// # Errors
    /// When no quantized linear has that name, it cannot be read, or the kernels do not support its scheme.
    pub fn qtensor(&self, linear: &str) -> Result<QTensor> {
        qtensor(self.quantized.read(linear).map_err(Error::wrap)?, &self.runner)
    }

    /// Reads a linear without its [bias](Self::bias), quantized or not.
    ///
    /// A linear that is not quantized, such as an output head, is packed as it is if it is stored in BF16. From another
    /// type, it becomes an `f32` tensor, which requires `f32` input.
    ///
    /// # Errors
    /// When `LINEAR.weight` is missing, is no matrix, cannot be read, or the kernels do not support its scheme.
    pub fn qmatmul(&self, linear: &str) -> Result<QMatMul> {
        if self.quantized.linear(linear).is_some() {
            return QMatMul::from_qtensor(self.qtensor(linear)?);
        }
        let (source, name) = (self.quantized.source(), format!("{linear}.weight"));
        let info = source.require(&name).map_err(Error::wrap)?;
        let [n, k] = <[usize; 2]>::try_from(info.shape.as_slice())
            .map_err(|_| Error::msg(format!("{name} has shape {:?}, expected a matrix", info.shape)))?;
        let values = source.read_f32(&name).map_err(Error::wrap)?;
        if info.dtype != Dtype::Bf16 {
            return Ok(QMatMul::Tensor(Tensor::from_vec(values, (n, k), &Device::Cpu)?));
        }
        // Widening was exact.
        let weight: Vec<_> = values.into_iter().map(half::bf16::from_f32).collect();
        let packed =
            PackedLinear::pack_bf16([n, k], &weight, None, self.runner.parallel()).map_err(Error::wrap)?;
        QMatMul::from_qtensor(as_qtensor(PackedType::float(packed, &self.runner)?, [n, k])?)
    }

    /// Reads the bias `[n]` of a linear, if it has one, in `f32`.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn bias(&self, linear: &str) -> Result<Option<Tensor>> {
        let bias = self.quantized.bias(linear).map_err(Error::wrap)?;
        bias.map(|bias| Tensor::new(bias, &Device::Cpu)).transpose()
    }

    /// All weights as float tensors of this type on the CPU: embeddings and norms, and the dequantized weights of
    /// quantized linears (`LINEAR.weight`). Tensors are read when they are asked for.
    ///
    /// The float models of `candle_transformers` load from it. With their linears in floats, they take the memory of
    /// the original model.
    pub fn var_builder(&self, dtype: DType) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(Floats(self.quantized.clone())), dtype, Device::Cpu)
    }
}

/// Packs a weight `[n, k]` for the kernels, as a tensor that [`QMatMul`] multiplies by.
///
/// Its `dtype()` is `Q8_1`, which no code of candle treats specially and no model file contains. `dequantize` and
/// `embedding` work as for other `QTensor`s. It cannot be written to a GGUF file: `data` returns bytes in the layout of
/// the kernels.
///
/// Inputs are rounded as the scheme of the weight requires: to int8 for W8A8 and W4A8, and to the values of FP8 and FP4
/// grids. Results are `f32` sums; for f16 and bf16 inputs, they are rounded to the type of the input.
///
/// # Errors
/// When the parts of the weight are inconsistent, or the kernels do not support its scheme.
pub fn qtensor(mut weight: QuantizedTensor, runner: &Runner) -> Result<QTensor> {
    let shape = weight.shape;
    // Checks the order, by which columns are indexed later.
    weight.sorted_view().map_err(Error::wrap)?;
    let order = weight.take_input_order();
    let grid = weight.input_grid().map_err(Error::wrap)?;
    let packed = weight.pack(None, runner.parallel()).map_err(Error::wrap)?;
    as_qtensor(PackedType::new(packed, Columns { grid, order }, runner)?, shape)
}

fn as_qtensor(packed: PackedType, [n, k]: [usize; 2]) -> Result<QTensor> {
    QTensor::new(QStorage::Cpu(Box::new(packed)), (n, k))
}

/// The examples of the pages are compiled.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../README.md")]
    struct Readme;
    #[doc = include_str!("../../docs/guide/kernels.md")]
    struct Guide;
    #[doc = include_str!("../../docs/kernels/candle.md")]
    struct Candle;
}
