//! Linear layers: with few tokens, they are limited by memory bandwidth; with many, by arithmetic.

use std::hint::black_box;
use std::ops::RangeInclusive;
use std::time::Instant;

use quant_core::Result;
use quant_core::random::SplitMix64;
use quant_kernels_cpu::{
    FloatFormat, FloatRows, Int8Rows, IsaToken, KernelError, PackedLinear, Rayon, RowLayout, Scales,
    WeightView,
};
use serde::Serialize;

use super::super::Session;
use super::{Limits, Only, median, refused};
use crate::output::table;

/// `[n, k]` of the linears, as in models of 1 and 8 billion parameters.
const SHAPES: [[usize; 2]; 5] = [[4096, 4096], [14336, 4096], [4096, 14336], [2048, 2048], [8192, 2048]];
const TOKENS: [usize; 5] = [1, 4, 16, 64, 512];
/// Bytes of weights that are read in turn if there are few tokens: more than the last-level caches of most processors
/// hold.
const ROTATED: usize = 192 << 20;
/// Minimum number of rounds per case, including those that only warm up; the median of the others is reported.
const ROUNDS: usize = 7;

/// A scheme and whether activations are integers.
#[derive(Debug, Clone, Copy)]
struct Scheme {
    name: &'static str,
    codes: Codes,
    group_size: Option<usize>,
    int8: bool,
}

#[derive(Debug, Clone, Copy)]
enum Codes {
    Int(u8),
    /// A floating-point format. The scales of groups of 16 are E4M3 below a global scale, those of other groups are
    /// powers of two; scales per row are floats.
    Float(FloatFormat),
}

impl Codes {
    fn bits(self) -> u8 {
        match self {
            Self::Int(bits) => bits,
            Self::Float(format) => format.bits(),
        }
    }
}

const SCHEMES: [Scheme; 10] = [
    Scheme { name: "w4a8-g128", codes: Codes::Int(4), group_size: Some(128), int8: true },
    Scheme { name: "w4a8-g32", codes: Codes::Int(4), group_size: Some(32), int8: true },
    Scheme { name: "w8a8-channel", codes: Codes::Int(8), group_size: None, int8: true },
    Scheme { name: "w4a16-g128", codes: Codes::Int(4), group_size: Some(128), int8: false },
    Scheme { name: "w8a16-channel", codes: Codes::Int(8), group_size: None, int8: false },
    Scheme { name: "wf4a8-g32-mx", codes: Codes::Float(FloatFormat::E2m1), group_size: Some(32), int8: true },
    Scheme { name: "wf4a8-g16-nv", codes: Codes::Float(FloatFormat::E2m1), group_size: Some(16), int8: true },
    Scheme {
        name: "wf4a16-g32-mx",
        codes: Codes::Float(FloatFormat::E2m1),
        group_size: Some(32),
        int8: false,
    },
    Scheme {
        name: "wf4a16-g16-nv",
        codes: Codes::Float(FloatFormat::E2m1),
        group_size: Some(16),
        int8: false,
    },
    Scheme { name: "wf8a16-channel", codes: Codes::Float(FloatFormat::E4m3), group_size: None, int8: false },
];

#[derive(Serialize)]
pub(super) struct Case {
    kernel: &'static str,
    n: usize,
    k: usize,
    tokens: usize,
    bits_per_weight: f64,
    /// Seconds of each round, without those that only warm up.
    seconds: Vec<f64>,
    gb_per_second: f64,
    /// `gb_per_second` as a share of the memory bandwidth measured just before and after.
    memory_share: f64,
    tops: f64,
    /// `tops` as a share of the rate at which this path multiplies such activations in registers, measured just before
    /// and after. If this path splits an `f32` activation into several bf16 values, the products of all of them are
    /// counted.
    dot_share: f64,
    #[serde(skip)]
    products: Option<f64>,
    #[serde(skip)]
    probes: RangeInclusive<usize>,
}

impl Case {
    pub(super) fn judge(&mut self, limits: &Limits) {
        let [gb_per_second, integers, floats] = limits.during(&self.probes);
        self.memory_share = self.gb_per_second / gb_per_second;
        self.dot_share = match self.products {
            None => self.tops / integers,
            Some(products) => self.tops * products / floats,
        };
    }
}

fn chosen<'a>(only: &'a Only<'_>) -> impl Iterator<Item = (Scheme, [usize; 2])> + 'a {
    let all = SHAPES.into_iter().flat_map(|shape| SCHEMES.map(|scheme| (scheme, shape)));
    all.filter(|(scheme, shape)| only.takes(&name(*scheme, *shape)))
}

fn name(scheme: Scheme, [n, k]: [usize; 2]) -> String {
    format!("{} {n} x {k}", scheme.name)
}

pub(super) fn taken(only: &Only<'_>) -> usize {
    chosen(only).count()
}

pub(super) fn measure(
    limits: &mut Limits,
    token: IsaToken,
    only: &Only<'_>,
    session: &Session,
) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    for (scheme, shape) in chosen(only) {
        session.cancel.check()?;
        session.progress.note(&name(scheme, shape));
        let packed = pack(scheme, shape).map_err(refused)?;
        let copies =
            vec![packed; ROTATED.div_ceil(shape[0] * shape[1] * usize::from(scheme.codes.bits()) / 8)];
        let mut before = limits.probe();
        for tokens in TOKENS {
            session.cancel.check()?;
            let mut case = time(scheme, &copies, tokens, token).map_err(refused)?;
            let after = limits.probe();
            case.probes = before..=after;
            cases.push(case);
            before = after;
        }
    }
    Ok(cases)
}

