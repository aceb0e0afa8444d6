//! From the text of a kernel family to the PTX or machine code of one variant, through NVRTC.
//!
//! A family is one `.cu` text, a variant what its macros make of it. Texts and headers are part of this crate and are handed
//! over in memory: no file is read, no toolkit's header is needed, the run-time compiler alone.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ptr;

use crate::libraries::{BytesOf, Nvrtc, SizeOf, nvrtc};
use crate::{Error, Result};

/// The text of a kernel family.
#[derive(Debug, Eq)]
pub struct Source {
    /// What messages call it: the file's name.
    pub name: &'static str,
    /// The text.
    pub text: &'static str,
    /// Names and texts of what it includes.
    pub headers: &'static [(&'static str, &'static str)],
}

/// One kernel of a family, its macros set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variant {
    /// The family.
    pub source: &'static Source,
    /// The `extern "C"` name of the kernel.
    pub kernel: &'static str,
    /// Macros and their values.
    pub defines: Vec<(&'static str, String)>,
}

/// Texts are long, and there is one of each: most often it is the same.
impl PartialEq for Source {
    fn eq(&self, other: &Self) -> bool {
        let all = |source: &Self| (source.name, source.text, source.headers);
        ptr::eq(self, other) || all(self) == all(other)
    }
}

/// Without the texts, so that a launch can look a kernel up.
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

/// What a kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Architecture {
    /// A100.
    Sm80,
    /// GeForce RTX 30, A10.
    Sm86,
    /// GeForce RTX 40, L40S.
    Sm89,
    /// H100, H200, by the instructions that sm_80 has too.
    Sm90,
    /// GeForce RTX 50.
    Sm120,
}

impl Architecture {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Sm80, Self::Sm86, Self::Sm89, Self::Sm90, Self::Sm120];

    /// The newest whose machine code, or else whose PTX, a device of this compute capability runs.
    pub fn of_device(major: u32, minor: u32) -> Option<Self> {
        let capability = major.checked_mul(10)?.checked_add(minor)?;
        Self::ALL.into_iter().rfind(|architecture| architecture.number() <= capability)
    }

    /// Whether machine code for it runs on a device of this compute capability: the same major version, and no older.
    pub fn runs_on(self, major: u32, minor: u32) -> bool {
        self.number() / 10 == major && self.number() % 10 <= minor
    }

    /// The compute capability, tenfold.
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

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}", self.number())
    }
}

/// What is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// Text that the driver compiles, on this architecture and all later ones.
    Ptx,
    /// Machine code.
    Cubin,
}

/// What the compiler made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// PTX without its closing zero, or a cubin.
    pub bytes: Vec<u8>,
    /// What the compiler said, of machine code what it takes.
    pub log: String,
}

/// What a kernel's machine code takes, of a thread and of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Usage {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of a thread's stack.
    pub stack: u32,
    /// Bytes that a thread writes to memory because registers do not suffice.
    pub spill_stores: u32,
    /// Bytes that it reads back.
    pub spill_loads: u32,
    /// Bytes of static shared memory.
    pub shared: u32,
}

impl Image {
    /// What the log says that the kernel takes; `None` of PTX.
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
/// When it is missing.
pub fn compiler_version() -> Result<[u32; 2]> {
    let nvrtc = nvrtc()?;
    let (mut major, mut minor): (c_int, c_int) = (0, 0);
    // SAFETY: both point to a number.
    checked(nvrtc, "ask for the version", unsafe { (nvrtc.version)(&mut major, &mut minor) })?;
    Ok([major, minor].map(|number| u32::try_from(number).unwrap_or(0)))
}

/// Options of the compiler for every variant.
pub(crate) fn options(architecture: Architecture, form: Form) -> Vec<String> {
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

/// Compiles a variant. No floats are contracted to fused operations but those that the text fuses.
///
/// # Errors
/// When there is no compiler, it knows no such architecture, or it refuses the text, with what it says.
pub fn compile(variant: &Variant, architecture: Architecture, form: Form) -> Result<Image> {
    let nvrtc = nvrtc()?;
    let mut options = options(architecture, form);
    options.extend(variant.defines.iter().map(|(name, value)| format!("--define-macro={name}={value}")));
    let program = Program::new(nvrtc, variant.source)?;
    let options: Vec<CString> = options.into_iter().map(text).collect::<Result<_>>()?;
    let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    let count = c_int::try_from(pointers.len()).map_err(|_| too_much())?;
    // SAFETY: the program is alive, and there are as many options as said, each closed by a zero.
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
        // SAFETY: the program is alive and compiled; what is written has the length that was said.
        Form::Ptx => unsafe { program.bytes(nvrtc.ptx_size, nvrtc.ptx) },
        // SAFETY: the program is alive and compiled; what is written has the length that was said.
        Form::Cubin => unsafe { program.bytes(nvrtc.cubin_size, nvrtc.cubin) },
    }?;
    Ok(Image { bytes: if form == Form::Ptx { until_zero(bytes) } else { bytes }, log })
}

/// A program of the compiler's, destroyed with this.
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
        // SAFETY: strings closed by a zero, as many headers as said; the compiler copies them.
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
        checked(nvrtc, "take in a program", result)?;
        Ok(Self { nvrtc, handle })
    }

    fn log(&self) -> Result<String> {
        // SAFETY: the program is alive.
        let bytes = unsafe { self.bytes(self.nvrtc.log_size, self.nvrtc.log) }?;
        Ok(String::from_utf8_lossy(&until_zero(bytes)).trim().to_owned())
    }

    /// # Safety
    /// The two functions must belong together: the second writes as many bytes as the first says.
    unsafe fn bytes(&self, size_of: SizeOf, bytes_of: BytesOf) -> Result<Vec<u8>> {
        let mut size = 0;
        // SAFETY: the program is alive.
        checked(self.nvrtc, "say how long a result is", unsafe { size_of(self.handle, &mut size) })?;
        let mut bytes = vec![0_u8; size];
        if size > 0 {
            // SAFETY: the program is alive, and there is room for what it said.
            let result = unsafe { bytes_of(self.handle, bytes.as_mut_ptr().cast()) };
            checked(self.nvrtc, "hand out a result", result)?;
        }
        Ok(bytes)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: it was created and is destroyed once. There is nothing to do about a failure.
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
    Error::Nvrtc { action: "take in a program", reason: "its text or options are no text".into() }
}

const SUCCESS: c_int = 0;

fn checked(nvrtc: &Nvrtc, action: &'static str, result: c_int) -> Result<()> {
    match result {
        SUCCESS => Ok(()),
        other => Err(Error::Nvrtc { action, reason: described(nvrtc, other) }),
    }
}

fn described(nvrtc: &Nvrtc, result: c_int) -> String {
    // SAFETY: any code may be asked about.
    let text = unsafe { (nvrtc.describe)(result) };
    if text.is_null() {
        return format!("error {result}");
    }
    // SAFETY: it is a text that the library holds, closed by a zero.
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
        let of = Architecture::of_device;
        assert_eq!(of(7, 5), None);
        assert_eq!(of(8, 0), Some(Architecture::Sm80));
        assert_eq!(of(8, 7), Some(Architecture::Sm86));
        assert_eq!(of(9, 0), Some(Architecture::Sm90));
        assert_eq!(of(10, 0), Some(Architecture::Sm90));
        assert_eq!(of(12, 1), Some(Architecture::Sm120));
        assert!(Architecture::Sm86.runs_on(8, 9) && !Architecture::Sm89.runs_on(8, 6));
        assert!(!Architecture::Sm90.runs_on(10, 0) && Architecture::Sm120.runs_on(12, 1));
    }
}
