//! The plan for a checkpoint that is already quantized: all values are kept, only the format changes.

use std::borrow::Cow;

use super::plan::FoldedNodes;
use super::scale_groups::ScaleGroups;
use super::{Action, Method, Plan, PlanEntry};
use crate::calibrate::Sampling;
use crate::checkpoint::{Dtype, TensorInfo};
use crate::format::Container;
use crate::model::{KvScheme, Model};
use crate::round::Nearest;
use crate::transform::TransformSettings;
use crate::{Error, Result};

/// Codes and scales come from the input.
pub static REPACK: Method = Method {
    name: Cow::Borrowed("repack"),
    summary: "writes the same numbers in a different checkpoint format",
    preparation: None,
    transforms: Cow::Borrowed(&[]),
    rounding: &Nearest,
    rounding_keys: &[],
};

impl Plan {
    /// Plans to write a quantized checkpoint in the format `container`, with the same value for every weight.
    ///
    /// If all stored zero points of the input are the midpoint, its grids are symmetric, and are written as such if the
    /// format makes the distinction.
    ///
    /// # Errors
    /// [`Error::Usage`] if no linear is quantized or the format cannot express a grid; errors of the input if its
    /// tensors cannot be read. Whether scales fit the format's dtype is checked only when they are read.
    pub fn repack(model: &Model, container: &'static dyn Container) -> Result<Self> {
        if model.quant_method().is_none() {
            return Err(Error::usage(
                format!("{} is not quantized, so there is nothing to repack", model.path().display()),
                "choose a ‹method› or ‹preset› to quantize it",
            ));
        }
        let mut entries = Vec::new();
        let mut float_modules = Vec::new();
        let symmetric = has_only_default_zero_points(model)?;
        let architecture = model.architecture();
        let embedding = architecture.embedding_module();
        for (layer, module, shape) in model.weight_modules() {
            let Some(stored) = model.stored_scheme(&module) else {
                float_modules.extend((module != embedding).then_some(module));
                continue;
            };
            if model.has_input_order(&module, shape)? {
                return Err(Error::usage(
                    format!(
                        "{} has groups of inputs that are not adjacent in `{module}` (desc_act or actorder), so it \
                         cannot be written in a different format with the same numbers",
                        model.path().display()
                    ),
                    "quantize it again with ‹requantize›",
                ));
            }
            let from = stored.with_symmetry(stored.is_symmetric() || symmetric);
            let scheme = container.restated_scheme(from);
            let mut sources = model.packed_tensors(&module, shape)?;
            for spec in &mut sources {
                spec.info = model.source().require(&spec.name)?.clone();
            }
            let stored_dtype = model.packed_scale_dtype(&module)?;
            // The product of two levels of scales needs more precision than either.
            let flattens = from.is_progressive() && !scheme.is_progressive();
            let stored = if flattens { Dtype::F32 } else { stored_dtype };
            // Floating-point formats with the same kind of scales keep the dtype of their scales.
            let scale_dtype = match scheme.float_format() {
                Some(_) if scheme.fixed_scales() == from.fixed_scales() => stored_dtype,
                _ => container.scale_dtype(scheme, stored),
            };
            let outputs = container.layout(&module, shape, scheme, scale_dtype).map_err(unfit)?;
            entries.push(PlanEntry {
                modified: false,
                by_columns: false,
                tensor: format!("{module}.weight"),
                stored: sources.first().map(|s| s.name.clone()).unwrap_or_default(),
                layer,
                info: TensorInfo { dtype: stored_dtype, shape: shape.to_vec() },
                action: Action::Repack { module, from, scheme, scale_dtype, sources },
                outputs,
                cache: Vec::new(),
            });
        }
        if entries.is_empty() {
            return Err(Error::usage(
                format!("{} has no quantized linears, so there is nothing to repack", model.path().display()),
                "quantize it with ‹requantize›",
            ));
        }
        if architecture.tied {
            float_modules.push(architecture.head.clone());
        }
        // Other cache settings are in a configuration key that is copied.
        let fp8_cache = model.kv_scheme().filter(|kv| *kv == KvScheme::Kvf8);
        let plan = Self {
            method: REPACK.clone(),
            container,
            sampling: Sampling::default(),
            settings: TransformSettings { kv: fp8_cache, ..TransformSettings::default() },
            entries,
            blocks: 0..architecture.layers,
            calibrated: None,
            forward: None,
            experts: None,
            grids_sha256: String::new(),
            selectors: Vec::new(),
            float_modules,
            untied_by_preparation: false,
            head: architecture.head.clone(),
            aliases: architecture.aliases(),
            embedding,
            fused: architecture.fused_modules(),
            scale_groups: ScaleGroups::of(architecture),
            step_notes: Vec::new(),
            wrapper: architecture.wrapper.as_ref().map(|wrapper| wrapper.names.clone()),
        };
        plan.container.check(&plan.module_schemes()).map_err(unfit)?;
        let mut plan = plan.complete(model, &FoldedNodes::default())?;
        plan.rename_cache_scales(model).map_err(unfit)?;
        plan.check_names(model)?;
        Ok(plan)
    }
}

/// Changes the remedy of a format's error, because repacking cannot choose grids.
fn unfit(error: Error) -> Error {
    match error {
        Error::Usage { message, .. } => {
            Error::usage(message, "quantize the original float checkpoint for this format")
        }
        other => other,
    }
}

/// Returns whether there are stored zero points, and all of them are the midpoint, as a symmetric grid implies.
fn has_only_default_zero_points(model: &Model) -> Result<bool> {
    let mut any = false;
    for (_, module, shape) in model.weight_modules() {
        let Some(scheme) = model.module_scheme(&module) else { continue };
        let Some(zeros) = model.packed_zeros(&module, shape)? else { continue };
        any = true;
        let zero_point = 1 << (scheme.bits() - 1);
        if zeros.iter().any(|&z| z != zero_point) {
            return Ok(false);
        }
    }
    Ok(any)
}
