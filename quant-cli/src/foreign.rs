//! Options and commands of other tools, answered with those of this one.

use std::ffi::OsString;

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, CommandFactory};

use crate::cli::Cli;

/// Options of other tools, the option here that does the same, and a sentence about it.
const OPTIONS: &[(&[&str], &str, &str)] = &[
    (
        &["bits", "wbits", "w-bit", "nbits", "num-bits", "n-bits", "qbits"],
        "scheme",
        "--scheme sets the bits: w4a16 has weights of 4 bits, w8a8 weights and activations of 8",
    ),
    (
        &["qtype", "ftype", "outtype", "quant-type", "quant", "quantization", "dtype"],
        "scheme",
        "--scheme names the number format, such as w4a16 or fp8; for a GGUF file, --format gguf --scheme q4_k_m",
    ),
    (&["q-group-size", "groupsize", "group"], "group-size", "--group-size 128"),
    (&["sym"], "symmetric", "--symmetric, or a scheme such as w4a16-g128-sym"),
    (&["zero-point", "asym"], "asymmetric", "--asymmetric, or a scheme such as w4a16-g128-asym"),
    (
        &["outfile", "out", "output-dir", "out-dir", "save-dir", "save", "save-path", "quant-path"],
        "output",
        "--output (-o) names the directory for the checkpoint",
    ),
    // Before the entry for --calibration: eval has both options, and a data set there is its text.
    (
        &["dataset", "data", "file"],
        "text",
        "--text takes a file, or the name of a set such as builtin-heldout",
    ),
    (
        &["dataset", "calib-data", "calib-dataset", "calibration-data", "calibration-dataset"],
        "calibration",
        "--calibration takes a file of text, a .jsonl file, or the name of a set",
    ),
    (
        &["num-samples", "nsamples", "calib-size", "num-calibration-samples", "max-calib-samples"],
        "samples",
        "--samples sets the number of calibration windows",
    ),
    (
        &["max-seq-length", "max-seq-len", "seqlen", "seq-length", "max-calib-seq-len"],
        "seq-len",
        "--seq-len sets the tokens per calibration window",
    ),
    (&["desc-act"], "act-order", "--act-order static-groups keeps groups in order, which engines prefer"),
    (&["damp-percent", "percdamp", "dampening-frac"], "damping", "--damping 0.01"),
    (&["targets"], "override", "--ignore leaves linears out, --override gives them a different scheme"),
    (
        &["tasks", "task"],
        "text",
        "tasks run in lm-evaluation-harness, which loads the checkpoint: lm_eval run --model fewbits",
    ),
    (
        &["ctx-size", "ctx", "context", "stride", "max-length"],
        "window",
        "--window sets the tokens per window",
    ),
    (
        &["base", "base-model", "original", "kl-divergence-base"],
        "reference",
        "--reference compares with another model",
    ),
    (
        &["baseline"],
        "reference",
        "--reference compares with another model; a baseline is an option of `quant gate`",
    ),
    (
        &["ppl", "perplexity", "kl"],
        "reference",
        "eval always measures the perplexity; with --reference MODEL, the KL divergence too",
    ),
    (
        &["n", "n-predict", "max-tokens", "max-length", "num-tokens"],
        "max-new-tokens",
        "--max-new-tokens sets the number of tokens",
    ),
    (&["n", "n-gen"], "decode", "--prefill and --decode set the number of tokens"),
    (
        &["device", "gpu", "cuda", "gpus"],
        "scheme",
        "quantization runs on the processor; eval, generate, chat and bench have --device",
    ),
];

/// Names of other tools for the model, which here is an argument.
const MODEL: [&str; 7] = ["m", "model", "model-path", "model-id", "model-name", "pretrained", "hf-model"];

/// What to write instead of a further argument, by command.
const FURTHER: &[(&str, &str, &str)] = &[
    ("quantize", "output", "the output follows -o: quant quantize MODEL -o OUT"),
    ("eval", "text", "the text follows --text, and a model to compare with --reference"),
    ("generate", "prompt", "the prompt follows --prompt: quant generate MODEL --prompt TEXT"),
    ("chat", "system", "chat reads messages from standard input, one per line"),
    ("merge", "output", "the output follows -o: quant merge STORE -o OUT"),
];

