//! The first GPU, for tests and measurements: its context, memory, and time.

use std::ffi::c_void;
use std::sync::OnceLock;

use cudarc::driver::result;
use cudarc::driver::sys;
use quant_kernels_cuda::device::DeviceLimits;

/// A device whose primary context is kept for as long as the program runs.
pub struct Gpu {
    context: sys::CUcontext,
    /// The driver's name of it.
    pub name: String,
    /// What plans depend on.
    pub limits: DeviceLimits,
}

// SAFETY: a context is a name that the driver gives; it may be used from any thread.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

impl Gpu {
    /// The first device, its context current on this thread.
    ///
    /// # Panics
    /// When there is none.
    pub fn get() -> &'static Self {
        static GPU: OnceLock<Gpu> = OnceLock::new();
        let gpu = GPU.get_or_init(|| {
            quant_kernels_cuda::require_device().unwrap_or_else(|e| panic!("a GPU was asked for: {e}"));
            let device = result::device::get(0).unwrap();
            // SAFETY: the context is never released.
            let context = unsafe { result::primary_ctx::retain(device) }.unwrap();
            // SAFETY: it was just retained.
            unsafe { result::ctx::set_current(context) }.unwrap();
            Self {
                context,
                name: result::device::get_name(device).unwrap(),
                limits: DeviceLimits::current().unwrap(),
            }
        });
        // SAFETY: the context is never released.
        unsafe { result::ctx::set_current(gpu.context) }.unwrap();
        gpu
    }

    /// Waits for all that was launched.
    ///
    /// # Errors
    /// What went wrong on the device since.
    pub fn wait(&self) -> Result<(), String> {
        result::ctx::synchronize().map_err(|e| e.to_string())
    }
}

/// Bytes on the device, freed when dropped.
pub struct Bytes {
    /// Where they begin: a multiple of 256.
    pub address: u64,
    /// How many there are.
    pub len: usize,
}

impl Bytes {
    /// Bytes that all are `fill`.
    pub fn filled(len: usize, fill: u8) -> Self {
        Gpu::get();
        // SAFETY: a context is current. What is allocated is filled at once.
        let address = unsafe {
            let address = result::malloc_sync(len.max(1)).unwrap();
            result::memset_d8_sync(address, fill, len.max(1)).unwrap();
            address
        };
        Self { address, len }
    }

    /// These bytes.
    pub fn of(bytes: &[u8]) -> Self {
        let own = Self::filled(bytes.len(), 0);
        own.write(0, bytes);
        own
    }

    /// Writes from `at` on.
    pub fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at.checked_add(bytes.len()).is_some_and(|end| end <= self.len));
        Gpu::get();
        // SAFETY: the bytes lie within what was allocated, as was just seen.
        unsafe { result::memcpy_htod_sync(self.address + at as u64, bytes) }.unwrap();
    }

    /// Reads `len` bytes from `at` on.
    pub fn read(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len));
        Gpu::get();
        let mut bytes = vec![0; len];
        // SAFETY: as above.
        unsafe { result::memcpy_dtoh_sync(&mut bytes, self.address + at as u64) }.unwrap();
        bytes
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        Gpu::get();
        // SAFETY: it was allocated here and is freed once. After a fault on the device nothing can be freed.
        let _ = unsafe { result::free_sync(self.address) };
    }
}

/// A point in the default stream.
#[allow(dead_code)] // Tests measure nothing.
pub struct Event(sys::CUevent);

#[allow(dead_code)]
impl Event {
    pub fn new() -> Self {
        Gpu::get();
        Self(result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).unwrap())
    }

    /// Marks where the stream is now.
    pub fn record(&self) {
        // SAFETY: the event and the default stream belong to the current context.
        unsafe { result::event::record(self.0, std::ptr::null_mut::<c_void>().cast()) }.unwrap();
    }

    /// Seconds from an earlier point to this one; waits for it.
    pub fn seconds_since(&self, earlier: &Self) -> f64 {
        // SAFETY: both were recorded.
        unsafe {
            result::event::synchronize(self.0).unwrap();
            f64::from(result::event::elapsed(earlier.0, self.0).unwrap()) / 1e3
        }
    }
}

#[allow(dead_code)]
impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: it was created here and is destroyed once.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}
