//! The cases that both programs run: models × methods × formats × schemes × options.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::lists::{ON_EVERY_MODEL, OPTIONS, PREPARED, RECIPE_CALIBRATION, RECIPES, REFUSED, SCHEMES, STEPS};
use super::models::{self, MAIN, TIED};

/// Options that make a calibrated run take a fraction of a second.
const SHORT: [&str; 4] = ["--samples", "4", "--seq-len", "64"];
/// The file name under which a run writes its channel maxima, and under which they are kept for other runs.
pub const MAXIMA: &str = "maxima.safetensors";
/// The model that ships with the program.
const DEMO: &str = "demo";

/// One task that both programs run.
#[derive(Debug, Clone)]
pub struct Case {
    /// The unique name, `group/what`.
    pub name: String,
    /// The input checkpoint.
    pub model: PathBuf,
    /// Options of `quant plan` and `quant quantize`.
    pub options: Vec<String>,
    /// Options of `quant quantize` alone.
    pub writing: Vec<String>,
}

/// The features of the base program, as listed by the help of its command `quantize`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Known {
    /// Presets.
    pub presets: Vec<String>,
    /// Methods that have their own names.
    pub methods: Vec<String>,
    /// Checkpoint formats.
    pub formats: Vec<String>,
}

impl Known {
    /// Reads the lists from the help text.
    ///
    /// # Errors
    /// When a list is missing.
    pub fn from_help(help: &str) -> Result<Self> {
        let listed = |option: &str| -> Result<Vec<String>> {
            let names = listed(help, option);
            ensure!(!names.is_empty(), "`quant quantize --help` of the base lists no values of {option}");
            Ok(names)
        };
        Ok(Self { presets: listed("--preset")?, methods: listed("--method")?, formats: listed("--format")? })
    }
}

/// The names in the first list in the help of an option.
fn listed(help: &str, option: &str) -> Vec<String> {
    let is_name = |word: &str| word.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-');
    let mut lines = help.lines().skip_while(|line| !line.trim_start().starts_with(&format!("{option} <")));
    lines.next();
    let of_option = lines.take_while(|line| !line.trim().is_empty());
    of_option
        .filter_map(|line| line.trim().split_once(": ").map(|(name, _)| name))
        .filter(|name| is_name(name))
        .map(str::to_owned)
        .collect()
}

/// The inputs of the cases, all below one directory.
#[derive(Debug)]
pub struct Workspace {
    dir: PathBuf,
    demo: PathBuf,
    models: Vec<&'static str>,
}

impl Workspace {
    /// Writes models, texts and recipes into an empty directory.
    ///
    /// # Errors
    /// When writing fails.
    pub fn create(dir: &Path, demo: &Path) -> Result<Self> {
        let (models, files) = (dir.join("models"), dir.join("files"));
        for dir in [&models, &files, &dir.join("prepared")] {
            std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        }
        models::write_texts(&files)?;
        for (name, text) in RECIPES {
            std::fs::write(files.join(name).with_extension("toml"), text.replace("CAL", RECIPE_CALIBRATION))?;
        }
        Ok(Self { dir: dir.to_owned(), demo: demo.to_owned(), models: models::write_all(&models)? })
    }

    /// Returns the preparatory runs of the base in order: cases whose outputs other cases read, each with its
    /// destination. One of them writes the channel maxima.
    pub fn preparations(&self) -> Vec<(Case, PathBuf)> {
        let prepared = PREPARED.iter().map(|(name, model, options)| {
            (self.case(&format!("prepared/{name}"), model, options), self.prepared(name))
        });
        let maxima = self.case("prepared/maxima", MAIN, "--method smoothquant MAXIMA CAL");
        prepared.chain([(maxima, self.dir.join("prepared/of-maxima"))]).collect()
    }

    fn prepared(&self, name: &str) -> PathBuf {
        self.dir.join("prepared").join(name)
    }

    /// The path of the kept channel maxima.
    pub fn kept_maxima(&self) -> PathBuf {
        self.dir.join("files").join(MAXIMA)
    }

