//! The current program and that of an earlier revision, the base, which is built once and kept.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::shell::{cargo, output, root, run as execute, target_dir};
use crate::bench_rtn::quant_binary;

/// The two programs.
#[derive(Debug, Clone, clap::Args)]
pub struct Pair {
    /// Git revision of the base; its program is built once and kept under target/base
    #[arg(long, value_name = "REV", required_unless_present = "base_program")]
    pub base: Option<String>,
    /// Program of the base; otherwise it is built
    #[arg(long, value_name = "PATH")]
    pub base_program: Option<PathBuf>,
    /// The current program; otherwise it is built
    #[arg(long, value_name = "PATH")]
    pub program: Option<PathBuf>,
}

/// A pair of programs.
#[derive(Debug)]
pub struct Programs {
    /// The program of the earlier revision.
    pub base: PathBuf,
    /// The program under test.
    pub ours: PathBuf,
}

impl Pair {
    /// Both programs, built if necessary.
    ///
    /// # Errors
    /// When the revision does not exist, or a program does not build.
    pub fn programs(&self) -> Result<Programs> {
        let base = match (&self.base_program, &self.base) {
            (Some(program), _) => std::path::absolute(program)?,
            (None, Some(revision)) => {
                of_revision(revision, &std::path::absolute(target_dir())?.join("base"))?
            }
            (None, None) => bail!("neither --base nor --base-program is given"),
        };
        Ok(Programs { base, ours: quant_binary(self.program.as_deref())? })
    }

    /// Name of the base in a record.
    pub fn base_name(&self) -> &str {
        self.base.as_deref().unwrap_or("a program of unknown revision")
    }
}

/// Returns the release program of a revision, and builds it first if necessary.
///
/// The sources are checked out as a worktree below `cache`, which is removed afterwards; built dependencies are kept.
fn of_revision(revision: &str, cache: &Path) -> Result<PathBuf> {
    let git = |arguments: &[&str]| {
        let mut command = Command::new("git");
        command.current_dir(root()).args(arguments);
        command
    };
    let commit = output(&mut git(&["rev-parse", "--verify", &format!("{revision}^{{commit}}")]))?;
    let program = cache.join(format!("quant-{commit}"));
    if program.is_file() {
        return Ok(program);
    }
    std::fs::create_dir_all(cache).with_context(|| format!("cannot create {}", cache.display()))?;
    let (tree, target) = (cache.join("tree"), cache.join("target"));
    let tree_name = tree.to_string_lossy().into_owned();
    let remove = || git(&["worktree", "remove", "--force", &tree_name]);
    if tree.exists() {
        execute(&mut remove())?;
    }
    execute(&mut git(&["worktree", "add", "--quiet", "--detach", &tree_name, &commit]))?;
    let mut build = cargo(&["build", "--release", "--locked", "-p", "quant-cli"]);
    let built = execute(build.current_dir(&tree).env("CARGO_TARGET_DIR", &target));
    execute(&mut remove())?;
    built?;
    let made = target.join("release/quant");
    ensure!(made.is_file(), "{} was not built", made.display());
    let partial = program.with_extension("partial");
    std::fs::copy(&made, &partial).with_context(|| format!("cannot copy {}", made.display()))?;
    std::fs::rename(&partial, &program)?;
    Ok(program)
}
