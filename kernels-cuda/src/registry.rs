//! All kernels there are, with what their machine code must be like.
//!
//! A family gives its entries by a plain function; what is listed is compiled for every architecture by
//! `tests/compile.rs`, which holds each to its registers and instructions.

use crate::compile::Variant;
use crate::{activation, attention, linear};

/// A variant, and what its machine code is held to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The family.
    pub family: &'static str,
    /// The kernel.
    pub variant: Variant,
    /// The most registers of a thread that leave room for the blocks which a multiprocessor is meant to hold.
    pub register_ceiling: u32,
    /// What disassembly must show on every architecture: beginnings of instructions, such as `IMMA.16832`.
    pub instructions: Vec<&'static str>,
}

/// A family: its name, and what lists its variants.
type Family = (&'static str, fn() -> Vec<Entry>);

/// All families.
pub const FAMILIES: [Family; 3] =
    [("activation", activation::variants), ("linear", linear::variants), ("attention", attention::variants)];

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
                // A text that lacks the name could not be asked for it.
                assert!(entry.variant.source.text.contains(entry.variant.kernel), "{}", entry.variant);
            }
        }
    }
}
