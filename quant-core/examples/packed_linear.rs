//! From a checkpoint on disk to a product of the kernels: what an engine does for each linear.
//!
//! ```text
//! cargo run --release -p quant-core --example packed_linear -- OUT model.layers.0.mlp.down_proj 256 768
//! ```
//!
//! `OUT` is a checkpoint of any of our formats, the name a linear's, the numbers its output and input features.

use std::error::Error;
use std::path::Path;

use quant_core::checkpoint::ModelDirectory;
use quant_core::format::{self, PackedWeight};
use quant_kernels_cpu::{FloatRows, IsaToken, PackedLinear, RowLayout, Serial};

/// Reads the linear `module`, `[n, k]`, and packs it for the kernels.
pub fn load(checkpoint: &Path, module: &str, shape: [usize; 2]) -> Result<PackedLinear, Box<dyn Error>> {
    let directory = ModelDirectory::open(checkpoint)?;
    let config = directory.config().get("quantization_config").ok_or("the checkpoint is not quantized")?;
    let source = directory.source().as_ref();
    let mut reader = format::reader(config)?;
    reader.survey(source)?;
    let scheme = reader.scheme(module).ok_or("this linear is stored float, or does not exist")?;
    let weight = reader.read(source, PackedWeight { module, shape, scheme })?;
    Ok(PackedLinear::pack(&weight.view()?, None, false, &Serial)?)
}

/// `x · Wᵀ`: `x` is `[m, k]`, the result `[m, n]`, both row-major.
pub fn multiply(linear: &PackedLinear, x: &[f32]) -> Result<Vec<f32>, Box<dyn Error>> {
    let layout = linear.layout();
    let (n, k) = (layout.n(), layout.k());
    let mut rows = FloatRows::new(IsaToken::detect());
    rows.pack(x, RowLayout::of(layout), &Serial)?;
    let mut out = vec![0.0; x.len() / k * n];
    linear.multiply_float(&rows, &mut out, &Serial)?;
    Ok(out)
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [checkpoint, module, n, k] = &arguments[..] else {
        return Err("give a checkpoint, the name of a linear, and its output and input features".into());
    };
    let shape = [n.parse()?, k.parse()?];
    let linear = load(Path::new(checkpoint), module, shape)?;
    let out = multiply(&linear, &vec![1.0; shape[1]])?;
    println!(
        "{} bytes packed; the sums of the first rows are {:?}",
        linear.layout().bytes(),
        &out[..out.len().min(4)]
    );
    Ok(())
}
