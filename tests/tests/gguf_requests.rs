//! Requests for GGUF files that are mistaken, and files that must not be replaced.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use quant_core::gguf::{GgufFile, Value};
use quant_tests::args;
use quant_tests::models::write_cut_demo_model;
use quant_tests::program::{Run, quant};
use quant_tests::refusal::check_message;
use tempfile::TempDir;

const TEXT: [&str; 6] = ["--calibration", "builtin", "--samples", "2", "--seq-len", "32"];

struct Bench {
    scratch: TempDir,
}

impl Bench {
    /// The first block of the demo model.
    fn new() -> Self {
        let bench = Self { scratch: tempfile::tempdir().unwrap() };
        write_cut_demo_model(&bench.at("model"), 1);
        bench
    }

    fn at(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn run(&self, arguments: Vec<OsString>, options: &[&str]) -> Run {
        quant(arguments.into_iter().chain(options.iter().map(OsString::from)))
    }

    fn quantize(&self, out: &str, options: &[&str]) -> Run {
        self.run(args!["quantize", self.at("model"), "-o", self.at(out)], options)
    }

    fn plan(&self, options: &[&str]) -> Run {
        self.run(args!["plan", self.at("model")], options)
    }
}

/// The output on both streams, with any line breaks of a terminal removed.
fn shown(run: &Run) -> String {
    format!("{}{}", run.stdout, run.stderr).split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn names_that_are_mistaken() {
    let bench = Bench::new();
    for (options, expected) in [
        (
            &["--format", "gguf", "--pre", "lama"][..],
            &["unknown pre-tokenizer `lama`", "did you mean llama3?", "llama-bpe, "][..],
        ),
        (&["--format", "gguf", "--pre", "Qwen2"], &["did you mean qwen2?", "youtu, none"]),
        (&["--format", "ggfu"], &["unknown format `ggfu`", "did you mean gguf?"]),
        (&["--format", "ggfu", "--pre", "qwen2"], &["unknown format `ggfu`"]),
        (
            &["--format", "gguf,awq"],
            &["unknown format `gguf,awq`", "run once with --format gguf, and once with the other"],
        ),
        (&["--format", "awq, safetensors"], &["run once with --format safetensors, and once with the other"]),
        (&["--format", "gptq,awq"], &["set --format once for each format: --format gptq --format awq"]),
        (&["--format", "GGUF", "--format", "awq"], &["GGUF cannot be combined with other formats"]),
        (
            &["--format", "gguf", "--scheme", "nvfp4"],
            &["the tensor type NVFP4", "(Q4_0, Q4_1, Q4_K_S, Q4_K_M)", "--override PATTERN=nvfp4"],
        ),
        (&["--format", "gguf", "--scheme", "nvfp4a16"], &["types with 4 bits: Q4_0, "]),
        (&["--format", "gguf", "--scheme", "mxfp4"], &["choose one of MXFP4_MOE"]),
        (&["--format", "gguf", "--scheme", "fp8"], &["types with 8 bits: Q8_0; "]),
    ] {
        for run in [bench.quantize("x.gguf", options), bench.plan(options)] {
            check_message(&options.join(" "), &run, 2, expected);
        }
        assert!(!bench.at("x.gguf").exists(), "{options:?}");
    }
    // Names that only llama.cpp knows are written.
    bench.quantize("other.gguf", &["--scheme", "q8_0", "--pre", "jina-v5-nano"]).succeeded();
    let file = GgufFile::open(&bench.at("other.gguf")).unwrap();
    assert_eq!(file.header().get("tokenizer.ggml.pre").and_then(Value::as_str), Some("jina-v5-nano"));
}

/// What would change nothing is refused, like a pattern that matches nothing.
#[test]
fn types_that_no_tensor_would_get() {
    let bench = Bench::new();
    for patterns in [
        &["--ignore", "ffn_down", "--override", "ffn_down=q8_0"][..],
        &["--override", "ffn_down=q8_0", "--override", "*ffn_down=q5_k"],
    ] {
        let options = [&["--format", "gguf", "--scheme", "q8_0"][..], patterns].concat();
        for run in [bench.quantize("x.gguf", &options), bench.plan(&options)] {
            check_message(
                &patterns.join(" "),
                &run,
                2,
                &["--override ffn_down has no effect: other patterns"],
            );
        }
    }
    // The codes of a quantized model are kept, whatever types are asked for.
    bench.quantize("packed", &["--method", "rtn", "--scheme", "w4a16-g32-sym"]).succeeded();
    let packed = |options: &[&str]| {
        bench.run(args!["quantize", bench.at("packed"), "-o", bench.at("x.gguf")], options)
    };
    for (options, expected) in [
        (&["--scheme", "q4_k_m"][..], "--scheme Q4_K_M has no effect: the model is already quantized"),
        (&["--scheme", "f16", "--allow-fallback"], "its codes are kept as Q4_0"),
        (
            &["--override", "ffn_down=q6_k"],
            "--override ffn_down has no effect: the model is already quantized",
        ),
        (&["--ignore", "ffn_down"], "all weights that it matches are kept as Q4_0"),
    ] {
        check_message(&options.join(" "), &packed(options), 2, &[expected, "add --requantize"]);
        assert!(!bench.at("x.gguf").exists(), "{options:?}");
    }
    // The type of the codes may be named, and float tensors get what is asked for.
    let options =
        ["--scheme", "q4_0", "--override", "ffn_down=q4_0", "--override", "token_embd=q8_0", "--json"];
    let summary = packed(&options).json();
    assert_eq!(summary["mixture"], "Q4_0", "{summary}");
    let types = |name: &str| {
        let file = GgufFile::open(&bench.at(name)).unwrap();
        let kind = |t: &str| file.header().tensors.iter().find(|of| of.name == t).unwrap().kind.name;
        [kind("token_embd.weight"), kind("blk.0.ffn_down.weight")]
    };
    assert_eq!(types("x.gguf"), ["Q8_0", "Q4_0"]);
    bench
        .run(
            args!["quantize", bench.at("packed"), "-o", bench.at("again.gguf")],
            &["--scheme", "q8_0", "--requantize"],
        )
        .succeeded();
    assert_eq!(types("again.gguf"), ["Q8_0", "Q8_0"]);
    // A matrix that no type uses is noted.
    let options = [&["--format", "gguf", "--scheme", "q8_0"][..], &TEXT].concat();
    let run = bench.quantize("q8.gguf", &options).succeeded();
    assert!(
        shown(&run).contains("the importance matrix has no effect on types of this file (F32, Q8_0)"),
        "{run}"
    );
}

#[test]
fn medium_mixtures_have_short_names() {
    let bench = Bench::new();
    for (short, name) in [("q3_k", "Q3_K_M"), ("Q4_K", "Q4_K_M"), ("q5_k", "Q5_K_M")] {
        let run = bench.plan(&["--format", "gguf", "--scheme", short, "--allow-fallback", "--json"]);
        assert_eq!(run.json()["mixture"], name);
    }
}

#[test]
fn case_does_not_matter_in_formats_and_in_the_ending_of_the_output() {
    let bench = Bench::new();
    bench.quantize("lower.gguf", &["--format", "gguf", "--scheme", "q8_0"]).succeeded();
    bench.quantize("upper.GGUF", &["--format", "GGUF", "--scheme", "Q8_0"]).succeeded();
    let run = bench.quantize("implied.GGUF", &["--scheme", "q8_0"]).succeeded();
    assert!(run.stderr.contains("--format gguf is implied by the name of the output"), "{run}");
    let bytes = |name: &str| std::fs::read(bench.at(name)).unwrap();
    for name in ["upper.GGUF", "implied.GGUF"] {
        assert!(bench.at(name).is_file() && bytes(name) == bytes("lower.gguf"), "{name}");
    }
    quant(args!["inspect", bench.at("upper.GGUF")]).succeeded();
    let floats = ["--format", "SafeTensors", "--scheme", "F16"];
    bench.run(args!["quantize", bench.at("upper.GGUF"), "-o", bench.at("floats")], &floats).succeeded();
    let summary = bench.quantize("packed", &["--format", "AWQ", "--method", "rtn", "--json"]).json();
    assert_eq!(summary["outputs"][0]["format"], "awq");
    let run = bench.quantize("no", &["--format", "AWQ", "--format", "awq", "--method", "rtn"]);
    check_message("twice", &run, 2, &["format `awq` is listed twice"]);
}

#[test]
fn files_that_do_not_exist_are_bad_input() {
    let bench = Bench::new();
    std::fs::write(bench.at("imatrix.gguf"), "").unwrap();
    let missing = bench.at("imatrx.gguf");
    let options = ["--format", "gguf", "--imatrix", missing.to_str().unwrap()];
    for run in [bench.quantize("x.gguf", &options), bench.plan(&options)] {
        check_message("a matrix", &run, 4, &["imatrx.gguf does not exist", "did you mean ", "imatrix.gguf?"]);
    }
    let missing = bench.at("maxima.safetensors");
    let options =
        ["--method", "smoothquant", "--scheme", "w8a8", "--channel-maxima", missing.to_str().unwrap()];
    let run = bench.quantize("out", &options);
    check_message("maxima", &run, 4, &["maxima.safetensors does not exist", "--save-channel-maxima"]);
}

/// A matrix replaces a matrix and no other file, as for `--json` and `--report`, whether or not `--force` is given for the
/// output.
#[test]
fn saved_matrices_replace_only_matrices() {
    let bench = Bench::new();
    let path = bench.at("saved");
    let saved = path.to_str().unwrap();
    let options =
        [&TEXT[..], &["--format", "gguf", "--scheme", "q8_0", "--force", "--save-imatrix", saved]].concat();
    let save = || bench.quantize("x.gguf", &options);
    bench.quantize("other.gguf", &["--format", "gguf", "--scheme", "q8_0"]).succeeded();
    let model = std::fs::read(bench.at("other.gguf")).unwrap();
    let [cut, text] = [model[..100].to_vec(), b"a diary".to_vec()];
    // Eight zero bytes have the form of the older format without entries.
    for contents in [model, cut, text, vec![0; 4], vec![0; 12]] {
        std::fs::write(&path, &contents).unwrap();
        check_message(
            "another file",
            &save(),
            2,
            &["--save-imatrix would replace", "a different kind of file"],
        );
        assert!(std::fs::read(&path).unwrap() == contents && !bench.at("x.gguf").exists());
    }
    std::fs::write(&path, "").unwrap();
    save().succeeded();
    let matrix = std::fs::read(&path).unwrap();
    assert!(matrix.starts_with(b"GGUF"));
    save().succeeded();
    assert!(std::fs::read(&path).unwrap() == matrix);
    let older = bench.at("saved.dat");
    let as_dat = [&options[..options.len() - 1], &[older.to_str().unwrap()]].concat();
    bench.quantize("x.gguf", &as_dat).succeeded();
    bench.quantize("x.gguf", &as_dat).succeeded();
    std::fs::copy(&older, &path).unwrap();
    save().succeeded();
    assert!(std::fs::read(&path).unwrap() == matrix);
    // The same for the maxima of channels.
    let maxima = ["--method", "smoothquant", "--scheme", "w8a8", "--force", "--save-channel-maxima", saved];
    let maxima = [&TEXT[..], &maxima].concat();
    let run = bench.quantize("out", &maxima);
    check_message("maxima", &run, 2, &["--save-channel-maxima would replace", "a different kind of file"]);
    std::fs::copy(bench.at("model").join("model.safetensors"), &path).unwrap();
    check_message("a model", &bench.quantize("out", &maxima), 2, &["--save-channel-maxima would replace"]);
    std::fs::remove_file(&path).unwrap();
    bench.quantize("out", &maxima).succeeded();
    bench.quantize("out", &maxima).succeeded();
}

/// Programs that rewrite a GGUF file copy metadata of other programs, `quant.version` among them.
#[test]
fn force_replaces_only_what_quant_wrote() {
    let bench = Bench::new();
    let write = |scheme: &str| bench.quantize("x.gguf", &["--scheme", scheme, "--force"]);
    let read = || std::fs::read(bench.at("x.gguf")).unwrap();
    write("q8_0").succeeded();
    let written = read();
    write("q4_k_m").succeeded();
    write("q8_0").succeeded();
    assert!(read() == written);
    let tensors = GgufFile::open(&bench.at("x.gguf")).unwrap().header().tensors.clone();
    let seal = written.windows(12).position(|window| window == b"quant.blake3").unwrap() + 12 + 4 + 8;
    let places = [tensors[0].offset as usize + 3, written.len() - 64, seal];
    for place in places {
        let mut changed = written.clone();
        changed[place] ^= 1;
        std::fs::write(bench.at("x.gguf"), &changed).unwrap();
        let run = write("q4_k_m");
        check_message(
            "changed",
            &run,
            2,
            &["x.gguf was modified after quant wrote it, so --force does not replace it"],
        );
        assert!(read() == changed);
    }
    // Other programs read a file with its digest.
    std::fs::write(bench.at("x.gguf"), &written).unwrap();
    write("q4_k_m").succeeded();
}

fn notes_of(run: &Run, expected: Option<&str>) {
    let text = shown(run);
    match expected {
        Some(expected) => assert!(text.contains(expected), "{expected}: {run}"),
        None => assert!(!text.contains("has no effect"), "{run}"),
    }
}

#[test]
fn notes_say_where_gptq_changes_nothing() {
    let bench = Bench::new();
    for (options, expected) in [
        (&["--scheme", "q8_0"][..], Some("`gptq` has no effect on this file")),
        (&["--scheme", "q8_0"], Some("(7 × Q8_0)")),
        (
            &["--scheme", "q4_k_m", "--override", "down_proj=q8_0", "--override", "o_proj=q8_0"],
            Some("`gptq` has no effect on some weights, which are rounded as without it: 2 × Q8_0"),
        ),
        (&["--scheme", "q4_k_m"], None),
        (&["--scheme", "iq4_xs", "--override", "down_proj=f16"], None),
    ] {
        let method = [&["--format", "gguf", "--method", "gptq"][..], options].concat();
        notes_of(&bench.plan(&method), expected);
        notes_of(
            &bench.quantize("x.gguf", &[&method[..], &TEXT, &["--force"]].concat()).succeeded(),
            expected,
        );
    }
    notes_of(&bench.plan(&["--format", "gguf", "--scheme", "q8_0"]), None);
}

/// What a file says about tokens and templates survives the ways into another file and into a checkpoint.
#[test]
fn special_tokens_and_templates_survive() {
    let bench = Bench::new();
    let model = bench.at("model");
    let templates = serde_json::json!([
        { "name": "default", "template": "{{ messages[0].content }}" },
        { "name": "tool_use", "template": "{{ 'tools' }}" },
    ]);
    let tokenizer: serde_json::Value =
        serde_json::from_slice(&std::fs::read(model.join("tokenizer.json")).unwrap()).unwrap();
    let text = |id: u64| {
        let vocabulary = tokenizer["model"]["vocab"].as_object().unwrap();
        vocabulary.iter().find(|(_, known)| known.as_u64() == Some(id)).unwrap().0.clone()
    };
    let config = serde_json::json!({
        "eos_token": text(0), "sep_token": text(300), "mask_token": text(301), "pad_token": text(302),
        "chat_template": templates,
    });
    std::fs::write(model.join("tokenizer_config.json"), config.to_string()).unwrap();
    bench.quantize("first.gguf", &["--scheme", "f16"]).succeeded();
    // Other programs name more tokens.
    let ids = [("eot", 303_u32), ("eom", 304), ("fim_pre", 305), ("fim_sep", 306)];
    insert(&bench.at("first.gguf"), &bench.at("second.gguf"), &ids);
    let again = args!["quantize", bench.at("second.gguf"), "-o", bench.at("third.gguf"), "--scheme", "q8_0"];
    quant(again).succeeded();
    let entries = |name: &str| {
        let file = GgufFile::open(&bench.at(name)).unwrap();
        let mut kept = file.header().metadata.clone();
        kept.retain(|(key, _)| key.ends_with("_token_id") || key.starts_with("tokenizer.chat_template"));
        kept.sort_by(|(a, _), (b, _)| a.cmp(b));
        kept
    };
    let second = entries("second.gguf");
    assert!(second.len() >= 4 + 4 + 3, "{second:?}");
    assert_eq!(entries("third.gguf"), second);
    let floats = ["--format", "safetensors", "--scheme", "f16"];
    bench.run(args!["quantize", bench.at("third.gguf"), "-o", bench.at("floats")], &floats).succeeded();
    let json = |name: &str| -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(bench.at("floats").join(name)).unwrap()).unwrap()
    };
    let settings = json("tokenizer_config.json");
    for (field, expected) in config.as_object().unwrap() {
        assert_eq!(&settings[field], expected, "{field}");
    }
    for name in ["config.json", "generation_config.json"] {
        let found = json(name);
        assert_eq!(found["eos_token_id"], serde_json::json!([0, 303, 304]), "{name}");
        assert_eq!(found["pad_token_id"], 302, "{name}");
    }
}

/// Copies a file with more special tokens, which are inserted before the first entry. Their size keeps the tensors
/// aligned.
fn insert(from: &Path, to: &Path, ids: &[(&str, u32)]) {
    let mut bytes = std::fs::read(from).unwrap();
    let mut inserted = Vec::new();
    let mut put = |key: &str, kind: u32, value: &[u8]| {
        inserted.extend((key.len() as u64).to_le_bytes());
        inserted.extend(key.bytes());
        inserted.extend(kind.to_le_bytes());
        inserted.extend_from_slice(value);
        inserted.len()
    };
    for (name, id) in ids {
        put(&format!("tokenizer.ggml.{name}_token_id"), 4, &id.to_le_bytes());
    }
    let used = put("x", 0, &[0]);
    // An entry of 8 + 1 + 4 + 8 bytes and its text.
    let text = (32 - (used + 21) % 32) % 32;
    put("y", 8, &[&(text as u64).to_le_bytes()[..], &vec![b' '; text]].concat());
    bytes[16] += ids.len() as u8 + 2;
    bytes.splice(24..24, inserted);
    std::fs::write(to, bytes).unwrap();
}
