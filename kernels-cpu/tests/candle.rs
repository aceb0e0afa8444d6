//! Linear layers on candle tensors give results that are bit-identical to those of the underlying kernels.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{CustomOp1, DType, Device, Layout, Module, Tensor, Var};
use half::{bf16, f16};
use quant_kernels_cpu::candle::{
    Activations, ExpertLinear, Fused, QuantizedExperts, QuantizedLinear, Runner,
};
use quant_kernels_cpu::experts::{Expert, ExpertGate, ExpertRows, Experts, NO_EXPERT, Routing};
use quant_kernels_cpu::{
    Bf16Parts, Element, FloatRows, GateUp, Int8Rows, IsaToken, KernelError, PackedLinear, Parallel, RmsNorm,
    RowLayout, Serial, StaticScale, WeightView, reference, rms_norm, silu_mul,
};

const STATIC: Activations = Activations::Static(StaticScale { scale: 0.03, zero: 7 });
const ALL: [Activations; 3] = [Activations::Float, Activations::PerToken, STATIC];

/// Separate threads, with a count of the parallel calls.
#[derive(Clone, Default)]
struct Threads(Arc<AtomicUsize>);

// SAFETY: `for_each` calls each number once, and returns when all calls have returned.
unsafe impl Parallel for Threads {
    fn threads(&self) -> usize {
        3
    }

    fn for_each(&self, count: usize, piece: &(dyn Fn(usize) + Sync)) {
        self.0.fetch_add(1, Ordering::Relaxed);
        std::thread::scope(|scope| {
            for t in 0..3 {
                scope.spawn(move || (t..count).step_by(3).for_each(piece));
            }
        });
    }
}

