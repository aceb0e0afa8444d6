//! Sums over the rows of each token.

use half::{bf16, f16};
use quant_kernels_cuda::Float;
use quant_kernels_cuda::compile::Variant;
use quant_kernels_cuda::experts::{SumArguments, SumShape};
use quant_kernels_cuda::launch::Region;

use crate::cases::Random;
use crate::support::has_nvrtc;
use crate::support::machine as ptx;
use crate::{bytes_of, launch, module, output, region};

pub struct Problem {
    pub shape: SumShape,
    /// `[rows, n]`, representable in the element's type.
    pub x: Vec<f32>,
    pub row_of: Vec<u32>,
    pub factors: Option<Vec<f32>>,
}

fn rounded(of: Float, value: f32) -> f32 {
    match of {
        Float::F32 => value,
        Float::F16 => f16::from_f32(value).to_f32(),
        Float::Bf16 => bf16::from_f32(value).to_f32(),
    }
}

fn encoded(of: Float, value: f32) -> Vec<u8> {
    match of {
        Float::F32 => value.to_le_bytes().to_vec(),
        Float::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
        Float::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
    }
}

fn decoded(of: Float, bytes: &[u8]) -> f32 {
    match of {
        Float::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
        Float::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        Float::Bf16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
    }
}

impl Problem {
    /// Every fourth term has no row.
    pub fn new(shape: SumShape, weighted: bool, seed: u64) -> Self {
        let mut random = Random(seed);
        let x = (0..shape.rows * shape.n).map(|_| rounded(shape.element, random.float() * 8.0)).collect();
        let terms = (0..shape.tokens * shape.terms).map(|i| match i % 4 {
            3 => [u32::MAX, shape.rows as u32][random.below(2) as usize],
            _ => random.below(shape.rows as u64) as u32,
        });
        let row_of = terms.collect();
        let factors = weighted.then(|| (0..shape.rows).map(|_| random.float()).collect());
        Self { shape, x, row_of, factors }
    }

    /// The bits of the sums, by their definition.
    pub fn expected(&self) -> Vec<u32> {
        let SumShape { n, terms, output, .. } = self.shape;
        let mut bits = Vec::new();
        for rows in self.row_of.chunks(terms) {
            let mut sums = vec![0.0_f32; n];
            for &row in rows.iter().filter(|&&row| (row as usize) < self.shape.rows) {
                let factor = self.factors.as_ref().map(|of| of[row as usize]);
                let x = &self.x[row as usize * n..][..n];
                sums.iter_mut().zip(x).for_each(|(sum, x)| *sum += factor.map_or(*x, |factor| factor * x));
            }
            bits.extend(sums.iter().map(|&sum| rounded(output, sum).to_bits()));
        }
        bits
    }

    pub fn run(&self, variant: Option<&Variant>, options: &ptx::Options) -> ptx::Result<Vec<u32>> {
        let SumShape { element, output: of, rows, tokens, n, x_stride, out_stride, aligned, .. } = self.shape;
        let plan = self.shape.plan().unwrap();
        let variant = variant.unwrap_or(&plan.variant);
        let mut memory = ptx::Memory::new();
        // Gaps between rows are NaN, so that using them shows.
        let mut padded = Vec::new();
        for row in 0..rows {
            padded.resize(row * x_stride * element.bytes(), 0xff);
            padded.extend(self.x[row * n..][..n].iter().flat_map(|&x| encoded(element, x)));
        }
        let align = |of: Float| if aligned { 16 } else { of.bytes() };
        let factors = self.factors.iter().flatten().map(|f| f.to_bits());
        let at = SumArguments {
            x: region(&mut memory, "x", &padded, align(element)),
            row_of: region(&mut memory, "row of", &bytes_of(self.row_of.iter().copied()), 4),
            factors: region(&mut memory, "factors", &bytes_of(factors), 4),
            out: output(&mut memory, "out", ((tokens - 1) * out_stride + n) * of.bytes(), align(of)),
        };
        let arguments = plan.arguments(&at).unwrap();
        launch(&module(variant), variant.kernel, &plan.launch, &arguments, &mut memory, options)?;
        let each = of.bytes();
        let bytes = memory.bytes_written(at.out.address, |i| i / each % out_stride < n)?;
        let values = bytes.chunks(out_stride * each).flat_map(|row| row[..n * each].chunks(each));
        Ok(values.map(|value| decoded(of, value).to_bits()).collect())
    }
}

#[test]
fn sums_are_bit_identical_to_a_loop() {
    if !has_nvrtc() {
        return;
    }
    use Float::{Bf16, F16, F32};
    for (i, (element, output)) in
        [(F32, F32), (F32, F16), (F32, Bf16), (F16, F16), (Bf16, Bf16), (F16, F32), (Bf16, F32)]
            .into_iter()
            .enumerate()
    {
        for (j, [tokens, terms, n]) in
            [[5, 3, 1040], [3, 8, 24], [2, 1, 13], [4, 5, 2064]].into_iter().enumerate()
        {
            let dense = SumShape::new(element, output, [tokens, terms, n]);
            let gaps = SumShape { x_stride: n + 16, out_stride: n + 32, ..dense };
            for shape in
                [dense, gaps, SumShape { x_stride: n + 3, out_stride: n + 1, aligned: false, ..dense }]
            {
                let problem = Problem::new(shape, (i + j) % 2 == 0, (7 * i + j) as u64);
                let got = problem.run(None, &ptx::Options::default()).unwrap();
                assert_eq!(got, problem.expected(), "{shape:?}");
            }
        }
    }
}

#[test]
fn tokens_without_rows_are_zero() {
    if !has_nvrtc() {
        return;
    }
    let mut problem = Problem::new(SumShape::new(Float::F32, Float::F16, [3, 2, 64]), true, 5);
    problem.row_of[2..4].fill(u32::MAX);
    let got = problem.run(None, &ptx::Options::default()).unwrap();
    assert_eq!(got, problem.expected());
    assert_eq!(got[64..128], [0; 64]);
}

/// Rows are read once, in whole sectors.
#[test]
fn bytes_of_memory_are_those_of_the_rows() {
    if !has_nvrtc() {
        return;
    }
    let mut problem = Problem::new(SumShape::new(Float::F32, Float::Bf16, [4, 8, 1024]), false, 5);
    problem.row_of = (0..32).collect();
    let plan = problem.shape.plan().unwrap();
    let mut memory = ptx::Memory::new();
    let x = region(&mut memory, "x", &bytes_of(problem.x.iter().map(|x| x.to_bits())), 32);
    let row_of = region(&mut memory, "row of", &bytes_of(problem.row_of.iter().copied()), 32);
    let out = output(&mut memory, "out", 4 * 1024 * 2, 32);
    let at = SumArguments { x, row_of, factors: Region::NONE, out };
    let arguments = plan.arguments(&at).unwrap();
    let report = launch(
        &module(&plan.variant),
        plan.variant.kernel,
        &plan.launch,
        &arguments,
        &mut memory,
        &ptx::Options::default(),
    );
    let counters = report.unwrap().counters;
    let read = counters.buffers["x"].read;
    assert_eq!((read.bytes_asked, 32 * read.unique_sectors), (x.bytes, x.bytes));
    assert_eq!(32 * counters.buffers["out"].written.unique_sectors, out.bytes);
}
