//! Settings of transforms.

use std::any::{Any, TypeId};
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::keys::StepKey;
use crate::model::KvScheme;
use crate::quantize::ScaleSearch;
use crate::{Error, Result};

/// Settings of all transforms, and of the run that they prepare weights for.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TransformSettings {
    /// The settings of each transform.
    pub steps: StepSettings,
    /// The values of the keys of transforms that do not store their settings in [`steps`](Self::steps), by the name of
    /// the transform.
    pub others: BTreeMap<&'static str, Map<String, Value>>,
    /// How keys and values will be cached; `None` for floats.
    pub kv: Option<KvScheme>,
    /// How the E4M3 scales of NVFP4 are chosen.
    pub scale_search: ScaleSearch,
}

impl TransformSettings {
    /// Returns the value of a key in [`others`](Self::others), if it is set.
    pub fn other(&self, transform: &str, key: &str) -> Option<&Value> {
        self.others.get(transform)?.get(key)
    }
}

/// The settings of transforms: one value of each type, the default if none was set. No code other than a transform's
/// own needs to know the type of its settings.
///
/// ```
/// use quant_core::transform::StepSettings;
///
/// #[derive(Debug, Clone, Default, PartialEq)]
/// struct Strength(f32);
///
/// let mut settings = StepSettings::default();
/// assert_eq!(settings.get::<Strength>(), Strength(0.0));
/// settings.set(Strength(0.5));
/// assert_eq!(settings.get::<Strength>(), Strength(0.5));
/// ```
#[derive(Clone, Default)]
pub struct StepSettings(BTreeMap<TypeId, Arc<dyn Stored>>);

impl StepSettings {
    /// Settings in which only this value is set.
    pub fn of<T: SettingsType>(value: T) -> Self {
        let mut settings = Self::default();
        settings.set(value);
        settings
    }

    /// Returns the value of this type, or its default.
    pub fn get<T: SettingsType>(&self) -> T {
        let stored = self.0.get(&TypeId::of::<T>());
        stored.and_then(|value| value.as_any().downcast_ref().cloned()).unwrap_or_default()
    }

    /// Sets the value of this type.
    pub fn set<T: SettingsType>(&mut self, value: T) {
        self.0.insert(TypeId::of::<T>(), Arc::new(value));
    }

    /// Changes the value of this type, or its default.
    pub fn change<T: SettingsType>(&mut self, change: impl FnOnce(&mut T)) {
        let mut value = self.get::<T>();
        change(&mut value);
        self.set(value);
    }
}

/// A type for the settings of a transform. Every type with these properties is one.
pub trait SettingsType: Any + Clone + Default + PartialEq + fmt::Debug + Send + Sync {}

impl<T: Any + Clone + Default + PartialEq + fmt::Debug + Send + Sync> SettingsType for T {}

trait Stored: fmt::Debug + Send + Sync {
    fn as_any(&self) -> &dyn Any;
    fn is_default(&self) -> bool;
    fn equals(&self, other: &dyn Stored) -> bool;
}

impl<T: SettingsType> Stored for T {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn is_default(&self) -> bool {
        *self == T::default()
    }

    fn equals(&self, other: &dyn Stored) -> bool {
        other.as_any().downcast_ref::<T>().is_some_and(|other| self == other)
    }
}

impl PartialEq for StepSettings {
    /// A value that is not set equals the default.
    fn eq(&self, other: &Self) -> bool {
        let covers = |one: &Self, other: &Self| {
            one.0.iter().all(|(id, value)| match other.0.get(id) {
                Some(other) => value.equals(&**other),
                None => value.is_default(),
            })
        };
        covers(self, other) && covers(other, self)
    }
}

impl fmt::Debug for StepSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.values()).finish()
    }
}

/// The key `alpha`, which this setting of requests sets.
pub(super) fn alpha_key(description: &str, setting: &'static str, help: &'static str) -> StepKey {
    let schema = json!({ "oneOf": [{ "type": "number", "minimum": 0, "maximum": 1 }, { "const": "auto" }] });
    StepKey::new("alpha", description, schema).with_setting(setting, help)
}

