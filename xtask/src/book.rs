//! `cargo xtask book`: builds the documentation site with mdBook from the existing Markdown.
//!
//! Pages link to each other by their paths in the repository, and some link to records or sources outside `docs/`.
//! Therefore all documents are copied with their paths, together with the targets of their links. `docs/SUMMARY.md` is
//! rewritten relative to the repository's root, and the records are added to it. Finally, the links of the finished
//! site are checked.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::support::shell::{output, remove_dir, root, run as execute, target_dir, tool};

const MDBOOK: &str = "0.5.4";
const RECORDS: &str = "benchmarks/record";

/// Builds the site into `target/book/html` and checks its links.
///
/// # Errors
/// When mdBook cannot be installed or fails, or a link is broken.
pub fn run() -> Result<()> {
    let book = target_dir().join("book");
    if book.exists() {
        remove_dir(&book)?;
    }
    stage(&book)?;
    let html = book.join("html");
    execute(Command::new(tool("mdbook", MDBOOK)?).arg("build").arg(&book).arg("--dest-dir").arg(&html))?;
    let followed = follow(&html)?;
    println!("{}: {followed} links followed", html.join("index.html").display());
    Ok(())
}

fn tracked(pattern: &str) -> Result<Vec<PathBuf>> {
    let list = output(Command::new("git").current_dir(root()).args(["ls-files", "--", pattern]))?;
    Ok(list.lines().map(PathBuf::from).collect())
}

fn stage(book: &Path) -> Result<()> {
    let source = book.join("src");
    std::fs::create_dir_all(&source)?;
    for name in ["book.toml", "book.css"] {
        let from = root().join("docs").join(name);
        std::fs::copy(&from, book.join(name)).with_context(|| format!("cannot copy {}", from.display()))?;
    }
    let pages: BTreeSet<PathBuf> =
        tracked("*.md")?.into_iter().filter(|p| root().join(p).is_file()).collect();
    for page in &pages {
        let text = read(&root().join(page))?;
        let text = match page.as_path() {
            p if p == Path::new("docs/SUMMARY.md") => continue,
            _ => with_links(&text, |link| rewritten(page, link, &pages, &source))?,
        };
        write(&source.join(page), &text)?;
    }
    write(&source.join("SUMMARY.md"), &summary(&pages)?)
}

/// Returns the summary with paths relative to the root, and with a line for every record.
fn summary(pages: &BTreeSet<PathBuf>) -> Result<String> {
    let text = read(&root().join("docs/SUMMARY.md"))?;
    let mut text = with_links(&text, |link| {
        let target = normal(&Path::new("docs").join(link)).context("it is outside the repository")?;
        Ok(target.display().to_string())
    })?;
    let records = pages.iter().filter(|page| page.starts_with(RECORDS));
    let mut by_kind: BTreeMap<String, Vec<&PathBuf>> = BTreeMap::new();
    for record in records {
        let kind = record.parent().and_then(Path::file_name).context("a record has a parent directory")?;
        by_kind.entry(kind.to_string_lossy().into_owned()).or_default().push(record);
    }
    let mut lines = String::new();
    for (kind, mut records) in by_kind {
        records.reverse();
        for record in records {
            let day: String = record
                .file_stem()
                .map(|s| s.to_string_lossy().chars().take(10).collect())
                .unwrap_or_default();
            lines.push_str(&format!("  - [{kind}, {day}]({})\n", record.display()));
        }
    }
    let place = "- [Benchmarks](benchmarks/README.md)\n";
    ensure!(text.contains(place), "docs/SUMMARY.md has no line `{}`", place.trim());
    text = text.replace(place, &format!("{place}{lines}"));
    Ok(text)
}

/// Rewrites a link of a page. A link to a directory of records becomes a link to its newest record; files of other
/// kinds are copied.
fn rewritten(page: &Path, link: &str, pages: &BTreeSet<PathBuf>, source: &Path) -> Result<String> {
    if link.contains("://") || link.starts_with('#') || link.starts_with("mailto:") {
        return Ok(link.to_owned());
    }
    let (path, anchor) = link.split_once('#').map_or((link, None), |(path, anchor)| (path, Some(anchor)));
    let base = page.parent().unwrap_or(Path::new(""));
    let target = normal(&base.join(path)).with_context(|| format!("{link} points outside the repository"))?;
    if pages.contains(&target) {
        // mdBook renders a `README.md` as `index.html`.
        return Ok(link.replace("README.md", "index.md"));
    }
    let on_disk = root().join(&target);
    let back = "../".repeat(base.components().count());
    let anchor = anchor.map(|a| format!("#{a}")).unwrap_or_default();
    if on_disk.is_dir() {
        let within = |p: &&PathBuf| p.parent() == Some(&target) && p.extension().is_some_and(|e| e == "md");
        return match pages.iter().rfind(within) {
            Some(newest) => Ok(format!("{back}{}{anchor}", newest.display())),
            // A link to a directory of sources is removed: a repository browser shows such a directory, but the site
            // does not.
            None => Ok(String::new()),
        };
    }
    ensure!(on_disk.is_file(), "{} links to {link}, which does not exist", page.display());
    let copy = source.join(&target);
    std::fs::create_dir_all(copy.parent().context("a file has a parent directory")?)?;
    std::fs::copy(&on_disk, &copy).with_context(|| format!("cannot copy {}", target.display()))?;
    Ok(link.to_owned())
}

