//! Our kernels.

use anyhow::{Context, Result};
use quant_kernels_cpu::limits::{dot_limit, read_limit};
use quant_kernels_cpu::{FloatRows, Int8Rows, IsaToken, PackedLinear, Rayon, RowLayout, WeightView};
use serde_json::{Value, json};

use crate::Case;
use crate::data::{BASE, repeated, weights};

/// A scheme of weights, and whether activations are whole numbers.
#[derive(Debug, Clone, Copy)]
pub struct Contestant {
    pub name: &'static str,
    bits: u8,
    group_size: Option<usize>,
    int8: bool,
}

pub const CONTESTANTS: [Contestant; 4] = [
    Contestant { name: "w4a8-g128", bits: 4, group_size: Some(128), int8: true },
    Contestant { name: "w4a8-g32", bits: 4, group_size: Some(32), int8: true },
    Contestant { name: "w8a8-channel", bits: 8, group_size: None, int8: true },
    Contestant { name: "w4a16-g128", bits: 4, group_size: Some(128), int8: false },
];

pub fn version() -> String {
    format!("{}, {}", env!("CARGO_PKG_VERSION"), IsaToken::detect().isa().name())
}

/// A contestant's weights.
pub struct Linear {
    int8: bool,
    copies: Vec<PackedLinear>,
    x: Vec<f32>,
    whole: Int8Rows,
    floats: FloatRows,
    out: Vec<f32>,
}

impl Linear {
    pub fn new(name: &str, [n, k]: [usize; 2], rotate: usize) -> Result<Self> {
        let found = CONTESTANTS.iter().find(|c| c.name == name);
        let contestant = found.with_context(|| format!("{name} is none of ours"))?;
        let group_size = contestant.group_size.unwrap_or(k);
        let base = weights(k);
        let half = 1 << (contestant.bits - 1);
        let (mut codes, mut scales) = (Vec::with_capacity(BASE * k), Vec::new());
        for group in base.chunks_exact(group_size) {
            let largest = group.iter().fold(0.0_f32, |a, b| a.max(b.abs()));
            // As a checkpoint stores it.
            let scale = (largest / (half - 1) as f32 * 1024.0).ceil() / 1024.0;
            let scale = if contestant.bits == 8 { largest / (half - 1) as f32 } else { scale };
            let code = |w: &f32| ((w / scale).round() as i32).clamp(-half, half - 1) + half;
            codes.extend(group.iter().map(|w| code(w) as u8));
            scales.push(scale);
        }
        let (codes, scales) = (repeated(&codes, n), repeated(&scales, n));
        let view = WeightView::new([n, k], contestant.bits, group_size, &codes, &scales, None)?;
        let packed = PackedLinear::pack(&view, None, false, &Rayon)?;
        let copies = rotate.div_ceil(packed.layout().bytes()).max(1);
        Ok(Self {
            int8: contestant.int8,
            copies: vec![packed; copies],
            x: Vec::new(),
            whole: Int8Rows::default(),
            floats: FloatRows::new(IsaToken::detect()),
            out: Vec::new(),
        })
    }
}

impl Case for Linear {
    fn bytes(&self) -> usize {
        self.copies[0].layout().bytes()
    }

    fn copies(&self) -> usize {
        self.copies.len()
    }

    fn note(&self) -> String {
        format!("{:.3} bits a weight", self.copies[0].layout().bits_per_weight())
    }

    fn tokens(&mut self, x: &[f32], m: usize) -> Result<()> {
        self.x = x.to_vec();
        self.out = vec![0.0; m * self.copies[0].layout().n()];
        Ok(())
    }

    fn pass(&mut self, copies: usize) -> Result<()> {
        for weights in &self.copies[..copies] {
            let rows = RowLayout::of(weights.layout());
            if self.int8 {
                self.whole.quantize(&self.x, rows, &Rayon)?;
                weights.multiply(&self.whole, &mut self.out, &Rayon)?;
            } else {
                self.floats.pack(&self.x, rows, &Rayon)?;
                weights.multiply_float(&self.floats, &mut self.out, &Rayon)?;
            }
        }
        Ok(())
    }

    fn out(&self) -> Result<Vec<f32>> {
        Ok(self.out.clone())
    }
}

/// What the machine gives, between the rounds.
pub struct Limits {
    memory: Vec<u64>,
}

impl Limits {
    /// More memory than any last cache holds.
    pub fn new() -> Self {
        Self { memory: vec![1; 32 << 20] }
    }

    /// The best of all patterns of reading, and of several looks at dot products in registers.
    pub fn look(&self) -> Value {
        let token = IsaToken::detect();
        let memory = read_limit(token, &self.memory, 1, &Rayon);
        let tops = dot_limit(token, 2, &Rayon) / 1e12;
        json!({"memory": memory.bytes_per_second / 1e9, "streams": memory.streams, "tops": tops})
    }
}
