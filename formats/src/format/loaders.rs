//! Programs that load checkpoints, and what they do not support, as data. `docs/formats/engines.md` describes the
//! evidence.

use super::ModuleSchemes;

/// A program that loads checkpoints, at the version whose sources were read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Loader {
    /// Its name.
    pub name: &'static str,
    /// The version whose sources were read.
    pub version: &'static str,
    /// The date on which the sources were read: `YYYY-MM-DD`.
    pub read: &'static str,
}

impl Loader {
    /// Creates a loader; `read` is `YYYY-MM-DD`.
    pub const fn new(name: &'static str, version: &'static str, read: &'static str) -> Self {
        Self { name, version, read }
    }
}

const READ: &str = "2026-11-22";

/// vLLM.
pub const VLLM: Loader = Loader::new("vLLM", "0.33.0", READ);
/// SGLang.
pub const SGLANG: Loader = Loader::new("SGLang", "0.5.23", READ);
/// transformers.
pub const TRANSFORMERS: Loader = Loader::new("transformers", "5.23.0", READ);
/// The package with which transformers loads compressed-tensors checkpoints.
pub const COMPRESSED_TENSORS: Loader = Loader::new("compressed-tensors", "0.20.0", READ);
/// The package with which transformers loads AWQ and GPTQ checkpoints.
pub const GPTQMODEL: Loader = Loader::new("gptqmodel", "7.7.0", READ);
/// LMDeploy.
pub const LMDEPLOY: Loader = Loader::new("LMDeploy", "0.18.0", READ);
/// mlx-lm.
pub const MLX: Loader = Loader::new("mlx-lm", "0.32.2", READ);
/// ONNX Runtime GenAI, including its model builder, which converts checkpoints to ONNX.
pub const ORT_GENAI: Loader = Loader::new("ONNX Runtime GenAI", "0.18.0", "2026-11-27");
/// llama.cpp, including its converter to GGUF.
pub const LLAMA_CPP: Loader = Loader::new("llama.cpp", "0.5.0", READ);
/// QServe, which has no releases; the version is the month of its last commit.
pub const QSERVE: Loader = Loader::new("QServe", "2025-02", READ);

/// A limit of some loaders that checkpoints of a format can exceed.
#[derive(Debug, Clone, Copy)]
pub struct LoaderRule {
    loaders: &'static [Loader],
    refused_by: &'static [Loader],
    notes: Notes,
}

#[derive(Debug, Clone, Copy)]
enum Notes {
    /// One sentence, if the condition holds.
    Fixed(fn(&ModuleSchemes<'_>) -> bool, &'static str),
    /// Sentences that name modules, types or sizes of the checkpoint.
    Computed(fn(&ModuleSchemes<'_>) -> Vec<String>),
}

impl LoaderRule {
    /// A sentence for the user about `loaders`, for checkpoints with schemes for which `applies` returns true.
    pub const fn new(
        loaders: &'static [Loader],
        applies: fn(&ModuleSchemes<'_>) -> bool,
        note: &'static str,
    ) -> Self {
        Self { loaders, refused_by: &[], notes: Notes::Fixed(applies, note) }
    }

    /// Sentences for the user about `loaders` that depend on the checkpoint; none if the rule does not apply.
    pub const fn computed(loaders: &'static [Loader], notes: fn(&ModuleSchemes<'_>) -> Vec<String>) -> Self {
        Self { loaders, refused_by: &[], notes: Notes::Computed(notes) }
    }

    /// Adds which of the loaders do not load such a checkpoint, or compute wrong results, as the sentences say.
    pub const fn refused_by(self, loaders: &'static [Loader]) -> Self {
        Self { refused_by: loaders, ..self }
    }

    /// Whether the sentences for a checkpoint with these schemes say that `loader` does not load it.
    pub fn refuses(&self, loader: &Loader, schemes: &ModuleSchemes<'_>) -> bool {
        self.refused_by.contains(loader) && !self.notes(schemes).is_empty()
    }

    /// The loaders that the rule is about. Empty if it is about all.
    pub fn loaders(&self) -> &'static [Loader] {
        self.loaders
    }

    /// Returns sentences for the user if the rule applies to a checkpoint with these schemes.
    pub fn notes(&self, schemes: &ModuleSchemes<'_>) -> Vec<String> {
        match self.notes {
            Notes::Fixed(applies, note) => {
                Some(note.to_owned()).filter(|_| applies(schemes)).into_iter().collect()
            }
            Notes::Computed(notes) => notes(schemes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::CONTAINERS;

    const ALL: [Loader; 10] = [
        VLLM,
        SGLANG,
        TRANSFORMERS,
        COMPRESSED_TENSORS,
        GPTQMODEL,
        LMDEPLOY,
        MLX,
        ORT_GENAI,
        LLAMA_CPP,
        QSERVE,
    ];

    fn check(note: &str, loaders: &[Loader]) {
        for loader in ALL {
            let is_listed = loaders.contains(&loader);
            // The format has the name of its package, and "transformers" is how the package is used.
            let is_format = loader == COMPRESSED_TENSORS;
            assert!(is_format || note.contains(loader.name) == is_listed, "{}: {note}", loader.name);
            for (at, _) in note.match_indices(&format!("{} ", loader.name)) {
                let after = &note[at + loader.name.len() + 1..];
                let version = after.split([' ', ',', ';', ':']).next().unwrap_or_default();
                if version.starts_with(|c: char| c.is_ascii_digit()) {
                    assert!(is_listed, "{}: {note}", loader.name);
                    assert!(
                        loader.version.starts_with(version)
                            || after.contains(" to ")
                            || after.contains(" or later"),
                        "{} is {}, not {version}: {note}",
                        loader.name,
                        loader.version
                    );
                }
            }
        }
    }

    #[test]
    fn rules_have_versions_and_dates_and_notes_name_their_loaders() {
        let mut fixed = 0;
        for container in CONTAINERS {
            for rule in container.loader_rules() {
                for loader in rule.loaders {
                    assert!(loader.version.starts_with(|c: char| c.is_ascii_digit()), "{loader:?}");
                    let date: Vec<_> = loader.read.split('-').map(str::len).collect();
                    assert_eq!(date, [4, 2, 2], "{loader:?}");
                }
                if let Notes::Fixed(_, note) = rule.notes {
                    check(note, rule.loaders);
                    fixed += 1;
                }
            }
        }
        assert!(fixed > 15, "{fixed}");
    }
}
