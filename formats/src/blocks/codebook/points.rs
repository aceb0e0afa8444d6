//! Code books, and their points nearest to any combination of levels.

use std::sync::LazyLock;

use super::tables;

pub(super) static IQ2_XXS: LazyLock<Points> = LazyLock::new(|| Points::new(&tables::IQ2_XXS, 2, 2));
pub(super) static IQ2_XS: LazyLock<Points> = LazyLock::new(|| Points::new(&tables::IQ2_XS, 2, 2));
pub(super) static IQ2_S: LazyLock<Points> = LazyLock::new(|| Points::new(&tables::IQ2_S, 2, 1));
pub(super) static IQ3_XXS: LazyLock<Points> = LazyLock::new(|| Points::new(&tables::IQ3_XXS, 3, 2));
pub(super) static IQ3_S: LazyLock<Points> = LazyLock::new(|| Points::new(&tables::IQ3_S, 3, 3));

/// A code book.
#[derive(Clone, Copy)]
pub(super) struct Book {
    /// The levels of each point, packed.
    pub(super) points: &'static [u16],
    /// Bits per level: 2 or 3.
    bits: usize,
}

impl Book {
    /// Elements per point.
    pub(super) fn elements(self) -> usize {
        if self.bits == 2 { 8 } else { 4 }
    }

    /// The largest level.
    pub(super) fn top(self) -> u8 {
        if self.bits == 2 { 2 } else { 7 }
    }

    /// The level of element `i` of a packed point.
    #[inline(always)]
    pub(super) fn level(self, point: u16, i: usize) -> usize {
        usize::from(point >> (self.bits * i)) & ((1 << self.bits) - 1)
    }

    #[inline(always)]
    pub(super) fn pack(self, levels: &[u8]) -> u16 {
        let bits = self.bits;
        levels.iter().enumerate().fold(0, |point, (i, level)| point | u16::from(*level) << (bits * i))
    }
}

/// A code book with the candidates for every point.
pub(super) struct Points {
    pub(super) book: Book,
    /// By packed point: where its candidates start in `candidates`, and their number.
    places: Vec<(u32, u16)>,
    /// Indices into the book.
    candidates: Vec<u16>,
}

impl Points {
    /// A point in the book has itself as its only candidate. The candidates for any other point are the points of the
    /// book with the `rings` smallest distances, nearest first.
    fn new(points: &'static [u16], bits: usize, rings: usize) -> Self {
        let book = Book { points, bits };
        let (elements, top) = (book.elements(), book.top());
        let mut places = vec![(0, 0); 1 << (bits * elements)];
        let mut candidates = Vec::new();
        let mut levels = vec![0; elements];
        let mut distances = vec![0_u16; points.len()];
        loop {
            let packed = book.pack(&levels);
            for (distance, point) in distances.iter_mut().zip(points) {
                let of = |i: usize| book.level(*point, i).abs_diff(usize::from(levels[i])).pow(2) as u16;
                *distance = (0..elements).map(of).sum();
            }
            let start = candidates.len();
            let mut last = None;
            for _ in 0..rings {
                let further = distances.iter().copied().filter(|d| last.is_none_or(|last| *d > last));
                let Some(ring) = further.min() else { break };
                let on_it = distances.iter().enumerate().filter(|(_, d)| **d == ring);
                candidates.extend(on_it.map(|(index, _)| index as u16));
                if ring == 0 {
                    break;
                }
                last = Some(ring);
            }
            places[usize::from(packed)] = (start as u32, (candidates.len() - start) as u16);
            let Some(i) = levels.iter().position(|level| *level < top) else { break };
            levels[..i].fill(0);
            levels[i] += 1;
        }
        Self { book, places, candidates }
    }

    /// The candidates for levels, which must not exceed [`Book::top`].
    #[inline(always)]
    pub(super) fn candidates(&self, levels: &[u8]) -> &[u16] {
        let (start, count) = self.places[usize::from(self.book.pack(levels))];
        &self.candidates[start as usize..][..usize::from(count)]
    }

    /// The index of these levels, if they are in the book.
    #[inline(always)]
    pub(super) fn index(&self, levels: &[u8]) -> Option<u16> {
        let packed = self.book.pack(levels);
        self.candidates(levels)
            .first()
            .copied()
            .filter(|index| self.book.points[usize::from(*index)] == packed)
    }
}
