//! The few functions of CUDA's driver that kernels are loaded and launched by, in the caller's context.

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::ptr;

use cudarc::driver::result::DriverError;
use cudarc::driver::sys::{self, CUresult};

use crate::launch::LaunchShape;
use crate::libraries::require_driver;
use crate::{Error, Result};

/// What a device has, as far as plans and launches depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Properties {
    /// Compute capability: major and minor.
    pub capability: [u32; 2],
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of shared memory that one block may have, if its kernel asks for them.
    pub shared_of_block: u32,
    /// Bytes of shared memory that a multiprocessor has for all its blocks.
    pub shared_of_multiprocessor: u32,
}

/// A module or function, as the driver calls it.
pub(crate) type Handle = usize;

/// What [`crate::device`] asks of a driver; its tests are one themselves.
pub(crate) trait Driver: Send + Sync {
    fn properties(&self) -> Result<Properties>;

    /// Machine code, or PTX closed by a zero.
    fn load(&self, image: &[u8]) -> Result<Handle>;

    fn function(&self, module: Handle, name: &CStr) -> Result<Handle>;

    /// Allows a function so many bytes of dynamic shared memory.
    fn allow_shared(&self, function: Handle, bytes: u32) -> Result<()>;

    /// # Safety
    /// The parameters point to what the function takes, in its order, and what it reads and writes is there until the stream
    /// has run it. The stream is one of the context's, or null.
    unsafe fn launch(
        &self,
        function: Handle,
        shape: &LaunchShape,
        stream: *mut c_void,
        parameters: &mut [*mut c_void],
    ) -> Result<()>;

    fn unload(&self, module: Handle);
}

/// The installed driver, in one context.
pub(crate) struct Cuda {
    context: sys::CUcontext,
}

// SAFETY: a context is a name that the driver gives; it may be used from any thread.
unsafe impl Send for Cuda {}
// SAFETY: as above.
unsafe impl Sync for Cuda {}

impl Cuda {
    /// In the context that is current in this thread.
    pub fn of_this_thread() -> Result<Self> {
        require_driver()?;
        let mut context = ptr::null_mut();
        // SAFETY: the driver is there, and the pointer is to a place for a context.
        match unsafe { sys::cuCtxGetCurrent(&mut context) } {
            CUresult::CUDA_SUCCESS if !context.is_null() => Ok(Self { context }),
            CUresult::CUDA_SUCCESS | CUresult::CUDA_ERROR_NOT_INITIALIZED => Err(Error::NoContext),
            other => checked("find the current context", other).map(|()| Self { context }),
        }
    }

    /// Makes the context current, and what was current before current again when dropped.
    fn enter(&self) -> Result<Entered> {
        // SAFETY: whoever made this says that the context exists.
        checked("enter the context", unsafe { sys::cuCtxPushCurrent_v2(self.context) })?;
        Ok(Entered)
    }
}

struct Entered;

impl Drop for Entered {
    fn drop(&mut self) {
        let mut context = ptr::null_mut();
        // SAFETY: it takes away what was pushed.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut context) };
    }
}

impl Driver for Cuda {
    fn properties(&self) -> Result<Properties> {
        use sys::CUdevice_attribute as Attribute;
        let _entered = self.enter()?;
        let mut device = 0;
        // SAFETY: a context is current, and the pointer is to a place for a device.
        checked("find the context's device", unsafe { sys::cuCtxGetDevice(&mut device) })?;
        let ask = |attribute: Attribute| -> Result<u32> {
            let mut value: c_int = 0;
            // SAFETY: the pointer is to a place for a number.
            let result = unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) };
            checked("ask for the device's properties", result)?;
            Ok(u32::try_from(value).unwrap_or(0))
        };
        Ok(Properties {
            capability: [
                ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ],
            multiprocessors: ask(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_of_block: ask(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            shared_of_multiprocessor: ask(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
            )?,
        })
    }

    fn load(&self, image: &[u8]) -> Result<Handle> {
        let _entered = self.enter()?;
        let mut module = ptr::null_mut();
        // SAFETY: a context is current. Machine code says its own length, and the caller closed a text by a zero.
        let result = unsafe { sys::cuModuleLoadData(&mut module, image.as_ptr().cast()) };
        checked("load an image", result)?;
        Ok(module as Handle)
    }

    fn function(&self, module: Handle, name: &CStr) -> Result<Handle> {
        let _entered = self.enter()?;
        let mut function = ptr::null_mut();
        // SAFETY: the module is one that `load` gave, and the name is closed by a zero.
        let result =
            unsafe { sys::cuModuleGetFunction(&mut function, module as sys::CUmodule, name.as_ptr()) };
        checked("find a kernel in its image", result)?;
        Ok(function as Handle)
    }

    fn allow_shared(&self, function: Handle, bytes: u32) -> Result<()> {
        let _entered = self.enter()?;
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let bytes = c_int::try_from(bytes).unwrap_or(c_int::MAX);
        // SAFETY: the function is one that `function` gave.
        let result = unsafe { sys::cuFuncSetAttribute(function as sys::CUfunction, attribute, bytes) };
        checked("give a kernel its shared memory", result)
    }

    unsafe fn launch(
        &self,
        function: Handle,
        shape: &LaunchShape,
        stream: *mut c_void,
        parameters: &mut [*mut c_void],
    ) -> Result<()> {
        let _entered = self.enter()?;
        let [x, y, z]: [c_uint; 3] = shape.grid;
        // SAFETY: the function is one that `function` gave; the rest is for the caller.
        let result = unsafe {
            sys::cuLaunchKernel(
                function as sys::CUfunction,
                x,
                y,
                z,
                shape.block,
                1,
                1,
                shape.shared_bytes,
                stream.cast(),
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        checked("launch a kernel", result)
    }

    fn unload(&self, module: Handle) {
        // Where the context is gone the module is gone with it.
        if let Ok(_entered) = self.enter() {
            // SAFETY: the module is one that `load` gave, and this is the last that is asked of it.
            let _ = unsafe { sys::cuModuleUnload(module as sys::CUmodule) };
        }
    }
}

fn checked(action: &'static str, result: CUresult) -> Result<()> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        other => Err(Error::Driver { action, reason: DriverError(other).to_string() }),
    }
}
