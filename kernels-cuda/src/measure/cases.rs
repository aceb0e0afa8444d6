//! The measured cases: kernels on shapes of Llama 3 8B and 70B, and of the experts of Qwen3-30B-A3B.

use quant_kernels_cpu::attention::KvType;
use quant_kernels_cpu::{FloatFormat, KernelError, ScaleType};

use super::{Ceilings, experts};
use crate::activation::{ActivationArguments, ActivationShape, Float, RowSource};
use crate::attention::{self, AppendArguments, AppendShape, DecodeArguments, DecodeShape, KvPageLayout};
use crate::compile::Variant;
use crate::launch::{Argument, LaunchShape, Region};
use crate::layout::{Order, WeightLayout};
use crate::linear::{InputType, LinearArguments, LinearPlan, Output, PlanLimits};

/// The type of the products, which determines the rate that they are compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Product {
    None,
    F16,
    Int8,
}

/// What determines the minimum time of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bound {
    /// Memory traffic.
    Bytes,
    /// Products on tensor cores.
    Products,
}

/// A planned launch, whose memory is not yet allocated.
pub struct Case {
    /// The scheme or the operation.
    pub name: String,
    /// `n x k` for weights, `k` for rows, `sequences x tokens` or `heads x features` for caches.
    pub shape: String,
    /// Number of tokens.
    pub tokens: usize,
    /// The number of bytes that are read or written, each counted once.
    pub bytes: usize,
    /// Operations; a multiplication and an addition count as two.
    pub operations: f64,
    pub(super) product: Product,
    pub(super) variant: Variant,
    pub(super) launch: LaunchShape,
    pub(super) buffers: Vec<Buffer>,
    pub(super) arguments: Box<Arguments>,
}

pub(super) type Arguments = dyn Fn(&[u64]) -> Result<Vec<Argument>, KernelError>;

#[derive(Debug, Clone)]
pub(super) struct Buffer {
    pub(super) bytes: usize,
    pub(super) fill: Fill,
    /// Whether successive launches use different copies, which are not in the L2 cache.
    pub(super) turns: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fill {
    Zeros,
    Random,
    /// f16 values of either sign with magnitudes below 2⁻⁷, for pages, whose f16 grids must be finite.
    SmallFloats,
    /// f16 values of either sign with magnitudes from a quarter to two.
    Floats,
    /// 0, 1, 2, … as u32.
    Counted,
    /// The same u32 repeated.
    Words(u32),
    /// These numbers.
    Numbers(Vec<u32>),
    /// The descriptors of experts whose weights have this layout, one after another in the first buffer.
    Descriptors(WeightLayout),
}

impl Case {
    /// The minimum time in seconds on a device with these ceilings, and what determines it.
    pub fn floor(&self, ceilings: &Ceilings) -> (f64, Bound) {
        // Kernels without products write about as much as they read.
        let (bandwidth, rate) = match self.product {
            Product::None => (ceilings.copy, f64::INFINITY),
            Product::F16 => (ceilings.read, ceilings.f16),
            Product::Int8 => (ceilings.read, ceilings.int8),
        };
        let (bytes, products) = (self.bytes as f64 / bandwidth, self.operations / rate);
        if bytes >= products { (bytes, Bound::Bytes) } else { (products, Bound::Products) }
    }

