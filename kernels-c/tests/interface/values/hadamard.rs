//! The Hadamard transform.

use core::ptr::{null, null_mut};

use quant_kernels::*;
use quant_kernels_cpu::{Hadamard, Isa, Serial};

use super::features::number;
use crate::common::*;

#[test]
fn transforms_are_those_of_rust() {
    for n in [1, 24, 64, 160] {
        let (of, mut by) = (Hadamard::new(n).unwrap(), null_mut());
        // SAFETY: every pointer is null or points to a live value.
        assert_eq!(unsafe { qz1_hadamard_new(n, &mut by, null()) }, qz1_status::Ok);
        for (row, column) in [(0, 0), (n - 1, n / 2), (n / 2, n - 1), (n, 0), (0, n)] {
            let sign = of.sign(row, column).map_or(0, i32::from);
            // SAFETY: this test upholds the pointer contract of the C interface.
            assert_eq!(unsafe { qz1_hadamard_sign(by, row, column) }, sign);
        }
        for isa in Isa::available() {
            for parallel in [None, Some(threads(&Manner::Right))] {
                let mut x = [noise(7 * n, 37), noise(7 * n, 37)];
                of.transform(isa.token().unwrap(), &mut x[0], &Serial).unwrap();
                let (at, parallel) = (x[1].as_mut_ptr(), pointer(parallel.as_ref()));
                // SAFETY: this test upholds the pointer contract of the C interface.
                let status = unsafe { qz1_hadamard_transform(by, at, 7 * n, number(isa), parallel, null()) };
                assert_eq!(status, qz1_status::Ok);
                assert_eq!(bits(&x[0]), bits(&x[1]), "{isa:?} {n}");
            }
        }
        // SAFETY: the handle is freed once.
        unsafe { qz1_hadamard_free(by) };
    }
}
