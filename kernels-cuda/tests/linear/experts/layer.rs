//! Weights of several experts, a routing, and the launch of all their products.

use half::{bf16, f16};
use quant_kernels_cpu::experts::ExpertGate;
use quant_kernels_cpu::reference::{clamped_gate, gelu_tanh, silu};
use quant_kernels_cuda::linear::{LinearExpertsPlan, LinearExpertsShape, LinearPlan, Output};

use crate::DEVICE;
use crate::cases::Random;
use crate::machine::{Outcome, floats, launch, module, sections, values_of};
use crate::problem::Problem;
use crate::support::machine::{Argument, Error, Launch, Memory, Module, Options};

/// The marker of rows without a token.
pub const NO_TOKEN: u32 = u32::MAX;

pub struct Layer {
    /// Each with the same activations.
    pub experts: Vec<Problem>,
    /// The function of a gate, whose weights are those of `experts`, and the up projections.
    pub gate: Option<(ExpertGate, Vec<Problem>)>,
    /// The first row of each expert, and the number of rows.
    pub starts: Vec<u32>,
    pub token_of: Option<Vec<u32>>,
    pub factors: Option<Vec<f32>>,
    /// Rows for which there is memory.
    pub max_rows: usize,
    /// Elements between rows of results beyond their number.
    pub out_gap: usize,
}

impl Layer {
    /// A layer whose experts have these numbers of rows, each of a random token. `make` creates the product of an expert
    /// with all tokens. Every third expert has no bias.
    pub fn new(counts: &[usize], seed: u64, make: impl Fn(u64) -> Problem) -> Self {
        let mut random = Random(seed);
        let experts: Vec<Problem> = (0..counts.len() as u64)
            .map(|e| {
                let mut problem = make(e);
                problem.bias = problem.bias.filter(|_| e % 3 != 2);
                problem.bias.iter_mut().flatten().for_each(|b| *b += e as f32 / 8.0);
                problem
            })
            .collect();
        let mut starts = vec![0];
        starts.extend(counts.iter().scan(0, |sum, &count| {
            *sum += count as u32;
            Some(*sum)
        }));
        let max_rows = *starts.last().unwrap() as usize;
        let token_of = (0..max_rows).map(|_| random.below(experts[0].m as u64) as u32).collect();
        Self { experts, gate: None, starts, token_of: Some(token_of), factors: None, max_rows, out_gap: 0 }
    }

    /// Adds up projections, which `make` creates as [`new`](Self::new) does.
    pub fn with_gate(mut self, gate: ExpertGate, make: impl Fn(u64) -> Problem) -> Self {
        let experts = self.experts.len() as u64;
        // Others have a bias than those of the gates.
        let ups = (0..experts).map(|e| make(e + 71)).map(|mut up| {
            up.bias = up.bias.map(|bias| bias.iter().map(|b| b * 0.5 - 0.25).collect());
            up
        });
        self.gate = Some((gate, ups.collect()));
        self
    }

    pub fn with_factors(mut self, seed: u64) -> Self {
        let mut random = Random(seed);
        self.factors = Some((0..self.max_rows).map(|_| random.float()).collect());
        self
    }

    pub fn n(&self) -> usize {
        self.experts[0].case.shape[0]
    }

    pub fn rows(&self) -> usize {
        *self.starts.last().unwrap() as usize
    }

    pub fn shape(&self) -> LinearExpertsShape {
        LinearExpertsShape {
            experts: self.experts.len(),
            tokens: self.experts[0].m,
            rows: self.max_rows,
            gate: self.gate.as_ref().map(|(gate, _)| *gate),
        }
    }

    pub fn plan(&self) -> LinearExpertsPlan {
        let first = &self.experts[0];
        let plan =
            LinearExpertsPlan::new(&first.layout, first.activation, first.output, &self.shape(), &DEVICE);
        plan.unwrap()
    }

    /// The tokens of an expert's rows.
    pub fn tokens(&self, expert: usize) -> Vec<usize> {
        let rows = self.starts[expert] as usize..self.starts[expert + 1] as usize;
        let token = |row: usize| self.token_of.as_ref().map_or(row, |of| of[row] as usize);
        rows.map(token).collect()
    }

    /// The bits of all rows, by a product for each matrix, which are also compared with the reference.
    pub fn one_by_one(&self) -> Vec<u32> {
        let product = |problem: &Problem| {
            let (layout, m) = (&problem.layout, problem.m);
            let plan = LinearPlan::new(layout, problem.activation, problem.output, m, &DEVICE).unwrap();
            let values = launch(problem, &plan);
            problem.check(&values);
            values
        };
        let exact = |problem: &Problem, tokens: &[usize]| {
            let mut problem = problem.of_tokens(tokens);
            problem.output = Output::F32;
            product(&problem)
        };
        let mut bits = Vec::new();
        for (e, expert) in self.experts.iter().enumerate() {
            let tokens = self.tokens(e);
            if tokens.is_empty() {
                continue;
            }
            if self.gate.is_none() && self.factors.is_none() {
                bits.extend(product(&expert.of_tokens(&tokens)).iter().map(|v| v.to_bits()));
                continue;
            }
            // Results are rounded to the output's type only once, after the gate and the factor.
            let mut values = exact(expert, &tokens);
            if let Some((gate, ups)) = &self.gate {
                let ups = exact(&ups[e], &tokens);
                values.iter_mut().zip(ups).for_each(|(value, up)| *value = gated(*gate, *value, up));
            }
            if let Some(factors) = &self.factors {
                let rows = values.chunks_mut(self.n()).zip(&factors[self.starts[e] as usize..]);
                rows.for_each(|(row, factor)| row.iter_mut().for_each(|value| *value *= factor));
            }
            bits.extend(values.iter().map(|&v| match expert.output {
                Output::F16 => f16::from_f32(v).to_f32().to_bits(),
                Output::Bf16 => bf16::from_f32(v).to_f32().to_bits(),
                Output::F32 => v.to_bits(),
            }));
        }
        bits
    }

