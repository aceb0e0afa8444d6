//! `quant bench kernels`: the limits of this machine, and how close the kernels come to them.

mod attention;
mod cuda;
mod linear;

use std::ops::RangeInclusive;

use quant_core::{Error, Result};
use quant_kernels_cpu::limits::{self, MemoryLimit, dot_limit, float_limit, read_limit};
use quant_kernels_cpu::{Isa, IsaToken, KernelError, Rayon};
use serde::Serialize;

use super::Session;
use crate::device::Device;
use crate::output::{JsonOption, table};

#[derive(Serialize)]
struct Report {
    schema: &'static str,
    isa: &'static str,
    threads: usize,
    memory: Memory,
    dot_tops: f64,
    /// Rate of products of floats in registers. On paths that replace a float by several bf16 values, every product of
    /// these is counted.
    float_tops: f64,
    /// Rates of every path of this processor, measured before the cases.
    peaks: Vec<Peak>,
    /// Messages about paths that multiply faster in registers than this processor's default path.
    warnings: Vec<String>,
    linear: Vec<linear::Case>,
    attention: Vec<attention::Case>,
}

#[derive(Serialize)]
struct Peak {
    isa: &'static str,
    integer_tops: f64,
    float_tops: f64,
    /// `float_tops` divided by the number of products that an `f32` activation takes.
    float_tops_of_f32: f64,
}

impl From<&limits::Peak> for Peak {
    fn from(peak: &limits::Peak) -> Self {
        Self {
            isa: peak.isa.name(),
            integer_tops: peak.integers / 1e12,
            float_tops: peak.floats / 1e12,
            float_tops_of_f32: peak.floats_of_f32() / 1e12,
        }
    }
}

fn warnings(peaks: &[limits::Peak], default: Isa) -> Vec<String> {
    /// Smaller ratios are treated as noise, because other programs may use the machine.
    const MIN_RATIO: f64 = 1.3;
    type Rate = fn(&limits::Peak) -> f64;
    let Some(own) = peaks.iter().find(|peak| peak.isa == default) else { return Vec::new() };
    let rates: [(&str, Rate); 2] =
        [("8-bit integers", |peak| peak.integers), ("floats", limits::Peak::floats_of_f32)];
    let mut warnings = Vec::new();
    for (what, rate) in rates {
        let fastest = peaks.iter().max_by(|a, b| rate(a).total_cmp(&rate(b)));
        if let Some(fastest) = fastest.filter(|fastest| rate(fastest) > MIN_RATIO * rate(own)) {
            warnings.push(format!(
                "{} multiplies {what} at {:.2} TOPS in registers, but {}, the default on this processor, \
                only at {:.2}; please report this, and set QUANT_ISA={} until it is fixed",
                fastest.isa.name(),
                rate(fastest) / 1e12,
                default.name(),
                rate(own) / 1e12,
                fastest.isa.name()
            ));
        }
    }
    warnings
}

/// A string that the names of measured kernels and shapes must contain. If `None`, all are measured.
struct Only<'a>(Option<&'a str>);

impl Only<'_> {
    fn takes(&self, name: &str) -> bool {
        self.0.is_none_or(|part| name.contains(part))
    }

    fn check(&self, taken: usize) -> Result<()> {
        match self.0 {
            Some(part) if taken == 0 => Err(Error::usage(
                format!("no kernel has `{part}` in its name or shape"),
                "omit --only to measure all kernels",
            )),
            _ => Ok(()),
        }
    }
}

#[derive(Serialize)]
struct Memory {
    gb_per_second: f64,
    /// The fastest probe: the better estimate if other programs used the machine during the run.
    best_gb_per_second: f64,
    streams: usize,
}

/// Measures the kernels of the processor or of a GPU.
pub fn run(only: Option<&str>, device: Device, json: &JsonOption, session: &Session) -> Result<()> {
    let only = Only(only);
    if device == Device::Cuda {
        return cuda::run(&only, json, session);
    }
    only.check(linear::taken(&only) + usize::from(only.takes(attention::NAME)))?;
    let token = IsaToken::detect();
    let peaks = limits::peaks(3, &Rayon);
    let mut limits = Limits::new(token);
    let mut linear = linear::measure(&mut limits, token, &only, session)?;
    let mut attention = match only.takes(attention::NAME) {
        true => attention::measure(&mut limits, session)?,
        false => Vec::new(),
    };
    linear.iter_mut().for_each(|case| case.judge(&limits));
    attention.iter_mut().for_each(|case| case.judge(&limits));
    let (memory, [dot_tops, float_tops]) = limits.median();
    let report = Report {
        schema: "quant-bench-kernels/4",
        isa: token.isa().name(),
        threads: rayon::current_num_threads(),
        memory,
        dot_tops,
        float_tops,
        peaks: peaks.iter().map(Peak::from).collect(),
        warnings: warnings(&peaks, Isa::fastest()),
        linear,
        attention,
    };
    json.emit(&report, || show(&report))
}

