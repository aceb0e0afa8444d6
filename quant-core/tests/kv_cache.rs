//! Quantized keys and values in whole models: the same results for whole windows and token by token, close to the
//! results with the kernels' pages, and without any effect on calibration.

use crate::common;

use common::{Kind, Tiny, flat};
use quant_core::calibrate::HiddenStates;
use quant_core::model::{Decoder, KvCaching, KvScheme, NoTap};
use quant_core::scheme::KV_CONFIG_KEY;
use quant_core::{CancelToken, Silent};
use quant_kernels_cpu::attention::KvType;

const LENGTH: usize = 90;

fn families() -> Vec<Tiny> {
    vec![
        Tiny::default(),
        Tiny { family: Kind::Mistral(Some(13)), ..Tiny::default() },
        Tiny { family: Kind::Qwen2, head_dim: 32, ..Tiny::default() },
        Tiny { family: Kind::Qwen3, heads: 2, kv_heads: 2, ..Tiny::default() },
        Tiny { hidden: 48, heads: 3, kv_heads: 1, layers: 3, ..Tiny::default() },
        Tiny::opt(),
    ]
}

fn load(tiny: &Tiny) -> Decoder {
    let model = tiny.random(11).model();
    Decoder::load(&model, LENGTH, &Silent, &CancelToken::new()).unwrap()
}

fn tokens(tiny: &Tiny) -> Vec<u32> {
    common::windows(tiny.vocab, 1, LENGTH, 3).window(0).to_vec()
}

fn at_once(decoder: &Decoder, tokens: &[u32]) -> Vec<f32> {
    flat(&decoder.logits(&decoder.hidden(&[tokens]).unwrap()).unwrap())
}

/// Logits with a prompt of one third, then token by token. The first logits are those of the prompt's last token.
fn in_steps(decoder: &Decoder, tokens: &[u32]) -> Vec<f32> {
    let (prompt, rest) = tokens.split_at(tokens.len() / 3);
    let mut cache = decoder.cache();
    let mut all = flat(&decoder.step(prompt, &mut cache).unwrap());
    for &token in rest {
        all.extend(flat(&decoder.step(&[token], &mut cache).unwrap()));
    }
    assert_eq!(cache.positions(), tokens.len());
    assert!(decoder.step(&[0], &mut cache).is_err(), "the cache is full");
    all
}

/// The largest difference, relative to the largest magnitude in `a`.
fn relative_distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let max = a.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
    a.iter().zip(b).fold(0.0_f32, |m, (a, b)| m.max((a - b).abs())) / max
}

#[test]
fn steps_give_what_is_given_at_once() {
    for tiny in families() {
        let tokens = tokens(&tiny);
        let first = (tokens.len() / 3 - 1) * tiny.vocab;
        let float = at_once(&load(&tiny), &tokens);
        for caching in [
            KvCaching::Float,
            KvCaching::Simulated(KvScheme::Kv4),
            KvCaching::Simulated(KvScheme::Kv8),
            KvCaching::Kernels(KvType::Kv4),
            KvCaching::Kernels(KvType::Kv8),
            KvCaching::Kernels(KvType::F16),
        ] {
            let decoder = load(&tiny).with_caching(caching);
            let whole = at_once(&decoder, &tokens);
            // A value close to the midpoint of two codes may be rounded either way; at 4 bits a step is large.
            let bound = match caching {
                KvCaching::Float => 1e-5,
                KvCaching::Kernels(KvType::F16) => 1e-3,
                KvCaching::Simulated(KvScheme::Kv8) | KvCaching::Kernels(KvType::Kv8) => 1e-2,
                _ => 5e-2,
            };
            let off = relative_distance(&whole[first..], &in_steps(&decoder, &tokens));
            assert!(off < bound, "{:?} {caching:?}: {off}", tiny.family);
            let changed = relative_distance(&float, &whole);
            match caching {
                KvCaching::Float => assert_eq!(changed, 0.0),
                KvCaching::Kernels(KvType::F16) => assert!(changed > 0.0 && changed < 1e-2, "{changed}"),
                _ => assert!(changed > 1e-4 && changed < 0.5, "{:?} {caching:?}: {changed}", tiny.family),
            }
        }
    }
}

