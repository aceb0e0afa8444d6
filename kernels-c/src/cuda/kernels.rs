//! Checks for the driver and the compiler, handles of loaded kernels, and the parts that all plans share.

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
use super::experts::LayerExperts;
use super::linear::Linear;
use super::pack::Pack;
use crate::memory::{self, Fields, Scope, fields};
use crate::status::{Fault, call, qz1_message, qz1_status};

/// The properties of a device that determine plans.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qz1_cuda_device {
    /// `sizeof(qz1_cuda_device)`
    pub struct_size: u32,
    /// The major version of the compute capability.
    pub capability_major: u32,
    /// The minor version of the compute capability.
    pub capability_minor: u32,
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// Maximum shared memory per block in bytes, if the kernel opts in.
    pub shared_of_block: u32,
    /// Shared memory per multiprocessor in bytes.
    pub shared_of_multiprocessor: u32,
}

fields!(qz1_cuda_device, shared_of_multiprocessor);

/// A set of kernels. Each is compiled and loaded when a plan first needs it. Any number of threads may use the set at
/// once.
pub struct qz1_cuda_kernels {
    pub(super) kernels: Kernels,
}

/// A launch of any family, complete except for addresses, with its loaded kernels. It is immutable and may be launched
/// repeatedly, also from several threads at once. It belongs to the context in which it was created.
pub struct qz1_cuda_plan {
    family: Family,
    /// The kernels in launch order.
    loaded: [Option<(Arc<Kernel>, LaunchShape)>; MAX_KERNELS],
}

/// Maximum number of kernels per plan.
pub(super) const MAX_KERNELS: usize = 6;

/// A family of launches: everything in which its plan and launch functions differ from those of other families.
pub(super) trait Launch: Sized {
    /// The structure that describes what to plan.
    type Shape: Fields;
    /// The structure with the device addresses and numbers of a launch.
    type Arguments: Fields;

    /// Checks a shape and plans the launch. Returns the kernels in launch order.
    ///
    /// # Safety
    /// Same as for [`Scope::read`], for the memory that the shape points to.
    unsafe fn plan(scope: &Scope, shape: Self::Shape) -> Result<(Self, Vec<(Variant, LaunchShape)>), Fault>;

