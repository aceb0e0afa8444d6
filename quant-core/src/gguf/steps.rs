//! The steps of a method before rounding, such as AWQ. They are searched block by block before tensors are written, with
//! the errors of candidates measured for the block types of the file; the writer then reads a rewritten model.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use serde_json::json;

use super::imatrix::Importance;
use super::plan::{GgufPlan, PlannedTensor};
use super::saved;
use crate::blocks::BlockSearch;
use crate::calibrate::HiddenStates;
use crate::checkpoint::Dtype;
use crate::model::{BlockGraph, Model, NodeId};
use crate::pipeline::{InputRanges, SearchContext, Searched, input_ranges, search_rewrites};
use crate::transform::{BlockGrid, FoldRecord, Rewrite, Search, rewritten};
use crate::{CancelToken, Error, Event, Observer, Result, TensorSink};
use quant_formats::timed;

/// What the steps have found.
pub struct Steps {
    model: Model,
    /// The factors of columns, by the names of weights in the checkpoint.
    factors: BTreeMap<String, Arc<[f32]>>,
    folds: Vec<FoldRecord>,
}

impl Steps {
    /// Searches the rewrite of every block, beginning with the batch's embeddings in `states`. Records each rewrite in
    /// `sink`. Those that an interrupted run recorded are not searched again.
    ///
    /// # Errors
    /// Errors of reading, running and searching blocks, and of `sink`; [`Error::InputFile`] if the importance of a
    /// tensor is invalid; [`Error::InputChanged`] if a weight has changed since the interrupted run;
    /// [`Error::Interrupted`].
    pub fn search(
        plan: &GgufPlan,
        model: &Model,
        states: &mut HiddenStates,
        importance: Option<&Importance>,
        sink: &mut dyn TensorSink,
        observer: &dyn Observer,
        cancel: &CancelToken,
    ) -> Result<Self> {
        let a = model.architecture();
        let (transforms, settings) = (&plan.request.method.transforms[..], &plan.request.settings);
        let needs_ranges = transforms.iter().any(|t| t.needs(settings).ranges);
        observer.event(&Event::StageStarted { stage: "search", unit: "block", units: a.layers as u64 });
        let ropes = model.rope(states.shape()[1])?;
        let types = Types::new(plan, importance);
        let mut rewrites = Vec::with_capacity(a.layers);
        let (mut factors, mut folds) = (BTreeMap::new(), Vec::new());
        for layer in 0..a.layers {
            cancel.check()?;
            let block = model.block(layer, &ropes)?;
            saved::check_block(sink, model, layer, &block)?;
            let graph = block.graph().clone();
            let advance = layer + 1 < a.layers;
            let alone = transforms.len() == 1;
            let known = recall(sink, layer);
            let is_known = known.is_some();
            let mut rewrite = match known {
                Some(rewrite) => rewrite,
                None => {
                    let prefix = a.in_block(layer, "");
                    // Norms are F32 in the file, so the quotients of their weights are not rounded further.
                    let norm_dtypes = graph.norms().map(|(node, ..)| (node, Dtype::F32)).collect();
                    let block_grids = types.grids(&graph, &|name| a.in_block(layer, name))?;
                    let ranges = match needs_ranges {
                        true => input_ranges(&prefix, &block, states, cancel, |pass, states| {
                            timed(observer, "ranges", || pass.run(states, false))
                        })?,
                        false => InputRanges::default(),
                    };
                    let context = SearchContext {
                        prefix: &prefix,
                        settings,
                        smoothing: a.smoothing,
                        norm_dtypes: &norm_dtypes,
                        ranges: &ranges.of,
                        block_grids: &block_grids,
                        experts_apart: false,
                        observer,
                        cancel,
                    };
                    let searched = [Searched { grids: &BTreeMap::new(), findings: None }];
                    let states = Some(&mut *states);
                    let found =
                        search_rewrites(transforms, &context, &block, &searched, states, advance && alone)?;
                    let mut rewrite = found.into_iter().next().unwrap_or_default();
                    if !rewrite.only_rescales() {
                        return Err(Error::Internal(format!(
                            "the steps {} support blocks, but clip or reorder weights of `{prefix}`",
                            plan.request.steps().join(", ")
                        )));
                    }
                    rewrite.folds = rewrite.folds.into_iter().map(FoldRecord::shortened).collect();
                    remember(sink, layer, &rewrite)?;
                    rewrite
                }
            };
            if advance && (is_known || !alone) {
                states.advance(&block, cancel)?;
            }
            for (node, name, ..) in graph.linears() {
                if let Some(columns) = rewrite.columns.get(&node) {
                    let tensor = format!("{}.weight", a.in_block(layer, name));
                    factors.insert(tensor, Arc::from(&columns[..]));
                }
            }
            folds.append(&mut rewrite.folds);
            rewrites.push(rewrite);
            observer.event(&Event::UnitDone { detail: format!("block {layer}") });
        }
        observer.event(&Event::StageDone);
        Ok(Self { model: rewritten(model, &rewrites)?, factors, folds })
    }

