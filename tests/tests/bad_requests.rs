//! Invalid requests, and texts that cannot be read, are refused before anything is computed.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

use quant_tests::files::snapshot;
use quant_tests::models::TinyLlama;
use quant_tests::program::{Running, command, quant};
use quant_tests::refusal::{check_message, job_of, old_checkpoint, refuses_to_quantize};
use quant_tests::{args, demo_model};
use tempfile::TempDir;

fn model() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    TinyLlama::default().write(directory.path());
    directory
}

/// Requests that `plan` and `quantize` refuse alike, and the expected messages.
#[test]
fn recipes() {
    let model = model();
    let cases: &[(&[&str], &[&str])] = &[
        (&["--scheme", "w9a16"], &["scheme `w9a16`", "w2, w3, w4, w5, w6, w7 or w8, then a16 or a8"]),
        (&["--scheme", "w8a8-static-asym-sym"], &["unknown part `sym`", "-static or -static-asym"]),
        (
            &["--method", "smoothquant", "--scheme", "w4a16-g32"],
            &["all activations stay float", "such as w8a8"],
        ),
        (&["--scheme", "w4a8-g32-static"], &["only with w8a8-channel-sym"]),
        (&["--format", "awq", "--scheme", "w4a8-g32-static"], &["cannot describe quantized activations"]),
        (&["--method", "smoothquant", "--alpha", "1.5"], &["alpha is 1.5; it must be from 0 to 1"]),
        (&["--method", "smoothquant", "--alpha", "best"], &["alpha `best`", "or auto"]),
        (&["--method", "smoothquant", "--smooth-producers", "some"], &["producers `some`", "norms, all"]),
        (&["--alpha", "0.5"], &["--alpha has no effect"]),
        (&["--skip", "rotate"], &["`rotate` is not a step of method `awq`", "its steps are awq"]),
        (
            &["--method", "rtn", "--skip", "rotate"],
            &["not a step of method `rtn`", "no steps that can be skipped"],
        ),
        (
            &["--method", "qoq", "--skip", "rotat"],
            &["`rotat` is not a step", "rotate, reorder, smooth-attention"],
        ),
        (
            &["--output-alpha", "0.1"],
            &["--output-alpha has no effect", "choose a method with `smooth-outputs`, such as qoq"],
        ),
        (
            &["--method", "qoq", "--skip", "smooth-attention", "--attention-alpha", "0.5"],
            &["--attention-alpha has no effect"],
        ),
        (
            &["--method", "qoq", "--output-alpha", "2"],
            &["`smooth-outputs.alpha`: alpha is 2; it must be from 0 to 1"],
        ),
        (&["--scheme", "w4a8kv5"], &["unknown cache `kv5`", "kv4, kv8, kvf8 or kv16"]),
        (&["--override", "down_proj=w4a8kv4"], &["`w4a8kv4`"]),
        (&["--scheme", "w4a8-channel-progressive"], &["progressive scales require groups"]),
        (&["--scheme", "w8a8-progressive"], &["unknown part `progressive`"]),
        (&["--method", "smoothquant", "--search", "fast"], &["--search has no effect"]),
        (&["--step", "awq"], &["`awq` is not a setting of a step", "--step STEP.KEY=VALUE"]),
        (&["--step", "search=fast"], &["`search=fast` is not a setting of a step"]),
        (&["--step", "awk.search=fast"], &["`awk`, which is not a step of", "did you mean awq?"]),
        (&["--step", "clip.search=fast"], &["`clip`, which is not a step of", "its steps are awq"]),
        (&["--step", "awq.saerch=fast"], &["key `saerch`", "did you mean search? its keys are search"]),
        (&["--step", "awq.search=deep"], &["unknown search `deep`"]),
        (&["--step", "awq.search=4"], &["`awq.search`: unknown search `4`", "fast, reference"]),
        (&["--step", "awq.search=fast", "--step", "awq.search=fast"], &["sets `search` of `awq` twice"]),
        (
            &["--search", "fast", "--step", "awq.search=fast"],
            &["--search and --step both set `search` of `awq`"],
        ),
        (
            &["--method", "smoothquant", "--scheme", "w8a8", "--step", "smoothquant.alpha=1.5"],
            &["alpha is 1.5; it must be from 0 to 1"],
        ),
        (
            &["--method", "smoothquant", "--step", "smoothquant.maxima=f"],
            &["`maxima` of `smoothquant` names a file", "set --channel-maxima"],
        ),
        (&["--method", "gptq", "--step", "gptq.damping=0"], &["the damping is 0; it must be greater than 0"]),
        (
            &["--method", "gptq", "--step", "gptq.block_size=1.5"],
            &["block_size is 1.5, which is not a count"],
        ),
        (
            &["--method", "rtn", "--step", "gptq.damping=0.1"],
            &["`gptq`, which is not a step", "no steps", "choose --method gptq"],
        ),
        (&["--method", "rtn", "--step", "rtn.x=1"], &["settings of `rtn`, which has none"]),
        (
            &["--method", "gptq", "--step", "GPTQ.damping=0.1"],
            &["`GPTQ`, which is not a", "did you mean gptq?"],
        ),
        (
            &["--method", "gptq", "--step", "gptq.span_blocks=2", "--step", "gptq.inputs=float"],
            &["`span_blocks` of `gptq`", "has no effect", "set `inputs` of `gptq` to quantized"],
        ),
        (
            &["--method", "qoq", "--step", "smooth-attention.alpha=x"],
            &["`smooth-attention.alpha`: invalid alpha `x`"],
        ),
        (&["--scheme", "w4a16-g32-maybe"], &["`maybe`", "-sym or -asym"]),
        (&["--scheme", "w4a16-g0"], &["`g0`"]),
        (&["--scheme", "w4a16-g032"], &["`g032`"]),
        (&["--scheme", "w4a16-g+32"], &["`g+32`"]),
        (
            &["--group-size", "32", "--seq-len", "1048577"],
            &["at most 1048576 windows of at most 1048576 tokens"],
        ),
        (&["--scheme", ""], &["scheme ``", "common schemes are w4a16-g128"]),
        (
            &["--scheme", "int4"],
            &["scheme `int4`", "did you mean w4a16?", "common schemes are w4a16-g128", "--preset"],
        ),
        (
            &["--method", "magic"],
            &["unknown method `magic`", "known methods: awq, awq-gptq, gptq, qoq, qoq-rtn, rtn"],
        ),
        (
            &["--format", "gguf9"],
            &[
                "unknown format `gguf9`",
                "did you mean gguf? known formats: compressed-tensors, awq, gptq",
                ", gguf",
            ],
        ),
        (&["--preset", "best"], &["unknown preset `best`", "known presets: awq-w4a16"]),
        (&["--group-size", "0"], &["group size `0`", "`channel`"]),
        (&["--group-size", "many"], &["group size `many`"]),
        (
            &["--scheme", "w4a16-g32", "--group-size", "64"],
            &["--scheme w4a16-g32 contradicts", "specify group size and symmetry only once"],
        ),
        (&["--scheme", "w4a16-g32-sym", "--asymmetric"], &["--scheme w4a16-g32-sym contradicts"]),
        (&["--scheme", "w4a16-g32-asym", "--symmetric"], &["--scheme w4a16-g32-asym contradicts"]),
        (
            &["--group-size", "32", "--ignore", "dwn_proj"],
            &["--ignore `dwn_proj` matches no linear", "did you mean down_proj"],
        ),
        (
            &["--group-size", "32", "--override", "mlp.downproj=w8a16"],
            &["--override `mlp.downproj` matches no linear", "did you mean mlp.down_proj"],
        ),
        (
            &["--group-size", "32", "--ignore", "*.layers.7.*"],
            &["`*.layers.7.*`", "`quant plan MODEL --all`"],
        ),
        (
            &["--group-size", "32", "--format", "awq", "--override", "lm_head=w4a16"],
            &["`lm_head` cannot be quantized", "keep it float"],
        ),
        (&["--group-size", "32", "--samples", "0"], &["0 calibration windows of 512 tokens"]),
        (
            &["--group-size", "32", "--ignore", "*.mlp.*", "--override", "down_proj=w8a16"],
            &["--override down_proj has no effect", "--ignore takes precedence"],
        ),
        (
            &["--format", "awq", "--scheme", "w3a16-g32"],
            &[
                "`model.layers.0.self_attn.q_proj.weight`: the awq format supports 4-bit weights only, not 3",
                "--format compressed-tensors",
            ],
        ),
        (
            &["--format", "awq", "--group-size", "32", "--override", "down_proj=w4a16-channel"],
            &["down_proj` has the scheme w4a16-channel-asym", "one scheme for all"],
        ),
        (&["--search", "deep"], &["unknown search `deep`", "fast, reference"]),
        (&["--method", "rtn", "--seed", "0"], &["--seed has no effect"]),
        (&["--method", "clip,reorder"], &["`clip` clips the ranges", "put `clip` last"]),
        (&["--method", "reorder,rotate"], &["modifies the whole model", "put `rotate` first"]),
        (&["--method", "rotate,magic"], &["unknown step `magic`", "the steps are awq, clip, fold-norms"]),
        (&["--packing", "bfd"], &["unknown packing `bfd`", "auto, stream, documents"]),
        (&["--mask", "users"], &["unknown mask `users`", "none, prompts"]),
        (&["--method", "rtn", "--packing", "documents"], &["--packing has no effect"]),
        (&["--method", "rtn", "--mask", "prompts"], &["--mask has no effect"]),
        (&["--group-size", "32", "--ignore", "re:("], &["pattern `re:(`", "a regular expression after re:"]),
        (
            &["--group-size", "32", "--ignore", "re:(a{1000}){1000}{1000}"],
            &["pattern `re:(a{1000}){1000}{1000}`", "exceeds size limit"],
        ),
        (&["--group-size", "32", "--ignore", ""], &["pattern ``", "is empty"]),
        (&["--group-size", "32", "--ignore", "*"], &["nothing is left to quantize"]),
        (&["--group-size", "32", "--override", "down_proj"], &["`down_proj` has no `=`", "PATTERN=SCHEME"]),
        (&["--group-size", "32", "--override", "down_proj=w9a16"], &["scheme `w9a16`"]),
        (
            &["--group-size", "64"],
            &[
                "does not divide the input width of 2 tensors",
                "\n  2 × model.layers.*.mlp.down_proj.weight: width 96, group size 64\n",
                "or --group-size channel",
                "--override 'down_proj=w4a16-channel'",
            ],
        ),
        (
            &[],
            &[
                "does not divide the input width of 14 tensors",
                "\n  2 × model.layers.*.self_attn.q_proj.weight: width 64, group size 128",
                "\n  2 × model.layers.*.mlp.down_proj.weight: width 96, group size 128",
            ],
        ),
        (
            &["--group-size", "32", "--override", "up_proj=w8a16-g48"],
            &["mlp.up_proj.weight: width 64, group size 48"],
        ),
    ];
    for (options, expected) in cases {
        let case = options.join(" ");
        refuses_to_quantize(&case, model.path(), options, 2, expected);
        let plan = args!["plan", model.path()].into_iter().chain(options.iter().map(Into::into));
        check_message(&case, &quant(plan), 2, expected);
    }
    // Following the advice in one of the messages works.
    let advice = "down_proj=w4a16-channel";
    quant(args!["plan", model.path(), "--group-size", "64", "--override", advice]).succeeded();
    quant(args!["plan", model.path(), "--group-size", "32", "--ignore", "lm_head"]).succeeded();
    let options = ["--method", "rtn", "--group-size", "32", "--calibration", "builtin"];
    refuses_to_quantize(
        "a text for rtn",
        model.path(),
        &options,
        2,
        &["--calibration builtin has no effect"],
    );
}

