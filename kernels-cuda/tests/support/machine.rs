//! The machine on which the kernels are tested: the interpreter, or, with `QUANT_GPU=1`, the first GPU.
//!
//! Names and calls are those of the interpreter. A GPU has no counters, and the order of execution cannot be chosen.
//! Buffers begin at odd multiples of their alignment; guard bytes on both sides are checked after each launch.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use quant_kernels_cuda::compile::{Form, GpuArchitecture, Image, Variant};
use quant_kernels_cuda::device::Kernel;
use quant_kernels_cuda::image_cache::{CACHE_DIRECTORY, ImageCache, Nvrtc};
use quant_kernels_cuda::launch::{self, LaunchShape, Stream};
use quant_ptx_interpreter as ptx;
pub use quant_ptx_interpreter::{Argument, Error, Launch, Options, Report, Result};

use super::gpu::{Bytes, Gpu};

const GPU: &str = "QUANT_GPU";
/// Guard bytes on each side of a buffer on a GPU.
const GUARD: usize = 1024;
const GUARD_BYTE: u8 = 0xa7;
/// The value of unwritten bytes on a GPU.
const UNWRITTEN: u8 = 0xcb;

pub fn on_gpu() -> bool {
    std::env::var_os(GPU).is_some_and(|value| !value.is_empty() && value != "0")
}

/// The PTX of a variant, which both machines accept, from the directory of images if one is set.
pub fn ptx_of(variant: &Variant) -> String {
    let directory = std::env::var_os(CACHE_DIRECTORY).filter(|path| !path.is_empty());
    let cache = ImageCache::in_directory(directory.map(Into::into), Nvrtc);
    let image = cache.image(variant, GpuArchitecture::Sm80, Form::Ptx).unwrap_or_else(|e| panic!("{e}"));
    String::from_utf8(image.bytes).expect("PTX is text")
}

pub struct Memory(Place);

enum Place {
    Interpreter(ptx::Memory),
    Gpu(Vec<Buffer>),
}

struct Buffer {
    name: String,
    all: Bytes,
    at: usize,
    len: usize,
}

impl Default for Memory {
    fn default() -> Self {
        Self::new()
    }
}

impl Memory {
    pub fn new() -> Self {
        Self(if on_gpu() { Place::Gpu(Vec::new()) } else { Place::Interpreter(ptx::Memory::new()) })
    }

    /// Adds an unwritten buffer, and returns its address.
    pub fn buffer(&mut self, name: &str, bytes: usize, align: usize) -> u64 {
        match &mut self.0 {
            Place::Interpreter(memory) => memory.buffer(name, bytes, align),
            Place::Gpu(buffers) => add(buffers, name, &vec![UNWRITTEN; bytes], align),
        }
    }

    pub fn buffer_from(&mut self, name: &str, bytes: &[u8], align: usize) -> u64 {
        match &mut self.0 {
            Place::Interpreter(memory) => memory.buffer_from(name, bytes, align),
            Place::Gpu(buffers) => add(buffers, name, bytes, align),
        }
    }

    pub fn write(&mut self, address: u64, bytes: &[u8]) -> Result<()> {
        match &mut self.0 {
            Place::Interpreter(memory) => memory.write(address, bytes),
            Place::Gpu(buffers) => {
                let buffer = at(buffers, address)?;
                buffer.all.write(buffer.at, bytes);
                Ok(())
            }
        }
    }

    /// The bytes of a buffer. On the interpreter, unwritten bytes are an error.
    pub fn bytes(&self, address: u64) -> Result<Cow<'_, [u8]>> {
        match &self.0 {
            Place::Interpreter(memory) => memory.bytes(address).map(Cow::Borrowed),
            Place::Gpu(buffers) => {
                let buffer = at(buffers, address)?;
                Ok(Cow::Owned(buffer.all.read(buffer.at, buffer.len)))
            }
        }
    }

    /// Returns the bytes of a buffer, after checking that exactly those bytes were written for which `is_written` is
    /// true. On a GPU, missing writes and writes of the initial value are not detected.
    #[track_caller]
    pub fn bytes_written(&self, address: u64, is_written: impl Fn(usize) -> bool) -> Result<Vec<u8>> {
        match &self.0 {
            Place::Interpreter(memory) => {
                let (bytes, written) = memory.bytes_and_written(address)?;
                let wrong = (0..bytes.len()).find(|&i| written[i] != is_written(i));
                assert_eq!(
                    wrong, None,
                    "index of the first byte that was unexpectedly written or not written"
                );
                Ok(bytes.to_vec())
            }
            Place::Gpu(_) => {
                let bytes = self.bytes(address)?.into_owned();
                let wrong = (0..bytes.len()).find(|&i| bytes[i] != UNWRITTEN && !is_written(i));
                assert_eq!(wrong, None, "index of the first byte that was unexpectedly written");
                Ok(bytes)
            }
        }
    }
}

