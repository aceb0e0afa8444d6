//! Runs blocks one after the other: scheduling of warps, barriers, and dispatch of instructions.

use crate::counters::Tally;
use crate::error::{Error, Fault, FaultKind, Result};
use crate::launch::{Launch, Options, WarpOrder};
use crate::memory::{AccessError, Memory};
use crate::operation::{Initial, Instruction, Kernel, Operation, Slot, Vote};
use crate::shared::Shared;
use crate::types::{LANES, low_bits};
use crate::warp::{Group, State, Warp, lanes};

/// Maximum number of faults that are collected if faults do not end the launch.
const MAX_FAULTS: usize = 1000;

pub(crate) enum Next {
    /// Continue with the next instruction.
    On,
    /// These lanes jump to the target; the others continue.
    Jump(u32, usize),
    /// These lanes jump to different targets.
    Scatter(Vec<(u32, usize)>),
    /// These lanes exit.
    End(u32),
    /// Other lanes must reach this instruction first.
    Together,
    /// The warp reached a barrier of the block.
    Barrier,
}

#[derive(Default)]
struct Barrier {
    /// Of each warp that arrived: its index, its time, and whether it waits.
    met: Vec<(usize, u32, bool)>,
    threads: u32,
    expected: u32,
    pc: Option<usize>,
    reduce: Vec<(usize, Slot, u32, Vote)>,
    count: u32,
    any: bool,
    all: bool,
}

/// Xorshift.
pub(crate) struct Random(pub u64);

impl Random {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) as usize % n.max(1)
    }
}

pub(crate) struct Machine<'a> {
    pub kernel: &'a Kernel,
    pub memory: &'a mut Memory,
    pub launch: &'a Launch,
    pub options: &'a Options,
    pub parameters: Vec<u8>,
    pub variables: u64,
    pub shared: Shared,
    pub warps: Vec<Warp>,
    pub tally: Tally,
    pub faults: Vec<Fault>,
    pub block: [u32; 3],
    barriers: Vec<Barrier>,
    random: Random,
    turn: usize,
}

impl<'a> Machine<'a> {
    pub fn new(
        kernel: &'a Kernel,
        memory: &'a mut Memory,
        launch: &'a Launch,
        options: &'a Options,
        parameters: Vec<u8>,
        variables: u64,
    ) -> Self {
        let threads: u32 = launch.block.iter().product();
        let warps = threads.div_ceil(LANES as u32) as usize;
        let shared = Shared::new(kernel.static_shared + launch.dynamic_shared as usize, warps);
        let seed = match options.warp_order {
            WarpOrder::Seeded(seed) => seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            _ => 1,
        };
        Self {
            kernel,
            memory,
            launch,
            options,
            parameters,
            variables,
            shared,
            warps: (0..warps).map(|_| Warp::new(kernel.slots, kernel.local_bytes)).collect(),
            tally: Tally::new(kernel.instructions.len()),
            faults: Vec::new(),
            block: [0; 3],
            barriers: Vec::new(),
            random: Random(seed),
            turn: 0,
        }
    }

    fn begin(&mut self, block: [u32; 3], number: u32) {
        self.block = block;
        self.shared.clear();
        self.memory.order.begin(number, self.warps.len());
        self.barriers.clear();
        self.barriers.resize_with(16, Barrier::default);
        self.turn = 0;
        self.tally.blocks += 1;
        let [nx, ny, nz] = self.launch.block;
        let threads = nx * ny * nz;
        let dynamic = self.launch.dynamic_shared;
        let total = self.kernel.static_shared as u32 + dynamic;
        let warps = self.warps.len();
        for (w, warp) in self.warps.iter_mut().enumerate() {
            let first = (w * LANES) as u32;
            warp.begin(low_bits((threads - first).min(32)) as u32);
            for (slot, initial) in &self.kernel.initial {
                for (lane, value) in warp.registers[*slot as usize].iter_mut().enumerate() {
                    let thread = first + lane as u32;
                    let bit = 1u64 << lane;
                    *value = match *initial {
                        Initial::Constant(bits) => bits,
                        Initial::Thread(0) => u64::from(thread % nx),
                        Initial::Thread(1) => u64::from(thread / nx % ny),
                        Initial::Thread(_) => u64::from(thread / nx / ny),
                        Initial::Threads(axis) => u64::from(self.launch.block[usize::from(axis)]),
                        Initial::Block(axis) => u64::from(block[usize::from(axis)]),
                        Initial::Blocks(axis) => u64::from(self.launch.grid[usize::from(axis)]),
                        Initial::LaneNumber => lane as u64,
                        Initial::WarpNumber => w as u64,
                        Initial::Warps => warps as u64,
                        Initial::LaneMask(0) => bit,
                        Initial::LaneMask(1) => bit - 1,
                        Initial::LaneMask(2) => bit | (bit - 1),
                        Initial::LaneMask(3) => low_bits(32) & !(bit | (bit - 1)),
                        Initial::LaneMask(_) => low_bits(32) & !(bit - 1),
                        Initial::DynamicShared => u64::from(dynamic),
                        Initial::TotalShared => u64::from(total),
                        Initial::Variable(offset) => self.variables.wrapping_add(offset),
                    };
                }
            }
        }
    }

