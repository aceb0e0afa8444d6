//! The provenance in a result: this program, and the models that it read.

use quant_core::checkpoint::file_sha256;
use quant_core::model::{FloatProducts, KvScheme, Model, kernels};
use quant_core::pipeline::QuantReport;
use quant_core::{Error, Result};
use quant_evaluator::report::LinearCell;
use quant_evaluator::{ModelIdentity, SchemeShare, Tool};

use crate::commands::Session;
use crate::commands::eval::Execution;
use crate::inputs::Opened;

/// Describes this build of the program, this processor and, if `gpu` names one, the GPU.
///
/// # Errors
/// [`Error::Interrupted`].
pub fn tool(
    execution: Execution,
    gpu: Option<&str>,
    model: &Model,
    cache_is_simulated: bool,
    session: &Session,
) -> Result<Tool> {
    let cache = if cache_is_simulated { ", cache simulated" } else { "" };
    let executable = session.code.clone().or_else(|| std::env::current_exe().ok());
    // If the executable was replaced while it runs, the hash is missing or wrong.
    let sha256 = match executable.map(|path| file_sha256(&path, &session.cancel)) {
        Some(Err(Error::Interrupted)) => return Err(Error::Interrupted),
        found => found.and_then(Result::ok),
    };
    Ok(Tool {
        name: "quant".into(),
        version: env!("CARGO_PKG_VERSION").into(),
        sha256,
        isa: match (execution, gpu) {
            (Execution::Fake, _) => isa(),
            (Execution::Kernels, Some(gpu)) => format!("{}, kernels cuda on {gpu}{cache}", isa()),
            (Execution::Kernels, None) => {
                format!("{}, kernels {}{}{cache}", isa(), kernels(), by_blocks(model))
            }
        },
    })
}

/// Describes how the kernels multiply the linears whose weights are blocks of a GGUF file; empty if there are none.
fn by_blocks(model: &Model) -> String {
    match model.block_types() {
        [types, _] if types.is_empty() || kernels() == "dense" => String::new(),
        [types, _] => format!(" with 8-bit activations per token for {}", types.join(", ")),
    }
}

/// Prints a note that names the block types of a GGUF file for which there are no kernels.
pub fn note_floats(model: &Model, on_gpu: bool, session: &Session) {
    let [mut floats, others] = model.block_types();
    if !on_gpu && kernels() != "dense" {
        floats.clear();
    }
    floats.extend(others);
    if !floats.is_empty() {
        let where_to = if on_gpu { "GPU kernels" } else { "kernels" };
        let types = floats.join(", ");
        session
            .progress
            .note(&format!("there are no {where_to} for {types}: these weights are multiplied as floats"));
    }
}

/// Returns the processor's architecture, the widest vectors used for products, and how floats are multiplied. Sums in
/// vectors of different widths round differently.
fn isa() -> String {
    #[cfg(target_arch = "x86_64")]
    let vectors = match () {
        () if is_x86_feature_detected!("avx512f") => "avx512f",
        () if is_x86_feature_detected!("fma") => "fma",
        () => "sse2",
    };
    #[cfg(not(target_arch = "x86_64"))]
    let vectors = "baseline";
    let parts = if FloatProducts::detect() == FloatProducts::Bf16Parts { Tool::BF16_PARTS } else { "" };
    format!("{} {vectors}{parts}", std::env::consts::ARCH)
}

/// Lists how the linears of a model's blocks are stored.
pub fn linears(model: &Model) -> Vec<LinearCell> {
    let a = model.architecture();
    let cell = |block: usize, name: &str| {
        let module = a.in_block(block, name);
        let scheme = model.module_scheme(&module).map(|scheme| (scheme.to_string(), Some(scheme.bits())));
        let blocks = || {
            let kind = model.block_type(&module).filter(|kind| !kind.is_float())?;
            Some((kind.name.to_owned(), kind.code_bits()))
        };
        let (scheme, bits) = scheme.or_else(blocks).unwrap_or_else(|| ("float".to_owned(), None));
        LinearCell { block, linear: name.to_owned(), bits, scheme }
    };
    (0..a.layers)
        .flat_map(|block| a.graph(block).linears().map(move |(_, name, ..)| (block, name)))
        .map(|(b, n)| cell(b, n))
        .collect()
}

/// Returns a model's identity: its path, the hash and size of its files, its schemes, and how it caches keys and
/// values.
///
/// # Errors
/// When a file cannot be read, or the run is cancelled.
pub fn identity(
    opened: &Opened,
    path: String,
    kv: Option<KvScheme>,
    session: &Session,
) -> Result<ModelIdentity> {
    let mut schemes: Vec<SchemeShare> = Vec::new();
    for LinearCell { scheme, .. } in linears(&opened.model) {
        match schemes.iter_mut().find(|s| s.scheme == scheme) {
            Some(share) => share.linears += 1,
            None => schemes.push(SchemeShare { scheme, linears: 1 }),
        }
    }
    // The report only labels the result, so errors are ignored.
    let report = QuantReport::find(opened.directory.path(), &opened.model).ok().flatten();
    let method = report.map(|report| report.method);
    Ok(ModelIdentity {
        path,
        sha256: opened.directory.sha256(&session.cancel)?,
        size_bytes: opened.directory.source().file_bytes(),
        schemes,
        kv_cache: kv,
        method,
    })
}
