//! The settings of runs that write a GGUF file.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::misplaced::explained;
use super::settings::{Given, RecipeSettings, set_twice};
use crate::blocks::{BLOCK_TYPES, BlockSearch, BlockType, block_type, unread_type};
use crate::calibrate::{Packing, Sampling};
use crate::gguf::{self, GgufRequest, MIXTURES, Mixture};
use crate::model::Preparation;
use crate::names::unknown;
use crate::recipe::{Extensions, METHODS, Method, Pattern, no_key, step_of};
use crate::round::{self, BlockRounding, Rounding};
use crate::scheme::LinearScheme;
use crate::transform::TransformSettings;
use crate::{Error, Result};

const DEFAULT_MIXTURE: &str = "Q4_K_M";

/// Settings that apply only to GGUF files.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GgufSettings {
    /// The pre-tokenizer, as llama.cpp names it; `none` writes a file without a vocabulary.
    pub pre: Option<String>,
    /// Whether tensors whose rows do not fit their type may get a fallback type.
    pub allow_fallback: bool,
    /// Whether scales are searched as by `llama-quantize`, with byte-identical results.
    pub reference_search: bool,
    /// An importance matrix (GGUF or .dat) that weights errors.
    pub imatrix: Option<PathBuf>,
    /// Where to write the gathered importance matrix: in the older format if it ends in `.dat`, otherwise as GGUF.
    pub save_imatrix: Option<PathBuf>,
    /// The size of the tensors in bytes above which the model is split into several files.
    pub split_max_size: Option<u64>,
}

impl GgufSettings {
    fn given(&self) -> [(&'static str, bool); 6] {
        [
            ("pre", self.pre.is_some()),
            ("allow_fallback", self.allow_fallback),
            ("reference_search", self.reference_search),
            ("imatrix", self.imatrix.is_some()),
            ("save_imatrix", self.save_imatrix.is_some()),
            ("split_max_size", self.split_max_size.is_some()),
        ]
    }

    /// Fails if a GGUF setting is given but no GGUF file is written.
    ///
    /// # Errors
    /// [`Error::Usage`] that names the setting.
    pub fn refuse(&self) -> Result<()> {
        match self.given().into_iter().find(|(_, given)| *given) {
            Some((option, _)) => Err(Error::usage(
                format!("‹{option}› has no effect: it applies only to GGUF files"),
                "add ‹format=gguf›, or leave it out",
            )),
            None => Ok(()),
        }
    }
}

impl RecipeSettings {
    /// Returns whether a GGUF file is written.
    ///
    /// # Errors
    /// [`Error::Usage`] when other formats are named too.
    pub fn writes_gguf(&self) -> Result<bool> {
        let named = self.format.iter().any(|format| format.eq_ignore_ascii_case(gguf::FORMAT));
        if named && self.format.len() > 1 {
            return Err(Error::usage(
                "GGUF cannot be combined with other formats in one run",
                "run once with ‹format=gguf›, and once with the other formats",
            ));
        }
        Ok(named)
    }

    /// Returns the GGUF request, `weighted` by an importance matrix or not.
    ///
    /// # Errors
    /// [`Error::Usage`] for an unknown type, and for settings that apply to other formats.
    pub fn gguf_request(&self, weighted: bool) -> Result<GgufRequest> {
        self.gguf_request_with(weighted, &Extensions::default())
    }

