//! Runs PTX on the CPU, to test kernels without a GPU, with checks that a GPU does not make.
//!
//! ```
//! use quant_ptx_interpreter::{Argument, Launch, Memory, Module, Options};
//!
//! let text = "
//!     .version 9.0 .target sm_80 .address_size 64
//!     .visible .entry twice(.param .u64 to, .param .u32 count) {
//!         .reg .pred %p<2>; .reg .b32 %r<5>; .reg .b64 %rd<4>;
//!         ld.param.u64 %rd1, [to];
//!         ld.param.u32 %r1, [count];
//!         mov.u32 %r2, %tid.x;
//!         setp.ge.u32 %p1, %r2, %r1;
//!         @%p1 ret;
//!         shl.b32 %r3, %r2, 1;
//!         mul.wide.u32 %rd2, %r2, 4;
//!         add.s64 %rd3, %rd1, %rd2;
//!         st.global.u32 [%rd3], %r3;
//!         ret;
//!     }";
//! let module = Module::parse(text)?;
//! let mut memory = Memory::new();
//! let to = memory.buffer("to", 40, 4);
//! let arguments = vec![Argument::U64(to), Argument::U32(10)];
//! let launch = Launch { grid: [1, 1, 1], block: [64, 1, 1], dynamic_shared: 0, arguments };
//! let report = module.launch("twice", &launch, &mut memory, &Options::default())?;
//! assert_eq!(memory.bytes(to)?[36..], 18u32.to_le_bytes());
//! assert_eq!(report.counters.opcode("st.global"), 1);
//! # Ok::<(), quant_ptx_interpreter::Error>(())
//! ```
//!
//! # What is modelled
//! The instructions that NVRTC 13.0 emits for kernels of matrix products, quantization and attention for sm_80 to
//! sm_120: integer and float arithmetic, conversions, loads and stores, atomics, fences, `cp.async`, `ldmatrix`,
//! `stmatrix`, `movmatrix`, `mma.sync` of f16, bf16, 8 and 4 bits, shuffles, votes, `redux`, `match`, and barriers.
//! [`Module::unsupported`] lists the other instructions of a kernel; they are faults only when they are executed.
//!
//! Lanes of a warp that are at the same instruction run together; the lanes that are first in the text run first. Warps
//! take turns according to [`Options::warp_order`], and blocks run one after the other. Memory is sequentially
//! consistent: a race is reported, but values are not reordered.
//!
//! # What is checked
//! Each [`Fault`] says where it occurred. Checked are:
//! - bounds, alignment (as declared for the buffer, see [`Memory::buffer`]), and reads of bytes that were never
//!   written;
//! - accesses to bytes of a copy in flight. A copy completes when its own thread waits for its group. Other lanes of
//!   the warp may read it after a `bar.warp.sync` or a barrier, other warps after a barrier;
//! - accesses of two warps to the same shared bytes without a barrier in between, at least one of them a write;
//! - accesses of two blocks to the same global bytes, at least one of them a plain write, that no atomic orders. A
//!   fence and then an atomic must follow the write, in the same warp or in one that a barrier connects with it. A
//!   later atomic on the same address acquires the write. A fence on the reading side is not required;
//! - reads and writes of global bytes that another warp of the block wrote, without a barrier in between;
//! - barriers that not all threads reach, warp-wide instructions for which lanes are at a different instruction,
//!   `trap`, and endless loops.
//!
//! Not checked: reads of local bytes that were never written; writes to the source of a copy in flight; races between
//! the lanes of a warp, except for copies; a write to global bytes that another warp of the block reads; readers of
//! several blocks, if the writer has acquired anything from an atomic.
//!
//! # Numbers
//! Integer results are exact. `add`, `sub`, `mul`, `fma`, `div`, `rcp`, `sqrt` of f32 and f64 follow IEEE 754, as do
//! directed roundings of f32 sums and products; f16 and bf16 results are rounded once. Approximate functions give the
//! f64 function rounded to f32. `mma` with f32 sums adds products in f32 in the order of k. Devices use a different
//! order and rounding, so compare within a bound instead of bit by bit. None of this was compared with a device.
//!
//! # Counts
//! [`Counters`] contains instructions by opcode and line, traffic by buffer, and passes through the banks of shared
//! memory. Caches and time are not modelled.
//!
//! Not modelled: calls, textures, clusters, `mbarrier` and bulk copies, `wgmma`, `tcgen05`, FP8 and tf32 factors,
//! carries (`add.cc`), clocks; blocks that wait for later blocks.

mod access;
mod atomic;
mod convert;
mod counters;
mod decode;
mod decode_memory;
mod decode_warp;
mod error;
mod exchange;
mod execute;
mod float;
mod integer;
mod launch;
mod machine;
mod matrix;
mod memory;
mod number;
mod operation;
mod order;
mod resolve;
mod rounding;
mod shared;
mod statement;
mod syntax;
mod token;
mod types;
mod warp;

pub use counters::{BufferTraffic, Counters, Traffic, Wavefronts};
pub use error::{Error, Fault, FaultKind, Result};
pub use launch::{
    Argument, BlockOrder, Launch, MAX_BLOCKS, MAX_SHARED, MAX_THREADS, Module, Options, Report, WarpOrder,
};
pub use memory::Memory;
