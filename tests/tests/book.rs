//! The pages of the site: all are listed, and their links are valid.

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