    /// Calls [`gguf_request`](Self::gguf_request) with the methods and steps of a program, which must
    /// [support blocks](crate::transform::Transform::supports_blocks).
    ///
    /// # Errors
    /// See [`gguf_request`](Self::gguf_request).
    pub fn gguf_request_with(&self, weighted: bool, extensions: &Extensions) -> Result<GgufRequest> {
        if let Some(option) = self.not_for_gguf(extensions).first() {
            return Err(Error::usage(
                format!("‹{option}› has no effect with ‹format={}›", gguf::FORMAT),
                "leave it out: ‹scheme› selects the types, and ‹calibration› computes the importance of \
                channels",
            ));
        }
        let overrides = self.overrides.iter().map(|text| {
            let (pattern, kind) = text.rsplit_once('=').ok_or_else(|| {
                Error::usage(
                    format!("override `{text}` has no `=`"),
                    "write ‹override=PATTERN=TYPE›, for example ffn_down=q6_k",
                )
            })?;
            Ok((Pattern::new(pattern)?, kind_of(kind)?))
        });
        self.gguf.pre.as_deref().map_or(Ok(()), gguf::check_pre)?;
        let (method, settings) = self.gguf_method(extensions)?;
        let request = GgufRequest {
            mixture: mixture(self.scheme.as_deref().unwrap_or(DEFAULT_MIXTURE))?,
            is_mixture_given: self.scheme.is_some(),
            overrides: overrides.collect::<Result<_>>()?,
            ignore: self.ignore.iter().map(|text| Pattern::new(text)).collect::<Result<_>>()?,
            pre: self.gguf.pre.clone(),
            allow_fallback: self.gguf.allow_fallback,
            weighted,
            method,
            settings,
            search: match self.gguf.reference_search {
                true => BlockSearch::Reference,
                false => BlockSearch::Refined,
            },
        };
        if request.is_float() && !request.method.transforms.is_empty() {
            return Err(Error::usage(
                format!(
                    "the steps {} have no effect on {}: no weight is rounded to blocks",
                    request.steps().join(", "),
                    request.mixture.name
                ),
                "omit ‹method›, or choose a type with blocks as ‹scheme›",
            ));
        }
        Ok(request)
    }

    /// Returns the method, and the settings of its steps and of its rounding.
    fn gguf_method(&self, extensions: &Extensions) -> Result<(Method, TransformSettings)> {
        let name = self.method.as_deref().unwrap_or(round::DEFAULT.name());
        let method = explained(extensions.method(name), "method", name, extensions)?;
        let mut settings = TransformSettings::default();
        method.set_defaults(&mut settings)?;
        let unsupported = method.preparation.map(Preparation::name);
        let unsupported = unsupported.or_else(|| {
            let transform = method.transforms.iter().find(|t| !t.supports_blocks()).map(|t| t.name());
            transform.or((!rounds_blocks(method.rounding)).then(|| method.rounding.name()))
        });
        if let Some(step) = unsupported {
            let named = METHODS.iter().filter(|method| is_supported(method)).map(|method| &*method.name);
            return Err(Error::usage(
                format!(
                    "method `{name}` is not supported for GGUF files: `{step}` does not take account of the scales of \
                     blocks"
                ),
                format!(
                    "choose one of {}, or omit ‹method› to round to nearest",
                    named.collect::<Vec<_>>().join(", ")
                ),
            ));
        }
        for transform in method.transforms.iter() {
            let (step, keys) = (transform.name(), transform.keys());
            for (key, value) in self.gguf_keys(step)? {
                if !keys.iter().any(|known| known.name == key) {
                    return Err(no_key(step, key, &keys));
                }
                transform.set(key, &value, &mut settings)?;
            }
        }
        self.set_gguf_rounding(method.rounding, &mut settings)?;
        Ok((method, settings))
    }

    /// Sets the given keys of a rounding, and checks its settings.
    fn set_gguf_rounding(&self, rounding: &dyn Rounding, settings: &mut TransformSettings) -> Result<()> {
        let name = rounding.name();
        let applies = match rounding.blocks(settings) {
            BlockRounding::Compensated { keys, .. } => keys,
            _ => &[],
        };
        let keys = rounding.keys();
        for (key, value) in self.gguf_keys(name)? {
            let known = keys.iter().find(|known| known.name == key);
            let known = known.ok_or_else(|| no_key(name, key, &keys))?;
            if !applies.contains(&key) {
                let names = match applies {
                    [] => "none of its keys".to_owned(),
                    _ => format!("only {}", applies.join(", ")),
                };
                return Err(Error::usage(
                    format!(
                        "`{key}` of `{name}` has no effect with ‹format={}›: {names} applies to the blocks of \
                         GGUF files",
                        gguf::FORMAT
                    ),
                    match known.setting {
                        Some(setting) => format!("leave it out (‹{setting}›, or ‹steps={name}.{key}›)"),
                        None => "leave it out".to_owned(),
                    },
                ));
            }
            rounding.set(key, &value, settings)?;
        }
        rounding.check(settings)?;
        let compensates = matches!(rounding.blocks(settings), BlockRounding::Compensated { .. });
        if self.gguf.reference_search && compensates {
            return Err(Error::usage(
                format!("‹reference_search› and `{name}` cannot be combined"),
                "leave one of them out",
            ));
        }
        Ok(())
    }