/// A misspelled name gives the nearest valid one, whatever kind of name it is.
#[test]
fn misspelled_names() {
    let model = model();
    let m = model.path();
    let gguf = ["--format", "gguf", "--scheme"];
    let plans: &[(&[&str], &str)] = &[
        (&["--method", "AWQ"], "unknown method `AWQ`\n  did you mean awq? known methods"),
        (&["--method", "gtpq"], "unknown method `gtpq`\n  did you mean gptq?"),
        (&["--method", "smooth_quant"], "did you mean smoothquant?"),
        (&["--method", "rotat"], "did you mean rotate?"),
        (&["--method", "rotate,awk"], "unknown step `awk`\n  did you mean awq? the steps are"),
        (&["--method", "rotate,awq,gtpq"], "unknown step `gtpq`\n  did you mean gptq?"),
        (&["--method", "qoq", "--skip", "smoth-outputs"], "did you mean smooth-outputs? its steps are"),
        (&["--step", "smoothquat.alpha=1"], "did you mean smoothquant? its steps are awq"),
        (&["--preset", "awq_w4a16"], "unknown preset `awq_w4a16`\n  did you mean awq-w4a16?"),
        (&["--preset", "gptq"], "did you mean gptq-w4a16?"),
        (&["--scheme", "int4-g128"], "did you mean w4a16-g128?"),
        (&["--scheme", "uint4-g64"], "did you mean w4a16-g64-asym?"),
        (&["--scheme", "INT8"], "did you mean w8a16?"),
        (&["--scheme", "q8"], "did you mean w8a16?"),
        (&["--scheme", "W4A16"], "scheme `W4A16`: unknown part `W4A16`\n  did you mean w4a16? Names of"),
        (&["--scheme", "W4A16-G128"], "did you mean w4a16-g128?"),
        (&["--scheme", "W8A8-Channel-ASYM"], "did you mean w8a8-channel-asym?"),
        (&["--scheme", "w4a16-G64"], "unknown part `G64`\n  did you mean w4a16-g64?"),
        (&["--scheme", "W4A8KV4-g128"], "unknown scheme `W4A8KV4-g128`\n  did you mean w4a8kv4-g128?"),
        (&["--scheme", "FP8"], "did you mean fp8?"),
        (&["--override", "down_proj=W8A16"], "did you mean w8a16?"),
        (&[gguf[0], gguf[1], gguf[2], "W4A16"], "types with 4 bits: Q4_0, Q4_1, Q4_K_S, Q4_K_M; known types"),
        (&["--scheme", "w4a16-g32-aysm"], "unknown part `aysm`\n  did you mean -asym?"),
        (&["--scheme", "fp16"], "to write floats, add --format safetensors"),
        (&["--format", "AQW"], "unknown format `AQW`\n  did you mean awq?"),
        (&["--format", "autoawq"], "did you mean awq?"),
        (&["--format", "compressed_tensors"], "did you mean compressed-tensors?"),
        (&["--format", "GUFF"], "did you mean gguf?"),
        (&[gguf[0], gguf[1], gguf[2], "Q4_KM"], "mixture `Q4_KM`\n  did you mean Q4_K_M?"),
        (&[gguf[0], gguf[1], gguf[2], "Q8_0", "--override", "down_proj=Q6K"], "did you mean Q6_K?"),
        (&["--packing", "streem"], "did you mean stream? known packings"),
        (&["--mask", "prompt"], "did you mean prompts? known masks"),
        (&["--search", "fats"], "did you mean fast? known searches"),
        (&["--method", "gptq", "--act-order", "static_groups"], "did you mean static-groups?"),
        (&["--method", "gptq", "--layer-inputs", "Float"], "did you mean float?"),
        (&["--method", "smoothquant", "--smooth-producers", "norm"], "did you mean norms?"),
        (&["--scheme", "nvfp4a16", "--scale-search", "swep"], "did you mean sweep?"),
        (&["--expert-tokens", "routet"], "did you mean routed?"),
    ];
    for (options, expected) in plans {
        let run = quant(args!["plan", m].into_iter().chain(options.iter().map(Into::into)));
        check_message(&options.join(" "), &run, 2, &[*expected]);
    }
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("out");
    let text = args!["quantize", m, "-o", &out, "--group-size", "32", "--calibration", "builtn"];
    check_message("a text", &quant(text), 4, &["did you mean builtin? give the path of a text"]);
    for (profile, meant) in
        [("gtpq-64", "gptq-64"), ("GPTQ-64", "gptq-64"), ("lm-eval-rolling-64", "lmeval-rolling-64")]
    {
        let run = quant(args!["eval", m, "--text", "builtin-heldout", "--profile", profile]);
        check_message(profile, &run, 2, &[&format!("did you mean {meant}? known profiles")]);
    }
    let run = quant(args!["eval", m, "--text", "builtin_heldout"]);
    check_message("an evaluation text", &run, 4, &["did you mean builtin-heldout?"]);
    check_message(
        "a printed preset",
        &quant(args!["plan", "--print-recipe", "rtn-w8"]),
        2,
        &["did you mean rtn-w8a8?"],
    );
    let file = model.path().join("mine.toml");
    std::fs::write(&file, "[quantize]\nscheme = \"w4a16\"\nmethod = \"gtpq\"\n").unwrap();
    let run = quant(args!["plan", m, "--recipe", &file]);
    check_message("a recipe file", &run, 2, &["unknown quantize.method `gtpq`", "did you mean gptq?"]);
}

