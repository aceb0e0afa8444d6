//! Names and sizes that a user writes: schemes, patterns, profiles, budgets.

use std::fmt::{Debug, Display};
use std::str::FromStr;

use quant_core::model::KvScheme;
use quant_core::recipe::Pattern;
use quant_core::run::MemoryBudget;
use quant_core::scheme::{LinearScheme, SchemeRequest};
use quant_evaluator::ProfileRequest;

use crate::input::Input;

const PARTS: [&str; 28] = [
    "w4",
    "w8",
    "a16",
    "a8",
    "-g128",
    "-channel",
    "-sym",
    "-asym",
    "-progressive",
    "-static",
    "kv4",
    "fp8",
    "nvfp4",
    "mxfp4",
    "wf8",
    "af8",
    "gptq-",
    "lmeval-rolling-",
    "2048",
    "0",
    "99999999999999999999",
    "GiB",
    "auto",
    "*",
    "?",
    "re:",
    "(a|b)+",
    "[",
];

/// A text from parts of valid names, or the bytes themselves.
fn name(data: &[u8]) -> String {
    match data.split_first() {
        Some((first, rest)) if !first.is_ascii() => {
            let mut input = Input::new(rest);
            (0..input.size(6)).map(|_| PARTS[input.below(PARTS.len())]).collect()
        }
        _ => String::from_utf8_lossy(data).into_owned(),
    }
}

/// A name that is accepted must be accepted as it is shown, with the same meaning.
fn returns<T: FromStr + Display + PartialEq + Debug>(text: &str)
where
    T::Err: Debug,
{
    if let Ok(value) = text.parse::<T>() {
        assert_eq!(value.to_string().parse::<T>().expect("a name that was shown"), value, "{text:?}");
    }
}

/// Names of any kind.
///
/// # Panics
/// If a property does not hold.
pub fn names(data: &[u8]) {
    let text = name(data);
    returns::<LinearScheme>(&text);
    returns::<KvScheme>(&text);
    returns::<SchemeRequest>(&text);
    drop(text.parse::<MemoryBudget>());
    if let Ok(pattern) = Pattern::new(&text) {
        let _ = pattern.matches("model.layers.0.self_attn.q_proj");
    }
    for (window, positions) in [(None, 256), (Some(16), 256), (Some(usize::MAX), usize::MAX)] {
        if let Ok(ProfileRequest { profile, .. }) = ProfileRequest::parse(&text, window, positions) {
            let again =
                ProfileRequest::parse(&profile.name(), None, positions).expect("a name that was shown");
            assert_eq!(again.profile, profile, "{text:?}");
        }
    }
}
