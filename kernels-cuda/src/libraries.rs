//! Finds CUDA's libraries before anything calls them.
//!
//! cudarc loads the driver when one of its functions is first called, and panics if the driver or the function is
//! missing. Nothing in this crate may therefore call the driver before [`require_standalone`] or [`require_launch`] has
//! succeeded. cudarc's own check is not available if another crate, such as candle, makes cudarc link the driver. The
//! functions of the run-time compiler are looked up here, because [`NVRTC`] may name its library.

use std::ffi::{OsStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::driver;
use libloading::Library;

use crate::{Error, Result};

/// The environment variable that names the library of the run-time compiler, or its directory. If it is not set, the
/// loader searches its default path.
pub const NVRTC: &str = "QUANT_NVRTC";

/// Functions that [`device_count`] calls, including its error paths.
const DRIVER_FUNCTIONS: [&str; 4] = ["cuInit", "cuDeviceGetCount", "cuGetErrorName", "cuGetErrorString"];
/// Further functions for loading and launching kernels.
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
/// Further functions for programs without a framework, which create the context themselves. See also [`elapsed`].
const STANDALONE_FUNCTIONS: [&str; 16] = [
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDriverGetVersion",
    "cuDevicePrimaryCtxRetain",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuMemGetInfo_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemsetD8_v2",
    "cuMemcpyHtoD_v2",
    "cuMemcpyDtoH_v2",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuEventDestroy_v2",
];
/// The functions that return the time between two events, the newest first. Drivers before CUDA 12.8 have only the
/// older one.
const ELAPSED_FUNCTIONS: [&str; 2] = ["cuEventElapsedTime_v2", "cuEventElapsedTime"];
/// In the order in which cudarc tries them.
const DRIVER_NAMES: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so", "libcuda.so.1"] };
/// In the order in which they are tried.
const NVRTC_NAMES: &[&str] = if cfg!(windows) {
    &["nvrtc64_130_0.dll", "nvrtc64_120_0.dll"]
} else {
    &["libnvrtc.so.13", "libnvrtc.so", "libnvrtc.so.12"]
};

/// Whether the CUDA driver's library can be loaded. This does not imply that there is a GPU: see [`device_count`].
pub fn driver_available() -> bool {
    require_driver().is_ok()
}

/// Whether NVRTC, which compiles kernels at run time, can be loaded.
pub fn nvrtc_available() -> bool {
    require_nvrtc().is_ok()
}

/// Checks that kernels can be compiled at run time.
///
/// # Errors
/// When the library, or a function of it, is missing.
pub fn require_nvrtc() -> Result<()> {
    nvrtc().map(|_| ())
}

/// The number of GPUs that the driver makes visible; may be 0.
///
/// # Errors
/// When there is no driver, or it cannot be initialized.
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

/// Checks that there is a GPU.
///
/// # Errors
/// When there is no driver or device, or the driver cannot be initialized.
pub fn require_device() -> Result<()> {
    match device_count()? {
        0 => Err(Error::NoDevice),
        _ => Ok(()),
    }
}

fn require_driver() -> Result<()> {
    static FOUND: OnceLock<Result<()>> = OnceLock::new();
    FOUND.get_or_init(|| has_driver_functions(&DRIVER_FUNCTIONS)).clone()
}

/// The driver's library, loaded on first use and never unloaded.
fn driver_library() -> Result<&'static Library> {
    static FOUND: OnceLock<Option<Library>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        // SAFETY: loading a library runs its initializers, which for the driver's library is safe. Users who set the
        // loader's search path ensure that it leads to the driver.
        DRIVER_NAMES.iter().find_map(|name| unsafe { Library::new(*name) }.ok())
    });
    found.as_ref().ok_or(Error::DriverMissing)
}

pub(crate) fn require_launch() -> Result<()> {
    static FOUND: OnceLock<Result<()>> = OnceLock::new();
    FOUND.get_or_init(|| require_driver().and_then(|()| has_driver_functions(&LAUNCH_FUNCTIONS))).clone()
}

