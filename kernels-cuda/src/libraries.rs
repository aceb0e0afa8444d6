//! Finds CUDA's libraries before anything calls them.
//!
//! cudarc loads a library when one of its functions is first called and panics if it, or the
//! function, is not there. So presence is asked for first, here, and nothing else in this crate
//! calls into CUDA before [`require_device`] or [`require_nvrtc`] agreed.

use std::ffi::c_void;
use std::sync::OnceLock;

use cudarc::{driver, nvrtc};

use crate::{Error, Result};

/// What [`device_count`] calls, the error paths included.
const DRIVER_FUNCTIONS: [&str; 4] = ["cuInit", "cuDeviceGetCount", "cuGetErrorName", "cuGetErrorString"];
/// What loading and launching kernels takes beside.
const LAUNCH_FUNCTIONS: [&str; 10] = [
    "cuCtxGetCurrent",
    "cuCtxGetDevice",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuDeviceGetAttribute",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuModuleUnload",
    "cuFuncSetAttribute",
    "cuLaunchKernel",
];
/// What compiling a program takes at least.
const NVRTC_FUNCTIONS: [&str; 10] = [
    "nvrtcVersion",
    "nvrtcCreateProgram",
    "nvrtcCompileProgram",
    "nvrtcGetProgramLogSize",
    "nvrtcGetProgramLog",
    "nvrtcGetPTXSize",
    "nvrtcGetPTX",
    "nvrtcGetCUBINSize",
    "nvrtcGetCUBIN",
    "nvrtcDestroyProgram",
];

/// Whether the CUDA driver's library can be loaded. Says nothing of a GPU: see [`device_count`].
pub fn driver_available() -> bool {
    require_driver().is_ok()
}

/// Whether NVRTC, which compiles kernels at run time, can be loaded.
pub fn nvrtc_available() -> bool {
    require_nvrtc().is_ok()
}

/// The number of GPUs that the driver shows; may be 0.
///
/// # Errors
/// When there is no driver, or it cannot start.
pub fn device_count() -> Result<usize> {
    require_driver()?;
    let failed = |e: driver::result::DriverError| match e.0 {
        driver::sys::CUresult::CUDA_ERROR_NO_DEVICE => Error::NoDevice,
        _ => Error::Driver { action: "count the devices", reason: e.to_string() },
    };
    match driver::CudaContext::device_count().map_err(failed) {
        Ok(count) => Ok(usize::try_from(count).unwrap_or(0)),
        Err(Error::NoDevice) => Ok(0),
        Err(e) => Err(e),
    }
}

/// Fails unless there is a GPU to use.
///
/// # Errors
/// What is missing: driver, or device.
pub fn require_device() -> Result<()> {
    match device_count()? {
        0 => Err(Error::NoDevice),
        _ => Ok(()),
    }
}

fn require_driver() -> Result<()> {
    static FOUND: OnceLock<Result<()>> = OnceLock::new();
    FOUND
        .get_or_init(|| {
            // SAFETY: loading a library runs its initializers. The driver's are made for that; that
            // the loader's search path leads to the driver and nothing else is for whoever set it.
            if !unsafe { driver::sys::is_culib_present() } {
                return Err(Error::DriverMissing);
            }
            has_driver_functions(&DRIVER_FUNCTIONS)
        })
        .clone()
}

/// Fails unless kernels can be loaded and launched, as far as the driver's library goes.
pub(crate) fn require_launch() -> Result<()> {
    static FOUND: OnceLock<Result<()>> = OnceLock::new();
    FOUND.get_or_init(|| require_driver().and_then(|()| has_driver_functions(&LAUNCH_FUNCTIONS))).clone()
}

/// Looks functions up. The driver's library must have been seen to load.
fn has_driver_functions(functions: &[&'static str]) -> Result<()> {
    for function in functions {
        // SAFETY: the library was seen to load. The symbol is looked up as a plain address and never called or read through.
        if unsafe { driver::sys::culib().get::<*const c_void>(function.as_bytes()) }.is_err() {
            return Err(Error::FunctionMissing { library: "the CUDA driver library", function });
        }
    }
    Ok(())
}

/// Fails unless kernels can be compiled at run time.
///
/// # Errors
/// What is missing: the library, or a function of it.
pub fn require_nvrtc() -> Result<()> {
    static FOUND: OnceLock<Result<()>> = OnceLock::new();
    FOUND
        .get_or_init(|| {
            // SAFETY: as in `require_driver`.
            if !unsafe { nvrtc::sys::is_culib_present() } {
                return Err(Error::NvrtcMissing);
            }
            for function in NVRTC_FUNCTIONS {
                // SAFETY: as in `require_driver`.
                if unsafe { nvrtc::sys::culib().get::<*const c_void>(function.as_bytes()) }.is_err() {
                    return Err(Error::FunctionMissing { library: "the NVRTC library", function });
                }
            }
            Ok(())
        })
        .clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// True on every machine: with a GPU, with a driver alone, and with neither.
    #[test]
    fn asking_never_panics_and_answers_agree() {
        for _ in 0..2 {
            let count = device_count();
            match (driver_available(), &count) {
                (true, Ok(_) | Err(Error::Driver { .. })) => {}
                (false, Err(Error::DriverMissing | Error::FunctionMissing { .. })) => {}
                (available, count) => panic!("driver {available}, but {count:?}"),
            }
            match count {
                Ok(0) => assert_eq!(require_device(), Err(Error::NoDevice)),
                Ok(_) => assert_eq!(require_device(), Ok(())),
                Err(e) => assert_eq!(require_device(), Err(e)),
            }
            assert_eq!(nvrtc_available(), require_nvrtc().is_ok());
        }
    }

    #[test]
    fn messages_say_what_to_install() {
        assert!(Error::DriverMissing.to_string().starts_with("CUDA driver library not found"));
        assert!(Error::NvrtcMissing.to_string().contains("install the CUDA toolkit"));
    }
}
