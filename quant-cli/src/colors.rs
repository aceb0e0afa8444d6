//! Colors on a terminal: the first word of a message, and the verdicts of a gate. Output to files and pipes has no
//! colors unless `CLICOLOR_FORCE` is set, and no output has colors if `NO_COLOR` is set.

use std::borrow::Cow;

use anstream::{AutoStream, ColorChoice, stream::RawStream};
use anstyle::{AnsiColor, Style};

pub fn shows(stream: &impl RawStream) -> bool {
    AutoStream::choice(stream) != ColorChoice::Never
}

/// Returns a message with its first word in color if it is `error`, `warning`, `lost` or `note`.
pub fn message(text: &str) -> Cow<'_, str> {
    let color = match text.split_once(": ").map(|(word, _)| word) {
        Some("error") => AnsiColor::Red,
        Some("warning" | "lost") => AnsiColor::Yellow,
        Some("note") => AnsiColor::Cyan,
        _ => return Cow::Borrowed(text),
    };
    let (word, rest) = text.split_at(text.find(':').unwrap_or(0));
    Cow::Owned(format!("{}{rest}", paint(word, color)))
}

/// Returns a gate's table with colored verdicts: the first word of each line, and the last word of the table.
pub fn verdicts(text: &str) -> String {
    let line = |line: &str| {
        let first = line.split(' ').next().unwrap_or_default();
        if let Some(color) = of_verdict(first) {
            return format!("{}{}", paint(first, color), &line[first.len()..]);
        }
        match line.rsplit_once(": ") {
            Some((policy, verdict)) => match of_verdict(verdict) {
                Some(color) => format!("{policy}: {}", paint(verdict, color)),
                None => line.to_owned(),
            },
            None => line.to_owned(),
        }
    };
    text.split('\n').map(line).collect::<Vec<_>>().join("\n")
}

fn of_verdict(word: &str) -> Option<AnsiColor> {
    match word {
        "pass" => Some(AnsiColor::Green),
        "fail" => Some(AnsiColor::Red),
        "inconclusive" => Some(AnsiColor::Yellow),
        _ => None,
    }
}

fn paint(word: &str, color: AnsiColor) -> String {
    let style = Style::new().bold().fg_color(Some(color.into()));
    format!("{style}{word}{style:#}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(text: &str) -> String {
        anstream::adapter::strip_str(text).to_string()
    }

    #[test]
    fn only_known_first_words_are_painted() {
        for text in ["error: no model\n  give one", "warning: few tokens", "note: x", "lost: y"] {
            assert!(message(text).starts_with('\u{1b}'), "{text}");
            assert_eq!(plain(&message(text)), text);
        }
        for text in ["", "quantize: block 1 of 2", "an error: x", "::warning file=a::b", "error"] {
            assert_eq!(message(text), text);
        }
    }

    #[test]
    fn verdicts_are_painted_where_they_stand() {
        let text =
            "pass          a  perplexity is the same\nfail          b  pass: no\n\nby p: inconclusive\n";
        let painted = verdicts(text);
        assert_eq!(plain(&painted), text);
        assert_eq!(painted.matches("\u{1b}[0m").count(), 3, "{painted:?}");
    }
}
