//! AWQ in GGUF files: scales are searched for the block types of the file and folded into norms and linears.

use std::path::{Path, PathBuf};

use half::f16;
use quant_tests::args;
use quant_tests::files::sha256;
use quant_tests::models::{RawTensor, read_safetensors, safetensors, write_cut_demo_model};
use quant_tests::program::{Run, Running, Signal, command, quant};
use quant_tests::refusal::{check_message, job_of};
use serde_json::Value;
use tempfile::TempDir;

const AWQ: [&str; 4] = ["--scheme", "q4_k_m", "--method", "awq"];
const TEXT: [&str; 6] = ["--calibration", "builtin", "--samples", "16", "--seq-len", "128"];

/// Multiplies some channels of every norm of a block by 32, and divides the columns that read them.
fn plant(directory: &Path) {
    let file = directory.join("model.safetensors");
    let channels = |layer: usize| (0..4).map(move |i| (layer * 11 + i * 37) % 256);
    let changed = read_safetensors(&file).into_iter().map(|mut tensor| {
        let Some(rest) = tensor.name.strip_prefix("model.layers.") else { return tensor };
        let (layer, name) = rest.split_once('.').unwrap();
        let layer: usize = layer.parse().unwrap();
        let is_norm = name.ends_with("norm.weight");
        let reads = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"].iter().any(|n| name.contains(n));
        if is_norm || reads {
            let columns = *tensor.shape.last().unwrap() as usize;
            for at in (0..tensor.data.len() / 2).filter(|at| channels(layer).any(|c| c == at % columns)) {
                let stored = f16::from_le_bytes([tensor.data[2 * at], tensor.data[2 * at + 1]]).to_f32();
                tensor.set_f16(at, if is_norm { stored * 32.0 } else { stored / 32.0 });
            }
        }
        tensor
    });
    let changed: Vec<RawTensor> = changed.collect();
    std::fs::write(file, safetensors(&changed)).unwrap();
}

struct Bench {
    scratch: TempDir,
}

impl Bench {
    /// The first blocks of the demo model, with outliers.
    fn planted(blocks: u64) -> Self {
        let bench = Self { scratch: tempfile::tempdir().unwrap() };
        write_cut_demo_model(&bench.at("model"), blocks);
        plant(&bench.at("model"));
        bench
    }

