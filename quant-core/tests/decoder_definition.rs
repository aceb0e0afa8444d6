//! Compares the model stage with its definition in double precision, for models that `candle_oracle.rs` cannot cover.

use crate::common;

use std::collections::BTreeMap;

use common::{Kind, TOP_K, Tiny, logits, relative_difference, windows};
use quant_core::TensorSource;
use quant_core::checkpoint::{Dtype, MemorySource};
use serde_json::json;

struct Definition {
    tiny: Tiny,
    tensors: BTreeMap<String, Vec<f64>>,
}

type Rows = Vec<Vec<f64>>;

fn add(x: &mut Rows, y: Rows) {
    for (x, y) in x.iter_mut().zip(y) {
        x.iter_mut().zip(y).for_each(|(a, b)| *a += b);
    }
}

impl Definition {
    fn new(tiny: &Tiny, source: &MemorySource) -> Self {
        let widened = |name: &str| source.read_f32(name).unwrap().into_iter().map(f64::from).collect();
        let tensors = source.names().into_iter().map(|name| (name.to_owned(), widened(name))).collect();
        Self { tiny: tiny.clone(), tensors }
    }

    fn norm(&self, x: &[Vec<f64>], name: &str) -> Rows {
        let weight = &self.tensors[&format!("{name}.weight")];
        let scaled = |row: &Vec<f64>| {
            let mean_square = row.iter().map(|v| v * v).sum::<f64>() / row.len() as f64;
            row.iter().zip(weight).map(|(v, w)| v / (mean_square + 1e-5).sqrt() * w).collect()
        };
        x.iter().map(scaled).collect()
    }

    fn layer_norm(&self, x: &[Vec<f64>], name: &str) -> Rows {
        let parameter = |kind: &str, i: usize, other: f64| {
            self.tensors.get(&format!("{name}.{kind}")).map_or(other, |values| values[i])
        };
        let scaled = |row: &Vec<f64>| {
            let mean = row.iter().sum::<f64>() / row.len() as f64;
            let variance = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / row.len() as f64;
            let unit = row.iter().map(|v| (v - mean) / (variance + 1e-5).sqrt()).enumerate();
            unit.map(|(i, v)| v * parameter("weight", i, 1.0) + parameter("bias", i, 0.0)).collect()
        };
        x.iter().map(scaled).collect()
    }

    /// Normalizes every head separately, with one weight for all.
    fn head_norm(&self, x: &[Vec<f64>], name: &str) -> Rows {
        let heads =
            |row: &Vec<f64>| -> Rows { row.chunks(self.tiny.head_dim).map(<[f64]>::to_vec).collect() };
        x.iter().map(|row| self.norm(&heads(row), name).concat()).collect()
    }

    fn linear(&self, x: &[Vec<f64>], name: &str) -> Rows {
        let weight = &self.tensors[&format!("{name}.weight")];
        let bias = self.tensors.get(&format!("{name}.bias"));
        let product = |row: &Vec<f64>| {
            let outputs = weight.chunks_exact(row.len()).enumerate();
            let dot = |w: &[f64]| row.iter().zip(w).map(|(a, b)| a * b).sum::<f64>();
            outputs.map(|(n, w)| dot(w) + bias.map_or(0.0, |b| b[n])).collect()
        };
        x.iter().map(product).collect()
    }

    /// Rotates every pair `(i, i + d/2)` of every head by `position · θ^(−2i/d) / factor`.
    fn rope(&self, x: &mut [Vec<f64>]) {
        let d = self.tiny.head_dim;
        let factor = self.tiny.rope_scaling["factor"].as_f64().unwrap_or(1.0);
        for (position, row) in x.iter_mut().enumerate() {
            for head in row.chunks_exact_mut(d) {
                for i in 0..d / 2 {
                    let angle = position as f64 * 10_000_f64.powf(-2.0 * i as f64 / d as f64) / factor;
                    let (a, b) = (head[i], head[i + d / 2]);
                    head[i] = a * angle.cos() - b * angle.sin();
                    head[i + d / 2] = b * angle.cos() + a * angle.sin();
                }
            }
        }
    }

