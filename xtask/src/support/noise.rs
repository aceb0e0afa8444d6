//! Approximately normal numbers from a counter, so that any element of a tensor can be generated without the elements
//! before it.
//!
//! A 64-bit mix of key and counter gives four 16-bit indices into a table of 65,536 quantiles of the normal
//! distribution, which are rounded to the element type beforehand.

use half::{bf16, f16};

/// Element types of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Float {
    /// bfloat16
    Bf16,
    /// IEEE half precision
    F16,
    /// IEEE single precision
    F32,
}

impl Float {
    /// The type with this name in a safetensors header.
    pub fn from_header(name: &str) -> Option<Self> {
        [Self::Bf16, Self::F16, Self::F32].into_iter().find(|f| f.header_name() == name)
    }

    /// The name in a safetensors header.
    pub fn header_name(self) -> &'static str {
        match self {
            Self::Bf16 => "BF16",
            Self::F16 => "F16",
            Self::F32 => "F32",
        }
    }

    /// The name in a `config.json`.
    pub fn config_name(self) -> &'static str {
        match self {
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
            Self::F32 => "float32",
        }
    }

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }

    /// Converts little-endian elements to `f32`, exactly.
    pub fn widen(self, bytes: &[u8]) -> Vec<f32> {
        let pair = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]);
        match self {
            Self::Bf16 => bytes.chunks_exact(2).map(|b| bf16::from_bits(pair(b)).to_f32()).collect(),
            Self::F16 => bytes.chunks_exact(2).map(|b| f16::from_bits(pair(b)).to_f32()).collect(),
            Self::F32 => {
                bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
            }
        }
    }

    /// Rounds values to this type, as little-endian elements.
    pub fn narrow(self, values: &[f32]) -> Vec<u8> {
        match self {
            Self::Bf16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
            Self::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
            Self::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        }
    }

    /// Whether the type represents the value exactly, as zero or as a normal number.
    pub fn holds_exactly(self, value: f32) -> bool {
        match self {
            Self::Bf16 => {
                let v = bf16::from_f32(value);
                v.to_f32() == value && (value == 0.0 || v.is_normal())
            }
            Self::F16 => {
                let v = f16::from_f32(value);
                v.to_f32() == value && (value == 0.0 || v.is_normal())
            }
            Self::F32 => value == 0.0 || value.is_normal(),
        }
    }
}

/// A well-mixed 64-bit function of a counter (the finalizer of splitmix64).
pub fn mix(counter: u64) -> u64 {
    finish(counter.wrapping_mul(GOLDEN))
}

/// The increment of splitmix64.
pub(super) const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

