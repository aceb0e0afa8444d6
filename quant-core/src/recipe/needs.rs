//! The data that a plan needs in addition to the weights, and checks of steps and activations.

use super::{Action, Plan, PlanEntry};
use crate::model::{Architecture, BlockGraph};
use crate::scheme::{ActivationScheme, LinearScheme};
use crate::transform::StepContext;
use crate::{Error, Result};

impl PlanEntry {
    pub(super) fn has_static_activations(&self) -> bool {
        // Weights that are already quantized come with the scales of their inputs.
        matches!(self.action, Action::Quantize { scheme, .. } if scheme.has_static_activations())
    }
}

impl Plan {
    /// Whether a calibration text is needed.
    pub fn needs_text(&self) -> bool {
        self.method.needs_text(&self.settings) || self.has_static_activations() || self.calibrates_cache()
    }

    /// Whether whole blocks are needed, and not only individual weights.
    pub(crate) fn needs_blocks(&self) -> bool {
        !self.transforms().is_empty() || self.needs_text()
    }

    /// Whether the ranges of linears' inputs are needed.
    pub(crate) fn needs_ranges(&self) -> bool {
        let by_transforms = self.transforms().iter().any(|t| t.needs(&self.settings).ranges);
        by_transforms || self.has_static_activations()
    }

    /// Whether static scales of cached keys and values are computed.
    pub(crate) fn calibrates_cache(&self) -> bool {
        match self.calibrated {
            Some(whole) => whole.cache,
            None => self.entries.iter().any(|entry| !entry.cache.is_empty()),
        }
    }

    pub(super) fn has_static_activations(&self) -> bool {
        match self.calibrated {
            Some(whole) => whole.static_activations,
            None => self.entries.iter().any(PlanEntry::has_static_activations),
        }
    }

    /// Whether any linear of an expert has a static scale for its input.
    pub(super) fn has_static_experts(&self, architecture: &Architecture) -> bool {
        let of_expert = |entry: &PlanEntry| {
            let (layer, node) = entry.layer.zip(entry.node())?;
            architecture.graph(layer).expert_of(node)
        };
        self.entries.iter().any(|entry| entry.has_static_activations() && of_expert(entry).is_some())
    }

    /// Whether any linear has group scales that the setting `scale_search` affects, as NVFP4 has.
    pub(crate) fn searches_scales(&self) -> bool {
        self.entries
            .iter()
            .any(|e| matches!(e.action, Action::Quantize { scheme, .. } if scheme.has_global_scale()))
    }

    pub(super) fn check_experts(&self, architecture: &Architecture) -> Result<()> {
        let has_experts = |graph: &BlockGraph| graph.nodes().iter().any(|n| n.op.selected_expert().is_some());
        let experts = self.sampling.experts;
        match experts.is_routed() || architecture.blocks.kinds().any(|kind| has_experts(kind.graph)) {
            true => Ok(()),
            false => Err(Error::usage(
                "the settings for calibrating experts have no effect: the model has no experts",
                "omit ‹expert_tokens› and ‹expert_floor› (expert_tokens and expert_floor in a recipe)",
            )),
        }
    }

    /// Fails if a step of the method is meaningless for the request.
    pub(super) fn check_steps(&self, architecture: &Architecture) -> Result<()> {
        let rounds = |scheme: LinearScheme| scheme.activations != ActivationScheme::Float;
        let rounded_inputs = self.entries.iter().filter_map(|entry| match &entry.action {
            Action::Quantize { node: Some(node), scheme, .. } if rounds(*scheme) => {
                Some((entry.layer?, *node))
            }
            _ => None,
        });
        let is_rounded = |e: &PlanEntry| e.quantized().is_some_and(|(_, scheme)| rounds(scheme));
        self.method.check_steps(StepContext {
            schemes: self.entries.iter().filter_map(PlanEntry::quantized).map(|(_, scheme)| scheme).collect(),
            rounded_inputs: rounded_inputs.collect(),
            rounds_in_blocks: self.entries.iter().any(|e| e.layer.is_some() && is_rounded(e)),
            calibrates_cache: self.calibrates_cache(),
            ..StepContext::new(architecture, &self.method.name, &self.settings)
        })
    }

    /// Fails if activations would be quantized for a module that does not support it.
    pub(super) fn check_activations(&self, architecture: &Architecture) -> Result<()> {
        let rounded = |e: &&PlanEntry| {
            e.quantized().is_some_and(|(_, scheme)| scheme.activations != ActivationScheme::Float)
        };
        for entry in self.entries.iter().filter(rounded) {
            let Some((module, scheme)) = entry.quantized() else { continue };
            if module == self.embedding {
                return Err(Error::usage(
                    format!("`{module}` does not support {scheme}: an embedding has no input activations"),
                    "choose a scheme with a16 for it",
                ));
            }
            if entry.layer.is_none() && scheme.has_static_activations() {
                return Err(Error::usage(
                    format!(
                        "`{module}` does not support {scheme}: static activation scales are calibrated only \
                        in blocks"
                    ),
                    "choose a scheme without -static or with a16 for it",
                ));
            }
            if scheme.has_static_activations() && architecture.has_multiplied_input(module) {
                return Err(Error::usage(
                    format!(
                        "`{module}` does not support {scheme}: the configuration multiplies its input by a factor, \
                        which a static activation scale would have to contain"
                    ),
                    "choose a scheme with dynamic or float activations for it",
                ));
            }
        }
        Ok(())
    }
}
