//! Compiles the kernels that [`quant_kernels_cuda::measure`] measures into a directory, for architectures such as
//! `sm_80`, whose devices need not be present:
//!
//! ```text
//! measure_images DIR SM...
//! ```
//!
//! On a machine with a GPU but without a compiler, set `QUANT_CUDA_CACHE` to such a directory.

use std::process::ExitCode;

use quant_kernels_cuda::compile::GpuArchitecture;
use quant_kernels_cuda::measure::compile_ahead;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let done = match arguments.split_first() {
        Some((directory, names)) if !names.is_empty() => compile(directory, names),
        _ => Err("usage: measure_images DIR SM...".into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}

fn compile(directory: &str, names: &[String]) -> Result<(), String> {
    let find = |name: &String| GpuArchitecture::ALL.into_iter().find(|a| a.to_string() == *name);
    let architectures: Option<Vec<GpuArchitecture>> = names.iter().map(find).collect();
    let architectures =
        architectures.ok_or_else(|| format!("expected architectures such as sm_90, got {names:?}"))?;
    let count = compile_ahead(directory.as_ref(), &architectures).map_err(|e| e.to_string())?;
    println!("{count} images in {directory}");
    Ok(())
}
