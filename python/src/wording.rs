//! Settings and commands spelled as Python users write them.

use quant_core::wording::{Argument, Wording};

/// The spelling of the Python package: `group_size=`, `format="gptq"`, `` `plan(MODEL)` ``.
#[derive(Debug, Clone, Copy)]
pub struct Keywords;

fn function(command: &str) -> &str {
    match command {
        "eval" => "evaluate",
        other => other,
    }
}

fn value(text: &str) -> String {
    let is_placeholder = !text.is_empty() && text.bytes().all(|b| b.is_ascii_uppercase());
    match text {
        _ if is_placeholder || text.parse::<f64>().is_ok() => text.to_owned(),
        _ => format!("{:?}", text.trim_matches('\'')),
    }
}

impl Wording for Keywords {
    fn setting(&self, name: &str, given: Option<&str>) -> String {
        match (name, given) {
            ("asymmetric", _) => "symmetric=False".into(),
            ("symmetric" | "resume" | "force" | "requantize" | "reference_search" | "allow_fallback", _) => {
                format!("{name}=True")
            }
            ("steps", Some(_)) => "steps={STEP: {KEY: VALUE}}".into(),
            ("update", _) => "`update_baseline()`".into(),
            ("override" | "ignore" | "skip", Some(given)) => format!("{name}=[{}]", value(given)),
            (_, Some(given)) => format!("{name}={}", value(given)),
            (_, None) => format!("{name}="),
        }
    }

    fn command(&self, name: &str, arguments: &[Argument<'_>]) -> String {
        match arguments {
            [Argument::Positional(model), Argument::Setting("all", None)] if name == "plan" => {
                return format!("`plan({model}).formats[0].tensors`");
            }
            [Argument::Positional(model), Argument::Setting("prompt", Some(text))] if name == "generate" => {
                return format!("`Model({model}).generate([{text}])`");
            }
            [Argument::Setting("print_recipe", Some(preset))] => {
                return format!("`preset_recipe({})`", value(preset));
            }
            [
                Argument::Positional(results),
                Argument::Setting("baseline", _),
                Argument::Setting("update", None),
            ] => {
                return format!("`update_baseline([{results}], FILE)`");
            }
            [Argument::Positional(results), Argument::Setting("suggest", None)] => {
                return format!("`suggest_policy([{results}])`");
            }
            _ => {}
        }
        // In Python, a result is an object with a method that saves it.
        let saved = arguments.iter().any(|a| matches!(a, Argument::Setting("json", _)));
        let words = arguments.iter().filter_map(|argument| match argument {
            Argument::Positional(given) => Some((*given).to_owned()),
            Argument::Setting("json", _) => None,
            Argument::Setting(name, given) => Some(self.setting(name, *given)),
            _ => None,
        });
        let words: Vec<String> = words.collect();
        let save = if saved { ".save(FILE)" } else { "" };
        format!("`{}({}){save}`", function(name), words.join(", "))
    }
}
