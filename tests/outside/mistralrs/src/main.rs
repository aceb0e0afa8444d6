//! Runs the linears of quantized checkpoints as layers of mistral.rs, and compares them with its own layers on the
//! dequantized weights.

mod layer;

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use candle_core::{DType, Device, Tensor};
use candle_nn::Linear;
use layer::PackedLayer;
use mistralrs_quant::{IsqType, QuantMethod, QuantMethodConfig, QuantizeOntoGuard, UnquantLinear};
use quant_formats::checkpoint::Dtype;
use quant_formats::format::QuantizedCheckpoint;
use quant_formats::quantize::InputGrid;

/// The largest error of products, relative to its bound: `2⁻¹⁶` of the sum of magnitudes, because the kernels may split
/// floats into two parts of bf16, and the rounding of two sums of `k` products.
fn share_of_bound(got: &Tensor, exact: &Tensor, magnitudes: &Tensor, k: usize) -> candle_core::Result<f32> {
    let bound = f64::from(2f32.powi(-16)) + 2.0 * (k as f64 + 4.0) * 2f64.powi(-23);
    let bounds = magnitudes.affine(bound, f64::from(f32::MIN_POSITIVE))?;
    let shares: Vec<f32> = ((got - exact)?.abs()? / bounds)?.flatten_all()?.to_vec1()?;
    // NaN must not pass.
    Ok(shares.into_iter().fold(0.0, |worst, share| if share <= worst { worst } else { share }))
}

/// The largest difference relative to the largest value of `exact`.
fn difference(got: &Tensor, exact: &Tensor) -> candle_core::Result<f32> {
    let largest = |x: Tensor| x.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>();
    let [got, exact] = [got.to_dtype(DType::F32)?, exact.to_dtype(DType::F32)?];
    let (worst, size) = (largest((&got - &exact)?)?, largest(exact)?);
    // NaN must not pass.
    if worst.is_finite() { Ok(worst / size.max(f32::MIN_POSITIVE)) } else { Ok(f32::INFINITY) }
}

/// The tensors of a GPTQ or AWQ linear as mistral.rs reads them, with this bias instead of its own if there is one.
fn of_engine(
    checkpoint: &QuantizedCheckpoint,
    name: &str,
    bits: u8,
    is_awq: bool,
    bias: Option<Tensor>,
) -> candle_core::Result<QuantMethodConfig> {
    let source = checkpoint.source();
    let tensor = |part: &str| -> candle_core::Result<Option<Tensor>> {
        let name = format!("{name}.{part}");
        let Some(info) = source.info(&name) else { return Ok(None) };
        let shape = info.shape.clone();
        let tensor = match info.dtype {
            Dtype::I32 => {
                let bytes = source.read(&name).map_err(candle_core::Error::wrap)?;
                let words =
                    bytes.chunks_exact(4).map(|word| i32::from_le_bytes(word.try_into().expect("4 bytes")));
                Tensor::from_vec(words.collect::<Vec<_>>(), shape, &Device::Cpu)?
            }
            _ => {
                let values = source.read_f32(&name).map_err(candle_core::Error::wrap)?;
                Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(DType::F16)?
            }
        };
        Ok(Some(tensor))
    };
    let require = |part: &str| tensor(part)?.ok_or_else(|| candle_core::Error::msg(format!("no {part}")));
    Ok(QuantMethodConfig::GptqAwq {
        bits: bits.into(),
        use_exllama: false,
        q_weight: require("qweight")?,
        qzeros: tensor("qzeros")?,
        scales: require("scales")?,
        g_idx: tensor("g_idx")?,
        bias: bias.map_or_else(|| tensor("bias"), |bias| Ok(Some(bias)))?,
        workspace: None,
        is_marlin: false,
        is_awq,
    })
}

