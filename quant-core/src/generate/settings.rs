//! The settings of text generation, and their file: `generation_config.json`.

use serde_json::{Map, Value};

use crate::checkpoint::{ConfigFields, ModelDirectory, parse_strictly};
use crate::{Error, Result};

const FILE: &str = "generation_config.json";
/// The maximum size of the file. Real ones have a few hundred bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// The maximum number of end-of-sequence or suppressed tokens.
const MAX_TOKENS: usize = 65_536;

/// Fields that would change the text but are not implemented, each with its neutral value. Any other value is reported
/// as a note.
const IGNORED: [(&str, Neutral); 17] = [
    ("num_beams", Neutral::Number(1.0)),
    ("num_beam_groups", Neutral::Number(1.0)),
    ("penalty_alpha", Neutral::Number(0.0)),
    ("typical_p", Neutral::Number(1.0)),
    ("epsilon_cutoff", Neutral::Number(0.0)),
    ("eta_cutoff", Neutral::Number(0.0)),
    ("top_h", Neutral::Nothing),
    ("guidance_scale", Neutral::Number(1.0)),
    ("min_length", Neutral::Number(0.0)),
    ("exponential_decay_length_penalty", Neutral::Nothing),
    ("bad_words_ids", Neutral::Nothing),
    ("force_words_ids", Neutral::Nothing),
    ("sequence_bias", Neutral::Nothing),
    ("forced_bos_token_id", Neutral::Nothing),
    ("forced_eos_token_id", Neutral::Nothing),
    ("begin_suppress_tokens", Neutral::Nothing),
    ("watermarking_config", Neutral::Nothing),
];

/// The value with which a field has no effect, in addition to `null` and an empty list.
#[derive(Debug, Clone, Copy)]
enum Neutral {
    Nothing,
    Number(f64),
}

/// Settings that determine how tokens are chosen and when generation stops, with the names and meanings of
/// transformers' `GenerationConfig`.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationSettings {
    /// The maximum number of new tokens.
    pub max_new_tokens: usize,
    /// The number of new tokens before which end-of-sequence tokens are excluded.
    pub min_new_tokens: usize,
    /// Whether to sample; otherwise the most probable token is taken.
    pub do_sample: bool,
    /// Logits are divided by the temperature before sampling; greater than 0.
    pub temperature: f32,
    /// Sampling is restricted to this many most probable tokens; 0 means all.
    pub top_k: usize,
    /// Sampling is restricted to the smallest set of most probable tokens with at least this total probability; above
    /// 0, at most 1.
    pub top_p: f32,
    /// Tokens whose probability is below this fraction of the largest one are not sampled; from 0 to 1.
    pub min_p: f32,
    /// Logits of tokens that are already in the prompt or the text are divided by the penalty if positive, and
    /// multiplied by it if negative; greater than 0.
    pub repetition_penalty: f32,
    /// No n-gram of this length occurs twice; 0 allows all.
    pub no_repeat_ngram_size: usize,
    /// Tokens that are never emitted.
    pub suppress_tokens: Vec<u32>,
    /// End-of-sequence tokens.
    pub eos_token_ids: Vec<u32>,
    /// The seed for sampling.
    pub seed: u64,
}

impl Default for GenerationSettings {
    fn default() -> Self {
        Self {
            max_new_tokens: 256,
            min_new_tokens: 0,
            do_sample: false,
            temperature: 1.0,
            top_k: 50,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            no_repeat_ngram_size: 0,
            suppress_tokens: Vec::new(),
            eos_token_ids: Vec::new(),
            seed: 0,
        }
    }
}