    /// `number` identifies the block when accesses are recorded.
    pub fn run_block(&mut self, block: [u32; 3], number: u32) -> Result<()> {
        self.begin(block, number);
        let mut ready = Vec::new();
        loop {
            ready.clear();
            ready.extend((0..self.warps.len()).filter(|w| self.warps[*w].state == State::Ready));
            if ready.is_empty() {
                let Some(stuck) = self.warps.iter().position(|w| w.state == State::Waits) else {
                    return Ok(());
                };
                let pc = self.warps[stuck].groups.first().map_or(0, |g| g.pc.saturating_sub(1));
                let detail = "the other warps have exited or wait at a different barrier".to_owned();
                return Err(self
                    .fault(stuck, pc, None, Self::plain(FaultKind::BarrierDivergence, detail))
                    .into());
            }
            let warp = match self.options.warp_order {
                WarpOrder::InOrder => ready[0],
                WarpOrder::RoundRobin => {
                    let next = ready.iter().copied().find(|w| *w >= self.turn).unwrap_or(ready[0]);
                    self.turn = next + 1;
                    next
                }
                WarpOrder::Reverse => ready[ready.len() - 1],
                WarpOrder::Seeded(_) => ready[self.random.below(ready.len())],
            };
            self.run_warp(warp)?;
        }
    }

    /// Runs a warp until it reaches a barrier, exits, or yields to other warps.
    fn run_warp(&mut self, w: usize) -> Result<()> {
        let kernel = self.kernel;
        self.memory.order.warp = w;
        let takes_turns = matches!(self.options.warp_order, WarpOrder::RoundRobin | WarpOrder::Seeded(_));
        loop {
            if self.warps[w].groups.is_empty() {
                self.warps[w].state = State::Done;
                return Ok(());
            }
            let Some(index) = self.warps[w].select() else {
                let pc = self.warps[w].groups[0].pc;
                let detail = "some lanes of the mask never reach this instruction".to_owned();
                return Err(self.fault(w, pc, None, Self::plain(FaultKind::WarpDivergence, detail)).into());
            };
            let Group { mut pc, mask, .. } = self.warps[w].groups[index];
            let meets = self.warps[w].groups.get(index + 1).map_or(usize::MAX, |g| g.pc);
            loop {
                let instruction = &kernel.instructions[pc];
                self.tally.executed[pc] += 1;
                self.tally.total += 1;
                if self.tally.total > self.options.max_instructions {
                    let detail = format!("more than {} instructions", self.options.max_instructions);
                    return Err(self.fault(w, pc, None, Self::plain(FaultKind::Runaway, detail)).into());
                }
                let active = match instruction.guard {
                    None => mask,
                    Some((slot, negated)) => mask & self.warps[w].holds(slot, negated),
                };
                let next =
                    if active == 0 { Next::On } else { self.execute(w, pc, active, mask, instruction)? };
                match next {
                    Next::On => pc += 1,
                    Next::Jump(taken, target) if taken == mask => pc = target,
                    Next::Jump(taken, target) => {
                        self.warps[w].groups[index] = Group { pc: pc + 1, mask: mask & !taken, waits: false };
                        self.warps[w].groups.push(Group { pc: target, mask: taken, waits: false });
                        break;
                    }
                    Next::Scatter(parts) => {
                        let gone = parts.iter().fold(0, |all, (part, _)| all | part);
                        let groups = &mut self.warps[w].groups;
                        groups[index] = Group { pc: pc + 1, mask: mask & !gone, waits: false };
                        groups.extend(parts.into_iter().map(|(mask, pc)| Group { pc, mask, waits: false }));
                        groups.retain(|g| g.mask != 0);
                        break;
                    }
                    Next::End(ended) => {
                        let warp = &mut self.warps[w];
                        warp.exited |= ended;
                        warp.groups[index] = Group { pc: pc + 1, mask: mask & !ended, waits: false };
                        // Groups that wait for exited lanes must check again.
                        warp.groups.retain(|g| g.mask != 0);
                        warp.groups.iter_mut().for_each(|g| g.waits = false);
                        break;
                    }
                    Next::Together => {
                        self.tally.executed[pc] -= 1;
                        self.tally.total -= 1;
                        self.warps[w].groups[index] = Group { pc, mask, waits: true };
                        break;
                    }
                    Next::Barrier => {
                        self.warps[w].groups[index].pc = pc + 1;
                        return Ok(());
                    }
                }
                if pc >= meets || pc < self.warps[w].groups[index].pc && self.warps[w].groups.len() > 1 {
                    self.warps[w].groups[index].pc = pc;
                    break;
                }
                if takes_turns && instruction.operation.yields() {
                    self.warps[w].groups[index].pc = pc;
                    return Ok(());
                }
            }
        }
    }