fn number(i: usize) -> usize {
    let z = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((z ^ z >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40) as usize
}

fn weight([n, k]: [usize; 2], group_size: usize) -> Arc<PackedLinear> {
    let codes: Vec<u8> = (0..n * k).map(|i| (number(i) % 16) as u8).collect();
    let groups = n * k / group_size;
    let scales: Vec<f32> = (0..groups).map(|i| (1 + number(i) % 100) as f32 / 512.0).collect();
    let zeros: Vec<u8> = (0..groups).map(|i| (number(i + 7) % 16) as u8).collect();
    let bias: Vec<f32> = (0..n).map(|i| number(i + 3) as f32 / 1e7).collect();
    let view = WeightView::new([n, k], 4, group_size, &codes, &scales, Some(&zeros)).unwrap();
    Arc::new(PackedLinear::pack(&view, Some(&bias), true, &Serial).unwrap())
}

fn values(len: usize) -> Vec<f32> {
    (0..len).map(|i| number(i) as f32 / 4e6 - 2.0).collect()
}

/// The results of calling the kernels directly.
fn direct<E: Element>(weight: &PackedLinear, activations: Activations, x: &[E]) -> Vec<f32> {
    let (layout, m) = (RowLayout::of(weight.layout()), x.len() / weight.layout().k());
    let (mut out, mut whole) = (vec![f32::NAN; m * weight.layout().n()], Int8Rows::default());
    match activations {
        Activations::Float => {
            let mut rows = FloatRows::new(IsaToken::detect());
            rows.pack(x, layout, &Serial).unwrap();
            weight.multiply_float(&rows, &mut out, &Serial).unwrap();
            return out;
        }
        Activations::PerToken => whole.quantize(x, layout, &Serial).unwrap(),
        Activations::Static(by) => whole.quantize_static(x, layout, by, &Serial).unwrap(),
    }
    weight.multiply(&whole, &mut out, &Serial).unwrap();
    out
}

fn expected(weight: &PackedLinear, activations: Activations, x: &Tensor) -> Vec<f32> {
    let x = x.flatten_all().unwrap();
    match x.dtype() {
        DType::F16 => {
            let out = direct(weight, activations, &x.to_vec1::<f16>().unwrap());
            out.into_iter().map(|v| f16::from_f32(v).to_f32()).collect()
        }
        DType::BF16 => {
            let out = direct(weight, activations, &x.to_vec1::<bf16>().unwrap());
            out.into_iter().map(|v| bf16::from_f32(v).to_f32()).collect()
        }
        _ => direct(weight, activations, &x.to_vec1::<f32>().unwrap()),
    }
}

fn found(y: &Tensor) -> Vec<f32> {
    y.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Checks a tensor with all kinds of activations, in every type.
fn holds(weight: &Arc<PackedLinear>, runner: &Runner, x: &Tensor) {
    for activations in ALL {
        let linear = QuantizedLinear::new(weight.clone(), activations, runner).unwrap();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            // Convert only if necessary: a conversion would make a view contiguous.
            let x = if x.dtype() == dtype { x.clone() } else { x.to_dtype(dtype).unwrap() };
            let y = linear.forward(&x).unwrap();
            assert_eq!(y.dtype(), dtype);
            let (inputs, outputs) = (x.dims().split_last().unwrap().1, y.dims().split_last().unwrap());
            assert_eq!(outputs, (&weight.layout().n(), inputs));
            let bits = |v: Vec<f32>| v.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            let same = bits(found(&y)) == bits(expected(weight, activations, &x));
            assert!(same, "{activations:?} {dtype:?} {:?}", x.layout());
        }
    }
}

fn tensor(shape: &[usize]) -> Tensor {
    Tensor::from_vec(values(shape.iter().product()), shape, &Device::Cpu).unwrap()
}

#[test]
fn bits_are_those_of_the_kernels() {
    let runner = Runner::new(Threads::default());
    for (shape, group_size) in [([1, 4], 4), ([33, 96], 32), ([100, 128], 128), ([16, 60], 20)] {
        let weight = weight(shape, group_size);
        // Large and small calls alternate, so that leftover data of one call would show in the next.
        for inputs in [&[37, shape[1]][..], &[shape[1]], &[2, 9, shape[1]], &[1, 1, 1, shape[1]]] {
            holds(&weight, &runner, &tensor(inputs));
        }
        runner.release();
    }
}

#[test]
fn rounded_results_may_be_many() {
    // Rounding takes more than one piece of work, of which the last is partial.
    let weight = weight([301, 32], 32);
    holds(&weight, &Runner::new(Threads::default()), &tensor(&[121, 32]));
}

#[test]
fn any_strides_and_offsets() {
    let (k, runner) = (64, Runner::new(Serial));
    let weight = weight([20, k], 32);
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let whole = tensor(&[3, 8, k]).to_dtype(dtype).unwrap();
        let views = [
            whole.transpose(0, 1).unwrap(),
            whole.narrow(1, 2, 3).unwrap(),
            whole.narrow(0, 1, 2).unwrap(),
            tensor(&[2, k, 5]).to_dtype(dtype).unwrap().transpose(1, 2).unwrap(),
            tensor(&[1, k]).to_dtype(dtype).unwrap().expand((6, k)).unwrap(),
            tensor(&[4, 2 * k]).to_dtype(dtype).unwrap().narrow(1, k, k).unwrap(),
        ];
        for view in &views {
            for activations in ALL {
                let linear = QuantizedLinear::new(weight.clone(), activations, &runner).unwrap();
                let y = found(&linear.forward(view).unwrap());
                assert_eq!(y, expected(&weight, activations, view), "{:?}", view.layout());
            }
        }
        let strided = views.iter().filter(|view| !view.is_contiguous()).count();
        assert_eq!(strided, 5);
    }
}

#[test]
fn no_rows_give_none() {
    let (weight, runner) = (weight([20, 64], 32), Runner::new(Serial));
    for shape in [&[0, 64][..], &[2, 0, 64], &[0, 3, 64]] {
        holds(&weight, &runner, &tensor(shape));
        holds(&weight, &runner, &tensor(shape).to_dtype(DType::BF16).unwrap());
    }
}

