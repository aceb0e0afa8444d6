//! Modules and launches: the public interface of the crate.

use std::collections::HashMap;

use crate::counters::Counters;
use crate::error::{Error, Fault, Result};
use crate::machine::{Machine, Random};
use crate::memory::Memory;
use crate::operation::{Kernel, Operation};
use crate::statement::Space;
use crate::syntax;

/// Maximum bytes of shared memory of a launch, including the static part.
pub const MAX_SHARED: usize = 227 * 1024;
const MAX_VARIABLES: usize = 1 << 26;
const MAX_LOCAL: usize = 1 << 19;
/// Maximum number of blocks per grid.
pub const MAX_BLOCKS: u32 = 1 << 24;
/// Maximum number of threads per block.
pub const MAX_THREADS: u32 = 1024;

/// An argument of a kernel.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Argument {
    /// A 64-bit number, or the address of a buffer.
    U64(u64),
    /// A signed 64-bit number.
    I64(i64),
    /// A 32-bit number.
    U32(u32),
    /// A signed 32-bit number.
    I32(i32),
    /// A 16-bit number, or the bits of a 16-bit float.
    U16(u16),
    /// An 8-bit number or a bool.
    U8(u8),
    /// A 32-bit float.
    F32(f32),
    /// A 64-bit float.
    F64(f64),
    /// The bytes of a structure.
    Bytes(Vec<u8>),
}

impl Argument {
    fn bytes(&self) -> Vec<u8> {
        match self {
            Self::U64(v) => v.to_le_bytes().to_vec(),
            Self::I64(v) => v.to_le_bytes().to_vec(),
            Self::U32(v) => v.to_le_bytes().to_vec(),
            Self::I32(v) => v.to_le_bytes().to_vec(),
            Self::U16(v) => v.to_le_bytes().to_vec(),
            Self::U8(v) => vec![*v],
            Self::F32(v) => v.to_le_bytes().to_vec(),
            Self::F64(v) => v.to_le_bytes().to_vec(),
            Self::Bytes(v) => v.clone(),
        }
    }
}

/// A launch's shape and arguments.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    /// Blocks along x, y and z, each at least 1, at most [`MAX_BLOCKS`] in total.
    pub grid: [u32; 3],
    /// Threads along x, y and z, each at least 1, at most [`MAX_THREADS`] in total.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub dynamic_shared: u32,
    /// The arguments, in the order and with the sizes of the kernel's parameters.
    pub arguments: Vec<Argument>,
}

/// The order in which the warps of a block take turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum WarpOrder {
    /// Each warp runs up to its next barrier, starting with the first warp. This is the fastest order.
    #[default]
    InOrder,
    /// Each warp in turn runs up to its next memory access.
    RoundRobin,
    /// Each warp runs up to its next barrier, starting with the last warp.
    Reverse,
    /// After every memory access, a randomly chosen warp runs.
    Seeded(u64),
}

/// The order in which the blocks of a grid run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum BlockOrder {
    /// x fastest, then y, then z.
    #[default]
    Forward,
    /// The reverse order.
    Reverse,
    /// A random order.
    Seeded(u64),
}

/// Options of a launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The order of warps within a block.
    pub warp_order: WarpOrder,
    /// The order of blocks, which run one after the other.
    pub block_order: BlockOrder,
    /// Whether the first fault ends the launch. If not, faults of memory accesses and of the masks and source lanes of
    /// warp-wide instructions are collected (up to 1000). Faulting reads return zeros and faulting writes are ignored,
    /// except that races and uninitialised bytes of global memory do not prevent an access. All other faults end the
    /// launch.
    pub fault_is_error: bool,
    /// The maximum number of warp instructions.
    pub max_instructions: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            warp_order: WarpOrder::default(),
            block_order: BlockOrder::default(),
            fault_is_error: true,
            max_instructions: 4_000_000_000,
        }
    }
}

/// The results of a launch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// The counters of the launch.
    pub counters: Counters,
    /// The collected faults, if the options do not make faults errors.
    pub faults: Vec<Fault>,
}

/// A decoded PTX text.
#[derive(Debug, Clone)]
pub struct Module {
    kernels: Vec<Kernel>,
    variables: Vec<u8>,
    variables_align: usize,
}

impl Module {
    /// Parses a PTX text. Most unsupported instructions cause an error only when they are executed.
    ///
    /// # Errors
    /// When the text is not PTX that this crate can parse.
    pub fn parse(text: &str) -> Result<Self> {
        let text = syntax::read(text)?;
        let kernels =
            text.entries.iter().map(|e| crate::decode::kernel(e, &text.variables)).collect::<Result<_>>()?;
        let mut places = HashMap::new();
        let end = crate::resolve::globals(&text.variables, &mut places);
        if end > MAX_VARIABLES {
            let message = format!("{end} bytes of variables, at most {MAX_VARIABLES}");
            return Err(Error::Parse { line: 1, message });
        }
        let mut variables = vec![0; end];
        let mut variables_align = 1;
        for variable in text.variables.iter().filter(|v| v.space == Space::Global) {
            variables_align = variables_align.max(variable.align);
            if let Some((_, at)) = places.get(variable.name)
                && let Some(to) = variables.get_mut(*at as usize..*at as usize + variable.initial.len())
            {
                to.copy_from_slice(&variable.initial);
            }
        }
        Ok(Self { kernels, variables, variables_align })
    }

