//! An excerpt of a failed command's output with the lines that explain the failure.

use std::collections::VecDeque;
use std::io::{BufRead, Write};

/// Lines kept after one that reports a failure, such as the message of a panic.
const LINES_AFTER: usize = 4;
const MAX_FAILURE_LINES: usize = 60;
const MAX_LAST_LINES: usize = 40;
/// Maximum length of a line; longer lines are truncated.
const MAX_LINE_BYTES: usize = 400;

/// The lines that report failures, and the last lines.
#[derive(Debug, Default)]
pub struct Excerpt {
    failures: Vec<String>,
    last: VecDeque<String>,
    /// How many of the next lines belong to the previous failure.
    following: usize,
}

impl Excerpt {
    /// Copies every line to `out` as it arrives, and keeps some of them.
    ///
    /// # Errors
    /// Read and write errors.
    pub fn copy(mut reader: impl BufRead, mut out: impl Write) -> std::io::Result<Self> {
        let mut excerpt = Self::default();
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line)? > 0 {
            out.write_all(&line)?;
            out.flush()?;
            excerpt.add(&String::from_utf8_lossy(&line));
            line.clear();
        }
        Ok(excerpt)
    }

    /// Builds the excerpt of a complete output.
    pub fn of(text: &str) -> Self {
        let mut excerpt = Self::default();
        text.lines().for_each(|line| excerpt.add(line));
        excerpt
    }

    fn add(&mut self, line: &str) {
        let line = line.trim_end();
        let mut end = line.len().min(MAX_LINE_BYTES);
        while !line.is_char_boundary(end) {
            end -= 1;
        }
        let line = &line[..end];
        if names_a_failure(line) {
            self.following = LINES_AFTER + 1;
        }
        let keep = self.following > 0;
        self.following = self.following.saturating_sub(1);
        if keep && self.failures.len() < MAX_FAILURE_LINES {
            self.failures.push(line.to_owned());
        }
        if self.last.len() == MAX_LAST_LINES {
            self.last.pop_front();
        }
        self.last.push_back(line.to_owned());
    }
}

/// The failure formats of tests, compilers, and this crate's checks.
fn names_a_failure(line: &str) -> bool {
    let starts = ["error", "FAILED", "Traceback", "thread '"];
    line.contains("panicked at") || line.ends_with("... FAILED") || starts.iter().any(|s| line.starts_with(s))
}

impl std::fmt::Display for Excerpt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if !self.failures.is_empty() {
            writeln!(f, "lines that name failures:")?;
            self.failures.iter().try_for_each(|line| writeln!(f, "  {line}"))?;
        }
        writeln!(f, "last lines:")?;
        self.last.iter().try_for_each(|line| writeln!(f, "  {line}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_kept_however_much_follows() {
        let mut text = String::from("running 2 tests\ntest a ... ok\ntest b ... FAILED\n");
        text += "thread 'b' panicked at tests/b.rs:3:5:\nassertion failed: left == right\n";
        for i in 0..1000 {
            text += &format!("test more_{i} ... ok\n");
        }
        let mut copied = Vec::new();
        let excerpt = Excerpt::copy(text.as_bytes(), &mut copied).unwrap();
        assert_eq!(copied, text.as_bytes());
        let shown = excerpt.to_string();
        assert!(
            shown.contains("test b ... FAILED") && shown.contains("assertion failed: left == right"),
            "{shown}"
        );
        assert!(shown.contains("more_999") && !shown.contains("more_900"), "{shown}");
        assert_eq!(Excerpt::of(&text).to_string(), shown);
    }

    #[test]
    fn an_excerpt_is_bounded() {
        let text = format!("error: {}\n", "é".repeat(10_000)).repeat(10_000);
        let shown = Excerpt::of(&text).to_string();
        assert!(
            shown.len() < (MAX_FAILURE_LINES + MAX_LAST_LINES + 2) * (MAX_LINE_BYTES + 3),
            "{}",
            shown.len()
        );
    }
}
