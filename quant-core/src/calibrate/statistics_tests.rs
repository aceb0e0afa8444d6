//! Statistics do not depend on how rows arrive, and attribute each row to its own token.

use std::sync::Arc;

use proptest::prelude::*;

use super::super::TokenUse::{Context, Counted, Padding};
use super::*;
use crate::model::arch::GraphBuilder;
use crate::model::{AttentionShape, Linear, Op, RopeTables, WeightBody};

#[derive(Clone)]
struct All {
    means: AbsMean,
    ranges: ChannelRanges,
    sampled: SampledRows,
    hessian: Hessian,
    gram: GramSum,
}

impl All {
    fn new(channels: usize, layout: &BatchLayout) -> Self {
        Self {
            means: AbsMean::new(channels),
            ranges: ChannelRanges::new(channels),
            sampled: SampledRows::new(channels, layout.counted(), 5),
            hessian: Hessian::new(channels).unwrap(),
            gram: GramSum::new(channels),
        }
    }

    fn finish(mut self) -> Self {
        self.hessian.finish();
        self
    }

    fn assert_same(&self, other: &Self) {
        assert_eq!(self.means.means(), other.means.means());
        assert_eq!(self.ranges, other.ranges);
        assert_eq!(self.sampled.values(), other.sampled.values());
        assert_eq!(self.hessian.tokens(), other.hessian.tokens());
        for i in 0..self.hessian.channels() {
            for j in 0..=i {
                assert_eq!(self.hessian.at(i, j), other.hessian.at(i, j));
            }
        }
        // Sums are in f32 and accumulated per piece.
        for (a, b) in self.gram.sum.iter().zip(&other.gram.sum) {
            assert!((a - b).abs() <= 1e-4 * (1.0 + a.abs()), "{a} {b}");
        }
    }
}

impl Statistic for All {
    fn take(&mut self, rows: &InputRows<'_>) -> Result<()> {
        let Self { means, ranges, sampled, hessian, gram } = self;
        let all: [&mut dyn Statistic; 5] = [means, ranges, sampled, hessian, gram];
        all.into_iter().try_for_each(|statistic| statistic.take(rows))
    }
}

/// A batch, and a value that has rows for some of its tokens.
#[derive(Debug, Clone)]
struct Case {
    layout: BatchLayout,
    channels: usize,
    /// Ascending.
    tokens: Vec<u32>,
    /// `[tokens, channels]`
    values: Vec<f32>,
    /// Rows at which a new piece begins, ascending.
    cuts: Vec<usize>,
}

impl Case {
    fn rows(&self, rows: std::ops::Range<usize>) -> &[f32] {
        &self.values[rows.start * self.channels..rows.end * self.channels]
    }

    fn pieces(&self) -> Vec<std::ops::Range<usize>> {
        let ends = self.cuts.iter().copied().chain([self.tokens.len()]);
        let mut first = 0;
        ends.map(|end| std::mem::replace(&mut first, end)..end).collect()
    }

    /// The tokens of pieces are described by `name`.
    fn gathered<'a>(
        &'a self,
        mut name: impl FnMut(std::ops::Range<usize>) -> Vec<(usize, TokenRows<'a>)>,
    ) -> All {
        let mut all = All::new(self.channels, &self.layout);
        for piece in self.pieces() {
            let mut at = piece.start;
            for (count, tokens) in name(piece) {
                let values = self.rows(at..at + count);
                let rows = InputRows::new(values, self.channels, tokens, &self.layout).unwrap();
                all.take(&rows).unwrap();
                at += count;
            }
        }
        all.finish()
    }

    fn by_indices(&self) -> All {
        self.gathered(|piece| {
            vec![(piece.len(), TokenRows::Indices { first: 0, indices: &self.tokens[piece] })]
        })
    }

    /// Runs of consecutive tokens are ranges.
    fn by_ranges(&self) -> All {
        self.gathered(|piece| {
            let tokens = &self.tokens[piece];
            let runs = tokens.chunk_by(|a, b| a + 1 == *b);
            runs.map(|run| (run.len(), TokenRows::range(run[0] as usize, run.len()))).collect()
        })
    }

