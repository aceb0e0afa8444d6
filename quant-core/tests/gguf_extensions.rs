//! GGUF files that are written with a step and roundings of a program: the file has what the step and the rounding say,
//! and the report and the fingerprint of the run have their names.

use crate::common;
use crate::tiny;

use std::path::{Path, PathBuf};

use common::{logits, mean_divergence, windows};
use quant_core::blocks::{Q8_0, block_type};
use quant_core::calibrate::{Corpus, HiddenStates};
use quant_core::checkpoint::ModelDirectory;
use quant_core::gguf::{GgufFile, GgufPlan};
use quant_core::model::{BlockGraph, FoldGroup, Model, NodeId};
use quant_core::pipeline::Program;
use quant_core::quantize::gptq::GptqSettings;
use quant_core::recipe::Extensions;
use quant_core::round::{BlockRounding, LayerInputs, Rounding};
use quant_core::run::{
    Done, GgufDone, GgufSettings, Host, Nothing, QuantizeRequest, RecipeSettings, Text, plan_gguf_with,
    quantize,
};
use quant_core::transform::{
    BlockTask, Needs, Rewrite, StepContext, StepKey, Transform, TransformSettings, fold,
};
use quant_core::{CancelToken, Category, Error, Result, Silent};
use serde_json::{Value, json};
use tempfile::TempDir;

fn extensions() -> Extensions {
    Extensions {
        transforms: vec![&LevelInputs],
        roundings: vec![&Careful, &Separate],
        ..Extensions::default()
    }
}

/// Divides the outputs of norms by a power of their channels' maxima, which it takes from the ranges of linears' inputs.
#[derive(Debug)]
struct LevelInputs;

fn groups(graph: &BlockGraph) -> impl Iterator<Item = FoldGroup> {
    graph.fold_groups().into_iter().filter(|group| group.repeat == 1)
}

impl Transform for LevelInputs {
    fn name(&self) -> &'static str {
        "level-inputs"
    }

    fn summary(&self) -> &'static str {
        "levels the inputs of linears"
    }

    fn folded_nodes(&self, graph: &BlockGraph, _: &TransformSettings) -> Vec<NodeId> {
        groups(graph).flat_map(|group| std::iter::once(group.producer).chain(group.consumers)).collect()
    }

    fn needs(&self, _: &TransformSettings) -> Needs {
        Needs { ranges: true, states: false }
    }

    fn keys(&self) -> Vec<StepKey> {
        let schema = json!({ "type": "number", "minimum": 0, "maximum": 1 });
        vec![StepKey::new("strength", "How much inputs are levelled.", schema)]
    }

    fn supports_blocks(&self) -> bool {
        true
    }

    /// The step refuses files whose types all have 8 bits, for this test.
    fn check(&self, context: &StepContext<'_>) -> Result<()> {
        assert_eq!((context.method, context.schemes.len()), ("level-inputs,careful", 0));
        match context.block_types.iter().any(|kind| **kind != Q8_0) {
            true => Ok(()),
            false => Err(Error::usage("`level-inputs` has no effect on Q8_0", "choose a smaller type")),
        }
    }

    fn search(&self, tasks: &[BlockTask<'_>], _: Option<&mut HiddenStates>, _: bool) -> Result<Vec<Rewrite>> {
        let one = |task: &BlockTask<'_>| {
            let strength =
                task.settings.other(self.name(), "strength").and_then(Value::as_f64).unwrap_or(0.5);
            let mut rewrite = Rewrite::default();
            for group in groups(task.block.graph()) {
                let maxima = task.ranges[&group.input].maxima();
                let scales: Vec<f32> = maxima.iter().map(|max| max.powf(strength as f32)).collect();
                fold(&mut rewrite, task, &group, &scales)?;
            }
            Ok(rewrite)
        };
        tasks.iter().map(one).collect()
    }
}

/// Compensates errors in blocks as GPTQ does, with a key of its own.
#[derive(Debug)]
struct Careful;

