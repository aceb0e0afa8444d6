//! Errors for unknown names, with the known name that was probably meant.

use crate::Error;

/// The shortest name for which a longer name that contains it is suggested.
const MIN_PART: usize = 3;

/// Returns the known name that was probably meant: the one with the smallest edit distance, if at most half of the
/// letters differ, otherwise one that contains `name` or is contained in it. Case does not matter. A name that differs
/// only in its separators comes first.
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
    let distances = all.iter().map(|(lower, known)| (strsim::osa_distance(lower, &name), *known));
    let near = distances.min().filter(|(distance, _)| 2 * distance <= name.chars().count());
    let contains = |whole: &str, part: &str| part.len() >= MIN_PART && whole.contains(part);
    near.map(|(_, known)| known).or_else(|| {
        let related = all.iter().find(|(lower, _)| contains(lower, &name) || contains(&name, lower));
        related.map(|(_, known)| *known)
    })
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
        assert_eq!(nearest("", known), None);
        assert_eq!(nearest("alpha", []), None);
        assert_eq!(suggestion("alpa", "its keys are …", &known), "did you mean alpha? its keys are …");
        assert_eq!(suggestion("seed", "its keys are …", &known), "its keys are …");
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