    /// Whether the method has this step or rounding.
    fn has_step(&self, step: &str, extensions: &Extensions) -> bool {
        let method = self.method.as_deref().and_then(|name| extensions.method(name).ok());
        method.is_some_and(|method| method.rounding.name() == step || method.steps().contains(&step))
    }

    /// The given keys of a step or of a rounding, from its own settings and from `steps`.
    fn gguf_keys(&self, step: &str) -> Result<Vec<(&str, Value)>> {
        let of_steps = self.steps.get(step).into_iter().flatten();
        let mut keys: Vec<(&str, Value)> =
            of_steps.map(|(key, value)| (key.as_str(), value.clone())).collect();
        for (setting, given) in self.keys_by_name() {
            let Some((_, key)) = step_of(setting).filter(|(of, _)| *of == step) else { continue };
            if keys.iter().any(|(known, _)| *known == key.name) {
                return Err(set_twice(setting, step, key.name));
            }
            if let Given::Value(value) = given {
                keys.push((key.name, value));
            }
        }
        Ok(keys)
    }

    /// The given settings that do not apply to GGUF files.
    fn not_for_gguf(&self, extensions: &Extensions) -> Vec<&'static str> {
        let all = [
            ("preset", self.preset.is_some()),
            ("recipe", self.recipe.is_some()),
            ("group_size", self.group_size.is_some()),
            ("symmetric", self.symmetric == Some(true)),
            ("asymmetric", self.symmetric == Some(false)),
            ("skip", !self.skip.is_empty()),
            ("steps", self.steps.keys().any(|step| !self.has_step(step, extensions))),
            ("scale_search", self.scale_search.is_some()),
        ];
        let given = all.into_iter().filter(|(_, given)| *given).map(|(name, _)| name);
        // Keys of the method are checked with its settings.
        let of_other = |name: &&str| step_of(name).is_none_or(|(step, _)| !self.has_step(step, extensions));
        let keys = self.keys_by_name().into_iter().map(|(name, _)| name);
        given.chain(keys.filter(of_other)).collect()
    }
}

/// Whether GGUF files can be written with a method.
fn is_supported(method: &Method) -> bool {
    method.preparation.is_none()
        && method.transforms.iter().all(|t| t.supports_blocks())
        && rounds_blocks(method.rounding)
}

/// Whether a rounding applies to blocks, whatever its settings are.
fn rounds_blocks(rounding: &dyn Rounding) -> bool {
    rounding.blocks(&TransformSettings::default()) != BlockRounding::Unsupported
}

