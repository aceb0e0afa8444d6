//! Vision-language models in the whole pipeline. The logits of the text tower are those of the same decoder on its own.

use crate::common;

use std::path::Path;
use std::sync::Arc;

use common::{Checkpoint, Kind, Quantized, Tiny, logits, recipe, run};
use quant_core::checkpoint::{Dtype, MemorySource};
use quant_core::format::container;
use quant_core::model::Model;
use quant_core::recipe::{Plan, Recipe};
use quant_core::{Category, Error, TensorSource};
use serde_json::{Map, Value, json};

/// The name prefixes of the text tower and of the head.
type Layout = (&'static str, &'static str);
const PLAIN: Layout = ("model.", "lm_head.");
const MODULES: Layout = ("model.language_model.", "lm_head.");
const TOWER_FIRST: Layout = ("language_model.model.", "language_model.lm_head.");

/// A class, its `model_type`, the `model_type` of its text model, the decoder's family, and the layouts.
struct Class {
    name: &'static str,
    model_type: &'static str,
    text: &'static str,
    kind: Kind,
    layouts: [Layout; 2],
    extra_tensors: &'static [&'static str],
}

const VISUAL: &[&str] = &["visual.blocks.0.attn.qkv.weight", "visual.patch_embed.proj.weight"];
const TOWER: &[&str] = &["vision_tower.layers.0.fc1.weight", "multi_modal_projector.linear_1.weight"];

fn classes() -> [Class; 6] {
    let class = |name, model_type, text, kind, layouts, extra_tensors| Class {
        name,
        model_type,
        text,
        kind,
        layouts,
        extra_tensors,
    };
    let plain = [PLAIN, MODULES];
    let tower = [TOWER_FIRST, MODULES];
    [
        class("Qwen2VLForConditionalGeneration", "qwen2_vl", "qwen2_vl_text", Kind::Qwen2, plain, VISUAL),
        class(
            "Qwen2_5_VLForConditionalGeneration",
            "qwen2_5_vl",
            "qwen2_5_vl_text",
            Kind::Qwen2,
            plain,
            VISUAL,
        ),
        class(
            "Qwen3VLForConditionalGeneration",
            "qwen3_vl",
            "qwen3_vl_text",
            Kind::Qwen3,
            [MODULES; 2],
            &["model.visual.blocks.0.attn.qkv.weight", "model.visual.deepstack_merger_list.0.norm.weight"],
        ),
        class("Mistral3ForConditionalGeneration", "mistral3", "mistral", Kind::Mistral(None), tower, TOWER),
        class("LlavaForConditionalGeneration", "llava", "llama", Kind::Llama, tower, TOWER),
        class("LlavaForConditionalGeneration", "llava", "qwen2", Kind::Qwen2, tower, TOWER),
    ]
}

impl Class {
    fn tiny(&self) -> Tiny {
        Tiny { family: self.kind, dtype: Dtype::Bf16, ..Tiny::default() }
    }

    fn config(&self, tiny: &Tiny) -> Map<String, Value> {
        let mut text = tiny.config();
        text.shift_remove("architectures");
        text.shift_remove("tie_word_embeddings");
        text.insert("model_type".into(), self.text.into());
        let config = json!({
            "architectures": [self.name],
            "model_type": self.model_type,
            "text_config": text,
            "vision_config": { "hidden_size": 8, "model_type": "of its own" },
            "image_token_id": 3,
            "tie_word_embeddings": tiny.tied,
        });
        config.as_object().unwrap().clone()
    }

    /// The decoder's tensors under the names of a layout, and some tensors outside it.
    fn source(&self, checkpoint: &Checkpoint, (base, head): Layout) -> MemorySource {
        let mut source = MemorySource::new();
        let plain = checkpoint.source();
        for name in plain.names() {
            let info = plain.info(name).unwrap().clone();
            let renamed = match name.strip_prefix("lm_head.") {
                Some(rest) => format!("{head}{rest}"),
                None => format!("{base}{}", name.strip_prefix("model.").unwrap()),
            };
            source.insert(renamed, info.dtype, info.shape, plain.bytes(name).unwrap().to_vec()).unwrap();
        }
        for (index, name) in self.extra_tensors.iter().enumerate() {
            let shape = [16 + index, 4];
            let values: Vec<f32> = (0..shape[0] * 4).map(|i| (i as f32).sin() - index as f32).collect();
            source.insert_f32(*name, Dtype::F32, shape, &values).unwrap();
        }
        source
    }
}

