//! A transform and a container that a program adds: each is a type in this file and a word in [`extensions`]. Recipes
//! name them, and the pipeline runs them.

use crate::common;
use crate::tiny;

use std::borrow::Cow;
use std::sync::Arc;

use common::{Tiny, logits, mean_divergence, recipe, run, windows};
use quant_core::calibrate::HiddenStates;
use quant_core::checkpoint::{Dtype, ModelDirectory, TensorSpec};
use quant_core::format::{
    Container, LoaderRule, ModuleSchemes, PackedReader, PackedWeight, QuantizedCheckpoint,
};
use quant_core::model::{BlockGraph, Model, NodeId};
use quant_core::pipeline::QuantReport;
use quant_core::quantize::QuantizedTensor;
use quant_core::recipe::{Extensions, Method, Plan, Rates, Recipe};
use quant_core::run::{Done, GgufSettings, Host, Nothing, QuantizeRequest, RecipeSettings, quantize};
use quant_core::scheme::{Granularity, LinearScheme};
use quant_core::transform::{
    BlockTask, Needs, Rewrite, SearchWork, StepContext, StepKey, StepRecord, Transform, TransformSettings,
    Workload, fold,
};
use quant_core::units::{JobRequest, Selection, UnitJob, WorkOptions, init};
use quant_core::{CancelToken, Category, Error, Result, Silent, TensorSource};
use serde_json::{Map, Value, json};

/// Registers the types under their names.
fn extensions() -> Extensions {
    Extensions { transforms: vec![&EVEN], containers: vec![&PlainBytes], ..Extensions::default() }
}

/// Equalizes the columns of linears whose inputs can be rescaled, by a power of their largest weight.
#[derive(Debug)]
struct EvenColumns {
    /// The power, unless a recipe sets a different one.
    strength: f32,
}

impl EvenColumns {
    fn strength(&self, settings: &TransformSettings) -> f32 {
        settings.other("even-columns", "strength").and_then(Value::as_f64).map_or(self.strength, |s| s as f32)
    }
}

const KEPT: u64 = 3 << 30;

impl Transform for EvenColumns {
    fn name(&self) -> &'static str {
        "even-columns"
    }

    fn summary(&self) -> &'static str {
        "evens out the columns of weights"
    }

    fn folded_nodes(&self, graph: &BlockGraph, _: &TransformSettings) -> Vec<NodeId> {
        let groups = graph.fold_groups().into_iter().filter(|g| g.repeat == 1);
        groups.flat_map(|g| std::iter::once(g.producer).chain(g.consumers)).collect()
    }

    fn needs(&self, _: &TransformSettings) -> Needs {
        Needs { ranges: false, states: false }
    }

    fn keys(&self) -> Vec<StepKey> {
        let schema = json!({ "type": "number", "minimum": 0, "maximum": 1 });
        vec![StepKey::new("strength", "How much columns are evened out.", schema)]
    }

    fn set(&self, key: &str, value: &Value, settings: &mut TransformSettings) -> Result<()> {
        if !value.as_f64().is_some_and(|strength| (0.0..=1.0).contains(&strength)) {
            return Err(Error::usage(format!("strength is {value}"), "it must be from 0 to 1"));
        }
        settings.others.entry(self.name()).or_default().insert(key.to_owned(), value.clone());
        Ok(())
    }

    fn described(&self, settings: &TransformSettings) -> Map<String, Value> {
        Map::from_iter([("strength".to_owned(), json!(f64::from(self.strength(settings))))])
    }

    fn fingerprint(&self, settings: &TransformSettings) -> Value {
        json!({ "strength": self.strength(settings) })
    }

    fn check(&self, context: &StepContext<'_>) -> Result<()> {
        match context.schemes.iter().any(|scheme| matches!(scheme.granularity, Granularity::Group(_))) {
            true => Ok(()),
            false => Err(Error::usage("`even-columns` needs groups", "choose a scheme with groups")),
        }
    }

    fn memory(&self, _: &Workload<'_>) -> u64 {
        KEPT
    }

    fn work(&self, work: &Workload<'_>) -> SearchWork {
        SearchWork { operations: 1e15 * work.schemes.len() as f64, rounded: 0.0 }
    }

    fn search(&self, tasks: &[BlockTask<'_>], _: Option<&mut HiddenStates>, _: bool) -> Result<Vec<Rewrite>> {
        let one = |task: &BlockTask<'_>| {
            let mut rewrite = Rewrite::default();
            for group in task.block.graph().fold_groups().into_iter().filter(|g| g.repeat == 1) {
                let mut largest = vec![1e-3_f32; group.rows.len()];
                for &consumer in &group.consumers {
                    let weight = task.block.linear(consumer).weight().read()?.to_f32()?;
                    for row in weight.chunks_exact(largest.len()) {
                        largest.iter_mut().zip(row).for_each(|(l, w)| *l = l.max(w.abs()));
                    }
                }
                let scales: Vec<f32> =
                    largest.iter().map(|l| l.powf(-self.strength(task.settings))).collect();
                let widest = largest.iter().fold(0.0_f32, |widest, l| widest.max(*l));
                rewrite.records.extend(group.consumers.iter().map(|&consumer| StepRecord {
                    module: task.module(consumer),
                    step: self.name(),
                    value: json!({ "widest": widest }),
                }));
                fold(&mut rewrite, task, &group, &scales)?;
            }
            Ok(rewrite)
        };
        tasks.iter().map(one).collect()
    }
}

