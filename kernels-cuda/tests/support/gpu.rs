//! The first GPU, for tests: any error ends the test.

use quant_kernels_cuda::standalone::{self, Memory};

/// A device whose context is current on this thread.
pub struct Gpu(&'static standalone::Gpu);

impl Gpu {
    /// The first device.
    ///
    /// # Panics
    /// If there is no GPU.
    pub fn get() -> Self {
        Self(standalone::Gpu::first().unwrap_or_else(|e| panic!("a GPU was requested: {e}")))
    }

    /// Waits for all launched work.
    ///
    /// # Errors
    /// Any error on the device since the last synchronization.
    pub fn wait(&self) -> Result<(), String> {
        self.0.wait().map_err(|e| e.to_string())
    }
}

/// Bytes on the device, freed when dropped.
pub struct Bytes {
    memory: Memory,
    /// The address of the first byte, a multiple of 256.
    pub address: u64,
    /// Length in bytes.
    pub len: usize,
}

impl Bytes {
    /// Allocates bytes, all set to `fill`.
    pub fn filled(len: usize, fill: u8) -> Self {
        let memory = Memory::filled(len, fill).unwrap();
        Self { address: memory.region().address, len, memory }
    }

    /// Allocates memory with these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        let own = Self::filled(bytes.len(), 0);
        own.write(0, bytes);
        own
    }

    /// Writes at offset `at`.
    pub fn write(&self, at: usize, bytes: &[u8]) {
        self.memory.write(at, bytes).unwrap();
    }

    /// Reads `len` bytes at offset `at`.
    pub fn read(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read(at, &mut bytes).unwrap();
        bytes
    }
}
