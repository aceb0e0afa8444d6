//! Metadata about the file rather than the model's graph, with the values that llama.cpp's converter writes.

use serde_json::{Map, Value as Json};

use super::families::GgufFamily;
use super::file::Value;
use super::plan::PlannedTensor;
use crate::checkpoint::{ModelDirectory, parse_strictly};

/// The version of the block types that llama.cpp expects.
const QUANTIZATION_VERSION: u32 = 2;

/// The key of the model's name.
pub(super) const NAME: &str = "general.name";

/// The name of the model: the one that its file states, or that of its directory.
pub(super) fn name(directory: &ModelDirectory) -> String {
    let of_directory = || directory.path().file_name().map(|n| n.to_string_lossy().into_owned());
    let stated = directory.description().get(NAME).and_then(Json::as_str).map(str::to_owned);
    stated.or_else(of_directory).unwrap_or_default()
}

/// General entries that describe the model and the file.
pub(super) fn general(
    family: &GgufFamily,
    name: &str,
    file_type: u32,
    tensors: &[PlannedTensor],
) -> Vec<(String, Value)> {
    let entries = [
        ("general.architecture", Value::string(family.arch)),
        ("general.type", Value::string("model")),
        (NAME, Value::string(name)),
        ("general.size_label", Value::string(size_label(tensors))),
        ("general.file_type", Value::U32(file_type)),
        ("general.quantization_version", Value::U32(QUANTIZATION_VERSION)),
    ];
    entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

/// The number of parameters, such as `7.3M`. With experts, their number and the parameters outside of experts and of one
/// expert, such as `8x3.9M`.
fn size_label(tensors: &[PlannedTensor]) -> String {
    let (mut shared, mut of_expert, mut experts, mut stacks) = (0, 0, 0, 0);
    for PlannedTensor { name, shape, .. } in tensors {
        let size: usize = shape.iter().product();
        match shape[..] {
            [count, _, _] if name.contains("_exps.") && count > 0 => {
                of_expert += size / count;
                experts += count;
                stacks += 1;
            }
            _ => shared += size,
        }
    }
    match experts.checked_div(stacks) {
        Some(experts) => format!("{experts}x{}", rounded(shared + of_expert)),
        None => rounded(shared),
    }
}

/// A number with two digits or more, and a suffix.
fn rounded(count: usize) -> String {
    let count = count as f64;
    let units = [(1e12, "T"), (1e9, "B"), (1e6, "M")];
    let (unit, suffix) = units.into_iter().find(|(unit, _)| count > *unit).unwrap_or((1e3, "K"));
    let scaled = count / unit;
    let digits = match scaled.round_ties_even() {
        whole if whole >= 10.0 => 0,
        whole if whole >= 1.0 => 1,
        _ => 2,
    };
    format!("{scaled:.digits$}{suffix}")
}

/// The type of a value.
enum Kind {
    Integer,
    Float,
}

use Kind::{Float, Integer};

/// The settings of `generation_config.json` that files contain: the key in the file, the field or fields, of which the
/// first one is used, and the type.
const SAMPLING: [(&str, &[&str], Kind); 11] = [
    ("top_k", &["top_k"], Integer),
    ("top_p", &["top_p"], Float),
    ("min_p", &["min_p"], Float),
    ("xtc_probability", &["xtc_probability"], Float),
    ("xtc_threshold", &["xtc_threshold"], Float),
    ("temp", &["temperature"], Float),
    ("penalty_last_n", &["penalty_last_n"], Integer),
    ("penalty_repeat", &["penalty_repeat", "repetition_penalty"], Float),
    ("mirostat", &["mirostat"], Integer),
    ("mirostat_tau", &["mirostat_tau"], Float),
    ("mirostat_eta", &["mirostat_eta"], Float),
];

/// The sampling that the model's authors recommend. Invalid values are left out.
pub(super) fn sampling(directory: &ModelDirectory) -> Vec<(String, Value)> {
    const MAX_BYTES: u64 = 1 << 20;
    let file = directory.sidecar("generation_config.json").and_then(|file| file.read(MAX_BYTES).ok()?.ok());
    match file.map(|bytes| parse_strictly(&bytes)) {
        Some(Ok(Json::Object(config))) => sampling_of(&config),
        _ => Vec::new(),
    }
}

fn sampling_of(config: &Map<String, Json>) -> Vec<(String, Value)> {
    let entry = |(key, fields, kind): &(&str, &[&str], Kind)| {
        let found = fields.iter().find_map(|field| config.get(*field))?;
        let value = match kind {
            Integer => Value::I32(found.as_i64()?.try_into().ok()?),
            Float => Value::F32(Some(found.as_f64()? as f32).filter(|value| value.is_finite())?),
        };
        Some((format!("general.sampling.{key}"), value))
    };
    SAMPLING.iter().filter_map(entry).collect()
}

/// The entries that record the importance matrix used, with the keys of `llama-quantize`.
pub(super) fn importance(file: &str, dataset: &str, entries: usize, chunks: u32) -> Vec<(String, Value)> {
    [
        ("quantize.imatrix.file", Value::string(file)),
        ("quantize.imatrix.dataset", Value::string(dataset)),
        ("quantize.imatrix.entries_count", Value::U32(entries as u32)),
        ("quantize.imatrix.chunks_count", Value::U32(chunks)),
    ]
    .into_iter()
    .map(|(key, value)| (key.to_owned(), value))
    .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::blocks::F32;
    use crate::gguf::rows::Source;

    #[test]
    fn sizes_are_rounded_as_by_the_converter() {
        let tensor = |name: &str, shape: &[usize]| PlannedTensor {
            name: name.into(),
            shape: shape.to_vec(),
            kind: &F32,
            replaces: None,
            source: Source::Values(Vec::new()),
        };
        for (count, label) in [
            (999, "1.0K"),
            (420, "0.42K"),
            (94_000, "94K"),
            (1_000_000, "1000K"),
            (7_316_000, "7.3M"),
            (9_960_000, "10M"),
            (1_235_814_400, "1.2B"),
            (70_553_706_496, "71B"),
            (1_026_408_232_448, "1.0T"),
        ] {
            assert_eq!(size_label(&[tensor("token_embd.weight", &[count])]), label, "{count}");
        }
        let experts = [
            tensor("token_embd.weight", &[1000, 100]),
            tensor("blk.0.ffn_up_exps.weight", &[8, 1000, 1000]),
            tensor("blk.0.ffn_up_exps.bias", &[8, 50_000]),
            tensor("blk.1.ffn_up_exps.weight", &[8, 1000, 1000]),
        ];
        assert_eq!(size_label(&experts), "8x2.5M");
    }

    #[test]
    fn sampling_is_copied_if_it_is_valid() {
        let config = json!({
            "temperature": 0.6, "top_p": null, "top_k": 20, "min_p": "none", "repetition_penalty": 1.05,
            "penalty_repeat": 1.1, "mirostat": 3_000_000_000_u64, "mirostat_tau": 1e300, "do_sample": true,
        });
        let found = sampling_of(config.as_object().unwrap());
        let key = |name: &str| format!("general.sampling.{name}");
        let expected = [
            (key("top_k"), Value::I32(20)),
            (key("temp"), Value::F32(0.6)),
            (key("penalty_repeat"), Value::F32(1.1)),
        ];
        assert_eq!(found, expected);
    }
}
