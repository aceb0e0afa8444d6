//! `cargo xtask synth`: a random Llama checkpoint of any size, streamed to disk.
//!
//! Weights are approximately normal with a standard deviation of 0.02. Weights of norms have a mean of 1 and a
//! deviation of 0.1, so that an implementation that omits a norm gives different results. The same options give the
//! same bytes. The content of a tensor depends only on the seed and its name, so models of different depth share their
//! first layers.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Result, ensure};
use serde_json::Value;

use crate::support::llama::{self, Shape};
use crate::support::noise::{Float, LANES, Noise, key, standard_normal_quantiles};
use crate::support::shards::{Entry, NewDir, ShardWriter, plan_shards, write_index, write_json};

const WEIGHT_STD: f32 = 0.02;
const NORM_STD: f32 = 0.1;
/// Bytes generated at a time.
const CHUNK: usize = 1 << 20;

/// The model to write.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// The directory to create
    pub out: PathBuf,
    #[command(flatten)]
    /// The sizes of the model
    pub shape: Shape,
    /// Element type of every tensor
    #[arg(long, value_enum, default_value = "bf16")]
    pub dtype: Float,
    /// Seed for the weights
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Largest size of one shard, in bytes
    #[arg(long, default_value_t = 5_000_000_000)]
    pub shard_bytes: u64,
}

/// Writes the checkpoint and prints a summary.
pub fn run(args: &Args) -> Result<()> {
    let start = Instant::now();
    let bytes = write(args)?;
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "{}: {} layers, {:.2} GB of {} in {seconds:.1} s ({:.2} GB/s)",
        args.out.display(),
        args.shape.layers,
        bytes as f64 / 1e9,
        args.dtype.header_name(),
        bytes as f64 / 1e9 / seconds
    );
    Ok(())
}

/// Writes the checkpoint; returns the number of bytes in its tensors.
///
/// # Errors
/// When the sizes do not form a Llama model, the directory exists, or writing fails.
pub fn write(args: &Args) -> Result<u64> {
    args.shape.check()?;
    let contents = Contents {
        tensors: args.shape.tensors(args.dtype),
        config: args.shape.config(args.dtype),
        float: args.dtype,
        spread: Spread { matrices: WEIGHT_STD, norms: NORM_STD, biases: 0.0 },
        seed: args.seed,
        shard_bytes: args.shard_bytes,
    };
    contents.write(&args.out)
}

/// Standard deviations of random parameters.
#[derive(Debug, Clone, Copy)]
pub struct Spread {
    /// Standard deviation of two-dimensional tensors.
    pub matrices: f32,
    /// Standard deviation of one-dimensional tensors, except biases.
    pub norms: f32,
    /// Standard deviation of one-dimensional tensors named `….bias`.
    pub biases: f32,
}

/// A random checkpoint of any family.
#[derive(Debug, Clone)]
pub struct Contents {
    /// All tensors, in the order in which they are written. Their element type is `float`.
    pub tensors: Vec<Entry>,
    /// The contents of `config.json`.
    pub config: Value,
    /// Element type of every tensor.
    pub float: Float,
    /// Standard deviations of the values.
    pub spread: Spread,
    /// Seed for the values.
    pub seed: u64,
    /// Largest size of one shard, in bytes.
    pub shard_bytes: u64,
}

impl Contents {
    /// Writes the checkpoint with its tokenizer into a new directory; returns the number of bytes in its tensors.
    ///
    /// # Errors
    /// When the directory exists, or writing fails.
    pub fn write(&self, out: &Path) -> Result<u64> {
        ensure!(self.shard_bytes > 0, "--shard-bytes must be positive");
        let dir = NewDir::create(out)?;
        let quantiles = standard_normal_quantiles();
        let noise = |mean: f32, std: f32| Noise::new(&quantiles, self.float, mean, std);
        let Spread { matrices, norms, biases } = self.spread;
        let (matrices, norms, biases) = (noise(0.0, matrices), noise(1.0, norms), noise(0.0, biases));
        let shards = plan_shards(self.tensors.clone(), self.shard_bytes);
        let mut buffer = vec![0; CHUNK];
        let mut total = 0;
        for (file, entries) in &shards {
            let mut shard = ShardWriter::create(&dir.path().join(file), entries)?;
            for entry in entries {
                let noise = match entry.shape.len() {
                    1 if entry.name.ends_with(".bias") => &biases,
                    1 => &norms,
                    _ => &matrices,
                };
                write_tensor(
                    &mut shard,
                    noise,
                    key(self.seed, &entry.name),
                    entry.bytes,
                    &mut buffer,
                    self.float,
                )?;
                total += entry.bytes;
            }
            shard.finish()?;
        }
        write_index(dir.path(), &shards)?;
        self.write_side_files(dir.path())?;
        dir.publish()?;
        Ok(total)
    }

