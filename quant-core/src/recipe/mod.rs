//! The fourth stage of the path: what the user asked for, and what each tensor therefore gets.
//!
//! A [`Recipe`] is the request; [`Plan::new`] holds it against a model before any compute and
//! settles every tensor's fate, with the bytes it will take. Every later stage obeys the plan.

mod file;
pub mod kv;
mod memory;
mod needs;
mod pattern;
mod plan;
mod repack;
mod schema;
mod scheme;
mod select;
mod time;

pub use pattern::Pattern;
pub use plan::{Action, Plan, PlanEntry};
pub use repack::REPACK;
pub use scheme::{ActivationScheme, Granularity, LinearScheme, SchemeRequest};
pub use select::SelectorMatches;
pub use time::Rates;

use crate::calibrate::Sampling;
use crate::format::{CONTAINERS, Container};
use crate::model::Model;
use crate::quantize::gptq::{GptqSettings, LayerInputs};
use crate::transform::{
    Awq, Clip, Reorder, SmoothAttention, SmoothOutputs, SmoothQuant, Transform, TransformSettings, rotate,
};
use crate::{Error, Result};

/// How the numbers of a quantized weight are found.
#[derive(Debug)]
pub struct Method {
    /// The name that `--method` takes.
    pub name: &'static str,
    /// One line for help and tables.
    pub summary: &'static str,
    /// Whether the model is rotated before anything else.
    pub rotates: bool,
    /// What rewrites a block's float weights before they are rounded, in order.
    pub transforms: &'static [&'static dyn Transform],
    /// How weights are rounded after that.
    pub rounding: Rounding,
}

impl Method {
    /// Whether a transform is among its own.
    pub fn has(&self, transform: &str) -> bool {
        self.transforms.iter().any(|t| t.name() == transform)
    }

    /// The names of what it does before weights are rounded, in order.
    pub fn steps(&self) -> Vec<&'static str> {
        let rotation = self.rotates.then_some(ROTATE);
        rotation.into_iter().chain(self.transforms.iter().map(|t| t.name())).collect()
    }

    /// Its transforms that are not left out.
    pub fn transforms(&self, settings: &TransformSettings) -> Vec<&'static dyn Transform> {
        self.transforms.iter().copied().filter(|t| !settings.skipped.contains(&t.name())).collect()
    }

    /// Whether the model is rotated, with such settings.
    pub fn rotates(&self, settings: &TransformSettings) -> bool {
        self.rotates && !settings.skipped.contains(&ROTATE)
    }

    /// Whether it looks at a calibration text, with such settings.
    pub fn needs_text(&self, settings: &TransformSettings) -> bool {
        let looks = |t: &&dyn Transform| t.needs(settings).ranges || t.needs(settings).states;
        self.rounding == Rounding::Gptq || self.transforms(settings).iter().any(looks)
    }

    /// How GPTQ is run where nothing is said: as published, QoQ judges linears by the inputs of the float model.
    pub fn usual_gptq(&self) -> GptqSettings {
        let inputs = if self.rotates { LayerInputs::Float } else { LayerInputs::default() };
        GptqSettings { inputs, ..GptqSettings::default() }
    }

    /// Settles which of its steps are left out.
    ///
    /// # Errors
    /// [`Error::Usage`] for what is none of its steps; the message lists those.
    pub fn skip(&self, names: &[String], settings: &mut TransformSettings) -> Result<()> {
        let steps = self.steps();
        for name in names {
            let Some(step) = steps.iter().find(|s| *s == name) else {
                return Err(Error::usage(
                    format!("`{name}` is no step of method `{}`", self.name),
                    match steps[..] {
                        [] => "it has none that could be left out".to_owned(),
                        _ => format!("its steps are {}", steps.join(", ")),
                    },
                ));
            };
            if !settings.skipped.contains(step) {
                settings.skipped.push(step);
            }
        }
        settings.skipped.sort_unstable();
        Ok(())
    }
}

/// The step that makes another model, and no other block.
pub const ROTATE: &str = "rotate";

/// How weights become codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// Each to the nearest of its grid.
    Nearest,
    /// In columns that make up for each other: [`gptq`](crate::quantize::gptq).
    Gptq,
}

impl Rounding {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Nearest, Self::Gptq];

    /// The name that recipes take: the method that rounds so and does nothing before.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nearest => "rtn",
            Self::Gptq => "gptq",
        }
    }
}

/// The methods this version knows: every order of transforms that makes sense, with each way to round.
///
/// AWQ comes last, since it narrows the ranges of the weights that are rounded, and whatever scaled them afterwards
/// would leave bounds of other weights.
pub static METHODS: &[Method] = &[
    Method {
        name: "awq",
        summary: "activation-aware scales and clipping, searched on a calibration text",
        rotates: false,
        transforms: &[&Awq],
        rounding: Rounding::Nearest,
    },
    Method {
        name: "awq-gptq",
        summary: "AWQ's scales, then GPTQ",
        rotates: false,
        transforms: &[&Awq],
        rounding: Rounding::Gptq,
    },
    Method {
        name: "gptq",
        summary: "columns that make up for each other's rounding, by the inputs that a calibration text gives",
        rotates: false,
        transforms: &[],
        rounding: Rounding::Gptq,
    },
    Method {
        name: "qoq",
        summary: "QServe's: rotation, reordering, SmoothAttention, smooth outputs, clipping, then GPTQ",
        rotates: true,
        transforms: QOQ,
        rounding: Rounding::Gptq,
    },
    Method {
        name: "qoq-rtn",
        summary: "QServe's steps, then round to nearest",
        rotates: true,
        transforms: QOQ,
        rounding: Rounding::Nearest,
    },
    Method {
        name: "rtn",
        summary: "round to nearest: needs no text and no forward pass",
        rotates: false,
        transforms: &[],
        rounding: Rounding::Nearest,
    },
    Method {
        name: "smoothquant",
        summary: "outliers of activations move into the weights, for activations of 8 bits",
        rotates: false,
        transforms: &[&SmoothQuant],
        rounding: Rounding::Nearest,
    },
    Method {
        name: "smoothquant-awq",
        summary: "SmoothQuant's scales, then AWQ's",
        rotates: false,
        transforms: &[&SmoothQuant, &Awq],
        rounding: Rounding::Nearest,
    },
    Method {
        name: "smoothquant-awq-gptq",
        summary: "SmoothQuant's scales, then AWQ's, then GPTQ",
        rotates: false,
        transforms: &[&SmoothQuant, &Awq],
        rounding: Rounding::Gptq,
    },
    Method {
        name: "smoothquant-gptq",
        summary: "SmoothQuant's scales, then GPTQ",
        rotates: false,
        transforms: &[&SmoothQuant],
        rounding: Rounding::Gptq,
    },
];