fn open(source: MemorySource, config: &Map<String, Value>) -> Result<Model, Error> {
    Model::new(Arc::new(source), Path::new("config.json"), config)
}

fn refusal(source: MemorySource, config: &Map<String, Value>) -> String {
    let error = open(source, config).err().expect("an error");
    assert_eq!(error.category(), Category::Input, "{error}");
    error.to_string()
}

#[test]
fn the_text_tower_is_the_decoder() {
    for class in classes() {
        let tiny = class.tiny();
        let checkpoint = tiny.random(1);
        let windows = common::windows(tiny.vocab, 2, 40, 2);
        let expected = logits(&checkpoint.model(), &windows);
        for layout in class.layouts {
            let model = open(class.source(&checkpoint, layout), &class.config(&tiny)).unwrap();
            assert_eq!(logits(&model, &windows), expected, "{} {layout:?}", class.name);
            let carried = model.carried().unwrap();
            assert_eq!((carried.class.as_str(), carried.tensors), (class.name, 2));
            assert_eq!(carried.bytes, (16 + 17) * 4 * 4);
        }
    }
}

/// As published: all fields except the vision tower's are at the top level, with mrope in the rope parameters.
#[test]
fn qwen2_vl_with_its_fields_at_the_top_level() {
    for class in classes().into_iter().take(2) {
        let tiny = class.tiny();
        let checkpoint = tiny.random(3);
        let windows = common::windows(tiny.vocab, 1, 40, 2);
        let mut config = tiny.config();
        config.insert("architectures".into(), json!([class.name]));
        config.insert("model_type".into(), json!(class.model_type));
        config.insert("vision_config".into(), json!({ "hidden_size": 8 }));
        config.insert("rope_scaling".into(), json!({ "type": "mrope", "mrope_section": [2, 3, 3] }));
        let model = open(class.source(&checkpoint, PLAIN), &config).unwrap();
        assert_eq!(logits(&model, &windows), logits(&checkpoint.model(), &windows));
        // A head of width 16 has 8 frequencies.
        for sections in [json!([2, 3, 4]), json!([2, 3]), json!("8"), json!([-1, 9]), json!([u64::MAX, 9])] {
            config.insert("rope_scaling".into(), json!({ "type": "mrope", "mrope_section": sections }));
            let message = refusal(class.source(&checkpoint, PLAIN), &config);
            assert!(message.contains("`rope_scaling.mrope_section`"), "{message}");
        }
    }
}

fn ignored(quantized: &Quantized) -> Vec<&str> {
    let ignore = quantized.config["quantization_config"]["ignore"].as_array().unwrap();
    ignore.iter().map(|name| name.as_str().unwrap()).collect()
}

