//! Remedies for errors.

use std::io::ErrorKind;
use std::path::Path;

use super::Error;
use crate::checkpoint::{WEIGHT_FLOATS, printable};
use crate::format::quant_methods;
use crate::names::{nearest, nearest_path};
use crate::wording::Remedy;

const CHANGED: &str = "restore the files of the model, or remove the directory next to the output whose name ends in .job to start over";

impl Error {
    /// Creates an error for an input that is not the one that an interrupted run read; `what` names it in the plural.
    pub fn inputs_changed(what: &str) -> Self {
        Self::usage(format!("{what} have changed since the run was interrupted"), CHANGED)
    }

    /// Returns what the user can do about the error. If a path does not exist, the remedy begins with the path that was
    /// probably meant, for which at most one directory is read.
    pub fn remedy(&self) -> Remedy {
        let remedy = self.known_remedy();
        match self.absent_path().and_then(shown_nearest) {
            Some(meant) => format!("did you mean {meant}? {remedy}").into(),
            None => remedy,
        }
    }

    /// The path of a file or directory that does not exist.
    fn absent_path(&self) -> Option<&Path> {
        match self {
            Self::NoCheckpoint { path, reason, .. }
            | Self::Recipe { path, reason, .. }
            | Self::InputFile { path, reason, .. } => {
                Some(path).filter(|_| reason.ends_with("does not exist"))
            }
            Self::Io { action: "read" | "open", path, source } => {
                Some(path).filter(|_| source.kind() == ErrorKind::NotFound)
            }
            _ => None,
        }
        .map(|path| path.as_path())
    }

