//! Errors for unknown names and for paths that do not exist, with the name that was probably meant.

use std::path::{Component, Path, PathBuf};

use crate::Error;

/// The shortest name for which a longer name that contains it is suggested.
const MIN_PART: usize = 3;

/// Returns the known name that was probably meant: the one with the smallest edit distance, if at most half of the
/// letters differ, otherwise one that contains `name` or is contained in it, which also decides between equal distances.
/// Case does not matter. A name that differs only in its separators comes first.
///
/// ```
/// use quant_formats::names::nearest;
///
/// let known = ["awq", "gptq", "smoothquant"];
/// assert_eq!(nearest("AWQ", known), Some("awq"));
/// assert_eq!(nearest("gtpq", known), Some("gptq"));
/// assert_eq!(nearest("smooth", known), Some("smoothquant"));
/// assert_eq!(nearest("q4km", ["Q4_0", "Q4_K_M"]), Some("Q4_K_M"));
/// assert_eq!(nearest("rotate", known), None);
/// ```
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let name = name.to_lowercase();
    let all: Vec<_> = known.into_iter().map(|known| (known.to_lowercase(), known)).collect();
    let letters = |name: &str| name.chars().filter(|c| c.is_alphanumeric()).collect::<String>();
    let own = letters(&name);
    let same = all.iter().find(|(lower, _)| !own.is_empty() && letters(lower) == own);
    if let Some((_, known)) = same {
        return Some(known);
    }
    let contains = |whole: &str, part: &str| part.len() >= MIN_PART && whole.contains(part);
    let is_related = |lower: &str| contains(lower, &name) || contains(&name, lower);
    let distances =
        all.iter().map(|(lower, known)| (strsim::osa_distance(lower, &name), !is_related(lower), *known));
    let near = distances.min().filter(|(distance, ..)| 2 * distance <= name.chars().count());
    near.map(|(.., known)| known).or_else(|| {
        let related = all.iter().find(|(lower, _)| is_related(lower));
        related.map(|(_, known)| *known)
    })
}

/// The most entries of a directory with which a name is compared.
const MAX_ENTRIES: usize = 4096;

/// Returns the existing path that was probably meant by one that does not exist: a path that differs in one component,
/// and little. At most one directory is read, and only if it has at most 4096 entries.
pub fn nearest_path(path: &Path) -> Option<PathBuf> {
    if path.exists() {
        return None;
    }
    let directory = path.ancestors().skip(1).find(|above| above.as_os_str().is_empty() || above.is_dir())?;
    let mut rest = path.strip_prefix(directory).ok()?.components();
    let Some(Component::Normal(name)) = rest.next() else { return None };
    let name = name.to_str()?;
    let listed = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
    let entries: Vec<_> = std::fs::read_dir(listed).ok()?.take(MAX_ENTRIES + 1).collect();
    if entries.len() > MAX_ENTRIES {
        return None;
    }
    let entries = entries.into_iter().filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut entries: Vec<String> =
        entries.filter(|entry| entry.starts_with('.') == name.starts_with('.')).collect();
    entries.sort();
    let near = nearest(name, entries.iter().map(String::as_str))?;
    let [near_lower, lower] = [near, name].map(str::to_lowercase);
    let is_part = near_lower.contains(&lower) || lower.contains(&near_lower);
    if !is_part && strsim::osa_distance(&near_lower, &lower) > 1 + lower.chars().count() / 4 {
        return None;
    }
    let meant = directory.join(near).join(rest.as_path());
    let meant = if rest.as_path().as_os_str().is_empty() { directory.join(near) } else { meant };
    meant.exists().then_some(meant)
}

/// Returns the remedy for an unknown name: the nearest known name, if there is one, and then `listed`.
pub fn suggestion(name: &str, listed: impl Into<String>, known: &[&str]) -> String {
    let listed = listed.into();
    match nearest(name, known.iter().copied()) {
        Some(near) => format!("did you mean {near}? {listed}"),
        None => listed,
    }
}

/// Returns the error for a name of a `kind` that is not in `known`; `plural` introduces the list of known names.
///
/// ```
/// let error = quant_formats::names::unknown("search", "fats", "searches", &["fast", "reference"]);
/// assert_eq!(error.to_string(), "unknown search `fats`");
/// assert_eq!(error.remedy().to_string(), "did you mean fast? known searches: fast, reference");
/// ```
pub fn unknown(kind: &str, name: &str, plural: &str, known: &[&str]) -> Error {
    let listed = format!("known {plural}: {}", known.join(", "));
    Error::usage(format!("unknown {kind} `{name}`"), suggestion(name, listed, known))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_suggested() {
        let known = ["alpha", "producers"];
        assert_eq!(nearest("alhpa", known), Some("alpha"));
        assert_eq!(nearest("Producer", known), Some("producers"));
        assert_eq!(nearest("seed", known), None);
        assert_eq!(nearest("lama", ["lfm2", "llama3"]), Some("llama3"));
        assert_eq!(nearest("", known), None);
        assert_eq!(nearest("alpha", []), None);
        assert_eq!(suggestion("alpa", "its keys are …", &known), "did you mean alpha? its keys are …");
        assert_eq!(suggestion("seed", "its keys are …", &known), "its keys are …");
    }

    #[test]
    fn the_nearest_path_is_suggested() {
        let directory = tempfile::tempdir().unwrap();
        let at = |path: &str| directory.path().join(path);
        for path in ["models/small", "models/large", "texts", ".cache", "b\u{1b}[31mad"] {
            std::fs::create_dir_all(at(path)).unwrap();
        }
        std::fs::write(at("texts/stories.txt"), "").unwrap();
        for (given, meant) in [
            ("model/small", Some(at("models/small"))),
            ("models/smal", Some(at("models/small"))),
            ("models/Large", Some(at("models/large"))),
            ("texts/story.txt", Some(at("texts/stories.txt"))),
            ("texts/stories", Some(at("texts/stories.txt"))),
            ("cache", None),
            ("b[31mad", Some(at("b\u{1b}[31mad"))),
            ("models/../tex", Some(at("models/../texts"))),
            // These differ in two components, by too much, or not at all.
            ("model/smal", None),
            ("models/tiny", None),
            ("texts/other.txt", None),
            ("models/small", None),
            ("texts/stories.txt/part", None),
        ] {
            assert_eq!(nearest_path(&at(given)), meant, "{given}");
        }
        assert_eq!(nearest_path(Path::new("Cargo.tml")), Some(PathBuf::from("Cargo.toml")));
        assert_eq!(nearest_path(Path::new("")), None);
        for i in 0..MAX_ENTRIES {
            std::fs::write(at("models").join(i.to_string()), "").unwrap();
        }
        assert_eq!(nearest_path(&at("models/smal")), None);
    }

    #[test]
    fn a_part_of_a_name_is_suggested_only_without_a_nearer_name() {
        assert_eq!(nearest("gptq", ["awq-w4a16", "gptq-w4a16"]), Some("gptq-w4a16"));
        assert_eq!(nearest("autoawq", ["compressed-tensors", "awq"]), Some("awq"));
        // Two letters occur in many names.
        assert_eq!(nearest("c4", ["c4-validation"]), None);
        assert_eq!(nearest("gptqq", ["gptq-w4a16", "gptq"]), Some("gptq"));
    }
}
