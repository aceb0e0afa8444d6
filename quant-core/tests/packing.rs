//! Documents that share a window give the same results as they do separately, in the blocks of several families.

use crate::common;

use std::collections::BTreeMap;

use candle_core::Tensor;
use common::{Kind, Tiny, flat, relative_difference};
use quant_core::CancelToken;
use quant_core::calibrate::{HiddenStates, TokenUse, TokenWindows};
use quant_core::model::{Model, NoTap, NodeId, Tap, TokenRows};

/// The hidden states of a batch after all blocks, `[tokens · hidden]`.
fn states(model: &Model, windows: &TokenWindows) -> Vec<f32> {
    let rope = model.rope(windows.length()).unwrap();
    let mut hidden = HiddenStates::embed(model, windows).unwrap();
    for layer in 0..model.architecture().layers {
        hidden.advance(&model.block(layer, &rope).unwrap(), &CancelToken::new()).unwrap();
    }
    hidden.chunks().flat_map(|c| flat(&c.unwrap().1)).collect()
}

#[test]
fn packed_documents_run_as_if_alone() {
    let llama3 = serde_json::json!({
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64
    });
    for (family, rope_scaling) in [
        (Kind::Llama, serde_json::Value::Null),
        (Kind::Llama, llama3),
        (Kind::Mistral(Some(9)), serde_json::Value::Null),
        (Kind::Qwen2, serde_json::Value::Null),
        (Kind::Qwen3, serde_json::Value::Null),
        (Kind::Opt, serde_json::Value::Null),
    ] {
        let tiny = match family {
            Kind::Opt => Tiny::opt(),
            _ => Tiny { family, rope_scaling, ..Tiny::default() },
        };
        let model = tiny.random(7).model();
        // Several chunks of several windows each.
        let windows = common::masked_windows(tiny.vocab, 30, 150, 3);
        let (layout, hidden) = (windows.layout(), tiny.hidden);
        let packed = states(&model, &windows);
        let mut first = 0;
        let mut documents = 0;
        for end in 1..=layout.tokens() {
            if end < layout.tokens() && layout.place(end) > 0 {
                continue;
            }
            let length = end - first;
            let alone = TokenWindows::cut(windows.tokens()[first..end].to_vec(), length);
            let difference =
                relative_difference(&packed[first * hidden..end * hidden], &states(&model, &alone));
            assert!(difference < 2e-5, "{family:?}, tokens {first}..{end}: {difference}");
            documents += 1;
            first = end;
        }
        assert!(documents > 60);
        // Without segments, attention crosses the borders and the results differ.
        let crossing = TokenWindows::cut(windows.tokens().to_vec(), windows.length());
        assert!(relative_difference(&states(&model, &crossing), &packed) > 1e-2);
    }
}

/// With one document per window, results are bit-identical to those without segments.
#[test]
fn a_document_a_window_changes_nothing() {
    let tiny = Tiny { family: Kind::Mistral(Some(20)), ..Tiny::default() };
    let model = tiny.random(8).model();
    let plain = common::windows(tiny.vocab, 20, 130, 4);
    let starts = vec![0; plain.tokens().len()];
    let one_piece = plain.clone().with_layout(None, Some(starts)).unwrap();
    assert_eq!(states(&model, &plain), states(&model, &one_piece));
}

#[derive(Default)]
struct Rows(BTreeMap<NodeId, Vec<usize>>);

impl Tap for Rows {
    fn linear_input(&mut self, linear: NodeId, x: &Tensor, tokens: TokenRows<'_>) -> quant_core::Result<()> {
        assert_eq!(tokens.count(), x.elem_count() / x.dims()[2]);
        self.0.entry(linear).or_default().extend(tokens.iter());
        Ok(())
    }
}

/// The window is processed in pieces, except in attention. The states are the same, and every linear's input contains
/// every token once.
#[test]
fn long_windows_go_in_pieces() {
    let tiny = Tiny { family: Kind::Mistral(Some(700)), layers: 1, ..Tiny::default() };
    let model = tiny.random(9).model();
    let windows = common::masked_windows(tiny.vocab, 2, 4500, 5);
    let block = model.block(0, &model.rope(4500).unwrap()).unwrap();
    let mut hidden = HiddenStates::embed(&model, &windows).unwrap();
    let whole: Vec<f32> = (hidden.chunks())
        .flat_map(|chunk| {
            let (first, x) = chunk.unwrap();
            flat(&block.forward_packed(&x, hidden.segments(first, &x), &mut NoTap).unwrap())
        })
        .collect();
    let (mut seen, mut watched) = (Rows::default(), Rows::default());
    hidden.watch(&block, &CancelToken::new(), &mut watched).unwrap();
    hidden.advance_watched(&block, &CancelToken::new(), &mut seen).unwrap();
    let pieces: Vec<f32> = hidden.chunks().flat_map(|c| flat(&c.unwrap().1)).collect();
    assert!(whole == pieces, "{}", relative_difference(&pieces, &whole));
    assert_eq!((seen.0.len(), &seen.0), (7, &watched.0));
    assert!(seen.0.values().all(|rows| rows.iter().copied().eq(0..9000)));
    // Cancelling stops the evaluation between two linears.
    let cancel = CancelToken::new();
    cancel.cancel();
    assert!(matches!(hidden.advance(&block, &cancel), Err(quant_core::Error::Interrupted)));
}

#[test]
fn layouts_that_do_not_fit_are_refused() {
    let windows = || TokenWindows::cut((0..20).collect(), 5);
    assert!(windows().with_layout(Some(vec![TokenUse::Counted; 19]), None).is_err());
    for starts in [vec![0; 19], vec![1; 20], [vec![0; 15], vec![0, 1, 0, 0, 0]].concat()] {
        assert!(windows().with_layout(None, Some(starts)).is_err());
    }
    let fits = windows().with_layout(Some(vec![TokenUse::Context; 20]), Some([0, 0, 2, 3, 3].repeat(4)));
    assert_eq!(fits.unwrap().uses(), [0, 20, 0]);
}
