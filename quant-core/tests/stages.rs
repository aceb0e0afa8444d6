//! The stages of the two libraries form a stack: no stage uses one above it. The test parses the sources.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The stages from bottom to top. Those up to `format` are in `quant-formats`, and `quant-core` re-exports them under
/// the same names; it has more of `quantize`. Whole runs use all stages.
const STAGES: [&str; 16] = [
    "blocks",
    "checkpoint",
    "scheme",
    "quantize",
    "format",
    "model",
    "calibrate",
    "generate",
    "transform",
    "round",
    "recipe",
    "pipeline",
    "gguf",
    "engines",
    "run",
    "units",
];
/// Modules that every stage may use. They use no stage, except that `error` uses [`OF_ERRORS`].
const SHARED: [&str; 11] = [
    "allocate", "digest", "error", "keys", "names", "progress", "random", "system", "vector", "wording",
    "worker",
];
/// `error` wraps the errors of headers, and its remedies list the formats.
const OF_ERRORS: [&str; 2] = ["checkpoint", "format"];

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
}

fn without_tests(text: &str) -> String {
    let (mut kept, mut skipping) = (String::new(), false);
    for line in text.lines() {
        let indent = line.len() - line.trim_start().len();
        if line.trim() == "#[cfg(test)]" && indent == 0 {
            skipping = true;
        } else if skipping {
            // The item ends at the first unindented line that ends with `}` or `;`.
            skipping = !(indent == 0 && (line.ends_with('}') || line.ends_with(';')));
        } else if !line.trim_start().starts_with("//") {
            kept.push_str(line.split(" //").next().unwrap_or_default());
            kept.push('\n');
        }
    }
    kept
}

/// Returns the root modules of the crate that a source names: `crate::x`, and each `x` of `crate::{x, y::z}`.
fn modules_used(text: &str) -> BTreeSet<String> {
    let word = |text: &str| text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
    let mut used = BTreeSet::new();
    for (at, _) in text.match_indices("crate::") {
        let path = &text[at + "crate::".len()..];
        let Some(list) = path.strip_prefix('{') else {
            used.insert(word(path));
            continue;
        };
        let (mut depth, mut start) = (0, 0);
        for (i, c) in list.char_indices() {
            match c {
                '{' => depth += 1,
                ',' | '}' if depth == 0 => {
                    used.insert(word(list[start..i].trim_start()));
                    start = i + 1;
                    if c == '}' {
                        break;
                    }
                }
                '}' => depth -= 1,
                _ => {}
            }
        }
    }
    used
}

fn is_for_tests(path: &Path) -> bool {
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    name == "tests"
        || name.ends_with("_tests")
        || path.components().any(|c| c.as_os_str() == "tests")
        // The reference implementation that tests compare the solver with.
        || path.ends_with("gptq/reference.rs")
}

