//! `cargo study peers-models`: tokens per second of a whole model, compared with llama.cpp and vLLM, in alternating
//! runs.
//!
//! The model is a synthetic one in the shape of Llama 3.2 1B or, with `--experts`, of Qwen3-30B-A3B with fewer blocks.
//! llama.cpp quantizes it itself; vLLM loads the checkpoints of quant. Each turn is a separate process on the same
//! cores, which runs everything twice; only the second run counts.
//!
//! If the system exposes the energy of the processor packages, two further processes per turn do less work, and the
//! differences are the energy per token.

mod experts;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Error, Result, ensure};
use serde_json::Value;
use xtask::bench_rtn::{quant_binary, synthetic_model};
use xtask::support::energy::Packages;
use xtask::support::host::clean_commit;
use xtask::support::measure::median;
use xtask::support::record::{Record, table, typed_command};
use xtask::support::shell::{self, output, remove_dir, root, target_dir};

use crate::peers_kernels::cpus;
use crate::support::llama_cpp::LlamaCpp;
use crate::support::venv::{kernels_python, vllm_python};

const HEADER: &str = "threads,round,name,bytes,prefill_tokens_per_second,decode_tokens_per_second,\
                      joules_per_prefill_token,joules_per_decode_token";

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Numbers of threads
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    threads: Vec<usize>,
    /// quant's schemes, also for the head
    #[arg(long, value_delimiter = ',', default_value = "w4a16-g128")]
    schemes: Vec<String>,
    /// Leave the head of quant's checkpoints in bf16
    #[arg(long)]
    float_head: bool,
    /// llama.cpp's types, also for the head; empty leaves llama.cpp out
    #[arg(long, value_delimiter = ',', default_value = "Q4_0,Q4_K_M")]
    types: Vec<String>,
    /// Also run quant's checkpoints in vLLM's CPU build, which needs a float head; the environment takes 3 GB
    #[arg(long, requires = "float_head")]
    vllm: bool,
    /// Tokens of the prompt, processed at once
    #[arg(long, default_value_t = 512)]
    prefill: usize,
    /// Tokens generated after it
    #[arg(long, default_value_t = 128)]
    decode: usize,
    /// Rounds, each of which runs every contestant once
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Decoder blocks; by default 16, with which the model has 1.24 billion parameters, or 4 with experts
    #[arg(long)]
    layers: Option<usize>,
    /// Experts per block, such as 128: the shape is that of Qwen3-30B-A3B, with 0.64 billion parameters per block
    #[arg(long, value_name = "COUNT", conflicts_with = "vllm")]
    experts: Option<usize>,
    /// One round and few tokens, to check that everything works; writes no record
    #[arg(long)]
    quick: bool,
    /// The program, if it has already been built
    #[arg(long, value_name = "PATH")]
    quant: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Engine {
    Quant,
    LlamaCpp,
    Vllm,
}

/// A program with a model.
#[derive(Debug, Clone)]
struct Contestant {
    engine: Engine,
    name: String,
    file: PathBuf,
    bytes: u64,
    /// The index of the contestant that its speed is compared with.
    base: usize,
}

#[derive(Debug)]
struct Programs {
    quant: PathBuf,
    /// llama.cpp and the program that was compiled against it.
    llama_cpp: Option<(LlamaCpp, PathBuf)>,
    /// The interpreter of vLLM's environment.
    vllm: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy)]
struct Rates {
    prefill: f64,
    decode: f64,
    /// Joules per token of the prompt and per generated token, if they can be measured.
    joules: Option<[f64; 2]>,
}

