//! A device for programs that have no framework: a context, memory and times, which elsewhere the caller brings.
//!
//! Kernels need none of this: they take addresses and streams from whoever made them. `quant` itself, the tests and what
//! measures kernels are such programs. All of it waits for the device.

mod linear;

use std::ptr;
use std::sync::OnceLock;

use cudarc::driver::{result, sys};

use crate::device::{DeviceLimits, checked};
use crate::error::{Error, Result};
use crate::launch::Region;
use crate::libraries::{elapsed, require_standalone};

pub use linear::{Activations, Linear, Runner};

/// The first device that the driver shows, with its primary context, kept for as long as the program runs.
#[derive(Debug)]
pub struct Gpu {
    context: sys::CUcontext,
    /// The driver's name of it.
    pub name: String,
    /// What plans depend on.
    pub limits: DeviceLimits,
}

// SAFETY: a context is a name that the driver gives; it may be used from any thread.
unsafe impl Send for Gpu {}
// SAFETY: a context may be used from any thread; nothing is changed through a shared reference.
unsafe impl Sync for Gpu {}

impl Gpu {
    /// The device, its context current on this thread. The first call looks for it.
    ///
    /// # Errors
    /// When there is no driver or device, or the context cannot be had.
    pub fn first() -> Result<&'static Self> {
        static GPU: OnceLock<Result<Gpu>> = OnceLock::new();
        let gpu = GPU.get_or_init(Self::find).as_ref().map_err(Clone::clone)?;
        gpu.make_current()?;
        Ok(gpu)
    }

    fn find() -> Result<Self> {
        require_standalone()?;
        let device = in_action("find the first device", result::device::get(0))?;
        // SAFETY: the context is never released, so it outlives whatever is made in it.
        let context = in_action("take the device's context", unsafe { result::primary_ctx::retain(device) })?;
        // SAFETY: it was just retained.
        in_action("make a context current", unsafe { result::ctx::set_current(context) })?;
        let name = in_action("name the device", result::device::get_name(device))?;
        Ok(Self { context, name, limits: DeviceLimits::current()? })
    }

    /// The newest CUDA that the driver takes: 13000 for 13.0.
    ///
    /// # Errors
    /// When the driver does not say.
    pub fn driver_version(&self) -> Result<u32> {
        let mut version = 0;
        // SAFETY: the driver was seen to be there; a number is written.
        checked("ask for the driver's version", unsafe { sys::cuDriverGetVersion(&mut version) })?;
        Ok(u32::try_from(version).unwrap_or(0))
    }

    /// Bytes of the device's L2 cache.
    ///
    /// # Errors
    /// When the driver does not say.
    pub fn cache_bytes(&self) -> Result<usize> {
        let device = in_action("find the first device", result::device::get(0))?;
        let which = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE;
        // SAFETY: the device is one.
        let bytes =
            in_action("ask what the device has", unsafe { result::device::get_attribute(device, which) })?;
        Ok(usize::try_from(bytes).unwrap_or(0))
    }

    /// How much of its memory there is.
    ///
    /// # Errors
    /// When the driver does not say.
    pub fn memory(&self) -> Result<DeviceMemory> {
        self.make_current()?;
        let (free, total) = in_action("ask for free memory", result::mem_get_info())?;
        Ok(DeviceMemory { free, total })
    }

    /// Makes its context this thread's current one.
    ///
    /// # Errors
    /// When the driver refuses, as after a fault on the device.
    pub fn make_current(&self) -> Result<()> {
        // SAFETY: the context is never released.
        in_action("make a context current", unsafe { result::ctx::set_current(self.context) })
    }

    /// Waits for all that was launched.
    ///
    /// # Errors
    /// What went wrong on the device since.
    pub fn wait(&self) -> Result<()> {
        self.make_current()?;
        in_action("wait for the device", result::ctx::synchronize())
    }
}

/// Bytes that a device has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Those that nobody has taken.
    pub free: usize,
    /// All.
    pub total: usize,
}

/// Bytes on the first device, freed when dropped.
#[derive(Debug)]
pub struct Memory {
    gpu: &'static Gpu,
    address: u64,
    len: usize,
}

