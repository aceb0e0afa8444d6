//! Tests single instructions on the interpreter and, with `QUANT_GPU=1`, on a GPU, and compares the results.
//!
//! Without a GPU, this shows that the interpreter runs all instructions that the kernels use. On a GPU, it validates
//! the interpreter's fragment layouts and rounding.

mod coverage;
mod instructions;
#[path = "../support/mod.rs"]
mod support;

use instructions::{Inputs, Instruction, Judge, all};
use quant_ptx_interpreter as ptx;
use support::machine::{Argument, Launch, Memory, Module, Options, on_gpu};

const WARPS: usize = 64;
const LANES: usize = 32;

/// The PTX of a kernel that loads words, runs an instruction, and stores words.
fn text(instruction: &Instruction) -> String {
    let load = (0..instruction.inputs.len())
        .map(|i| format!("    ld.global.u32 %a{i}, [%rd3+{}];\n", i * WARPS * LANES * 4))
        .collect::<String>();
    let store = (0..instruction.outputs)
        .map(|i| format!("    st.global.u32 [%rd4+{}], %d{i};\n", i * WARPS * LANES * 4))
        .collect::<String>();
    format!(
        ".version 8.0\n.target sm_80\n.address_size 64\n\n\
         .visible .entry calibrate(\n    .param .u64 calibrate_param_0,\n    .param .u64 calibrate_param_1\n)\n{{\n\
         \x20   .reg .pred %p<4>;\n    .reg .b16 %h<8>;\n    .reg .b32 %a<16>;\n    .reg .b32 %d<16>;\n    \
         .reg .b32 %t<8>;\n    .reg .b64 %rd<8>;\n    .shared .align 128 .b8 words[4096];\n\n    \
         ld.param.u64 %rd1, [calibrate_param_0];\n    ld.param.u64 %rd2, [calibrate_param_1];\n    \
         mov.u32 %t0, %ctaid.x;\n    mov.u32 %t1, %tid.x;\n    mad.lo.s32 %t2, %t0, {LANES}, %t1;\n    \
         mul.wide.u32 %rd5, %t2, 4;\n    add.s64 %rd3, %rd1, %rd5;\n    add.s64 %rd4, %rd2, %rd5;\n{load}    \
         {}\n{store}    ret;\n}}\n",
        instruction.body.replace('\n', "\n    ")
    )
}

fn words(kind: Inputs, seed: u64) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 16) as u32
    };
    (0..WARPS * LANES).map(|i| kind.word(i, &mut next)).collect()
}

fn bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn words_of(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// Runs a kernel on the interpreter, even on a machine with a GPU.
fn interpreted(text: &str, inputs: &[u8], outputs: usize) -> Vec<u32> {
    let mut memory = ptx::Memory::new();
    let from = memory.buffer_from("inputs", inputs, 256);
    let to = memory.buffer("outputs", outputs, 256);
    let module = ptx::Module::parse(text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    module
        .launch("calibrate", &launch(from, to), &mut memory, &ptx::Options::default())
        .unwrap_or_else(|e| panic!("{e}\n{text}"));
    words_of(memory.bytes(to).unwrap())
}

fn on_machine(text: &str, inputs: &[u8], outputs: usize) -> Vec<u32> {
    let mut memory = Memory::new();
    let from = memory.buffer_from("inputs", inputs, 256);
    let to = memory.buffer("outputs", outputs, 256);
    let module = Module::parse(text).unwrap();
    module
        .launch("calibrate", &launch(from, to), &mut memory, &Options::default())
        .unwrap_or_else(|e| panic!("{e}\n{text}"));
    words_of(&memory.bytes(to).unwrap())
}

fn launch(from: u64, to: u64) -> Launch {
    Launch {
        grid: [WARPS as u32, 1, 1],
        block: [LANES as u32, 1, 1],
        dynamic_shared: 0,
        arguments: vec![Argument::U64(from), Argument::U64(to)],
    }
}

#[test]
fn the_interpreter_is_the_device() {
    let mut wrong = Vec::new();
    for (place, instruction) in all().iter().enumerate() {
        let inputs: Vec<Vec<u32>> = instruction
            .inputs
            .iter()
            .enumerate()
            .map(|(i, &kind)| words(kind, (place * 100 + i) as u64 + 1))
            .collect();
        let text = text(instruction);
        let input_bytes: Vec<u8> = inputs.iter().flat_map(|words| bytes(words)).collect();
        let output_bytes = instruction.outputs * WARPS * LANES * 4;
        let expected = interpreted(&text, &input_bytes, output_bytes);
        assert_eq!(expected.len(), instruction.outputs * WARPS * LANES);
        assert!(expected.iter().any(|word| *word != expected[0]), "{}: {:#x}", instruction.name, expected[0]);
        if !on_gpu() {
            continue;
        }
        let got = on_machine(&text, &input_bytes, output_bytes);
        let report = instruction.judge.compare(&got, &expected);
        println!("{:44} {}", instruction.name, report.as_ref().unwrap_or_else(|e| e));
        if let Err(e) = report {
            wrong.push(format!("{}: {e}", instruction.name));
        }
    }
    assert!(wrong.is_empty(), "{} of {} differ:\n{}", wrong.len(), all().len(), wrong.join("\n"));
}

#[test]
fn comparisons_tell_what_differs() {
    let one = 1.0_f32.to_bits();
    assert!(Judge::Bits.compare(&[1, 2], &[1, 2]).is_ok());
    assert!(Judge::Bits.compare(&[1, 2], &[1, 3]).is_err());
    assert!(Judge::Float.compare(&[0x7fc0_0000], &[0x7fff_ffff]).is_ok());
    assert!(Judge::Float.compare(&[0x7fc0_0000], &[one]).is_err());
    assert!(Judge::Float.compare(&[one], &[one + 1]).is_err());
    assert!(Judge::Last(2).compare(&[one + 2], &[one]).is_ok());
    assert!(Judge::Last(2).compare(&[one + 3], &[one]).is_err());
    assert!(Judge::Last(2).compare(&[0], &[0x8000_0000]).is_ok());
    assert!(Judge::Near(1e-6).compare(&[one + 8], &[one]).is_ok());
    assert!(Judge::Near(1e-6).compare(&[one + 80], &[one]).is_err());
    assert!(Judge::Sum(1.0).compare(&[one + 4], &[one]).is_ok());
    assert!(Judge::Sum(1.0).compare(&[one + 1000], &[one]).is_err());
    assert!(Judge::Halves.compare(&[0x7e00_3c00], &[0x7fff_3c00]).is_ok());
    assert!(Judge::Halves.compare(&[0x7e00_3c00], &[0x7e00_3c01]).is_err());
}
