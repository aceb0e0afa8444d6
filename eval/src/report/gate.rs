//! The page of a gate.

use maud::html;

use super::{page, pareto, row, tile, tool};
use crate::Evaluation;
use crate::gate::Outcome;

/// Renders the page of a gate's decision on these results.
pub fn gate_page(outcome: &Outcome, results: &[(String, Evaluation)]) -> String {
    let subtitle =
        html! { "Policy " (outcome.policy) ", with a one-sided significance level of " (outcome.level) "." };
    let count = |name: &str| outcome.checks.iter().filter(|c| c.verdict.name() == name).count().to_string();
    let body = html! {
        div.tiles {
            (tile("verdict", outcome.verdict.name(), ""))
            (tile("checks that pass", &count("pass"), ""))
            (tile("checks that fail", &count("fail"), ""))
            (tile("inconclusive checks", &count("inconclusive"), "too few windows to decide"))
        }
        h2 { "Checks" }
        div.wide { table.cards {
            tr { th { "result" } th { "" } th { "check" } th { "windows" } th.text { "" } }
            @for check in &outcome.checks {
                tr {
                    td.text { (check.result) }
                    td class=(check.verdict.name()) { (check.verdict.name()) }
                    td { (check.name) }
                    td { (check.windows) }
                    td.text { (check.message) }
                }
            }
        } }
        @for note in &outcome.notes { p.soft { (note) } }
        @if results.iter().any(|(_, e)| e.comparison.is_some()) {
            h2 { "Results" }
            (pareto(&results.iter().map(|(n, e)| (n.clone(), e)).collect::<Vec<_>>()))
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
    page("quant gate", &subtitle, &body)
}