/// The machine's limits, probed before and after each case, because they vary over time.
struct Limits {
    token: IsaToken,
    /// The memory that each probe reads: more than the last-level caches of most processors hold.
    words: Vec<u64>,
    probes: Vec<Probe>,
}

/// The limits at one time.
struct Probe {
    memory: MemoryLimit,
    dot: f64,
    float: f64,
}

impl Limits {
    fn new(token: IsaToken) -> Self {
        Self { token, words: vec![1; 32 << 20], probes: Vec::new() }
    }

    fn probe(&mut self) -> usize {
        let memory = read_limit(self.token, &self.words, 1, &Rayon);
        let (dot, float) = (dot_limit(self.token, 1, &Rayon), float_limit(self.token, 1, &Rayon));
        self.probes.push(Probe { memory, dot, float });
        self.probes.len() - 1
    }

    /// Returns the medians over these probes: memory bandwidth in GB/s, and products of integers and of floats in TOPS.
    fn during(&self, probes: &RangeInclusive<usize>) -> [f64; 3] {
        let probes = self.probes.get(probes.clone()).unwrap_or_default();
        let median_of = |of: fn(&Probe) -> f64| median(&probes.iter().map(of).collect::<Vec<_>>());
        let [dot, float] = [median_of(|probe| probe.dot), median_of(|probe| probe.float)];
        [median_of(|probe| probe.memory.bytes_per_second) / 1e9, dot / 1e12, float / 1e12]
    }

    /// Returns the memory bandwidth of the median and of the best probe, and the median rates of products in TOPS.
    fn median(mut self) -> (Memory, [f64; 2]) {
        let [_, dot, float] = self.during(&(0..=self.probes.len() - 1));
        self.probes.sort_by(|a, b| a.memory.bytes_per_second.total_cmp(&b.memory.bytes_per_second));
        let (median, best) =
            (self.probes[self.probes.len() / 2].memory, self.probes[self.probes.len() - 1].memory);
        let memory = Memory {
            gb_per_second: median.bytes_per_second / 1e9,
            best_gb_per_second: best.bytes_per_second / 1e9,
            streams: median.streams,
        };
        (memory, [dot, float])
    }
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let median_of = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[median_of] } else { (sorted[median_of - 1] + sorted[median_of]) / 2.0 }
}

fn refused(error: KernelError) -> Error {
    Error::Internal(format!("a kernel rejected its operands: {error}"))
}

fn show(report: &Report) -> String {
    let tables = [linear::show(&report.linear), attention::show(&report.attention)];
    let mut tables: Vec<String> = tables.into_iter().flatten().collect();
    let peaks = report.peaks.iter().map(|peak| {
        let of_f32 = format!("{:.2}", peak.float_tops_of_f32);
        vec![peak.isa.into(), format!("{:.2}", peak.integer_tops), format!("{:.2}", peak.float_tops), of_f32]
    });
    let header = ["path, in registers", "integers: TOPS", "floats: TOPS", "of f32 activations"];
    tables.push(table(&header, &peaks.collect::<Vec<_>>()));
    tables.extend(report.warnings.iter().map(|warning| format!("warning: {warning}\n")));
    format!(
        "{}\nmemory {:.1} GB/s in {} stream(s) per thread (best: {:.1}); products in registers: integers \
        {:.2} TOPS, floats {:.2}. These limits vary, so percentages are relative to those measured just \
        before and after each kernel; for float kernels, to the float limit, with every product counted. {} \
        thread(s), {}\n",
        tables.join("\n"),
        report.memory.gb_per_second,
        report.memory.streams,
        report.memory.best_gb_per_second,
        report.dot_tops,
        report.float_tops,
        report.threads,
        match Isa::detect() {
            Isa::Scalar => "portable code",
            isa => isa.name(),
        }
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_faster_path_than_the_default_is_reported() {
        let peak = |isa, integers, floats| limits::Peak { isa, integers, floats };
        let narrow = peak(Isa::Avx512Vnni, 1e12, 4e11);
        let all = |floats| [narrow, peak(Isa::Avx512Bf16, 1e12, floats)];
        assert!(warnings(&all(1e12), Isa::Avx512Bf16).is_empty());
        assert!(warnings(&all(2e11), Isa::Avx512Vnni).is_empty());
        let slow = warnings(&all(2e11), Isa::Avx512Bf16);
        assert!(slow.len() == 1 && slow[0].contains("QUANT_ISA=avx512vnni"), "{slow:?}");
        assert!(warnings(&[], Isa::Scalar).is_empty());
    }
}
