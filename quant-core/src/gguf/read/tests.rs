//! Files that are read, and malformed files with a single fault each.

use std::path::PathBuf;

use super::super::file::{Array, Value, write_file};
use super::open;
use crate::checkpoint::ModelDirectory;
use crate::{Error, Result};

pub(super) type Metadata = Vec<(String, Value)>;
pub(super) type Tensors = Vec<(String, Vec<usize>, Vec<f32>)>;

/// A Llama with one block: 2 heads of 4 channels, a SentencePiece vocabulary of 6 tokens.
pub(super) fn model() -> (Metadata, Tensors) {
    let metadata = [
        ("general.architecture", Value::string("llama")),
        ("llama.block_count", Value::U32(1)),
        ("llama.context_length", Value::U32(64)),
        ("llama.embedding_length", Value::U32(8)),
        ("llama.feed_forward_length", Value::U32(16)),
        ("llama.attention.head_count", Value::U32(2)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
        ("tokenizer.ggml.model", Value::string("llama")),
        ("tokenizer.ggml.tokens", texts(&["<unk>", "<s>", "a", "b", "ab", "aba"])),
        ("tokenizer.ggml.scores", Value::Array(Array::F32(vec![0.0, 0.0, -1.0, -2.0, -3.0, -4.0]))),
        ("tokenizer.ggml.token_type", Value::Array(Array::I32(vec![2, 3, 1, 1, 1, 1]))),
        ("tokenizer.ggml.bos_token_id", Value::U32(1)),
    ];
    let metadata = metadata.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    let mut tensors = Vec::new();
    for (i, (name, shape)) in [
        ("token_embd", &[6, 8][..]),
        ("output_norm", &[8]),
        ("blk.0.attn_norm", &[8]),
        ("blk.0.attn_q", &[8, 8]),
        ("blk.0.attn_k", &[8, 8]),
        ("blk.0.attn_v", &[8, 8]),
        ("blk.0.attn_output", &[8, 8]),
        ("blk.0.ffn_norm", &[8]),
        ("blk.0.ffn_gate", &[16, 8]),
        ("blk.0.ffn_up", &[16, 8]),
        ("blk.0.ffn_down", &[8, 16]),
    ]
    .into_iter()
    .enumerate()
    {
        tensors.push(tensor(&format!("{name}.weight"), shape, i as f32));
    }
    (metadata, tensors)
}

pub(super) fn tensor(name: &str, shape: &[usize], first: f32) -> (String, Vec<usize>, Vec<f32>) {
    let count = shape.iter().product::<usize>();
    (name.to_owned(), shape.to_vec(), (0..count).map(|i| first + i as f32 / 1024.0).collect())
}

pub(super) fn texts(list: &[&str]) -> Value {
    Value::Array(Array::String(list.iter().map(|&text| text.to_owned()).collect()))
}

pub(super) fn set(metadata: &mut Metadata, key: &str, value: Value) {
    metadata.retain(|(known, _)| known != key);
    metadata.push((key.to_owned(), value));
}

pub(super) fn read((metadata, tensors): &(Metadata, Tensors)) -> (tempfile::TempDir, Result<ModelDirectory>) {
    let directory = tempfile::tempdir().unwrap();
    let path: PathBuf = directory.path().join("x.gguf");
    std::fs::write(&path, write_file(metadata, tensors).unwrap()).unwrap();
    let read = open(&path);
    (directory, read)
}

/// The message, followed by the remedy, for a file in which these entries replace its own.
fn refused(entries: &[(&str, Value)]) -> String {
    let mut model = model();
    for (key, value) in entries {
        set(&mut model.0, key, value.clone());
    }
    refusal(&model)
}

fn refusal(model: &(Metadata, Tensors)) -> String {
    match read(model).1 {
        Err(error @ Error::InputFile { .. }) => format!("{error}; {}", error.remedy()),
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("the file was accepted"),
    }
}

fn assert_contains(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "{message} does not say {part}");
    }
}