    /// The kernels' names.
    pub fn kernels(&self) -> impl Iterator<Item = &str> {
        self.kernels.iter().map(|k| k.name.as_str())
    }

    fn kernel(&self, name: &str) -> Result<&Kernel> {
        self.kernels.iter().find(|k| k.name == name).ok_or_else(|| Error::NoKernel {
            kernel: name.to_owned(),
            present: self.kernels().collect::<Vec<_>>().join(", "),
        })
    }

    /// Returns the line and opcode of each unsupported instruction of a kernel.
    ///
    /// # Errors
    /// When there is no such kernel.
    pub fn unsupported(&self, kernel: &str) -> Result<Vec<(u32, String)>> {
        let kernel = self.kernel(kernel)?;
        let unknown = kernel.instructions.iter().filter(|i| matches!(i.operation, Operation::Unsupported));
        Ok(unknown.map(|i| (i.line, kernel.opcodes[i.opcode].clone())).collect())
    }

    /// Returns the size of a kernel's static shared memory in bytes.
    ///
    /// # Errors
    /// When there is no such kernel.
    pub fn static_shared(&self, kernel: &str) -> Result<usize> {
        Ok(self.kernel(kernel)?.static_shared)
    }

    /// Runs a kernel over a grid. The module's variables are initialized for every launch.
    ///
    /// # Errors
    /// When there is no such kernel, or the launch does not match it; at the first [`Fault`], if the options make
    /// faults errors.
    pub fn launch(
        &self,
        kernel: &str,
        launch: &Launch,
        memory: &mut Memory,
        options: &Options,
    ) -> Result<Report> {
        let kernel = self.kernel(kernel)?;
        let parameters = check(kernel, launch)?;
        let variables = memory.buffer_from("(module)", &self.variables, self.variables_align);
        memory.begin();
        let mut machine = Machine::new(kernel, memory, launch, options, parameters, variables);
        let [nx, ny, nz] = launch.grid;
        let blocks = nx * ny * nz;
        let mut order: Vec<u32> = Vec::new();
        if let BlockOrder::Seeded(seed) = options.block_order {
            order = (0..blocks).collect();
            let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
            for i in (1..order.len()).rev() {
                order.swap(i, random.below(i + 1));
            }
        }
        let mut done = Ok(());
        for i in 0..blocks {
            let number = match options.block_order {
                BlockOrder::Forward => i,
                BlockOrder::Reverse => blocks - 1 - i,
                BlockOrder::Seeded(_) => order[i as usize],
            };
            let block = [number % nx, number / nx % ny, number / nx / ny];
            done = machine.run_block(block, number);
            if done.is_err() {
                break;
            }
        }
        let (tally, faults) = (std::mem::take(&mut machine.tally), std::mem::take(&mut machine.faults));
        let report = done.map(|()| Report { counters: tally.finish(kernel, memory), faults });
        memory.drop_last();
        report
    }
}

fn check(kernel: &Kernel, launch: &Launch) -> Result<Vec<u8>> {
    let wrong = |message: String| Err(Error::Launch { kernel: kernel.name.clone(), message });
    let product = |sizes: [u32; 3]| sizes.iter().try_fold(1u32, |all, n| all.checked_mul(*n)).unwrap_or(0);
    if product(launch.grid) == 0 || product(launch.grid) > MAX_BLOCKS {
        return wrong(format!("a grid must have 1 to {MAX_BLOCKS} blocks, got {:?}", launch.grid));
    }
    let threads = product(launch.block);
    if threads == 0 || threads > MAX_THREADS {
        return wrong(format!("a block must have 1 to {MAX_THREADS} threads, got {:?}", launch.block));
    }
    if let Some(max) = kernel.max_threads
        && threads > product(max)
    {
        return wrong(format!("{threads} threads per block, compiled for at most {max:?}"));
    }
    let shared = kernel.static_shared + launch.dynamic_shared as usize;
    if shared > MAX_SHARED {
        return wrong(format!("{shared} bytes of shared memory, at most {MAX_SHARED}"));
    }
    if kernel.local_bytes > MAX_LOCAL {
        return wrong(format!(
            "{} bytes of local memory per thread, at most {MAX_LOCAL}",
            kernel.local_bytes
        ));
    }
    if launch.arguments.len() != kernel.parameters.len() {
        let (given, wanted) = (launch.arguments.len(), kernel.parameters.len());
        return wrong(format!("{given} arguments for {wanted} parameters"));
    }
    let mut bytes = vec![0; kernel.parameter_bytes];
    for (i, (argument, parameter)) in launch.arguments.iter().zip(&kernel.parameters).enumerate() {
        let value = argument.bytes();
        if value.len() != parameter.bytes {
            let (given, wanted) = (value.len(), parameter.bytes);
            return wrong(format!(
                "argument {i} has {given} bytes, its parameter ({:?}) {wanted}",
                parameter.ty
            ));
        }
        bytes[parameter.offset..parameter.offset + value.len()].copy_from_slice(&value);
    }
    Ok(bytes)
}