static EVEN: EvenColumns = EvenColumns { strength: 0.5 };
static STRONGER: EvenColumns = EvenColumns { strength: 0.8 };

fn method(transform: &'static dyn Transform) -> Method {
    let rtn = quant_core::recipe::method("rtn").unwrap();
    Method { name: "even-columns".into(), transforms: Cow::Owned(vec![transform]), ..rtn }
}

#[test]
fn a_transform_brings_its_checks_its_memory_its_work_and_its_settings() {
    let tiny = Tiny::default();
    let model = tiny.random(5).model();
    let rtn = recipe("rtn", "w4a16-g16-sym");
    let own = Recipe { method: method(&EVEN), ..rtn.clone() };

    let [plain, planned] = [&rtn, &own].map(|r| Plan::all(&model, r).unwrap());
    let [before, after] = [&plain, &planned].map(|plans| Plan::peak_memory(plans, &model));
    assert!(before < KEPT && after >= KEPT, "{before} and {after}");
    let rates = Rates { operations: 1e9, rounded: 1e9, hashed: 1e9 };
    let [before, after] = [&plain, &planned].map(|plans| Plan::seconds(plans, &model, rates));
    assert!(after > before + 1e6, "{before} and {after}");
    let prints = [&EVEN, &STRONGER].map(|t| method(t).fingerprint(&own.settings));
    assert_eq!(prints[0], json!({ "even-columns": { "strength": 0.5 } }));
    assert_ne!(prints[0], prints[1]);

    let refused = Recipe { method: method(&EVEN), ..recipe("rtn", "w8a16-channel-sym") };
    let error = Plan::all(&model, &refused).unwrap_err();
    assert_eq!(
        (error.category(), error.to_string().as_str()),
        (Category::Usage, "`even-columns` needs groups")
    );
}

#[test]
fn a_transform_is_folded_and_reported() {
    let tiny = Tiny::default();
    let checkpoint = tiny.random(5);
    let (model, others) = (checkpoint.model(), windows(tiny.vocab, 2, 24, 3));
    let float = logits(&model, &others);
    let fine = |transform| Recipe { method: method(transform), ..recipe("rtn", "w8a16-g16-sym") };
    let rounded = run(&model, &tiny.config(), &recipe("rtn", "w8a16-g16-sym"), None);
    let rtn = mean_divergence(&float, &logits(&rounded.model(), &others), tiny.vocab);
    for transform in [&EVEN, &STRONGER] {
        let written = run(&model, &tiny.config(), &fine(transform), None);
        assert_eq!(written.report.steps, ["even-columns"]);
        // The model computes the same function up to rounding, with different weights.
        let lost = mean_divergence(&float, &logits(&written.model(), &others), tiny.vocab);
        assert!(lost < 8.0 * rtn, "lost {lost}, but rounding alone loses {rtn}");
        let norm = "model.layers.0.input_layernorm.weight";
        assert_ne!(written.source.read(norm).unwrap(), rounded.source.read(norm).unwrap());
    }
}

