//! Weights and activations of a group of a `quantization_config`, read strictly.

use serde_json::{Value, json};

use super::layout::Storage;
use super::object::Object;
use super::{E4M3_SCALES, E8M0_SCALES, MIXED};
use crate::scheme::{
    ActivationScheme, BLOCK, FloatFormat, Granularity, LinearScheme, MX_GROUP, NV_GROUP, ScaleFormat,
    WeightFormat,
};

/// The `format` of a configuration or one of its groups; `None` if the groups have their own.
pub(super) fn storage(of: &Object<'_>, may_be_mixed: bool) -> Result<Option<Storage>, String> {
    match of.get("format").and_then(Value::as_str) {
        Some(MIXED) if may_be_mixed => Ok(None),
        // FP8 weights with float activations.
        Some("naive-quantized") => Ok(Some(Storage::Float)),
        Some(name) => match Storage::ALL.into_iter().find(|s| s.name() == name) {
            Some(storage) => Ok(Some(storage)),
            None => {
                let known: Vec<_> = Storage::ALL.iter().map(|s| s.name()).collect();
                Err(of.refuse("format", &format!("is \"{name}\"; supported values: {}", known.join(", "))))
            }
        },
        None => of.require("format", Storage::Packed.name()).map(|()| None),
    }
}

/// The activations of a group.
pub(super) struct Activations {
    pub(super) scheme: ActivationScheme,
    /// What the group describes, if this version leaves the activations float instead.
    pub(super) left_float: Option<&'static str>,
}

/// The `input_activations` of a group whose weights have the scheme `weights`. Next to weights in MXFP4, activations that
/// are quantized when the model runs stay float, as in engines without kernels for both.
pub(super) fn activations(group: &Object<'_>, weights: LinearScheme) -> Result<Activations, String> {
    let follow = |scheme| Ok(Activations { scheme, left_float: None });
    if group.get("input_activations").is_none() {
        return follow(ActivationScheme::Float);
    }
    let input = group.object("input_activations")?;
    input.allow_only(QUANTIZATION_ARGUMENTS)?;
    let has_mxfp4_weights = weights.float_format() == Some(FloatFormat::E2m1)
        && weights.fixed_scales() == Some(ScaleFormat::E8m0);
    let left_float = match input.get("type").and_then(Value::as_str) {
        Some("float") if is_mxfp4(&input) => match has_mxfp4_weights {
            true => "MXFP4 (4 bits, one scale per token and 32 inputs)",
            false => return Err(input.refuse("num_bits", "is 4, but the weights are not in MXFP4")),
        },
        Some("float") => match (float_activations(&input)?, has_mxfp4_weights) {
            (ActivationScheme::Fp8Token, true) => "FP8 (one scale per token)",
            (ActivationScheme::Fp8Group, true) => "FP8 (one scale per token and 128 inputs)",
            (ActivationScheme::Mxfp8, true) => "MXFP8 (8 bits, one scale per token and 32 inputs)",
            (scheme, _) => return follow(scheme),
        },
        _ => return follow(int_activations(&input)?),
    };
    Ok(Activations { scheme: ActivationScheme::Float, left_float: Some(left_float) })
}

/// Whether activations are E2M1 with a power of two per 32 inputs.
fn is_mxfp4(input: &Object<'_>) -> bool {
    let described = [
        ("num_bits", json!(4)),
        ("strategy", json!("group")),
        ("group_size", json!(MX_GROUP)),
        ("dynamic", json!(true)),
        ("scale_dtype", json!(E8M0_SCALES)),
    ];
    described.iter().all(|(key, value)| input.get(key) == Some(value))
        && input.get("symmetric").is_none_or(|symmetric| *symmetric == Value::Bool(true))
        && ["block_structure", "actorder"].iter().all(|key| input.get(key).is_none())
}

fn int_activations(input: &Object<'_>) -> Result<ActivationScheme, String> {
    if input.get("type").is_some() {
        input.require("type", "int")?;
    }
    if input.get("num_bits").and_then(Value::as_u64) != Some(8) {
        return Err(input.refuse("num_bits", "must be 8"));
    }
    for key in ["group_size", "block_structure", "actorder"] {
        input.require_absent(key)?;
    }
    let flag = |key, default| match input.get(key) {
        None => Ok(default),
        Some(value) => value.as_bool().ok_or_else(|| input.refuse(key, "must be true or false")),
    };
    let (symmetric, dynamic) = (flag("symmetric", true)?, flag("dynamic", false)?);
    match (input.get("strategy").and_then(Value::as_str), dynamic, symmetric) {
        (Some("token"), true, true) => Ok(ActivationScheme::Token),
        (Some("tensor"), false, symmetric) => Ok(ActivationScheme::Static { symmetric }),
        _ => Err(input.refuse("strategy", "must be token (dynamic and symmetric) or tensor (static)")),
    }
}

