//! The kernels of quant.

use anyhow::{Context, Result};
use quant_formats::blocks::block_type;
use quant_kernels_cpu::limits::{dot_limit, read_limit};
use quant_kernels_cpu::{
    FloatFormat, FloatRows, Int8Rows, IsaToken, PackedLinear, Rayon, RowLayout, Scales, WeightView,
};
use serde_json::{Value, json};

use crate::Case;
use crate::data::{BASE, repeated, weights};

/// A weight scheme, and the form of the activations.
#[derive(Debug, Clone, Copy)]
pub struct Contestant {
    pub name: &'static str,
    codes: Codes,
    group_size: Option<usize>,
    rows: Rows,
}

/// The type of the weight codes.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Codes {
    /// Integers with this number of bits.
    Int(u8),
    /// E2M1 with E8M0 scales, which are powers of two.
    Mxfp4,
    /// E2M1 with E4M3 scales and a global scale.
    Nvfp4,
    /// Blocks of a GGUF type, encoded as in llama.cpp.
    Blocks(&'static str),
}

/// The form of the activations.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Rows {
    /// Quantized in every product.
    Int8,
    /// Quantized beforehand, as when several linear layers read the same input. No peer is measured this way.
    Int8Ready,
    /// As floats.
    Float,
}

pub const CONTESTANTS: [Contestant; 12] = [
    Contestant { name: "w4a8-g128", codes: Codes::Int(4), group_size: Some(128), rows: Rows::Int8 },
    Contestant {
        name: "w4a8-g128-ready",
        codes: Codes::Int(4),
        group_size: Some(128),
        rows: Rows::Int8Ready,
    },
    Contestant { name: "w4a8-g32", codes: Codes::Int(4), group_size: Some(32), rows: Rows::Int8 },
    Contestant { name: "w8a8-channel", codes: Codes::Int(8), group_size: None, rows: Rows::Int8 },
    Contestant { name: "w4a16-g128", codes: Codes::Int(4), group_size: Some(128), rows: Rows::Float },
    Contestant { name: "wf4a8-g32-mx", codes: Codes::Mxfp4, group_size: Some(32), rows: Rows::Int8 },
    Contestant { name: "wf4a8-g16-nv", codes: Codes::Nvfp4, group_size: Some(16), rows: Rows::Int8 },
    blocks("q4_k"),
    blocks("q5_k"),
    blocks("q6_k"),
    blocks("iq4_xs"),
    blocks("iq4_nl"),
];

const fn blocks(name: &'static str) -> Contestant {
    Contestant { name, codes: Codes::Blocks(name), group_size: None, rows: Rows::Int8 }
}

pub fn version() -> String {
    format!("{}, {}", env!("CARGO_PKG_VERSION"), IsaToken::detect().isa().name())
}

/// Quantizes weights `[n, k]` so that each group's largest magnitude is at the end of the symmetric grid, up to the
/// rounding of scales to bf16.
pub fn pack([n, k]: [usize; 2], bits: u8, group_size: usize) -> Result<PackedLinear> {
    let base = weights(k);
    let half = 1 << (bits - 1);
    let (mut codes, mut scales) = (Vec::with_capacity(BASE * k), Vec::new());
    for group in base.chunks_exact(group_size) {
        let largest = group.iter().fold(0.0_f32, |a, b| a.max(b.abs()));
        // Round the scale up to bf16, in which checkpoints store it.
        let scale = (largest / (half - 1) as f32).to_bits();
        let scale = f32::from_bits(scale.saturating_add(0xffff) & 0xffff_0000);
        let code = |w: &f32| ((w / scale).round() as i32).clamp(-half, half - 1) + half;
        codes.extend(group.iter().map(|w| code(w) as u8));
        scales.push(scale);
    }
    let (codes, scales) = (repeated(&codes, n), repeated(&scales, n));
    let view = WeightView::new([n, k], bits, group_size, &codes, &scales, None)?;
    Ok(PackedLinear::pack(&view, None, false, &Rayon)?)
}

