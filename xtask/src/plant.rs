//! `cargo xtask plant`: plants outlier channels in a real Llama checkpoint without changing its logits.
//!
//! In every norm that feeds linears of its block, some channels are multiplied by a power of two, and the columns of
//! the linears that read them are divided by it. In f32 every product stays bit-identical, and so do the float logits.
//! But these columns are now far smaller than the rest of their group when they are rounded to a grid. Outliers in
//! large models have the same effect.
//!
//! `--keys N` also plants outliers in keys. In every key head, it selects N channels and the channels that rotary
//! embedding pairs with them. The rows of `k_proj` for these channels are multiplied, and the matching rows of `q_proj`
//! are divided. Scores stay the same, but in a low-bit cache, a few channels of the keys are now much larger than the
//! others.
//!
//! If the file's type cannot hold a result exactly (f16 often cannot), all float tensors are written as F32 instead,
//! and the run reports it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::support::llama::{Role, require_llama, role};
use crate::support::noise::{Float, key, mix};
use crate::support::shards::{Checkpoint, Entry, NewDir, ShardWriter, read_json, write_index, write_json};

/// What to plant, and where.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// The model to read
    pub model: PathBuf,
    /// The directory to create
    pub out: PathBuf,
    /// Channels of every norm that become outliers
    #[arg(long, default_value_t = 4)]
    pub channels: usize,
    /// Factor of the outlier channels, a power of two
    #[arg(long, default_value_t = 32)]
    pub factor: u32,
    /// Pairs of channels of every key head that become outliers
    #[arg(long, default_value_t = 0)]
    pub keys: usize,
    /// Factor of the outliers in keys, a power of two
    #[arg(long, default_value_t = 16)]
    pub key_factor: u32,
    /// Seed for the choice of channels
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

/// The planted outliers.
#[derive(Debug, PartialEq)]
pub struct Planted {
    /// The channels of each norm, ascending.
    pub channels: BTreeMap<String, Vec<usize>>,
    /// Whether the float tensors had to be written as F32.
    pub widened: bool,
}

/// Plants the outliers and prints them.
pub fn run(args: &Args) -> Result<()> {
    let planted = plant(args)?;
    println!(
        "{}: {} channel(s) of each of {} norms multiplied by {}, the columns that read them divided by it",
        args.out.display(),
        args.channels,
        planted.channels.len(),
        args.factor
    );
    if planted.widened {
        println!("float tensors were written as F32: the original type cannot hold every quotient exactly");
    }
    Ok(())
}

/// Writes a copy of the model with the outliers.
///
/// # Errors
/// When an option is invalid, the input is not a float Llama model, a result is not exact even in F32, the output
/// exists, or writing fails.
pub fn plant(args: &Args) -> Result<Planted> {
    for (option, factor) in [("--factor", args.factor), ("--key-factor", args.key_factor)] {
        ensure!(factor.is_power_of_two() && factor > 1, "{option} must be a power of two above 1");
    }
    let mut config = read_json(&args.model.join("config.json"))?;
    require_llama(&config)?;
    let checkpoint = Checkpoint::open(&args.model)?;
    let plan = Plan::new(&checkpoint, args, &config)?;
    let widened = !plan.is_exact_in_place(&checkpoint)?;

    let dir = NewDir::create(&args.out)?;
    let mut shards = checkpoint.shards.clone();
    for (file, entries) in &mut shards {
        if widened {
            entries.iter_mut().for_each(widen_entry);
        }
        let mut shard = ShardWriter::create(&dir.path().join(&*file), entries)?;
        for entry in entries.iter() {
            shard.write(&plan.rewritten(&checkpoint, entry)?)?;
        }
        shard.finish()?;
    }
    write_index(dir.path(), &shards)?;
    if widened {
        for field in ["dtype", "torch_dtype"] {
            if let Some(value) = config.get_mut(field) {
                *value = json!(Float::F32.config_name());
            }
        }
    }
    write_json(&dir.path().join("config.json"), &config)?;
    copy_side_files(&args.model, dir.path())?;
    dir.publish()?;
    Ok(Planted { channels: plan.channels, widened })
}

