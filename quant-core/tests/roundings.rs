//! Roundings that a program adds: one that looks at each weight by itself, and one that rounds a block in stages, on the
//! states of a calibration batch. Each is a type in this file and a word in [`extensions`].

use crate::common;

use std::sync::Arc;

use common::{Tiny, recipe, run, windows};
use quant_core::calibrate::HiddenStates;
use quant_core::checkpoint::MemorySink;
use quant_core::model::WeightBody;
use quant_core::pipeline::{Job, quantize_job};
use quant_core::quantize::{
    ErrorStats, QuantizedTensor, RowsError, ScaleContext, SourceRows, quantize_within,
};
use quant_core::recipe::{Extensions, Method, Plan, Recipe};
use quant_core::round::{
    LayerInputs, Rounded, Rounding, RoundingMemory, RoundingTask, StageRounded, StagedRounding, States,
    WeightTask,
};
use quant_core::run::RecipeSettings;
use quant_core::transform::{StepKey, TransformSettings, Workload};
use quant_core::{CancelToken, Category, Error, Result, Silent, TensorSource};
use serde_json::{Value, json};

/// Registers the two types under their names.
fn extensions() -> Extensions {
    Extensions { roundings: vec![&Shrunk, &InStages], ..Extensions::default() }
}

/// Rounds to nearest after weights have moved towards zero by a factor. It looks at each weight by itself.
#[derive(Debug)]
struct Shrunk;

impl Shrunk {
    fn factor(settings: &TransformSettings) -> f32 {
        settings.other("shrunk", "factor").and_then(Value::as_f64).unwrap_or(0.5) as f32
    }
}

impl Rounding for Shrunk {
    fn name(&self) -> &'static str {
        "shrunk"
    }

    fn summary(&self) -> &'static str {
        "rounds smaller weights"
    }

    fn keys(&self) -> Vec<StepKey> {
        let schema = json!({ "type": "number", "minimum": 0, "maximum": 1 });
        vec![StepKey::new("factor", "The factor of weights.", schema)]
    }

    fn set(&self, key: &str, value: &Value, settings: &mut TransformSettings) -> Result<()> {
        if !value.as_f64().is_some_and(|factor| (0.0..=1.0).contains(&factor)) {
            return Err(Error::usage(format!("factor is {value}"), "it must be from 0 to 1"));
        }
        settings.others.entry(self.name()).or_default().insert(key.to_owned(), value.clone());
        Ok(())
    }

    fn round_weight(
        &self,
        task: &WeightTask<'_>,
    ) -> std::result::Result<(QuantizedTensor, ErrorStats), RowsError> {
        let [n, k] = task.shape;
        let mut values = vec![0.0; n * k];
        values.chunks_exact_mut(k).enumerate().for_each(|(i, row)| task.rows.load(i, row));
        let smaller: Vec<f32> = values.iter().map(|w| w * Self::factor(task.settings)).collect();
        let target = (task.scheme, task.scale_dtype);
        let rows = SourceRows::Floats(&smaller);
        let (tensor, _) = quantize_within(rows, task.shape, target, task.clip, task.context)?;
        let error = ErrorStats::of(&values, &tensor).map_err(|e| RowsError::Layout(e.to_string()))?;
        Ok((tensor, error))
    }
}

/// Rounds all linears of a block to nearest in one stage, on the states of the float model. Its record has the number of
/// tokens.
#[derive(Debug)]
struct InStages;

const SOLVED: u64 = 5 << 30;

