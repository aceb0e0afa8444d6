//! `cargo xtask python`: builds the Python package as a wheel, installs it in a fresh virtual environment, and runs its
//! tests there.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::support::shell::{remove_dir, root, run as execute, succeeds, target_dir};

const MATURIN: &str = "maturin==1.16.0";
/// The linker of optimized wheels, which links them for an older glibc than that of this machine.
const ZIG: &str = "ziglang==0.17.0";
/// What an optimized wheel runs on: glibc 2.17 or later.
const PLATFORM: &str = "manylinux2014";
/// The requirements of the tests, in addition to the wheel.
const REQUIREMENTS: &str = "python/tests/requirements.txt";

/// Build options.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Args {
    /// Build and test the optimized wheel, as it would be published
    #[arg(long)]
    pub release: bool,
}

/// Downloads the external requirements of this step. If a download fails, the step itself tries again.
pub fn fetch() {
    let _ = tools(false).and_then(|_| wheels());
}

/// Builds the wheel, installs it into an empty environment, and runs the tests there. Unless a release is built, the
/// profile is that of the tests, whose dependencies are already compiled.
///
/// # Errors
/// When any of this fails.
pub fn run(args: &Args) -> Result<()> {
    let wheels = wheels()?;
    let built = if args.release { released() } else { directory().join("wheels") };
    remove_dir(&built)?;
    let tools = tools(args.release)?;
    let mut maturin = Command::new(tools.join("maturin"));
    // Maturin looks for zig there.
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths([tools].into_iter().chain(std::env::split_paths(&path)))?;
    maturin.env("PATH", path);
    maturin.current_dir(root().join("python")).args(["build", "--locked", "--out"]).arg(&built);
    execute(match args.release {
        true => maturin.args(["--release", "--zig", "--compatibility", PLATFORM]),
        false => maturin.args(["--profile", "dev", "--features", "as-tested"]),
    })?;
    let wheel = only_file(&built)?;
    println!("{}: {:.1} MB", wheel.display(), wheel.metadata()?.len() as f64 / 1e6);

    let fresh = directory().join("venv");
    let python = environment(&fresh, true)?;
    let mut install = Command::new(&python);
    install.args(["-m", "pip", "install", "--quiet", "--no-index", "--find-links"]).arg(&wheels).arg("-r");
    execute(install.arg(root().join(REQUIREMENTS)).arg(&wheel))?;
    // Also unpack the wheel, for environments with other packages.
    let package = directory().join("package");
    remove_dir(&package)?;
    let mut unpack = Command::new(&python);
    unpack.args(["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]).arg(&package);
    execute(unpack.arg(&wheel))?;
    // Tests run in their own directory, where imports find the installed wheel and not the sources of the package.
    let mut tests = Command::new(fresh.join("bin/pytest"));
    tests.current_dir(root().join("python/tests")).args(["-q", "-p", "no:cacheprovider", "--durations=5"]);
    execute(tests.env("FEWBITS_ROOT", root()).env("PYTHONDONTWRITEBYTECODE", "1"))
}

fn directory() -> PathBuf {
    target_dir().join("python")
}

/// The directory of the optimized wheel.
pub fn released() -> PathBuf {
    directory().join("release")
}

/// The directory of the programs of an environment with maturin, and with zig if asked for. They are installed if they
/// are missing.
fn tools(with_zig: bool) -> Result<PathBuf> {
    let tools = directory().join("tools");
    let programs = tools.join("bin");
    let has_maturin = succeeds(Command::new(programs.join("maturin")).arg("--version"));
    let has_zig = || succeeds(Command::new(programs.join("python")).args(["-m", "ziglang", "version"]));
    if !has_maturin || with_zig && !has_zig() {
        let python = environment(&tools, false)?;
        let mut install = Command::new(python);
        install.args(["-m", "pip", "install", "--quiet", MATURIN]).args(with_zig.then_some(ZIG));
        execute(&mut install)?;
    }
    Ok(programs)
}

/// The directory with the packages that the tests need, which are downloaded if the requirements have changed.
fn wheels() -> Result<PathBuf> {
    let wheels = directory().join("packages");
    let requirements = root().join(REQUIREMENTS);
    let wanted = std::fs::read(&requirements).context("cannot read the requirements of the tests")?;
    let record = wheels.join("requirements.txt");
    if std::fs::read(&record).ok() != Some(wanted.clone()) {
        let python = environment(&directory().join("tools"), false)?;
        // Some packages are published only as sources, so build wheels, which can be installed without further
        // requirements.
        let mut download = Command::new(python);
        download.args(["-m", "pip", "wheel", "--quiet", "--wheel-dir"]).arg(&wheels).arg("-r");
        execute(download.arg(&requirements))?;
        std::fs::write(&record, wanted).with_context(|| format!("cannot write {}", record.display()))?;
    }
    Ok(wheels)
}

/// The interpreter of a virtual environment, which is created if it is missing or `fresh` is set.
fn environment(place: &Path, fresh: bool) -> Result<PathBuf> {
    let python = place.join("bin/python");
    if fresh || !succeeds(Command::new(&python).arg("--version")) {
        execute(Command::new("python3").args(["-m", "venv", "--clear"]).arg(place))?;
    }
    Ok(python)
}

/// The file in a directory that must have exactly one.
pub fn only_file(directory: &Path) -> Result<PathBuf> {
    let files =
        std::fs::read_dir(directory).with_context(|| format!("cannot list {}", directory.display()))?;
    let files = files.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    ensure!(files.len() == 1, "expected one wheel in {}, found {}", directory.display(), files.len());
    Ok(files.into_iter().next().unwrap_or_default())
}
