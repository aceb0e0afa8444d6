//! Compares the instruction-set paths of linear layers, interleaved within one process, on one thread.
//!
//! `paths [SHAPES] [TOKENS] [KERNEL] [PATHS]`, such as `paths 4096x4096 1,16,512 w4a8 avx512vnni,amx`. `KERNEL` selects
//! the kernels whose names contain it. Times are CPU times of the thread, so that other load on the machine disturbs
//! them less. Products rotate through copies of the weights, so that weights come from memory. Rates are medians of the
//! products alone, also as a percentage of the measured limit: the rate in registers or, for few tokens, the memory
//! bandwidth. The time to quantize or pack the rows is reported as a percentage of the product.

#[cfg(target_os = "linux")]
fn main() {
    linux::main();
}

#[cfg(not(target_os = "linux"))]
fn main() {
    eprintln!("the CPU time of a thread is read on Linux only");
}

#[cfg(target_os = "linux")]
mod linux {
    use std::hint::black_box;

    use half::{bf16, f16};
    use quant_kernels_cpu::limits::{dot_limit, float_limit, peaks, read_limit};
    use quant_kernels_cpu::{
        FloatRows, Int8Rows, Isa, PackedLinear, RowLayout, SUPER_BLOCK, Scales, Serial, SuperMins,
        SuperScales, WeightView,
    };
    use rustix::time::{ClockId, clock_gettime};

    const COPIES: usize = 256 << 20;
    /// Bytes that are read to measure the memory bandwidth.
    const READ: usize = 128 << 20;
    /// Up to this many tokens, products are limited by memory.
    const FEW: usize = 4;
    /// The type of activations.
    #[derive(Clone, Copy, PartialEq)]
    enum Rows {
        Int8,
        F32,
        Bf16,
    }

    /// Name, bits, group size (0: per row), activations. Kernels with the names of GGUF's types use super-blocks; those
    /// of 16 bits are dense.
    const KERNELS: [(&str, u8, usize, Rows); 14] = [
        ("q4_k", 4, 32, Rows::Int8),
        ("q5_k", 5, 32, Rows::Int8),
        ("q6_k", 6, 16, Rows::Int8),
        ("w4a8-g128", 4, 128, Rows::Int8),
        ("w4a8-g32", 4, 32, Rows::Int8),
        ("w8a8-channel", 8, 0, Rows::Int8),
        ("w4a16-g128", 4, 128, Rows::F32),
        ("w4a16-g32", 4, 32, Rows::F32),
        ("w8a16-channel", 8, 0, Rows::F32),
        ("w4a16-g128-bf16", 4, 128, Rows::Bf16),
        ("w8a16-channel-bf16", 8, 0, Rows::Bf16),
        ("q4_k-a16", 4, 32, Rows::F32),
        ("dense-a16", 16, 0, Rows::F32),
        ("dense-a16-bf16", 16, 0, Rows::Bf16),
    ];

    /// CPU seconds of this thread.
    fn cpu_time(run: impl FnOnce()) -> f64 {
        let now = || {
            let time = clock_gettime(ClockId::ThreadCPUTime);
            time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
        };
        let started = now();
        run();
        now() - started
    }

    fn median(values: &mut [f64]) -> f64 {
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    }

    fn list<T>(text: &str, of: impl Fn(&str) -> Option<T>) -> Vec<T> {
        text.split(',').map(|word| of(word).unwrap_or_else(|| panic!("cannot parse `{word}`"))).collect()
    }

