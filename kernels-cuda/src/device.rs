//! Loads images as kernels on the device of the caller's context.
//!
//! This module uses the context that is current on the calling thread, which belongs to the caller. [`Kernels`]
//! compiles and loads a variant when it is first needed; [`Kernel::launch`] launches it.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_int};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;

use crate::compile::{Form, GpuArchitecture, Image, Variant};
use crate::image_cache::{Compiler, ImageCache, Nvrtc};
use crate::libraries::require_launch;
use crate::{Error, Result};

/// The properties of the current context's device that determine plans and images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceLimits {
    /// Compute capability, major and minor.
    pub capability: [u32; 2],
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// Maximum shared memory per block in bytes, with opt-in.
    pub shared_of_block: u32,
    /// Shared memory per multiprocessor in bytes.
    pub shared_of_multiprocessor: u32,
}

impl DeviceLimits {
    /// Returns the properties of the device whose context is current on this thread.
    ///
    /// # Errors
    /// When there is no driver, or no context is current.
    pub fn current() -> Result<Self> {
        use sys::CUdevice_attribute as A;
        current_context()?;
        let mut device = 0;
        // SAFETY: the driver is present, checked above; the pointer is to a device number.
        checked("get the device of the context", unsafe { sys::cuCtxGetDevice(&mut device) })?;
        let attribute = |which| -> Result<u32> {
            let mut value: c_int = 0;
            // SAFETY: the driver is present, checked above; the pointer is to a live number.
            checked("get the properties of the device", unsafe {
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

    /// Returns the architecture and the form to compile for this device: machine code if possible, else PTX.
    ///
    /// # Errors
    /// When the device is older than every supported architecture.
    pub fn target(&self) -> Result<(GpuArchitecture, Form)> {
        let [major, minor] = self.capability;
        let architecture =
            GpuArchitecture::of_device(major, minor).ok_or(Error::DeviceTooOld { major, minor })?;
        Ok((architecture, if architecture.runs_on(major, minor) { Form::Cubin } else { Form::Ptx }))
    }
}

/// A kernel that is loaded into a context.
#[derive(Debug)]
pub struct Kernel {
    context: sys::CUcontext,
    module: sys::CUmodule,
    pub(crate) function: sys::CUfunction,
    /// Maximum dynamic shared memory per block in bytes.
    pub(crate) shared_bytes: u32,
}

// SAFETY: the fields are driver handles, which may be used from any thread.
unsafe impl Send for Kernel {}
// SAFETY: the fields are driver handles, which may be used from any thread; nothing is modified through a shared
// reference.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// Loads a kernel of an image into the current context, and allows its blocks this much dynamic shared memory.
    ///
    /// # Errors
    /// When there is no context, the driver rejects the image, the image lacks the kernel, or there is too little
    /// shared memory.
    ///
    /// # Safety
    /// The image must be trusted, such as one that [`compile`](crate::compile) has generated. The context must outlive
    /// the kernel.
    pub unsafe fn load(image: &Image, name: &str, shared_bytes: u32) -> Result<Self> {
        let context = current_context()?;
        let name = CString::new(name).map_err(|_| Error::Driver {
            action: "find a kernel",
            reason: "its name contains a NUL byte".into(),
        })?;
        // PTX must end with a zero byte. It does no harm after machine code.
        let mut text = image.bytes.clone();
        text.push(0);
        let mut module = ptr::null_mut();
        // SAFETY: by the contract of this function this is a complete image; a zero byte follows it.
        checked("load a kernel", unsafe { sys::cuModuleLoadData(&mut module, text.as_ptr().cast()) })?;
        // From here on, dropping the kernel unloads the module.
        let mut kernel = Self { context, module, function: ptr::null_mut(), shared_bytes };
        // SAFETY: the module is loaded; the name ends with a zero byte.
        let found = unsafe { sys::cuModuleGetFunction(&mut kernel.function, module, name.as_ptr()) };
        checked("find a kernel", found)?;
        let bytes = c_int::try_from(shared_bytes).map_err(|_| Error::Driver {
            action: "reserve shared memory",
            reason: "the size exceeds 2 GiB".into(),
        })?;
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function belongs to the module.
        let allowed = unsafe { sys::cuFuncSetAttribute(kernel.function, attribute, bytes) };
        checked("reserve shared memory", allowed)?;
        Ok(kernel)
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        let mut before = ptr::null_mut();
        // SAFETY: the context is alive, by the contract of `load`, and the previous context is made current again.
        unsafe {
            if sys::cuCtxPushCurrent_v2(self.context) == sys::CUresult::CUDA_SUCCESS {
                // An error cannot be handled in `drop`.
                let _ = sys::cuModuleUnload(self.module);
                let _ = sys::cuCtxPopCurrent_v2(&mut before);
            }
        }
    }
}

/// A context, a variant, and the bytes of shared memory.
type Key = (usize, Variant, u32);

/// The kernels of variants, compiled and loaded when they are first needed.
#[derive(Debug)]
pub struct Kernels<C = Nvrtc> {
    images: ImageCache<C>,
    loaded: Mutex<HashMap<Key, Arc<Kernel>>>,
}

impl Default for Kernels {
    /// Creates an empty map; images come from the run-time compiler, and are cached in the default directory.
    fn default() -> Self {
        Self::new(ImageCache::new())
    }
}

impl<C: Compiler> Kernels<C> {
    /// Creates an empty map that takes images from the given cache.
    pub fn new(images: ImageCache<C>) -> Self {
        Self { images, loaded: Mutex::default() }
    }

    /// Returns the kernel of a variant in the current context. The first call compiles and loads it and may synchronize
    /// with the device, so make it before time-critical code.
    ///
    /// # Errors
    /// When the driver is missing, no context is current, the device is too old, or compiling or loading fails.
    ///
    /// # Safety
    /// The context must outlive `self` and the returned kernel, and images in the cache's directory must be trusted.
    pub unsafe fn kernel(&self, variant: &Variant, shared_bytes: u32) -> Result<Arc<Kernel>> {
        let key = (current_context()? as usize, variant.clone(), shared_bytes);
        // A poisoned lock is harmless: only complete kernels are inserted.
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = loaded.get(&key) {
            return Ok(Arc::clone(kernel));
        }
        let (architecture, form) = DeviceLimits::current()?.target()?;
        let image = self.images.image(variant, architecture, form)?;
        // SAFETY: by the contract of this function, the images are trusted and the context outlives the kernel.
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
    // SAFETY: the driver is present, checked above; the pointer is to a handle.
    checked("get the current context", unsafe { sys::cuCtxGetCurrent(&mut context) })?;
    if context.is_null() { Err(Error::NoContext) } else { Ok(context) }
}

pub(crate) fn checked(action: &'static str, result: sys::CUresult) -> Result<()> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = ptr::null();
    // SAFETY: a result code exists only if the driver does; the pointer is to a pointer, which is set to a static
    // string or null.
    let status = unsafe { sys::cuGetErrorString(result, &mut text) };
    let reason = match status == sys::CUresult::CUDA_SUCCESS && !text.is_null() {
        // SAFETY: a static string that ends with a zero byte.
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
        assert_eq!(target([8, 0]), Ok((GpuArchitecture::Sm80, Form::Cubin)));
        assert_eq!(target([8, 7]), Ok((GpuArchitecture::Sm86, Form::Cubin)));
        assert_eq!(target([9, 0]), Ok((GpuArchitecture::Sm90, Form::Cubin)));
        assert_eq!(target([10, 0]), Ok((GpuArchitecture::Sm90, Form::Ptx)));
        assert_eq!(target([12, 1]), Ok((GpuArchitecture::Sm120, Form::Cubin)));
        assert_eq!(target([7, 5]), Err(Error::DeviceTooOld { major: 7, minor: 5 }));
    }

    /// With a driver, there is no context here.
    #[test]
    fn what_is_missing_is_an_error() {
        let expected = |e: &Error| match crate::driver_available() {
            true => matches!(e, Error::NoContext | Error::Driver { .. } | Error::FunctionMissing { .. }),
            false => matches!(e, Error::DriverMissing | Error::FunctionMissing { .. }),
        };
        let limits = DeviceLimits::current().unwrap_err();
        assert!(expected(&limits), "{limits}");
        let image = Image { bytes: b"no image".to_vec(), log: String::new() };
        // SAFETY: there is no context, so nothing is loaded into it.
        let loaded = unsafe { Kernel::load(&image, "k", 0) }.unwrap_err();
        assert!(expected(&loaded), "{loaded}");
        let variant = crate::registry::entries().swap_remove(0).variant;
        let kernels = Kernels::new(ImageCache::in_directory(None, Nvrtc));
        // SAFETY: there is no context, so nothing is loaded into it.
        let kernel = unsafe { kernels.kernel(&variant, 0) }.unwrap_err();
        assert!(expected(&kernel), "{kernel}");
    }
}