fn add(buffers: &mut Vec<Buffer>, name: &str, bytes: &[u8], align: usize) -> u64 {
    let align = align.max(1).next_power_of_two();
    let all = Bytes::filled(bytes.len() + 2 * GUARD + 3 * align, GUARD_BYTE);
    let from = all.address + GUARD as u64;
    let address = from.next_multiple_of(2 * align as u64) + align as u64;
    let at = (address - all.address) as usize;
    all.write(at, bytes);
    buffers.push(Buffer { name: name.to_owned(), all, at, len: bytes.len() });
    address
}

fn at(buffers: &[Buffer], address: u64) -> Result<&Buffer> {
    let found = buffers.iter().find(|buffer| buffer.all.address + buffer.at as u64 == address);
    found.ok_or_else(|| Error::Memory { message: format!("no buffer begins at {address:#x}") })
}

impl Buffer {
    /// The first overwritten guard byte, as an offset from the buffer's beginning.
    fn trespassed(&self) -> Option<isize> {
        let all = self.all.read(0, self.all.len);
        let inside = self.at..self.at + self.len;
        let found = (0..all.len()).find(|i| !inside.contains(i) && all[*i] != GUARD_BYTE)?;
        Some(found as isize - self.at as isize)
    }
}

pub struct Module(Text);

enum Text {
    Interpreter(Box<ptx::Module>),
    Gpu { image: Image, kernels: Mutex<HashMap<(String, u32), Arc<Kernel>>> },
}

impl Module {
    pub fn parse(text: &str) -> Result<Self> {
        if on_gpu() {
            let image = Image { bytes: text.as_bytes().to_vec(), log: String::new() };
            return Ok(Self(Text::Gpu { image, kernels: Mutex::default() }));
        }
        ptx::Module::parse(text).map(|module| Self(Text::Interpreter(Box::new(module))))
    }

    /// The statements of a kernel that the interpreter does not support; running them is an error.
    pub fn unsupported(&self, kernel: &str) -> Result<Vec<(u32, String)>> {
        match &self.0 {
            Text::Interpreter(module) => module.unsupported(kernel),
            Text::Gpu { .. } => Ok(Vec::new()),
        }
    }

    pub fn launch(
        &self,
        kernel: &str,
        launch: &Launch,
        memory: &mut Memory,
        options: &Options,
    ) -> Result<Report> {
        match (&self.0, &mut memory.0) {
            (Text::Interpreter(module), Place::Interpreter(memory)) => {
                module.launch(kernel, launch, memory, options)
            }
            (Text::Gpu { image, kernels }, Place::Gpu(buffers)) => {
                let failed = |message: String| Error::Launch { kernel: kernel.to_owned(), message };
                on_device(image, kernels, kernel, launch).map_err(failed)?;
                let trespassed = buffers.iter().find_map(|b| {
                    b.trespassed().map(|at| {
                        format!("the guard byte at offset {at} of buffer `{}` was overwritten", b.name)
                    })
                });
                match trespassed {
                    None => Ok(Report::default()),
                    Some(message) => Err(failed(message)),
                }
            }
            _ => unreachable!("the environment changed"),
        }
    }
}

fn on_device(
    image: &Image,
    kernels: &Mutex<HashMap<(String, u32), Arc<Kernel>>>,
    name: &str,
    launch: &Launch,
) -> Result<(), String> {
    let gpu = Gpu::get();
    let key = (name.to_owned(), launch.dynamic_shared);
    let found = kernels.lock().unwrap().get(&key).cloned();
    let kernel = match found {
        Some(kernel) => kernel,
        None => {
            // SAFETY: the text was generated by this crate's compiler, and the context is never released.
            let kernel = unsafe { Kernel::load(image, name, launch.dynamic_shared) };
            let kernel = Arc::new(kernel.map_err(|e| e.to_string())?);
            kernels.lock().unwrap().insert(key, Arc::clone(&kernel));
            kernel
        }
    };
    let arguments = launch.arguments.iter().map(|argument| match *argument {
        Argument::U64(v) => Ok(launch::Argument::U64(v)),
        Argument::U32(v) => Ok(launch::Argument::U32(v)),
        Argument::I32(v) => Ok(launch::Argument::U32(v as u32)),
        Argument::F32(v) => Ok(launch::Argument::F32(v)),
        ref other => Err(format!("launches on a GPU do not support the argument {other:?}")),
    });
    let arguments: Vec<launch::Argument> = arguments.collect::<Result<_, _>>()?;
    let [block, 1, 1] = launch.block else {
        return Err(format!("blocks must have the shape [n, 1, 1], got {:?}", launch.block));
    };
    let shape = LaunchShape { grid: launch.grid, block, shared_bytes: launch.dynamic_shared };
    // SAFETY: tests pass arguments that match the kernel, and wait for the launch.
    unsafe { kernel.launch(&shape, &arguments, Stream::DEFAULT) }.map_err(|e| e.to_string())?;
    gpu.wait()
}