#[test]
fn tensors_outside_the_text_tower_are_written_byte_for_byte() {
    for class in classes() {
        let tiny = class.tiny();
        let checkpoint = tiny.random(5);
        let windows = common::windows(tiny.vocab, 4, 64, 2);
        let plain = run(&checkpoint.model(), &tiny.config(), &recipe("awq", "w4a16-g32"), Some(&windows));
        for layout in class.layouts {
            let source = class.source(&checkpoint, layout);
            let model = open(source.clone(), &class.config(&tiny)).unwrap();
            let quantized = run(&model, &class.config(&tiny), &recipe("awq", "w4a16-g32"), Some(&windows));
            for name in class.extra_tensors {
                assert_eq!(quantized.source.bytes(name), source.bytes(name), "{name}");
            }
            assert_eq!(quantized.report.carried, model.carried());
            // The codes and scales equal those of the decoder on its own, under the names that were read.
            let names = plain.source.names();
            assert_eq!(quantized.source.names().len(), names.len() + class.extra_tensors.len());
            for name in names {
                let renamed = match name.strip_prefix("lm_head.") {
                    Some(rest) => format!("{}{rest}", layout.1),
                    None => format!("{}{}", layout.0, name.strip_prefix("model.").unwrap()),
                };
                assert_eq!(quantized.source.bytes(&renamed), plain.source.bytes(name), "{renamed}");
            }
            assert_eq!(logits(&quantized.model(), &windows), logits(&plain.model(), &windows));
            let head = layout.1.trim_end_matches('.');
            let mut expected = vec![head];
            if head != "lm_head" {
                expected.push("lm_head");
            }
            let outside: &[&str] = match class.extra_tensors {
                TOWER => &[r"re:(model\.)?multi_modal_projector\..*", r"re:(model\.)?vision_tower\..*"],
                _ => &[r"re:(model\.)?visual\..*"],
            };
            expected.extend(outside);
            assert_eq!(ignored(&quantized), expected);
        }
    }
}

/// Overrides and float linears are listed both by their names in the file and by loaders' module names.
#[test]
fn names_of_readers_are_added_to_those_of_the_file() {
    let class = &classes()[4];
    let tiny = class.tiny();
    let checkpoint = tiny.random(6);
    let mut recipe = recipe("rtn", "w4a16-g32");
    recipe.overrides.push((
        quant_core::recipe::Pattern::new("layers.0.mlp.down_proj").unwrap(),
        "w8a16-g32".parse().unwrap(),
    ));
    let model = open(class.source(&checkpoint, TOWER_FIRST), &class.config(&tiny)).unwrap();
    let quantized = run(&model, &class.config(&tiny), &recipe, None);
    let groups = &quantized.config["quantization_config"]["config_groups"];
    assert_eq!(groups["group_0"]["targets"], json!(["Linear"]));
    assert_eq!(
        groups["group_1"]["targets"],
        json!(
            ["language_model.model.layers.0.mlp.down_proj", "model.language_model.layers.0.mlp.down_proj",]
        )
    );
    let windows = common::windows(tiny.vocab, 1, 20, 2);
    assert_eq!(logits(&quantized.model(), &windows).len(), 20 * tiny.vocab);
}

#[test]
fn other_formats_leave_the_vision_tower_float_too() {
    let class = &classes()[3];
    let tiny = class.tiny();
    let checkpoint = tiny.random(7);
    let windows = common::windows(tiny.vocab, 1, 20, 2);
    let with = |format: &str, scheme: &str| Recipe {
        containers: vec![container(format).unwrap()],
        ..recipe("rtn", scheme)
    };
    for layout in class.layouts {
        let model = open(class.source(&checkpoint, layout), &class.config(&tiny)).unwrap();
        let written = |recipe| run(&model, &class.config(&tiny), &recipe, None);
        let awq = written(with("awq", "w4a16-g32-asym"));
        let names = &awq.config["quantization_config"]["modules_to_not_convert"];
        for name in
            ["multi_modal_projector", "model.multi_modal_projector", "vision_tower", "model.vision_tower"]
        {
            assert!(names.as_array().unwrap().contains(&json!(name)), "{names}");
        }
        let gptq = written(with("gptq", "w4a16-g32-sym"));
        let rules = &gptq.config["quantization_config"]["dynamic"];
        for name in [r"-:(model\.)?multi_modal_projector\..*", r"-:(model\.)?vision_tower\..*"] {
            assert!(rules.as_object().unwrap().contains_key(name), "{rules}");
        }
        for quantized in [awq, gptq] {
            assert_eq!(quantized.model().carried(), model.carried());
            assert!(logits(&quantized.model(), &windows).iter().all(|l| l.is_finite()));
        }
        let qserve = with("qserve", "w4a8-g128-asym-progressive");
        let error = Plan::new(&model, &qserve, qserve.containers[0]).err().unwrap();
        assert_eq!(error.category(), Category::Usage, "{error}");
    }
}

