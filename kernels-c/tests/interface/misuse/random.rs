//! Random bytes and numbers.

use core::ptr::null;
use proptest::prelude::*;

use quant_kernels::*;

use crate::common::*;

proptest! {
    /// Any bytes are valid packed weights: the scalar path and the detected one give the same products.
    #[test]
    fn any_packed_bytes_are_taken(seed in any::<u64>(), m in 1usize..5) {
        let (matrix, rows) = (Matrix::new(), Rows::new());
        let layout = matrix.layout();
        let mut state = seed;
        let bytes: Vec<u8> = (0..layout.bytes)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 40) as u8
            })
            .collect();
        let x = vec![0.5_f32; m * K];
        prop_assert_eq!(rows.quantize(&layout, &values(&x), None), qz1_status::Ok);
        let mut out = [vec![0.0_f32; m * N], vec![1.0_f32; m * N]];
        for (out, isa) in out.iter_mut().zip([QZ1_ISA_SCALAR, QZ1_ISA_DETECT]) {
            // SAFETY: every pointer is null or points to a live value.
            let status = unsafe {
                let (at, len) = (bytes.as_ptr(), bytes.len());
                qz1_multiply(&layout, at, len, rows.0, null(), 0, out.as_mut_ptr(), m * N, isa, null(), null())
            };
            prop_assert_eq!(status, qz1_status::Ok);
        }
        let bits = |v: &[f32]| v.iter().map(|v| if v.is_nan() { 0 } else { v.to_bits() }).collect::<Vec<_>>();
        prop_assert_eq!(bits(&out[0]), bits(&out[1]));
    }

    #[test]
    fn random_fields_are_refused_or_right(words in prop::array::uniform8(any::<u64>()), which in 0usize..8) {
        let matrix = Matrix::new();
        let (mut weights, mut layout) = (matrix.weights(), matrix.layout());
        match which {
            0 => weights.n = words[0] as usize,
            1 => weights.k = words[0] as usize,
            2 => weights.group_size = words[0] as usize,
            3 => weights.bits = words[0] as u32,
            4 => (weights.n, weights.k) = (words[0] as usize, words[1] as usize),
            5 => (layout.n, layout.k, layout.group_size) = (words[0], words[1], words[2]),
            6 => layout.id = words[0],
            _ => (layout.code_bits, layout.scales, layout.middle) = (words[0] as u32, words[1] as u32, words[2] as u32),
        }
        let mut out = vec![0_u8; matrix.layout().bytes as usize];
        // SAFETY: pointers and lengths are those of live values.
        let status = unsafe {
            qz1_pack(&weights, &layout, 0, 2, out.as_mut_ptr(), out.len(), null(), null())
        };
        let same = (weights.n, weights.k, weights.group_size, weights.bits) == (N, K, GROUP, 4);
        if which > 4 || !same {
            prop_assert_ne!(status, qz1_status::Ok);
        }
    }
}