    /// The rewritten model, which is equal to the original in real arithmetic.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The importance of the inputs of the rewritten model, from those of the original.
    pub fn importance(&self, importance: Importance, tensors: &[PlannedTensor]) -> Importance {
        importance.divided(tensors, |name| self.factors.get(name).map(|factors| &factors[..]))
    }

    /// How the scales were chosen.
    pub(super) fn folds(&self) -> &[FoldRecord] {
        &self.folds
    }

    /// Whether a weight of the checkpoint has different columns.
    pub(super) fn changes(&self, tensor: &str) -> bool {
        self.factors.contains_key(tensor)
    }
}

/// The key of the record of a block's rewrite.
fn key(layer: usize) -> String {
    format!("rewrite of block {layer}")
}

/// Records what [`rewritten`] needs of a rewrite that only rescales.
fn remember(sink: &mut dyn TensorSink, layer: usize, rewrite: &Rewrite) -> Result<()> {
    let parts = [
        ("norm", &rewrite.norms),
        ("norm bias", &rewrite.norm_biases),
        ("columns", &rewrite.columns),
        ("rows", &rewrite.rows),
    ];
    let vectors = parts.into_iter().flat_map(|(part, vectors)| {
        vectors.iter().map(move |(node, values)| (format!("{part} {node}"), &values[..]))
    });
    sink.remember(&key(layer), &json!({ "vectors": saved::record(vectors), "folds": rewrite.folds }))?;
    sink.commit()
}

/// Returns the rewrite of a block that an interrupted run recorded.
fn recall(sink: &dyn TensorSink, layer: usize) -> Option<Rewrite> {
    let record = sink.recall(&key(layer))?;
    let mut rewrite =
        Rewrite { folds: serde_json::from_value(record["folds"].clone()).ok()?, ..Rewrite::default() };
    for (name, values) in saved::vectors(&record["vectors"])? {
        let (part, node) = name.rsplit_once(' ')?;
        let vectors = match part {
            "norm" => &mut rewrite.norms,
            "norm bias" => &mut rewrite.norm_biases,
            "columns" => &mut rewrite.columns,
            "rows" => &mut rewrite.rows,
            _ => return None,
        };
        vectors.insert(node.parse().ok()?, values);
    }
    Some(rewrite)
}

/// The block types of weights, by their names in the checkpoint.
struct Types<'a> {
    importance: Option<&'a Importance>,
    /// The tensor of the file that contains a weight, and the weight's index in it.
    tensors: BTreeMap<&'a str, (&'a PlannedTensor, usize)>,
    search: BlockSearch,
}

impl<'a> Types<'a> {
    fn new(plan: &'a GgufPlan, importance: Option<&'a Importance>) -> Self {
        // Blocks consist of adjacent columns of the file, and candidates are rounded in the order of the checkpoint.
        let rounded = plan
            .tensors
            .iter()
            .filter(|t| t.layer().is_some() && !t.kind.is_float() && !t.keeps_codes() && t.keeps_columns());
        let named = rounded.flat_map(|tensor| {
            let sources = tensor.sources().into_iter().enumerate();
            sources.map(move |(index, source)| (source, (tensor, index)))
        });
        let request = &plan.request;
        let mode = request.method.search_mode(&request.settings);
        let search = match mode {
            Some(Search::Reference) => request.search,
            // It takes a fraction of the time. The exponents are not quite as good.
            _ => BlockSearch::Reference,
        };
        Self { importance, tensors: named.collect(), search }
    }

    fn grids(
        &self,
        graph: &BlockGraph,
        in_block: &dyn Fn(&str) -> String,
    ) -> Result<BTreeMap<NodeId, BlockGrid>> {
        let mut known: BTreeMap<&str, Option<Vec<f32>>> = BTreeMap::new();
        let mut grids = BTreeMap::new();
        for (node, name, [_, k], _) in graph.linears() {
            let name = format!("{}.weight", in_block(name));
            let Some(&(tensor, index)) = self.tensors.get(&name[..]) else { continue };
            if tensor.shape.last() != Some(&k) {
                return Err(Error::Internal(format!("`{}` does not have {k} columns", tensor.name)));
            }
            let importance = match known.entry(&tensor.name) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => {
                    let all = self.importance.map(|importance| importance.of(tensor)).transpose()?.flatten();
                    new.insert(all)
                }
            };
            let sources = tensor.sources().len();
            let importance = importance.as_ref().map(|all| Importance::of_source(all, index, sources, k));
            grids.insert(node, BlockGrid { kind: tensor.kind, search: self.search, importance });
        }
        Ok(grids)
    }
}