/// A recipe file is equivalent to the same options, and its errors name the line.
#[test]
fn recipe_files() {
    let model = model();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mine.toml");
    let plan = |options: &[&std::ffi::OsStr]| {
        let arguments = args!["plan", model.path(), "--json"].into_iter();
        quant(arguments.chain(options.iter().map(|o| (*o).to_owned())))
    };
    let recipe: &[&std::ffi::OsStr] = &["--recipe".as_ref(), file.as_ref()];
    std::fs::write(
        &file,
        "[[transform]]\nkind = \"awq\"\n[quantize]\nscheme = \"w3a16-g32\"\nignore = [\"o_proj\"]\n\
         [[quantize.override]]\npattern = \"up_proj\"\nscheme = \"w8a16\"\n[calibration]\nsamples = 4\n",
    )
    .unwrap();
    let options =
        ["--scheme", "w3a16-g32", "--ignore", "o_proj", "--override", "up_proj=w8a16", "--samples", "4"];
    let same = plan(&options.map(AsRef::as_ref)).succeeded();
    assert_eq!(plan(recipe).succeeded().stdout, same.stdout);
    let refined = plan(&[recipe, &["--override".as_ref(), "v_proj=w8a16".as_ref()]].concat()).succeeded();
    assert_eq!(refined.json()["selectors"].as_array().unwrap().len(), 3);
    // With a method that reads no text, the file's calibration settings have no effect.
    let rounded = plan(&[recipe, &["--method".as_ref(), "rtn".as_ref()]].concat());
    check_message("rtn", &rounded, 2, &["[calibration] of ", "mine.toml has no effect"]);
    let printed = quant(args!["plan", "--print-recipe", "rtn-w8a16"]).succeeded();
    std::fs::write(&file, printed.stdout).unwrap();
    let preset = ["--preset", "rtn-w8a16", "--group-size", "32"].map(AsRef::as_ref);
    let grouped = [recipe, &["--group-size".as_ref(), "32".as_ref()]].concat();
    assert_eq!(plan(&grouped).succeeded().stdout, plan(&preset).succeeded().stdout);

    // A pattern without effect is reported with its place, not as an option.
    let head = "[quantize]\nscheme = \"w4a16-g32\"\n";
    let down = "[[quantize.override]]\npattern = \"down_proj\"\nscheme = \"w8a16\"\n";
    for (text, expected) in [
        (
            format!("{head}ignore = [\n  \"o_proj\",\n  \"down_prj\",\n]\n"),
            &[
                "mine.toml: line 5: ignore `down_prj` matches no linear of the model",
                "did you mean down_proj",
            ][..],
        ),
        (
            format!("{head}[[quantize.override]]\npattern = \"mlp.downproj\"\nscheme = \"w8a16\"\n"),
            &["mine.toml: line 4: override `mlp.downproj` matches no linear", "did you mean mlp.down_proj"],
        ),
        (
            format!("{head}{down}{down}"),
            &["mine.toml: line 4: override `down_proj` has no effect: other patterns take precedence"],
        ),
        (format!("{head}ignore = [\"re:(\"]\n"), &["mine.toml: line 3: pattern `re:(`"]),
        (
            format!("{head}override = [\"down_proj=w8a16\"]\n"),
            &["mine.toml: line 3: invalid type: string", "expected a table with the keys pattern and scheme"],
        ),
    ] {
        std::fs::write(&file, text).unwrap();
        check_message(expected[0], &plan(recipe), 2, expected);
        assert!(!plan(recipe).stderr.contains("--override") || expected[0].contains("no effect"));
    }
    std::fs::write(&file, "[quantize]\nscheme = \"w4a16\"\nbits = 4\n").unwrap();
    check_message("a key", &plan(recipe), 2, &["mine.toml: line 3: unknown field `bits`", "--print-recipe"]);
    std::fs::write(
        &file,
        "[[transform]]\nkind = \"reorder\"\n[[transform]]\nkind = \"rotate\"\n[quantize]\nscheme = \"w4a16\"\n",
    )
    .unwrap();
    check_message(
        "an order",
        &plan(recipe),
        2,
        &["mine.toml: the steps reorder, rotate", "put `rotate` first"],
    );
    std::fs::remove_file(&file).unwrap();
    check_message("no file", &plan(recipe), 2, &["mine.toml does not exist", "--print-recipe"]);
    std::fs::write(&file, b"\xff\xfe").unwrap();
    check_message("no text", &plan(recipe), 2, &["mine.toml is not UTF-8"]);
    check_message("no model", &quant(args!["plan"]), 2, &["<MODEL>"]);
}

