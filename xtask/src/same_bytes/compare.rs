//! Compares the outputs of two programs and reports the first difference.
//!
//! The output of `quant plan` is compared as JSON, without the keys that may change ([`plans`]). Model cards and job
//! directories are not compared. All other files are compared byte for byte, with two exceptions:
//!
//! * `quant_report.json` is compared as JSON, without the keys [`VERSIONS`]. If the schema versions differ, the new
//!   program's report may have keys that the base's does not have, and may leave out keys whose value is `null` in the
//!   base's.
//! * `quant_manifest.json` is compared as JSON, without its entries for `quant_report.json` and the model card.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::support::shards::{Entry, read_header};

const REPORT: &str = "quant_report.json";
const MANIFEST: &str = "quant_manifest.json";
/// Describes the layout in sentences.
const QSERVE_MANIFEST: &str = "qserve_manifest.json";
/// Model cards are not compared, because they repeat other files.
const CARD: &str = "README.md";
/// Top-level keys of a report that identify the version of the program that wrote it.
const VERSIONS: [&str; 2] = ["schema", "version"];
/// Suffix of a run's job directory, which a failed run may leave behind.
const JOB_SUFFIX: &str = ".job";

/// The first difference between the files of two directories, subdirectories included; with `weights`, between their
/// tensors, indexes and `config.json`.
///
/// # Errors
/// When a file cannot be read.
pub fn directories(base: &Path, ours: &Path, weights: bool) -> Result<Option<String>> {
    let (of_base, of_ours) = (files(base)?, files(ours)?);
    let names: BTreeSet<&String> = of_base.keys().chain(of_ours.keys()).collect();
    let described = |name: &str| {
        let file = name.rsplit('/').next().unwrap_or(name);
        [REPORT, MANIFEST, QSERVE_MANIFEST].contains(&file)
    };
    for name in names.into_iter().filter(|name| !(weights && described(name))) {
        let difference = match (of_base.get(name), of_ours.get(name)) {
            (Some(base), Some(ours)) => files_differ(base, ours)?,
            (Some(_), None) => Some("only the base writes it".to_owned()),
            _ => Some("the base does not write it".to_owned()),
        };
        if let Some(difference) = difference {
            return Ok(Some(format!("{name}: {difference}")));
        }
    }
    Ok(None)
}

/// The first difference between two JSON documents that must be equal byte for byte.
pub fn documents(base: &[u8], ours: &[u8]) -> Option<String> {
    let position = first_difference(base, ours)?;
    let parsed = serde_json::from_slice(base).ok().zip(serde_json::from_slice(ours).ok());
    let of_values = parsed.and_then(|(base, ours): (Value, Value)| values_differ("", &base, &ours, false));
    Some(of_values.unwrap_or_else(|| format!("differs from byte {position} on")))
}

/// Returns the first difference between two plans. Engines, messages and predicted memory are not compared.
pub fn plans(base: &[u8], ours: &[u8]) -> Option<String> {
    let without_engines = |text: &[u8]| -> Option<Value> {
        let mut plan: Value = serde_json::from_slice(text).ok()?;
        for format in plan.get_mut("formats").and_then(Value::as_array_mut).into_iter().flatten() {
            for prose in ["engines", "warnings", "loses"] {
                format.as_object_mut().map(|format| format.shift_remove(prose));
            }
        }
        for predicted in ["peak_memory_bytes", "smallest_budget_bytes", "scratch_bytes"] {
            plan.as_object_mut().map(|plan| plan.shift_remove(predicted));
        }
        Some(plan)
    };
    match without_engines(base).zip(without_engines(ours)) {
        Some((base, ours)) => values_differ("", &base, &ours, false),
        None => documents(base, ours),
    }
}