impl Rounding for InStages {
    fn name(&self) -> &'static str {
        "in-stages"
    }

    fn summary(&self) -> &'static str {
        "rounds a block at a time"
    }

    fn inputs(&self, _: &TransformSettings) -> Option<LayerInputs> {
        Some(LayerInputs::Float)
    }

    fn memory(&self, _: &Workload<'_>) -> Vec<RoundingMemory> {
        vec![RoundingMemory { gathering: 0, solving: SOLVED, rounds: None }]
    }

    fn operations(&self, _: &Workload<'_>) -> f64 {
        1e15
    }

    fn begin<'a>(
        &self,
        task: RoundingTask<'a>,
        (which, states): (States, &'a mut HiddenStates),
        advance: bool,
    ) -> Result<Box<dyn StagedRounding + 'a>> {
        if advance && which == States::Float {
            states.advance(&task.block, task.cancel)?;
        }
        let tokens = states.layout().tokens() as u64;
        Ok(Box::new(Stage { task: Some(task), tokens }))
    }
}

struct Stage<'a> {
    task: Option<RoundingTask<'a>>,
    tokens: u64,
}

impl StagedRounding for Stage<'_> {
    fn next_stage(&mut self) -> Result<Option<StageRounded>> {
        let Some(task) = self.task.take() else { return Ok(None) };
        let mut rounded = StageRounded::new();
        for (&node, grid) in task.grids {
            let weight = task.block.linear(node).weight().read()?;
            let rows = weight.as_float().expect("float weights");
            let clip = task.rewrite.clips.get(&node).map(Vec::as_slice);
            let (target, context) = ((grid.scheme, grid.scale_dtype), ScaleContext::default());
            let (tensor, _) = quantize_within(rows, weight.shape(), target, clip, context)
                .map_err(|error| error.within(&task.tensor(node), None))?;
            let weight = Arc::new(WeightBody::Quantized(task.stored(node, tensor)?));
            let record = json!({ "tokens": self.tokens });
            rounded.insert(node, Rounded { weight, record, tokens: self.tokens, routed: None });
        }
        Ok(Some(rounded))
    }

    fn finish(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}

#[test]
fn a_rounding_looks_at_each_weight() {
    let tiny = Tiny::default();
    let model = tiny.random(5).model();
    let text = |keys: &str| format!("[quantize]\nscheme = 'w8a16-g16-sym'\nmethod = 'shrunk'\n{keys}");
    let parse = |keys: &str| Recipe::parse_with(&text(keys), &extensions());
    let [half, whole] = ["", "[quantize.shrunk]\nfactor = 1.0"].map(|keys| parse(keys).unwrap());
    assert!(whole.to_toml().contains("[quantize.shrunk]\nfactor = 1.0"), "{}", whole.to_toml());
    let again = Recipe::parse_with(&whole.to_toml(), &extensions()).unwrap();
    assert_eq!((again.to_toml(), &again.settings), (whole.to_toml(), &whole.settings));
    let nearest = run(&model, &tiny.config(), &recipe("rtn", "w8a16-g16-sym"), None);
    let [half, whole] = [half, whole].map(|recipe| run(&model, &tiny.config(), &recipe, None));
    let name = "model.layers.0.mlp.up_proj.weight_scale";
    let scales = |of: &common::Quantized| of.source.read_f32(name).unwrap();
    assert_eq!(scales(&whole), scales(&nearest));
    assert!(
        scales(&half)
            .iter()
            .zip(scales(&nearest))
            .all(|(half, whole)| (half - 0.5 * whole).abs() < 1e-3 * whole)
    );
    assert_eq!((half.report.method.as_str(), half.report.gptq), ("shrunk", None));
    assert_eq!(whole.report.rounding, [("shrunk".to_owned(), json!({ "factor": 1.0 }))].into());
    assert!(half.report.rounding.is_empty(), "all keys have their defaults");

    for (keys, expected) in [
        ("[quantize.shrunk]\nfactor = 7", "line 5: factor is 7"),
        ("[quantize.shrunk]\nfacter = 1", "line 5: unknown key `facter` in [quantize.shrunk]"),
        (
            "[quantize.gptq]\ndamping = 0.1",
            "[quantize.gptq] has no effect, because quantize.method is not gptq",
        ),
        ("shrunk = 4", "line 4: quantize.shrunk is not a table"),
        ("shrnk = 4", "line 4: unknown field `shrnk`, expected one of `method`"),
        ("[quantize.rtn]\nfactor = 1", "unknown field `rtn`"),
    ] {
        let error = parse(keys).unwrap_err();
        assert_eq!((error.category(), error.category().exit_code()), (Category::Usage, 2));
        assert!(error.to_string().contains(expected), "{error}");
    }
    let error = Recipe::parse(&text("")).unwrap_err();
    assert!(error.to_string().contains("unknown quantize.method `shrunk`"), "{error}");
    assert!(error.remedy().marked().contains("must be rtn or gptq"), "{}", error.remedy());
}

