//! Measures round-to-nearest from the bytes of a BF16 weight to packed words, in GB/s of input.
//!
//! ```text
//! cargo run --release -p quant-core --example rtn_throughput -- [THREADS] [ROWS] [COLUMNS]
//! ```
//!
//! Defaults: all cores, a weight of 4096 × 14336 (117 MB). Prints the best and the median of nine runs for each scheme,
//! and a checksum of the packed bytes, which must not depend on the number of threads.

use std::process::ExitCode;
use std::time::Instant;

use quant_core::checkpoint::Dtype;
use quant_core::format::pack_rows;
use quant_core::quantize::{QuantizedRows, SourceRows, quantize_rows};
use quant_core::scheme::LinearScheme;

const RUNS: usize = 9;

fn main() -> ExitCode {
    let numbers: Result<Vec<usize>, _> = std::env::args().skip(1).map(|a| a.parse()).collect();
    let Ok(numbers) = numbers else {
        eprintln!("usage: rtn_throughput [THREADS] [ROWS] [COLUMNS]");
        return ExitCode::from(2);
    };
    let number = |i: usize, default| numbers.get(i).copied().unwrap_or(default);
    let (threads, n, k) = (number(0, 0), number(1, 4096), number(2, 14336));
    let pool = match rayon::ThreadPoolBuilder::new().num_threads(threads).build() {
        Ok(pool) => pool,
        Err(e) => {
            eprintln!("cannot start threads: {e}");
            return ExitCode::from(5);
        }
    };
    let bytes = weight(n * k);
    println!(
        "{n} × {k} BF16, {:.0} MB, {} thread(s), {RUNS} runs",
        bytes.len() as f64 / 1e6,
        pool.current_num_threads()
    );
    println!(
        "{:<22} {:>10} {:>12} {:>12} {:>12}  checksum",
        "scheme", "best GB/s", "median GB/s", "codes ms", "pack ms"
    );
    for text in ["w4a16", "w4a16-asym", "w4a16-g32", "w3a16", "w8a16-channel"] {
        if let Err(e) = pool.install(|| measure(text, &bytes, n, k)) {
            eprintln!("{text}: {e}");
            return ExitCode::from(6);
        }
    }
    ExitCode::SUCCESS
}

/// Values like those of a layer, with a standard deviation near 0.02.
fn weight(len: usize) -> Vec<u8> {
    let mut state = 1u64;
    let mut uniform = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u32 << 24) as f32 - 0.5
    };
    let values: Vec<f32> = (0..len).map(|_| (uniform() + uniform() + uniform()) * 0.04).collect();
    Dtype::Bf16.narrow(&values)
}

fn measure(
    text: &str,
    bytes: &[u8],
    n: usize,
    k: usize,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let scheme: LinearScheme = text.parse()?;
    let groups = n * k / scheme.granularity.group_size(k);
    let (mut codes, mut scales) = (vec![0; n * k], vec![0.0; groups]);
    let mut zeros = vec![0; if scheme.is_symmetric() { 0 } else { groups }];
    let mut rows = vec![0.0; if scheme.is_progressive() { n } else { 0 }];
    let mut times = Vec::new();
    let mut checksum = 0u64;
    for _ in 0..RUNS {
        let start = Instant::now();
        let out = QuantizedRows {
            codes: &mut codes,
            scales: &mut scales,
            zeros: (!scheme.is_symmetric()).then_some(&mut zeros[..]),
            rows: scheme.is_progressive().then_some(&mut rows[..]),
        };
        quantize_rows(SourceRows::Bytes(bytes, Dtype::Bf16), k, scheme, Dtype::Bf16, None, out)?;
        let coded = start.elapsed().as_secs_f64();
        let packed = pack_rows(&codes, k, scheme.bits());
        let total = start.elapsed().as_secs_f64();
        times.push((total, coded));
        let words = packed.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        checksum = words.fold(0, |sum, w| (sum ^ u64::from(w)).wrapping_mul(0x0000_0100_0000_01b3));
    }
    times.sort_by(|a, b| a.0.total_cmp(&b.0));
    let rate = |seconds: f64| bytes.len() as f64 / seconds / 1e9;
    let (best, coded) = times[0];
    println!(
        "{text:<22} {:>10.2} {:>12.2} {:>12.1} {:>12.1}  {checksum:016x}",
        rate(best),
        rate(times[RUNS / 2].0),
        coded * 1e3,
        (best - coded) * 1e3,
    );
    Ok(())
}