#[test]
fn no_stage_uses_one_above_it() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (mut files, mut inside) = (Vec::new(), Vec::new());
    for root in [here.join("../formats/src"), here.join("src")] {
        let before = files.len();
        sources(&root, &mut files);
        files[before..].iter_mut().for_each(|file| *file = file.strip_prefix(&root).unwrap().to_owned());
        assert!(files.len() > before + 50, "{}", root.display());
        inside.extend(std::iter::repeat_n(root, files.len() - before));
    }
    let height = |module: &str| STAGES.iter().position(|stage| *stage == module);
    let (mut faults, mut seen) = (Vec::new(), BTreeSet::new());
    for (path, root) in files.iter().zip(&inside) {
        let own = path.components().next().unwrap().as_os_str().to_string_lossy().replace(".rs", "");
        if own == "lib" || is_for_tests(path) {
            continue;
        }
        let shared = SHARED.contains(&own.as_str());
        assert!(shared || height(&own).is_some(), "`{own}` belongs to no stage");
        seen.insert(own.clone());
        let stage_root = path.components().count() == 1 || path.ends_with(format!("{own}/mod.rs"));
        let text = without_tests(&std::fs::read_to_string(root.join(path)).unwrap());
        assert!(
            !(stage_root && text.contains("super::")),
            "{}: name the crate's modules by `crate::`",
            path.display()
        );
        for used in modules_used(&text) {
            let allowed = own == "error" && OF_ERRORS.contains(&used.as_str());
            let above = match (height(&own), height(&used)) {
                (Some(own), Some(used)) => used > own,
                (None, Some(_)) => !allowed,
                _ => false,
            };
            if above {
                faults.push(format!("{} uses {used}, which is above {own}", path.display()));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    for stage in STAGES {
        assert!(seen.contains(stage), "there is no stage `{stage}`");
    }
}

/// The files that may match on the operations of a block, and why a match there cannot miss a new operation. All other
/// code calls a method of `Op`, whose match is exhaustive.
const NAMES_OPERATIONS: [(&str, &str); 8] = [
    ("model/arch/", "graphs are built from operations here, and each operation answers every question"),
    ("model/block.rs", "evaluates them; an unknown one is an error"),
    ("model/norm.rs", "evaluates norms; another operation is an error"),
    (
        "model/fused.rs",
        "recognizes operations that the kernels compute while packing; others are computed separately",
    ),
    ("model/grouped.rs", "recognizes the experts that one call can run; others run one by one"),
    ("transform/fold.rs", "folds into norms and linears; another operation is an error"),
    ("transform/rotate.rs", "refuses each operation that it does not know to commute"),
    (
        "gguf/",
        "`check_graph` refuses what `Op::computes` does not describe and the family's graph does not name",
    ),
];

#[test]
fn every_operation_is_classified() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&root, &mut files);
    let mut naming = BTreeSet::new();
    for file in &files {
        let path = file.strip_prefix(&root).unwrap();
        let text = without_tests(&std::fs::read_to_string(file).unwrap());
        let is_variant = |(at, name): (usize, &str)| {
            let before = text[..at].chars().next_back();
            !before.is_some_and(|c| c.is_alphanumeric() || c == '_')
                && text[at + name.len()..].starts_with(char::is_uppercase)
        };
        if is_for_tests(path) || !text.match_indices("Op::").any(is_variant) {
            continue;
        }
        let path = path.to_string_lossy().replace('\\', "/");
        let place = NAMES_OPERATIONS.iter().find(|(place, _)| path.starts_with(place));
        let (place, _) = place.unwrap_or_else(|| panic!("{path} names operations: make it a method of `Op`"));
        naming.insert(*place);
    }
    let unused: Vec<_> = NAMES_OPERATIONS.iter().filter(|(place, _)| !naming.contains(place)).collect();
    assert!(unused.is_empty(), "{unused:?}");
}

/// Files with strings that equal the name of a family but mean something else.
const OTHER_NAMES: [(&str, &str); 1] = [(
    "quant-core/src/gguf/read/tokenizer.rs",
    "tokenizers in GGUF files are named after the first models that used them",
)];