/// All files below a directory by relative path, without job directories and model cards; empty if there is no such
/// directory.
fn files(dir: &Path) -> Result<BTreeMap<String, PathBuf>> {
    let mut found = BTreeMap::new();
    if !dir.is_dir() {
        return Ok(found);
    }
    for entry in std::fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !path.is_dir() {
            if name != CARD {
                found.insert(name, path);
            }
        } else if !name.ends_with(JOB_SUFFIX) {
            found.extend(files(&path)?.into_iter().map(|(below, path)| (format!("{name}/{below}"), path)));
        }
    }
    Ok(found)
}

fn files_differ(base: &Path, ours: &Path) -> Result<Option<String>> {
    let read = |path: &Path| std::fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    let (of_base, of_ours) = (read(base)?, read(ours)?);
    let Some(position) = first_difference(&of_base, &of_ours) else { return Ok(None) };
    let name = base.file_name().unwrap_or_default().to_string_lossy();
    let parse = |text: &[u8], path: &Path| -> Result<Value> {
        serde_json::from_slice(text).with_context(|| format!("{} is not JSON", path.display()))
    };
    let both = || -> Result<(Value, Value)> { Ok((parse(&of_base, base)?, parse(&of_ours, ours)?)) };
    Ok(match &*name {
        REPORT => both().map(|(base, ours)| reports_differ(base, ours))?,
        MANIFEST => both().map(|(base, ours)| manifests_differ(base, ours))?,
        name if name.ends_with(".json") => documents(&of_base, &of_ours),
        name if name.ends_with(".safetensors") => {
            Some(tensors_differ(base, ours, [&of_base, &of_ours], position)?)
        }
        _ => Some(format!("differs from byte {position} on")),
    })
}

/// The offset of the first difference of two byte strings; if one is a prefix of the other, its length.
fn first_difference(base: &[u8], ours: &[u8]) -> Option<usize> {
    let common = base.iter().zip(ours).position(|(b, o)| b != o);
    common.or_else(|| (base.len() != ours.len()).then(|| base.len().min(ours.len())))
}

fn reports_differ(mut base: Value, mut ours: Value) -> Option<String> {
    let is_other_schema = base.get("schema") != ours.get("schema");
    for report in [&mut base, &mut ours].into_iter().filter_map(Value::as_object_mut) {
        VERSIONS.iter().for_each(|key| drop(report.shift_remove(*key)));
    }
    values_differ("", &base, &ours, is_other_schema)
}

fn manifests_differ(mut base: Value, mut ours: Value) -> Option<String> {
    for manifest in [&mut base, &mut ours] {
        if let Some(files) = manifest.get_mut("files").and_then(Value::as_array_mut) {
            let name = |file: &Value| file.get("name").and_then(Value::as_str).map(str::to_owned);
            files.retain(|file| ![REPORT, CARD].iter().any(|other| name(file).as_deref() == Some(other)));
        }
    }
    values_differ("", &base, &ours, false)
}

/// The first difference between two values, with its path. With `grown`, the new program's value may have additional
/// keys, and may leave out those that are `null`.
fn values_differ(path: &str, base: &Value, ours: &Value, grown: bool) -> Option<String> {
    match (base, ours) {
        (Value::Object(of_base), Value::Object(of_ours)) => {
            let in_base = of_base.iter().find_map(|(key, value)| match of_ours.get(key) {
                Some(ours) => values_differ(&format!("{path}/{key}"), value, ours, grown),
                None if grown && value.is_null() => None,
                None => Some(format!("{path}/{key} is missing")),
            });
            let added = of_ours.keys().find(|key| !grown && !of_base.contains_key(*key));
            in_base.or_else(|| added.map(|key| format!("{path}/{key} is new")))
        }
        (Value::Array(of_base), Value::Array(of_ours)) if of_base.len() == of_ours.len() => {
            let mut pairs = of_base.iter().zip(of_ours).enumerate();
            pairs.find_map(|(i, (base, ours))| values_differ(&format!("{path}/{i}"), base, ours, grown))
        }
        _ if base == ours => None,
        _ => Some(format!("{path} is {}, was {}", shortened(ours), shortened(base))),
    }
}