/// Whether keys and values are FP8 with static scales; `false` if they stay float.
pub(super) fn fp8_cache(root: &Object<'_>) -> Result<bool, String> {
    if root.get("kv_cache_scheme").is_none() {
        return Ok(false);
    }
    let scheme = root.object("kv_cache_scheme")?;
    scheme.allow_only(QUANTIZATION_ARGUMENTS)?;
    scheme.require("type", "float")?;
    scheme.require("strategy", "tensor")?;
    match float_activations(&scheme)? {
        ActivationScheme::Fp8Static => Ok(true),
        _ => Err(scheme.refuse("strategy", "and the keys next to it must describe FP8 with static scales")),
    }
}

fn float_activations(input: &Object<'_>) -> Result<ActivationScheme, String> {
    for key in ["block_structure", "actorder"] {
        input.require_absent(key)?;
    }
    if input.get("symmetric").is_some_and(|symmetric| *symmetric != Value::Bool(true)) {
        return Err(input.refuse("symmetric", "must be true for floating-point types"));
    }
    let text = |key| input.get(key).and_then(Value::as_str);
    let number = |key| input.get(key).and_then(Value::as_u64);
    let (scales, local) = (text("scale_dtype"), text("dynamic") == Some("local"));
    let dynamic = input.get("dynamic").and_then(Value::as_bool);
    match (number("num_bits"), text("strategy"), number("group_size"), dynamic) {
        (Some(8), Some("token"), None, Some(true)) => Ok(ActivationScheme::Fp8Token),
        (Some(8), Some("tensor"), None, None | Some(false)) if !local => Ok(ActivationScheme::Fp8Static),
        (Some(8), Some("group"), Some(128), Some(true)) => Ok(ActivationScheme::Fp8Group),
        (Some(8), Some("group"), Some(32), Some(true)) if scales == Some(E8M0_SCALES) => {
            Ok(ActivationScheme::Mxfp8)
        }
        (Some(4), Some("tensor_group"), Some(16), None)
            if local && scales.is_none_or(|s| s == E4M3_SCALES) =>
        {
            Ok(ActivationScheme::Nvfp4)
        }
        _ => Err(input.refuse(
            "strategy",
            "and the keys next to it must describe FP8 (per token, per tensor or per 128 inputs), MXFP8, \
            NVFP4, or MXFP4 next to weights in MXFP4",
        )),
    }
}

pub(super) fn kind_of(scheme: LinearScheme) -> &'static str {
    if scheme.float_format().is_some() { "float" } else { "int" }
}

const QUANTIZATION_ARGUMENTS: &[&str] = &[
    "num_bits",
    "type",
    "symmetric",
    "strategy",
    "group_size",
    "block_structure",
    "dynamic",
    "actorder",
    "observer",
    "observer_kwargs",
    "scale_dtype",
    "zp_dtype",
];

/// Whether a `weights` object describes groups of columns that are not adjacent, which need an index of every column's
/// group. Static ordering (`static`, `weight`) keeps adjacent columns together.
pub(super) fn has_group_index(weights: &Object<'_>) -> Result<bool, String> {
    match weights.get("actorder") {
        None | Some(Value::Bool(false)) => Ok(false),
        Some(Value::Bool(true)) => Ok(true),
        Some(order) => match order.as_str() {
            Some("static" | "weight") => Ok(false),
            Some("group" | "dynamic") => Ok(true),
            _ => Err(weights.refuse("actorder", "must be group, dynamic, static or weight")),
        },
    }
}

