//! Results that must not change unintentionally, kept in `tests/goldens/`: hashes of the demo model rounded to nearest
//! and of the output of `plan` for it, and its sizes.
//!
//! After an intentional change, run `QUANT_BLESS=1 cargo test --workspace --test suite goldens::` and commit the difference.
//! Methods that read a text have no goldens, because they run in `f32`, whose sums differ in the last bits between
//! instruction sets. Rounding to nearest is exact everywhere.

use std::ffi::OsString;
use std::path::PathBuf;

use quant_tests::files::{hashes, sha256};
use quant_tests::program::quant;
use quant_tests::{args, demo_model, workspace_root};

/// If this is set, the tests write their goldens instead of comparing them.
const BLESS: &str = "QUANT_BLESS";

fn golden_path(name: &str) -> PathBuf {
    workspace_root().join("tests/goldens").join(format!("{name}.txt"))
}

/// Compares lines of `hash  name` with the golden file, or writes it.
#[track_caller]
fn check(name: &str, found: &str) {
    let path = golden_path(name);
    if std::env::var_os(BLESS).is_some() {
        std::fs::write(path, found).unwrap();
        return;
    }
    let golden = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    assert_eq!(found, golden, "{name}: if this is intended, run again with {BLESS}=1");
}

#[test]
fn rounding_to_nearest() {
    for (scheme, format) in [
        ("w4a16-g128-sym", "compressed-tensors"),
        ("w3a16-g64-asym", "compressed-tensors"),
        ("w5a16-g64-asym", "compressed-tensors"),
        ("w6a16-g128-sym", "compressed-tensors"),
        ("w8a16-channel-sym", "compressed-tensors"),
        ("wf8a16-channel", "compressed-tensors"),
        ("wf8a16-tensor", "compressed-tensors"),
        ("wf8af8-b128", "compressed-tensors"),
        ("wf4a16-g16-nv", "compressed-tensors"),
        ("wf4a16-g32-mx", "compressed-tensors"),
        ("wf8a16-g32-mx", "compressed-tensors"),
        ("w8a8-channel-sym", "compressed-tensors"),
        ("w4a8-g64-sym", "compressed-tensors"),
        ("w4a16-g64-sym", "gptq"),
        ("w3a16-g128-asym", "gptq"),
        ("w2a16-g32-asym", "gptq"),
        ("w4a16-g64-asym", "awq"),
        ("w4a8-g128-asym-progressive", "qserve"),
        ("w4a8-channel-asym", "qserve"),
        ("w8a8-channel-sym", "qserve"),
    ] {
        let scratch = tempfile::tempdir().unwrap();
        let out = scratch.path().join("out");
        let options = ["--method", "rtn", "--scheme", scheme, "--format", format].map(OsString::from);
        quant(args!["quantize", demo_model(), "-o", &out].into_iter().chain(options)).succeeded();
        let files = hashes(&out);
        let of = |name: &str| format!("{}  {name}\n", files[name]);
        let is_default = format == "compressed-tensors";
        let name = if is_default { scheme.to_owned() } else { format!("{format}-{scheme}") };
        let manifest = match format {
            "qserve" => Some("qserve_manifest.json"),
            "gptq" => Some("quantize_config.json"),
            _ => None,
        };
        let files = ["model.safetensors", "config.json", "quant_report.json"].into_iter().chain(manifest);
        check(&name, &files.map(of).collect::<String>());
    }
}

#[test]
fn plans() {
    let cases: [(&str, &[&str]); 3] = [
        ("default", &[]),
        ("w3a16-g64-asym", &["--method", "rtn", "--scheme", "w3a16-g64-asym"]),
        ("mixed", &["--override", "down_proj=w8a16-g32", "--ignore", "*.layers.0.*"]),
    ];
    let lines = cases.map(|(name, options)| {
        let arguments = args!["plan", demo_model(), "--json"];
        let run = quant(arguments.into_iter().chain(options.iter().map(OsString::from))).succeeded();
        let mut plan = run.json();
        let keys = plan.as_object_mut().unwrap();
        // Predictions of memory depend on the instructions that the processor has.
        for predicted in ["peak_memory_bytes", "smallest_budget_bytes", "scratch_bytes"] {
            assert!(keys.remove(predicted).is_some_and(|bytes| bytes.is_u64()), "{predicted}");
        }
        format!("{}  {name}\n", sha256(plan.to_string().as_bytes()))
    });
    check("plans", &lines.concat());
}

/// These numbers show how much the change matters.
#[test]
fn sizes() {
    let mut found = String::new();
    for scheme in ["w3a16-g64-asym", "w4a16-g32-sym", "w4a16-g128-sym", "w8a16-channel-asym"] {
        let plan = quant(args!["plan", demo_model(), "--scheme", scheme, "--json"]).json();
        found.push_str(&format!(
            "{scheme} {} {:.4}\n",
            plan["formats"][0]["output_bytes"],
            plan["formats"][0]["bits_per_quantized_weight"].as_f64().unwrap()
        ));
    }
    check("sizes", &found);
}
