//! OPT in the whole pipeline.

use crate::common;

use std::sync::Arc;

use common::{Checkpoint, OPT_POSITIONS, Tiny, flat, logits, model, recipe, relative_difference, run};
use quant_core::calibrate::{HiddenStates, TokenWindows};
use quant_core::checkpoint::{Dtype, MemorySource};
use quant_core::model::{Decoder, Model};
use quant_core::recipe::Plan;
use quant_core::{CancelToken, Category, Silent, TensorSource};
use serde_json::json;

fn renamed(checkpoint: &Checkpoint, name: impl Fn(&str) -> Option<String>) -> Arc<MemorySource> {
    let mut source = MemorySource::new();
    for (old, (shape, values)) in &checkpoint.tensors {
        if let Some(name) = name(old) {
            source.insert_f32(&name, checkpoint.tiny.dtype, shape.clone(), values).unwrap();
        }
    }
    Arc::new(source)
}

fn bare(name: &str) -> String {
    name.strip_prefix("model.").unwrap_or(name).to_owned()
}

#[test]
fn names_without_their_first_part_are_the_same_model() {
    for tied in [true, false] {
        let tiny = Tiny { tied, ..Tiny::opt() };
        let checkpoint = tiny.random(1);
        let windows = common::windows(tiny.vocab, 2, 40, 2);
        let exact = logits(&checkpoint.model(), &windows);
        let short = model(renamed(&checkpoint, |name| Some(bare(name))), &tiny.config());
        assert_eq!(logits(&short, &windows), exact);
        // The output always has full names.
        let recipe = recipe("awq", "w4a16-g32");
        let [long, short] =
            [&checkpoint.model(), &short].map(|model| run(model, &tiny.config(), &recipe, Some(&windows)));
        assert_eq!(short.source.names(), long.source.names());
        for name in long.source.names() {
            assert_eq!(short.source.bytes(name), long.source.bytes(name), "{name}");
        }
        assert_eq!(short.config, long.config);
    }
    // A tensor with both names is ambiguous.
    let mut both = Tiny::opt().random(1);
    both.tensors = both.tensors.iter().map(|(name, t)| (bare(name), t.clone())).collect();
    let twice = both.tensors["decoder.layers.0.fc1.weight"].clone();
    both.tensors.insert("model.decoder.layers.0.fc1.weight".into(), twice);
    let path = std::path::Path::new("config.json");
    let error = Model::new(Arc::new(both.source()), path, &Tiny::opt().config()).err().unwrap();
    assert!(matches!(error, quant_core::Error::MissingTensor { .. }), "{error}");
}

#[test]
fn a_final_norm_that_was_removed_is_not_computed() {
    let tiny = Tiny::opt();
    let mut checkpoint = tiny.random(3);
    let windows = common::windows(tiny.vocab, 2, 30, 4);
    let with = logits(&checkpoint.model(), &windows);
    let mut config = tiny.config();
    config.insert("_remove_final_layer_norm".into(), json!(true));
    checkpoint.tensors.retain(|name, _| !name.starts_with("model.decoder.final_layer_norm"));
    let without = model(Arc::new(checkpoint.source()), &config);
    assert!(relative_difference(&logits(&without, &windows), &with) > 0.05);
    let decoder = common::decoder(&without);
    let mut last = None;
    let hidden = decoder.hidden_through(&[windows.window(0)], &mut |_, hidden| {
        last = Some(hidden.clone());
        Ok(hidden)
    });
    assert_eq!(flat(&hidden.unwrap()), flat(&last.unwrap()));
    // If the norm's tensors are missing, the configuration must say so.
    let path = std::path::Path::new("config.json");
    let error = Model::new(Arc::new(checkpoint.source()), path, &tiny.config()).err().unwrap();
    assert!(error.to_string().contains("model.decoder.final_layer_norm.weight"), "{error}");
}

