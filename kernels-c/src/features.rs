//! Versions, instruction sets and features.

use core::ffi::c_char;

use quant_kernels_cpu::{Isa, IsaToken};

use crate::status::Fault;

/// The fastest instruction set of the processor, or the one named by the environment variable `QUANT_ISA`.
pub const QZ1_ISA_DETECT: u32 = 0;
/// Portable code, the reference for every result.
pub const QZ1_ISA_SCALAR: u32 = 1;
/// AVX2, FMA and F16C.
pub const QZ1_ISA_AVX2: u32 = 2;
/// AVX2, FMA, F16C and AVX-VNNI.
pub const QZ1_ISA_AVXVNNI: u32 = 3;
/// AVX-512 F, BW, VL and VNNI.
pub const QZ1_ISA_AVX512VNNI: u32 = 4;
/// AVX-512 F, BW, VL, VNNI and BF16.
pub const QZ1_ISA_AVX512BF16: u32 = 5;
/// AArch64's Advanced SIMD.
pub const QZ1_ISA_NEON: u32 = 6;
/// Advanced SIMD and dotprod.
pub const QZ1_ISA_NEONDOT: u32 = 7;
/// Advanced SIMD, dotprod and i8mm.
pub const QZ1_ISA_NEONI8MM: u32 = 8;
/// The instructions of `QZ1_ISA_AVX512BF16`, and AMX: tiles of 8-bit integers and of bf16, if the operating system
/// permits them.
pub const QZ1_ISA_AMX: u32 = 9;

/// Weights of 2 to 8 bits with 8-bit activations.
pub const QZ1_FEATURE_INT8: u32 = 1;
/// Weights of 2 to 8 bits with float activations.
pub const QZ1_FEATURE_FLOAT: u32 = 2;
/// Weights with two levels of scales.
pub const QZ1_FEATURE_PROGRESSIVE: u32 = 3;
/// Activations of f16 and bf16.
pub const QZ1_FEATURE_HALF: u32 = 4;
/// Quantization fused with RMSNorm and with SiLU.
pub const QZ1_FEATURE_FUSED: u32 = 5;
/// The Hadamard transform.
pub const QZ1_FEATURE_HADAMARD: u32 = 6;
/// Attention on a quantized cache.
pub const QZ1_FEATURE_ATTENTION: u32 = 7;
/// Kernels for NVIDIA GPUs, `quant_kernels_cuda.h`, if the library was built with them.
pub const QZ1_FEATURE_CUDA: u32 = 8;
/// The experts of a layer in one call.
pub const QZ1_FEATURE_EXPERTS: u32 = 9;
/// Quantized checkpoints on disk, if the library was built with them.
pub const QZ1_FEATURE_CHECKPOINTS: u32 = 10;

const NAMES: [(u32, &str, &core::ffi::CStr); 9] = [
    (QZ1_ISA_SCALAR, "scalar", c"scalar"),
    (QZ1_ISA_AVX2, "avx2", c"avx2"),
    (QZ1_ISA_AVXVNNI, "avxvnni", c"avxvnni"),
    (QZ1_ISA_AVX512VNNI, "avx512vnni", c"avx512vnni"),
    (QZ1_ISA_AVX512BF16, "avx512bf16", c"avx512bf16"),
    (QZ1_ISA_NEON, "neon", c"neon"),
    (QZ1_ISA_NEONDOT, "neondot", c"neondot"),
    (QZ1_ISA_NEONI8MM, "neoni8mm", c"neoni8mm"),
    (QZ1_ISA_AMX, "amx", c"amx"),
];

pub(crate) fn token(isa: u32) -> Result<IsaToken, Fault> {
    if isa == QZ1_ISA_DETECT {
        return Ok(IsaToken::detect());
    }
    let name = NAMES.iter().find(|(number, ..)| *number == isa).map(|(_, name, _)| *name);
    let found = Isa::ALL.into_iter().find(|isa| Some(isa.name()) == name);
    let isa = found.ok_or_else(|| Fault::isa(isa))?;
    Ok(isa.token()?)
}

/// The version of this interface: the major version in the upper 16 bits, the minor in the lower 16. Within a major
/// version, functions and fields are only added.
#[unsafe(no_mangle)]
pub extern "C" fn qz1_abi_version() -> u32 {
    1 << 16
}

/// The version of the library, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn qz1_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// 1 if the library was built with a feature, `QZ1_FEATURE_…`, else 0.
#[unsafe(no_mangle)]
pub extern "C" fn qz1_has(feature: u32) -> u32 {
    let always = matches!(feature, QZ1_FEATURE_INT8..=QZ1_FEATURE_ATTENTION | QZ1_FEATURE_EXPERTS);
    let cuda = feature == QZ1_FEATURE_CUDA && cfg!(feature = "cuda");
    let checkpoints = feature == QZ1_FEATURE_CHECKPOINTS && cfg!(feature = "checkpoints");
    u32::from(always || cuda || checkpoints)
}

/// 1 if the processor has a `QZ1_ISA_…`, else 0.
#[unsafe(no_mangle)]
pub extern "C" fn qz1_isa_available(isa: u32) -> u32 {
    u32::from(token(isa).is_ok())
}

/// The `QZ1_ISA_…` that `QZ1_ISA_DETECT` selects, or `QZ1_ISA_DETECT` itself if `QUANT_ISA` names the emulated tile
/// unit (`amxemulated`), which has no number.
#[unsafe(no_mangle)]
pub extern "C" fn qz1_isa_detect() -> u32 {
    let found = IsaToken::detect().isa().name();
    NAMES.iter().find(|(_, name, _)| *name == found).map_or(QZ1_ISA_DETECT, |(isa, ..)| *isa)
}

/// The name of a `QZ1_ISA_…`, or null if there is no such name.
#[unsafe(no_mangle)]
pub extern "C" fn qz1_isa_name(isa: u32) -> *const c_char {
    NAMES.iter().find(|(number, ..)| *number == isa).map_or(core::ptr::null(), |(.., name)| name.as_ptr())
}
