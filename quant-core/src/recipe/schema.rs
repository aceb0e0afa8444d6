//! The JSON schema of recipe files, for editors that complete and check TOML. Names of formats, steps and bit widths
//! come from the library's tables.

use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Map, Value, json};

use super::file::RecipeFile;
use super::{Extensions, Recipe, steps};
use crate::format::CONTAINERS;
use crate::keys::StepKey;
use crate::round::ROUNDINGS;
use crate::scheme::{FLOAT_SCHEMES, WeightFormat};

impl Recipe {
    /// The JSON schema of recipe files, with a final newline.
    pub fn schema() -> String {
        let schema = schemars::schema_for!(RecipeFile);
        format!("{:#}\n", schema.as_value())
    }
}

fn one_of(names: impl Iterator<Item = (&'static str, &'static str)>) -> Schema {
    let choices = names.map(|(name, summary)| json_schema!({ "const": name, "description": summary }).into());
    json_schema!({ "type": "string", "oneOf": choices.collect::<Vec<Value>>() })
}

pub(super) fn container(_: &mut SchemaGenerator) -> Schema {
    one_of(CONTAINERS.iter().map(|c| (c.name(), c.summary())))
}

pub(super) fn containers(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "array", "items": container(generator), "minItems": 1, "uniqueItems": true })
}

/// An entry of `transform`: one alternative for each step, with the keys that it accepts.
pub(super) fn transform() -> Schema {
    let alternative = |(name, summary): (&'static str, &'static str)| {
        let transform = Extensions::default().transform(name);
        let keys = transform.map(|transform| transform.keys()).unwrap_or_default();
        let kind = ("kind".to_owned(), json!({ "const": name }));
        json!({
            "type": "object",
            "description": summary,
            "properties": Map::from_iter([kind].into_iter().chain(properties(keys))),
            "required": ["kind"],
            "additionalProperties": false,
        })
    };
    json_schema!({ "oneOf": steps().into_iter().map(alternative).collect::<Vec<_>>() })
}

/// Adds the tables `[quantize.NAME]` of roundings that have settings to the schema of `[quantize]`.
pub(super) fn add_roundings(schema: &mut Schema) {
    let Some(all) = schema.get_mut("properties").and_then(Value::as_object_mut) else { return };
    for rounding in ROUNDINGS {
        let properties: Map<String, Value> = properties(rounding.keys()).collect();
        if properties.is_empty() {
            continue;
        }
        let name = rounding.name();
        let table = json!({
            "description": format!("Settings of the rounding `{name}`, if it is the method."),
            "type": "object",
            "properties": properties,
            "additionalProperties": false,
        });
        all.insert(name.to_owned(), table);
    }
}

fn properties(keys: Vec<StepKey>) -> impl Iterator<Item = (String, Value)> {
    keys.into_iter().filter(|key| !key.is_file).map(|key| (key.name.to_owned(), key.schema))
}

pub(super) fn rounding(_: &mut SchemaGenerator) -> Schema {
    one_of(ROUNDINGS.iter().map(|rounding| (rounding.name(), rounding.summary())))
}

pub(super) fn scheme(_: &mut SchemaGenerator) -> Schema {
    let bits: Vec<String> = WeightFormat::INT_BITS.iter().map(u8::to_string).collect();
    let granularity = "(-(g[1-9][0-9]*|channel))?";
    let symmetry = "(-a?sym)?";
    // Granularity and symmetry may be given in either order.
    let weights = format!("({granularity}{symmetry}|{symmetry}{granularity})");
    let (kv, progressive) = ("(kv(4|8|16|f8))?", "(-progressive)?");
    let weights = format!("{kv}{weights}{progressive}");
    let pattern =
        format!("^w({})(a16{weights}|a8{weights}(-static(-a?sym)?)?)$|{}", bits.join("|"), floats(kv));
    json_schema!({
        "type": "string",
        "pattern": pattern,
        "examples": ["w4a16-g128", "w8a16-channel-sym", "w8a8", "wf8af8-channel", "wf4a16-g16-nv"],
    })
}

/// `kv` is the pattern for the cache.
fn floats(kv: &str) -> String {
    let heads = ["wf8a16", "wf8af8", "wf4a16", "wf4af4"];
    let of_head = |head: &str| {
        let tails: Vec<&str> = FLOAT_SCHEMES.iter().filter_map(|name| name.strip_prefix(head)).collect();
        // If a row has one scale, `-channel` is optional.
        let whole = if tails.contains(&"-channel") { "?" } else { "" };
        format!("^{head}{kv}({}){whole}$", tails.join("|"))
    };
    heads.map(of_head).join("|")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::{PRESETS, kv};
    use crate::scheme::SchemeRequest;

    fn schema() -> Value {
        serde_json::from_str(&Recipe::schema()).unwrap()
    }

    #[test]
    fn it_knows_every_key_that_a_recipe_prints() {
        let schema = schema();
        let properties = |value: &Value| -> Vec<String> {
            value["properties"].as_object().unwrap().keys().cloned().collect()
        };
        for preset in PRESETS {
            let printed: toml::Table = Recipe::preset(preset.name).unwrap().to_toml().parse().unwrap();
            for (key, value) in &printed {
                assert!(properties(&schema).contains(key), "{key}");
                let entry = match key.as_str() {
                    "quantize" => "QuantizeEntry",
                    "calibration" => "CalibrationEntry",
                    _ => continue,
                };
                let known = properties(&schema["$defs"][entry]);
                for inner in value.as_table().unwrap().keys() {
                    assert!(known.contains(inner), "{key}.{inner}");
                }
            }
        }
        assert_eq!(schema["additionalProperties"], false);
        assert!(Recipe::schema().contains("\"compressed-tensors\""));
    }

    #[test]
    fn its_pattern_of_schemes_is_the_parser() {
        let mut generator = SchemaGenerator::default();
        let pattern = scheme(&mut generator).as_value()["pattern"].as_str().unwrap().to_owned();
        let pattern = regex::Regex::new(&pattern).unwrap();
        for text in [
            "w4a16",
            "w3a16-g64",
            "w8a16-channel-asym",
            "w4a16-sym-g32",
            "w4a16-asym",
            "w5a16",
            "w6a16-g32",
            "w9a16",
            "w4a8",
            "wf8a16",
            "wf8a16-channel",
            "wf8a16-g128",
            "wf8a16-channel-sym",
            "wf8a8",
            "wf4a16",
            "w8a8-channel-sym-static",
            "w8a8-static-asym",
            "w8a8-sym-static-sym",
            "w8a8-static-g32",
            "w4a16-static",
            "w4a4",
            "w4a16-",
            "w4a16-g0",
            "w4a16-gx",
            "w4a16-g64-channel",
            "w4a16-sym-asym",
            "x",
            "w4a16-g64-sym-",
            "w8a16kv8",
            "w4a8kv4-g128",
            "w8a8kvf8",
            "wf8af8kvf8-channel",
            "wf4a16kv4-g16-nv",
            "w8a8kv2",
            "w8a8kvf4",
            "W4A16",
        ] {
            let parsed = kv::split(text).and_then(|(scheme, _)| scheme.parse::<SchemeRequest>());
            assert_eq!(pattern.is_match(text), parsed.is_ok(), "{text}");
        }
    }
}
