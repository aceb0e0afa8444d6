//! Default texts for calibration and evaluation, and a small model to experiment with.
//!
//! * [`CORPUS`]: original text over several domains, the default calibration set;
//! * [`HELDOUT`]: more text of the same kind, never used for calibration, to measure perplexity quickly;
//! * [`public_sets`]: the public sets that can be selected by name, from `manifest.toml`;
//! * [`demo_model`]: a small trained Llama model.
//!
//! A text file holds documents separated by lines that contain only `%%`. Everything but the public sets is embedded.
#![forbid(unsafe_code)]

use serde::Deserialize;

/// The texts of one domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Domain {
    /// `narrative`, `code`, `numbers` …
    pub name: &'static str,
    /// Its documents, separated by lines that contain only `%%`.
    pub text: &'static str,
}

macro_rules! domains {
    ($folder:literal: $($name:literal),+ $(,)?) => {
        &[$(Domain { name: $name, text: include_str!(concat!($folder, "/", $name, ".txt")) }),+]
    };
}

/// The default calibration set, by domain.
pub static CORPUS: &[Domain] = domains!(
    "corpus": "narrative", "exposition", "dialogue", "instructions", "code", "numbers", "languages",
);

/// Text by the same authors that is never used for calibration.
pub static HELDOUT: &[Domain] = domains!("heldout": "narrative", "exposition", "mixed");

/// One document: a story, an article, a question with its answer, a source file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Document {
    /// The domain it belongs to.
    pub domain: &'static str,
    /// Its text, without leading and trailing empty lines.
    pub text: &'static str,
}

/// Returns the documents of a set in a fixed order, in which the domains alternate until they run out of documents.
///
/// ```
/// use quant_calibration_data::{CORPUS, documents};
///
/// let first: Vec<&str> = documents(CORPUS).take(CORPUS.len()).map(|document| document.domain).collect();
/// let domains: Vec<&str> = CORPUS.iter().map(|domain| domain.name).collect();
/// assert_eq!(first, domains);
/// ```
pub fn documents(set: &[Domain]) -> impl Iterator<Item = Document> + use<> {
    let mut queues: Vec<_> = set.iter().map(|d| (d.name, split(d.text))).collect();
    let mut ordered = Vec::new();
    while !queues.is_empty() {
        queues.retain_mut(|(domain, texts)| match texts.next() {
            Some(text) => {
                ordered.push(Document { domain, text });
                true
            }
            None => false,
        });
    }
    ordered.into_iter()
}

fn split(text: &'static str) -> impl Iterator<Item = &'static str> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let current = rest?;
        let mut at = 0;
        for line in current.split_inclusive('\n') {
            if line.trim_end_matches(['\r', '\n']) == "%%" {
                rest = Some(&current[at + line.len()..]);
                return Some(&current[..at]);
            }
            at += line.len();
        }
        rest = None;
        Some(current)
    })
    .map(|document| document.trim_matches(['\r', '\n']))
    .filter(|document| !document.trim().is_empty())
}

/// A public text set on a hub.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct PublicSet {
    /// The name that `--calibration` and `--text` take.
    pub name: String,
    /// A one-line description.
    pub summary: String,
    /// The data set's id on the hub, `owner/name`.
    pub hub_id: String,
    /// The file inside it.
    pub file: String,
    /// The split of the set that the file contains.
    pub split: String,
    /// The column or field that holds the text.
    pub field: String,
    /// The license as the set's authors state it.
    pub licence: String,
    /// SHA-256 of the file in lower-case hex; empty if no file has been fetched and hashed yet.
    pub sha256: String,
}

/// Returns the public sets in the order of the manifest.
///
/// # Errors
/// If the manifest is malformed.
pub fn public_sets() -> Result<Vec<PublicSet>, toml::de::Error> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Manifest {
        set: Vec<PublicSet>,
    }
    Ok(toml::from_str::<Manifest>(include_str!("manifest.toml"))?.set)
}

/// A file of a model directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ModelFile {
    /// The file name in the directory.
    pub name: &'static str,
    /// The contents of the file.
    pub bytes: &'static [u8],
}

