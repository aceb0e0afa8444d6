//! Chooses the type of each tensor.

use std::collections::BTreeSet;

use super::{Draft, GgufRequest, PlannedTensor, family_experts};
use crate::blocks::{BlockType, F32, MXFP4, Q4_0, Q8_0, block_type};
use crate::gguf::families::GgufFamily;
use crate::gguf::mixture::{ModelFacts, Role};
use crate::gguf::rows::{Change, RowOrder, Source};
use crate::model::{Architecture, Model};
use crate::recipe::Pattern;
use crate::scheme::{Granularity, WeightFormat};
use crate::{Error, Result};

/// A tensor whose rows do not fit its type.
pub(super) struct Unfit {
    name: String,
    columns: usize,
    wanted: &'static BlockType,
}

impl Unfit {
    /// What the type would be replaced by, if anything.
    pub(super) fn fallback(&self) -> Option<String> {
        fitting(self.wanted, self.columns).map(|kind| format!("{} for {}", kind.name, self.wanted.name))
    }
}

impl std::fmt::Display for Unfit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, columns, wanted } = self;
        let (kind, size) = (wanted.name, wanted.elements);
        write!(f, "{name}: the row width {columns} is not a multiple of the block size of {kind}, {size}")
    }
}

/// The type, or the first of its fallback types that rows of this width fit.
fn fitting(wanted: &'static BlockType, columns: usize) -> Option<&'static BlockType> {
    let mut kinds = std::iter::successors(Some(wanted), |kind| kind.fallback);
    kinds.find(|kind| kind.row_bytes(columns).is_some())
}

pub(super) struct Types<'a> {
    request: &'a GgufRequest,
    facts: ModelFacts,
    /// Blocks that compute values, which are numbered separately.
    values: BTreeSet<usize>,
    downs: BTreeSet<(usize, String)>,
}

impl<'a> Types<'a> {
    pub(super) fn new(
        a: &Architecture,
        family: &GgufFamily,
        request: &'a GgufRequest,
        drafts: &[Draft],
    ) -> Self {
        let heads_per_key = a.attentions().first().map_or(1, |shape| shape.repeat);
        let experts = (0..a.layers).map(|layer| family_experts(a, layer));
        let makes_values = drafts.iter().filter(|draft| draft.role == Role::Value && draft.is_weight);
        let values: BTreeSet<usize> = makes_values.map(|draft| draft.layer).collect();
        let downs = drafts.iter().filter(|draft| draft.role == Role::Down && draft.is_weight);
        let downs = downs.map(|draft| (draft.layer, draft.name.clone())).collect();
        let facts = ModelFacts {
            layers: a.layers,
            values: values.len(),
            heads_per_key,
            experts: experts.max().unwrap_or(0),
            weighted: request.weighted,
            favours_values: ModelFacts::favours_values(family, a.layers, heads_per_key),
        };
        Self { request, facts, values, downs }
    }

    /// A pattern that matches nothing, or only weights that other patterns take or whose codes are kept, is an error,
    /// because it would have no effect.
    pub(super) fn check_patterns(&self, model: &Model, drafts: &[Draft]) -> Result<()> {
        let weights: Vec<&Draft> = drafts.iter().filter(|d| d.is_weight).collect();
        let ignored = self.request.ignore.iter().map(|pattern| ("ignore", pattern, None));
        let overridden =
            self.request.overrides.iter().map(|(pattern, kind)| ("override", pattern, Some(*kind)));
        for (index, (option, pattern, asked)) in ignored.chain(overridden).enumerate() {
            let matching: Vec<&Draft> =
                weights.iter().copied().filter(|draft| selects(pattern, draft)).collect();
            if matching.is_empty() {
                let names: BTreeSet<&str> = weights.iter().map(|d| d.module.as_str()).collect();
                let names: Vec<&str> = names.into_iter().collect();
                return Err(pattern.matches_nothing(option, &names));
            }
            let decided: Vec<&Draft> =
                matching.into_iter().filter(|draft| self.decisive(draft) == Some(index)).collect();
            if decided.is_empty() {
                return Err(pattern.has_no_effect(option));
            }
            let mut kept = None;
            for draft in &decided {
                match codes(model, draft)? {
                    Some((kind, _)) if asked != Some(kind) => kept = Some(kind.name),
                    _ => {
                        kept = None;
                        break;
                    }
                }
            }
            if let Some(kind) = kept {
                return Err(pattern.keeps_codes(option, kind));
            }
        }
        Ok(())
    }