#[test]
fn a_step_reports_what_it_found() {
    let tiny = Tiny::default();
    let model = tiny.random(5).model();
    let written = run(
        &model,
        &tiny.config(),
        &Recipe { method: method(&EVEN), ..recipe("rtn", "w8a16-g16-sym") },
        None,
    );
    let json: Value = serde_json::from_str(&{
        let mut text = Vec::new();
        written.report.write_json(&mut text).unwrap();
        String::from_utf8(text).unwrap()
    })
    .unwrap();
    let tensors = json["tensors"].as_array().unwrap();
    let of = |name: &str| tensors.iter().find(|t| t["tensor"] == name).unwrap();
    let (reader, other) =
        (of("model.layers.1.mlp.up_proj.weight"), of("model.layers.1.input_layernorm.weight"));
    assert!(reader["even-columns"]["widest"].as_f64().is_some_and(|widest| widest > 0.0), "{reader}");
    assert!(other.get("even-columns").is_none() && other.get("records").is_none(), "{other}");
    let read: QuantReport = serde_json::from_value(json).unwrap();
    assert_eq!(read, written.report);
}

#[test]
fn jobs_know_them_too() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    std::fs::create_dir(at("model")).unwrap();
    tiny::tiny_llama(&at("model")).unwrap();
    std::fs::write(at("recipe.toml"), RECIPE).unwrap();
    let settings = RecipeSettings { recipe: Some(at("recipe.toml")), ..RecipeSettings::default() };
    let (cancel, own) = (CancelToken::new(), extensions());
    let host = Host::new(&Silent, &cancel, &Nothing);
    let request = QuantizeRequest {
        settings: settings.clone(),
        extensions: own.clone(),
        ..QuantizeRequest::new(at("model"), at("whole"))
    };
    quantize(&request, &host).unwrap();
    let request =
        JobRequest { model: at("model"), settings, extensions: own.clone(), ..JobRequest::default() };
    assert!(init(&request, &at("job"), &host).unwrap().created);
    let unknown = UnitJob::open(&at("job"), None, &host).err().unwrap();
    assert_eq!(unknown.category().exit_code(), 2, "{unknown}");
    assert!(
        unknown.to_string().contains("unknown format `plain-bytes`")
            || unknown.to_string().contains("unknown step"),
        "{unknown}"
    );
    let job = UnitJob::open_with(&at("job"), None, &own, &host).unwrap();
    job.run(&Selection::All, &WorkOptions::default(), &host).unwrap();
    job.merge(&at("merged"), (false, false), &host).unwrap();
    for file in ["model.safetensors", "config.json", "quant_report.json"] {
        let [whole, merged] = ["whole", "merged"].map(|out| std::fs::read(at(out).join(file)).unwrap());
        assert!(whole == merged, "{file} differs");
    }
}

/// Codes as bytes in `MODULE.bytes`, with scales in single precision.
#[derive(Debug)]
struct PlainBytes;

fn specs(module: &str, [n, k]: [usize; 2], scheme: LinearScheme) -> Vec<TensorSpec> {
    let groups = k / scheme.granularity.group_size(k);
    vec![
        TensorSpec::new(format!("{module}.bytes"), Dtype::U8, [n, k]),
        TensorSpec::new(format!("{module}.steps"), Dtype::F32, [n, groups]),
    ]
}

