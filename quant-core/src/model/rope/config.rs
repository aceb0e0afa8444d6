//! Reads a rotary embedding from a configuration.
//!
//! transformers 5 stores everything in `rope_parameters`, one object for all layers or one per layer type. Earlier
//! versions have separate `rope_theta` and `rope_scaling` keys. Published checkpoints use either form.

use std::sync::Arc;

use super::{LongRope, Rope, RopeLayout, RopeScaling, Yarn};
use crate::Result;
use crate::checkpoint::ConfigFields;

/// The supported types of scaling.
const TYPES: [&str; 7] = ["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"];
/// A longer list means that the configuration is damaged.
const MAX_FACTORS: usize = 1 << 14;

/// A family's defaults for its rotary embedding, and its names for keys.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct RopeRequest<'a> {
    /// Width of a head.
    pub head_dim: usize,
    /// Base of the frequencies.
    pub theta: f64,
    /// The top-level key of the base.
    pub theta_key: &'a str,
    /// The default rotated fraction of a head; `None` if the family only rotates whole heads.
    pub partial: Option<f64>,
    /// The top-level key of the fraction.
    pub partial_key: &'a str,
    /// The pairing of channels.
    pub layout: RopeLayout,
    /// The layer type, in families with a separate rotation per layer type.
    pub layer_type: Option<&'a str>,
    /// Whether `rope_scaling` applies to this layer type too.
    pub is_scaled: bool,
    /// The original training context, in positions, if the family has a default.
    pub original_positions: Option<usize>,
    /// Other names of `longrope` in the family's checkpoints.
    pub longrope_names: &'a [&'a str],
    /// Whether `alpha` next to the type `dynamic` means that the base is scaled by a fixed factor.
    pub has_alpha: bool,
}

impl<'a> RopeRequest<'a> {
    /// Creates a request for whole heads, paired by halves, with one rotation for all layers.
    pub fn new(head_dim: usize, theta: f64) -> Self {
        Self {
            head_dim,
            theta,
            theta_key: "rope_theta",
            partial: None,
            partial_key: "partial_rotary_factor",
            layout: RopeLayout::Halves,
            layer_type: None,
            is_scaled: true,
            original_positions: None,
            longrope_names: &[],
            has_alpha: false,
        }
    }

    /// Reads the rotary embedding that a configuration describes.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) with the field that is missing, malformed, out of range or unsupported.
    pub fn read(&self, config: &ConfigFields<'_>) -> Result<Rope> {
        let parameters = config.optional_object("rope_parameters")?;
        let scaling = config.optional_object("rope_scaling")?;
        let by_type =
            |p: &ConfigFields<'_>| ["full_attention", "sliding_attention"].iter().any(|k| p.get(k).is_some());
        let own = match (&parameters, self.layer_type) {
            (Some(all), Some(kind)) if by_type(all) => all.optional_object(kind)?,
            (Some(all), Some(_)) if !all.map().is_empty() => {
                return Err(config.error("rope_parameters", "must have an entry for each layer type"));
            }
            (_, Some(_)) => None,
            (shared, None) => shared.clone(),
        };
        // If both are present, transformers uses the older key.
        let nested = scaling.as_ref().filter(|_| self.is_scaled).or(own.as_ref());
        if let Some(fields) = nested
            && let Some((kind, _)) = fields.map().iter().find(|(_, value)| value.is_object())
        {
            let kind = kind.escape_default().to_string();
            return Err(fields.error(
                &kind,
                "has its own RoPE parameters, but in this family all blocks have the same RoPE",
            ));
        }
        let reader = Reader { request: self, config, nested };
        let theta = reader.theta(own.as_ref().filter(|_| self.layer_type.is_some()))?;
        let rotary_dim = reader.rotary_dim()?;
        // If there is one set of parameters per layer type, `truncate` is stored next to these sets.
        let truncate = match (&parameters, nested, self.layer_type) {
            (Some(parameters), _, Some(_)) => parameters.optional_bool("truncate")?,
            (_, Some(nested), None) => nested.optional_bool("truncate")?,
            _ => None,
        };
        if let Some(alpha) = reader.alpha()? {
            let exponent = rotary_dim as f64 / (rotary_dim as f64 - 2.0);
            let theta = theta * alpha.powf(exponent);
            return Ok(self.rope(rotary_dim, theta, RopeScaling::None));
        }
        let scaling = reader.scaling(theta, rotary_dim, truncate.unwrap_or(true))?;
        let rotary_dim = match scaling {
            RopeScaling::Proportional { .. } => self.head_dim,
            _ => rotary_dim,
        };
        Ok(self.rope(rotary_dim, theta, scaling))
    }