    /// All cases.
    pub fn cases(&self, known: &Known) -> Vec<Case> {
        let mut cases = Vec::new();
        let mut add = |name: String, model: &str, options: &str| cases.push(self.case(&name, model, options));
        for model in self.models.iter().copied() {
            for (name, options) in ON_EVERY_MODEL {
                add(format!("models/{model}/{name}"), model, options);
            }
        }
        for preset in &known.presets {
            let calibration = if preset.starts_with("rtn") { "" } else { "CAL" };
            for model in [MAIN, DEMO] {
                add(format!("presets/{preset}/{model}"), model, &format!("--preset {preset} {calibration}"));
            }
        }
        for method in &known.methods {
            let calibration = if method == "rtn" { "" } else { "CAL" };
            for format in &known.formats {
                let scheme = scheme_of(method, format);
                let options = format!("--method {method} --format {format} {scheme} {calibration}");
                add(format!("methods/{method}/{format}"), MAIN, &options);
            }
        }
        for (name, options) in weight_schemes(&known.formats) {
            add(name, MAIN, &options);
        }
        for scheme in SCHEMES {
            add(format!("schemes/{scheme}"), MAIN, &format!("--method rtn --scheme {scheme}"));
            let gptq = format!("--method gptq --scheme {scheme} --format qserve CAL");
            add(format!("schemes/{scheme}/qserve"), MAIN, &gptq);
        }
        for (name, options) in OPTIONS {
            add(format!("options/{name}"), MAIN, options);
        }
        for (steps, scheme) in STEPS {
            add(format!("steps/{steps}"), MAIN, &format!("--method {steps} --scheme {scheme}"));
        }
        for (name, _) in RECIPES {
            add(format!("recipes/{name}"), MAIN, &format!("RECIPE={name}"));
        }
        add("recipes/refined".into(), TIED, "RECIPE=awq --group-size 32 --ignore q_proj --samples 3");
        for (name, model, options) in REFUSED {
            add(format!("refused/{name}"), model, options);
        }
        cases.extend(self.conversions(&known.formats));
        cases
    }

    /// Quantized checkpoints, written again in every format.
    fn conversions(&self, formats: &[String]) -> Vec<Case> {
        let to = |(name, ..): &(&str, &str, &str)| {
            let (name, model) = ((*name).to_owned(), self.prepared(name).join("out"));
            formats.iter().map(move |format| Case {
                name: format!("conversions/{name}/{format}"),
                model: model.clone(),
                options: vec!["--format".into(), format.clone()],
                writing: Vec::new(),
            })
        };
        PREPARED.iter().flat_map(to).collect()
    }

    fn case(&self, name: &str, model: &str, options: &str) -> Case {
        let model = if model == DEMO { self.demo.clone() } else { self.dir.join("models").join(model) };
        let mut case = Case { name: name.to_owned(), model, options: Vec::new(), writing: Vec::new() };
        options.split_whitespace().for_each(|word| self.words(word, &mut case));
        case
    }

    /// Expands an abbreviation. Any other word becomes an option unchanged.
    fn words(&self, word: &str, case: &mut Case) {
        let file = |name: &str| self.dir.join("files").join(name).to_string_lossy().into_owned();
        let pair = |option: &str, value: String| [option.to_owned(), value];
        match word.split_once('=') {
            Some(("TEXT", "plain")) => case.writing.extend(pair("--calibration", file("plain.txt"))),
            Some(("TEXT", name)) => {
                case.writing.extend(pair("--calibration", file(&format!("{name}.jsonl"))))
            }
            Some(("RECIPE", name)) => case.options.extend(pair("--recipe", file(&format!("{name}.toml")))),
            _ => match word {
                "CAL" => case.options.extend(SHORT.map(str::to_owned)),
                "MAXIMA" => case.writing.extend(pair("--save-channel-maxima", MAXIMA.to_owned())),
                "KEPT" => case.options.extend(pair("--channel-maxima", file(MAXIMA))),
                _ => case.options.push(word.to_owned()),
            },
        }
    }
}

