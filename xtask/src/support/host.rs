//! The description of the machine in a benchmark record.

use std::collections::BTreeSet;
use std::process::Command;

use super::shell::{output, root};

/// Instruction sets that decide which kernels run.
const FEATURES: [&str; 14] = [
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_int8",
    "asimd",
    "asimddp",
    "i8mm",
];

/// The properties of a machine that matter for timings.
#[derive(Debug, Clone)]
pub struct Host {
    /// The CPU's marketing name.
    pub cpu: String,
    /// The CPU's family and model, which tell generations apart that virtual machines name alike; empty if not stated.
    pub generation: String,
    /// Logical CPUs this process may use.
    pub cpus: usize,
    /// The relevant instruction sets that it supports.
    pub features: Vec<&'static str>,
    /// Memory in GiB.
    pub memory_gib: u64,
    /// Kernel release.
    pub kernel: String,
}

impl Host {
    /// Describes this machine.
    pub fn detect() -> Self {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let kib: u64 = field(&meminfo, "MemTotal")
            .and_then(|v| v.trim_end_matches("kB").trim().parse().ok())
            .unwrap_or(0);
        Self {
            cpu: field(&cpuinfo, "model name").unwrap_or(std::env::consts::ARCH).to_owned(),
            generation: generation(&cpuinfo),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            features: interesting(&cpuinfo),
            memory_gib: (kib as f64 / f64::from(1 << 20)).round() as u64,
            kernel: release.trim().to_owned(),
        }
    }

    /// A name for use in file names: `amd-epyc-2cpu`.
    pub fn slug(&self) -> String {
        let lower = self.cpu.to_lowercase();
        let words: Vec<&str> =
            lower.split(|c: char| !c.is_ascii_alphanumeric()).filter(|w| !w.is_empty()).take(4).collect();
        format!("{}-{}cpu", words.join("-"), self.cpus)
    }

    /// The header lines of a record.
    pub fn lines(&self) -> String {
        format!(
            "- host: {}{}, {} CPUs, {} GiB, Linux {}\n- instruction sets: {}\n",
            self.cpu,
            self.generation,
            self.cpus,
            self.memory_gib,
            self.kernel,
            self.features.join(" ")
        )
    }
}

fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines().find_map(|l| {
        let (k, v) = l.split_once(':')?;
        (k.trim() == key).then_some(v.trim())
    })
}

fn generation(cpuinfo: &str) -> String {
    match (field(cpuinfo, "cpu family"), field(cpuinfo, "model")) {
        (Some(family), Some(model)) => format!(" (family {family}, model {model})"),
        _ => String::new(),
    }
}

fn interesting(cpuinfo: &str) -> Vec<&'static str> {
    let flags = field(cpuinfo, "flags").or_else(|| field(cpuinfo, "Features")).unwrap_or_default();
    let flags: BTreeSet<&str> = flags.split_whitespace().collect();
    FEATURES.into_iter().filter(|f| flags.contains(f)).collect()
}

/// Today in UTC, `2026-11-21`.
pub fn today() -> anyhow::Result<String> {
    output(Command::new("date").args(["-u", "+%F"]))
}

/// The checked-out commit, marked if the working tree differs from it.
pub fn commit() -> String {
    let git = |args: &[&str]| output(Command::new("git").current_dir(root()).args(args)).ok();
    match (clean_commit(), git(&["rev-parse", "--short=12", "HEAD"])) {
        (Some(hash), _) => hash,
        (None, Some(hash)) => format!("{hash} with local changes"),
        _ => "unknown".into(),
    }
}

/// The checked-out commit, or `None` if the working tree differs from it. Changed records are ignored, because they do
/// not affect measurements.
pub fn clean_commit() -> Option<String> {
    let git = |args: &[&str]| output(Command::new("git").current_dir(root()).args(args)).ok();
    let changes = git(&["status", "--porcelain", "--", ".", ":(exclude)benchmarks/record"])?;
    changes.is_empty().then(|| git(&["rev-parse", "--short=12", "HEAD"]))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_and_fields_are_found() {
        let text = "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC (Zen) 9B14\n\
                    flags\t\t: fpu avx2 avx512f avx512fx\n";
        assert_eq!(field(text, "model name"), Some("AMD EPYC (Zen) 9B14"));
        assert_eq!(interesting(text), ["avx2", "avx512f"]);
        let (known, unknown) = (generation(text), generation("model name : one\n"));
        assert_eq!([&*known, &*unknown], [" (family 25, model 17)", ""]);
        let host = Host {
            cpu: "AMD EPYC (Zen) 9B14".into(),
            generation: known,
            cpus: 2,
            features: vec![],
            memory_gib: 1,
            kernel: String::new(),
        };
        assert_eq!(host.slug(), "amd-epyc-zen-9b14-2cpu");
    }
}
