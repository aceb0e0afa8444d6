//! Checks that readers of several formats share.

use serde_json::{Map, Value};

use crate::checkpoint::{Dtype, TensorInfo, TensorSource, TensorSpec};
use crate::{Error, Result};

/// Checks that the tensors exist with these shapes, and with these dtypes or others that `fits` accepts.
///
/// # Errors
/// [`Error::MissingTensor`], [`Error::TensorDtype`] or [`Error::TensorShape`] for the first that differs.
pub(super) fn check_specs(
    source: &dyn TensorSource,
    specs: &[TensorSpec],
    fits: impl Fn(&TensorSpec, Dtype) -> bool,
) -> Result<()> {
    specs.iter().try_for_each(|spec| {
        let TensorInfo { dtype, shape } = source.require(&spec.name)?;
        if *dtype != spec.info.dtype && !fits(spec, *dtype) {
            return Err(Error::TensorDtype {
                path: source.location(&spec.name),
                tensor: spec.name.clone(),
                expected: spec.info.dtype.to_string(),
                got: dtype.to_string(),
            });
        }
        if *shape != spec.info.shape {
            return Err(Error::TensorShape {
                path: source.location(&spec.name),
                tensor: spec.name.clone(),
                expected: spec.info.shape.clone(),
                got: shape.clone(),
            });
        }
        Ok(())
    })
}

/// Returns the names in `modules_to_not_convert`, if any.
///
/// # Errors
/// A reason that names the key, when it is not an array of strings.
pub(super) fn modules_to_not_convert(config: &Map<String, Value>) -> Result<Vec<String>, String> {
    const KEY: &str = "modules_to_not_convert";
    match config.get(KEY).filter(|value| !value.is_null()) {
        None => Ok(Vec::new()),
        Some(Value::Array(names)) => {
            let names: Option<_> = names.iter().map(|name| name.as_str().map(str::to_owned)).collect();
            names.ok_or_else(|| format!("`quantization_config.{KEY}` contains an entry that is not a string"))
        }
        Some(_) => Err(format!("`quantization_config.{KEY}` is not an array")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::checkpoint::MemorySource;

    #[test]
    fn dtypes_and_shapes_are_compared() {
        let mut source = MemorySource::new();
        source.insert("a", Dtype::F16, [2, 3], vec![0; 12]).unwrap();
        source.insert("b", Dtype::I64, [1], vec![0; 8]).unwrap();
        let check = |dtype, shape: [usize; 2], wide: bool| {
            let specs = [TensorSpec::new("a", dtype, shape), TensorSpec::new("b", Dtype::I32, [1])];
            check_specs(&source, &specs, |spec, dtype| wide && spec.name == "b" && dtype == Dtype::I64)
        };
        assert!(check(Dtype::F16, [2, 3], true).is_ok());
        assert!(
            matches!(check(Dtype::F16, [2, 3], false), Err(Error::TensorDtype { tensor, .. }) if tensor == "b")
        );
        assert!(
            matches!(check(Dtype::Bf16, [2, 3], true), Err(Error::TensorDtype { tensor, .. }) if tensor == "a")
        );
        assert!(
            matches!(check(Dtype::F16, [3, 2], true), Err(Error::TensorShape { got, .. }) if got == [2, 3])
        );
        let missing = check_specs(&source, &[TensorSpec::new("c", Dtype::F16, [1])], |_, _| true);
        assert!(matches!(missing, Err(Error::MissingTensor { tensor, .. }) if tensor == "c"));
    }

    #[test]
    fn names_of_float_modules() {
        let parse = |value: Value| modules_to_not_convert(value.as_object().unwrap());
        assert_eq!(parse(json!({})).unwrap(), [""; 0]);
        assert_eq!(parse(json!({ "modules_to_not_convert": null })).unwrap(), [""; 0]);
        assert_eq!(parse(json!({ "modules_to_not_convert": ["a", "b"] })).unwrap(), ["a", "b"]);
        for (value, reason) in [(json!("a"), "is not an array"), (json!(["a", 1]), "not a string")] {
            let found = parse(json!({ "modules_to_not_convert": value })).unwrap_err();
            assert!(found.contains("`quantization_config.modules_to_not_convert`") && found.contains(reason));
        }
    }
}
