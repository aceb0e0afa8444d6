//! Segments of a window, such as documents.

/// The start of each position's segment, for the windows of a batch. Attention stays inside a segment, and positions
/// are counted from its start.
#[derive(Debug, Clone, Copy, Default)]
pub struct Segments<'a> {
    /// `[batch, positions]`, each relative to the start of its window.
    starts: Option<&'a [u32]>,
}

impl<'a> Segments<'a> {
    /// Creates one segment per window.
    pub fn whole() -> Self {
        Self { starts: None }
    }

    /// Creates segments from the start of each position's segment within its window: `[batch, positions]`, never beyond
    /// the position itself, and constant throughout a segment.
    pub fn new(starts: &'a [u32]) -> Self {
        Self { starts: Some(starts) }
    }

    /// Returns whether every window is one segment.
    pub fn is_whole(self) -> bool {
        self.starts.is_none()
    }

    /// Returns whether the segments are valid for `batch` windows of `positions` positions.
    pub(crate) fn fit(self, batch: usize, positions: usize) -> bool {
        let Some(starts) = self.starts else { return true };
        let window = |starts: &[u32]| {
            let continues = |i: usize| i > 0 && starts[i] == starts[i - 1];
            (0..positions).all(|i| starts[i] as usize == i || continues(i))
        };
        starts.len() == batch * positions && starts.chunks_exact(positions.max(1)).all(window)
    }

    pub(super) fn starts_from(self, row: usize) -> Option<&'a [u32]> {
        self.starts.and_then(|s| s.get(row..))
    }

    /// Returns the position of every row in its segment, `[batch · positions]`; `None` if every window is one segment.
    pub(super) fn positions(self, positions: usize) -> Option<Vec<u32>> {
        let place = |(row, start): (usize, &u32)| (row % positions.max(1)) as u32 - start;
        self.starts.map(|s| s.iter().enumerate().map(place).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_start_again_in_every_segment() {
        let starts = [0, 0, 2, 3, 3, 0, 0, 0, 0, 0];
        let segments = Segments::new(&starts);
        assert!(segments.fit(2, 5) && !segments.fit(2, 4) && !segments.fit(1, 10));
        assert_eq!(segments.positions(5).unwrap(), [0, 1, 0, 0, 1, 0, 1, 2, 3, 4]);
        assert!(Segments::whole().fit(3, 3) && Segments::whole().positions(3).is_none());
        assert!(!Segments::new(&[0, 1, 0]).fit(1, 3), "a segment cannot be resumed");
    }
}
