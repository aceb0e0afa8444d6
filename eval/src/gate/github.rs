//! An outcome for GitHub Actions: a table for the step summary, and annotations on the policy's lines.

use super::{Outcome, Verdict};

/// The outcome as Markdown.
pub fn summary(outcome: &Outcome) -> String {
    let mut text = format!("### quant gate: {}\n\n", outcome.verdict.name());
    text.push_str("| | result | check | value | ± | allowed | windows |\n| --- | --- | --- | ---: | ---: | --- | ---: |\n");
    for check in &outcome.checks {
        let sign = match check.verdict {
            Verdict::Pass => "✅",
            Verdict::Fail => "❌",
            Verdict::Inconclusive => "❔",
        };
        let allowed = [check.at_most.map(|m| format!("≤ {m}")), check.at_least.map(|l| format!("≥ {l}"))];
        let allowed: Vec<String> = allowed.into_iter().flatten().collect();
        let error = check.standard_error.map(|e| format!("{e:.2e}")).unwrap_or_default();
        text.push_str(&format!(
            "| {sign} {} | {} | {} | {} | {error} | {} | {} |\n",
            check.verdict.name(),
            cell(&check.result),
            cell(&check.name),
            super::shown(check.value),
            allowed.join(", "),
            check.windows
        ));
    }
    for note in &outcome.notes {
        text.push_str(&format!("\n- {}", cell(note)));
    }
    text.push('\n');
    text
}

/// Workflow commands that annotate the policy's lines whose checks did not pass.
pub fn annotations(outcome: &Outcome) -> Vec<String> {
    let marked = outcome.checks.iter().filter(|c| c.verdict != Verdict::Pass);
    marked
        .map(|check| {
            let kind = match (check.verdict, outcome.verdict) {
                (Verdict::Fail, _) | (_, Verdict::Fail) => "error",
                _ => "warning",
            };
            format!(
                "::{kind} file={},line={},title={}::{}",
                property(&outcome.policy),
                check.line,
                property(&format!("quant gate: {} {}", check.result, check.verdict.name())),
                escaped(&check.message)
            )
        })
        .collect()
}

/// Escapes text for a table cell: no markup, and no cell separator.
fn cell(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '\\' | '`' | '*' | '_' | '{' | '}' | '[' | ']' | '#' | '|' | '~' | '!' => out.extend(['\\', c]),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

/// Escapes the message of a workflow command, which ends at a newline.
fn escaped(text: &str) -> String {
    text.replace('%', "%25").replace('\r', "%0D").replace('\n', "%0A")
}

/// Escapes a property, which also ends at a comma or colon.
fn property(text: &str) -> String {
    escaped(text).replace(':', "%3A").replace(',', "%2C")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_names_stay_text() {
        assert_eq!(cell("a|b\n<img>`_"), "a\\|b &lt;img&gt;\\`\\_");
        assert_eq!(property("a:b,c\n::error::%"), "a%3Ab%2Cc%0A%3A%3Aerror%3A%3A%25");
    }
}
