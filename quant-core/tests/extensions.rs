//! A third-party transform and container: each is a type in this file, and the pipeline runs them without any change.

mod common;

use std::borrow::Cow;
use std::sync::Arc;

use common::{Tiny, logits, mean_divergence, recipe, run, windows};
use quant_core::calibrate::HiddenStates;
use quant_core::checkpoint::{Dtype, TensorSpec};
use quant_core::format::{Container, ModuleSchemes, PackedReader, PackedWeight, QuantizedCheckpoint};
use quant_core::model::{BlockGraph, NodeId};
use quant_core::quantize::QuantizedTensor;
use quant_core::recipe::{Method, Plan, Rates, Recipe};
use quant_core::scheme::{Granularity, LinearScheme};
use quant_core::transform::{
    BlockTask, Needs, Outline, Rewrite, SearchWork, Transform, TransformSettings, Workload, fold,
};
use quant_core::{Category, Error, Result, TensorSource};
use serde_json::{Value, json};

/// Equalizes the columns of linears that read norms, by a power of their largest weight. Needs no text.
#[derive(Debug)]
struct EvenColumns {
    strength: f32,
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

    fn fingerprint(&self, _: &TransformSettings) -> Value {
        json!({ "strength": self.strength })
    }

    fn check(&self, outline: &Outline<'_>) -> Result<()> {
        match outline.schemes.iter().any(|scheme| matches!(scheme.granularity, Granularity::Group(_))) {
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
                let scales: Vec<f32> = largest.iter().map(|l| l.powf(-self.strength)).collect();
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

/// Codes as bytes, with scales in single precision.
#[derive(Debug)]
struct PlainBytes;

fn specs(module: &str, [n, k]: [usize; 2], scheme: LinearScheme) -> Vec<TensorSpec> {
    let groups = k / scheme.granularity.group_size(k);
    vec![
        TensorSpec::new(format!("{module}.weight"), Dtype::U8, [n, k]),
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

    fn warnings(&self, _: &ModuleSchemes<'_>) -> Vec<String> {
        vec!["no engine loads this".to_owned()]
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
    fn scheme(&self, module: &str) -> Option<LinearScheme> {
        module.ends_with("_proj").then_some(self.0)
    }

    fn scale_dtype(&self, source: &dyn TensorSource, module: &str) -> Result<Dtype> {
        Ok(source.require(&format!("{module}.steps"))?.dtype)
    }

    fn shape(&self, source: &dyn TensorSource, module: &str) -> Result<Option<[usize; 2]>> {
        let info = source.require(&format!("{module}.weight"))?;
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
        Ok(QuantizedTensor {
            shape: weight.shape,
            scheme: weight.scheme,
            codes: source.read(&format!("{}.weight", weight.module))?,
            scales: source.read_f32(&format!("{}.steps", weight.module))?,
            scale_dtype: Dtype::F32,
            levels: None,
            zeros: None,
            global: None,
            input: None,
        })
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
