//! Attention in f64 on the contents of a cache, and the error bound from the documentation of
//! `quant_kernels_cuda::attention`.

use std::ops::Range;

use quant_kernels_cpu::attention::{KvType, quantize_head};

/// The contents of the cache for one key-value head of one sequence.
pub struct Held {
    pub kind: KvType,
    pub head_dim: usize,
    /// Keys and values as stored: `[tokens, head_dim]`.
    pub rows: [Vec<f64>; 2],
    /// Scales and zero points of keys and values; empty for f16.
    pub grids: [Vec<[f64; 2]>; 2],
}

impl Held {
    pub fn new(kind: KvType, head_dim: usize) -> Self {
        Self { kind, head_dim, rows: [Vec::new(), Vec::new()], grids: [Vec::new(), Vec::new()] }
    }

    pub fn tokens(&self) -> usize {
        self.rows[0].len() / self.head_dim
    }

    pub fn push(&mut self, key: &[f32], value: &[f32]) {
        for (part, x) in [key, value].into_iter().enumerate() {
            if self.kind == KvType::F16 {
                self.rows[part].extend(x.iter().map(|&x| half::f16::from_f32(x).to_f64()));
                continue;
            }
            let mut codes = vec![0; x.len()];
            let grid = quantize_head(x, if self.kind == KvType::Kv4 { 4 } else { 8 }, &mut codes).unwrap();
            let (scale, zero) = (grid.scale.to_f64(), grid.zero.to_f64());
            self.grids[part].push([scale, zero]);
            self.rows[part].extend(codes.iter().map(|&code| scale * f64::from(code) + zero));
        }
    }

    pub fn attend(&self, query: &[f64], scale: f64, seen: Range<usize>, is_bf16: bool) -> Expected {
        let (d, n) = (self.head_dim, self.tokens());
        let key = |t: usize| &self.rows[0][t * d..][..d];
        let value = |t: usize| &self.rows[1][t * d..][..d];
        let scores: Vec<f64> =
            seen.clone().map(|t| scale * query.iter().zip(key(t)).map(|(q, k)| q * k).sum::<f64>()).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
        let (centre, largest_code) = match self.kind {
            KvType::Kv4 => (8.0, 271.0),
            KvType::Kv8 => (128.0, 1279.0),
            KvType::F16 => (0.0, 0.0),
        };
        let u = 2.0_f64.powi(-24);
        let magnitude: f64 = query.iter().map(|q| q.abs()).sum();
        let adds = (512.0_f64).max(n as f64 / 32.0 + 64.0) / 2.0 + 64.0;
        let d_ = d as f64;
        let mut delta = 0.0_f64;
        for t in seen.clone() {
            let here = match self.kind {
                KvType::F16 => {
                    let product: f64 = query.iter().zip(key(t)).map(|(q, k)| (q * k).abs()).sum();
                    (2.0 * d_ + 16.0) * u * product
                }
                _ => {
                    let [s, z] = self.grids[0][t];
                    (6.0 * d_ + 32.0) * u * magnitude * (largest_code * s + z.abs())
                }
            };
            let query_rounding = if is_bf16 {
                let largest = query.iter().fold(0.0_f64, |m, q| m.max(q.abs()));
                d_ * 2.0_f64.powi(-39) * largest * key(t).iter().fold(0.0_f64, |m, k| m.max(k.abs()))
            } else {
                0.0
            };
            delta = delta.max(scale.abs() * (here + query_rounding));
        }
        let reach = scores.iter().fold(0.0_f64, |m, s| m.max(s.abs()));
        let epsilon = 2.0 * delta + 2.0_f64.powi(-21) + 2.0_f64.powi(-22) * reach;
        let seen_values = self.rows[1][seen.start * d..seen.end * d].iter();
        let (mut out, mut bound) = (vec![0.0; d], vec![0.0; d]);
        let mut largest = 0.0_f64;
        for (score, t) in scores.iter().zip(seen) {
            let p = (score - max).exp() / total;
            let step = if self.kind == KvType::F16 { 0.0 } else { self.grids[1][t][0] };
            for ((out, bound), v) in out.iter_mut().zip(&mut bound).zip(value(t)) {
                *out += p * v;
                *bound += p * (2.0 * epsilon + 4.0 * adds * u) * v.abs();
                match self.kind {
                    KvType::F16 => *bound += p * v.abs() * 2.0_f64.powi(-11),
                    _ => {
                        let from_centre = (v - self.grids[1][t][1] - centre * step).abs();
                        *bound += p * from_centre * 2.0_f64.powi(-11);
                        *bound += p * step * (4.0 * adds * u * largest_code + 2.0 * epsilon);
                    }
                }
                largest = largest.max(if self.kind == KvType::F16 { v.abs() } else { centre * step });
            }
        }
        let left = if self.kind == KvType::F16 { -32 } else { -31 };
        let widest = seen_values.fold(0.0_f64, |max, v| max.max(v.abs()));
        bound.iter_mut().for_each(|b| *b += 2.0_f64.powi(left) * n as f64 * largest);
        let lse = max + total.ln();
        let lse_bound = epsilon + (adds + 8.0) * u + 2.0_f64.powi(-22) * (1.0 + lse.abs());
        Expected { out, bound, lse, lse_bound, widest }
    }
}

pub struct Expected {
    pub out: Vec<f64>,
    pub bound: Vec<f64>,
    pub lse: f64,
    pub lse_bound: f64,
    /// The largest magnitude of a value.
    pub widest: f64,
}

pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    /// A sum of uniform numbers, with standard deviation 1.
    pub fn normal(&mut self) -> f32 {
        (0..4).map(|_| self.next() as f32 / u64::MAX as f32 - 0.5).sum::<f32>() * 3.0_f32.sqrt()
    }

    pub fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}
