//! A third-party program makes a whole run with the library, and gets the bytes of `quant quantize`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use quant_core::calibrate::Corpus;
use quant_core::quantize::gptq::GptqSettings;
use quant_core::recipe::{Extensions, Recipe, step_of};
use quant_core::run::{
    Catalog, Done, Host, Nothing, QuantizeRequest, RecipeSettings, Summary, Text, quantize,
};
use quant_core::wording::{Argument, CommandLine, Wording, worded};
use quant_core::{CancelToken, Category, Error, Event, Observer, Silent};
use quant_tests::args;
use quant_tests::files::hashes;
use quant_tests::models::write_cut_demo_model;
use quant_tests::program::quant;
use quant_tests::workspace_root;
use serde_json::{Value, json};

const TEXT: &str = "The mill stood by the river, and nobody knew who owned it. ";

fn request(model: &Path, out: &Path) -> QuantizeRequest {
    let settings = RecipeSettings { samples: Some(2), seq_len: Some(128), ..RecipeSettings::default() };
    let text = Text::Given(Corpus::Texts(vec![TEXT.repeat(200)]), "mine".into());
    QuantizeRequest { settings, calibration: Some(text), ..QuantizeRequest::new(model, out) }
}

/// Keeps every event, and cancels after a block.
struct Recorder<'a> {
    events: Mutex<Vec<Event>>,
    cancel: Option<&'a CancelToken>,
}

impl Observer for Recorder<'_> {
    fn event(&self, event: &Event) {
        if let (Event::UnitDone { .. }, Some(cancel)) = (event, self.cancel) {
            cancel.cancel();
        }
        self.events.lock().unwrap().push(event.clone());
    }

    fn wants_estimate(&self) -> bool {
        true
    }
}

struct Shelf;

impl Catalog for Shelf {
    fn built_in(&self, name: &str) -> Option<Vec<String>> {
        (name == "mill").then(|| vec![TEXT.repeat(200)])
    }
}

#[test]
fn one_call_gives_the_program_s_bytes_and_resumes_to_them() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let (model, file) = (at("model"), at("text.txt"));
    write_cut_demo_model(&model, 3);
    std::fs::write(&file, TEXT.repeat(200)).unwrap();
    let line = args![
        "quantize",
        &model,
        "-o",
        at("program"),
        "--samples",
        "2",
        "--seq-len",
        "128",
        "--calibration",
        &file
    ];
    quant(line).succeeded();
    let expected = hashes(&at("program"));

    let cancel = CancelToken::new();
    let recorder = Recorder { events: Mutex::default(), cancel: None };
    let done = quantize(&request(&model, &at("library")), &Host::new(&recorder, &cancel, &Nothing)).unwrap();
    assert_eq!(hashes(&at("library")), expected);
    let Summary::Checkpoints(summary) = done.summary() else { panic!("a GGUF file") };
    assert_eq!((summary.method.as_str(), summary.outputs.len()), ("awq", 1));
    assert!(summary.steps.iter().any(|step| step.step == "awq" && step.seconds > 0.0));
    let events = recorder.events.into_inner().unwrap();
    let is_estimate =
        |event: &Event| matches!(event, Event::Expected { stage: "quantize", seconds } if *seconds > 0.0);
    assert_eq!(events.iter().filter(|event| is_estimate(event)).count(), 1);

    let recorder = Recorder { events: Mutex::default(), cancel: Some(&cancel) };
    let mut again = request(&model, &at("resumed"));
    let error = quantize(&again, &Host::new(&recorder, &cancel, &Nothing)).unwrap_err();
    assert!(matches!(error, Error::Interrupted) && !at("resumed").exists());
    cancel.reset();
    again.resume = true;
    again.calibration = Some(Text::Named("mill".into()));
    let recorder = Recorder { events: Mutex::default(), cancel: None };
    quantize(&again, &Host::new(&recorder, &cancel, &Shelf)).unwrap();
    assert_eq!(hashes(&at("resumed")), expected);
    let events = recorder.events.into_inner().unwrap();
    assert!(
        events.iter().any(|event| matches!(event, Event::Resumed { units } if *units >= 1)),
        "{events:?}"
    );
}

/// The spelling of a program whose users press buttons.
struct Buttons;

impl Wording for Buttons {
    fn setting(&self, name: &str, _: Option<&str>) -> String {
        format!("[{name}]")
    }