/// Measures and writes the record.
///
/// # Errors
/// When a model or program cannot be built, or quant fails.
pub fn run(args: &Args) -> Result<()> {
    let mut args = args.clone();
    args.types.retain(|kind| !kind.is_empty());
    if args.quick {
        (args.prefill, args.decode, args.rounds) = (64, 8, 1);
    }
    ensure!(args.rounds > 0 && args.prefill > 0 && args.decode > 0, "nothing to measure");
    let programs = Programs::install(&args)?;
    let packages = Packages::of_this_machine();
    let contestants = contestants(&args, &programs)?;

    let mut csv = vec![HEADER.to_owned()];
    let (mut body, mut versions) = (String::new(), BTreeMap::new());
    for &threads in &args.threads {
        let mut results: Vec<Result<Vec<Rates>>> = contestants.iter().map(|_| Ok(Vec::new())).collect();
        for round in 0..args.rounds {
            for (contestant, result) in contestants.iter().zip(&mut results) {
                let Ok(rates) = result else { continue };
                let one = match programs.turn_with_energy(&args, contestant, threads, packages.as_ref()) {
                    Ok((one, version)) => {
                        versions.extend(version.map(|version| (contestant.engine.name(), version)));
                        one
                    }
                    Err(error) if contestant.engine == Engine::Quant => return Err(error),
                    Err(error) => {
                        eprintln!("skipped, {threads} thread(s): {}: {error:#}", contestant.name);
                        *result = Err(error);
                        continue;
                    }
                };
                println!(
                    "{threads} thread(s), {}: prefill {:.1}, decode {:.1} tokens/s",
                    contestant.name, one.prefill, one.decode
                );
                let joules = one.joules.map_or_else(|| ",".to_owned(), |[p, d]| format!("{p:.4},{d:.4}"));
                csv.push(format!(
                    "{threads},{round},{},{},{:.3},{:.3},{joules}",
                    contestant.name, contestant.bytes, one.prefill, one.decode
                ));
                rates.push(one);
            }
        }
        let part = part(threads, &contestants, &results);
        println!("\n{part}");
        body += &part;
    }
    if args.quick {
        return Ok(());
    }
    if clean_commit().is_none() {
        println!("not recorded: the working tree has uncommitted changes");
        return Ok(());
    }
    let shape = match args.experts {
        None => format!("Synthetic Llama in the shape of Llama 3.2 1B, {} layers", args.layers()),
        Some(experts) => format!(
            "Synthetic model in the shape of Qwen3-30B-A3B, {} layers of {experts} experts, 8 per token",
            args.layers()
        ),
    };
    let record = Record {
        benchmark: if args.experts.is_some() { "peers-models-experts" } else { "peers-models" },
        title: "Whole models in quant and in other engines".into(),
        command: typed_command(),
        body: format!(
            "{shape}, random weights. quant's head is {}. llama.cpp \
             quantizes the model itself, including the head, and runs its library code for this processor, with its \
             default repacking of weights and its own threads. {}Versions: {}. A prompt of {} tokens is processed at once, then {} tokens are generated greedily. Each \
             turn is a process that does both twice, and the second time counts. In each of the {} rounds, every \
             program has a turn on the same cores. The table has medians; ratios are computed per round. {}\n\n{body}",
            if args.float_head { "bf16" } else { "quantized like the other linears" },
            if args.vllm { "vLLM loads quant's checkpoints and computes in bf16. " } else { "" },
            versions.iter().map(|(name, version)| format!("{name} {version}")).collect::<Vec<_>>().join("; "),
            args.prefill,
            args.decode,
            args.rounds,
            match packages {
                Some(_) => "Energy is that of all processor packages, by the counters of the system.",
                None => "This system exposes no energy counters.",
            }
        ),
        csv,
    };
    println!("recorded in {}", record.write()?.display());
    Ok(())
}

impl Args {
    fn layers(&self) -> usize {
        self.layers.unwrap_or(if self.experts.is_some() { 4 } else { 16 })
    }

    /// The model, and the first part of the names of files that are made from it.
    fn model(&self) -> Result<(PathBuf, String)> {
        let layers = self.layers();
        match self.experts {
            None => Ok((synthetic_model(layers)?, format!("{layers}l"))),
            Some(experts) => Ok((experts::model(layers, experts)?, format!("{layers}l-{experts}e"))),
        }
    }
}

impl Engine {
    const fn name(self) -> &'static str {
        match self {
            Self::Quant => "quant",
            Self::LlamaCpp => "llama.cpp",
            Self::Vllm => "vLLM",
        }
    }
}