#[test]
fn arguments() {
    let model = model();
    let m = model.path();
    let cases = [
        (args!["plan", m, "--gruop-size", "32"], "unexpected argument '--gruop-size'"),
        (args!["plan", m, "--gruop-size", "32"], "similar argument exists: '--group-size'"),
        (args!["plan", m, "--bits", "4"], "tip: --scheme sets the bits: w4a16 has weights of 4 bits"),
        (args!["quantize", m, "--wbits=4"], "tip: --scheme sets the bits"),
        (args!["quantize", m, "-o", "x", "--dataset", "c4"], "tip: --calibration takes a file of text"),
        (args!["eval", m, "--dataset", "c4"], "tip: --text takes a file, or the name of a set"),
        (args!["quantize", m, "--output_dir", "x"], "tip: --output (-o) names the directory"),
        (
            args!["convert", m],
            "tip: to convert a quantized checkpoint: quant quantize CHECKPOINT -o OUT --format awq",
        ),
        (
            args!["export", m],
            "tip: to convert a quantized checkpoint: quant quantize CHECKPOINT -o OUT --format awq",
        ),
        (args!["inspect", m, "--json", "x.json"], "tip: to write the JSON to a file, use --json=x.json"),
        (args!["eval", m, "--text", "t", "--json", "x.json"], "use --json=x.json"),
        (args!["perplexity", m], "tip: to measure: quant eval MODEL --text builtin-heldout"),
        (args!["plan", m, "--symmetric", "--asymmetric"], "cannot be used with"),
        (args!["plan", m, "--threads", "0"], "expected a number from 1 to 1024"),
        (args!["plan", m, "--threads", "1000000"], "expected a number from 1 to 1024"),
        (args!["plan", m, "--threads=-1"], "expected a number from 1 to 1024"),
        (args!["plan", m, "--threads", "two"], "expected a number from 1 to 1024"),
        (args!["plan"], "<MODEL>"),
        (args!["quantize", m], "--output <OUTPUT>"),
        (args!["quantize", m, "-o", ""], "--output <OUTPUT>"),
        (args!["quantize", m, "-o", "/nonexistent/x", "--samples=-1"], "--samples"),
        (args!["eval", m], "--text"),
        (args!["eval", m, "--text", "x", "--windows", "0"], "--windows"),
        (args!["gate", "x.json", "--baseline", "b", "--update", "--policy", "p"], "cannot be used with"),
        (args!["gate", "x.json", "--update"], "--baseline <FILE>"),
        (args!["gate", "--policy", "p"], "<RESULT>"),
        (args!["completions", "basic"], "possible values: bash"),
        (args!["dmo"], "unrecognized subcommand 'dmo'"),
        (args!["eval", m, "--text", "builtin-heldout", "--window", "1"], "windows of 1 tokens are too short"),
        (args!["eval", m, "--text", "builtin-heldout", "--window", "0"], "windows of 0 tokens are too short"),
        (args!["eval", m, "--text", "builtin-heldout", "--profile", "best"], "unknown profile `best`"),
        (args!["bench", m, "--prefill", "0"], "nothing to measure"),
        (args!["bench", m, "--decode", "99999999999"], "need 100000000511 positions; the maximum is"),
        (args!["bench", m, "--only", "w8a8"], "--only has no effect without `bench kernels`"),
        (args!["bench", "kernels", "--only", "w9a9"], "no kernel has `w9a9` in its name"),
    ];
    for (arguments, expected) in cases {
        check_message(expected, &quant(arguments), 2, &[expected]);
    }
    let run = quant(args![]);
    assert_eq!(run.code(), Some(2), "{run}");
    assert!(run.stderr.contains("Usage:"), "{run}");
}