/// What QoQ does to blocks, in QServe's order.
const QOQ: &[&dyn Transform] = &[&Reorder, &SmoothAttention, &SmoothOutputs, &Clip];

/// The method of that name.
///
/// # Errors
/// When there is none; the message lists those there are.
pub fn method(name: &str) -> Result<&'static Method> {
    METHODS.iter().find(|m| m.name == name).ok_or_else(|| {
        let known: Vec<_> = METHODS.iter().map(|m| m.name).collect();
        Error::usage(format!("unknown method `{name}`"), format!("known methods: {}", known.join(", ")))
    })
}

/// A named combination of method and scheme.
#[derive(Debug)]
pub struct Preset {
    /// The name that `--preset` takes.
    pub name: &'static str,
    /// Its method.
    pub method: &'static str,
    /// Its scheme.
    pub scheme: &'static str,
}

/// The presets this version knows; the first is the default.
pub static PRESETS: &[Preset] = &[
    Preset { name: "awq-w4a16", method: "awq", scheme: "w4a16-g128" },
    Preset { name: "gptq-w4a16", method: "gptq", scheme: "w4a16-g128" },
    Preset { name: "qoq-w4a8kv4", method: "qoq", scheme: "w4a8kv4-g128-progressive" },
    Preset { name: "qoq-w4a8kv4-channel", method: "qoq", scheme: "w4a8kv4-channel-asym" },
    Preset { name: "rtn-w4a16", method: "rtn", scheme: "w4a16-g128" },
    Preset { name: "rtn-w8a16", method: "rtn", scheme: "w8a16-g128" },
    Preset { name: "rtn-w8a8", method: "rtn", scheme: "w8a8-channel" },
    Preset { name: "smoothquant-w8a8", method: "smoothquant", scheme: "w8a8-channel" },
];

/// What the user asked for.
#[derive(Debug, Clone)]
pub struct Recipe {
    /// How the numbers are found.
    pub method: &'static Method,
    /// The grid of every linear that no override names.
    pub scheme: SchemeRequest,
    /// The containers to write, each into a directory of its own where there are several.
    pub containers: Vec<&'static dyn Container>,
    /// Linears that stay float.
    pub ignore: Vec<Pattern>,
    /// Linears that get a scheme of their own; later ones win.
    pub overrides: Vec<(Pattern, SchemeRequest)>,
    /// The calibration batch, for methods that need one.
    pub sampling: Sampling,
    /// How transforms are run.
    pub settings: TransformSettings,
    /// How GPTQ is run, for methods that round with it.
    pub gptq: GptqSettings,
    /// The calibration text, a file or the name of a set, where the recipe names one.
    pub calibration: Option<String>,
}

impl Recipe {
    /// The model that is going to be quantized: the given one, rotated where the method does so. One that is quantized
    /// already stays as it is.
    ///
    /// # Errors
    /// As [`rotate`].
    pub fn prepared(&self, model: Model) -> Result<Model> {
        if model.quant_method().is_none() && self.method.rotates(&self.settings) {
            return rotate(&model);
        }
        Ok(model)
    }

    /// Whether a calibration text is looked at: by the method, or for grids of activations.
    pub fn needs_text(&self) -> bool {
        let schemes = std::iter::once(&self.scheme).chain(self.overrides.iter().map(|(_, scheme)| scheme));
        let mut activations = schemes.map(|s| s.activations);
        self.method.needs_text(&self.settings)
            || activations.any(|a| matches!(a, ActivationScheme::Static { .. }))
    }

    /// The recipe of a preset.
    ///
    /// # Errors
    /// When there is none of that name; the message lists those there are.
    pub fn preset(name: &str) -> Result<Self> {
        let preset = PRESETS.iter().find(|p| p.name == name).ok_or_else(|| {
            let known: Vec<_> = PRESETS.iter().map(|p| p.name).collect();
            Error::usage(format!("unknown preset `{name}`"), format!("known presets: {}", known.join(", ")))
        })?;
        let method = method(preset.method)?;
        let (scheme, kv) = kv::split(preset.scheme)?;
        let scheme = scheme.parse()?;
        Ok(Self {
            scheme,
            containers: vec![CONTAINERS[0]],
            ignore: Vec::new(),
            overrides: Vec::new(),
            sampling: Sampling::default(),
            settings: TransformSettings { kv, ..TransformSettings::default() },
            gptq: method.usual_gptq(),
            method,
            calibration: None,
        })
    }
}
