//! A device for programs without a framework: context, memory and timing. `quant` itself, the tests and the kernel
//! benchmarks use it. Its functions synchronize with the device.

mod linear;

use std::ptr;
use std::sync::OnceLock;

use cudarc::driver::{result, sys};

use crate::device::{DeviceLimits, checked};
use crate::error::{Error, Result};
use crate::launch::Region;
use crate::libraries::{elapsed, require_standalone};

pub use linear::{CudaLinear, Launcher};
pub use quant_kernels_cpu::Activations;

/// The first visible device with its primary context, which is kept until the program ends.
#[derive(Debug)]
pub struct Gpu {
    context: sys::CUcontext,
    /// The device's name, from the driver.
    pub name: String,
    /// The properties that plans depend on.
    pub limits: DeviceLimits,
}

// SAFETY: a context is a handle of the driver, which may be used from any thread.
unsafe impl Send for Gpu {}
// SAFETY: a context may be used from any thread; nothing is modified through a shared reference.
unsafe impl Sync for Gpu {}

impl Gpu {
    /// Returns the device, with its context current on this thread.
    ///
    /// # Errors
    /// When there is no driver or device, or the context cannot be created.
    pub fn first() -> Result<&'static Self> {
        static GPU: OnceLock<Result<Gpu>> = OnceLock::new();
        let gpu = GPU.get_or_init(Self::find).as_ref().map_err(Clone::clone)?;
        gpu.make_current()?;
        Ok(gpu)
    }

    fn find() -> Result<Self> {
        require_standalone()?;
        let device = in_action("get the first device", result::device::get(0))?;
        // SAFETY: the driver returned this device. The context is never released.
        let context =
            in_action("retain the device's context", unsafe { result::primary_ctx::retain(device) })?;
        // SAFETY: the context was just retained.
        in_action("make a context current", unsafe { result::ctx::set_current(context) })?;
        let name = in_action("get the name of the device", result::device::get_name(device))?;
        Ok(Self { context, name, limits: DeviceLimits::current()? })
    }

    /// The newest CUDA version that the driver supports: 13000 for 13.0.
    ///
    /// # Errors
    /// When the driver returns an error.
    pub fn driver_version(&self) -> Result<u32> {
        let mut version = 0;
        // SAFETY: `find` checked that the driver is present; the pointer is to a live number.
        checked("get the driver's version", unsafe { sys::cuDriverGetVersion(&mut version) })?;
        Ok(u32::try_from(version).unwrap_or(0))
    }

    /// Returns the size of the device's L2 cache in bytes.
    ///
    /// # Errors
    /// When the driver returns an error.
    pub fn cache_bytes(&self) -> Result<usize> {
        let device = in_action("get the first device", result::device::get(0))?;
        let which = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE;
        // SAFETY: the driver returned this device.
        let bytes = in_action("get the properties of the device", unsafe {
            result::device::get_attribute(device, which)
        })?;
        Ok(usize::try_from(bytes).unwrap_or(0))
    }

    /// Returns the size of the device's memory, and how much of it is free.
    ///
    /// # Errors
    /// When the driver returns an error.
    pub fn memory(&self) -> Result<DeviceMemory> {
        self.make_current()?;
        let (free, total) = in_action("get the amount of free memory", result::mem_get_info())?;
        Ok(DeviceMemory { free, total })
    }

    /// Makes the context of this device current on this thread.
    ///
    /// # Errors
    /// When the driver returns an error, such as after a fault on the device.
    pub fn make_current(&self) -> Result<()> {
        // SAFETY: the context is never released.
        in_action("make a context current", unsafe { result::ctx::set_current(self.context) })
    }

    /// Waits for all launched work.
    ///
    /// # Errors
    /// Any error on the device since the last synchronization.
    pub fn wait(&self) -> Result<()> {
        self.make_current()?;
        in_action("wait for the device", result::ctx::synchronize())
    }
}

/// The size of a device's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceMemory {
    /// The number of bytes that are not allocated.
    pub free: usize,
    /// The total number of bytes.
    pub total: usize,
}

/// Memory on the first device, freed when dropped.
#[derive(Debug)]
pub struct Memory {
    gpu: &'static Gpu,
    address: u64,
    len: usize,
}