#[test]
fn decoding_by_steps_is_prefill() {
    let tiny = Tiny { tied: true, ..Tiny::opt() };
    let decoder = common::decoder(&tiny.random(5).model());
    let tokens: Vec<u32> = common::windows(tiny.vocab, 1, 60, 6).window(0).to_vec();
    let whole = flat(&decoder.logits(&decoder.hidden(&[&tokens]).unwrap()).unwrap());
    let mut cache = decoder.cache();
    let mut done = 0;
    for count in [7, 1, 1, 30, 1, 20] {
        let found = flat(&decoder.step(&tokens[done..done + count], &mut cache).unwrap());
        done += count;
        let exact = &whole[(done - 1) * tiny.vocab..done * tiny.vocab];
        assert!(relative_difference(&found, exact) < 1e-5, "after {done} tokens");
    }
}

/// The message states the maximum length.
#[test]
fn windows_longer_than_the_positions_are_refused() {
    let tiny = Tiny::opt();
    let model = tiny.random(7).model();
    let load = |positions| Decoder::load(&model, positions, &Silent, &CancelToken::new()).map(|_| ());
    let embed = |length| {
        let windows = TokenWindows::cut(vec![1; length], length);
        HiddenStates::embed(&model, &windows).map(|_| ())
    };
    let plan = |length| {
        let mut recipe = recipe("awq", "w4a16-g32");
        recipe.sampling.length = length;
        Plan::new(&model, &recipe, recipe.containers[0]).map(|_| ())
    };
    for (what, found) in [
        ("load", [load(OPT_POSITIONS), load(OPT_POSITIONS + 1)]),
        ("embed", [embed(OPT_POSITIONS), embed(OPT_POSITIONS + 1)]),
        ("plan", [plan(OPT_POSITIONS), plan(OPT_POSITIONS + 1)]),
    ] {
        let [fits, longer] = found;
        assert!(fits.is_ok(), "{what}");
        let error = longer.unwrap_err();
        assert_eq!(error.category(), Category::Usage, "{what}");
        assert!(error.to_string().contains("512 learned positions"), "{what}: {error}");
    }
}

#[test]
fn what_is_written_reads_back_near_the_float_model() {
    let windows = common::windows(128, 12, 32, 8);
    let held_out = common::windows(128, 4, 32, 9);
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        for (method, scheme) in [("rtn", "w8a16-g32"), ("awq", "w8a16-g32"), ("awq", "w8a16-g64-asym")] {
            let sizes = Tiny { hidden: 128, intermediate: 256, head_dim: 32, vocab: 128, ..Tiny::opt() };
            let tiny = Tiny { dtype, norm_dtype: dtype, tied: dtype == Dtype::F16, ..sizes };
            let checkpoint = tiny.random(10);
            let exact = logits(&checkpoint.model(), &held_out);
            let calibration = (method == "awq").then_some(&windows);
            let written = run(&checkpoint.model(), &tiny.config(), &recipe(method, scheme), calibration);
            let difference = relative_difference(&logits(&written.model(), &held_out), &exact);
            println!("{method} {scheme} in {dtype}: logits move by {difference:.1e}");
            assert!(difference < 0.03, "{method} {scheme} {dtype}: {difference}");
            if method == "awq" {
                // Both parameters of the norms are changed and written.
                for (norm, _) in tiny.norms() {
                    for parameter in ["weight", "bias"] {
                        let name = format!("{}{norm}.{parameter}", tiny.block(0));
                        let read = |source: &dyn TensorSource| source.read_f32(&name).unwrap();
                        assert_ne!(read(&checkpoint.source()), read(&written.source), "{name}");
                    }
                }
            }
            // Positions and the final norm are unchanged.
            for name in ["model.decoder.embed_positions.weight", "model.decoder.final_layer_norm.bias"] {
                assert_eq!(checkpoint.source().bytes(name), written.source.bytes(name), "{name}");
            }
        }
    }
}
