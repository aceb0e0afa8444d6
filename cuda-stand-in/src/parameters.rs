//! The sizes of a kernel's parameters. Callers do not pass them, so the driver reads them from the image.

use quant_ptx_interpreter::Argument;

/// Types of the same size are not distinguished.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Parameter {
    Word,
    Long,
}

/// Returns the parameters of a kernel in a PTX text; `None` if there is no such kernel, or it has unsupported
/// parameters.
pub(crate) fn of(text: &str, kernel: &str) -> Option<Vec<Parameter>> {
    let mut rest = text;
    loop {
        rest = rest.split_once(".entry")?.1.trim_start();
        let name_end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '$'))?;
        if &rest[..name_end] != kernel {
            continue;
        }
        let behind = rest[name_end..].trim_start();
        let Some(list) = behind.strip_prefix('(') else { return Some(Vec::new()) };
        let list = list.split_once(')')?.0;
        return list.split(',').filter(|one| !one.trim().is_empty()).map(parameter).collect();
    }
}

fn parameter(declaration: &str) -> Option<Parameter> {
    let words: Vec<&str> = declaration.split_whitespace().collect();
    let is_there = |types: &[&str]| types.iter().any(|ty| words.contains(ty));
    if words.first() != Some(&".param") {
        None
    } else if is_there(&[".u64", ".b64", ".s64"]) {
        Some(Parameter::Long)
    } else if is_there(&[".u32", ".b32", ".s32", ".f32"]) {
        Some(Parameter::Word)
    } else {
        None
    }
}

impl Parameter {
    /// Reads an argument.
    ///
    /// # Safety
    /// The pointer must be valid for reading as many bytes as the parameter has.
    pub(crate) unsafe fn read(self, from: *const std::ffi::c_void) -> Argument {
        // SAFETY: the caller guarantees that the pointer is valid for these bytes; the reads are unaligned.
        unsafe {
            match self {
                Self::Word => Argument::U32(from.cast::<u32>().read_unaligned()),
                Self::Long => Argument::U64(from.cast::<u64>().read_unaligned()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_from_the_text() {
        let text = ".visible .entry first(\n .param .u64 first_param_0,\n .param .u64 .ptr .align 1 first_param_1,\n\
                    .param .u32 first_param_2, .param .f32 x\n)\n{ ret; }\n.visible .entry none()\n{ ret; }\n\
                    .entry bytes(.param .align 8 .b8 p[24]) { ret; }";
        use Parameter::{Long, Word};
        assert_eq!(of(text, "first"), Some(vec![Long, Long, Word, Word]));
        assert_eq!(of(text, "none"), Some(Vec::new()));
        assert_eq!(of(text, "bytes"), None);
        assert_eq!(of(text, "firs"), None);
    }
}
