//! The functions of the driver, as `cuda.h` declares them.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::slice;

use crate::device::{Code, Device, MAX_SHARED, MEMORY, device};

const CONTEXT: usize = 0x10;
/// The driver's version: CUDA 13.0, whose compiler the tests use.
const VERSION: c_int = 13_000;
/// The size of the L2 cache in bytes. A small one keeps measurements on memory outside the cache short.
const CACHE: usize = 16 << 10;

thread_local! {
    /// The context stack of a thread, with the current one last; null means no context.
    static CONTEXTS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

fn current() -> usize {
    CONTEXTS.with_borrow(|contexts| contexts.last().copied().unwrap_or(0))
}

/// Runs a call that needs no context.
fn initialised(call: impl FnOnce(&mut Device) -> Result<(), Code>) -> Code {
    let mut device = device();
    if !device.initialised {
        return Code::NOT_INITIALIZED;
    }
    call(&mut device).err().unwrap_or(Code::SUCCESS)
}

/// Runs a call that needs a context, and a device on which no launch has failed.
fn in_context(call: impl FnOnce(&mut Device) -> Result<(), Code>) -> Code {
    initialised(|device| match (current(), device.broken) {
        (0, _) => Err(Code::INVALID_CONTEXT),
        (_, Some(code)) => Err(code),
        _ => call(device),
    })
}

/// Writes a result.
///
/// # Safety
/// The pointer must be null or valid for writing a value.
unsafe fn give<T>(to: *mut T, value: T) -> Result<(), Code> {
    if to.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: the pointer is not null (checked above), so the caller guarantees that it is valid for writing a `T`.
    unsafe { to.write(value) };
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: c_uint) -> Code {
    if flags != 0 {
        return Code::INVALID_VALUE;
    }
    device().initialised = true;
    Code::SUCCESS
}

/// # Safety
/// See the driver's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> Code {
    // SAFETY: the caller guarantees that the pointers are valid, by the contract of the driver's function.
    initialised(|_| unsafe { give(count, 1) })
}

/// # Safety
/// See the driver's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> Code {
    initialised(|_| match ordinal {
        // SAFETY: the caller guarantees that the pointers are valid, by the contract of the driver's function.
        0 => unsafe { give(device, 0) },
        _ => Err(Code::INVALID_DEVICE),
    })
}

/// # Safety
/// See the driver's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) -> Code {
    initialised(|_| {
        let (text, len) = (c"PTX interpreter", usize::try_from(len).unwrap_or(0));
        let bytes = text.to_bytes_with_nul();
        if device != 0 || name.is_null() || len < bytes.len() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the caller guarantees that the pointer is valid for `len` bytes, which are enough, as checked above.
        unsafe { name.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    })
}

/// # Safety
/// See the driver's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> Code {
    // SAFETY: the caller guarantees that the pointer is valid, by the contract of the driver's function. This function
    // may be called before `cuInit`.
    unsafe { give(version, VERSION) }.err().unwrap_or(Code::SUCCESS)
}

/// # Safety
/// See the driver's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: c_int) -> Code {
    initialised(|_| {
        // The numbers of the attributes: multiprocessors, L2 cache size, compute capability, shared memory per
        // multiprocessor and per block.
        let found = match attribute {
            16 => 2,
            38 => CACHE as c_int,
            75 => 10,
            76 => 0,
            81 => MAX_SHARED as c_int + 1024,
            97 => MAX_SHARED as c_int,
            _ => return Err(Code::INVALID_VALUE),
        };
        // SAFETY: the caller guarantees that the pointers are valid, by the contract of the driver's function.
        if device == 0 { unsafe { give(value, found) } } else { Err(Code::INVALID_DEVICE) }
    })
}

/// # Safety
/// See the driver's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) -> Code {
    // SAFETY: the caller guarantees that the pointers are valid, by the contract of the driver's function.
    initialised(|_| if device == 0 { unsafe { give(context, CONTEXT) } } else { Err(Code::INVALID_DEVICE) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: usize) -> Code {
    initialised(|_| {
        if context != 0 && context != CONTEXT {
            return Err(Code::INVALID_CONTEXT);
        }
        CONTEXTS.with_borrow_mut(|contexts| {
            contexts.pop();
            contexts.push(context);
        });
        Ok(())
    })
}

/// # Safety
/// See the driver's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut usize) -> Code {
    // SAFETY: the caller guarantees that the pointers are valid, by the contract of the driver's function.
    initialised(|_| unsafe { give(context, current()) })
}

