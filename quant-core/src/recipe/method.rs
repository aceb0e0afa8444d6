//! Methods: the steps applied to a model before its weights are rounded, in order, and the rounding.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::Extensions;
use crate::keys::{StepKey, as_text_if_string};
use crate::model::Preparation;
use crate::names::suggestion;
use crate::round::{DEFAULT, Gptq, Nearest, ROUNDINGS, Rounding};
use crate::transform::{
    Awq, Clip, Reorder, Search, SmoothAttention, SmoothOutputs, SmoothQuant, StepContext, Transform,
    TransformSettings,
};
use crate::{Error, Result};

/// A quantization method: one of [`METHODS`], or steps in a [custom order](Self::of).
#[derive(Debug, Clone)]
pub struct Method {
    /// The name for `--method`. A method without a name of its own is named by its steps, separated by commas, followed
    /// by its rounding unless that is the [default](DEFAULT).
    pub name: Cow<'static, str>,
    /// A one-line description for help and tables.
    pub summary: &'static str,
    /// The preparation of the whole model, before anything else.
    pub preparation: Option<Preparation>,
    /// The transforms of a block's float weights before they are rounded, in order.
    pub transforms: Cow<'static, [&'static dyn Transform]>,
    /// How weights are rounded after the transforms.
    pub rounding: &'static dyn Rounding,
    /// The keys of the rounding for which this method has its own defaults, with their values.
    pub rounding_keys: &'static [(&'static str, &'static str)],
}

impl PartialEq for Method {
    /// Whether two methods have the same steps and the same rounding.
    fn eq(&self, other: &Self) -> bool {
        self.rounding == other.rounding && self.steps() == other.steps()
    }
}

impl Eq for Method {}

pub(super) const TRANSFORMS: &[&dyn Transform] =
    &[&Awq, &Clip, &Reorder, &SmoothAttention, &SmoothOutputs, &SmoothQuant];

/// Returns the step, and its key, that this field of [`RecipeSettings`](crate::run::RecipeSettings) sets.
///
/// ```
/// let (step, key) = quant_core::recipe::step_of("output_alpha").expect("a setting of a step");
/// assert_eq!((step, key.name), ("smooth-outputs", "alpha"));
/// ```
pub fn step_of(setting: &str) -> Option<(&'static str, StepKey)> {
    let transforms = TRANSFORMS.iter().flat_map(|t| t.keys().into_iter().map(|key| (t.name(), key)));
    let roundings = ROUNDINGS.iter().flat_map(|r| r.keys().into_iter().map(|key| (r.name(), key)));
    transforms.chain(roundings).find(|(_, key)| key.setting == Some(setting))
}

/// The name and the summary of every step that may come before rounding, sorted by name.
pub fn steps() -> Vec<(&'static str, &'static str)> {
    Extensions::default().steps()
}