    fn known_remedy(&self) -> Remedy {
        let text: String = match self {
            Self::Usage { remedy, .. }
            | Self::Config { remedy: Some(remedy), .. }
            | Self::NoCheckpoint { remedy: Some(remedy), .. }
            | Self::Recipe { remedy, .. }
            | Self::Unavailable { remedy, .. }
            | Self::InputFile { remedy, .. } => return remedy.clone(),
            Self::PatternMatchesNothing { nearest, .. } if nearest.is_empty() => {
                "‹plan(MODEL, all)› lists the names of all linears; a pattern is a name, its last parts, or a glob, and `re:` \
                 begins a regular expression"
                    .into()
            }
            Self::PatternMatchesNothing { nearest, .. } => {
                format!("did you mean {}? ‹plan(MODEL, all)› lists all names", nearest.join(", "))
            }
            Self::GroupSizeDoesNotDivide(offenders) => format!(
                "choose a ‹group_size› that divides these widths, or ‹group_size=channel›, which fits all; or a \
                different scheme for these tensors, for example ‹override='{0}=w4a16-channel'›. Groups of floating-point \
                formats have a fixed size; for these, choose for example ‹override='{0}=wf8a16-channel'›",
                offenders.first().map(|o| suggestion_pattern(&o.tensor)).unwrap_or_default()
            ),
            Self::Kernel(_) => "dequantize the weight, and multiply by the floats".into(),
            Self::OutputExists { .. } => "choose a different output, or replace it with ‹force› if quant wrote it".into(),
            Self::OutputIsInput { input, .. } => {
                format!("choose a path outside {}", input.display())
            }
            Self::InputChanged { .. } => CHANGED.into(),
            Self::MissingLinear { is_float: true, .. } => {
                "read a float weight from the source of the checkpoint".into()
            }
            Self::MissingLinear { nearest: Some(name), .. } => format!("did you mean {name}?"),
            Self::MissingLinear { .. } => "the checkpoint lists the names of its quantized linears".into(),
            Self::NoCheckpoint { .. } => {
                "a model is a Hugging Face directory with config.json and either model.safetensors or \
                model.safetensors.index.json and its shards; most commands also accept a GGUF file"
                    .into()
            }
            Self::PickleOnly { .. } => {
                "reading a pickle file can run arbitrary code, so none is opened; convert the model \
                once in a sandbox: load it with transformers and call `save_pretrained(..., \
                safe_serialization=True)`"
                    .into()
            }
            Self::Safetensors { source, .. } if source.placeholder().is_some() => {
                source.placeholder().map_or_else(String::new, |found| found.remedy().into())
            }
            Self::Safetensors { .. } => {
                "the file is damaged, incomplete or hostile: download it again and verify its checksum".into()
            }
            Self::Index { .. } => "download the index and its shards again, from the same revision".into(),
            Self::MissingTensor { path, .. } | Self::TensorShape { path, .. } | Self::Config { path, .. }
                if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf")) =>
            {
                "the GGUF file is damaged or incomplete: download it again".into()
            }
            Self::MissingTensor { .. } | Self::TensorShape { .. } | Self::UnknownExperts { .. } => {
                "config.json and the weights must belong to the same model: download both again".into()
            }
            Self::TensorDtype { expected, .. } if expected == WEIGHT_FLOATS => {
                "convert the checkpoint to float32, float16 or bfloat16, or download it again".into()
            }
            Self::TensorDtype { .. } => {
                "the tensors of this linear do not belong together, or do not match `quantization_config`: \
                download the checkpoint again"
                    .into()
            }
            Self::Config { path, .. } => {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                format!("correct {name}, or download it again")
            }
            Self::UnknownArchitecture { known, .. } => {
                format!(
                    "if the model computes the same function as a supported architecture, convert its fields and \
                    tensor names to that one; docs/families.md describes all of them. Supported architectures: {}",
                    known.join(", ")
                )
            }
            Self::AmbiguousNames { .. } => {
                "the directory may contain a mix of two saved models: download the checkpoint into an empty \
                directory"
                    .into()
            }
            Self::AlreadyQuantized { .. } => {
                "start from the original float checkpoint; or set only ‹format› to write the same numbers \
                in a different format; or set ‹requantize› to quantize the dequantized weights again, which \
                adds a second rounding error"
                    .into()
            }
            Self::UnsupportedQuantization { path, .. } if path.ends_with("config.json") => format!(
                "start from the original float checkpoint, or from a checkpoint in a format that can be read: \
                `quant_method` {}, or GGUF",
                quant_methods().collect::<Vec<_>>().join(", ")
            ),
            Self::UnsupportedQuantization { .. } => {
                "the file is damaged, or the program that wrote it does not follow the format: write the checkpoint \
                again with that program, or start from the original float checkpoint"
                    .into()
            }
            Self::NotRepackable { .. } => "quantize the original float checkpoint to this format".into(),
            Self::Tokenizer { .. } => {
                "download the model's tokenizer.json and tokenizer_config.json into the model directory, from the \
                same revision as the weights"
                    .into()
            }
            Self::Text { line: Some(_), .. } => {
                "correct this line: every line must be a JSON object of at most 64 MiB with a field `text` or \
                `messages`"
                    .into()
            }
            Self::Text { .. } => {
                "give a text of at most 1 GiB: UTF-8, or JSONL whose lines have a field `text` or `messages`"
                    .into()
            }
            Self::NameTaken { .. } => {
                "the checkpoint is partly quantized or inconsistent: download the original again, or leave \
                this linear float with ‹ignore›"
                    .into()
            }
            Self::UnknownText { name, known } => {
                let set = || nearest(name, known.iter().map(String::as_str)).map(str::to_owned);
                let file = || shown_nearest(Path::new(name));
                let meant = match name.contains(['/', '.']) {
                    true => file().or_else(set),
                    false => set().or_else(file),
                };
                let meant = meant.map_or_else(String::new, |meant| format!("did you mean {meant}? "));
                let known = known.join(", ");
                format!("{meant}give the path of a text or .jsonl file, or one of these sets: {known}")
            }
            Self::Io { .. } => "check the path, its permissions, and the disk".into(),
            Self::Memory { .. } => {
                "free some memory, raise the memory limit of the process or container, or request \
                fewer or shorter windows; ‹plan()› predicts the memory of a run"
                    .into()
            }
            Self::MemoryBudget { needed, budget, available, threads } => {
                let limit = budget.or(*available).unwrap_or_default();
                let threads = threads.and_then(|threads| threads.that_fit(*needed, limit));
                let threads = threads.map_or_else(String::new, |fit| format!("set ‹threads={fit}› or less, "));
                let needed = needed.div_ceil(1 << 20);
                match budget {
                    Some(_) => format!(
                        "{threads}set ‹memory_budget={needed}MiB› or more, or request fewer or shorter windows"
                    ),
                    None => format!(
                        "{threads}free some memory, request fewer or shorter windows, or set \
                        ‹memory_budget={needed}MiB› to run anyway"
                    ),
                }
            }
            Self::DiskFull { .. } => "free some disk space, or write to a different disk".into(),
            Self::FileTooLarge { limit: Some(_), .. } => {
                "raise the limit on file sizes (`ulimit -f unlimited`), or write a GGUF file in parts with \
                ‹split_max_size›"
                    .into()
            }
            Self::FileTooLarge { .. } => {
                "write to a different file system, or write a GGUF file in parts with ‹split_max_size›".into()
            }
            Self::Locked { .. } => "wait for that process to finish, or stop it".into(),
            Self::Verification { .. } => {
                "the disk returned bytes that differ from those written: check the disk and run again".into()
            }
            Self::NonFinite { .. } => {
                "the checkpoint is damaged: download it again, or repair this tensor".into()
            }
            Self::Numeric { .. } => {
                "leave this tensor float with ‹ignore›, or choose a different scheme for it with ‹override›"
                    .into()
            }
            Self::Logits { .. } => {
                "check whether the original model produces finite logits on the same text".into()
            }
            Self::Engine(_) => {
                "this is an error of the program that runs the model: correct what it reports".into()
            }
            Self::Calibration { .. } => {
                "the model probably overflows on this text: check whether ‹eval()› reports a finite perplexity on \
                this text, choose a different ‹calibration› text, or use ‹method=rtn›, which needs no text"
                    .into()
            }
            Self::Cache { .. } => {
                "cache keys and values as floats, with ‹kv=16› or a scheme without kv; if this fails, too, \
                the model itself overflows"
                    .into()
            }
            Self::Tensor(_) | Self::Internal(_) => {
                "this is a bug: please report it, and what caused it".into()
            }
            Self::Interrupted => {
                "run it again: ‹quantize()› continues where it stopped, and so does ‹eval()› with the same ‹journal›"
                    .into()
            }
        };
        text.into()
    }
}

