//! quant's time per step, from the program's log.

use std::collections::BTreeMap;
use std::time::SystemTime;

use anyhow::{Context, Result, ensure};
use xtask::support::record::table;

const DAY: f64 = 86_400.0;
const STEPS: [(&str, &str); 3] = [
    ("scales of", "scales chosen producer="),
    ("clipping of", "ranges chosen module="),
    ("rounding of", "rounded tensor="),
];

/// Seconds since midnight UTC, the clock of the program's log.
pub fn time_of_day() -> f64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    since.as_secs_f64().rem_euclid(DAY)
}

/// Seconds between consecutive lines about steps in the program's log, attributed to the step of the later line and
/// summed over blocks. `start` and `end` are the times at which the process started and ended.
pub fn time_until_steps(log: &str, start: f64, end: f64) -> Result<BTreeMap<String, f64>> {
    let mut steps = BTreeMap::new();
    let mut before = start;
    for line in log.lines() {
        let Some((what, name)) = STEPS.iter().find_map(|(what, text)| Some((what, line.split_once(text)?.1)))
        else {
            continue;
        };
        let name = name.split(['"', ' ']).find(|n| !n.is_empty()).context("a log line names no module")?;
        let name = name.strip_suffix(".weight").unwrap_or(name);
        let name = name.rsplit('.').next().unwrap_or(name);
        let now = seconds_of_day(line).with_context(|| format!("no time in `{line}`"))?;
        *steps.entry(format!("{what} {name}")).or_default() += (now - before).rem_euclid(DAY);
        before = now;
    }
    ensure!(!steps.is_empty(), "the log contains no steps");
    steps.insert("end".to_owned(), (end - before).rem_euclid(DAY));
    Ok(steps)
}

fn seconds_of_day(line: &str) -> Option<f64> {
    let time = line.split_once('T')?.1.split_once('Z')?.0;
    let mut parts = time.split(':').map(str::parse::<f64>);
    let (h, m, s) = (parts.next()?.ok()?, parts.next()?.ok()?, parts.next()?.ok()?);
    Some(h * 3600.0 + m * 60.0 + s)
}

/// The steps, longest first.
pub fn table_of_steps(steps: &BTreeMap<String, f64>) -> String {
    let total: f64 = steps.values().sum();
    let mut sorted: Vec<_> = steps.iter().collect();
    sorted.sort_by(|a, b| b.1.total_cmp(a.1));
    let rows: Vec<Vec<String>> = sorted
        .into_iter()
        .map(|(step, s)| vec![step.clone(), format!("{s:.1}"), format!("{:.0} %", 100.0 * s / total)])
        .collect();
    table(&["until", "seconds", "share"], &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_timed_by_the_log() {
        let log = r#"note
2026-01-31T23:59:58.500000Z DEBUG quant_core::transform::awq: scales chosen producer="model.layers.0.input_layernorm" ratio=0.3
2026-01-31T23:59:59.000000Z DEBUG quant_core::transform::clip: ranges chosen module="model.layers.0.self_attn.v_proj" clipped=25
2026-02-01T00:00:01.000000Z DEBUG quant_core::transform::awq: scales chosen producer="model.layers.1.input_layernorm" ratio=0.3
2026-02-01T00:00:01.250000Z DEBUG quant_core::transform::clip: ranges chosen module="model.layers.1.self_attn.v_proj" clipped=25
2026-02-01T00:00:01.750000Z DEBUG quant_core::pipeline::gptq: rounded tensor="model.layers.1.self_attn.v_proj.weight" loss=0.1
"#;
        let steps: Vec<_> = time_until_steps(log, DAY - 2.5, 2.0).unwrap().into_iter().collect();
        let expected = [
            ("clipping of v_proj", 0.75),
            ("end", 0.25),
            ("rounding of v_proj", 0.5),
            ("scales of input_layernorm", 3.0),
        ];
        assert_eq!(steps, expected.map(|(step, seconds)| (step.to_owned(), seconds)));
        assert!(time_until_steps("nothing", 0.0, 1.0).is_err());
    }
}
