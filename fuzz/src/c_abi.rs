//! Arbitrary numbers through the C interface, with correct lengths. No call may report an internal error or access
//! other memory than the caller's.

use core::ptr::{null, null_mut};

use quant_kernels::*;

use crate::c::{empty, is_valid_status, threads};
use crate::input::Input;

fn optional<T>(of: Option<&Vec<T>>) -> (*const T, usize) {
    of.map_or((null(), 0), |v| (v.as_ptr(), v.len()))
}

fn corrupt(layout: &mut qz1_layout, input: &mut Input<'_>) {
    let word = input.word() as u64;
    match input.below(12) {
        0 => layout.code_bits = word as u32,
        1 => layout.scales = word as u32,
        2 => layout.zeros = word as u32,
        3 => layout.middle = word as u32,
        4 => layout.sums = word as u32,
        5 => layout.n = word,
        6 => layout.k = word,
        7 => layout.group_size = word,
        8 => layout.panels = word,
        9 => layout.panel_bytes = word,
        10 => layout.bytes = word,
        _ => layout.id = word,
    }
}

/// Packs weights, quantizes activations and multiplies them through the C interface.
///
/// # Panics
/// If a property does not hold.
pub fn c_abi(data: &[u8]) {
    let mut input = Input::new(data);
    let fitting = !input.rarely(3);
    let (n, groups, group_size) = (input.size(40), input.size(4), input.size(72));
    let (k, bits) = (groups * group_size, 2 + input.below(7) as u8);
    let mut codes = input.codes(bits, n * k);
    // With two levels of scales, some weights do not fit 8 bits, which the library must detect.
    let progressive = input.rarely(4);
    let largest = if bits <= 4 { 8 } else { 1 };
    let mut group_scales =
        progressive.then(|| input.bytes(n * groups).iter().map(|b| b % (largest + 1)).collect::<Vec<u8>>());
    let mut scales = input.floats(if progressive { n } else { n * groups });
    let mut zeros = input.flag().then(|| input.codes(bits, n * groups));
    let mut weights = qz1_weights { n, k, group_size, bits: bits.into(), ..empty!(qz1_weights) };
    if !fitting {
        match input.below(9) {
            0 => weights.n = input.word(),
            1 => weights.k = input.word(),
            2 => weights.group_size = input.word(),
            3 => weights.bits = input.word() as u32,
            4 => codes.truncate(input.below(codes.len() + 1)),
            5 => scales.truncate(input.below(scales.len() + 1)),
            6 => {
                let len = input.below(2 * n * groups);
                group_scales = Some(input.bytes(len));
            }
            7 => group_scales = group_scales.is_none().then(|| input.bytes(n * groups)),
            _ => zeros = Some(input.codes(bits, 3)),
        }
    }
    (weights.codes, weights.codes_len) = (codes.as_ptr(), codes.len());
    (weights.scales, weights.scales_len) = (scales.as_ptr(), scales.len());
    (weights.group_scales, weights.group_scales_len) = optional(group_scales.as_ref());
    (weights.zeros, weights.zeros_len) = optional(zeros.as_ref());
    let on = threads(1 + u32::from(input.byte() % 9));
    let on = if input.flag() { &raw const on } else { null() };
    let mut text = [0_u8; 24];
    let message = qz1_message { text: text.as_mut_ptr().cast(), capacity: text.len(), ..empty!(qz1_message) };
    let mut layout = empty!(qz1_layout);
    // SAFETY: every length is that of the slice that its pointer comes from.
    let made =
        is_valid_status(unsafe { qz1_layout_of(&weights, input.byte().into(), &mut layout, &message) });
    assert!(made || !fitting);
    let spoiled = !made || input.rarely(4);
    let len = if made { layout.bytes as usize } else { 4096 };
    if spoiled {
        corrupt(&mut layout, &mut input);
    }
    let mut packed = vec![0x5a_u8; len];
    let (first, panels) = match input.rarely(4) {
        true => (input.word(), input.word()),
        false => (0, layout.panels as usize),
    };
    // SAFETY: all pointers come from live slices and handles, and are passed with their lengths.
    is_valid_status(unsafe {
        qz1_pack(&weights, &layout, first, panels, packed.as_mut_ptr(), len, on, &message)
    });

    let (m, isa) = (input.below(6), u32::from(input.byte() % 10));
    let odd = usize::from(input.rarely(8));
    let form = input.below(5);
    // The gate and the up projection may be in one matrix.
    let wide = if form == 4 { 2 } else { 1 };
    let x = input.floats(wide * m * k + odd);
    let kind = if input.rarely(4) { input.byte().into() } else { QZ1_TYPE_F32 };
    let of = |x: &[f32]| qz1_values { kind, data: x.as_ptr().cast(), len: x.len(), ..empty!(qz1_values) };
    let (x, up) = (of(&x), input.floats(m * k));
    let up = of(&up);
    let mut weight = input.floats(k);
    weight.truncate(if input.rarely(8) { input.below(k) } else { k });
    let norm = qz1_rms_norm {
        eps: if input.rarely(4) { input.floats(1)[0] } else { 1e-5 },
        weight: weight.as_ptr(),
        weight_len: weight.len(),
        ..empty!(qz1_rms_norm)
    };
    let mut residual = input.floats(m * k);
    let residual = qz1_residual {
        kind,
        data: residual.as_mut_ptr().cast(),
        len: residual.len(),
        ..empty!(qz1_residual)
    };
    let residual = if form == 2 { &raw const residual } else { null() };
    let up = if form == 3 { &raw const up } else { null() };
    let by = qz1_static_scale {
        scale: input.floats(1)[0],
        zero: i32::from(input.byte() as i8) * 2,
        ..empty!(qz1_static_scale)
    };
    let by = if input.flag() { &raw const by } else { null() };
    let bias = input.flag().then(|| input.floats(n));
    let (bias_at, bias_len) = optional(bias.as_ref());
    let mut out = vec![0.0_f32; if input.rarely(4) { input.below(200) } else { m * n }];
    let (to, out_len) = (out.as_mut_ptr(), out.len());
    let (parts, nothing) = ((n * k, n * groups), empty!(qz1_parts));
    let mut channels_out = vec![0.0; if progressive { n } else { 0 }];
    let (mut codes_out, mut scales_out, mut zeros_out) =
        (vec![0; parts.0], vec![0.0; parts.1], zeros.as_ref().map(|_| vec![0; parts.1]));
    // SAFETY: all pointers come from live slices and handles, and are passed with their lengths.
    unsafe {
        let (mut rows, mut floats) = (null_mut(), null_mut());
        assert!(is_valid_status(qz1_int8_rows_new(QZ1_ISA_DETECT, &mut rows, null())));
        assert_eq!(is_valid_status(qz1_float_rows_new(isa, &mut floats, &message)), !floats.is_null());
        is_valid_status(match form {
            0 => qz1_int8_rows_quantize(rows, &layout, &x, by, on, &message),
            1 | 2 => qz1_int8_rows_quantize_rms_norm(rows, &layout, &x, &norm, residual, by, on, &message),
            _ => qz1_int8_rows_quantize_silu_mul(rows, &layout, &x, up, by, on, &message),
        });
        let at = packed.as_ptr();
        is_valid_status(qz1_multiply(
            &layout, at, len, rows, bias_at, bias_len, to, out_len, isa, on, &message,
        ));
        if !floats.is_null() {
            is_valid_status(match form {
                0 => qz1_float_rows_pack(floats, &layout, &x, on, &message),
                1 | 2 => qz1_float_rows_pack_rms_norm(floats, &layout, &x, &norm, residual, on, &message),
                _ => qz1_float_rows_pack_silu_mul(floats, &layout, &x, up, on, &message),
            });
            is_valid_status(qz1_multiply_float(
                &layout, at, len, floats, bias_at, bias_len, to, out_len, on, &message,
            ));
        }
        is_valid_status(qz1_dequantize_rows(&layout, at, len, first, panels, to, out_len, &message));
        let (zeros_at, zeros_len) = match &mut zeros_out {
            Some(zeros) => (zeros.as_mut_ptr(), zeros.len()),
            None => (null_mut(), 0),
        };
        let parts = qz1_parts {
            codes: codes_out.as_mut_ptr(),
            codes_len: codes_out.len(),
            scales: scales_out.as_mut_ptr(),
            scales_len: scales_out.len(),
            zeros: zeros_at,
            zeros_len,
            channels: if progressive { channels_out.as_mut_ptr() } else { null_mut() },
            channels_len: channels_out.len(),
            ..nothing
        };
        is_valid_status(qz1_unpack(&layout, at, len, &parts, &message));
        qz1_int8_rows_free(rows);
        qz1_float_rows_free(floats);
    }
}

