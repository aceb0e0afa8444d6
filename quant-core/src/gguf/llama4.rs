//! Llama 4: attention to chunks, experts in every few blocks, and a factor of queries in blocks without rotation.

use super::families::GgufFamily;
use super::file::Value;
use super::metadata::unfit;
use super::specials::count;
use crate::Result;
use crate::model::{Architecture, BlockGraph, Op, PositionScale};

/// The length of chunks, which llama.cpp does not read from the file.
const CHUNK: usize = 8192;
/// One block of each period attends to all positions.
const PERIOD: usize = 4;
/// The number of experts of the only model whose queries and keys are not normalized.
pub(super) const EXPERTS_WITHOUT_NORMS: usize = 128;
/// The factor of queries.
const SCALE: PositionScale = PositionScale { beta: 0.1, original_positions: CHUNK, offset: 1 };

/// Writes the keys of the family, after checking that llama.cpp computes the same.
pub(super) fn keys(
    a: &Architecture,
    family: &GgufFamily,
    experts: usize,
    put: &mut impl FnMut(&str, Value),
) -> Result<()> {
    if !family.has_chunks {
        return Ok(());
    }
    for (layer, graph) in (0..a.layers).map(|layer| (layer, a.graph(layer))) {
        let expected = (!(layer + 1).is_multiple_of(PERIOD)).then_some(CHUNK);
        if graph.attentions().any(|shape| shape.chunk != expected) {
            let reason = format!("the chunks of block {layer} do not follow the pattern of the architecture");
            return Err(unfit(family, reason));
        }
        let scale = graph.nodes().iter().find_map(|node| match node.op {
            Op::PositionScale(scale) => Some(scale),
            _ => None,
        });
        if scale != expected.is_none().then_some(SCALE) {
            let reason = format!("block {layer} scales queries by position in an unsupported way");
            return Err(unfit(family, reason));
        }
        let normalizes = graph.nodes().iter().any(|node| matches!(node.op, Op::Normalize { .. }));
        if normalizes != (expected.is_some() && experts != EXPERTS_WITHOUT_NORMS) {
            let does = if normalizes { "normalizes" } else { "does not normalize" };
            return Err(unfit(family, format!("block {layer} {does} queries and keys")));
        }
    }
    let routes = |graph: &BlockGraph| graph.nodes().iter().any(|node| node.op.routing().is_some());
    let step = (0..a.layers).position(|layer| routes(a.graph(layer))).map_or(0, |first| first + 1);
    let follows = |layer: usize| routes(a.graph(layer)) == (layer + 1).is_multiple_of(step.max(1));
    if step == 0 || !(0..a.layers).all(follows) {
        return Err(unfit(family, "the blocks with experts are not at equal distances".into()));
    }
    put("interleave_moe_layer_step", count(family, step)?);
    Ok(())
}
