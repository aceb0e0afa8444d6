//! The device: allocations, modules, and launches on the interpreter.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use quant_ptx_interpreter::{Argument, Launch, Memory, Module, Options};

use crate::parameters::{self, Parameter};

/// A result code of the driver, as numbered in `cuda.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Code(pub u32);

impl Code {
    /// `CUDA_SUCCESS`
    pub const SUCCESS: Self = Self(0);
    /// `CUDA_ERROR_INVALID_VALUE`
    pub const INVALID_VALUE: Self = Self(1);
    /// `CUDA_ERROR_OUT_OF_MEMORY`
    pub const OUT_OF_MEMORY: Self = Self(2);
    /// `CUDA_ERROR_NOT_INITIALIZED`
    pub const NOT_INITIALIZED: Self = Self(3);
    /// `CUDA_ERROR_INVALID_DEVICE`
    pub const INVALID_DEVICE: Self = Self(101);
    /// `CUDA_ERROR_INVALID_IMAGE`
    pub const INVALID_IMAGE: Self = Self(200);
    /// `CUDA_ERROR_INVALID_CONTEXT`
    pub const INVALID_CONTEXT: Self = Self(201);
    /// `CUDA_ERROR_INVALID_HANDLE`
    pub const INVALID_HANDLE: Self = Self(400);
    /// `CUDA_ERROR_NOT_FOUND`
    pub const NOT_FOUND: Self = Self(500);
    /// `CUDA_ERROR_LAUNCH_FAILED`
    pub const LAUNCH_FAILED: Self = Self(719);
}

/// The first address, far from those of the host and of the interpreter.
const FIRST: u64 = 0x7000_0000_0000;
const ALIGN: u64 = 256;
/// The default limit on a kernel's dynamic shared memory in bytes; [`MAX_SHARED`] is the highest that can be set.
const DEFAULT_SHARED: u32 = 48 * 1024;
pub(crate) const MAX_SHARED: u32 = 227 * 1024;
/// In bytes.
pub(crate) const MEMORY: usize = 4 << 30;

struct Loaded {
    text: String,
    module: Module,
}

struct Function {
    module: usize,
    kernel: String,
    parameters: Vec<Parameter>,
    max_shared: u32,
}

#[derive(Default)]
pub(crate) struct Device {
    pub(crate) initialised: bool,
    allocations: BTreeMap<u64, Vec<u8>>,
    next: u64,
    modules: HashMap<usize, Loaded>,
    functions: HashMap<usize, Function>,
    handles: usize,
    /// The error of a failed launch, which all later calls that need a context return.
    pub(crate) broken: Option<Code>,
}