#[test]
fn help_and_version_are_not_errors() {
    for arguments in [args!["--help"], args!["-h"], args!["help"], args!["quantize", "--help"]] {
        let run = quant(arguments).succeeded();
        assert!(run.stdout.contains("Usage:") && run.stderr.is_empty(), "{run}");
    }
    let run = quant(args!["--version"]).succeeded();
    assert_eq!(run.stdout.trim(), concat!("quant ", env!("CARGO_PKG_VERSION")));
}

#[test]
fn absurd_numbers() {
    let model = model();
    let m = model.path();
    let max = u64::MAX.to_string();
    for (samples, length) in [(max.as_str(), "2"), ("1", &max), (&max, &max)] {
        let options = ["--group-size", "32", "--samples", samples, "--seq-len", length];
        let expected = format!("{samples} calibration windows of {length} tokens");
        refuses_to_quantize("absurd sampling", m, &options, 2, &[&expected, "at most 1048576"]);
        let plan = quant(args!["plan", m].into_iter().chain(options.map(Into::into)));
        check_message("absurd sampling", &plan, 2, &[&expected]);
    }
    let options = ["--group-size", "32", "--samples", "1048576", "--seq-len", "1048576"];
    refuses_to_quantize("too many samples", m, &options, 5, &["memory", "--memory-budget"]);
    quant(args!["plan", m].into_iter().chain(options.map(Into::into))).succeeded();
    let options = ["--group-size", "32", "--samples", "0"];
    refuses_to_quantize("no sample", m, &options, 2, &["0 calibration windows of 512 tokens"]);
    let options = ["--group-size", "32", "--seq-len", "1"];
    refuses_to_quantize("too short samples", m, &options, 2, &["64 calibration windows of 1 tokens"]);
    let run = quant(args!["eval", m, "--text", "builtin-heldout", "--window", &max]);
    check_message("window", &run, 2, &["windows of 18446744073709551615 tokens are too long"]);
    let run = quant(args!["eval", m, "--text", "builtin-heldout", "--window", "1048576"]);
    check_message("long windows", &run, 4, &["builtin-heldout has ", "fewer than one window of 1048576"]);
    let run =
        quant(args!["eval", m, "--text", "builtin-heldout", "--window", "64", "--windows", &max]).succeeded();
    assert!(run.stderr.contains("windows of 64; all are scored"), "{run}");
    let run = quant(args!["bench", m, "--prefill", &max, "--decode", &max]);
    check_message("bench", &run, 2, &["positions; the maximum is"]);
    let run = quant(args!["plan", m, "--group-size", &max]);
    check_message("group size", &run, 2, &["14 tensors", &max]);
}