fn values(model: &ModelDirectory, name: &str) -> Vec<f32> {
    let info = model.source().info(name).unwrap();
    let mut bytes = vec![0; info.byte_len() as usize];
    model.source().read_range(name, 0, &mut bytes).unwrap();
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

#[test]
fn heads_as_a_list_count_as_heads() {
    const QUERIES: &str = "model.layers.0.self_attn.q_proj.weight";
    let (_scratch, plain) = read(&model());
    let plain = plain.unwrap();
    // Row 1 of the checkpoint is the third row of a head of 4 in the file.
    assert_eq!(values(&plain, QUERIES)[8], 3.0 + 16.0 / 1024.0);
    for list in [Array::I32(vec![2]), Array::U32(vec![2]), Array::U64(vec![2])] {
        let mut listed = model();
        set(&mut listed.0, "llama.attention.head_count", Value::Array(list));
        let (_scratch, listed) = read(&listed);
        let listed = listed.unwrap();
        assert_eq!(listed.config(), plain.config());
        assert_eq!(values(&listed, QUERIES), values(&plain, QUERIES));
    }
    let differs = Value::Array(Array::I32(vec![2, 4]));
    assert_contains(
        &refused(&[("llama.attention.head_count", differs)]),
        &["must be the same integer of at least 0 for all blocks"],
    );
    assert_contains(
        &refused(&[("llama.attention.head_count", Value::F32(2.0))]),
        &["head_count` must be an integer of at least 0"],
    );
}

#[test]
fn a_tensor_has_one_name() {
    for name in ["blk.+0.attn_v.weight", "blk.00.attn_v.weight", "blk.-0.attn_v.weight", "blk..attn_v.weight"]
    {
        let mut model = model();
        model.1.push(tensor(name, &[8, 8], 9.0));
        assert_contains(&refusal(&model), &[name, "is not supported for llama", "Hugging Face directory"]);
    }
}

/// A Mixtral with 2 experts by its metadata and `count` by its tensors.
fn experts(count: usize) -> (Metadata, Tensors) {
    let (mut metadata, mut tensors) = model();
    set(&mut metadata, "llama.expert_count", Value::U32(2));
    set(&mut metadata, "llama.expert_used_count", Value::U32(1));
    tensors.retain(|(name, ..)| !["ffn_gate", "ffn_up", "ffn_down"].iter().any(|part| name.contains(part)));
    tensors.push(tensor("blk.0.ffn_gate_inp.weight", &[2, 8], 0.5));
    for name in ["gate", "up", "down"] {
        let [rows, columns] = if name == "down" { [8, 16] } else { [16, 8] };
        tensors.push(tensor(&format!("blk.0.ffn_{name}_exps.weight"), &[count, rows, columns], 0.25));
    }
    (metadata, tensors)
}

#[test]
fn counts_are_checked_before_use() {
    let (_scratch, two) = read(&experts(2));
    two.unwrap();
    assert_contains(
        &refusal(&experts(3)),
        &["blk.0.ffn_gate_exps.weight", "3 experts", "`llama.expert_count` is 2"],
    );
    let mut many = experts(2);
    set(&mut many.0, "llama.expert_count", Value::U32(1 << 30));
    assert_contains(&refusal(&many), &["llama.expert_count", "the limit is 4096"]);

    let with_divisors = |count: usize| {
        let mut model = model();
        model.1.push(tensor("rope_freqs.weight", &[count], 1.0));
        model
    };
    let (_scratch, fitting) = read(&with_divisors(2));
    fitting.unwrap();
    assert_contains(
        &refusal(&with_divisors(1 << 16)),
        &["rope_freqs.weight", "65536 values", "pair of the 4 rotated channels"],
    );
}

#[test]
fn tokens_that_are_too_long_or_too_alike_are_refused() {
    let tokens = |list: Vec<String>| {
        let count = list.len();
        [
            ("tokenizer.ggml.tokens", Value::Array(Array::String(list))),
            ("tokenizer.ggml.scores", Value::Array(Array::F32(vec![-1.0; count]))),
            ("tokenizer.ggml.token_type", Value::Array(Array::I32(vec![1; count]))),
            ("tokenizer.ggml.bos_token_id", Value::U32(0)),
        ]
    };
    let long = tokens(vec!["a".into(), "b".repeat(1024), "c".repeat(1025)]);
    assert_contains(
        &refused(&long),
        &["tokenizer.ggml.tokens", "1025 bytes for token 2", "the limit is 1024"],
    );
    let runs = tokens((1..200).map(|count| "a".repeat(count)).collect());
    assert_contains(&refused(&runs), &["tokenizer.ggml.tokens", "more than 6368 pairs"]);
    let (_scratch, read) = read(&model());
    let json = read.unwrap().sidecar("tokenizer.json").unwrap().contents.clone().unwrap();
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    assert_eq!(json["model"]["merges"], serde_json::json!([["a", "b"], ["ab", "a"]]));
}

#[test]
fn values_of_a_wrong_type_are_refused() {
    for key in [
        "general.type",
        "general.architecture",
        "split.count",
        "llama.expert_count",
        "llama.rope.scaling.type",
        "llama.rope.scaling.factor",
        "llama.rope.scale_linear",
        "tokenizer.ggml.model",
        "tokenizer.ggml.add_bos_token",
        "tokenizer.ggml.add_eos_token",
        "tokenizer.ggml.add_space_prefix",
        "tokenizer.ggml.bos_token_id",
        "tokenizer.ggml.eos_token_id",
        "tokenizer.ggml.padding_token_id",
        "tokenizer.ggml.eot_token_id",
        "tokenizer.ggml.mask_token_id",
        "tokenizer.chat_template",
        "tokenizer.chat_template.tool_use",
    ] {
        let wrong = texts(&["1"]);
        assert_contains(&refused(&[(key, wrong)]), &[&format!("`{key}` "), "download it again"]);
    }
    let byte_level = [("tokenizer.ggml.model", Value::string("gpt2")), ("tokenizer.ggml.pre", Value::U32(1))];
    assert_contains(&refused(&byte_level), &["`tokenizer.ggml.pre` must be a string"]);
}

#[test]
fn numbers_that_make_no_sense_are_refused() {
    let outside = ("tokenizer.ggml.bos_token_id", Value::U32(6));
    let says_so = ["`tokenizer.ggml.bos_token_id` is 6", "6 tokens"];
    assert_contains(
        &refused(&[outside.clone(), ("tokenizer.ggml.add_bos_token", Value::Bool(true))]),
        &says_so,
    );
    // SentencePiece adds a BOS token unless the file disables it.
    assert_contains(&refused(std::slice::from_ref(&outside)), &says_so);
    let mut unused = model();
    set(&mut unused.0, outside.0, outside.1);
    set(&mut unused.0, "tokenizer.ggml.add_bos_token", Value::Bool(false));
    set(&mut unused.0, "tokenizer.ggml.padding_token_id", Value::I32(-1));
    read(&unused).1.unwrap();
    let scores = Value::Array(Array::F32(vec![0.0, 0.0, f32::NAN, 0.0, 0.0, 0.0]));
    assert_contains(
        &refused(&[("tokenizer.ggml.scores", scores)]),
        &["`tokenizer.ggml.scores` is NaN for token 2"],
    );
}

#[test]
fn a_factor_without_a_type_is_linear() {
    let scaling = |entries: &[(&str, Value)]| {
        let mut model = model();
        for (key, value) in entries {
            set(&mut model.0, key, value.clone());
        }
        read(&model).1.unwrap().config()["rope_scaling"].clone()
    };
    let linear = serde_json::json!({ "rope_type": "linear", "factor": 4.0 });
    let (newer, older) = ("llama.rope.scaling.factor", "llama.rope.scale_linear");
    assert_eq!(scaling(&[(newer, Value::F32(4.0))]), linear);
    assert_eq!(scaling(&[(older, Value::F32(4.0))]), linear);
    assert_eq!(scaling(&[(newer, Value::F32(4.0)), (older, Value::F32(8.0))]), linear);
    for none in [
        &[][..],
        &[(newer, Value::F32(1.0))],
        &[(newer, Value::F32(0.0))],
        &[(newer, Value::F32(4.0)), ("llama.rope.scaling.type", Value::string("none"))],
    ] {
        assert!(scaling(none).is_null(), "{none:?}");
    }
    assert_contains(&refused(&[(newer, Value::F32(-2.0))]), &["rope.scaling.factor` is negative"]);
}

#[test]
fn remedies_fit_what_is_wrong() {
    let damaged = refused(&[("llama.block_count", Value::string("1"))]);
    assert_contains(&damaged, &["the GGUF file is damaged or incomplete: download it again"]);
    let big_endian = b"GGUF\0\0\0\x03".repeat(8);
    let scratch = tempfile::tempdir().unwrap();
    std::fs::write(scratch.path().join("x.gguf"), big_endian).unwrap();
    let unread = open(&scratch.path().join("x.gguf")).unwrap_err();
    assert_contains(&unread.to_string(), &["big-endian order"]);
    assert_contains(unread.remedy().marked(), &["Hugging Face directory"]);
    let second = [
        ("split.count", Value::U16(2)),
        ("split.no", Value::U16(1)),
        ("split.tensors.count", Value::I32(11)),
    ];
    assert_contains(&refused(&second), &["is file 2 of a model in 2 files", "give the first file"]);
    let unknown = refused(&[("general.architecture", Value::string("gpt9"))]);
    assert_contains(&unknown, &["`gpt9`; supported architectures:", "Hugging Face directory"]);
    assert_eq!(unknown.matches(" llama,").count(), 1, "{unknown}");
    let dense = refused(&[("general.architecture", Value::string("qwen3moe"))]);
    assert_contains(&dense, &["`qwen3moe.expert_count` is missing or 0"]);
    let mixed = [("general.architecture", Value::string("gemma2")), ("gemma2.expert_count", Value::U32(4))];
    assert_contains(&refused(&mixed), &["`gemma2.expert_count` is 4"]);
}

/// The model in two files, the second with these entries; `change` is applied to the tensors of both.
fn parts(
    second: &[(&str, Value)],
    names: [&str; 2],
    change: impl Fn(&mut Tensors, &mut Tensors),
) -> (tempfile::TempDir, Result<ModelDirectory>) {
    let (mut metadata, mut first) = model();
    let mut rest = first.split_off(6);
    change(&mut first, &mut rest);
    for (key, value) in
        [("split.no", Value::U16(0)), ("split.count", Value::U16(2)), ("split.tensors.count", Value::I32(11))]
    {
        set(&mut metadata, key, value);
    }
    let second: Metadata = second.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect();
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    std::fs::write(at(names[0]), write_file(&metadata, &first).unwrap()).unwrap();
    std::fs::write(at(names[1]), write_file(&second, &rest).unwrap()).unwrap();
    let read = open(&at(names[0]));
    (directory, read)
}

#[test]
fn models_in_parts_are_read_as_one() {
    const NAMES: [&str; 2] = ["x-00001-of-00002.gguf", "x-00002-of-00002.gguf"];
    let second = |number: u16, count: u16, tensors: i32| {
        [
            ("split.no", Value::U16(number)),
            ("split.count", Value::U16(count)),
            ("split.tensors.count", Value::I32(tensors)),
        ]
    };
    let good = second(1, 2, 11);
    let (_scratch, joined) = parts(&good, NAMES, |_, _| {});
    let joined = joined.unwrap();
    let (_whole, whole) = read(&model());
    let whole = whole.unwrap();
    assert_eq!(joined.config(), whole.config());
    assert_eq!(joined.source().names(), whole.source().names());
    for name in whole.source().names() {
        assert_eq!(values(&joined, name), values(&whole, name), "{name}");
    }
    assert_eq!(joined.source().files().len(), 2);
    let refused = |second: &[(&str, Value)], names, change: &dyn Fn(&mut Tensors, &mut Tensors)| {
        let (_scratch, read) = parts(second, names, change);
        match read {
            Err(error @ Error::InputFile { .. }) => error.to_string(),
            Err(other) => panic!("{other:?}"),
            Ok(_) => panic!("the file was accepted"),
        }
    };
    let as_it_is = |_: &mut Tensors, _: &mut Tensors| {};
    for wrong in [second(0, 2, 11), second(1, 3, 11), second(1, 2, 12)] {
        assert_contains(&refused(&wrong, NAMES, &as_it_is), &[NAMES[1], "is not file 2 of 2"]);
    }
    assert_contains(&refused(&[], NAMES, &as_it_is), &[NAMES[1], "is not file 2 of 2"]);
    assert_contains(
        &refused(&second(2, 2, 11), NAMES, &as_it_is),
        &[NAMES[1], "`split.no` is 2; it must be less than `split.count`, 2"],
    );
    let mut too_many = second(1, 2, 11);
    too_many[1].1 = Value::U32(u32::from(u16::MAX) + 1);
    assert_contains(
        &refused(&too_many, NAMES, &as_it_is),
        &[NAMES[1], "`split.count` is 65536, but the maximum is 65535"],
    );
    assert_contains(
        &refused(&second(1, 2, -1), NAMES, &as_it_is),
        &[NAMES[1], "`split.tensors.count` must be an integer of at least 0"],
    );
    assert_contains(
        &refused(&good, ["x.gguf", NAMES[1]], &as_it_is),
        &["must end in `-00001-of-00002.gguf`"],
    );
    assert_contains(
        &refused(&good, [NAMES[0], "y.gguf"], &as_it_is),
        &["is the first of 2 files, of which others are missing: x-00002-of-00002.gguf"],
    );
    let twice = |first: &mut Tensors, rest: &mut Tensors| rest.push(first[0].clone());
    assert_contains(
        &refused(&good, NAMES, &twice),
        &[NAMES[1], "token_embd.weight", "also in an earlier file"],
    );
    let fewer = |_: &mut Tensors, rest: &mut Tensors| rest.truncate(2);
    assert_contains(&refused(&good, NAMES, &fewer), &["11 tensors, but the files contain 8"]);
}

/// A two-block Qwen3.5. One block has a delta net of 2 key heads and 4 value heads.
fn hybrid() -> (Metadata, Tensors) {
    let (mut metadata, mut tensors) = model();
    metadata.retain(|(key, _)| !key.starts_with("llama."));
    set(&mut metadata, "general.architecture", Value::string("qwen35"));
    for (key, value) in [
        ("block_count", Value::U32(2)),
        ("context_length", Value::U32(64)),
        ("embedding_length", Value::U32(8)),
        ("feed_forward_length", Value::U32(16)),
        ("attention.head_count", Value::U32(2)),
        ("attention.key_length", Value::U32(4)),
        ("attention.layer_norm_rms_epsilon", Value::F32(1e-6)),
        ("ssm.conv_kernel", Value::U32(4)),
        ("ssm.state_size", Value::U32(2)),
        ("ssm.group_count", Value::U32(2)),
        ("ssm.time_step_rank", Value::U32(4)),
        ("ssm.inner_size", Value::U32(8)),
        ("full_attention_interval", Value::U32(2)),
        ("rope.dimension_count", Value::U32(2)),
    ] {
        set(&mut metadata, &format!("qwen35.{key}"), value);
    }
    tensors.truncate(2);
    let mut add = |name: &str, shape: &[usize], first: f32| tensors.push(tensor(name, shape, first));
    for layer in 0..2 {
        let name = |stem: &str| format!("blk.{layer}.{stem}");
        add(&name("attn_norm.weight"), &[8], 1.0);
        add(&name("post_attention_norm.weight"), &[8], 1.0);
        add(&name("ffn_gate.weight"), &[16, 8], 0.0);
        add(&name("ffn_up.weight"), &[16, 8], 0.0);
        add(&name("ffn_down.weight"), &[8, 16], 0.0);
    }
    for (stem, shape, first) in [
        ("attn_qkv.weight", &[16, 8][..], 0.0),
        ("attn_gate.weight", &[8, 8], 0.0),
        ("ssm_alpha.weight", &[4, 8], 0.0),
        ("ssm_beta.weight", &[4, 8], 0.0),
        ("ssm_conv1d.weight", &[16, 4], 0.0),
        ("ssm_a", &[4], -2.0),
        ("ssm_dt.bias", &[4], 0.0),
        ("ssm_norm.weight", &[2], 1.0),
        ("ssm_out.weight", &[8, 8], 0.0),
    ] {
        add(&format!("blk.0.{stem}"), shape, first);
    }
    for (stem, shape) in [
        ("attn_q", &[16, 8][..]),
        ("attn_k", &[8, 8]),
        ("attn_v", &[8, 8]),
        ("attn_output", &[8, 8]),
        ("attn_q_norm", &[4]),
        ("attn_k_norm", &[4]),
    ] {
        add(&format!("blk.1.{stem}.weight"), shape, 0.5);
    }
    (metadata, tensors)
}

#[test]
fn heads_of_delta_nets_go_back_to_their_groups() {
    let (_scratch, model) = read(&hybrid());
    let model = model.unwrap();
    let of = |name: &str| values(&model, &format!("model.layers.0.linear_attn.{name}"));
    // The file has heads 0, 2, 1, 3 of the checkpoint: it separates the heads of a group.
    let steps: Vec<f32> = [0.0, 2.0, 1.0, 3.0].iter().map(|i| i / 1024.0).collect();
    assert_eq!(of("dt_bias"), steps);
    // Rows of queries and keys keep their places; value heads of two rows each follow. Rows are identified by their
    // first elements.
    let mixed: Vec<usize> =
        of("in_proj_qkv.weight").chunks(8).map(|row| (row[0] * 1024.0) as usize / 8).collect();
    assert_eq!(mixed, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]);
    let columns: Vec<usize> = of("out_proj.weight")[..8].iter().map(|v| (v * 1024.0) as usize).collect();
    assert_eq!(columns, [0, 1, 4, 5, 2, 3, 6, 7]);
    // A negated exponential becomes a logarithm again, and norms lose the added 1, except for the gated one.
    for (found, stored) in of("A_log").iter().zip(&steps) {
        assert!((found - (2.0 - stored).ln()).abs() < 1e-6, "{found}");
    }
    assert_eq!(values(&model, "model.layers.0.input_layernorm.weight")[0], 0.0);
    assert_eq!(of("norm.weight")[0], 1.0);
    assert!(model.config().get("layer_types").is_none());
}

