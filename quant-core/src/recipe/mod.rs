//! The fourth stage of the path: what the user asked for, and what each tensor therefore gets.
//!
//! A [`Recipe`] is the request; [`Plan::new`] holds it against a model before any compute and
//! settles every tensor's fate, with the bytes it will take. Every later stage obeys the plan.

mod file;
mod memory;
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
pub use scheme::{Granularity, SchemeRequest, WeightScheme};
pub use select::SelectorMatches;
pub use time::Rates;

use crate::calibrate::Sampling;
use crate::format::{CONTAINERS, Container};
use crate::quantize::gptq::GptqSettings;
use crate::transform::Search;
use crate::{Error, Result};

/// How the numbers of a quantized weight are found.
#[derive(Debug)]
pub struct Method {
    /// The name that `--method` takes.
    pub name: &'static str,
    /// One line for help and tables.
    pub summary: &'static str,
    /// The search that rewrites a block's float weights before they are rounded, if any; it runs on
    /// a calibration batch.
    pub transform: Option<&'static dyn crate::transform::Transform>,
    /// How weights are rounded after that.
    pub rounding: Rounding,
}

impl Method {
    /// Whether it looks at a calibration text.
    pub fn needs_text(&self) -> bool {
        self.transform.is_some() || self.rounding == Rounding::Gptq
    }
}

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

/// The methods this version knows.
pub static METHODS: &[Method] = &[
    Method {
        name: "awq",
        summary: "activation-aware scales and clipping, searched on a calibration text",
        transform: Some(&crate::transform::Awq),
        rounding: Rounding::Nearest,
    },
    Method {
        name: "awq-gptq",
        summary: "AWQ's scales, then GPTQ",
        transform: Some(&crate::transform::Awq),
        rounding: Rounding::Gptq,
    },
    Method {
        name: "gptq",
        summary: "columns that make up for each other's rounding, by the inputs that a calibration text gives",
        transform: None,
        rounding: Rounding::Gptq,
    },
    Method {
        name: "rtn",
        summary: "round to nearest: needs no text and no forward pass",
        transform: None,
        rounding: Rounding::Nearest,
    },
];

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
    Preset { name: "rtn-w4a16", method: "rtn", scheme: "w4a16-g128" },
    Preset { name: "rtn-w8a16", method: "rtn", scheme: "w8a16-g128" },
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
    /// How candidates of a search are compared, for methods with one.
    pub search: Search,
    /// How GPTQ is run, for methods that round with it.
    pub gptq: GptqSettings,
    /// The calibration text, a file or the name of a set, where the recipe names one.
    pub calibration: Option<String>,
}

impl Recipe {
    /// The recipe of a preset.
    ///
    /// # Errors
    /// When there is none of that name; the message lists those there are.
    pub fn preset(name: &str) -> Result<Self> {
        let preset = PRESETS.iter().find(|p| p.name == name).ok_or_else(|| {
            let known: Vec<_> = PRESETS.iter().map(|p| p.name).collect();
            Error::usage(format!("unknown preset `{name}`"), format!("known presets: {}", known.join(", ")))
        })?;
        Ok(Self {
            method: method(preset.method)?,
            scheme: preset.scheme.parse()?,
            containers: vec![CONTAINERS[0]],
            ignore: Vec::new(),
            overrides: Vec::new(),
            sampling: Sampling::default(),
            search: Search::default(),
            gptq: GptqSettings::default(),
            calibration: None,
        })
    }
}
