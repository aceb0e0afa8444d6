//! `cargo xtask dist`: builds one binary that runs on any Linux system, and tests it in an empty root directory.
//!
//! The binary is linked statically against glibc.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};

use crate::python;
use crate::sbom::sbom;
use crate::support::record::{Record, table, typed_command};
use crate::support::shell::{self, cargo, display, output, succeeds, target_dir};

/// Build options.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Test the binary of an earlier build
    #[arg(long)]
    pub no_build: bool,
    /// Write a record of the size of the binary and of the wheel that `cargo xtask python --release` built
    #[arg(long)]
    pub record: bool,
}

/// Builds, tests and describes the binary.
///
/// # Errors
/// When it cannot be built, is linked dynamically, or fails in the empty root.
pub fn run(args: &Args) -> Result<()> {
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    if !args.no_build {
        // Without `--target`, these flags would also apply to build scripts and procedural macros.
        let mut build = cargo(&["build", "--release", "--locked", "-p", "quant-cli", "--target", &target]);
        // Take random seeds from the system call only: an empty root has no /dev/urandom as a fallback.
        let flags = "-C target-feature=+crt-static --cfg getrandom_backend=\"linux_getrandom\"";
        shell::run(build.env("RUSTFLAGS", flags))?;
    }
    let binary = target_dir().join(&target).join("release/quant");
    let size = binary.metadata().with_context(|| format!("{} is missing", binary.display()))?.len();
    ensure!(is_static(&binary)?, "{} needs a dynamic linker", binary.display());

    let root = tempfile::tempdir()?;
    std::fs::copy(&binary, root.path().join("quant"))?;
    let version = in_empty_root(root.path(), &["--version"])?;
    ensure!(version.starts_with("quant "), "`quant --version` printed `{version}`");
    println!("{version}");
    let help = in_empty_root(root.path(), &["--help"])?;
    if help.lines().any(|l| l.trim_start().starts_with("demo")) {
        // The demo writes its checkpoints to the directory for temporary files.
        std::fs::create_dir(root.path().join("tmp"))?;
        let quick = in_empty_root(root.path(), &["demo", "--help"])?.contains("--quick");
        let demo: &[&str] = if quick { &["demo", "--quick"] } else { &["demo"] };
        println!("{}", in_empty_root(root.path(), demo)?);
    }
    let written = describe(&binary, &target)?;
    println!("{}: {:.1} MB, static glibc, ran in an empty root", binary.display(), size as f64 / 1e6);
    for path in written {
        println!("{}", path.display());
    }
    if args.record {
        println!("recorded in {}", sizes(&binary, &target)?.write()?.display());
    }
    Ok(())
}

/// The sizes of what users download.
fn sizes(binary: &Path, target: &str) -> Result<Record> {
    let wheel = python::only_file(&python::released())
        .context("there is no optimized wheel; run `cargo xtask python --release` first")?;
    let files = [(format!("`quant`, {target}, static"), binary), ("wheel".to_owned(), &wheel)];
    let mut rows = Vec::new();
    for (name, path) in files {
        let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let bytes = path.metadata().with_context(|| format!("{} is missing", path.display()))?.len();
        rows.push(vec![name, file, format!("{:.1}", bytes as f64 / 1e6), bytes.to_string()]);
    }
    Ok(Record {
        benchmark: "sizes",
        title: "Sizes of the binary and of the wheel".into(),
        command: typed_command(),
        body: format!(
            "The binary has no debug information and is not compressed; a wheel is a zip archive.\n\n{}",
            table(&["what", "file", "MB", "bytes"], &rows)
        ),
        csv: std::iter::once("what,file,bytes".to_owned())
            .chain(rows.iter().map(|row| format!("\"{}\",{},{}", row[0], row[1], row[3])))
            .collect(),
    })
}

fn describe(binary: &Path, target: &str) -> Result<[PathBuf; 2]> {
    let bill = binary.with_file_name("quant.cdx.json");
    let text = format!("{:#}\n", sbom("quant-cli", target)?);
    std::fs::write(&bill, &text).with_context(|| format!("cannot write {}", bill.display()))?;
    let sums = binary.with_file_name("SHA256SUMS");
    let mut lines = String::new();
    for path in [binary, &bill] {
        let digest = Sha256::digest(std::fs::read(path)?);
        let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        lines.push_str(&format!("{hex}  {name}\n"));
    }
    std::fs::write(&sums, lines).with_context(|| format!("cannot write {}", sums.display()))?;
    Ok([sums, bill])
}

/// Checks that the binary requests no interpreter, and prints the output of the system's tools about it.
fn is_static(binary: &Path) -> Result<bool> {
    for tool in ["file", "ldd"] {
        if let Ok(printed) = Command::new(tool).arg(binary).output() {
            print!("{tool}: {}{}", text(&printed.stdout), text(&printed.stderr));
        }
    }
    Ok(!has_interpreter(&std::fs::read(binary)?).context("not a 64-bit little-endian ELF file")?)
}

fn text(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    if text.trim().is_empty() { String::new() } else { format!("{}\n", text.trim()) }
}

/// Whether an ELF file has a `PT_INTERP` segment, the request for a dynamic linker.
fn has_interpreter(elf: &[u8]) -> Option<bool> {
    const PT_INTERP: u32 = 3;
    let at = |offset: usize, len: usize| elf.get(offset..offset.checked_add(len)?);
    if at(0, 6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let half = |offset: usize| Some(usize::from(u16::from_le_bytes(at(offset, 2)?.try_into().ok()?)));
    let table = usize::try_from(u64::from_le_bytes(at(0x20, 8)?.try_into().ok()?)).ok()?;
    let (entry, count) = (half(0x36)?, half(0x38)?);
    let mut found = false;
    for i in 0..count {
        let kind = at(table.checked_add(i * entry)?, 4)?;
        found |= u32::from_le_bytes(kind.try_into().ok()?) == PT_INTERP;
    }
    Some(found)
}

fn in_empty_root(root: &Path, args: &[&str]) -> Result<String> {
    let chroot = ["/usr/sbin/chroot", "/sbin/chroot", "/usr/bin/chroot"].iter().map(PathBuf::from);
    let chroot = chroot.into_iter().find(|p| p.is_file()).context("chroot is not installed")?;
    // The root user may change the root directory; other users may do so in a user namespace.
    let mut command = if succeeds(Command::new(&chroot).arg("/").arg("/bin/true")) {
        Command::new(&chroot)
    } else {
        let mut command = Command::new("unshare");
        command.arg("-r").arg(&chroot);
        command
    };
    command.env_clear().arg(root).arg("/quant").args(args);
    println!("$ {}", display(&command));
    output(&mut command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interpreters_are_recognized() {
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let expected = !cfg!(target_feature = "crt-static");
        assert_eq!(has_interpreter(&own), Some(expected));
        assert_eq!(has_interpreter(b"#!/bin/sh\n"), None);
        assert_eq!(has_interpreter(&own[..100]), None);
    }
}