impl Method {
    /// Returns the transform with this name, if it is one of the method's.
    pub fn transform(&self, name: &str) -> Option<&'static dyn Transform> {
        self.transforms.iter().copied().find(|t| t.name() == name)
    }

    /// How candidates for scales are compared, if a step searches for them.
    pub fn search_mode(&self, settings: &TransformSettings) -> Option<Search> {
        self.transforms.iter().find_map(|t| t.search_mode(settings))
    }

    /// Whether a step has an effect only if inputs are rounded.
    pub fn is_for_rounded_inputs(&self) -> bool {
        self.transforms.iter().any(|t| t.is_for_rounded_inputs())
    }

    /// The settings of each transform, by its name.
    pub fn fingerprint(&self, settings: &TransformSettings) -> Value {
        self.transforms
            .iter()
            .map(|t| (t.name().to_owned(), t.fingerprint(settings)))
            .collect::<Map<_, _>>()
            .into()
    }

    /// The settings of the rounding by its name; empty if it has none.
    pub(crate) fn rounding_fingerprint(&self, settings: &TransformSettings) -> Value {
        let print = self.rounding.fingerprint(settings);
        let named = Some((self.rounding.name().to_owned(), print));
        let is_some = |(_, print): &(String, Value)| print.as_object().is_none_or(|keys| !keys.is_empty());
        named.filter(is_some).into_iter().collect::<Map<_, _>>().into()
    }

    /// The names of the steps before rounding, in order.
    pub fn steps(&self) -> Vec<&'static str> {
        let preparation = self.preparation.map(Preparation::name);
        preparation.into_iter().chain(self.transforms.iter().map(|t| t.name())).collect()
    }

    /// Whether the method needs a calibration text with these settings.
    pub fn needs_text(&self, settings: &TransformSettings) -> bool {
        let needs_statistics = |t: &&dyn Transform| t.needs(settings).ranges || t.needs(settings).states;
        self.rounding.inputs(settings).is_some() || self.transforms.iter().any(needs_statistics)
    }

    /// Fails if a step of the method is meaningless for a request.
    pub(crate) fn check_steps(&self, mut context: StepContext<'_>) -> Result<()> {
        let steps = self.steps();
        for transform in self.transforms.iter() {
            let name = transform.name();
            context.earlier = steps.iter().copied().take_while(|step| *step != name).collect();
            context.others = self.transforms.iter().copied().filter(|t| t.name() != name).collect();
            transform.check(&context)?;
        }
        Ok(())
    }

    /// Sets the keys of the rounding to this method's defaults.
    ///
    /// # Errors
    /// [`Error::Usage`] when a default is not a value of its key.
    pub fn set_defaults(&self, settings: &mut TransformSettings) -> Result<()> {
        self.rounding.reset(settings);
        let keys = self.rounding.keys();
        self.rounding_keys.iter().try_for_each(|(name, text)| {
            let parsed = serde_json::from_str(text).ok().filter(|value: &Value| !value.is_null());
            let value = parsed.unwrap_or_else(|| Value::from(*text));
            match keys.iter().find(|key| key.name == *name) {
                Some(key) => self.rounding.set(name, &as_text_if_string(&value, &key.schema), settings),
                None => self.rounding.set(name, &value, settings),
            }
        })
    }

    /// Returns the method without some of its steps.
    ///
    /// # Errors
    /// [`Error::Usage`] for a name that is not one of its steps; the remedy lists them.
    pub fn without(&self, names: &[String]) -> Result<Self> {
        if names.is_empty() {
            return Ok(self.clone());
        }
        let steps = self.steps();
        if let Some(name) = names.iter().find(|name| !steps.contains(&name.as_str())) {
            return Err(Error::usage(
                format!("`{name}` is not a step of method `{}`", self.name),
                match steps[..] {
                    [] => "this method has no steps that can be skipped".to_owned(),
                    _ => suggestion(name, format!("its steps are {}", steps.join(", ")), &steps),
                },
            ));
        }
        let left: Vec<&str> =
            steps.into_iter().filter(|step| !names.iter().any(|name| name == step)).collect();
        let method = Self::composed(&left, self.rounding, (METHODS, &self.transforms))?;
        Ok(Self { rounding_keys: self.rounding_keys, ..method })
    }

    /// Builds a method from steps in this order and a rounding. If one of [`METHODS`] has the same steps and rounding,
    /// returns that.
    ///
    /// # Errors
    /// [`Error::Usage`] with the reason, for an unknown step, a repeated step, steps that exclude each other, or an
    /// order in which a step undoes the result of an earlier one.
    pub fn of(steps: &[&str], rounding: &'static dyn Rounding) -> Result<Self> {
        Self::composed(steps, rounding, (METHODS, TRANSFORMS))
    }

    pub(super) fn composed(
        steps: &[&str],
        rounding: &'static dyn Rounding,
        (methods, known): (&[Self], &[&'static dyn Transform]),
    ) -> Result<Self> {
        if let Some(named) = methods.iter().find(|m| m.rounding == rounding && m.steps() == steps) {
            return Ok(named.clone());
        }
        let mut transforms = Vec::with_capacity(steps.len());
        for (i, step) in steps.iter().enumerate() {
            if steps[..i].contains(step) {
                return Err(Error::usage(format!("step `{step}` is listed twice"), "remove one of them"));
            }
            match known.iter().find(|t| t.name() == *step) {
                Some(transform) => transforms.push(*transform),
                None if prepares(step).is_some() => {}
                None if ROUNDINGS.iter().any(|r| r.name() == *step) => {
                    return Err(Error::usage(
                        format!("`{step}` rounds the weights, and must come after all steps"),
                        "list it once, at the end; in a recipe, as `method` of [quantize]",
                    ));
                }
                None => {
                    let prepared = Preparation::ALL.into_iter().map(Preparation::name);
                    let mut known: Vec<_> = known.iter().map(|t| t.name()).chain(prepared).collect();
                    known.sort_unstable();
                    let listed = format!("the steps are {}", known.join(", "));
                    known.extend(ROUNDINGS.iter().map(|rounding| rounding.name()));
                    let remedy = suggestion(step, listed, &known);
                    return Err(Error::usage(format!("unknown step `{step}`"), remedy));
                }
            }
        }
        let refused = |reason: String, remedy: &str| -> Result<Self> {
            Err(Error::usage(
                format!("the steps {} cannot be combined in this order: {reason}", steps.join(", ")),
                remedy,
            ))
        };
        let prepared: Vec<Preparation> = steps.iter().filter_map(|step| prepares(step)).collect();
        let included = |one: &Preparation| prepared.iter().find(|other| other.includes(*one));
        if let Some((one, other)) = prepared.iter().find_map(|one| Some((one, included(one)?))) {
            return refused(
                format!("`{}` already folds norms", other.name()),
                &format!("remove `{}`", one.name()),
            );
        }
        if let Some(step) = steps.iter().skip(1).find(|step| prepares(step).is_some()) {
            let reason = format!(
                "`{step}` modifies the whole model, which would invalidate the result of `{}`",
                steps[0]
            );
            return refused(reason, &format!("put `{step}` first"));
        }
        let narrowing: Vec<&str> =
            transforms.iter().filter(|t| t.narrows_ranges()).map(|t| t.name()).collect();
        if let [one, other, ..] = narrowing[..] {
            return refused(
                format!("`{one}` and `{other}` both clip the ranges of weights"),
                &format!("remove `{other}`"),
            );
        }
        if let (Some(last), Some(narrows)) =
            (steps.last(), narrowing.first().filter(|n| steps.last() != Some(n)))
        {
            return refused(
                format!("`{narrows}` clips the ranges of weights, which `{last}` would then change"),
                &format!("put `{narrows}` last, before weights are rounded"),
            );
        }
        let mut name = steps.to_vec();
        if rounding != DEFAULT {
            name.push(rounding.name());
        }
        Ok(Self {
            name: name.join(",").into(),
            summary: "custom steps",
            preparation: steps.first().and_then(|step| prepares(step)),
            transforms: transforms.into(),
            rounding,
            rounding_keys: &[],
        })
    }
}

fn prepares(step: &str) -> Option<Preparation> {
    Preparation::ALL.into_iter().find(|p| p.name() == step)
}

/// A method of [`METHODS`] without a preparation.
const fn plain(
    name: &'static str,
    summary: &'static str,
    transforms: &'static [&'static dyn Transform],
    rounding: &'static dyn Rounding,
) -> Method {
    Method {
        name: Cow::Borrowed(name),
        summary,
        preparation: None,
        transforms: Cow::Borrowed(transforms),
        rounding,
        rounding_keys: &[],
    }
}

