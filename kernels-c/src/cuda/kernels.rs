//! Checks for the driver and compiler, loaded kernels, and what all plans have in common.

use core::ffi::{CStr, c_char, c_void};
use std::path::PathBuf;
use std::sync::Arc;

use quant_kernels_cuda::compile::Variant;
use quant_kernels_cuda::device::{DeviceLimits, Kernel, Kernels};
use quant_kernels_cuda::image_cache::{ImageCache, Nvrtc};
use quant_kernels_cuda::launch::{Argument, LaunchShape, Stream};

use super::activation::Activation;
use super::append::Append;
use super::attention::{Decode, Merge};
use super::linear::Linear;
use super::pack::Pack;
use crate::memory::{self, Fields, Scope, fields};
use crate::status::{Fault, call, qz1_message, qz1_status};

/// The properties of a device that plans depend on.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qz1_cuda_device {
    /// `sizeof(qz1_cuda_device)`
    pub struct_size: u32,
    /// Compute capability, major.
    pub capability_major: u32,
    /// Compute capability, minor.
    pub capability_minor: u32,
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// Maximum shared memory per block in bytes, with opt-in.
    pub shared_of_block: u32,
    /// Shared memory per multiprocessor in bytes.
    pub shared_of_multiprocessor: u32,
}

fields!(qz1_cuda_device, shared_of_multiprocessor);

/// Kernels, compiled and loaded when a plan first needs them. Any number of threads may use it at once.
pub struct qz1_cuda_kernels {
    pub(super) kernels: Kernels,
}

/// A launch of any family, complete except for addresses, and its kernels. Immutable: any number of threads may use it
/// at once, and it may be launched repeatedly. It belongs to the context in which it was made.
pub struct qz1_cuda_plan {
    family: Family,
    /// In launch order.
    loaded: [Option<(Arc<Kernel>, LaunchShape)>; MAX_KERNELS],
}

/// Maximum number of kernels per plan, reached when packing weights.
const MAX_KERNELS: usize = 3;

/// A family of launches: everything that distinguishes its plan and launch functions from those of other families.
pub(super) trait Launch: Sized {
    /// The structure that describes what is planned.
    type Shape: Fields;
    /// The structure of a launch's device addresses and numbers.
    type Arguments: Fields;

    /// Checks a shape and plans the launch. Returns the kernels in launch order.
    ///
    /// # Safety
    /// As [`Scope::read`], for the memory that the shape points to.
    unsafe fn plan(scope: &Scope, shape: Self::Shape) -> Result<(Self, Vec<(Variant, LaunchShape)>), Fault>;

    /// Checks the arguments and launches the kernels of `plan`, which was made for `self`.
    ///
    /// # Safety
    /// As [`Kernel::launch`].
    unsafe fn launch(
        &self,
        plan: &qz1_cuda_plan,
        at: Self::Arguments,
        stream: *mut c_void,
    ) -> Result<(), Fault>;

    /// Returns the bytes of the workspace and of the tickets.
    fn workspace(&self) -> (usize, usize) {
        (0, 0)
    }

    /// Returns the plan of this family; `None` if `family` is a different one.
    fn of(family: &Family) -> Option<&Self>;
}

macro_rules! families {
    ($($name:ident),*) => {
        /// The plan of any family, and the shape that arguments are checked against.
        pub(super) enum Family {
            $($name($name)),*
        }

        impl Family {
            fn workspace(&self) -> (usize, usize) {
                match self {
                    $(Self::$name(family) => family.workspace()),*
                }
            }
        }

        $(
            impl From<$name> for Family {
                fn from(family: $name) -> Self {
                    Self::$name(family)
                }
            }
        )*
    };
}

families!(Pack, Linear, Activation, Append, Decode, Merge);

/// Implements [`Launch::of`] for a family whose variant of [`Family`] has the same name.
macro_rules! is_family {
    ($name:ident) => {
        fn of(family: &$crate::cuda::kernels::Family) -> Option<&Self> {
            match family {
                $crate::cuda::kernels::Family::$name(family) => Some(family),
                _ => None,
            }
        }
    };
}
pub(super) use is_family;