    fn attention(&self, q: &[Vec<f64>], k: &[Vec<f64>], v: &[Vec<f64>]) -> Rows {
        let (d, heads) = (self.tiny.head_dim, self.tiny.heads);
        let repeat = heads / self.tiny.kv_heads;
        let mut out = vec![vec![0.0; heads * d]; q.len()];
        for (t, row) in out.iter_mut().enumerate() {
            for (head, out) in row.chunks_exact_mut(d).enumerate() {
                let (own, shared) = (head * d, head / repeat * d);
                let score = |s: usize| -> f64 {
                    (0..d).map(|i| q[t][own + i] * k[s][shared + i]).sum::<f64>() / (d as f64).sqrt()
                };
                let sees = |s: usize| t - s < self.tiny.family.window();
                let weights: Vec<f64> = (0..=t).map(|s| if sees(s) { score(s).exp() } else { 0.0 }).collect();
                let total: f64 = weights.iter().sum();
                for (s, weight) in weights.iter().enumerate() {
                    for (i, o) in out.iter_mut().enumerate() {
                        *o += weight / total * v[s][shared + i];
                    }
                }
            }
        }
        out
    }

    fn gated(&self, x: &[Vec<f64>], [gate, up, down]: &[String; 3]) -> Rows {
        let mut gated = self.linear(x, gate);
        for (gate, up) in gated.iter_mut().zip(self.linear(x, up)) {
            gate.iter_mut().zip(up).for_each(|(g, u)| *g = *g / (1.0 + (-*g).exp()) * u);
        }
        self.linear(&gated, down)
    }

    /// Runs all experts on all tokens. For each token, only those with the largest logits count, weighted by their
    /// softmax.
    fn experts(&self, x: &[Vec<f64>], router: &str, experts: &[[String; 3]]) -> Rows {
        let outputs: Vec<Rows> = experts.iter().map(|linears| self.gated(x, linears)).collect();
        let logits = self.linear(x, router);
        let token = |(t, logits): (usize, &Vec<f64>)| {
            let total: f64 = logits.iter().map(|l| l.exp()).sum();
            let mut order: Vec<usize> = (0..logits.len()).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
            let chosen = &order[..TOP_K];
            let all_chosen: f64 = chosen.iter().map(|&e| logits[e].exp()).sum();
            let total = if self.tiny.family == Kind::Qwen3Moe(false) { total } else { all_chosen };
            let mut sum = vec![0.0; x[t].len()];
            for &e in chosen {
                sum.iter_mut().zip(&outputs[e][t]).for_each(|(s, y)| *s += logits[e].exp() / total * y);
            }
            sum
        };
        logits.iter().enumerate().map(token).collect()
    }

    fn rows(&self, name: &str, rows: impl Iterator<Item = usize>) -> Rows {
        let (values, h) = (&self.tensors[name], self.tiny.hidden);
        rows.map(|row| values[row * h..(row + 1) * h].to_vec()).collect()
    }

    fn opt_logits(&self, tokens: &[u32]) -> Vec<f32> {
        let mut x = self.rows("model.decoder.embed_tokens.weight", tokens.iter().map(|&t| t as usize));
        add(&mut x, self.rows("model.decoder.embed_positions.weight", 2..2 + tokens.len()));
        for layer in 0..self.tiny.layers {
            let name = |module: &str| format!("{}{module}", self.tiny.block(layer));
            let n = self.layer_norm(&x, &name("self_attn_layer_norm"));
            let [q, k, v] = ["q", "k", "v"].map(|m| self.linear(&n, &name(&format!("self_attn.{m}_proj"))));
            add(&mut x, self.linear(&self.attention(&q, &k, &v), &name("self_attn.out_proj")));
            let n = self.layer_norm(&x, &name("final_layer_norm"));
            let mut wide = self.linear(&n, &name("fc1"));
            wide.iter_mut().flatten().for_each(|v| *v = v.max(0.0));
            add(&mut x, self.linear(&wide, &name("fc2")));
        }
        x = self.layer_norm(&x, "model.decoder.final_layer_norm");
        let head = if self.tiny.tied { "model.decoder.embed_tokens" } else { "lm_head" };
        self.linear(&x, head).concat().into_iter().map(|v| v as f32).collect()
    }

