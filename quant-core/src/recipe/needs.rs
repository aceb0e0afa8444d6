//! What a plan has to look at beside the weights, and whether its activations go with its method.

use std::collections::BTreeSet;

use super::{Action, Plan, PlanEntry};
use crate::model::{Architecture, BlockGraph, NodeId};
use crate::scheme::ActivationScheme;
use crate::transform::{Producers, check_maxima};
use crate::{Error, Result};

impl Plan {
    /// Whether a calibration text is looked at.
    pub fn needs_text(&self) -> bool {
        self.method.needs_text(&self.settings) || self.has_static_activations() || self.calibrates_cache()
    }

    /// Whether blocks are looked at, and not only their weights one by one.
    pub(crate) fn needs_blocks(&self) -> bool {
        !self.transforms().is_empty() || self.needs_text()
    }

    /// Whether the ranges of what linears read are looked at.
    pub(crate) fn needs_ranges(&self) -> bool {
        let by_transforms = self.transforms().iter().any(|t| t.needs(&self.settings).ranges);
        by_transforms || self.has_static_activations()
    }

    /// Whether static scales of cached keys and values are found.
    pub(crate) fn calibrates_cache(&self) -> bool {
        self.entries.iter().any(|entry| !entry.cache.is_empty())
    }

    fn has_static_activations(&self) -> bool {
        // Of weights that are quantized already, scales of inputs are there.
        self.entries
            .iter()
            .any(|e| matches!(e.action, Action::Quantize { scheme, .. } if scheme.has_static_activations()))
    }

    /// Whether scales of groups are searched for: those of NVFP4.
    pub(crate) fn searches_scales(&self) -> bool {
        self.entries
            .iter()
            .any(|e| matches!(e.action, Action::Quantize { scheme, .. } if scheme.has_global_scale()))
    }

    /// Fails where it is said which tokens experts are calibrated on, and no block that is looked at has any.
    pub(super) fn check_experts(&self, architecture: &Architecture) -> Result<()> {
        let has_experts = |graph: &BlockGraph| graph.nodes().iter().any(|n| n.op.selected_expert().is_some());
        let experts = self.sampling.experts;
        match experts.is_routed() || architecture.blocks.kinds().any(|kind| has_experts(kind.graph)) {
            true => Ok(()),
            false => Err(Error::usage(
                "which tokens experts are calibrated on has no effect: no layer of the model has experts",
                "leave ‹expert_tokens› and ‹expert_floor› out, in a recipe expert_tokens and expert_floor",
            )),
        }
    }

    /// Fails where a step makes no sense for floating-point weights.
    pub(super) fn check_floats(&self) -> Result<()> {
        let quantized = || self.entries.iter().filter_map(PlanEntry::quantized);
        let smooth = ["smoothquant", "smooth-outputs"].into_iter().find(|step| self.method.has(step));
        if let (Some(step), Some((_, scheme))) =
            (smooth, quantized().find(|(_, s)| s.fixed_scales().is_some()))
        {
            return Err(Error::usage(
                format!(
                    "`{step}` does not help {scheme}: every {} inputs have a scale of their own, which follows outliers, \
                     and larger weights round worse",
                    scheme.granularity.group_size(0)
                ),
                "choose ‹method=rtn›, gptq or awq, or a scheme such as wf8af8-channel",
            ));
        }
        if self.calibrates_cache() && self.method.has("smooth-attention") {
            return Err(Error::usage(
                "`smooth-attention` helps caches of integers: FP8 has steps that grow with the numbers, and one scale for all \
                 channels of keys",
                "leave the step out, for example with ‹skip=smooth-attention›",
            ));
        }
        if self.method.has("clip") && !quantized().any(|(_, scheme)| scheme.takes_clip_bounds()) {
            let scheme = quantized().next().map(|(_, scheme)| scheme.to_string()).unwrap_or_default();
            return Err(Error::usage(
                format!(
                    "`clip` has no effect on {scheme}: rows share its scales, or they are powers of two or searched for \
                     when weights are rounded"
                ),
                "leave the step out",
            ));
        }
        Ok(())
    }

    /// Fails where activations and method do not go together, or two steps do the same.
    pub(super) fn check_activations(&self) -> Result<()> {
        let rounded = |e: &&PlanEntry| {
            e.quantized().is_some_and(|(_, scheme)| scheme.activations != ActivationScheme::Float)
        };
        let in_blocks = self.entries.iter().any(|e| e.layer.is_some() && rounded(&e));
        let all_producers = self.settings.smooth.producers == Producers::All;
        if self.method.has("smoothquant") && all_producers && self.method.has("smooth-outputs") {
            return Err(Error::usage(
                "`smooth-outputs` would do again what SmoothQuant with all producers does: both divide what the output \
                 projections read",
                "leave `smooth-outputs` out, or say `norms` for SmoothQuant's producers",
            ));
        }
        let first = self.method.steps().first().copied();
        if let (Some(_), Some(step)) = (&self.settings.smooth.maxima, first.filter(|s| *s != "smoothquant")) {
            return Err(Error::usage(
                format!(
                    "maxima of channels from a file are of the model as it is, and `{step}` changes it first"
                ),
                "leave ‹channel_maxima› out, so that they are gathered after that, or put `smoothquant` first",
            ));
        }
        if self.method.has("smoothquant") && !in_blocks {
            return Err(Error::usage(
                format!("method `{}` has no effect: all activations stay float", self.method.name),
                "SmoothQuant makes activations easier to round; take a scheme such as w8a8, or another ‹method›",
            ));
        }
        for entry in self.entries.iter().filter(rounded) {
            let Some((module, scheme)) = entry.quantized() else { continue };
            if module == self.embedding {
                return Err(Error::usage(
                    format!("`{module}` cannot be {scheme}: an embedding multiplies no activations"),
                    "choose a scheme with a16 for it",
                ));
            }
            if entry.layer.is_none() && scheme.has_static_activations() {
                return Err(Error::usage(
                    format!("`{module}` cannot be {scheme}: static activations are found for the blocks"),
                    "choose a scheme without -static for it, or with a16",
                ));
            }
        }
        Ok(())
    }

    /// Fails where a file of channel maxima is not of this model.
    pub(super) fn check_maxima(&self, architecture: &Architecture) -> Result<()> {
        let Some(file) = self.settings.smooth.maxima.as_ref().filter(|_| self.method.has("smoothquant"))
        else {
            return Ok(());
        };
        let rounded = |entry: &PlanEntry| match &entry.action {
            Action::Quantize { node: Some(node), scheme, .. } => {
                (scheme.activations != ActivationScheme::Float).then_some((entry.layer?, *node))
            }
            _ => None,
        };
        let rounded: BTreeSet<(usize, NodeId)> = self.entries.iter().filter_map(rounded).collect();
        (0..architecture.layers).try_for_each(|layer| {
            check_maxima(file, architecture, layer, &self.settings, |node| rounded.contains(&(layer, node)))
        })
    }
}
