//! Runs the kernels' PTX on the interpreter: memory, launches, and the counters for budgets.

use quant_kernels_cuda::compile::Variant;
use quant_kernels_cuda::launch::{Argument, LaunchShape};
use quant_ptx_interpreter as interpreter;
use quant_ptx_interpreter::{BlockOrder, WarpOrder};

use crate::support::machine::{Launch, Memory, Module, Options, ptx_of};

/// The order in which blocks, and warps between barriers, run.
#[derive(Debug, Clone, Copy)]
pub enum Order {
    Straight,
    Reversed,
    Seeded(u64),
}

pub struct Counters {
    all: interpreter::Counters,
    /// Passes through the banks of shared memory by loads, and the minimum without conflicts.
    pub shared_read_wavefronts: u64,
    pub shared_read_ideal: u64,
}

impl Counters {
    pub fn of(&self, opcode: &str) -> u64 {
        self.all.opcode(opcode)
    }

    pub fn total(&self) -> u64 {
        self.all.instructions
    }

    pub fn traffic(&self, buffer: &str) -> interpreter::BufferTraffic {
        self.all.buffers.get(buffer).copied().unwrap_or_default()
    }

    /// Bytes of a buffer that were read, each counted once.
    pub fn read_of(&self, buffer: &str) -> u64 {
        self.all.buffers.get(buffer).map_or(0, |buffer| buffer.read.unique_bytes)
    }
}

/// Any fault stops the launch.
#[derive(Default)]
pub struct Machine {
    memory: Memory,
}

impl Machine {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn buffer_from(&mut self, name: &str, bytes: &[u8]) -> u64 {
        self.memory.buffer_from(name, bytes, 16)
    }

    /// An unwritten buffer.
    pub fn buffer(&mut self, name: &str, length: usize) -> u64 {
        self.memory.buffer(name, length, 16)
    }

    /// Fills a buffer with repetitions of the same bytes.
    pub fn fill(&mut self, buffer: u64, bytes: &[u8], times: usize) {
        self.memory.write(buffer, &bytes.repeat(times)).unwrap();
    }

    pub fn bytes(&self, buffer: u64) -> Vec<u8> {
        self.memory.bytes(buffer).unwrap().to_vec()
    }

    pub fn launch(
        &mut self,
        variant: &Variant,
        shape: &LaunchShape,
        arguments: &[Argument],
        order: Order,
    ) -> Result<Counters, String> {
        let module = Module::parse(&ptx_of(variant)).map_err(|e| e.to_string())?;
        let arguments = arguments.iter().map(|argument| match *argument {
            Argument::U64(x) => interpreter::Argument::U64(x),
            Argument::U32(x) => interpreter::Argument::U32(x),
            Argument::F32(x) => interpreter::Argument::F32(x),
        });
        let launch = Launch {
            grid: shape.grid,
            block: [shape.block, 1, 1],
            dynamic_shared: shape.shared_bytes,
            arguments: arguments.collect(),
        };
        let (warp_order, block_order) = match order {
            Order::Straight => (WarpOrder::RoundRobin, BlockOrder::Forward),
            Order::Reversed => (WarpOrder::Reverse, BlockOrder::Reverse),
            Order::Seeded(seed) => (WarpOrder::Seeded(seed), BlockOrder::Seeded(seed)),
        };
        let options = Options { warp_order, block_order, ..Options::default() };
        let report = module
            .launch(variant.kernel, &launch, &mut self.memory, &options)
            .map_err(|fault| fault.to_string())?;
        let loads = report.counters.shared_reads;
        Ok(Counters {
            shared_read_wavefronts: loads.taken,
            shared_read_ideal: loads.ideal,
            all: report.counters,
        })
    }
}
