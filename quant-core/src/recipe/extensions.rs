//! The steps, methods and formats that may be named in requests: the library's, and those of the calling program.

use std::borrow::Cow;

use super::method::TRANSFORMS;
use super::{METHODS, Method};
use crate::format::{CONTAINERS, Container, containers_with};
use crate::keys::StepKey;
use crate::model::Preparation;
use crate::names::{suggestion, unknown};
use crate::round::{DEFAULT, ROUNDINGS, Rounding};
use crate::transform::Transform;
use crate::{Error, Result};

/// The name of GGUF as an output format. Recipes do not describe GGUF files.
pub const GGUF: &str = "gguf";
/// The name of safetensors with floats as an output format. Recipes do not describe it, because nothing is quantized.
pub const FLOATS: &str = "safetensors";

/// A kind of output that is not a [`Container`], so that no recipe names it.
#[derive(Clone, Copy)]
struct OtherOutput {
    name: &'static str,
    /// What is written.
    files: &'static str,
    remedy: &'static str,
}

const OTHER_OUTPUTS: [OtherOutput; 2] = [
    OtherOutput {
        name: GGUF,
        files: "GGUF files",
        remedy: "set ‹format=gguf›, and ‹scheme› in place of the recipe",
    },
    OtherOutput {
        name: FLOATS,
        files: "float checkpoints",
        remedy: "set ‹format=safetensors› and ‹scheme=bf16›, ‹scheme=f16› or ‹scheme=f32› in place of the recipe",
    },
];

/// Steps, roundings, methods and formats that the calling program adds to those of this library.
///
/// [`QuantizeRequest::extensions`](crate::run::QuantizeRequest::extensions) makes them known by their names: in a
/// recipe file (`kind` of `[[transform]]`, `method` of `[quantize]`, `format`) and in settings (`method`, `format`). The
/// default adds nothing.
///
/// ```
/// use quant_core::recipe::{Extensions, Method, method};
///
/// // A method of the program: AWQ on a rotated model.
/// let own = Method { name: "rotated-awq".into(), summary: "AWQ, rotated", ..method("rotate,awq")? };
/// let known = Extensions { methods: vec![own], ..Extensions::default() };
/// assert_eq!(known.method("rotated-awq")?.steps(), ["rotate", "awq"]);
/// assert_eq!(known.container("awq")?.name(), "awq");
/// # Ok::<(), quant_core::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Extensions {
    /// Steps before rounding.
    pub transforms: Vec<&'static dyn Transform>,
    /// Roundings.
    pub roundings: Vec<&'static dyn Rounding>,
    /// Methods.
    pub methods: Vec<Method>,
    /// Formats.
    pub containers: Vec<&'static dyn Container>,
}

impl Extensions {
    /// Checks that every name is unique and can be written in lists and in `STEP.KEY=VALUE`.
    ///
    /// # Errors
    /// [`Error::Usage`] for a name that is empty, is taken, or has a comma or a space; for the name of a step that a method
    /// with other steps has; for the name of a step, a
    /// rounding or a key with `.` or `=`; for a key named `kind`, one that a step has twice, and one with a
    /// [`setting`](StepKey::setting) or a [file](StepKey::is_file), which only steps of this library have.
    pub fn check(&self) -> Result<()> {
        let prepared = Preparation::ALL.into_iter().map(Preparation::name);
        let rounded = self.roundings().map(|rounding| rounding.name());
        let steps = self.transforms().map(|t| t.name()).chain(prepared).chain(rounded).collect();
        let methods = self.methods().map(|m| &*m.name).collect();
        let formats = self.containers().map(|c| c.name()).collect();
        [("step", steps), ("method", methods), ("format", formats)]
            .into_iter()
            .try_for_each(|(kind, names): (_, Vec<&str>)| are_distinct(kind, &names))?;
        let own = self.transforms.iter().map(|t| t.name()).chain(self.roundings.iter().map(|r| r.name()));
        own.into_iter().try_for_each(|name| self.is_not_another_method(name))?;
        let transforms = self.transforms.iter().map(|t| (t.name(), t.keys()));
        let roundings = self.roundings.iter().map(|r| (r.name(), r.keys()));
        transforms.chain(roundings).try_for_each(|(step, keys)| are_valid(step, &keys))
    }