    fn quantized(name: &str, [n, k]: [usize; 2], bits: u8, group_size: usize) -> PackedLinear {
        let mask = u8::MAX >> (8 - bits);
        let code = |i: usize| (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()[2] & mask;
        let codes: Vec<u8> = (0..n * k).map(code).collect();
        let scales: Vec<f32> = (0..n * k / group_size).map(|i| (1 + i % 7) as f32 / 1024.0).collect();
        let (whole, mins) = (vec![3_i8; n * k / group_size], vec![5_u8; n * k / group_size]);
        let halves = vec![f16::from_f32(1.0 / 1024.0); n * k / SUPER_BLOCK];
        let mins = SuperMins { groups: &mins, blocks: &halves };
        let mins = (bits != 6).then_some(mins);
        let scales = match name.starts_with('q') {
            true => Scales::Super(SuperScales { groups: &whole, blocks: &halves, mins }),
            false => Scales::Float(&scales),
        };
        let view =
            WeightView::with_scales([n, k], bits, group_size, &codes, scales, None).expect("valid weights");
        PackedLinear::pack(&view, None, false, &Serial).expect("valid weights")
    }

    fn dense([n, k]: [usize; 2]) -> PackedLinear {
        let weight: Vec<bf16> = (0..n * k).map(|i| bf16::from_f32((i * 7919 % 997) as f32 - 498.0)).collect();
        PackedLinear::pack_bf16([n, k], &weight, None, &Serial).expect("valid weights")
    }

    pub fn main() {
        let args: Vec<String> = std::env::args().skip(1).collect();
        let arg = |i: usize, default: &str| args.get(i).cloned().unwrap_or(default.to_owned());
        let shapes = list(&arg(0, "4096x4096"), |word| {
            let (n, k) = word.split_once('x')?;
            Some([n.parse::<usize>().ok()?, k.parse::<usize>().ok()?])
        });
        let tokens = list(&arg(1, "1,16,64,512"), |word| word.parse::<usize>().ok());
        let only = arg(2, "");
        let all: Vec<_> = Isa::available().filter(|isa| *isa != Isa::Scalar).map(Isa::name).collect();
        let paths = list(&arg(3, &all.join(",")), |word| Isa::available().find(|isa| isa.name() == word));
        let memory = vec![1_u64; READ / 8];
        for peak in peaks(5, &Serial) {
            let [integers, floats] = [peak.integers, peak.floats].map(|rate| rate / 1e12);
            println!(
                "{}: in registers {integers:.2} TOPS of integers, {floats:.2} of floats",
                peak.isa.name()
            );
        }
        for [n, k] in shapes {
            for (name, bits, group_size, of_rows) in
                KERNELS.into_iter().filter(|(name, ..)| name.contains(&only))
            {
                let group_size = if group_size == 0 { k } else { group_size };
                let packed = match bits {
                    16 => dense([n, k]),
                    _ => quantized(name, [n, k], bits, group_size),
                };
                let (layout, bytes) = (RowLayout::of(packed.layout()), packed.layout().bytes());
                let copies = vec![packed; COPIES.div_ceil(bytes)];
                for &m in &tokens {
                    let x: Vec<f32> = (0..m * k).map(|i| ((i * 7919) % 997) as f32 - 498.0).collect();
                    let halves: Vec<bf16> = x.iter().copied().map(bf16::from_f32).collect();
                    let mut out = vec![1.0_f32; m * n];
                    let mut times = vec![(Vec::new(), Vec::new(), Vec::new()); paths.len()];
                    for round in 0..if m <= 16 { 24 } else { 7 } {
                        for (i, (isa, times)) in paths.iter().zip(&mut times).enumerate() {
                            let token = isa.token().expect("an available instruction set");
                            let (mut whole, mut floats) = (Int8Rows::new(token), FloatRows::new(token));
                            let mut rows = || match of_rows {
                                Rows::Int8 => whole.quantize(&x, layout, &Serial).expect("whole rows"),
                                Rows::F32 => floats.pack(&x, layout, &Serial).expect("whole rows"),
                                Rows::Bf16 => floats.pack(&halves, layout, &Serial).expect("whole rows"),
                            };
                            rows();
                            times.1.push(cpu_time(&mut rows));
                            let weight = copies[(round * paths.len() + i) % copies.len()].view();
                            times.0.push(cpu_time(|| {
                                match of_rows {
                                    Rows::Int8 => weight.multiply(token, &whole, None, &mut out, &Serial),
                                    _ => weight.multiply_float(&floats, None, &mut out, &Serial),
                                }
                                .expect("matching shapes");
                            }));
                            black_box(&out);
                            times.2.push(match of_rows {
                                _ if m <= FEW => read_limit(token, &memory, 1, &Serial).bytes_per_second,
                                Rows::Int8 => dot_limit(token, 2, &Serial),
                                _ => float_limit(token, 2, &Serial),
                            });
                        }
                    }
                    for (isa, (products, rows, limits)) in paths.iter().zip(&mut times) {
                        let (product, rows, limit) = (median(products), median(rows), median(limits));
                        let parts = if of_rows == Rows::F32 && isa.splits_floats() { 2.0 } else { 1.0 };
                        let (rate, read) = (2.0 * (m * n * k) as f64 / product, bytes as f64 / product);
                        let share = match m {
                            ..=FEW => format!("{:.0} % of memory", 100.0 * read / limit),
                            _ => format!("{:.0} % of registers", 100.0 * parts * rate / limit),
                        };
                        println!(
                            "{name} {n} x {k}, {m} token(s), {}: {:.3} TOPS, {:.1} GB/s, {share}; rows take {:.1} % on \
                             top",
                            isa.name(),
                            rate / 1e12,
                            read / 1e9,
                            100.0 * rows / product
                        );
                    }
                }
            }
        }
    }
}
