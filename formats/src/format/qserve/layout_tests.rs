//! Published positions of single codes, golden bytes of small matrices, and rejected input.

use proptest::prelude::*;

use super::*;
use crate::quantize::{Levels, quantize_rtn};

const GROUPS: &str = "w4a8-g128-asym-progressive";

fn quantized(shape: [usize; 2], scheme: &str) -> QuantizedTensor {
    let weights: Vec<f32> = (0..shape[0] * shape[1]).map(|i| (i as f32 * 0.37).sin() * 0.1 + 0.02).collect();
    quantize_rtn("x", &weights, shape, scheme.parse().unwrap(), Dtype::F16, None).unwrap()
}

fn place_of(row: usize, column: usize, n: usize, k: usize) -> (usize, bool) {
    let mut codes = vec![0; n * k];
    codes[row * k + column] = 15;
    let bytes = pack_nibbles(&codes, n, k);
    let found: Vec<(usize, u8)> = bytes.iter().copied().enumerate().filter(|(_, byte)| *byte != 0).collect();
    assert_eq!(found.len(), 1, "one code is one nibble");
    let (at, byte) = found[0];
    assert!(byte == 0x0f || byte == 0xf0, "{byte}");
    (at, byte == 0xf0)
}

/// Positions according to the published kernels and converters, for k = 4096.
#[test]
fn codes_are_where_the_kernels_read_them() {
    for (row, column, at, high) in [
        (0, 0, 0, false),
        (16, 0, 0, true),
        (8, 0, 4, false),
        (0, 4, 16, false),
        (0, 16, 8, false),
        (1, 0, 64, false),
        (0, 32, 512, false),
        (32, 0, 65536, false),
        // By hand from the formula: nt 1, kt 127, nl 7, kl 3, kh 1, h 1, kr 3, p 1.
        (63, 4095, 131_071, true),
    ] {
        assert_eq!(place_of(row, column, 64, 4096), (at, high), "({row}, {column})");
    }
}

#[test]
fn the_formula() {
    let (n, k) = (96, 160);
    let codes: Vec<u8> = (0..n * k).map(|i| (i * 7 + i / 31) as u8 & 15).collect();
    let bytes = pack_nibbles(&codes, n, k);
    for row in 0..n {
        for column in 0..k {
            let (nt, p, h, nl) = (row / 32, row / 16 % 2, row / 8 % 2, row % 8);
            let (kt, kh, kl, kr) = (column / 32, column / 16 % 2, column / 4 % 4, column % 4);
            let byte = bytes[((nt * (k / 32) + kt) * 32 + nl * 4 + kl) * 16 + kh * 8 + h * 4 + kr];
            assert_eq!(byte >> (4 * p) & 15, codes[row * k + column], "({row}, {column})");
        }
    }
}

#[test]
fn both_orders_of_scales() {
    let outputs = |order: S2Order| -> Vec<usize> {
        let mut stored = vec![0; 64];
        (0..64).for_each(|n| stored[order.place(n)] = n);
        stored
    };
    let kernel = outputs(S2Order::Kernel);
    assert_eq!(kernel[..10], [0, 8, 16, 24, 1, 9, 17, 25, 2, 10]);
    assert_eq!((kernel[31], &kernel[32..36]), (31, &[32, 40, 48, 56][..]));
    let other = outputs(S2Order::Deepcompressor);
    assert_eq!(other[..6], [0, 8, 1, 9, 2, 10]);
    assert_eq!(other[14..20], [7, 15, 16, 24, 17, 25]);
    let values: Vec<u8> = (0..64).flat_map(|n| [n, 100 + n]).collect();
    for order in S2Order::ALL {
        let stored = order.store(&values, 64, 2);
        assert_eq!(stored[order.place(9)], 9);
        assert_eq!(stored[64 + order.place(9)], 109);
        assert_eq!(order.restore(&stored, 64, 2).unwrap(), values);
    }
}

