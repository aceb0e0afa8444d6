//! `quant bench MODEL --prefill N --decode N`: tokens per second of a model; `quant bench kernels`: speed of the
//! kernels alone.

mod kernels;

use std::path::{Path, PathBuf};
use std::time::Instant;

use quant_core::model::{CudaRunner, Decoder, KvCaching, kernels};
use quant_core::{Error, Result};
use serde::Serialize;

use super::Session;
use crate::device::Device;
use crate::inputs;
use crate::kv::KvBits;
use crate::output::{JsonOption, bytes, table};
use crate::provenance;

/// What to measure.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model directory or GGUF file, float or quantized, or org/name or org/name@revision on a hub; or `kernels`, to measure the
    /// kernels against the limits of this machine
    pub model: PathBuf,
    /// Tokens of the prompt, processed at once
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub prefill: usize,
    /// Tokens to generate, one at a time
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub decode: usize,
    /// Repetitions; the median is shown
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub repeat: usize,
    /// Precision of the KV cache: auto (as in config.json), 16 (floats), 8, 4 or fp8
    #[arg(long, value_enum, default_value_t, value_name = "BITS")]
    kv: KvBits,
    /// Measure only kernels with TEXT in their name or shape, or on a GPU in their number of tokens
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Device for quantized linears or for the measured kernels: cuda is the first NVIDIA GPU
    #[arg(long, value_enum, default_value_t, value_name = "DEVICE")]
    device: Device,
    #[command(flatten)]
    json: JsonOption,
}

#[derive(Serialize)]
struct Report {
    schema: &'static str,
    model: String,
    threads: usize,
    /// The code path that multiplies quantized weights: an instruction set, `dense`, or `cuda on` and the GPU's name.
    kernels: String,
    /// How keys and values are cached: `kv4`, `kv8` or `f16`; if the kernels do not support the attention, `f32`, or
    /// the quantized format followed by ` (simulated)`, as always for `kvf8`.
    kv_cache: String,
    /// Bytes of the cache at the end.
    kv_cache_bytes: usize,
    prefill: Rate,
    decode: Rate,
}

#[derive(Serialize)]
struct Rate {
    tokens: usize,
    seconds: Vec<f64>,
    tokens_per_second: f64,
}

impl Rate {
    fn new(tokens: usize, seconds: Vec<f64>) -> Self {
        let mut sorted = seconds.clone();
        sorted.sort_by(f64::total_cmp);
        Self { tokens, tokens_per_second: tokens as f64 / sorted[sorted.len() / 2], seconds }
    }
}

/// Measures a model, or the kernels alone.
pub fn run(args: &Args, session: &Session) -> Result<()> {
    args.json.check_distinct(&args.model, &[])?;
    if args.model == Path::new("kernels") {
        return kernels::run(args.only.as_deref(), args.device, &args.json, session);
    }
    if args.only.is_some() {
        return Err(Error::usage("--only has no effect without `bench kernels`", "omit --only"));
    }
    if args.prefill == 0 || args.decode == 0 || args.repeat == 0 {
        return Err(Error::usage(
            "nothing to measure",
            "--prefill, --decode and --repeat must each be at least 1",
        ));
    }
    let gpu = (args.device == Device::Cuda).then(CudaRunner::new).transpose()?;
    let opened = inputs::open(&args.model, session)?;
    let positions = args.prefill.saturating_add(args.decode);
    // The tables and the cache grow with the number of positions.
    if positions > 1 << 20 {
        return Err(Error::usage(
            format!("prefill and decode together need {positions} positions; the maximum is 1048576"),
            "choose --prefill and --decode so that their sum is at most 1048576",
        ));
    }
    provenance::note_floats(&opened.model, gpu.is_some(), session);
    let decoder = Decoder::load(&opened.model, positions, &session.progress, &session.cancel)?
        .with_kv(args.kv.scheme(&opened.model));
    let decoder = match &gpu {
        Some(gpu) => decoder.on_cuda(gpu)?,
        None => decoder.packed()?,
    };
    let decoder = decoder.with_half_cache();
    if let KvCaching::Simulated(kv) = decoder.caching() {
        let reason = opened.model.kernels_refuse(kv).unwrap_or_default();
        session.progress.note(&format!("the KV cache is simulated: {reason}"));
    }
    let prompt: Vec<u32> = (0..args.prefill).map(|i| ((i * 7919 + 1) % decoder.vocab()) as u32).collect();
    let (mut prefill, mut decode) = (Vec::new(), Vec::new());
    let mut kv_cache_bytes = 0;
    for _ in 0..args.repeat {
        let mut cache = decoder.cache();
        let started = Instant::now();
        let mut token = best(&decoder.step(&prompt, &mut cache)?.to_vec1::<f32>()?);
        prefill.push(started.elapsed().as_secs_f64());
        let started = Instant::now();
        for _ in 0..args.decode {
            session.cancel.check()?;
            token = best(&decoder.step(&[token], &mut cache)?.to_vec1::<f32>()?);
        }
        decode.push(started.elapsed().as_secs_f64());
        kv_cache_bytes = cache.bytes();
    }
    let report = Report {
        schema: "quant-bench/2",
        model: args.model.display().to_string(),
        threads: rayon::current_num_threads(),
        kernels: gpu.as_ref().map_or_else(|| kernels().to_owned(), |gpu| format!("cuda on {}", gpu.device())),
        kv_cache: decoder.caching().to_string(),
        kv_cache_bytes,
        prefill: Rate::new(args.prefill, prefill),
        decode: Rate::new(args.decode, decode),
    };
    args.json.emit(&report, || {
        let row = |name: &str, rate: &Rate| {
            vec![name.to_owned(), rate.tokens.to_string(), format!("{:.1}", rate.tokens_per_second)]
        };
        let rows = [row("prefill", &report.prefill), row("decode", &report.decode)];
        let shown = table(&["", "tokens", "tokens/s"], &rows);
        format!(
            "{shown}\n{} thread(s), median of {}; keys and values in {}, {}\n",
            report.threads,
            args.repeat,
            report.kv_cache,
            bytes(report.kv_cache_bytes as u64)
        )
    })
}

fn best(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, &x) in logits.iter().enumerate() {
        if x > logits[best] {
            best = i;
        }
    }
    best as u32
}
