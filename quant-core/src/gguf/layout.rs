//! Maps the tensors of a block to tensors of the file, for writing and for reading.

use super::factors::RowFactors;
use super::families::{GgufFamily, How};
use super::rows::{Change, RowOrder, View};
use crate::model::{Architecture, BlockGraph, DeltaNet, Op, Parameter, RecurrentKind, StateSpace};
use crate::{Error, Result};

/// A tensor of a block, or a part of it, and its place in the file.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Placed {
    pub(super) tensor: String,
    /// The module in the checkpoint; for an expert, the file's name for all experts, after the block's prefix in the
    /// checkpoint.
    pub(super) module: String,
    pub(super) shape: Vec<usize>,
    /// The name in the file, without the prefix of the block.
    pub(super) stored: String,
    /// The shape in the file; for an expert, that of one matrix or vector.
    pub(super) stored_shape: Vec<usize>,
    /// The expert to which it belongs, if any. The tensor in the file has a matrix or vector per expert.
    pub(super) expert: Option<usize>,
    pub(super) view: View,
}

impl Placed {
    pub(super) fn name(&self, layer: usize) -> String {
        format!("blk.{layer}.{}", self.stored)
    }

    /// Whether this is one of the matrices of latent attention, of which the file has one per head.
    pub(super) fn is_per_head(&self) -> bool {
        self.expert.is_none() && self.stored_shape.len() > 2
    }
}

/// The places of all tensors of a block, in order of use.
pub(super) fn of_block(a: &Architecture, family: &GgufFamily, layer: usize) -> Result<Vec<Placed>> {
    let graph = a.graph(layer);
    let mut placed = Vec::new();
    for op in graph.nodes().iter().map(|node| &node.op) {
        for parameter in op.parameters() {
            placed.extend(of_parameter(a, family, layer, op, &parameter)?);
        }
    }
    Ok(placed)
}

/// The places of one tensor of a block: a single one, or one per part.
pub(super) fn of_parameter(
    a: &Architecture,
    family: &GgufFamily,
    layer: usize,
    op: &Op,
    parameter: &Parameter,
) -> Result<Vec<Placed>> {
    let graph = a.graph(layer);
    let within = op.tensor_name(parameter);
    let tensor = a.in_block(layer, &within);
    let shape = parameter.shape.clone();
    let place = |stored: String, stored_shape: Vec<usize>, view| Placed {
        tensor: tensor.clone(),
        module: a.in_block(layer, op.name()),
        shape: shape.clone(),
        stored,
        stored_shape,
        expert: None,
        view,
    };
    if let Some((expert, stored)) = family.expert(op.name()) {
        let one = place(format!("{stored}.{}", parameter.name), shape.clone(), View::AS_STORED);
        return Ok(vec![Placed { expert: Some(expert), module: a.in_block(layer, stored), ..one }]);
    }
    if let Some((_, how)) = family.tensors.iter().find(|(known, _)| *known == within) {
        let missing = || Error::Internal(format!("`{tensor}` does not belong to this kind of block"));
        let tiled = |net: DeltaNet, first: usize, width: usize| match family.tiles_heads && net.repeat > 1 {
            true => RowOrder::Tiled { first, groups: net.key_heads, repeat: net.repeat, width },
            false => RowOrder::AsStored,
        };
        let net = delta_net(graph);
        let folded = |name: &str, width: usize, change| {
            let view = View { change, ..View::of(RowOrder::Folded { width }) };
            place(name.into(), vec![shape[0] / width.max(1), width], view)
        };
        return Ok(match *how {
            How::Named(name) => vec![place(name.into(), squeezed(&shape), View::AS_STORED)],
            How::Heads(name) => {
                let net = net.ok_or_else(missing)?;
                let order = tiled(net, 0, shape[0] / net.value_heads().max(1));
                vec![place(name.into(), squeezed(&shape), View::of(order))]
            }
            How::Decays(name) => {
                let order = tiled(net.ok_or_else(missing)?, 0, 1);
                vec![place(name.into(), shape.clone(), View { change: Change::Decay, ..View::of(order) })]
            }
            How::Mixed(name) => {
                let net = net.ok_or_else(missing)?;
                let order = tiled(net, 2 * net.key_heads * net.key_dim, net.value_dim);
                vec![place(name.into(), squeezed(&shape), View::of(order))]
            }
            How::OfHeads(name) => {
                let net = net.ok_or_else(missing)?;
                let columns = tiled(net, 0, net.value_dim);
                vec![place(name.into(), shape.clone(), View { columns, ..View::AS_STORED })]
            }
            How::ByKeyHead([mixed, gate]) => {
                let net = net.ok_or_else(missing)?;
                let (keys, values) = (net.key_dim, net.repeat * net.value_dim);
                let parts = |parts| {
                    let period = 2 * keys + 2 * values;
                    RowOrder::Parts { period, periods: net.key_heads, parts }
                };
                let mixed_rows = parts([[0, keys], [keys, keys], [2 * keys, values]]);
                let gate_rows = parts([[2 * keys + values, values], [0, 0], [0, 0]]);
                [(mixed, mixed_rows), (gate, gate_rows)]
                    .map(|(name, order)| {
                        place(name.into(), vec![order.count(shape[0]), shape[1]], View::of(order))
                    })
                    .into()
            }
            How::SplitByKeyHead(names) => {
                let shape_of_heads = graph.attentions().next().ok_or_else(missing)?;
                let (repeat, head) = (shape_of_heads.repeat, shape_of_heads.head_dim);
                let (period, periods) = ((repeat + 2) * head, shape_of_heads.kv_heads);
                let parts = [[0, repeat * head], [repeat * head, head], [(repeat + 1) * head, head]];
                let orders = [true, true, false].into_iter().zip(parts).map(|(rotated, part)| {
                    match rotated && family.pairs_neighbours {
                        true => RowOrder::PairedPart { period, periods, part, head },
                        false => RowOrder::Parts { period, periods, parts: [part, [0, 0], [0, 0]] },
                    }
                });
                let rows = |order: RowOrder| {
                    let rows = order.count(shape[0]);
                    [&[rows], &shape[1..]].concat()
                };
                let named = names.into_iter().zip(orders);
                named.map(|(name, order)| place(name.into(), rows(order), View::of(order))).collect()
            }
            How::JoinedHeads(name) => {
                let shape_of_heads = graph.attentions().next().ok_or_else(missing)?;
                let (heads, head) = (shape_of_heads.kv_heads, shape_of_heads.head_dim);
                let parts = [[0, head], [head, head], [2 * head, head]];
                let order = RowOrder::Parts { period: 3 * head, periods: heads, parts };
                vec![place(name.into(), shape.clone(), View::of(order))]
            }
            How::Halves(names) => {
                let half = shape[0] / 2;
                let rows = |first| RowOrder::Parts {
                    period: 2 * half,
                    periods: 1,
                    parts: [[first, half], [0, 0], [0, 0]],
                };
                let parts = names.into_iter().zip([rows(0), rows(half)]);
                parts.map(|(name, order)| place(name.into(), vec![half, shape[1]], View::of(order))).collect()
            }
            How::Column(name) => vec![folded(name, 1, Change::None)],
            How::DecayColumn(name) => vec![folded(name, 1, Change::Decay)],
            How::Groups(name) => {
                let space = state_space(graph).ok_or_else(missing)?;
                vec![folded(name, space.width() / space.groups.max(1), Change::None)]
            }
            How::Latent([keys, values]) => {
                let [plain, value] = latent(graph).ok_or_else(missing)?;
                let (period, depth) = (plain + value, shape[1]);
                let heads = shape[0] / period.max(1);
                let transposed = RowOrder::Transposed { period, width: plain, depth };
                let parts =
                    RowOrder::Parts { period, periods: heads, parts: [[plain, value], [0, 0], [0, 0]] };
                vec![
                    place(keys.into(), vec![heads, depth, plain], View::of(transposed)),
                    place(values.into(), vec![heads, value, depth], View::of(parts)),
                ]
            }
        });
    }
    let Some(stored) = family.module(op.name()) else {
        return Err(Error::usage(
            format!("GGUF files of {} cannot store `{tensor}`", family.arch),
            "write a different format",
        ));
    };
    let head = graph.attentions().next().map_or(0, |shape| shape.head_dim);
    let pairs = family.pairs_neighbours && matches!(stored, "attn_q" | "attn_k");
    let order = if pairs { RowOrder::Paired { head } } else { RowOrder::AsStored };
    let mut view = View::of(order).plus(op.weight_offset());
    if let Some(factors) = family.folds_factors.then(|| RowFactors::of(graph, op)).flatten() {
        view.change = Change::Multiply(factors);
    }
    Ok(vec![place(format!("{stored}.{}", parameter.name), shape.clone(), view)])
}