    pub fn launch(&self, plan: &LinearExpertsPlan, options: &Options) -> Outcome {
        self.run(plan, &module(&plan.work.variant), options).unwrap()
    }

    /// The bits of all rows, by the planned launch.
    pub fn at_once(&self) -> Vec<u32> {
        self.bits(&self.plan())
    }

    pub fn bits(&self, plan: &LinearExpertsPlan) -> Vec<u32> {
        self.launch(plan, &Options::default()).values.iter().map(|v| v.to_bits()).collect()
    }

    /// Runs the module, twice if there is a workspace: it must be reusable as the first launch left it.
    pub fn run(
        &self,
        plan: &LinearExpertsPlan,
        module: &Module,
        options: &Options,
    ) -> Result<Outcome, Error> {
        let mut memory = Memory::new();
        let (n, first) = (self.n(), &self.experts[0]);
        let ups = self.gate.as_ref().map_or(&[][..], |(_, ups)| ups);
        let matrices = self.experts.iter().enumerate();
        let descriptors: Vec<u8> = matrices
            .flat_map(|(e, expert)| [Some(expert), ups.get(e)])
            .flatten()
            .flat_map(|expert| {
                let [codes, parameters, scales, zeros, sums] = sections(&mut memory, expert);
                let bias = floats(&mut memory, "bias", expert.bias.as_deref().unwrap_or_default());
                [codes, parameters, scales, zeros, sums, bias].into_iter().flat_map(u64::to_le_bytes)
            })
            .collect();
        let experts = memory.buffer_from("experts", &descriptors, 16);
        let words = |memory: &mut Memory, name, words: &[u32]| {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            memory.buffer_from(name, &bytes, 4)
        };
        let starts = words(&mut memory, "starts", &self.starts);
        let token_of = self.token_of.as_ref().map_or(0, |of| words(&mut memory, "token of", of));
        let factors = self.factors.as_ref().map_or(0, |of| floats(&mut memory, "factors", of));
        let x = memory.buffer_from("x", &first.x, 16);
        let x_scales = floats(&mut memory, "x scales", &first.x_scales);
        let (mut partials, mut tickets) = (0, 0);
        if plan.work.workspace_bytes > 0 {
            partials = memory.buffer("partials", plan.work.workspace_bytes, 256);
            tickets = memory.buffer_from("tickets", &vec![0; plan.work.ticket_bytes], 256);
        }
        let numbers = match self.gate {
            Some((ExpertGate::Clamped { alpha, limit }, _)) => [alpha, limit],
            _ => [f32::NAN; 2],
        };
        let (each, stride) = (plan.work.variant.scheme.output_bytes(), n + self.out_gap);
        let rows = self.rows().min(self.max_rows);
        let mut outcome: Option<Outcome> = None;
        for _ in 0..if plan.work.workspace_bytes > 0 { 2 } else { 1 } {
            let out = memory.buffer("out", self.max_rows * stride * each, each);
            let launch = Launch {
                grid: plan.work.launch.grid,
                block: [plan.work.launch.block, 1, 1],
                dynamic_shared: plan.work.launch.shared_bytes,
                arguments: vec![
                    Argument::U64(experts),
                    Argument::U64(starts),
                    Argument::U64(token_of),
                    Argument::U64(factors),
                    Argument::U64(x),
                    Argument::U64(x_scales),
                    Argument::U64(out),
                    Argument::U64(partials),
                    Argument::U64(tickets),
                    Argument::U32(self.experts.len() as u32),
                    Argument::U32(self.max_rows as u32),
                    Argument::U32(first.m as u32),
                    Argument::U32(n as u32),
                    Argument::U32(first.case.shape[1] as u32),
                    Argument::U32(first.x_stride as u32),
                    Argument::U32(stride as u32),
                    Argument::U32(plan.work.chunks),
                    Argument::U32(u32::from(first.layout.zero_point().unwrap_or(0))),
                    Argument::U32(first.x_zero as u32),
                    Argument::F32(numbers[0]),
                    Argument::F32(numbers[1]),
                ],
            };
            let report = module.launch("linear_experts", &launch, &mut memory, options)?;
            let is_result = |byte: usize| byte / each / stride < rows && byte / each % stride < n;
            let bytes = memory.bytes_written(out, is_result)?;
            let values = values_of(&bytes, first.output);
            let values: Vec<f32> =
                values.chunks(stride).take(rows).flat_map(|row| row[..n].to_vec()).collect();
            if let Some(before) = &outcome {
                let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&before.values), bits(&values), "the second launch gives different results");
            }
            outcome = Some(Outcome { values, report });
        }
        if plan.work.workspace_bytes > 0 {
            assert!(memory.bytes(tickets)?.iter().all(|&b| b == 0), "tickets were not reset to 0");
        }
        Ok(outcome.unwrap())
    }
}

/// The definition of a gate.
pub fn gated(gate: ExpertGate, g: f32, u: f32) -> f32 {
    match gate {
        ExpertGate::Silu => silu(g) * u,
        ExpertGate::GeluTanh => gelu_tanh(g) * u,
        ExpertGate::Clamped { alpha, limit } => clamped_gate(g, u, alpha, limit),
        other => panic!("no definition of {other:?}"),
    }
}
