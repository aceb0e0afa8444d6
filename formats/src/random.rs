//! The random generator behind every seed. It must not change, so that a seed gives the same values in every version.

/// SplitMix64 by Steele, Lea and Flood (OOPSLA 2014), from a seed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SplitMix64(pub u64);

impl SplitMix64 {
    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        let mixed = mix(self.0);
        self.0 = self.0.wrapping_add(INCREMENT);
        mixed
    }

    /// An integer below `bound`, with a bias below `bound / 2⁶⁴`.
    pub fn below(&mut self, bound: usize) -> usize {
        below(self.next_u64(), bound)
    }

    /// `count` distinct integers below `all`, in ascending order; all integers below `all` if there are fewer.
    pub fn choose(&mut self, count: usize, all: usize) -> Vec<usize> {
        let mut indices: Vec<usize> = (0..all).collect();
        for i in 0..count.min(all) {
            let j = i + self.below(indices.len() - i);
            indices.swap(i, j);
        }
        indices.truncate(count);
        indices.sort_unstable();
        indices
    }
}

const INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;

/// The generator's output for this state, for values that are drawn in arbitrary order.
pub fn mix(state: u64) -> u64 {
    let mut z = state.wrapping_add(INCREMENT);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// An integer below `bound` from 64 random bits.
pub fn below(bits: u64, bound: usize) -> usize {
    ((u128::from(bits) * bound as u128) >> 64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generator_is_the_published_one() {
        let mut random = SplitMix64(1_234_567);
        assert_eq!(random.next_u64(), 6_457_827_717_110_365_317);
        assert_eq!(random.next_u64(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn chosen_numbers_are_different_and_ascending() {
        let chosen = SplitMix64(7).choose(40, 100);
        assert!(chosen.len() == 40 && chosen.windows(2).all(|w| w[0] < w[1]) && chosen[39] < 100);
        assert_eq!(SplitMix64(7).choose(9, 5), [0, 1, 2, 3, 4]);
    }
}