/// The demo model: a Llama of 6.8 million parameters in f16, as a Hugging Face directory. `None` in a published crate,
/// whose size limit its weights exceed.
#[cfg(not(demo_model))]
pub fn demo_model() -> Option<[ModelFile; 4]> {
    None
}

/// The demo model: a Llama of 6.8 million parameters in f16, as a Hugging Face directory. `None` in a published crate,
/// whose size limit its weights exceed.
#[cfg(demo_model)]
pub fn demo_model() -> Option<[ModelFile; 4]> {
    macro_rules! file {
        ($name:literal) => {
            ModelFile { name: $name, bytes: include_bytes!(concat!("demo-model/", $name)) }
        };
    }
    Some([
        file!("config.json"),
        file!("generation_config.json"),
        file!("model.safetensors"),
        file!("tokenizer.json"),
    ])
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    fn files(folder: &str) -> BTreeSet<String> {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
        let paths = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
        let texts = paths.filter(|p| p.extension().is_some_and(|e| e == "txt"));
        texts.map(|p| p.file_stem().unwrap().to_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn every_file_is_embedded() {
        for (set, folder) in [(CORPUS, "corpus"), (HELDOUT, "heldout")] {
            let names: BTreeSet<String> = set.iter().map(|d| d.name.to_owned()).collect();
            assert_eq!(names, files(folder));
        }
    }

    #[test]
    fn the_corpus_is_large_enough_and_every_domain_counts() {
        let mut bytes: BTreeMap<&str, usize> = BTreeMap::new();
        for document in documents(CORPUS) {
            assert!(!document.text.trim().is_empty());
            *bytes.entry(document.domain).or_default() += document.text.len();
        }
        assert_eq!(bytes.len(), CORPUS.len());
        assert!(bytes.values().sum::<usize>() >= 150_000, "{bytes:?}");
        assert!(bytes.values().all(|b| *b >= 5_000), "{bytes:?}");
    }

    #[test]
    fn no_document_is_in_two_places() {
        let all: Vec<_> = documents(CORPUS).chain(documents(HELDOUT)).map(|d| d.text).collect();
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
        assert!(all.iter().all(|text| !text.lines().any(|l| l == "%%")));
    }

    #[test]
    fn documents_are_cut_at_separator_lines_only() {
        let text = "%%\na\nb %%\n\n%%\n\n%%\n%% c\r\n%%\r\n  d\n";
        assert_eq!(split(text).collect::<Vec<_>>(), ["a\nb %%", "%% c", "  d"]);
    }

    #[test]
    fn domains_take_turns() {
        let set = [Domain { name: "x", text: "1\n%%\n2\n%%\n3" }, Domain { name: "y", text: "4" }];
        let order: Vec<_> = documents(&set).map(|d| (d.domain, d.text)).collect();
        assert_eq!(order, [("x", "1"), ("y", "4"), ("x", "2"), ("x", "3")]);
    }

    #[test]
    fn the_manifest_is_complete() {
        let sets = public_sets().unwrap();
        let names: Vec<_> = sets.iter().map(|s| &*s.name).collect();
        assert_eq!(names, ["pile-val", "c4", "wikitext-2"]);
        for set in sets {
            let stated = [&set.summary, &set.file, &set.split, &set.field, &set.licence];
            assert!(stated.iter().all(|s| !s.is_empty()), "{set:?}");
            assert_eq!(set.hub_id.split('/').count(), 2, "{set:?}");
            let hex = set.sha256.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
            assert!(hex && [0, 64].contains(&set.sha256.len()), "{set:?}");
        }
    }

    #[test]
    fn the_demo_model_is_whole() {
        let size = |name| demo_model().unwrap().iter().find(|f| f.name == name).unwrap().bytes.len();
        let weights = demo_model().unwrap()[2].bytes;
        let header = u64::from_le_bytes(weights[..8].try_into().unwrap());
        let data = weights.len() as u64 - 8 - header;
        assert_eq!(data, 2 * 6_819_072);
        assert!(weights.len() <= 14_000_000);
        assert!(size("config.json") > 0 && size("tokenizer.json") > 0);
    }
}