#[test]
fn numbers_of_delta_nets_and_blocks_are_compared() {
    let says_of = |key: &str, value: Value, parts: &[&str]| {
        let mut model = hybrid();
        set(&mut model.0, &format!("qwen35.{key}"), value);
        assert_contains(&refusal(&model), parts);
    };
    says_of(
        "ssm.inner_size",
        Value::U32(9),
        &["`qwen35.ssm.inner_size` is 9, but must be the total width of \
        4 heads of width 2"],
    );
    let flags = Value::Array(Array::Bool(vec![true]));
    says_of("attention.recurrent_layers", flags, &["must be a list of at least 2 booleans"]);
    says_of(
        "nextn_predict_layers",
        Value::U32(2),
        &["`qwen35.nextn_predict_layers` is 2; it must be less than `block_count`, 2"],
    );
    says_of("block_count", Value::U32(3), &["tensor `blk.2.attn_norm.weight` is missing"]);
    says_of(
        "full_attention_interval",
        Value::U32(1),
        &["tensor `blk.0.attn_qkv.weight` is not supported for qwen35"],
    );
    // Blocks for multi-token prediction are ignored.
    let mut further = hybrid();
    set(&mut further.0, "qwen35.block_count", Value::U32(3));
    set(&mut further.0, "qwen35.nextn_predict_layers", Value::U32(1));
    further.1.push(tensor("blk.2.nextn.eh_proj.weight", &[8, 16], 0.0));
    read(&further).1.unwrap();
    let mut narrow = hybrid();
    narrow.1.retain(|(name, ..)| name != "blk.0.ssm_conv1d.weight");
    narrow.1.push(tensor("blk.0.ssm_conv1d.weight", &[16, 3], 0.0));
    assert_contains(&refusal(&narrow), &["blk.0.ssm_conv1d.weight", "[16, 3]", "expected [16, 4]"]);
}