/// SmoothQuant's exponent: how much of the outliers is moved from the activations into the weights.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "alpha is a number from 0 to 1, or \"auto\"")]
pub enum Alpha {
    /// The same exponent for all producers.
    Fixed(f32),
    /// For each producer, the exponent with the least error in the block's output.
    Auto(Automatic),
}

/// The value `auto` of an exponent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Automatic {
    /// Found by a search.
    Auto,
}

impl Alpha {
    /// Checks that the exponent is from 0 to 1, or `auto`.
    ///
    /// # Errors
    /// [`Error::Usage`] if it is not.
    pub fn check(self) -> Result<()> {
        match self {
            Self::Fixed(alpha) if !(0.0..=1.0).contains(&alpha) => Err(Error::usage(
                format!("alpha is {alpha}; it must be from 0 to 1, or auto"),
                "choose a value in this range: 0 leaves all outliers in the activations, and 1 moves all of \
                them into the weights",
            )),
            _ => Ok(()),
        }
    }
}

impl Alpha {
    /// Parses the value of a recipe's key.
    ///
    /// # Errors
    /// [`Error::Usage`] when it is neither a number from 0 to 1 nor `auto`.
    pub fn from_value(value: &Value) -> Result<Self> {
        match value {
            Value::Number(number) => number.to_string().parse(),
            Value::String(text) => text.parse(),
            other => Err(invalid_alpha(&other.to_string())),
        }
    }

    /// The value in a recipe, which [`from_value`](Self::from_value) reads back.
    pub fn to_value(self) -> Value {
        match self {
            // The shortest digits that read back as the same `f32`.
            Self::Fixed(alpha) => alpha.to_string().parse::<f64>().map_or(Value::Null, Value::from),
            Self::Auto(_) => "auto".into(),
        }
    }
}

fn invalid_alpha(text: &str) -> Error {
    Error::usage(format!("invalid alpha `{text}`"), "give a number from 0 to 1, or auto")
}

impl FromStr for Alpha {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text == "auto" {
            return Ok(Self::Auto(Automatic::Auto));
        }
        let alpha = text.parse().map(Self::Fixed).map_err(|_| invalid_alpha(text))?;
        alpha.check()?;
        Ok(alpha)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Clone, Default, PartialEq)]
    struct Own(u8);
    #[derive(Debug, Clone, Default, PartialEq)]
    struct Another(u8);

    #[test]
    fn every_type_has_its_own_value() {
        let mut settings = StepSettings::of(Own(3));
        assert_eq!((settings.get::<Own>(), settings.get::<Another>()), (Own(3), Another(0)));
        assert_ne!(settings, StepSettings::default());
        assert_ne!(StepSettings::default(), settings);
        assert_ne!(settings, StepSettings::of(Another(3)));
        settings.change(|Own(value)| *value -= 3);
        assert_eq!(settings, StepSettings::default(), "a value that is not set is the default");
        assert_eq!(StepSettings::of(Another(1)).clone(), StepSettings::of(Another(1)));
    }

    #[test]
    fn exponents() {
        assert_eq!("0.5".parse::<Alpha>().unwrap(), Alpha::Fixed(0.5));
        assert_eq!("auto".parse::<Alpha>().unwrap(), Alpha::Auto(Automatic::Auto));
        for text in ["1.1", "-0.1", "NaN", "inf", "a", ""] {
            assert!(text.parse::<Alpha>().is_err(), "{text}");
        }
        for alpha in [Alpha::Fixed(0.85), Alpha::Fixed(0.1), Alpha::Fixed(1.0), Alpha::Auto(Automatic::Auto)]
        {
            assert_eq!(Alpha::from_value(&alpha.to_value()).unwrap(), alpha);
        }
        assert_eq!(Alpha::Fixed(0.85).to_value().to_string(), "0.85");
        for value in [json!(1.5), json!(true), json!("best"), json!([0.5])] {
            assert!(Alpha::from_value(&value).is_err(), "{value}");
        }
    }
}
