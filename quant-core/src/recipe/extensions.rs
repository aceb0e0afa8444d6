//! The steps, methods and formats that may be named in requests: the library's, and those of the calling program.

use std::borrow::Cow;

use super::method::TRANSFORMS;
use super::{METHODS, Method, Rounding};
use crate::format::{CONTAINERS, Container, containers_with};
use crate::keys::StepKey;
use crate::model::Preparation;
use crate::names::{suggestion, unknown};
use crate::quantize::gptq::GptqSettings;
use crate::transform::Transform;
use crate::{Error, Result};

/// The name of GGUF as an output format. Its files are not described by recipes, but have plans of their own.
pub const GGUF: &str = "gguf";
/// The name of safetensors with floats as an output format. It is not described by recipes, because nothing is quantized.
pub const FLOATS: &str = "safetensors";

/// Steps, methods and formats that the calling program adds to those of this library.
///
/// [`QuantizeRequest::extensions`](crate::run::QuantizeRequest::extensions) makes them known by their names: in a
/// recipe file (`kind` of `[[transform]]`, `format`) and in settings (`method`, `format`). The default adds nothing.
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
    /// Methods.
    pub methods: Vec<Method>,
    /// Formats.
    pub containers: Vec<&'static dyn Container>,
}

impl Extensions {
    /// Checks that every name is unique and can be part of a comma-separated list.
    ///
    /// # Errors
    /// [`Error::Usage`] for a name that is empty, has a comma or a space, or is taken.
    pub fn check(&self) -> Result<()> {
        let prepared = Preparation::ALL.into_iter().map(Preparation::name);
        let rounded = Rounding::ALL.into_iter().map(Rounding::name);
        let steps = self.transforms().map(|t| t.name()).chain(prepared).chain(rounded).collect();
        let methods = self.methods().map(|m| &*m.name).collect();
        let formats = self.containers().map(|c| c.name()).collect();
        [("step", steps), ("method", methods), ("format", formats)]
            .into_iter()
            .try_for_each(|(kind, names): (_, Vec<&str>)| are_distinct(kind, &names))
    }

    /// The transforms of this library, then those of the calling program.
    pub fn transforms(&self) -> impl Iterator<Item = &'static dyn Transform> {
        TRANSFORMS.iter().chain(&self.transforms).copied()
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
        let rounding = [(Rounding::Gptq.name(), GptqSettings::keys())];
        let all = steps.chain(rounding).flat_map(|(step, keys)| keys.into_iter().map(move |key| (step, key)));
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
        let known = |step: &str| self.steps().iter().any(|(name, _)| *name == step);
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
        let named = Rounding::ALL.into_iter().find(|r| steps.last() == Some(&r.name()));
        if named.is_some() {
            steps.pop();
        }
        self.method_of(&steps, named.unwrap_or(Rounding::Nearest))
    }

    /// [`Method::of`] with the steps and methods of this library and of the calling program.
    ///
    /// # Errors
    /// As [`Method::of`].
    pub fn method_of(&self, steps: &[&str], rounding: Rounding) -> Result<Method> {
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
        if name == GGUF {
            return Err(Error::usage(
                "a recipe cannot name the format gguf, because no recipe applies to GGUF files",
                "set ‹format=gguf›, and ‹scheme› in place of the recipe",
            ));
        }
        if name == FLOATS {
            return Err(Error::usage(
                "a recipe cannot name the format safetensors, because no recipe applies to float checkpoints",
                "set ‹format=safetensors› and ‹scheme=bf16›, ‹scheme=f16› or ‹scheme=f32› in place of the recipe",
            ));
        }
        self.containers().find(|c| c.name() == name).ok_or_else(|| {
            let mut known: Vec<_> = self.containers().map(|c| c.name()).collect();
            known.extend([GGUF, FLOATS]);
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
            _ => continue,
        };
        return Err(Error::usage(
            format!("the name `{name}` of a {kind} {wrong}"),
            "give it another name in the program that adds it",
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