pub(crate) fn device() -> MutexGuard<'static, Device> {
    static DEVICE: LazyLock<Mutex<Device>> = LazyLock::new(Mutex::default);
    DEVICE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Device {
    fn handle(&mut self) -> usize {
        self.handles += 16;
        self.handles
    }

    pub(crate) fn allocate(&mut self, bytes: usize) -> Result<u64, Code> {
        if bytes == 0 {
            return Err(Code::INVALID_VALUE);
        }
        if bytes > MEMORY.saturating_sub(self.allocated()) {
            return Err(Code::OUT_OF_MEMORY);
        }
        let mut memory = Vec::new();
        memory.try_reserve_exact(bytes).map_err(|_| Code::OUT_OF_MEMORY)?;
        memory.resize(bytes, 0xee);
        let address = self.next.max(FIRST);
        self.next = (address + bytes as u64).next_multiple_of(ALIGN) + 4096;
        self.allocations.insert(address, memory);
        Ok(address)
    }

    pub(crate) fn allocated(&self) -> usize {
        self.allocations.values().map(Vec::len).sum()
    }

    pub(crate) fn free(&mut self, address: u64) -> Result<(), Code> {
        self.allocations.remove(&address).map(|_| ()).ok_or(Code::INVALID_VALUE)
    }

    /// Returns the allocation that contains an address, and the offset in it.
    fn find(&self, address: u64) -> Option<(u64, usize)> {
        let (&base, memory) = self.allocations.range(..=address).next_back()?;
        let at = usize::try_from(address - base).ok()?;
        // An empty range may begin after the last byte.
        (at <= memory.len()).then_some((base, at))
    }

    pub(crate) fn bytes(&mut self, address: u64, len: usize) -> Result<&mut [u8], Code> {
        let (base, at) = self.find(address).ok_or(Code::INVALID_VALUE)?;
        let memory = self.allocations.get_mut(&base).ok_or(Code::INVALID_VALUE)?;
        at.checked_add(len).and_then(|end| memory.get_mut(at..end)).ok_or(Code::INVALID_VALUE)
    }

    pub(crate) fn load(&mut self, text: &str) -> Result<usize, Code> {
        let module = Module::parse(text).map_err(|e| logged(&e, Code::INVALID_IMAGE))?;
        let handle = self.handle();
        self.modules.insert(handle, Loaded { text: text.to_owned(), module });
        Ok(handle)
    }

    pub(crate) fn unload(&mut self, module: usize) -> Result<(), Code> {
        self.functions.retain(|_, function| function.module != module);
        self.modules.remove(&module).map(|_| ()).ok_or(Code::INVALID_HANDLE)
    }

    pub(crate) fn function(&mut self, module: usize, kernel: &str) -> Result<usize, Code> {
        let loaded = self.modules.get(&module).ok_or(Code::INVALID_HANDLE)?;
        let parameters = parameters::of(&loaded.text, kernel).ok_or(Code::NOT_FOUND)?;
        let handle = self.handle();
        let function = Function { module, kernel: kernel.to_owned(), parameters, max_shared: DEFAULT_SHARED };
        self.functions.insert(handle, function);
        Ok(handle)
    }

    pub(crate) fn allow_shared(&mut self, function: usize, bytes: u32) -> Result<(), Code> {
        let function = self.functions.get_mut(&function).ok_or(Code::INVALID_HANDLE)?;
        if bytes > MAX_SHARED {
            return Err(Code::INVALID_VALUE);
        }
        function.max_shared = bytes.max(DEFAULT_SHARED);
        Ok(())
    }

    pub(crate) fn parameters(&self, function: usize) -> Result<Vec<Parameter>, Code> {
        self.functions.get(&function).map(|f| f.parameters.clone()).ok_or(Code::INVALID_HANDLE)
    }

    /// Runs a kernel to its end, on copies of the allocations that it can reach.
    pub(crate) fn launch(
        &mut self,
        function: usize,
        [grid, block]: [[u32; 3]; 2],
        shared: u32,
        arguments: Vec<Argument>,
    ) -> Result<(), Code> {
        let function = self.functions.get(&function).ok_or(Code::INVALID_HANDLE)?;
        if shared > function.max_shared {
            return Err(Code::INVALID_VALUE);
        }
        let loaded = self.modules.get(&function.module).ok_or(Code::INVALID_HANDLE)?;
        let mut memory = Memory::new();
        let places = self.reachable(&arguments);
        for (base, bytes) in places.iter().filter_map(|base| self.allocations.get_key_value(base)) {
            let placed = memory.buffer_at(&format!("{base:#x}"), bytes, *base);
            placed.map_err(|e| logged(&e, Code::INVALID_VALUE))?;
        }
        let launch = Launch { grid, block, dynamic_shared: shared, arguments };
        let ran = loaded.module.launch(&function.kernel, &launch, &mut memory, &Options::default());
        if let Err(e) = ran {
            let code = logged(&e, Code::LAUNCH_FAILED);
            self.broken = Some(code);
            return Err(code);
        }
        for base in places {
            if let (Ok(bytes), Some(to)) = (memory.bytes(base), self.allocations.get_mut(&base)) {
                to.copy_from_slice(bytes);
            }
        }
        Ok(())
    }

    /// The allocations that arguments point into, and those that words in these point into.
    fn reachable(&self, arguments: &[Argument]) -> BTreeSet<u64> {
        let first = arguments.iter().filter_map(|argument| match argument {
            Argument::U64(address) => self.find(*address).map(|(base, _)| base),
            _ => None,
        });
        let mut bases: BTreeSet<u64> = first.collect();
        let words = bases.iter().filter_map(|base| self.allocations.get(base)).flat_map(|bytes| {
            bytes
                .chunks_exact(8)
                .map(|b| u64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]))
        });
        let others =
            words.filter(|word| (FIRST..self.next).contains(word)).filter_map(|word| self.find(word));
        let others: Vec<u64> = others.map(|(base, _)| base).collect();
        bases.extend(others);
        bases
    }
}

/// A result code has no details.
fn logged(error: &quant_ptx_interpreter::Error, code: Code) -> Code {
    eprintln!("stand-in for the CUDA driver: {error}");
    code
}
