//! `interop-dump`: quant's numbers for the interop check, as safetensors.
//!
//! * `interop-dump logits MODEL TOKENS.json OUT`: `logits` `[windows, length, vocab]` of a float or quantized model for
//!   some token windows;
//! * `interop-dump decoded MODEL TOKENS.json OUT`: logits from a cache: the first half of each window at once, of which
//!   only the last logits are written, and the rest token by token;
//! * `interop-dump weights MODEL OUT`: the embedding, every linear of the blocks and the head as `f32`, dequantized, by
//!   tensor name;
//! * `interop-dump chats MODEL CHATS.jsonl OUT.json`: the text, the tokens and the assistant's part of every
//!   conversation;
//! * `interop-dump tokens MODEL TEXT LENGTH COUNT OUT.json`: the first windows of a text;
//! * `interop-dump ids MODEL TEXTS.json OUT.json`: the tokens of texts, with those that the tokenizer adds;
//! * `interop-dump encode TYPE COLUMNS VALUES OUT [IMPORTANCE]`: rows encoded in a block type as ggml does; files are
//!   little-endian;
//! * `interop-dump refine TYPE COLUMNS VALUES OUT [IMPORTANCE]`: rows encoded with quant's own search;
//! * `interop-dump decode TYPE COLUMNS BYTES OUT`: the floats that rows of a block type represent;
//! * `interop-dump inputs RULE IN OUT [SCALE]`: `x` `[tokens, k]` rounded as inputs of a linear: `fp8-token`,
//!   `fp8-group`, `mxfp8`, or with a calibrated scale `fp8-static`, `nvfp4`; or as cached keys and values: `kv-fp8`;
//! * `interop-dump describe PAIRS.json OUT.json`: for each pair of configurations, `null` if both describe the same
//!   model, or else what differs; a configuration that is an error is described by the message.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;

use quant_core::blocks::{BlockSearch, BlockType, block_type};
use quant_core::calibrate::{ChatTemplate, Corpus, Mask, TextTokenizer, TokenWindows, read_corpus};
use quant_core::checkpoint::{ConfigFields, Dtype, MemorySource, ModelDirectory};
use quant_core::model::arch::{self, EmbeddingScale};
use quant_core::model::{Decoder, KvScheme, Model, round_cached};
use quant_core::quantize::InputGrid;
use quant_core::{CancelToken, Silent, gguf};
use safetensors::tensor::{Dtype as Stored, TensorView, serialize_to_file};
use serde_json::{Map, Value, json};

type Failure = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match arguments[..] {
        ["logits", model, tokens, out] => logits(model, tokens, out),
        ["decoded", model, tokens, out] => decoded(model, tokens, out),
        ["weights", model, out] => weights(model, out),
        ["chats", model, chats, out] => chats_of(model, chats, out),
        ["tokens", model, text, length, count, out] => tokens(model, text, length, count, out),
        ["ids", model, texts, out] => ids(model, texts, out),
        ["encode", kind, columns, from, out] => encode(BlockSearch::Reference, kind, columns, from, out, None),
        ["encode", kind, columns, from, out, importance] => {
            encode(BlockSearch::Reference, kind, columns, from, out, Some(importance))
        }
        ["refine", kind, columns, from, out] => encode(BlockSearch::Refined, kind, columns, from, out, None),
        ["refine", kind, columns, from, out, importance] => {
            encode(BlockSearch::Refined, kind, columns, from, out, Some(importance))
        }
        ["decode", kind, columns, from, out] => decode(kind, columns, from, out),
        ["inputs", rule, from, out] => inputs(rule, None, from, out),
        ["inputs", rule, from, out, scale] => match scale.parse() {
            Ok(scale) => inputs(rule, Some(scale), from, out),
            Err(error) => Err(format!("scale {scale}: {error}").into()),
        },
        ["describe", pairs, out] => describe(pairs, out),
        _ => Err("usage: interop-dump logits|decoded|weights|chats|tokens|ids|encode|refine|decode|inputs|describe ...; see the source".into()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("interop-dump: {error}");
            ExitCode::FAILURE
        }
    }
}

fn open(path: &str) -> Result<(ModelDirectory, Model), Failure> {
    let path = Path::new(path);
    let directory = if gguf::is_gguf(path) { gguf::open(path)? } else { ModelDirectory::open(path)? };
    let model = Model::open(&directory)?;
    Ok((directory, model))
}

fn save(tensors: &BTreeMap<String, (Vec<usize>, Vec<f32>)>, out: &str) -> Result<(), Failure> {
    let bytes: Vec<_> =
        tensors.iter().map(|(name, (shape, values))| (name, shape, Dtype::F32.narrow(values))).collect();
    let views = bytes
        .iter()
        .map(|(name, shape, bytes)| Ok((name, TensorView::new(Stored::F32, (*shape).clone(), bytes)?)))
        .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
    Ok(serialize_to_file(views, None, Path::new(out))?)
}