    pub fn plain(kind: FaultKind, detail: String) -> AccessError {
        AccessError { kind, buffer: None, offset: 0, detail }
    }

    pub fn fault(&self, warp: usize, pc: usize, lane: Option<usize>, wrong: AccessError) -> Fault {
        let instruction = &self.kernel.instructions[pc];
        Fault {
            kind: wrong.kind,
            kernel: self.kernel.name.clone(),
            line: instruction.line,
            opcode: self.kernel.opcodes[instruction.opcode].clone(),
            block: self.block,
            warp: warp as u32,
            lane: lane.map(|l| l as u32),
            buffer: wrong.buffer,
            offset: wrong.offset,
            detail: wrong.detail,
        }
    }

    /// Returns the fault as an error, or adds it to the report.
    pub fn report(&mut self, warp: usize, pc: usize, lane: Option<usize>, wrong: AccessError) -> Result<()> {
        let fault = self.fault(warp, pc, lane, wrong);
        if self.options.fault_is_error {
            return Err(Error::from(fault));
        }
        if self.faults.len() < MAX_FAULTS {
            self.faults.push(fault);
        }
        Ok(())
    }

    pub fn meet(&mut self, w: usize, pc: usize, active: u32, operation: &Operation) -> Result<Next> {
        let (id, threads, waits) = match operation {
            Operation::Barrier { id, threads, waits } => (*id, *threads, *waits),
            Operation::BarrierReduce { id, .. } => (*id, None, true),
            _ => return Ok(Next::On),
        };
        let warp = &self.warps[w];
        let lane = active.trailing_zeros() as usize;
        if active != warp.all {
            let detail = format!("only lanes {active:#010x} of {:#010x} arrived", warp.all);
            return Err(self.fault(w, pc, None, Self::plain(FaultKind::BarrierDivergence, detail)).into());
        }
        let id = warp.get(id)[lane] as u32 as usize;
        let block: u32 = self.launch.block.iter().product();
        let expected = match threads {
            None => block,
            Some(slot) => warp.get(slot)[lane] as u32,
        };
        if id >= self.barriers.len() {
            let detail = format!("there is no barrier {id}");
            return Err(self.fault(w, pc, None, Self::plain(FaultKind::BarrierDivergence, detail)).into());
        }
        let reduced = match operation {
            Operation::BarrierReduce { d, p, negated, vote, .. } => {
                Some((*d, warp.holds(*p, *negated) & active, *vote))
            }
            _ => None,
        };
        let time = self.shared.arrive(waits);
        self.memory.order.arrive();
        let barrier = &mut self.barriers[id];
        let first = barrier.met.is_empty();
        let same = first || (barrier.expected == expected && (threads.is_some() || barrier.pc == Some(pc)));
        if first {
            barrier.expected = expected;
            barrier.pc = threads.is_none().then_some(pc);
            barrier.all = true;
        }
        barrier.met.push((w, time, waits));
        // With a thread count, whole warps are counted.
        let full = if threads.is_some() { LANES as u32 } else { active.count_ones() };
        barrier.threads += full;
        if let Some((d, holds, vote)) = reduced {
            barrier.reduce.push((w, d, active, vote));
            barrier.count += holds.count_ones();
            barrier.any |= holds != 0;
            barrier.all &= holds == active;
        }
        let complete = barrier.threads >= barrier.expected;
        if !same {
            let detail =
                "another warp uses this barrier elsewhere or for a different number of threads".to_owned();
            return Err(self.fault(w, pc, None, Self::plain(FaultKind::BarrierDivergence, detail)).into());
        }
        if waits {
            self.warps[w].state = State::Waits;
        }
        if complete {
            let barrier = std::mem::take(&mut self.barriers[id]);
            self.tally.barriers += 1;
            self.shared.barrier(&barrier.met);
            self.memory.order.barrier(barrier.met.iter().map(|(w, _, waits)| (*w, *waits)));
            for (warp, _, waited) in &barrier.met {
                if *waited {
                    self.warps[*warp].state = State::Ready;
                }
            }
            for (warp, d, mask, vote) in barrier.reduce {
                let value = match vote {
                    Vote::Ballot | Vote::Uniform => u64::from(barrier.count),
                    Vote::All => u64::from(barrier.all),
                    Vote::Any => u64::from(barrier.any),
                };
                self.warps[warp].set(d, mask, &[value; LANES]);
            }
        }
        Ok(if waits { Next::Barrier } else { Next::On })
    }

