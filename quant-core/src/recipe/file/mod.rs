//! Recipe files: a [`Recipe`] as TOML.
//!
//! ```toml
//! format = "compressed-tensors"
//!
//! [[transform]]
//! kind = "smoothquant"
//! alpha = 0.85                # or "auto"; the default depends on the family
//! producers = "norms"
//!
//! [[transform]]
//! kind = "awq"
//! search = "fast"
//!
//! [quantize]
//! method = "gptq"
//! scheme = "w4a8-g128-sym"
//! ignore = ["*.layers.0.*"]
//!
//! [[quantize.override]]
//! pattern = "down_proj"
//! scheme = "w8a16-g128-sym"
//!
//! [quantize.gptq]
//! damping = 0.01
//! block_size = 128
//! act_order = "static-groups"
//! inputs = "quantized"
//!
//! [calibration]
//! text = "builtin"
//! samples = 64
//! length = 512
//! seed = 0
//! packing = "auto"
//! mask = "none"
//! expert_tokens = "routed"
//! expert_floor = 0
//! ```
//!
//! Transforms run in the order in which they are listed, then weights are rounded. Unknown keys are errors, and so are
//! `[calibration]`, `[quantize.gptq]`, `scale_search` and keys of `[[transform]]` if they have no effect.

mod entries;

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use toml::Spanned;

pub(super) use entries::RecipeFile;

use entries::*;

use super::{Extensions, Method, PRESETS, Pattern, Recipe, kv};
use crate::calibrate::{ExpertSampling, Sampling};
use crate::checkpoint::read_capped;
use crate::names::suggestion;
use crate::round::DEFAULT;
use crate::scheme::SchemeRequest;
use crate::transform::TransformSettings;
use crate::wording::parser_message;
use crate::{Error, Result, format};

/// The maximum size of a recipe file.
const MAX_BYTES: u64 = 1 << 20;
const START: &str = "‹plan(print_recipe=awq-w4a16)› prints an example";

impl Recipe {
    /// Reads a recipe file. If it names a calibration text in its own directory, the recipe has the text's path.
    ///
    /// # Errors
    /// [`Error::Recipe`] if the file does not exist, is not a regular file, has more than 1 MiB, is not UTF-8, or is
    /// invalid; then the message names the line or the key. [`Error::Io`] if it cannot be read.
    pub fn read(path: &Path) -> Result<Self> {
        Self::read_with(path, &Extensions::default())
    }

