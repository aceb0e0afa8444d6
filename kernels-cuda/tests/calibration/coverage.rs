//! Every instruction of the kernels is tested: the instructions that the compiler generates for the listed variants
//! must occur in the tests here, or in the interpreter's own tests.

use std::collections::{BTreeMap, BTreeSet};

use quant_kernels_cuda::compile::{Form, GpuArchitecture, compile};
use quant_kernels_cuda::registry::entries;

use crate::instructions::all;
use crate::support::{every_variant, has_nvrtc};
use crate::text;

const TESTS: [&str; 5] = [
    include_str!("../../../ptx-interpreter/tests/emitted.rs"),
    include_str!("../../../ptx-interpreter/tests/instructions.rs"),
    include_str!("../../../ptx-interpreter/tests/matrix.rs"),
    include_str!("../../../ptx-interpreter/tests/planted.rs"),
    include_str!("../../../ptx-interpreter/tests/support/mod.rs"),
];

fn opcodes(ptx: &str) -> impl Iterator<Item = &str> {
    ptx.lines().filter_map(|line| {
        let line = line.split("//").next().unwrap_or_default().trim();
        let line = line.strip_prefix('@').map_or(line, |rest| rest.split_once(' ').map_or("", |at| at.1));
        let line = line.trim_start_matches('{').trim_start();
        let opcode = line.split([' ', '\t', ';']).next().unwrap_or_default();
        let begins = opcode.starts_with(|c: char| c.is_ascii_lowercase());
        // Skips labels and continuations of the previous line.
        let is_whole = line.trim_end_matches('}').trim_end().ends_with(';');
        (begins && is_whole && !opcode.ends_with([':', ','])).then_some(opcode)
    })
}

fn untested(kernels: &[(String, String)], tested: &BTreeSet<&str>) -> BTreeMap<String, String> {
    let mut missing = BTreeMap::new();
    for (name, ptx) in kernels {
        for opcode in opcodes(ptx).filter(|opcode| !tested.contains(opcode)) {
            missing.entry(opcode.to_owned()).or_insert_with(|| name.clone());
        }
    }
    missing
}

/// All words that occur in the interpreter's tests, and the opcodes of the instructions here.
fn tested(calibrated: &[String]) -> BTreeSet<&str> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | ':');
    // Line breaks appear as `\n` in the sources of these tests.
    let words =
        TESTS.iter().flat_map(|text| text.split("\\n")).flat_map(|text| text.split(move |c| !is_word(c)));
    words.chain(calibrated.iter().flat_map(|text| opcodes(text))).collect()
}

#[test]
fn every_instruction_of_a_kernel_is_tested() {
    if !has_nvrtc() {
        return;
    }
    let calibrated: Vec<String> = all().iter().map(text).collect();
    let tested = tested(&calibrated);
    // Neighbours in the list differ in one option only.
    let step = if every_variant() { 1 } else { 2 };
    let entries: Vec<_> = entries().into_iter().step_by(step).collect();
    let (first, second) = entries.split_at(entries.len() / 2);
    let ptx = |part: &[quant_kernels_cuda::registry::Entry]| -> Vec<(String, String)> {
        let of = |variant| compile(variant, GpuArchitecture::Sm80, Form::Ptx).unwrap().bytes;
        part.iter().map(|e| (e.variant.to_string(), String::from_utf8(of(&e.variant)).unwrap())).collect()
    };
    let kernels = std::thread::scope(|scope| {
        let other = scope.spawn(|| ptx(second));
        [ptx(first), other.join().unwrap()].concat()
    });
    let missing = untested(&kernels, &tested);
    assert!(
        missing.is_empty(),
        "instructions without a test in ptx-interpreter/tests or an entry in tests/calibration: {missing:#?}"
    );
}

#[test]
fn an_instruction_without_a_test_is_found() {
    let ptx = "\t.reg .b32 %r<4>;\n$L_1:\n\t@%p1 bra \t$L_1;\n\t{ cvt.rn.bf16x2.f32 %r1, %f1, %f2;}\n\tsad.u64 %rd1, %rd2, %rd3, %rd4; // so\n\tret;\n";
    assert_eq!(opcodes(ptx).collect::<Vec<_>>(), ["bra", "cvt.rn.bf16x2.f32", "sad.u64", "ret"]);
    let calibrated: Vec<String> = all().iter().map(text).collect();
    let missing = untested(&[("k".to_owned(), ptx.to_owned())], &tested(&calibrated));
    assert_eq!(missing.into_keys().collect::<Vec<_>>(), ["sad.u64"]);
}
