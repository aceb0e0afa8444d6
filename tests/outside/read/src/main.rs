//! Reads quantized checkpoints and multiplies each of their linears by a row of ones.

use std::path::Path;

use quant_formats::Result;
use quant_formats::format::QuantizedCheckpoint;
use quant_kernels_cpu::{FloatRows, IsaToken, KernelError, RowLayout, Serial};

/// The first element of `W · 1 + b`.
fn first_output(checkpoint: &QuantizedCheckpoint, name: &str) -> Result<f32> {
    let bias = checkpoint.bias(name)?;
    let packed = checkpoint.read(name)?.pack(bias.as_deref(), &Serial)?;
    let ones = vec![1.0_f32; packed.layout().k()];
    let mut out = vec![0.0; packed.layout().n()];
    let mut rows = FloatRows::new(IsaToken::detect());
    let multiplied: std::result::Result<(), KernelError> = rows
        .pack(&ones, RowLayout::of(packed.layout()), &Serial)
        .and_then(|()| packed.multiply_float(&rows, &mut out, &Serial));
    multiplied.expect("lengths match the layout");
    Ok(out[0])
}

fn run(path: &Path) -> Result<()> {
    let checkpoint = QuantizedCheckpoint::open(path)?;
    for linear in checkpoint.linears() {
        let first = first_output(&checkpoint, &linear.name)?;
        println!("{} {} {:?}: {first:.9e}", linear.name, linear.scheme, linear.shape);
    }
    Ok(())
}

fn main() {
    for path in std::env::args_os().skip(1) {
        if let Err(error) = run(Path::new(&path)) {
            eprintln!("{error}\n{}", error.remedy());
            std::process::exit(error.category().exit_code().into());
        }
    }
}
