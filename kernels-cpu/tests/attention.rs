//! Attention on every kind of cache and every instruction set, against the definition: random, extreme and ragged.

use proptest::prelude::*;
use quant_kernels_cpu::attention::{
    Heads, KvCache, KvLayout, KvPages, KvType, PAGE_TOKENS, PageList, Workspace, dequantize_head, merge,
    quantize_head, quantize_query,
};
use quant_kernels_cpu::{Isa, KernelError, Parallel, Serial, reference};

/// Runs pieces backwards, and says that it has many threads.
struct Backwards;

// SAFETY: each number is called once, and all calls are done at the end.
unsafe impl Parallel for Backwards {
    fn threads(&self) -> usize {
        7
    }

    fn for_each(&self, count: usize, piece: &(dyn Fn(usize) + Sync)) {
        (0..count).rev().for_each(piece);
    }
}

/// Threads of its own.
struct Threads(usize);

// SAFETY: each number is called once, and all calls are done at the end.
unsafe impl Parallel for Threads {
    fn threads(&self) -> usize {
        self.0
    }

    fn for_each(&self, count: usize, piece: &(dyn Fn(usize) + Sync)) {
        std::thread::scope(|scope| {
            for t in 0..self.0 {
                scope.spawn(move || (t..count).step_by(self.0).for_each(piece));
            }
        });
    }
}

/// A stream of numbers that repeats itself for a seed.
struct Stream(u64);

impl Stream {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn float(&mut self) -> f32 {
        self.below(1 << 24) as f32 / (1 << 23) as f32 - 1.0
    }
}

const KINDS: [KvType; 3] = [KvType::Kv4, KvType::Kv8, KvType::F16];

/// A sequence, its pages in any order among others, and queries.
struct Case {
    layout: KvLayout,
    heads: Heads,
    /// Tokens and queries.
    shape: [usize; 2],
    /// `[tokens, kv, d]`
    keys: Vec<f32>,
    values: Vec<f32>,
    /// `[queries, query heads, d]`
    q: Vec<f32>,
    bytes: Vec<u8>,
    pages: Vec<Vec<u32>>,
    first: usize,
    seen: isize,
}