    fn at(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn arguments(&self, out: &str, options: &[&str]) -> Vec<std::ffi::OsString> {
        let mut arguments = args!["quantize", self.at("model"), "-o", self.at(out), "--format", "gguf"];
        arguments.extend(TEXT.iter().chain(options).map(Into::into));
        arguments
    }

    fn quantize(&self, out: &str, options: &[&str]) -> Run {
        quant(self.arguments(out, options))
    }

    fn divergence(&self, out: &str) -> f64 {
        let arguments = args![
            "eval",
            self.at(out),
            "--reference",
            self.at("model"),
            "--text",
            "builtin-heldout",
            "--window",
            "128",
            "--windows",
            "40",
            "--json"
        ];
        quant(arguments).json()["comparison"]["kl"]["mean"].as_f64().expect("a KL divergence")
    }

    fn digest(&self, file: &str) -> String {
        sha256(&std::fs::read(self.at(file)).unwrap())
    }
}

#[test]
fn scales_are_searched_for_the_types_of_the_file() {
    let bench = Bench::planted(3);
    for (scheme, most) in [("q4_0", 0.8), ("q4_k_m", 0.95)] {
        bench.quantize("plain.gguf", &["--scheme", scheme, "--force"]).succeeded();
        bench.quantize("awq", &["--scheme", scheme, "--method", "awq", "--force"]).succeeded();
        let [plain, awq] = [bench.divergence("plain.gguf"), bench.divergence("awq/model.gguf")];
        println!("{scheme}: {awq} of {plain}");
        assert!(awq < most * plain, "{scheme}: {awq} of {plain}");
    }
    bench.quantize("gptq.gguf", &["--scheme", "q4_k_m", "--method", "gptq"]).succeeded();
    bench.quantize("both.gguf", &["--scheme", "q4_k_m", "--method", "awq-gptq"]).succeeded();
    let [gptq, both] = [bench.divergence("gptq.gguf"), bench.divergence("both.gguf")];
    println!("GPTQ: {both} of {gptq}");
    assert!(both < gptq && both < bench.divergence("awq/model.gguf"), "{both} of {gptq}");
    let report: Value =
        serde_json::from_slice(&std::fs::read(bench.at("awq/quant_report.json")).unwrap()).unwrap();
    let folds = report["folds"].as_array().unwrap();
    assert_eq!(
        folds.len(),
        3 * 3,
        "norms of attention and MLP, and up projections, whose channels are not repeated"
    );
    assert!(folds.iter().all(|fold| fold["error_after"].as_f64() <= fold["error_before"].as_f64()));
    let steps = |name: &str| {
        let tensors = report["tensors"].as_array().unwrap();
        tensors.iter().find(|t| t["tensor"] == name).unwrap()["steps"].clone()
    };
    assert_eq!(steps("blk.0.attn_q.weight"), serde_json::json!(["awq"]));
    assert_eq!((steps("token_embd.weight"), steps("blk.0.attn_output.weight")), (Value::Null, Value::Null));
}

/// With all other tensors in F32, a weight in Q8_0 alone would cause almost no error, so folds must cancel out in the
/// norms, the permuted queries and keys, the values and the up projections.
#[test]
fn folds_do_not_change_the_function_of_the_file() {
    let bench = Bench::planted(3);
    let floats = ["--override", "*=f32"];
    for kept in ["attn_k", "ffn_down", "ffn_gate"] {
        let coarse = format!("blk.*.{kept}=q4_0");
        let fine = format!("blk.*.{kept}=q8_0");
        for kind in [&coarse, &fine] {
            let options = [&floats[..], &["--override", kind, "--force"]].concat();
            bench.quantize("plain.gguf", &options).succeeded();
            bench.quantize("awq", &[&options[..], &["--method", "awq"]].concat()).succeeded();
            let [plain, awq] = [bench.divergence("plain.gguf"), bench.divergence("awq/model.gguf")];
            println!("{kind}: {awq} of {plain}");
            assert!(awq < 1.1 * plain.max(2e-6), "{kind}: {awq} of {plain}");
        }
        let report = std::fs::read(bench.at("awq/quant_report.json")).unwrap();
        let report: Value = serde_json::from_slice(&report).unwrap();
        let folds = report["folds"].as_array().unwrap();
        assert_eq!(folds.len(), 3, "one group per block has a quantized weight");
        assert!(folds.iter().any(|fold| !fold["ratio"].is_null()), "{kept}");
    }
}

#[test]
fn importance_budgets_and_interruptions_do_not_change_the_result() {
    let bench = Bench::planted(2);
    fn with<'a>(options: &[&'a str]) -> Vec<&'a str> {
        AWQ.iter().chain(options).copied().collect()
    }
    let saved = |name: &str| bench.at(name).to_str().unwrap().to_owned();
    let [matrix, other] = ["imatrix.gguf", "other.gguf"].map(saved);
    bench.quantize("one.gguf", &with(&["--save-imatrix", &matrix])).succeeded();
    // The matrix that is saved is that of the original model.
    bench.quantize("plain.gguf", &["--scheme", "q4_k_m", "--save-imatrix", &other]).succeeded();
    assert_eq!(bench.digest("imatrix.gguf"), bench.digest("other.gguf"));
    bench.quantize("two.gguf", &with(&["--imatrix", &matrix])).succeeded();
    assert_eq!(bench.divergence("one.gguf"), bench.divergence("two.gguf"));
    assert_ne!(bench.divergence("one.gguf"), bench.divergence("plain.gguf"));
    let run = bench.quantize("no.gguf", &with(&["--imatrix", &matrix, "--save-imatrix", &other]));
    check_message("two matrices", &run, 2, &["would compute one"]);

    bench.quantize("whole.gguf", &AWQ).succeeded();
    let plan = args!["plan", bench.at("model"), "--format", "gguf", "--json"];
    let options = AWQ.iter().chain(&TEXT[2..]).map(Into::into);
    let plan = quant(plan.into_iter().chain(options).collect::<Vec<_>>()).json();
    let smallest = plan["smallest_budget_bytes"].as_u64().unwrap();
    assert!(smallest < plan["peak_memory_bytes"].as_u64().unwrap(), "{plan}");
    let budget = format!("{}MiB", smallest.div_ceil(1 << 20));
    bench.quantize("budget.gguf", &with(&["--memory-budget", &budget])).succeeded();
    assert_eq!(bench.digest("budget.gguf"), bench.digest("whole.gguf"));

    let out = bench.at("out.gguf");
    let mut run = Running::start(command(bench.arguments("out.gguf", &AWQ)));
    let journal = job_of(&out).join("journal.jsonl");
    let begun = || std::fs::read_to_string(&journal).unwrap_or_default().contains("\"tensor\":\"blk.0.");
    assert!(run.wait_until(begun), "ended before a tensor was finished");
    run.signal(Signal::INT);
    check_message("SIGINT", &run.wait(), 75, &["continue with: "]);
    let run = bench.quantize("out.gguf", &["--scheme", "q4_k_m", "--resume"]);
    check_message("without AWQ", &run, 2, &["different inputs or settings"]);
    let run = bench.quantize("out.gguf", &with(&["--resume"])).succeeded();
    assert!(run.stderr.contains("resumed: "), "{run}");
    assert_eq!(bench.digest("out.gguf"), bench.digest("whole.gguf"));
}