    pub(super) fn arguments(&self, at: &[u64]) -> Result<Vec<Argument>, KernelError> {
        (self.arguments)(at)
    }
}

pub(super) fn region(address: u64, bytes: usize) -> Region {
    Region { address, bytes: bytes as u64 }
}

const LINEARS: [[usize; 2]; 5] = [[6144, 4096], [8192, 8192], [28_672, 4096], [4096, 14_336], [57_344, 8192]];
const TOKENS: [usize; 8] = [1, 8, 16, 32, 64, 256, 1024, 4096];

/// Returns all cases, planned for this device.
///
/// # Errors
/// When planning one of them fails.
pub fn cases(device: &PlanLimits) -> Result<Vec<Case>, KernelError> {
    let mut cases = Vec::new();
    for m in [1, 64, 4096] {
        for k in [4096, 8192, 14_336] {
            let norm = RowSource::RmsNorm { weight: Float::F16, residual: true };
            for rows in [norm, RowSource::SiluMul, RowSource::Plain] {
                cases.push(activation(rows, m, k)?);
            }
        }
    }
    for [n, k] in LINEARS {
        let schemes = [
            ("w4a16_g128", 4, 128, ScaleType::F16, Some(8), InputType::F16),
            ("w4a16_g128_asym", 4, 128, ScaleType::F16, None, InputType::F16),
            ("w8a8_channel", 8, k, ScaleType::F32, Some(128), InputType::Int8 { zero: false }),
            ("w4a8_channel", 4, k, ScaleType::F32, Some(8), InputType::Int8 { zero: false }),
            ("w4a8_g128_progressive", 4, 128, ScaleType::Progressive, None, InputType::Int8 { zero: false }),
        ];
        for (name, bits, group, scale, zero_point, input) in schemes {
            let order = if input == InputType::F16 { Order::Float } else { Order::Int8 };
            let layout = WeightLayout::from_parts([n, k], bits, group, scale, zero_point, order, false)?;
            for m in TOKENS {
                cases.push(linear(name, layout, input, m, device)?);
            }
        }
        for (name, format, group, scale) in [
            ("wf4a16_g16_nv", FloatFormat::E2m1, 16, ScaleType::E4m3),
            ("wf4a16_g32_mx", FloatFormat::E2m1, 32, ScaleType::E8m0),
            ("wf8a16_channel", FloatFormat::E4m3, k, ScaleType::F32),
        ] {
            let layout = WeightLayout::from_float_parts([n, k], format, group, scale)?;
            for m in TOKENS {
                cases.push(linear(name, layout, InputType::F16, m, device)?);
            }
        }
    }
    cases.extend(experts::cases(device)?);
    for kind in [KvType::Kv4, KvType::Kv8, KvType::F16] {
        for (sequences, tokens) in [(1, 65_536), (16, 4096), (64, 1024), (64, 4096), (256, 1024)] {
            cases.push(decode(kind, sequences, tokens)?);
        }
        for tokens in [64, 4096] {
            cases.push(append(kind, tokens)?);
        }
    }
    Ok(cases)
}

fn activation(rows: RowSource, m: usize, k: usize) -> Result<Case, KernelError> {
    let shape = ActivationShape { group: Some(128), ..ActivationShape::new(rows, Float::F16, m, k) };
    let plan = shape.plan()?;
    let (floats, sums) = (m * k * 2, m * k.div_ceil(128) * 4);
    let (name, matrices) = match rows {
        RowSource::Plain => ("quantize", 1),
        RowSource::SiluMul => ("silu_mul_quantize", 2),
        RowSource::RmsNorm { .. } => ("add_rms_norm_quantize", 3),
    };
    let buffer = |bytes, fill, turns| Buffer { bytes, fill, turns };
    let buffers = vec![
        buffer(floats, Fill::Floats, true),
        buffer(if matrices == 2 { floats } else { 0 }, Fill::Floats, true),
        buffer(if matrices == 3 { floats } else { 0 }, Fill::Floats, true),
        buffer(k * 2, Fill::Floats, false),
        buffer(m * k, Fill::Zeros, true),
        buffer(m * 4, Fill::Zeros, true),
        buffer(m * 4, Fill::Zeros, true),
        buffer(sums, Fill::Zeros, true),
    ];
    let sizes: Vec<usize> = buffers.iter().map(|buffer| buffer.bytes).collect();
    let (variant, launch) = (plan.variant.clone(), plan.launch);
    Ok(Case {
        name: name.to_owned(),
        shape: format!("{k}"),
        tokens: m,
        variant,
        launch,
        bytes: matrices * floats + m * k + 8 * m + sums + if matrices == 3 { k * 2 } else { 0 },
        operations: 0.0,
        product: Product::None,
        buffers,
        arguments: Box::new(move |at| {
            let there = |i: usize| if sizes[i] == 0 { Region::NONE } else { region(at[i], sizes[i]) };
            let arguments = ActivationArguments {
                x: there(0),
                up: there(1),
                residual: there(2),
                weight: there(3),
                eps: 1e-5,
                fixed: None,
                codes: there(4),
                scales: there(5),
                row_sums: there(6),
                group_sums: there(7),
                count: Region::NONE,
            };
            plan.arguments(&arguments).map(|arguments| arguments.to_vec())
        }),
    })
}

fn linear(
    name: &str,
    layout: WeightLayout,
    input: InputType,
    m: usize,
    device: &PlanLimits,
) -> Result<Case, KernelError> {
    let (n, k) = (layout.n(), layout.k());
    let plan = LinearPlan::new(&layout, input, Output::F16, m, device)?;
    let is_float = input == InputType::F16;
    let x = m * k * if is_float { 2 } else { 1 };
    let buffer = |bytes, fill, turns| Buffer { bytes, fill, turns };
    let buffers = vec![
        buffer(layout.bytes(), Fill::Random, true),
        buffer(x, if is_float { Fill::Floats } else { Fill::Random }, false),
        buffer(if is_float { 0 } else { m * 4 }, Fill::Words(0x3c00_0000), false),
        buffer(m * n * 2, Fill::Zeros, false),
        buffer(plan.work.workspace_bytes, Fill::Zeros, false),
        buffer(plan.work.ticket_bytes, Fill::Zeros, false),
    ];
    let sizes: Vec<usize> = buffers.iter().map(|buffer| buffer.bytes).collect();
    Ok(Case {
        name: name.to_owned(),
        shape: format!("{n} x {k}"),
        tokens: m,
        variant: plan.work.variant.compiled(),
        launch: plan.work.launch,
        bytes: layout.bytes() + x + m * n * 2 + sizes[2],
        operations: 2.0 * m as f64 * n as f64 * k as f64,
        product: if is_float { Product::F16 } else { Product::Int8 },
        buffers,
        arguments: Box::new(move |at| {
            let there = |i: usize| if sizes[i] == 0 { Region::NONE } else { region(at[i], sizes[i]) };
            let arguments = LinearArguments {
                weight: there(0),
                x: there(1),
                x_stride: k,
                x_scales: there(2),
                x_zero: 0,
                bias: Region::NONE,
                out: there(3),
                out_stride: n,
                tickets: there(5),
                workspace: there(4),
            };
            plan.arguments(&arguments).map(|arguments| arguments.to_vec())
        }),
    })
}

/// As in Llama 3 8B: 32 query heads of 128 features on 8 key-value heads.
const HEADS: [usize; 3] = [32, 8, 128];
const PAGE: usize = 64;

fn kind_name(kind: KvType) -> &'static str {
    match kind {
        KvType::Kv4 => "kv4",
        KvType::Kv8 => "kv8",
        _ => "kv16",
    }
}