    /// Checks that a step's name is not that of a method with other steps: in settings, the method would be meant, and
    /// in recipe files the step.
    fn is_not_another_method(&self, step: &str) -> Result<()> {
        let is_alone = |method: &Method| match method.steps()[..] {
            [] => method.rounding.name() == step,
            [one] => one == step,
            _ => false,
        };
        match self.methods().find(|method| method.name == step && !is_alone(method)) {
            None => Ok(()),
            Some(method) => Err(Error::usage(
                format!(
                    "the name `{step}` of a step is that of a method with other steps: {}",
                    method.summary
                ),
                "give it another name in the program that adds it",
            )),
        }
    }

    /// The transforms of this library, then those of the calling program.
    pub fn transforms(&self) -> impl Iterator<Item = &'static dyn Transform> {
        TRANSFORMS.iter().chain(&self.transforms).copied()
    }

    /// The roundings of this library, then those of the calling program.
    pub fn roundings(&self) -> impl Iterator<Item = &'static dyn Rounding> {
        ROUNDINGS.iter().chain(&self.roundings).copied()
    }

    /// Returns the rounding with this name.
    pub fn rounding(&self, name: &str) -> Option<&'static dyn Rounding> {
        self.roundings().find(|rounding| rounding.name() == name)
    }

    /// The named methods of this library, then those of the calling program.
    fn methods(&self) -> impl Iterator<Item = &Method> {
        METHODS.iter().chain(&self.methods)
    }

    /// The formats of this library, then those of the calling program.
    pub fn containers(&self) -> impl Iterator<Item = &'static dyn Container> {
        CONTAINERS.iter().chain(&self.containers).copied()
    }

    /// Returns the transform with this name.
    pub fn transform(&self, name: &str) -> Option<&'static dyn Transform> {
        self.transforms().find(|t| t.name() == name)
    }

    /// The name and the summary of every step that may come before rounding, sorted by name.
    pub fn steps(&self) -> Vec<(&'static str, &'static str)> {
        let prepared = Preparation::ALL.into_iter().map(|p| (p.name(), p.summary()));
        let mut steps: Vec<_> = self.transforms().map(|t| (t.name(), t.summary())).chain(prepared).collect();
        steps.sort_unstable();
        steps
    }

    /// The keys that recipe files and requests may set, with the step or the rounding that each belongs to.
    pub fn keys(&self) -> Vec<(&'static str, StepKey)> {
        let steps = self.transforms().map(|t| (t.name(), t.keys()));
        let roundings = self.roundings().map(|rounding| (rounding.name(), rounding.keys()));
        let all =
            steps.chain(roundings).flat_map(|(step, keys)| keys.into_iter().map(move |key| (step, key)));
        all.filter(|(_, key)| !key.is_file).collect()
    }

    /// Returns the method with this name, or the one that consists of steps separated by commas. The last one may be a
    /// rounding: `rotate,awq,gptq`.
    ///
    /// # Errors
    /// [`Error::Usage`] if the name is unknown, with a remedy that lists the methods; otherwise as [`Method::of`].
    pub fn method(&self, name: &str) -> Result<Method> {
        if let Some(named) = self.methods().find(|m| m.name == name) {
            return Ok(named.clone());
        }
        let mut steps: Vec<&str> = name.split(',').map(str::trim).collect();
        let known = |step: &str| {
            self.steps().iter().any(|(name, _)| *name == step)
                || self.roundings.iter().any(|r| r.name() == step)
        };
        if steps.len() == 1 && !known(name) {
            let mut known: Vec<_> = self.methods().map(|m| &*m.name).collect();
            let listed = format!(
                "known methods: {}; or list steps separated by commas, as in rotate,awq,gptq",
                known.join(", ")
            );
            known.extend(self.steps().into_iter().map(|(step, _)| step));
            let remedy = suggestion(name, listed, &known);
            return Err(Error::usage(format!("unknown method `{name}`"), remedy));
        }
        let named = steps.last().and_then(|last| self.rounding(last));
        if named.is_some() {
            steps.pop();
        }
        self.method_of(&steps, named.unwrap_or(DEFAULT))
    }

    /// [`Method::of`] with the steps and methods of this library and of the calling program.
    ///
    /// # Errors
    /// As [`Method::of`].
    pub fn method_of(&self, steps: &[&str], rounding: &'static dyn Rounding) -> Result<Method> {
        let methods: Cow<'_, [Method]> = match self.methods[..] {
            [] => METHODS.into(),
            _ => self.methods().cloned().collect::<Vec<_>>().into(),
        };
        let transforms: Vec<_> = self.transforms().collect();
        Method::composed(steps, rounding, (&methods, &transforms))
    }

    /// Returns the format with this name.
    ///
    /// # Errors
    /// [`Error::Usage`] if no format has that name; the remedy lists the known names.
    pub fn container(&self, name: &str) -> Result<&'static dyn Container> {
        let is_it = |other: &&OtherOutput| other.name.eq_ignore_ascii_case(name);
        if let Some(OtherOutput { name, files, remedy }) = OTHER_OUTPUTS.iter().find(is_it) {
            return Err(Error::usage(
                format!("a recipe cannot name the format {name}, because no recipe applies to {files}"),
                *remedy,
            ));
        }
        self.containers().find(|c| c.name().eq_ignore_ascii_case(name)).ok_or_else(|| {
            let mut known: Vec<_> = self.containers().map(|c| c.name()).collect();
            known.extend(OTHER_OUTPUTS.map(|other| other.name));
            unknown("format", name, "formats", &known)
        })
    }

    /// Returns the formats with these names.
    ///
    /// # Errors
    /// As [`container`](Self::container); also if the list is empty or has a duplicate.
    pub fn containers_of(&self, names: &[String]) -> Result<Vec<&'static dyn Container>> {
        containers_with(names, |name| self.container(name))
    }
}

