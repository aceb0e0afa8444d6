//! Compiles one variant of a kernel family from its source to PTX or machine code, with NVRTC.
//!
//! A family is one `.cu` source; a variant is the source with particular values of its macros. Sources and headers are
//! part of this crate, so only the run-time compiler is needed.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ptr;

use crate::libraries::{BytesOf, Nvrtc, SizeOf, nvrtc};
use crate::{Error, Result};

/// The source of a kernel family.
#[derive(Debug, Eq)]
pub struct Source {
    /// The file's name, for messages.
    pub name: &'static str,
    /// The text.
    pub text: &'static str,
    /// The names and texts of the headers that the source includes.
    pub headers: &'static [(&'static str, &'static str)],
}

/// One kernel of a family, with the values of its macros.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variant {
    /// The family.
    pub source: &'static Source,
    /// The `extern "C"` name of the kernel.
    pub kernel: &'static str,
    /// The names and values of the macros.
    pub defines: Vec<(&'static str, String)>,
}

/// Compares pointers first: the texts are long and usually the same.
impl PartialEq for Source {
    fn eq(&self, other: &Self) -> bool {
        let all = |source: &Self| (source.name, source.text, source.headers);
        ptr::eq(self, other) || all(self) == all(other)
    }
}

/// Does not hash the texts, so that looking up a kernel is fast.
impl Hash for Variant {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.source.name, self.kernel, &self.defines).hash(state);
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kernel)?;
        let mut sign = '[';
        for (name, value) in &self.defines {
            write!(f, "{sign}{name}={value}")?;
            sign = ' ';
        }
        if self.defines.is_empty() { Ok(()) } else { f.write_str("]") }
    }
}

/// The architecture that a kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum GpuArchitecture {
    /// A100.
    Sm80,
    /// GeForce RTX 30, A10.
    Sm86,
    /// GeForce RTX 40, L40S.
    Sm89,
    /// H100, H200.
    Sm90,
    /// GeForce RTX 50.
    Sm120,
}

impl GpuArchitecture {
    /// All supported architectures.
    pub const ALL: [Self; 5] = [Self::Sm80, Self::Sm86, Self::Sm89, Self::Sm90, Self::Sm120];

    /// The newest architecture whose PTX runs on a device of this compute capability.
    pub fn of_device(major: u32, minor: u32) -> Option<Self> {
        let capability = major.checked_mul(10)?.checked_add(minor)?;
        Self::ALL.into_iter().rfind(|architecture| architecture.number() <= capability)
    }

    /// Whether machine code for this architecture runs on a device of this compute capability.
    pub fn runs_on(self, major: u32, minor: u32) -> bool {
        self.number() / 10 == major && self.number() % 10 <= minor
    }

    /// Ten times the compute capability.
    pub fn number(self) -> u32 {
        match self {
            Self::Sm80 => 80,
            Self::Sm86 => 86,
            Self::Sm89 => 89,
            Self::Sm90 => 90,
            Self::Sm120 => 120,
        }
    }
}

impl fmt::Display for GpuArchitecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}", self.number())
    }
}

/// The output format of the compiler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// Text that the driver compiles for this architecture and all later ones.
    Ptx,
    /// Machine code, for the devices of [`GpuArchitecture::runs_on`].
    Cubin,
}

/// The output of the compiler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// PTX without its terminating zero, or a cubin.
    pub bytes: Vec<u8>,
    /// The compiler's log; for machine code it contains the resource usage.
    pub log: String,
}

/// Resource usage of a kernel's machine code, per thread and per block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Usage {
    /// Registers per thread.
    pub registers: u32,
    /// Stack bytes per thread.
    pub stack: u32,
    /// Bytes that a thread stores because of register spilling.
    pub spill_stores: u32,
    /// Bytes that a thread loads because of register spilling.
    pub spill_loads: u32,
    /// Bytes of static shared memory.
    pub shared: u32,
}

impl Image {
    /// The resource usage in the log; `None` for PTX.
    pub fn usage(&self) -> Option<Usage> {
        let before = |what: &str| -> Option<u32> {
            let head = &self.log[..self.log.find(what)?];
            head.rsplit(|c: char| !c.is_ascii_digit()).find(|word| !word.is_empty())?.parse().ok()
        };
        Some(Usage {
            registers: {
                let tail = &self.log[self.log.find("Used ")? + "Used ".len()..];
                tail.split(' ').next()?.parse().ok()?
            },
            stack: before(" bytes stack frame")?,
            spill_stores: before(" bytes spill stores")?,
            spill_loads: before(" bytes spill loads")?,
            shared: before(" bytes smem").unwrap_or(0),
        })
    }
}

