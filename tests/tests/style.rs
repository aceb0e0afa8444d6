//! Counts phrases that `docs/style.md` replaces: their number may fall, but not rise. Also checks that documents name
//! tests that exist.

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
    ("told", 0, 1),
    ("anew", 0, 0),
    ("is none", 0, 3),
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
    ("side by side", 1, 0),
    ("not yet run", 1, 0),
    ("in vain", 0, 0),
    ("nobody", 2, 9),
    ("of ours", 0, 0),
    ("as alone", 0, 0),
    ("of another", 2, 17),
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

/// The table of planted errors in `docs/families.md` names tests and traps that exist.
#[test]
fn planted_errors_name_tests_that_exist() {
    let root = workspace_root();
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    let document = read("docs/families.md");
    let (_, table) = document.split_once("## Planted errors").unwrap();
    let table = table.split("\n## ").next().unwrap();
    let cells: Vec<&str> = table
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| error"))
        .map(|line| line.trim_end_matches([' ', '|']).rsplit(" | ").next().unwrap())
        .collect();
    let traps = read("tests/interop/check_families.py");
    let families = read("quant-core/tests/families.rs");
    let (mut named, mut planted) = (0, 0);
    for cell in &cells {
        // Two backticks enclose a title that contains backticks.
        let (titles, others): (Vec<_>, Vec<_>) = cell.split("``").enumerate().partition(|(i, _)| i % 2 == 1);
        let names = others.iter().flat_map(|(_, text)| text.split('`').skip(1).step_by(2));
        for name in titles.iter().map(|(_, title)| *title).chain(names) {
            if name.contains('_') && !name.contains(' ') {
                let (file, test) = match name.split_once("::tests::") {
                    Some((module, test)) => (read(&format!("quant-core/src/model/{module}.rs")), test),
                    None => (families.clone(), name),
                };
                assert!(file.contains(&format!("fn {test}(")), "no test is named {name}");
                named += 1;
            } else {
                // Parts of a title are left out at its beginning or end.
                let part = name.trim().trim_matches('…').trim();
                assert!(traps.contains(part), "no trap is named {name}");
                planted += 1;
            }
        }
    }
    assert!(cells.len() > 30 && named > 10 && planted > 80, "{} rows, {named}, {planted}", cells.len());
}
