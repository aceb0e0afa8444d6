//! The experts of a layer, run in one call or as a sequence of single products.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use quant_kernels_cpu::experts::{
    Expert, ExpertGate, ExpertRows, Experts, ExpertsPlan, ExpertsWorkspace, Routing,
};
use quant_kernels_cpu::{
    Bf16Parts, FloatRows, GateUp, Int8Rows, IsaToken, PackedLinear, Product, Rayon, RowLayout, multiply_each,
    multiply_float_each,
};
use serde_json::{Value, json};

use crate::data::{BASE, activations, weights};
use crate::ours::pack;
use crate::passes;

/// A scheme of 4-bit weights, and how they are multiplied.
#[derive(Debug, Clone, Copy)]
pub struct Contestant {
    pub name: &'static str,
    group_size: usize,
    rows: ExpertRows,
    how: How,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum How {
    /// One call.
    Grouped,
    /// Single products for each expert that has rows: gathers its rows, computes three products, and adds the weighted
    /// result.
    Loop,
    /// Single products with the same number of rows for every expert, without gathering and summing, like dense layers
    /// of this shape.
    Dense,
}

const FLOAT: ExpertRows = ExpertRows::Float(Bf16Parts::Two);

pub const CONTESTANTS: [Contestant; 7] = [
    Contestant { name: "w4a8-g128", group_size: 128, rows: ExpertRows::Int8, how: How::Grouped },
    Contestant { name: "w4a8-g32", group_size: 32, rows: ExpertRows::Int8, how: How::Grouped },
    Contestant { name: "w4a16-g128", group_size: 128, rows: FLOAT, how: How::Grouped },
    Contestant { name: "w4a8-g128-loop", group_size: 128, rows: ExpertRows::Int8, how: How::Loop },
    Contestant { name: "w4a16-g128-loop", group_size: 128, rows: FLOAT, how: How::Loop },
    Contestant { name: "w4a8-g128-dense", group_size: 128, rows: ExpertRows::Int8, how: How::Dense },
    Contestant { name: "w4a16-g128-dense", group_size: 128, rows: FLOAT, how: How::Dense },
];

/// A layer, with the state that requests set.
pub struct Layer {
    of: Contestant,
    hidden: usize,
    inner: usize,
    experts: Vec<[PackedLinear; 3]>,
    x: Vec<f32>,
    tokens: usize,
    top_k: usize,
    /// The experts of each call, `[tokens, top_k]`.
    calls: Vec<Vec<u32>>,
    weights: Vec<f32>,
    workspace: ExpertsWorkspace,
    rows: Rows,
    out: Vec<f32>,
}

/// The buffers for single products.
#[derive(Default)]
struct Rows {
    whole: Int8Rows,
    float: Option<FloatRows>,
    x: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    down: Vec<f32>,
}

/// Answers a request; for `route`, `routed` is the line that follows it.
pub fn serve(
    layers: &mut BTreeMap<String, Layer>,
    request: &str,
    name: &str,
    numbers: &[usize],
    routed: Option<&str>,
) -> Result<Value> {
    if let ("prepare", &[inner, hidden, count]) = (request, numbers) {
        let layer = Layer::new(name, inner, hidden, count)?;
        let bytes: usize = layer.experts[0].iter().map(|part| part.layout().bytes()).sum();
        let note = format!("{:.3} bits per weight", 8.0 * bytes as f64 / (3 * inner * hidden) as f64);
        layers.insert(name.to_owned(), layer);
        return Ok(json!({"bytes": bytes, "copies": 1, "note": note}));
    }
    let layer = layers.get_mut(name).with_context(|| format!("{name} was not prepared"))?;
    match (request, numbers) {
        ("route", &[tokens, calls, top_k]) => {
            let routed = routed.context("the line with the experts is missing")?.split_whitespace();
            let routed: Vec<u32> = routed.map(str::parse).collect::<Result<_, _>>()?;
            ensure!(
                tokens > 0 && routed.len() == tokens * calls * top_k,
                "the number of experts does not match the request"
            );
            layer.route(tokens, top_k, &routed)?;
            layer.pass()?;
            Ok(json!({"error": layer.error()}))
        }
        ("run", &[milliseconds]) => {
            let calls = layer.calls.len();
            Ok(json!({"seconds": passes(milliseconds, calls, &mut || layer.pass())?}))
        }
        ("drop", []) => {
            layers.remove(name);
            Ok(json!({}))
        }
        _ => bail!("unknown request or wrong number of arguments: {request}"),
    }
}

impl Layer {
    fn new(name: &str, inner: usize, hidden: usize, count: usize) -> Result<Self> {
        let found = CONTESTANTS.iter().find(|c| c.name == name);
        let of = *found.with_context(|| format!("unknown contestant {name}"))?;
        ensure!(count > 0, "no experts");
        let reads = pack([inner, hidden], 4, of.group_size)?;
        let down = pack([hidden, inner], 4, of.group_size)?;
        // Each expert has its own memory.
        let experts = (0..count).map(|_| [reads.clone(), reads.clone(), down.clone()]).collect();
        Ok(Self {
            of,
            hidden,
            inner,
            experts,
            x: Vec::new(),
            tokens: 0,
            top_k: 0,
            calls: Vec::new(),
            weights: Vec::new(),
            workspace: ExpertsWorkspace::default(),
            rows: Rows::default(),
            out: Vec::new(),
        })
    }