struct Plan {
    channels: BTreeMap<String, Vec<usize>>,
    factor: f32,
    keys: Keys,
    /// The original tensors by name, with their original types.
    originals: BTreeMap<String, Entry>,
}

impl Plan {
    fn new(checkpoint: &Checkpoint, args: &Args, config: &Value) -> Result<Self> {
        let mut channels = BTreeMap::new();
        for norm in checkpoint.entries().filter(|e| role(&e.name) == Role::Norm) {
            let width = norm.shape.first().copied().unwrap_or(0);
            ensure!(args.channels <= width, "{} has only {width} channels", norm.name);
            channels.insert(norm.name.clone(), choose(key(args.seed, &norm.name), width, args.channels));
        }
        ensure!(!channels.is_empty(), "the checkpoint has no norm that feeds linears");
        let originals = checkpoint.entries().map(|e| (e.name.clone(), e.clone())).collect();
        let keys = Keys::new(args, config)?;
        Ok(Self { channels, factor: args.factor as f32, keys, originals })
    }

    fn is_exact_in_place(&self, checkpoint: &Checkpoint) -> Result<bool> {
        for entry in checkpoint.entries().filter(|e| role(&e.name) != Role::Other) {
            let float = entry.float().with_context(|| format!("{} is {}", entry.name, entry.dtype))?;
            let before = float.widen(&checkpoint.read(entry)?);
            let after = self.planted(entry, before.clone())?;
            if !before.iter().zip(&after).all(|(b, a)| b == a || float.holds_exactly(*a)) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn rewritten(&self, checkpoint: &Checkpoint, output: &Entry) -> Result<Vec<u8>> {
        let original = &self.originals[&output.name];
        let bytes = checkpoint.read(original)?;
        let (Some(from), Some(to)) = (original.float(), output.float()) else {
            return Ok(bytes);
        };
        if role(&output.name) == Role::Other && from == to {
            return Ok(bytes);
        }
        let values = self.planted(original, from.widen(&bytes))?;
        Ok(to.narrow(&values))
    }

    /// The values after planting, each exact in f32.
    fn planted(&self, entry: &Entry, mut values: Vec<f32>) -> Result<Vec<f32>> {
        match role(&entry.name) {
            Role::Other => {}
            Role::Norm => {
                for &c in &self.channels[&entry.name] {
                    values[c] = exact(entry, values[c] * self.factor)?;
                }
            }
            Role::ReaderOf(norm) => {
                let chosen = self.channels.get(&norm).with_context(|| format!("{norm} is missing"))?;
                let &[_, width] = &entry.shape[..] else {
                    bail!("{} is not a matrix", entry.name);
                };
                ensure!(chosen.iter().all(|c| *c < width), "{} is narrower than {norm}", entry.name);
                for row in values.chunks_exact_mut(width) {
                    for &c in chosen {
                        row[c] = exact(entry, row[c] / self.factor)?;
                    }
                }
                self.keys.plant(entry, width, &mut values)?;
            }
        }
        Ok(values)
    }
}

struct Keys {
    /// Number of pairs of channels in each key head that become outliers.
    count: usize,
    factor: f32,
    head_dim: usize,
    repeat: usize,
    seed: u64,
}

impl Keys {
    fn new(args: &Args, config: &Value) -> Result<Self> {
        let field = |name: &str| config.get(name).and_then(Value::as_u64).map(|v| v as usize);
        let heads = field("num_attention_heads").context("config.json: no num_attention_heads")?;
        let hidden = field("hidden_size").context("config.json: no hidden_size")?;
        let kv_heads = field("num_key_value_heads").unwrap_or(heads);
        ensure!(
            heads > 0 && kv_heads > 0 && heads % kv_heads == 0,
            "config.json: the number of KV heads does not divide the number of heads"
        );
        let head_dim = field("head_dim").unwrap_or(hidden / heads);
        let biased = config.get("attention_bias").and_then(Value::as_bool).unwrap_or(false);
        ensure!(args.keys == 0 || !biased, "--keys does not support biases of queries and keys");
        ensure!(args.keys <= head_dim / 2, "a head has only {} pairs of channels", head_dim / 2);
        let (factor, repeat) = (args.key_factor as f32, heads / kv_heads);
        Ok(Self { count: args.keys, factor, head_dim, repeat, seed: args.seed })
    }

    fn plant(&self, entry: &Entry, width: usize, values: &mut [f32]) -> Result<()> {
        let d = self.head_dim;
        let (layer, by, repeat) = match entry.name.strip_suffix("k_proj.weight") {
            Some(layer) => (layer, self.factor, 1),
            None => match entry.name.strip_suffix("q_proj.weight") {
                Some(layer) => (layer, 1.0 / self.factor, self.repeat),
                None => return Ok(()),
            },
        };
        for (head, rows) in values.chunks_exact_mut(d * width).enumerate() {
            let key_head = format!("{layer}{}", head / repeat);
            for c in choose(key(self.seed, &key_head), d / 2, self.count) {
                for row in [c, c + d / 2] {
                    for value in &mut rows[row * width..(row + 1) * width] {
                        *value = exact(entry, *value * by)?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// Returns the result of a multiplication by a power of two. Fails if it is neither zero nor a normal number, because
/// it may then have lost bits.
fn exact(entry: &Entry, value: f32) -> Result<f32> {
    ensure!(
        value.is_finite() && Float::F32.holds_exactly(value),
        "{}: {value:e} is outside the range in which scaling by a power of two is exact; choose a smaller --factor",
        entry.name
    );
    Ok(value)
}

fn choose(key: u64, width: usize, count: usize) -> Vec<usize> {
    let mut ranked: Vec<usize> = (0..width).collect();
    ranked.sort_by_key(|c| mix(key.wrapping_add(*c as u64)));
    ranked.truncate(count);
    ranked.sort_unstable();
    ranked
}

fn widen_entry(entry: &mut Entry) {
    if entry.float().is_some() {
        *entry = Entry::new(std::mem::take(&mut entry.name), Float::F32, &entry.shape);
    }
}

/// Copies the tokenizer and generation files.
fn copy_side_files(from: &Path, to: &Path) -> Result<()> {
    for file in std::fs::read_dir(from)? {
        let path = file?.path();
        let Some(name) = path.file_name() else { continue };
        let is_side_file = path.extension().is_some_and(|e| e == "json" || e == "model")
            && name != "config.json"
            && name != "model.safetensors.index.json";
        if is_side_file {
            // Copies only the contents, not the permissions: the source may be read-only.
            std::fs::write(to.join(name), std::fs::read(&path)?)
                .with_context(|| format!("cannot copy {}", path.display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::support::llama::Shape;
    use crate::synth;

    fn model(dir: &Path, dtype: Float, shard_bytes: u64) -> PathBuf {
        let out = dir.join(format!("{}-{shard_bytes}", dtype.header_name()));
        let shape = Shape {
            layers: 2,
            hidden: 64,
            intermediate: 96,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            vocab: 300,
            tied: true,
        };
        synth::write(&synth::Args { out: out.clone(), shape, dtype, seed: 1, shard_bytes }).unwrap();
        out
    }

    fn values(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
        let entry = checkpoint.entries().find(|e| e.name == name).unwrap();
        entry.float().unwrap().widen(&checkpoint.read(entry).unwrap())
    }

    fn assert_equivalent(before: &Path, after: &Path, planted: &Planted, factor: f32) {
        let (before, after) = (Checkpoint::open(before).unwrap(), Checkpoint::open(after).unwrap());
        let mut readers = 0;
        for entry in before.entries() {
            let (old, new) = (values(&before, &entry.name), values(&after, &entry.name));
            match role(&entry.name) {
                Role::Other => assert_eq!(old, new, "{}", entry.name),
                Role::Norm => {
                    let moved: Vec<_> = (0..old.len()).filter(|i| new[*i] == old[*i] * factor).collect();
                    assert_eq!(moved, planted.channels[&entry.name]);
                }
                Role::ReaderOf(norm) => {
                    let (n, m) = (values(&before, &norm), values(&after, &norm));
                    let width = n.len();
                    for (i, (o, p)) in old.iter().zip(&new).enumerate() {
                        let c = i % width;
                        assert_eq!((o * n[c]).to_bits(), (p * m[c]).to_bits(), "{} {i}", entry.name);
                    }
                    readers += 1;
                }
            }
        }
        assert_eq!(readers, 2 * 5);
    }

    #[test]
    fn products_stay_the_same_bit_for_bit() {
        let dir = tempfile::tempdir().unwrap();
        for (dtype, widened) in [(Float::Bf16, false), (Float::F32, false), (Float::F16, true)] {
            for shard_bytes in [30_000, 1 << 40] {
                let model = model(dir.path(), dtype, shard_bytes);
                let out = model.with_extension("planted");
                let (channels, factor, keys, key_factor, seed) = (3, 32, 0, 16, 9);
                let (model, out) = (model.clone(), out.clone());
                let args =
                    Args { model: model.clone(), out: out.clone(), channels, factor, keys, key_factor, seed };
                let planted = plant(&args).unwrap();
                assert_eq!(planted.widened, widened, "{dtype:?}");
                assert_equivalent(&model, &out, &planted, 32.0);
                let config = read_json(&out.join("config.json")).unwrap();
                let expected = if widened { Float::F32 } else { dtype };
                assert_eq!(config["torch_dtype"], expected.config_name());
                assert!(out.join("tokenizer.json").is_file());
            }
        }
    }

    #[test]
    fn keys_grow_as_queries_shrink() {
        let dir = tempfile::tempdir().unwrap();
        let model = model(dir.path(), Float::F32, 1 << 40);
        let out = dir.path().join("keys");
        let args = Args {
            model: model.clone(),
            out: out.clone(),
            channels: 0,
            factor: 32,
            keys: 2,
            key_factor: 16,
            seed: 3,
        };
        plant(&args).unwrap();
        let (before, after) = (Checkpoint::open(&model).unwrap(), Checkpoint::open(&out).unwrap());
        let (d, width) = (16, 64);
        for layer in 0..2 {
            let rows = |of: &str, by: f32| -> Vec<usize> {
                let name = format!("model.layers.{layer}.self_attn.{of}_proj.weight");
                let (old, new) = (values(&before, &name), values(&after, &name));
                let rows = old.chunks_exact(width).zip(new.chunks_exact(width)).enumerate();
                rows.filter(|(_, (o, n))| o != n)
                    .map(|(row, (o, n))| {
                        assert!(o.iter().zip(n).all(|(o, n)| o * by == *n), "{name}");
                        row
                    })
                    .collect()
            };
            let (keys, queries) = (rows("k", 16.0), rows("q", 1.0 / 16.0));
            assert_eq!(keys.len(), 2 * 4);
            for head in 0..4 {
                let of = |rows: &[usize], head: usize| -> Vec<usize> {
                    rows.iter().filter(|r| **r / d == head).map(|r| r % d).collect()
                };
                let channels = of(&queries, head);
                assert_eq!(channels, of(&keys, head / 2));
                assert!(channels.iter().all(|c| channels.contains(&((c + d / 2) % d))));
            }
            assert!(rows("v", 1.0).is_empty());
        }
    }

    #[test]
    fn what_cannot_be_exact_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let model = model(dir.path(), Float::F32, 1 << 40);
        let args = |factor, channels| Args {
            model: model.clone(),
            out: dir.path().join("out"),
            channels,
            factor,
            keys: 0,
            key_factor: 16,
            seed: 0,
        };
        assert!(plant(&args(31, 1)).is_err(), "not a power of two");
        assert!(plant(&args(1, 1)).is_err(), "no change");
        assert!(plant(&args(32, 65)).is_err(), "more channels than the norm has");
        assert!(!dir.path().join("out").exists());
        let tiny = Entry::new("w".into(), Float::F32, &[1]);
        assert!(exact(&tiny, f32::MIN_POSITIVE / 2.0).is_err());
        assert!(exact(&tiny, f32::INFINITY).is_err());
        assert!(exact(&tiny, 0.0).is_ok());
    }

    #[test]
    fn chosen_channels_are_distinct_and_depend_on_the_seed() {
        let first = choose(key(0, "norm"), 256, 8);
        assert_eq!(first.len(), 8);
        assert!(first.windows(2).all(|w| w[0] < w[1]) && first[7] < 256);
        assert_ne!(first, choose(key(1, "norm"), 256, 8));
    }
}
