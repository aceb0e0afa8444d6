//! Remedies for errors.

use super::Error;
use crate::wording::Remedy;

impl Error {
    /// Returns what the user can do about the error; its [parts](Remedy::parts) name settings and commands.
    pub fn remedy(&self) -> Remedy {
        let text: String = match self {
            Self::Usage { remedy, .. }
            | Self::Recipe { remedy, .. }
            | Self::Unavailable { remedy, .. }
            | Self::InputFile { remedy, .. } => return remedy.clone(),
            Self::PatternMatchesNothing { nearest, .. } if nearest.is_empty() => {
                "‹plan(MODEL)› lists the names that can be matched".into()
            }
            Self::PatternMatchesNothing { nearest, .. } => {
                format!("did you mean {}? ‹plan(MODEL)› lists all names", nearest.join(", "))
            }
            Self::GroupSizeDoesNotDivide(offenders) => format!(
                "choose a ‹group_size› that divides them, or give these tensors their own scheme, \
                 for example ‹override='{}=w4a16-channel'›",
                offenders.first().map(|o| suggestion_pattern(&o.tensor)).unwrap_or_default()
            ),
            Self::OutputExists { .. } => "choose a different output, or replace it with ‹force›".into(),
            Self::OutputIsInput { .. } => "write to a separate directory".into(),
            Self::NoCheckpoint { .. } => {
                "give a Hugging Face model directory with config.json and model.safetensors, or its \
                 shards with model.safetensors.index.json"
                    .into()
            }
            Self::PickleOnly { .. } => {
                "pickle files can run code when read, so they are never opened; convert them \
                 once in a sandbox: load with transformers and `save_pretrained(..., \
                 safe_serialization=True)`"
                    .into()
            }
            Self::Safetensors { .. } => {
                "the file is damaged, incomplete or hostile: fetch it again and compare its checksum".into()
            }
            Self::Index { .. } => {
                "fetch the index and its shards again; they must come from the same revision".into()
            }
            Self::MissingTensor { path, .. } | Self::TensorShape { path, .. } | Self::Config { path, .. }
                if path.extension().is_some_and(|extension| extension == "gguf") =>
            {
                "the GGUF file is damaged or incomplete: fetch it again".into()
            }
            Self::MissingTensor { .. } | Self::TensorShape { .. } => {
                "config.json and the weights must come from the same model; fetch both again".into()
            }
            Self::TensorDtype { .. } => {
                "convert the checkpoint to float32, float16 or bfloat16, or fetch it again".into()
            }
            Self::Config { .. } => "correct config.json, or fetch it again".into(),
            Self::UnknownArchitecture { known, .. } => {
                format!("this version knows {}", known.join(", "))
            }
            Self::AmbiguousNames { .. } => {
                "two saves of the model may be mixed in one directory: fetch the checkpoint again into an empty one"
                    .into()
            }
            Self::AlreadyQuantized { .. } => {
                "quantize from the original float checkpoint, or give only ‹format› to write the same \
                numbers in a different format; ‹requantize› rounds the dequantized weights a second time, \
                with additional loss"
                    .into()
            }
            Self::UnsupportedQuantization { .. } => {
                "compressed-tensors, AWQ gemm, GPTQ, QServe, ModelOpt, FP8 (quant_method fp8) and MXFP4 (quant_method mxfp4) checkpoints can be read; \
                 ‹quantize()› also starts from the original float checkpoint"
                    .into()
            }
            Self::NotRepackable { .. } => {
                "quantize the original float checkpoint to this format".into()
            }
            Self::Tokenizer { .. } => {
                "the model directory needs the tokenizer.json that belongs to it".into()
            }
            Self::Text { line: Some(_), .. } => {
                "correct this line: every line is a JSON object with a `text` field, or, for calibration, \
                `messages`"
                    .into()
            }
            Self::Text { .. } => {
                "give a longer UTF-8 text, or a JSONL file whose every line has a `text` field (for \
                 calibration, or `messages`), or \
                 fewer or shorter windows (‹samples› and ‹seq_len›, or ‹windows› and ‹window›)"
                    .into()
            }
            Self::NameTaken { .. } => {
                "the checkpoint is partly quantized or inconsistent: fetch the original again, or leave the \
                 other tensor float with ‹ignore›"
                    .into()
            }
            Self::UnknownText { known, .. } => {
                format!("give the path of a text or .jsonl file, or one of {}", known.join(", "))
            }
            Self::Io { .. } => "check the path, its permissions and the disk".into(),
            Self::Memory { .. } => {
                "free some memory, raise the limit on it (ulimit -v, or the container's), or ask for fewer \
                or shorter windows; ‹plan()› predicts the memory of a run"
                    .into()
            }
            Self::MemoryBudget { needed, budget: Some(_), .. } => {
                format!("set ‹memory_budget={}MiB› or more, or ask for fewer or shorter windows", needed.div_ceil(1 << 20))
            }
            Self::MemoryBudget { needed, .. } => format!(
                "free some memory, ask for fewer or shorter windows, or set ‹memory_budget={}MiB› to try it anyway",
                needed.div_ceil(1 << 20)
            ),
            Self::DiskFull { .. } => "free some space, or write elsewhere".into(),
            Self::Locked { .. } => "wait for it to finish, or stop it".into(),
            Self::Verification { .. } => {
                "the disk returned different bytes than were written: check it and run again".into()
            }
            Self::NonFinite { .. } => {
                "the checkpoint is broken: fetch it again, or repair this tensor".into()
            }
            Self::Numeric { .. } => {
                "exclude this tensor with ‹ignore›, or choose a different scheme for it with ‹override›".into()
            }
            Self::Logits { .. } => {
                "check whether the original model gives finite numbers on the same text".into()
            }
            Self::Calibration { .. } => {
                "the float model itself overflows there: check whether ‹eval()› gives it a finite perplexity \
                on this text, use a different ‹calibration›, or use ‹method=rtn›, which needs none"
                    .into()
            }
            Self::Cache { .. } => {
                "cache them as floats, with ‹kv=16› or a scheme without kv; if that fails too, the model \
                itself overflows"
                    .into()
            }
            Self::Tensor(_) | Self::Internal(_) => {
                "this is a bug: please report it with the command that led here".into()
            }
            Self::Interrupted => {
                "run the same command again; ‹quantize()› continues where it stopped with ‹resume›, and so \
                does ‹eval()› with ‹journal›"
                    .into()
            }
        };
        text.into()
    }
}

/// `model.layers.3.mlp.down_proj.weight` → `down_proj`.
fn suggestion_pattern(tensor: &str) -> String {
    let module = tensor.strip_suffix(".weight").unwrap_or(tensor);
    module.rsplit('.').next().unwrap_or(module).to_owned()
}
