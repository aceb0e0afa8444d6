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

/// Parses a number of bytes with an optional unit, where K, M and G are powers of 1000 as in llama.cpp's programs.
fn size(text: &str) -> std::result::Result<u64, String> {
    let (digits, unit) = match text.char_indices().last() {
        Some((at, 'k' | 'K')) => (&text[..at], 1_000),
        Some((at, 'm' | 'M')) => (&text[..at], 1_000_000),
        Some((at, 'g' | 'G')) => (&text[..at], 1_000_000_000),
        _ => (text, 1),
    };
    let bytes = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
    bytes
        .filter(|bytes| *bytes > 0)
        .ok_or_else(|| "expected a number of bytes, such as 500M or 4G".to_owned())
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