/// Either level may tie the head to the embedding; a stored head that differs is not tied.
#[test]
fn heads() {
    let class = &classes()[0];
    let tiny = Tiny { tied: true, ..class.tiny() };
    let checkpoint = tiny.random(8);
    let windows = common::windows(tiny.vocab, 1, 20, 2);
    let expected = logits(&checkpoint.model(), &windows);
    let configured = |outer: Option<bool>, inner: Option<bool>| {
        let mut config = class.config(&tiny);
        config.shift_remove("tie_word_embeddings");
        config.extend(outer.map(|tied| ("tie_word_embeddings".to_owned(), json!(tied))));
        let text = config["text_config"].as_object_mut().unwrap();
        text.extend(inner.map(|tied| ("tie_word_embeddings".to_owned(), json!(tied))));
        config
    };
    for (outer, inner) in [(Some(true), None), (None, Some(true)), (Some(false), Some(true))] {
        let model = open(class.source(&checkpoint, PLAIN), &configured(outer, inner)).unwrap();
        assert_eq!(logits(&model, &windows), expected);
    }
    for (outer, inner) in [(None, None), (Some(false), None), (Some(false), Some(false))] {
        let message = refusal(class.source(&checkpoint, PLAIN), &configured(outer, inner));
        assert!(message.contains("`lm_head.weight` is missing"), "{message}");
    }
    // Mistral3 ties by default.
    let mistral = &classes()[3];
    let tiny = Tiny { tied: true, ..mistral.tiny() };
    let mut config = mistral.config(&tiny);
    config.shift_remove("tie_word_embeddings");
    assert!(open(mistral.source(&tiny.random(8), TOWER_FIRST), &config).unwrap().architecture().tied);
    let untied = Tiny { tied: false, ..tiny };
    let own_head = open(mistral.source(&untied.random(8), TOWER_FIRST), &config).unwrap();
    assert!(!own_head.architecture().tied);
}

#[test]
fn nested_configurations_that_are_refused() {
    let class = &classes()[4];
    let tiny = class.tiny();
    let checkpoint = tiny.random(9);
    let with = |edit: &dyn Fn(&mut Map<String, Value>)| {
        let mut config = class.config(&tiny);
        edit(&mut config);
        refusal(class.source(&checkpoint, TOWER_FIRST), &config)
    };
    let text = |key: &'static str, value: Value| {
        with(&move |config| {
            config["text_config"].as_object_mut().unwrap().insert(key.into(), value.clone());
        })
    };
    for (message, configured) in [
        (with(&|c| drop(c.insert("text_config".into(), json!([1])))), "`text_config` is a list"),
        (with(&|c| drop(c.insert("text_config".into(), json!("llama")))), "`text_config` is the text"),
        (with(&|c| drop(c.shift_remove("text_config"))), "`text_config` is missing"),
        (with(&|c| drop(c.insert("text_config".into(), Value::Null))), "`text_config` is missing"),
        (text("text_config", json!({ "hidden_size": 64 })), "`text_config.text_config` must not contain"),
        (text("text_config", json!(7)), "`text_config.text_config` must not contain"),
        (text("model_type", json!("mamba")), "`text_config.model_type` is `mamba`"),
        (text("model_type", json!(["llama"])), "`text_config.model_type` is a list"),
        (text("hidden_size", json!("64")), "`text_config.hidden_size` is the text"),
        (text("hidden_size", json!(1u64 << 40)), "`text_config.hidden_size` is 1099511627776"),
        (text("num_hidden_layers", json!(1u64 << 31)), "num_hidden_layers"),
        (text("tie_word_embeddings", json!("yes")), "`text_config.tie_word_embeddings`"),
        (with(&|c| drop(c.insert("model_type".into(), json!("llama")))), "`model_type` is `llama`"),
    ] {
        assert!(message.contains(configured), "{message}");
    }
    // Both levels must agree on the quantization.
    let written = run(
        &open(class.source(&checkpoint, TOWER_FIRST), &class.config(&tiny)).unwrap(),
        &class.config(&tiny),
        &recipe("rtn", "w4a16-g32"),
        None,
    );
    let settings = written.config["quantization_config"].clone();
    let mut inside = written.config.clone();
    inside.shift_remove("quantization_config");
    inside["text_config"]["quantization_config"] = settings.clone();
    let windows = common::windows(tiny.vocab, 1, 20, 2);
    let nested = open(written.source.clone(), &inside).unwrap();
    assert_eq!(logits(&nested, &windows), logits(&written.model(), &windows));
    inside.insert("quantization_config".into(), json!({ "quant_method": "awq" }));
    let message = refusal(written.source, &inside);
    assert!(message.contains("`quantization_config` differs"), "{message}");
}

