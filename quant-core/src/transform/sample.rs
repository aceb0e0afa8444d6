//! Selects the tokens of a batch for a [race](super::race), and assigns them to rounds.

use super::rows::StoredValues;
use crate::calibrate::{BatchLayout, InputRows, Packing, Sampling, Spill, Statistic};
use crate::model::{BlockGraph, FoldGroup};
use crate::{Result, allocate};

/// A race uses at most one token in `TOKENS_PER_SAMPLE` of the batch, but at least [`MIN_TOKENS`].
const TOKENS_PER_SAMPLE: usize = 4;
const MIN_TOKENS: usize = 4096;
const FIRST_TOKENS: usize = 1024;
/// The minimum number of windows in the first round, if whole windows are used.
pub(super) const FIRST_WINDOWS: usize = 4;
/// The minimum number of windows, if whole windows are used. A batch with at most this many is used whole in the first
/// round.
const MIN_WINDOWS: usize = 8;
/// The number of tokens at the start of a document, or of a window without documents, that are always used.
const HEAD: usize = 4;
/// The minimum number of units for estimating the variance.
const UNITS: usize = 16;

pub(super) fn mixes_tokens(graph: &BlockGraph, group: &FoldGroup) -> bool {
    graph.mixes_tokens(group.input, group.inspected)
}

#[derive(Debug, Clone)]
pub(super) enum Schedule {
    /// The rank of every window, and the number of windows used after each round.
    Windows { ranks: Vec<usize>, until: Vec<usize> },
    /// Every `stride`-th token after the head in the first round; each further round halves the stride.
    Tokens { stride: usize, rounds: usize, units_per_window: usize },
}

/// The part of a group's input that a race may use, `[tokens, channels]`, filled in order of tokens.
#[derive(Debug)]
pub(super) struct SearchSample {
    pub(super) layout: BatchLayout,
    pub(super) channels: usize,
    pub(super) schedule: Schedule,
    rows: StoredValues,
    pub(super) places: Vec<Place>,
    /// The memory that a round may use, if the rows are in a file.
    round_bytes: Option<u64>,
    /// The number of counted tokens added.
    counted: usize,
    /// The window of the last token added, and the number of counted tokens after heads that were added from this
    /// window.
    window: usize,
    tails: usize,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Place {
    /// The position in the batch.
    pub(super) token: usize,
    round: usize,
    pub(super) unit: usize,
    /// Whether it is one of the first tokens of a document, or of a window without documents.
    pub(super) head: bool,
    /// Whether the error of the token is measured. Attention also needs tokens that do not count.
    pub(super) counts: bool,
}

impl SearchSample {
    /// An empty sample of an input with `channels` features. It is `rounded` to bfloat16 if the race needs no more
    /// precision. About the fraction `of_tokens` of all tokens has a row in the input: less than 1 inside an expert.
    pub(super) fn new(
        layout: BatchLayout,
        channels: usize,
        mixes_tokens: bool,
        rounded: bool,
        of_tokens: f64,
        spill: Option<&Spill>,
    ) -> Result<Self> {
        let schedule = if mixes_tokens {
            Schedule::windows(layout.windows())
        } else {
            Schedule::tokens(&layout, of_tokens)
        };
        let (rows, places) = (StoredValues::new(rounded, 0, spill)?, Vec::new());
        let round_bytes = spill.map(Spill::round_bytes);
        let mut sample =
            Self { layout, channels, schedule, rows, places, round_bytes, counted: 0, window: 0, tails: 0 };
        if of_tokens < 1.0 {
            return Ok(sample);
        }
        // All memory is allocated now: a growing list would keep its old and its new buffer in memory at the same time.
        let wanted = (0..sample.layout.tokens()).filter(|&token| sample.place(token).is_some()).count();
        (sample.window, sample.tails) = (0, 0);
        if spill.is_none() {
            sample.rows = StoredValues::new(rounded, wanted * channels, None)?;
        }
        sample.places = Vec::with_capacity(wanted);
        Ok(sample)
    }

