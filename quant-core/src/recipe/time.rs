//! How long a plan will take: operations counted from shapes, over what this machine was seen to do
//! in a tenth of a second.

use std::time::Instant;

use super::{Action, Plan, Rounding};
use crate::checkpoint::Dtype;
use crate::digest::sha256_hex;
use crate::model::{BlockGraph, BlockKind, FoldGroup, Model, Reach, WeightBody, multiply};
use crate::quantize::gptq::LayerInputs;
use crate::quantize::{Rows, quantize_tensor};
use crate::transform::{
    Alpha, CLIP_CANDIDATES, Producers, SCALE_CANDIDATES, SMOOTH_CANDIDATES, SMOOTH_TOKENS, Search,
    SmoothSettings, kept_bytes,
};
use crate::{Error, Result};

/// Share of the batch that a candidate of the fast search runs on, about: most leave early.
const RACE_SHARE: f64 = 1.0 / 8.0;
/// What reading, hashing, writing and reading back a byte costs beside hashing it once.
const PASSES: f64 = 2.0;

/// What this machine does in a second, on the threads of the current rayon pool.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Floating-point operations of a large matrix product.
    pub operations: f64,
    /// Weights rounded.
    pub rounded: f64,
    /// Bytes hashed by one thread.
    pub hashed: f64,
}

impl Rates {
    /// Measures them; takes about a tenth of a second.
    ///
    /// # Errors
    /// Never but for a bug.
    pub fn measure() -> Result<Self> {
        const SIDE: usize = 1024;
        const WEIGHTS: [usize; 2] = [SIDE, 2048];
        let values: Vec<f32> = (0..SIDE * SIDE).map(|i| (i % 251) as f32 * 1e-3 - 0.1).collect();
        let weight = WeightBody::F32 { shape: [SIDE, SIDE], values: values.clone() };
        let mut out = vec![0.0; SIDE * SIDE];
        let product = best(3, || multiply(&values, &weight, SIDE, &mut out))?;
        let rows: Vec<f32> = values.iter().chain(&values).copied().collect();
        let rounding = best(3, || {
            let scheme = crate::scheme::LinearScheme::default();
            quantize_tensor(Rows::Floats(&rows), WEIGHTS, scheme, Dtype::F16, None)
                .map(drop)
                .map_err(|e| Error::Internal(e.to_string()))
        })?;
        let bytes = vec![0x5a; 4 << 20];
        let hashing = best(2, || {
            std::hint::black_box(sha256_hex(&bytes));
            Ok(())
        })?;
        Ok(Self {
            operations: 2.0 * (SIDE * SIDE * SIDE) as f64 / product,
            rounded: (WEIGHTS[0] * WEIGHTS[1]) as f64 / rounding,
            hashed: bytes.len() as f64 / hashing,
        })
    }
}

/// Seconds of the quickest of some runs; the first warms up.
fn best(runs: usize, mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    run()?;
    let mut best = f64::INFINITY;
    for _ in 0..runs {
        let started = Instant::now();
        run()?;
        best = best.min(started.elapsed().as_secs_f64());
    }
    Ok(best.max(1e-9))
}

impl Plan {
    /// Seconds that one run of all these plans for a model will take, about: within a factor of two
    /// on a machine that does nothing else and whose disk keeps up.
    pub fn seconds(plans: &[Self], model: &Model, rates: Rates) -> f64 {
        let Some(first) = plans.first() else { return 0.0 };
        let mut operations = 0.0;
        let mut rounded = 0.0;
        if first.needs_text() {
            let again = if first.needs_ranges() && first.method.has("awq") { 2.0 } else { 1.0 };
            operations += again * first.forward_operations(model);
        }
        for plan in plans {
            if plan.method.has("awq") {
                let (searched, tried) = plan.search_work(model);
                operations += searched;
                rounded += tried;
            }
            operations += plan.smooth_operations(model);
            if plan.method.rounding == Rounding::Gptq {
                operations += plan.gptq_operations(model);
            }
        }
        let mut bytes = 0.0;
        for plan in plans {
            let weights = |e: &&super::PlanEntry| matches!(e.action, Action::Quantize { .. });
            rounded += plan.entries.iter().filter(weights).map(|e| e.info.elements() as f64).sum::<f64>();
            bytes += (plan.input_bytes() + plan.output_bytes()) as f64;
        }
        operations / rates.operations + rounded / rates.rounded + PASSES * bytes / rates.hashed
    }

    /// Hessians, their factors, the solves; and what running a block in stages costs beyond one pass.
    fn gptq_operations(&self, model: &Model) -> f64 {
        let of_block = |graph: &BlockGraph| {
            let mut widths = std::collections::BTreeMap::new();
            let mut operations = 0.0;
            for (id, _, [n, k], _) in graph.linears() {
                widths.insert(graph.nodes()[id].inputs[0], k as f64);
                operations += n as f64 * (k as f64).powi(2);
            }
            for (&value, k) in &widths {
                // In f64 the factor runs at half the rate.
                operations +=
                    self.tokens() * self.share_of_tokens(graph, value) * k * k + 4.0 / 3.0 * k.powi(3);
            }
            operations
        };
        let again = match self.gptq.inputs {
            LayerInputs::Quantized => 0.75,
            LayerInputs::Float => 0.0,
        };
        self.in_all_blocks(model, of_block) + again * self.forward_operations(model)
    }

