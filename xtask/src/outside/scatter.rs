//! Checkpoints in which the groups of a weight are not adjacent inputs, as other programs write them: GPTQ with
//! `desc_act`, and compressed-tensors with `actorder: group`. `quant` reads them, but writes none.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::decode::modules;
use crate::support::noise::mix;
use crate::support::shards::{Checkpoint, Entry, ShardWriter, read_json, write_index, write_json};

/// Copies a checkpoint, with groups of inputs in a random order. The codes stay where they are.
///
/// # Errors
/// When the checkpoint has no linears in groups, or a file cannot be read or written.
pub(super) fn scatter(from: &Path, to: &Path, format: &str) -> Result<()> {
    let checkpoint = Checkpoint::open(from)?;
    let (index, scales) = match format {
        "gptq" => ("g_idx", "scales"),
        _ => ("weight_g_idx", "weight_scale"),
    };
    std::fs::create_dir(to)?;
    let mut shards = checkpoint.shards.clone();
    for (file, entries) in &mut shards {
        let mut indices: Vec<(Entry, Vec<u8>)> = Vec::new();
        for (module, codes) in modules(&checkpoint).filter(|(_, codes)| entries.contains(codes)) {
            let scales = checkpoint.entries().find(|entry| entry.name == format!("{module}.{scales}"));
            let scales = scales.with_context(|| format!("{module} has no scales"))?;
            let (inputs, groups) = match format {
                "gptq" => (codes.shape[0] * 8, scales.shape[0]),
                _ => (codes.shape[1] * 8, scales.shape[1]),
            };
            ensure!(groups > 1, "{module} has one group");
            let bytes: Vec<u8> = scattered(module, inputs, groups).flat_map(u32::to_le_bytes).collect();
            let name = format!("{module}.{index}");
            let entry = Entry { name, dtype: "I32".into(), shape: vec![inputs], bytes: bytes.len() as u64 };
            indices.push((entry, bytes));
        }
        ensure!(!indices.is_empty(), "{file} has no linears");
        entries.retain(|entry| indices.iter().all(|(index, _)| index.name != entry.name));
        let kept = entries.len();
        entries.extend(indices.iter().map(|(entry, _)| entry.clone()));
        let mut shard = ShardWriter::create(&to.join(&*file), entries)?;
        for entry in &entries[..kept] {
            shard.write(&checkpoint.read(entry)?)?;
        }
        indices.iter().try_for_each(|(_, bytes)| shard.write(bytes))?;
        shard.finish()?;
    }
    write_index(to, &shards)?;
    let mut config = read_json(&from.join("config.json"))?;
    let settings = &mut config["quantization_config"];
    match format {
        "gptq" => settings["desc_act"] = json!(true),
        _ => {
            let groups =
                settings["config_groups"].as_object_mut().context("no groups in the configuration")?;
            groups.values_mut().for_each(|group: &mut Value| group["weights"]["actorder"] = json!("group"));
        }
    }
    write_json(&to.join("config.json"), &config)
}

/// The group of every input: each group has the same number of inputs, in a random order.
fn scattered(module: &str, inputs: usize, groups: usize) -> impl Iterator<Item = u32> {
    let seed = module.bytes().fold(0, |seed, byte| mix(seed ^ u64::from(byte)));
    let mut order: Vec<usize> = (0..inputs).collect();
    order.sort_by_key(|&input| mix(seed ^ input as u64));
    let mut of_input = vec![0; inputs];
    for (place, input) in order.into_iter().enumerate() {
        of_input[input] = (place * groups / inputs) as u32;
    }
    of_input.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_the_same_number_of_inputs() {
        let index: Vec<u32> = scattered("a", 256, 8).collect();
        for group in 0..8 {
            assert_eq!(index.iter().filter(|&&g| g == group).count(), 32);
        }
        assert!(!index.is_sorted());
        assert!(index != scattered("b", 256, 8).collect::<Vec<_>>());
    }
}
