//! Measures the error rates of the gate on a real model: planted regressions that it must find, and equal models that
//! it must not fail.
//!
//! `cargo run --release -p quant-evaluator --example gate_trials -- MODEL TEXT` prints counts as JSON; `cargo study
//! gate-trials` records them.
//!
//! Every trial draws its own windows from the text and compares a new model with the unchanged model on these windows,
//! with a margin of 0.5 % in perplexity.
//!
//! * Equal: every block's output has a relative disturbance of up to 2⁻⁹. This simulates a different kernel.
//! * Regressed: normal noise is added to one weight tensor, so that the perplexity rises by 1 % on windows spread over
//!   the text. The increase on the trial's own windows varies.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use quant_core::calibrate::{TextTokenizer, TokenizerSettings, read_documents};
use quant_core::checkpoint::{ModelDirectory, TensorInfo};
use quant_core::digest::sha256_hex;
use quant_core::model::{Decoder, Model};
use quant_core::random::SplitMix64;
use quant_core::{CancelToken, Error, Result, Silent, TensorSource};
use quant_evaluator::gate::{Baseline, Policy, Verdict, judge};
use quant_evaluator::{
    Evaluation, EvaluationText, Journal, ModelIdentity, Profile, Scores, Tokenization, Tool,
    disturbed_perplexity, perplexity,
};

const POLICY: &str = "schema = \"quant-gate-policy/1\"\n[[non_inferiority]]\nmetric = \"perplexity\"\nagainst = \
                      \"baseline\"\nmargin = 0.005\n";
/// The relative perplexity increase of a planted regression.
const REGRESSION: f64 = 0.01;
/// The tolerance of that increase, as a fraction of it.
const NEAR: f64 = 0.03;
const WINDOW: usize = 512;
/// Windows per trial.
const TRIAL_WINDOWS: usize = 40;
const EQUAL_TRIALS: u64 = 1000;
const REGRESSED_TRIALS: u64 = 100;
/// Number of disturbed runs over the whole text; equal trials use them in turn.
const DISTURBED_RUNS: u64 = 25;

struct Damaged {
    whole: Arc<dyn TensorSource>,
    tensor: String,
    bytes: Vec<u8>,
}

impl TensorSource for Damaged {
    fn names(&self) -> Vec<&str> {
        self.whole.names()
    }

    fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.whole.info(name)
    }

    fn read_range(&self, name: &str, offset: u64, buffer: &mut [u8]) -> Result<()> {
        if name != self.tensor {
            return self.whole.read_range(name, offset, buffer);
        }
        let (from, length) = (offset as usize, buffer.len());
        let part = self.bytes.get(from..from + length);
        buffer.copy_from_slice(part.ok_or_else(|| Error::Internal("a range leaves its tensor".into()))?);
        Ok(())
    }

    fn location(&self, name: &str) -> PathBuf {
        self.whole.location(name)
    }
}

/// An approximately normal value with variance one: the sum of twelve uniform ones.
fn normal(random: &mut SplitMix64) -> f32 {
    let sum: f64 = (0..12).map(|_| (random.next_u64() >> 11) as f64 / (1_u64 << 53) as f64).sum();
    (sum - 6.0) as f32
}

struct Bench {
    directory: ModelDirectory,
    text: EvaluationText,
    cancel: CancelToken,
}

impl Bench {
    fn open(model: &Path, text: &Path) -> Result<Self> {
        let directory = ModelDirectory::open(model)?;
        let path = directory.tokenizer_path().ok_or_else(|| Error::Internal("no tokenizer".into()))?;
        let tokenizer = TextTokenizer::open(&path)?;
        let settings = TokenizerSettings::open(&directory)?;
        let sha256 = sha256_hex(std::fs::read(&path).map_err(|e| Error::io("read", &path, e))?);
        let tokenization = Tokenization { tokenizer: &tokenizer, settings: &settings, sha256 };
        let documents = read_documents(text)?;
        let text = EvaluationText::new(&tokenization, &documents, Profile::gptq(WINDOW)?.into(), None, text)?;
        Ok(Self { directory, text, cancel: CancelToken::new() })
    }

    fn decoder(&self, source: Arc<dyn TensorSource>) -> Result<Decoder> {
        let model = Model::new(source, self.directory.config_path(), self.directory.config())?;
        Decoder::load(&model, self.text.longest_input(), &Silent, &self.cancel)
    }

    fn some(&self, numbers: &[usize]) -> EvaluationText {
        let mut text = self.text.clone();
        text.windows = numbers.iter().map(|&n| self.text.windows[n].clone()).collect();
        text
    }

    fn score(&self, decoder: &Decoder, text: &EvaluationText) -> Result<Scores> {
        perplexity(decoder, text, &mut Journal::none(), &Silent, &self.cancel)
    }