impl Memory {
    /// So many bytes that all are `fill`; 0 take no memory of others.
    ///
    /// # Errors
    /// When there is no device, or not as much memory.
    pub fn filled(len: usize, fill: u8) -> Result<Self> {
        let gpu = Gpu::first()?;
        // SAFETY: a context is current.
        let address = in_action("allocate memory", unsafe { result::malloc_sync(len.max(1)) })?;
        let memory = Self { gpu, address, len };
        // SAFETY: as many bytes were just allocated.
        in_action("fill memory", unsafe { result::memset_d8_sync(address, fill, len.max(1)) })?;
        Ok(memory)
    }

    /// These bytes.
    ///
    /// # Errors
    /// As [`filled`](Self::filled).
    pub fn of(bytes: &[u8]) -> Result<Self> {
        let memory = Self::filled(bytes.len(), 0)?;
        memory.write(0, bytes)?;
        Ok(memory)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where they lie: from a multiple of 256 on.
    pub fn region(&self) -> Region {
        Region { address: self.address, bytes: self.len as u64 }
    }

    /// Writes from byte `at` on, after what was launched before.
    ///
    /// # Errors
    /// When that is beyond the end, or something went wrong on the device.
    pub fn write(&self, at: usize, bytes: &[u8]) -> Result<()> {
        let to = self.within("write", at, bytes.len())?;
        self.gpu.make_current()?;
        // SAFETY: the bytes lie within what was allocated, as was just seen.
        in_action("write memory", unsafe { result::memcpy_htod_sync(to, bytes) })
    }

    /// Reads from byte `at` on, after what was launched before.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn read(&self, at: usize, bytes: &mut [u8]) -> Result<()> {
        let from = self.within("read", at, bytes.len())?;
        self.gpu.make_current()?;
        // SAFETY: the bytes lie within what was allocated, as was just seen.
        in_action("read memory", unsafe { result::memcpy_dtoh_sync(bytes, from) })
    }

    fn within(&self, action: &'static str, at: usize, len: usize) -> Result<u64> {
        match at.checked_add(len) {
            Some(end) if end <= self.len => Ok(self.address + at as u64),
            _ => Err(Error::Driver { action, reason: format!("{len} bytes at {at} of {}", self.len) }),
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // After a fault on the device nothing can be freed, and there is nothing to do about that.
        if self.gpu.make_current().is_ok() {
            // SAFETY: it was allocated here and is freed once.
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
    /// Where the stream is now.
    ///
    /// # Errors
    /// When there is no device, or something went wrong on it.
    pub fn now() -> Result<Self> {
        let gpu = Gpu::first()?;
        let event = in_action("make an event", result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT))?;
        let made = Self { gpu, event };
        // SAFETY: the event and the default stream belong to the current context.
        in_action("record an event", unsafe { result::event::record(made.event, ptr::null_mut()) })?;
        Ok(made)
    }

    /// Seconds from an earlier point to this one; waits for it.
    ///
    /// # Errors
    /// What went wrong on the device since.
    pub fn seconds_since(&self, earlier: &Self) -> Result<f64> {
        self.gpu.make_current()?;
        let (elapsed, mut milliseconds) = (elapsed()?, 0.0);
        // SAFETY: both were recorded; a number is written.
        unsafe {
            in_action("wait for an event", result::event::synchronize(self.event))?;
            checked("read a time", elapsed(&mut milliseconds, earlier.event, self.event))?;
        }
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.gpu.make_current().is_ok() {
            // SAFETY: it was created here and is destroyed once.
            let _ = unsafe { result::event::destroy(self.event) };
        }
    }
}

/// The driver's answer as ours.
fn in_action<T>(action: &'static str, answer: std::result::Result<T, result::DriverError>) -> Result<T> {
    answer.map_err(|e| match checked(action, e.0) {
        Err(error) => error,
        Ok(()) => Error::Driver { action, reason: "the driver says neither yes nor no".into() },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On every machine: without a driver or a device, nothing panics.
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
