//! Reads quantized checkpoints and multiplies each of their linears by a row.

use std::path::Path;

use quant_formats::Result;
use quant_formats::format::QuantizedCheckpoint;
use quant_kernels_cpu::{FloatRows, KernelError, RowLayout, Serial};

/// `W · x + b`, where `x[i]` is `(37 i mod 61) / 32 − 1`.
fn outputs(checkpoint: &QuantizedCheckpoint, name: &str) -> Result<Vec<f32>> {
    let bias = checkpoint.bias(name)?;
    let mut weight = checkpoint.read(name)?;
    let mut x: Vec<f32> = (0..weight.shape[1]).map(|i| (37 * i % 61) as f32 / 32.0 - 1.0).collect();
    if let Some(order) = weight.take_input_order() {
        x = order.iter().map(|&input| x[input as usize]).collect();
    }
    let packed = weight.pack(bias.as_deref(), &Serial)?;
    let mut out = vec![0.0; packed.layout().n()];
    let mut rows = FloatRows::default();
    let multiplied: std::result::Result<(), KernelError> = rows
        .pack(&x, RowLayout::of(packed.layout()), &Serial)
        .and_then(|()| packed.multiply_float(&rows, &mut out, &Serial));
    multiplied.expect("lengths match the layout");
    Ok(out)
}

fn run(path: &Path) -> Result<()> {
    let checkpoint = QuantizedCheckpoint::open(path)?;
    for linear in checkpoint.linears() {
        let outputs = outputs(&checkpoint, &linear.name)?.into_iter().map(|out| format!("{out:e}"));
        println!(
            "{} {} {:?}: {}",
            linear.name,
            linear.scheme,
            linear.shape,
            outputs.collect::<Vec<_>>().join(" ")
        );
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
