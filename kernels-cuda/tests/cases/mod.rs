//! Weights of every scheme from a seed, for the tests of layouts and kernels.
#![allow(dead_code, reason = "each test uses a part")]

use half::{bf16, f16};
use quant_kernels_cpu::{FloatFormat, Scales, WeightView};

/// Splitmix64.
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// From −1 up to, but excluding, 1.
    pub fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    F16,
    Bf16,
    F32,
    Progressive,
    /// E4M3 scales with a global float scale, for floating-point codes.
    E4m3,
    /// E8M0 scales, which are powers of two, for floating-point codes.
    E8m0,
}

#[derive(Debug, Clone)]
pub struct Case {
    pub shape: [usize; 2],
    pub bits: u8,
    pub group: usize,
    pub kind: Kind,
    pub float: Option<FloatFormat>,
    pub codes: Vec<u8>,
    /// The scales of groups; for progressive weights, of rows; for E4M3, the one number that group scales are divided
    /// by.
    pub scales: Vec<f32>,
    pub groups: Vec<u8>,
    pub zeros: Option<Vec<u8>>,
}

impl Case {
    pub fn new([n, k]: [usize; 2], bits: u8, group: usize, kind: Kind, zeros: bool, seed: u64) -> Self {
        let mut random = Random(seed);
        let count = n * (k / group);
        let levels = 1_u64 << bits;
        let mut codes: Vec<u8> = (0..n * k).map(|_| random.below(levels) as u8).collect();
        let zeros: Option<Vec<u8>> = zeros.then(|| (0..count).map(|_| random.below(levels) as u8).collect());
        let scale = |random: &mut Random| (random.float() + 1.5) * 0.01;
        let mut groups = Vec::new();
        let scales = match kind {
            Kind::E4m3 | Kind::E8m0 => panic!("scales of floating-point codes"),
            Kind::F16 => (0..count).map(|_| f16::from_f32(scale(&mut random)).to_f32()).collect(),
            Kind::Bf16 => {
                // Beyond the range of f16.
                (0..count).map(|_| bf16::from_f32(scale(&mut random) * 1e-12).to_f32()).collect()
            }
            Kind::F32 => (0..count).map(|_| scale(&mut random) * 1.000_001).collect(),
            Kind::Progressive => {
                groups = (0..count).map(|_| 1 + random.below(17) as u8).collect();
                (0..n).map(|_| scale(&mut random)).collect()
            }
        };
        if kind == Kind::Progressive {
            // `(code − zero) · scale` must fit eight signed bits.
            for (i, code) in codes.iter_mut().enumerate() {
                let g = i / k * (k / group) + i % k / group;
                let zero = zeros.as_ref().map_or(1 << (bits - 1), |z| i32::from(z[g]));
                let reach = |c: u8| (i32::from(c) - zero) * i32::from(groups[g]);
                while reach(*code) > 127 {
                    *code -= 1;
                }
                while reach(*code) < -128 {
                    *code += 1;
                }
            }
        }
        Self { shape: [n, k], bits, group, kind, float: None, codes, scales, groups, zeros }
    }

    pub fn float([n, k]: [usize; 2], format: FloatFormat, group: usize, kind: Kind, seed: u64) -> Self {
        let mut random = Random(seed);
        let numbers: Vec<u8> = (0..=u8::MAX).filter(|&code| format.is_number(code)).collect();
        let codes = (0..n * k).map(|_| numbers[random.below(numbers.len() as u64) as usize]).collect();
        let count = n * (k / group);
        let integers = Self::new([n, count / n], 4, count / n, Kind::F32, false, seed);
        let mut case = Self { codes, group, kind, float: Some(format), bits: format.bits(), ..integers };
        case.shape = [n, k];
        case.scales = match kind {
            Kind::Progressive => panic!("scales of integers"),
            // These include 0, subnormal scales and the largest scale.
            Kind::E4m3 => {
                case.groups = (0..count).map(|_| random.below(0x7f) as u8).collect();
                vec![731.5]
            }
            Kind::E8m0 => (0..count).map(|_| 2.0_f32.powi(random.below(9) as i32 - 12)).collect(),
            _ => {
                let scales = (0..count).map(|_| (random.float() + 1.5) * 0.01);
                let stored = |s: f32| match kind {
                    Kind::F16 => f16::from_f32(s).to_f32(),
                    Kind::Bf16 => bf16::from_f32(s * 1e-12).to_f32(),
                    _ => s * 1.000_001,
                };
                scales.map(stored).collect()
            }
        };
        case
    }

    /// The exact scale of a group; for progressive weights the scale of the row.
    pub fn scale(&self, row: usize, group: usize) -> f64 {
        let at = row * (self.shape[1] / self.group) + group;
        match self.kind {
            Kind::E4m3 => f64::from(FloatFormat::E4m3.value(self.groups[at])) / f64::from(self.scales[0]),
            Kind::Progressive => f64::from(self.scales[row]),
            _ => f64::from(self.scales[at]),
        }
    }

    pub fn view(&self) -> WeightView<'_> {
        let scales = match self.kind {
            Kind::E4m3 => Scales::E4m3 { groups: &self.groups, global: self.scales[0] },
            Kind::Progressive => Scales::Progressive { groups: &self.groups, channels: &self.scales },
            _ => Scales::Float(&self.scales),
        };
        if let Some(format) = self.float {
            let view = WeightView::float_with_scales(self.shape, format, self.group, &self.codes, scales);
            return view.expect("consistent parts");
        }
        WeightView::with_scales(self.shape, self.bits, self.group, &self.codes, scales, self.zeros.as_deref())
            .expect("consistent parts")
    }
}
