//! A warp: its registers, the positions of its lanes, and its copies in flight.

use crate::types::{LANES, Lanes};

/// Lanes that are at the same instruction.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Group {
    pub pc: usize,
    pub mask: u32,
    /// Whether the group waits for other lanes of the warp.
    pub waits: bool,
}

/// An asynchronous copy in flight.
pub(crate) struct Copy {
    pub lane: usize,
    /// The number of its copy group, counted per lane.
    pub group: u32,
    pub address: u64,
    pub bytes: [u8; 16],
    pub count: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Ready,
    /// The warp has reached a barrier.
    Waits,
    Done,
}

pub(crate) struct Warp {
    pub registers: Vec<Lanes>,
    pub groups: Vec<Group>,
    pub all: u32,
    pub exited: u32,
    pub state: State,
    pub copies: Vec<Copy>,
    pub closed: [u32; LANES],
    pub warp_barriers: u32,
    pub local: Vec<u8>,
}

pub(crate) fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    let mut left = mask;
    std::iter::from_fn(move || {
        let lane = left.trailing_zeros() as usize;
        left &= left.wrapping_sub(1);
        (lane < LANES).then_some(lane)
    })
}

impl Warp {
    pub fn new(slots: usize, local: usize) -> Self {
        Self {
            registers: vec![[0; LANES]; slots],
            groups: Vec::new(),
            all: 0,
            exited: 0,
            state: State::Done,
            copies: Vec::new(),
            closed: [0; LANES],
            warp_barriers: 0,
            local: vec![0; local * LANES],
        }
    }

    /// Starts the warp with these lanes. Registers and local memory are zeroed.
    pub fn begin(&mut self, all: u32) {
        self.groups.clear();
        self.groups.push(Group { pc: 0, mask: all, waits: false });
        self.all = all;
        self.exited = 0;
        self.state = State::Ready;
        self.copies.clear();
        self.closed = [0; LANES];
        self.warp_barriers = 0;
        self.registers.iter_mut().for_each(|r| *r = [0; LANES]);
        self.local.fill(0);
    }

    pub fn live(&self) -> u32 {
        self.all & !self.exited
    }

    /// Merges groups that are at the same instruction, and returns the next one to run: of those that do not wait, the
    /// first in the text.
    pub fn select(&mut self) -> Option<usize> {
        if self.groups.len() == 1 {
            return (!self.groups[0].waits).then_some(0);
        }
        self.groups.sort_unstable_by_key(|g| g.pc);
        let mut kept: Vec<Group> = Vec::with_capacity(self.groups.len());
        for group in &self.groups {
            match kept.last_mut() {
                Some(last) if last.pc == group.pc => {
                    last.mask |= group.mask;
                    // Checks again whether all lanes have arrived.
                    last.waits = last.waits && group.waits;
                }
                _ => kept.push(*group),
            }
        }
        self.groups = kept;
        self.groups.iter().position(|g| !g.waits)
    }

    pub fn holds(&self, slot: u32, negated: bool) -> u32 {
        let mut mask = 0;
        for (lane, value) in self.registers[slot as usize].iter().enumerate() {
            mask |= ((*value & 1) as u32) << lane;
        }
        if negated { !mask } else { mask }
    }

    pub fn set(&mut self, slot: u32, mask: u32, values: &Lanes) {
        let register = &mut self.registers[slot as usize];
        if mask == u32::MAX {
            *register = *values;
        } else {
            for lane in lanes(mask) {
                register[lane] = values[lane];
            }
        }
    }

    pub fn get(&self, slot: u32) -> &Lanes {
        &self.registers[slot as usize]
    }
}