    fn logits(&self, tokens: &[u32]) -> Vec<f32> {
        if self.tiny.family == Kind::Opt {
            return self.opt_logits(tokens);
        }
        let mut x = self.rows("model.embed_tokens.weight", tokens.iter().map(|&t| t as usize));
        for layer in 0..self.tiny.layers {
            let name = |module: &str| format!("model.layers.{layer}.{module}");
            let n = self.norm(&x, &name("input_layernorm"));
            let mut q = self.linear(&n, &name("self_attn.q_proj"));
            let mut k = self.linear(&n, &name("self_attn.k_proj"));
            let v = self.linear(&n, &name("self_attn.v_proj"));
            if self.tiny.family.head_norms() {
                q = self.head_norm(&q, &name("self_attn.q_norm"));
                k = self.head_norm(&k, &name("self_attn.k_norm"));
            }
            self.rope(&mut q);
            self.rope(&mut k);
            let attended = self.attention(&q, &k, &v);
            add(&mut x, self.linear(&attended, &name("self_attn.o_proj")));
            let n = self.norm(&x, &name("post_attention_layernorm"));
            match self.tiny.family.experts(layer) {
                None => add(
                    &mut x,
                    self.gated(&n, &["gate", "up", "down"].map(|m| name(&format!("mlp.{m}_proj")))),
                ),
                Some((router, experts)) => {
                    let experts: Vec<_> =
                        experts.into_iter().map(|e| e.map(|linear| name(&linear))).collect();
                    add(&mut x, self.experts(&n, &name(router), &experts));
                }
            }
        }
        let n = self.norm(&x, "model.norm");
        let head = if self.tiny.tied { "model.embed_tokens" } else { "lm_head" };
        self.linear(&n, head).concat().into_iter().map(|v| v as f32).collect()
    }
}

#[test]
fn logits_are_those_of_the_definition() {
    const BOUND: f64 = 5e-6;
    let biased = Tiny { attention_bias: true, mlp_bias: true, ..Tiny::default() };
    let half = Tiny { dtype: Dtype::F16, norm_dtype: Dtype::Bf16, ..biased.clone() };
    let interpolated = json!({"rope_type": "linear", "factor": 4.0});
    let mut worst = 0.0_f64;
    for (name, tiny) in [
        ("plain", Tiny::default()),
        ("attention biases", Tiny { attention_bias: true, ..Tiny::default() }),
        ("mlp biases, tied", Tiny { mlp_bias: true, tied: true, ..Tiny::default() }),
        ("wide heads", Tiny { head_dim: 40, ..biased.clone() }),
        ("narrow heads, 3 to 1", Tiny { head_dim: 6, heads: 6, kv_heads: 2, ..half }),
        ("mistral", Tiny { family: Kind::Mistral(Some(5)), ..Tiny::default() }),
        ("mistral without a window", Tiny { family: Kind::Mistral(None), ..Tiny::default() }),
        ("qwen2", Tiny { family: Kind::Qwen2, tied: true, ..Tiny::default() }),
        ("qwen3", Tiny { family: Kind::Qwen3, head_dim: 24, ..Tiny::default() }),
        ("qwen3, biases", Tiny { family: Kind::Qwen3, attention_bias: true, ..Tiny::default() }),
        ("mixtral", Tiny { family: Kind::Mixtral, ..Tiny::default() }),
        ("qwen3-moe", Tiny { family: Kind::Qwen3Moe(false), layers: 3, ..Tiny::default() }),
        ("qwen3-moe, normalized", Tiny { family: Kind::Qwen3Moe(true), head_dim: 24, ..Tiny::default() }),
        ("opt", Tiny::opt()),
        ("opt, tied, norms in f16", Tiny { tied: true, norm_dtype: Dtype::F16, ..Tiny::opt() }),
        ("opt, no biases", Tiny { attention_bias: false, mlp_bias: false, ..Tiny::opt() }),
        ("opt, norms without parameters", Tiny { affine: false, ..Tiny::opt() }),
        ("interpolated positions", Tiny { rope_scaling: interpolated, ..biased }),
    ] {
        for seed in 0..2 {
            let checkpoint = tiny.random(20 + seed);
            let windows = windows(tiny.vocab, 2, 70, seed);
            let definition = Definition::new(&tiny, &checkpoint.source());
            let exact = [definition.logits(windows.window(0)), definition.logits(windows.window(1))].concat();
            let difference = relative_difference(&logits(&checkpoint.model(), &windows), &exact);
            assert!(difference <= BOUND, "{name}, seed {seed}: {difference:e}");
            worst = worst.max(difference);
        }
    }
    println!("largest difference from double precision: {worst:.2e} of the largest logit");
}
