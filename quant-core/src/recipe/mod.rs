//! Turns the user's request into an action for each tensor.
//!
//! A [`Recipe`] is the request. [`Plan::new`] applies it to a model before any compute, and determines the action and
//! the output size for every tensor.

mod cache_scales;
mod commented;
mod extensions;
mod file;
mod keys;
pub mod kv;
mod memory;
mod method;
mod needs;
mod part;
mod passes;
mod pattern;
mod plan;
mod repack;
mod scale_groups;
mod schema;
mod select;
mod time;

pub use cache_scales::CacheScale;
pub use extensions::{Extensions, FLOATS, GGUF};
pub(crate) use keys::{method_with, no_key};
pub(crate) use memory::is_reused;
pub use method::{METHODS, Method, method, step_of, steps};
pub(crate) use passes::{FirstPass, PassPlan};
pub use pattern::Pattern;
pub use plan::{Action, Plan, PlanEntry};
pub use repack::REPACK;
pub use select::SelectorMatches;
pub(crate) use time::PASSES;
pub use time::Rates;

use crate::Result;
use crate::calibrate::Sampling;
use crate::format::{CONTAINERS, Container};
use crate::model::{KvScheme, Model, Preparation};
use crate::names::unknown;
use crate::scheme::{ActivationScheme, SchemeRequest};
use crate::transform::{SettingsType, TransformSettings, fold_norms, rotate};

/// A named combination of method and scheme.
#[derive(Debug)]
#[non_exhaustive]
pub struct Preset {
    /// The name for `--preset`.
    pub name: &'static str,
    /// The method.
    pub method: &'static str,
    /// The scheme.
    pub scheme: &'static str,
}

/// The presets; the first is the default.
pub static PRESETS: &[Preset] = &[
    Preset { name: "awq-w4a16", method: "awq", scheme: "w4a16-g128" },
    Preset { name: "gptq-w4a16", method: "gptq", scheme: "w4a16-g128" },
    Preset { name: "qoq-w4a8kv4", method: "qoq", scheme: "w4a8kv4-g128-progressive" },
    Preset { name: "qoq-w4a8kv4-channel", method: "qoq", scheme: "w4a8kv4-channel" },
    Preset { name: "rtn-w4a16", method: "rtn", scheme: "w4a16-g128" },
    Preset { name: "rtn-w8a16", method: "rtn", scheme: "w8a16-g128" },
    Preset { name: "rtn-w8a8", method: "rtn", scheme: "w8a8-channel" },
    Preset { name: "smoothquant-w8a8", method: "smoothquant", scheme: "w8a8-channel" },
];

/// A request for quantization: the method, its settings, and what is written.
///
/// ```
/// use quant_core::recipe::Recipe;
///
/// let mut recipe = Recipe::preset("awq-w4a16")?;
/// recipe.scheme = "w4a16-g64-asym".parse()?;
/// recipe.containers = quant_core::format::containers(&["awq".to_owned()])?;
/// assert!(recipe.needs_text());
/// # Ok::<(), quant_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Recipe {
    /// The quantization method.
    pub method: Method,
    /// The scheme of every linear without an override.
    pub scheme: SchemeRequest,
    /// The formats to write. Several formats are written to separate directories.
    pub containers: Vec<&'static dyn Container>,
    /// Patterns of linears that stay float.
    pub ignore: Vec<Pattern>,
    /// Patterns of linears with schemes of their own, and these schemes; the last match wins.
    pub overrides: Vec<(Pattern, SchemeRequest)>,
    /// The selection of the calibration batch, for methods that need one.
    pub sampling: Sampling,
    /// Settings of transforms and of the rounding.
    pub settings: TransformSettings,
    /// The calibration text, if the recipe names one: a file or the name of a text, such as `builtin`.
    pub calibration: Option<String>,
}

impl Recipe {
    /// The model to quantize: the given one, rotated or with folded norms if the method requires it. A model that is
    /// already quantized does not change.
    ///
    /// # Errors
    /// As [`rotate`].
    pub fn prepared(&self, model: Model) -> Result<Model> {
        match self.method.preparation {
            Some(Preparation::Rotate) if model.quant_method().is_none() => rotate(&model),
            Some(Preparation::FoldNorms) if model.quant_method().is_none() => fold_norms(&model),
            _ => Ok(model),
        }
    }

    /// Replaces the method. The keys of the rounding get the defaults of the new method.
    ///
    /// # Errors
    /// As [`Method::set_defaults`].
    pub fn set_method(&mut self, method: Method) -> Result<()> {
        self.method.rounding.reset(&mut self.settings);
        method.set_defaults(&mut self.settings)?;
        self.method = method;
        Ok(())
    }

    /// The recipe with other settings of the step or the rounding whose type this is.
    ///
    /// ```
    /// use quant_core::quantize::gptq::GptqSettings;
    /// use quant_core::recipe::Recipe;
    ///
    /// let damped = GptqSettings { damping: 0.05, ..GptqSettings::default() };
    /// let recipe = Recipe::preset("gptq-w4a16")?.with_settings(damped);
    /// assert!(recipe.to_toml().contains("damping = 0.05"));
    /// # Ok::<(), quant_core::Error>(())
    /// ```
    pub fn with_settings<T: SettingsType>(mut self, settings: T) -> Self {
        self.settings.steps.set(settings);
        self
    }

    /// Whether a calibration text is needed: for the method, or to compute the grids of activations or of cached keys
    /// and values.
    pub fn needs_text(&self) -> bool {
        let schemes = std::iter::once(&self.scheme).chain(self.overrides.iter().map(|(_, scheme)| scheme));
        let mut activations = schemes.map(|s| s.activations);
        let cached = self.settings.kv == Some(KvScheme::Kvf8);
        cached || self.method.needs_text(&self.settings) || activations.any(ActivationScheme::is_static)
    }

    /// Whether any scheme has group scales that [`TransformSettings::scale_search`] affects, as NVFP4 has.
    pub fn searches_scales(&self) -> bool {
        let schemes = std::iter::once(&self.scheme).chain(self.overrides.iter().map(|(_, scheme)| scheme));
        schemes.into_iter().any(|s| s.with_default_symmetry(true).has_global_scale())
    }

    /// The recipe of a preset.
    ///
    /// # Errors
    /// [`Error::Usage`](crate::Error::Usage) if there is no such preset; the remedy lists all.
    pub fn preset(name: &str) -> Result<Self> {
        let preset = PRESETS.iter().find(|p| p.name == name).ok_or_else(|| {
            let known: Vec<_> = PRESETS.iter().map(|p| p.name).collect();
            unknown("preset", name, "presets", &known)
        })?;
        let method = method(preset.method)?;
        let (scheme, kv) = kv::split(preset.scheme)?;
        let scheme = scheme.parse()?;
        let mut settings = TransformSettings { kv, ..TransformSettings::default() };
        method.set_defaults(&mut settings)?;
        Ok(Self {
            scheme,
            containers: vec![CONTAINERS[0]],
            ignore: Vec::new(),
            overrides: Vec::new(),
            sampling: Sampling::default(),
            settings,
            method,
            calibration: None,
        })
    }
}
