//! A model that a different engine runs is scored like quant's.

use std::cell::{Cell, RefCell};
use std::ops::Range;

use quant_core::calibrate::{TextTokenizer, TokenizerSettings};
use quant_core::checkpoint::ModelDirectory;
use quant_core::digest::sha256_hex;
use quant_core::model::{Decoder, Model};
use quant_core::random::mix;
use quant_core::{CancelToken, Category, Error, Silent};
use quant_evaluator::gate::{Baseline, Policy, Verdict, judge};
use quant_evaluator::{
    EncodedText, Evaluation, EvaluationText, Journal, LogitsBatch, LogitsModel, ModelIdentity, Profile,
    Reference, Scored, Tokenization, Tokenizer, Tool, UnscoredWindow, Window, compare, perplexity,
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
    refused(Broken(vocab, |_| Err("no such device".into())), 5, "the engine failed: no such device");
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

#[test]
fn errors_of_an_engine_keep_their_category_and_source() {
    let directory = ModelDirectory::open(&demo_model()).unwrap();
    let text = text(&directory);
    let failed = |fails: fn(&mut Vec<f32>) -> Result<(), Failure>| {
        let engine: &dyn LogitsModel = &Broken(4096, fails);
        perplexity(engine, &text, &mut Journal::none(), &Silent, &CancelToken::new()).unwrap_err()
    };
    // Errors of this crate are returned as they are.
    let interrupted = failed(|_| Err(Error::Interrupted.into()));
    assert!(matches!(interrupted, Error::Interrupted), "{interrupted}");
    let usage = failed(|_| Err(Error::usage("the window is too long", "use shorter windows").into()));
    assert_eq!((usage.category(), usage.remedy().marked()), (Category::Usage, "use shorter windows"));
    assert_eq!(usage.to_string(), "the window is too long");
    // Others are the source.
    let other = failed(|_| Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into()));
    let source = std::error::Error::source(&other).and_then(|source| source.downcast_ref::<std::io::Error>());
    assert_eq!(source.map(std::io::Error::kind), Some(std::io::ErrorKind::TimedOut), "{other}");
    assert_eq!((other.category(), other.category().exit_code()), (Category::Environment, 5));
}

/// Logits that depend on the token and its position only: a hash, from −8 to 8.
fn hashed(token: u32, position: usize, vocab: usize) -> impl Iterator<Item = f32> {
    let seed = mix(u64::from(token) ^ (position as u64) << 32);
    (0..vocab).map(move |next| (mix(seed ^ next as u64) >> 40) as f32 / (1 << 20) as f32 - 8.0)
}

struct Whole(usize);

impl LogitsModel for Whole {
    fn vocab(&self) -> usize {
        self.0
    }

    fn logits(&self, tokens: &[u32], first: usize, out: &mut Vec<f32>) -> Result<(), Failure> {
        for (position, &token) in tokens.iter().enumerate().skip(first) {
            out.extend(hashed(token, position, self.0));
        }
        Ok(())
    }
}

/// The same model, which runs several windows together and returns the logits of some positions at a time.
struct Ranged {
    vocab: usize,
    max_windows: usize,
    /// The number of windows after which the engine fails.
    fails_after: usize,
    /// The first token of every window that was run, by batch.
    batches: RefCell<Vec<Vec<u32>>>,
    asked: RefCell<Vec<(usize, Range<usize>)>>,
}

impl Ranged {
    fn new(vocab: usize, max_windows: usize, fails_after: usize) -> Self {
        let (batches, asked) = Default::default();
        Self { vocab, max_windows, fails_after, batches, asked }
    }

    fn windows(&self) -> Vec<u32> {
        self.batches.borrow().concat()
    }
}

struct Running<'a>(&'a Ranged, Vec<(Vec<u32>, usize)>);

impl LogitsModel for Ranged {
    fn vocab(&self) -> usize {
        self.vocab
    }

    fn logits(&self, _: &[u32], _: usize, _: &mut Vec<f32>) -> Result<(), Failure> {
        Err("windows are started instead".into())
    }

    fn max_windows(&self) -> usize {
        self.max_windows
    }

    fn start<'a>(&'a self, windows: &[UnscoredWindow<'_>]) -> Result<Box<dyn LogitsBatch + 'a>, Failure> {
        if self.windows().len() + windows.len() > self.fails_after {
            return Err("out of memory".into());
        }
        let same = windows.iter().all(|window| window.tokens.len() == windows[0].tokens.len());
        assert!(same && (1..=self.max_windows).contains(&windows.len()));
        self.batches.borrow_mut().push(windows.iter().map(|window| window.tokens[0]).collect());
        let kept = windows.iter().map(|window| (window.tokens.to_vec(), window.first)).collect();
        Ok(Box::new(Running(self, kept)))
    }
}

impl LogitsBatch for Running<'_> {
    fn logits(&mut self, window: usize, positions: Range<usize>, out: &mut Vec<f32>) -> Result<(), Failure> {
        let (tokens, first) = &self.1[window];
        let numbered = tokens.iter().enumerate().skip(first + positions.start);
        for (position, &token) in numbered.take(positions.len()) {
            out.extend(hashed(token, position, self.0.vocab));
        }
        self.0.asked.borrow_mut().push((window, positions));
        Ok(())
    }
}