/// The only difference is that the kernels round queries to 8 bits.
#[test]
fn pages_are_near_what_is_simulated() {
    for tiny in families() {
        let tokens = tokens(&tiny);
        for scheme in KvScheme::INTEGERS {
            let simulated = at_once(&load(&tiny).with_kv(Some(scheme)), &tokens);
            let pages =
                at_once(&load(&tiny).with_caching(KvCaching::Kernels(scheme.kind().unwrap())), &tokens);
            let off = relative_distance(&simulated, &pages);
            // Small differences after one block may move a key in the next block to an adjacent code.
            let bound = if scheme == KvScheme::Kv8 { 3e-2 } else { 0.1 };
            assert!(off < bound, "{:?} {scheme}: {off}", tiny.family);
        }
    }
}

#[test]
fn only_those_who_evaluate_follow_the_configuration() {
    let tiny = Tiny::default();
    let random = tiny.random(11);
    let plain = random.model();
    let mut config = tiny.config();
    config.insert(KV_CONFIG_KEY.into(), KvScheme::Kv4.config_value().unwrap());
    let marked = common::model(plain.source().clone(), &config);
    assert_eq!((plain.kv_scheme(), marked.kv_scheme()), (None, Some(KvScheme::Kv4)));
    let tokens = tokens(&tiny);
    let open = |model| Decoder::load(model, LENGTH, &Silent, &CancelToken::new()).unwrap();
    let followed = open(&marked);
    assert_eq!(followed.caching(), KvCaching::Simulated(KvScheme::Kv4));
    assert_eq!(open(&plain).caching(), KvCaching::Float);
    let asked = open(&plain).with_kv(Some(KvScheme::Kv4));
    assert_eq!(at_once(&followed, &tokens), at_once(&asked, &tokens));
    assert_eq!(at_once(&followed.with_kv(None), &tokens), at_once(&open(&plain), &tokens));
    let packed = open(&marked).packed().unwrap();
    assert_eq!(packed.caching(), KvCaching::Kernels(KvType::Kv4));
    assert_eq!(open(&plain).packed().unwrap().caching(), KvCaching::Float);
    assert_eq!(open(&plain).with_half_cache().caching(), KvCaching::Kernels(KvType::F16));

    let windows = common::windows(tiny.vocab, 4, 40, 7);
    let [a, b] = [&plain, &marked].map(|model| {
        let block = model.block(0, &model.rope(40).unwrap()).unwrap();
        assert_eq!(block.caching(), KvCaching::Float);
        let hidden = HiddenStates::embed(model, &windows).unwrap();
        let (first, x) = hidden.chunks().next().unwrap().unwrap();
        flat(&block.forward_packed(&x, hidden.segments(first, &x), &mut NoTap).unwrap())
    });
    assert_eq!(a, b);
    let recipe = common::recipe("rtn", "w4a16-g32-sym");
    let [a, b] = [(&plain, tiny.config()), (&marked, config)]
        .map(|(model, config)| common::run(model, &config, &recipe, None));
    assert_eq!(a.model().kv_scheme(), None);
    assert_eq!(b.model().kv_scheme(), Some(KvScheme::Kv4), "what the configuration says is kept");
}

/// Values beyond the range of the scales' type end the run with a message, not with a wrong result.
#[test]
fn values_that_no_cache_holds_are_reported() {
    let tiny = Tiny::default();
    let mut random = tiny.random(11);
    random.values("model.layers.1.self_attn.v_proj.weight").iter_mut().for_each(|w| *w *= 1e7);
    let model = random.model();
    let decoder = Decoder::load(&model, LENGTH, &Silent, &CancelToken::new()).unwrap();
    let tokens = tokens(&tiny);
    decoder.hidden(&[&tokens]).unwrap();
    for caching in [KvCaching::Simulated(KvScheme::Kv8), KvCaching::Kernels(KvType::Kv4)] {
        let decoder =
            Decoder::load(&model, LENGTH, &Silent, &CancelToken::new()).unwrap().with_caching(caching);
        let error = decoder.hidden(&[&tokens]).unwrap_err();
        assert!(error.category().exit_code() == 6 && error.to_string().contains("65504"), "{error}");
    }
}
