//! The launches for the experts of a layer on the interpreter: sorted routings, sums over a token's rows, and a whole
//! layer, compared with the CPU.

#[path = "../cases/mod.rs"]
mod cases;
mod layer;
mod planted;
mod route;
mod sum;
#[path = "../support/mod.rs"]
mod support;

use quant_kernels_cuda::compile::Variant;
use quant_kernels_cuda::launch::{Argument, LaunchShape, Region};

use crate::support::machine as ptx;

fn module(variant: &Variant) -> ptx::Module {
    let module = ptx::Module::parse(&ptx::ptx_of(variant)).unwrap();
    assert_eq!(module.unsupported(variant.kernel).unwrap(), [], "{variant}");
    module
}

fn launch(
    module: &ptx::Module,
    kernel: &str,
    shape: &LaunchShape,
    arguments: &[Argument],
    memory: &mut ptx::Memory,
    options: &ptx::Options,
) -> ptx::Result<ptx::Report> {
    let arguments = arguments.iter().map(|argument| match *argument {
        Argument::U64(v) => ptx::Argument::U64(v),
        Argument::U32(v) => ptx::Argument::U32(v),
        Argument::F32(v) => ptx::Argument::F32(v),
    });
    let launch = ptx::Launch {
        grid: shape.grid,
        block: [shape.block, 1, 1],
        dynamic_shared: shape.shared_bytes,
        arguments: arguments.collect(),
    };
    module.launch(kernel, &launch, memory, options)
}

fn region(memory: &mut ptx::Memory, name: &str, bytes: &[u8], align: usize) -> Region {
    match bytes.len() {
        0 => Region::NONE,
        len => Region { address: memory.buffer_from(name, bytes, align), bytes: len as u64 },
    }
}

fn output(memory: &mut ptx::Memory, name: &str, bytes: usize, align: usize) -> Region {
    match bytes {
        0 => Region::NONE,
        _ => Region { address: memory.buffer(name, bytes, align), bytes: bytes as u64 },
    }
}

fn bytes_of(words: impl IntoIterator<Item = u32>) -> Vec<u8> {
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}

fn words_of(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}
