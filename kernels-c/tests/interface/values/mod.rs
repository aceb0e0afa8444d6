//! Every function gives bit-identical results to the Rust interface.

mod attention;
mod experts;
mod features;
mod hadamard;
mod pages;
mod products;
mod weights;

use std::path::Path;

/// Names that are followed by a parenthesis.
fn called(text: &str) -> impl Iterator<Item = &str> {
    let lines = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    lines.flat_map(|line| {
        line.match_indices("qz1_").filter_map(|(at, _)| {
            let rest = &line[at..];
            let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))?;
            (rest[end..].starts_with('(') && !line[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_'))
                .then_some(&rest[..end])
        })
    })
}

/// Every function of the header is called by some test in this folder, or by the tests of checkpoints.
#[test]
fn all_functions_have_values() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let header = std::fs::read_to_string(root.join("include/quant_kernels.h")).unwrap();
    let names: Vec<&str> = called(&header).collect();
    assert!(names.len() > 35 && names.contains(&"qz1_multiply"), "{names:?}");
    let files = std::fs::read_dir(root.join("tests/interface/values")).unwrap();
    let paths = files.map(|file| file.unwrap().path()).chain([root.join("tests/checkpoint.rs")]);
    let tests: String = paths.map(|path| std::fs::read_to_string(path).unwrap()).collect();
    let tested: Vec<&str> = called(&tests).collect();
    let missing: Vec<_> = names.into_iter().filter(|name| !tested.contains(name)).collect();
    assert!(missing.is_empty(), "no value test calls {missing:?}");
}
