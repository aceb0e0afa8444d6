//! What a rank holds of a linear, and what packing asks of it: the rules that engines share.

use super::Verdict::{self, No, Yes};
use super::outline::{FusedLayer, LayerKind, Outline};
use super::{AWQ, COMPRESSED_TENSORS, GPTQ, MODELOPT};
use crate::scheme::{BLOCK, Granularity, LinearScheme};

/// A rank's share of a quantized linear.
#[derive(Debug, Clone)]
pub(super) struct Share<'a> {
    /// The first part's module, for messages.
    pub(super) module: &'a str,
    /// Output features of every part.
    pub(super) parts: Vec<usize>,
    /// Input features.
    pub(super) k: usize,
    /// Whether the inputs are split.
    pub(super) split_inputs: bool,
    /// Whether the outputs are.
    pub(super) split_outputs: bool,
    pub(super) scheme: LinearScheme,
}

impl Share<'_> {
    /// Output features of all parts.
    pub(super) fn n(&self) -> usize {
        self.parts.iter().sum()
    }

    /// The group size; `None` for a scale per channel.
    pub(super) fn group(&self) -> Option<usize> {
        match self.scheme.granularity {
            Granularity::Group(size) => Some(size),
            _ => None,
        }
    }

    /// Whether its weights are floating-point numbers, each in a byte or half of one, without zeros.
    fn is_float(&self) -> bool {
        self.scheme.float_format().is_some()
    }

    /// `` `module`: what ``.
    pub(super) fn fault(&self, what: impl std::fmt::Display) -> String {
        format!("`{}`: {what}", self.module)
    }
}

/// The shares of all quantized linears on so many ranks.
///
/// # Errors
/// Why a linear cannot be split.
fn shares(outline: &Outline, ranks: usize) -> Result<Vec<Share<'_>>, String> {
    for shape in &outline.attentions {
        let (heads, kv_heads) = (shape.heads(), shape.kv_heads);
        if !heads.is_multiple_of(ranks) {
            return Err(format!("{heads} heads cannot be split across {ranks} ranks"));
        }
        // Fewer key heads than ranks are repeated.
        let whole =
            if kv_heads >= ranks { kv_heads.is_multiple_of(ranks) } else { ranks.is_multiple_of(kv_heads) };
        if !whole {
            return Err(format!("{kv_heads} key heads cannot be split across {ranks} ranks"));
        }
    }
    let mut shares = Vec::new();
    for layer in &outline.layers {
        let Ok(scheme) = layer.scheme() else { continue };
        let share = share(layer, ranks)?;
        if let (Some((module, parts, k)), Some(scheme)) = (share, scheme) {
            let split_inputs = layer.kind == LayerKind::Row && ranks > 1;
            let split_outputs = !matches!(layer.kind, LayerKind::Row | LayerKind::Whole) && ranks > 1;
            shares.push(Share { module, parts, k, split_inputs, split_outputs, scheme });
        }
    }
    Ok(shares)
}

type Sizes<'a> = (&'a str, Vec<usize>, usize);

fn share(layer: &FusedLayer, ranks: usize) -> Result<Option<Sizes<'_>>, String> {
    let Some(first) = layer.parts.first() else { return Ok(None) };
    let module = first.module.as_str();
    let split = |size: usize, what: &str| match size.is_multiple_of(ranks) {
        true => Ok(size / ranks),
        false => Err(format!("`{module}`: {size} {what} cannot be split across {ranks} ranks")),
    };
    let (parts, k) = match layer.kind {
        LayerKind::Row => (layer.parts.iter().map(|p| p.n).collect(), split(layer.k, "inputs")?),
        LayerKind::Whole => (layer.parts.iter().map(|p| p.n).collect(), layer.k),
        LayerKind::Column => {
            let parts = layer.parts.iter().map(|p| split(p.n, "outputs"));
            (parts.collect::<Result<_, _>>()?, layer.k)
        }
        LayerKind::Attention(head_dim) => {
            let of_part = |n: usize| {
                let heads = n / head_dim.max(1);
                (heads / ranks).max(1) * head_dim
            };
            (layer.parts.iter().map(|p| of_part(p.n)).collect(), layer.k)
        }
    };
    Ok(Some((module, parts, k)))
}