    fn write_side_files(&self, dir: &Path) -> Result<()> {
        write_json(&dir.join("config.json"), &self.config)?;
        write_json(&dir.join("generation_config.json"), &llama::generation_config())?;
        write_json(&dir.join("tokenizer.json"), &llama::tokenizer())
    }
}

fn write_tensor(
    shard: &mut ShardWriter,
    noise: &Noise,
    key: u64,
    bytes: u64,
    buffer: &mut [u8],
    float: Float,
) -> Result<()> {
    debug_assert_eq!(buffer.len() % (LANES * float.size()), 0);
    let mut done = 0;
    while done < bytes {
        let part = (bytes - done).min(buffer.len() as u64) as usize;
        noise.fill(key, done / float.size() as u64, &mut buffer[..part]);
        shard.write(&buffer[..part])?;
        done += part as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::support::shards::{Checkpoint, read_json};

    fn tiny(out: PathBuf) -> Args {
        let shape = Shape {
            layers: 2,
            hidden: 96,
            intermediate: 160,
            heads: 6,
            kv_heads: 2,
            head_dim: 16,
            vocab: 300,
            tied: false,
        };
        Args { out, shape, dtype: Float::Bf16, seed: 3, shard_bytes: 1 << 40 }
    }

    fn all_bytes(dir: &Path) -> Vec<(String, Vec<u8>)> {
        let checkpoint = Checkpoint::open(dir).unwrap();
        let mut all: Vec<_> =
            checkpoint.entries().map(|e| (e.name.clone(), checkpoint.read(e).unwrap())).collect();
        all.sort();
        all
    }

    #[test]
    fn the_same_options_give_the_same_bytes_however_sharded() {
        let dir = tempfile::tempdir().unwrap();
        let args = tiny(dir.path().join("single"));
        write(&args).unwrap();
        let again = Args { out: dir.path().join("again"), ..args.clone() };
        write(&again).unwrap();
        let file = |d: &Path| std::fs::read(d.join("model.safetensors")).unwrap();
        assert_eq!(file(&args.out), file(&again.out));

        let sharded = Args { out: dir.path().join("sharded"), shard_bytes: 40_000, ..args.clone() };
        write(&sharded).unwrap();
        assert!(!sharded.out.join("model.safetensors").exists());
        let index = read_json(&sharded.out.join("model.safetensors.index.json")).unwrap();
        assert_eq!(index["weight_map"].as_object().unwrap().len(), all_bytes(&args.out).len());
        assert_eq!(all_bytes(&args.out), all_bytes(&sharded.out));

        let other = Args { out: dir.path().join("other"), seed: 4, ..args.clone() };
        write(&other).unwrap();
        assert_ne!(file(&args.out), file(&other.out));
    }

    #[test]
    fn a_deeper_model_shares_its_first_layers() {
        let dir = tempfile::tempdir().unwrap();
        let shallow = tiny(dir.path().join("2"));
        let mut deep = tiny(dir.path().join("4"));
        deep.shape.layers = 4;
        write(&shallow).unwrap();
        write(&deep).unwrap();
        let deep = all_bytes(&deep.out);
        assert!(all_bytes(&shallow.out).iter().all(|tensor| deep.contains(tensor)));
    }

    #[test]
    fn an_existing_directory_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        assert!(write(&tiny(dir.path().to_owned())).is_err());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn tied_models_have_no_head() {
        let dir = tempfile::tempdir().unwrap();
        let mut args = tiny(dir.path().join("tied"));
        args.shape.tied = true;
        write(&args).unwrap();
        assert!(all_bytes(&args.out).iter().all(|(name, _)| name != "lm_head.weight"));
        assert_eq!(read_json(&args.out.join("config.json")).unwrap()["tie_word_embeddings"], true);
    }
}