/// Transforms rows of any width and number through the C interface. Threads must not change the result, and
/// transforming twice with a symmetric matrix must be the identity.
///
/// # Panics
/// If a property does not hold.
pub fn c_hadamard(data: &[u8]) {
    let mut input = Input::new(data);
    let (n, m, isa) = (input.below(200), input.below(20), u32::from(input.byte() % 10));
    let n = if input.rarely(16) { input.word() } else { n };
    let odd = usize::from(input.rarely(8));
    let x = input.floats(m * if n < 200 { n } else { 7 } + odd);
    let on = threads(1 + u32::from(input.byte() % 9));
    let mut text = [0_u8; 24];
    let message = qz1_message { text: text.as_mut_ptr().cast(), capacity: text.len(), ..empty!(qz1_message) };
    let mut by = null_mut();
    // SAFETY: every length is that of the slice that its pointer comes from.
    let made = is_valid_status(unsafe { qz1_hadamard_new(n, &mut by, &message) });
    assert_eq!(made, !by.is_null());
    let (mut once, mut again) = (x.clone(), x.clone());
    let (row, column) = (input.word(), input.word());
    // SAFETY: this function upholds the pointer contract of the C interface; a null transform is rejected with a
    // status.
    unsafe {
        let run = |x: &mut Vec<f32>, isa, on| {
            is_valid_status(qz1_hadamard_transform(by, x.as_mut_ptr(), x.len(), isa, on, &message))
        };
        let done = run(&mut once, QZ1_ISA_SCALAR, null());
        assert_eq!(done, made && x.len().is_multiple_of(n));
        if run(&mut again, isa, &on) {
            assert_eq!(crate::bits(&once), crate::bits(&again));
        }
        let sign = qz1_hadamard_sign(by, row, column);
        assert_eq!(sign != 0, made && row < n && column < n);
        if made && n.is_power_of_two() && x.iter().all(|x| x.abs() < 8.0) {
            run(&mut once, QZ1_ISA_DETECT, &on);
            assert!(!done || once.iter().zip(&x).all(|(a, b)| (a - b).abs() < 1e-3));
        }
        qz1_hadamard_free(by);
    }
}