#[test]
fn texts() {
    let model = model();
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe.txt");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let write = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).unwrap();
    write("empty.txt", b"");
    write("blank.txt", b" \n\t\n");
    write("short.txt", b"a hundred bytes are wanted");
    write("latin.txt", b"caf\xe9");
    write("no-text.jsonl", b"{\"text\": \"good\"}\n\n{\"txt\": \"bad\"}\n");
    write("number.jsonl", b"{\"text\": 3}\n");
    write("cut.jsonl", b"{\"text\": \"good\"}\n{\"text\": \"ba");
    write("empty.jsonl", b"");
    let cases: &[(&str, &[&str])] = &[
        ("empty.txt", &["empty.txt holds no text"]),
        ("blank.txt", &["blank.txt holds no text"]),
        ("short.txt", &["short.txt has 26 tokens, ", " of 50"]),
        ("latin.txt", &["latin.txt is not valid UTF-8 at byte 3"]),
        ("no-text.jsonl", &["no-text.jsonl:3: has no string field `text`"]),
        ("number.jsonl", &["number.jsonl:1: has no string field `text`"]),
        ("cut.jsonl", &["cut.jsonl:2: is not JSON"]),
        ("empty.jsonl", &["empty.jsonl holds no text"]),
        ("pipe.txt", &["pipe.txt is not a regular file"]),
        (".", &["is not a regular file"]),
        (
            "nowhere.txt",
            &[
                "nowhere.txt is neither an existing file nor a known text set",
                "one of these sets: builtin, builtin-heldout, ",
            ],
        ),
    ];
    for (name, expected) in cases {
        let path = folder.path().join(name);
        let options = ["--group-size", "32", "--samples", "1", "--seq-len", "50"];
        let options = [&options[..], &["--calibration", path.to_str().unwrap()]].concat();
        refuses_to_quantize(name, model.path(), &options, 4, expected);
        check_message(
            name,
            &quant(args!["eval", model.path(), "--text", &path, "--window", "50"]),
            4,
            expected,
        );
    }
    let options = ["--group-size", "32", "--calibration", "c4"];
    refuses_to_quantize(
        "a public set",
        model.path(),
        &options,
        2,
        &["`c4`", "allenai/c4", "give the path of the converted file"],
    );
}

