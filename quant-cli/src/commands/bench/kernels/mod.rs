//! `quant bench kernels`: what this machine can do at most, and how near the kernels come to it.

mod attention;
mod cuda;
mod linear;

use std::ops::RangeInclusive;

use quant_core::{Error, Result};
use quant_kernels_cpu::limits::{MemoryLimit, dot_limit, read_limit};
use quant_kernels_cpu::{Isa, IsaToken, KernelError, Rayon};
use serde::Serialize;

use super::Session;
use crate::device::Device;
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

/// A part of what kernels and shapes are called, or all.
struct Only<'a>(Option<&'a str>);

impl Only<'_> {
    fn takes(&self, name: &str) -> bool {
        self.0.is_none_or(|part| name.contains(part))
    }

    /// Fails when it takes nothing.
    fn check(&self, taken: usize) -> Result<()> {
        match self.0 {
            Some(part) if taken == 0 => Err(Error::usage(
                format!("no kernel that is measured has `{part}` in its name"),
                "leave --only out, and see what there is",
            )),
            _ => Ok(()),
        }
    }
}

#[derive(Serialize)]
struct Memory {
    gb_per_second: f64,
    /// The best look, for a machine that others used while this ran.
    best_gb_per_second: f64,
    streams: usize,
}

/// Measures those of the processor, or of a GPU.
pub fn run(only: Option<&str>, device: Device, json: &JsonOption, session: &Session) -> Result<()> {
    let only = Only(only);
    if device == Device::Cuda {
        return cuda::run(&only, json, session);
    }
    only.check(linear::taken(&only) + usize::from(only.takes(attention::NAME)))?;
    let token = IsaToken::detect();
    let mut limits = Limits::new(token);
    let mut linear = linear::measure(&mut limits, token, &only, session)?;
    let mut attention = match only.takes(attention::NAME) {
        true => attention::measure(&mut limits, session)?,
        false => Vec::new(),
    };
    linear.iter_mut().for_each(|case| case.judge(&limits));
    attention.iter_mut().for_each(|case| case.judge(&limits));
    let (memory, dot_tops) = limits.usual();
    let report = Report {
        schema: "quant-bench-kernels/3",
        isa: token.isa().name(),
        threads: rayon::current_num_threads(),
        memory,
        dot_tops,
        linear,
        attention,
    };
    json.emit(&report, || show(&report))
}

/// Limits, looked at before and after each case: on a shared machine they change while one measures.
struct Limits {
    token: IsaToken,
    /// Read by each look: more than any last cache holds.
    words: Vec<u64>,
    looks: Vec<Look>,
}

/// What the machine gave at one time, in the best of its patterns.
struct Look {
    memory: MemoryLimit,
    dot: f64,
}

impl Limits {
    fn new(token: IsaToken) -> Self {
        Self { token, words: vec![1; 32 << 20], looks: Vec::new() }
    }

    /// Looks, and says how many looks there were before.
    fn look(&mut self) -> usize {
        let memory = read_limit(self.token, &self.words, 1, &Rayon);
        self.looks.push(Look { memory, dot: dot_limit(self.token, 1, &Rayon) });
        self.looks.len() - 1
    }

    /// The middle of what memory gave in these looks, in GB/s, and of dot products, in TOPS.
    fn during(&self, looks: &RangeInclusive<usize>) -> [f64; 2] {
        let looks = self.looks.get(looks.clone()).unwrap_or_default();
        let middle = |of: fn(&Look) -> f64| median(&looks.iter().map(of).collect::<Vec<_>>());
        [middle(|look| look.memory.bytes_per_second) / 1e9, middle(|look| look.dot) / 1e12]
    }

    /// The median look.
    fn usual(mut self) -> (Memory, f64) {
        let dot = self.during(&(0..=self.looks.len() - 1))[1];
        self.looks.sort_by(|a, b| a.memory.bytes_per_second.total_cmp(&b.memory.bytes_per_second));
        let (usual, best) =
            (self.looks[self.looks.len() / 2].memory, self.looks[self.looks.len() - 1].memory);
        let memory = Memory {
            gb_per_second: usual.bytes_per_second / 1e9,
            best_gb_per_second: best.bytes_per_second / 1e9,
            streams: usual.streams,
        };
        (memory, dot)
    }
}

/// The middle of some values, or of the two in the middle.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 }
}

fn refused(error: KernelError) -> Error {
    Error::Internal(format!("a kernel refuses its operands: {error}"))
}

fn show(report: &Report) -> String {
    let tables = [linear::show(&report.linear), attention::show(&report.attention)];
    let tables: Vec<String> = tables.into_iter().flatten().collect();
    format!(
        "{}\nmemory {:.1} GB/s in {} stream(s) a thread (at best {:.1}), dot products {:.2} TOPS, which change: per cent are \
         of what there was just before and after; {} thread(s), {}\n",
        tables.join("\n"),
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