impl Container for PlainBytes {
    fn name(&self) -> &'static str {
        "plain-bytes"
    }

    fn summary(&self) -> &'static str {
        "a byte for each code"
    }

    fn layout(
        &self,
        module: &str,
        shape: [usize; 2],
        scheme: LinearScheme,
        _: Dtype,
    ) -> Result<Vec<TensorSpec>> {
        match scheme.is_symmetric() {
            true => Ok(specs(module, shape, scheme)),
            false => Err(Error::usage("plain-bytes has no zeros", "choose a symmetric scheme")),
        }
    }

    fn pack(&self, module: &str, tensor: &QuantizedTensor) -> Result<Vec<(TensorSpec, Vec<u8>)>> {
        let scales = tensor.scales.iter().flat_map(|s| s.to_le_bytes()).collect();
        Ok(specs(module, tensor.shape, tensor.scheme)
            .into_iter()
            .zip([tensor.codes.clone(), scales])
            .collect())
    }

    fn quantization_config(&self, schemes: &ModuleSchemes<'_>) -> Value {
        let scheme = schemes.quantized.first().map(|(_, scheme)| scheme.to_string());
        json!({ "quant_method": "plain-bytes", "scheme": scheme })
    }

    fn loader_rules(&self) -> &'static [LoaderRule] {
        static RULES: [LoaderRule; 1] = [LoaderRule::new(&[], |_| true, "no engine loads this")];
        &RULES
    }

    fn reader(&self, config: &Value) -> Result<Option<Box<dyn PackedReader>>, String> {
        if config["quant_method"] != "plain-bytes" {
            return Ok(None);
        }
        let scheme = config["scheme"].as_str().and_then(|scheme| scheme.parse().ok());
        let scheme = scheme.ok_or("`quantization_config.scheme` is not a scheme")?;
        Ok(Some(Box::new(PlainReader(scheme))))
    }
}

struct PlainReader(LinearScheme);