/// A public set in a build that does not download it: the message names what needs no download, and so does the help.
#[test]
fn texts_of_a_hub() {
    let model = model();
    let expected = [
        "the text set `wikitext-2` is not available",
        "use the built-in text (builtin-heldout for an evaluation, builtin for calibration)",
        "--features hub",
    ];
    let eval = quant(args!["eval", model.path(), "--text", "wikitext-2"]);
    check_message("wikitext-2", &eval, 2, &expected);
    let options = ["--group-size", "32", "--calibration", "wikitext-2"];
    refuses_to_quantize("wikitext-2", model.path(), &options, 2, &expected);
    for help in ["-h", "--help"] {
        let run = quant(args!["eval", help]).succeeded();
        let text = run.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
        let expected = "a file (plain text, or .jsonl with texts or conversations), builtin-heldout (built in), or a public set";
        assert!(text.contains(expected) && text.contains("wikitext-2"), "{run}");
    }
}

/// A model name without a local directory: only a build with the feature `hub` downloads it.
#[test]
fn models_of_a_hub() {
    let expected =
        ["no such directory", "does not download", "`hf download org/tiny --revision v1`", "--features hub"];
    refuses_to_quantize("a hub's model", Path::new("org/tiny@v1"), &[], 2, &expected);
    for arguments in [
        args!["plan", "org/tiny@v1"],
        args!["eval", "org/tiny@v1", "--text", "builtin-heldout"],
        args!["eval", demo_model(), "--reference", "org/tiny@v1", "--text", "builtin-heldout"],
        args!["inspect", "org/tiny@v1"],
        args!["bench", "org/tiny@v1"],
    ] {
        check_message("a hub's model", &quant(arguments), 2, &expected);
    }
    for path in ["org/tiny/more", "./org/tiny", "tiny", "org/tiny@"] {
        check_message(path, &quant(args!["inspect", path]), 4, &[path, "does not exist"]);
    }
}

#[test]
fn outputs() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let model = at("models/tiny");
    TinyLlama::default().write(&model);
    // A model that this program did not write, and an output to which a user has added files.
    TinyLlama::default().write(&at("models/other"));
    old_checkpoint(&at("visited"));
    std::fs::write(at("visited/notes.txt"), "which of these is the good one?").unwrap();
    old_checkpoint(&at("there"));
    std::fs::create_dir(at("empty")).unwrap();
    std::fs::create_dir(at("home")).unwrap();
    std::fs::write(at("home/diary.txt"), "dear diary").unwrap();
    std::fs::write(at("file"), "a file").unwrap();
    std::os::unix::fs::symlink(&model, at("link")).unwrap();
    std::os::unix::fs::symlink(at("gone"), at("dangling")).unwrap();
    std::fs::create_dir(at("taken.job")).unwrap();
    std::fs::write(at("taken.job/thesis.tex"), "years of work").unwrap();
    let before = snapshot(scratch.path());

    let cases: &[(&str, bool, i32, &[&str])] = &[
        ("models/tiny", false, 2, &["overlaps the input"]),
        ("models/tiny", true, 2, &["overlaps the input"]),
        ("models/../models/./tiny/", true, 2, &["overlaps the input"]),
        ("models/tiny/out", true, 2, &["overlaps the input", "choose a path outside"]),
        ("models", true, 2, &["overlaps the input"]),
        ("link", true, 2, &["overlaps the input"]),
        ("link/out", true, 2, &["overlaps the input"]),
        ("there", false, 2, &["there exists already", "--force"]),
        ("empty", false, 2, &["empty exists already", "--force"]),
        ("file", false, 2, &["file exists already", "--force"]),
        ("file", true, 2, &["file is not a directory"]),
        ("file/out", true, 5, &["file/out", "Not a directory"]),
        ("home", true, 2, &["was not written by quant", "--force does not replace it"]),
        ("models/other", true, 2, &["was not written by quant", "--force does not replace it"]),
        ("visited", true, 2, &["visited contains `notes.txt`, which quant did not write"]),
        ("dangling", true, 2, &["dangling", "a broken symbolic link"]),
        ("taken", true, 2, &["taken.job", "thesis.tex"]),
    ];
    for (output, force, code, expected) in cases {
        let mut arguments =
            args!["quantize", &model, "-o", at(output), "--method", "rtn", "--group-size", "32"];
        arguments.extend(force.then(|| "--force".into()));
        check_message(output, &quant(arguments), *code, expected);
        assert_eq!(snapshot(scratch.path()), before, "{output}: something has changed");
    }
    let run = quant(args!["quantize", &model, "-o", "/", "--method", "rtn", "--group-size", "32"]);
    check_message("/", &run, 2, &["/ cannot be the output"]);
    if cfg!(target_os = "linux") {
        let mounted =
            args!["quantize", &model, "-o", "/proc", "--method", "rtn", "--group-size", "32", "--force"];
        check_message("/proc", &quant(mounted), 2, &["/proc is a mount point", "such as /proc/model"]);
    }
    let run = quant(args!["inspect", &model, format!("--json={}", at("nowhere/x.json").display())]);
    check_message("a report nowhere", &run, 5, &["nowhere/x.json"]);
    // The error is reported before the evaluation, not after it.
    let nowhere = format!("--json={}", at("nowhere/x.json").display());
    let run = quant(args!["eval", &model, "--text", "no such text", &nowhere]);
    check_message("a report nowhere", &run, 5, &["nowhere/x.json"]);
    assert_eq!(snapshot(scratch.path()), before);

    // An output that may be replaced is replaced as a whole.
    for output in ["there", "empty"] {
        let out = at(output);
        let options = ["--method", "rtn", "--group-size", "32", "--force"].map(std::ffi::OsString::from);
        quant(args!["quantize", &model, "-o", &out].into_iter().chain(options)).succeeded();
        assert!(out.join("quant_manifest.json").is_file() && !out.join("old.txt").exists());
        assert!(!job_of(&out).exists());
    }
}