fn are_distinct(kind: &str, names: &[&str]) -> Result<()> {
    for (i, name) in names.iter().enumerate() {
        let wrong = match name {
            _ if names[..i].contains(name) => "is taken",
            _ if name.is_empty() || name.contains([',', ' ']) => "is empty or has a comma or a space",
            _ if kind == "step" && name.contains(['.', '=']) => {
                "has `.` or `=`, which end it in STEP.KEY=VALUE"
            }
            _ => continue,
        };
        return Err(Error::usage(
            format!("the name `{name}` of a {kind} {wrong}"),
            "give it another name in the program that adds it",
        ));
    }
    Ok(())
}

/// Checks the keys of a step or rounding of the calling program.
fn are_valid(step: &str, keys: &[StepKey]) -> Result<()> {
    for (i, key) in keys.iter().enumerate() {
        let wrong = match key.name {
            name if keys[..i].iter().any(|other| other.name == name) => "is there twice",
            "kind" => "has the name of the step in a recipe file",
            name if name.is_empty() || name.contains([',', ' ', '.', '=']) => {
                "is empty, or has a comma, a space, `.` or `=`"
            }
            _ if key.setting.is_some() || key.is_file => {
                "has a setting or names a file, which only keys of the library's steps may"
            }
            _ => continue,
        };
        return Err(Error::usage(
            format!("the key `{}` of `{step}` {wrong}", key.name),
            "change it in the program that adds it",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::method;
    use crate::transform::Awq;

    #[test]
    fn names_that_are_taken_are_refused() {
        assert!(Extensions::default().check().is_ok());
        let named = |name: &'static str| Method { name: name.into(), ..method("rotate,awq").unwrap() };
        let methods = |name| Extensions { methods: vec![named(name)], ..Extensions::default() };
        assert!(methods("mine").check().is_ok());
        let awq = Extensions { transforms: vec![&Awq], ..Extensions::default() };
        let format = Extensions { containers: vec![CONTAINERS[0]], ..Extensions::default() };
        for (extensions, expected) in [
            (awq, "the name `awq` of a step is taken"),
            (format, "the name `compressed-tensors` of a format is taken"),
            (methods("gptq"), "the name `gptq` of a method is taken"),
            (methods("a,b"), "has a comma"),
            (methods(""), "is empty"),
        ] {
            let error = extensions.check().unwrap_err();
            assert_eq!(error.category(), crate::Category::Usage);
            assert!(error.to_string().contains(expected), "{error}");
        }
        assert_eq!(methods("mine").method("rotate,awq").unwrap().name, "mine", "named by its own method");
    }
}
