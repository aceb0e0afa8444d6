//! The smallest and largest value of every channel of a linear's input, from which SmoothQuant and the grids of static
//! activations are computed.

/// The minimum and maximum of every channel over tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct ChannelRanges {
    lowest: Vec<f32>,
    highest: Vec<f32>,
    has_nan: bool,
}

impl ChannelRanges {
    /// The ranges of an input with this many channels, before any token.
    pub fn new(channels: usize) -> Self {
        let (lowest, highest) = (vec![f32::INFINITY; channels], vec![f32::NEG_INFINITY; channels]);
        Self { lowest, highest, has_nan: false }
    }

    /// The number of channels of the input.
    pub fn channels(&self) -> usize {
        self.lowest.len()
    }

    /// Adds rows `[tokens, channels]`, in any order.
    pub fn add(&mut self, x: &[f32]) {
        for row in x.chunks_exact(self.lowest.len().max(1)) {
            for ((low, high), v) in self.lowest.iter_mut().zip(&mut self.highest).zip(row) {
                // Comparisons skip NaN.
                *low = if *v < *low { *v } else { *low };
                *high = if *v > *high { *v } else { *high };
            }
            self.has_nan |= row.iter().any(|v| v.is_nan());
        }
    }

    /// Whether no value was NaN or infinite.
    pub fn is_finite(&self) -> bool {
        let finite = |v: &f32| v.abs() < f32::INFINITY;
        let seen = |(low, high): (&f32, &f32)| low > high || (finite(low) && finite(high));
        !self.has_nan && self.lowest.iter().zip(&self.highest).all(seen)
    }

    /// `max |x|` of every channel; 0 if no token was seen.
    pub fn maxima(&self) -> Vec<f32> {
        self.lowest.iter().zip(&self.highest).map(|(low, high)| (-low).max(*high).max(0.0)).collect()
    }

    /// Reorders the channels: new channel `i` is old channel `order[i]`.
    pub fn reorder(&mut self, order: &[u32]) {
        for ends in [&mut self.lowest, &mut self.highest] {
            *ends = order.iter().map(|&from| ends[from as usize]).collect();
        }
    }

    /// Divides the range of every channel by its scale, which must be positive.
    pub fn divide(&mut self, scales: &[f32]) {
        for ends in [&mut self.lowest, &mut self.highest] {
            ends.iter_mut().zip(scales).for_each(|(end, scale)| *end /= scale);
        }
    }

    /// The smallest and largest value over all channels; `[0, 0]` if no token was seen.
    pub fn whole(&self) -> [f32; 2] {
        let mut range = [f32::INFINITY, f32::NEG_INFINITY];
        for (low, high) in self.lowest.iter().zip(&self.highest) {
            range = [range[0].min(*low), range[1].max(*high)];
        }
        if range[0] > range[1] { [0.0, 0.0] } else { range }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_do_not_depend_on_how_rows_arrive() {
        let x: Vec<f32> = (0..60).map(|i| ((i * 37 % 60) as f32 - 20.0) * 0.5).collect();
        let (mut whole, mut parts) = (ChannelRanges::new(3), ChannelRanges::new(3));
        whole.add(&x);
        x.rchunks(6).for_each(|part| parts.add(part));
        assert_eq!(whole, parts);
        let of = |c: usize| x.iter().skip(c).step_by(3).copied();
        for c in 0..3 {
            assert_eq!(whole.maxima()[c], of(c).map(f32::abs).fold(0.0, f32::max));
        }
        assert_eq!(whole.whole(), [-10.0, 19.5]);
        let lowest = (0..3).map(|c| of(c).fold(0.0, f32::min) / [1.0, 2.0, 4.0][c]).fold(0.0, f32::min);
        let maxima = whole.maxima();
        whole.divide(&[1.0, 2.0, 4.0]);
        assert_eq!(whole.whole()[0], lowest);
        whole.reorder(&[2, 0, 1]);
        assert_eq!(whole.maxima(), [maxima[2] / 4.0, maxima[0], maxima[1] / 2.0]);
    }

    #[test]
    fn nan_is_detected() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut ranges = ChannelRanges::new(2);
            ranges.add(&[1.0, 2.0]);
            assert!(ranges.is_finite());
            ranges.add(&[1.0, bad]);
            assert!(!ranges.is_finite(), "{bad}");
        }
        let nothing = ChannelRanges::new(2);
        assert!(nothing.is_finite());
        assert_eq!((nothing.maxima(), nothing.whole()), (vec![0.0, 0.0], [0.0, 0.0]));
    }
}