#[test]
fn a_rounding_works_in_stages() {
    let tiny = Tiny::default();
    let model = tiny.random(5).model();
    let batch = windows(tiny.vocab, 4, 24, 9);
    let extensions = extensions();
    for steps in ["in-stages", "smoothquant,in-stages", "smoothquant,clip,in-stages"] {
        let scheme = if steps.contains("smoothquant") { "w8a8-channel-sym" } else { "w8a16-g16-sym" };
        let staged = Recipe { method: extensions.method(steps).unwrap(), ..recipe("rtn", scheme) };
        assert!(staged.needs_text());
        let before = steps.strip_suffix(",in-stages").unwrap_or("rtn");
        let plain = Recipe { method: extensions.method(before).unwrap(), ..recipe("rtn", scheme) };
        let [ours, expected] =
            [&staged, &plain].map(|recipe| run(&model, &tiny.config(), recipe, Some(&batch)));
        for name in expected.source.names() {
            assert_eq!(
                ours.source.read(name).unwrap(),
                expected.source.read(name).unwrap(),
                "{steps} {name}"
            );
        }
        let report = ours.report.tensors.iter().find(|t| t.tensor.ends_with("0.mlp.up_proj.weight")).unwrap();
        assert_eq!(report.records["in-stages"], json!({ "tokens": 96 }));
        assert_eq!(report.calibration_tokens, Some(96));
        let [before, after] =
            [&plain, &staged].map(|r| Plan::peak_memory(&Plan::all(&model, r).unwrap(), &model));
        assert!(before < SOLVED && after >= SOLVED, "{before} and {after}");
    }
}

#[test]
fn a_rounding_that_leaves_linears_out_is_refused() {
    #[derive(Debug)]
    struct Forgets;
    impl Rounding for Forgets {
        fn name(&self) -> &'static str {
            "forgets"
        }
        fn summary(&self) -> &'static str {
            "returns no stage"
        }
        fn inputs(&self, _: &TransformSettings) -> Option<LayerInputs> {
            Some(LayerInputs::Float)
        }
        fn begin<'a>(
            &self,
            task: RoundingTask<'a>,
            (which, states): (States, &'a mut HiddenStates),
            advance: bool,
        ) -> Result<Box<dyn StagedRounding + 'a>> {
            if advance && which == States::Float {
                states.advance(&task.block, task.cancel)?;
            }
            Ok(Box::new(Stage { task: None, tokens: 0 }))
        }
    }
    let extensions = Extensions { roundings: vec![&Forgets], ..Extensions::default() };
    let tiny = Tiny::default();
    let (model, batch) = (tiny.random(5).model(), windows(tiny.vocab, 4, 24, 9));
    let recipe = Recipe { method: extensions.method("forgets").unwrap(), ..recipe("rtn", "w8a16-g16-sym") };
    let plan = Plan::new(&model, &recipe, recipe.containers[0]).unwrap();
    let mut sink = MemorySink::new(plan.outputs()).unwrap();
    let (observer, cancel) = (&Silent, &CancelToken::new());
    let job = Job {
        model: &model,
        plan: &plan,
        windows: Some(&batch),
        maxima: None,
        searches: None,
        observer,
        cancel,
    };
    let error = quantize_job(&job, &mut sink).unwrap_err();
    assert_eq!(error.category(), Category::Usage);
    assert!(error.to_string().contains("the rounding `forgets` left out"), "{error}");
}