/// The option that selects a scheme for a method if the format cannot store its default scheme.
fn scheme_of(method: &str, format: &str) -> &'static str {
    let has_activations = method.starts_with("smoothquant") || method.starts_with("qoq");
    if format == "qserve" && !has_activations { "--scheme w4a8-g128-progressive" } else { "" }
}

/// Integer weight-only schemes, rounded to nearest, in every format that supports more than one of them.
fn weight_schemes(formats: &[String]) -> Vec<(String, String)> {
    let mut cases = Vec::new();
    for format in formats.iter().filter(|format| *format != "qserve") {
        let bits: &[u32] = if format == "awq" { &[4] } else { &[2, 3, 4, 8] };
        for bits in bits {
            for group in ["g32", "g64", "g128", "channel"] {
                for symmetry in ["sym", "asym"] {
                    let scheme = format!("w{bits}a16-{group}-{symmetry}");
                    let options = format!("--method rtn --scheme {scheme} --format {format}");
                    cases.push((format!("schemes/{scheme}/{format}"), options));
                }
            }
        }
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const HELP: &str = "\
Recipe:
      --preset <PRESET>
          Named combination of method and scheme:
            awq-w4a16: awq w4a16-g128
            rtn-w8a8: rtn w8a8-channel

      --method <METHOD>
          How the numbers are found; the preset's when not given:
            awq: activation-aware scales and clipping, searched on a calibration text
            gptq: columns that make up for each other's rounding, by the inputs that a calibration
            text gives
            rtn: round to nearest: needs no text and no forward pass
          
          Or steps of one's own order with commas between, and gptq or rtn last (rtn without):
            clip: ranges of weights are narrowed where the error of the output falls

      --format <FORMAT>
          Container to write [default: compressed-tensors]; given several times, each goes into
          OUT/FORMAT, and the calibration text goes through the model once for all:
            compressed-tensors: for vLLM
            awq: AutoAWQ gemm
            bits, one scheme

";

    fn known() -> Known {
        Known::from_help(HELP).unwrap()
    }

    #[test]
    fn names_are_read_from_the_help() {
        let known = known();
        assert_eq!(known.presets, ["awq-w4a16", "rtn-w8a8"]);
        assert_eq!(known.methods, ["awq", "gptq", "rtn"]);
        assert_eq!(known.formats, ["compressed-tensors", "awq"]);
        assert!(Known::from_help("Usage: quant").is_err());
    }

    #[test]
    fn cases_have_different_names_and_read_what_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let workspace = Workspace::create(dir.path(), dir.path()).unwrap();
        let cases = workspace.cases(&known());
        let names: BTreeSet<&str> = cases.iter().map(|case| &*case.name).collect();
        assert_eq!(names.len(), cases.len());
        let prepared: Vec<PathBuf> =
            workspace.preparations().into_iter().map(|(_, to)| to.join("out")).collect();
        for case in &cases {
            assert!(case.model.is_dir() || prepared.contains(&case.model), "{case:?}");
            for word in case.options.iter().chain(&case.writing) {
                let is_file = word.starts_with('/') && *word != workspace.kept_maxima().to_string_lossy();
                assert!(!is_file || Path::new(word).is_file(), "{word}");
                assert!(!word.is_empty() && !word.contains('\''), "{case:?}");
            }
        }
    }

    #[test]
    fn words_are_replaced_by_options() {
        let dir = tempfile::tempdir().unwrap();
        let workspace = Workspace::create(dir.path(), dir.path()).unwrap();
        let case = workspace.case("a", MAIN, "--method awq TEXT=chats MAXIMA CAL");
        assert_eq!(case.options, ["--method", "awq", "--samples", "4", "--seq-len", "64"]);
        let chats = dir.path().join("files/chats.jsonl");
        let expected = ["--calibration", &*chats.to_string_lossy(), "--save-channel-maxima", MAXIMA];
        assert_eq!(case.writing, expected);
    }
}
