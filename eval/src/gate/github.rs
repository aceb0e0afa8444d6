//! An outcome for GitHub Actions: a table for the step summary, and annotations on the policy's lines.

use super::changes::with_causes;
use super::{Outcome, Verdict};

/// The outcome as Markdown.
pub fn summary(outcome: &Outcome) -> String {
    let mut text = format!("### Accuracy gate: {}\n\n", outcome.verdict.name());
    text.push_str(
        "| verdict | result | check | measured | allowed | windows |\n| --- | --- | --- | --- | --- | ---: |\n",
    );
    for check in &outcome.checks {
        let sign = match check.verdict {
            Verdict::Pass => "✅",
            Verdict::Fail => "❌",
            Verdict::Inconclusive => "❔",
        };
        let windows = match check.windows_needed {
            Some(needed) => format!("{}; about {needed} would be needed", check.windows),
            None => check.windows.to_string(),
        };
        text.push_str(&format!(
            "| {sign} {} | {} | {} | {} | {} | {windows} |\n",
            check.verdict.name(),
            cell(&check.result),
            cell(&check.name),
            cell(&check.measured),
            cell(&check.allowed),
        ));
    }
    text.push_str(&changed(outcome));
    for note in &outcome.notes {
        text.push_str(&format!("\n- {}", cell(note)));
    }
    text.push('\n');
    text
}

fn changed(outcome: &Outcome) -> String {
    let compares = outcome.changes.iter().any(|c| c.before.is_some());
    let mut text = match compares {
        true => {
            "\n| result | property | baseline | now | change |\n| --- | --- | --- | --- | --- |\n".to_owned()
        }
        false => "\n| result | property | now |\n| --- | --- | --- |\n".to_owned(),
    };
    for change in &outcome.changes {
        text.push_str(&format!("| {} | {} |", cell(&change.result), change.name));
        if compares {
            text.push_str(&format!(" {} |", cell(change.before.as_deref().unwrap_or("–"))));
        }
        text.push_str(&format!(" {} |", cell(&change.now)));
        if compares {
            text.push_str(&format!(" {} |", cell(&change.described())));
        }
        text.push('\n');
    }
    text
}

/// Workflow commands that annotate the policy's lines whose checks did not pass.
pub fn annotations(outcome: &Outcome) -> Vec<String> {
    let marked = outcome.checks.iter().filter(|c| c.verdict != Verdict::Pass);
    marked
        .map(|check| {
            // If the gate as a whole does not pass, the step fails.
            let kind = if outcome.verdict == Verdict::Pass { "warning" } else { "error" };
            format!(
                "::{kind} file={},line={},title={}::{}",
                property(&outcome.policy),
                check.line,
                property(&format!(
                    "accuracy gate: {}, {}: {}",
                    check.result,
                    check.name,
                    check.verdict.name()
                )),
                escaped(&with_causes(&check.message, &outcome.changes, &check.result))
            )
        })
        .collect()
}

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

/// A property also ends at a comma or colon.
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