/// Implements `qz1_cuda_…_plan`: makes a plan; writes null on an error.
///
/// # Safety
/// As for `qz1_cuda_require_device`.
pub(super) unsafe fn plan<F: Launch + Into<Family>>(
    kernels: *const qz1_cuda_kernels,
    shape: *const F::Shape,
    out: *mut *mut qz1_cuda_plan,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the pointer contract.
    call(message, |scope| unsafe {
        let out = scope.value(out, "the plan")?;
        let made = (|| {
            let kernels = scope.look(kernels, "the kernels")?;
            let (family, wanted) = F::plan(scope, scope.read(shape, "the shape")?)?;
            let mut loaded = [const { None }; MAX_KERNELS];
            for (to, (variant, launch)) in loaded.iter_mut().zip(wanted) {
                let kernel = kernels.kernels.kernel(&variant, launch.shared_bytes)?;
                *to = Some((kernel, launch));
            }
            memory::boxed(qz1_cuda_plan { family: family.into(), loaded })
        })();
        match made {
            Ok(made) => out.put(made),
            // Memory that overlaps is not written.
            Err(fault) if fault.status() == qz1_status::Overlap => return Err(fault),
            Err(fault) => {
                out.put(core::ptr::null_mut());
                return Err(fault);
            }
        }
        Ok(())
    })
}

/// Implements `qz1_cuda_…_launch`.
///
/// # Safety
/// As for `qz1_cuda_pack_launch`.
pub(super) unsafe fn launch<F: Launch>(
    plan: *const qz1_cuda_plan,
    arguments: *const F::Arguments,
    stream: *mut c_void,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the pointer contract.
    call(message, |scope| unsafe {
        let plan = scope.look(plan, "the plan")?;
        let at = scope.read(arguments, "the arguments")?;
        let another = || Fault::new(qz1_status::Mismatch, "the plan is for a different kernel family");
        F::of(&plan.family).ok_or_else(another)?.launch(plan, at, stream)
    })
}

impl qz1_cuda_plan {
    /// Launches the only kernel of a plan.
    ///
    /// # Safety
    /// As [`Kernel::launch`].
    pub(super) unsafe fn launch(&self, arguments: &[Argument], stream: *mut c_void) -> Result<(), Fault> {
        // SAFETY: the pointer contract.
        unsafe { self.launch_each(stream, |_| arguments) }
    }

    /// Launches all kernels of a plan.
    ///
    /// # Safety
    /// As [`Kernel::launch`].
    pub(super) unsafe fn launch_each<'a>(
        &self,
        stream: *mut c_void,
        arguments: impl Fn(usize) -> &'a [Argument],
    ) -> Result<(), Fault> {
        for (i, (kernel, shape)) in self.loaded.iter().flatten().enumerate() {
            // SAFETY: the pointer contract.
            unsafe { kernel.launch(shape, arguments(i), Stream(stream)) }?;
        }
        Ok(())
    }
}

/// 0 if there is a driver with a device, else `QZ1_STATUS_CUDA_MISSING`, or `QZ1_STATUS_CUDA_FAILED` if the driver
/// cannot be initialized. The message says what to install. Needs no context.
///
/// # Safety
/// Pointers are null or valid for what their structures and lengths say, here and below.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_require_device(message: *const qz1_message) -> qz1_status {
    call(message, |_| Ok(quant_kernels_cuda::require_device()?))
}

/// 0 if NVRTC, which compiles kernels, can be loaded: from the loader's path, or from the path in the environment
/// variable `QUANT_NVRTC`. Else `QZ1_STATUS_CUDA_MISSING`: then only kernels whose images are in the cache directory
/// can be planned.
///
/// # Safety
/// As for `qz1_cuda_require_device`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_require_compiler(message: *const qz1_message) -> qz1_status {
    call(message, |_| Ok(quant_kernels_cuda::require_nvrtc()?))
}