impl Case {
    fn new(kind: KvType, d: usize, [kv, group]: [usize; 2], [tokens, m]: [usize; 2], seed: u64) -> Self {
        let mut s = Stream(seed);
        let layout = KvLayout::new(kind, d).unwrap();
        let heads = Heads { query: kv * group, kv, scale: 1.0 / (d as f32).sqrt() };
        let head = |s: &mut Stream, out: &mut Vec<f32>| {
            let (style, size, shift) = (s.below(12), 2.0_f32.powi(s.below(5) as i32 - 2), 2.0 * s.float());
            out.extend((0..d).map(|_| match style {
                // Codes at both ends, zeros, constants, grids with subnormal scales, one outlier, and usual ones.
                0 => [-size, size][s.below(2) as usize],
                1 => 0.0,
                2 => shift,
                3 => s.float() * 3e-6,
                4 => shift + s.float() * 1e-4,
                5 if s.below(d as u64) == 0 => 40.0,
                _ => shift + s.float() * size,
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
            q.extend((0..d).map(|_| s.float() * size));
        }
        let blocks = tokens.div_ceil(PAGE_TOKENS);
        let mut order: Vec<u32> = (0..(blocks * kv + 3) as u32).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, s.below(i as u64 + 1) as usize);
        }
        // What nobody wrote reads as NaN.
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

    fn lists(&self) -> Vec<PageList<'_>> {
        let list = |pages| PageList { pages, tokens: self.shape[0], first: self.first, seen: self.seen };
        self.pages.iter().map(|pages| list(&pages[..])).collect()
    }

    fn run(&self, isa: Isa, lists: &[PageList<'_>], parallel: &dyn Parallel) -> (Vec<f32>, Vec<f32>) {
        let [_, m] = self.shape;
        let pages = KvPages::new(self.layout, self.layout.id(), &self.bytes).unwrap();
        let tokens = lists.iter().map(|list| list.tokens).max().unwrap();
        // Not one word more than was asked for.
        let words = KvPages::workspace(&self.layout, self.heads, m, tokens).unwrap();
        let mut workspace = vec![u32::MAX; words];
        let (mut out, mut lse) = (vec![f32::NAN; self.q.len()], vec![f32::NAN; m * self.heads.query]);
        let token = isa.token().unwrap();
        pages
            .attend(token, self.heads, lists, &self.q, &mut out, &mut lse, &mut workspace, parallel)
            .unwrap();
        (out, lse)
    }

    /// All instruction sets: the same bits but for outputs of bf16, and within the bound.
    fn check(&self) {
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

    fn check_bound(&self, (out, lse): &(Vec<f32>, Vec<f32>), bf16: bool) {
        let (d, [tokens, m]) = (self.layout.head_dim(), self.shape);
        let group = self.heads.query / self.heads.kv;
        let is_float = self.layout.kind() == KvType::F16;
        let bits = self.layout.bits() as u32;
        let centre = if is_float { 0.0 } else { 2.0_f64.powi(bits as i32 - 1) };
        for h in 0..self.heads.kv {
            // What the cache holds, by the definition; per number what the bound of values counts, and of
            // keys codes with their grids.
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
                let (scale, sum) = quantize_query(q, &mut codes);
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

fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|x| x.to_bits()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn all_instruction_sets_equal_the_definition(
        kind in prop::sample::select(KINDS.to_vec()),
        d in prop_oneof![1_usize..9, Just(4), Just(8), Just(16)].prop_map(|d| 16 * d),
        heads in (1_usize..4, 1_usize..10),
        tokens in 0_usize..200,
        m in 1_usize..5,
        first in 0_usize..90,
        seen in prop_oneof![Just(isize::MAX), -3_isize..200],
        seed: u64,
    ) {
        let mut case = Case::new(kind, d, [heads.0, heads.1], [tokens, m], seed);
        case.first = if seed % 2 == 0 { first.min(tokens) } else { 0 };
        case.seen = seen;
        case.check();
    }

    /// Parts of a list, cut between pages or within one, merge to what the whole gives.
    #[test]
    fn parts_merge(
        kind in prop::sample::select(KINDS.to_vec()),
        tokens in 1_usize..300,
        cut in 0_usize..300,
        m in 1_usize..4,
        causal: bool,
        seed: u64,
    ) {
        let mut case = Case::new(kind, 32, [2, 3], [tokens, m], seed);
        if causal {
            case.seen = tokens as isize - m as isize + 1;
        }
        let (isa, cut) = (Isa::available().last().unwrap(), cut.min(tokens));
        let whole = case.run(isa, &case.lists(), &Serial);
        let left: Vec<_> = case.lists().iter().map(|list| PageList { tokens: cut, ..*list }).collect();
        let right: Vec<_> = case.lists().iter().map(|list| PageList { first: cut, ..*list }).collect();
        let (mut out, mut lse) = case.run(isa, &left, &Serial);
        let (other, other_lse) = case.run(isa, &right, &Serial);
        merge(32, &mut out, &mut lse, &other, &other_lse).unwrap();
        for (a, b) in out.iter().zip(&whole.0).chain(lse.iter().zip(&whole.1)) {
            // Roundings to bf16 are relative to other maxima; scores of a case are below a hundred.
            let tolerance = if kind == KvType::F16 { 1e-4 } else { 1.0 / 128.0 };
            prop_assert!(a == b || (a - b).abs() <= tolerance * (1.0 + b.abs().max(4.0)), "{a} {b}");
        }
    }
}

/// Sequences of many chunks: the same bits for every number of threads and order, for few rows (a piece a
/// chunk) and many (a piece a block of rows).
#[test]
fn long_sequences_do_not_depend_on_the_split() {
    for (kind, heads, tokens, m) in [
        (KvType::Kv4, [2, 4], 5000, 1),
        (KvType::Kv8, [1, 7], 3100, 2),
        (KvType::F16, [3, 1], 2049, 1),
        (KvType::Kv4, [2, 2], 2300, 150),
        (KvType::F16, [1, 3], 1100, 80),
    ] {
        let mut case = Case::new(kind, 64, heads, [tokens, m], 11);
        case.seen = tokens as isize - m as isize + 1;
        let lists = case.lists();
        for isa in Isa::available() {
            if isa == Isa::Scalar && m > 1 {
                continue;
            }
            let expected = case.run(isa, &lists, &Serial);
            for parallel in [&Backwards as &dyn Parallel, &Threads(2), &Threads(3)] {
                let got = case.run(isa, &lists, parallel);
                assert_eq!([bits(&got.0), bits(&got.1)], [bits(&expected.0), bits(&expected.1)], "{isa:?}");
            }
            case.check_bound(&expected, isa == Isa::Avx512Bf16);
        }
    }
}

/// A query's bits are the same whether it comes alone, cut by chunks, or among many, cut by rows.
#[test]
fn prefill_equals_decoding() {
    for kind in KINDS {
        let mut many = Case::new(kind, 32, [1, 2], [2100, 100], 5);
        many.seen = 2100 - 99;
        for isa in Isa::available() {
            let (out, lse) = many.run(isa, &many.lists(), &Serial);
            for i in [0, 47, 99] {
                let width = 2 * 32;
                let mut one = Case::new(kind, 32, [1, 2], [2100, 1], 5);
                one.q = many.q[i * width..(i + 1) * width].to_vec();
                (one.bytes, one.pages) = (many.bytes.clone(), many.pages.clone());
                one.seen = 2001 + i as isize;
                let (o, l) = one.run(isa, &one.lists(), &Serial);
                assert_eq!(bits(&o), bits(&out[i * width..(i + 1) * width]), "{kind:?} {isa:?} {i}");
                assert_eq!(bits(&l), bits(&lse[i * 2..(i + 1) * 2]));
            }
        }
    }
}

/// The largest sums there are: all codes at their ends, the widest heads.
#[test]
fn whole_numbers_reach_their_ends() {
    for kind in [KvType::Kv4, KvType::Kv8] {
        let levels = if kind == KvType::Kv4 { 15.0 } else { 255.0 };
        let mut case = Case::new(kind, 512, [1, 4], [70, 1], 3);
        // One value is 0, the others are the largest: codes 0 and 511 times 15 or 255, scale 1 and zero 0.
        for t in 0..70 {
            let mut key = vec![levels; 512];
            key[t] = 0.0;
            let page = case.pages[0][t / PAGE_TOKENS] as usize * case.layout.page_bytes();
            let page = &mut case.bytes[page..page + case.layout.page_bytes()];
            case.layout.write(page, t % PAGE_TOKENS, &key, &key).unwrap();
        }
        case.heads.scale = 2.0_f32.powi(-12);
        for (r, q) in [127.0, -127.0, 1.0, -1.0].into_iter().enumerate() {
            case.q[r * 512..(r + 1) * 512].fill(q);
        }
        for isa in Isa::available() {
            let (out, lse) = case.run(isa, &case.lists(), &Backwards);
            for (r, q) in [127.0_f64, -127.0, 1.0, -1.0].into_iter().enumerate() {
                // The scale of a query of ones is 1/127, rounded.
                let factor = f64::from((q.abs() as f32) / 127.0) * 127.0 * q.signum();
                let score = 511.0 * f64::from(levels) * factor / 4096.0;
                let exact = score + 70.0_f64.ln();
                assert!((f64::from(lse[r]) - exact).abs() <= exact.abs() * 2e-7 + 1e-6, "{isa:?} {}", lse[r]);
                // Rounded to bf16, a token in seventy counts a little more or less.
                let values = out[r * 512..r * 512 + 512].iter().enumerate();
                for (f, v) in values {
                    let exact = f64::from(levels) * if f < 70 { 69.0 / 70.0 } else { 1.0 };
                    assert!((f64::from(*v) - exact).abs() <= exact * 4e-3, "{isa:?} {f} {v} {exact}");
                }
            }
        }
    }
}

#[test]
fn what_is_not_finite_stays_in_its_head() {
    for kind in KINDS {
        let mut case = Case::new(kind, 16, [2, 2], [1100, 2], 9);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30] {
            case.q[5 * 16 + 3] = bad;
            for isa in Isa::available() {
                let (out, lse) = case.run(isa, &case.lists(), &Serial);
                for row in 0..8 {
                    let whole = out[row * 16..(row + 1) * 16].iter().chain([&lse[row]]);
                    assert!(whole.clone().all(|v| v.is_nan() == (row == 5)), "{kind:?} {isa:?} {bad} {row}");
                }
            }
        }
    }
}

#[test]
fn a_cache_is_filled_in_any_portions() {
    let (kv, query, d, tokens) = (2, 6, 32, 1300);
    for kind in KINDS {
        let case = Case::new(kind, d, [kv, query / kv], [tokens, 3], 21);
        let mut cache = KvCache::new(case.layout, case.heads, 1300).unwrap();
        let width = kv * d;
        let mut at = 0;
        for portion in [1, 62, 1, 3, 500, 64, 669] {
            let part = at * width..(at + portion) * width;
            cache.append(&case.keys[part.clone()], &case.values[part], &Backwards).unwrap();
            at += portion;
        }
        assert_eq!((cache.tokens(), cache.bytes()), (tokens, cache.max_bytes()));
        let mut workspace = Workspace::default();
        let (mut out, mut lse) = (vec![0.0; 3 * query * d], vec![0.0; 3 * query]);
        cache.prefill(&case.q, &mut out, &mut lse, &mut workspace, &Threads(2)).unwrap();
        let causal: Vec<_> = case.pages.iter().map(|pages| PageList::causal(pages, tokens, 3)).collect();
        let expected = case.run(Isa::detect(), &causal, &Serial);
        assert_eq!([bits(&out), bits(&lse)], [bits(&expected.0), bits(&expected.1)]);
        // What was forgotten and filled in again is as it was; the last query is a decode.
        cache.truncate(100).unwrap();
        cache.append(&case.values[..77 * width], &case.keys[..77 * width], &Serial).unwrap();
        cache.truncate(100).unwrap();
        cache.append(&case.keys[100 * width..], &case.values[100 * width..], &Serial).unwrap();
        let last = &case.q[2 * query * d..];
        let (mut one, mut one_lse) = (vec![0.0; query * d], vec![0.0; query]);
        cache.decode(last, &mut one, &mut one_lse, &mut workspace, &Serial).unwrap();
        assert_eq!(bits(&one), bits(&out[2 * query * d..]));
        assert_eq!(bits(&one_lse), bits(&lse[2 * query..]));
        cache.clear();
        cache.decode(last, &mut one, &mut one_lse, &mut workspace, &Serial).unwrap();
        assert!(one.iter().all(|v| *v == 0.0) && one_lse.iter().all(|v| *v == f32::NEG_INFINITY));
    }
}

/// Pages of any owner, appended to in portions, hold what tokens written one by one hold.
#[test]
fn pages_are_appended_to_by_lists() {
    for kind in KINDS {
        // More pages than are compared without allocating.
        let case = Case::new(kind, 16, [3, 1], [1500, 1], 5);
        let mut bytes = vec![0xff; case.bytes.len()];
        let mut at = 0;
        for portion in [1, 63, 1, 0, 200, 64, 1171] {
            let lists: Vec<_> = case.pages.iter().map(|pages| PageList::all(pages, at)).collect();
            let part = at * 48..(at + portion) * 48;
            let (keys, values) = (&case.keys[part.clone()], &case.values[part]);
            case.layout.append(&mut bytes, &lists, keys, values, &Backwards).unwrap();
            at += portion;
        }
        assert!(at == 1500 && bytes == case.bytes, "{kind:?}");
    }
}

#[test]
fn appending_what_does_not_fit_writes_nothing() {
    let layout = KvLayout::new(KvType::Kv8, 16).unwrap();
    let mut bytes = vec![7; 4 * layout.page_bytes()];
    let x = vec![1.0; 2 * 32];
    let mut code = |len: usize, lists: &[PageList<'_>], keys: &[f32], values: &[f32]| {
        layout.append(&mut bytes[..len], lists, keys, values, &Serial).map_err(|e| e.code())
    };
    let all = 4 * layout.page_bytes();
    let lists = |a: &'static [u32], b: &'static [u32], tokens| [a, b].map(|p| PageList::all(p, tokens));
    assert_eq!(code(all, &[], &x, &x), Err(4));
    assert_eq!(code(all, &lists(&[0], &[1], 0), &x[1..], &x[1..]), Err(1));
    assert_eq!(code(all, &lists(&[0], &[1], 0), &x, &x[32..]), Err(1));
    assert_eq!(code(all - 1, &lists(&[0], &[1], 0), &x, &x), Err(1));
    assert_eq!(code(all, &lists(&[0], &[1], 63), &x, &x), Err(4));
    assert_eq!(code(all, &lists(&[0], &[4], 0), &x, &x), Err(4));
    assert_eq!(code(all, &lists(&[2], &[2], 0), &x, &x), Err(4));
    assert_eq!(code(all, &lists(&[0, 1], &[1, 2], 63), &x, &x), Err(4));
    assert_eq!(code(all, &lists(&[0], &[1], usize::MAX), &x, &x), Err(2));
    let mut bad = x.clone();
    bad[33] = f32::INFINITY;
    assert_eq!(code(all, &lists(&[0], &[1], 0), &x, &bad), Err(3));
    // What is full is not written.
    assert_eq!(code(all, &lists(&[9, 0], &[9, 1], 64), &[], &[]), Ok(()));
    assert!(bytes.iter().all(|&b| b == 7));
    assert_eq!(layout.append(&mut bytes, &lists(&[9, 0], &[9, 1], 64), &x, &x, &Serial), Ok(()));
}

/// 4.25 bits a number at 128 features, 8.25, and 16.
#[test]
fn caches_are_small() {
    let heads = Heads { query: 32, kv: 8, scale: 1.0 };
    let bytes = KINDS.map(|kind| {
        KvCache::new(KvLayout::new(kind, 128).unwrap(), heads, 32 << 10).unwrap().max_bytes() / (32 << 10) / 8
    });
    assert_eq!(bytes, [136, 264, 512]);
}

#[test]
fn misuse_is_an_error() {
    let case = Case::new(KvType::Kv4, 16, [2, 2], [70, 3], 1);
    let pages = KvPages::new(case.layout, case.layout.id(), &case.bytes).unwrap();
    let (heads, lists) = (case.heads, case.lists());
    let words = KvPages::workspace(&case.layout, heads, 3, 70).unwrap();
    let run = |heads, lists: &[PageList<'_>], q: &[f32], sizes: [usize; 3]| {
        let [out, lse, words] = sizes;
        let (mut out, mut lse, mut words) = (vec![0.0; out], vec![0.0; lse], vec![0; words]);
        let token = Isa::Scalar.token().unwrap();
        pages.attend(token, heads, lists, q, &mut out, &mut lse, &mut words, &Serial).map_err(|e| e.code())
    };
    let good = [3 * 64, 12, words];
    assert_eq!(run(heads, &lists, &case.q, good), Ok(()));
    assert_eq!(run(heads, &lists, &case.q[1..], good), Err(1));
    for i in 0..3 {
        let mut sizes = good;
        sizes[i] -= 1;
        assert_eq!(run(heads, &lists, &case.q, sizes), Err(1));
    }
    assert_eq!(run(heads, &lists[1..], &case.q, good), Err(1));
    let with = |list: PageList<'static>| [list, list];
    assert_eq!(run(heads, &with(PageList::all(&[0], 65)), &case.q, good), Err(4));
    assert_eq!(run(heads, &with(PageList::all(&[0, 99], 65)), &case.q, good), Err(4));
    assert_eq!(run(heads, &with(PageList::all(&[0, 99], 64)), &case.q, good), Ok(()));
    let skips = PageList { first: 65, ..PageList::all(&[0], 64) };
    assert_eq!(run(heads, &with(skips), &case.q, good), Err(4));
    assert_eq!(run(Heads { query: 3, ..heads }, &lists, &case.q, good), Err(4));
    assert_eq!(run(Heads { kv: 0, ..heads }, &[], &case.q, good), Err(4));
    assert_eq!(run(Heads { scale: f32::NAN, ..heads }, &lists, &case.q, good), Err(3));
    let code = |error: KernelError| error.code();
    assert_eq!(KvPages::new(case.layout, 1, &case.bytes).map_err(code).unwrap_err(), 5);
    let id = case.layout.id();
    assert_eq!(KvPages::new(case.layout, id, &case.bytes[1..]).map_err(code).unwrap_err(), 1);
    assert_eq!(KvPages::workspace(&case.layout, heads, usize::MAX / 2, 1).map_err(code).unwrap_err(), 2);
    assert_eq!(KvCache::new(case.layout, heads, usize::MAX).map_err(code).unwrap_err(), 2);
    assert_eq!(KvCache::new(case.layout, heads, 1 << 50).map_err(code).unwrap_err(), 2);

    let many = Heads { query: 1 << 40, kv: 1 << 40, scale: 1.0 };
    assert_eq!(KvCache::new(case.layout, many, 0).map_err(code).unwrap_err(), 2);

    let mut cache = KvCache::new(case.layout, heads, 66).unwrap();
    let x = vec![1.0; 67 * 32];
    assert_eq!(cache.append(&x, &x, &Serial).map_err(code), Err(2));
    assert_eq!(cache.append(&x[1..65], &x[..65], &Serial).map_err(code), Err(1));
    assert_eq!(cache.append(&x[..63], &x[..63], &Serial).map_err(code), Err(1));
    let mut bad = x.clone();
    bad[65] = f32::NAN;
    assert_eq!(cache.append(&x[..96], &bad[..96], &Serial).map_err(code), Err(3));
    assert_eq!(cache.tokens(), 0);
    cache.append(&x[..64], &x[..64], &Serial).unwrap();
    assert_eq!(cache.truncate(3).map_err(code), Err(4));
    let mut workspace = Workspace::default();
    let (mut out, mut lse) = (vec![0.0; 192], vec![0.0; 12]);
    assert_eq!(cache.prefill(&case.q, &mut out, &mut lse, &mut workspace, &Serial).map_err(code), Err(4));
    let q = &case.q[..128];
    assert_eq!(cache.decode(q, &mut out, &mut lse, &mut workspace, &Serial).map_err(code), Err(1));
    assert_eq!(merge(4, &mut [0.0; 8], &mut [0.0; 2], &[0.0; 8], &[0.0; 1]).map_err(code), Err(1));
    assert_eq!(merge(4, &mut [0.0; 7], &mut [0.0; 2], &[0.0; 8], &[0.0; 2]).map_err(code), Err(1));
}

#[test]
fn merging_takes_what_is_there() {
    let nothing = f32::NEG_INFINITY;
    let (mut out, mut lse) = ([0.0, 0.0, 1.0, 2.0], [nothing, 3.0]);
    merge(2, &mut out, &mut lse, &[5.0, 6.0, 9.0, 9.0], &[1.5, nothing]).unwrap();
    assert_eq!((out, lse), ([5.0, 6.0, 1.0, 2.0], [1.5, 3.0]));
    merge(2, &mut out, &mut lse, &[7.0, 8.0, 3.0, 4.0], &[1.5, f32::NAN]).unwrap();
    assert_eq!((out[..2].to_vec(), lse[0]), (vec![6.0, 7.0], 1.5 + 2.0_f32.ln()));
    assert!(out[2..].iter().all(|v| v.is_nan()) && lse[1].is_nan());
}
