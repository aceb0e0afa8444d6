//! Problems for the activation kernels.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};

use half::{bf16, f16};
use quant_kernels_cpu::activation::{GateUp, RmsNorm, RowLayout, StaticScale};
use quant_kernels_cpu::{Int8Rows, Layout, ScaleType, Serial};
use quant_kernels_cuda::activation::{
    ActivationArguments, ActivationPlan, ActivationShape, FixedScale, Float, RowSource,
};
use quant_kernels_cuda::compile::Variant;
use quant_kernels_cuda::launch::{Argument, Region};

use crate::support::machine as ptx;

pub const EPS: f32 = 1e-5;
pub const FIXED: FixedScale = FixedScale { scale: 0.031, zero: -7 };

pub struct Numbers(pub u64);

impl Numbers {
    pub fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    /// From −1 to 1.
    pub fn float(&mut self) -> f32 {
        self.next() as f32 / (1_u32 << 30) as f32 - 1.0
    }
}

/// Values are representable in the element's type.
#[derive(Clone)]
pub struct Problem {
    pub shape: ActivationShape,
    /// `[m, k]` each.
    pub x: Vec<f32>,
    pub up: Vec<f32>,
    pub residual: Vec<f32>,
    pub weight: Vec<f32>,
    pub row_sums: bool,
    /// The number of rows on the device, if it is less than that of the shape.
    pub count: Option<u32>,
    /// Addresses are odd multiples of it.
    pub align: usize,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// `[m, k]`
    pub codes: Vec<i8>,
    /// The bits of the scales; for NaN without sign and payload.
    pub scales: Vec<u32>,
    pub row_sums: Vec<i32>,
    pub group_sums: Vec<i32>,
    /// The bits of the residual, `[m, k]`.
    pub residual: Vec<u32>,
}

fn round(to: Float, value: f32) -> f32 {
    match to {
        Float::F32 => value,
        Float::F16 => f16::from_f32(value).to_f32(),
        Float::Bf16 => bf16::from_f32(value).to_f32(),
    }
}

fn encode(as_: Float, values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    let each = |v: f32| match as_ {
        Float::F32 => v.to_le_bytes().to_vec(),
        Float::F16 => f16::from_f32(v).to_le_bytes().to_vec(),
        Float::Bf16 => bf16::from_f32(v).to_le_bytes().to_vec(),
    };
    values.into_iter().flat_map(each).collect()
}

fn decode(as_: Float, bytes: &[u8]) -> Vec<f32> {
    let each = |b: &[u8]| match as_ {
        Float::F32 => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
        Float::F16 => f16::from_le_bytes([b[0], b[1]]).to_f32(),
        Float::Bf16 => bf16::from_le_bytes([b[0], b[1]]).to_f32(),
    };
    bytes.chunks_exact(as_.bytes()).map(each).collect()
}

fn bits(value: f32) -> u32 {
    if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() }
}

impl Problem {
    pub fn new(shape: ActivationShape, seed: u64) -> Self {
        let mut numbers = Numbers(seed);
        let (len, element) = (shape.m * shape.k, shape.element);
        let mut matrix =
            |scale: f32| -> Vec<f32> { (0..len).map(|_| round(element, numbers.float() * scale)).collect() };
        let (x, up, residual) = (matrix(8.0), matrix(2.0), matrix(4.0));
        let of_weight = match shape.rows {
            RowSource::RmsNorm { weight, .. } => weight,
            RowSource::Plain | RowSource::SiluMul => Float::F32,
        };
        let weight = (0..shape.k).map(|_| round(of_weight, numbers.float() + 1.5)).collect();
        Self { shape, x, up, residual, weight, row_sums: true, count: None, align: 16 }
    }

    pub fn only(&self, rows: &[usize]) -> Self {
        let k = self.shape.k;
        let some = |all: &[f32]| rows.iter().flat_map(|r| all[r * k..][..k].to_vec()).collect();
        Self {
            shape: ActivationShape { m: rows.len(), ..self.shape },
            x: some(&self.x),
            up: some(&self.up),
            residual: some(&self.residual),
            ..self.clone()
        }
    }

