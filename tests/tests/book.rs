//! The pages of the site: all are listed, their links are valid, and the tests that a page names exist.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use quant_tests::workspace_root;

const SKIPPED: [&str; 2] = ["target", ".git"];

/// All Markdown files below a directory, by path from the root.
fn documents(directory: &Path, found: &mut BTreeMap<PathBuf, String>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            if !SKIPPED.contains(&&*name) {
                documents(&path, found);
            }
        } else if name.ends_with(".md") {
            let text = std::fs::read_to_string(&path).unwrap();
            found.insert(path.strip_prefix(workspace_root()).unwrap().to_owned(), text);
        }
    }
}

/// A page without its code blocks and code spans.
fn prose(text: &str) -> String {
    let mut out = String::new();
    let mut is_code = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        } else if !is_code {
            out.push_str(line);
            out.push('\n');
        }
    }
    out
}

fn links(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for paragraph in prose(text).split("\n\n") {
        let without_spans: String = paragraph.split('`').step_by(2).collect();
        for after in without_spans.split("](").skip(1) {
            found.push(after.split(')').next().unwrap().to_owned());
        }
    }
    found
}

/// The anchors that renderers generate for a page's headings.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    for line in prose(text).lines().filter(|line| line.starts_with('#')) {
        let words = line.trim_start_matches('#').trim().to_lowercase();
        let kept = words.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
        let slug: String = kept.map(|c| if c == ' ' { '-' } else { c }).collect();
        let mut name = slug.clone();
        for number in 1.. {
            if anchors.insert(name.clone()) {
                break;
            }
            name = format!("{slug}-{number}");
        }
    }
    anchors
}

fn normal(path: &Path) -> PathBuf {
    let mut parts = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => assert!(parts.pop(), "{} points outside the repository", path.display()),
            Component::CurDir => {}
            other => parts.push(other),
        }
    }
    parts
}