    /// Checks the arguments, and calls `launch` once with the arguments of each kernel, in launch order. They are lent
    /// to `launch` so that a launch does not allocate.
    fn launch(&self, at: &Self::Arguments, launch: &mut Launcher<'_>) -> Result<(), Fault>;

    /// Returns the sizes of the workspace and of the tickets in bytes.
    fn workspace(&self) -> (usize, usize) {
        (0, 0)
    }

    fn of(family: &Family) -> Option<&Self>;
}

pub(super) type Launcher<'a> = dyn FnMut(&[&[Argument]]) -> Result<(), Fault> + 'a;

macro_rules! families {
    ($($name:ident),*) => {
        /// A plan of any family, and the shape against which arguments are checked.
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

families!(Pack, Linear, LayerExperts, Activation, Append, Decode, Merge);

/// Implements [`Launch::of`] for a family.
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

/// Implements `qz1_cuda_…_plan`.
///
/// # Safety
/// Same as for `qz1_cuda_require_device`.
pub(super) unsafe fn plan<F: Launch + Into<Family>>(
    kernels: *const qz1_cuda_kernels,
    shape: *const F::Shape,
    out: *mut *mut qz1_cuda_plan,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract. Kernels are loaded from a trusted directory
    // (`qz1_cuda_kernels_new`), and their context outlives them (`qz1_cuda_plan_free`, `qz1_cuda_kernels_free`).
    call(message, |scope| unsafe {
        let out = scope.value(out, "the plan")?;
        let made = (|| {
            let kernels = scope.shared(kernels, "the kernels")?;
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
            // If `out` overlaps other memory of the call, it must not be written, not even with null.
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
/// Same as for `qz1_cuda_pack_launch`.
pub(super) unsafe fn launch<F: Launch>(
    plan: *const qz1_cuda_plan,
    arguments: *const F::Arguments,
    stream: *mut c_void,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract and the contract of `qz1_cuda_pack_launch`; the arguments are
    // those of the plan's own kernels.
    call(message, |scope| unsafe {
        let plan = scope.shared(plan, "the plan")?;
        let at = scope.read(arguments, "the arguments")?;
        let another = || Fault::new(qz1_status::Mismatch, "the plan is for a different kernel family");
        let family = F::of(&plan.family).ok_or_else(another)?;
        family.launch(&at, &mut |arguments| plan.launch(arguments, stream))
    })
}

impl qz1_cuda_plan {
    /// Launches the kernels of a plan.
    ///
    /// # Safety
    /// Same as for [`Kernel::launch`].
    unsafe fn launch(&self, arguments: &[&[Argument]], stream: *mut c_void) -> Result<(), Fault> {
        for ((kernel, shape), arguments) in self.loaded.iter().flatten().zip(arguments) {
            // SAFETY: the caller upholds the contract of `Kernel::launch`.
            unsafe { kernel.launch(shape, arguments, Stream(stream)) }?;
        }
        Ok(())
    }
}

/// Returns 0 if there is a driver with a device, `QZ1_STATUS_CUDA_FAILED` if the driver cannot be initialized, and
/// `QZ1_STATUS_CUDA_MISSING` otherwise. The message states what to install. Needs no context.
///
/// # Safety
/// The caller must uphold the pointer contract of the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_require_device(message: *const qz1_message) -> qz1_status {
    call(message, |_| Ok(quant_kernels_cuda::require_device()?))
}

/// Returns 0 if NVRTC, which compiles kernels, can be loaded: from the loader's path, or from the path in the
/// environment variable `QUANT_NVRTC`. Otherwise returns `QZ1_STATUS_CUDA_MISSING`; then only kernels whose images are
/// in the cache directory can be planned.
///
/// # Safety
/// Same as for `qz1_cuda_require_device`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_require_compiler(message: *const qz1_message) -> qz1_status {
    call(message, |_| Ok(quant_kernels_cuda::require_nvrtc()?))
}

/// Describes the device whose context is current on the calling thread. Fills `out`, whose `struct_size` must be set by
/// the caller.
///
/// # Safety
/// Same as for `qz1_cuda_require_device`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_current_device(
    out: *mut qz1_cuda_device,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
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

/// Creates a handle for kernels, initially without any; needs no driver. `images` is the directory where compiled
/// kernels are cached. It must end with a zero byte, and be UTF-8 on systems where paths are not bytes. An empty string
/// means no directory; null means the directory in the environment variable `QUANT_CUDA_CACHE`, or else `quant/cuda` in
/// the user's cache directory. The files in it are run on the device, so only the user who runs the program may have
/// write access to the directory. The handle must be freed by `qz1_cuda_kernels_free`. On error, `out` is set to null.
///
/// # Safety
/// Same as for `qz1_cuda_require_device`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_kernels_new(
    images: *const c_char,
    out: *mut *mut qz1_cuda_kernels,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
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
/// The handle must come from `qz1_cuda_kernels_new` and be freed only once, and the contexts in which it was used must
/// still exist.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_kernels_free(kernels: *mut qz1_cuda_kernels) {
    // SAFETY: the caller upholds the pointer contract.
    unsafe { memory::free(kernels) }
}

/// The number of bytes of device memory that a launch needs as its workspace and for its tickets, each at a multiple of
/// 256; both may be 0. The initial contents of the workspace do not matter. Tickets must be 0 before a launch, which
/// resets them to 0. Launches of any plans that run one after another may share both, if these are large enough for
/// each; launches that may run concurrently need their own.
///
/// # Safety
/// Same as for `qz1_cuda_require_device`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_plan_workspace(
    plan: *const qz1_cuda_plan,
    bytes: *mut usize,
    tickets: *mut usize,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        let plan = scope.shared(plan, "the plan")?;
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
/// The plan must come from a `qz1_cuda_…_plan` and be freed only once, and the context in which it was made must still
/// exist.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_plan_free(plan: *mut qz1_cuda_plan) {
    // SAFETY: the caller upholds the pointer contract.
    unsafe { memory::free(plan) }
}
