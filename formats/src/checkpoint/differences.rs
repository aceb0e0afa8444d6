//! Compares the request of a run with that of the interrupted run that it should resume.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::names::printable;

const FINGERPRINT: &str = "fingerprint.";
/// Prefix of the fields that describe the program.
const PROGRAM: &str = "program.";
/// Prefix of the fields that hold the scheme of each linear.
const SCHEMES: &str = "schemes.";
/// Fields that follow from the method. They are not listed if the method itself has changed.
const OF_METHOD: [&str; 4] = ["steps", "transforms", "rounding", "calibration"];
/// Prefix of the fields that hold the settings of the rounding, by its name. It is not shown.
const ROUNDING: &str = "rounding.";
/// Fields that follow from the calibration text and the other settings of `calibration`. They are not listed if one of
/// these settings has changed; otherwise one line reports that the text has changed.
const OF_TEXT: [&str; 5] = [
    "calibration.tokens",
    "calibration.tokens_counted",
    "calibration.padding",
    "calibration.tokens_sha256",
    "calibration.layout_sha256",
];
/// Fields whose names are not those of settings.
const NAMES: [(&str, &str); 7] = [
    ("program.instruction_set", "instruction set"),
    ("program.processor", "processor"),
    ("program.float_products", "products of floats"),
    ("tool_version", "version"),
    ("max_shard_bytes", "bytes per shard"),
    ("calibration.experts.tokens", "expert tokens"),
    ("calibration.experts.floor", "expert floor"),
];
const MAX_SHOWN: usize = 80;

/// Compares what two runs depend on. Returns one line per difference, such as `method: was awq, is rtn`, without those
/// that follow from another one; none if the values are equal.
pub fn differences(was: &Value, is: &Value) -> Vec<String> {
    Differences::new(was, is).lines
}

struct Difference {
    field: String,
    was: Value,
    is: Value,
}

pub(crate) struct Differences {
    /// One per line, as `method: was awq, is rtn`.
    pub(crate) lines: Vec<String>,
    /// Whether the program itself differs, or the instructions that it uses.
    pub(crate) program: bool,
}

impl Differences {
    pub(crate) fn new(was: &Value, is: &Value) -> Self {
        let mut all = Vec::new();
        collect("", was, is, &mut all);
        let program = all.iter().any(|d| d.field.starts_with(PROGRAM));
        let mut lines = schemes(&all);
        let others: Vec<&Difference> = all.iter().filter(|d| !d.field.starts_with(SCHEMES)).collect();
        let has = |field: &str| others.iter().any(|d| d.field == field);
        let method = has("method");
        let text = |d: &Difference| OF_TEXT.contains(&&*d.field);
        let sampled = others.iter().any(|d| d.field.starts_with("calibration.") && !text(d));
        let mut text_listed = false;
        for difference in &others {
            let root = difference.field.split('.').next().unwrap_or_default();
            match &*difference.field {
                _ if method && OF_METHOD.contains(&root) => {}
                "tool_version" if has("version") => {}
                _ if text(difference) => {
                    if !sampled && !std::mem::replace(&mut text_listed, true) {
                        lines.push("calibration text: has changed".into());
                    }
                }
                // Names and shapes of tensors, and metadata, follow from the other fields, or from the model.
                "layout_sha256" => {}
                _ => lines.push(difference.line()),
            }
        }
        if lines.is_empty() && has("layout_sha256") {
            lines.push("names, types or shapes of tensors, or metadata of the output: have changed".into());
        }
        Self { lines, program }
    }
}

impl Difference {
    fn line(&self) -> String {
        // Parts of a run that have settings of their own, such as steps.
        let parts = |value: &Value| value.is_null() || value.is_object();
        let part = Some(&*self.field).filter(|_| parts(&self.was) && parts(&self.is));
        let part = part.map(|field| match field {
            "calibration" => "calibration text".to_owned(),
            other => other.rsplit('.').next().unwrap_or(other).to_owned(),
        });
        if let Some(part) = part {
            let [was, is] =
                [&self.was, &self.is].map(|value| if value.is_null() { "not used" } else { "used" });
            return format!("{}: was {was}, is {is}", printable(&part));
        }
        match &*self.field {
            "config_sha256" => "config.json: has changed".into(),
            "program.executable_blake3" => "executable: is a different build".into(),
            field if field.ends_with("_sha256") => {
                format!("{}: has changed", printable(field.trim_end_matches("_sha256")))
            }
            field => {
                let known = NAMES.iter().find(|(known, _)| *known == field).map(|(_, name)| *name);
                let name = known.unwrap_or_else(|| field.strip_prefix(ROUNDING).unwrap_or(field));
                format!("{}: was {}, is {}", printable(name), shown(&self.was), shown(&self.is))
            }
        }
    }
}

fn schemes(all: &[Difference]) -> Vec<String> {
    let mut changes: BTreeMap<(String, String), Vec<&str>> = BTreeMap::new();
    for difference in all {
        if let Some(module) = difference.field.strip_prefix(SCHEMES) {
            let scheme = |value: &Value| if value.is_null() { "float".into() } else { shown(value) };
            changes.entry((scheme(&difference.was), scheme(&difference.is))).or_default().push(module);
        }
    }
    let line = |((was, is), modules): (&(String, String), &Vec<&str>)| match &modules[..] {
        [module] => format!("scheme of {}: was {was}, is {is}", printable(module)),
        several => format!("scheme: was {was}, is {is} ({} linears)", several.len()),
    };
    changes.iter().map(line).collect()
}

/// The value of a field that records leave out.
fn left_out(field: &str) -> Option<Value> {
    (field.strip_prefix(FINGERPRINT).unwrap_or(field) == "calibration.experts")
        .then(|| json!({ "tokens": "routed", "floor": 0 }))
}

