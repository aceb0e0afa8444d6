//! From an image to a kernel on the device of the caller's context.
//!
//! A context belongs to the caller: the one that is current on the calling thread is used, and none is made.
//! [`Kernels`] compiles and loads a variant when it is first asked for; a launch then is [`Kernel::launch`].

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_int};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;

use crate::compile::{Architecture, Form, Image, Variant};
use crate::image_cache::{Compiler, ImageCache, Nvrtc};
use crate::libraries::require_launch;
use crate::{Error, Result};

/// What plans and images depend on, of the device of the current context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Compute capability, major and minor.
    pub capability: [u32; 2],
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of shared memory that one block may have, if it asks for them.
    pub shared_of_block: u32,
    /// Bytes of shared memory that a multiprocessor has.
    pub shared_of_multiprocessor: u32,
}

impl DeviceLimits {
    /// Those of the device whose context is current on this thread.
    ///
    /// # Errors
    /// When there is no driver, or no context is current.
    pub fn current() -> Result<Self> {
        use sys::CUdevice_attribute as A;
        current_context()?;
        let mut device = 0;
        // SAFETY: the driver was seen to be there; a device's number is written.
        checked("find the context's device", unsafe { sys::cuCtxGetDevice(&mut device) })?;
        let attribute = |which| -> Result<u32> {
            let mut value: c_int = 0;
            // SAFETY: the driver was seen to be there; a number is written.
            checked("ask what the device has", unsafe {
                sys::cuDeviceGetAttribute(&mut value, which, device)
            })?;
            Ok(u32::try_from(value).unwrap_or(0))
        };
        Ok(Self {
            capability: [
                attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ],
            multiprocessors: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_of_block: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            shared_of_multiprocessor: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?,
        })
    }

    /// What is compiled for such a device: machine code where one of our architectures' runs on it, else PTX of the newest
    /// that it takes.
    ///
    /// # Errors
    /// When it is older than all of them.
    pub fn target(&self) -> Result<(Architecture, Form)> {
        let [major, minor] = self.capability;
        let architecture =
            Architecture::of_device(major, minor).ok_or(Error::DeviceTooOld { major, minor })?;
        Ok((architecture, if architecture.runs_on(major, minor) { Form::Cubin } else { Form::Ptx }))
    }
}

/// A kernel that is loaded into a context.
#[derive(Debug)]
pub struct Kernel {
    context: sys::CUcontext,
    module: sys::CUmodule,
    pub(crate) function: sys::CUfunction,
    /// Bytes of dynamic shared memory that a block may have.
    pub(crate) shared_bytes: u32,
}

// SAFETY: handles of the driver, which may be used from any thread.
unsafe impl Send for Kernel {}
// SAFETY: handles of the driver, which may be used from any thread; nothing is changed through a shared reference.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// Loads a kernel of an image into the current context, and lets its blocks have so many bytes of dynamic shared memory.
    ///
    /// # Errors
    /// When there is no context, the driver refuses the image, the image lacks the kernel, or a block cannot have as much.
    ///
    /// # Safety
    /// The image must be one that the driver may run: from [`compile`](crate::compile) or as trusted. The context must
    /// outlive the kernel.
    pub unsafe fn load(image: &Image, name: &str, shared_bytes: u32) -> Result<Self> {
        let context = current_context()?;
        let name = CString::new(name)
            .map_err(|_| Error::Driver { action: "find a kernel", reason: "its name is invalid".into() })?;
        // PTX must be closed by a zero, machine code knows its length.
        let mut text = image.bytes.clone();
        text.push(0);
        let mut module = ptr::null_mut();
        // SAFETY: a whole image, by the caller's promise, with a zero behind it.
        checked("load a kernel", unsafe { sys::cuModuleLoadData(&mut module, text.as_ptr().cast()) })?;
        // From here on the module is unloaded whatever happens.
        let mut kernel = Self { context, module, function: ptr::null_mut(), shared_bytes };
        // SAFETY: the module is loaded; the name is closed by a zero.
        let found = unsafe { sys::cuModuleGetFunction(&mut kernel.function, module, name.as_ptr()) };
        checked("find a kernel", found)?;
        let bytes = c_int::try_from(shared_bytes).map_err(|_| Error::Driver {
            action: "ask for shared memory",
            reason: "it is too much".into(),
        })?;
        let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function belongs to the module.
        let allowed = unsafe { sys::cuFuncSetAttribute(kernel.function, most, bytes) };
        checked("ask for shared memory", allowed)?;
        Ok(kernel)
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        let mut before = ptr::null_mut();
        // SAFETY: the context lives, as promised when the kernel was loaded; whatever was current is so again.
        unsafe {
            if sys::cuCtxPushCurrent_v2(self.context) == sys::CUresult::CUDA_SUCCESS {
                // There is nothing to do about a failure.
                let _ = sys::cuModuleUnload(self.module);
                let _ = sys::cuCtxPopCurrent_v2(&mut before);
            }
        }
    }
}

