//! The bits of keys and values in the name of a scheme: `w4a8kv4-g128` is `w4a8-g128` with a 4-bit KV cache.

use crate::model::KvScheme;
use crate::scheme::SchemeRequest;
use crate::{Error, Result};

/// Splits a scheme into the text without the cache, and the scheme of the cache: `None` for `kv16` or if the text names
/// no cache.
///
/// # Errors
/// [`Error::Usage`] if the cache is not `kv4`, `kv8`, `kvf8` or `kv16`.
pub fn split(text: &str) -> Result<(String, Option<KvScheme>)> {
    let lower = text.to_ascii_lowercase();
    if lower != text && lower.contains("kv") {
        let is_scheme = |(scheme, _): (String, _)| scheme.parse::<SchemeRequest>().is_ok();
        if split(&lower).is_ok_and(is_scheme) {
            return Err(Error::usage(
                format!("unknown scheme `{text}`"),
                format!("did you mean {lower}? Names of schemes are in lower case"),
            ));
        }
    }
    let (head, rest) = match text.split_once('-') {
        Some((head, rest)) => (head, Some(rest)),
        None => (text, None),
    };
    let Some((linear, bits)) = head.split_once("kv") else { return Ok((text.to_owned(), None)) };
    let bits = match bits {
        "16" => None,
        _ => Some(KvScheme::ALL.into_iter().find(|kv| kv.suffix() == bits).ok_or_else(|| {
            Error::usage(
                format!("scheme `{text}`: unknown cache `kv{bits}`"),
                "use kv4, kv8, kvf8 or kv16, as in w4a8kv4-g128",
            )
        })?),
    };
    let rest = rest.map_or(String::new(), |rest| format!("-{rest}"));
    Ok((format!("{linear}{rest}"), bits))
}

/// Inserts the cache into the text of a scheme, after its first word.
pub fn joined(scheme: &str, kv: Option<KvScheme>) -> String {
    let Some(bits) = kv.map(KvScheme::suffix) else { return scheme.to_owned() };
    match scheme.split_once('-') {
        Some((head, rest)) => format!("{head}kv{bits}-{rest}"),
        None => format!("{scheme}kv{bits}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_part_of_the_first_word() {
        for (text, linear, bits) in [
            ("w4a8kv4-g128-sym", "w4a8-g128-sym", Some(KvScheme::Kv4)),
            ("w8a8kv8", "w8a8", Some(KvScheme::Kv8)),
            ("wf8af8kvf8-channel", "wf8af8-channel", Some(KvScheme::Kvf8)),
            ("nvfp4kvf8", "nvfp4", Some(KvScheme::Kvf8)),
            ("w4a16-g64", "w4a16-g64", None),
        ] {
            assert_eq!(split(text).unwrap(), (linear.to_owned(), bits));
            assert_eq!(joined(linear, bits), text);
        }
        assert_eq!(split("w4a8kv16").unwrap(), ("w4a8".to_owned(), None));
        for text in ["w4a8kv5", "w4a8kv", "w4a8kvx-g128", "w4a8kv44", "w4a8kvf4", "w4a8kvf"] {
            assert!(matches!(split(text), Err(Error::Usage { .. })), "{text}");
        }
    }
}