/// The compiler's version, such as `[13, 0]`.
///
/// # Errors
/// When there is no compiler, or it returns an error.
pub fn compiler_version() -> Result<[u32; 2]> {
    let nvrtc = nvrtc()?;
    let (mut major, mut minor): (c_int, c_int) = (0, 0);
    // SAFETY: both pointers point to live integers.
    checked(nvrtc, "get the version", unsafe { (nvrtc.version)(&mut major, &mut minor) })?;
    Ok([major, minor].map(|number| u32::try_from(number).unwrap_or(0)))
}

pub(crate) fn options(architecture: GpuArchitecture, form: Form) -> Vec<String> {
    let kind = if form == Form::Ptx { "compute" } else { "sm" };
    let mut options = vec![
        format!("--gpu-architecture={kind}_{}", architecture.number()),
        "--std=c++17".into(),
        "--fmad=false".into(),
    ];
    if form == Form::Cubin {
        options.push("--ptxas-options=-v".into());
    }
    options
}

/// Compiles a variant. Floating-point operations are not contracted to FMA, except where the source writes an FMA.
///
/// # Errors
/// When there is no compiler, it does not know the architecture, or it rejects the source; the error contains its log.
pub fn compile(variant: &Variant, architecture: GpuArchitecture, form: Form) -> Result<Image> {
    let nvrtc = nvrtc()?;
    let mut options = options(architecture, form);
    options.extend(variant.defines.iter().map(|(name, value)| format!("--define-macro={name}={value}")));
    let program = Program::new(nvrtc, variant.source)?;
    let options: Vec<CString> = options.into_iter().map(text).collect::<Result<_>>()?;
    let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    let count = c_int::try_from(pointers.len()).map_err(|_| too_much())?;
    // SAFETY: the program is alive, and `pointers` holds `count` strings, each ending with a zero byte.
    let result = unsafe { (nvrtc.compile)(program.handle, count, pointers.as_ptr()) };
    let log = program.log()?;
    if result != SUCCESS {
        return Err(Error::Compile {
            variant: variant.to_string(),
            architecture,
            log: if log.is_empty() { described(nvrtc, result) } else { log },
        });
    }
    let bytes = match form {
        // SAFETY: the two functions return the size and the bytes of the same output, and the program has been
        // compiled.
        Form::Ptx => unsafe { program.bytes(nvrtc.ptx_size, nvrtc.ptx) },
        // SAFETY: the two functions return the size and the bytes of the same output, and the program has been
        // compiled.
        Form::Cubin => unsafe { program.bytes(nvrtc.cubin_size, nvrtc.cubin) },
    }?;
    Ok(Image { bytes: if form == Form::Ptx { until_zero(bytes) } else { bytes }, log })
}

struct Program {
    nvrtc: &'static Nvrtc,
    handle: *mut c_void,
}

impl Program {
    fn new(nvrtc: &'static Nvrtc, source: &Source) -> Result<Self> {
        let (body, name) = (text(source.text.to_owned())?, text(source.name.to_owned())?);
        let each = |of: fn(&(&str, &str)) -> String| -> Result<Vec<CString>> {
            source.headers.iter().map(|header| text(of(header))).collect()
        };
        let (names, bodies) = (each(|h| h.0.to_owned())?, each(|h| h.1.to_owned())?);
        let pointers = |all: &[CString]| all.iter().map(|s| s.as_ptr()).collect::<Vec<*const c_char>>();
        let (name_pointers, body_pointers) = (pointers(&names), pointers(&bodies));
        let count = c_int::try_from(names.len()).map_err(|_| too_much())?;
        let mut handle = ptr::null_mut();
        // SAFETY: all strings end with a zero byte, and there are `count` headers and names; the compiler copies them.
        let result = unsafe {
            (nvrtc.create)(
                &mut handle,
                body.as_ptr(),
                name.as_ptr(),
                count,
                body_pointers.as_ptr(),
                name_pointers.as_ptr(),
            )
        };
        checked(nvrtc, "create a program", result)?;
        Ok(Self { nvrtc, handle })
    }