/// A block type by its name, the number of columns, and the bytes of a row.
fn rows_of(kind: &str, columns: &str) -> Result<(&'static BlockType, usize, usize), Failure> {
    let kind = block_type(kind).ok_or_else(|| format!("no block type {kind}"))?;
    let columns = columns.parse()?;
    Ok((kind, columns, kind.row_bytes(columns).ok_or("the rows are not whole blocks")?))
}

fn floats(path: &str) -> Result<Vec<f32>, Failure> {
    let bytes = std::fs::read(path)?;
    let mut values = vec![0.0; bytes.len() / 4];
    Dtype::F32.widen(&bytes, &mut values);
    Ok(values)
}

fn encode(
    search: BlockSearch,
    kind: &str,
    columns: &str,
    from: &str,
    out: &str,
    importance: Option<&str>,
) -> Result<(), Failure> {
    let (kind, columns, row_bytes) = rows_of(kind, columns)?;
    let importance = importance.map(floats).transpose()?;
    let values = floats(from)?;
    let mut bytes = vec![0; values.len() / columns * row_bytes];
    for (row, out) in values.chunks_exact(columns).zip(bytes.chunks_exact_mut(row_bytes)) {
        kind.encode_by(search, row, importance.as_deref(), out);
    }
    Ok(std::fs::write(out, bytes)?)
}

fn decode(kind: &str, columns: &str, from: &str, out: &str) -> Result<(), Failure> {
    let (kind, columns, row_bytes) = rows_of(kind, columns)?;
    let bytes = std::fs::read(from)?;
    let mut values = vec![0.0; bytes.len() / row_bytes * columns];
    for (bytes, row) in bytes.chunks_exact(row_bytes).zip(values.chunks_exact_mut(columns)) {
        kind.decode(bytes, row);
    }
    Ok(std::fs::write(out, Dtype::F32.narrow(&values))?)
}

fn inputs(rule: &str, scale: Option<f32>, from: &str, out: &str) -> Result<(), Failure> {
    let grid = match (rule, scale) {
        ("kv-fp8", Some(_)) => None,
        ("fp8-token", None) => Some(InputGrid::Fp8Token),
        ("fp8-group", None) => Some(InputGrid::Fp8Group),
        ("mxfp8", None) => Some(InputGrid::Mxfp8),
        ("fp8-static", Some(scale)) => Some(InputGrid::Fp8Static { scale }),
        ("nvfp4", Some(global)) => Some(InputGrid::Nvfp4 { global }),
        _ => return Err(format!("no rule {rule} with scale {scale:?}").into()),
    };
    let bytes = std::fs::read(from)?;
    let tensors = safetensors::SafeTensors::deserialize(&bytes)?;
    let x = tensors.tensor("x")?;
    let &[tokens, k] = x.shape() else { return Err("x is not a matrix".into()) };
    let mut values = vec![0.0; tokens * k];
    Dtype::F32.widen(x.data(), &mut values);
    match grid {
        Some(grid) => grid.round(&mut values, k),
        None => round_cached(KvScheme::Kvf8, &mut values, k, scale.unwrap_or(1.0))?,
    }
    save(&BTreeMap::from([("x".to_owned(), (vec![tokens, k], values))]), out)
}

fn logits(model: &str, tokens: &str, out: &str) -> Result<(), Failure> {
    let windows: Vec<Vec<u32>> = serde_json::from_slice(&std::fs::read(tokens)?)?;
    let length = windows.first().ok_or("no windows")?.len();
    let (_, model) = open(model)?;
    let decoder = Decoder::load(&model, length, &Silent, &CancelToken::new())?;
    let mut values = Vec::new();
    for window in &windows {
        let hidden = decoder.hidden(&[window])?;
        values.extend(decoder.logits(&hidden)?.flatten_all()?.to_vec1::<f32>()?);
    }
    let shape = vec![windows.len(), length, decoder.vocab()];
    save(&BTreeMap::from([("logits".to_owned(), (shape, values))]), out)
}

fn decoded(model: &str, tokens: &str, out: &str) -> Result<(), Failure> {
    let windows: Vec<Vec<u32>> = serde_json::from_slice(&std::fs::read(tokens)?)?;
    let length = windows.first().ok_or("no windows")?.len();
    let (_, model) = open(model)?;
    let decoder = Decoder::load(&model, length, &Silent, &CancelToken::new())?;
    let mut values = Vec::new();
    for window in &windows {
        let mut cache = decoder.cache();
        let (first, rest) = window.split_at(length / 2);
        values.extend(decoder.step(first, &mut cache)?.to_vec1::<f32>()?);
        for token in rest {
            values.extend(decoder.step(&[*token], &mut cache)?.to_vec1::<f32>()?);
        }
    }
    let shape = vec![windows.len(), length - length / 2 + 1, decoder.vocab()];
    save(&BTreeMap::from([("logits".to_owned(), (shape, values))]), out)
}

