//! Versions, features and names of instructions.

use core::ffi::{CStr, c_char};

use quant_kernels::*;
use quant_kernels_cpu::{Isa, IsaToken};

fn text(at: *const c_char) -> Option<&'static str> {
    // SAFETY: strings of the library end with a zero byte and are static.
    (!at.is_null()).then(|| unsafe { CStr::from_ptr(at) }.to_str().unwrap())
}

/// The `QZ1_ISA_…` of an instruction set.
pub(super) fn number(isa: Isa) -> u32 {
    (1..99).find(|&number| text(qz1_isa_name(number)) == Some(isa.name())).unwrap()
}

#[test]
fn versions_and_features() {
    assert_eq!(qz1_abi_version() >> 16, 1);
    assert_eq!(text(qz1_version()), Some(env!("CARGO_PKG_VERSION")));
    let there: Vec<u32> = (0..99).filter(|&feature| qz1_has(feature) == 1).collect();
    let always = [1, 2, 3, 4, 5, 6, 7, QZ1_FEATURE_EXPERTS];
    let built = [
        (QZ1_FEATURE_CUDA, cfg!(feature = "cuda")),
        (QZ1_FEATURE_CHECKPOINTS, cfg!(feature = "checkpoints")),
    ];
    let mut expected: Vec<u32> =
        always.into_iter().chain(built.iter().filter(|f| f.1).map(|f| f.0)).collect();
    expected.sort_unstable();
    assert_eq!(there, expected);
    assert_eq!(qz1_has(u32::MAX), 0);
}

/// `cargo cinstall` names the library by the version of the interface.
#[test]
fn the_installed_library_has_the_version_of_the_interface() {
    let manifest = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")).unwrap();
    let (_, library) = manifest.split_once("[package.metadata.capi.library]").unwrap();
    let (major, minor) = (qz1_abi_version() >> 16, qz1_abi_version() & 0xffff);
    assert!(library.contains(&format!("version = \"{major}.{minor}.0\"")), "{library}");
}

#[test]
fn instruction_sets_have_numbers_and_names() {
    let names: Vec<_> = (0..12).map(|isa| text(qz1_isa_name(isa))).collect();
    let all = ["scalar", "avx2", "avxvnni", "avx512vnni", "avx512bf16", "neon", "neondot", "neoni8mm", "amx"];
    assert_eq!(names[1..10], all.map(Some));
    assert_eq!([names[0], names[10], names[11]], [None; 3]);
    assert_eq!(Isa::ALL.len(), all.len());
    for isa in Isa::ALL {
        assert_eq!(qz1_isa_available(number(isa)), u32::from(isa.token().is_ok()), "{isa:?}");
    }
    let there = [0, QZ1_ISA_SCALAR, 10, u32::MAX].map(|isa| qz1_isa_available(isa));
    assert_eq!(there, [1, 1, 0, 0]);
    assert_eq!(qz1_isa_detect(), number(IsaToken::detect().isa()));
}