    /// The approximate number of tokens that a sample takes from a batch; an upper bound if windows are cut from a
    /// stream.
    pub(super) fn max_tokens(batch: Sampling, mixes_tokens: bool) -> u64 {
        let (windows, length) = (batch.samples as u64, batch.length as u64);
        if mixes_tokens {
            return windows
                .div_ceil(TOKENS_PER_SAMPLE as u64)
                .max(MIN_WINDOWS as u64)
                .min(windows)
                .saturating_mul(length);
        }
        let tokens = windows.saturating_mul(length);
        let wanted = (tokens / TOKENS_PER_SAMPLE as u64).max(MIN_TOKENS as u64);
        let stride = 1 << (tokens / wanted).min(length).max(1).ilog2();
        let heads = match batch.packing {
            // Each document has its own head; documents are assumed to have at least 32 tokens.
            Packing::Documents => tokens / (32 / HEAD as u64),
            Packing::Auto | Packing::Stream => 0,
        };
        let heads = heads.saturating_add(windows.saturating_mul(HEAD as u64));
        (tokens / stride).saturating_add(heads).min(tokens)
    }

    /// The assignment of the next token, if it is used.
    fn place(&mut self, token: usize) -> Option<Place> {
        let length = self.layout.length();
        let (window, position) = (token / length, token % length);
        let counts = self.layout.counts(token);
        let place = |round, unit, head| Some(Place { token, round, unit, head, counts });
        match &self.schedule {
            Schedule::Windows { ranks, until } => {
                place(until.iter().position(|&n| ranks[window] < n)?, window, false)
            }
            Schedule::Tokens { stride, rounds, units_per_window } => {
                if window != self.window {
                    (self.window, self.tails) = (window, 0);
                }
                if !counts {
                    return None;
                }
                if self.layout.place(token) < HEAD {
                    return place(0, window * units_per_window, true);
                }
                let tail = self.tails;
                self.tails += 1;
                let round = (0..*rounds).find(|r| tail.is_multiple_of(stride >> r))?;
                let part = (position - HEAD) * units_per_window / (length - HEAD).max(1);
                place(round, window * units_per_window + part, false)
            }
        }
    }

    /// The number of counted tokens that had a row, whether or not the sample kept them.
    pub(super) fn counted(&self) -> usize {
        self.counted
    }

    pub(super) fn rounds(&self) -> usize {
        match &self.schedule {
            Schedule::Windows { until, .. } => until.len(),
            Schedule::Tokens { rounds, .. } => *rounds,
        }
    }

    pub(super) fn units(&self) -> usize {
        match &self.schedule {
            Schedule::Windows { .. } => self.layout.windows(),
            Schedule::Tokens { units_per_window, .. } => self.layout.windows() * units_per_window,
        }
    }

    /// The rows of a round, as positions in the sample.
    pub(super) fn round(&self, round: usize) -> Vec<usize> {
        (0..self.places.len()).filter(|&row| self.places[row].round == round).collect()
    }

    /// The values of these rows, and the places of their tokens.
    pub(super) fn rows(&self, rows: &[usize]) -> Result<(Vec<f32>, Vec<Place>)> {
        let mut values = allocate::room(rows.len() * self.channels, "the inputs of a round")?;
        rows.iter().try_for_each(|&row| self.rows.copy_row(row, self.channels, &mut values))?;
        Ok((values, rows.iter().map(|&row| self.places[row]).collect()))
    }