fn broken(pages: &BTreeMap<PathBuf, String>) -> Vec<String> {
    let mut broken = Vec::new();
    for (page, text) in pages {
        for link in links(text).into_iter().filter(|link| !link.contains("://")) {
            let (path, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = match path {
                "" => page.clone(),
                _ => normal(&page.parent().unwrap().join(path)),
            };
            let there = pages.contains_key(&target) || workspace_root().join(&target).exists();
            let named = anchor.is_empty() || pages.get(&target).is_some_and(|t| anchors(t).contains(anchor));
            if !there || !named {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    broken
}

#[test]
fn links_lead_somewhere() {
    let mut pages = BTreeMap::new();
    documents(&workspace_root(), &mut pages);
    assert!(pages.len() > 60, "{}", pages.len());
    let broken = broken(&pages);
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn a_broken_link_is_found() {
    let text = "# A heading: `b`, c\n\n[x](b.md) [y](b.md#gone) [z](#a-heading-b-c) `[q](r)`, `of two\nlines` [u](#gone)\n";
    let pages = [("d/a.md", text), ("d/b.md", "# B\n")];
    let pages = pages.map(|(path, text)| (PathBuf::from(path), text.to_owned())).into();
    assert_eq!(broken(&pages), ["d/a.md: b.md#gone", "d/a.md: #gone"]);
}

/// The program that builds the site lists the records; all other documents are listed by hand.
#[test]
fn every_page_is_in_the_summary_once() {
    let mut pages = BTreeMap::new();
    documents(&workspace_root(), &mut pages);
    let summary = pages.remove(Path::new("docs/SUMMARY.md")).unwrap();
    let mut listed = BTreeMap::new();
    for link in links(&summary) {
        *listed.entry(normal(&Path::new("docs").join(link))).or_insert(0) += 1;
    }
    for (page, times) in &listed {
        assert_eq!(*times, 1, "{}", page.display());
    }
    let missing: Vec<_> = pages
        .keys()
        .filter(|page| !page.starts_with("benchmarks/record") && !listed.contains_key(*page))
        .collect();
    assert!(missing.is_empty(), "docs/SUMMARY.md lacks {missing:?}");
}

/// The code spans of a line, each with the text before it.
fn spans(line: &str) -> Vec<(&str, &str)> {
    let (mut found, mut rest) = (Vec::new(), line);
    while let Some(begin) = rest.find('`') {
        let ticks = rest[begin..].len() - rest[begin..].trim_start_matches('`').len();
        let after = &rest[begin + ticks..];
        let Some(end) = after.find(&rest[begin..begin + ticks]) else { break };
        found.push((&rest[..begin], after[..end].trim()));
        rest = &after[end + ticks..];
    }
    found
}

/// Whether a name that may be shortened with `…` stands for `whole`.
fn stands_for(short: &str, whole: &str) -> bool {
    let parts: Vec<&str> = short.split('…').map(str::trim).collect();
    let mut rest = whole;
    for (i, part) in parts.iter().enumerate() {
        let Some(at) = rest.find(part).filter(|at| i > 0 || *at == 0) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.is_empty() || parts.len() > 1 && parts.last() == Some(&"")
}

/// The names of the traps in a check of the interop test: the keys of its dictionaries of traps.
fn traps(check: &str) -> Vec<String> {
    let text = std::fs::read_to_string(workspace_root().join("tests/interop").join(check)).unwrap();
    let (mut found, mut is_inside) = (Vec::new(), false);
    for line in text.lines() {
        is_inside = match line {
            _ if line.ends_with("TRAPS = {") => true,
            "}" => false,
            _ => is_inside,
        };
        let key = line.strip_prefix("    \"").filter(|_| is_inside);
        found.extend(key.and_then(|key| key.split_once("\": (")).map(|(name, _)| name.to_owned()));
    }
    found
}

/// All Rust sources below a directory.
fn sources(directory: &Path, found: &mut Vec<(PathBuf, String)>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            found.push((path, text));
        }
    }
}

/// The table of planted errors names traps of the interop test and functions of other tests. Each must exist, and every
/// trap must be in the table.
#[test]
fn planted_errors_are_tested_as_the_page_says() {
    let page = std::fs::read_to_string(workspace_root().join("docs/families.md")).unwrap();
    let (_, section) = page.split_once("\n## Planted errors\n").unwrap();
    let section = section.split("\n## ").next().unwrap();
    let known: Vec<String> =
        ["family_traps.py", "check_vision_language.py"].into_iter().flat_map(traps).collect();
    assert!(known.len() > 100, "{}", known.len());
    let mut code = Vec::new();
    for directory in ["quant-core/src", "quant-core/tests"] {
        sources(&workspace_root().join(directory), &mut code);
    }
    let is_test = |name: &str| {
        let (module, function) = name.split_once("::").unwrap_or(("tests/families", name));
        let (_, function) = function.rsplit_once("::").unwrap_or(("", function));
        let declared = format!("fn {function}(");
        code.iter().any(|(path, text)| path.to_string_lossy().contains(module) && text.contains(&declared))
    };
    let (mut cited, mut missing, mut rows) = (BTreeSet::new(), Vec::new(), 0);
    for row in section.lines().filter(|line| line.starts_with("| ")) {
        let (_, tests) = row.trim_matches('|').split_once(" | ").unwrap();
        rows += 1;
        for part in tests.split("; ") {
            let mut is_trap = false;
            for (before, name) in spans(part) {
                is_trap |= before.contains("trap");
                match is_trap {
                    true => {
                        let named: Vec<&String> =
                            known.iter().filter(|trap| stands_for(name, trap)).collect();
                        if named.is_empty() {
                            missing.push(format!("no trap is called `{name}`"));
                        }
                        cited.extend(named);
                    }
                    false if !is_test(name) => missing.push(format!("no test is called `{name}`")),
                    false => {}
                }
            }
        }
    }
    assert!(rows > 40, "{rows}");
    missing.extend(
        known.iter().filter(|trap| !cited.contains(trap)).map(|trap| format!("`{trap}` is not in the table")),
    );
    assert!(missing.is_empty(), "docs/families.md: {}", missing.join("; "));
}

#[test]
fn shortened_names_stand_for_whole_ones() {
    for (short, whole, stands) in [
        ("no sinks", "no sinks", true),
        ("no sinks", "no sinks at all", false),
        ("no …", "no sinks", true),
        ("… Hy3's …", "no correction of Hy3's scores", true),
        ("… not scaled", "weights of groups not scaled", true),
        ("… not scaled", "not scaled twice", false),
        ("keys …", "no keys of blocks", false),
    ] {
        assert_eq!(stands_for(short, whole), stands, "{short} {whole}");
    }
    assert_eq!(spans("trap `a`, `` `b` c ``"), [("trap ", "a"), (", ", "`b` c")]);
}