/// Commands of other tools, and the command here that does the same.
const COMMANDS: &[(&[&str], &str)] = &[
    (
        &["convert", "export", "repack", "save", "pack"],
        "to convert a quantized checkpoint: quant quantize CHECKPOINT -o OUT --format awq",
    ),
    (
        &["compress", "oneshot", "awq", "gptq", "rtn", "smoothquant", "ptq", "autoround"],
        "to quantize: quant quantize MODEL -o OUT --method awq",
    ),
    (
        &["perplexity", "ppl", "evaluate", "evaluation", "measure", "kl", "test"],
        "to measure: quant eval MODEL --text builtin-heldout",
    ),
    (&["diff", "versus", "vs", "leaderboard"], "to compare results of eval: quant compare RESULT RESULT"),
    (
        &["imatrix"],
        "to compute an importance matrix: quant quantize MODEL -o OUT --format gguf --save-imatrix FILE",
    ),
    (&["benchmark", "speed", "perf"], "to measure speed: quant bench MODEL"),
    (&["run", "complete", "completion", "prompt"], "to generate text: quant generate MODEL --prompt TEXT"),
    (&["serve", "server"], "engines serve checkpoints: vllm serve OUT"),
    (&["info", "show", "list", "ls", "dump"], "to see the contents of a checkpoint: quant inspect MODEL"),
    (&["download", "pull", "get"], "to download a model: hf download ORG/NAME"),
    (&["estimate", "dry-run", "dryrun", "check"], "to see what quantizing would do: quant plan MODEL"),
];

/// Adds a tip to an error of the argument parser that is about an option or a command of another tool.
pub fn explained(mut error: clap::Error, arguments: &[OsString]) -> clap::Error {
    let Some(tip) = tip(&error, arguments) else {
        // The parser suggests `-- --option` to pass an option as a model.
        if error.kind() == ErrorKind::UnknownArgument {
            error.remove(ContextKind::Suggested);
        }
        return error;
    };
    // The parser's own suggestions are guesses based on spelling.
    for kind in [ContextKind::SuggestedArg, ContextKind::SuggestedSubcommand] {
        error.remove(kind);
    }
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![StyledStr::from(tip)]));
    error
}

fn tip(error: &clap::Error, arguments: &[OsString]) -> Option<String> {
    let named = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    match error.kind() {
        ErrorKind::UnknownArgument => {
            let given = named(ContextKind::InvalidArg)?;
            // The value of --json is optional, so a word after it is an argument of its own.
            if arguments.windows(2).any(|pair| pair[0] == "--json" && pair[1] == given) {
                return Some(format!("to write the JSON to a file, use --json={given}"));
            }
            let cli = Cli::command();
            let named = |command: &Command| arguments.iter().any(|word| word == command.get_name());
            let subcommand = cli.get_subcommands().find(|command| named(command))?;
            if !given.starts_with('-') {
                let further = FURTHER.iter().find(|(command, ..)| *command == subcommand.get_name());
                return further.map(|(.., tip)| (*tip).to_owned());
            }
            let option = given.trim_start_matches('-');
            let option = option.split('=').next().unwrap_or_default().replace('_', "-").to_ascii_lowercase();
            if MODEL.contains(&&*option) && takes_model(subcommand) {
                let name = subcommand.get_name();
                return Some(format!("the model is an argument, not an option: quant {name} MODEL"));
            }
            let known = OPTIONS.iter().filter(|(names, ..)| names.contains(&&*option));
            known
                .filter(|(_, here, _)| has_option(subcommand, here))
                .map(|(.., tip)| (*tip).to_owned())
                .next()
        }
        ErrorKind::InvalidSubcommand => {
            let subcommand = named(ContextKind::InvalidSubcommand)?.to_ascii_lowercase();
            COMMANDS.iter().find(|(names, _)| names.contains(&&*subcommand)).map(|(_, tip)| (*tip).to_owned())
        }
        _ => None,
    }
}

fn takes_model(subcommand: &Command) -> bool {
    subcommand.get_positionals().any(|argument| argument.get_id() == "model")
}

fn has_option(subcommand: &Command, name: &str) -> bool {
    subcommand.get_arguments().any(|argument| argument.get_long() == Some(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tip_names_what_exists() {
        let cli = Cli::command();
        for (names, here, _) in OPTIONS {
            let subcommands: Vec<&Command> =
                cli.get_subcommands().filter(|subcommand| has_option(subcommand, here)).collect();
            assert!(!subcommands.is_empty(), "{here}");
            // Tips on options that the command has would never be shown.
            for name in *names {
                assert!(subcommands.iter().all(|subcommand| !has_option(subcommand, name)), "{name}");
            }
        }
        for (command, here, _) in FURTHER {
            let command = cli.get_subcommands().find(|known| known.get_name() == *command);
            assert!(command.is_some_and(|command| has_option(command, here)), "{here}");
        }
        let with_models = cli.get_subcommands().filter(|command| takes_model(command));
        assert!(with_models.inspect(|c| assert!(!has_option(c, "model"))).count() >= 6);
        for (names, tip) in COMMANDS {
            for name in *names {
                assert!(cli.get_subcommands().all(|subcommand| subcommand.get_name() != *name), "{name}");
            }
            if let Some((_, words)) = tip.split_once("quant ") {
                let subcommand = words.split(' ').next().unwrap();
                let subcommand =
                    cli.get_subcommands().find(|v| v.get_name() == subcommand).expect("a command");
                for option in words.split(' ').filter_map(|word| word.strip_prefix("--")) {
                    assert!(has_option(subcommand, option.trim_end_matches(';')), "{tip}");
                }
            }
        }
    }
}