    /// Returns the model with noise on one weight tensor, scaled to the intended perplexity increase.
    fn regressed(
        &self,
        random: &mut SplitMix64,
        before: &Scores,
        calibration: &EvaluationText,
    ) -> Result<Decoder> {
        let source: Arc<dyn TensorSource> = self.directory.source().clone();
        let names: Vec<String> =
            source.names().into_iter().filter(|n| n.contains("_proj.")).map(str::to_owned).collect();
        let tensor = names[random.below(names.len())].clone();
        let info = source.require(&tensor)?.clone();
        let mut values = vec![0.0; info.elements()];
        info.dtype.widen(&source.read(&tensor)?, &mut values);
        let rms = (values.iter().map(|v| f64::from(v * v)).sum::<f64>() / values.len() as f64).sqrt() as f32;
        let noise: Vec<f32> = values.iter().map(|_| rms * normal(random)).collect();
        let mut scale = 0.2_f32;
        for _ in 0..20 {
            let damaged: Vec<f32> = values.iter().zip(&noise).map(|(v, n)| v + scale * n).collect();
            let bytes = info.dtype.narrow(&damaged);
            let damaged = Damaged { whole: source.clone(), tensor: tensor.clone(), bytes };
            let decoder = self.decoder(Arc::new(damaged))?;
            let rise = (self.score(&decoder, calibration)?.nll.mean - before.nll.mean).exp_m1();
            if (rise / REGRESSION - 1.0).abs() < NEAR {
                return Ok(decoder);
            }
            // The loss grows approximately with the square of the noise.
            let factor = if rise > 0.0 { (REGRESSION / rise).sqrt().clamp(0.25, 4.0) } else { 4.0 };
            scale *= factor as f32;
        }
        Err(Error::Internal(format!("no noise on {tensor} raises the perplexity by {REGRESSION}")))
    }
}

fn evaluation(text: &EvaluationText, means: Vec<f64>) -> Evaluation {
    let tokens: Vec<usize> = text.windows.iter().map(|w| w.scored()).collect();
    let scores = Scores::of_windows(means, &tokens);
    let tool = Tool { name: "trial".into(), version: String::new(), sha256: None, isa: String::new() };
    let digest = sha256_hex("trial");
    let model = ModelIdentity {
        path: String::new(),
        sha256: digest,
        size_bytes: 0,
        schemes: Vec::new(),
        kv_cache: None,
        method: None,
    };
    Evaluation::new(tool, model, None, ("trial".into(), text), (scores, None), (0.0, 0.0))
}

fn verdict(policy: &Policy, text: &EvaluationText, before: Vec<f64>, now: Vec<f64>) -> Result<Verdict> {
    let baseline = Baseline::new(&[("trial".to_owned(), evaluation(text, before))]);
    let results = [("trial".to_owned(), evaluation(text, now))];
    Ok(judge(policy, Some((&baseline, Path::new("baseline.json"))), &results)?.verdict)
}

fn counts(verdicts: &[Verdict]) -> serde_json::Value {
    let of = |v| verdicts.iter().filter(|&&x| x == v).count();
    serde_json::json!({
        "trials": verdicts.len(),
        "pass": of(Verdict::Pass),
        "fail": of(Verdict::Fail),
        "inconclusive": of(Verdict::Inconclusive),
    })
}

fn run(model: &Path, text: &Path) -> Result<serde_json::Value> {
    let bench = Bench::open(model, text)?;
    let policy = Policy::parse(POLICY, Path::new("gate.toml"))?;
    let source: Arc<dyn TensorSource> = bench.directory.source().clone();
    let decoder = bench.decoder(source)?;
    let all = bench.text.windows.len();
    let before = bench.score(&decoder, &bench.text)?;
    let pick = |scores: &Scores, numbers: &[usize]| -> Vec<f64> {
        numbers.iter().map(|&n| scores.window_nll[n]).collect()
    };

    let disturbed = (0..DISTURBED_RUNS)
        .map(|seed| disturbed_perplexity(&decoder, &bench.text, seed, &bench.cancel))
        .collect::<Result<Vec<_>>>()?;
    let mut equal = Vec::new();
    for trial in 0..EQUAL_TRIALS {
        let numbers = SplitMix64(trial).choose(TRIAL_WINDOWS, all);
        let now = pick(&disturbed[(trial % DISTURBED_RUNS) as usize], &numbers);
        equal.push(verdict(&policy, &bench.some(&numbers), pick(&before, &numbers), now)?);
    }

    let spread: Vec<usize> = (0..TRIAL_WINDOWS).map(|i| i * all / TRIAL_WINDOWS).collect();
    let calibration = bench.some(&spread);
    let before_spread = bench.score(&decoder, &calibration)?;
    let mut regressed = Vec::new();
    for trial in 0..REGRESSED_TRIALS {
        let mut random = SplitMix64(1_000_000 + trial);
        let numbers = random.choose(TRIAL_WINDOWS, all);
        let damaged = bench.regressed(&mut random, &before_spread, &calibration)?;
        let some = bench.some(&numbers);
        let now = bench.score(&damaged, &some)?;
        regressed.push(verdict(&policy, &some, pick(&before, &numbers), now.window_nll)?);
        eprintln!("{} of {REGRESSED_TRIALS}: {}", trial + 1, regressed[trial as usize].name());
    }
    Ok(serde_json::json!({
        "text_windows": all,
        "trial_windows": TRIAL_WINDOWS,
        "window": WINDOW,
        "margin": 0.005,
        "disturbed_runs": DISTURBED_RUNS,
        "equal": counts(&equal),
        "regressed": counts(&regressed),
    }))
}

fn main() {
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [model, text] = &arguments[..] else {
        eprintln!("usage: gate_trials MODEL TEXT");
        std::process::exit(2);
    };
    match run(model, text) {
        Ok(counts) => println!("{counts}"),
        Err(error) => {
            eprintln!("error: {error}");
            std::process::exit(1);
        }
    }
}