    /// The statistics by their definitions, token by token.
    fn defined(&self) -> (Vec<f32>, Vec<[f32; 2]>, Vec<f32>, u64) {
        let stride = (self.layout.counted() / 5).max(1);
        let mut sums = vec![0.0_f64; self.channels];
        let mut ends = vec![[f32::INFINITY, f32::NEG_INFINITY]; self.channels];
        let (mut kept, mut counted) = (Vec::new(), 0);
        for (row, &token) in self.values.chunks(self.channels).zip(&self.tokens) {
            if !self.layout.counts(token as usize) {
                continue;
            }
            counted += 1;
            let rank = (0..token as usize).filter(|&t| self.layout.counts(t)).count();
            if rank.is_multiple_of(stride) {
                kept.extend_from_slice(row);
            }
            for (c, &v) in row.iter().enumerate() {
                sums[c] += f64::from(v.abs());
                ends[c] = [ends[c][0].min(v), ends[c][1].max(v)];
            }
        }
        let means = sums.iter().map(|s| (s / (counted as f64).max(1.0)) as f32).collect();
        (means, ends, kept, counted)
    }
}

/// Some batches have masked tokens and padding; in some cases the value has rows for all tokens.
fn case() -> impl Strategy<Value = Case> {
    let sizes = (1_usize..5, 1_usize..40, 1_usize..5, any::<u64>(), 0_u8..3);
    sizes.prop_map(|(windows, length, channels, seed, kind)| {
        let mut random = crate::random::SplitMix64(seed);
        let mut below = |n: usize| random.below(n);
        let tokens = windows * length;
        let uses: Vec<_> = (0..tokens).map(|_| [Counted, Counted, Context, Padding][below(4)]).collect();
        let layout = match kind {
            0 => BatchLayout::plain(windows, length),
            _ => BatchLayout::new(windows, length, None, Some(&uses)),
        };
        let with_rows: Vec<u32> = (0..tokens as u32).filter(|_| kind == 1 || below(3) == 0).collect();
        let values = (0..with_rows.len() * channels).map(|_| below(2001) as f32 / 100.0 - 10.0).collect();
        let cuts = (0..with_rows.len()).filter(|_| below(7) == 0).collect();
        Case { layout, channels, tokens: with_rows, values, cuts }
    })
}

proptest! {
    #[test]
    fn statistics_do_not_depend_on_how_rows_arrive(case in case()) {
        let whole = Case { cuts: Vec::new(), ..case.clone() }.by_indices();
        case.by_indices().assert_same(&whole);
        case.by_ranges().assert_same(&whole);
        let (means, ends, kept, counted) = case.defined();
        prop_assert_eq!(whole.means.means(), means);
        prop_assert_eq!(whole.sampled.values(), &kept[..]);
        prop_assert_eq!(whole.hessian.tokens(), counted);
        let maxima: Vec<f32> = ends.iter().map(|[low, high]| (-low).max(*high).max(0.0)).collect();
        prop_assert_eq!(whole.ranges.maxima(), maxima);
    }
}

#[test]
fn gram_matches_its_definition_for_any_number_of_threads() {
    let (tokens, channels) = (37, 300);
    let x: Vec<f32> = (0..tokens * channels).map(|i| (i as f32 * 0.7).sin()).collect();
    let run = |threads| {
        let mut sum = vec![0.0; channels * channels];
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            gram(&x[..20 * channels], channels, &mut sum);
            gram(&x[20 * channels..], channels, &mut sum);
        });
        sum
    };
    let sum = run(1);
    assert_eq!(sum, run(3));
    for i in 0..channels {
        for j in 0..=i {
            let exact: f64 =
                (0..tokens).map(|t| f64::from(x[t * channels + i]) * f64::from(x[t * channels + j])).sum();
            assert!((f64::from(sum[i * channels + j]) - exact).abs() < 1e-4);
        }
    }
}

fn weight_of(seed: usize) -> Vec<f32> {
    (0..16).map(|i| ((i * 7 + seed * 5) % 11) as f32 / 11.0 - 0.5).collect()
}

