//! llama.cpp as built from a package by `tests/interop/setup_llama_cpp.sh`, and the programs of this repository that
//! link it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use xtask::support::shell::{self, root, target_dir};

/// The package with llama.cpp's libraries and headers.
#[derive(Debug)]
pub struct LlamaCpp {
    directory: PathBuf,
}

impl LlamaCpp {
    /// Installs it if it is missing.
    ///
    /// # Errors
    /// When it cannot be built on this machine.
    pub fn install() -> Result<Self> {
        let directory = target_dir().join("interop-llama-cpp");
        let script = root().join("tests/interop/setup_llama_cpp.sh");
        shell::run(Command::new("bash").arg(script).arg(&directory))?;
        Ok(Self { directory })
    }

    /// The directory of the libraries, some of which exist in a variant for each kind of processor.
    pub fn libraries(&self) -> PathBuf {
        self.directory.join("bin")
    }

    /// The directory of the sources.
    pub fn source(&self) -> PathBuf {
        self.directory.join("source")
    }

    /// Compiles a program of this repository against the libraries.
    ///
    /// # Errors
    /// When there is no compiler, or it fails.
    pub fn compile(&self, file: &Path) -> Result<PathBuf> {
        let (source, libraries) = (self.source(), self.libraries());
        let out = target_dir().join("peers-llama-cpp").join(file.file_stem().context("no name")?);
        std::fs::create_dir_all(target_dir().join("peers-llama-cpp"))?;
        let mut command = Command::new("g++");
        command.args(["-std=c++17", "-O2", "-Wall"]).arg(root().join(file)).arg("-o").arg(&out);
        for headers in ["include", "ggml/include"] {
            command.arg("-I").arg(source.join(headers));
        }
        for library in ["libllama.v", "libggml.v", "libggml-base."] {
            command.arg(named(&libraries, library)?);
        }
        command.arg(format!("-Wl,-rpath,{}", std::path::absolute(&libraries)?.display())).arg("-ldl");
        shell::run(&mut command)?;
        Ok(out)
    }
}

fn named(directory: &Path, start: &str) -> Result<PathBuf> {
    let files =
        std::fs::read_dir(directory).with_context(|| format!("cannot list {}", directory.display()))?;
    let mut paths = files.filter_map(|f| Some(f.ok()?.path()));
    let found = paths.find(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with(start)));
    found.with_context(|| format!("no {start}* in {}", directory.display()))
}
