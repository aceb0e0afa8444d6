//! Linear layers and quantized activations on a device, from packing to results.

use core::ptr::null_mut;

use half::f16;
use quant_kernels::*;
use quant_kernels_cpu::{FloatFormat, Int8Rows, Layout, RowLayout, ScaleType, Serial};

use crate::common::*;
use crate::driver::{self, Bytes};

pub fn halves(len: usize, by: usize) -> Vec<f16> {
    (0..len).map(|i| f16::from_f32(((i * by % 997) as f32 - 498.0) / 125.0)).collect()
}

pub fn workspace(plan: &Plan) -> [Bytes; 2] {
    let (bytes, tickets) = plan.workspace();
    [Bytes::filled(bytes, 0x5a), Bytes::filled(tickets, 0)]
}

/// Codes, scales, row sums and group sums of `[m, k]`.
fn quantized(kernels: &Kernels, x: &[f16], [m, k]: [usize; 2], group: usize) -> [Bytes; 4] {
    let shape =
        qz1_cuda_activation_shape { rows: QZ1_CUDA_ROWS_PLAIN, x_type: QZ1_TYPE_F16, m, k, group, ..sized() };
    let plan = Plan::new(kernels, &shape, qz1_cuda_activation_plan);
    assert_eq!(plan.workspace(), (0, 0));
    let x = Bytes::of(x);
    let outputs = [m * k, 4 * m, 4 * m, 4 * m * k.div_ceil(group)].map(|len| Bytes::filled(len, 0x5a));
    let [codes, scales, row_sums, group_sums] = outputs.each_ref().map(Bytes::region);
    let arguments =
        qz1_cuda_activation_arguments { x: x.region(), codes, scales, row_sums, group_sums, ..sized() };
    // SAFETY: device memory stays allocated until after the synchronization.
    done(|m| unsafe { qz1_cuda_activation_launch(plan.0, &arguments, null_mut(), m) });
    driver::wait();
    outputs
}

#[test]
fn quantized_rows_are_multiplied() {
    if !on_gpu() {
        return;
    }
    driver::context();
    let kernels = Kernels::new();
    // Wide enough for several blocks to work on a row of results and combine their sums in the workspace.
    let ([n, k], m, group) = ([40, 2048], 5, 128);
    let matrix = Matrix::new([n, k], group, true);
    let x = halves(m * k, 37);
    let [codes, scales, row_sums, group_sums] = quantized(&kernels, &x, [m, k], group);

    let mut rows = Int8Rows::default();
    let layout = Layout::from_parts([1, k], 4, k, ScaleType::F32, None, true).unwrap();
    rows.quantize(&x, RowLayout::of(&layout), &Serial).unwrap();
    let (codes_read, scales_read) = (codes.read::<i8>(), scales.read::<f32>());
    assert!((0..m).all(|row| codes_read[row * k..][..k] == *rows.row(row)));
    assert_eq!(scales_read, rows.scales());
    let sums = |of: &[i8]| of.iter().map(|&c| i32::from(c)).sum::<i32>();
    assert_eq!(row_sums.read::<i32>(), codes_read.chunks(k).map(sums).collect::<Vec<_>>());
    assert_eq!(group_sums.read::<i32>(), codes_read.chunks(group).map(sums).collect::<Vec<_>>());

    let layout = matrix.layout(QZ1_CUDA_ORDER_INT8, 0);
    let shape = qz1_cuda_linear_shape {
        x_type: QZ1_CUDA_TYPE_INT8,
        out_type: QZ1_TYPE_F32,
        layout: &layout,
        m,
        ..sized()
    };
    let plan = Plan::new(&kernels, &shape, qz1_cuda_linear_plan);
    assert!(plan.workspace().0 > 0 && plan.workspace().1 > 0);
    let (weight, [workspace, tickets]) = (Bytes::of(&matrix.packed(&layout)), workspace(&plan));
    let stride = n + 8;
    let run = || {
        let out = Bytes::of(&vec![-7.5_f32; m * stride]);
        let arguments = qz1_cuda_linear_arguments {
            weight: weight.region(),
            x: codes.region(),
            x_scales: scales.region(),
            out: out.region(),
            tickets: tickets.region(),
            workspace: workspace.region(),
            out_stride: stride,
            ..sized()
        };
        // SAFETY: this test upholds the pointer contract of the C interface.
        done(|m| unsafe { qz1_cuda_linear_launch(plan.0, &arguments, null_mut(), m) });
        out.read::<f32>()
    };
    let out = run();
    for row in 0..m {
        for column in 0..stride {
            let got = out[row * stride + column];
            if column >= n {
                assert_eq!(got, -7.5, "{row} {column}");
                continue;
            }
            let product = |i: usize| f64::from(codes_read[row * k + i]) * matrix.weight(column, i);
            let scale = f64::from(scales_read[row]);
            let exact = scale * (0..k).map(product).sum::<f64>();
            let most = scale * (0..k).map(|i| product(i).abs()).sum::<f64>();
            assert!((f64::from(got) - exact).abs() <= 1e-5 * most, "{row} {column}: {got} and {exact}");
        }
    }
    // A launch resets its tickets, so the next one works too.
    assert_eq!(run(), out);
}