/// A block whose input is read both by linears before attention and by one after it in evaluation order.
fn parallel_block() -> Block {
    block_with(1)
}

fn block_with(heads: usize) -> Block {
    let mut graph = GraphBuilder::default();
    let linear =
        |name: &str| Op::Linear { name: name.into(), shape: [4, 4], bias: false, stays_float: false };
    let input = graph.add(Op::Input { width: 4 }, &[]);
    let [q, k, v] = ["q", "k", "v"].map(|name| graph.add(linear(name), &[input]));
    let heads = AttentionShape { window: Some(3), ..AttentionShape::new(heads, 1, 4 / heads) };
    let attended = graph.add(Op::Attention(heads), &[q, k, v]);
    let o = graph.add(linear("o"), &[attended]);
    let up = graph.add(linear("up"), &[input]);
    graph.add(Op::Add, &[o, up]);
    let graph = Arc::new(graph.finish());
    let weight =
        |seed: usize| Linear::new(Arc::new(WeightBody::F32 { shape: [4, 4], values: weight_of(seed) }), None);
    let linears = graph.linears().map(|(id, ..)| (id, weight(id))).collect();
    let ropes = RopeTables::new(std::iter::empty(), 0).unwrap();
    Block::new(graph, BTreeMap::new(), linears, BTreeMap::new(), &ropes).unwrap()
}

#[derive(Default)]
struct Noted(Vec<usize>, Vec<f32>);

impl Statistic for Noted {
    fn take(&mut self, rows: &InputRows<'_>) -> Result<()> {
        self.0.extend(rows.all().map(|(token, _)| token));
        self.1.extend_from_slice(rows.counted_values());
        Ok(())
    }
}

impl AttentionStatistic for Noted {
    fn take(&mut self, queries: &InputRows<'_>, keys: &InputRows<'_>) -> Result<()> {
        assert_eq!((queries.count(), queries.channels()), (keys.count(), keys.channels()));
        Statistic::take(self, keys)
    }
}

/// Several linears read the same value, and some of them are in the second part of a block.
#[test]
fn a_pass_shows_every_value_once() {
    let block = parallel_block();
    let graph = block.graph();
    let id = |name: &str| (0..graph.nodes().len()).find(|&id| graph.name(id) == name).unwrap();
    for (windows, length) in [(5, 900), (2, 4500)] {
        let tokens = windows * length;
        let uses: Vec<_> = (0..tokens).map(|t| if t % 3 == 0 { Context } else { Counted }).collect();
        let layout = BatchLayout::new(windows, length, None, Some(&uses));
        let values: Vec<f32> = (0..tokens * 4).map(|i| (i % 97) as f32 / 97.0 - 0.5).collect();
        let mut states = HiddenStates::new(layout.clone(), 4, values.clone()).unwrap();
        let (mut input, mut again, mut attended, mut keys) =
            (Noted::default(), Noted::default(), Noted::default(), Noted::default());
        let cancel = CancelToken::new();
        let mut pass = StatisticsPass::new(&block, &layout, &cancel);
        pass.gather(graph.input(), &mut input).unwrap();
        pass.gather(graph.input(), &mut again).unwrap();
        pass.gather(graph.nodes()[id("o")].inputs[0], &mut attended).unwrap();
        pass.gather_attention(graph.nodes()[id("o")].inputs[0], &mut keys);
        let counts = pass.run(&mut states, false).unwrap();
        let expected: Vec<f32> = values
            .chunks(4)
            .zip(&uses)
            .filter(|(_, u)| **u == Counted)
            .flat_map(|(row, _)| row)
            .copied()
            .collect();
        assert_eq!((&input.1, &again.1), (&expected, &expected));
        for noted in [input, again, attended, keys] {
            assert!(noted.0.into_iter().eq(0..tokens));
        }
        let each = ["q", "k", "v", "o", "up"].map(|name| (id(name), layout.counted() as u64));
        assert_eq!(counts, BTreeMap::from(each));
    }
}