    fn command(&self, name: &str, _: &[Argument<'_>]) -> String {
        format!("the button {name}")
    }
}

#[test]
fn several_formats_and_a_gguf_file() {
    let scratch = tempfile::tempdir().unwrap();
    let (model, out) = (scratch.path().join("model"), scratch.path().join("out"));
    write_cut_demo_model(&model, 2);
    let (cancel, formats) = (CancelToken::new(), ["compressed-tensors", "gptq"]);
    let mut host = Host::new(&Silent, &cancel, &Nothing);
    host.wording = &Buttons;
    let settings = RecipeSettings {
        method: Some("rtn".into()),
        symmetric: Some(true),
        format: formats.map(str::to_owned).to_vec(),
        ..RecipeSettings::default()
    };
    let written = QuantizeRequest { settings, ..QuantizeRequest::new(&model, &out) };
    let Done::Checkpoints(done) = quantize(&written, &host).unwrap() else { panic!("a GGUF file") };
    let paths: Vec<_> = done.outputs.iter().map(|(published, _)| published.path.clone()).collect();
    assert_eq!(paths, formats.map(|format| out.join(format)));
    for path in &paths {
        assert!(path.join("quant_report.json").is_file());
        let card = std::fs::read_to_string(path.join("README.md")).unwrap();
        assert!(card.contains("```\nthe button eval\n```"), "{card}");
        assert!(card.contains("\nthe button plan shows more"), "{card}");
        assert!(!card.contains("quant eval") && !card.contains("quant plan"), "{card}");
    }

    let settings = RecipeSettings {
        format: vec!["gguf".into()],
        scheme: Some("Q8_0".into()),
        ..RecipeSettings::default()
    };
    let file = scratch.path().join("a.gguf");
    let written = QuantizeRequest { settings, ..QuantizeRequest::new(&model, &file) };
    assert!(matches!(quantize(&written, &host).unwrap(), Done::Gguf(_)));
    assert!(file.is_file());
}

#[test]
fn messages_name_settings_and_no_options() {
    let scratch = tempfile::tempdir().unwrap();
    let (model, out) = (scratch.path().join("model"), scratch.path().join("out"));
    write_cut_demo_model(&model, 2);
    let cancel = CancelToken::new();
    let host = Host::new(&Silent, &cancel, &Nothing);
    let refused = |change: &dyn Fn(&mut QuantizeRequest)| {
        let mut request = request(&model, &out);
        change(&mut request);
        let error = quantize(&request, &host).unwrap_err();
        let message = format!("{error}\n{}", error.remedy());
        assert!(!message.contains("--"), "{message}");
        assert!(!out.exists());
        (error.category(), worded(&message, &CommandLine).into_owned())
    };
    let settings = |change: fn(&mut RecipeSettings)| {
        refused(&|request: &mut QuantizeRequest| change(&mut request.settings))
    };
    for ((category, message), expected) in [
        (settings(|s| s.group_size = Some("100".into())), "choose a --group-size that divides these widths"),
        (settings(|s| s.ignore = vec!["none_such".into()]), "--ignore `none_such` matches no linear"),
        (
            settings(|s| s.damping = Some(0.1)),
            "--damping has no effect: method `awq` does not round with `gptq`",
        ),
        (settings(|s| s.gguf.pre = Some("qwen2".into())), "--pre has no effect"),
        (settings(|s| s.format = vec!["gguf".into(), "awq".into()]), "run once with --format gguf"),
        (
            settings(|s| (s.preset, s.recipe) = (Some("a".into()), Some("b".into()))),
            "--preset and --recipe cannot be combined",
        ),
        (
            refused(&|r| (r.settings, r.calibration) = (rtn(), Some(Text::Named("x".into())))),
            "--calibration x has no",
        ),
        (refused(&|r| r.output.clone_from(&r.model)), "overlaps the input"),
    ] {
        assert_eq!(category, Category::Usage, "{message}");
        assert!(message.contains(expected), "{message}");
    }
    let (category, message) = refused(&|r| r.calibration = Some(Text::Named("none".into())));
    assert!(
        category == Category::Input
            && message.contains("none is neither an existing file nor a known text set"),
        "{message}"
    );
}

#[test]
fn a_recipe_is_a_file_or_its_text() {
    let recipe = |given: &str| RecipeSettings { recipe: Some(given.into()), ..RecipeSettings::default() };
    let preset = Recipe::preset("gptq-w4a16").unwrap().to_toml();
    let settings = recipe(&preset);
    assert_eq!(settings.recipe().unwrap().to_toml(), preset);
    assert_eq!(settings.files().count(), 0);
    let described = |error: Error| format!("{error}\n{}", error.remedy().worded(&CommandLine));
    for (given, expected) in [
        ("quantize:\n  method: awq\n", "line 1: "),
        ("quantize:\n  method: awq\n", "correct the recipe, which must be TOML"),
        ("awq-w4a16", "awq-w4a16 does not exist\n--preset awq-w4a16 selects the preset of that name"),
        ("none.toml", "none.toml does not exist\ngive a recipe file; "),
    ] {
        let message = described(recipe(given).recipe().unwrap_err());
        assert!(message.contains(expected), "{message}");
    }
    let given = preset.replace("samples = 64", "samples = 8");
    let settings = RecipeSettings { method: Some("rtn".into()), ..recipe(&given) };
    let message = described(settings.recipe().unwrap_err());
    assert!(message.contains("[calibration] of the recipe has no effect"), "{message}");
}

/// Every setting that is a key of a step can be set by its field and by the step's own name, with the same result, and
/// its help on the command line is that of the step.
#[test]
fn settings_of_steps_are_keys_of_steps() {
    let help = quant(["quantize", "--help"]).succeeded().stdout;
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    let cases = [
        ("awq", "search", json!("reference")),
        ("smoothquant", "alpha", json!("0.7")),
        ("smoothquant", "smooth_producers", json!("all")),
        ("qoq", "output_alpha", json!("auto")),
        ("qoq", "attention_alpha", json!("0.25")),
        ("gptq", "damping", json!(0.05)),
        ("gptq", "block_size", json!(64)),
        ("gptq", "act_order", json!("none")),
        ("qoq", "layer_inputs", json!("quantized")),
        ("gptq", "span_blocks", json!(2)),
    ];
    for (method, setting, value) in &cases {
        let (step, key) = step_of(setting).unwrap();
        let read = |fields: Value| -> Recipe {
            serde_json::from_value::<RecipeSettings>(fields).unwrap().recipe().unwrap()
        };
        let (plain, named) = (json!({ "method": method }), json!({ "method": method, *setting: value }));
        let by_step = json!({ "method": method, "steps": { step: { key.name: value } } });
        let [plain, named, by_step] = [plain, named, by_step].map(read);
        assert_eq!(&named.settings, &by_step.settings, "{setting}");
        assert_ne!(named.to_toml(), plain.to_toml(), "{setting}");
        assert_eq!(named.to_toml(), by_step.to_toml(), "{setting}");
        assert!(help.contains(&*worded(key.help, &CommandLine)), "{setting}: {help}");
    }
    let known = Extensions::default();
    let settings = known.keys().into_iter().filter_map(|(_, key)| key.setting);
    let named: BTreeSet<&str> = cases.iter().map(|(_, setting, _)| *setting).collect();
    assert_eq!(settings.collect::<BTreeSet<_>>(), named);
    let (step, key) = step_of("channel_maxima").unwrap();
    assert!(step == "smoothquant" && key.is_file && help.contains(&*worded(key.help, &CommandLine)));
    for (step, key) in known.keys() {
        assert!(help.contains(&format!("{step}.{} (", key.name)), "{step}.{}", key.name);
        assert!(key.schema["description"].is_string());
    }
}

/// In GGUF files too, a key of GPTQ has the same effect by its field and by the step's own name.
#[test]
fn settings_of_gptq_apply_to_gguf() {
    let gptq = |fields: Value| {
        let mut fields = fields;
        (fields["format"], fields["method"]) = (json!(["gguf"]), json!("gptq"));
        serde_json::from_value::<RecipeSettings>(fields)
            .unwrap()
            .gguf_request(true)
            .unwrap()
            .compensation()
            .unwrap()
    };
    let (named, by_step) = (json!({ "damping": 0.05 }), json!({ "steps": { "gptq": { "damping": 0.05 } } }));
    assert_eq!(gptq(named.clone()), GptqSettings { damping: 0.05, ..GptqSettings::default() });
    assert_eq!(gptq(named), gptq(by_step));
    assert_eq!(gptq(json!({})), GptqSettings::default());
}

/// The settings of a job that an earlier version wrote are read, and written with the same bytes.
#[test]
fn stored_settings_keep_their_bytes() {
    let stored = "{\"preset\":null,\"recipe\":null,\"method\":\"qoq\",\"scheme\":null,\"format\":[],\"group_size\":null,\
        \"symmetric\":null,\"ignore\":[],\"override\":[],\"gguf\":{\"pre\":null,\"allow_fallback\":false,\
        \"reference_search\":false,\"imatrix\":null,\"save_imatrix\":null,\"split_max_size\":null},\"alpha\":null,\
        \"smooth_producers\":null,\"channel_maxima\":null,\"skip\":[],\"output_alpha\":\"0.2\",\
        \"attention_alpha\":\"auto\",\"steps\":{\"smooth-outputs\":{}},\"search\":null,\"damping\":0.02,\
        \"block_size\":null,\"act_order\":null,\"layer_inputs\":null,\"span_blocks\":null,\"scale_search\":null,\
        \"requantize\":false,\"samples\":4,\"seq_len\":null,\"seed\":null,\"packing\":null,\"mask\":null,\
        \"expert_tokens\":null,\"expert_floor\":null}";
    let settings: RecipeSettings = serde_json::from_str(stored).unwrap();
    assert_eq!(serde_json::to_string(&settings).unwrap(), stored);
    let recipe = settings.recipe().unwrap();
    let print = recipe.method.fingerprint(&recipe.settings);
    let expected = "{\"reorder\":null,\"smooth-attention\":\"auto\",\"smooth-outputs\":0.2,\"clip\":null}";
    assert_eq!(print.to_string().replace("0.20000000298023224", "0.2"), expected);
    assert_eq!(recipe.settings.steps.get::<GptqSettings>().damping, 0.02);
    // The fingerprints of AWQ and SmoothQuant, which an interrupted run must match.
    let print = |method: &str| {
        let settings = RecipeSettings { method: Some(method.into()), ..RecipeSettings::default() };
        let recipe = settings.recipe().unwrap();
        recipe.method.fingerprint(&recipe.settings).to_string()
    };
    assert_eq!(print("awq"), "{\"awq\":null}");
    let expected = "{\"smoothquant\":{\"alpha\":null,\"producers\":\"norms\",\"maxima\":null}}";
    assert_eq!(print("smoothquant"), expected);
}

fn code(directory: &Path, found: &mut Vec<(PathBuf, String)>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            code(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            let lines = text.lines().filter(|line| !line.trim_start().starts_with("//"));
            found.push((path, lines.collect::<Vec<_>>().join("\n")));
        }
    }
}