/// Quantizes weights `[n, k]` to E2M1 codes. The largest magnitude of each group, divided by the scale, is 6 up to the
/// rounding of E4M3 scales for NVFP4, and from 3.5 to 7 for MXFP4, whose scales are powers of two.
fn pack_fp4([n, k]: [usize; 2], codes: Codes, group_size: usize) -> Result<PackedLinear> {
    let (base, format) = (weights(k), FloatFormat::E2m1);
    let largest = |values: &[f32]| values.iter().fold(0.0_f32, |a, b| a.max(b.abs()));
    // The global scale of NVFP4, computed as in its checkpoints; MXFP4 has none.
    let global = FloatFormat::E4m3.largest() * format.largest() / largest(&base);
    let (mut all, mut groups, mut scales) = (Vec::with_capacity(BASE * k), Vec::new(), Vec::new());
    for group in base.chunks_exact(group_size) {
        let scale = match codes {
            Codes::Nvfp4 => {
                groups.push(FloatFormat::E4m3.code(global * largest(group) / format.largest()));
                FloatFormat::E4m3.value(groups[groups.len() - 1]) / global
            }
            _ => {
                // The exponent is that of the largest magnitude minus two, plus one if its mantissa is at least 1.75.
                let rounded = largest(group).to_bits() + (1 << 21);
                f32::from_bits((rounded & 0x7f80_0000) - (2 << 23))
            }
        };
        all.extend(group.iter().map(|w| format.code(w / scale)));
        scales.push(scale);
    }
    let (all, groups, scales) = (repeated(&all, n), repeated(&groups, n), repeated(&scales, n));
    let scales = match codes {
        Codes::Nvfp4 => Scales::E4m3 { groups: &groups, global },
        _ => Scales::Float(&scales),
    };
    let view = WeightView::float_with_scales([n, k], format, group_size, &all, scales)?;
    Ok(PackedLinear::pack(&view, None, false, &Rayon)?)
}

/// Encodes weights `[n, k]` as blocks of a GGUF type.
fn pack_blocks([n, k]: [usize; 2], name: &str) -> Result<PackedLinear> {
    let kind = block_type(name).context("no such type")?;
    let row_bytes = kind.row_bytes(k).context("rows are not whole blocks")?;
    let mut bytes = vec![0; BASE * row_bytes];
    for (row, out) in weights(k).chunks_exact(k).zip(bytes.chunks_exact_mut(row_bytes)) {
        kind.encode(row, None, out);
    }
    let pack = |view: &WeightView<'_>| PackedLinear::pack(view, None, false, &Rayon);
    let packed = kind.with_view([n, k], &repeated(&bytes, n), pack)?;
    Ok(packed.context("no kernel for this type")??)
}

/// The weights of a contestant.
pub struct Linear {
    rows: Rows,
    copies: Vec<PackedLinear>,
    x: Vec<f32>,
    whole: Int8Rows,
    floats: FloatRows,
    out: Vec<f32>,
}

impl Linear {
    pub fn new(name: &str, [n, k]: [usize; 2], rotate: usize) -> Result<Self> {
        let found = CONTESTANTS.iter().find(|c| c.name == name);
        let contestant = found.with_context(|| format!("unknown contestant {name}"))?;
        let group_size = contestant.group_size.unwrap_or(k);
        let packed = match contestant.codes {
            Codes::Int(bits) => pack([n, k], bits, group_size)?,
            Codes::Blocks(name) => pack_blocks([n, k], name)?,
            codes => pack_fp4([n, k], codes, group_size)?,
        };
        let copies = rotate.div_ceil(packed.layout().bytes()).max(1);
        Ok(Self {
            rows: contestant.rows,
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
        format!("{:.3} bits per weight", self.copies[0].layout().bits_per_weight())
    }

    fn tokens(&mut self, x: &[f32], m: usize) -> Result<()> {
        self.x = x.to_vec();
        self.out = vec![0.0; m * self.copies[0].layout().n()];
        self.whole.quantize(x, RowLayout::of(self.copies[0].layout()), &Rayon)?;
        Ok(())
    }

    fn pass(&mut self, copies: usize) -> Result<()> {
        for weights in &self.copies[..copies] {
            let rows = RowLayout::of(weights.layout());
            match self.rows {
                Rows::Int8 => self.whole.quantize(&self.x, rows, &Rayon)?,
                Rows::Int8Ready => {}
                Rows::Float => self.floats.pack(&self.x, rows, &Rayon)?,
            }
            match self.rows {
                Rows::Float => weights.multiply_float(&self.floats, &mut self.out, &Rayon)?,
                _ => weights.multiply(&self.whole, &mut self.out, &Rayon)?,
            }
        }
        Ok(())
    }

    fn out(&self) -> Result<Vec<f32>> {
        Ok(self.out.clone())
    }
}

/// Measures the limits of the machine.
pub struct Limits {
    memory: Vec<u64>,
}

impl Limits {
    /// Allocates 256 MiB, so that most reads come from main memory instead of a cache.
    pub fn new() -> Self {
        Self { memory: vec![1; 32 << 20] }
    }

    /// Returns the best read bandwidth of all numbers of streams, and the best rate of several measurements of dot
    /// products in registers.
    pub fn probe(&self) -> Value {
        let token = IsaToken::detect();
        let memory = read_limit(token, &self.memory, 1, &Rayon);
        let tops = dot_limit(token, 2, &Rayon) / 1e12;
        json!({"memory": memory.bytes_per_second / 1e9, "streams": memory.streams, "tops": tops})
    }
}
