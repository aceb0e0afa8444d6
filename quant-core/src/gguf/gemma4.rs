//! Metadata for Gemma 4, whose blocks have heads of two kinds, and may have per-layer inputs, the keys and values of an
//! earlier block, and MLPs of two widths.

use super::families::{GgufFamily, ROPE_FACTORS};
use super::file::{Array, Value};
use super::metadata::unfit;
use super::specials::count;
use crate::Result;
use crate::model::{Architecture, AttentionShape, Op, Rope, RopeScaling};

/// A divisor so large that a pair of channels is not rotated.
const UNROTATED_DIVISOR: f32 = 1e30;

/// The attention shapes of blocks without and with a sliding window.
fn shapes(a: &Architecture, family: &GgufFamily) -> Result<[AttentionShape; 2]> {
    let attentions = a.attentions();
    let kind = |windowed: bool| {
        let mut of_kind = attentions.iter().filter(|shape| shape.window.is_some() == windowed);
        match (of_kind.next(), of_kind.next()) {
            (Some(shape), None) => Ok(*shape),
            (None, _) => Err(unfit(
                family,
                "it does not have both blocks with sliding windows and blocks with full attention".into(),
            )),
            (Some(_), Some(_)) => Err(unfit(family, "the attention of blocks of one kind differs".into())),
        }
    };
    Ok([kind(false)?, kind(true)?])
}

fn of_block(a: &Architecture, layer: usize) -> Option<AttentionShape> {
    a.graph(layer).attentions().next()
}

fn has_linear(a: &Architecture, layer: usize, module: &str) -> bool {
    a.graph(layer).linears().any(|(_, name, ..)| name == module)
}

/// The attention shape of blocks without a sliding window.
pub(super) fn attention(a: &Architecture, family: &GgufFamily) -> Result<AttentionShape> {
    let [full, _] = shapes(a, family)?;
    match full.scale() == 1.0 {
        true => Ok(full),
        false => {
            Err(unfit(family, format!("attention scores are multiplied by {} instead of 1", full.scale())))
        }
    }
}

pub(super) fn heads(a: &Architecture, family: &GgufFamily, put: &mut impl FnMut(&str, Value)) -> Result<()> {
    let [full, windowed] = shapes(a, family)?;
    let count = |n: usize| count(family, n);
    put("attention.head_count", count(full.heads())?);
    let keys: Vec<usize> = (0..a.layers).map(|layer| of_block(a, layer).map_or(0, |s| s.kv_heads)).collect();
    put("attention.head_count_kv", one_or_all(family, &keys)?);
    put("attention.key_length", count(full.head_dim)?);
    put("attention.value_length", count(full.head_dim)?);
    put("attention.key_length_swa", count(windowed.head_dim)?);
    put("attention.value_length_swa", count(windowed.head_dim)?);
    let windows = (0..a.layers).map(|layer| of_block(a, layer).is_some_and(|s| s.window.is_some()));
    put("attention.sliding_window_pattern", Value::Array(Array::Bool(windows.collect())));
    let makes = (0..a.layers).take_while(|layer| has_linear(a, *layer, "self_attn.k_proj")).count();
    put("attention.shared_kv_layers", count(a.layers - makes)?);
    // Blocks that share keys and values use those of the last two blocks that compute them, one of each kind.
    let is_windowed = |layer: usize| of_block(a, layer).is_some_and(|shape| shape.window.is_some());
    if makes < a.layers && (makes < 2 || is_windowed(makes - 1) || !is_windowed(makes - 2)) {
        let reason = "the last two blocks that compute keys and values are not one with a sliding window and \
            then one without";
        return Err(unfit(family, reason.into()));
    }
    if (makes..a.layers).any(|layer| has_linear(a, layer, "self_attn.k_proj")) {
        return Err(unfit(family, "the blocks that share keys and values are not the last blocks".into()));
    }
    let own = a.per_layer_inputs.as_ref();
    if let Some(inputs) = own.filter(|inputs| inputs.vocab != a.vocab) {
        let reason = format!(
            "its per-layer inputs have a vocabulary of {}, but the model has {}",
            inputs.vocab, a.vocab
        );
        return Err(unfit(family, reason));
    }
    put("embedding_length_per_layer_input", count(own.map_or(0, |inputs| inputs.width))?);
    Ok(())
}

pub(super) fn mlps(a: &Architecture, family: &GgufFamily) -> Result<Value> {
    let width = |layer: usize| {
        let mut linears = a.graph(layer).linears();
        linears.find(|(_, name, ..)| *name == "mlp.down_proj").map_or(0, |(_, _, [_, k], _)| k)
    };
    one_or_all(family, &(0..a.layers).map(width).collect::<Vec<_>>())
}

fn one_or_all(family: &GgufFamily, numbers: &[usize]) -> Result<Value> {
    match numbers {
        [first, rest @ ..] if rest.iter().all(|n| n == first) => count(family, *first),
        _ => {
            let numbers = numbers.iter().map(|n| match count(family, *n)? {
                Value::U32(n) => Ok(n as i32),
                _ => Ok(0),
            });
            Ok(Value::Array(Array::I32(numbers.collect::<Result<_>>()?)))
        }
    }
}

/// Writes the rotary embeddings of both kinds of blocks, and returns the frequency divisors of blocks without a window.
pub(super) fn rope(
    a: &Architecture,
    family: &GgufFamily,
    put: &mut impl FnMut(&str, Value),
) -> Result<Vec<(&'static str, Vec<f32>)>> {
    let of = |windowed: bool| -> Option<&Rope> {
        (0..a.layers)
            .filter(|layer| of_block(a, *layer).is_some_and(|s| s.window.is_some() == windowed))
            .find_map(|layer| {
                a.graph(layer).nodes().iter().find_map(|node| match &node.op {
                    Op::Rope(rope) => Some(rope),
                    _ => None,
                })
            })
    };
    let (Some(full), Some(windowed)) = (of(false), of(true)) else {
        return Err(unfit(family, "the blocks of one kind do not use RoPE".into()));
    };
    if windowed.scaling != RopeScaling::None {
        return Err(unfit(family, "blocks with sliding windows have RoPE scaling".into()));
    }
    let RopeScaling::Proportional { factor, pairs } = full.scaling else {
        return Err(unfit(family, "blocks without sliding windows do not use proportional RoPE".into()));
    };
    put("rope.dimension_count", count(family, full.head_dim)?);
    put("rope.dimension_count_swa", count(family, windowed.rotary_dim)?);
    put("rope.freq_base", Value::F32(full.theta as f32));
    put("rope.freq_base_swa", Value::F32(windowed.theta as f32));
    let divisor = |pair: usize| if pair < pairs { factor as f32 } else { UNROTATED_DIVISOR };
    Ok(vec![(ROPE_FACTORS, (0..full.head_dim / 2).map(divisor).collect())])
}