#[test]
fn no_source_of_a_library_names_an_option_or_a_command() {
    let mut sources = Vec::new();
    for library in ["formats/src", "quant-core/src", "eval/src"] {
        code(&workspace_root().join(library), &mut sources);
    }
    let mut options = BTreeSet::new();
    for command in ["plan", "quantize", "eval", "gate"] {
        let help = quant([command, "--help"]).succeeded().stdout;
        options.extend(help.split_whitespace().filter_map(|word| {
            let name = word.strip_prefix("--")?;
            let end = name.find(|c: char| !(c.is_ascii_lowercase() || c == '-'));
            Some(format!("--{}", &name[..end.unwrap_or(name.len())]))
        }));
    }
    assert!(options.len() > 50 && options.contains("--group-size"), "{options:?}");
    let help = quant(["--help"]).succeeded().stdout;
    let listed = help.lines().skip_while(|line| !line.starts_with("Commands:")).skip(1);
    let commands: Vec<String> = listed
        .take_while(|line| line.starts_with("  "))
        .filter_map(|line| Some(format!("quant {}", line.split_whitespace().next()?)))
        .collect();
    assert!(commands.len() > 8 && commands.contains(&"quant gate".to_owned()), "{commands:?}");
    for (path, text) in sources {
        for command in &commands {
            let named = text.contains(command.as_str());
            // The tests in `wording.rs` contain commands.
            assert!(!named || path.ends_with("wording.rs"), "{} names `{command}`", path.display());
        }
        for option in &options {
            let is_whole = |(at, _): (usize, &str)| {
                let after = text[at + option.len()..].chars().next();
                !after.is_some_and(|c| c.is_ascii_alphanumeric() || c == '-')
                    && !text[..at].ends_with(|c: char| c.is_ascii_alphanumeric() || c == '-')
            };
            let named = text.match_indices(option.as_str()).any(is_whole);
            // The tests in `wording.rs` contain options.
            assert!(!named || path.ends_with("wording.rs"), "{} names {option}", path.display());
        }
    }
}

fn rtn() -> RecipeSettings {
    RecipeSettings { method: Some("rtn".into()), ..RecipeSettings::default() }
}