#[test]
fn a_pass_refuses_what_no_linear_reads_and_stops_when_cancelled() {
    let block = parallel_block();
    let layout = BatchLayout::plain(1, 3);
    let mut states = HiddenStates::new(layout.clone(), 4, vec![0.5; 12]).unwrap();
    let cancel = CancelToken::new();
    let mut noted = Noted::default();
    let mut pass = StatisticsPass::new(&block, &layout, &cancel);
    assert!(matches!(pass.gather(block.graph().output(), &mut noted), Err(Error::Internal(_))));
    let pass = StatisticsPass::new(&block, &layout, &cancel);
    cancel.cancel();
    assert!(matches!(pass.run(&mut states, true), Err(Error::Interrupted)));
    assert!(HiddenStates::new(layout, 4, vec![0.0; 11]).is_err());
}

/// Attention is linear in its values, so the projection of what a head returns for the input of the projection is what
/// the head returns for its output.
#[test]
fn attended_values_are_those_before_their_projection() {
    for heads in [1, 2] {
        let block = block_with(heads);
        let graph = block.graph();
        let id = |name: &str| (0..graph.nodes().len()).find(|&id| graph.name(id) == name).unwrap();
        let attention = graph.nodes()[id("o")].inputs[0];
        for (windows, length) in [(5, 70), (2, 3000)] {
            let tokens = windows * length;
            let uses: Vec<_> = (0..tokens).map(|t| if t % 3 == 0 { Context } else { Counted }).collect();
            // The second half of each window is another document.
            let starts: Vec<u32> =
                (0..tokens).map(|t| if t % length < length / 2 { 0 } else { length as u32 / 2 }).collect();
            let layout = BatchLayout::new(windows, length, Some(&starts), Some(&uses));
            let mut state = 0.3_f32;
            let mut next = || {
                state = (state * 91.7).sin();
                state
            };
            let values: Vec<f32> = (0..tokens * 4).map(|_| next()).collect();
            let mut states = HiddenStates::new(layout.clone(), 4, values).unwrap();
            let cancel = CancelToken::new();
            let (mut mixed, mut output) = (vec![Noted::default(), Noted::default()], Noted::default());
            mixed.truncate(heads);
            let mut pass = StatisticsPass::new(&block, &layout, &cancel);
            let each = mixed.iter_mut().map(|noted| noted as &mut dyn Statistic).collect();
            pass.gather_attended(attention, graph.input(), each).unwrap();
            pass.gather(attention, &mut output).unwrap();
            pass.run(&mut states, false).unwrap();
            let (projection, width) = (weight_of(id("v")), 4 / heads);
            let mut largest = 0.0_f32;
            for (head, mixed) in mixed.iter().enumerate() {
                assert!(mixed.0.iter().copied().eq(0..tokens));
                assert_eq!(mixed.1.len(), 4 * layout.counted());
                for (x, y) in mixed.1.chunks(4).zip(output.1.chunks(4)) {
                    for (row, y) in y[head * width..][..width].iter().enumerate() {
                        let weight = &projection[4 * (head * width + row)..][..4];
                        let product: f32 = weight.iter().zip(x).map(|(w, x)| w * x).sum();
                        assert!((product - y).abs() < 1e-5, "head {head}: {product} {y}");
                        largest = largest.max(y.abs());
                    }
                }
            }
            assert!(largest > 0.1);
        }
    }
}

#[test]
fn only_values_that_are_read_before_attention_can_be_attended_to() {
    let block = block_with(2);
    let graph = block.graph();
    let id = |name: &str| (0..graph.nodes().len()).find(|&id| graph.name(id) == name).unwrap();
    let attention = graph.nodes()[id("o")].inputs[0];
    let (layout, cancel) = (BatchLayout::plain(1, 3), CancelToken::new());
    for (node, value, heads) in
        [(id("o"), graph.input(), 2), (attention, attention, 2), (attention, graph.input(), 1)]
    {
        let mut noted = [Noted::default(), Noted::default()];
        let mut pass = StatisticsPass::new(&block, &layout, &cancel);
        let each = noted.iter_mut().take(heads).map(|noted| noted as &mut dyn Statistic).collect();
        assert!(matches!(pass.gather_attended(node, value, each), Err(Error::Internal(_))));
    }
}
