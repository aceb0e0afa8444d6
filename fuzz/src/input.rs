//! Converts input bytes to numbers, sizes and floats.

/// Reads the input byte by byte; after its end, pseudo-random bytes seeded by the input follow.
#[derive(Debug)]
pub(crate) struct Input<'a> {
    bytes: &'a [u8],
    state: u64,
}

impl<'a> Input<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        // Every byte of the input affects the seed (FNV-1a).
        let state = bytes
            .iter()
            .fold(0xcbf2_9ce4_8422_2325, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3));
        Self { bytes, state: state | 1 }
    }

    pub(crate) fn byte(&mut self) -> u8 {
        if let Some((&first, rest)) = self.bytes.split_first() {
            self.bytes = rest;
            return first;
        }
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        (self.state >> 32) as u8
    }

    pub(crate) fn flag(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    /// True with probability about `1 / times`.
    pub(crate) fn rarely(&mut self, times: u8) -> bool {
        self.byte() % times == times - 1
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        usize::from(u16::from_le_bytes([self.byte(), self.byte()])) % n.max(1)
    }

    /// From 1 to `max`.
    pub(crate) fn size(&mut self, max: usize) -> usize {
        1 + self.below(max)
    }

    pub(crate) fn word(&mut self) -> usize {
        let wide = self.flag();
        usize::from_le_bytes(std::array::from_fn(|i| if wide || i == 0 { self.byte() } else { 0 }))
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.byte()).collect()
    }

    /// Codes or zero points of `bits` bits.
    pub(crate) fn codes(&mut self, bits: u8, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.byte() >> (8 - bits)).collect()
    }

    /// Arbitrary floats, or only small finite ones.
    pub(crate) fn floats(&mut self, len: usize) -> Vec<f32> {
        let any = self.flag();
        let mut float = || match any {
            true => f32::from_le_bytes(std::array::from_fn(|_| self.byte())),
            false => f32::from(self.byte() as i8) / 32.0,
        };
        (0..len).map(|_| float()).collect()
    }
}
