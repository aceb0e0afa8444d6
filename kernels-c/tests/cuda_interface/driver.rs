//! The driver functions that every caller needs, as `cuda.h` declares them. They are looked up here, so that these
//! tests share no code with the library's own access to the driver.

use core::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use quant_kernels::qz1_cuda_region;

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

const RTLD_NOW: c_int = 2;

/// A function of the driver.
///
/// # Safety
/// `F` is the type of a pointer to this function.
unsafe fn function<F: Copy>(name: &CStr) -> F {
    static LIBRARY: OnceLock<usize> = OnceLock::new();
    let library = *LIBRARY.get_or_init(|| {
        // SAFETY: the name ends with a zero byte, and loading the driver has no preconditions.
        let open = |name: &CStr| unsafe { dlopen(name.as_ptr(), RTLD_NOW) } as usize;
        match open(c"libcuda.so") {
            0 => open(c"libcuda.so.1"),
            found => found,
        }
    });
    assert_ne!(library, 0, "a GPU was requested, but there is no driver");
    // SAFETY: the library is open.
    let found = unsafe { dlsym(library as *mut c_void, name.as_ptr()) };
    assert!(!found.is_null(), "the driver has no {name:?}");
    assert_eq!(size_of::<F>(), size_of::<*mut c_void>());
    // SAFETY: by the contract of this function, `F` is the type of a pointer to it.
    unsafe { core::mem::transmute_copy(&found) }
}

/// Makes the context of the first device current on this thread. It is never released.
pub fn context() {
    // SAFETY: functions have the signatures that `cuda.h` declares.
    unsafe {
        let init: extern "C" fn(u32) -> c_int = function(c"cuInit");
        let get: extern "C" fn(*mut c_int, c_int) -> c_int = function(c"cuDeviceGet");
        let retain: extern "C" fn(*mut usize, c_int) -> c_int = function(c"cuDevicePrimaryCtxRetain");
        let (mut device, mut context) = (0, 0_usize);
        assert_eq!((init(0), get(&mut device, 0), retain(&mut context, device)), (0, 0, 0));
        set_context(context);
    }
}

pub fn no_context() {
    set_context(0);
}

fn set_context(context: usize) {
    // SAFETY: the driver's function of this name has this signature.
    let set: extern "C" fn(usize) -> c_int = unsafe { function(c"cuCtxSetCurrent") };
    assert_eq!(set(context), 0);
}

pub fn wait() {
    // SAFETY: the driver's function of this name has this signature.
    let wait: extern "C" fn() -> c_int = unsafe { function(c"cuCtxSynchronize") };
    assert_eq!(wait(), 0, "a launch failed");
}

/// Memory on the device, at a multiple of 256, freed when dropped.
pub struct Bytes {
    address: u64,
    len: usize,
}

impl Bytes {
    /// Allocates the given bytes, all set to `fill`.
    pub fn filled(len: usize, fill: u8) -> Self {
        Self::of(&vec![fill; len])
    }

    pub fn of<T: Copy>(values: &[T]) -> Self {
        let len = size_of_val(values);
        let mut address = 0;
        // SAFETY: the driver's function of this name has this signature; both memories have this many bytes.
        unsafe {
            let allocate: extern "C" fn(*mut u64, usize) -> c_int = function(c"cuMemAlloc_v2");
            let copy: extern "C" fn(u64, *const c_void, usize) -> c_int = function(c"cuMemcpyHtoD_v2");
            assert_eq!(allocate(&mut address, len.max(1)), 0);
            assert_eq!(copy(address, values.as_ptr().cast(), len), 0);
        }
        assert!(address.is_multiple_of(256));
        Self { address, len }
    }

    pub fn region(&self) -> qz1_cuda_region {
        qz1_cuda_region { address: self.address, bytes: self.len as u64 }
    }

    /// Copies the numbers back to the host, after all launched work.
    pub fn read<T: Copy + Default>(&self) -> Vec<T> {
        wait();
        let mut values = vec![T::default(); self.len / size_of::<T>()];
        // SAFETY: the driver's function of this name has this signature; any bits are valid numbers.
        unsafe {
            let copy: extern "C" fn(*mut c_void, u64, usize) -> c_int = function(c"cuMemcpyDtoH_v2");
            assert_eq!(copy(values.as_mut_ptr().cast(), self.address, size_of_val(&values[..])), 0);
        }
        values
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        // SAFETY: the driver's function of this name has this signature; the memory is freed once.
        let free: extern "C" fn(u64) -> c_int = unsafe { function(c"cuMemFree_v2") };
        // Ignore errors: after a fault on the device, freeing fails.
        let _ = free(self.address);
    }
}
