//! A sequence in pages, queries on it, and the error bound of the results.

use quant_kernels_cpu::attention::{
    Heads, KvLayout, KvPages, KvType, PAGE_TOKENS, PageList, dequantize_head, quantize_head, quantize_query,
};
use quant_kernels_cpu::{Isa, Parallel, Serial, reference};

use crate::common::{Backwards, Stream};

pub const KINDS: [KvType; 3] = [KvType::Kv4, KvType::Kv8, KvType::F16];

pub struct Case {
    pub layout: KvLayout,
    pub heads: Heads,
    pub shape: [usize; 2],
    /// `[tokens, kv, d]`
    pub keys: Vec<f32>,
    pub values: Vec<f32>,
    /// `[queries, query heads, d]`
    pub q: Vec<f32>,
    pub bytes: Vec<u8>,
    pub pages: Vec<Vec<u32>>,
    pub first: usize,
    pub seen: isize,
}

impl Case {
    pub fn new(kind: KvType, d: usize, [kv, group]: [usize; 2], [tokens, m]: [usize; 2], seed: u64) -> Self {
        let mut s = Stream(seed);
        let layout = KvLayout::new(kind, d).unwrap();
        let heads = Heads { query: kv * group, kv, scale: 1.0 / (d as f32).sqrt() };
        let head = |s: &mut Stream, out: &mut Vec<f32>| {
            let (style, size, shift) = (s.below(12), 2.0_f32.powi(s.below(5) as i32 - 2), 2.0 * s.unit());
            out.extend((0..d).map(|_| match style {
                // Extreme codes, zeros, constants, grids with subnormal scales, values close together, outliers, and
                // typical values.
                0 => [-size, size][s.below(2) as usize],
                1 => 0.0,
                2 => shift,
                3 => s.unit() * 3e-6,
                4 => shift + s.unit() * 1e-4,
                5 if s.below(d as u64) == 0 => 40.0,
                _ => shift + s.unit() * size,
            }));
        };
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for _ in 0..tokens * kv {
            head(&mut s, &mut keys);
            head(&mut s, &mut values);
        }
        let mut q: Vec<f32> = Vec::new();
        for _ in 0..m * heads.query {
            let size = [1.0, 1.0, 4.0, 0.0, 1e-3][s.below(5) as usize];
            q.extend((0..d).map(|_| s.unit() * size));
        }
        let blocks = tokens.div_ceil(PAGE_TOKENS);
        let mut order: Vec<u32> = (0..(blocks * kv + 3) as u32).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, s.below(i as u64 + 1) as usize);
        }
        // Fill the pages with NaN, so that reading unwritten slots shows.
        let mut bytes = vec![0xff; order.len() * layout.page_bytes()];
        let pages: Vec<Vec<u32>> = (0..kv).map(|h| order[h * blocks..(h + 1) * blocks].to_vec()).collect();
        for t in 0..tokens {
            for (h, pages) in pages.iter().enumerate() {
                let page = pages[t / PAGE_TOKENS] as usize * layout.page_bytes();
                let page = &mut bytes[page..page + layout.page_bytes()];
                let at = (t * kv + h) * d;
                layout.write(page, t % PAGE_TOKENS, &keys[at..at + d], &values[at..at + d]).unwrap();
            }
        }
        Self { layout, heads, shape: [tokens, m], keys, values, q, bytes, pages, first: 0, seen: isize::MAX }
    }

    pub fn lists(&self) -> Vec<PageList<'_>> {
        let list = |pages| PageList { pages, tokens: self.shape[0], first: self.first, seen: self.seen };
        self.pages.iter().map(|pages| list(&pages[..])).collect()
    }

    pub fn run(&self, isa: Isa, lists: &[PageList<'_>], parallel: &dyn Parallel) -> (Vec<f32>, Vec<f32>) {
        let [_, m] = self.shape;
        let pages = KvPages::new(self.layout, self.layout.id(), &self.bytes).unwrap();
        let tokens = lists.iter().map(|list| list.tokens).max().unwrap();
        let words = KvPages::workspace(&self.layout, self.heads, m, tokens).unwrap();
        let mut workspace = vec![u32::MAX; words];
        let (mut out, mut lse) = (vec![f32::NAN; self.q.len()], vec![f32::NAN; m * self.heads.query]);
        let token = isa.token().unwrap();
        pages
            .attend(token, self.heads, lists, &self.q, &mut out, &mut lse, &mut workspace, parallel)
            .unwrap();
        (out, lse)
    }

    pub fn check(&self) {
        let lists = self.lists();
        let expected = self.run(Isa::Scalar, &lists, &Serial);
        self.check_bound(&expected, false);
        for isa in Isa::available() {
            for parallel in [&Serial as &dyn Parallel, &Backwards] {
                let (out, lse) = self.run(isa, &lists, parallel);
                assert_eq!(bits(&lse), bits(&expected.1), "{isa:?}");
                if isa != Isa::Avx512Bf16 || self.layout.kind() == KvType::F16 {
                    assert_eq!(bits(&out), bits(&expected.0), "{isa:?}");
                } else {
                    self.check_bound(&(out, lse), true);
                }
            }
        }
    }

    pub fn check_bound(&self, (out, lse): &(Vec<f32>, Vec<f32>), bf16: bool) {
        let (d, [tokens, m]) = (self.layout.head_dim(), self.shape);
        let group = self.heads.query / self.heads.kv;
        let is_float = self.layout.kind() == KvType::F16;
        let bits = self.layout.bits() as u32;
        let centre = if is_float { 0.0 } else { 2.0_f64.powi(bits as i32 - 1) };
        for h in 0..self.heads.kv {
            // The contents of the cache as the reference defines them.
            let (mut keys, mut values, mut sizes, mut grids) = (vec![], vec![], vec![], vec![]);
            for t in 0..tokens {
                let at = (t * self.heads.kv + h) * d;
                for (x, to) in [(&self.keys, &mut keys), (&self.values, &mut values)] {
                    let x = &x[at..at + d];
                    if is_float {
                        to.extend(x.iter().map(|&x| half::f16::from_f32(x).to_f32()));
                        continue;
                    }
                    let (mut codes, mut floats) = (vec![0; d], vec![0.0; d]);
                    let grid = quantize_head(x, bits, &mut codes).unwrap();
                    dequantize_head(&codes, grid, &mut floats).unwrap();
                    to.extend(floats);
                    grids.push((grid, codes));
                }
                match grids.last() {
                    Some((grid, codes)) => sizes.extend(codes.iter().map(|&c| {
                        let (s, z) = (f64::from(grid.scale.to_f32()), f64::from(grid.zero.to_f32()));
                        s * (f64::from(c) - centre).abs() + (z + centre * s).abs()
                    })),
                    None => sizes.extend(values[t * d..].iter().map(|v| f64::from(v.abs()))),
                }
            }
            for row in (0..m * group).map(|r| r / group * self.heads.query + h * group + r % group) {
                let i = row / self.heads.query;
                let q = &self.q[row * d..][..d];
                let mut codes = vec![0; d];
                let (scale, sum) = quantize_query(q, &mut codes).unwrap();
                let used: Vec<f64> = match is_float {
                    true => q.iter().map(|&q| f64::from(q)).collect(),
                    false => codes.iter().map(|&c| f64::from(scale) * f64::from(c)).collect(),
                };
                let end = self.seen.saturating_add_unsigned(i).clamp(0, tokens as isize) as usize;
                let seen = self.first.min(end)..end;
                let part = |v: &[f32]| v[seen.start * d..seen.end * d].to_vec();
                let by = f64::from(self.heads.scale);
                let (exact, exact_lse, p) = reference::attention(&used, &part(&keys), &part(&values), by);
                let scores = seen.clone().map(|t| match is_float {
                    true => {
                        let terms = used.iter().zip(&keys[t * d..]).map(|(q, k)| (q * f64::from(*k)).abs());
                        by * terms.sum::<f64>()
                    }
                    false => {
                        let (grid, key) = &grids[2 * t];
                        let dot: i32 =
                            codes.iter().zip(key).map(|(&a, &c)| i32::from(a) * i32::from(c)).sum();
                        let shared = f64::from(grid.zero.to_f32()) * f64::from(sum);
                        let own = f64::from(grid.scale.to_f32()) * f64::from(dot);
                        by * f64::from(scale) * (shared.abs() + own.abs())
                    }
                });
                let b = scores.fold(0.0, f64::max);
                let off = if is_float { (d as f64 + 2.0) * 2.0_f64.powi(-24) } else { 2.0_f64.powi(-22) };
                let epsilon = 2.0 * off * b + 2.0_f64.powi(-23) * b + 2.0_f64.powi(-22);
                let sums = (1040.0 + 3.0 * (tokens as f64 / 1024.0).ceil()) * 2.0_f64.powi(-24);
                let got = lse[row];
                if seen.is_empty() {
                    assert!(got == f32::NEG_INFINITY && out[row * d..][..d].iter().all(|v| *v == 0.0));
                    continue;
                }
                let bound = 2.0 * epsilon + sums + 2.0_f64.powi(-23) * exact_lse.abs();
                assert!((f64::from(got) - exact_lse).abs() <= bound, "lse {got}, not {exact_lse}");
                for f in 0..d {
                    let size: f64 = p.iter().zip(seen.clone()).map(|(p, t)| p * sizes[t * d + f]).sum();
                    let rounding = if bf16 { 2.0_f64.powi(-8) } else { 0.0 };
                    let bound = (2.0 * epsilon + 2.0 * sums + rounding) * size + 1e-30;
                    let got = f64::from(out[row * d + f]);
                    let off = (got - exact[f]).abs();
                    assert!(off <= bound, "{got}, not {}: {off:e} of {bound:e}", exact[f]);
                }
            }
        }
    }
}

pub fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|x| x.to_bits()).collect()
}