impl Rounding for Careful {
    fn name(&self) -> &'static str {
        "careful"
    }

    fn summary(&self) -> &'static str {
        "compensates errors"
    }

    fn keys(&self) -> Vec<StepKey> {
        let schema = json!({ "type": "number", "minimum": 0, "maximum": 1 });
        vec![StepKey::new("caution", "The damping.", schema)]
    }

    fn inputs(&self, _: &TransformSettings) -> Option<LayerInputs> {
        Some(LayerInputs::Float)
    }

    fn blocks(&self, settings: &TransformSettings) -> BlockRounding {
        let damping = settings.other(self.name(), "caution").and_then(Value::as_f64).unwrap_or(0.02);
        let settings = GptqSettings { damping, ..GptqSettings::default() };
        BlockRounding::Compensated { keys: &["caution"], settings }
    }
}

/// Rounds each weight by itself.
#[derive(Debug)]
struct Separate;

impl Rounding for Separate {
    fn name(&self) -> &'static str {
        "separate"
    }

    fn summary(&self) -> &'static str {
        "rounds each weight by itself"
    }

    fn blocks(&self, _: &TransformSettings) -> BlockRounding {
        BlockRounding::Nearest
    }
}

struct Bench {
    scratch: TempDir,
}

impl Bench {
    fn new() -> Self {
        let bench = Self { scratch: tempfile::tempdir().unwrap() };
        std::fs::create_dir(bench.at("model")).unwrap();
        tiny::tiny_llama(&bench.at("model")).unwrap();
        bench
    }