impl GenerationSettings {
    /// Reads the settings recommended by a model's authors: `generation_config.json` next to the model, with the
    /// end-of-sequence tokens of `config.json` if the former specifies none. Also returns a note on each field that
    /// would change the text and is not implemented.
    ///
    /// # Errors
    /// [`Error::Config`] with the field when one is malformed or out of range; [`Error::InputFile`] when the file is
    /// larger than 1 MiB or not a JSON object.
    pub fn open(directory: &ModelDirectory) -> Result<(Self, Vec<String>)> {
        let path = directory.path().join(FILE);
        let map = match directory.sidecar(FILE) {
            None => Map::new(),
            Some(sidecar) => {
                let fault = |reason| Error::InputFile {
                    path: path.clone(),
                    line: None,
                    reason,
                    remedy: "correct the file, or remove it to use the default, greedy decoding".into(),
                };
                let bytes = sidecar.read(MAX_FILE_BYTES)?.map_err(fault)?;
                match parse_strictly(&bytes) {
                    Ok(Value::Object(map)) => map,
                    Ok(_) => return Err(fault("must contain one JSON object".into())),
                    Err(reason) => return Err(fault(format!("is not valid JSON: {reason}"))),
                }
            }
        };
        let mut settings = Self::from_fields(&ConfigFields::new(&path, &map))?;
        if settings.eos_token_ids.is_empty() {
            settings.eos_token_ids = tokens(&directory.fields(), "eos_token_id")?;
        }
        let notes = IGNORED.iter().filter(|(key, neutral)| is_set(&map, key, *neutral));
        let notes =
            notes.map(|(key, _)| format!("{FILE}: `{key}` is not supported and was ignored")).collect();
        Ok((settings, notes))
    }

    fn from_fields(fields: &ConfigFields<'_>) -> Result<Self> {
        let default = Self::default();
        let number = |key: &str, default: f32| -> Result<f32> {
            Ok(fields.optional_f64(key)?.map_or(default, |value| value as f32))
        };
        let settings = Self {
            max_new_tokens: fields.optional_positive("max_new_tokens")?.unwrap_or(default.max_new_tokens),
            min_new_tokens: fields.optional_usize("min_new_tokens")?.unwrap_or(0),
            do_sample: fields.optional_bool("do_sample")?.unwrap_or(default.do_sample),
            temperature: number("temperature", default.temperature)?,
            top_k: fields.optional_usize("top_k")?.unwrap_or(default.top_k),
            top_p: number("top_p", default.top_p)?,
            min_p: number("min_p", default.min_p)?,
            repetition_penalty: number("repetition_penalty", default.repetition_penalty)?,
            no_repeat_ngram_size: fields.optional_usize("no_repeat_ngram_size")?.unwrap_or(0),
            suppress_tokens: tokens(fields, "suppress_tokens")?,
            eos_token_ids: tokens(fields, "eos_token_id")?,
            seed: default.seed,
        };
        match settings.fault() {
            // Some files specify greedy decoding by a temperature of 0.
            Some(("temperature", _)) if settings.temperature == 0.0 => {
                Ok(Self { do_sample: false, temperature: 1.0, ..settings })
            }
            Some((key, reason)) => Err(fields.error(key, reason)),
            None => Ok(settings),
        }
    }

    /// Checks the ranges of settings.
    ///
    /// # Errors
    /// [`Error::Usage`] when a setting is out of range.
    pub fn check(&self) -> Result<()> {
        match self.fault() {
            Some((name, reason)) => Err(Error::usage(
                format!("`{name}` {reason}"),
                "use a value in this range, or omit the setting",
            )),
            None => Ok(()),
        }
    }

    /// The first setting that is out of range, with the rest of a sentence that begins with its name.
    fn fault(&self) -> Option<(&'static str, String)> {
        let positive = |value: f32| value.is_finite() && value > 0.0;
        let range = |name, value: f32, is_valid: bool, range: &str| {
            (!is_valid).then(|| (name, format!("is {value}; it must be {range}")))
        };
        range(
            "temperature",
            self.temperature,
            positive(self.temperature),
            "a finite number greater than 0, or 0 for the most likely token",
        )
        .or(range("top_p", self.top_p, self.top_p > 0.0 && self.top_p <= 1.0, "greater than 0 and at most 1"))
        .or(range("min_p", self.min_p, (0.0..=1.0).contains(&self.min_p), "from 0 to 1"))
        .or(range(
            "repetition_penalty",
            self.repetition_penalty,
            positive(self.repetition_penalty),
            "a finite number greater than 0",
        ))
    }
}