    fn place(&self, memory: &mut ptx::Memory, name: &str, values: &[f32], stride: usize) -> Region {
        let (k, element) = (self.shape.k, self.shape.element);
        // To the interpreter, the whole buffer is written. Reading the gaps, which are NaN, changes results.
        let mut padded = Vec::new();
        for (r, row) in values.chunks(k).enumerate() {
            padded.resize(r * stride, f32::NAN);
            padded.extend_from_slice(row);
        }
        region(memory, name, &encode(element, padded), self.align)
    }

    pub fn plan(&self) -> ActivationPlan {
        self.shape.plan().unwrap()
    }

    pub fn run(&self, options: &ptx::Options) -> (Outcome, ptx::Report) {
        let plan = self.plan();
        self.run_variant(&plan, &plan.variant, options).unwrap()
    }

    pub fn run_variant(
        &self,
        plan: &ActivationPlan,
        variant: &Variant,
        options: &ptx::Options,
    ) -> ptx::Result<(Outcome, ptx::Report)> {
        let ActivationShape { m, k, element, .. } = self.shape;
        let mut memory = ptx::Memory::new();
        let x = self.place(&mut memory, "x", &self.x, self.shape.x_stride);
        let (mut up, mut residual, mut weight) = (Region::NONE, Region::NONE, Region::NONE);
        match self.shape.rows {
            RowSource::Plain => {}
            RowSource::SiluMul => up = self.place(&mut memory, "up", &self.up, self.shape.up_stride),
            RowSource::RmsNorm { weight: of, residual: adds } => {
                weight = region(&mut memory, "weight", &encode(of, self.weight.iter().copied()), self.align);
                if adds {
                    residual =
                        self.place(&mut memory, "residual", &self.residual, self.shape.residual_stride);
                }
            }
        }
        let count =
            self.count.map_or(Region::NONE, |rows| region(&mut memory, "count", &rows.to_le_bytes(), 4));
        let groups = self.shape.group.map_or(0, |g| k.div_ceil(g));
        let mut output = |name, bytes: usize| Region {
            address: memory.buffer(name, bytes, self.align),
            bytes: bytes as u64,
        };
        let at = ActivationArguments {
            x,
            up,
            residual,
            weight,
            eps: EPS,
            fixed: self.shape.fixed.then_some(FIXED),
            codes: output("codes", (m - 1) * self.shape.code_stride + k),
            scales: output("scales", m * 4),
            row_sums: if self.row_sums { output("row_sums", m * 4) } else { Region::NONE },
            group_sums: if groups > 0 { output("group_sums", m * groups * 4) } else { Region::NONE },
            count,
        };
        let arguments = plan.arguments(&at).unwrap().map(|argument| match argument {
            Argument::U64(v) => ptx::Argument::U64(v),
            Argument::U32(v) => ptx::Argument::U32(v),
            Argument::F32(v) => ptx::Argument::F32(v),
        });
        let launch = ptx::Launch {
            grid: plan.launch.grid,
            block: [plan.launch.block, 1, 1],
            dynamic_shared: plan.launch.shared_bytes,
            arguments: arguments.to_vec(),
        };
        let report = module(variant).launch(variant.kernel, &launch, &mut memory, options)?;
        let rows = self.count.map_or(m, |rows| m.min(rows as usize));
        let words = |at: Region| -> Vec<u32> {
            if at == Region::NONE {
                return Vec::new();
            }
            let len = at.bytes as usize / m * rows;
            let bytes = memory.bytes_written(at.address, |i| i < len).unwrap();
            bytes[..len].chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
        };
        let signed = |at| words(at).into_iter().map(|w| w as i32).collect();
        let stride = self.shape.code_stride;
        let codes = memory.bytes_written(at.codes.address, |i| i / stride < rows && i % stride < k)?;
        let codes = codes.chunks(stride).take(rows).flat_map(|row| row[..k].iter().map(|&c| c as i8));
        let codes = codes.collect();
        let mut sum = Vec::new();
        if residual != Region::NONE {
            let values = decode(element, &memory.bytes(residual.address)?);
            let rows = values.chunks(self.shape.residual_stride);
            sum = rows.flat_map(|row| row[..k].iter().map(|&v| bits(v))).collect();
        }
        let outcome = Outcome {
            codes,
            scales: words(at.scales).into_iter().map(|w| bits(f32::from_bits(w))).collect(),
            row_sums: signed(at.row_sums),
            group_sums: signed(at.group_sums),
            residual: sum,
        };
        Ok((outcome, report))
    }

