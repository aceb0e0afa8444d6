//! Counters of a launch: instructions, memory traffic and passes through shared memory.

use std::collections::BTreeMap;

use crate::memory::Memory;
use crate::operation::Kernel;

/// Traffic in one direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes that lanes accessed; a byte counts each time it is accessed.
    pub bytes_asked: u64,
    /// 32-byte sectors, counted once per warp instruction: the requests to the caches.
    pub sectors: u64,
    /// Distinct bytes over the whole launch.
    pub unique_bytes: u64,
    /// Distinct 32-byte sectors over the whole launch. Times 32, this is the minimum DRAM traffic in bytes.
    pub unique_sectors: u64,
}

/// Traffic of a buffer in both directions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BufferTraffic {
    /// Reads, including those of asynchronous copies and atomics.
    pub read: Traffic,
    /// Writes, including those of atomics.
    pub written: Traffic,
}

/// Wavefronts of shared memory: passes through its banks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Wavefronts {
    /// The number of wavefronts for the actual addresses.
    pub taken: u64,
    /// The number of wavefronts without bank conflicts.
    pub ideal: u64,
}

/// Counters of a launch. An instruction counts once for all lanes of a warp that reach it together, even if its guard
/// is false in all of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counters {
    /// Number of warp instructions.
    pub instructions: u64,
    /// Warp instructions by opcode with its modifiers.
    pub by_opcode: BTreeMap<String, u64>,
    /// Warp instructions by line of the PTX text, from 1.
    pub by_line: BTreeMap<u32, u64>,
    /// Warp instructions by file number and line of the last `.loc`, if the text has any.
    pub by_source: BTreeMap<(u32, u32), u64>,
    /// Traffic by name of the buffer. The variables of a module are counted as `(module)`.
    pub buffers: BTreeMap<String, BufferTraffic>,
    /// Loads from shared memory, including `ldmatrix` and atomics.
    pub shared_reads: Wavefronts,
    /// Stores to shared memory, including `stmatrix`, atomics and asynchronous copies.
    pub shared_writes: Wavefronts,
    /// Loads and stores by line of the PTX text.
    pub shared_by_line: BTreeMap<u32, Wavefronts>,
    /// Number of completed barriers.
    pub barriers: u64,
    /// Number of executed blocks.
    pub blocks: u64,
}

impl Counters {
    /// The number of instructions whose opcode begins with `prefix`, such as `mma` or `ld.global`.
    pub fn opcode(&self, prefix: &str) -> u64 {
        self.by_opcode.iter().filter(|(name, _)| name.starts_with(prefix)).map(|(_, count)| count).sum()
    }
}

#[derive(Default)]
pub(crate) struct Tally {
    pub executed: Vec<u64>,
    pub reads: Vec<Wavefronts>,
    pub writes: Vec<Wavefronts>,
    pub traffic: Vec<[(u64, u64); 2]>,
    pub barriers: u64,
    pub blocks: u64,
    pub total: u64,
}

impl Tally {
    pub fn new(instructions: usize) -> Self {
        let none = vec![Wavefronts::default(); instructions];
        Self { executed: vec![0; instructions], reads: none.clone(), writes: none, ..Self::default() }
    }

    /// `touched` holds `(buffer, sector)` in any order, `lanes` the `(buffer, address)` of each lane with an access.
    pub fn traffic(
        &mut self,
        written: bool,
        bytes: usize,
        touched: &mut Vec<(usize, u64)>,
        lanes: &[(usize, u64)],
    ) {
        for (buffer, _) in lanes {
            if self.traffic.len() <= *buffer {
                self.traffic.resize(buffer + 1, [(0, 0); 2]);
            }
            self.traffic[*buffer][usize::from(written)].0 += bytes as u64;
        }
        touched.sort_unstable();
        touched.dedup();
        for (buffer, _) in touched.iter() {
            self.traffic[*buffer][usize::from(written)].1 += 1;
        }
    }

    pub fn finish(&self, kernel: &Kernel, memory: &Memory) -> Counters {
        let mut counters = Counters {
            instructions: self.total,
            barriers: self.barriers,
            blocks: self.blocks,
            ..Counters::default()
        };
        for (i, instruction) in kernel.instructions.iter().enumerate() {
            let count = self.executed[i];
            if count == 0 {
                continue;
            }
            *counters.by_opcode.entry(kernel.opcodes[instruction.opcode].clone()).or_default() += count;
            *counters.by_line.entry(instruction.line).or_default() += count;
            if instruction.source.1 != 0 {
                *counters.by_source.entry(instruction.source).or_default() += count;
            }
            for (one, sum) in
                [(self.reads[i], &mut counters.shared_reads), (self.writes[i], &mut counters.shared_writes)]
            {
                sum.taken += one.taken;
                sum.ideal += one.ideal;
                if one.taken > 0 {
                    let line = counters.shared_by_line.entry(instruction.line).or_default();
                    line.taken += one.taken;
                    line.ideal += one.ideal;
                }
            }
        }
        for (i, (name, touched)) in memory.touched().into_iter().enumerate() {
            let [read, written] = self.traffic.get(i).copied().unwrap_or_default();
            let buffer = counters.buffers.entry(name).or_default();
            for (to, asked, bytes, sectors) in [
                (&mut buffer.read, read, touched.read_bytes, touched.read_sectors),
                (&mut buffer.written, written, touched.written_bytes, touched.written_sectors),
            ] {
                to.bytes_asked += asked.0;
                to.sectors += asked.1;
                to.unique_bytes += bytes;
                to.unique_sectors += sectors;
            }
        }
        counters
    }
}
