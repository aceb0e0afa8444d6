//! Summaries of a plan.

use super::{Action, Plan, PlanEntry};
use crate::checkpoint::TensorSpec;
use crate::format::ModuleSchemes;
use crate::model::{BlockGraph, ExpertOrder, KvScheme};
use crate::recipe::PassPlan;
use crate::transform::Transform;

impl Plan {
    /// Every tensor that will be written, in order.
    pub fn outputs(&self) -> Vec<TensorSpec> {
        self.entries.iter().flat_map(|e| e.outputs.iter().cloned()).collect()
    }

    /// The size of all input tensors in bytes.
    pub fn input_bytes(&self) -> u64 {
        // A head that the preparation unties from the embedding is not a tensor of the input.
        let virtual_head =
            |e: &&PlanEntry| self.untied_by_preparation && e.stored == format!("{}.weight", self.head);
        let sources = self.entries.iter().filter(|e| !virtual_head(e)).flat_map(PlanEntry::sources);
        sources.collect::<std::collections::BTreeMap<_, _>>().values().sum()
    }

    /// The size of all tensors that will be written, in bytes.
    pub fn output_bytes(&self) -> u64 {
        self.entries.iter().map(PlanEntry::output_bytes).sum()
    }

    /// The average number of bits per quantized weight, including scales and zero points.
    pub fn bits_per_quantized_weight(&self) -> f64 {
        let quantized = || self.entries.iter().filter(|e| e.quantized().is_some());
        let weights: usize = quantized().map(|e| e.info.elements()).sum();
        let bytes: u64 = quantized().map(PlanEntry::output_bytes).sum();
        bytes as f64 * 8.0 / weights.max(1) as f64
    }

    /// The schemes of all modules, as needed for a format's configuration.
    pub fn module_schemes(&self) -> ModuleSchemes<'_> {
        let stored = |(module, scheme)| (module, self.container.stored_scheme(scheme));
        let quantized = || self.entries.iter().filter_map(PlanEntry::quantized).map(stored);
        let mut float_dtypes = Vec::new();
        for entry in self.entries.iter().filter(|e| e.quantized().is_none()) {
            float_dtypes.extend(Some(entry.info.dtype).filter(|dtype| !float_dtypes.contains(dtype)));
        }
        let aliases = self.aliases.iter().filter(|(module, _)| self.float_modules.contains(module));
        ModuleSchemes {
            quantized: quantized().filter(|(module, _)| *module != self.embedding).collect(),
            float: self
                .float_modules
                .iter()
                .map(String::as_str)
                .chain(aliases.map(|(_, alias)| alias.as_str()))
                .collect(),
            fused: &self.fused,
            head: self.quantizes(&self.head).then_some(self.head.as_str()),
            embedding: quantized().find(|(module, _)| *module == self.embedding).map(|(_, scheme)| scheme),
            shapes: self.entries.iter().filter_map(PlanEntry::quantized_shape).collect(),
            fp8_cache: self.settings.kv == Some(KvScheme::Kvf8),
            float_dtypes,
            wrapper: self.wrapper.as_ref(),
        }
    }

    /// The properties of the schemes that the format loses, without duplicates.
    pub fn losses(&self) -> Vec<String> {
        let mut losses: Vec<String> = Vec::new();
        for entry in &self.entries {
            let (Action::Quantize { scheme, scale_dtype, .. }
            | Action::Repack { from: scheme, scale_dtype, .. }) = &entry.action
            else {
                continue;
            };
            let new = self.container.loses(*scheme, *scale_dtype);
            losses.extend(new.into_iter().filter(|loss| !losses.contains(loss)).collect::<Vec<_>>());
        }
        losses
    }

    /// The linears, including this one, for which engines use one common tensor scale; `None` if this linear has its
    /// own.
    pub(crate) fn shares_scale_with(&self, module: &str) -> Option<&[String]> {
        self.scale_groups.with(module)
    }

    pub(super) fn quantizes(&self, module: &str) -> bool {
        self.entries.iter().any(|e| e.quantized().is_some_and(|(quantized, _)| quantized == module))
    }

    /// Whether the output must not tie the head to the embedding: the preparation unties it, or it is quantized.
    pub fn unties_head(&self) -> bool {
        self.untied_by_preparation || self.quantizes(&self.head)
    }

    /// Whether the source is quantized, and is written in another format with the same values.
    pub fn is_repacked(&self) -> bool {
        self.entries.iter().any(|entry| matches!(entry.action, Action::Repack { .. }))
    }

    /// Whether the decoder is part of a larger model.
    pub fn is_wrapped(&self) -> bool {
        self.wrapper.is_some()
    }

    /// The names of the steps before rounding, in order.
    pub fn steps(&self) -> Vec<&'static str> {
        self.method.steps()
    }

    pub(crate) fn transforms(&self) -> Vec<&'static dyn Transform> {
        self.method.transforms.to_vec()
    }

    /// Whether the experts of a block with this graph can be processed one at a time while the block is searched and
    /// rounded, with the same result.
    pub(crate) fn takes_experts_apart(&self, graph: &BlockGraph) -> bool {
        let (transforms, rounding) = (self.transforms(), self.method.rounding);
        let is_staged = rounding.inputs(&self.settings).is_some();
        (!is_staged || rounding.takes_experts_apart(&self.settings))
            && transforms.iter().all(|t| t.takes_experts_apart(graph, &self.settings))
            && PassPlan::new(self, false).cache.is_none()
            && ExpertOrder::of(graph).is_some()
    }

    /// Notes for the user: what the steps of the method leave unchanged, and engines that cannot load the result.
    pub fn warnings(&self) -> Vec<String> {
        let of_format = self.container.warnings(&self.module_schemes());
        self.step_notes.iter().cloned().chain(of_format).collect()
    }

    /// Notes on parts of the model that the steps of the method leave unchanged, with the reasons.
    pub fn step_notes(&self) -> &[String] {
        &self.step_notes
    }
}