#[test]
fn float_rows_are_multiplied() {
    if !on_gpu() {
        return;
    }
    driver::context();
    let kernels = Kernels::new();
    let ([n, k], m) = ([20, 192], 3);
    let matrix = Matrix::new([n, k], 64, false);
    let layout = matrix.layout(QZ1_CUDA_ORDER_FLOAT, 0);
    let (x_type, out_type) = (QZ1_TYPE_F16, QZ1_TYPE_F16);
    let shape = qz1_cuda_linear_shape { x_type, out_type, layout: &layout, m, ..sized() };
    let plan = Plan::new(&kernels, &shape, qz1_cuda_linear_plan);
    let (values, bias) = (halves(m * k, 53), (0..n).map(|i| i as f32 / 3.0).collect::<Vec<f32>>());
    let (weight, x, to) = (Bytes::of(&matrix.packed(&layout)), Bytes::of(&values), Bytes::of(&bias));
    let (out, [workspace, tickets]) = (Bytes::filled(2 * m * n, 0x5a), workspace(&plan));
    let arguments = qz1_cuda_linear_arguments {
        weight: weight.region(),
        x: x.region(),
        bias: to.region(),
        out: out.region(),
        tickets: tickets.region(),
        workspace: workspace.region(),
        ..sized()
    };
    // SAFETY: this test upholds the pointer contract of the C interface.
    done(|m| unsafe { qz1_cuda_linear_launch(plan.0, &arguments, null_mut(), m) });
    for (i, got) in out.read::<u16>().into_iter().map(f16::from_bits).enumerate() {
        let (row, column) = (i / n, i % n);
        let product = |i: usize| values[row * k + i].to_f64() * matrix.weight(column, i);
        let exact = f64::from(bias[column]) + (0..k).map(product).sum::<f64>();
        let most = (0..k).map(|i| product(i).abs()).sum::<f64>();
        let bound = exact.abs() / 2048.0 + 1e-5 * most;
        assert!((got.to_f64() - exact).abs() <= bound, "{row} {column}: {got} and {exact}");
    }
}

#[test]
fn weights_are_packed_on_the_device() {
    if !on_gpu() {
        return;
    }
    driver::context();
    let kernels = Kernels::new();
    for (group, zeros, order, sums) in [
        (64, true, QZ1_CUDA_ORDER_INT8, 1),
        (192, true, QZ1_CUDA_ORDER_INT8, 1),
        (64, false, QZ1_CUDA_ORDER_FLOAT, 0),
    ] {
        let mut matrix = Matrix::new([20, 192], group, zeros);
        let layout = matrix.layout(order, sums);
        let shape = qz1_cuda_pack_shape { bits: 4, layout: &layout, ..sized() };
        let plan = Plan::new(&kernels, &shape, qz1_cuda_pack_plan);
        let run = |matrix: &Matrix| {
            let (codes, scales) = (Bytes::of(&matrix.codes), Bytes::of(&matrix.scales));
            let zeros = matrix.zeros.as_ref().map(|zeros| Bytes::of(zeros));
            let (fault, out) = (Bytes::of(&[0_u32]), Bytes::filled(layout.bytes as usize, 0));
            let arguments = qz1_cuda_pack_arguments {
                codes: codes.region(),
                scales: scales.region(),
                zeros: zeros.as_ref().map_or(NONE, Bytes::region),
                fault: fault.region(),
                out: out.region(),
                ..sized()
            };
            // SAFETY: this test upholds the pointer contract of the C interface.
            done(|m| unsafe { qz1_cuda_pack_launch(plan.0, &arguments, null_mut(), m) });
            (fault.read::<u32>()[0], out.read::<u8>())
        };
        let (fault, bytes) = run(&matrix);
        assert_eq!(fault, 0);
        assert!(bytes == matrix.packed(&layout), "{group} {zeros}");
        matrix.codes[1000] = 16;
        assert_eq!(run(&matrix).0, 1);
    }
}