    /// Sums are computed here, from the CPU's codes.
    pub fn expected(&self) -> Outcome {
        match self.shape.element {
            Float::F32 => self.on_cpu(|v| v, |v: f32| v),
            Float::F16 => self.on_cpu(f16::from_f32, f16::to_f32),
            Float::Bf16 => self.on_cpu(bf16::from_f32, bf16::to_f32),
        }
    }

    fn on_cpu<E: quant_kernels_cpu::activation::Element>(
        &self,
        from: impl Fn(f32) -> E,
        to: impl Fn(E) -> f32,
    ) -> Outcome {
        let ActivationShape { m, k, fixed, .. } = self.shape;
        let layout = Layout::from_parts([1, k], 4, k, ScaleType::F32, None, true).unwrap();
        let layout = RowLayout::of(&layout);
        let by = fixed.then_some(StaticScale { scale: FIXED.scale, zero: FIXED.zero });
        let typed = |values: &[f32]| -> Vec<E> { values.iter().map(|&v| from(v)).collect() };
        let (x, up, mut residual) = (typed(&self.x), typed(&self.up), typed(&self.residual));
        let mut rows = Int8Rows::default();
        let mut sum = Vec::new();
        match (self.shape.rows, by) {
            (RowSource::Plain, None) => rows.quantize(&x, layout, &Serial).unwrap(),
            (RowSource::Plain, Some(by)) => rows.quantize_static(&x, layout, by, &Serial).unwrap(),
            (RowSource::SiluMul, by) => {
                rows.quantize_silu_mul(GateUp::Apart { gate: &x, up: &up }, layout, by, &Serial).unwrap();
            }
            (RowSource::RmsNorm { residual: adds, .. }, by) => {
                let norm = RmsNorm { weight: &self.weight, eps: EPS };
                let with = adds.then_some(&mut residual[..]);
                rows.quantize_rms_norm(&x, norm, with, layout, by, &Serial).unwrap();
                if adds {
                    sum = residual.iter().map(|&v| bits(to(v))).collect();
                }
            }
        }
        let codes: Vec<i8> = (0..m).flat_map(|r| rows.row(r)).collect();
        let add = |codes: &[i8]| codes.iter().map(|&c| i32::from(c)).sum::<i32>();
        let of_groups =
            |g: usize| codes.chunks(k).flat_map(move |row| row.chunks(g).map(add).collect::<Vec<_>>());
        Outcome {
            scales: rows.scales().iter().map(|&s| bits(s)).collect(),
            row_sums: if self.row_sums { codes.chunks(k).map(add).collect() } else { Vec::new() },
            group_sums: self.shape.group.map_or(Vec::new(), |g| of_groups(g).collect()),
            residual: sum,
            codes,
        }
    }
}

fn region(memory: &mut ptx::Memory, name: &str, bytes: &[u8], align: usize) -> Region {
    Region { address: memory.buffer_from(name, bytes, align), bytes: bytes.len() as u64 }
}

/// Parsed only once.
pub fn module(variant: &Variant) -> Arc<ptx::Module> {
    static MODULES: LazyLock<Mutex<HashMap<Variant, Arc<ptx::Module>>>> = LazyLock::new(Mutex::default);
    let found = MODULES.lock().unwrap().get(variant).cloned();
    found.unwrap_or_else(|| {
        let module = Arc::new(ptx::Module::parse(&ptx::ptx_of(variant)).unwrap());
        assert_eq!(module.unsupported(variant.kernel).unwrap(), [], "{variant}");
        MODULES.lock().unwrap().insert(variant.clone(), Arc::clone(&module));
        module
    })
}
