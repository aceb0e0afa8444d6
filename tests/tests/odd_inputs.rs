//! Unusual inputs that other tests do not cover. Legal ones work and give the same bytes as ordinary ones; the others
//! are refused with an exit code and a message.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use half::f16;
use quant_tests::args;
use quant_tests::files::{hashes, snapshot};
use quant_tests::models::{RawTensor, TinyLlama, edit_config, read_safetensors};
use quant_tests::program::quant;
use quant_tests::refusal::{check_message, refuses_to_quantize};
use serde_json::{Value, json};
use tempfile::TempDir;

const WEIGHTS: &str = "model.safetensors";
const CONFIG: &str = "config.json";
const RTN: [&str; 4] = ["--method", "rtn", "--scheme", "w4a16-g32"];
const AWQ: [&str; 6] = ["--scheme", "w4a16-g32", "--samples", "2", "--seq-len", "64"];
const EVAL: [&str; 5] = ["--window", "64", "--windows", "1", "--json"];

struct Bench {
    scratch: TempDir,
}

impl Bench {
    fn new() -> Self {
        let bench = Self { scratch: tempfile::tempdir().unwrap() };
        TinyLlama::default().write(&bench.at("model"));
        bench
    }

    fn at(&self, name: impl AsRef<Path>) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn text(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.at(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

fn quantize(model: &Path, out: &Path, options: &[&str]) -> Vec<OsString> {
    let mut arguments = args!["quantize", model, "-o", out];
    arguments.extend(options.iter().map(OsString::from));
    arguments
}

fn eval(model: &Path, text: &Path) -> Vec<OsString> {
    let mut arguments = args!["eval", model, "--text", text];
    arguments.extend(EVAL.iter().map(OsString::from));
    arguments
}

fn names(directory: &Path) -> Vec<OsString> {
    let mut names: Vec<_> =
        std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    names
}

#[test]
fn weights_of_which_nothing_is_left() {
    let bench = Bench::new();
    let tiny = TinyLlama::default();
    let run = |tensors: &[RawTensor], out: &str| {
        tiny.write_with(&bench.at("model"), tensors);
        let run = quant(quantize(&bench.at("model"), &bench.at(out), &RTN)).succeeded();
        let report = std::fs::read(bench.at(out).join("quant_report.json")).unwrap();
        let report: Value = serde_json::from_slice(&report).unwrap();
        let with = |key: &str| -> Vec<(String, Value)> {
            let tensors = report["tensors"].as_array().unwrap().iter().filter(|t| t.get(key).is_some());
            tensors.map(|t| (t["tensor"].as_str().unwrap().to_owned(), t[key].clone())).collect()
        };
        (run, with("all_zero"), with("vanished_groups"))
    };
    let (plain, zero, vanished) = run(&tiny.tensors(), "plain");
    assert!(!plain.stderr.contains("zero") && zero.is_empty() && vanished.is_empty(), "{plain}");
    let mut tensors = tiny.tensors();
    let [k_proj, down] = ["layers.0.self_attn.k_proj", "layers.1.mlp.down_proj"]
        .map(|name| tensors.iter().position(|t| t.name.contains(name)).unwrap());
    tensors[k_proj].data.fill(0);
    // Two groups of 32 in a row of 96, and one in another row.
    for index in [5, 40, 96 * 7 + 95] {
        tensors[down].set_f16(index, 60000.0);
    }
    let (run, zero, vanished) = run(&tensors, "odd");
    let [k_proj, down] = [k_proj, down].map(|at| tensors[at].name.clone());
    assert_eq!((zero, vanished), (vec![(k_proj.clone(), json!(true))], vec![(down.clone(), json!(3))]));
    let warned = |says: &[&str]| {
        let mut lines = run.stderr.lines().filter(|line| line.starts_with("warning: "));
        assert!(lines.any(|line| says.iter().all(|part| line.contains(part))), "{says:?}: {run}");
    };
    warned(&["all weights are zero in 1 linear", &k_proj]);
    warned(&["in 3 groups", &format!("{down} (3)")]);
}

/// Tensors in a block that the family does not compute are copied, with a warning. Stored frequencies and biases of 0 are
/// legal, also in files of quantized models.
#[test]
fn tensors_that_are_not_computed() {
    let bench = Bench::new();
    let mut tensors = TinyLlama::default().tensors();
    let biased = tensors.iter().find(|t| t.name.ends_with("layers.0.mlp.up_proj.weight")).unwrap();
    let (bias, outputs) = (biased.name.replace("weight", "bias"), biased.shape[0]);
    let block = bias.replace("mlp.up_proj.bias", "");
    let legal = [format!("{block}self_attn.rotary_emb.inv_freq"), format!("{block}self_attn.k_proj.k_scale")];
    tensors.extend(legal.iter().map(|name| RawTensor::f16(name, &[2], [1.0, 0.5])));
    tensors.push(RawTensor::f16(&bias, &[outputs], vec![0.0; outputs as usize]));
    TinyLlama::default().write_with(&bench.at("model"), &tensors);
    let says = "does not compute";
    let run = quant(quantize(&bench.at("model"), &bench.at("legal"), &RTN)).succeeded();
    assert!(!run.stderr.contains(says), "{run}");

    tensors.last_mut().unwrap().set_f16(3, 0.5);
    let norm = format!("{block}self_attn.q_norm.weight");
    tensors.push(RawTensor::f16(&norm, &[2], [1.0, 0.5]));
    TinyLlama::default().write_with(&bench.at("model"), &tensors);
    let text = bench.text("text.txt", "Rain fell on the eastern sea. ".repeat(100));
    let mut plan = args!["plan", bench.at("model")];
    plan.extend(RTN.iter().map(OsString::from));
    let all = [plan, quantize(&bench.at("model"), &bench.at("out"), &RTN), eval(&bench.at("model"), &text)];
    for arguments in all {
        let run = quant(arguments).succeeded();
        let lines: Vec<&str> = run.stderr.lines().filter(|line| line.contains(says)).collect();
        let [line] = lines[..] else { panic!("{run}") };
        assert!(line.starts_with("warning: ") && line.contains("have 2 tensors"), "{line}");
        for name in [&bias, &norm] {
            assert!(line.contains(&format!("`{}`", name.replace("layers.0.", "layers.*."))), "{line}");
        }
    }
    let written = read_safetensors(&bench.at("out").join(WEIGHTS));
    assert_eq!(written.iter().find(|t| t.name == norm), tensors.last());
}

/// Weights of experts that the configuration does not describe would be copied as if they had no effect.
#[test]
fn experts_that_are_not_described() {
    let bench = Bench::new();
    let text = bench.text("text.txt", "Rain fell on the eastern sea. ".repeat(100));
    for name in [
        "mlp.experts.0.up_proj.weight",
        "mlp.shared_expert.up_proj.weight",
        "mlp.shared_experts.down_proj.weight",
    ] {
        let mut tensors = TinyLlama::default().tensors();
        let block =
            tensors.iter().find_map(|t| t.name.strip_suffix("self_attn.q_proj.weight")).unwrap().to_owned();
        let name = format!("{block}{name}");
        tensors.push(RawTensor::f16(&name, &[2], [1.0, 0.5]));
        TinyLlama::default().write_with(&bench.at("model"), &tensors);
        let expected = ["does not describe 1 tensor of experts", &name, "must belong to the same model"];
        refuses_to_quantize(&name, &bench.at("model"), &RTN, 4, &expected);
        check_message(&name, &quant(eval(&bench.at("model"), &text)), 4, &expected);
    }
}

/// Names of tensors are data: a name that looks like a path is written to no file, and a name that would change the
/// display of a terminal is refused and escaped.
#[test]
fn names_of_tensors_are_no_paths() {
    let scratch = tempfile::tempdir().unwrap();
    let inner = scratch.path().join("a/b");
    let (model, out) = (inner.join("model"), inner.join("out"));
    let more = ["../../evil", "a/../../../evil.safetensors", "/nonexistent/evil"];
    let mut tensors = TinyLlama::default().tensors();
    tensors.extend(more.map(|name| RawTensor::f16(name, &[2], [1.0, -3.0])));
    TinyLlama::default().write_with(&model, &tensors);
    quant(quantize(&model, &out, &RTN)).succeeded();
    assert_eq!(names(scratch.path()), ["a"]);
    assert_eq!(names(&scratch.path().join("a")), ["b"]);
    assert_eq!(names(&inner), ["model", "out"]);
    let written = read_safetensors(&out.join(WEIGHTS));
    for name in more {
        let original = tensors.iter().find(|t| t.name == name).unwrap();
        assert_eq!(written.iter().find(|t| t.name == name), Some(original));
    }

    for (name, escaped) in
        [("a\u{202e}b", "`a\\u{202e}b`"), ("a\u{1b}[2Jb", "`a\\u{1b}[2Jb`"), ("a\0b", "NUL"), ("", "empty")]
    {
        let model = tempfile::tempdir().unwrap();
        let mut tensors = TinyLlama::default().tensors();
        tensors.push(RawTensor::f16(name, &[1], [1.0]));
        TinyLlama::default().write_with(model.path(), &tensors);
        refuses_to_quantize(escaped, model.path(), &RTN, 4, &[WEIGHTS, escaped]);
        let run = quant(args!["inspect", model.path()]);
        check_message(escaped, &run, 4, &[WEIGHTS, escaped]);
        assert!(!run.stderr.contains(|c: char| c.is_control() && c != '\n' || c == '\u{202e}'), "{run}");
    }
}

/// Data may begin at an odd offset: they are copied before they are used.
#[test]
fn data_at_an_odd_offset() {
    let bench = Bench::new();
    quant(quantize(&bench.at("model"), &bench.at("aligned"), &RTN)).succeeded();
    let path = bench.at("model").join(WEIGHTS);
    let mut file = std::fs::read(&path).unwrap();
    let length = u64::from_le_bytes(file[..8].try_into().unwrap());
    assert_eq!(length % 8, 0);
    file[..8].copy_from_slice(&(length + 1).to_le_bytes());
    file.insert(8 + length as usize, b' ');
    std::fs::write(&path, file).unwrap();
    quant(quantize(&bench.at("model"), &bench.at("odd"), &RTN)).succeeded();
    let weights = |out: &str| std::fs::read(bench.at(out).join(WEIGHTS)).unwrap();
    assert_eq!(weights("odd"), weights("aligned"));
    let text = bench.text("text.txt", "Rain fell on the eastern sea. ".repeat(100));
    quant(eval(&bench.at("model"), &text)).succeeded();
}

#[test]
fn empty_tensors_and_scalars() {
    let bench = Bench::new();
    let mut tensors = TinyLlama::default().tensors();
    let more = [
        RawTensor::f16("extra.scalar", &[], [0.25]),
        RawTensor::f16("extra.no_rows", &[0, 5], []),
        RawTensor::f16("extra.no_columns", &[7, 0], []),
    ];
    tensors.extend(more.clone());
    TinyLlama::default().write_with(&bench.at("model"), &tensors);
    quant(quantize(&bench.at("model"), &bench.at("out"), &RTN)).succeeded();
    let written = read_safetensors(&bench.at("out").join(WEIGHTS));
    for tensor in more {
        assert_eq!(written.iter().find(|t| t.name == tensor.name), Some(&tensor));
    }
}

#[test]
fn numbers_of_a_configuration() {
    const NOT_JSON: [&str; 2] = [CONFIG, "is not valid JSON"];
    let cases: [(&str, &str, [&str; 2]); 7] = [
        ("rms_norm_eps", "NaN", NOT_JSON),
        ("rms_norm_eps", "Infinity", NOT_JSON),
        ("rms_norm_eps", "-Infinity", NOT_JSON),
        ("rms_norm_eps", "1e999", NOT_JSON),
        ("num_hidden_layers", "2e0", ["`num_hidden_layers` is 2.0", "expected an integer"]),
        ("hidden_size", "64.0", ["`hidden_size` is 64.0", "expected an integer"]),
        ("rms_norm_eps", "\"1e-5\"", ["`rms_norm_eps`", "the text \"1e-5\""]),
    ];
    for (key, value, expected) in cases {
        let case = format!("{key} = {value}");
        let bench = Bench::new();
        let model = bench.at("model");
        edit_config(&model, &json!({ key: null }));
        let text = std::fs::read_to_string(model.join(CONFIG)).unwrap();
        let open = text.trim_end().strip_suffix('}').unwrap();
        std::fs::write(model.join(CONFIG), format!("{open},\"{key}\":{value}}}")).unwrap();
        refuses_to_quantize(&case, &model, &RTN, 4, &expected);
        check_message(&case, &quant(args!["inspect", &model]), 4, &expected);
    }
}

/// Paths with spaces and letters of any script work; paths that no file system holds are an error.
#[test]
fn long_and_foreign_paths() {
    let bench = Bench::new();
    let expected = bench.at("plain");
    quant(quantize(&bench.at("model"), &expected, &RTN)).succeeded();
    for name in ["with a space", "größe 模型 🦀", "quote'd \"name\"", "-dash", "a\nb"] {
        let model = bench.at(format!("of {name}"));
        TinyLlama::default().write(&model);
        quant(quantize(&model, &bench.at(name), &RTN)).succeeded();
        let weights = |out: &Path| std::fs::read(out.join(WEIGHTS)).unwrap();
        assert_eq!(weights(&bench.at(name)), weights(&expected), "{name:?}");
        assert!(quant(args!["inspect", &model]).succeeded().stdout.contains("llama: 2 blocks"));
    }
    // A name of more than 255 bytes, and a path of more than 4096.
    let before = snapshot(bench.scratch.path());
    for long in ["n".repeat(300), "d/".repeat(3000)] {
        let path = bench.at(&long);
        refuses_to_quantize("a long model", &path, &RTN, 5, &["File name too long"]);
        check_message("inspect", &quant(args!["inspect", &path]), 5, &["File name too long"]);
        let run = quant(quantize(&bench.at("model"), &path, &RTN));
        check_message("a long output", &run, 5, &["File name too long"]);
    }
    assert_eq!(snapshot(bench.scratch.path()), before);
}

#[test]
fn paths_that_are_not_utf8() {
    let bench = Bench::new();
    let (model, out) = (bench.at(OsStr::from_bytes(b"mod\xe9")), bench.at(OsStr::from_bytes(b"caf\xe9\xff")));
    TinyLlama::default().write(&model);
    quant(quantize(&model, &out, &RTN)).succeeded();
    quant(quantize(&bench.at("model"), &bench.at("plain"), &RTN)).succeeded();
    let weights = |out: &Path| std::fs::read(out.join(WEIGHTS)).unwrap();
    assert_eq!(weights(&out), weights(&bench.at("plain")));
    quant(args!["inspect", &out]).succeeded();
    // Such a file in the model is not a companion, and is left out.
    std::fs::write(model.join(OsStr::from_bytes(b"LICENSE-\xff")), "x").unwrap();
    quant(quantize(&model, &bench.at("again"), &RTN)).succeeded();
    assert_eq!(names(&bench.at("again")), names(&bench.at("plain")));
    // Other arguments must be UTF-8.
    let bad = OsStr::from_bytes(b"w4\xff");
    for arguments in [
        args!["plan", &model, "--scheme", bad],
        args!["plan", &model, "--group-size", "32", "--ignore", bad],
        args!["eval", &model, "--text", bad],
        args![bad],
    ] {
        let run = quant(arguments);
        assert_eq!((run.code(), run.stdout.as_str()), (Some(2), ""), "{run}");
        assert!(run.stderr.starts_with("error: ") && !run.stderr.contains("panicked"), "{run}");
    }
}

#[test]
fn unusual_texts() {
    let bench = Bench::new();
    let model = bench.at("model");
    let line = "Rain fell on the eastern sea.";
    let plain = bench.text("plain.txt", format!("{line}\n").repeat(200));
    let measured = |text: &Path| -> (Value, f64) {
        let result = quant(eval(&model, text)).json();
        (result["text"]["sha256"].clone(), result["nll"]["mean"].as_f64().unwrap())
    };
    // A byte order mark is not part of the text; line ends are.
    let marked = bench.text("marked.txt", format!("\u{feff}{}", format!("{line}\n").repeat(200)));
    let windows = bench.text("windows.txt", format!("{line}\r\n").repeat(200));
    assert_eq!(measured(&marked), measured(&plain));
    assert_ne!(measured(&windows), measured(&plain));

    for (name, text) in [("letter.txt", "a".repeat(20_000)), ("line.txt", line.repeat(500))] {
        let text = bench.text(name, text);
        let out = bench.at(format!("of {name}"));
        let mut arguments = quantize(&model, &out, &AWQ);
        arguments.extend(args!["--calibration", &text]);
        quant(arguments).succeeded();
        for tensor in read_safetensors(&out.join(WEIGHTS)).iter().filter(|t| t.dtype == "F16") {
            let finite = |b: &[u8]| f16::from_le_bytes([b[0], b[1]]).is_finite();
            assert!(tensor.data.chunks_exact(2).all(finite), "{name}: {}", tensor.name);
        }
        assert!(measured(&text).1.is_finite(), "{name}");
    }

    let utf16: Vec<u8> = line.repeat(100).encode_utf16().flat_map(u16::to_le_bytes).collect();
    let bytes: Vec<u8> = (0..=255).collect();
    bench.text("utf16.txt", [&b"\xff\xfe"[..], &utf16].concat());
    bench.text("bytes.bin", bytes.repeat(100));
    for name in ["large.txt", "large.jsonl"] {
        File::create(bench.at(name)).unwrap().set_len(100 << 30).unwrap();
    }
    for (name, expected) in [
        ("utf16.txt", "utf16.txt is not valid UTF-8 at byte 0"),
        ("bytes.bin", "bytes.bin is not valid UTF-8 at byte 128"),
        ("large.txt", "large.txt has 107374182400 bytes; the limit is "),
        ("large.jsonl", "large.jsonl has 107374182400 bytes; the limit is "),
    ] {
        let path = bench.at(name);
        let options = [&AWQ[..], &["--calibration", path.to_str().unwrap()]].concat();
        refuses_to_quantize(name, &model, &options, 4, &[expected]);
        check_message(name, &quant(eval(&model, &path)), 4, &[expected]);
    }
}

/// A weight that needs a scale beyond float16: formats with float16 scales refuse it, and the others store scales of
/// the weights' type.
#[test]
fn weights_beyond_float16() {
    let bench = Bench::new();
    let model = bench.at("model");
    let name = "model.layers.0.mlp.up_proj.weight";
    let tensors: Vec<RawTensor> = (TinyLlama::default().tensors().into_iter())
        .map(|tensor| {
            let mut values: Vec<f32> =
                tensor.data.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect();
            if tensor.name == name {
                values[5] = 3e38;
            }
            let data = values.into_iter().flat_map(f32::to_le_bytes).collect();
            RawTensor { dtype: "F32".into(), data, ..tensor }
        })
        .collect();
    TinyLlama::default().write_with(&model, &tensors);
    for format in ["awq", "gptq"] {
        let options = [&RTN[..], &["--format", format]].concat();
        let expected =
            ["or a multiple of it, exceeds the range of F16", &format!("tensor `{name}`: row 0, group 0")];
        refuses_to_quantize(format, &model, &options, 6, &expected);
    }
    quant(quantize(&model, &bench.at("out"), &RTN)).succeeded();
    let written = read_safetensors(&bench.at("out").join(WEIGHTS));
    let scales = written.iter().find(|t| t.name == format!("{name}_scale")).unwrap();
    assert_eq!(scales.dtype, "F32");
    let values: Vec<f32> =
        scales.data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    assert!(values[0] > 1e37 && values.iter().all(|v| v.is_finite()), "{:?}", &values[..4]);
}

#[test]
fn the_order_of_tensors_in_a_file() {
    let bench = Bench::new();
    let mut tensors = TinyLlama::default().tensors();
    tensors.reverse();
    TinyLlama::default().write_with(&bench.at("reversed"), &tensors);
    quant(quantize(&bench.at("model"), &bench.at("one"), &RTN)).succeeded();
    quant(quantize(&bench.at("reversed"), &bench.at("other"), &RTN)).succeeded();
    let weights = |out: &str| hashes(&bench.at(out))[WEIGHTS].clone();
    assert_eq!(weights("one"), weights("other"));
}