/// QServe's method: the model is rotated, and GPTQ uses the inputs of the float model.
const fn qoq(
    name: &'static str,
    summary: &'static str,
    rounding: &'static dyn Rounding,
    rounding_keys: &'static [(&'static str, &'static str)],
) -> Method {
    Method {
        name: Cow::Borrowed(name),
        summary,
        preparation: Some(Preparation::Rotate),
        transforms: Cow::Borrowed(QOQ),
        rounding,
        rounding_keys,
    }
}

/// The named methods; [`Method::of`] builds others.
pub static METHODS: &[Method] = &[
    plain("awq", "activation-aware scales and clipping, searched on a calibration text", &[&Awq], &Nearest),
    plain("awq-gptq", "AWQ's scales, then GPTQ", &[&Awq], &Gptq),
    plain(
        "gptq",
        "rounds column by column, and compensates each error in the remaining columns, on a calibration text",
        &[],
        &Gptq,
    ),
    qoq(
        "qoq",
        "QServe's method: rotation, reordering, SmoothAttention, smooth outputs, clipping, then GPTQ",
        &Gptq,
        &[("inputs", "float")],
    ),
    qoq("qoq-rtn", "QServe's steps, then rounding to nearest", &Nearest, &[]),
    plain("rtn", "rounds to nearest; needs a calibration text only for static scales", &[], &Nearest),
    plain(
        "smoothquant",
        "moves outliers from activations into weights, for 8-bit activations",
        &[&SmoothQuant],
        &Nearest,
    ),
    plain("smoothquant-awq", "SmoothQuant's scales, then AWQ's", &[&SmoothQuant, &Awq], &Nearest),
    plain(
        "smoothquant-awq-gptq",
        "SmoothQuant's scales, then AWQ's, then GPTQ",
        &[&SmoothQuant, &Awq],
        &Gptq,
    ),
    plain("smoothquant-gptq", "SmoothQuant's scales, then GPTQ", &[&SmoothQuant], &Gptq),
];

