//! Counts phrases that `docs/style.md` replaces: their number may fall, but not rise.

use std::path::{Path, PathBuf};

use quant_tests::workspace_root;

/// A phrase in lower case, and how often it occurs in documents and in sources. A count may only fall, and its limit with
/// it.
const LIMITS: &[(&str, usize, usize)] = &[
    ("whole numbers", 0, 0),
    ("second cache", 0, 0),
    ("a scale a", 0, 0),
    ("nats a token", 0, 0),
    ("gone on with", 0, 0),
    ("vouch", 0, 0),
    ("vouches", 0, 0),
    ("safety: as above", 0, 0),
    ("safety: see", 0, 0),
    ("contract above", 0, 0),
    ("here and below", 0, 0),
    ("told", 0, 2),
    ("anew", 0, 0),
    ("is none", 0, 7),
    ("usual", 0, 0),
    ("turned", 0, 0),
    ("at the most", 0, 0),
    ("at hand", 0, 0),
    ("is to be", 0, 0),
    ("readers disagree", 0, 0),
    ("computes something else", 0, 0),
    ("look at", 1, 0),
    ("looked at", 0, 0),
    ("known are", 0, 0),
    ("so many", 0, 0),
    ("side by side", 0, 0),
    ("not yet run", 0, 0),
    ("in vain", 0, 0),
    ("nobody", 2, 9),
    ("of ours", 0, 0),
    ("as alone", 0, 0),
    ("of another", 1, 15),
];

/// The project's files with one of these endings, without records and generated files.
fn files(directory: &Path, endings: &[&str], found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let skipped = ["target", "record", "CHANGELOG.md", "style.md", "style.rs"].contains(&&*name);
        if skipped || name.starts_with('.') {
            continue;
        }
        if path.is_dir() {
            files(&path, endings, found);
        } else if endings.iter().any(|ending| name.ends_with(ending)) {
            found.push(path);
        }
    }
}

/// How often a phrase occurs in a text, delimited by characters that are not part of a word. Line ends count as spaces,
/// also inside comments.
fn count(text: &str, phrase: &str) -> usize {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let at = |(start, _): &(usize, &str)| {
        let before = text[..*start].chars().next_back();
        let after = text[start + phrase.len()..].chars().next();
        !before.is_some_and(is_word) && !after.is_some_and(is_word)
    };
    text.match_indices(phrase).filter(at).count()
}

fn flat(text: &str) -> String {
    let words = text.split_whitespace().filter(|word| !["//", "///", "//!", "*", "#"].contains(word));
    words.collect::<Vec<_>>().join(" ").to_lowercase()
}

fn texts(endings: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    files(&workspace_root(), endings, &mut found);
    let text = |path: &PathBuf| String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned();
    // `is None` is Python.
    found.iter().map(|path| flat(&text(path).replace("is None", ""))).collect()
}

#[test]
fn phrases_become_rarer() {
    let [documents, sources] = [texts(&[".md"]), texts(&[".rs", ".h", ".c", ".cu", ".cuh", ".cpp", ".py"])];
    assert!(documents.len() > 30 && sources.len() > 300, "{} and {}", documents.len(), sources.len());
    let total = |texts: &[String], phrase: &str| texts.iter().map(|text| count(text, phrase)).sum::<usize>();
    let counts: Vec<_> = LIMITS
        .iter()
        .map(|(phrase, ..)| (*phrase, total(&documents, phrase), total(&sources, phrase)))
        .collect();
    let lines: Vec<String> = counts.iter().map(|(p, d, s)| format!("    ({p:?}, {d}, {s}),")).collect();
    assert!(
        counts == LIMITS,
        "docs/style.md has what to write where a count has risen; where it has fallen, lower its limit; counted:\n{}",
        lines.join("\n")
    );
}

#[test]
fn phrases_are_found_across_lines_and_not_inside_words() {
    let text = flat("/// A scale\n/// a row, and a\n// second   cache. Untold.");
    assert_eq!(text, "a scale a row, and a second cache. untold.");
    for (phrase, expected) in [("a scale a", 1), ("second cache", 1), ("told", 0), ("row", 1)] {
        assert_eq!(count(&text, phrase), expected, "{phrase}");
    }
}
