//! Measures the CUDA kernels as shares of what the device can do, which it measures first.
//!
//! ```text
//! gpu_bench [FILE]                    measures, prints a table, writes it as JSON lines to FILE
//! gpu_bench images DIR SM...          compiles what is measured into DIR, for sm_80 and so on; needs no GPU
//! ```
//!
//! `QUANT_CUDA_CACHE` names a directory of such images; where a compiler is there too it fills what is missing.

mod cases;
mod ceilings;
mod measure;

use std::collections::HashMap;
use std::fmt::Write as _;
use std::process::ExitCode;

use cases::{Buffer, Case, Fill, Product};
use ceilings::Ceilings;
use measure::{Bench, Work};
use quant_kernels_cuda::compile::{Architecture, Variant};
use quant_kernels_cuda::linear::DeviceLimits;
use quant_kernels_cuda::standalone::{Gpu, Memory};

/// Bytes that buffers used in turn have together at least: several times the second cache.
const TURN_BYTES: usize = 512 << 20;
const MOST_TURNS: usize = 64;
/// Bytes of random numbers that are repeated.
const RANDOM: usize = 8 << 20;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let done = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["images", directory, ref names @ ..] if !names.is_empty() => images(directory, names),
        [] => measure(None),
        [file] => measure(Some(file)),
        _ => Err("usage: gpu_bench [FILE] | gpu_bench images DIR SM...".into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}

fn images(directory: &str, names: &[&str]) -> Result<(), String> {
    let find = |name: &&str| Architecture::ALL.into_iter().find(|a| a.to_string() == **name);
    let architectures: Option<Vec<Architecture>> = names.iter().map(find).collect();
    let architectures = architectures.ok_or_else(|| format!("one of {names:?} is no architecture"))?;
    let variants = |architecture| -> Vec<Variant> {
        let cases = cases::all(&DeviceLimits::of(architecture)).expect("cases are planned");
        let mut variants = ceilings::variants();
        for case in cases {
            if !variants.contains(&case.variant) {
                variants.push(case.variant);
            }
        }
        variants
    };
    let count = measure::compile_ahead(directory.into(), variants, &architectures)?;
    println!("{count} images in {directory}");
    Ok(())
}

fn measure(file: Option<&str>) -> Result<(), String> {
    let gpu = Gpu::first().map_err(told)?;
    let bench = Bench::new(gpu);
    println!(
        "{}, compute capability {:?}, {} multiprocessors",
        gpu.name, gpu.limits.capability, gpu.limits.multiprocessors
    );
    let ceilings = Ceilings::measure(&bench)?;
    println!(
        "read {:.0} GB/s, copy {:.0} GB/s; products f16 {:.0}, bf16 {:.0}, int8 {:.0} T/s; a launch {:.2} µs\n",
        ceilings.read / 1e9,
        ceilings.copy / 1e9,
        ceilings.f16 / 1e12,
        ceilings.bf16 / 1e12,
        ceilings.int8 / 1e12,
        ceilings.launch * 1e6
    );
    let mut lines = format!(
        "{{\"device\":{:?},\"read\":{:e},\"copy\":{:e},\"f16\":{:e},\"bf16\":{:e},\"int8\":{:e},\"launch\":{:e}}}\n",
        gpu.name, ceilings.read, ceilings.copy, ceilings.f16, ceilings.bf16, ceilings.int8, ceilings.launch
    );
    println!(
        "{:28} {:>14} {:>7} {:>10} {:>10} {:>7}  of",
        "kernel", "shape", "tokens", "µs", "floor µs", "share"
    );
    let mut failed = 0;
    let limits = DeviceLimits::from(&gpu.limits);
    for case in cases::all(&limits).map_err(|e| e.to_string())? {
        let rate = match case.product {
            Product::None => f64::INFINITY,
            Product::F16 => ceilings.f16,
            Product::Int8 => ceilings.int8,
        };
        // What is written costs as what is copied does.
        let bandwidth = if case.product == Product::None { ceilings.copy } else { ceilings.read };
        let (memory, products) = (case.bytes as f64 / bandwidth, case.operations / rate);
        let floor = memory.max(products);
        match time(&bench, &case) {
            Ok(seconds) => {
                let of = if memory >= products { "bytes" } else { "products" };
                println!(
                    "{:28} {:>14} {:>7} {:>10.2} {:>10.2} {:>6.1}%  {of}",
                    case.name,
                    case.shape,
                    case.tokens,
                    seconds * 1e6,
                    floor * 1e6,
                    100.0 * floor / seconds
                );
                let _ = writeln!(
                    lines,
                    "{{\"kernel\":{:?},\"shape\":{:?},\"tokens\":{},\"seconds\":{seconds:e},\"floor\":{floor:e},\"bound\":{of:?}}}",
                    case.name, case.shape, case.tokens
                );
            }
            Err(e) => {
                failed += 1;
                println!("{:28} {:>14} {:>7} FAILED: {e}", case.name, case.shape, case.tokens);
            }
        }
    }
    if let Some(file) = file {
        std::fs::write(file, lines).map_err(|e| format!("cannot write {file}: {e}"))?;
    }
    if failed > 0 { Err(format!("{failed} measurements failed")) } else { Ok(()) }
}