#[test]
fn requests_that_awq_cannot_meet() {
    let bench = Bench { scratch: tempfile::tempdir().unwrap() };
    write_cut_demo_model(&bench.at("model"), 1);
    let packed = args!["quantize", bench.at("model"), "-o", bench.at("packed"), "--method", "rtn"];
    quant(packed.into_iter().chain(args!["--scheme", "w4a16-g32-sym"]).collect::<Vec<_>>()).succeeded();
    let plan = |model: &str, options: &[&str]| {
        let arguments = args!["plan", bench.at(model), "--format", "gguf"];
        quant(arguments.into_iter().chain(options.iter().map(Into::into)).collect::<Vec<_>>())
    };
    for (options, expected) in [
        (&["--method", "smoothquant"][..], "`smoothquant` is not supported for GGUF files"),
        (&["--method", "rotate,awq"], "`rotate` does not take account of the scales of blocks"),
        (&["--method", "awq", "--scheme", "f16"], "the steps awq have no effect on F16"),
        (&["--method", "awq", "--ignore", "*"], "the method has no effect: no weight of a block is rounded"),
        (&["--method", "gptq", "--ignore", "*"], "the method has no effect: no weight of a block is rounded"),
        (&["--method", "awq", "--step", "awq.serch=fast"], "did you mean search?"),
        (&["--method", "awq", "--search", "best"], "unknown search"),
        (&["--method", "gptq", "--search", "fast"], "--search has no effect"),
        (&["--method", "awq", "--damping", "0.1"], "--damping has no effect"),
        (&["--method", "awq-gptq", "--reference-search"], "cannot be combined"),
        (&["--method", "awk"], "unknown method `awk`"),
    ] {
        check_message(expected, &plan("model", options), 2, &[expected]);
        check_message(expected, &bench.quantize("no.gguf", options), 2, &[expected]);
        assert!(!bench.at("no.gguf").exists(), "{options:?}");
    }
    let run = plan("packed", &["--method", "awq"]);
    check_message("codes", &run, 2, &["the steps awq cannot rewrite `blk.0.", "--requantize"]);
    plan("packed", &["--method", "awq", "--requantize"]).succeeded();
    bench.quantize("reference.gguf", &["--method", "awq", "--reference-search"]).succeeded();
    bench.quantize("steps.gguf", &["--method", "awq,gptq", "--search", "reference"]).succeeded();
}