#[test]
fn yarn_is_read_as_llama_cpp_computes_it() {
    let yarn = |entries: &[(&str, Value)]| {
        let mut model = model();
        set(&mut model.0, "llama.rope.scaling.type", Value::string("yarn"));
        for (key, value) in entries {
            set(&mut model.0, &format!("llama.rope.scaling.{key}"), value.clone());
        }
        model
    };
    let factor = ("factor", Value::F32(4.0));
    let (_scratch, plain) = read(&yarn(std::slice::from_ref(&factor)));
    let plain = plain.unwrap().config()["rope_scaling"].clone();
    let recommended = 1.0 + 0.1 * 4.0_f64.ln();
    assert_eq!((&plain["truncate"], &plain["beta_fast"]), (&true.into(), &32.0.into()));
    assert_eq!(plain["original_max_position_embeddings"], 64);
    assert!((plain["attention_factor"].as_f64().unwrap() - recommended).abs() < 1e-12);
    for (more, says_so) in [
        (("yarn_beta_fast", Value::F32(8.0)), "yarn_beta_fast` is 8, but llama.cpp always uses 32"),
        (("yarn_ext_factor", Value::F32(0.5)), "yarn_ext_factor` is 0.5"),
        (("yarn_log_multiplier", Value::F32(0.1)), "yarn_log_multiplier"),
        (("factor", Value::F32(-4.0)), "factor` is -4"),
    ] {
        assert_contains(&refusal(&yarn(&[factor.clone(), more])), &[says_so]);
    }
    assert_contains(&refusal(&yarn(&[])), &["rope.scaling.factor` is missing"]);
}