#[test]
fn tensors_of_each_kind() {
    for (scheme, expected) in [
        (
            GROUPS,
            &[
                ("x.qweight", Dtype::I8, vec![64, 128]),
                ("x.s1_scales", Dtype::F16, vec![64]),
                ("x.s2_scales", Dtype::I8, vec![2, 64]),
                ("x.s2_zeros", Dtype::I8, vec![2, 64]),
            ][..],
        ),
        (
            "w4a8-channel-asym",
            &[
                ("x.qweight", Dtype::I8, vec![64, 128]),
                ("x.s1_scales", Dtype::F16, vec![64]),
                ("x.s1_szeros", Dtype::F16, vec![64]),
            ],
        ),
        (
            "w8a8-channel-sym",
            &[("x.weight", Dtype::I8, vec![64, 256]), ("x.dequant_scale", Dtype::F16, vec![64])],
        ),
    ] {
        let tensor = quantized([64, 256], scheme);
        let parts = pack("x", &tensor).unwrap();
        let agreed = layout("x", [64, 256], tensor.scheme, Dtype::F16).unwrap();
        assert_eq!(parts.iter().map(|(spec, _)| spec.clone()).collect::<Vec<_>>(), agreed);
        let found: Vec<_> =
            agreed.iter().map(|s| (s.name.as_str(), s.info.dtype, s.info.shape.clone())).collect();
        assert_eq!(found, expected, "{scheme}");
        assert!(parts.iter().all(|(spec, bytes)| spec.info.byte_len() == bytes.len() as u64));
    }
}

#[test]
fn a_group_by_hand() {
    let mut tensor = quantized([32, 128], GROUPS);
    tensor.codes.iter_mut().enumerate().for_each(|(i, code)| *code = (i % 16) as u8);
    let levels = Levels { groups: (0..32).map(|n| n % 16 + 1).collect(), rows: vec![0.25; 32] };
    tensor.scales = levels.products();
    tensor.levels = Some(levels);
    tensor.zeros = Some((0..32).map(|n| if n % 16 > 7 { 8 } else { n % 16 + 3 }).collect());
    let parts = pack("x", &tensor).unwrap();
    // Codes 0 to 3 of rows 0 and 16, then of 8 and 24; then those from input 16.
    assert_eq!(parts[0].1[..12], [0x00, 0x11, 0x22, 0x33, 0x00, 0x11, 0x22, 0x33, 0x00, 0x11, 0x22, 0x33]);
    assert_eq!(parts[1].1[..2], [0x00, 0x34], "0.25 in F16");
    // Outputs 0, 8, 16, 24, 1, 9: scales 1, 9, 1, 9, 2, 10 and zero points 3, 8, 3, 8, 4, 8.
    assert_eq!(parts[2].1[..6], [1, 9, 1, 9, 2, 10]);
    let zeros: Vec<i8> = parts[3].1[..6].iter().map(|&b| b as i8).collect();
    assert_eq!(zeros, [-3, -72, -3, -72, -8, -80]);
    // The kernel's arithmetic on bytes.
    for output in 0..32 {
        let at = S2Order::Kernel.place(output);
        for code in 0..16_u8 {
            let integer = code.wrapping_mul(parts[2].1[at]).wrapping_add(parts[3].1[at]) as i8;
            let (scale, zero) =
                (tensor.levels.as_ref().unwrap().groups[output], tensor.zeros.as_ref().unwrap()[output]);
            assert_eq!(i32::from(integer), (i32::from(code) - i32::from(zero)) * i32::from(scale));
        }
    }
}

#[test]
fn zeros_of_rows_are_stored_times_their_scales() {
    let tensor = quantized([32, 64], "w4a8-channel-asym");
    let parts = pack("x", &tensor).unwrap();
    let mut stored = vec![0.0; 32];
    Dtype::F16.widen(&parts[2].1, &mut stored);
    for ((stored, scale), &zero) in stored.iter().zip(&tensor.scales).zip(tensor.zeros.as_ref().unwrap()) {
        assert!(zero > 0, "zero points of 0 would test nothing");
        assert_eq!(*stored, half::f16::from_f32(scale * f32::from(zero)).to_f32());
    }
    let mut wide = tensor;
    wide.scales[3] = 60000.0_f32;
    wide.scales[3] = Dtype::F16.round(wide.scales[3]);
    let error = pack("x", &wide).unwrap_err();
    assert!(matches!(&error, Error::Numeric { tensor, .. } if tensor == "x.weight"), "{error}");
    assert!(error.to_string().contains("row 3: the qserve format"), "{error}");
}

