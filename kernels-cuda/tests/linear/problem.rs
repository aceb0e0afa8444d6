//! Weights, activations and their expected product.

use half::{bf16, f16};
use quant_kernels_cpu::reference::{float_linear, int8_linear};
use quant_kernels_cpu::{Int8Rows, IsaToken, Layout, RowLayout, Serial, StaticScale};
use quant_kernels_cuda::layout::{Order, TILE_K, WeightLayout};
use quant_kernels_cuda::linear::{InputType, Output, Parts};

use crate::cases::{Case, Kind, Random};

pub struct Problem {
    pub case: Case,
    pub layout: WeightLayout,
    pub packed: Vec<u8>,
    pub activation: InputType,
    pub output: Output,
    pub m: usize,
    /// `[m, x_stride]`, f16, bf16 or i8.
    pub x: Vec<u8>,
    pub x_stride: usize,
    pub x_scales: Vec<f32>,
    pub x_zero: i32,
    pub bias: Option<Vec<f32>>,
    values: Values,
}

enum Values {
    Float(Vec<f32>),
    /// With the row of each token.
    Int8(Box<Int8Rows>, Vec<usize>),
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Draw {
    /// Around zero.
    Typical,
    /// Far from zero and of one sign, for which the offsets of the dequantization cost the most accuracy.
    Shifted,
    /// The ends of the range.
    Extreme,
}

/// The number of chunks of `k` that are summed separately.
fn parts(n: usize, k: usize) -> usize {
    Parts::of([n, k]).chunks
}

impl Problem {
    pub fn float(case: Case, activation: InputType, output: Output, m: usize, draw: Draw, seed: u64) -> Self {
        let k = case.shape[1];
        let mut random = Random(seed);
        let mut rows = Vec::with_capacity(m * k);
        for _ in 0..m * k {
            let value = match draw {
                Draw::Typical => random.float() * 4.0,
                Draw::Shifted => random.float() + 3.0,
                Draw::Extreme => [-60_000.0, 60_000.0, 6e-8, -0.0][random.below(4) as usize],
            };
            rows.push(match activation {
                InputType::F16 => f16::from_f32(value).to_f32(),
                _ => bf16::from_f32(value).to_f32(),
            });
        }
        let layout = WeightLayout::of(&case.view(), Order::Float, false).unwrap();
        let mut problem = Self::of(case, layout, activation, output, m, seed, Values::Float(rows));
        problem.fill_rows();
        problem
    }

    /// Creates a problem with one token per feature and f32 results, so that the results are the weights.
    pub fn one_hot(case: Case, activation: InputType) -> Self {
        let k = case.shape[1];
        let mut rows = vec![0.0; k * k];
        (0..k).for_each(|i| rows[i * k + i] = 1.0);
        let layout = WeightLayout::of(&case.view(), Order::Float, false).unwrap();
        let mut problem = Self::of(case, layout, activation, Output::F32, k, 1, Values::Float(rows));
        problem.fill_rows();
        problem
    }

    pub fn int8(case: Case, output: Output, m: usize, zero: Option<i8>, draw: Draw, seed: u64) -> Self {
        let k = case.shape[1];
        let mut random = Random(seed);
        let values: Vec<f32> = (0..m * k)
            .map(|_| match draw {
                Draw::Typical => random.float() * 4.0,
                Draw::Shifted => random.float() + 3.0,
                Draw::Extreme => [-4.0, 4.0][random.below(2) as usize],
            })
            .collect();
        let view = case.view();
        let rows_of = RowLayout::of(&Layout::of(&view, zero.is_some()).unwrap());
        let mut rows = Int8Rows::new(IsaToken::detect());
        match zero {
            Some(zero) => {
                let by = StaticScale { scale: 0.03, zero };
                rows.quantize_static(&values, rows_of, by, &Serial).unwrap();
            }
            None => rows.quantize(&values, rows_of, &Serial).unwrap(),
        }
        let layout = WeightLayout::of(&view, Order::Int8, zero.is_some()).unwrap();
        let activation = InputType::Int8 { zero: zero.is_some() };
        let mut problem = Self::of(
            case,
            layout,
            activation,
            output,
            m,
            seed,
            Values::Int8(Box::new(rows), (0..m).collect()),
        );
        problem.fill_rows();
        problem
    }