    /// The blocks that the search for SmoothQuant's exponents runs.
    fn smooth_operations(&self, model: &Model) -> f64 {
        let SmoothSettings { alpha, producers, .. } = &self.settings.smooth;
        if !self.method.has("smoothquant") || !matches!(alpha, Some(Alpha::Auto(_))) {
            return 0.0;
        }
        let share = (SMOOTH_TOKENS as f64 / self.tokens().max(1.0)).min(1.0);
        self.in_all_blocks(model, |graph| {
            let meant =
                |g: &&FoldGroup| *producers == Producers::All || graph.nodes()[g.producer].op.is_norm();
            let runs = graph.fold_groups().iter().filter(meant).count() * SMOOTH_CANDIDATES + 1;
            runs as f64 * share * self.block_operations(graph)
        })
    }

    fn tokens(&self) -> f64 {
        self.sampling.samples as f64 * self.sampling.length as f64
    }

    /// The share of all tokens that a value is computed for while the block is watched; experts that few tokens are routed
    /// to are taken to be few.
    fn share_of_tokens(&self, graph: &BlockGraph, id: usize) -> f64 {
        self.sampling.experts.shares(graph.share_of_tokens(id))[0]
    }

    /// The batch through all blocks.
    fn forward_operations(&self, model: &Model) -> f64 {
        self.in_all_blocks(model, |graph| self.block_operations(graph))
    }

    /// The batch through a block.
    fn block_operations(&self, graph: &BlockGraph) -> f64 {
        let length = self.sampling.length as f64;
        let nodes = graph.nodes().iter().enumerate();
        nodes
            .map(|(id, n)| n.op.product_operations(self.tokens() * self.share_of_tokens(graph, id), length))
            .sum()
    }

    /// What mixes the tokens of the whole batch.
    fn mixing_operations(&self, graph: &BlockGraph) -> f64 {
        let attentions = graph.nodes().iter().filter(|node| node.op.reach() == Reach::Window);
        let length = self.sampling.length as f64;
        attentions.map(|node| node.op.product_operations(self.tokens(), length)).sum()
    }

    /// Operations of the searches in all blocks, and weights that they round.
    fn search_work(&self, model: &Model) -> (f64, f64) {
        let kinds = model.architecture().blocks.kinds_in(self.blocks());
        kinds.fold((0.0, 0.0), |(operations, rounded), kind| {
            let (more, tried) = self.search_work_of(kind);
            (operations + kind.layers as f64 * more, rounded + kind.layers as f64 * tried)
        })
    }

    /// The same in one block.
    fn search_work_of(&self, BlockKind { graph, first, .. }: BlockKind<'_>) -> (f64, f64) {
        let shape = |id: usize| graph.nodes()[id].op.linear_shape().unwrap_or_default();
        let weights = |id: usize| shape(id).map(|s| s as f64).iter().product::<f64>();
        let candidates = SCALE_CANDIDATES as f64;
        let (mut operations, mut rounded) = (0.0, 0.0);
        for group in graph.fold_groups().iter().filter(|g| g.repeat == 1) {
            let own: f64 = group.consumers.iter().map(|&c| weights(c)).sum();
            rounded += candidates * own;
            let [n, k] = shape(group.consumers[0]).map(|s| s as f64);
            let tokens = self.tokens() * self.share_of_tokens(graph, group.input);
            let gram = group.consumers.len() == 1 && self.is_gram(graph, group, shape(group.consumers[0]));
            if gram {
                operations += tokens * k * k + candidates * 2.0 * n * k * k;
                continue;
            }
            let share = match self.settings.search {
                Search::Fast => RACE_SHARE,
                Search::Reference => 1.0,
            };
            let watched = if group.consumers.len() == 1 { 0.0 } else { weights(group.inspected) };
            let mixes = graph.mixes_tokens(group.input, group.inspected);
            let attention = if mixes { self.mixing_operations(graph) } else { 0.0 };
            let own: f64 = group.consumers.iter().map(|&c| weights(c) * graph.share_of_tokens(c)).sum();
            operations += candidates * share * (2.0 * self.tokens() * (own + watched) + attention);
        }
        for (id, _, [n, k], _) in graph.linears().filter(|(id, ..)| !graph.feeds_queries_or_keys(*id)) {
            let scheme = self.entries.iter().find_map(|e| match &e.action {
                Action::Quantize { node: Some(node), scheme, .. }
                    if e.layer == Some(first) && *node == id =>
                {
                    Some(*scheme)
                }
                _ => None,
            });
            let Some(scheme) = scheme else { continue };
            let group = scheme.granularity.group_size(k).min(512) as f64;
            let tried = CLIP_CANDIDATES as f64 * n as f64 * k as f64;
            operations += 2.0 * group * tried;
            rounded += tried;
        }
        (operations, rounded)
    }

    /// Whether a single linear is judged by its input's Gram matrix.
    fn is_gram(&self, graph: &crate::model::BlockGraph, group: &FoldGroup, [n, k]: [usize; 2]) -> bool {
        let (n, k) = (n as u64, k as u64);
        match self.settings.search {
            Search::Fast => kept_bytes(graph, group, self.sampling, [n, k], SCALE_CANDIDATES) == 4 * k * k,
            Search::Reference => self.tokens() > k as f64,
        }
    }

    /// What the blocks that the plan covers take together.
    fn in_all_blocks(&self, model: &Model, operations: impl Fn(&BlockGraph) -> f64) -> f64 {
        let kinds = model.architecture().blocks.kinds_in(self.blocks());
        kinds.map(|kind| kind.layers as f64 * operations(kind.graph)).sum()
    }
}