#[test]
fn floating_point_weights() {
    if !on_gpu() {
        return;
    }
    driver::context();
    let kernels = Kernels::new();
    let ([n, k], m) = ([20, 192], 3);
    let matrix = Matrix::new([n, k], 16, false);
    let groups: Vec<u8> = (0..n * k / 16).map(|i| (i * 5 % 0x7f) as u8).collect();
    let global = [300.0_f32];
    let weights = qz1_weights {
        scales: global.as_ptr(),
        scales_len: 1,
        group_scales: groups.as_ptr(),
        group_scales_len: groups.len(),
        format: QZ1_CODES_E2M1,
        ..matrix.weights()
    };
    let mut layout: qz1_cuda_layout = sized();
    let mut packed;
    // SAFETY: every pointer is null or points to a live value.
    unsafe {
        let order = QZ1_CUDA_ORDER_FLOAT;
        done(|m| qz1_cuda_layout_of(&weights, order, 0, &mut layout, m));
        assert_eq!((layout.format, layout.scales), (QZ1_CODES_E2M1, QZ1_SCALES_E4M3));
        packed = vec![0; layout.bytes as usize];
        done(|m| qz1_cuda_pack(&weights, &layout, packed.as_mut_ptr(), packed.len(), m));
        let mut same: qz1_cuda_layout = sized();
        done(|m| qz1_cuda_layout_from(&layout, &mut same, m));
        assert_eq!((same.bytes, same.id), (layout.bytes, layout.id));
        let (status, _) =
            with_message(|m| qz1_cuda_layout_of(&weights, QZ1_CUDA_ORDER_INT8, 0, &mut same, m));
        assert_eq!(status, qz1_status::Scheme);
    }
    let shape = qz1_cuda_pack_shape { bits: 4, layout: &layout, ..sized() };
    let plan = Plan::new(&kernels, &shape, qz1_cuda_pack_plan);
    let run = |groups: &[u8]| {
        let (codes, scales, channels) = (Bytes::of(&matrix.codes), Bytes::of(groups), Bytes::of(&global));
        let (fault, out) = (Bytes::of(&[0_u32]), Bytes::filled(layout.bytes as usize, 0));
        let arguments = qz1_cuda_pack_arguments {
            codes: codes.region(),
            scales: scales.region(),
            channels: channels.region(),
            fault: fault.region(),
            out: out.region(),
            ..sized()
        };
        // SAFETY: this test upholds the pointer contract of the C interface.
        done(|m| unsafe { qz1_cuda_pack_launch(plan.0, &arguments, null_mut(), m) });
        (fault.read::<u32>()[0], out.read::<u8>())
    };
    let (fault, bytes) = run(&groups);
    assert!(fault == 0 && bytes == packed);
    let mut wrong = groups.clone();
    wrong[7] = 0x80;
    assert_eq!(run(&wrong).0, 1);

    let (x_type, out_type) = (QZ1_TYPE_F16, QZ1_TYPE_F32);
    let shape = qz1_cuda_linear_shape { x_type, out_type, layout: &layout, m, ..sized() };
    let plan = Plan::new(&kernels, &shape, qz1_cuda_linear_plan);
    let values = halves(m * k, 53);
    let (weight, x, out) = (Bytes::of(&packed), Bytes::of(&values), Bytes::filled(4 * m * n, 0x5a));
    let [workspace, tickets] = workspace(&plan);
    let arguments = qz1_cuda_linear_arguments {
        weight: weight.region(),
        x: x.region(),
        out: out.region(),
        tickets: tickets.region(),
        workspace: workspace.region(),
        ..sized()
    };
    // SAFETY: this test upholds the pointer contract of the C interface.
    done(|m| unsafe { qz1_cuda_linear_launch(plan.0, &arguments, null_mut(), m) });
    for (i, got) in out.read::<f32>().into_iter().enumerate() {
        let (row, column) = (i / n, i % n);
        let product = |i: usize| {
            let code = matrix.codes[column * k + i];
            let scale = FloatFormat::E4m3.value(groups[(column * k + i) / 16]) / global[0];
            values[row * k + i].to_f64() * f64::from(FloatFormat::E2m1.value(code) * scale)
        };
        let exact = (0..k).map(product).sum::<f64>();
        let most = (0..k).map(|i| product(i).abs()).sum::<f64>();
        assert!((f64::from(got) - exact).abs() <= 1e-5 * most, "{row} {column}: {got} and {exact}");
    }
}