    fn of(
        case: Case,
        layout: WeightLayout,
        activation: InputType,
        output: Output,
        m: usize,
        seed: u64,
        values: Values,
    ) -> Self {
        let mut packed = vec![0; layout.bytes()];
        layout.pack(&case.view(), &mut packed).unwrap();
        let mut random = Random(seed ^ 0xb1a5);
        // Problems with an even seed have a bias.
        let bias = seed.is_multiple_of(2).then(|| (0..case.shape[0]).map(|_| random.float()).collect());
        let (x_scales, x_zero) = match &values {
            Values::Float(_) => (Vec::new(), 0),
            Values::Int8(rows, _) => (rows.scales().to_vec(), rows.zero()),
        };
        let x = Vec::new();
        Self { case, layout, packed, activation, output, m, x, x_stride: 0, x_scales, x_zero, bias, values }
    }

    /// The padding to 16 bytes is not zero, so that using it shows.
    fn fill_rows(&mut self) {
        let k = self.case.shape[1];
        let each = if matches!(self.values, Values::Float(_)) { 2 } else { 1 };
        self.x_stride = (k * each).next_multiple_of(16) / each;
        self.x = vec![0x7f; self.m * self.x_stride * each];
        for m in 0..self.m {
            let bytes: Vec<u8> = match (&self.values, self.activation) {
                (Values::Int8(rows, of), _) => rows.row(of[m]).iter().map(|&a| a as u8).collect(),
                (Values::Float(x), InputType::F16) => {
                    x[m * k..][..k].iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect()
                }
                (Values::Float(x), _) => {
                    x[m * k..][..k].iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect()
                }
            };
            self.x[m * self.x_stride * each..][..bytes.len()].copy_from_slice(&bytes);
        }
    }

    pub fn of_tokens(&self, tokens: &[usize]) -> Self {
        let k = self.case.shape[1];
        let each = self.x.len() / (self.m * self.x_stride) * self.x_stride;
        let x = tokens.iter().flat_map(|&m| self.x[m * each..(m + 1) * each].to_vec()).collect();
        let values = match &self.values {
            Values::Float(x) => {
                Values::Float(tokens.iter().flat_map(|&m| x[m * k..(m + 1) * k].to_vec()).collect())
            }
            Values::Int8(rows, of) => Values::Int8(rows.clone(), tokens.iter().map(|&m| of[m]).collect()),
        };
        let x_scales = match self.x_scales.is_empty() {
            true => Vec::new(),
            false => tokens.iter().map(|&m| self.x_scales[m]).collect(),
        };
        Self {
            case: self.case.clone(),
            layout: self.layout,
            packed: self.packed.clone(),
            activation: self.activation,
            output: self.output,
            m: tokens.len(),
            x,
            x_stride: self.x_stride,
            x_scales,
            x_zero: self.x_zero,
            bias: self.bias.clone(),
            values,
        }
    }

    fn rounded(&self, value: f32) -> f32 {
        match self.output {
            Output::F16 => f16::from_f32(value).to_f32(),
            Output::Bf16 => bf16::from_f32(value).to_f32(),
            Output::F32 => value,
        }
    }