/// # Safety
/// See the driver's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetDevice(device: *mut c_int) -> Code {
    // SAFETY: the caller guarantees that the pointers are valid, by the contract of the driver's function.
    in_context(|_| unsafe { give(device, 0) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent_v2(context: usize) -> Code {
    initialised(|_| {
        if context != CONTEXT {
            return Err(Code::INVALID_CONTEXT);
        }
        CONTEXTS.with_borrow_mut(|contexts| contexts.push(context));
        Ok(())
    })
}

/// # Safety
/// See the driver's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut usize) -> Code {
    initialised(|_| match CONTEXTS.with_borrow_mut(Vec::pop) {
        // SAFETY: the caller guarantees that the pointers are valid, by the contract of the driver's function. A
        // pointer may also be null, which is checked first.
        Some(top) => unsafe { if context.is_null() { Ok(()) } else { give(context, top) } },
        None => Err(Code::INVALID_CONTEXT),
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> Code {
    in_context(|_| Ok(()))
}

/// # Safety
/// See the driver's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Code {
    // SAFETY: the caller guarantees that the pointers are valid, by the contract of the driver's function.
    in_context(|device| unsafe {
        give(free, MEMORY.saturating_sub(device.allocated()))?;
        give(total, MEMORY)
    })
}

/// # Safety
/// See the driver's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> Code {
    // SAFETY: the caller guarantees that the pointers are valid, by the contract of the driver's function.
    in_context(|device| unsafe { give(address, device.allocate(bytes)?) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(address: u64) -> Code {
    in_context(|device| device.free(address))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8_v2(address: u64, value: u8, bytes: usize) -> Code {
    in_context(|device| device.bytes(address, bytes).map(|to| to.fill(value)))
}

/// # Safety
/// See the driver's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) -> Code {
    in_context(|device| {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller guarantees that the pointer is valid for `bytes` bytes, by the contract of the driver's
        // function.
        let from = unsafe { slice::from_raw_parts(from.cast::<u8>(), bytes) };
        device.bytes(to, bytes).map(|to| to.copy_from_slice(from))
    })
}

/// # Safety
/// See the driver's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) -> Code {
    in_context(|device| {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller guarantees that the pointer is valid for writing `bytes` bytes, by the contract of the
        // driver's function.
        let to = unsafe { slice::from_raw_parts_mut(to.cast::<u8>(), bytes) };
        device.bytes(from, bytes).map(|from| to.copy_from_slice(from))
    })
}

/// # Safety
/// See the driver's documentation; the image must be PTX terminated by a zero, since no other form is supported.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(module: *mut usize, image: *const c_char) -> Code {
    in_context(|device| {
        if image.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the caller guarantees a terminating zero. Machine code, which is rejected, contains zero bytes near
        // its beginning.
        let text = unsafe { CStr::from_ptr(image) }.to_str().map_err(|_| Code::INVALID_IMAGE)?;
        let loaded = device.load(text)?;
        // SAFETY: the caller guarantees that the pointers are valid, by the contract of the driver's function.
        unsafe { give(module, loaded) }
    })
}

/// # Safety
/// See the driver's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(
    function: *mut usize,
    module: usize,
    name: *const c_char,
) -> Code {
    in_context(|device| {
        if name.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the caller guarantees a string with a terminating zero, by the contract of the driver's function.
        let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| Code::NOT_FOUND)?;
        let found = device.function(module, name)?;
        // SAFETY: the caller guarantees that the pointers are valid, by the contract of the driver's function.
        unsafe { give(function, found) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleUnload(module: usize) -> Code {
    in_context(|device| device.unload(module))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncSetAttribute(function: usize, attribute: c_uint, value: c_int) -> Code {
    in_context(|device| match (attribute, u32::try_from(value)) {
        // The maximum size of dynamic shared memory.
        (8, Ok(bytes)) => device.allow_shared(function, bytes),
        _ => Err(Code::INVALID_VALUE),
    })
}

/// # Safety
/// See the driver's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernel(
    function: usize,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared: c_uint,
    _stream: usize,
    parameters: *const *const c_void,
    extra: *const *const c_void,
) -> Code {
    in_context(|device| {
        if !extra.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let mut arguments = Vec::new();
        for (i, parameter) in device.parameters(function)?.into_iter().enumerate() {
            // SAFETY: by the contract of the driver's function, the caller guarantees that there is a pointer to a
            // value for each parameter.
            arguments.push(unsafe { parameter.read(*parameters.add(i)) });
        }
        device.launch(function, [[grid_x, grid_y, grid_z], [block_x, block_y, block_z]], shared, arguments)
    })
}

/// # Safety
/// See the driver's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(event: *mut usize, _flags: c_uint) -> Code {
    // SAFETY: the caller guarantees that the pointers are valid, by the contract of the driver's function.
    in_context(|_| unsafe { give(event, 0x30) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(_event: usize, _stream: usize) -> Code {
    in_context(|_| Ok(()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(_event: usize) -> Code {
    in_context(|_| Ok(()))
}

/// Returns one second between any two events: time is not modeled.
///
/// # Safety
/// See the driver's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime(milliseconds: *mut f32, _from: usize, _to: usize) -> Code {
    // SAFETY: the caller guarantees that the pointers are valid, by the contract of the driver's function.
    in_context(|_| unsafe { give(milliseconds, 1000.0) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(_event: usize) -> Code {
    in_context(|_| Ok(()))
}

fn words(code: Code) -> &'static CStr {
    match code {
        Code::SUCCESS => c"no error",
        Code::INVALID_VALUE => c"invalid value",
        Code::OUT_OF_MEMORY => c"out of memory",
        Code::NOT_INITIALIZED => c"not initialised",
        Code::INVALID_DEVICE => c"invalid device",
        Code::INVALID_IMAGE => c"invalid image",
        Code::INVALID_CONTEXT => c"invalid context",
        Code::INVALID_HANDLE => c"invalid handle",
        Code::NOT_FOUND => c"not found",
        Code::LAUNCH_FAILED => c"a launch failed",
        _ => c"unknown error",
    }
}

/// # Safety
/// See the driver's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(code: Code, text: *mut *const c_char) -> Code {
    // SAFETY: the caller guarantees that the pointers are valid, by the contract of the driver's function.
    unsafe { give(text, words(code).as_ptr()) }.err().unwrap_or(Code::SUCCESS)
}

/// # Safety
/// See the driver's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(code: Code, text: *mut *const c_char) -> Code {
    // SAFETY: the caller guarantees that the pointers are valid, by the contract of the driver's function.
    unsafe { give(text, words(code).as_ptr()) }.err().unwrap_or(Code::SUCCESS)
}