/// A rule for what a share must hold for its scales and packed words to begin where a rank's do; the error is the reason
/// why they do not.
pub(super) type Rule = fn(&Share<'_>) -> Result<(), String>;

/// What a container asks of a split: the first rule that a share breaks is the reason against it.
pub(super) const SPLITS: &[(&str, &[Rule])] = &[
    (COMPRESSED_TENSORS, &[groups, blocks, words_of_codes, words_of_zeros]),
    (MODELOPT, &[groups, blocks, words_of_codes, words_of_zeros]),
    (AWQ, &[groups, channels_whole, outputs_by_eights]),
    // Zeros are stored even where grids are symmetric.
    (GPTQ, &[groups, words_of_all_zeros, blocks, words_of_codes, words_of_zeros]),
];

/// Whether scales and packed words of a share begin where a rank's do.
///
/// # Errors
/// The reason why not.
fn aligned(container: &str, share: &Share<'_>) -> Result<(), String> {
    let of_container = SPLITS.iter().find(|(name, _)| *name == container);
    of_container.map_or(&[][..], |(_, rules)| rules).iter().try_for_each(|rule| rule(share))
}

/// Groups do not cross ranks.
fn groups(share: &Share<'_>) -> Result<(), String> {
    let k = share.k;
    let Some(group) = share.group().filter(|group| !k.is_multiple_of(*group)) else { return Ok(()) };
    let fits = [128, 64, 32].into_iter().find(|g| *g < group && k.is_multiple_of(*g));
    let remedy = fits.map(|g| format!("; groups of {g} would work")).unwrap_or_default();
    Err(share.fault(format!("{k} inputs per rank are not a multiple of the group size {group}{remedy}")))
}

/// A reader that splits scales by inputs has no share of one scale per channel.
fn channels_whole(share: &Share<'_>) -> Result<(), String> {
    match share.group().is_none() && share.split_inputs {
        true => Err(share.fault("in this format, a scale per channel cannot be split across ranks")),
        false => Ok(()),
    }
}

/// Codes are packed along the outputs, eight in a word.
fn outputs_by_eights(share: &Share<'_>) -> Result<(), String> {
    match share.parts.iter().find(|n| !n.is_multiple_of(8)) {
        Some(n) => Err(share.fault(format!("{n} outputs per rank are not a multiple of 8"))),
        None => Ok(()),
    }
}

/// Codes are packed along the inputs.
fn words_of_codes(share: &Share<'_>) -> Result<(), String> {
    let (k, bits) = (share.k, usize::from(share.scheme.bits()));
    match !share.is_float() && share.split_inputs && !(k * bits).is_multiple_of(32) {
        true => Err(share.fault(format!("{k} codes of {bits} bits per rank do not fill whole 32-bit words"))),
        false => Ok(()),
    }
}

/// Zeros are packed along the outputs, each part's own, where a grid has any.
fn words_of_zeros(share: &Share<'_>) -> Result<(), String> {
    let bits = usize::from(share.scheme.bits());
    let along = if bits.is_power_of_two() { 32 / bits } else { 32 };
    let has_zeros = !share.is_float() && !share.scheme.is_symmetric();
    match share.parts.iter().find(|n| has_zeros && !n.is_multiple_of(along)) {
        Some(n) => {
            Err(share.fault(format!("zero points of {n} outputs per rank do not fill whole 32-bit words")))
        }
        None => Ok(()),
    }
}

/// The same where every grid has zeros, packed without gaps.
fn words_of_all_zeros(share: &Share<'_>) -> Result<(), String> {
    let bits = usize::from(share.scheme.bits());
    match share.parts.iter().find(|n| !(*n * bits).is_multiple_of(32)) {
        Some(n) => {
            Err(share.fault(format!("zero points of {n} outputs per rank do not fill whole 32-bit words")))
        }
        None => Ok(()),
    }
}

/// Whether blocks of 128 × 128 begin where a rank's share and the parts of a fused linear do.
fn blocks(share: &Share<'_>) -> Result<(), String> {
    if !share.is_float() || share.scheme.granularity != Granularity::Block {
        return Ok(());
    }
    // What comes last may end inside a block, where it is not cut.
    let ends = share.parts.len() - usize::from(!share.split_outputs);
    if let Some(n) = share.parts[..ends].iter().find(|n| !n.is_multiple_of(BLOCK)) {
        return Err(share.fault(format!("{n} outputs per rank are not a multiple of the block size {BLOCK}")));
    }
    match share.split_inputs && !share.k.is_multiple_of(BLOCK) {
        true => {
            Err(share
                .fault(format!("{} inputs per rank are not a multiple of the block size {BLOCK}", share.k)))
        }
        false => Ok(()),
    }
}

/// The worst that a kernel says of any linear, once all can be loaded and split.
pub(super) fn linears(outline: &Outline, ranks: usize, kernel: impl Fn(&Share<'_>) -> Verdict) -> Verdict {
    for layer in &outline.layers {
        if let Err((one, other)) = layer.scheme() {
            return No(format!(
                "`{one}` and `{other}` are fused into one linear, but have different schemes"
            ));
        }
    }
    let shares = match shares(outline, ranks) {
        Ok(shares) => shares,
        Err(reason) => return No(reason),
    };
    let of_share = |share: &Share<'_>| match aligned(outline.container, share) {
        Ok(()) => kernel(share),
        Err(reason) => No(reason),
    };
    shares.iter().map(of_share).fold(Yes, Verdict::and)
}
