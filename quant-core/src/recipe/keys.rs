//! Setting a key of a step by its name, for requests and the command line.

use std::path::Path;

use serde_json::Value;

use super::{METHODS, Method, Recipe, steps};
use crate::keys::{StepKey, as_text_if_string};
use crate::names::suggestion;
use crate::round::ROUNDINGS;
use crate::{Error, Result};

impl Method {
    /// Returns the keys of a step or of the rounding; `None` if the method does not have it.
    pub fn keys_of(&self, step: &str) -> Option<Vec<StepKey>> {
        if self.rounds_by(step) {
            return Some(self.rounding.keys());
        }
        let transform = self.transform(step).map(|transform| transform.keys());
        transform.or_else(|| self.steps().contains(&step).then(Vec::new))
    }

    /// Whether this is the name of the method's rounding, and the rounding has settings.
    fn rounds_by(&self, step: &str) -> bool {
        step == self.rounding.name() && !self.rounding.keys().is_empty()
    }
}

impl Recipe {
    /// Sets a key of a step of the recipe's method, or of its rounding. The step checks the value; whether it fits the
    /// values of other keys is checked by [`Plan::new`](super::Plan::new). For a key whose schema is a string, a number
    /// or a boolean is its text.
    ///
    /// ```
    /// use quant_core::recipe::Recipe;
    ///
    /// let mut recipe = Recipe::preset("awq-w4a16")?;
    /// recipe.set("awq", "search", &"reference".into())?;
    /// assert!(recipe.to_toml().contains("search = \"reference\""));
    /// let error = recipe.set("awq", "saerch", &"reference".into()).unwrap_err();
    /// assert!(error.remedy().marked().contains("did you mean search?"));
    /// # Ok::<(), quant_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Usage`] for a step that the method does not have, a key that the step does not have or that names a
    /// file, and an invalid value.
    pub fn set(&mut self, step: &str, key: &str, value: &Value) -> Result<()> {
        let keys = self.method.keys_of(step).ok_or_else(|| self.no_step(step))?;
        let known = keys.iter().find(|known| known.name == key).ok_or_else(|| no_key(step, key, &keys))?;
        if let (true, Some(setting)) = (known.is_file, known.setting) {
            return Err(Error::usage(
                format!("`{key}` of `{step}` names a file, which ‹steps› cannot set"),
                format!("set ‹{setting}›"),
            ));
        }
        let value = as_text_if_string(value, &known.schema);
        let set = match self.method.transform(step) {
            Some(transform) => transform.set(key, &value, &mut self.settings),
            None => self.method.rounding.set(key, &value, &mut self.settings),
        };
        set.map_err(|error| match error {
            Error::Usage { message, remedy } => Error::usage(format!("`{step}.{key}`: {message}"), remedy),
            other => other,
        })
    }

    pub(crate) fn check_step(&self, step: &str) -> Result<()> {
        self.method.keys_of(step).map(drop).ok_or_else(|| self.no_step(step))
    }

    /// Reads the file that a key of a step names.
    ///
    /// # Errors
    /// [`Error::Usage`] for a step that the method does not have, and a key that it does not have or that names no file;
    /// when the file cannot be read or is invalid.
    pub fn set_file(&mut self, step: &str, key: &str, path: &Path) -> Result<()> {
        let transform = self.method.transform(step).ok_or_else(|| self.no_step(step))?;
        let keys = transform.keys();
        if !keys.iter().find(|known| known.name == key).ok_or_else(|| no_key(step, key, &keys))?.is_file {
            return Err(Error::usage(format!("`{key}` of `{step}` does not name a file"), "set its value"));
        }
        transform.set_file(key, path, &mut self.settings)
    }

    fn no_step(&self, step: &str) -> Error {
        let mut own = self.method.steps();
        own.extend([self.method.rounding.name()].into_iter().filter(|name| self.method.rounds_by(name)));
        let listed = match own[..] {
            [] => "leave them out: it has no steps with settings".to_owned(),
            _ => format!("its steps are {}", own.join(", ")),
        };
        let known: Vec<_> = steps().into_iter().map(|(name, _)| name).collect();
        let known = [known, ROUNDINGS.iter().map(|rounding| rounding.name()).collect()].concat();
        // Steps of the calling program are known only if the method has them.
        let meant = [&known[..], &own].concat();
        if self.method.rounding.name() == step {
            return Error::usage(
                format!("‹steps› has settings of `{step}`, which has none"),
                format!("leave them out; {listed}"),
            );
        }
        Error::usage(
            format!("‹steps› has settings of `{step}`, which is not a step of method `{}`", self.method.name),
            match known.contains(&step) {
                true => format!("{listed}; to use `{step}`, {}", method_with(step)),
                false => suggestion(step, listed, &meant),
            },
        )
    }
}

/// Returns the advice for choosing a method that has a step or a rounding.
pub(crate) fn method_with(step: &str) -> String {
    let has = |method: &&Method| method.steps().contains(&step) || method.rounding.name() == step;
    match METHODS.iter().find(|method| method.name == step).or_else(|| METHODS.iter().find(has)) {
        Some(method) if method.name == step => format!("choose ‹method={step}›"),
        Some(method) => format!("choose a method with `{step}`, such as {}", method.name),
        None => format!("add `{step}` to the steps"),
    }
}

pub(crate) fn no_key(step: &str, key: &str, known: &[StepKey]) -> Error {
    let names: Vec<_> = known.iter().filter(|key| !key.is_file).map(|key| key.name).collect();
    let listed = match names[..] {
        [] => "it has no keys".to_owned(),
        _ => format!("its keys are {}", names.join(", ")),
    };
    Error::usage(
        format!("‹steps› has the key `{key}`, which `{step}` does not know"),
        suggestion(key, listed, &names),
    )
}
