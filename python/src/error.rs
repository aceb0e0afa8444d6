//! Converts errors of the library to exceptions of the package.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use quant_core::Error;
use quant_core::wording::worded;

use crate::wording::Keywords;

/// Builds the exception for an error with `fewbits._errors`, which defines the classes.
pub fn exception(py: Python<'_>, error: &Error) -> PyErr {
    let made = || -> PyResult<Bound<'_, PyAny>> {
        let fields = PyDict::new(py);
        fields.set_item("category", error.category().name())?;
        fields.set_item("exit_code", error.category().exit_code())?;
        fields.set_item("message", worded(&error.to_string(), &Keywords).into_owned())?;
        fields.set_item("remedy", error.remedy().worded(&Keywords).into_owned())?;
        fields.set_item("tensor", error.tensor())?;
        fields.set_item("path", error.path().map(|path| path.display().to_string()))?;
        py.import("fewbits._errors")?.getattr("make")?.call((), Some(&fields))
    };
    match made() {
        Ok(exception) => PyErr::from_value(exception),
        Err(failed) => failed,
    }
}