/// Windows whose first tokens are their numbers.
fn numbered(lengths: &[usize]) -> EvaluationText {
    let window = |(number, &length): (usize, &usize)| Window {
        tokens: (0..length as u32).map(|i| if i == 0 { number as u32 } else { i * 7 % 50 }).collect(),
        first: 1 + number % 3,
    };
    let windows = lengths.iter().enumerate().map(window).collect();
    EvaluationText::of_windows(windows, Profile::gptq(64).unwrap()).unwrap()
}

/// The fields of a text are public. What an engine could not score is refused before it is asked, with a message about
/// the text, not about the logits.
#[test]
fn texts_that_the_model_cannot_score_are_refused() {
    let cancel = CancelToken::new();
    let scored = |text: &EvaluationText| {
        perplexity(&Whole(50) as &dyn LogitsModel, text, &mut Journal::none(), &Silent, &cancel)
    };
    let text = numbered(&[30, 30]);
    assert!(scored(&text).is_ok());
    for (change, expected) in [
        (
            (|text| text.windows[1].tokens[4] = 50) as fn(&mut EvaluationText),
            "the text has token 50, but the model has a vocabulary of 50 tokens",
        ),
        (|text| text.windows[0].first = 0, "window 0 of the text has no token before"),
        (|text| text.windows[1].first = 31, "window 1 of the text has no token before"),
    ] {
        let mut text = text.clone();
        change(&mut text);
        let error = scored(&text).unwrap_err();
        assert_eq!(error.category().exit_code(), 2, "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    }
}

/// The logits of a large vocabulary are requested for few positions at a time, with bit-identical results.
#[test]
fn an_engine_returns_logits_for_some_positions_at_a_time() {
    // 64 MiB are the logits of 64 positions.
    const VOCAB: usize = 1 << 18;
    let text = numbered(&[30, 30, 30, 100]);
    let cancel = CancelToken::new();
    let (whole, ranged) = (Whole(VOCAB), Ranged::new(VOCAB, 2, usize::MAX));
    let scores =
        |engine: &dyn LogitsModel| perplexity(engine, &text, &mut Journal::none(), &Silent, &cancel).unwrap();
    assert_eq!(scores(&ranged), scores(&whole));
    assert_eq!(*ranged.batches.borrow(), [vec![0, 1], vec![2], vec![3]]);
    assert_eq!(*ranged.asked.borrow(), [(0, 0..29), (1, 0..28), (0, 0..27), (0, 0..64), (0, 64..99)]);

    // The reference and the model are paired position by position.
    let (_, divergence) = compare(
        Reference::Engine(&whole),
        Scored::Engine(&ranged),
        &text,
        &mut Journal::none(),
        &Silent,
        &cancel,
    )
    .unwrap();
    assert_eq!((divergence.kl.mean, divergence.top1_agreement.mean), (0.0, 1.0));
    assert_eq!(divergence.kl_quantiles.max.value, 0.0);
}

#[test]
fn long_windows_run_together() {
    let text = numbered(&[1500; 5]);
    let ranged = Ranged::new(64, 4, usize::MAX);
    let engine: &dyn LogitsModel = &ranged;
    perplexity(engine, &text, &mut Journal::none(), &Silent, &CancelToken::new()).unwrap();
    assert_eq!(*ranged.batches.borrow(), [vec![0, 1, 2, 3], vec![4]]);
}

/// Windows and tokenizers of an engine have no files to hash; the result is read and gated all the same.
#[test]
fn a_result_without_hashes_of_files_is_read() {
    let text = numbered(&[30, 30, 40]);
    let engine: &dyn LogitsModel = &Whole(64);
    let scores = perplexity(engine, &text, &mut Journal::none(), &Silent, &CancelToken::new()).unwrap();
    let model = ModelIdentity {
        path: "whole".into(),
        sha256: sha256_hex("whole"),
        size_bytes: 0,
        schemes: Vec::new(),
        kv_cache: None,
        method: None,
    };
    let tool = Tool { name: "their-engine".into(), version: "7".into(), sha256: None, isa: "none".into() };
    let result = Evaluation::new(tool, model, None, ("own".into(), &text), (scores, None), (1.0, 1.0));
    assert_eq!((result.text.sha256.as_str(), result.tokenizer_sha256.as_str()), ("", ""));
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("own.json");
    std::fs::write(&path, serde_json::to_string(&result).unwrap()).unwrap();
    assert_eq!(Evaluation::read(&path).unwrap(), result);
    let run = quant(args!["gate", &path, "--suggest"]);
    assert_eq!(run.code(), Some(0), "{run}");
}

/// An evaluation that stops resumes with the missing windows, even if the engine now runs a different number of windows
/// together.
#[test]
fn an_interrupted_evaluation_of_an_engine_resumes() {
    let text = numbered(&[20; 8]);
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("journal");
    let counts: Vec<usize> = text.windows.iter().map(Window::scored).collect();
    let run = |engine: &dyn LogitsModel, journal: &mut Journal<f64>| {
        perplexity(engine, &text, journal, &Silent, &CancelToken::new())
    };
    let open = || Journal::open(&path, &serde_json::json!({ "model": "hashed" }), &counts).unwrap();
    let expected = run(&Whole(300), &mut Journal::none()).unwrap();
    let first = Ranged::new(300, 3, 6);
    let error = run(&first, &mut open()).unwrap_err();
    assert!(error.to_string().contains("the engine failed: out of memory"), "{error}");
    assert_eq!(error.category().exit_code(), 5);
    // Batches of 4 windows would begin before the end of the kept ones.
    let second = Ranged::new(300, 4, usize::MAX);
    assert_eq!(run(&second, &mut open()).unwrap(), expected);
    assert_eq!(*second.batches.borrow(), [[6, 7]]);
    let third = Ranged::new(300, 5, usize::MAX);
    assert_eq!(run(&third, &mut open()).unwrap(), expected);
    assert!(third.windows().is_empty());
}

#[test]
fn positions_without_logits_end_the_evaluation() {
    struct Short;
    impl LogitsBatch for Short {
        fn logits(&mut self, _: usize, positions: Range<usize>, out: &mut Vec<f32>) -> Result<(), Failure> {
            out.resize(out.len() + 50 * positions.len() - 1, 0.0);
            Ok(())
        }
    }
    impl LogitsModel for Short {
        fn vocab(&self) -> usize {
            50
        }
        fn logits(&self, _: &[u32], _: usize, _: &mut Vec<f32>) -> Result<(), Failure> {
            Ok(())
        }
        fn start<'a>(&'a self, _: &[UnscoredWindow<'_>]) -> Result<Box<dyn LogitsBatch + 'a>, Failure> {
            Ok(Box::new(Self))
        }
    }
    let (text, engine): (_, &dyn LogitsModel) = (numbered(&[20]), &Short);
    let error = perplexity(engine, &text, &mut Journal::none(), &Silent, &CancelToken::new()).unwrap_err();
    assert_eq!(error.category().exit_code(), 6);
    assert!(error.to_string().contains("949 logits for 19 positions and a vocabulary of 50"), "{error}");
}

/// A tokenizer of an engine, without a file.
#[derive(Debug)]
struct Letters {
    prefix: bool,
    /// Texts of which it loses the tokens.
    lost: usize,
    /// The number of bytes by which its offsets are wrong.
    shift: usize,
}

impl Tokenizer for Letters {
    fn encode(&self, texts: &[&str]) -> quant_core::Result<Vec<EncodedText>> {
        let place = |i: usize| i + self.shift..i + self.shift + 1;
        let one = |text: &&str| text.bytes().enumerate().map(|(i, b)| (b.into(), place(i))).collect();
        Ok(texts.iter().skip(self.lost).map(one).collect())
    }

    fn document_prefix(&self) -> quant_core::Result<u32> {
        match self.prefix {
            true => Ok(7),
            false => Err(quant_core::Error::usage("no prefix", "choose a different profile")),
        }
    }
}

#[test]
fn an_engines_tokenizer_cuts_texts() {
    let documents = ["abcdefgh".repeat(10), "xyz".repeat(10)];
    let cut = |letters: &Letters, profile: Profile| {
        EvaluationText::new(letters, &documents, profile.into(), None, "letters".as_ref())
    };
    let letters = Letters { prefix: true, lost: 0, shift: 0 };
    let text = cut(&letters, Profile::gptq(16).unwrap()).unwrap();
    // 80 letters, 2 newlines and 30 letters.
    assert_eq!((text.windows.len(), text.tokens_scored(), text.scored_bytes), (7, 7 * 15, 7 * 15));
    assert_eq!(text.windows[0].tokens, b"abcdefghabcdefgh".map(u32::from));
    assert_eq!((text.tokenizer_sha256.as_str(), text.warnings.len()), ("", 0));
    let rolling = Profile::LmEvalRolling { window: 64 };
    let text = cut(&letters, rolling).unwrap();
    assert_eq!(text.windows[0].tokens[..3], [7, u32::from(b'a'), u32::from(b'b')]);
    assert_eq!((text.words, text.scored_bytes), (Some(2), 110));
    for (letters, expected) in [
        (Letters { prefix: false, lost: 0, shift: 0 }, "no prefix"),
        (Letters { prefix: true, lost: 1, shift: 0 }, "tokens for"),
        (Letters { prefix: true, lost: 0, shift: 1 }, "token 104 at bytes 80 to 81 of a text of 80 bytes"),
    ] {
        let error = cut(&letters, rolling).unwrap_err();
        assert_eq!(error.category().exit_code(), 2, "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    }
}