    /// Compares results `[m, n]` with the reference: bit for bit if integers are summed over all of `k` or `k` is one
    /// part, otherwise within a bound. For float sums, returns the largest error relative to `Σ |s (q − z) x| + |b|`.
    pub fn check(&self, y: &[f32]) -> f64 {
        let [n, k] = self.case.shape;
        assert_eq!(y.len(), self.m * n);
        let view = self.case.view();
        match &self.values {
            Values::Int8(rows, of) => {
                let all = int8_linear(&view, rows, self.bias.as_deref());
                let expected: Vec<f32> = of.iter().flat_map(|&m| all[m * n..][..n].to_vec()).collect();
                let bits =
                    self.layout.row_is_group() || self.case.kind == Kind::Progressive || parts(n, k) == 1;
                let mut worst = 0.0_f64;
                for (i, (&y, &e)) in y.iter().zip(&expected).enumerate() {
                    if bits {
                        let e = self.rounded(e);
                        assert_eq!(
                            y.to_bits(),
                            e.to_bits(),
                            "token {} feature {}: {y} for {e}",
                            i / n,
                            i % n
                        );
                    } else {
                        // Sums of integers are equal. Their products with scales are added in a different order.
                        let (m, o) = (i / n, i % n);
                        let size = view.group_size();
                        let a = rows.row(of[m]);
                        let magnitude: f64 = (0..view.groups())
                            .map(|g| {
                                let zero = i32::from(view.zero(o, g));
                                let sum: i32 = (g * size..(g + 1) * size)
                                    .map(|i| {
                                        (i32::from(self.case.codes[o * k + i]) - zero)
                                            * (i32::from(a[i]) - self.x_zero)
                                    })
                                    .sum();
                                (f64::from(sum) * f64::from(self.case.scales[o * view.groups() + g])).abs()
                            })
                            .sum::<f64>()
                            * f64::from(self.x_scales[m])
                            + self.bias.as_ref().map_or(0.0, |b| f64::from(b[o]).abs());
                        let roundings = 2.0 * (view.groups() + parts(n, k) + 2) as f64;
                        let bound = magnitude * roundings * 2_f64.powi(-24) + self.output_bound(e);
                        let error = (f64::from(y) - f64::from(e)).abs();
                        assert!(error <= bound, "token {m} feature {o}: {y} for {e}, bound {bound:e}");
                        worst = worst.max(error / magnitude.max(f64::MIN_POSITIVE));
                    }
                }
                worst
            }
            Values::Float(x) => {
                let expected = float_linear(&view, x, self.bias.as_deref());
                let mut worst = 0.0_f64;
                for (i, (&y, &(e, _))) in y.iter().zip(&expected).enumerate() {
                    let (m, o) = (i / n, i % n);
                    let (magnitude, folded) = self.magnitudes(&x[m * k..(m + 1) * k], o);
                    // Every f32 operation has an error of at most 2⁻²³, as in tensor cores that truncate. The products
                    // of a block of features are summed sequentially twice: with codes and with ones. Then come the
                    // product with the zero point, and the sums over blocks and parts.
                    let block = view.group_size().min(TILE_K) as f64;
                    // With E4M3 scales, the row's factor and the product with it are rounded too.
                    let factor = if self.case.kind == Kind::E4m3 { 4 } else { 0 };
                    let groups = k.div_ceil(view.group_size().min(32));
                    let later = (groups + parts(n, k) + 4 + factor) as f64;
                    let bias = self.bias.as_ref().map_or(0.0, |b| f64::from(b[o]).abs());
                    let bound = 2_f64.powi(-23) * ((2.0 * block + 4.0) * folded + later * (magnitude + bias))
                        + self.output_bound(e as f32);
                    let error = (f64::from(y) - e).abs();
                    assert!(
                        error <= bound,
                        "token {m} feature {o}: {y} for {e}, error {error:e}, bound {bound:e}"
                    );
                    if magnitude + bias > 0.0 {
                        let own = (error - self.output_bound(e as f32)).max(0.0);
                        worst = worst.max(own / (magnitude + bias));
                    }
                }
                worst
            }
        }
    }

    /// Half a unit of the output's last place.
    fn output_bound(&self, value: f32) -> f64 {
        let value = f64::from(value).abs();
        match self.output {
            Output::F16 => value * 2_f64.powi(-11) + 2_f64.powi(-25),
            Output::Bf16 => value * 2_f64.powi(-8),
            Output::F32 => 0.0,
        }
    }

    /// `Σ |s (q − z) x|`, and the same sum with the numbers in the kernel: offset plus code, and offset plus zero
    /// point.
    fn magnitudes(&self, x: &[f32], o: usize) -> (f64, f64) {
        let view = self.case.view();
        let (k, size) = (view.k(), view.group_size());
        // The largest offset of a row, see `cuda/dequantize.cuh`.
        let offset = match (self.layout.code_bits(), self.activation) {
            _ if view.float_format().is_some() => 0.0,
            (4, InputType::F16) => 256.0,
            (4, _) => 32.0,
            (_, InputType::F16) => 1024.0,
            _ => 128.0,
        };
        let (mut plain, mut folded) = (0.0, 0.0);
        for i in 0..k {
            let g = i / size;
            let s = self.case.scale(o, g).abs();
            let x = f64::from(x[i]).abs();
            let code = self.case.codes[o * k + i];
            if let Some(format) = view.float_format() {
                let term = s * f64::from(format.value(code)).abs() * x;
                (plain, folded) = (plain + term, folded + term);
                continue;
            }
            let (q, z) = (f64::from(code), f64::from(view.zero(o, g)));
            plain += s * (q - z).abs() * x;
            folded += s * (2.0 * offset + q + z) * x;
        }
        (plain, folded)
    }
}