/// The path that was probably meant, as messages show it.
fn shown_nearest(path: &Path) -> Option<String> {
    nearest_path(path).map(|meant| printable(&meant.display().to_string()))
}

/// `model.layers.3.mlp.down_proj.weight` → `down_proj`.
fn suggestion_pattern(tensor: &str) -> String {
    let module = tensor.strip_suffix(".weight").unwrap_or(tensor);
    module.rsplit('.').next().unwrap_or(module).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ThreadMemory;

    #[test]
    fn another_download_does_not_mend_a_format() {
        let remedy = |path: &str| {
            let error = Error::UnsupportedQuantization { path: path.into(), reason: "is unknown".into() };
            error.remedy().to_string()
        };
        let config = remedy("model/config.json");
        assert!(
            config.starts_with("start from the original float checkpoint, or from a checkpoint in a format")
        );
        assert!(config.contains("compressed-tensors, ") && config.ends_with(", or GGUF"), "{config}");
        let tensor = remedy("model/model.safetensors");
        assert!(tensor.contains("write the checkpoint again with that program"), "{tensor}");
        assert!(!format!("{config}{tensor}").contains("download"));
    }

    #[test]
    fn fewer_threads_are_suggested_only_if_they_suffice() {
        let remedy = |limit: u64, threads| {
            let error = Error::MemoryBudget {
                needed: 100 << 20,
                budget: Some(limit << 20),
                available: None,
                threads,
            };
            (error.to_string(), error.remedy().to_string())
        };
        let threads = Some(ThreadMemory { count: 8, bytes: 4 << 20 });
        let plain = "set ‹memory_budget=100MiB› or more, or request fewer or shorter windows";
        let (message, advice) = remedy(89, threads);
        assert_eq!(
            message,
            "the run needs at least 100 MiB of memory with 8 threads, but the budget is 89 MiB"
        );
        assert_eq!(advice, format!("set ‹threads=5› or less, {plain}"));
        assert_eq!(remedy(72, threads).1, format!("set ‹threads=1› or less, {plain}"));
        assert_eq!(remedy(71, threads).1, plain);
        let (message, advice) = remedy(89, None);
        assert_eq!(
            (&*message, &*advice),
            ("the run needs at least 100 MiB of memory, but the budget is 89 MiB", plain)
        );
    }
}
