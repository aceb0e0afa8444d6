//! Runs a linear layer on the first NVIDIA GPU. Without a GPU, prints what is missing.
//!
//! ```text
//! cargo run --release -p quant-kernels-cuda --example linear
//! ```
use std::error::Error;
use std::sync::Arc;

use quant_kernels_cpu::WeightView;
use quant_kernels_cuda::standalone::{Activations, CudaLinear, Launcher};

fn main() -> Result<(), Box<dyn Error>> {
    if let Err(missing) = quant_kernels_cuda::require_device() {
        println!("{missing}");
        return Ok(());
    }
    let [n, k, group] = [256, 512, 128];
    let codes: Vec<u8> = (0..n * k).map(|i| (i * 7 % 16) as u8).collect();
    let scales: Vec<f32> = (0..n * k / group).map(|i| 0.01 + (i % 5) as f32 * 0.001).collect();
    let view = WeightView::new([n, k], 4, group, &codes, &scales, None)?;

    let launcher = Arc::new(Launcher::new()?); // one for all linears
    let linear = CudaLinear::new(&view, Activations::Float, &launcher)?;
    let mut out = vec![0.0; 2 * n];
    linear.multiply(&vec![0.5; 2 * k], &mut out)?;
    println!("{} bytes on {}: {:?}", linear.bytes(), launcher.device(), &out[..4]);
    Ok(())
}