fn pack(scheme: Scheme, [n, k]: [usize; 2]) -> Result<PackedLinear, KernelError> {
    let group_size = scheme.group_size.unwrap_or(k);
    let mut random = SplitMix64(n as u64 ^ k as u64);
    let mask = u8::MAX >> (8 - scheme.codes.bits());
    let codes: Vec<u8> =
        (0..n * k / 8).flat_map(|_| random.next_u64().to_le_bytes()).map(|b| b & mask).collect();
    let scales: Vec<f32> = (0..n * k / group_size).map(|i| (1 + i % 7) as f32 / 1024.0).collect();
    // Replace codes that are NaN or infinite.
    let codes: Vec<u8> = match scheme.codes {
        Codes::Int(_) => codes,
        Codes::Float(format) => codes.into_iter().map(|c| if format.is_number(c) { c } else { 0 }).collect(),
    };
    let bytes: Vec<u8> = (0..n * k / group_size).map(|i| 0x30 + (i % 7) as u8).collect();
    let powers: Vec<f32> = bytes.iter().map(|&code| 2.0_f32.powi(i32::from(code % 7) - 9)).collect();
    let view = match (scheme.codes, scheme.group_size) {
        (Codes::Int(bits), _) => WeightView::new([n, k], bits, group_size, &codes, &scales, None),
        (Codes::Float(format), None) => WeightView::float([n, k], format, group_size, &codes, &scales),
        (Codes::Float(format), Some(16)) => {
            let scales = Scales::E4m3 { groups: &bytes, global: 1000.0 };
            WeightView::float_with_scales([n, k], format, group_size, &codes, scales)
        }
        (Codes::Float(format), Some(_)) => WeightView::float([n, k], format, group_size, &codes, &powers),
    };
    let Ok(view) = view else {
        return Err(KernelError::Scheme("the group size must divide the number of input features"));
    };
    PackedLinear::pack(&view, None, false, &Rayon)
}

fn time(
    scheme: Scheme,
    copies: &[PackedLinear],
    tokens: usize,
    token: IsaToken,
) -> Result<Case, KernelError> {
    let layout = *copies[0].layout();
    let (n, k) = (layout.n(), layout.k());
    let x: Vec<f32> = (0..tokens * k).map(|i| ((i * 7919) % 997) as f32 - 498.0).collect();
    let (mut whole, mut floats) = (Int8Rows::new(token), FloatRows::new(token));
    whole.quantize(&x, RowLayout::of(&layout), &Rayon)?;
    floats.pack(&x, RowLayout::of(&layout), &Rayon)?;
    // Ones, because the system would allocate the pages of a zeroed vector only on the first write.
    let mut out = vec![1.0; tokens * n];
    let mut seconds = Vec::new();
    // The first `min(rounds, copies) / 2` rounds only warm up and are not recorded.
    let rounds = if tokens <= 16 { ROUNDS.max(2 * copies.len()) } else { ROUNDS };
    for round in 0..rounds {
        let weights = &copies[round % copies.len()];
        let started = Instant::now();
        match scheme.int8 {
            true => weights.multiply(&whole, &mut out, &Rayon)?,
            false => weights.multiply_float(&floats, &mut out, &Rayon)?,
        }
        black_box(&out);
        if round >= rounds.min(copies.len()) / 2 {
            seconds.push(started.elapsed().as_secs_f64());
        }
    }
    let median_seconds = median(&seconds);
    let (bytes, operations) = (layout.bytes() as f64, 2.0 * (n * k * tokens) as f64);
    Ok(Case {
        kernel: scheme.name,
        n,
        k,
        tokens,
        bits_per_weight: layout.bits_per_weight(),
        gb_per_second: bytes / median_seconds / 1e9,
        memory_share: 0.0,
        tops: operations / median_seconds / 1e12,
        dot_share: 0.0,
        products: (!scheme.int8).then(|| if token.isa().splits_floats() { 2.0 } else { 1.0 }),
        probes: 0..=0,
        seconds,
    })
}

pub(super) fn show(cases: &[Case]) -> Option<String> {
    if cases.is_empty() {
        return None;
    }
    let mut header: Vec<String> = vec!["kernel".into(), "n x k".into(), "bits".into()];
    header.extend(TOKENS.iter().map(|t| if *t <= 4 { format!("{t}: GB/s") } else { format!("{t}: TOPS") }));
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let rows: Vec<Vec<String>> = cases
        .chunks(TOKENS.len())
        .map(|cases| {
            let first = &cases[0];
            let shape = format!("{} x {}", first.n, first.k);
            let mut row = vec![first.kernel.to_owned(), shape, format!("{:.3}", first.bits_per_weight)];
            row.extend(cases.iter().map(|c| match c.tokens {
                ..=4 => format!("{:.1} ({:.0} %)", c.gb_per_second, 100.0 * c.memory_share),
                _ => format!("{:.2} ({:.0} %)", c.tops, 100.0 * c.dot_share),
            }));
            row
        })
        .collect();
    Some(table(&header, &rows))
}