/// A norm with a residual; and gate and up in one buffer, with one scale for all rows.
#[test]
fn fused_rows() {
    if !on_gpu() {
        return;
    }
    driver::context();
    let kernels = Kernels::new();
    let (m, k) = (3, 64);
    let (x, residual) = (halves(m * k, 37), halves(m * k, 91));
    let weight: Vec<f32> = (0..k).map(|i| 0.5 + i as f32 / 64.0).collect();
    let shape = qz1_cuda_activation_shape {
        rows: QZ1_CUDA_ROWS_RESIDUAL_RMS_NORM,
        x_type: QZ1_TYPE_F16,
        weight_type: QZ1_TYPE_F32,
        m,
        k,
        ..sized()
    };
    let plan = Plan::new(&kernels, &shape, qz1_cuda_activation_plan);
    let [x_at, residual_at, weight_at] = [Bytes::of(&x), Bytes::of(&residual), Bytes::of(&weight)];
    let [codes, scales] = [m * k, 4 * m].map(|len| Bytes::filled(len, 0x5a));
    let arguments = qz1_cuda_activation_arguments {
        eps: 1e-5,
        x: x_at.region(),
        residual: residual_at.region(),
        weight: weight_at.region(),
        codes: codes.region(),
        scales: scales.region(),
        ..sized()
    };
    // SAFETY: this test upholds the pointer contract of the C interface.
    done(|m| unsafe { qz1_cuda_activation_launch(plan.0, &arguments, null_mut(), m) });
    let sums: Vec<f16> =
        x.iter().zip(&residual).map(|(x, r)| f16::from_f32(x.to_f32() + r.to_f32())).collect();
    let got: Vec<f16> = residual_at.read::<u16>().into_iter().map(f16::from_bits).collect();
    assert_eq!(got, sums);
    let (codes, scales) = (codes.read::<i8>(), scales.read::<f32>());
    for (row, values) in sums.chunks(k).enumerate() {
        let mean = values.iter().map(|v| v.to_f64() * v.to_f64()).sum::<f64>() / k as f64;
        for (i, value) in values.iter().enumerate() {
            let normed = value.to_f64() / (mean + 1e-5).sqrt() * f64::from(weight[i]);
            let code = f64::from(codes[row * k + i]);
            assert!((code - normed / f64::from(scales[row])).abs() < 0.51, "{row} {i}");
        }
    }

    let both = halves(m * 2 * k, 29);
    let shape = qz1_cuda_activation_shape {
        rows: QZ1_CUDA_ROWS_SILU_MUL,
        x_type: QZ1_TYPE_F16,
        fixed: 1,
        m,
        k,
        x_stride: 2 * k,
        up_stride: 2 * k,
        code_stride: k + 16,
        ..sized()
    };
    let plan = Plan::new(&kernels, &shape, qz1_cuda_activation_plan);
    let at = Bytes::of(&both);
    let [codes, scales] = [m * (k + 16), 4 * m].map(|len| Bytes::filled(len, 0x5a));
    let (gate, skipped) = (at.region(), 2 * k as u64);
    let up = qz1_cuda_region { address: gate.address + skipped, bytes: gate.bytes - skipped };
    let (scale, zero) = (0.1, 3);
    let (codes_at, scales) = (codes.region(), scales.region());
    let arguments =
        qz1_cuda_activation_arguments { scale, zero, x: gate, up, codes: codes_at, scales, ..sized() };
    // SAFETY: this test upholds the pointer contract of the C interface.
    done(|m| unsafe { qz1_cuda_activation_launch(plan.0, &arguments, null_mut(), m) });
    for (at, code) in codes.read::<i8>().into_iter().enumerate() {
        let (row, i) = (at / (k + 16), at % (k + 16));
        if i >= k {
            assert_eq!(code, 0x5a, "{row} {i}");
            continue;
        }
        let [gate, up] = [i, k + i].map(|i| both[row * 2 * k + i].to_f64());
        let value = gate / (1.0 + (-gate).exp()) * up;
        let exact = (value / f64::from(scale) + f64::from(zero)).clamp(-128.0, 127.0);
        assert!((f64::from(code) - exact).abs() < 0.51, "{row} {i}: {code} and {exact}");
    }
}