pub(crate) fn require_standalone() -> Result<()> {
    static FOUND: OnceLock<Result<()>> = OnceLock::new();
    let look = || {
        require_device()?;
        require_launch()?;
        has_driver_functions(&STANDALONE_FUNCTIONS)?;
        elapsed().map(|_| ())
    };
    FOUND.get_or_init(look).clone()
}

/// Writes the milliseconds between two events.
pub(crate) type Elapsed =
    unsafe extern "C" fn(*mut f32, driver::sys::CUevent, driver::sys::CUevent) -> driver::sys::CUresult;

pub(crate) fn elapsed() -> Result<Elapsed> {
    let library = driver_library()?;
    // SAFETY: a function of either name has this signature; the library is never unloaded.
    let find = |name: &&str| unsafe { library.get::<Elapsed>(name.as_bytes()) }.ok().map(|found| *found);
    let missing =
        Error::FunctionMissing { library: "the CUDA driver library", function: ELAPSED_FUNCTIONS[1] };
    ELAPSED_FUNCTIONS.iter().find_map(find).ok_or(missing)
}

fn has_driver_functions(functions: &[&'static str]) -> Result<()> {
    let library = driver_library()?;
    for function in functions {
        // SAFETY: the symbol is looked up as a plain address, which is never called or dereferenced.
        if unsafe { library.get::<*const c_void>(function.as_bytes()) }.is_err() {
            return Err(Error::FunctionMissing { library: "the CUDA driver library", function });
        }
    }
    Ok(())
}

type Program = *mut c_void;
type Text = *const c_char;

/// Functions that return result codes, of which 0 is success.
pub(crate) struct Nvrtc {
    pub version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int,
    pub create: unsafe extern "C" fn(*mut Program, Text, Text, c_int, *const Text, *const Text) -> c_int,
    pub compile: unsafe extern "C" fn(Program, c_int, *const Text) -> c_int,
    pub log_size: SizeOf,
    pub log: BytesOf,
    pub ptx_size: SizeOf,
    pub ptx: BytesOf,
    pub cubin_size: SizeOf,
    pub cubin: BytesOf,
    pub destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    pub describe: unsafe extern "C" fn(c_int) -> Text,
}

pub(crate) type SizeOf = unsafe extern "C" fn(Program, *mut usize) -> c_int;
pub(crate) type BytesOf = unsafe extern "C" fn(Program, *mut c_char) -> c_int;

/// The run-time compiler, loaded on first use and never unloaded.
pub(crate) fn nvrtc() -> Result<&'static Nvrtc> {
    static FOUND: OnceLock<Result<Nvrtc>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        // An empty variable counts as unset.
        let named = std::env::var_os(NVRTC).filter(|path| !path.is_empty());
        Nvrtc::of(Box::leak(Box::new(nvrtc_library(named.as_deref())?)))
    });
    found.as_ref().map_err(Clone::clone)
}

fn nvrtc_library(named: Option<&OsStr>) -> Result<Library> {
    let Some(named) = named else {
        // SAFETY: loading NVRTC runs its initializers, which have no preconditions. Users who set the loader's search
        // path ensure that it leads to NVRTC.
        let found = NVRTC_NAMES.iter().find_map(|name| unsafe { Library::new(*name) }.ok());
        return found.ok_or(Error::NvrtcMissing);
    };
    let failed = |reason: String| Error::NvrtcNamed { path: named.to_string_lossy().into_owned(), reason };
    let path = Path::new(named);
    let (directory, library) = if path.is_dir() {
        let found = sibling(path, |name| {
            name.starts_with("libnvrtc.so") || name.starts_with("nvrtc64_") && name.ends_with("_0.dll")
        });
        (
            path,
            found.ok_or_else(|| {
                failed("the directory does not contain libnvrtc.so or nvrtc64_*.dll".into())
            })?,
        )
    } else {
        (path.parent().unwrap_or(path), path.to_owned())
    };
    // The compiler loads its builtins by file name. It finds them if they are loaded already.
    if let Some(builtins) = sibling(directory, |name| {
        name.starts_with("libnvrtc-builtins.so") || name.starts_with("nvrtc-builtins64_")
    }) {
        // SAFETY: the initializers of NVRTC's builtins have no preconditions. Users who set `QUANT_NVRTC` ensure that
        // it names NVRTC or its directory.
        std::mem::forget(unsafe { Library::new(builtins) }.map_err(|e| failed(with_causes(&e)))?);
    }
    // SAFETY: the initializers of NVRTC have no preconditions. Users who set `QUANT_NVRTC` ensure that it names NVRTC
    // or its directory.
    unsafe { Library::new(library) }.map_err(|e| failed(with_causes(&e)))
}