proptest::proptest! {
    /// A file with a few changed bytes is rejected or read; if it is read, all its tensors can be read.
    #[test]
    fn changed_bytes_of_models_are_refused_or_read(
        changes in proptest::collection::vec((0_usize..1 << 16, proptest::prelude::any::<u8>()), 1..4),
        has_delta_net: bool,
    ) {
        let (metadata, tensors) = if has_delta_net { hybrid() } else { experts(2) };
        let mut bytes = write_file(&metadata, &tensors).unwrap();
        let len = bytes.len();
        for (at, with) in changes {
            bytes[at % len] = with;
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.gguf");
        std::fs::write(&path, bytes).unwrap();
        if let Ok(model) = open(&path) {
            for name in model.source().names() {
                model.source().read(name).unwrap();
            }
        }
    }
}

#[test]
fn tokenizers_that_are_not_read_say_why() {
    use crate::calibrate::TextTokenizer;
    for (entries, reason) in [
        (&[("model", "gpt2"), ("pre", "gpt-9")][..], "the pre-tokenizer `gpt-9` is not supported"),
        (&[("model", "bert")], "the tokenizer model `bert` is not supported"),
        (&[("model", "none")], "the file has no tokenizer"),
    ] {
        let mut model = model();
        for (key, text) in entries {
            set(&mut model.0, &format!("tokenizer.ggml.{key}"), Value::string(*text));
        }
        let (_scratch, read) = read(&model);
        let error = TextTokenizer::of(&read.unwrap()).unwrap_err();
        assert_contains(&error.to_string(), &["x.gguf: ", reason]);
        assert!(error.to_string().ends_with(reason), "{error}");
        assert_contains(error.remedy().marked(), &["Hugging Face directory"]);
    }
}

#[test]
fn remedies_of_faults_found_later_fit_a_file() {
    let path = PathBuf::from("x.gguf");
    let fault = Error::Config { path, field: "hidden_size".into(), reason: "is 0".into(), remedy: None };
    assert_contains(fault.remedy().marked(), &["GGUF file is damaged"]);
    let path = PathBuf::from("config.json");
    let fault = Error::Config { path, field: "hidden_size".into(), reason: "is 0".into(), remedy: None };
    assert_contains(fault.remedy().marked(), &["correct config.json"]);
}