#[test]
fn threads_are_those_of_the_runner_and_calls_may_be_at_once() {
    let threads = Threads::default();
    let runner = Runner::new(threads.clone());
    let weight = weight([48, 128], 64);
    let linear = QuantizedLinear::new(weight.clone(), Activations::PerToken, &runner).unwrap();
    let before = threads.0.load(Ordering::Relaxed);
    std::thread::scope(|scope| {
        for m in 1..6 {
            let (linear, weight) = (linear.clone(), &weight);
            scope.spawn(move || {
                let x = tensor(&[m, 128]).to_dtype(DType::F16).unwrap();
                let expected = expected(weight, Activations::PerToken, &x);
                for _ in 0..20 {
                    assert_eq!(found(&linear.forward(&x).unwrap()), expected);
                }
            });
        }
    });
    assert!(threads.0.load(Ordering::Relaxed) >= before + 200);
    assert_eq!(format!("{runner:?}"), "Runner { threads: 3, .. }");
}

#[test]
fn not_a_number_and_infinities_come_through() {
    let weight = weight([17, 32], 32);
    let mut x = values(3 * 32);
    x[3] = f32::NAN;
    x[40] = f32::INFINITY;
    // Sums beyond the range of f16.
    x[64..].fill(60_000.0);
    let linear = QuantizedLinear::new(weight.clone(), Activations::PerToken, &Runner::new(Serial)).unwrap();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let x = Tensor::from_slice(&x, (3, 32), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        let (y, expected) =
            (found(&linear.forward(&x).unwrap()), expected(&weight, Activations::PerToken, &x));
        assert!(y[..2 * 17].iter().all(|v| v.is_nan()));
        assert_eq!(y[2 * 17..], expected[2 * 17..]);
        assert_eq!(y.iter().any(|v| v.is_infinite()), dtype == DType::F16);
    }
}

/// The message of an error; candle may append a backtrace.
fn message(error: candle_core::Error) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

#[test]
fn what_does_not_fit_is_refused() {
    let runner = Runner::new(Serial);
    let linear = QuantizedLinear::new(weight([20, 64], 32), Activations::Float, &runner).unwrap();
    let refused = |x: &Tensor| message(linear.forward(x).unwrap_err());
    assert_eq!(
        refused(&tensor(&[3, 32])),
        "quantized-linear: expected an input of shape [.., 64], got [3, 32]"
    );
    assert_eq!(refused(&tensor(&[])), "quantized-linear: expected an input of shape [.., 64], got []");
    let double = tensor(&[3, 64]).to_dtype(DType::F64).unwrap();
    assert_eq!(refused(&double), "quantized-linear: expected f32, f16 or bf16, got f64");
    assert_eq!(refused(&double.t().unwrap().contiguous().unwrap().t().unwrap()), refused(&double));

    let layout = Layout::contiguous((1, 64));
    let cuda = message(linear.cuda_fwd(&candle_core::CudaStorage, &layout).unwrap_err());
    assert!(cuda.contains("runs on the CPU only") && cuda.contains("CUDA"), "{cuda}");
    let metal = message(linear.metal_fwd(&candle_core::MetalStorage, &layout).unwrap_err());
    assert!(metal.contains("runs on the CPU only") && metal.contains("Metal"), "{metal}");

    // If the layout describes more elements than exist, the error is that of the kernels.
    let short = candle_core::CpuStorage::F32(vec![0.0; 70]);
    let error = linear.cpu_fwd(&short, &Layout::contiguous((2, 64))).unwrap_err();
    let kernels = KernelError::Length { what: "activations", expected: 128, got: 70 };
    assert_eq!(message(error), kernels.to_string());

    let view = WeightView::new([2, 8], 4, 8, &[8; 16], &[1.0; 2], None).unwrap();
    let plain = Arc::new(PackedLinear::pack(&view, None, false, &Serial).unwrap());
    let refused = |by| QuantizedLinear::new(plain.clone(), Activations::Static(by), &runner).unwrap_err();
    assert!(matches!(refused(StaticScale { scale: 0.1, zero: 1 }), KernelError::Scheme(_)));
    assert!(matches!(refused(StaticScale { scale: 0.0, zero: 0 }), KernelError::Scheme(_)));
    let error = linear.multiply(&[0.0_f32; 65], &mut [0.0; 20]).unwrap_err();
    assert!(matches!(error, KernelError::Length { .. }));
}

