//! The options of `--format gguf`, shared by `plan` and `quantize`.

use std::path::PathBuf;

use quant_core::blocks::{BLOCK_TYPES, BlockType, Search, block_type};
use quant_core::gguf::{self, GgufRequest, MIXTURES, Mixture};
use quant_core::quantize::gptq::GptqSettings;
use quant_core::recipe::Pattern;
use quant_core::{Error, Result};

use crate::recipe::RecipeOptions;

/// The mixture of a request that names none.
const DEFAULT_MIXTURE: &str = "Q4_K_M";

/// What is about GGUF files alone.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct GgufOptions {
    /// The pre-tokenizer, by llama.cpp's name, where it is not recognized; none writes a file without vocabulary
    #[arg(long, value_name = "NAME", help_heading = "GGUF")]
    pub pre: Option<String>,
    /// Give rows that do not fit their type the type that llama-quantize falls back to; the report lists them
    #[arg(long, help_heading = "GGUF")]
    pub allow_fallback: bool,
    /// Find scales as llama-quantize does, byte for byte, and not by the search that leaves less error
    #[arg(long, help_heading = "GGUF")]
    pub reference_search: bool,
    /// Weigh errors by the importance matrix in FILE (GGUF or .dat). With --calibration one is gathered
    #[arg(long, value_name = "FILE", help_heading = "GGUF")]
    pub imatrix: Option<PathBuf>,
    /// Write the importance matrix that was gathered to FILE; .dat for the older kind of file, else GGUF
    #[arg(long, value_name = "FILE", help_heading = "GGUF")]
    pub save_imatrix: Option<PathBuf>,
    /// Write several files into the directory OUT where one would have more than SIZE of tensors, as 500M or 4G
    #[arg(long, value_name = "SIZE", value_parser = size, help_heading = "GGUF")]
    pub split_max_size: Option<u64>,
}

/// Bytes, from a number with a unit of 1000s, as llama.cpp's programs read it.
fn size(text: &str) -> std::result::Result<u64, String> {
    let (digits, unit) = match text.char_indices().last() {
        Some((at, 'k' | 'K')) => (&text[..at], 1_000),
        Some((at, 'm' | 'M')) => (&text[..at], 1_000_000),
        Some((at, 'g' | 'G')) => (&text[..at], 1_000_000_000),
        _ => (text, 1),
    };
    let bytes = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
    bytes.filter(|bytes| *bytes > 0).ok_or_else(|| "expected a number of bytes, as 500M or 4G".to_owned())
}

impl GgufOptions {
    fn given(&self) -> [(&'static str, bool); 6] {
        [
            ("--pre", self.pre.is_some()),
            ("--allow-fallback", self.allow_fallback),
            ("--reference-search", self.reference_search),
            ("--imatrix", self.imatrix.is_some()),
            ("--save-imatrix", self.save_imatrix.is_some()),
            ("--split-max-size", self.split_max_size.is_some()),
        ]
    }

    /// Fails where an option is given and no GGUF file is written.
    ///
    /// # Errors
    /// [`Error::Usage`].
    pub fn refuse(&self) -> Result<()> {
        match self.given().into_iter().find(|(_, given)| *given) {
            Some((option, _)) => Err(Error::usage(
                format!("{option} has no effect: it is about GGUF files"),
                "add --format gguf, or leave it out",
            )),
            None => Ok(()),
        }
    }
}

impl RecipeOptions {
    /// Whether a GGUF file is written.
    ///
    /// # Errors
    /// [`Error::Usage`] when other formats are named too.
    pub fn writes_gguf(&self) -> Result<bool> {
        let named = self.format.iter().any(|format| format == gguf::FORMAT);
        if named && self.format.len() > 1 {
            return Err(Error::usage(
                "GGUF is written in a run of its own",
                "run once with --format gguf, and once with the other formats",
            ));
        }
        Ok(named)
    }

