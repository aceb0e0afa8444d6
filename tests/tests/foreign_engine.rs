//! A model that a different engine runs is scored like quant's: the same windows, sums and statistics from its logits.

use std::cell::Cell;

use quant_core::calibrate::{TextTokenizer, TokenizerSettings};
use quant_core::checkpoint::ModelDirectory;
use quant_core::digest::sha256_hex;
use quant_core::model::{Decoder, Model};
use quant_core::{CancelToken, Silent};
use quant_evaluator::{
    EvaluationText, Journal, LogitsModel, Profile, Reference, Scored, Tokenization, compare, perplexity,
};
use quant_tests::demo_model;
use quant_tests::models::write_cut_demo_model;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// A third-party engine: here a decoder of `quant-core` that returns all logits of a window.
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