fn compared(text: &str, names: &BTreeSet<&str>) -> Vec<String> {
    let mut found = Vec::new();
    for line in text.lines() {
        for name in names {
            let quoted = format!("\"{name}\"");
            found.extend(line.match_indices(&quoted).filter_map(|(at, _)| {
                let (before, after) = (line[..at].trim_end(), line[at + quoted.len()..].trim_start());
                let operand = ["==", "!=", "\" |"].iter().any(|end| before.ends_with(end))
                    || ["==", "!=", "| \""].iter().any(|start| after.starts_with(start));
                let argument = ["with(", "contains(", "contains(&", ".eq(", ".ne("];
                let is_compared = operand
                    || argument.iter().any(|end| before.ends_with(end))
                    || before.contains("matches!(")
                    || after.contains("=>");
                is_compared.then(|| line.trim().to_owned())
            }));
        }
        for field in ["family", "container", "wrapper", "arch"] {
            for ending in ["", "()", ".name()", ".family", ".arch"] {
                let subject = format!("{field}{ending} ");
                let is_one = |(at, _): (usize, &str)| {
                    let after = &line[at + subject.len()..];
                    let right = after.strip_prefix("== ").or_else(|| after.strip_prefix("!= "));
                    !line[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_')
                        && (after == "{" && line.contains("match ")
                            || right.is_some_and(|r| r.starts_with(|c: char| c == '"' || c.is_uppercase())))
                };
                if line.match_indices(&subject).any(is_one) {
                    found.push(line.trim().to_owned());
                }
            }
        }
    }
    found
}

#[test]
fn names_of_containers_and_families_are_data() {
    let names: BTreeSet<&str> = (quant_core::model::arch::supported())
        .chain(quant_core::format::CONTAINERS.iter().map(|container| container.name()))
        .collect();
    assert!(names.contains("awq") && names.contains("opt") && names.len() > 40);
    // Each format and family may use its own name.
    let own = ["formats/src/format/", "quant-core/src/model/arch/"];
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let (mut faults, mut excused) = (Vec::new(), BTreeSet::new());
    for folder in ["formats", "quant-core", "eval", "quant-cli", "python"] {
        let mut files = Vec::new();
        sources(&root.join(folder).join("src"), &mut files);
        assert!(!files.is_empty(), "{folder}");
        for file in files.iter().filter(|file| !is_for_tests(file.strip_prefix(&root).unwrap())) {
            let path = file.strip_prefix(&root).unwrap().to_string_lossy().replace('\\', "/");
            let text = without_tests(&std::fs::read_to_string(file).unwrap());
            let lines = compared(&text, &names);
            if lines.is_empty() || own.iter().any(|folder| path.starts_with(folder)) {
                continue;
            }
            match OTHER_NAMES.iter().find(|(place, _)| path == *place) {
                Some((place, _)) => _ = excused.insert(*place),
                None => faults.extend(lines.into_iter().map(|line| format!("{path}: {line}"))),
            }
        }
    }
    assert!(faults.is_empty(), "make these entries of a table:\n{}", faults.join("\n"));
    assert_eq!(excused.len(), OTHER_NAMES.len(), "{excused:?}");
}

/// The modules that call the operating system directly, one per crate, if the crate does. A port to another system
/// changes only these, and `docs/crates.md` lists them.
const SYSTEM_MODULES: [(&str, Option<&str>); 5] = [
    ("formats", Some("src/system.rs")),
    ("quant-core", Some("src/system/")),
    ("quant-cli", Some("src/system.rs")),
    ("eval", None),
    ("python", None),
];

#[test]
fn the_operating_system_is_asked_in_one_module_of_a_crate() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let page = std::fs::read_to_string(root.join("docs/crates.md")).unwrap();
    for (folder, module) in SYSTEM_MODULES {
        let (mut files, mut asking) = (Vec::new(), BTreeSet::new());
        sources(&root.join(folder).join("src"), &mut files);
        assert!(!files.is_empty(), "{folder}");
        for file in files.iter().filter(|file| !is_for_tests(file.strip_prefix(&root).unwrap())) {
            let text = without_tests(&std::fs::read_to_string(file).unwrap());
            let calls = ["std::os::", "rustix::", "libc::", "\"/proc/", "\"/sys/"];
            if calls.iter().any(|call| text.contains(call)) {
                asking.insert(file.strip_prefix(&root).unwrap().to_string_lossy().replace('\\', "/"));
            }
        }
        let module = module.map(|module| format!("{folder}/{module}"));
        let is_system = |file: &&String| module.as_ref().is_some_and(|module| file.starts_with(module));
        let others: Vec<_> = asking.iter().filter(|file| !is_system(file)).collect();
        assert!(others.is_empty(), "these calls belong into the system module: {others:?}");
        if let Some(module) = &module {
            assert!(!asking.is_empty(), "{module} makes no calls");
            assert!(page.contains(&format!("| `{module}`")), "docs/crates.md does not list {module}");
        }
    }
}

/// Returns the public types of a source that other crates could match in full or write as literals, and that are not
/// `#[non_exhaustive]`.
fn closed_types(text: &str) -> BTreeSet<String> {
    let (mut found, mut is_open) = (BTreeSet::new(), false);
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        is_open = line == "#[non_exhaustive]" || is_open && !line.is_empty();
        let Some(item) = line.strip_prefix("pub enum ").or(line.strip_prefix("pub struct ")) else {
            continue;
        };
        let name: String = item.chars().take_while(|c| c.is_alphanumeric()).collect();
        let mut is_closed = line.starts_with("pub enum");
        if line.starts_with("pub struct") && line.ends_with('{') {
            let body = lines.by_ref().take_while(|line| *line != "}");
            let fields = body.filter(|line| line.starts_with(' ') && !line.starts_with("     "));
            let fields: Vec<&str> =
                fields.map(str::trim).filter(|f| !f.starts_with(['#', ')', '}'])).collect();
            is_closed = !fields.is_empty() && fields.iter().all(|field| field.starts_with("pub "));
        }
        if is_closed && !is_open {
            found.insert(name);
        }
        is_open = false;
    }
    found
}