fn collect(field: &str, was: &Value, is: &Value, found: &mut Vec<Difference>) {
    let default = left_out(field).unwrap_or_default();
    let [was, is] = [was, is].map(|value| if value.is_null() { &default } else { value });
    if let (Value::Object(a), Value::Object(b)) = (was, is) {
        let keys = a.keys().chain(b.keys().filter(|k| !a.contains_key(*k)));
        for key in keys {
            let inner = if field.is_empty() { key.clone() } else { format!("{field}.{key}") };
            let at = |map: &serde_json::Map<String, Value>| map.get(key).cloned().unwrap_or_default();
            collect(&inner, &at(a), &at(b), found);
        }
    } else if was != is {
        let field = field.strip_prefix(FINGERPRINT).unwrap_or(field).to_owned();
        found.push(Difference { field, was: was.clone(), is: is.clone() });
    }
}

fn shown(value: &Value) -> String {
    let text = match value {
        Value::Null => "not set".into(),
        Value::String(text) => text.clone(),
        Value::Object(_) => "set".into(),
        other => other.to_string(),
    };
    let text = printable(&text);
    match text.char_indices().nth(MAX_SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn lines(was: Value, is: Value) -> Vec<String> {
        Differences::new(&json!({ "fingerprint": was }), &json!({ "fingerprint": is })).lines
    }

    #[test]
    fn schemes_are_counted() {
        let schemes = |a: &str, b: Option<&str>| match b {
            Some(b) => json!({ "schemes": { "l.0.q": a, "l.1.q": a, "l.1.v": b }}),
            None => json!({ "schemes": { "l.0.q": a, "l.1.q": a }}),
        };
        let was = schemes("w4a16-g128-sym", Some("w4a16-g128-sym"));
        assert_eq!(
            lines(was.clone(), schemes("w4a16-g64-sym", Some("w4a16-g64-sym"))),
            ["scheme: was w4a16-g128-sym, is w4a16-g64-sym (3 linears)"]
        );
        assert_eq!(
            lines(was.clone(), schemes("w4a16-g64-sym", Some("w8a16"))),
            [
                "scheme: was w4a16-g128-sym, is w4a16-g64-sym (2 linears)",
                "scheme of l.1.v: was w4a16-g128-sym, is w8a16"
            ]
        );
        assert_eq!(
            lines(was, schemes("w4a16-g128-sym", None)),
            ["scheme of l.1.v: was w4a16-g128-sym, is float"]
        );
    }

    #[test]
    fn consequences_are_not_listed() {
        let of = |method: &str, steps: &[&str], seed: u64, tokens: &str| {
            json!({
                "method": method, "steps": steps,
                "calibration": { "seed": seed, "tokens_sha256": tokens, "layout_sha256": tokens },
            })
        };
        let was = of("awq", &["awq"], 0, "a");
        assert_eq!(
            lines(was.clone(), json!({ "method": "rtn", "steps": [], "calibration": null })),
            ["method: was awq, is rtn"]
        );
        assert_eq!(
            lines(was.clone(), of("awq", &["awq"], 7, "b")),
            ["calibration.seed: was 0, is 7"],
            "a different seed gives different tokens"
        );
        assert_eq!(lines(was, of("awq", &["awq"], 0, "b")), ["calibration text: has changed"]);
        assert_eq!(
            Differences::new(&json!({ "layout_sha256": "a" }), &json!({ "layout_sha256": "b" })).lines,
            ["names, types or shapes of tensors, or metadata of the output: have changed"]
        );
    }

    #[test]
    fn parts_are_used_or_not() {
        let of = |text: bool, experts: Value, transforms: Value| {
            let mut calibration = json!({ "seed": 0, "tokens_sha256": "a" });
            if !experts.is_null() {
                calibration["experts"] = experts;
            }
            json!({ "calibration": text.then_some(calibration), "transforms": transforms })
        };
        let (none, awq) = (json!({}), json!({ "awq": { "search": "fast" }}));
        let plain = of(true, Value::Null, none.clone());
        assert_eq!(
            lines(of(false, Value::Null, none.clone()), plain.clone()),
            ["calibration text: was not used, is used"]
        );
        assert_eq!(lines(plain.clone(), of(true, Value::Null, awq)), ["awq: was not used, is used"]);
        let all = of(true, json!({ "tokens": "all", "floor": 0 }), none.clone());
        assert_eq!(lines(plain.clone(), all.clone()), ["expert tokens: was routed, is all"]);
        let floor = of(true, json!({ "tokens": "routed", "floor": 60 }), none);
        assert_eq!(lines(floor.clone(), plain), ["expert floor: was 60, is 0"]);
        assert_eq!(lines(all, floor), ["expert tokens: was all, is routed", "expert floor: was 0, is 60"]);
    }

    #[test]
    fn programs_are_not_settings() {
        let of = |hash: &str, isa: &str| json!({ "fingerprint": { "program": { "executable_blake3": hash, "instruction_set": isa }}});
        let differences = Differences::new(&of("a", "avx2"), &of("b", "scalar"));
        assert!(differences.program);
        assert_eq!(
            differences.lines,
            ["executable: is a different build", "instruction set: was avx2, is scalar"]
        );
        assert!(!Differences::new(&json!({ "program": 1 }), &json!({ "program": 2 })).program);
    }

    #[test]
    fn long_and_hostile_values_are_shortened() {
        let long = "é".repeat(1000);
        let line = &lines(json!({ "a\u{1b}": long }), json!({ "a\u{1b}": null }))[0];
        assert!(line.chars().count() < 120 && line.ends_with("…, is not set"), "{line}");
        assert!(!line.contains('\u{1b}'), "{line}");
    }
}
