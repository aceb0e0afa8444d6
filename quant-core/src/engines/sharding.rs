//! Each rank's share of a linear, and the alignment that packing requires of it.

use super::Compatibility::{self, No, Yes};
use super::outline::{FusedLayer, LayerKind, Outline};
use super::{AWQ, COMPRESSED_TENSORS, GPTQ, MODELOPT};
use crate::scheme::{BLOCK, Granularity, LinearScheme};

/// A rank's share of a quantized linear.
#[derive(Debug, Clone)]
pub(super) struct Share<'a> {
    /// The first part's module, for messages.
    pub(super) module: &'a str,
    /// The number of output features of each part.
    pub(super) parts: Vec<usize>,
    /// The number of input features.
    pub(super) k: usize,
    pub(super) split_inputs: bool,
    pub(super) split_outputs: bool,
    /// For a linear of an expert, the hidden size, which experts read and write and which is not split.
    pub(super) expert_width: Option<usize>,
    pub(super) scheme: LinearScheme,
}

impl Share<'_> {
    /// The number of output features of all parts together.
    pub(super) fn n(&self) -> usize {
        self.parts.iter().sum()
    }

    /// The group size; `None` if scales are not per group.
    pub(super) fn group(&self) -> Option<usize> {
        match self.scheme.granularity {
            Granularity::Group(size) => Some(size),
            _ => None,
        }
    }

    /// FP8 and FP4 weights have no zero points.
    fn is_float(&self) -> bool {
        self.scheme.float_format().is_some()
    }

    /// Returns the message `` `module`: what ``.
    pub(super) fn fault(&self, what: impl std::fmt::Display) -> String {
        format!("`{}`: {what}", self.module)
    }
}

/// Returns one rank's shares of all quantized linears.
///
/// # Errors
/// The reason why the heads or a linear cannot be split.
fn shares(outline: &Outline, ranks: usize) -> Result<Vec<Share<'_>>, String> {
    for shape in &outline.attentions {
        let (heads, kv_heads) = (shape.heads(), shape.kv_heads);
        if !heads.is_multiple_of(ranks) {
            return Err(format!("{heads} heads cannot be split across {ranks} ranks"));
        }
        // Engines replicate key-value heads if there are fewer of them than ranks.
        let whole =
            if kv_heads >= ranks { kv_heads.is_multiple_of(ranks) } else { ranks.is_multiple_of(kv_heads) };
        if !whole {
            return Err(format!("{kv_heads} key-value heads cannot be split across {ranks} ranks"));
        }
    }
    let mut shares = Vec::new();
    for layer in &outline.layers {
        let Ok(scheme) = layer.scheme() else { continue };
        let share = share(layer, ranks)?;
        if let (Some((module, parts, k)), Some(scheme)) = (share, scheme) {
            let split_inputs = layer.kind == LayerKind::Row && ranks > 1;
            let split_outputs = !matches!(layer.kind, LayerKind::Row | LayerKind::Whole) && ranks > 1;
            let width = match layer.kind {
                LayerKind::Row => parts.iter().sum(),
                _ => k,
            };
            let expert_width = layer.of_expert.then_some(width);
            shares.push(Share { module, parts, k, split_inputs, split_outputs, expert_width, scheme });
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

/// The error is the reason why scales or packed words cannot be cut at the boundaries of a share.
pub(super) type Rule = fn(&Share<'_>) -> Result<(), String>;

/// The rules of each format, in the order in which they are checked.
pub(super) const SPLITS: &[(&str, &[Rule])] = &[
    (COMPRESSED_TENSORS, &[groups, blocks, words_of_codes, words_of_zeros]),
    (MODELOPT, &[groups, blocks, words_of_codes, words_of_zeros]),
    (AWQ, &[groups, channels_whole, outputs_by_eights]),
    // GPTQ stores zero points even if grids are symmetric.
    (GPTQ, &[groups, words_of_all_zeros, blocks, words_of_codes, words_of_zeros]),
];

/// Checks a share against the rules of its format.
///
/// # Errors
/// The first rule that fails, as a reason.
fn aligned(container: &str, share: &Share<'_>) -> Result<(), String> {
    let of_container = SPLITS.iter().find(|(name, _)| *name == container);
    of_container.map_or(&[][..], |(_, rules)| rules).iter().try_for_each(|rule| rule(share))
}

/// A group must not cross ranks.
fn groups(share: &Share<'_>) -> Result<(), String> {
    let k = share.k;
    let Some(group) = share.group().filter(|group| !k.is_multiple_of(*group)) else { return Ok(()) };
    let fits = [128, 64, 32].into_iter().find(|g| *g < group && k.is_multiple_of(*g));
    let remedy = fits.map(|g| format!("; groups of {g} would work")).unwrap_or_default();
    Err(share.fault(format!("{k} inputs per rank are not a multiple of the group size {group}{remedy}")))
}

/// Engines split the scales by inputs, which is impossible with one scale per channel.
fn channels_whole(share: &Share<'_>) -> Result<(), String> {
    match share.group().is_none() && share.split_inputs {
        true => Err(share.fault("in this format, scales per channel cannot be split across ranks")),
        false => Ok(()),
    }
}

/// Codes are packed along the outputs, eight per word.
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

/// Zero points of asymmetric grids are packed along the outputs, separately for each part.
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

/// Zero points of all grids are packed along the outputs, without gaps.
fn words_of_all_zeros(share: &Share<'_>) -> Result<(), String> {
    let bits = usize::from(share.scheme.bits());
    match share.parts.iter().find(|n| !(*n * bits).is_multiple_of(32)) {
        Some(n) => {
            Err(share.fault(format!("zero points of {n} outputs per rank do not fill whole 32-bit words")))
        }
        None => Ok(()),
    }
}

/// Blocks of 128 × 128 must begin at the boundaries of shares and of the parts of a fused linear.
fn blocks(share: &Share<'_>) -> Result<(), String> {
    if !share.is_float() || share.scheme.granularity != Granularity::Block {
        return Ok(());
    }
    // The last part may end inside a block if outputs are not split.
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

/// Returns the worst verdict of `kernel` for any linear, or `No` if a linear cannot be fused or split.
pub(super) fn linears(
    outline: &Outline,
    ranks: usize,
    kernel: impl Fn(&Share<'_>) -> Compatibility,
) -> Compatibility {
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
    shares.iter().map(of_share).fold(Yes, Compatibility::and)
}