#[test]
fn outputs_over_inputs() {
    let model = model();
    let scratch = tempfile::tempdir().unwrap();
    let prompt = scratch.path().join("prompt.txt");
    std::fs::write(&prompt, "Once upon a time").unwrap();
    let before = snapshot(model.path());
    for name in ["config.json", "model.safetensors", "new.json"] {
        let json = format!("--json={}", model.path().join(name).display());
        let cases = [
            args!["plan", model.path(), "--group-size", "32", &json],
            args!["inspect", model.path(), &json],
            args!["bench", model.path(), &json],
            args!["generate", model.path(), "--prompt", "a", &json],
        ];
        for arguments in cases {
            check_message(name, &quant(arguments), 2, &["--json would write", name]);
        }
    }
    let json = format!("--json={}", prompt.display());
    let run = quant(args!["generate", model.path(), "--prompt-file", &prompt, &json]);
    check_message("a prompt", &run, 2, &["--json would write", "prompt.txt"]);
    let out = scratch.path().join("out");
    let run = quant(args![
        "quantize",
        model.path(),
        "-o",
        &out,
        "--group-size",
        "32",
        "--calibration",
        &prompt,
        "--save-channel-maxima",
        &prompt
    ]);
    check_message("a text", &run, 2, &["--save-channel-maxima would write", "prompt.txt"]);
    assert_eq!(std::fs::read_to_string(&prompt).unwrap(), "Once upon a time");
    assert_eq!(snapshot(model.path()), before);
    assert!(!out.exists());
    let run = quant(args!["inspect", model.path(), "--json=/dev/null"]).succeeded();
    assert!(run.stdout.contains("tensors"), "{run}");
}

#[test]
fn a_closed_stdout_ends_quietly() {
    let demo = demo_model();
    let cases = [
        args!["plan", &demo, "--all"],
        args!["plan", &demo, "--json"],
        args!["inspect", &demo],
        args!["completions", "bash"],
        args!["--help"],
    ];
    for arguments in cases {
        let mut command = command(&arguments);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let mut message = String::new();
        child.stderr.take().unwrap().read_to_string(&mut message).unwrap();
        assert_eq!((child.wait().unwrap().code(), message.as_str()), (Some(0), ""), "{arguments:?}");
    }
    for arguments in [args!["inspect", &demo], args!["--help"], args!["quantize", "-h"], args!["--version"]] {
        let mut command = command(&arguments);
        command.stdout(std::fs::File::create("/dev/full").unwrap()).stderr(Stdio::piped());
        let output = command.spawn().unwrap().wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(5), "{arguments:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("standard output"), "{arguments:?}");
    }
}

#[test]
fn a_closed_or_full_stderr_stops_nothing() {
    let scratch = tempfile::tempdir().unwrap();
    let model = scratch.path().join("model");
    TinyLlama::default().write(&model);
    let run = |name: &str, stderr: Stdio| {
        let out = scratch.path().join(name);
        let mut command =
            command(args!["quantize", &model, "-o", &out, "--method", "rtn", "--group-size", "32"]);
        let mut child = command.stdout(Stdio::null()).stderr(stderr).spawn().unwrap();
        drop(child.stderr.take());
        assert_eq!(child.wait().unwrap().code(), Some(0), "{name}");
        assert!(out.join("quant_manifest.json").is_file(), "{name}");
    };
    run("closed", Stdio::piped());
    run("full", std::fs::File::create("/dev/full").unwrap().into());
}

#[test]
fn streams() {
    let scratch = tempfile::tempdir().unwrap();
    let model = scratch.path().join("model");
    TinyLlama::default().write(&model);
    let fixed = |out: &Path| args!["quantize", &model, "-o", out, "--method", "rtn", "--group-size", "32"];
    let silent = quant(fixed(&scratch.path().join("a")).into_iter().chain(args!["--quiet"])).succeeded();
    assert_eq!(silent.stderr, "");
    assert!(silent.stdout.contains("written to "), "the result is not progress output: {silent}");
    let json = Running::start(command(fixed(&scratch.path().join("b")).into_iter().chain(args!["--json"])));
    assert_eq!(json.wait().json()["schema"], "quant-summary/2");
    let report = scratch.path().join("report.json");
    let run = quant(args!["inspect", &model, format!("--json={}", report.display())]).succeeded();
    assert!(run.stdout.contains("llama: 2 blocks"), "{run}");
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(report).unwrap()).unwrap();
    assert_eq!(report["schema"], "quant-inspect/3");
}