fn time(bench: &Bench, case: &Case) -> Result<f64, String> {
    let turning: usize = case.buffers.iter().filter(|b| b.turns).map(|b| b.bytes).sum();
    let turns = TURN_BYTES.div_ceil(turning.max(1)).clamp(1, MOST_TURNS);
    let random = random_bytes();
    let mut memory: Vec<Memory> = Vec::new();
    let mut place = |buffer: &Buffer| -> Result<u64, String> {
        let bytes = Memory::filled(buffer.bytes, 0).map_err(told)?;
        fill(&bytes, buffer.fill, &random).map_err(told)?;
        let address = bytes.region().address;
        memory.push(bytes);
        Ok(address)
    };
    let mut kept = HashMap::new();
    let mut work = Vec::new();
    for _ in 0..turns {
        let mut addresses = Vec::new();
        for (i, buffer) in case.buffers.iter().enumerate() {
            let address = match kept.get(&i) {
                Some(&address) if !buffer.turns => address,
                _ => place(buffer)?,
            };
            kept.insert(i, address);
            addresses.push(address);
        }
        work.push(Work { shape: case.launch, arguments: case.arguments(&addresses)? });
    }
    bench.seconds(&case.variant, &work)
}

fn random_bytes() -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(RANDOM);
    while bytes.len() < RANDOM {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes
}

fn told(error: quant_kernels_cuda::Error) -> String {
    error.to_string()
}

fn fill(to: &Memory, fill: Fill, random: &[u8]) -> quant_kernels_cuda::Result<()> {
    let words = to.len() as u32 / 4;
    match fill {
        Fill::Zeros => Ok(()),
        Fill::Counted => to.write(0, &(0..words).flat_map(u32::to_le_bytes).collect::<Vec<u8>>()),
        Fill::Words(word) => to.write(0, &word.to_le_bytes().repeat(words as usize)),
        Fill::Random => repeat(to, random),
        Fill::Floats => {
            // The exponents of numbers from a quarter to two, as halves.
            let one = |pair: &[u8]| [pair[0], pair[1] & 0x83 | 0x34 | (pair[1] & 0x0c)];
            repeat(to, &random.chunks_exact(2).flat_map(one).collect::<Vec<u8>>())
        }
    }
}

fn repeat(to: &Memory, block: &[u8]) -> quant_kernels_cuda::Result<()> {
    (0..to.len())
        .step_by(block.len())
        .try_for_each(|at| to.write(at, &block[..block.len().min(to.len() - at)]))
}