/// Returns a text with all links outside code replaced. If a replacement is empty, only the link's text is kept.
fn with_links(text: &str, mut replace: impl FnMut(&str) -> Result<String>) -> Result<String> {
    let mut out = String::with_capacity(text.len());
    // Backticks in the paragraph so far, because a code span may continue on the next line.
    let (mut is_code, mut marks) = (false, 0);
    for line in text.split_inclusive('\n') {
        let is_fence = line.trim_start().starts_with("```");
        if is_fence {
            is_code = !is_code;
        }
        if line.trim().is_empty() {
            marks = 0;
        }
        if is_code || is_fence {
            out.push_str(line);
            continue;
        }
        let mut rest = line;
        while let Some(at) = rest.find("](") {
            let (before, after) = (&rest[..at], &rest[at + 2..]);
            marks += before.matches('`').count();
            match after.find(')').filter(|_| marks % 2 == 0) {
                Some(end) => {
                    let new = replace(&after[..end])?;
                    match (new.is_empty(), before.rfind('[')) {
                        (true, Some(start)) => {
                            out.push_str(&(before[..start].to_owned() + &before[start + 1..]))
                        }
                        _ => out.push_str(&format!("{before}]({new})")),
                    }
                    rest = &after[end + 1..];
                }
                None => {
                    out.push_str(&rest[..at + 2]);
                    rest = after;
                }
            }
        }
        marks += rest.matches('`').count();
        out.push_str(rest);
    }
    Ok(out)
}

/// A path without `.` and `..`; `None` if it leaves the root.
fn normal(path: &Path) -> Option<PathBuf> {
    let mut parts = Vec::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => drop(parts.pop()?),
            Component::Normal(name) => parts.push(name),
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(parts.iter().collect())
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::create_dir_all(path.parent().context("a file has a parent directory")?)?;
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Checks every link within a site and returns their number.
fn follow(html: &Path) -> Result<usize> {
    let mut pages = BTreeMap::new();
    collect(html, html, &mut pages)?;
    let (mut followed, mut broken) = (0, Vec::new());
    for (page, text) in &pages {
        // The pages that mdBook adds for printing and old browsers are skipped.
        if page.ends_with("print.html") || page.ends_with("404.html") || page.ends_with("toc.html") {
            continue;
        }
        for link in attributes(text, "href").into_iter().chain(attributes(text, "src")) {
            if link.contains("://") || link.starts_with("data:") || link.starts_with("mailto:") {
                continue;
            }
            followed += 1;
            let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
            let base = page.parent().unwrap_or(Path::new(""));
            let target = if path.is_empty() { Some(page.clone()) } else { normal(&base.join(path)) };
            let there = target.as_ref().is_some_and(|t| html.join(t).is_file());
            let named = anchor.is_empty()
                || target.and_then(|t| pages.get(&t)).is_none_or(|t| t.contains(&format!("id=\"{anchor}\"")));
            if !there || !named {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    if !broken.is_empty() {
        bail!("{} broken link(s):\n{}", broken.len(), broken.join("\n"));
    }
    Ok(followed)
}

fn collect(base: &Path, directory: &Path, pages: &mut BTreeMap<PathBuf, String>) -> Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(base, &path, pages)?;
        } else if path.extension().is_some_and(|e| e == "html") {
            pages.insert(path.strip_prefix(base)?.to_owned(), read(&path)?);
        }
    }
    Ok(())
}

fn attributes<'a>(text: &'a str, name: &str) -> Vec<&'a str> {
    let start = format!(" {name}=\"");
    text.split(start.as_str()).skip(1).filter_map(|rest| rest.split('"').next()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_replaced_outside_of_code() {
        let text = "a [b](c.md) and `d](e)` and [f](g)\n```\n[h](i)\n```\nof `two\nlines` [j](k), [l](m)\n";
        let replaced =
            with_links(text, |link| Ok(if link == "g" { String::new() } else { format!("x/{link}") }));
        let expected =
            "a [b](x/c.md) and `d](e)` and f\n```\n[h](i)\n```\nof `two\nlines` [j](x/k), [l](x/m)\n";
        assert_eq!(replaced.unwrap(), expected);
    }

    #[test]
    fn a_link_that_leads_nowhere_fails() {
        let site = tempfile::tempdir().unwrap();
        let page = |text: &str| std::fs::write(site.path().join("index.html"), text).unwrap();
        page("<h1 id=\"here\"></h1><a href=\"index.html#here\"></a><a href=\"#here\"></a>");
        assert_eq!(follow(site.path()).unwrap(), 2);
        for link in ["gone.html", "index.html#gone", "#gone", "../index.html"] {
            page(&format!("<a href=\"{link}\"></a>"));
            assert!(follow(site.path()).unwrap_err().to_string().contains(link), "{link}");
        }
    }

    #[test]
    fn the_book_can_be_staged() {
        let book = tempfile::tempdir().unwrap();
        stage(book.path()).unwrap();
        let summary = read(&book.path().join("src/SUMMARY.md")).unwrap();
        assert!(summary.contains("(docs/guide/start.md)") && summary.contains("(benchmarks/record/"));
    }
}