fn decode(kind: KvType, sequences: usize, tokens: usize) -> Result<Case, KernelError> {
    let [query_heads, kv_heads, head_dim] = HEADS;
    let layout = KvPageLayout::new(kind, head_dim, PAGE)?;
    let plan = DecodeShape {
        layout,
        query_heads,
        kv_heads,
        sequences,
        queries: 1,
        max_tokens: tokens,
        query: attention::Float::F16,
        out: attention::Float::F16,
    }
    .plan()?;
    let pages_of = tokens.div_ceil(PAGE);
    let head = layout.page_bytes();
    let pages = sequences * pages_of * kv_heads * head;
    let row = query_heads * head_dim;
    let buffer = |bytes, fill, turns| Buffer { bytes, fill, turns };
    // As grids, random bytes could be NaN, or let scores grow so that the kernel rescales often.
    let buffers = vec![
        buffer(sequences * row * 2, Fill::Floats, false),
        buffer(pages, Fill::SmallFloats, true),
        buffer(sequences * pages_of * 4, Fill::Counted, false),
        buffer(sequences * 4, Fill::Words(tokens as u32), false),
        buffer(sequences * row * 2, Fill::Zeros, false),
        buffer(plan.workspace(), Fill::Zeros, false),
        buffer(plan.tickets(), Fill::Zeros, false),
    ];
    let (variant, launch) = (plan.variant.clone(), plan.launch);
    Ok(Case {
        name: format!("attention_decode_{}", kind_name(kind)),
        shape: format!("{sequences} x {tokens}"),
        tokens: sequences,
        variant,
        launch,
        bytes: pages + 2 * sequences * row * 2,
        operations: 4.0 * (sequences * tokens * row) as f64,
        product: Product::F16,
        buffers,
        arguments: Box::new(move |at| {
            let arguments = DecodeArguments {
                query: at[0],
                query_stride: row as u64,
                pages: at[1],
                page_stride: (kv_heads * head) as u64,
                head_stride: head as u64,
                table: at[2],
                table_stride: pages_of as u32,
                table_head_stride: 0,
                tokens: at[3],
                first: 0,
                count_stride: 1,
                count_head_stride: 0,
                scale: 1.0 / (head_dim as f32).sqrt(),
                out: at[4],
                lse: 0,
                tickets: at[6],
                workspace: at[5],
            };
            Ok(plan.arguments(&arguments).to_vec())
        }),
    })
}

fn append(kind: KvType, tokens: usize) -> Result<Case, KernelError> {
    let [_, kv_heads, head_dim] = HEADS;
    let layout = KvPageLayout::new(kind, head_dim, PAGE)?;
    let plan = AppendShape { layout, kv_heads, tokens, input: attention::Float::F16 }.plan()?;
    let pages_of = tokens.div_ceil(PAGE);
    let (row, head) = (kv_heads * head_dim, layout.page_bytes());
    let buffer = |bytes, fill, turns| Buffer { bytes, fill, turns };
    let stored = tokens.div_ceil(attention::TILE_TOKENS) * layout.tile_bytes() * kv_heads;
    let buffers = vec![
        buffer(tokens * row * 2, Fill::Floats, true),
        buffer(tokens * row * 2, Fill::Floats, true),
        buffer(tokens * 4, Fill::Zeros, false),
        buffer(tokens * 4, Fill::Counted, false),
        buffer(pages_of * 4, Fill::Counted, false),
        buffer(pages_of * kv_heads * head, Fill::Zeros, true),
    ];
    let (variant, launch) = (plan.variant.clone(), plan.launch);
    Ok(Case {
        name: format!("append_{}", kind_name(kind)),
        shape: format!("{kv_heads} x {head_dim}"),
        tokens,
        variant,
        launch,
        bytes: 2 * tokens * row * 2 + stored,
        operations: 0.0,
        product: Product::None,
        buffers,
        arguments: Box::new(move |at| {
            let arguments = AppendArguments {
                keys: at[0],
                key_stride: row as u64,
                values: at[1],
                value_stride: row as u64,
                sequence: at[2],
                position: at[3],
                table: at[4],
                table_stride: pages_of as u32,
                pages: at[5],
                page_stride: (kv_heads * head) as u64,
                head_stride: head as u64,
                page_count: pages_of as u32,
                refused: 0,
            };
            Ok(plan.arguments(&arguments).to_vec())
        }),
    })
}
