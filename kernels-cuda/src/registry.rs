//! Variants of all kernels, with requirements on their machine code.
//!
//! `tests/compile.rs` compiles them for every architecture and checks their registers and instructions.

use crate::compile::{GpuArchitecture, Variant};
use crate::{activation, attention, experts, linear};

/// A variant, with requirements on its machine code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The family.
    pub family: &'static str,
    /// The kernel.
    pub variant: Variant,
    /// The maximum number of registers per thread, so that the intended number of blocks fits on a multiprocessor.
    pub register_ceiling: u32,
    /// The maximum number of bytes of registers that may be spilled: 0, unless more blocks with a few spilled registers
    /// were faster than fewer without.
    pub spill_bytes: u32,
    /// The only architecture on which plans choose the variant, if there is one. On others it must compile, but may spill
    /// registers.
    pub only_on: Option<GpuArchitecture>,
    /// Prefixes of instructions, such as `IMMA.16832`, that the disassembly must contain on every architecture.
    pub instructions: Vec<&'static str>,
}

type Family = (&'static str, fn() -> Vec<Entry>);

/// All families.
pub const FAMILIES: [Family; 4] = [
    ("activation", activation::variants),
    ("linear", linear::variants),
    ("experts", experts::variants),
    ("attention", attention::variants),
];

/// The entries of all families.
pub fn entries() -> Vec<Entry> {
    FAMILIES.iter().flat_map(|(_, list)| list()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_have_names_and_entries() {
        for (name, list) in FAMILIES {
            let entries = list();
            assert!(!entries.is_empty(), "{name}");
            for entry in entries {
                assert_eq!(entry.family, name);
                assert!((16..=255).contains(&entry.register_ceiling), "{}", entry.variant);
                assert!(!entry.instructions.is_empty(), "{}", entry.variant);
                assert!(entry.variant.source.text.contains(entry.variant.kernel), "{}", entry.variant);
            }
        }
    }
}
