//! Measures the two costs of GPTQ relative to faer's time for the same matrix operations.
//!
//! ```text
//! cargo run --release -p quant-core --example gptq_throughput -- [THREADS] [SIDE] [TOKENS]
//! ```
//!
//! Defaults: one thread, a weight of 4096 × 4096, 16384 tokens. The solver is compared with faer's Cholesky chain
//! (factor, inverse, factor of the inverse, all in `f32`) plus the blocked update at 60 % of the rate of faer's product
//! of two SIDE × SIDE matrices; the Hessian is compared with faer's triangular product of all tokens at once. The
//! measurements take turns, and the best of three counts. faer always runs on one thread, so ratios compare the two
//! only if THREADS is 1. With more threads, the ratios show how GPTQ scales.

use std::process::ExitCode;
use std::time::Instant;

use faer::linalg::matmul::matmul;
use faer::linalg::matmul::triangular::{self, BlockStructure};
use faer::linalg::solvers::{DenseSolveCore, Llt};
use faer::{Accum, Mat, MatRef, Par, Side};
use quant_core::checkpoint::Dtype;
use quant_core::quantize::SourceRows;
use quant_core::quantize::gptq::{Factor, GptqSettings, Hessian, solve};
use quant_core::scheme::LinearScheme;

const RUNS: usize = 3;

fn main() -> ExitCode {
    let numbers: Result<Vec<usize>, _> = std::env::args().skip(1).map(|a| a.parse()).collect();
    let Ok(numbers) = numbers else {
        eprintln!("usage: gptq_throughput [THREADS] [SIDE] [TOKENS]");
        return ExitCode::from(2);
    };
    let number = |i: usize, default| numbers.get(i).copied().unwrap_or(default);
    let (threads, side, tokens) = (number(0, 1), number(1, 4096), number(2, 32 * 512));
    let pool = match rayon::ThreadPoolBuilder::new().num_threads(threads).build() {
        Ok(pool) => pool,
        Err(e) => {
            eprintln!("cannot start threads: {e}");
            return ExitCode::from(5);
        }
    };
    match pool.install(|| measure(pool.current_num_threads(), side, tokens)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::from(6)
        }
    }
}

/// Values in −1 to 1, with correlated neighbors.
fn values(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut before = 0.0;
    let next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        before = 0.5 * before + 0.5 * ((state >> 40) as f32 / (1u32 << 23) as f32 - 1.0);
        before
    };
    std::iter::repeat_with(next).take(len).collect()
}

/// Lowers `best` to the time of `work` in seconds if that is less.
fn timed<R>(best: &mut f64, work: impl FnOnce() -> R) -> R {
    let start = Instant::now();
    let result = work();
    *best = best.min(start.elapsed().as_secs_f64());
    result
}

fn measure(
    threads: usize,
    side: usize,
    tokens: usize,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    // This crate does not enable the feature for faer's own threads.
    let par = Par::Seq;
    let x = values(tokens * side, 1);
    let rows = MatRef::from_row_major_slice(&x, tokens, side);
    let weights = values(side * side, 2);
    let square = MatRef::from_row_major_slice(&weights, side, side);
    let settings = GptqSettings::default();
    let scheme: LinearScheme = "w4a16-g128-sym".parse()?;

    let never = f64::INFINITY;
    let (mut triangle, mut summed, mut product, mut chain, mut factored, mut solved) =
        (never, never, never, never, never, never);
    let (mut solved_all, mut checksum, mut loss) = (never, 0_u64, 0.0);
    for _ in 0..RUNS {
        let mut gram = Mat::<f32>::zeros(side, side);
        timed(&mut triangle, || {
            triangular::matmul(
                gram.as_mut(),
                BlockStructure::TriangularLower,
                Accum::Replace,
                rows.transpose(),
                BlockStructure::Rectangular,
                rows,
                BlockStructure::Rectangular,
                1.0,
                par,
            );
        });
        let hessian = timed(&mut summed, || {
            let mut hessian = Hessian::new(side).unwrap();
            hessian.add(&x);
            hessian.finish();
            hessian
        });
        let mut out = Mat::<f32>::zeros(side, side);
        timed(&mut product, || {
            matmul(out.as_mut(), Accum::Replace, square, square.transpose(), 1.0_f32, par);
        });
        let mean = (0..side).map(|i| gram[(i, i)]).sum::<f32>() / side as f32;
        let damped = Mat::from_fn(side, side, |i, j| match i == j {
            true => gram[(i, j)] + 0.01 * mean,
            false => gram[(i.max(j), i.min(j))],
        });
        timed(&mut chain, || -> Result<(), String> {
            let failed = |_| "faer's chain fails in f32".to_owned();
            let inverse = Llt::new(damped.as_ref(), Side::Lower).map_err(failed)?.inverse();
            Llt::new(inverse.as_ref(), Side::Lower).map_err(failed)?;
            Ok(())
        })?;
        let start = Instant::now();
        let factor = timed(&mut factored, || {
            let columns = settings.act_order.columns(&hessian.diagonal(), 128);
            Factor::new(&hessian, columns, settings.damping)
        })?;
        let result = timed(&mut solved, || {
            solve(SourceRows::Floats(&weights), [side, side], scheme, Dtype::F16, None, &factor, settings)
        })?;
        solved_all = solved_all.min(start.elapsed().as_secs_f64());
        loss = result.loss;
        checksum = result
            .tensor
            .codes
            .iter()
            .fold(0, |sum, c| (sum ^ u64::from(*c)).wrapping_mul(0x0000_0100_0000_01b3));
    }
    let rate = 2.0 * (side as f64).powi(3) / product;
    let update = (side as f64).powi(3) / (0.6 * rate);
    println!("{side} × {side}, {tokens} tokens, {threads} thread(s), best of {RUNS}");
    println!("square product of faer   {:8.3} s  {:.0} GFLOP/s in f32", product, rate / 1e9);
    println!(
        "Hessian                  {summed:8.3} s  faer's triangle {triangle:.3} s: {:.0} % of its rate",
        100.0 * triangle / summed
    );
    println!("Cholesky chain of faer   {chain:8.3} s");
    println!("blocked update at 60 %   {update:8.3} s");
    println!(
        "solve                    {solved_all:8.3} s  ({factored:.3} s factor, {solved:.3} s columns): {:.2} × chain and update",
        solved_all / (chain + update)
    );
    println!("loss {loss:e}, checksum of the codes {checksum:016x}");
    println!("csv: {threads},{side},{tokens},{product},{summed},{triangle},{chain},{factored},{solved}");
    Ok(())
}
