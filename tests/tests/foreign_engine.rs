//! A model that a different engine runs is scored like quant's: the same windows, sums and statistics from its logits.

use std::cell::Cell;

use quant_core::calibrate::{TextTokenizer, TokenizerSettings};
use quant_core::checkpoint::ModelDirectory;
use quant_core::digest::sha256_hex;
use quant_core::model::{Decoder, Model};
use quant_core::{CancelToken, Silent};
use quant_evaluator::gate::{Baseline, Policy, Verdict, judge};
use quant_evaluator::{
    Evaluation, EvaluationText, Journal, LogitsModel, ModelIdentity, Profile, Reference, Scored,
    Tokenization, Tool, compare, perplexity,
};
use quant_tests::models::write_cut_demo_model;
use quant_tests::program::quant;
use quant_tests::{args, demo_model};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// A third-party engine: here a decoder of `quant-core`, which computes the logits of whole windows.
struct Foreign<'a> {
    decoder: &'a Decoder,
    asked: Cell<usize>,
}

impl LogitsModel for Foreign<'_> {
    fn vocab(&self) -> usize {
        self.decoder.vocab()
    }

    fn logits(&self, tokens: &[u32], first: usize, out: &mut Vec<f32>) -> Result<(), Failure> {
        self.asked.set(self.asked.get() + 1);
        let all = self.decoder.logits(&self.decoder.hidden(&[tokens])?)?;
        let (_, positions, _) = all.dims3()?;
        out.extend(all.narrow(1, first, positions - first)?.flatten_all()?.to_vec1::<f32>()?);
        Ok(())
    }
}

/// A faulty engine.
struct Broken(usize, fn(&mut Vec<f32>) -> Result<(), Failure>);

impl LogitsModel for Broken {
    fn vocab(&self) -> usize {
        self.0
    }

    fn logits(&self, _: &[u32], _: usize, out: &mut Vec<f32>) -> Result<(), Failure> {
        (self.1)(out)
    }
}

fn text(directory: &ModelDirectory) -> EvaluationText {
    let path = directory.tokenizer_path().unwrap();
    let tokenizer = TextTokenizer::open(&path).unwrap();
    let settings = TokenizerSettings::open(directory).unwrap();
    let sha256 = sha256_hex(std::fs::read(&path).unwrap());
    let tokenization = Tokenization { tokenizer: &tokenizer, settings: &settings, sha256 };
    let documents = ["The mill stood by the river, and nobody knew who owned it. ".repeat(40)];
    let profile = Profile::gptq(64).unwrap().into();
    EvaluationText::new(&tokenization, &documents, profile, Some(6), "text".as_ref()).unwrap()
}

fn load(directory: &ModelDirectory, text: &EvaluationText) -> Decoder {
    let model = Model::open(directory).unwrap();
    Decoder::load(&model, text.longest_input(), &Silent, &CancelToken::new()).unwrap()
}

#[test]
fn an_engine_is_scored_as_a_decoder_is() {
    let scratch = tempfile::tempdir().unwrap();
    write_cut_demo_model(scratch.path(), 2);
    let [whole, cut] = [&demo_model(), scratch.path()].map(|path| ModelDirectory::open(path).unwrap());
    let text = text(&whole);
    let [whole, cut] = [&whole, &cut].map(|directory| load(directory, &text));
    let [engine, other] = [&cut, &whole].map(|decoder| Foreign { decoder, asked: Cell::new(0) });
    let cancel = CancelToken::new();

    let (mut ours, mut theirs) = (Journal::none(), Journal::none());
    let expected = perplexity(&cut, &text, &mut ours, &Silent, &cancel).unwrap();
    let scores = perplexity(&engine as &dyn LogitsModel, &text, &mut theirs, &Silent, &cancel).unwrap();
    assert_eq!(engine.asked.get(), 6);
    // Only the order of the additions in the head's products differs.
    let near = |a: f64, b: f64| assert!((a - b).abs() <= 1e-6 * b.abs().max(1e-3), "{a} and {b}");
    near(scores.nll.mean, expected.nll.mean);
    near(scores.nll.standard_error.unwrap(), expected.nll.standard_error.unwrap());
    assert_eq!(scores.window_nll.len(), 6);

    let compared = |reference: Reference<'_>, model: Scored<'_>| {
        compare(reference, model, &text, &mut Journal::none(), &Silent, &cancel).unwrap()
    };
    let (_, expected) = compared(Reference::Model { decoder: &whole, floor: false }, (&cut).into());
    assert!(expected.kl.mean > 1e-3 && expected.top1_agreement.mean < 1.0);
    for (reference, model) in [
        (Reference::Model { decoder: &whole, floor: false }, Scored::Engine(&engine)),
        (Reference::Engine(&other), Scored::Decoder(&cut)),
        (Reference::Engine(&other), Scored::Engine(&engine)),
    ] {
        let (_, divergence) = compared(reference, model);
        near(divergence.kl.mean, expected.kl.mean);
        near(divergence.kl_quantiles.p99.value, expected.kl_quantiles.p99.value);
        assert_eq!(divergence.top1_agreement.mean, expected.top1_agreement.mean);
        assert!(divergence.noise_floor.is_none());
    }
}

/// An engine whose logits are rounded to bfloat16.
struct InBf16<'a>(&'a dyn LogitsModel);