/// QoQ's transforms, in QServe's order.
const QOQ: &[&dyn Transform] = &[&Reorder, &SmoothAttention, &SmoothOutputs, &Clip];

/// Returns the method with this name, or the one that consists of steps separated by commas. The last one may be a
/// rounding: `rotate,awq,gptq`.
///
/// # Errors
/// [`Error::Usage`] if the name is unknown, with a remedy that lists the methods; otherwise as [`Method::of`].
///
/// ```
/// use quant_core::recipe::method;
///
/// let steps = method("rotate,awq,gptq")?;
/// assert_eq!((steps.steps(), steps.rounding.name()), (vec!["rotate", "awq"], "gptq"));
/// assert!(method("magic").is_err());
/// # Ok::<(), quant_core::Error>(())
/// ```
pub fn method(name: &str) -> Result<Method> {
    Extensions::default().method(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::round::LayerInputs;

    #[test]
    fn names_come_back() {
        for named in METHODS {
            assert_eq!(method(&named.name).unwrap().name, named.name);
            let steps = named.steps();
            assert_eq!(Method::of(&steps, named.rounding).unwrap().name, named.name);
        }
        for name in
            ["rotate,awq", "rotate,smoothquant,gptq", "smoothquant,clip", "reorder,smooth-outputs,awq,gptq"]
        {
            let composed = method(name).unwrap();
            assert_eq!(composed.name, name);
            assert_eq!(composed, Method::of(&composed.steps(), composed.rounding).unwrap());
        }
        assert_eq!(method("smoothquant, awq, rtn").unwrap().name, "smoothquant-awq");
        assert_eq!(method("rotate").unwrap().steps(), ["rotate"]);
    }

    #[test]
    fn steps_that_are_left_out() {
        let names = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
        let qoq = method("qoq").unwrap();
        let left = qoq.without(&names(&["rotate", "clip"])).unwrap();
        assert_eq!(left.name, "reorder,smooth-attention,smooth-outputs,gptq");
        let mut settings = TransformSettings::default();
        left.set_defaults(&mut settings).unwrap();
        let inputs = left.rounding.inputs(&settings);
        assert_eq!(inputs, Some(LayerInputs::Float), "QoQ's way, whatever is left of it");
        assert_eq!(qoq.without(&names(&qoq.steps())).unwrap().name, "gptq");
        let error = qoq.without(&names(&["awq"])).unwrap_err();
        assert!(error.to_string().contains("`awq` is not a step of method `qoq`"), "{error}");
        assert!(error.remedy().marked().contains("smooth-attention"), "{}", error.remedy());
    }

    #[test]
    fn senseless_orders_are_refused_with_the_reason() {
        for (name, expected, remedy) in [
            ("awq,smoothquant", "`awq` clips the ranges of weights, which `smoothquant` would", "last"),
            ("clip,reorder,gptq", "`clip` clips", "last"),
            ("clip,awq", "`clip` and `awq` both clip the ranges", "remove `awq`"),
            ("reorder,rotate", "modifies the whole model", "put `rotate` first"),
            ("awq,fold-norms", "modifies the whole model", "put `fold-norms` first"),
            ("fold-norms,rotate", "`rotate` already folds norms", "remove `fold-norms`"),
            ("reorder,reorder", "listed twice", "remove one"),
            ("reorder,gptq,clip", "`gptq` rounds the weights", "list it once, at the end"),
            ("gptq,rtn", "`gptq` rounds the weights", "once"),
            ("reorder,magic", "unknown step `magic`", "the steps are awq, clip"),
            ("smoothqaunt", "unknown method `smoothqaunt`", "separated by commas"),
            ("", "unknown method ``", "known methods"),
            ("rotate,", "unknown step ``", "the steps are"),
        ] {
            let error = method(name).unwrap_err();
            assert!(error.to_string().contains(expected), "{name}: {error}");
            assert!(error.remedy().marked().contains(remedy), "{name}: {}", error.remedy());
        }
    }
}
