//! A whole small kernel, and what a text may hold.
mod support;

use quant_ptx_interpreter::{Error, FaultKind, Memory, Module, Options};
use support::{bytes_of, fault, kernel, launch, numbers, orders, over_words, run, words};

#[test]
fn every_thread_of_a_grid_adds_its_numbers() {
    let a = numbers(256, 1);
    let b = numbers(256, 2);
    let sums = over_words("add.s32 %r20, %r10, %r11;", &a, &b, &a);
    let expected: Vec<u32> = a.iter().zip(&b).map(|(a, b)| a.wrapping_add(*b)).collect();
    assert_eq!(sums, expected);
}
