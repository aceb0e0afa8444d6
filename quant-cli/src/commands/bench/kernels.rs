//! `quant bench kernels`: what this machine can do at most, and how near the kernels come to it.

use std::hint::black_box;
use std::time::Instant;

use quant_core::random::SplitMix64;
use quant_core::{Error, Result};
use quant_kernels_cpu::limits::{MemoryLimit, dot_limit, read_limit};
use quant_kernels_cpu::{
    FloatRows, Int8Rows, Isa, IsaToken, KernelError, PackedLinear, Rayon, RowLayout, WeightView,
};
use serde::Serialize;

use super::Session;
use crate::output::{JsonOption, table};

/// `[n, k]` of the linears, those of models of 1 and 8 billion parameters.
const SHAPES: [[usize; 2]; 5] = [[4096, 4096], [14336, 4096], [4096, 14336], [2048, 2048], [8192, 2048]];
const TOKENS: [usize; 5] = [1, 4, 16, 64, 512];
/// Weights that are read in turn for few tokens: more than any last cache holds.
const ROTATED: usize = 192 << 20;
/// Times of each case; the median counts.
const ROUNDS: usize = 7;

/// A scheme and whether activations are whole numbers.
#[derive(Debug, Clone, Copy)]
struct Scheme {
    name: &'static str,
    bits: u8,
    group_size: Option<usize>,
    int8: bool,
}

const SCHEMES: [Scheme; 5] = [
    Scheme { name: "w4a8-g128", bits: 4, group_size: Some(128), int8: true },
    Scheme { name: "w4a8-g32", bits: 4, group_size: Some(32), int8: true },
    Scheme { name: "w8a8-channel", bits: 8, group_size: None, int8: true },
    Scheme { name: "w4a16-g128", bits: 4, group_size: Some(128), int8: false },
    Scheme { name: "w8a16-channel", bits: 8, group_size: None, int8: false },
];

#[derive(Serialize)]
struct Report {
    schema: &'static str,
    isa: &'static str,
    threads: usize,
    memory: Memory,
    dot_tops: f64,
    cases: Vec<Case>,
}

#[derive(Serialize)]
struct Memory {
    gb_per_second: f64,
    streams: usize,
}

#[derive(Serialize)]
struct Case {
    kernel: &'static str,
    n: usize,
    k: usize,
    tokens: usize,
    bits_per_weight: f64,
    /// Of each round.
    seconds: Vec<f64>,
    gb_per_second: f64,
    /// Of what memory gave in this run.
    memory_share: f64,
    tops: f64,
    /// Of what dot products in registers gave.
    dot_share: f64,
}

/// Measures.
pub fn run(json: &JsonOption, session: &Session) -> Result<()> {
    let token = IsaToken::detect();
    let mut limits = Limits::default();
    let mut report = Report {
        schema: "quant-bench-kernels/1",
        isa: token.isa().name(),
        threads: rayon::current_num_threads(),
        memory: Memory { gb_per_second: 0.0, streams: 0 },
        dot_tops: 0.0,
        cases: Vec::new(),
    };
    for [n, k] in SHAPES {
        for scheme in SCHEMES {
            limits.look(token);
            session.cancel.check()?;
            session.progress.note(&format!("{} {n} x {k}", scheme.name));
            measure(&mut report, scheme, [n, k], token, session).map_err(refused)?;
        }
    }
    limits.look(token);
    if let Some((memory, dot)) = limits.usual() {
        report.memory = Memory { gb_per_second: memory.bytes_per_second / 1e9, streams: memory.streams };
        report.dot_tops = dot / 1e12;
    }
    for case in &mut report.cases {
        case.memory_share = case.gb_per_second / report.memory.gb_per_second;
        case.dot_share = case.tops / report.dot_tops;
    }
    json.emit(&report, || show(&report))
}

/// Limits, looked at between the cases: on a shared machine they change while one measures.
#[derive(Default)]
struct Limits {
    memory: Vec<MemoryLimit>,
    dot: Vec<f64>,
}