    /// If lanes that a warp-wide instruction requires have not reached it, returns the warp's next step.
    pub fn together(&mut self, w: usize, pc: usize, active: u32, mask: Option<Slot>) -> Result<Option<Next>> {
        let warp = &self.warps[w];
        let wanted = match mask {
            Some(slot) => warp.get(slot)[active.trailing_zeros() as usize % LANES] as u32,
            None => warp.all,
        };
        if active & !wanted != 0 {
            let lane = (active & !wanted).trailing_zeros() as usize;
            let detail = format!("the mask {wanted:#010x} does not include it");
            self.report(w, pc, Some(lane), Self::plain(FaultKind::WarpDivergence, detail))?;
            return Ok(None);
        }
        Ok((wanted & warp.live() & !active != 0).then_some(Next::Together))
    }

    fn execute(
        &mut self,
        w: usize,
        pc: usize,
        active: u32,
        mask: u32,
        instruction: &Instruction,
    ) -> Result<Next> {
        let warp = &mut self.warps[w];
        if crate::execute::arithmetic(warp, active, &instruction.operation) {
            return Ok(Next::On);
        }
        match &instruction.operation {
            Operation::Branch { target } => return Ok(Next::Jump(active, *target)),
            Operation::BranchIndex { index, targets } => {
                let mut parts: Vec<(u32, usize)> = Vec::new();
                for lane in lanes(active) {
                    let i = warp.get(*index)[lane] as u32 as usize;
                    let target = targets.get(i).or(targets.last()).copied().unwrap_or(pc + 1);
                    match parts.iter_mut().find(|(_, at)| *at == target) {
                        Some((part, _)) => *part |= 1 << lane,
                        None => parts.push((1 << lane, target)),
                    }
                }
                return Ok(Next::Scatter(parts));
            }
            Operation::Exit => return Ok(Next::End(active)),
            Operation::Trap => {
                return Err(self.fault(w, pc, None, Self::plain(FaultKind::Trap, String::new())).into());
            }
            Operation::Unsupported => {
                let name = self.kernel.opcodes[instruction.opcode].clone();
                let wrong = Self::plain(FaultKind::Unsupported(name), String::new());
                return Err(self.fault(w, pc, None, wrong).into());
            }
            Operation::Barrier { .. } | Operation::BarrierReduce { .. } => {
                return self.meet(w, pc, active, &instruction.operation);
            }
            Operation::Nothing => {}
            Operation::LoadParameter { d, offset, ty, keep } => {
                let bytes = ty.bytes();
                for (i, d) in d.as_slice().iter().enumerate() {
                    let from = &self.parameters[offset + i * bytes..offset + (i + 1) * bytes];
                    let mut all = [0; 8];
                    all[..bytes].copy_from_slice(from);
                    let value = crate::integer::extend(u64::from_le_bytes(all), ty.bits(), ty.is_signed());
                    self.warps[w].set(*d, active, &[value & keep; LANES]);
                }
            }
            _ => {
                if let Some(next) = self.exchange(w, pc, active, mask, &instruction.operation)? {
                    return Ok(next);
                }
                self.access(w, pc, active, &instruction.operation)?;
            }
        }
        Ok(Next::On)
    }
}