    /// [`read`](Self::read) with the steps and formats of the calling program.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_with(path: &Path, extensions: &Extensions) -> Result<Self> {
        let wrong = |reason, remedy| Error::Recipe { path: path.to_owned(), reason, remedy };
        let broken = |reason: String| wrong(reason, format!("give a recipe file; {START}").into());
        let refused = |e: std::io::Error| match e.kind() {
            ErrorKind::NotFound => match PRESETS.iter().find(|preset| path == Path::new(preset.name)) {
                Some(preset) => {
                    let remedy = format!("‹preset={}› selects the preset of that name", preset.name);
                    wrong("does not exist".into(), remedy.into())
                }
                None => broken("does not exist".into()),
            },
            _ => Error::io("read", path, e),
        };
        // Opening a pipe would block until its other end is opened.
        let real = path.canonicalize().map_err(refused)?;
        if !std::fs::metadata(&real).map_err(refused)?.is_file() {
            return Err(broken("is not a regular file".into()));
        }
        let bytes = read_capped(&real, path, MAX_BYTES)?.map_err(broken)?;
        let text = String::from_utf8(bytes).map_err(|_| broken("is not UTF-8".into()))?;
        let mut recipe = Self::parse_with(&text, extensions).map_err(|e| match e {
            Error::Usage { message, remedy } => wrong(message, remedy),
            other => other,
        })?;
        if let (Some(text), Some(folder)) = (&mut recipe.calibration, path.parent()) {
            let in_folder = folder.join(&*text);
            if in_folder.is_file() {
                *text = in_folder.to_string_lossy().into_owned();
            }
        }
        let file: Arc<Path> = path.into();
        let patterns =
            recipe.ignore.iter_mut().chain(recipe.overrides.iter_mut().map(|(pattern, _)| pattern));
        patterns.for_each(|pattern| pattern.set_file(&file));
        Ok(recipe)
    }

    /// Parses a recipe from TOML.
    ///
    /// # Errors
    /// [`Error::Usage`] if the text is not a valid recipe; the message names the line or the key.
    pub fn parse(text: &str) -> Result<Self> {
        Self::parse_with(text, &Extensions::default())
    }

    /// [`parse`](Self::parse) with the steps and formats of the calling program.
    ///
    /// # Errors
    /// As [`parse`](Self::parse).
    pub fn parse_with(text: &str, extensions: &Extensions) -> Result<Self> {
        let line = |start: usize| text[..start].matches('\n').count() + 1;
        let file: RecipeFile = toml::from_str(text).map_err(|e| {
            let line = e.span().map(|span| line(span.start));
            let place = line.map(|line| format!("line {line}: ")).unwrap_or_default();
            let message = parser_message(e.message(), "a table");
            Error::usage(
                format!("{place}{message}"),
                format!("correct the recipe, which must be TOML; {START}"),
            )
        })?;
        let mut settings = TransformSettings::default();
        let method = file.method(extensions)?;
        let containers = match &file.format {
            Some(Formats::One(name)) => vec![extensions.container(name)?],
            Some(Formats::Several(names)) => extensions.containers_of(names)?,
            None => vec![format::CONTAINERS[0]],
        };
        // Names the line of the part that is invalid.
        let at = |span: Range<usize>| {
            let line = line(span.start);
            move |error| match error {
                Error::Usage { message, remedy } => Error::usage(format!("line {line}: {message}"), remedy),
                other => other,
            }
        };
        let parsed_scheme = |text: &Spanned<String>| {
            let (scheme, kv) = kv::split(text.get_ref())?;
            Ok((scheme.parse::<SchemeRequest>()?, kv))
        };
        let (scheme, kv) = parsed_scheme(&file.quantize.scheme).map_err(at(file.quantize.scheme.span()))?;
        settings.kv = kv;
        settings.scale_search = file.quantize.scale_search.unwrap_or_default();
        let pattern = |text: &Spanned<String>| {
            let pattern = Pattern::new(text.get_ref()).map_err(at(text.span()))?;
            Ok(pattern.at_line(line(text.span().start)))
        };
        let overrides = file.quantize.overrides.iter();
        let defaults = Sampling::default();
        let calibration = file.calibration.as_ref();
        method.set_defaults(&mut settings)?;
        for (name, entry) in &file.quantize.roundings {
            entry.add_to(&mut settings, (name, method.rounding), extensions, line)?;
        }
        file.transform.iter().try_for_each(|entry| entry.add_to(&mut settings, extensions, line))?;
        let recipe = Self {
            method,
            scheme,
            containers,
            ignore: file.quantize.ignore.iter().map(pattern).collect::<Result<_>>()?,
            overrides: overrides
                .map(|o| {
                    let refined = scheme.refine(o.scheme.get_ref()).map_err(at(o.scheme.span()))?;
                    Ok((pattern(&o.pattern)?, refined))
                })
                .collect::<Result<_>>()?,
            sampling: Sampling {
                samples: calibration.and_then(|c| c.samples).unwrap_or(defaults.samples),
                length: calibration.and_then(|c| c.length).unwrap_or(defaults.length),
                seed: calibration.and_then(|c| c.seed).unwrap_or(defaults.seed),
                packing: calibration.and_then(|c| c.packing).unwrap_or(defaults.packing),
                mask: calibration.and_then(|c| c.mask).unwrap_or(defaults.mask),
                experts: ExpertSampling {
                    tokens: calibration.and_then(|c| c.expert_tokens).unwrap_or(defaults.experts.tokens),
                    floor: calibration.and_then(|c| c.expert_floor).unwrap_or(defaults.experts.floor),
                },
            },
            settings,
            calibration: calibration.and_then(|c| c.text.clone()),
        };
        if file.quantize.scale_search.is_some() && !recipe.searches_scales() {
            return Err(Error::usage(
                "quantize.scale_search has no effect: it applies only to NVFP4 scales",
                "remove it, or choose a scheme such as wf4a16-g16-nv",
            ));
        }
        if calibration.is_some() && !recipe.needs_text() {
            return Err(Error::usage(
                "[calibration] has no effect, because no step uses a text",
                "remove it, or add a [[transform]] that uses one",
            ));
        }
        Ok(recipe)
    }

    /// The recipe as a file with all defaults written out; [`parse`](Self::parse) reads it back.
    pub fn to_toml(&self) -> String {
        let file = RecipeFile {
            format: Some(match &self.containers[..] {
                [one] => Formats::One(one.name().into()),
                several => Formats::Several(several.iter().map(|c| c.name().into()).collect()),
            }),
            transform: self.method.steps().into_iter().map(|step| self.transform_entry(step)).collect(),
            quantize: QuantizeEntry {
                method: Some(self.method.rounding.name().into()),
                roundings: self.rounding_entries(),
                scheme: written(kv::joined(&self.scheme.to_string(), self.settings.kv)),
                scale_search: self.searches_scales().then_some(self.settings.scale_search),
                ignore: self.ignore.iter().map(|p| written(p.text().to_owned())).collect(),
                overrides: (self.overrides.iter())
                    .map(|(p, s)| OverrideEntry {
                        pattern: written(p.text().to_owned()),
                        scheme: written(s.to_string()),
                    })
                    .collect(),
            },
            calibration: self.needs_text().then(|| CalibrationEntry {
                text: self.calibration.clone(),
                samples: Some(self.sampling.samples),
                length: Some(self.sampling.length),
                seed: Some(self.sampling.seed),
                packing: Some(self.sampling.packing),
                mask: Some(self.sampling.mask),
                expert_tokens: Some(self.sampling.experts.tokens),
                expert_floor: Some(self.sampling.experts.floor),
            }),
        };
        // All values have types that TOML supports.
        toml::to_string(&file).unwrap_or_default()
    }

    fn rounding_entries(&self) -> BTreeMap<String, RoundingEntry> {
        let rounding = self.method.rounding;
        let described = rounding.described(&self.settings);
        let keys = described.into_iter().map(|(key, value)| (key, value, 0)).collect();
        let entry = Some((rounding.name().to_owned(), RoundingEntry { at: 0, keys: Some(keys) }));
        entry.filter(|_| !rounding.keys().is_empty()).into_iter().collect()
    }

    fn transform_entry(&self, kind: &str) -> TransformEntry {
        let transform = self.method.transforms.iter().find(|t| t.name() == kind);
        let described = transform.map(|transform| transform.described(&self.settings)).unwrap_or_default();
        let keys = described.into_iter().map(|(key, value)| (key, value, 0)).collect();
        TransformEntry { kind: kind.to_owned(), keys }
    }
}

/// The value does not come from a file, so its span is empty.
fn written(text: String) -> Spanned<String> {
    Spanned::new(0..0, text)
}

impl RecipeFile {
    fn method(&self, extensions: &Extensions) -> Result<Method> {
        let rounding = match self.quantize.method.as_deref() {
            None => DEFAULT,
            Some(name) => extensions.rounding(name).ok_or_else(|| {
                let names: Vec<_> = extensions.roundings().map(|r| r.name()).collect();
                let listed = format!(
                    "quantize.method must be {}; steps before rounding are [[transform]] entries",
                    names.join(" or ")
                );
                Error::usage(format!("unknown quantize.method `{name}`"), suggestion(name, listed, &names))
            })?,
        };
        let kinds: Vec<&str> = self.transform.iter().map(|t| t.kind.as_str()).collect();
        extensions.method_of(&kinds, rounding)
    }
}

#[cfg(test)]
mod tests;
