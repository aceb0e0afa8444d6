//! The contents of directories, for comparison: every file, byte for byte.

use std::collections::BTreeMap;
use std::path::Path;

use sha2::{Digest, Sha256};

/// The contents of every file below a directory, and the target of every link, by relative path. The value of a
/// directory is `None`.
///
/// # Panics
/// When something cannot be read.
#[track_caller]
pub fn snapshot(directory: &Path) -> BTreeMap<String, Option<Vec<u8>>> {
    let mut found = BTreeMap::new();
    collect(directory, "", &mut found);
    found
}

fn collect(directory: &Path, prefix: &str, found: &mut BTreeMap<String, Option<Vec<u8>>>) {
    for entry in std::fs::read_dir(directory).expect("a directory can be listed") {
        let entry = entry.expect("a readable entry");
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        let kind = entry.file_type().expect("an entry has a type");
        if kind.is_dir() {
            collect(&entry.path(), &format!("{name}/"), found);
            found.insert(name, None);
        } else if kind.is_symlink() {
            let target = std::fs::read_link(entry.path()).expect("a link can be read");
            found.insert(name, Some(target.to_string_lossy().into_owned().into_bytes()));
        } else {
            found.insert(name, Some(std::fs::read(entry.path()).expect("a file can be read")));
        }
    }
}

/// The SHA-256 of every file below a directory, and of every link's target, by relative path.
///
/// # Panics
/// When something cannot be read.
#[track_caller]
pub fn hashes(directory: &Path) -> BTreeMap<String, String> {
    let files = snapshot(directory).into_iter();
    files.filter_map(|(name, bytes)| Some((name, sha256(&bytes?)))).collect()
}

/// A SHA-256 in hexadecimal digits.
pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

/// Copies the files of a directory, which must have no subdirectories, into another, which is created if necessary.
///
/// # Panics
/// When something cannot be copied.
#[track_caller]
pub fn copy_files(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("a directory can be created");
    for entry in std::fs::read_dir(from).expect("a directory can be listed") {
        let entry = entry.expect("a readable entry");
        std::fs::copy(entry.path(), to.join(entry.file_name())).expect("a file can be copied");
    }
}