fn check(checkpoint: &QuantizedCheckpoint, method: &str, name: &str) -> Result<f32, Box<dyn Error>> {
    let packed: Arc<dyn QuantMethod> = Arc::new(PackedLayer::read(checkpoint, name)?);
    let weight = checkpoint.read(name)?;
    let [n, k] = weight.shape;
    // Independent of the packed layout: the weights as the reader unpacks them.
    let exact_weight = Tensor::from_vec(weight.dequantize()?, (n, k), &Device::Cpu)?;
    if difference(&packed.dequantize_w()?, &exact_weight)? > 1e-6 {
        return Err(format!("{name}: dequantize_w differs").into());
    }
    let bias = checkpoint.bias(name)?.map(|bias| Tensor::new(bias, &Device::Cpu)).transpose()?;
    let layer =
        |weight: Tensor, bias| UnquantLinear::new(QuantMethodConfig::Unquantized(Linear::new(weight, bias)));
    let sizes = layer(exact_weight.abs()?, bias.as_ref().map(Tensor::abs).transpose()?)?;
    let exact = layer(exact_weight.clone(), bias)?;
    let mut worst = 0.0_f32;
    for tokens in [1, 7] {
        let x: Vec<f32> = (0..tokens * k).map(|i| (37 * i % 61) as f32 / 32.0 - 0.9).collect();
        let input = Tensor::from_slice(&x, (1, tokens, k), &Device::Cpu)?;
        let mut rounded = x;
        if let Some(grid) = weight.input_grid()? {
            grid.round(&mut rounded, k);
        }
        let rounded = Tensor::from_vec(rounded, (1, tokens, k), &Device::Cpu)?;
        let expected = exact.forward(&rounded)?;
        let share = share_of_bound(&packed.forward(&input)?, &expected, &sizes.forward(&rounded.abs()?)?, k)?;
        if !(share <= 1.0) {
            return Err(format!("{name}: the error is {share} times its bound").into());
        }
        worst = worst.max(share);
        // As the engine calls it: activations in BF16.
        let half = packed.forward_autocast(&input.to_dtype(DType::BF16)?)?;
        let is_float = weight.input_grid()?.is_none_or(|grid| !matches!(grid, InputGrid::Token));
        let coarse = difference(&half, &expected)?;
        if half.dtype() != DType::BF16 || (is_float && coarse > 0.02) {
            return Err(format!("{name}: {coarse} with BF16 activations").into());
        }
        if ["awq", "gptq"].contains(&method) {
            let config = of_engine(checkpoint, name, weight.scheme.bits(), method == "awq", None)?;
            let same = difference(&PackedLayer::new(config)?.forward(&input)?, &packed.forward(&input)?)?;
            if same != 0.0 {
                return Err(format!("{name}: differs by {same} if loaded from the engine's tensors").into());
            }
            // With a bias too, which the checkpoint may not have.
            let bias: Vec<f32> = (0..n).map(|i| (41 * i % 67) as f32 / 16.0 - 2.0).collect();
            let bias = Tensor::from_vec(bias, n, &Device::Cpu)?;
            let half = Some(bias.to_dtype(DType::F16)?);
            let config = of_engine(checkpoint, name, weight.scheme.bits(), method == "awq", half)?;
            let (exact, sizes) = (
                layer(exact_weight.clone(), Some(bias.clone()))?,
                layer(exact_weight.abs()?, Some(bias.abs()?))?,
            );
            let got = PackedLayer::new(config)?.forward(&input)?;
            let share = share_of_bound(&got, &exact.forward(&rounded)?, &sizes.forward(&rounded.abs()?)?, k)?;
            if !(share <= 1.0) {
                return Err(format!("{name}: with a bias, the error is {share} times its bound").into());
            }
        }
    }
    // LoRA and requantization go through floats.
    let delta = exact_weight.affine(0.5, 0.0)?;
    let sum = packed.add_delta_w(&delta)?.dequantize_w()?;
    if difference(&sum, &(exact_weight.clone() * 1.5)?)? > 1e-6 {
        return Err(format!("{name}: add_delta_w differs").into());
    }
    let count = AtomicUsize::new(0);
    let isq = packed.apply_isq(Some(IsqType::Q8_0), Device::Cpu, &count, None, QuantizeOntoGuard::new())?;
    if difference(&isq.dequantize_w()?, &exact_weight)? > 0.01 {
        return Err(format!("{name}: apply_isq differs").into());
    }
    Ok(worst)
}

fn main() -> Result<(), Box<dyn Error>> {
    for path in std::env::args_os().skip(1) {
        let checkpoint = QuantizedCheckpoint::open(Path::new(&path))?;
        let settings = checkpoint.config().get("quantization_config");
        let method = settings.and_then(|settings| settings["quant_method"].as_str()).unwrap_or_default();
        let mut worst = 0.0_f32;
        for linear in checkpoint.linears() {
            worst = worst.max(check(&checkpoint, method, &linear.name)?);
        }
        println!("{method}: {} linears, errors up to {worst:.2} of their bound", checkpoint.linears().len());
    }
    Ok(())
}
