//! The page of a gate.

use maud::{Markup, html};

use super::{breakable, page, pareto, row, tile, tool};
use crate::Evaluation;
use crate::gate::{Baseline, Outcome};

/// Renders the page of a gate's decision on these results, which were compared with this baseline.
pub fn gate_page(outcome: &Outcome, results: &[(String, Evaluation)], baseline: Option<&Baseline>) -> String {
    let subtitle =
        html! { "Policy " (outcome.policy) ", with a one-sided significance level of " (outcome.level) "." };
    let count = |name: &str| outcome.checks.iter().filter(|c| c.verdict.name() == name).count().to_string();
    let verdict = outcome.verdict.name();
    let mut shown: Vec<(String, &Evaluation)> = results.iter().map(|(n, e)| (n.clone(), e)).collect();
    let before = baseline.into_iter().flat_map(|b| &b.results).filter(|(name, e)| {
        // For an unchanged model, the two points would coincide.
        results.iter().all(|(n, now)| n != *name || now.model.sha256 != e.model.sha256)
    });
    shown.extend(before.map(|(name, e)| (format!("{name} (baseline)"), e)));
    let body = html! {
        div.tiles {
            div class=(format!("tile verdict {verdict}")) { small { "verdict" } b { (verdict) } small { (reason(outcome)) } }
            (tile("checks that pass", &count("pass"), ""))
            (tile("checks that fail", &count("fail"), ""))
            (tile("inconclusive checks", &count("inconclusive"), if count("inconclusive") == "0" { "" } else { "too few windows to decide" }))
        }
        h2 { "Checks" }
        div.wide { table.cards.labelled {
            tr { th { "result" } th.name { "verdict" } th.text { "check" } th.text { "measured" } th.text { "allowed" } th.text { "windows" } }
            @for check in &outcome.checks {
                tr {
                    td.text.names { (breakable(&check.result)) }
                    td class=(format!("name {}", check.verdict.name())) { (check.verdict.name()) }
                    td.text.names data-label="check" { (breakable(&check.name)) }
                    td.text data-label="measured" { (check.measured) }
                    td.text data-label="allowed" { (check.allowed) }
                    td.text data-label="windows" {
                        (check.windows)
                        @if let Some(needed) = check.windows_needed { "; about " (needed) " would be needed" }
                    }
                }
            }
        } }
        h2 { @if baseline.is_some() { "What has changed" } @else { "What was judged" } }
        (changed(outcome, baseline.is_some()))
        @for note in &outcome.notes { p.soft { (note) } }
        @if shown.iter().filter(|(_, e)| e.comparison.is_some()).count() > 1 {
            h2 { "Divergence by size" }
            (pareto(&shown))
        }
        h2 { "Provenance" }
        div.wide { table {
            (row("policy, SHA-256", &outcome.policy_sha256))
            (row("baseline, SHA-256", outcome.baseline_sha256.as_deref().unwrap_or("none")))
            @for judged in &outcome.results {
                (row(&format!("{}, SHA-256", judged.name), &judged.sha256))
                (row("its tool", &tool(&judged.tool)))
                (row("its model", &judged.model_sha256))
                (row("its reference", judged.reference_sha256.as_deref().unwrap_or("none")))
                (row("its scored tokens", &judged.tokens_sha256))
            }
        } }
    };
    page("accuracy gate", &subtitle, &body)
}

/// The first of the checks that decide, and the number of others. Empty for a pass.
fn reason(outcome: &Outcome) -> String {
    let verdict = outcome.verdict;
    let deciding: Vec<&str> =
        outcome.checks.iter().filter(|c| c.verdict == verdict).map(|c| c.name.as_str()).collect();
    match (verdict, &deciding[..]) {
        (crate::gate::Verdict::Pass, _) | (_, []) => String::new(),
        (_, [one]) => (*one).to_owned(),
        (_, [first, rest @ ..]) => format!("{first}, and {} more", rest.len()),
    }
}

fn changed(outcome: &Outcome, compares: bool) -> Markup {
    html! {
        div.wide { table.cards.labelled {
            tr {
                th { "result" } th.name { "property" }
                th.text { @if compares { "baseline → now" } @else { "now" } }
                @if compares { th.name { "change" } }
            }
            @for change in &outcome.changes {
                tr {
                    td { (change.result) }
                    td.name { (change.name) }
                    td.text {
                        @match &change.before {
                            Some(before) if *before != change.now => { (before) " → " (change.now) }
                            _ => { (change.now) }
                        }
                    }
                    @if compares {
                        td class=(match change.trend { Some(t) if t.name() == "better" => "name pass", Some(_) => "name fail", None => "name" }) {
                            (change.described())
                        }
                    }
                }
            }
        } }
    }
}