    fn log(&self) -> Result<String> {
        // SAFETY: `log` writes as many bytes as `log_size` returns.
        let bytes = unsafe { self.bytes(self.nvrtc.log_size, self.nvrtc.log) }?;
        Ok(String::from_utf8_lossy(&until_zero(bytes)).trim().to_owned())
    }

    /// # Safety
    /// The two functions must belong together: the second writes as many bytes as the first returns.
    unsafe fn bytes(&self, size_of: SizeOf, bytes_of: BytesOf) -> Result<Vec<u8>> {
        let mut size = 0;
        // SAFETY: `self` owns the program, which only `drop` destroys.
        checked(self.nvrtc, "get the size of the compiler output", unsafe {
            size_of(self.handle, &mut size)
        })?;
        let mut bytes = vec![0_u8; size];
        if size > 0 {
            // SAFETY: `self` owns the program, which only `drop` destroys, and there is room for the size that it
            // returned.
            let result = unsafe { bytes_of(self.handle, bytes.as_mut_ptr().cast()) };
            checked(self.nvrtc, "get the compiler output", result)?;
        }
        Ok(bytes)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program was created by `new` and is destroyed once. An error cannot be handled in `drop`.
        let _ = unsafe { (self.nvrtc.destroy)(&mut self.handle) };
    }
}

fn text(text: String) -> Result<CString> {
    CString::new(text).map_err(|_| too_much())
}

fn until_zero(mut bytes: Vec<u8>) -> Vec<u8> {
    let end = CStr::from_bytes_until_nul(&bytes).map_or(bytes.len(), CStr::count_bytes);
    bytes.truncate(end);
    bytes
}

fn too_much() -> Error {
    Error::Nvrtc { action: "create a program", reason: "the source or an option contains a NUL byte".into() }
}

const SUCCESS: c_int = 0;

fn checked(nvrtc: &Nvrtc, action: &'static str, result: c_int) -> Result<()> {
    match result {
        SUCCESS => Ok(()),
        other => Err(Error::Nvrtc { action, reason: described(nvrtc, other) }),
    }
}

fn described(nvrtc: &Nvrtc, result: c_int) -> String {
    // SAFETY: the function accepts any result code.
    let text = unsafe { (nvrtc.describe)(result) };
    if text.is_null() {
        return format!("error {result}");
    }
    // SAFETY: the string belongs to the library and ends with a zero byte.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_kernel_takes_is_read_from_the_log() {
        let log = "ptxas info    : 0 bytes gmem\n\
                   ptxas info    : Compiling entry function 'k' for 'sm_80'\n\
                   ptxas info    : Function properties for k\n    \
                   24 bytes stack frame, 16 bytes spill stores, 8 bytes spill loads\n\
                   ptxas info    : Used 168 registers, used 1 barriers, 512 bytes smem, 432 bytes cmem[0]";
        let image = Image { bytes: Vec::new(), log: log.into() };
        let usage = Usage { registers: 168, stack: 24, spill_stores: 16, spill_loads: 8, shared: 512 };
        assert_eq!(image.usage(), Some(usage));
        let without = Image { log: log.replace("512 bytes smem, ", ""), ..image };
        assert_eq!(without.usage(), Some(Usage { shared: 0, ..usage }));
        assert_eq!(Image { bytes: Vec::new(), log: "nothing".into() }.usage(), None);
    }

    #[test]
    fn devices_get_what_they_run() {
        let of = GpuArchitecture::of_device;
        assert_eq!(of(7, 5), None);
        assert_eq!(of(8, 0), Some(GpuArchitecture::Sm80));
        assert_eq!(of(8, 7), Some(GpuArchitecture::Sm86));
        assert_eq!(of(9, 0), Some(GpuArchitecture::Sm90));
        assert_eq!(of(10, 0), Some(GpuArchitecture::Sm90));
        assert_eq!(of(12, 1), Some(GpuArchitecture::Sm120));
        assert!(GpuArchitecture::Sm86.runs_on(8, 9) && !GpuArchitecture::Sm89.runs_on(8, 6));
        assert!(!GpuArchitecture::Sm90.runs_on(10, 0) && GpuArchitecture::Sm120.runs_on(12, 1));
    }
}