impl Memory {
    /// Allocates `len` bytes, which may be 0, all set to `fill`.
    ///
    /// # Errors
    /// When there is no device, or too little memory.
    pub fn filled(len: usize, fill: u8) -> Result<Self> {
        let gpu = Gpu::first()?;
        // SAFETY: `Gpu::first` made a context current.
        let address = in_action("allocate memory", unsafe { result::malloc_sync(len.max(1)) })?;
        let memory = Self { gpu, address, len };
        // SAFETY: this many bytes were just allocated.
        in_action("fill memory", unsafe { result::memset_d8_sync(address, fill, len.max(1)) })?;
        Ok(memory)
    }

    /// Allocates memory and copies these bytes to it.
    ///
    /// # Errors
    /// See [`filled`](Self::filled).
    pub fn of(bytes: &[u8]) -> Result<Self> {
        let memory = Self::filled(bytes.len(), 0)?;
        memory.write(0, bytes)?;
        Ok(memory)
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The region of this memory, whose address is a multiple of 256.
    pub fn region(&self) -> Region {
        Region { address: self.address, bytes: self.len as u64 }
    }

    /// Writes bytes at offset `at`, after all work launched before.
    ///
    /// # Errors
    /// When the range is out of bounds, or an error occurred on the device.
    pub fn write(&self, at: usize, bytes: &[u8]) -> Result<()> {
        let to = self.within("write", at, bytes.len())?;
        self.gpu.make_current()?;
        // SAFETY: the bytes are within the allocation, checked above.
        in_action("write memory", unsafe { result::memcpy_htod_sync(to, bytes) })
    }

    /// Reads bytes at offset `at`, after all work launched before.
    ///
    /// # Errors
    /// See [`write`](Self::write).
    pub fn read(&self, at: usize, bytes: &mut [u8]) -> Result<()> {
        let from = self.within("read", at, bytes.len())?;
        self.gpu.make_current()?;
        // SAFETY: the bytes are within the allocation, checked above.
        in_action("read memory", unsafe { result::memcpy_dtoh_sync(bytes, from) })
    }

    fn within(&self, action: &'static str, at: usize, len: usize) -> Result<u64> {
        match at.checked_add(len) {
            Some(end) if end <= self.len => Ok(self.address + at as u64),
            _ => Err(Error::Driver {
                action,
                reason: format!("{len} bytes at offset {at} exceed an allocation of {} bytes", self.len),
            }),
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // After a fault on the device, freeing fails, which `drop` cannot report.
        if self.gpu.make_current().is_ok() {
            // SAFETY: the memory was allocated by `filled` and is freed once.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// A point in the default stream.
#[derive(Debug)]
pub struct Event {
    gpu: &'static Gpu,
    event: sys::CUevent,
}

impl Event {
    /// Records an event at the current point of the stream.
    ///
    /// # Errors
    /// When there is no device, or an error occurred on it.
    pub fn now() -> Result<Self> {
        let gpu = Gpu::first()?;
        let event =
            in_action("create an event", result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT))?;
        let made = Self { gpu, event };
        // SAFETY: the event and the default stream belong to the current context.
        in_action("record an event", unsafe { result::event::record(made.event, ptr::null_mut()) })?;
        Ok(made)
    }

    /// Returns the seconds from an earlier event to this one, after waiting for this one.
    ///
    /// # Errors
    /// Any error on the device since the last synchronization.
    pub fn seconds_since(&self, earlier: &Self) -> Result<f64> {
        self.gpu.make_current()?;
        let (elapsed, mut milliseconds) = (elapsed()?, 0.0);
        // SAFETY: both events were recorded; the pointer is to a live number.
        unsafe {
            in_action("wait for an event", result::event::synchronize(self.event))?;
            checked(
                "measure the time between two events",
                elapsed(&mut milliseconds, earlier.event, self.event),
            )?;
        }
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.gpu.make_current().is_ok() {
            // SAFETY: the event was created by `now` and is destroyed once.
            let _ = unsafe { result::event::destroy(self.event) };
        }
    }
}

fn in_action<T>(action: &'static str, answer: std::result::Result<T, result::DriverError>) -> Result<T> {
    answer.map_err(|e| match checked(action, e.0) {
        Err(error) => error,
        Ok(()) => {
            Error::Driver { action, reason: "the driver reported an error with the code of success".into() }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Must hold with or without a driver or device.
    #[test]
    fn what_is_missing_is_an_error() {
        match Gpu::first() {
            Ok(_) => assert!(Memory::filled(16, 1).is_ok()),
            Err(e) => {
                assert_eq!(Memory::filled(16, 1).unwrap_err(), e);
                assert_eq!(Event::now().unwrap_err(), e);
            }
        }
    }
}