/// A context's address, a variant, and bytes of shared memory.
type Key = (usize, Variant, u32);

/// Kernels by variant, compiled and loaded when they are first asked for.
#[derive(Debug)]
pub struct Kernels<C = Nvrtc> {
    images: ImageCache<C>,
    loaded: Mutex<HashMap<Key, Arc<Kernel>>>,
}

impl Default for Kernels {
    /// With images of the run-time compiler's, kept where they are by default.
    fn default() -> Self {
        Self::new(ImageCache::new())
    }
}

impl<C: Compiler> Kernels<C> {
    /// With images from there.
    pub fn new(images: ImageCache<C>) -> Self {
        Self { images, loaded: Mutex::default() }
    }

    /// The kernel of a variant in the current context. The first time it is compiled and loaded, which takes a tenth of a
    /// second and may wait for the device: ask before what must not wait.
    ///
    /// # Errors
    /// When something is missing, or a step fails.
    ///
    /// # Safety
    /// The context must outlive this, and images in the cache's directory must be trusted.
    pub unsafe fn kernel(&self, variant: &Variant, shared_bytes: u32) -> Result<Arc<Kernel>> {
        let key = (current_context()? as usize, variant.clone(), shared_bytes);
        // Whoever panicked left whole kernels behind.
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = loaded.get(&key) {
            return Ok(Arc::clone(kernel));
        }
        let (architecture, form) = DeviceLimits::current()?.target()?;
        let image = self.images.image(variant, architecture, form)?;
        // SAFETY: the caller trusts the images, and keeps the context.
        let kernel = unsafe { Kernel::load(&image, variant.kernel, shared_bytes) };
        let kernel = Arc::new(kernel.map_err(|e| match e {
            Error::Driver { reason, .. } => {
                Error::Load { variant: variant.to_string(), architecture, reason }
            }
            other => other,
        })?);
        loaded.insert(key, Arc::clone(&kernel));
        Ok(kernel)
    }
}

/// The context that is current on this thread.
fn current_context() -> Result<sys::CUcontext> {
    require_launch()?;
    let mut context = ptr::null_mut();
    // SAFETY: the driver was seen to be there; a handle is written.
    checked("find the current context", unsafe { sys::cuCtxGetCurrent(&mut context) })?;
    if context.is_null() { Err(Error::NoContext) } else { Ok(context) }
}

/// The driver's answer as a result.
pub(crate) fn checked(action: &'static str, result: sys::CUresult) -> Result<()> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = ptr::null();
    // SAFETY: whoever has an answer of the driver has the driver; a pointer to a lasting text is written, or none.
    let said = unsafe { sys::cuGetErrorString(result, &mut text) };
    let reason = match said == sys::CUresult::CUDA_SUCCESS && !text.is_null() {
        // SAFETY: a text closed by a zero, which lasts.
        true => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        false => format!("{result:?}"),
    };
    Err(Error::Driver { action, reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_get_machine_code_or_text() {
        let target = |capability| {
            let (shared_of_block, shared_of_multiprocessor) = (101_376, 102_400);
            DeviceLimits { capability, multiprocessors: 1, shared_of_block, shared_of_multiprocessor }
                .target()
        };
        assert_eq!(target([8, 0]), Ok((Architecture::Sm80, Form::Cubin)));
        assert_eq!(target([8, 7]), Ok((Architecture::Sm86, Form::Cubin)));
        assert_eq!(target([9, 0]), Ok((Architecture::Sm90, Form::Cubin)));
        assert_eq!(target([10, 0]), Ok((Architecture::Sm90, Form::Ptx)));
        assert_eq!(target([12, 1]), Ok((Architecture::Sm120, Form::Cubin)));
        assert_eq!(target([7, 5]), Err(Error::DeviceTooOld { major: 7, minor: 5 }));
    }

    /// On every machine: without a driver, with one and no context, as here, nothing panics.
    #[test]
    fn what_is_missing_is_an_error() {
        let expected = |e: &Error| match crate::driver_available() {
            true => matches!(e, Error::NoContext | Error::Driver { .. } | Error::FunctionMissing { .. }),
            false => matches!(e, Error::DriverMissing | Error::FunctionMissing { .. }),
        };
        let limits = DeviceLimits::current().unwrap_err();
        assert!(expected(&limits), "{limits}");
        let image = Image { bytes: b"no image".to_vec(), log: String::new() };
        // SAFETY: there is no context, so nothing is loaded.
        let loaded = unsafe { Kernel::load(&image, "k", 0) }.unwrap_err();
        assert!(expected(&loaded), "{loaded}");
        let variant = crate::registry::entries().swap_remove(0).variant;
        let kernels = Kernels::new(ImageCache::in_directory(None, Nvrtc));
        // SAFETY: there is no context, so nothing is loaded.
        let kernel = unsafe { kernels.kernel(&variant, 0) }.unwrap_err();
        assert!(expected(&kernel), "{kernel}");
    }
}