impl Programs {
    fn install(args: &Args) -> Result<Self> {
        let llama_cpp = if args.types.is_empty() {
            None
        } else {
            let installed = LlamaCpp::install()?;
            let program = installed.compile(Path::new("benchmarks/peers/models_llama.cpp"))?;
            Some((installed, program))
        };
        let vllm = args.vllm.then(vllm_python).transpose()?;
        Ok(Self { quant: quant_binary(args.quant.as_deref())?, llama_cpp, vllm })
    }

    /// llama.cpp's program and the directory of its libraries.
    fn llama_cpp(&self) -> Result<(&Path, PathBuf)> {
        let (installed, program) = self.llama_cpp.as_ref().context("llama.cpp is not installed")?;
        Ok((program, installed.libraries()))
    }

    /// Runs a contestant. Returns its rates, with the energy if it can be measured, and the version of its engine, if
    /// it reports one.
    fn turn_with_energy(
        &self,
        args: &Args,
        contestant: &Contestant,
        threads: usize,
        packages: Option<&Packages>,
    ) -> Result<(Rates, Option<String>)> {
        let measured = |decode: usize, repeat: usize| {
            let before = packages.and_then(Packages::read);
            let turn = self.turn(args, contestant, threads, [args.prefill, decode, repeat])?;
            let after = packages.and_then(Packages::read);
            let joules =
                packages.zip(before.zip(after)).map(|(p, (before, after))| p.joules(&before, &after));
            Ok::<_, Error>((turn, joules))
        };
        let ((mut rates, version), all) = measured(args.decode, 2)?;
        let Some(all) = all else { return Ok((rates, version)) };
        if let ((_, Some(prompts)), (_, Some(prompt))) = (measured(1, 2)?, measured(1, 1)?) {
            rates.joules = Some(joules_per_token([all, prompts, prompt], args.prefill, args.decode));
        }
        Ok((rates, version))
    }

    /// Runs a contestant in one process, with this many tokens of the prompt, generated tokens and repetitions.
    fn turn(
        &self,
        args: &Args,
        contestant: &Contestant,
        threads: usize,
        counts: [usize; 3],
    ) -> Result<(Rates, Option<String>)> {
        let decoded = counts[1];
        let counts = counts.map(|n| n.to_string());
        let [prefill, decode, repeat] = &counts;
        let threads_text = threads.to_string();
        let mut command = Command::new("taskset");
        command.args(["--cpu-list", &cpus(threads)?]);
        match contestant.engine {
            Engine::Quant => {
                command.arg(&self.quant).arg("bench").arg(&contestant.file);
                command.args(["--prefill", prefill, "--decode", decode, "--repeat", repeat]);
                command.args(["--threads", &threads_text, "--quiet", "--json"]);
            }
            Engine::LlamaCpp => {
                let (program, libraries) = self.llama_cpp()?;
                command.arg(program).arg("bench").arg(&contestant.file);
                command.args(&counts).arg(&threads_text).arg(libraries);
            }
            Engine::Vllm => {
                let python = self.vllm.as_deref().context("vLLM is not installed")?;
                let bin = python.parent().context("the interpreter is in a directory")?;
                let path = std::env::var_os("PATH").unwrap_or_default();
                let path = std::iter::once(bin.to_owned()).chain(std::env::split_paths(&path));
                command.env("PATH", std::env::join_paths(path).context("an entry of PATH has a colon")?);
                command.arg(python).arg(root().join("benchmarks/peers/models_vllm.py"));
                command.arg(&contestant.file).args(&counts);
            }
        }
        command.env("RAYON_NUM_THREADS", &threads_text).env("OMP_NUM_THREADS", &threads_text);
        let printed = output(&mut command)?;
        // vLLM's libraries print lines of their own first.
        let report: Value = serde_json::from_str(printed.lines().last().unwrap_or_default())
            .or_else(|_| serde_json::from_str(&printed))
            .with_context(|| format!("the report of {} is not JSON", contestant.name))?;
        let rates = rates_of(&report, args.prefill, decoded).context("the report has an unexpected form")?;
        Ok((rates, report["version"].as_str().map(str::to_owned)))
    }
}

