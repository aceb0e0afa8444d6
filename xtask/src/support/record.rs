//! Benchmark records: one page and one table per host and day, checked in under `benchmarks/record/`.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

use super::host::{Host, commit, today};
use super::shell::root;

/// A record to be written.
#[derive(Debug)]
pub struct Record {
    /// The folder under `benchmarks/record/`.
    pub benchmark: &'static str,
    /// The heading of the page.
    pub title: String,
    /// The command that produced the record.
    pub command: String,
    /// Method and results, as Markdown.
    pub body: String,
    /// Every single measurement, with a header line.
    pub csv: Vec<String>,
}

impl Record {
    /// Writes `<date>-<host>.md` and `.csv`, replacing an earlier record of the same day.
    pub fn write(&self) -> Result<PathBuf> {
        let host = Host::detect();
        let date = today()?;
        let dir = root().join("benchmarks/record").join(self.benchmark);
        std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let stem = dir.join(format!("{date}-{}", host.slug()));
        let page = format!(
            "# {}\n\n- date: {date}\n- commit: {}\n{}- command: `{}`\n\n{}",
            self.title,
            commit(),
            host.lines(),
            self.command,
            self.body
        );
        let path = stem.with_extension("md");
        std::fs::write(&path, page).with_context(|| format!("cannot write {}", path.display()))?;
        std::fs::write(stem.with_extension("csv"), self.csv.join("\n") + "\n")?;
        Ok(path)
    }

    /// Writes the record, and prints its path and the claims that do not hold.
    ///
    /// # Errors
    /// When it cannot be written, or when `check` is set and a claim does not hold.
    pub fn conclude(&self, check: bool, broken: &[String]) -> Result<()> {
        println!("recorded in {}", self.write()?.display());
        broken.iter().for_each(|b| println!("does not hold: {b}"));
        ensure!(!check || broken.is_empty(), "{}", broken.join("; "));
        Ok(())
    }
}

/// A Markdown table.
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let header: Vec<String> = header.iter().map(|h| (*h).to_owned()).collect();
    let mut text = line(&header);
    text += &line(&vec!["---".to_owned(); header.len()]);
    for row in rows {
        text += &line(row);
    }
    text
}

/// The command as typed, for a record: `cargo xtask` or, in the program `studies`, `cargo study`.
pub fn typed_command() -> String {
    let mut args = std::env::args();
    let program = args.next().map(PathBuf::from).unwrap_or_default();
    let alias = if program.file_stem().is_some_and(|stem| stem == "studies") { "study" } else { "xtask" };
    format!("cargo {alias} {}", without_places(args).join(" "))
}

/// The arguments without options that give the path of an existing program.
fn without_places(mut args: impl Iterator<Item = String>) -> Vec<String> {
    let mut kept = Vec::new();
    while let Some(arg) = args.next() {
        match arg.split_once('=').map_or(&*arg, |(option, _)| option) {
            "--quant" | "--program" | "--base-program" => {
                if !arg.contains('=') {
                    args.next();
                }
            }
            _ => kept.push(arg),
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_markdown() {
        let text = table(&["a", "b"], &[vec!["1".into(), "2".into()]]);
        assert_eq!(text, "| a | b |\n| --- | --- |\n| 1 | 2 |\n");
    }

    #[test]
    fn commands_name_no_places() {
        let typed = "bench --quant /a/quant --pairs 15 --base-program=/b --check --program /c";
        let kept = without_places(typed.split(' ').map(str::to_owned));
        assert_eq!(kept, ["bench", "--pairs", "15", "--check"]);
    }
}
