//! The options of `--format gguf`, shared by `plan` and `quantize`.

use std::path::PathBuf;

use quant_core::run::GgufSettings;

/// Options that only apply to GGUF files.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct GgufOptions {
    /// Pre-tokenizer by its name in llama.cpp, if it is not recognized; none writes a file without a vocabulary
    #[arg(long, hide_short_help = true, value_name = "NAME", help_heading = "GGUF")]
    pub pre: Option<String>,
    /// If the row width of a tensor does not suit its type, use the fallback type of llama-quantize; the report lists such tensors
    #[arg(long, hide_short_help = true, help_heading = "GGUF")]
    pub allow_fallback: bool,
    /// Choose scales exactly as llama-quantize does, instead of with the search that gives a smaller error
    #[arg(long, hide_short_help = true, help_heading = "GGUF")]
    pub reference_search: bool,
    /// Weigh errors by the importance matrix in FILE (GGUF or .dat), instead of computing one with --calibration
    #[arg(long, hide_short_help = true, value_name = "FILE", help_heading = "GGUF")]
    pub imatrix: Option<PathBuf>,
    /// Write the computed importance matrix to FILE, as GGUF or, if its name ends in .dat, in the older format
    #[arg(long, hide_short_help = true, value_name = "FILE", help_heading = "GGUF")]
    pub save_imatrix: Option<PathBuf>,
    /// Split the output into several files in the directory OUT, each with at most SIZE of tensors, such as 500M or 4G
    #[arg(long, hide_short_help = true, value_name = "SIZE", value_parser = size, help_heading = "GGUF")]
    pub split_max_size: Option<u64>,
}

/// Parses a number of bytes with an optional unit. K, M and G are powers of 1000, as in llama.cpp's programs, and so are
/// KB, MB and GB; KiB, MiB and GiB are powers of 1024.
fn size(text: &str) -> std::result::Result<u64, String> {
    let (digits, unit) = text.split_at(text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len()));
    let unit = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => Some(1),
        "k" | "kb" => Some(1_000),
        "m" | "mb" => Some(1_000_000),
        "g" | "gb" => Some(1_000_000_000),
        "kib" => Some(1 << 10),
        "mib" => Some(1 << 20),
        "gib" => Some(1 << 30),
        _ => None,
    };
    let bytes =
        digits.parse::<u64>().ok().zip(unit).and_then(|(number, unit): (u64, u64)| number.checked_mul(unit));
    bytes.filter(|bytes| *bytes > 0).ok_or_else(|| {
        "expected a whole number of bytes with an optional unit, such as 500M or 4GiB".to_owned()
    })
}

impl GgufOptions {
    /// Converts these options to the library's settings.
    pub fn settings(&self) -> GgufSettings {
        let options = self.clone();
        GgufSettings {
            pre: options.pre,
            allow_fallback: options.allow_fallback,
            reference_search: options.reference_search,
            imatrix: options.imatrix,
            save_imatrix: options.save_imatrix,
            split_max_size: options.split_max_size,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [
            ("1", Some(1)),
            ("7b", Some(7)),
            ("500M", Some(500_000_000)),
            ("1GB", Some(1_000_000_000)),
            ("4g", Some(4_000_000_000)),
            ("4GiB", Some(4 << 30)),
            ("2kib", Some(2048)),
            ("", None),
            ("0", None),
            ("0G", None),
            ("G", None),
            ("-1G", None),
            ("1.5G", None),
            ("1 G", None),
            ("1T", None),
            ("18446744073709551616", None),
            ("18446744073709551615G", None),
        ] {
            assert_eq!(size(text).ok(), bytes, "{text}");
        }
    }
}