    fn rope(&self, rotary_dim: usize, theta: f64, scaling: RopeScaling) -> Rope {
        Rope { head_dim: self.head_dim, rotary_dim, layout: self.layout, theta, scaling }
    }
}

struct Reader<'r, 'a, 'c> {
    request: &'r RopeRequest<'r>,
    config: &'a ConfigFields<'c>,
    nested: Option<&'a ConfigFields<'c>>,
}

impl Reader<'_, '_, '_> {
    fn theta(&self, own: Option<&ConfigFields<'_>>) -> Result<f64> {
        let (request, mut theta) = (self.request, None);
        for fields in [self.nested, own].into_iter().flatten() {
            if theta.is_none() {
                theta = fields.optional_f64("rope_theta")?;
            }
        }
        let theta = match theta {
            Some(theta) => theta,
            None => self.config.optional_f64(request.theta_key)?.unwrap_or(request.theta),
        };
        if theta <= 1.0 || !(theta as f32).is_finite() {
            return Err(self.config.error(
                request.theta_key,
                format!("is {theta}; it must be greater than 1 and at most 3.4e38"),
            ));
        }
        Ok(theta)
    }

    fn rotary_dim(&self) -> Result<usize> {
        const KEY: &str = "partial_rotary_factor";
        let (head_dim, request) = (self.request.head_dim, self.request);
        let inner = match self.nested {
            Some(fields) => fields.optional_f64(KEY)?,
            None => None,
        };
        let found = match inner {
            Some(share) => Some(share),
            None => self.config.optional_f64(request.partial_key)?,
        };
        let share = found.or(request.partial).unwrap_or(1.0);
        let dim = (head_dim as f64 * share) as usize;
        if !(share > 0.0 && share <= 1.0) || dim == 0 {
            let reason = format!(
                "is {share} for heads of width {head_dim}; it must be greater than 0 and at \
                most 1, and rotate at least one channel"
            );
            return Err(self.config.error(request.partial_key, reason));
        }
        if request.partial.is_none() && dim != head_dim && self.kind()? != "proportional" {
            let reason = format!("is {share}; this family supports only 1");
            return Err(self.config.error(request.partial_key, reason));
        }
        if !dim.is_multiple_of(2) {
            let reason = format!("implies {dim} of {head_dim} rotated channels; RoPE needs an even number");
            let field = if dim == head_dim { "head_dim" } else { request.partial_key };
            return Err(self.config.error(field, reason));
        }
        Ok(dim)
    }

    /// The type of scaling. Before transformers 4.43 the key was `type`.
    fn kind(&self) -> Result<&str> {
        let Some(fields) = self.nested else { return Ok("default") };
        for key in ["rope_type", "type"] {
            if let Some(kind) = fields.optional_str(key)? {
                return Ok(if self.request.longrope_names.contains(&kind) { "longrope" } else { kind });
            }
        }
        match fields.get("factor") {
            Some(_) => Err(fields.error("rope_type", "is missing, but `factor` is present")),
            None => Ok("default"),
        }
    }

    /// Reads HunYuan's fixed NTK scaling: with `dim` rotated channels, the base is multiplied by
    /// `alpha^(dim / (dim − 2))`, whatever the length.
    fn alpha(&self) -> Result<Option<f64>> {
        let Some(fields) = self.nested.filter(|_| self.request.has_alpha) else { return Ok(None) };
        if self.kind()? != "dynamic" {
            return Ok(None);
        }
        match fields.optional_f64("alpha")?.filter(|alpha| *alpha != 0.0) {
            Some(alpha) if !(1.0..=1e9).contains(&alpha) || self.request.head_dim <= 2 => Err(fields.error(
                "alpha",
                format!("is {alpha}; it must be from 1 to 1e9, and the width of a head greater than 2"),
            )),
            alpha => Ok(alpha),
        }
    }

    /// Reads the original training context.
    fn original_positions(&self, fields: &ConfigFields<'_>) -> Result<usize> {
        const KEY: &str = "original_max_position_embeddings";
        let outer = match self.request.layer_type {
            Some(_) => None,
            None => self.config.optional_positive(KEY)?.or(self.request.original_positions),
        };
        let inner = match outer {
            Some(_) => None,
            None => fields.optional_f64(KEY)?,
        };
        match (outer, inner) {
            (Some(positions), _) => Ok(positions),
            // Some configurations store an integer as a float: 8192.0.
            (None, Some(found)) if (1.0..=f64::from(u32::MAX)).contains(&found) && found.fract() == 0.0 => {
                Ok(found as usize)
            }
            (None, Some(found)) => {
                Err(fields.error(KEY, format!("is {found}; it must be a positive integer below 2^32")))
            }
            (None, None) => self.config.require_positive("max_position_embeddings"),
        }
    }

    fn scaling(&self, theta: f64, dim: usize, truncate: bool) -> Result<RopeScaling> {
        let kind = self.kind()?;
        let Some(fields) = self.nested else { return Ok(RopeScaling::None) };
        let positive = |key: &str| {
            let value = fields.require_f64(key)?;
            if (value as f32).is_normal() && value > 0.0 {
                Ok(value)
            } else {
                Err(fields.error(key, format!("is {value}; it must be positive and in the range of f32")))
            }
        };
        let optional_positive = |key: &str| match fields.optional_f64(key)? {
            Some(_) => positive(key).map(Some),
            None => Ok(None),
        };
        match kind {
            "default" => Ok(RopeScaling::None),
            "linear" => Ok(RopeScaling::Linear { factor: positive("factor")? }),
            "llama3" => {
                let (low, high) = (positive("low_freq_factor")?, positive("high_freq_factor")?);
                if high <= low {
                    return Err(fields.error(
                        "high_freq_factor",
                        format!(
                            "is {high}; it must be greater than \
                            low_freq_factor, which is {low}"
                        ),
                    ));
                }
                let factor = positive("factor")?;
                let original_positions = self.original_positions(fields)? as f64;
                Ok(RopeScaling::Llama3 { factor, low, high, original_positions })
            }
            "dynamic" if dim <= 2 => Err(fields.error(
                "rope_type",
                format!("is `dynamic`, which requires more than {dim} rotated channels"),
            )),
            "dynamic" => {
                let factor = positive("factor")?;
                if factor < 1.0 {
                    return Err(fields.error("factor", format!("is {factor}; it must be at least 1")));
                }
                let positions = self.config.require_positive("max_position_embeddings")?;
                Ok(RopeScaling::Dynamic { factor, positions })
            }
            "yarn" => self.yarn(fields, theta, dim, truncate),
            "longrope" => {
                let original_positions = self.original_positions(fields)?;
                let factor = self.factor(fields, original_positions, false)?;
                let attention_factor = match optional_positive("attention_factor")? {
                    Some(factor) => factor,
                    None if factor <= 1.0 => 1.0,
                    None => (1.0 + factor.ln() / (original_positions as f64).ln()).sqrt(),
                };
                if !(attention_factor as f32).is_normal() {
                    return Err(fields.error(
                        "attention_factor",
                        format!("evaluates to {attention_factor}, which is out of range"),
                    ));
                }
                let factors = |key| factors(fields, key, dim / 2);
                let (short, long) = (factors("short_factor")?, factors("long_factor")?);
                Ok(RopeScaling::LongRope(LongRope { short, long, original_positions, attention_factor }))
            }
            "proportional" => {
                let share = fields.optional_f64("partial_rotary_factor")?.unwrap_or(1.0);
                let pairs = (share * self.request.head_dim as f64 / 2.0) as usize;
                let factor = optional_positive("factor")?.unwrap_or(1.0);
                Ok(RopeScaling::Proportional { factor, pairs })
            }
            other => {
                let key = if fields.get("rope_type").is_some() { "rope_type" } else { "type" };
                Err(fields.unsupported(key, other, &TYPES))
            }
        }
    }

    fn factor(&self, fields: &ConfigFields<'_>, original: usize, required: bool) -> Result<f64> {
        match fields.optional_f64("factor")? {
            Some(factor) if factor > 0.0 && (factor as f32).is_normal() => Ok(factor),
            Some(factor) => {
                Err(fields
                    .error("factor", format!("is {factor}; it must be positive and in the range of f32")))
            }
            None if required && !fields.has("factor") => Err(fields.error("factor", "is missing")),
            None => Ok(self.config.require_positive("max_position_embeddings")? as f64 / original as f64),
        }
    }

    fn yarn(&self, fields: &ConfigFields<'_>, theta: f64, dim: usize, truncate: bool) -> Result<RopeScaling> {
        let original = self.original_positions(fields)?;
        let factor = self.factor(fields, original, true)?;
        // 0 means the default, like `null`.
        let or = |key: &str, default: f64| -> Result<f64> {
            match fields.optional_f64(key)?.filter(|value| *value != 0.0) {
                Some(value) if value > 0.0 && (value as f32).is_normal() => Ok(value),
                Some(value) => {
                    Err(fields.error(key, format!("is {value}; it must be positive and in the range of f32")))
                }
                None => Ok(default),
            }
        };
        let (fast, slow) = (or("beta_fast", 32.0)?, or("beta_slow", 1.0)?);
        let (mscale, all_dim) = (or("mscale", 0.0)?, or("mscale_all_dim", 0.0)?);
        let attention_factor = match fields.optional_f64("attention_factor")? {
            Some(factor) if (factor as f32).is_normal() && factor > 0.0 => factor,
            Some(factor) => {
                return Err(fields.error(
                    "attention_factor",
                    format!("is {factor}; it must be positive and in the range of f32"),
                ));
            }
            None if mscale > 0.0 && all_dim > 0.0 => {
                Yarn::recommended_factor(factor, mscale) / Yarn::recommended_factor(factor, all_dim)
            }
            None => Yarn::recommended_factor(factor, 1.0),
        };
        if !(attention_factor as f32).is_normal() {
            return Err(fields.error(
                "mscale",
                format!("implies an attention factor of {attention_factor}, which is out of range"),
            ));
        }
        let pair = |rotations| Yarn::pair_of(rotations, theta, dim, original as f64);
        let (mut low, mut high) = (pair(fast), pair(slow));
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, high) = (low.max(0.0), high.min(dim as f64 - 1.0));
        let (rotations, original_positions, truncated) = ([fast, slow], original, truncate);
        Ok(RopeScaling::Yarn(Yarn {
            factor,
            low,
            high,
            attention_factor,
            original_positions,
            rotations,
            truncated,
        }))
    }
}

fn factors(fields: &ConfigFields<'_>, key: &str, pairs: usize) -> Result<Arc<[f32]>> {
    let Some(list) = fields.get(key).and_then(serde_json::Value::as_array) else {
        return Err(fields.error(key, "must be present and a list of numbers"));
    };
    if list.len() != pairs || pairs > MAX_FACTORS {
        return Err(fields.error(
            key,
            format!("has {} entries, expected one for each of {pairs} channel pairs", list.len()),
        ));
    }
    let number = |value: &serde_json::Value| {
        let number = value.as_f64().map(|v| v as f32).filter(|v| v.is_normal() && *v > 0.0);
        number.ok_or_else(|| fields.error(key, "contains an entry that is not a positive number"))
    };
    list.iter().map(number).collect()
}