    fn route(&mut self, tokens: usize, top_k: usize, routed: &[u32]) -> Result<()> {
        (self.tokens, self.top_k) = (tokens, top_k);
        self.x = activations(tokens, self.hidden);
        self.calls = routed.chunks_exact(tokens * top_k).map(<[u32]>::to_vec).collect();
        self.weights = vec![1.0 / top_k as f32; tokens * top_k];
        self.out = vec![0.0; tokens * self.hidden];
        Ok(())
    }

    fn pass(&mut self) -> Result<()> {
        let calls = std::mem::take(&mut self.calls);
        let done = calls.iter().try_for_each(|routed| match self.of.how {
            How::Grouped => self.grouped(routed),
            How::Loop => self.one_by_one(routed),
            How::Dense => self.dense(),
        });
        self.calls = calls;
        done
    }

    fn grouped(&mut self, routed: &[u32]) -> Result<()> {
        let experts: Vec<Expert<'_>> = (self.experts.iter())
            .map(|[gate, up, down]| Expert { gate: gate.into(), up: up.into(), down: down.into() })
            .collect();
        let experts = Experts::new(&experts)?;
        let (token, gate) = (IsaToken::detect(), ExpertGate::Silu);
        let plan = ExpertsPlan::new::<f32>(&experts, token, self.of.rows, gate, self.tokens, self.top_k)?;
        self.workspace.reserve(&plan)?;
        let routing = Routing { top_k: self.top_k, experts: routed, weights: &self.weights };
        Ok(experts.run(&plan, &self.x, &routing, &mut self.workspace, &mut self.out, &Rayon)?)
    }

    fn one_by_one(&mut self, routed: &[u32]) -> Result<()> {
        let (hidden, top_k) = (self.hidden, self.top_k);
        self.out.fill(0.0);
        for expert in 0..self.experts.len() {
            let slots: Vec<usize> = (0..routed.len()).filter(|&slot| routed[slot] == expert as u32).collect();
            if slots.is_empty() {
                continue;
            }
            self.rows.x.clear();
            for slot in &slots {
                self.rows.x.extend_from_slice(&self.x[slot / top_k * hidden..][..hidden]);
            }
            self.rows.products(self.of.rows, &self.experts[expert], slots.len())?;
            for (y, slot) in self.rows.down.chunks_exact(hidden).zip(slots) {
                let sums = &mut self.out[slot / top_k * hidden..][..hidden];
                sums.iter_mut().zip(y).for_each(|(sum, y)| *sum += self.weights[slot] * y);
            }
        }
        Ok(())
    }

    /// Runs every expert with the mean number of rows per expert.
    fn dense(&mut self) -> Result<()> {
        let rows = (self.tokens * self.top_k).div_ceil(self.experts.len());
        self.rows.x.clear();
        self.rows.x.extend(self.x.iter().cycle().take(rows * self.hidden));
        for expert in &self.experts {
            self.rows.products(self.of.rows, expert, rows)?;
        }
        self.out[..self.hidden].copy_from_slice(&self.rows.down[..self.hidden]);
        Ok(())
    }

    /// Returns the relative error of the first outputs of the first token, compared with the unquantized weights. All
    /// experts have the same weights, and a token's routing weights add up to 1, so one expert gives the reference.
    fn error(&self) -> f64 {
        let (reads, down) = (weights(self.hidden), weights(self.inner));
        let dot = |row: &[f32], x: &dyn Fn(usize) -> f64| -> f64 {
            row.iter().enumerate().map(|(i, w)| f64::from(*w) * x(i)).sum()
        };
        let between: Vec<f64> = (0..BASE)
            .map(|r| dot(&reads[r * self.hidden..][..self.hidden], &|i| f64::from(self.x[i])))
            .map(|g| g / (1.0 + (-g).exp()) * g)
            .collect();
        let (mut wrong, mut all) = (0.0, 0.0);
        for r in 0..BASE {
            let expected = dot(&down[r * self.inner..][..self.inner], &|i| between[i % BASE]);
            wrong += (f64::from(self.out[r]) - expected).powi(2);
            all += expected * expected;
        }
        (wrong / all).sqrt()
    }
}

impl Rows {
    /// Computes the three products of an expert with `m` rows.
    fn products(&mut self, rows: ExpertRows, [gate, up, down]: &[PackedLinear; 3], m: usize) -> Result<()> {
        let [reads, writes] = [gate, down].map(|of| RowLayout::of(of.layout()));
        let (inner, hidden) = (gate.layout().n(), down.layout().n());
        self.gate.resize(m * inner, 0.0);
        self.up.resize(m * inner, 0.0);
        self.down.resize(m * hidden, 0.0);
        let float = self.float.get_or_insert_with(|| FloatRows::new(IsaToken::detect()));
        let mut both = [
            Product { weight: gate.view(), bias: None, out: &mut self.gate },
            Product { weight: up.view(), bias: None, out: &mut self.up },
        ];
        if rows == ExpertRows::Int8 {
            self.whole.quantize(&self.x, reads, &Rayon)?;
            multiply_each(IsaToken::detect(), &self.whole, &mut both, &Rayon)?;
            let product = GateUp::Apart { gate: &self.gate, up: &self.up };
            self.whole.quantize_silu_mul(product, writes, None, &Rayon)?;
            down.multiply(&self.whole, &mut self.down, &Rayon)?;
            return Ok(());
        }
        float.pack(&self.x, reads, &Rayon)?;
        multiply_float_each(float, &mut both, &Rayon)?;
        float.pack_silu_mul(GateUp::Apart { gate: &self.gate, up: &self.up }, writes, &Rayon)?;
        Ok(down.multiply_float(float, &mut self.down, &Rayon)?)
    }
}