#[test]
fn there_is_no_gradient() {
    let linear =
        QuantizedLinear::new(weight([20, 64], 32), Activations::Float, &Runner::new(Serial)).unwrap();
    let x = Var::from_tensor(&tensor(&[3, 64])).unwrap();
    assert!(!linear.forward(&x).unwrap().track_op());
    let y = x.apply_op1(linear).unwrap();
    assert!(y.backward().unwrap_err().to_string().contains("quantized-linear"));
}

/// Five layers are more than one parallel call can include.
#[test]
fn linears_that_read_the_same_run_at_once() {
    let threads = Threads::default();
    let runner = Runner::new(threads.clone());
    let sizes = [48, 7, 130, 16, 33];
    let weights = sizes.map(|n| weight([n, 96], 32));
    for activations in ALL {
        let linears = weights.clone().map(|w| QuantizedLinear::new(w, activations, &runner).unwrap());
        let all: Vec<&QuantizedLinear> = linears.iter().collect();
        for m in [1, 3, 40] {
            for dtype in [DType::F32, DType::BF16] {
                let x = Tensor::from_vec(values(m * 96), (1, m, 96), &Device::Cpu).unwrap();
                let x = x.to_dtype(dtype).unwrap();
                let alone: Vec<Tensor> = linears.iter().map(|l| l.forward(&x).unwrap()).collect();
                let before = threads.0.swap(0, Ordering::Relaxed);
                assert!(before > 0);
                let together = QuantizedLinear::forward_each(&all, &x).unwrap();
                for ((a, b), n) in alone.iter().zip(&together).zip(sizes) {
                    assert_eq!((b.dims(), b.dtype()), (&[1, m, n][..], dtype));
                    let bits = |t: &Tensor| flat(t).into_iter().map(f32::to_bits).collect::<Vec<_>>();
                    assert_eq!(bits(a), bits(b), "{activations:?}, {m} rows, {n}");
                }
                let calls = threads.0.swap(0, Ordering::Relaxed);
                // Rows are packed once, and at most four products share one call.
                assert!(dtype != DType::F32 || calls <= 4, "{calls} calls");
            }
        }
        let whole = Tensor::from_vec(values(4 * 3 * 96), (4, 3, 96), &Device::Cpu).unwrap();
        let one = whole.narrow(0, 2, 1).unwrap();
        let together = QuantizedLinear::forward_each(&all[..2], &one).unwrap();
        assert_eq!(flat(&together[1]), flat(&linears[1].forward(&one).unwrap()));
    }
    assert!(
        QuantizedLinear::forward_each(&[], &Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap())
            .unwrap()
            .is_empty()
    );
    // Layers whose groups, widths or activations differ do not share rows.
    let first = QuantizedLinear::new(weights[0].clone(), Activations::Float, &runner).unwrap();
    for (weight, activations) in [
        (weight([8, 96], 96), Activations::Float),
        (weight([8, 64], 32), Activations::Float),
        (weights[1].clone(), Activations::PerToken),
    ] {
        let other = QuantizedLinear::new(weight, activations, &runner).unwrap();
        assert!(!first.shares_input_with(&other));
        let x = Tensor::zeros((1, 1, 96), DType::F32, &Device::Cpu).unwrap();
        let error = QuantizedLinear::forward_each(&[&first, &other], &x).unwrap_err().to_string();
        assert!(error.contains("cannot share an input"), "{error}");
    }
    let narrow = Tensor::zeros((1, 1, 95), DType::F32, &Device::Cpu).unwrap();
    assert!(QuantizedLinear::forward_each(&[&first], &narrow).is_err());
}

