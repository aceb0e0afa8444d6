//! The software bill of materials of the binary: CycloneDX 1.5, from Cargo's own metadata.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::support::shell::{cargo, output, root};

/// Returns the components from which `package` is built for `target`, including those of build scripts, as a CycloneDX
/// document. The same sources give the same bytes.
///
/// # Errors
/// When Cargo fails, or does not know the package.
pub fn sbom(package: &str, target: &str) -> Result<Value> {
    let arguments = ["metadata", "--format-version", "1", "--locked", "--filter-platform", target];
    let metadata: Value = serde_json::from_str(&output(&mut cargo(&arguments))?)?;
    let lock = std::fs::read_to_string(root().join("Cargo.lock")).context("cannot read Cargo.lock")?;
    document(&metadata, &checksums(&lock), package)
}

fn document(
    metadata: &Value,
    checksums: &BTreeMap<(String, String), String>,
    package: &str,
) -> Result<Value> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let packages: BTreeMap<String, Value> =
        list(&metadata["packages"]).into_iter().map(|p| (text(&p["id"]), p)).collect();
    let nodes: BTreeMap<String, Value> =
        list(&metadata["resolve"]["nodes"]).into_iter().map(|n| (text(&n["id"]), n)).collect();
    let first = packages.iter().find(|(_, p)| p["name"] == package);
    let first = first.map(|(id, _)| id.clone()).with_context(|| format!("no package `{package}`"))?;
    let mut included = BTreeSet::new();
    let mut open = vec![first.clone()];
    while let Some(id) = open.pop() {
        if !included.insert(id.clone()) {
            continue;
        }
        for dependency in list(&nodes.get(&id).unwrap_or(&Value::Null)["deps"]) {
            // Dependencies of build scripts are listed, because some compile C code for the binary.
            let kinds = list(&dependency["dep_kinds"]);
            if kinds.iter().any(|kind| kind["kind"] != "dev") {
                open.push(text(&dependency["pkg"]));
            }
        }
    }
    let component = |id: &String| {
        let p = &packages[id];
        let (name, version) = (text(&p["name"]), text(&p["version"]));
        let purl = format!("pkg:cargo/{name}@{version}");
        let mut component =
            json!({ "type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl });
        if let Some(license) = p["license"].as_str() {
            // Old manifests separate alternatives by a slash.
            component["licenses"] = json!([{ "expression": license.replace('/', " OR ") }]);
        }
        if let Some(sum) = checksums.get(&(name, version)) {
            component["hashes"] = json!([{ "alg": "SHA-256", "content": sum }]);
        }
        component
    };
    let mut program = component(&first);
    program["type"] = json!("application");
    included.remove(&first);
    let mut components: Vec<Value> = included.iter().map(component).collect();
    components.sort_by_key(|c| c["bom-ref"].as_str().unwrap_or_default().to_owned());
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": { "component": program },
        "components": components,
    }))
}

/// The hashes of packages in a `Cargo.lock`, by name and version.
fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    let field = |block: &str, key: &str| {
        let line = block.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = "));
        line.map(|value| value.trim_matches('"').to_owned())
    };
    let of =
        |block: &str| Some(((field(block, "name")?, field(block, "version")?), field(block, "checksum")?));
    lock.split("[[package]]").filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_of_the_program_are_listed_once() {
        let package =
            |id: &str| json!({ "id": id, "name": id, "version": "1.0.0", "license": "MIT/Apache-2.0" });
        let dependency = |id: &str, kind: Value| json!({ "pkg": id, "dep_kinds": [{ "kind": kind }] });
        let packages = ["program", "a", "b", "build", "test", "other"].map(package);
        let metadata = json!({
            "packages": packages,
            "resolve": { "nodes": [
                { "id": "program", "deps": [
                    dependency("a", Value::Null), dependency("build", json!("build")), dependency("test", json!("dev")),
                ] },
                { "id": "a", "deps": [dependency("b", Value::Null)] },
                { "id": "b", "deps": [dependency("a", Value::Null)] },
            ] },
        });
        let lock = "version = 4\n\n[[package]]\nname = \"a\"\nversion = \"1.0.0\"\nsource = \"x\"\nchecksum = \"ab\"\n\n\
                    [[package]]\nname = \"program\"\nversion = \"1.0.0\"\n";
        let found = document(&metadata, &checksums(lock), "program").unwrap();
        let names: Vec<_> =
            found["components"].as_array().unwrap().iter().map(|c| c["name"].clone()).collect();
        assert_eq!(names, ["a", "b", "build"]);
        assert_eq!(found["metadata"]["component"]["name"], "program");
        let a = &found["components"][0];
        assert_eq!((&a["purl"], &a["hashes"][0]["content"]), (&json!("pkg:cargo/a@1.0.0"), &json!("ab")));
        assert_eq!(a["licenses"][0]["expression"], "MIT OR Apache-2.0");
        assert!(document(&metadata, &BTreeMap::new(), "nothing").is_err());
    }
}