/// Whether a mixture chooses the type of a tensor.
pub(super) fn takes_type(name: &str, shape: &[usize]) -> bool {
    const KEPT: [&str; 5] = [
        "_norm.weight",
        "ffn_gate_inp.weight",
        "ssm_conv1d",
        "shortconv.conv.weight",
        "per_layer_model_proj",
    ];
    let dimensions = shape.iter().skip_while(|dimension| **dimension == 1).count();
    dimensions > 1 && name.ends_with("weight") && KEPT.iter().all(|kept| !name.contains(kept))
}

/// Removes the dimension of size 1 from convolutions and from vectors that are stored as a row.
fn squeezed(shape: &[usize]) -> Vec<usize> {
    match *shape {
        [channels, 1, kernel] => vec![channels, kernel],
        [1, width] => vec![width],
        _ => shape.to_vec(),
    }
}

pub(super) fn delta_net(graph: &BlockGraph) -> Option<DeltaNet> {
    graph.nodes().iter().find_map(|node| match &node.op {
        Op::Recurrent(recurrent) => match recurrent.kind {
            RecurrentKind::DeltaNet(net) => Some(net),
            RecurrentKind::Convolution(_) | RecurrentKind::StateSpace(_) => None,
        },
        _ => None,
    })
}

pub(super) fn state_space(graph: &BlockGraph) -> Option<StateSpace> {
    graph.nodes().iter().find_map(|node| match &node.op {
        Op::Recurrent(recurrent) => match recurrent.kind {
            RecurrentKind::StateSpace(space) => Some(space),
            RecurrentKind::Convolution(_) | RecurrentKind::DeltaNet(_) => None,
        },
        _ => None,
    })
}

/// For latent attention: the number of unrotated features of a key head, and the features of a value head.
pub(super) fn latent(graph: &BlockGraph) -> Option<[usize; 2]> {
    let values = graph.attentions().next()?.value_dim;
    graph.nodes().iter().find_map(|node| match node.op {
        Op::JoinHeads { widths: [plain, _], .. } => Some([plain, values]),
        _ => None,
    })
}