#[test]
fn bytes_are_signed() {
    let tensor = quantized([32, 64], "w8a8-channel-sym");
    let parts = pack("x", &tensor).unwrap();
    for (byte, code) in parts[0].1.iter().zip(&tensor.codes) {
        assert_eq!(i32::from(*byte as i8), i32::from(*code) - 128);
    }
}

#[test]
fn what_the_format_cannot_hold() {
    let refused =
        |shape, scheme: &str, dtype| layout("m.up", shape, scheme.parse().unwrap(), dtype).unwrap_err();
    let message = |shape, scheme: &str, dtype| refused(shape, scheme, dtype).to_string();
    for scheme in [
        "w4a8-g128-asym",
        "w4a8-g64-asym-progressive",
        "w4a8-g128-sym-progressive",
        "w4a16-g128-asym-progressive",
        "w4a8-channel-sym",
        "w8a8-channel-asym",
        "w8a8-static",
        "w8a16-channel-sym",
        "w3a8-channel-asym",
        "w4a16-g128-asym",
    ] {
        let error = refused([64, 256], scheme, Dtype::F16);
        assert!(matches!(error, Error::Usage { .. }), "{error}");
        assert!(
            error.to_string().contains(&format!(
                "`m.up.weight`: the qserve format does not support {}",
                scheme.parse::<LinearScheme>().unwrap()
            )),
            "{error}"
        );
        assert!(
            error.remedy().marked().contains("‹scheme=w4a8-g128-asym-progressive›"),
            "{}",
            error.remedy()
        );
    }
    assert!(message([64, 256], GROUPS, Dtype::Bf16).contains("scales as F16, not BF16"));
    assert!(message([40, 256], GROUPS, Dtype::F16).contains("a multiple of 32 outputs, got 40"));
    assert!(message([64, 192], GROUPS, Dtype::F16).contains("a multiple of 128 inputs, got 192"));
    assert!(message([64, 48], "w4a8-channel-asym", Dtype::F16).contains("a multiple of 32 inputs, got 48"));
    assert!(message([0, 256], GROUPS, Dtype::F16).contains("outputs, got 0"));
    assert!(message([usize::MAX / 2, 256], GROUPS, Dtype::F16).contains("address space"));
    assert!(refused([40, 256], GROUPS, Dtype::F16).remedy().marked().contains("‹ignore›"));
}

#[test]
fn what_no_kernel_could_run_is_not_written() {
    let mut wide = quantized([32, 128], GROUPS);
    wide.zeros.as_mut().unwrap()[7] = 0;
    wide.codes[7 * 128 + 5] = 15;
    let levels = wide.levels.as_mut().unwrap();
    levels.groups[7] = 9;
    wide.scales = levels.products();
    let error = pack("x", &wide).unwrap_err();
    assert!(
        error.to_string().contains("output 7, group 0 has a code of 15, which represents the integer 135"),
        "{error}"
    );
    let mut coarse = quantized([32, 128], GROUPS);
    coarse.levels.as_mut().unwrap().groups[2] = 17;
    assert!(
        pack("x", &coarse).unwrap_err().to_string().contains("has a scale of 17; it must be from 1 to 16")
    );
    let mut without = quantized([32, 128], GROUPS);
    without.levels = None;
    assert!(pack("x", &without).is_err());
}

proptest! {
    #[test]
    fn any_codes_come_back(tiles in 1_usize..5, columns in 1_usize..5, seed: u64) {
        let (n, k) = (32 * tiles, 32 * columns);
        let codes: Vec<u8> = (0..n * k)
            .map(|i| ((seed.wrapping_mul(2 * i as u64 + 1) >> 32) as u8 ^ i as u8) & 15)
            .collect();
        let bytes = pack_nibbles(&codes, n, k);
        prop_assert_eq!(bytes.len() * 2, codes.len());
        prop_assert_eq!(unpack_nibbles(&bytes, n, k).unwrap(), codes);
    }
}