#[test]
fn a_method_sets_keys_of_its_rounding() {
    let shrunk = extensions().method("shrunk").unwrap();
    let own = Method { name: "whole".into(), rounding_keys: &[("factor", "1")], ..shrunk };
    let mut settings = TransformSettings::default();
    own.set_defaults(&mut settings).unwrap();
    assert_eq!(settings.other("shrunk", "factor"), Some(&json!(1)));
}

#[test]
fn a_rounding_with_the_name_of_a_field_is_refused() {
    #[derive(Debug)]
    struct Dtype;
    impl Rounding for Dtype {
        fn name(&self) -> &'static str {
            "dtype"
        }
        fn summary(&self) -> &'static str {
            "has the name of a field of the report"
        }
    }
    let extensions = Extensions { roundings: vec![&Dtype], ..Extensions::default() };
    let model = Tiny::default().random(5).model();
    let recipe = Recipe { method: extensions.method("dtype").unwrap(), ..recipe("rtn", "w8a16-g16-sym") };
    let plan = Plan::new(&model, &recipe, recipe.containers[0]).unwrap();
    let mut sink = MemorySink::new(plan.outputs()).unwrap();
    let (observer, cancel) = (&Silent, &CancelToken::new());
    let job =
        Job { model: &model, plan: &plan, windows: None, maxima: None, searches: None, observer, cancel };
    let error = quantize_job(&job, &mut sink).unwrap_err();
    assert_eq!((error.category(), error.category().exit_code()), (Category::Usage, 2));
    assert!(error.to_string().contains("the step `dtype` has the name of a field"), "{error}");
}

#[test]
fn names_and_keys_that_cannot_be_written_are_refused() {
    #[derive(Debug)]
    struct Named(&'static str, Vec<StepKey>);
    impl Rounding for Named {
        fn name(&self) -> &'static str {
            self.0
        }
        fn summary(&self) -> &'static str {
            "for its name"
        }
        fn keys(&self) -> Vec<StepKey> {
            self.1.clone()
        }
    }
    let key = |name: &'static str| StepKey::new(name, "a key", json!({ "type": "string" }));
    let mut file = key("file");
    file.is_file = true;
    let mut setting = key("setting");
    setting.setting = Some("damping");
    for (name, keys, expected) in [
        ("a.b", vec![], "the name `a.b` of a step has `.` or `=`"),
        ("a=b", vec![], "the name `a=b` of a step has `.` or `=`"),
        ("rtn", vec![], "the name `rtn` of a step is taken"),
        ("own", vec![key("kind")], "the key `kind` of `own` has the name of the step"),
        ("own", vec![key("a.b")], "the key `a.b` of `own` is empty, or has"),
        ("own", vec![key("")], "the key `` of `own` is empty"),
        ("own", vec![key("a"), key("a")], "the key `a` of `own` is there twice"),
        ("own", vec![file], "names a file"),
        ("own", vec![setting], "has a setting"),
    ] {
        let own: &'static Named = Box::leak(Box::new(Named(name, keys)));
        let extensions = Extensions { roundings: vec![own], ..Extensions::default() };
        let error = RecipeSettings::default().recipe_with(&extensions).unwrap_err();
        assert_eq!((error.category(), error.category().exit_code()), (Category::Usage, 2));
        assert!(error.to_string().contains(expected), "{error}");
    }
    // A key of strings takes the text of what a command line cannot quote.
    let own: &'static Named = Box::leak(Box::new(Named("own", vec![key("year")])));
    let extensions = Extensions { roundings: vec![own], ..Extensions::default() };
    let mut settings = RecipeSettings { method: Some("own".into()), ..RecipeSettings::default() };
    settings.add_step("own.year=2024").unwrap();
    let recipe = settings.recipe_with(&extensions).unwrap();
    assert_eq!(recipe.settings.other("own", "year"), Some(&json!("2024")));
}