fn weights(model: &str, out: &str) -> Result<(), Failure> {
    let (_, model) = open(model)?;
    let architecture = model.architecture().clone();
    let rope = model.rope(1)?;
    let mut tensors = BTreeMap::new();
    for layer in 0..architecture.layers {
        let block = model.block(layer, &rope)?;
        for (node, name, shape, _) in architecture.graph(layer).linears() {
            let values = block.linear(node).weight().to_f32()?;
            tensors
                .insert(format!("{}.weight", architecture.in_block(layer, name)), (shape.to_vec(), values));
        }
    }
    let outer = [architecture.vocab, architecture.hidden].to_vec();
    let embedding = model.embedding()?;
    tensors.insert(architecture.embedding.clone(), (outer.clone(), embedding.to_f32()?));
    let head = model.head(&embedding)?;
    tensors.insert(format!("{}.weight", architecture.head), (outer, head.weight().to_f32()?));
    save(&tensors, out)
}

fn tokens(model: &str, text: &str, length: &str, count: &str, out: &str) -> Result<(), Failure> {
    let (directory, _) = open(model)?;
    let tokens = TextTokenizer::of(&directory)?.encode(&std::fs::read_to_string(text)?)?;
    let mut windows = TokenWindows::cut(tokens, length.parse()?);
    windows.truncate(count.parse()?);
    let windows: Vec<&[u32]> = (0..windows.len()).map(|i| windows.window(i)).collect();
    Ok(std::fs::write(out, serde_json::to_vec(&windows)?)?)
}

fn ids(model: &str, texts: &str, out: &str) -> Result<(), Failure> {
    let (directory, _) = open(model)?;
    let tokenizer = TextTokenizer::of(&directory)?;
    let texts: Vec<String> = serde_json::from_slice(&std::fs::read(texts)?)?;
    let ids = texts.iter().map(|text| tokenizer.encode(text)).collect::<Result<Vec<_>, _>>()?;
    Ok(std::fs::write(out, serde_json::to_vec(&ids)?)?)
}

fn chats_of(model: &str, chats: &str, out: &str) -> Result<(), Failure> {
    let (directory, _) = open(model)?;
    let template = ChatTemplate::open(&directory)?;
    let tokenizer = TextTokenizer::of(&directory)?;
    let origin = Path::new(chats);
    let Corpus::Chats(conversations) = read_corpus(origin)? else { return Err("no conversations".into()) };
    let mut lines = Vec::new();
    for conversation in &conversations {
        let chat = template.render(conversation, Mask::Prompts, origin)?;
        let (tokens, assistant) = chat.tokenize(&tokenizer)?;
        lines.push(json!({ "text": chat.text, "tokens": tokens, "assistant": assistant }));
    }
    Ok(std::fs::write(out, serde_json::to_vec(&lines)?)?)
}

fn describe(pairs: &str, out: &str) -> Result<(), Failure> {
    let pairs: Vec<[Map<String, Value>; 2]> = serde_json::from_slice(&std::fs::read(pairs)?)?;
    let one = |config: &Map<String, Value>| {
        let fields = ConfigFields::new(Path::new("config.json"), config);
        match arch::describe(&fields, &MemorySource::new()) {
            Ok(mut architecture) => {
                // These fields do not affect what is computed.
                if architecture.learned_positions.is_none() {
                    architecture.max_positions = 0;
                }
                architecture.further_blocks = 0;
                let factor = architecture.embedding_scale;
                architecture.embedding_scale = factor.filter(|scale| *scale != EmbeddingScale::Exact(1.0));
                format!("{architecture:?}")
            }
            Err(error) => format!("error: {error}"),
        }
    };
    let compared: Vec<Value> = pairs
        .iter()
        .map(|[first, second]| {
            let texts = [one(first), one(second)];
            // Descriptions of large models take megabytes, so only the place where they begin to differ is shown.
            let same = texts[0].bytes().zip(texts[1].bytes()).take_while(|(a, b)| a == b).count();
            let around = |text: &String| {
                let bytes =
                    &text.as_bytes()[same.saturating_sub(80).min(text.len())..text.len().min(same + 120)];
                match text.starts_with("error: ") {
                    true => text.clone(),
                    false => String::from_utf8_lossy(bytes).into_owned(),
                }
            };
            match texts[0] == texts[1] {
                true if !texts[0].starts_with("error: ") => Value::Null,
                _ => json!(texts.each_ref().map(around)),
            }
        })
        .collect();
    Ok(std::fs::write(out, serde_json::to_vec(&compared)?)?)
}
