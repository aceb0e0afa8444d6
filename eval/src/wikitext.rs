//! WikiText-2's raw test split in the two forms in which tools score it.

use std::borrow::Cow;

use quant_formats::digest::sha256_hex;

use crate::Profile;

/// SHA-256 of `wiki.test.raw` (1,290,590 bytes), the file that llama.cpp scores.
const RAW: &str = "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08";
/// SHA-256 of its 4358 rows as the `datasets` library gives them, joined by two newlines.
const JOINED: &str = "696cca6b65a171b0a358a4be6732cdfdf2dd6164a32e20fd70e3c13fc4dfae83";

/// Returns WikiText-2 in the form that a rule scores; `None` for other texts. For rules that score rows,
/// `wiki.test.raw` is split into lines; each keeps its line end, and blank lines become empty rows.
pub(crate) fn as_scored(text: &str, profile: Profile) -> Option<Cow<'_, str>> {
    let digest = sha256_hex(text);
    match profile_id(profile, &digest).starts_with("wt2-") {
        true => Some(Cow::Borrowed(text)),
        false if digest == RAW => {
            let row = |line| if str::trim(line).is_empty() { "" } else { line };
            Some(Cow::Owned(text.split_inclusive('\n').map(row).collect::<Vec<_>>().join("\n\n")))
        }
        false => None,
    }
}

pub(crate) fn profile_id(profile: Profile, text_sha256: &str) -> String {
    let name = profile.name();
    match (profile, text_sha256) {
        (Profile::Gptq { .. } | Profile::HfStride { .. }, JOINED) | (Profile::LlamaCpp { .. }, RAW) => {
            format!("wt2-{name}")
        }
        _ => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_raw_file_becomes_the_rows_of_the_literature() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/data/text/wiki.test.raw");
        let Ok(raw) = std::fs::read_to_string(path) else {
            eprintln!("SKIPPED: wiki.test.raw is not available");
            return;
        };
        let profile = Profile::Gptq { window: 2048 };
        let joined = as_scored(&raw, profile).unwrap();
        let digest = sha256_hex(joined.as_bytes());
        assert_eq!((joined.len(), profile_id(profile, &digest).as_str()), (1_296_370, "wt2-gptq-2048"));
        let profile = Profile::LlamaCpp { window: 512 };
        assert_eq!(as_scored(&raw, profile).unwrap(), raw);
        assert_eq!(as_scored("another", profile), None);
        assert_eq!(profile_id(profile, &sha256_hex(&raw)), "wt2-llamacpp-512");
        assert_eq!(profile_id(profile, &digest), "llamacpp-512");
    }
}
