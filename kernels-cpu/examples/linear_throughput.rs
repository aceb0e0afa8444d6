//! How fast linear layers run: `cargo run --release -p quant-kernels-cpu --features rayon --example linear_throughput -- [THREADS]`
use std::time::Instant;

use quant_kernels_cpu::{FloatRows, Int8Rows, Isa, IsaToken, PackedLinear, Rayon, RowLayout, WeightView};

fn main() {
    let threads = std::env::args().nth(1).map_or(1, |t| t.parse().unwrap());
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().unwrap();
    println!("{:?} {threads} threads", Isa::detect());
    // DRAM: sum of a large buffer by several streams.
    let big = vec![1_u64; 64 << 20];
    let mut best = 0.0_f64;
    for _ in 0..5 {
        let started = Instant::now();
        let sum: u64 = std::thread::scope(|s| {
            let parts: Vec<_> =
                big.chunks(big.len() / threads).map(|c| s.spawn(move || streams(c))).collect();
            parts.into_iter().map(|p| p.join().unwrap()).fold(0, u64::wrapping_add)
        });
        std::hint::black_box(sum);
        best = best.max(8.0 * big.len() as f64 / started.elapsed().as_secs_f64() / 1e9);
    }
    println!("DRAM {best:.1} GB/s");
    for (n, k) in [(4096, 4096), (14336, 4096), (4096, 14336)] {
        for (bits, group) in [(4, 128), (4, 32), (8, k)] {
            let codes: Vec<u8> =
                (0..n * k).map(|i| (i * 2654435761 >> 7) as u8 & ((1 << bits) - 1) as u8).collect();
            let scales = vec![0.01_f32; n * k / group];
            let view = WeightView::new([n, k], bits, group, &codes, &scales, None).unwrap();
            let packed = PackedLinear::pack(&view, None, false, &Rayon).unwrap();
            let copies = (160_000_000 / packed.layout().bytes()).clamp(1, 24);
            let many: Vec<_> = (0..copies).map(|_| packed.clone()).collect();
            print!("{n}x{k} w{bits} g{group}:");
            for m in [1, 4, 16, 64, 512] {
                let x: Vec<f32> = (0..m * k).map(|i| ((i * 7919) % 1000) as f32 - 500.0).collect();
                let mut rows = Int8Rows::default();
                rows.quantize(&x, RowLayout::of(packed.layout()), &Rayon).unwrap();
                let mut out = vec![0.0; m * n];
                let runs = if m <= 16 { 3 * copies } else { 3 };
                let mut times = Vec::new();
                for i in 0..runs {
                    let started = Instant::now();
                    many[i % copies].multiply(&rows, &mut out, &Rayon).unwrap();
                    times.push(started.elapsed().as_secs_f64());
                }
                times.sort_by(f64::total_cmp);
                let t = times[times.len() / 2];
                let (gb, tops) =
                    (packed.layout().bytes() as f64 / t / 1e9, 2.0 * (m * n * k) as f64 / t / 1e12);
                if m <= 4 {
                    print!("  m{m} {gb:.1} GB/s ({:.0}%)", 100.0 * gb / best)
                } else {
                    print!("  m{m} {tops:.3} TOPS")
                }
            }
            println!();
            print!("    float:");
            for m in [1, 4, 16, 64, 512] {
                let x: Vec<f32> = (0..m * k).map(|i| ((i * 7919) % 1000) as f32 - 500.0).collect();
                let mut rows = FloatRows::new(IsaToken::detect());
                let started = Instant::now();
                rows.pack(&x, RowLayout::of(packed.layout()), &Rayon).unwrap();
                let pack = started.elapsed().as_secs_f64();
                let mut out = vec![0.0; m * n];
                let runs = if m <= 16 { 3 * copies } else { 3 };
                let mut times = Vec::new();
                for i in 0..runs {
                    let started = Instant::now();
                    many[i % copies].multiply_float(&rows, &mut out, &Rayon).unwrap();
                    times.push(started.elapsed().as_secs_f64());
                }
                times.sort_by(f64::total_cmp);
                let t = times[times.len() / 2];
                let (gb, tops) =
                    (packed.layout().bytes() as f64 / t / 1e9, 2.0 * (m * n * k) as f64 / t / 1e12);
                if m <= 4 {
                    print!("  m{m} {gb:.1} GB/s ({:.0}%)", 100.0 * gb / best)
                } else {
                    print!("  m{m} {tops:.3} TOPS (pack {:.0}%)", 100.0 * pack / t)
                }
            }
            println!();
        }
    }
}

fn streams(c: &[u64]) -> u64 {
    let q = c.len() / 4;
    let (mut s, mut i) = ([0_u64; 32], 0);
    while i + 8 <= q {
        for p in 0..4 {
            for j in 0..8 {
                s[p * 8 + j] = s[p * 8 + j].wrapping_add(c[p * q + i + j]);
            }
        }
        i += 8;
    }
    s.iter().fold(0, |a, b| a.wrapping_add(*b))
}