    /// What is asked for, `weighted` by an importance matrix or not.
    ///
    /// # Errors
    /// [`Error::Usage`] for a type that is unknown, and for options that are about other formats.
    pub fn gguf_request(&self, weighted: bool) -> Result<GgufRequest> {
        if let Some((option, _)) = self.not_for_gguf().into_iter().find(|(_, given)| *given) {
            return Err(Error::usage(
                format!("{option} has no effect with --format {}", gguf::FORMAT),
                "leave it out; --scheme names the types, and --calibration weighs errors",
            ));
        }
        let overrides = self.overrides.iter().map(|text| {
            let (pattern, kind) = text.rsplit_once('=').ok_or_else(|| {
                Error::usage(
                    format!("override `{text}` has no `=`"),
                    "write --override PATTERN=TYPE, for example ffn_down=q6_k",
                )
            })?;
            Ok((Pattern::new(pattern)?, kind_of(kind)?))
        });
        Ok(GgufRequest {
            mixture: mixture(self.scheme.as_deref().unwrap_or(DEFAULT_MIXTURE))?,
            overrides: overrides.collect::<Result<_>>()?,
            ignore: self.ignore.iter().map(|text| Pattern::new(text)).collect::<Result<_>>()?,
            pre: self.gguf.pre.clone(),
            allow_fallback: self.gguf.allow_fallback,
            weighted,
            gptq: self.gguf_method()?,
            search: match self.gguf.reference_search {
                true => Search::Reference,
                false => Search::Refined,
            },
        })
    }

    /// The settings of GPTQ, where it is the method.
    fn gguf_method(&self) -> Result<Option<GptqSettings>> {
        let settings = match self.method.as_deref() {
            None | Some("rtn") => return Ok(None),
            Some("gptq") => GptqSettings {
                damping: self.damping.unwrap_or(GptqSettings::default().damping),
                ..GptqSettings::default()
            },
            Some(other) => {
                return Err(Error::usage(
                    format!("the method {other} does not write GGUF files"),
                    "choose gptq, or leave it out: rows are rounded to nearest then",
                ));
            }
        };
        settings.check()?;
        if self.gguf.reference_search {
            return Err(Error::usage(
                "--reference-search and --method gptq ask for different bytes",
                "leave one of them out",
            ));
        }
        Ok(Some(settings))
    }

    fn not_for_gguf(&self) -> Vec<(&'static str, bool)> {
        vec![
            ("--preset", self.preset.is_some()),
            ("--recipe", self.recipe.is_some()),
            ("--group-size", self.group_size.is_some()),
            ("--symmetric", self.symmetric),
            ("--asymmetric", self.asymmetric),
            ("--alpha", self.alpha.is_some()),
            ("--smooth-producers", self.smooth_producers.is_some()),
            ("--channel-maxima", self.channel_maxima.is_some()),
            ("--skip", !self.skip.is_empty()),
            ("--output-alpha", self.output_alpha.is_some()),
            ("--attention-alpha", self.attention_alpha.is_some()),
            ("--search", self.search.is_some()),
            ("--damping", self.damping.is_some() && self.method.is_none()),
            ("--block-size", self.block_size.is_some()),
            ("--act-order", self.act_order.is_some()),
            ("--layer-inputs", self.layer_inputs.is_some()),
            ("--scale-search", self.scale_search.is_some()),
        ]
    }
}

fn mixture(name: &str) -> Result<&'static Mixture> {
    gguf::mixture(name).ok_or_else(|| {
        let known: Vec<&str> = MIXTURES.iter().map(|m| m.name).collect();
        Error::usage(format!("`{name}` is no type of GGUF files"), format!("known are {}", known.join(", ")))
    })
}

fn kind_of(name: &str) -> Result<&'static BlockType> {
    block_type(name).ok_or_else(|| {
        let known: Vec<&str> = BLOCK_TYPES.iter().map(|kind| kind.name).collect();
        Error::usage(format!("`{name}` is no type of a tensor"), format!("known are {}", known.join(", ")))
    })
}
