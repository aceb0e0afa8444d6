//! `cargo xtask nightly`: checks that take too long, or depend too much on the network, to run for every change.

use anyhow::Result;

use crate::support::shell::{cargo, run as execute};
use crate::support::steps::Steps;
use crate::{
    bench_awq_memory, bench_rtn, book, ci, crash_points, cuda, dist, fuzz, interop, outside, publish, python,
    sanitize,
};

/// The steps to run.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Run these steps only: clippy, advisories, semver, proptest, hub, store, book, sanitize, aarch64, cuda, aarch64-programs, cuda-variants, cuda-candle, interop, vllm, engines, outside, mistralrs, no-features, python, dist, fuzz, ray, slurm, crash-points, bench-rtn, bench-awq-memory
    #[arg(long, value_delimiter = ',')]
    pub only: Vec<String>,
    /// Cases per property test
    #[arg(long, default_value_t = 4096)]
    pub cases: u32,
}

/// Runs the steps in order and prints the time of each.
///
/// # Errors
/// When a step failed; the other steps still ran.
pub fn run(args: &Args) -> Result<()> {
    let mut steps = Steps::new(&args.only);
    steps.step("clippy", || ci::clippy(&[]));
    steps.step("deny", || ci::deny(&["advisories", "licenses", "bans", "sources"]));
    steps.step("semver", publish::semver);
    steps.step("proptest", || ci::test(&[("PROPTEST_CASES", &args.cases.to_string())]));
    steps.step("hub", ci::hub);
    steps.step("store", ci::store);
    steps.step("book", book::run);
    steps.step("sanitize", sanitize::all);
    steps.step("aarch64", || interop::script("tests/aarch64/check.sh", &[]));
    steps.step("cuda", cuda::run);
    steps.step("aarch64-programs", || interop::script("tests/aarch64/programs.sh", &[]));
    steps.step("cuda-variants", cuda::every_variant);
    steps.step("cuda-candle", cuda::candle);
    steps.step("interop", || {
        for kind in ["profile", "gguf", "tokens", "exchange"] {
            interop::run(&["--whole", "--only", kind])?;
        }
        for kind in ["vision-language", "defaults"] {
            interop::run(&["--whole", "--only", kind])?;
        }
        interop::run(&["--families", "all", "--only", "family"])
    });
    steps.step("vllm", || interop::script("tests/interop/run_vllm.sh", &[]));
    steps.step("engines", || interop::script("tests/interop/run_engines.sh", &[]));
    steps.step("outside", outside::run);
    steps.step("mistralrs", outside::mistralrs);
    steps.step("no-features", outside::without_features);
    steps.step("python", || python::run(&python::Args { release: true }));
    steps.step("dist", || dist::run(&dist::Args { no_build: false, record: false }));
    steps.step("fuzz", || fuzz::run(&fuzz::Args { only: Vec::new(), seconds: 300, total: Some(3600) }));
    for (name, script) in [("ray", "tests/ray/check.sh"), ("slurm", "tests/slurm/check.sh")] {
        steps.step(name, || {
            execute(&mut cargo(&["build", "--workspace", "--locked"]))?;
            interop::script(script, &[])
        });
    }
    steps.step("crash-points", || {
        crash_points::run(&crash_points::Args {
            every: 1,
            first: 0,
            only: Vec::new(),
            quant: None,
            record: false,
        })
    });
    steps.step("bench-rtn", || {
        bench_rtn::run(&bench_rtn::Args {
            scheme: None,
            layers: 16,
            repeat: 3,
            threads: vec![1, 2],
            quant: None,
            check: true,
        })
    });
    steps.step("bench-awq-memory", || {
        bench_awq_memory::run(&bench_awq_memory::Args {
            layers: 2,
            samples: 32,
            seq_len: 512,
            threads: 2,
            quant: None,
            check: true,
        })
    });
    steps.finish()
}