/// Quantizes the model for every contestant. llama.cpp's files are kept, because its version is fixed.
fn contestants(args: &Args, programs: &Programs) -> Result<Vec<Contestant>> {
    let (model, stem) = args.model()?;
    let folder = target_dir().join("peers-models");
    std::fs::create_dir_all(&folder)?;
    let mut all = Vec::new();
    for scheme in &args.schemes {
        let head = if args.float_head { "-float-head" } else { "" };
        let out = folder.join(format!("{stem}-{scheme}{head}"));
        // Quantize again, because the program's output may have changed.
        remove_dir(&out)?;
        let mut command = Command::new(&programs.quant);
        command.arg("quantize").arg(&model).arg("-o").arg(&out);
        command.args(["--method", "rtn", "--quiet", "--scheme", scheme]);
        if !args.float_head {
            command.args(["--override", &format!("lm_head={scheme}")]);
        }
        shell::run(&mut command)?;
        let (bytes, base) = (linear_bytes(&out)?, all.len());
        let contestant = |engine: Engine| {
            let name = format!("{} {scheme}", engine.name());
            Contestant { engine, name, file: out.clone(), bytes, base }
        };
        all.push(contestant(Engine::Quant));
        if args.vllm {
            all.push(contestant(Engine::Vllm));
        }
    }
    let float = folder.join(format!("{stem}-bf16.gguf"));
    for kind in &args.types {
        let out = folder.join(format!("{stem}-{kind}.gguf"));
        if !out.is_file() {
            if !float.is_file() {
                let part = float.with_extension("part");
                let mut command = Command::new(kernels_python()?);
                command.arg(root().join("benchmarks/peers/models_gguf.py")).arg(&model).arg(&part);
                shell::run(&mut command)?;
                std::fs::rename(&part, &float)?;
            }
            let part = out.with_extension("part");
            let (program, libraries) = programs.llama_cpp()?;
            let mut command = Command::new(program);
            command.arg("quantize").arg(&float).arg(&part).args([kind, "2"]).arg(libraries);
            shell::run(&mut command)?;
            std::fs::rename(&part, &out)?;
        }
        let bytes = out.metadata()?.len();
        let name = format!("llama.cpp {kind}");
        all.push(Contestant { engine: Engine::LlamaCpp, name, file: out, bytes, base: 0 });
    }
    let _ = std::fs::remove_file(&float);
    Ok(all)
}

fn linear_bytes(dir: &Path) -> Result<u64> {
    xtask::support::measure::safetensors_of(dir)?.into_iter().map(|p| Ok(p.metadata()?.len())).sum()
}

/// The rates of the last repetition: `[seconds]` from the peers' programs, `{"seconds": [seconds]}` from `quant`.
fn rates_of(report: &Value, prefill: usize, decode: usize) -> Option<Rates> {
    let last = |name: &str| {
        let seconds = report[name].get("seconds").unwrap_or(&report[name]);
        seconds.as_array()?.last()?.as_f64()
    };
    Some(Rates {
        prefill: prefill as f64 / last("prefill")?,
        decode: decode as f64 / last("decode")?,
        joules: None,
    })
}

/// The joules per token of the prompt and per generated token, from those of three processes: with two prompts, each
/// followed by `decode` tokens; with two prompts, each followed by one token; and with one prompt followed by one token.
fn joules_per_token([all, prompts, prompt]: [f64; 3], prefill: usize, decode: usize) -> [f64; 2] {
    let generated = 2 * decode.saturating_sub(1).max(1);
    [(prompts - prompt) / prefill as f64, (all - prompts) / generated as f64]
}

