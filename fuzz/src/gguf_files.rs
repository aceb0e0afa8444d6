//! Whole GGUF files, and the vocabulary files from which they are made.

use std::sync::OnceLock;

use quant_core::checkpoint::{Archive, ModelDirectory, Origin};
use quant_core::gguf::GgufArchive;
use quant_core::model::Model;
use quant_core::run::{Host, Nothing, QuantizeRequest, RecipeSettings, plan_gguf, quantize};
use quant_core::{CancelToken, Silent};

use crate::input::Input;
use crate::parsers::tiny::tiny_llama;
use crate::texts::{in_directory, in_file};

/// A GGUF file that this program wrote.
fn written() -> &'static [u8] {
    static WRITTEN: OnceLock<Vec<u8>> = OnceLock::new();
    WRITTEN.get_or_init(|| {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let at = |name: &str| directory.path().join(name);
        std::fs::create_dir(at("model")).expect("a directory");
        tiny_llama(&at("model")).expect("a model");
        std::fs::write(at("code"), "code").expect("a file");
        let mut request = QuantizeRequest::new(at("model"), at("model.gguf"));
        request.settings = gguf_settings(Some("none"));
        let (cancel, code) = (CancelToken::new(), at("code"));
        let mut host = Host::new(&Silent, &cancel, &Nothing);
        // The executable takes long to hash.
        host.code = Some(&code);
        quantize(&request, &host).expect("a model that can be written");
        std::fs::read(at("model.gguf")).expect("the file")
    })
}

fn gguf_settings(pre: Option<&str>) -> RecipeSettings {
    let mut settings = RecipeSettings {
        scheme: Some("Q8_0".into()),
        format: vec!["gguf".into()],
        ..RecipeSettings::default()
    };
    settings.gguf.pre = pre.map(str::to_owned);
    settings
}

/// Changes some bytes, most of them at the beginning, and the length.
fn changed(valid: &[u8], data: &[u8], head: usize) -> Vec<u8> {
    let mut input = Input::new(data);
    let mut bytes = valid.to_vec();
    for _ in 0..input.below(4) {
        let room = if input.rarely(4) { bytes.len() } else { head.min(bytes.len()) };
        let at = input.below(room);
        match input.below(3) {
            0 => bytes[at] = input.byte(),
            1 => drop(bytes.splice(at..at, data.iter().copied().take(8))),
            _ => drop(bytes.drain(at..(at + input.size(8)).min(bytes.len()))),
        }
    }
    if input.rarely(8) {
        bytes.truncate(input.below(bytes.len() + 1));
    }
    bytes
}

/// A model in a GGUF file. Only an unchanged file counts as written by this program.
///
/// # Panics
/// If a property does not hold.
pub fn gguf_model(data: &[u8]) {
    let bytes = changed(written(), data, 2048);
    in_file("model.gguf", &bytes, |path| {
        let archive = GgufArchive { file_name: "model.gguf".into(), metadata: Vec::new(), in_parts: false };
        if let Ok(origin) = archive.origin(path) {
            assert_eq!(origin == Origin::Own, bytes == written(), "{origin:?}");
        }
        let Ok(directory) = ModelDirectory::open(path) else { return };
        let Ok(model) = Model::open(&directory) else { return };
        for name in model.source().names() {
            let info = model.source().info(name).expect("a tensor that is listed");
            if let Ok(read) = model.source().read(name) {
                assert_eq!(read.len() as u64, info.byte_len(), "{name}");
            }
        }
    });
}

/// A piece of a SentencePiece model: its text, score and type.
fn piece(text: &str, kind: u8) -> Vec<u8> {
    let mut piece = vec![0x0a, text.len() as u8];
    piece.extend_from_slice(text.as_bytes());
    piece.push(0x15);
    piece.extend((-1.5_f32).to_le_bytes());
    piece.extend([0x18, kind]);
    [vec![0x0a, piece.len() as u8], piece].concat()
}

/// `tokenizer.model`, a protobuf message, next to a tokenizer with byte fallback.
///
/// # Panics
/// If a property does not hold.
pub fn sentencepiece_model(data: &[u8]) {
    const TOKENIZER: &str = r#"{"version":"1.0","added_tokens":[{"id":0,"content":"<unk>","special":true,"single_word":false,
"lstrip":false,"rstrip":false,"normalized":false}],
"model":{"type":"BPE","vocab":{"<unk>":0,"a":1},"merges":[],"unk_token":"<unk>","byte_fallback":true}}"#;
    let mut valid = [piece("<unk>", 2), piece("\u{2581}a", 1), piece("<0x0A>", 6)].concat();
    // The algorithm is BPE, and a space is put before a text.
    valid.extend([0x12, 2, 0x18, 2, 0x1a, 2, 0x18, 1]);
    in_directory(|directory| {
        let directory = directory.join("sentencepiece");
        if !directory.join("tokenizer.model").exists() {
            std::fs::create_dir_all(&directory).expect("a directory");
            tiny_llama(&directory).expect("the directory can be written");
            std::fs::write(directory.join("tokenizer.json"), TOKENIZER).expect("it can be written");
        }
        let cancel = CancelToken::new();
        let host = Host::new(&Silent, &cancel, &Nothing);
        let plan = |bytes: &[u8]| {
            std::fs::write(directory.join("tokenizer.model"), bytes).expect("it can be written");
            plan_gguf(&directory, &gguf_settings(None), &host).map(drop)
        };
        for bytes in [data, &changed(&valid, data, valid.len())] {
            // The vocabulary has too few byte tokens in any case.
            assert!(plan(bytes).is_err());
        }
    });
}

/// `generation_config.json`.
///
/// # Panics
/// If a property does not hold.
pub fn generation_settings(data: &[u8]) {
    const VALID: &str = r#"{"do_sample":true,"temperature":0.7,"top_k":20,"top_p":0.9,"min_p":0.05,"eos_token_id":[2,3],
"bos_token_id":1,"max_new_tokens":100,"repetition_penalty":1.1,"num_beams":1}"#;
    in_directory(|directory| {
        let directory = directory.join("generating");
        if !directory.join("model.safetensors").exists() {
            std::fs::create_dir_all(&directory).expect("a directory");
            tiny_llama(&directory).expect("the directory can be written");
        }
        let path = directory.join("generation_config.json");
        std::fs::write(path, crate::texts::text(data, &[VALID])).expect("it can be written");
        let opened = ModelDirectory::open(&directory).expect("only the settings are damaged");
        if let Ok((settings, _)) = quant_core::generate::GenerationSettings::open(&opened) {
            settings.check().expect("settings that were accepted");
        }
    });
}