/// The scheme of a `weights` object, without the activations, which are specified next to it.
pub(super) fn scheme(weights: &Object<'_>) -> Result<LinearScheme, String> {
    weights.allow_only(QUANTIZATION_ARGUMENTS)?;
    let bits = weights
        .get("num_bits")
        .and_then(Value::as_u64)
        .and_then(|b| u8::try_from(b).ok())
        .filter(|b| (2..=8).contains(b))
        .ok_or_else(|| weights.refuse("num_bits", "must be an integer from 2 to 8"))?;
    let is_float = match weights.get("type").map(Value::as_str) {
        None | Some(Some("int")) => false,
        Some(Some("float")) => true,
        Some(_) => return Err(weights.refuse("type", "must be int or float")),
    };
    let flag = |key, default| match weights.get(key) {
        None => Ok(default),
        Some(value) => value.as_bool().ok_or_else(|| weights.refuse(key, "must be true or false")),
    };
    let symmetric = flag("symmetric", true)?;
    if flag("dynamic", false)? {
        return Err(weights.refuse("dynamic", "is true, but weights must have stored scales"));
    }
    has_group_index(weights)?;
    let group_size = match weights.get("group_size") {
        None => None,
        Some(value) => {
            let size = value.as_i64().ok_or_else(|| weights.refuse("group_size", "is not an integer"))?;
            (size != -1).then_some(size)
        }
    };
    let positive = group_size.and_then(|g| usize::try_from(g).ok()).filter(|g| *g > 0);
    let strategy = match weights.get("strategy") {
        Some(value) => value.as_str().ok_or_else(|| weights.refuse("strategy", "is not a string"))?,
        // The defaults of the reference implementation.
        None if group_size.is_some() => "group",
        None if weights.get("group_size").is_some() => "channel",
        None => "tensor",
    };
    let block = weights.get("block_structure");
    if strategy != "block" {
        weights.require_absent("block_structure")?;
    }
    let granularity = match (strategy, group_size, positive) {
        ("tensor", None, _) if is_float => Granularity::Tensor,
        ("block", None, _) if is_float => match block {
            // Old versions write the string `128x128`.
            Some(size) if *size == json!([BLOCK, BLOCK]) || *size == json!("128x128") => Granularity::Block,
            _ => return Err(weights.refuse("block_structure", "must be [128, 128]")),
        },
        ("tensor_group", _, Some(NV_GROUP)) if is_float && bits == 4 => Granularity::Group(NV_GROUP),
        ("group", _, Some(size)) => Granularity::Group(size),
        ("group", ..) => return Err(weights.refuse("group_size", "must be positive")),
        ("channel", None, _) => Granularity::Channel,
        ("channel", ..) => {
            return Err(weights.refuse("group_size", "must be absent or -1, because `strategy` is channel"));
        }
        ("tensor" | "block", ..) if is_float => {
            let reason = format!("must be absent or -1, because `strategy` is {strategy}");
            return Err(weights.refuse("group_size", &reason));
        }
        ("tensor_group", ..) if is_float => {
            return Err(
                weights.refuse("strategy", "can be tensor_group only with `num_bits` 4 and `group_size` 16")
            );
        }
        (other, ..) => {
            let known =
                if is_float { "tensor, channel, block, group and tensor_group" } else { "group and channel" };
            return Err(weights.refuse("strategy", &format!("is {other}; supported values: {known}")));
        }
    };
    if !is_float {
        return Ok(LinearScheme::weight_only(WeightFormat::int(bits, symmetric), granularity));
    }
    let format = match bits {
        8 => FloatFormat::E4m3,
        4 => FloatFormat::E2m1,
        _ => return Err(weights.refuse("num_bits", "must be 8 or 4 for floating-point types")),
    };
    if !symmetric {
        return Err(weights.refuse("symmetric", "must be true for floating-point types"));
    }
    if format == FloatFormat::E2m1
        && granularity == Granularity::Group(NV_GROUP)
        && strategy != "tensor_group"
    {
        return Err(weights.refuse("strategy", "must be tensor_group for FP4 groups of 16, not group"));
    }
    let scheme = LinearScheme::weight_only(WeightFormat::Float(format), granularity);
    let implied = match scheme.fixed_scales() {
        Some(ScaleFormat::E4m3) => Some(E4M3_SCALES),
        Some(_) => Some(E8M0_SCALES),
        None => None,
    };
    match (weights.get("scale_dtype").and_then(Value::as_str), implied) {
        (Some(stated), Some(implied)) if stated != implied => {
            Err(weights.refuse("scale_dtype", &format!("is {stated}; it must be {implied} for this type")))
        }
        _ => Ok(scheme),
    }
}

/// Before compressed-tensors 0.18, codes whose width does not divide 32 did not straddle words.
pub(super) fn reject_padded_words(root: &Object<'_>) -> Result<(), String> {
    let Some(version) = root.get("version").and_then(Value::as_str) else { return Ok(()) };
    let mut numbers = version.split('.').map(|n| n.parse::<u32>().ok());
    match (numbers.next().flatten(), numbers.next().flatten()) {
        (Some(0), Some(minor)) if minor < 18 => Err(root.refuse(
            "version",
            &format!(
                "is {version}; before 0.18, codes of this width were packed \
                differently, which is not supported"
            ),
        )),
        _ => Ok(()),
    }
}