fn part(threads: usize, contestants: &[Contestant], results: &[Result<Vec<Rates>>]) -> String {
    let mut rows = Vec::new();
    let mut skipped = Vec::new();
    let mut has_energy = false;
    for (contestant, result) in contestants.iter().zip(results) {
        let rates = match result {
            Ok(rates) => rates,
            Err(error) => {
                skipped.push(left_out(&contestant.name, error));
                continue;
            }
        };
        let mut row = vec![contestant.name.clone(), format!("{:.0}", contestant.bytes as f64 / 1e6)];
        for of in [(|r| r.prefill) as fn(&Rates) -> f64, |r| r.decode] {
            row.push(format!("{:.1}", median(rates.iter().map(of))));
            let base = results.get(contestant.base).and_then(|result| result.as_ref().ok());
            let ratios = base.map(|base| base.iter().zip(rates).map(|(quant, other)| of(quant) / of(other)));
            row.push(ratios.map_or_else(String::new, |ratios| format!("{:.2}", median(ratios))));
        }
        let joules: Option<Vec<[f64; 2]>> = rates.iter().map(|rates| rates.joules).collect();
        has_energy |= joules.is_some();
        row.extend([0, 1].map(|i| {
            joules
                .as_ref()
                .map_or_else(String::new, |all| format!("{:.3}", median(all.iter().map(|one| one[i]))))
        }));
        rows.push(row);
    }
    let header = [
        "",
        "MB",
        "prefill, tokens/s",
        "speed-up of quant",
        "decode, tokens/s",
        "speed-up of quant",
        "prefill, J/token",
        "decode, J/token",
    ];
    let columns = if has_energy { header.len() } else { header.len() - 2 };
    rows.iter_mut().for_each(|row| row.truncate(columns));
    let header = &header[..columns];
    format!("### {threads} thread(s)\n\n{}{}\n", table(header, &rows), skipped.concat())
}

fn left_out(name: &str, error: &Error) -> String {
    let text = format!("{error:#}");
    let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
    format!("\n{name} failed and was left out: {}\n", last.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contestant(engine: Engine, name: &str, base: usize) -> Contestant {
        Contestant { engine, name: name.into(), file: PathBuf::new(), bytes: 0, base }
    }

    #[test]
    fn speed_ups_are_computed_per_round_against_the_own_base() {
        let rate = |prefill| Rates { prefill, decode: 1.0, joules: None };
        let contestants = [
            contestant(Engine::Quant, "quant a", 0),
            contestant(Engine::LlamaCpp, "llama.cpp", 0),
            contestant(Engine::Quant, "quant b", 2),
            contestant(Engine::Vllm, "vLLM b", 2),
        ];
        let results = [[4.0, 6.0, 9.0], [2.0, 2.0, 9.0], [1.0, 1.0, 1.0], [4.0, 4.0, 4.0]]
            .map(|rates| Ok(rates.map(rate).to_vec()));
        let part = part(1, &contestants, &results);
        assert!(part.contains("| llama.cpp | 0 | 2.0 | 2.00 | 1.0 | 1.00 |"), "{part}");
        assert!(part.contains("| vLLM b | 0 | 4.0 | 0.25 | 1.0 | 1.00 |"), "{part}");
    }

    #[test]
    fn energy_per_token_is_shown_if_it_was_measured() {
        // 100 J to load, 64 J per prompt, 2 J per generated token.
        let all = [100.0 + 2.0 * (64.0 + 9.0 * 2.0), 100.0 + 2.0 * (64.0 + 2.0), 100.0 + 64.0 + 2.0];
        let joules = joules_per_token(all, 32, 9);
        assert_eq!(joules, [66.0 / 32.0, 2.0]);
        let contestants =
            [contestant(Engine::Quant, "quant", 0), contestant(Engine::LlamaCpp, "llama.cpp", 0)];
        let rates = |joules| Ok(vec![Rates { prefill: 4.0, decode: 1.0, joules }]);
        let text = part(1, &contestants, &[rates(Some(joules)), rates(None)]);
        assert!(text.contains("J/token") && text.contains("| 2.062 | 2.000 |"), "{text}");
        let text = part(1, &contestants, &[rates(None), rates(None)]);
        assert!(!text.contains("J/token"), "{text}");
    }

    #[test]
    fn a_peer_that_failed_is_named_with_its_error() {
        let contestants = [contestant(Engine::Quant, "quant", 0), contestant(Engine::Vllm, "vLLM", 0)];
        let results = [
            Ok(vec![Rates { prefill: 1.0, decode: 1.0, joules: None }]),
            Err(Error::msg("`python` ended with exit status: 1:\nTraceback\nValueError: no kernel\n")),
        ];
        let part = part(1, &contestants, &results);
        assert!(part.contains("vLLM failed and was left out: ValueError: no kernel"), "{part}");
        assert!(!part.contains("| vLLM"), "{part}");
    }
}