/// The device whose context is current on the calling thread. Fills `out`, whose `struct_size` the caller has set.
///
/// # Safety
/// As for `qz1_cuda_require_device`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_current_device(
    out: *mut qz1_cuda_device,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the pointer contract.
    call(message, |scope| unsafe {
        let out = scope.place(out, "the device")?;
        let limits = DeviceLimits::current()?;
        out.put(qz1_cuda_device {
            struct_size: size_of::<qz1_cuda_device>() as u32,
            capability_major: limits.capability[0],
            capability_minor: limits.capability[1],
            multiprocessors: limits.multiprocessors,
            shared_of_block: limits.shared_of_block,
            shared_of_multiprocessor: limits.shared_of_multiprocessor,
        });
        Ok(())
    })
}

/// A handle for kernels, initially without any; needs no driver. `images` is the directory where compiled kernels are
/// cached, ending with a zero byte, in UTF-8 on systems where paths are not bytes. An empty string means no directory;
/// null means the one in the environment variable `QUANT_CUDA_CACHE`, or else `quant/cuda` in the user's cache
/// directory. The driver runs the files in it, so the directory must belong to the user who runs the program. Freed by
/// `qz1_cuda_kernels_free`. On an error `out` is set to null.
///
/// # Safety
/// As for `qz1_cuda_require_device`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_kernels_new(
    images: *const c_char,
    out: *mut *mut qz1_cuda_kernels,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the pointer contract.
    call(message, |scope| unsafe {
        let out = scope.value(out, "the handle")?;
        let images = match images.is_null() {
            true => None,
            false => {
                let text = CStr::from_ptr(images).to_bytes();
                scope.slice(images.cast::<u8>(), text.len() + 1, "the image directory")?;
                Some(text)
            }
        };
        out.put(core::ptr::null_mut());
        let images = match images {
            None => ImageCache::new(),
            Some([]) => ImageCache::in_directory(None, Nvrtc),
            Some(path) => ImageCache::in_directory(Some(directory(path)?), Nvrtc),
        };
        out.put(memory::boxed(qz1_cuda_kernels { kernels: Kernels::new(images) })?);
        Ok(())
    })
}

#[cfg(unix)]
fn directory(path: &[u8]) -> Result<PathBuf, Fault> {
    use std::os::unix::ffi::OsStrExt;
    Ok(std::ffi::OsStr::from_bytes(path).into())
}

#[cfg(not(unix))]
fn directory(path: &[u8]) -> Result<PathBuf, Fault> {
    let text = core::str::from_utf8(path);
    text.map(PathBuf::from)
        .map_err(|_| Fault::new(qz1_status::Scheme, "the image directory is not valid UTF-8"))
}

/// Frees a handle; null is allowed. Plans remain valid. A kernel is unloaded when the handle and all plans that use it
/// are freed, so all its launches must have finished before the last of these is freed.
///
/// # Safety
/// The handle comes from `qz1_cuda_kernels_new` and is freed once, and the contexts in which it was used still exist.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_kernels_free(kernels: *mut qz1_cuda_kernels) {
    // SAFETY: the pointer contract.
    unsafe { memory::free(kernels) }
}

/// Bytes of device memory that a launch needs as its workspace and for its tickets, each at a multiple of 256; both may
/// be 0. A workspace may hold any bytes. Tickets must be 0 before a launch, which resets them to 0. Launches of any
/// plans that run one after another may share both, if these are large enough for each; launches that may run
/// concurrently need their own.
///
/// # Safety
/// As for `qz1_cuda_require_device`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_plan_workspace(
    plan: *const qz1_cuda_plan,
    bytes: *mut usize,
    tickets: *mut usize,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the pointer contract.
    call(message, |scope| unsafe {
        let plan = scope.look(plan, "the plan")?;
        let (bytes, tickets) =
            (scope.value(bytes, "the workspace size")?, scope.value(tickets, "the ticket size")?);
        let workspace = plan.family.workspace();
        bytes.put(workspace.0);
        tickets.put(workspace.1);
        Ok(())
    })
}

/// Frees a plan; null is allowed. Launches that are still running are unaffected while the handle of the kernels
/// exists.
///
/// # Safety
/// The plan comes from a `qz1_cuda_…_plan` and is freed once, and the context in which it was made still exists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_plan_free(plan: *mut qz1_cuda_plan) {
    // SAFETY: the pointer contract.
    unsafe { memory::free(plan) }
}
