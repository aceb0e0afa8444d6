//! The files of a checkpoint that the program wrote itself, and reads again later.

use std::path::PathBuf;
use std::sync::{Mutex, OnceLock, PoisonError};

use quant_core::calibrate::TokenizerSettings;
use quant_core::checkpoint::{ModelDirectory, verify_checkpoint};
use quant_core::digest::sha256_hex;
use quant_core::model::Model;
use quant_core::pipeline::QuantReport;
use quant_core::run::{Host, Nothing, QuantizeRequest, quantize};
use quant_core::{CancelToken, Silent};
use tempfile::TempDir;

use crate::parsers::tiny::tiny_llama;
use crate::texts::{in_directory, text};

const MANIFEST: &str = "quant_manifest.json";
const REPORT: &str = "quant_report.json";
const TOKENIZER_SETTINGS: &str = r#"{"bos_token":"<s>","eos_token":{"content":"</s>","lstrip":false},"add_bos_token":true,
"unk_token":null,"model_max_length":1000,"chat_template":"{{ messages }}","tokenizer_class":"LlamaTokenizer"}"#;

/// A quantized checkpoint.
struct Bench {
    directory: TempDir,
    manifest: String,
    report: String,
}

impl Bench {
    /// One input uses it at a time.
    fn shared() -> &'static Mutex<Self> {
        static SHARED: OnceLock<Mutex<Bench>> = OnceLock::new();
        SHARED.get_or_init(|| Mutex::new(Self::new()))
    }

    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let at = |name: &str| directory.path().join(name);
        std::fs::create_dir(at("model")).expect("a directory");
        tiny_llama(&at("model")).expect("a model");
        std::fs::write(at("code"), "code").expect("a file");
        let mut request = QuantizeRequest::new(at("model"), at("out"));
        request.settings.method = Some("rtn".into());
        request.settings.scheme = Some("w4a16-g32-sym".into());
        let (cancel, code) = (CancelToken::new(), at("code"));
        let mut host = Host::new(&Silent, &cancel, &Nothing);
        // The executable takes long to hash.
        host.code = Some(&code);
        quantize(&request, &host).expect("a model that can be quantized");
        let read =
            |name: &str| std::fs::read_to_string(at("out").join(name)).expect("a file of the checkpoint");
        let (manifest, report) = (read(MANIFEST), read(REPORT));
        Self { manifest, report, directory }
    }

    fn out(&self) -> PathBuf {
        self.directory.path().join("out")
    }
}

/// The list of a checkpoint's files: it is accepted only if every listed file has the listed bytes.
///
/// # Panics
/// If a property does not hold.
pub fn manifest(data: &[u8]) {
    let bench = Bench::shared().lock().unwrap_or_else(PoisonError::into_inner);
    let out = bench.out();
    let bytes = text(data, &[&bench.manifest]);
    std::fs::write(out.join(MANIFEST), &bytes).expect("a file");
    let verified = verify_checkpoint(&out, &Silent, &CancelToken::new());
    std::fs::write(out.join(MANIFEST), &bench.manifest).expect("a file");
    let Ok(verified) = verified else { return };
    let listed: serde_json::Value = serde_json::from_slice(&bytes).expect("a manifest that was accepted");
    let files = listed["files"].as_array().expect("a list of files");
    assert_eq!(files.len(), verified.files);
    for file in files {
        let name = file["name"].as_str().expect("a name");
        let content = std::fs::read(out.join(name)).expect("a file that was verified");
        assert_eq!(file["bytes"].as_u64(), Some(content.len() as u64), "{name}");
        let hash = file["sha256"].as_str().expect("a hash");
        assert!(hash.eq_ignore_ascii_case(&sha256_hex(content)), "{name}");
    }
}

/// The report next to the weights: it is accepted only if it fits the model.
///
/// # Panics
/// If a property does not hold.
pub fn quant_report(data: &[u8]) {
    static MODEL: OnceLock<Model> = OnceLock::new();
    let bench = Bench::shared().lock().unwrap_or_else(PoisonError::into_inner);
    let model = MODEL.get_or_init(|| {
        let directory = ModelDirectory::open(&bench.out()).expect("a checkpoint");
        Model::open(&directory).expect("a model")
    });
    let bytes = text(data, &[&bench.report]);
    in_directory(|directory| {
        std::fs::write(directory.join(REPORT), bytes).expect("a file");
        let found = QuantReport::find(directory, model);
        std::fs::remove_file(directory.join(REPORT)).expect("the file was written");
        let Ok(Some(report)) = found else { return };
        for tensor in report.tensors.iter().filter(|tensor| tensor.weight_error.is_some()) {
            let module = tensor.tensor.strip_suffix(".weight").unwrap_or(&tensor.tensor);
            assert!(model.module_scheme(module).is_some(), "`{module}` is not quantized");
        }
        let written = serde_json::to_string(&report).expect("a report can be written");
        assert!(!written.is_empty());
    });
}

/// `tokenizer_config.json`.
///
/// # Panics
/// If a property does not hold.
pub fn tokenizer_settings(data: &[u8]) {
    in_directory(|directory| {
        let directory = directory.join("with-settings");
        if !directory.join("model.safetensors").exists() {
            std::fs::create_dir_all(&directory).expect("a directory");
            tiny_llama(&directory).expect("the directory can be written");
        }
        let path = directory.join("tokenizer_config.json");
        std::fs::write(path, text(data, &[TOKENIZER_SETTINGS])).expect("it can be written");
        let opened = ModelDirectory::open(&directory).expect("only the tokenizer's settings are damaged");
        let Ok(settings) = TokenizerSettings::open(&opened) else { return };
        let _ = settings.adds_bos();
        if let Ok(special) = settings.special_tokens() {
            assert!(special.iter().all(|(name, _)| settings.fields().contains_key(*name)));
        }
    });
}