    /// Returns how many tokens of `token_bytes` each may be compared at a time: a multiple of `piece` that fits into
    /// the memory of a round, but at least one piece; all tokens if the rows are in memory.
    pub(super) fn tokens_at_a_time(&self, token_bytes: u64, piece: usize) -> usize {
        let Some(bytes) = self.round_bytes else { return usize::MAX };
        let pieces = bytes / token_bytes.saturating_mul(piece as u64).max(1);
        usize::try_from(pieces).unwrap_or(usize::MAX).max(1).saturating_mul(piece.max(1))
    }
}

impl Statistic for SearchSample {
    fn take(&mut self, rows: &InputRows<'_>) -> Result<()> {
        self.counted += rows.count();
        for (token, row) in rows.all() {
            if let Some(place) = self.place(token) {
                self.rows.extend(row)?;
                self.places.push(place);
            }
        }
        Ok(())
    }
}

pub(super) const PLACE_BYTES: u64 = size_of::<Place>() as u64;

/// The widths of the values in a race: the input, the outputs of all consumers together, the input of the watched
/// linear and the watched output.
#[derive(Debug, Clone, Copy)]
pub(super) struct RaceShape {
    pub(super) k: usize,
    pub(super) outputs: usize,
    pub(super) read: usize,
    pub(super) inspected: usize,
}

impl RaceShape {
    /// The memory in bytes of a token while candidates are compared on it: its row, the row's copy in the prepared
    /// batch, and values of the float module.
    pub(super) fn token_bytes(self, one_consumer: bool, differences: bool) -> u64 {
        let Self { k, outputs, read, inspected } = self;
        let kept = match (differences, one_consumer) {
            (true, true) => 2 * k,
            (true, false) => 2 * k + 2 * outputs + 4 * read,
            (false, _) => 4 * k + 4 * inspected,
        };
        (4 * k + kept) as u64
    }
}

impl Schedule {
    fn windows(windows: usize) -> Self {
        // Bit-reversed counting, so that any prefix of the order spreads over the batch.
        let bits = windows.next_power_of_two().trailing_zeros();
        let reversed = |i: usize| if bits == 0 { 0 } else { i.reverse_bits() >> (usize::BITS - bits) };
        let mut ranks = vec![0; windows];
        let order = (0..windows.next_power_of_two()).map(reversed).filter(|w| *w < windows);
        for (rank, window) in order.enumerate() {
            ranks[window] = rank;
        }
        let max = windows.div_ceil(TOKENS_PER_SAMPLE).max(MIN_WINDOWS).min(windows);
        let first = if windows <= MIN_WINDOWS { windows } else { FIRST_WINDOWS.max(windows / 16) };
        let mut until = vec![first.min(max)];
        while let Some(&last) = until.last().filter(|l| **l < max) {
            until.push((2 * last).min(max));
        }
        Self::Windows { ranks, until }
    }

