//! Steps in any sensible order: with each pair, a whole model is quantized, written and read back, and loses little.
//! Other orders are rejected with a reason.

use crate::common;

use std::collections::BTreeMap;

use common::{Kind, Tiny, logits, mean_divergence};
use quant_core::Category;
use quant_core::calibrate::{Packing, Sampling};
use quant_core::checkpoint::TensorSource;
use quant_core::model::KvScheme;
use quant_core::recipe::{Method, Plan, Recipe, method, steps};
use quant_core::round::Nearest;

const LENGTH: usize = 32;

fn recipe(method: Method) -> Recipe {
    let mut recipe = common::recipe("rtn", "w8a8-g16-sym");
    recipe.set_method(method).unwrap();
    recipe.settings.kv = Some(KvScheme::Kv8);
    recipe.sampling = Sampling { samples: 4, length: LENGTH, packing: Packing::Auto, ..Sampling::default() };
    recipe
}

fn lost(tiny: &Tiny, method: Method) -> f64 {
    quantized(tiny, method).0
}

/// The loss of 8-bit quantization, and the written bytes.
fn quantized(tiny: &Tiny, method: Method) -> (f64, Vec<u8>) {
    let checkpoint = tiny.random(31);
    let (windows, others) =
        (common::windows(tiny.vocab, 4, LENGTH, 5), common::windows(tiny.vocab, 2, LENGTH, 3));
    let recipe = recipe(method);
    let model = recipe.prepared(checkpoint.model()).unwrap();
    let written = common::run(&model, &tiny.config(), &recipe, Some(&windows));
    assert_eq!(written.report.steps, recipe.method.steps());
    let lost = mean_divergence(
        &logits(&checkpoint.model(), &others),
        &logits(&written.model(), &others),
        tiny.vocab,
    );
    let names = written.source.names();
    (lost, names.into_iter().flat_map(|name| written.source.read(name).unwrap()).collect())
}

fn pairs() -> Vec<[&'static str; 2]> {
    let names: Vec<_> = steps().into_iter().map(|(name, _)| name).collect();
    names.iter().flat_map(|a| names.iter().map(move |b| [*a, *b])).filter(|[a, b]| a != b).collect()
}

#[test]
fn every_pair_is_done_or_refused_with_the_reason() {
    let families = [
        Tiny { attention_bias: true, ..Tiny::default() },
        Tiny { family: Kind::Qwen3, head_dim: 24, tied: true, ..Tiny::default() },
    ];
    // On a random model without outliers, some steps gain nothing.
    let alone: Vec<BTreeMap<&str, f64>> = families
        .iter()
        .map(|tiny| steps().iter().map(|(step, _)| (*step, lost(tiny, method(step).unwrap()))).collect())
        .collect();
    let rtn = || method("rtn").unwrap();
    let plain: Vec<Vec<u8>> = families.iter().map(|tiny| quantized(tiny, rtn()).1).collect();
    let mut done = 0;
    for pair in pairs() {
        let method = match Method::of(&pair, &Nearest) {
            Ok(method) => method,
            Err(error) => {
                assert_eq!(error.category(), Category::Usage);
                let narrows = matches!(pair[0], "awq" | "clip");
                assert!(narrows || matches!(pair[1], "rotate" | "fold-norms"), "{pair:?}: {error}");
                continue;
            }
        };
        done += 1;
        for (tiny, alone) in families.iter().zip(&alone) {
            let ((lost, bytes), worse) = (quantized(tiny, method.clone()), pair.map(|step| alone[step]));
            // A wrong fold loses a thousand times more.
            let bound = 4.0 * worse[0].max(worse[1]);
            // With random head norms there may be nothing to smooth and nothing to clip.
            let may_do_nothing = tiny.family == Kind::Qwen3;
            assert!(may_do_nothing || !plain.contains(&bytes), "{pair:?}: nothing is done");
            assert!(lost < bound, "{pair:?}, {:?}: lost {lost}, but each alone loses {worse:?}", tiny.family);
        }
    }
    // 8 steps form 56 pairs; 14 end in a step that creates a new model, 14 begin with a step that narrows ranges, and 4
    // do both.
    assert_eq!(done, 56 - 14 - 14 + 4);
}

#[test]
fn longer_orders_with_both_roundings() {
    let tiny = Tiny::default();
    let rtn = lost(&tiny, method("rtn").unwrap());
    for name in [
        "rotate,smoothquant,awq,gptq",
        "smoothquant,reorder,smooth-attention,awq",
        "smooth-outputs,reorder,awq,gptq",
        "fold-norms,reorder,smooth-attention,smooth-outputs,clip,gptq",
        "rotate,smooth-attention,smoothquant,reorder,smooth-outputs,clip,gptq",
    ] {
        let own = method(name).unwrap();
        assert_eq!(own.name, name);
        let lost = lost(&tiny, own.clone());
        assert!(lost < 3.0 * rtn + 1e-6, "{name}: lost {lost}, but rounding alone loses {rtn}");
        // The same method, but read from a recipe file.
        let toml = recipe(own.clone()).to_toml();
        let again = Recipe::parse(&toml).unwrap();
        assert_eq!((&again.method, &again.method.name), (&own, &own.name));
        assert_eq!(again.to_toml(), toml);
    }
}

#[test]
fn what_would_be_done_twice_is_refused() {
    let model = Tiny::default().random(1).model();
    let mut recipe = recipe(method("smoothquant,smooth-outputs").unwrap());
    assert!(Plan::new(&model, &recipe, recipe.containers[0]).is_ok());
    recipe.set("smoothquant", "producers", &"all".into()).unwrap();
    let error = Plan::new(&model, &recipe, recipe.containers[0]).unwrap_err();
    assert_eq!(error.category(), Category::Usage);
    assert!(
        error.to_string().contains("`smooth-outputs` and SmoothQuant with all producers cannot be combined"),
        "{error}"
    );
}
