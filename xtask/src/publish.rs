//! Checks whether the crates can be published: their packages, the size of each, and breaking changes since the last
//! release.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::support::shell::{cargo, output, root, run as execute, target_dir, tool};

/// The maximum size of a crate that the registry accepts, in bytes.
const MAX_CRATE_BYTES: u64 = 10 << 20;
const SEMVER_CHECKS: &str = "0.51.0";

/// Packages all crates without compiling them, and checks their sizes.
///
/// # Errors
/// When a crate cannot be packaged, or is too large.
pub fn dry_run() -> Result<()> {
    let packages = target_dir().join("package");
    if packages.exists() {
        // Crates of earlier versions would be measured too.
        std::fs::remove_dir_all(&packages)
            .with_context(|| format!("cannot remove {}", packages.display()))?;
    }
    let flags = ["--workspace", "--dry-run", "--no-verify", "--allow-dirty", "--locked"];
    execute(cargo(&["publish"]).args(flags))?;
    let mut found = 0;
    // Cargo keeps the crates of a dry run in a subfolder.
    for path in files_in(&packages)? {
        if path.extension().is_none_or(|extension| extension != "crate") {
            continue;
        }
        let bytes = path.metadata()?.len();
        println!("{}: {bytes} bytes", path.display());
        ensure!(bytes <= MAX_CRATE_BYTES, "{} exceeds {MAX_CRATE_BYTES} bytes", path.display());
        found += 1;
    }
    ensure!(found > 0, "{} contains no crate", packages.display());
    Ok(())
}

fn files_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry?.path();
        match path.is_dir() {
            true => files.extend(files_in(&path)?),
            false => files.push(path),
        }
    }
    Ok(files)
}

/// Compares the public API with that of the last release, a tag such as `v0.1.0`.
///
/// # Errors
/// When a version number does not announce a breaking change.
pub fn semver() -> Result<()> {
    let mut tags = Command::new("git");
    tags.current_dir(root()).args(["tag", "--list", "v[0-9]*", "--sort", "-version:refname"]);
    let tags = output(&mut tags)?;
    let Some(last) = tags.lines().next() else {
        println!("SKIPPED: no release is tagged yet (`v*`), so there is no interface to compare with");
        return Ok(());
    };
    let mut check = Command::new(tool("cargo-semver-checks", SEMVER_CHECKS)?);
    check.current_dir(root()).args(["semver-checks", "--workspace", "--baseline-rev", last]);
    execute(&mut check)
}
