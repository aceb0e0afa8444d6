//! Runs a linear from a checkpoint on disk: the steps that an engine takes for each linear.
//!
//! ```text
//! cargo run --release -p quant-formats --example packed_linear -- OUT model.layers.0.mlp.down_proj
//! ```
use std::error::Error;
use std::path::Path;

use quant_formats::format::QuantizedCheckpoint;
use quant_kernels_cpu::{FloatRows, PackedLinear, RowLayout, Serial};

/// Reads the linear `module`, with its bias, and packs it for the kernels.
pub fn load(checkpoint: &Path, module: &str) -> Result<PackedLinear, Box<dyn Error>> {
    let checkpoint = QuantizedCheckpoint::open(checkpoint)?;
    let bias = checkpoint.bias(module)?;
    Ok(checkpoint.read(module)?.pack(bias.as_deref(), &Serial)?)
}

/// `x · Wᵀ + b`: `x` is `[m, k]`, the result `[m, n]`, both row-major.
pub fn multiply(linear: &PackedLinear, x: &[f32]) -> Result<Vec<f32>, Box<dyn Error>> {
    let (n, k) = (linear.layout().n(), linear.layout().k());
    let mut rows = FloatRows::default();
    rows.pack(x, RowLayout::of(linear.layout()), &Serial)?;
    let mut out = vec![0.0; x.len() / k * n];
    linear.multiply_float(&rows, &mut out, &Serial)?;
    Ok(out)
}

fn main() -> Result<(), Box<dyn Error>> {
    let [checkpoint, module] = [1, 2].map(|i| std::env::args().nth(i).expect("CHECKPOINT LINEAR"));
    let linear = load(Path::new(&checkpoint), &module)?;
    let out = multiply(&linear, &vec![1.0; linear.layout().k()])?;
    println!(
        "{} bytes packed; the first rows sum to {:?}",
        linear.layout().bytes(),
        &out[..out.len().min(4)]
    );
    Ok(())
}