/// A token or a list of tokens. Negative numbers, which some files use for "no token", are left out.
fn tokens(fields: &ConfigFields<'_>, key: &str) -> Result<Vec<u32>> {
    let one = |value: &Value| match value.as_i64() {
        Some(token) if token < 0 => Ok(None),
        Some(token) => u32::try_from(token).map(Some).map_err(|_| ()),
        None => Err(()),
    };
    let found = match fields.get(key) {
        None => return Ok(Vec::new()),
        Some(Value::Array(list)) if list.len() > MAX_TOKENS => {
            return Err(fields.error(key, format!("lists {} tokens; the limit is {MAX_TOKENS}", list.len())));
        }
        Some(Value::Array(list)) => list.iter().map(one).collect::<std::result::Result<Vec<_>, _>>(),
        Some(value) => one(value).map(|token| vec![token]),
    };
    match found {
        Ok(tokens) => Ok(tokens.into_iter().flatten().collect()),
        Err(()) => Err(fields.error(key, "must be a token ID or a list of token IDs")),
    }
}

fn is_set(map: &Map<String, Value>, key: &str, neutral: Neutral) -> bool {
    match (map.get(key), neutral) {
        (None | Some(Value::Null), _) => false,
        (Some(Value::Array(list)), _) if list.is_empty() => false,
        (Some(value), Neutral::Number(number)) => value.as_f64() != Some(number),
        (Some(_), Neutral::Nothing) => true,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;

    fn from(value: Value) -> Result<GenerationSettings> {
        let Value::Object(map) = value else { panic!() };
        GenerationSettings::from_fields(&ConfigFields::new(Path::new(FILE), &map))
    }

    #[test]
    fn fields_are_those_of_transformers() {
        assert_eq!(from(json!({})).unwrap(), GenerationSettings::default());
        let read = from(json!({
            "do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": null,
            "repetition_penalty": 1.05, "eos_token_id": [151645, 151643, -1], "suppress_tokens": [7],
            "max_new_tokens": 2048, "min_new_tokens": 3, "no_repeat_ngram_size": 4,
            "transformers_version": "5.0.0",
        }));
        let expected = GenerationSettings {
            max_new_tokens: 2048,
            min_new_tokens: 3,
            do_sample: true,
            temperature: 0.6,
            top_k: 20,
            top_p: 0.95,
            min_p: 0.0,
            repetition_penalty: 1.05,
            no_repeat_ngram_size: 4,
            suppress_tokens: vec![7],
            eos_token_ids: vec![151_645, 151_643],
            seed: 0,
        };
        assert_eq!(read.unwrap(), expected);
        assert_eq!(from(json!({"eos_token_id": 2})).unwrap().eos_token_ids, [2]);
        let greedy = from(json!({"do_sample": true, "temperature": 0.0})).unwrap();
        assert_eq!((greedy.do_sample, greedy.temperature), (false, 1.0));
    }

    #[test]
    fn what_is_out_of_range_is_named() {
        for (value, phrase) in [
            (json!({"temperature": -1}), "`temperature` is -1; it must be a finite number greater than 0"),
            (json!({"top_p": 0}), "`top_p` is 0"),
            (json!({"top_p": 1.5}), "`top_p` is 1.5"),
            (json!({"min_p": 2}), "`min_p` is 2"),
            (json!({"repetition_penalty": 0}), "`repetition_penalty` is 0"),
            (json!({"temperature": 1e300}), "`temperature` is inf"),
            (json!({"top_k": -5}), "`top_k`"),
            (json!({"do_sample": "yes"}), "`do_sample`"),
            (json!({"max_new_tokens": 0}), "`max_new_tokens`"),
            (json!({"eos_token_id": "</s>"}), "`eos_token_id` must be a token ID"),
            (json!({"eos_token_id": [1, 1.5]}), "`eos_token_id` must be a token ID"),
            (json!({"eos_token_id": 4294967296_u64}), "`eos_token_id` must be a token ID"),
            (json!({"suppress_tokens": vec![0; MAX_TOKENS + 1]}), "`suppress_tokens` lists 65537 tokens"),
        ] {
            let message = from(value.clone()).unwrap_err().to_string();
            assert!(message.contains(phrase), "{value}: {message}");
        }
    }

    #[test]
    fn what_is_not_implemented_is_noted() {
        let Value::Object(map) = json!({
            "num_beams": 4, "typical_p": 1.0, "bad_words_ids": [], "sequence_bias": [[[1], 2.0]],
            "guidance_scale": null, "eta_cutoff": 0,
        }) else {
            panic!()
        };
        let noted: Vec<&str> = IGNORED
            .iter()
            .filter(|(key, neutral)| is_set(&map, key, *neutral))
            .map(|(key, _)| *key)
            .collect();
        assert_eq!(noted, ["num_beams", "sequence_bias"]);
    }
}
