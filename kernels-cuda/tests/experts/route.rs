//! Sorting a routing by expert.

use quant_kernels_cuda::compile::Variant;
use quant_kernels_cuda::experts::{NO_EXPERT, RouteArguments, RoutePlan};
use quant_kernels_cuda::launch::Region;

use crate::cases::Random;
use crate::support::has_nvrtc;
use crate::support::machine as ptx;
use crate::{bytes_of, launch, module, region, words_of};

pub struct Routing {
    pub count: usize,
    pub top_k: usize,
    /// `[tokens, top_k]` each.
    pub experts: Vec<u32>,
    pub weights: Vec<f32>,
}

/// The initial words of results.
const UNWRITTEN: u32 = 0xa5a5_a5a5;

#[derive(Debug, PartialEq, Default)]
pub struct Sorted {
    pub starts: Vec<u32>,
    /// `UNWRITTEN` beyond the last row.
    pub token_of: Vec<u32>,
    /// As bits.
    pub factors: Vec<u32>,
    pub row_of: Vec<u32>,
}

impl Routing {
    /// Some slots have no expert, and some tokens have an expert twice.
    pub fn new([count, tokens, top_k]: [usize; 3], seed: u64) -> Self {
        let mut random = Random(seed);
        let experts = (0..tokens * top_k).map(|_| match random.below(9) {
            0 => NO_EXPERT,
            1 => count as u32,
            _ => random.below(count as u64) as u32,
        });
        let experts: Vec<u32> = experts.collect();
        let weights = experts.iter().map(|_| random.float()).collect();
        Self { count, top_k, experts, weights }
    }

    fn tokens(&self) -> usize {
        self.experts.len() / self.top_k
    }

    /// The definition.
    pub fn sorted(&self) -> Sorted {
        let mut sorted = Sorted { row_of: vec![u32::MAX; self.experts.len()], ..Sorted::default() };
        let mut used = vec![0; self.tokens()];
        for expert in 0..self.count as u32 {
            sorted.starts.push(sorted.token_of.len() as u32);
            for slot in (0..self.experts.len()).filter(|&slot| self.experts[slot] == expert) {
                let token = slot / self.top_k;
                sorted.row_of[token * self.top_k + used[token]] = sorted.token_of.len() as u32;
                used[token] += 1;
                sorted.token_of.push(token as u32);
                sorted.factors.push(self.weights[slot].to_bits());
            }
        }
        sorted.starts.push(sorted.token_of.len() as u32);
        sorted.token_of.resize(self.experts.len(), UNWRITTEN);
        sorted.factors.resize(self.experts.len(), UNWRITTEN);
        sorted
    }

    pub fn run(&self, variant: &Variant, options: &ptx::Options) -> ptx::Result<Sorted> {
        let plan = RoutePlan::new(self.count, self.tokens(), self.top_k).unwrap();
        let mut memory = ptx::Memory::new();
        let mut output = |name, words| region(&mut memory, name, &bytes_of(vec![UNWRITTEN; words]), 4);
        let slots = self.experts.len();
        let starts = output("starts", self.count + 1);
        let [token_of, factors, row_of] = ["token of", "factors", "row of"].map(|name| output(name, slots));
        let at = RouteArguments {
            experts: region(&mut memory, "experts", &bytes_of(self.experts.iter().copied()), 4),
            weights: region(&mut memory, "weights", &bytes_of(self.weights.iter().map(|w| w.to_bits())), 4),
            starts,
            token_of,
            factors,
            row_of,
        };
        let arguments = plan.arguments(&at).unwrap();
        launch(&module(variant), variant.kernel, &plan.launch, &arguments, &mut memory, options)?;
        let read = |at: Region| match at {
            Region::NONE => Vec::new(),
            at => words_of(&memory.bytes(at.address).unwrap()),
        };
        Ok(Sorted {
            starts: read(at.starts),
            token_of: read(at.token_of),
            factors: read(at.factors),
            row_of: read(at.row_of),
        })
    }
}

pub fn variant() -> Variant {
    RoutePlan::new(1, 1, 1).unwrap().variant
}

const SHAPES: [[usize; 3]; 8] =
    [[1, 1, 1], [1, 40, 1], [3, 5, 2], [4, 16, 2], [7, 33, 3], [128, 1, 8], [130, 9, 8], [5, 0, 2]];

#[test]
fn rows_are_sorted_by_expert_token_and_slot() {
    if !has_nvrtc() {
        return;
    }
    for (seed, shape) in SHAPES.into_iter().enumerate() {
        let routing = Routing::new(shape, seed as u64);
        let sorted = routing.run(&variant(), &ptx::Options::default()).unwrap();
        assert_eq!(sorted, routing.sorted(), "{shape:?}");
    }
}

#[test]
fn one_expert_has_all_slots_or_none() {
    if !has_nvrtc() {
        return;
    }
    for expert in [0, 2, 3, NO_EXPERT] {
        let mut routing = Routing::new([3, 21, 2], 4);
        routing.experts.fill(expert);
        let sorted = routing.run(&variant(), &ptx::Options::default()).unwrap();
        assert_eq!(sorted, routing.sorted(), "{expert}");
    }
}

#[test]
fn the_order_of_warps_changes_nothing() {
    if !has_nvrtc() {
        return;
    }
    use quant_ptx_interpreter::{BlockOrder, WarpOrder};
    let routing = Routing::new([9, 40, 4], 2);
    for (block_order, warp_order) in
        [(BlockOrder::Reverse, WarpOrder::RoundRobin), (BlockOrder::Seeded(5), WarpOrder::Seeded(6))]
    {
        let options = ptx::Options { block_order, warp_order, ..ptx::Options::default() };
        assert_eq!(routing.run(&variant(), &options).unwrap(), routing.sorted());
    }
}