impl PackedReader for PlainReader {
    fn code_suffixes(&self) -> &'static [&'static str] {
        &[".bytes"]
    }

    fn scheme(&self, module: &str) -> Option<LinearScheme> {
        module.ends_with("_proj").then_some(self.0)
    }

    fn scale_dtype(&self, source: &dyn TensorSource, module: &str) -> Result<Dtype> {
        Ok(source.require(&format!("{module}.steps"))?.dtype)
    }

    fn shape(&self, source: &dyn TensorSource, module: &str) -> Result<Option<[usize; 2]>> {
        let info = source.require(&format!("{module}.bytes"))?;
        Ok(<[usize; 2]>::try_from(info.shape.as_slice()).ok())
    }

    fn tensors(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<Vec<TensorSpec>> {
        let specs = specs(weight.module, weight.shape, weight.scheme);
        specs.iter().try_for_each(|spec| source.require(&spec.name).map(drop))?;
        Ok(specs)
    }

    fn zeros(&self, _: &dyn TensorSource, _: PackedWeight<'_>) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }

    fn read(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<QuantizedTensor> {
        let codes = source.read(&format!("{}.bytes", weight.module))?;
        let scales = source.read_f32(&format!("{}.steps", weight.module))?;
        Ok(QuantizedTensor::new(weight.shape, weight.scheme, codes, scales, Dtype::F32))
    }
}

#[test]
fn a_container_is_written_by_the_pipeline_and_read_by_engines() {
    let tiny = Tiny::default();
    let model = tiny.random(5).model();
    let ours = Recipe { containers: vec![&PlainBytes], ..recipe("rtn", "w4a16-g16-sym") };
    let written = run(&model, &tiny.config(), &ours, None);
    assert!(Plan::all(&model, &ours).unwrap()[0].warnings().contains(&"no engine loads this".to_owned()));
    assert_eq!(written.config["quantization_config"]["quant_method"], "plain-bytes");

    let reader = PlainBytes.reader(&written.config["quantization_config"]).unwrap().unwrap();
    let opened = QuantizedCheckpoint::with_reader(Arc::new(written.source.clone()), reader).unwrap();
    let known = run(&model, &tiny.config(), &recipe("rtn", "w4a16-g16-sym"), None);
    let known = QuantizedCheckpoint::new(
        Arc::new(known.source),
        "known".as_ref(),
        &known.config["quantization_config"],
    );
    let known = known.unwrap();
    assert_eq!(opened.linears(), known.linears());
    assert!(opened.linears().len() >= 14);
    for linear in opened.linears() {
        let [ours, theirs] = [&opened, &known].map(|c| c.read(&linear.name).unwrap().dequantize().unwrap());
        assert_eq!(ours, theirs, "{}", linear.name);
    }
    let asymmetric = Recipe { containers: vec![&PlainBytes], ..recipe("rtn", "w4a16-g16-asym") };
    assert!(Plan::all(&model, &asymmetric).unwrap_err().to_string().contains("no zeros"));
}

const RECIPE: &str = "
format = 'plain-bytes'
[[transform]]
kind = 'even-columns'
strength = 0.75
[quantize]
scheme = 'w8a16-g16-sym'
";

#[test]
fn a_recipe_names_both() {
    let parsed = Recipe::parse_with(RECIPE, &extensions()).unwrap();
    assert_eq!((parsed.method.steps(), parsed.containers[0].name()), (vec!["even-columns"], "plain-bytes"));
    assert_eq!(EVEN.strength(&parsed.settings), 0.75);
    assert_eq!(parsed.method.fingerprint(&parsed.settings), json!({ "even-columns": { "strength": 0.75 } }));
    let printed = parsed.to_toml();
    let again = Recipe::parse_with(&printed, &extensions()).unwrap();
    assert_eq!((again.to_toml(), again.settings), (printed.clone(), parsed.settings));
    assert!(printed.contains("strength = 0.75"), "{printed}");

    for (text, expected) in [
        (RECIPE.replace("0.75", "7"), "line 5: strength is 7"),
        (RECIPE.replace("strength", "force"), "line 5: unknown key `force`"),
        (RECIPE.replace("'plain-bytes'", "'bytes'"), "unknown format `bytes`"),
    ] {
        let error = Recipe::parse_with(&text, &extensions()).unwrap_err();
        assert_eq!(error.category(), Category::Usage);
        assert!(error.to_string().contains(expected), "{error}");
    }
    assert!(Recipe::parse(RECIPE).unwrap_err().to_string().contains("unknown step `even-columns`"));
}

#[test]
fn a_method_of_a_program_keeps_its_name() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    std::fs::create_dir(at("model")).unwrap();
    tiny::tiny_llama(&at("model")).unwrap();
    let own = Method { name: "house".into(), ..quant_core::recipe::method("fold-norms").unwrap() };
    let known = Extensions { methods: vec![own], ..extensions() };
    let settings = RecipeSettings {
        method: Some("house".into()),
        scheme: Some("w8a16-g16-sym".into()),
        ..RecipeSettings::default()
    };
    let request = QuantizeRequest {
        settings,
        extensions: known.clone(),
        ..QuantizeRequest::new(at("model"), at("out"))
    };
    quantize(&request, &Host::new(&Silent, &CancelToken::new(), &Nothing)).unwrap();
    let report: Value =
        serde_json::from_slice(&std::fs::read(at("out").join("quant_report.json")).unwrap()).unwrap();
    assert_eq!(report["method"], "house");

    // A step may not have the name of a method with other steps, because settings would mean the method.
    let taken = Method { name: "even-columns".into(), ..quant_core::recipe::method("awq").unwrap() };
    let error = Extensions { methods: vec![taken], ..known }.check().unwrap_err();
    assert_eq!(error.category(), Category::Usage);
    assert!(error.to_string().contains("is that of a method with other steps"), "{error}");
}

#[test]
fn one_call_writes_them_and_reads_them_back() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    std::fs::create_dir(at("model")).unwrap();
    tiny::tiny_llama(&at("model")).unwrap();
    std::fs::write(at("recipe.toml"), RECIPE).unwrap();
    let run = |model: &str, out: &str, settings: RecipeSettings| {
        let request = QuantizeRequest {
            settings,
            extensions: extensions(),
            ..QuantizeRequest::new(at(model), at(out))
        };
        quantize(&request, &Host::new(&Silent, &CancelToken::new(), &Nothing))
    };
    let of = |method: &str, format: &str| RecipeSettings {
        method: Some(method.to_owned()),
        scheme: Some("w8a16-g16-sym".to_owned()),
        format: vec![format.to_owned()],
        ..RecipeSettings::default()
    };
    let recipe = RecipeSettings { recipe: Some(at("recipe.toml")), ..RecipeSettings::default() };
    let Done::Checkpoints(done) = run("model", "of-recipe", recipe).unwrap() else {
        panic!("not checkpoints")
    };
    assert_eq!(done.outputs[0].1.steps, ["even-columns"]);
    assert!(done.steps.iter().any(|step| step.step == "even-columns"), "{:?}", done.steps);

    let keys = Map::from_iter([("strength".to_owned(), json!(0.75))]);
    let steps = [("even-columns".to_owned(), keys)].into();
    run("model", "of-settings", RecipeSettings { steps, ..of("even-columns", "plain-bytes") }).unwrap();
    run("model", "default", of("even-columns", "plain-bytes")).unwrap();
    let bytes = |out: &str| std::fs::read(at(out).join("model.safetensors")).unwrap();
    assert_eq!(bytes("of-recipe"), bytes("of-settings"));
    assert_ne!(bytes("of-recipe"), bytes("default"), "0.5 is the default");

    // The written model gives the same results as the same codes in a known format.
    run(
        "of-recipe",
        "converted",
        RecipeSettings { format: vec!["compressed-tensors".into()], ..Default::default() },
    )
    .unwrap();
    let gguf = RecipeSettings {
        scheme: Some("f16".into()),
        format: vec!["gguf".into()],
        requantize: true,
        gguf: GgufSettings { pre: Some("none".into()), ..GgufSettings::default() },
        ..RecipeSettings::default()
    };
    run("of-recipe", "floats.gguf", gguf).unwrap();
    let opened = |out: &str| {
        Model::open_with(&ModelDirectory::open(&at(out)).unwrap(), &extensions().containers).unwrap()
    };
    let others = windows(64, 1, 16, 3);
    let [ours, known] = ["of-recipe", "converted"].map(|out| logits(&opened(out), &others));
    assert_eq!(ours, known);
    assert!(
        Model::open(&ModelDirectory::open(&at("of-recipe")).unwrap()).is_err(),
        "only this program knows it"
    );

    let mut text = of("even-columns", "plain-bytes");
    text.add_step("even-columns.strength=0.75").unwrap();
    run("model", "of-text", text).unwrap();
    assert_eq!(bytes("of-recipe"), bytes("of-text"));
    for (given, expected, remedy) in [
        ("even-columns.strength=7", "strength is 7", "from 0 to 1"),
        ("even-columns.strenght=0.5", "has the key `strenght`", "did you mean strength?"),
        ("even-column.strength=0.5", "settings of `even-column`", "did you mean even-columns?"),
    ] {
        let mut settings = of("even-columns", "plain-bytes");
        settings.add_step(given).unwrap();
        let error = run("model", "refused", settings).unwrap_err();
        assert_eq!(error.category(), Category::Usage);
        assert!(error.to_string().contains(expected), "{error}");
        assert!(error.remedy().marked().contains(remedy), "{}", error.remedy());
        assert!(!at("refused").exists());
    }

    let error = run(
        "model",
        "no-step",
        RecipeSettings { steps: [("clip".to_owned(), Map::new())].into(), ..of("rtn", "awq") },
    );
    let error = error.unwrap_err();
    assert_eq!(error.category(), Category::Usage);
    assert!(error.to_string().contains("`clip`, which is not a step of method `rtn`"), "{error}");
}
