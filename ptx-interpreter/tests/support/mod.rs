//! Builds small kernels around a few instructions, and launches them.
#![allow(dead_code)]

use quant_ptx_interpreter::{Argument, Error, FaultKind, Launch, Memory, Module, Options, Report, WarpOrder};

/// A kernel `k` with u64 parameters `p0`, `p1`, ..., common registers, and the given body. `%rd1`, `%rd2`, ... hold the
/// parameters, `%r1` the thread's index in the block, `%r2` the block's index, and `%r3` the thread's index in the
/// grid.
pub fn kernel(parameters: usize, before: &str, body: &str) -> String {
    let list: Vec<_> = (0..parameters).map(|i| format!(".param .u64 p{i}")).collect();
    let loads: String = (0..parameters).map(|i| format!("ld.param.u64 %rd{}, [p{i}];\n", i + 1)).collect();
    format!(
        ".version 9.0\n.target sm_80\n.address_size 64\n{before}\n.visible .entry k({})\n{{\n\
         .reg .pred %p<32>;\n.reg .b16 %rs<64>;\n.reg .b32 %r<128>;\n.reg .f32 %f<128>;\n.reg .b64 %rd<64>;\n\
         .reg .f64 %fd<16>;\n{loads}\
         mov.u32 %r1, %tid.x;\nmov.u32 %r2, %ctaid.x;\nmov.u32 %r4, %ntid.x;\nmad.lo.s32 %r3, %r2, %r4, %r1;\n\
         {body}\nret;\n}}\n",
        list.join(", ")
    )
}

pub fn launch(grid: u32, block: u32, dynamic_shared: u32, arguments: &[u64]) -> Launch {
    let arguments = arguments.iter().map(|a| Argument::U64(*a)).collect();
    Launch { grid: [grid, 1, 1], block: [block, 1, 1], dynamic_shared, arguments }
}

pub fn orders() -> Vec<Options> {
    let orders = [
        WarpOrder::InOrder,
        WarpOrder::RoundRobin,
        WarpOrder::Reverse,
        WarpOrder::Seeded(1),
        WarpOrder::Seeded(7),
    ];
    orders.into_iter().map(|warp_order| Options { warp_order, ..Options::default() }).collect()
}

pub fn run(text: &str, launch: &Launch, memory: &mut Memory) -> Result<Report, Error> {
    Module::parse(text)?.launch("k", launch, memory, &Options::default())
}

pub fn fault(result: Result<Report, Error>) -> FaultKind {
    match result {
        Err(Error::Fault(fault)) => fault.kind,
        other => panic!("expected a fault, got {other:?}"),
    }
}

pub fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
}

pub fn bytes_of(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

/// Every thread loads `%r10`, `%r11` and `%r12` from three arrays, and the snippet writes its result to `%r20`.
pub fn over_words(snippet: &str, a: &[u32], b: &[u32], c: &[u32]) -> Vec<u32> {
    let body = format!(
        "mul.wide.u32 %rd10, %r3, 4;\nadd.s64 %rd11, %rd1, %rd10;\nld.global.u32 %r10, [%rd11];\n\
         add.s64 %rd12, %rd2, %rd10;\nld.global.u32 %r11, [%rd12];\nadd.s64 %rd13, %rd3, %rd10;\n\
         ld.global.u32 %r12, [%rd13];\nmov.b32 %f10, %r10;\nmov.b32 %f11, %r11;\nmov.b32 %f12, %r12;\n\
         {snippet}\nadd.s64 %rd14, %rd4, %rd10;\nst.global.u32 [%rd14], %r20;"
    );
    let text = kernel(4, "", &body);
    assert_eq!(a.len() % 32, 0);
    let mut memory = Memory::new();
    let inputs = [a, b, c].map(|v| memory.buffer_from("input", &bytes_of(v), 4));
    let out = memory.buffer("out", a.len() * 4, 4);
    let launch = launch((a.len() / 32) as u32, 32, 0, &[inputs[0], inputs[1], inputs[2], out]);
    run(&text, &launch, &mut memory).unwrap_or_else(|e| panic!("{snippet}: {e}"));
    words(memory.bytes(out).unwrap())
}

pub fn numbers(count: usize, seed: u64) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 20) as u32
    };
    std::iter::repeat_with(next).take(count).collect()
}