fn shortened(value: &Value) -> String {
    const MAX_CHARS: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// Describes a difference of two safetensors files; `position` is the offset of the first different byte.
fn tensors_differ(base: &Path, ours: &Path, bytes: [&[u8]; 2], position: usize) -> Result<String> {
    let describe = |path: &Path| read_header(path).with_context(|| format!("{} is invalid", path.display()));
    let (of_base, of_ours) = (describe(base)?, describe(ours)?);
    let as_map = |tensors: &[(Entry, u64)]| -> BTreeMap<String, Entry> {
        tensors.iter().map(|(entry, _)| (entry.name.clone(), entry.clone())).collect()
    };
    let (map_of_base, map_of_ours) = (as_map(&of_base), as_map(&of_ours));
    let names: BTreeSet<&String> = map_of_base.keys().chain(map_of_ours.keys()).collect();
    for name in names {
        match (map_of_base.get(name), map_of_ours.get(name)) {
            (Some(base), Some(ours)) if base == ours => {}
            (Some(base), Some(ours)) => {
                let of = |entry: &Entry| format!("{} {:?}", entry.dtype, entry.shape);
                return Ok(format!("{name} is {}, was {}", of(ours), of(base)));
            }
            (Some(_), None) => return Ok(format!("{name} is missing")),
            _ => return Ok(format!("{name} is new")),
        }
    }
    for ((entry, from_base), (_, from_ours)) in of_base.iter().zip(&of_ours) {
        if from_base != from_ours {
            return Ok("tensors are in a different order or position".to_owned());
        }
        let start = usize::try_from(*from_base)?;
        let data = start..start + usize::try_from(entry.bytes)?;
        let (was, is) = (&bytes[0][data.clone()], &bytes[1][data]);
        if let Some(first) = first_difference(was, is) {
            let count = was.iter().zip(is).filter(|(b, o)| b != o).count();
            return Ok(format!(
                "{} differs in {count} of {} bytes, first in byte {first}",
                entry.name, entry.bytes
            ));
        }
    }
    Ok(format!("the header differs from byte {position} on"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::support::noise::Float;
    use crate::support::shards::ShardWriter;
    use serde_json::json;

    /// Two directories, and a way to write equal or different files to them.
    struct Pair(tempfile::TempDir);

    impl Pair {
        fn new() -> Self {
            let pair = Self(tempfile::tempdir().unwrap());
            for side in ["base", "ours"] {
                std::fs::create_dir_all(pair.at(side).join("out")).unwrap();
            }
            pair
        }

        fn at(&self, side: &str) -> PathBuf {
            self.0.path().join(side)
        }

        fn write(&self, name: &str, base: &[u8], ours: &[u8]) {
            std::fs::write(self.at("base/out").join(name), base).unwrap();
            std::fs::write(self.at("ours/out").join(name), ours).unwrap();
        }

        fn json(&self, name: &str, base: &Value, ours: &Value) {
            self.write(name, base.to_string().as_bytes(), ours.to_string().as_bytes());
        }

        fn difference(&self) -> Option<String> {
            directories(&self.at("base"), &self.at("ours"), false).unwrap()
        }

        #[track_caller]
        fn differs(&self, expected: &[&str]) {
            let difference = self.difference().unwrap();
            assert!(expected.iter().all(|part| difference.contains(part)), "{difference}");
        }
    }

    fn safetensors(path: &Path, tensors: &[(&str, usize)], data: &[u8]) {
        let entry = |(name, n): &(&str, usize)| Entry::new((*name).to_owned(), Float::Bf16, &[*n]);
        let entries: Vec<Entry> = tensors.iter().map(entry).collect();
        let _ = std::fs::remove_file(path);
        let mut writer = ShardWriter::create(path, &entries).unwrap();
        writer.write(data).unwrap();
        writer.finish().unwrap();
    }

    #[test]
    fn a_changed_missing_or_added_file_is_seen() {
        let pair = Pair::new();
        pair.write("tokenizer.model", b"abc", b"abc");
        assert_eq!(pair.difference(), None);
        pair.write("tokenizer.model", b"abc", b"abd");
        pair.differs(&["out/tokenizer.model", "byte 2"]);
        pair.write("tokenizer.model", b"abc", b"abcd");
        pair.differs(&["byte 3"]);
        std::fs::remove_file(pair.at("ours/out/tokenizer.model")).unwrap();
        pair.differs(&["out/tokenizer.model: only the base"]);
        std::fs::remove_file(pair.at("base/out/tokenizer.model")).unwrap();
        std::fs::write(pair.at("ours/out/tokenizer.model"), b"").unwrap();
        pair.differs(&["out/tokenizer.model: the base does not"]);
        assert!(directories(&pair.at("base"), &pair.at("nowhere"), false).unwrap().is_none());
        assert!(directories(&pair.at("nowhere"), &pair.at("ours"), false).unwrap().is_some());
    }

    #[test]
    fn sentences_are_left_out_where_only_weights_count() {
        let pair = Pair::new();
        for name in [REPORT, MANIFEST, QSERVE_MANIFEST] {
            pair.json(name, &json!({ "a": 1 }), &json!({ "a": 2 }));
        }
        let of_weights = || directories(&pair.at("base"), &pair.at("ours"), true).unwrap();
        assert!(pair.difference().is_some());
        assert_eq!(of_weights(), None);
        pair.json("config.json", &json!({ "a": 1 }), &json!({ "a": 2 }));
        assert!(of_weights().unwrap().contains("config.json"));
    }

    #[test]
    fn model_cards_are_left_out() {
        let pair = Pair::new();
        std::fs::write(pair.at("ours/out/README.md"), "new").unwrap();
        let [model, card] = ["model", "README.md"].map(|name| json!({ "name": name, "sha256": "0" }));
        pair.json(MANIFEST, &json!({ "files": [model] }), &json!({ "files": [card, model] }));
        assert_eq!(pair.difference(), None);
        let other = json!({ "name": "model", "sha256": "1" });
        pair.json(MANIFEST, &json!({ "files": [model] }), &json!({ "files": [card, other] }));
        pair.differs(&["sha256"]);
    }

    #[test]
    fn journals_are_left_out() {
        let pair = Pair::new();
        let journal = pair.at("ours/out.job");
        std::fs::create_dir(&journal).unwrap();
        std::fs::write(journal.join("record.json"), "{}").unwrap();
        assert_eq!(pair.difference(), None);
    }

    #[test]
    fn a_difference_in_json_has_its_path() {
        let pair = Pair::new();
        let config = json!({ "a": [1, { "b": 2 }], "text": "x" });
        pair.json("config.json", &config, &config);
        assert_eq!(pair.difference(), None);
        pair.json("config.json", &config, &json!({ "a": [1, { "b": 3 }], "text": "x" }));
        pair.differs(&["out/config.json: /a/1/b is 3, was 2"]);
        pair.json("config.json", &config, &json!({ "a": [1, { "b": 2 }] }));
        pair.differs(&["/text is missing"]);
        pair.json("config.json", &json!({ "a": [1] }), &json!({ "a": [1, 2] }));
        pair.differs(&["/a is [1,2], was [1]"]);
        pair.json("config.json", &json!({}), &json!({ "c": null }));
        pair.differs(&["/c is new"]);
        pair.write("config.json", b"{\"a\": 1}", b"{\"a\":  1}");
        pair.differs(&["byte 6"]);
        assert_eq!(documents(b"{}", b"{}"), None);
    }

    #[test]
    fn plans_may_differ_only_in_their_engines() {
        let plan = |scheme: &str, engines: &str| {
            json!({ "formats": [{ "scheme": scheme, "engines": [engines] }], "engines": engines }).to_string()
        };
        let differ = |ours: String| plans(plan("a", "b").as_bytes(), ours.as_bytes());
        assert_eq!(differ(plan("a", "b")), None);
        let other = json!({ "formats": [{ "scheme": "a", "engines": [] }], "engines": "b" }).to_string();
        assert_eq!(differ(other), None);
        assert_eq!(differ(plan("c", "b")).unwrap(), "/formats/0/scheme is \"c\", was \"a\"");
        assert_eq!(differ(plan("a", "c")).unwrap(), "/engines is \"c\", was \"b\"", "elsewhere");
        assert_eq!(plans(b"no plan", b"no plan"), None);
        assert!(plans(b"no plan", b"another").is_some());
    }

    #[test]
    fn reports_may_differ_in_their_versions_alone() {
        let pair = Pair::new();
        let report = |schema: &str, version: &str, rest: Value| {
            changed(json!({ "schema": schema, "version": version }), &rest)
        };
        let numbers = json!({ "tensors": [{ "error": 0.5, "ratio": null }] });
        let base = report("quant-report/1", "0.1.0", numbers.clone());
        pair.json(REPORT, &base, &report("quant-report/1", "0.2.0", numbers));
        assert_eq!(pair.difference(), None);
        let other = json!({ "tensors": [{ "error": 0.5000000001, "ratio": null }] });
        for schema in ["quant-report/1", "quant-report/2"] {
            pair.json(REPORT, &base, &report(schema, "0.1.0", other.clone()));
            pair.differs(&["out/quant_report.json: /tensors/0/error is 0.5000000001, was 0.5"]);
        }
        let grown = json!({ "tensors": [{ "error": 0.5, "tokens": 4 }], "kind": "a" });
        pair.json(REPORT, &base, &report("quant-report/2", "0.1.0", grown.clone()));
        assert_eq!(pair.difference(), None);
        pair.json(REPORT, &base, &report("quant-report/1", "0.1.0", grown));
        pair.differs(&["/tensors/0/ratio is missing"]);
        pair.json(REPORT, &base, &report("quant-report/2", "0.1.0", json!({ "tensors": [{ "ratio": 1 }] })));
        pair.differs(&["/tensors/0/error is missing"]);
    }

    fn changed(mut value: Value, changes: &Value) -> Value {
        value.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        value
    }

    #[test]
    fn manifests_may_differ_in_the_report_alone() {
        let pair = Pair::new();
        let manifest = |report: &str, config: &str| json!({ "files": [{ "name": "config.json", "sha256": config }, { "name": REPORT, "sha256": report }] });
        pair.json(MANIFEST, &manifest("a", "c"), &manifest("b", "c"));
        assert_eq!(pair.difference(), None);
        pair.json(MANIFEST, &manifest("a", "c"), &manifest("b", "d"));
        pair.differs(&["quant_manifest.json: /files/0/sha256 is \"d\", was \"c\""]);
    }

    #[test]
    fn a_difference_in_a_tensor_has_its_name_and_place() {
        let pair = Pair::new();
        let [base, ours] = ["base", "ours"].map(|side| pair.at(side).join("out/model.safetensors"));
        let tensors = [("a", 2), ("b", 3)];
        let data: Vec<u8> = (0..10).collect();
        safetensors(&base, &tensors, &data);
        safetensors(&ours, &tensors, &data);
        assert_eq!(pair.difference(), None);
        let mut flipped = data.clone();
        flipped[7] ^= 1;
        flipped[9] ^= 0x80;
        safetensors(&ours, &tensors, &flipped);
        pair.differs(&["out/model.safetensors: b differs in 2 of 6 bytes, first in byte 3"]);
        safetensors(&ours, &[("a", 3), ("b", 2)], &data);
        pair.differs(&["a is BF16 [3], was BF16 [2]"]);
        safetensors(&ours, &[("a", 2), ("c", 3)], &data);
        pair.differs(&["b is missing"]);
        safetensors(&ours, &[("b", 3), ("a", 2)], &data);
        pair.differs(&["order or position"]);
        std::fs::write(&ours, [b"\x02\0\0\0\0\0\0\0{}", &data[..]].concat()).unwrap();
        pair.differs(&["a is missing"]);
        std::fs::write(&ours, b"broken").unwrap();
        assert!(directories(&pair.at("base"), &pair.at("ours"), false).is_err());
    }
}