#[test]
fn norms_and_gates_are_computed_as_rows_are_packed() {
    let runner = Runner::new(Serial);
    let weights = [48, 7].map(|n| weight([n, 96], 32));
    let token = IsaToken::detect();
    for activations in ALL {
        let linears = weights.clone().map(|w| QuantizedLinear::new(w, activations, &runner).unwrap());
        let all: Vec<&QuantizedLinear> = linears.iter().collect();
        for m in [1, 3, 40] {
            let tensor = |values: Vec<f32>| Tensor::from_vec(values, (1, m, 96), &Device::Cpu).unwrap();
            let (x, up) = (values(m * 96), values(m * 97)[m..].to_vec());
            let gamma = &values(200)[104..];
            let norm = RmsNorm { weight: gamma, eps: 1e-5 };
            let mut made = vec![0.0; m * 96];
            rms_norm(token, &x, norm, None, &mut made, &Serial).unwrap();
            let bits = |all: Vec<Tensor>| -> Vec<Vec<u32>> {
                all.iter().map(|t| flat(t).into_iter().map(f32::to_bits).collect()).collect()
            };
            let fused = Fused::RmsNorm { x: &tensor(x.clone()), weight: gamma, eps: 1e-5 };
            let found = QuantizedLinear::forward_fused(&all, fused).unwrap();
            assert_eq!(found[1].dims(), [1, m, 7]);
            assert_eq!(bits(found), bits(QuantizedLinear::forward_each(&all, &tensor(made)).unwrap()));

            let mut made = vec![0.0; m * 96];
            silu_mul(token, GateUp::Apart { gate: &x, up: &up }, 96, &mut made, &Serial).unwrap();
            let fused = Fused::SiluMul { gate: &tensor(x.clone()), up: &tensor(up.clone()) };
            let found = QuantizedLinear::forward_fused(&all, fused).unwrap();
            assert_eq!(bits(found), bits(QuantizedLinear::forward_each(&all, &tensor(made)).unwrap()));
        }
        let x = Tensor::from_vec(values(2 * 96), (2, 96), &Device::Cpu).unwrap();
        let refused = |from| QuantizedLinear::forward_fused(&all, from).unwrap_err().to_string();
        let gamma = values(96);
        assert!(refused(Fused::RmsNorm { x: &x, weight: &gamma[1..], eps: 1e-5 }).contains("weight"));
        assert!(refused(Fused::RmsNorm { x: &x, weight: &gamma, eps: 0.0 }).contains("norm"));
        let halves = x.to_dtype(DType::F16).unwrap();
        assert!(refused(Fused::RmsNorm { x: &halves, weight: &gamma, eps: 1e-5 }).contains("f32"));
        let one = x.narrow(0, 0, 1).unwrap();
        assert!(refused(Fused::SiluMul { gate: &x, up: &one }).contains("the gate has shape"));
    }
    let x = Tensor::zeros((1, 96), DType::F32, &Device::Cpu).unwrap();
    assert!(QuantizedLinear::forward_fused(&[], Fused::SiluMul { gate: &x, up: &x }).unwrap().is_empty());
}