/// The sources contain the loader's own message.
fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |all, cause| format!("{all}: {cause}"))
}

/// Returns the last of the matching files by name, normally the newest version.
fn sibling(directory: &Path, such: impl Fn(&str) -> bool) -> Option<PathBuf> {
    let files = std::fs::read_dir(directory).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    files.filter(|path| path.file_name().and_then(OsStr::to_str).is_some_and(&such)).max()
}

impl Nvrtc {
    fn of(library: &'static Library) -> Result<Self> {
        /// # Safety
        /// The library's function of that name must have the type `F`.
        unsafe fn find<F: Copy>(library: &'static Library, function: &'static str) -> Result<F> {
            // SAFETY: by the contract of this function, it has the type `F`.
            unsafe { library.get::<F>(function.as_bytes()) }
                .map(|found| *found)
                .map_err(|_| Error::FunctionMissing { library: "the NVRTC library", function })
        }
        // SAFETY: the types of the fields are the declarations of nvrtc.h.
        unsafe {
            Ok(Self {
                version: find(library, "nvrtcVersion")?,
                create: find(library, "nvrtcCreateProgram")?,
                compile: find(library, "nvrtcCompileProgram")?,
                log_size: find(library, "nvrtcGetProgramLogSize")?,
                log: find(library, "nvrtcGetProgramLog")?,
                ptx_size: find(library, "nvrtcGetPTXSize")?,
                ptx: find(library, "nvrtcGetPTX")?,
                cubin_size: find(library, "nvrtcGetCUBINSize")?,
                cubin: find(library, "nvrtcGetCUBIN")?,
                destroy: find(library, "nvrtcDestroyProgram")?,
                describe: find(library, "nvrtcGetErrorString")?,
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With a GPU, with a driver only, or with neither.
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
    fn messages_name_what_to_install() {
        assert!(Error::DriverMissing.to_string().starts_with("CUDA driver library not found"));
        assert!(Error::NvrtcMissing.to_string().contains("install the CUDA toolkit"));
    }

    #[test]
    fn a_compiler_that_is_named_wrongly_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let of = |path: &Path| match nvrtc_library(Some(path.as_os_str())) {
            Err(Error::NvrtcNamed { path: named, reason }) => {
                assert_eq!(Path::new(&named), path);
                reason
            }
            other => panic!("{:?}", other.map(|_| "loaded")),
        };
        assert!(of(directory.path()).contains("does not contain libnvrtc.so"));
        assert!(of(&directory.path().join("libnvrtc.so.13")).contains("libnvrtc.so.13"));
        std::fs::write(directory.path().join("libnvrtc.so.12"), "no library").unwrap();
        assert!(of(directory.path()).contains("libnvrtc.so.12"));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_library_without_the_functions_is_an_error() {
        let library = nvrtc_library(Some(OsStr::new("libc.so.6"))).unwrap();
        let missing = Nvrtc::of(Box::leak(Box::new(library))).err();
        let expected = Error::FunctionMissing { library: "the NVRTC library", function: "nvrtcVersion" };
        assert_eq!(missing, Some(expected));
    }
}