    fn at(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn try_write(&self, out: &str, settings: &RecipeSettings) -> Result<GgufDone> {
        // Every window has all words of the vocabulary.
        let words: Vec<String> = (0..64 * 20).map(|i| format!("w{}", i % 64)).collect();
        let text = Text::Given(Corpus::Texts(vec![words.join(" ")]), "words".into());
        let request = QuantizeRequest {
            settings: RecipeSettings { samples: Some(4), seq_len: Some(64), ..settings.clone() },
            extensions: extensions(),
            calibration: Some(text),
            ..QuantizeRequest::new(self.at("model"), self.at(out))
        };
        match quantize(&request, &Host::new(&Silent, &CancelToken::new(), &Nothing))? {
            Done::Gguf(done) => Ok(*done),
            _ => panic!("not a GGUF file"),
        }
    }

    fn write(&self, out: &str, settings: &RecipeSettings) -> GgufDone {
        self.try_write(out, settings).unwrap()
    }

    fn bytes(&self, out: &str) -> Vec<u8> {
        std::fs::read(self.at(out)).unwrap()
    }

    fn plan(&self, settings: &RecipeSettings) -> GgufPlan {
        let cancel = CancelToken::new();
        let host = Host::new(&Silent, &cancel, &Nothing);
        plan_gguf_with(&self.at("model"), settings, &extensions(), &host).unwrap().plan
    }

    /// The method, the rounding and the transforms in the fingerprint of a run.
    fn fingerprint(&self, settings: &RecipeSettings) -> [Value; 3] {
        let directory = ModelDirectory::open(&self.at("model")).unwrap();
        let program = Program::current(&CancelToken::new()).unwrap();
        let print = self.plan(settings).fingerprint(&directory, None, None, &program);
        ["method", "rounding", "transforms"].map(|key| print[key].clone())
    }
}

fn settings(method: &str, steps: &[&str]) -> RecipeSettings {
    let mut settings = RecipeSettings {
        method: Some(method.to_owned()),
        scheme: Some("q4_0".into()),
        format: vec!["gguf".into()],
        // The row width of the tiny model does not suit Q6_K.
        overrides: vec!["lm_head=q8_0".into()],
        gguf: GgufSettings { pre: Some("none".into()), ..GgufSettings::default() },
        ..RecipeSettings::default()
    };
    steps.iter().for_each(|step| settings.add_step(step).unwrap());
    settings
}

/// The values of a tensor of a file.
fn decoded(path: &Path, name: &str) -> Vec<f32> {
    let file = GgufFile::open(path).unwrap();
    let tensor = file.tensor(name).unwrap();
    let (mut bytes, mut values) = (vec![0; tensor.bytes as usize], vec![0.0; tensor.shape.iter().product()]);
    file.read(tensor, 0, &mut bytes).unwrap();
    tensor.kind.decode(&bytes, &mut values);
    values
}

#[test]
fn a_step_and_a_rounding_of_a_program_write_a_gguf_file() {
    let bench = Bench::new();
    let own = settings("level-inputs,careful", &["level-inputs.strength=0.75", "careful.caution=0.05"]);
    let done = bench.write("own.gguf", &own);
    let rounded = done.report.tensors.iter().filter(|tensor| tensor.method.is_some());
    let rounded: Vec<_> =
        rounded.map(|tensor| (&*tensor.tensor, tensor.method.as_deref().unwrap())).collect();
    assert_eq!(rounded.len(), 2 * 7, "{rounded:?}");
    assert!(rounded.iter().all(|(_, method)| *method == "careful"), "{rounded:?}");
    let stepped: Vec<_> = done.report.tensors.iter().filter(|tensor| !tensor.steps.is_empty()).collect();
    assert!(stepped.iter().any(|tensor| tensor.tensor == "blk.1.ffn_up.weight"));
    assert!(stepped.iter().all(|tensor| tensor.steps == ["level-inputs"]));

    // The first norm is divided by the maxima of its outputs, to the power 0.75, over all words; the columns of its
    // readers are multiplied by the same numbers.
    let directory = ModelDirectory::open(&bench.at("model")).unwrap();
    let read = |name: &str| directory.source().read_f32(name).unwrap();
    let norm = read("model.layers.0.input_layernorm.weight");
    let mut maxima = vec![0.0_f32; 64];
    for row in read("model.embed_tokens.weight").chunks_exact(64) {
        let mean = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / 64.0;
        let inverse = 1.0 / (mean + 1e-5).sqrt() as f32;
        maxima
            .iter_mut()
            .zip(row)
            .zip(&norm)
            .for_each(|((max, x), w)| *max = max.max((x * inverse * w).abs()));
    }
    let scales: Vec<f32> = maxima.iter().map(|max| max.powf(0.75)).collect();
    let (least, most) = scales.iter().fold((f32::MAX, 0.0_f32), |(a, b), s| (a.min(*s), b.max(*s)));
    assert!(most > 1.2 * least, "the scales differ: {least} to {most}");
    let written = decoded(&bench.at("own.gguf"), "blk.0.attn_norm.weight");
    for ((written, norm), scale) in written.iter().zip(&norm).zip(&scales) {
        assert!((written * scale / norm - 1.0).abs() < 1e-4, "{written} for {norm} and {scale}");
    }
    let values = decoded(&bench.at("own.gguf"), "blk.0.attn_v.weight");
    let expected: Vec<f32> = read("model.layers.0.self_attn.v_proj.weight")
        .chunks_exact(64)
        .flat_map(|row| row.iter().zip(&scales).map(|(w, scale)| w * scale).collect::<Vec<_>>())
        .collect();
    let distance = |a: &[f32], b: &[f32]| {
        let [error, all] =
            [a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f32>(), b.iter().map(|b| b * b).sum()];
        (error / all).sqrt()
    };
    assert!(distance(&values, &expected) < 0.15, "{}", distance(&values, &expected));
    let unscaled = read("model.layers.0.self_attn.v_proj.weight");
    assert!(distance(&values, &unscaled) > 0.3, "{}", distance(&values, &unscaled));

    // The file is read back as a model that computes almost the same.
    let others = windows(64, 2, 24, 3);
    let float = logits(&Model::open(&directory).unwrap(), &others);
    let divergence = |out: &str| {
        let model = Model::open(&quant_core::gguf::open(&bench.at(out)).unwrap()).unwrap();
        mean_divergence(&float, &logits(&model, &others), 64)
    };
    bench.write("rtn.gguf", &settings("rtn", &[]));
    let [own, rtn] = ["own.gguf", "rtn.gguf"].map(divergence);
    assert!(rtn > 0.0 && own < 2.0 * rtn, "{own}, but rounding alone loses {rtn}");
}

#[test]
fn a_rounding_of_a_program_writes_what_its_settings_say() {
    let bench = Bench::new();
    let methods = |done: &GgufDone| {
        let named = done.report.tensors.iter().filter_map(|tensor| tensor.method.clone());
        named.collect::<std::collections::BTreeSet<_>>().into_iter().collect::<Vec<_>>()
    };
    let careful = bench.write("careful.gguf", &settings("careful", &["careful.caution=0.3"]));
    let gptq = bench.write("gptq.gguf", &settings("gptq", &["gptq.damping=0.3"]));
    assert_eq!([methods(&careful), methods(&gptq)], [["careful"], ["gptq"]]);
    assert!(bench.bytes("careful.gguf") == bench.bytes("gptq.gguf"), "the same damping");
    bench.write("default.gguf", &settings("careful", &[]));
    assert!(bench.bytes("default.gguf") != bench.bytes("gptq.gguf"), "a different damping");

    let separate = bench.write("separate.gguf", &settings("separate", &[]));
    bench.write("rtn.gguf", &settings("rtn", &[]));
    assert_eq!(methods(&separate), [""; 0]);
    assert!(bench.bytes("separate.gguf") == bench.bytes("rtn.gguf"));
}

#[test]
fn fingerprints_have_the_names_and_settings_of_steps_and_roundings() {
    let bench = Bench::new();
    let of_gptq = |damping: f64| {
        json!({ "gptq": {
            "damping": damping, "block_size": 128, "act_order": "static-groups", "inputs": "quantized"
        }})
    };
    for (method, steps, expected) in [
        ("rtn", &[][..], [json!("rtn"), json!({}), json!({})]),
        ("separate", &[], [json!("separate"), json!({}), json!({})]),
        ("gptq", &[], [json!("gptq"), of_gptq(0.01), json!({})]),
        ("awq", &[], [json!("awq"), json!({}), json!({ "awq": null })]),
        ("awq,gptq", &["gptq.damping=0.5"], [json!("awq-gptq"), of_gptq(0.5), json!({ "awq": null })]),
        (
            "careful",
            &["careful.caution=0.5"],
            [json!("careful"), json!({ "careful": { "caution": 0.5 } }), json!({})],
        ),
        (
            "level-inputs,careful",
            &["level-inputs.strength=0.25"],
            [json!("level-inputs,careful"), json!({}), json!({ "level-inputs": { "strength": 0.25 } })],
        ),
    ] {
        assert_eq!(bench.fingerprint(&settings(method, steps)), expected, "{method}");
    }
    let unnamed = RecipeSettings { method: None, ..settings("rtn", &[]) };
    assert_eq!(bench.fingerprint(&unnamed), bench.fingerprint(&settings("rtn", &[])));
}

#[test]
fn steps_of_a_program_are_checked_for_gguf_files() {
    let bench = Bench::new();
    let own = settings("level-inputs,careful", &[]);
    let unknown = own.gguf_request(false).unwrap_err();
    assert!(unknown.to_string().contains("level-inputs"), "{unknown}");
    let request = own.gguf_request_with(false, &extensions()).unwrap();
    assert_eq!((request.steps(), request.needs_text()), (vec!["level-inputs"], true));

    let of_scheme = |scheme: &str| RecipeSettings { scheme: Some(scheme.to_owned()), ..own.clone() };
    let error = bench.try_write("out.gguf", &of_scheme("q8_0")).unwrap_err();
    assert_eq!(error.category(), Category::Usage);
    assert!(error.to_string().contains("no effect on Q8_0"), "{error}");
    assert!(!bench.at("out.gguf").exists());
    let plan = bench.plan(&of_scheme("q5_0"));
    assert!(plan.tensors.iter().any(|tensor| Some(tensor.kind) == block_type("q5_0")));

    for (step, expected) in [
        ("level-inputs.strenght=0.5", "strenght"),
        ("careful.block_size=64", "block_size"),
        ("gptq.damping=0.5", "no effect"),
    ] {
        let mut settings = own.clone();
        settings.add_step(step).unwrap();
        let error = settings.gguf_request_with(false, &extensions()).unwrap_err();
        assert_eq!(error.category(), Category::Usage);
        assert!(error.to_string().contains(expected), "{step}: {error}");
    }
}