fn flat(x: &Tensor) -> Vec<f32> {
    x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn experts_of_a_layer() {
    let (hidden, inner) = (64, 48);
    let expert = |_| [weight([inner, hidden], 32), weight([inner, hidden], 32), weight([hidden, inner], 16)];
    let owned: Vec<[Arc<PackedLinear>; 3]> = (0..3).map(expert).collect();
    let parts = |bias: Option<&Arc<[f32]>>| -> Vec<[ExpertLinear; 3]> {
        let of = |parts: &[Arc<PackedLinear>; 3]| {
            let mut parts = parts.clone().map(ExpertLinear::from);
            parts[2].bias = bias.cloned();
            parts
        };
        owned.iter().map(of).collect()
    };
    let bias: Arc<[f32]> = values(hidden).into();
    let threads = Threads::default();
    let runner = Runner::new(threads.clone());
    for (activations, rows) in [
        (Activations::PerToken, ExpertRows::Int8),
        (Activations::Float, ExpertRows::Float(Bf16Parts::default())),
    ] {
        for bias in [None, Some(&bias)] {
            let layer = QuantizedExperts::new(parts(bias), activations, ExpertGate::Silu, &runner).unwrap();
            let views: Vec<Expert<'_>> = (owned.iter())
                .map(|[gate, up, down]| Expert {
                    gate: (&**gate).into(),
                    up: (&**up).into(),
                    down: quant_kernels_cpu::experts::ExpertWeight {
                        weight: down.view(),
                        bias: bias.map_or(down.bias(), |bias| Some(bias)),
                    },
                })
                .collect();
            let all = Experts::new(&views).unwrap();
            for tokens in [0, 3, 1030] {
                let x = values(tokens * hidden);
                let numbers: Vec<u32> = (0..2 * tokens)
                    .map(|i| if i % 5 == 4 { NO_EXPERT } else { number(i) as u32 % 3 })
                    .collect();
                let shares = values(2 * tokens);
                let routing = Routing { top_k: 2, experts: &numbers, weights: &shares };
                let (token, gate) = (IsaToken::detect(), ExpertGate::Silu);
                let expected = reference::experts(&all, token, rows, gate, &x, &routing).unwrap();
                let tensor = |values: &[f32], width: usize| {
                    Tensor::from_slice(values, (1, tokens, width), &Device::Cpu).unwrap()
                };
                let numbers = Tensor::from_slice(&numbers, (1, tokens, 2), &Device::Cpu).unwrap();
                let (x, shares) = (tensor(&x, hidden), tensor(&shares, 2));
                let y = layer.forward(&x, &numbers, &shares).unwrap();
                assert_eq!(y.dims(), [1, tokens, hidden]);
                assert_eq!(y.flatten_all().unwrap().to_vec1::<f32>().unwrap(), expected);
                if tokens != 3 {
                    continue;
                }
                // Results for bf16 are those for `f32`, rounded once, half to even.
                let short = x.to_dtype(DType::BF16).unwrap();
                let wide = layer.forward(&short.to_dtype(DType::F32).unwrap(), &numbers, &shares).unwrap();
                let narrow = layer.forward(&short, &numbers, &shares).unwrap();
                assert_eq!(narrow.dtype(), DType::BF16);
                if rows == ExpertRows::Int8 {
                    let wide = wide.to_dtype(DType::BF16).unwrap().flatten_all().unwrap();
                    let narrow = narrow.flatten_all().unwrap();
                    assert_eq!(narrow.to_vec1::<bf16>().unwrap(), wide.to_vec1::<bf16>().unwrap());
                }
                for (x, numbers, shares) in [
                    (&shares, &numbers, &shares),
                    (&x, &numbers.narrow(1, 0, 2).unwrap(), &shares),
                    (&x, &Tensor::full(9_u32, (1, 3, 2), &Device::Cpu).unwrap(), &shares),
                    (&x, &numbers, &shares.narrow(2, 0, 1).unwrap()),
                    (&x, &shares, &shares),
                    (&x.to_dtype(DType::F64).unwrap(), &numbers, &shares),
                ] {
                    assert!(layer.forward(x, numbers, shares).is_err());
                }
            }
        }
    }
    assert!(threads.0.load(Ordering::Relaxed) > 0);
    let refused = QuantizedExperts::new(parts(None), STATIC, ExpertGate::Silu, &runner);
    assert!(matches!(refused.unwrap_err(), KernelError::Scheme(_)));
}