impl LogitsModel for InBf16<'_> {
    fn vocab(&self) -> usize {
        self.0.vocab()
    }

    fn logits(&self, tokens: &[u32], first: usize, out: &mut Vec<f32>) -> Result<(), Failure> {
        let begin = out.len();
        self.0.logits(tokens, first, out)?;
        out[begin..].iter_mut().for_each(|x| *x = half::bf16::from_f32(*x).to_f32());
        Ok(())
    }
}

const POLICY: &str = r#"schema = "quant-gate-policy/1"

[[non_inferiority]]
metric = "perplexity"
against = "baseline"
margin = 0.01

[[cap]]
metric = "kl"
at_most = 0.01
"#;

/// An engine's results pass the gate or fail it, through the library and through the program, which reads their files.
#[test]
fn the_results_of_an_engine_are_gated() {
    let scratch = tempfile::tempdir().unwrap();
    let cut = scratch.path().join("cut");
    std::fs::create_dir(&cut).unwrap();
    write_cut_demo_model(&cut, 2);
    let [whole, cut] = [demo_model(), cut].map(|path| ModelDirectory::open(&path).unwrap());
    let text = text(&whole);
    let [whole, cut] = [&whole, &cut].map(|directory| load(directory, &text));
    let [reference, cut] = [&whole, &cut].map(|decoder| Foreign { decoder, asked: Cell::new(0) });

    let identity = |name: &str| ModelIdentity {
        path: name.to_owned(),
        sha256: sha256_hex(name),
        size_bytes: 0,
        schemes: Vec::new(),
        kv_cache: None,
        method: None,
    };
    let tool = Tool { name: "their-engine".into(), version: "7".into(), sha256: None, isa: "none".into() };
    let measured = |name: &str, engine: &dyn LogitsModel| {
        let compared = compare(
            Reference::Engine(&reference),
            Scored::Engine(engine),
            &text,
            &mut Journal::none(),
            &Silent,
            &CancelToken::new(),
        );
        let (scores, divergence) = compared.unwrap();
        let [model, of] = [name, "whole"].map(identity);
        let numbers = (scores, Some(divergence));
        let result =
            Evaluation::new(tool.clone(), model, Some(of), ("held".into(), &text), numbers, (1.0, 1.0));
        // Every result is named by its file.
        let path = scratch.path().join(name).join("held.json");
        std::fs::create_dir(path.parent().unwrap()).unwrap();
        std::fs::write(&path, serde_json::to_string(&result).unwrap()).unwrap();
        let read = Evaluation::read(&path).unwrap();
        assert_eq!(read, result);
        (path, vec![("held".to_owned(), read)])
    };
    let (_, good) = measured("good", &reference);
    let near = measured("near", &InBf16(&reference));
    let far = measured("far", &cut);

    let [policy, baseline] = ["gate.toml", "baseline.json"].map(|name| scratch.path().join(name));
    std::fs::write(&policy, POLICY).unwrap();
    std::fs::write(&baseline, Baseline::new(&good).to_json().unwrap()).unwrap();
    let parsed = Policy::read(&policy).unwrap();
    let known = Baseline::read(&baseline).unwrap();
    for ((path, results), verdict, code) in [(&near, Verdict::Pass, 0), (&far, Verdict::Fail, 1)] {
        let outcome = judge(&parsed, Some((&known, &baseline)), results).unwrap();
        assert_eq!(outcome.verdict, verdict, "{:?}", outcome.checks);
        assert_eq!(outcome.checks.len(), 2);
        assert!(outcome.checks.iter().all(|check| check.verdict == verdict), "{:?}", outcome.checks);
        assert_eq!(outcome.results[0].tool.name, "their-engine");
        let run = quant(args!["gate", path, "--policy", &policy, "--baseline", &baseline]);
        assert_eq!(run.code(), Some(code), "{run}");
    }
}

#[test]
fn an_engine_that_fails_ends_the_evaluation() {
    let directory = ModelDirectory::open(&demo_model()).unwrap();
    let text = text(&directory);
    let decoder = load(&directory, &text);
    let vocab = decoder.vocab();
    let refused = |engine: Broken, code: u8, phrase: &str| {
        let reference = Reference::Model { decoder: &decoder, floor: false };
        let cancel = CancelToken::new();
        let model = Scored::Engine(&engine);
        let error = compare(reference, model, &text, &mut Journal::none(), &Silent, &cancel).unwrap_err();
        assert_eq!(error.category().exit_code(), code, "{error}");
        assert!(error.to_string().contains(phrase), "{error}");
    };
    refused(Broken(vocab, |_| Err("no such device".into())), 6, "no such device");
    refused(Broken(vocab, |_| Ok(())), 6, "0 logits for");
    let one = |out: &mut Vec<f32>| {
        out.push(1.0);
        Ok(())
    };
    refused(Broken(vocab, one), 6, "1 logits for");
    refused(Broken(0, |_| Ok(())), 6, "vocabulary of 0 tokens");
    refused(Broken(vocab + 1, |_| Ok(())), 2, "tokens");
    // A window of 64 tokens has 63 scored ones.
    let nan = |out: &mut Vec<f32>| {
        out.extend(std::iter::repeat_n(f32::NAN, 63 * 4096));
        Ok(())
    };
    assert_eq!((vocab, text.windows[0].scored()), (4096, 63));
    refused(Broken(vocab, nan), 6, "NaN or infinite");
}