pub(super) fn finish(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The key of a tensor's stream of numbers.
pub fn key(seed: u64, name: &str) -> u64 {
    name.bytes().fold(mix(seed ^ 0x51), |h, b| mix(h ^ u64::from(b)))
}

/// A generator of numbers around a mean, ready to be copied out as bytes.
#[derive(Debug)]
pub struct Noise {
    float: Float,
    /// The quantiles in the element type, `float.size()` bytes each.
    table: Vec<u8>,
}

/// Values per mix: a chunk of a tensor must start at a multiple of this.
pub const LANES: usize = 4;

impl Noise {
    /// Approximately normal values with this mean and standard deviation, from `standard_normal_quantiles`.
    pub fn new(quantiles: &[f32], float: Float, mean: f32, std: f32) -> Self {
        let values: Vec<f32> = quantiles.iter().map(|q| mean + std * q).collect();
        Self { float, table: float.narrow(&values) }
    }

    /// Writes the elements starting at index `first` until `out` is full.
    ///
    /// # Panics
    /// If `first` is not a multiple of [`LANES`], or the length of `out` is not a multiple of the element size.
    pub fn fill(&self, key: u64, first: u64, out: &mut [u8]) {
        assert_eq!(first % LANES as u64, 0, "a chunk must start at a multiple of {LANES} elements");
        assert_eq!(out.len() % self.float.size(), 0, "the length must be a multiple of the element size");
        match self.float.size() {
            2 => self.fill_sized::<2>(key, first, out),
            _ => self.fill_sized::<4>(key, first, out),
        }
    }

    fn fill_sized<const SIZE: usize>(&self, key: u64, first: u64, out: &mut [u8]) {
        let (table, _) = self.table.as_chunks::<SIZE>();
        let (elements, _) = out.as_chunks_mut::<SIZE>();
        let counter = first / LANES as u64;
        for (i, lanes) in (counter..).zip(elements.chunks_mut(LANES)) {
            let bits = mix(key.wrapping_add(i));
            for (lane, element) in lanes.iter_mut().enumerate() {
                *element = table[usize::from((bits >> (16 * lane)) as u16)];
            }
        }
    }
}

/// 65,536 quantiles of the standard normal distribution at `(i + 0.5) / 65,536`, ascending.
///
/// The density is integrated by Simpson's rule; within a step, the integral is inverted by linear interpolation.
pub fn standard_normal_quantiles() -> Vec<f32> {
    const HALF: usize = 1 << 15;
    const STEP: f64 = 1.0 / 4096.0;
    let density = |z: f64| (-0.5 * z * z).exp() / (2.0 * std::f64::consts::PI).sqrt();
    let mut upper = Vec::with_capacity(HALF);
    let (mut z, mut mass) = (0.0, 0.0);
    while upper.len() < HALF {
        let next = mass + STEP / 6.0 * (density(z) + 4.0 * density(z + STEP / 2.0) + density(z + STEP));
        while upper.len() < HALF {
            let wanted = (upper.len() as f64 + 0.5) / (2 * HALF) as f64;
            if wanted > next {
                break;
            }
            upper.push((z + STEP * (wanted - mass) / (next - mass)) as f32);
        }
        (z, mass) = (z + STEP, next);
    }
    upper.iter().rev().map(|q| -q).chain(upper.iter().copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_normal_distribution() {
        let q = standard_normal_quantiles();
        assert_eq!(q.len(), 65536);
        assert!(q.windows(2).all(|w| w[0] < w[1]));
        // Φ(1) = 0.841344746, Φ(−1.96) = 0.024997895
        let at = |p: f64| q[(p * 65536.0) as usize];
        assert!((at(0.841_344_746) - 1.0).abs() < 1e-4, "{}", at(0.841_344_746));
        assert!((at(0.024_997_895) + 1.96).abs() < 5e-4, "{}", at(0.024_997_895));
    }

    #[test]
    fn chunks_join_into_the_same_stream() {
        let noise = Noise::new(&standard_normal_quantiles(), Float::Bf16, 0.0, 0.02);
        let mut whole = vec![0; 2 * 1003];
        noise.fill(key(7, "a"), 0, &mut whole);
        let mut parts = vec![0; 2 * 1003];
        let (head, tail) = parts.split_at_mut(2 * 400);
        noise.fill(key(7, "a"), 0, head);
        noise.fill(key(7, "a"), 400, tail);
        assert_eq!(whole, parts);
        let mut other = vec![0; 2 * 1003];
        noise.fill(key(7, "b"), 0, &mut other);
        assert_ne!(whole, other);
    }

    #[test]
    fn mean_and_deviation_are_as_asked() {
        for float in [Float::Bf16, Float::F16, Float::F32] {
            let noise = Noise::new(&standard_normal_quantiles(), float, 1.0, 0.1);
            let mut bytes = vec![0; float.size() * 200_000];
            noise.fill(key(1, "norm"), 0, &mut bytes);
            let values = float.widen(&bytes);
            let n = values.len() as f64;
            let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
            let var = values.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / n;
            assert!((mean - 1.0).abs() < 1e-3, "{float:?} {mean}");
            assert!((var.sqrt() - 0.1).abs() < 1e-3, "{float:?} {}", var.sqrt());
        }
    }

    #[test]
    fn exactness_excludes_rounding_and_subnormals() {
        assert!(Float::F16.holds_exactly(0.5) && Float::F16.holds_exactly(-0.0));
        assert!(!Float::F16.holds_exactly(1.0 + 1.0 / 4096.0));
        assert!(!Float::F16.holds_exactly(2f32.powi(-20)), "subnormal");
        assert!(!Float::F16.holds_exactly(70000.0), "overflow");
        assert!(Float::Bf16.holds_exactly(2f32.powi(-100)));
        assert!(!Float::F32.holds_exactly(f32::MIN_POSITIVE / 2.0));
    }
}
