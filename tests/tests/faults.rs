//! Checks `tests/faults.toml`: every fault is in the table once, and the tests that it names exist and run.

use std::collections::BTreeMap;
use std::path::Path;

use quant_tests::workspace_root;
use toml::{Table, Value};

const FAULTS: i64 = 112;

/// The number of faults of which the program does less than the table says. Lower it when one is mended; it may not
/// rise.
const OPEN: usize = 6;

fn faults() -> Vec<Table> {
    let text = std::fs::read_to_string(workspace_root().join("tests/faults.toml")).unwrap();
    let mut table: Table = text.parse().unwrap();
    let Some(Value::Array(faults)) = table.remove("fault") else {
        panic!("no array of tables named `fault`")
    };
    assert!(table.is_empty(), "unknown keys: {:?}", table.keys().collect::<Vec<_>>());
    faults.into_iter().map(|fault| fault.as_table().cloned().unwrap()).collect()
}

fn string<'a>(fault: &'a Table, key: &str) -> Option<&'a str> {
    fault.get(key).map(|value| value.as_str().filter(|text| !text.is_empty()).unwrap())
}

/// Why a named test does not count; `None` if it does.
fn defect(root: &Path, name: &str) -> Option<String> {
    let Some((path, function)) = name.split_once("::") else { return Some("has no `::`".into()) };
    let Ok(text) = std::fs::read_to_string(root.join(path)) else { return Some("has no such file".into()) };
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let start = format!("fn {function}(");
    let found: Vec<usize> = (0..lines.len()).filter(|&i| lines[i].starts_with(&start)).collect();
    let &[at] = &found[..] else { return Some(format!("is defined {} times", found.len())) };
    let before = lines[..at].iter().rev().take_while(|line| line.starts_with("#[") || line.starts_with("//"));
    let attributes: Vec<&str> = before.copied().filter(|line| line.starts_with("#[")).collect();
    if !attributes.contains(&"#[test]") {
        return Some("is not a test".into());
    }
    attributes.iter().any(|attribute| attribute.contains("ignore")).then(|| "is ignored".into())
}

#[test]
fn every_fault_is_in_the_table_once() {
    let faults = faults();
    let mut numbers: Vec<i64> = faults.iter().map(|fault| fault["number"].as_integer().unwrap()).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, (1..=FAULTS).collect::<Vec<_>>(), "a number is missing, or there twice");
}

#[test]
fn every_fault_has_tests_or_a_reason() {
    let root = workspace_root();
    let mut states: BTreeMap<String, usize> = BTreeMap::new();
    let mut defects = Vec::new();
    for fault in faults() {
        let number = &fault["number"];
        let keys = ["number", "state", "fault", "tests", "why", "note"];
        assert!(fault.keys().all(|key| keys.contains(&key.as_str())), "{number}: an unknown key: {fault:?}");
        assert!(string(&fault, "fault").is_some(), "{number}: no description");
        let state = string(&fault, "state").unwrap().to_owned();
        let tests = fault.get("tests").map_or(&[][..], |tests| tests.as_array().unwrap().as_slice());
        let [why, note] = ["why", "note"].map(|key| string(&fault, key).is_some());
        match state.as_str() {
            "tested" => assert!(!tests.is_empty() && !why, "{number}: no tests, or a reason instead"),
            "open" => assert!(why && !note, "{number}: it is not said what is missing"),
            "n/a" => assert!(why && !note && tests.is_empty(), "{number}: no reason, or tests"),
            other => panic!("{number}: unknown state `{other}`"),
        }
        for test in tests {
            let name = test.as_str().unwrap();
            defects.extend(defect(&root, name).map(|defect| format!("{number}: `{name}` {defect}")));
        }
        *states.entry(state).or_insert(0) += 1;
    }
    assert!(defects.is_empty(), "{}", defects.join("\n"));
    assert_eq!(states["open"], OPEN, "{states:?}: change `OPEN` if a fault was mended");
}

#[test]
fn tests_that_do_not_count_are_found() {
    let root = tempfile::tempdir().unwrap();
    let text = "/// Right.\n#[test]\n#[cfg(unix)]\nfn right() {}\n\nfn helper() {}\n\n#[test]\n#[ignore = \"slow\"]\n\
                fn ignored() {}\nmod one {\n    #[test]\n    fn twice() {}\n}\n#[test]\nfn twice() {}\n";
    std::fs::write(root.path().join("some.rs"), text).unwrap();
    let defect = |name: &str| defect(root.path(), name);
    assert_eq!(defect("some.rs::right"), None);
    for (name, expected) in [
        ("some.rs", "has no `::`"),
        ("other.rs::right", "has no such file"),
        ("some.rs::wrong", "is defined 0 times"),
        ("some.rs::twice", "is defined 2 times"),
        ("some.rs::helper", "is not a test"),
        ("some.rs::ignored", "is ignored"),
    ] {
        assert_eq!(defect(name).as_deref(), Some(expected), "{name}");
    }
}