impl Limits {
    fn look(&mut self, token: IsaToken) {
        let memory = vec![1_u64; 32 << 20];
        self.memory.push(read_limit(token, &memory, 1, &Rayon));
        self.dot.push(dot_limit(token, 2, &Rayon));
    }

    /// The median look, each the best of its patterns.
    fn usual(mut self) -> Option<(MemoryLimit, f64)> {
        self.memory.sort_by(|a, b| a.bytes_per_second.total_cmp(&b.bytes_per_second));
        self.dot.sort_by(f64::total_cmp);
        Some((*self.memory.get(self.memory.len() / 2)?, *self.dot.get(self.dot.len() / 2)?))
    }
}

fn refused(error: KernelError) -> Error {
    Error::Internal(format!("a kernel refuses its operands: {error}"))
}

fn measure(
    report: &mut Report,
    scheme: Scheme,
    [n, k]: [usize; 2],
    token: IsaToken,
    session: &Session,
) -> std::result::Result<(), KernelError> {
    let group_size = scheme.group_size.unwrap_or(k);
    let mut random = SplitMix64(n as u64 ^ k as u64);
    let mask = u8::MAX >> (8 - scheme.bits);
    let codes: Vec<u8> =
        (0..n * k / 8).flat_map(|_| random.next_u64().to_le_bytes()).map(|b| b & mask).collect();
    let scales: Vec<f32> = (0..n * k / group_size).map(|i| (1 + i % 7) as f32 / 1024.0).collect();
    let Ok(view) = WeightView::new([n, k], scheme.bits, group_size, &codes, &scales, None) else {
        return Err(KernelError::Scheme("a shape that its groups do not divide"));
    };
    let packed = PackedLinear::pack(&view, None, false, &Rayon)?;
    drop(codes);
    let layout = *packed.layout();
    let copies: Vec<PackedLinear> = (0..ROTATED.div_ceil(layout.bytes())).map(|_| packed.clone()).collect();
    for tokens in TOKENS {
        if session.cancel.check().is_err() {
            return Ok(());
        }
        let x: Vec<f32> = (0..tokens * k).map(|i| ((i * 7919) % 997) as f32 - 498.0).collect();
        let (mut whole, mut floats) = (Int8Rows::default(), FloatRows::new(token));
        whole.quantize(&x, RowLayout::of(&layout), &Rayon)?;
        floats.pack(&x, RowLayout::of(&layout), &Rayon)?;
        let mut out = vec![0.0; tokens * n];
        let mut seconds = Vec::new();
        // The first round of all copies only fetches them.
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
        let mut sorted = seconds.clone();
        sorted.sort_by(f64::total_cmp);
        let median = sorted[sorted.len() / 2];
        let (bytes, operations) = (layout.bytes() as f64, 2.0 * (n * k * tokens) as f64);
        report.cases.push(Case {
            kernel: scheme.name,
            n,
            k,
            tokens,
            bits_per_weight: layout.bits_per_weight(),
            gb_per_second: bytes / median / 1e9,
            memory_share: 0.0,
            tops: operations / median / 1e12,
            dot_share: 0.0,
            seconds,
        });
    }
    Ok(())
}

fn show(report: &Report) -> String {
    let mut header: Vec<String> = vec!["kernel".into(), "n x k".into(), "bits".into()];
    header.extend(TOKENS.iter().map(|t| if *t <= 4 { format!("{t}: GB/s") } else { format!("{t}: TOPS") }));
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let rows: Vec<Vec<String>> = report
        .cases
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
    format!(
        "{}\nmemory {:.1} GB/s in {} stream(s) a thread, dot products {:.2} TOPS; {} thread(s), {}\n",
        table(&header, &rows),
        report.memory.gb_per_second,
        report.memory.streams,
        report.dot_tops,
        report.threads,
        match Isa::detect() {
            Isa::Scalar => "portable code",
            isa => isa.name(),
        }
    )
}
