//! The fuzz targets on stable Rust: random bytes, and the saved inputs.

use std::path::Path;

use proptest::prelude::*;
use quant_fuzz::TARGETS;

/// They see an eighth of the inputs.
const SLOW: [&str; 4] = ["job_tokens", "unit_files", "unit_objects", "write_journal"];
/// They exist with a feature only.
const WITH_STORE: [&str; 1] = ["unit_objects"];

proptest! {
    #[test]
    fn random_bytes(data in prop::collection::vec(any::<u8>(), 0..256), turn in 0..8) {
        for (name, target) in TARGETS {
            if turn == 0 || !SLOW.contains(name) {
                target(&data);
            }
        }
    }
}

/// Inputs that once exposed a bug, one folder per target.
#[test]
fn kept_bytes() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for (name, target) in TARGETS {
        target(&[]);
        let Ok(files) = std::fs::read_dir(corpus.join(name)) else { continue };
        for file in files {
            let path = file.unwrap().path();
            println!("{}", path.display());
            target(&std::fs::read(&path).unwrap());
        }
    }
}

#[test]
fn all_are_fuzzed() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("libfuzzer/fuzz_targets");
    let mut files: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|f| f.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned())
        .collect();
    files.sort();
    if !cfg!(feature = "store") {
        files.retain(|name| !WITH_STORE.contains(&name.as_str()));
    }
    let targets: Vec<&str> = TARGETS.iter().map(|(name, _)| *name).collect();
    assert_eq!(files, targets);
}
