//! Names that were given to the wrong setting: `fp8` as a method.

use crate::gguf;
use crate::recipe::{Extensions, FLOATS, GGUF, PRESETS, kv};
use crate::scheme::SchemeRequest;
use crate::{Error, Result};

/// Adds to the error for an unknown name of `setting` which other setting has that name.
pub(super) fn explained<T>(
    result: Result<T>,
    setting: &str,
    name: &str,
    extensions: &Extensions,
) -> Result<T> {
    result.map_err(|error| match (error, belongs_to(setting, name, extensions)) {
        (Error::Usage { message, remedy }, Some(place)) => {
            Error::usage(message, format!("{place}\n  {}", remedy.marked()))
        }
        (error, _) => error,
    })
}

fn belongs_to(setting: &str, name: &str, extensions: &Extensions) -> Option<String> {
    if setting == "format" && name.contains(',') {
        let alone = [GGUF, FLOATS].into_iter();
        let alone = alone.filter(|alone| name.split(',').any(|one| one.trim().eq_ignore_ascii_case(alone)));
        if let Some(alone) = alone.into_iter().next() {
            return Some(format!(
                "a run that writes {alone} writes no other format: run once with ‹format={alone}›, and once with the \
                other formats"
            ));
        }
        let each: Vec<String> = name.split(',').map(|one| format!("‹format={}›", one.trim())).collect();
        return Some(format!("set ‹format› once for each format: {}", each.join(" ")));
    }
    let is_scheme = || kv::split(name).is_ok_and(|(scheme, _)| scheme.parse::<SchemeRequest>().is_ok());
    let is_format = || extensions.containers().map(|c| c.name()).chain([GGUF, FLOATS]).any(|own| own == name);
    let kinds = [
        ("preset", PRESETS.iter().any(|preset| preset.name == name)),
        ("method", extensions.method(name).is_ok()),
        ("format", is_format()),
        ("scheme", is_scheme()),
    ];
    let found: Vec<&str> =
        kinds.into_iter().filter(|(kind, has)| *has && *kind != setting).map(|(kind, _)| kind).collect();
    if !found.is_empty() {
        let are: Vec<String> = found.iter().map(|kind| format!("a {kind}")).collect();
        let set: Vec<String> = found.iter().map(|kind| format!("‹{kind}={name}›")).collect();
        return Some(format!("`{name}` is {}: set {}", are.join(" and "), set.join(" or ")));
    }
    // The scheme's own error says so.
    let mixture = gguf::mixture(name).filter(|_| setting != "scheme")?;
    Some(format!("{} is a GGUF quantization type: set ‹format={GGUF}› and ‹scheme={name}›", mixture.name))
}