#[test]
fn types_that_cannot_grow_are_listed() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let page = std::fs::read_to_string(root.join("docs/crates.md")).unwrap();
    let (_, section) = page.split_once("### Types that callers fill in or match").unwrap();
    for (folder, package) in [
        ("formats/src", "quant-formats"),
        ("quant-core/src", "quant-core"),
        ("eval/src", "quant-evaluator"),
        ("kernels-cpu/src", "quant-kernels-cpu"),
        ("kernels-cuda/src", "quant-kernels-cuda"),
        ("calibration-data", "quant-calibration-data"),
    ] {
        let (mut files, mut closed) = (Vec::new(), BTreeSet::new());
        sources(&root.join(folder), &mut files);
        assert!(!files.is_empty(), "{folder}");
        for file in files.iter().filter(|file| !is_for_tests(file.strip_prefix(&root).unwrap())) {
            closed.extend(closed_types(&without_tests(&std::fs::read_to_string(file).unwrap())));
        }
        let start = format!("| `{package}` | ");
        let row = section.lines().find_map(|line| line.strip_prefix(start.as_str())).unwrap();
        let listed = row.split('`').skip(1).step_by(2).map(str::to_owned).collect::<BTreeSet<_>>();
        let missing: Vec<_> = closed.difference(&listed).collect();
        let stale: Vec<_> = listed.difference(&closed).collect();
        assert!(missing.is_empty(), "{package}: make these #[non_exhaustive], or list them: {missing:?}");
        assert!(stale.is_empty(), "{package}: the list names types that may grow or do not exist: {stale:?}");
    }
}

#[test]
fn types_that_cannot_grow_are_found() {
    let text = "#[non_exhaustive]\npub enum A {\n    B,\n}\n\n#[derive(Debug)]\npub enum C {\n    D,\n}\n\n\
                pub struct E {\n    pub f: u8,\n    g: u8,\n}\n\npub struct H<'a> {\n    #[serde(default)]\n    \
                pub i: &'a u8,\n}\n\n#[non_exhaustive]\n#[derive(Debug)]\npub struct J {\n    pub k: u8,\n}\n\n\
                pub struct L(pub u8);\n";
    assert_eq!(closed_types(text), BTreeSet::from(["C".to_owned(), "H".to_owned()]));
}

#[test]
fn comparisons_of_names_are_found() {
    let names = BTreeSet::from(["awq", "gptq"]);
    for line in [
        "if outline.container == \"awq\" {",
        "if \"awq\" != name {",
        "let x = matches!(name, \"x\" | \"gptq\");",
        "Some(\"gptq\") => 1,",
        "(\"awq\", None) if x => 2,",
        "name.starts_with(\"awq\")",
        "[\"x\"].contains(&\"awq\")",
        "match outline.container {",
        "let x = match plan.container.name() {",
        "if family.arch == PHI {",
        "filter(|f| f.family != \"unheard\")",
    ] {
        assert_eq!(compared(line, &names).len().min(1), 1, "{line}");
    }
    for line in [
        "(\"awq\", &[rule]),",
        "let x = table.get(\"awq\");",
        "f.family == name",
        "match container.reader() {",
    ] {
        assert!(compared(line, &names).is_empty(), "{line}");
    }
}

#[test]
fn paths_are_found_wherever_they_are() {
    let text =
        "use crate::{Error, model::{Block, NodeId}, recipe::Plan};\nlet x = crate::format::reader(y);\n";
    let used = modules_used(text);
    for module in ["Error", "model", "recipe", "format"] {
        assert!(used.contains(module), "{module} in {used:?}");
    }
    assert!(!used.contains("Block") && !used.contains("NodeId"));
    let text = "use crate::a::B;\n// crate::b\n#[cfg(test)]\nmod tests {\n    use crate::c::D;\n}\nfn e() { crate::f::g() }\n";
    assert_eq!(modules_used(&without_tests(text)).into_iter().collect::<Vec<_>>(), ["a", "f"]);
}