    fn tokens(layout: &BatchLayout, of_tokens: f64) -> Self {
        let (windows, length) = (layout.windows(), layout.length());
        let tokens = (layout.counted() as f64 * of_tokens) as usize;
        let power = |wanted: usize| (tokens / wanted.max(1)).max(1).min(length.max(1));
        let floor_power = |n: usize| 1_usize << n.ilog2();
        let last = floor_power(power((tokens / TOKENS_PER_SAMPLE).max(MIN_TOKENS)));
        let stride = floor_power(power(FIRST_TOKENS)).max(last);
        let rounds = (stride / last).ilog2() as usize + 1;
        let units_per_window = UNITS.div_ceil(windows.max(1)).min(length.saturating_sub(HEAD).max(1));
        Self::Tokens { stride, rounds, units_per_window }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::TokenRows;

    fn sample(layout: BatchLayout, mixes_tokens: bool) -> SearchSample {
        let tokens = layout.tokens();
        let mut sample = SearchSample::new(layout.clone(), 1, mixes_tokens, false, 1.0, None).unwrap();
        let values = vec![1.0; tokens];
        sample.take(&InputRows::new(&values, 1, TokenRows::range(0, tokens), &layout).unwrap()).unwrap();
        sample
    }

    fn rounds(sample: &SearchSample) -> Vec<Vec<usize>> {
        let mut rounds: Vec<Vec<usize>> = Vec::new();
        for place in &sample.places {
            rounds.resize(rounds.len().max(place.round + 1), Vec::new());
            rounds[place.round].push(place.token);
        }
        rounds
    }

    fn batch(samples: usize, length: usize, packing: Packing) -> Sampling {
        Sampling { samples, length, packing, ..Sampling::default() }
    }

    #[test]
    fn tokens_double_up_to_a_quarter() {
        let rounds = rounds(&sample(BatchLayout::plain(32, 512), false));
        let counts: Vec<usize> = rounds.iter().map(Vec::len).collect();
        // The first round also contains the heads.
        assert_eq!(counts, [1024 + 128, 1024, 2048 - 32]);
        let max = SearchSample::max_tokens(batch(32, 512, Packing::Stream), false) as usize;
        assert!(counts.iter().sum::<usize>().abs_diff(max) < 64);
        assert_eq!(rounds[0][..6], [0, 1, 2, 3, 4, 20]);
    }

    /// The chosen tokens do not depend on the pieces in which rows arrive.
    #[test]
    fn rows_race_for_their_own_tokens() {
        use crate::calibrate::TokenUse::{Context, Counted};
        let (windows, length) = (32, 512);
        let uses: Vec<_> =
            (0..windows * length).map(|t| if t % 5 == 0 { Context } else { Counted }).collect();
        let layout = BatchLayout::new(windows, length, None, Some(&uses));
        let all: Vec<u32> = (0..(windows * length) as u32).collect();
        let some: Vec<u32> = all.iter().copied().filter(|t| t % 7 < 3).collect();
        for (mixes, tokens) in [(false, &all), (true, &all), (false, &some)] {
            let taken = |pieces: Vec<&[u32]>, ranges: bool| {
                let mut sample = SearchSample::new(layout.clone(), 1, mixes, false, 1.0, None).unwrap();
                for piece in pieces {
                    for part in
                        if ranges { piece.chunk_by(|a, b| a + 1 == *b).collect() } else { vec![piece] }
                    {
                        let values: Vec<f32> = part.iter().map(|t| *t as f32).collect();
                        let tokens = match ranges {
                            true => TokenRows::range(part[0] as usize, part.len()),
                            false => TokenRows::indices(part),
                        };
                        sample.take(&InputRows::new(&values, 1, tokens, &layout).unwrap()).unwrap();
                    }
                }
                let rows: Vec<f32> = sample.rows.to_vec().unwrap();
                assert!(rows.iter().zip(&sample.places).all(|(row, place)| *row as usize == place.token));
                (sample.places, rows)
            };
            let whole = taken(vec![tokens], false);
            assert_eq!(taken(tokens.chunks(1000).collect(), false), whole);
            assert_eq!(taken(tokens.chunks(777).collect(), true), whole);
            assert!(
                mixes || whole.0.iter().all(|p| p.counts && tokens.binary_search(&(p.token as u32)).is_ok())
            );
            assert!(whole.0.len() > 500 && whole.0.len() < tokens.len());
        }
    }

    #[test]
    fn small_batches_are_used_whole() {
        for (windows, length) in [(1, 2), (2, 128), (8, 512), (3, 1000), (1, 1), (700, 3)] {
            let all: usize =
                rounds(&sample(BatchLayout::plain(windows, length), false)).iter().map(Vec::len).sum();
            assert_eq!(all, windows * length, "{windows} × {length}");
        }
        let whole = sample(BatchLayout::plain(5, 10), true);
        assert_eq!(rounds(&whole).iter().map(Vec::len).sum::<usize>(), 50);
    }

    #[test]
    fn windows_spread_over_the_batch() {
        let spread = sample(BatchLayout::plain(32, 1), true);
        let Schedule::Windows { until, .. } = &spread.schedule else { panic!() };
        assert_eq!(until, &[4, 8]);
        assert_eq!(rounds(&spread), [vec![0, 8, 16, 24], vec![4, 12, 20, 28]]);
        let taken = rounds(&sample(BatchLayout::plain(13, 13), true));
        assert_eq!(taken.concat().len(), 8 * 13);
    }

    #[test]
    fn masked_tokens_do_not_race() {
        use crate::calibrate::TokenUse::{Context, Counted};
        let (windows, length) = (64, 512);
        let uses: Vec<_> =
            (0..windows * length).map(|t| if t % 128 < 64 { Context } else { Counted }).collect();
        let starts: Vec<u32> = (0..windows * length).map(|t| (t % length / 96 * 96) as u32).collect();
        let layout = BatchLayout::new(windows, length, Some(&starts), Some(&uses));
        let tokens = sample(layout.clone(), false);
        assert!(tokens.places.iter().all(|p| p.counts && layout.counts(p.token)));
        let heads = (0..layout.tokens()).filter(|&t| layout.counts(t) && layout.place(t) < HEAD).count();
        assert_eq!(tokens.places.iter().filter(|p| p.head).count(), heads);
        let quarter = layout.counted() / 4;
        assert!(
            (quarter..quarter + heads + windows).contains(&tokens.places.len()),
            "{}",
            tokens.places.len()
        );
        let max = SearchSample::max_tokens(batch(windows, length, Packing::Documents), false);
        assert!(tokens.places.len() as u64 <= max);
        assert!(tokens.places.iter().all(|p| p.unit < tokens.units()));
        // Attention also needs the preceding tokens.
        let whole = sample(layout, true);
        assert_eq!(whole.places.iter().filter(|p| p.counts).count(), whole.places.len() / 2);
    }
}
