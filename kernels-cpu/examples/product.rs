//! A linear layer in an engine: its weights are packed once and multiplied by the rows of each step, with integer and
//! with float activations.
//!
//! ```text
//! cargo run --release -p quant-kernels-cpu --example product
//! ```
use std::error::Error;

use quant_kernels_cpu::{FloatRows, Int8Rows, Isa, PackedLinear, RowLayout, Serial, WeightView};

fn main() -> Result<(), Box<dyn Error>> {
    let [n, k, group] = [256, 512, 128];
    let codes: Vec<u8> = (0..n * k).map(|i| (i * i % 13) as u8).collect();
    let scales: Vec<f32> = (0..n * k / group).map(|i| 0.01 + (i % 5) as f32 * 0.001).collect();
    let view = WeightView::new([n, k], 4, group, &codes, &scales, None)?;
    let weight = PackedLinear::pack(&view, None, false, &Serial)?;
    println!("{} bytes on {}", weight.layout().bytes(), Isa::detect().name());

    // Two tokens.
    let x: Vec<f32> = (0..2 * k).map(|i| (i % 9) as f32 * 0.25 - 0.5).collect();
    let layout = RowLayout::of(weight.layout());
    let (mut integers, mut floats) = (Int8Rows::default(), FloatRows::default());
    let (mut w4a8, mut w4a16) = (vec![0.0; 2 * n], vec![0.0; 2 * n]);
    integers.quantize(&x, layout, &Serial)?;
    weight.multiply(&integers, &mut w4a8, &Serial)?;
    floats.pack(&x, layout, &Serial)?;
    weight.multiply_float(&floats, &mut w4a16, &Serial)?;
    println!("w4a8 {:?}\nw4a16 {:?}", &w4a8[..4], &w4a16[..4]);
    Ok(())
}
