#![allow(dead_code, reason = "no test uses all of it")]

use quant_kernels_cpu::Parallel;

/// Runs pieces in reverse order, and reports many threads, so that pieces become small.
pub struct Backwards;

// SAFETY: `for_each` calls each number once, and returns when all calls have returned.
unsafe impl Parallel for Backwards {
    fn threads(&self) -> usize {
        7
    }

    fn for_each(&self, count: usize, piece: &(dyn Fn(usize) + Sync)) {
        (0..count).rev().for_each(piece);
    }
}

pub struct Threads(pub usize);

// SAFETY: `for_each` calls each number once, and returns when all calls have returned.
unsafe impl Parallel for Threads {
    fn threads(&self) -> usize {
        self.0
    }

    fn for_each(&self, count: usize, piece: &(dyn Fn(usize) + Sync)) {
        std::thread::scope(|scope| {
            for t in 0..self.0 {
                scope.spawn(move || (t..count).step_by(self.0).for_each(piece));
            }
        });
    }
}

/// Unwinds after this number of pieces.
pub struct Panics(pub usize);

// SAFETY: `for_each` calls each number at most once, and no call is running when it unwinds.
unsafe impl Parallel for Panics {
    fn threads(&self) -> usize {
        1
    }

    fn for_each(&self, count: usize, piece: &(dyn Fn(usize) + Sync)) {
        (0..count.min(self.0)).for_each(piece);
        panic!("threads that unwind");
    }
}

/// A random number generator with a fixed seed.
pub struct Stream(pub u64);

impl Stream {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// A random value from −1 up to, but excluding, 1.
    pub fn unit(&mut self) -> f32 {
        self.below(1 << 24) as f32 / (1 << 23) as f32 - 1.0
    }

    /// A random value of either sign, scaled by a random power of two from 2⁻⁸ to 2³.
    pub fn float(&mut self) -> f32 {
        let scale = 2.0_f32.powi(self.below(12) as i32 - 8);
        self.unit() * scale
    }
}