#[test]
fn names_of_two_layouts_at_once_are_refused() {
    for class in classes().iter().filter(|class| class.layouts[0] != class.layouts[1]) {
        let tiny = class.tiny();
        let checkpoint = tiny.random(10);
        for [layout, (base, head)] in [class.layouts, [class.layouts[1], class.layouts[0]]] {
            let stray = |name: String| {
                let mut source = class.source(&checkpoint, layout);
                source.insert_f32(&name, Dtype::F32, [2, 2], &[0.0; 4]).unwrap();
                source
            };
            let mut names = vec![format!("{base}layers.1.mlp.up_proj.weight")];
            names.extend((head != layout.1).then(|| format!("{head}weight")));
            for name in names {
                let message = refusal(stray(name.clone()), &class.config(&tiny));
                assert!(message.contains(&name) && message.contains("two layouts"), "{message}");
            }
        }
        // Names that match no known layout.
        let mut nothing = MemorySource::new();
        for name in ["encoder.layers.0.mlp.up_proj.weight", "a", "b", "c"] {
            nothing.insert_f32(name, Dtype::F32, [2, 2], &[0.0; 4]).unwrap();
        }
        let message = refusal(nothing, &class.config(&tiny));
        assert!(message.contains("is missing"), "{message}");
    }
}

/// Projectors write to the residual stream, so rotating only the decoder would be wrong.
#[test]
fn the_residual_stream_is_not_rotated() {
    for class in classes() {
        let tiny = class.tiny();
        let checkpoint = tiny.random(11);
        let model = open(class.source(&checkpoint, class.layouts[0]), &class.config(&tiny)).unwrap();
        let error = quant_core::transform::rotate(&model).err().unwrap();
        assert_eq!(error.category(), Category::Usage);
        let (message, remedy) = (error.to_string(), error.remedy().to_string());
        assert!(message.contains("projector") && message.contains(class.name), "{message}");
        assert!(remedy.contains("‹skip=rotate›"), "{remedy}");
        // Folding norms leaves the stream unchanged.
        let folded = quant_core::transform::fold_norms(&model).unwrap();
        let windows = common::windows(tiny.vocab, 1, 20, 2);
        let distance = common::relative_difference(&logits(&folded, &windows), &logits(&model, &windows));
        assert!(distance < 0.05, "{distance}");
        assert_eq!(folded.carried(), model.carried());
    }
}

/// Published Llava configurations contain only values that differ from the defaults of the text model's class.
#[test]
fn sizes_that_the_class_implies() {
    let class = &classes()[4];
    let mut config = class.config(&class.tiny());
    config.insert("text_config".into(), json!({ "vocab_size": 32064, "max_position_embeddings": 4096 }));
    let mut source = MemorySource::new();
    for layer in 0..32 {
        let name = format!("language_model.model.layers.{layer}.input_layernorm.weight");
        source.insert_f32(name, Dtype::F32, [4096], &[1.0; 4096]).unwrap();
    }
    source.insert_f32("language_model.model.norm.weight", Dtype::F32, [4096], &[1.0; 4096]).unwrap();
    source.insert_f32("language_model.model.embed_tokens.weight", Dtype::F32, [2, 2], &[0.0; 4]).unwrap();
    let message = refusal(source, &config);
    assert!(message.contains("[32064, 4096]"), "{message}");
}