fn mixture(name: &str) -> Result<&'static Mixture> {
    gguf::mixture(name).ok_or_else(|| {
        const WHAT: &str = "GGUF quantization type or mixture";
        let known: Vec<&str> = MIXTURES.iter().map(|m| m.name).collect();
        let upper = name.to_ascii_uppercase();
        let begin_with = |prefix: &str| -> Vec<&str> {
            known.iter().copied().filter(|known| known.starts_with(prefix)).collect()
        };
        let of_type = block_type(name).map_or_else(Vec::new, |kind| begin_with(&format!("{}_", kind.name)));
        if !of_type.is_empty() {
            return Error::usage(
                format!("unknown {WHAT} `{name}`"),
                format!("choose one of {}, which are mixtures with {upper}", of_type.join(", ")),
            );
        }
        if let Some(kind) = block_type(name) {
            let similar = begin_with(&format!("Q{}_", kind.code_bits().unwrap_or_default()));
            return Error::usage(
                format!("no mixture has the name of the tensor type {upper}"),
                format!(
                    "choose a mixture of a similar size as ‹scheme› ({}), and set the type of some of its tensors with \
                    ‹override=PATTERN={}›; known mixtures: {}",
                    similar.join(", "),
                    kind.name.to_ascii_lowercase(),
                    known.join(", ")
                ),
            );
        }
        // Schemes of other formats state the bits of weights.
        let scheme = name.to_ascii_lowercase().parse::<LinearScheme>().ok();
        if let Some(scheme) = scheme {
            let similar = begin_with(&format!("Q{}_", scheme.bits()));
            let meant = match similar.is_empty() {
                true => String::new(),
                false => format!("types with {} bits: {}; ", scheme.bits(), similar.join(", ")),
            };
            return Error::usage(
                format!("unknown {WHAT} `{name}`"),
                format!("GGUF files have types instead of schemes; {meant}known types: {}", known.join(", ")),
            );
        }
        // A similar name means something else.
        match (0..u32::from(u8::MAX)).filter_map(unread_type).any(|other| other == upper) {
            true => Error::usage(
                format!("the GGUF quantization type {upper} is not supported"),
                format!("known types: {}", known.join(", ")),
            ),
            false => unknown(WHAT, name, "types", &known),
        }
    })
}

fn kind_of(name: &str) -> Result<&'static BlockType> {
    block_type(name).ok_or_else(|| {
        let known: Vec<&str> = BLOCK_TYPES.iter().map(|kind| kind.name).collect();
        unknown("GGUF tensor type", name, "types", &known)
    })
}

/// Checks the settings of importance matrices and of the text. `reads`: whether there is a text; `needs`: whether the
/// method needs one, apart from an importance matrix.
pub(super) fn check_importance(options: &RecipeSettings, reads: bool, needs: bool) -> Result<()> {
    let gathers = options.gguf.save_imatrix.is_some() || reads && !needs;
    if gathers && options.gguf.imatrix.is_some() {
        return Err(Error::usage(
            "‹imatrix› gives an importance matrix, but ‹calibration› or ‹save_imatrix› would compute one",
            "leave one of them out",
        ));
    }
    let sampling = [
        ("samples", options.samples.is_some()),
        ("seq_len", options.seq_len.is_some()),
        ("seed", options.seed.is_some()),
        ("packing", options.packing.is_some()),
        ("mask", options.mask.is_some()),
    ];
    let of_experts = [
        ("expert_tokens", options.expert_tokens.is_some()),
        ("expert_floor", options.expert_floor.is_some()),
    ];
    if let Some((option, _)) = of_experts.into_iter().find(|(_, given)| *given) {
        return Err(Error::usage(
            format!(
                "‹{option}› has no effect: an importance matrix always uses the tokens routed to each expert"
            ),
            "leave it out",
        ));
    }
    match sampling.into_iter().find(|(_, given)| *given && !reads) {
        Some((option, _)) => Err(Error::usage(
            format!("‹{option}› has no effect: no calibration text is used"),
            "add ‹calibration›, or leave it out",
        )),
        None => Ok(()),
    }
}

pub(super) fn sampling(options: &RecipeSettings) -> Result<Sampling> {
    let defaults = Sampling::default();
    let sampling = Sampling {
        samples: options.samples.unwrap_or(defaults.samples),
        length: options.seq_len.unwrap_or(defaults.length),
        seed: options.seed.unwrap_or(defaults.seed),
        packing: options.packing.as_deref().map_or(Ok(Packing::Auto), str::parse)?,
        mask: options.mask.as_deref().map_or(Ok(defaults.mask), str::parse)?,
        ..defaults
    };
    sampling.check()?;
    Ok(sampling)
}