    /// The tensor with its type, unless its rows do not fit.
    pub(super) fn of(&self, model: &Model, draft: Draft) -> Result<Result<PlannedTensor, Unfit>> {
        let Draft { name, shape, source, .. } = &draft;
        let planned = |kind, replaces, source: &Source| PlannedTensor {
            name: name.clone(),
            shape: shape.clone(),
            kind,
            replaces,
            source: source.clone(),
        };
        if !draft.is_weight {
            return Ok(Ok(planned(&F32, None, source)));
        }
        if let Some((kind, codes)) = codes(model, &draft)? {
            return Ok(Ok(planned(kind, None, &codes)));
        }
        let columns = shape.last().copied().unwrap_or_default();
        let matrices = if shape.len() > 2 { shape[0] } else { 1 };
        let wanted = match self.named(&draft) {
            Some(Some(kind)) => kind,
            Some(None) => as_stored(model, source)?,
            // If the checkpoint is already quantized, float tensors keep their type.
            None if model.quant_method().is_some() && !self.request.mixture.is_of_experts() => {
                as_stored(model, source)?
            }
            None => {
                let place = match draft.role {
                    Role::Value => self.values.range(..draft.layer).count(),
                    Role::Down if self.request.mixture.counts_downs() => {
                        let this = (draft.layer, draft.name.clone());
                        self.downs.range(..this).count()
                    }
                    _ => draft.layer,
                };
                self.request.mixture.of(draft.role, place, [matrices, columns], &self.facts)
            }
        };
        let unfit = Unfit { name: name.clone(), columns, wanted };
        let Some(kind) =
            fitting(wanted, columns).filter(|kind| *kind == wanted || self.request.allow_fallback)
        else {
            return Ok(Err(unfit));
        };
        let outside = matches!(draft.role, Role::Head | Role::Embedding);
        if kind.needs_importance && !self.request.weighted && !outside {
            return Err(Error::usage(
                format!("the type {} of `{name}` needs an importance matrix", kind.name),
                "set ‹calibration› or ‹imatrix›, or choose a larger type",
            ));
        }
        Ok(Ok(planned(kind, (kind != wanted).then_some(wanted), source)))
    }

    /// The type requested by name; `Some(None)` if the tensor stays as stored.
    fn named(&self, draft: &Draft) -> Option<Option<&'static BlockType>> {
        let overridden = self.decisive(draft)?.checked_sub(self.request.ignore.len());
        Some(overridden.map(|index| self.request.overrides[index].1))
    }

    /// The index of the pattern that decides about a tensor: the first of `ignore`, otherwise the last override, which
    /// are counted after the patterns of `ignore`.
    fn decisive(&self, draft: &Draft) -> Option<usize> {
        let GgufRequest { ignore, overrides, .. } = self.request;
        let ignored = ignore.iter().position(|pattern| selects(pattern, draft));
        let overridden = || overrides.iter().rposition(|(pattern, _)| selects(pattern, draft));
        ignored.or_else(|| overridden().map(|index| index + ignore.len()))
    }
}

/// Whether a pattern matches a tensor, by its name in the checkpoint or in the file.
fn selects(pattern: &Pattern, draft: &Draft) -> bool {
    let stored = draft.name.strip_suffix(".weight").unwrap_or(&draft.name);
    pattern.matches(&draft.module) || pattern.matches(stored)
}

fn as_stored(model: &Model, source: &Source) -> Result<&'static BlockType> {
    let Source::Stored { tensors, .. } = source else { return Ok(&F32) };
    let Some(tensor) = tensors.first() else { return Ok(&F32) };
    let dtype = model.source().require(tensor)?.dtype;
    Ok(block_type(dtype.name()).unwrap_or(&F32))
}

fn codes(model: &Model, draft: &Draft) -> Result<Option<(&'static BlockType, Source)>> {
    let Source::Stored { tensors, view } = &draft.source else { return Ok(None) };
    let order = &view.order;
    if tensors.iter().all(|tensor| model.source().is_mxfp4(tensor)) {
        return Ok(Some((&MXFP4, Source::Blocks { tensors: tensors.clone() })));
    }
    let modules: Vec<String> =
        tensors.iter().map(|t| t.strip_suffix(".weight").unwrap_or(t).to_owned()).collect();
    let mut kind = None;
    for module in &modules {
        let Some(scheme) = model.module_scheme(module) else { return Ok(None) };
        let refuse = |reason: String| Error::NotRepackable {
            path: model.path().to_owned(),
            module: module.clone(),
            reason,
        };
        let size = match scheme.granularity {
            Granularity::Group(size) => size,
            _ => draft.shape.last().copied().unwrap_or_default(),
        };
        let found = match scheme.weight {
            WeightFormat::Int { bits: 4, .. } => &Q4_0,
            WeightFormat::Int { bits: 8, .. } => &Q8_0,
            _ => {
                return Err(refuse(format!(
                    "no GGUF type can store {scheme}; Q4_0 and Q8_0 store 4-bit and 8-bit integers"
                )));
            }
        };
        let is_whole = matches!(order, RowOrder::AsStored | RowOrder::Paired { .. } | RowOrder::Tiled { .. });
        if view.change != Change::None || view.columns != RowOrder::AsStored || !is_whole {
            let reason = "the file does not have its rows as they are: they are multiplied by factors, split over \
                several tensors, or have a different order of columns";
            return Err(refuse(reason.into()));
        }
        if size == 0 || !size.is_multiple_of(32) || scheme.is_progressive() {
            return Err(refuse(match scheme.is_progressive() {
                true => format!("no GGUF type can store {scheme}, because its scales are progressive"),
                false => {
                    format!("no GGUF type can store {scheme}: groups of {size} are not a multiple of 32")
                }
            }));
        }
        if kind.is_some_and(|known: &BlockType| known != found) {
            return Err(refuse("the experts of one tensor have different schemes".into()));
        }
        kind = Some(found);
    }
    Ok(kind.map(|kind| (kind, Source::Codes { modules, order: *order })))
}
