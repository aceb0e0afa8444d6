//! `quant bench kernels`: what this machine can do at most, and how near the kernels come to it.

mod attention;
mod linear;

use quant_core::{Error, Result};
use quant_kernels_cpu::limits::{MemoryLimit, dot_limit, read_limit};
use quant_kernels_cpu::{Isa, IsaToken, KernelError, Rayon};
use serde::Serialize;

use super::Session;
use crate::output::JsonOption;

#[derive(Serialize)]
struct Report {
    schema: &'static str,
    isa: &'static str,
    threads: usize,
    memory: Memory,
    dot_tops: f64,
    linear: Vec<linear::Case>,
    attention: Vec<attention::Case>,
}

#[derive(Serialize)]
struct Memory {
    gb_per_second: f64,
    /// The best look, for a machine that others used while this ran.
    best_gb_per_second: f64,
    streams: usize,
}

/// Measures.
pub fn run(json: &JsonOption, session: &Session) -> Result<()> {
    let token = IsaToken::detect();
    let mut limits = Limits::default();
    let mut linear = linear::measure(&mut limits, token, session)?;
    let mut attention = attention::measure(&mut limits, token, session)?;
    limits.look(token);
    let (memory, dot_tops) = limits.usual();
    linear.iter_mut().for_each(|case| case.judge(memory.gb_per_second, dot_tops));
    attention.iter_mut().for_each(|case| case.judge(memory.gb_per_second));
    let report = Report {
        schema: "quant-bench-kernels/2",
        isa: token.isa().name(),
        threads: rayon::current_num_threads(),
        memory,
        dot_tops,
        linear,
        attention,
    };
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
    fn usual(mut self) -> (Memory, f64) {
        self.memory.sort_by(|a, b| a.bytes_per_second.total_cmp(&b.bytes_per_second));
        let (usual, best) = (self.memory[self.memory.len() / 2], self.memory[self.memory.len() - 1]);
        let memory = Memory {
            gb_per_second: usual.bytes_per_second / 1e9,
            best_gb_per_second: best.bytes_per_second / 1e9,
            streams: usual.streams,
        };
        (memory, median(&self.dot) / 1e12)
    }
}

/// The middle of some times.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

fn refused(error: KernelError) -> Error {
    Error::Internal(format!("a kernel refuses its operands: {error}"))
}

fn show(report: &Report) -> String {
    format!(
        "{}\n{}\nmemory {:.1} GB/s in {} stream(s) a thread (at best {:.1}), dot products {:.2} TOPS; \
         {} thread(s), {}\n",
        linear::show(&report.linear),
        attention::show(&report.attention),
        report.memory.gb_per_second,
        report.memory.streams,
        report.memory.best_gb_per_second,
        report.dot_tops,
        report.threads,
        match Isa::detect() {
            Isa::Scalar => "portable code",
            isa => isa.name(),
        }
    )
}
