//! A block's shared memory: bytes, who touched them and when, copies in flight, and bank conflicts.
//!
//! Order between warps comes from barriers only. Every access carries the number of barriers that the
//! block had completed; `seen[w][u]` is the number up to which warp `w` may count on warp `u`'s accesses.

use crate::error::FaultKind;
use crate::memory::Wrong;
use crate::types::LANES;

/// Banks of shared memory, each 4 bytes wide.
const BANKS: usize = 32;
/// A byte no lane of a copy is responsible for.
const NO_LANE: u8 = u8::MAX;

/// What is known of a byte.
#[derive(Debug, Clone, Copy, Default)]
struct Trace {
    /// Barriers completed before the last write, plus one; 0: never written.
    written: u32,
    /// The same of the last reads that are not ordered among themselves.
    read: u32,
    /// The warps of those reads.
    readers: u32,
    /// The warp barriers its warp had passed when its copy landed.
    landed: u32,
    /// The last writer.
    writer: u8,
    /// The lane whose copy landed here.
    lane: u8,
    /// A copy is on its way.
    in_flight: bool,
}

/// Who asks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Actor {
    pub warp: usize,
    pub lane: usize,
    /// Warp barriers that the warp has passed.
    pub warp_barriers: u32,
}

/// Shared memory of the block that runs.
pub(crate) struct Shared {
    bytes: Vec<u8>,
    traces: Vec<Trace>,
    /// Barriers completed.
    pub epoch: u32,
    /// See the module's words.
    seen: Vec<Vec<u32>>,
}

impl Shared {
    pub fn new(bytes: usize, warps: usize) -> Self {
        Self {
            bytes: vec![0; bytes],
            traces: vec![Trace { lane: NO_LANE, ..Trace::default() }; bytes],
            epoch: 1,
            seen: vec![vec![0; warps]; warps],
        }
    }

    /// The next block finds nothing written.
    pub fn clear(&mut self) {
        self.bytes.fill(0);
        self.traces.fill(Trace { lane: NO_LANE, ..Trace::default() });
        self.epoch = 1;
        self.seen.iter_mut().for_each(|row| row.fill(0));
    }

    /// A warp comes to a barrier: gives the time up to which others may then count on its accesses.
    ///
    /// One that does not wait goes on at a later time.
    pub fn arrive(&mut self, waits: bool) -> u32 {
        let time = self.epoch + 1;
        self.epoch += u32::from(!waits);
        time
    }

    /// These met at a barrier: the warp, its time of [`arrive`](Self::arrive), and whether it waited.
    pub fn barrier(&mut self, met: &[(usize, u32, bool)]) {
        self.epoch += 1;
        let mut all = vec![0; self.seen.len()];
        for (w, time, waited) in met {
            for (all, seen) in all.iter_mut().zip(&self.seen[*w]) {
                *all = (*all).max(*seen);
            }
            // Who waited did nothing since it came. Others' barriers may have moved the time on meanwhile, and a byte's
            // readers share the time of the last.
            all[*w] = all[*w].max(if *waited { self.epoch } else { *time });
        }
        for (w, ..) in met.iter().filter(|(.., waited)| *waited) {
            self.seen[*w].copy_from_slice(&all);
        }
    }

    fn wrong(&self, kind: FaultKind, offset: usize, detail: String) -> Wrong {
        Wrong { kind, buffer: Some("shared".to_owned()), offset: offset as u64, detail }
    }

    fn locate(&self, address: u64, bytes: usize) -> Result<usize, Wrong> {
        let offset = address as usize;
        if !address.is_multiple_of(bytes.next_power_of_two() as u64) {
            return Err(self.wrong(FaultKind::Misaligned, offset, format!("{bytes} bytes")));
        }
        if address.saturating_add(bytes as u64) > self.bytes.len() as u64 {
            let detail = format!("{bytes} bytes, the block has {}", self.bytes.len());
            return Err(self.wrong(FaultKind::OutOfBounds, offset, detail));
        }
        Ok(offset)
    }

    /// Whether the accesses of `other` at `time` come before what `warp` does now.
    fn ordered(&self, warp: usize, other: usize, time: u32) -> bool {
        warp == other || time < self.seen[warp][other]
    }

    /// Reads `out.len()` bytes.
    pub fn read(&mut self, address: u64, out: &mut [u8], who: Actor) -> Result<(), Wrong> {
        let start = self.locate(address, out.len())?;
        let range = start..start + out.len();
        let (own, epoch) = (1u32 << who.warp, self.epoch);
        let seen = &self.seen[who.warp];
        // Nearly every byte is an ordinary one: written before, by nobody's copy, and read by this warp alone.
        let mut plain = true;
        for trace in &mut self.traces[range.clone()] {
            let writer = usize::from(trace.writer);
            let ordered = writer == who.warp || seen.get(writer).is_some_and(|seen| trace.written < *seen);
            let marked = trace.in_flight || trace.lane < NO_LANE - 1;
            if trace.written == 0 || !ordered || marked || trace.readers & !own != 0 {
                plain = false;
                break;
            }
            trace.readers = own;
            trace.read = epoch;
        }
        if !plain {
            for i in range.clone() {
                self.read_byte(i, out.len(), who)?;
            }
        }
        out.copy_from_slice(&self.bytes[range]);
        Ok(())
    }

    fn read_byte(&mut self, i: usize, bytes: usize, who: Actor) -> Result<(), Wrong> {
        let trace = self.traces[i];
        if trace.in_flight {
            let detail = format!("warp {} lane {} copies there", trace.writer, trace.lane);
            return Err(self.wrong(FaultKind::InFlight, i, detail));
        }
        if trace.written == 0 {
            return Err(self.wrong(FaultKind::Uninitialised, i, format!("{bytes} bytes")));
        }
        let writer = usize::from(trace.writer);
        if !self.ordered(who.warp, writer, trace.written) {
            return Err(self.wrong(FaultKind::SharedRace, i, format!("warp {writer} wrote it")));
        }
        let own_copy = trace.lane >= NO_LANE - 1 || usize::from(trace.lane) == who.lane;
        if writer == who.warp
            && !own_copy
            && trace.landed >= who.warp_barriers
            && trace.written >= self.seen[writer][writer]
        {
            return Err(self.wrong(FaultKind::NotVisible, i, format!("lane {} copied it", trace.lane)));
        }
        let mut others = trace.readers & !(1 << who.warp);
        while others != 0 && self.ordered(who.warp, others.trailing_zeros() as usize, trace.read) {
            others &= others - 1;
        }
        let trace = &mut self.traces[i];
        trace.readers = if others == 0 { 1 << who.warp } else { trace.readers | 1 << who.warp };
        trace.read = self.epoch;
        Ok(())
    }

    fn check_write(&self, i: usize, who: Actor) -> Result<(), Wrong> {
        let trace = &self.traces[i];
        if trace.in_flight {
            let detail = format!("warp {} lane {} copies there", trace.writer, trace.lane);
            return Err(self.wrong(FaultKind::InFlight, i, detail));
        }
        let writer = usize::from(trace.writer);
        if trace.written != 0 && !self.ordered(who.warp, writer, trace.written) {
            return Err(self.wrong(FaultKind::SharedRace, i, format!("warp {writer} wrote it")));
        }
        if trace.readers & !(1 << who.warp) != 0 {
            for reader in 0..self.seen.len() {
                if trace.readers >> reader & 1 != 0 && !self.ordered(who.warp, reader, trace.read) {
                    return Err(self.wrong(FaultKind::SharedRace, i, format!("warp {reader} read it")));
                }
            }
        }
        Ok(())
    }

    /// Writes.
    pub fn store(&mut self, address: u64, bytes: &[u8], who: Actor) -> Result<(), Wrong> {
        let start = self.locate(address, bytes.len())?;
        for i in start..start + bytes.len() {
            self.check_write(i, who)?;
            let writer = who.warp as u8;
            self.traces[i] = Trace { written: self.epoch, writer, lane: NO_LANE, ..Trace::default() };
        }
        self.bytes[start..start + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    /// An atomic's read: other warps' atomics do not race with it, so its write is not remembered as one.
    pub fn atomic(&mut self, address: u64, old: &mut [u8], who: Actor) -> Result<(), Wrong> {
        let start = self.locate(address, old.len())?;
        for i in start..start + old.len() {
            let trace = self.traces[i];
            if trace.in_flight || trace.written == 0 {
                return self.read(address, old, who);
            }
            // A lane of its own marks bytes that only atomics wrote since the last ordered write.
            let atomics = trace.lane == NO_LANE - 1;
            if !atomics && !self.ordered(who.warp, usize::from(trace.writer), trace.written) {
                let detail = format!("warp {} wrote it", trace.writer);
                return Err(self.wrong(FaultKind::SharedRace, i, detail));
            }
            let (written, writer) = (self.epoch, who.warp as u8);
            self.traces[i] = Trace { written, writer, lane: NO_LANE - 1, readers: 0, ..trace };
        }
        old.copy_from_slice(&self.bytes[start..start + old.len()]);
        Ok(())
    }

    /// The new value of an atomic, whose place [`atomic`](Self::atomic) has checked.
    pub fn atomic_store(&mut self, address: u64, new: &[u8]) {
        let start = address as usize;
        if let Some(target) = self.bytes.get_mut(start..start + new.len()) {
            target.copy_from_slice(new);
        }
    }

    /// A copy sets out: its bytes are nobody's until it lands.
    pub fn set_out(&mut self, address: u64, bytes: usize, who: Actor) -> Result<(), Wrong> {
        let start = self.locate(address, bytes)?;
        for i in start..start + bytes {
            self.check_write(i, who)?;
            let (written, writer, lane) = (self.epoch, who.warp as u8, who.lane as u8);
            self.traces[i] = Trace { written, writer, lane, in_flight: true, ..Trace::default() };
        }
        Ok(())
    }

    /// A copy lands: its thread waited for it.
    pub fn land(&mut self, address: u64, bytes: &[u8], who: Actor) {
        let start = address as usize;
        self.bytes[start..start + bytes.len()].copy_from_slice(bytes);
        for trace in &mut self.traces[start..start + bytes.len()] {
            trace.in_flight = false;
            trace.written = self.epoch;
            trace.landed = who.warp_barriers;
        }
    }
}

/// Wavefronts of an access, and the fewest for its distinct words.
///
/// Lanes go 32 at once with up to 4 bytes each, 16 with 8 bytes, 8 with 16 bytes (a group is one pass);
/// a pass needs as many wavefronts as the busiest bank has distinct words. That a device may join passes
/// whose lanes read the same words is not modelled.
pub(crate) fn wavefronts(addresses: &[Option<u64>; LANES], bytes: usize) -> (u64, u64) {
    let group = match bytes {
        0..=4 => 32,
        5..=8 => 16,
        _ => 8,
    };
    let (mut taken, mut ideal) = (0, 0);
    for lanes in addresses.chunks(group) {
        // Most banks have one word, which is remembered apart from all further ones.
        let mut first = [u64::MAX; BANKS];
        let mut busy = [0u64; BANKS];
        let mut further = Vec::new();
        let mut distinct = 0u64;
        for address in lanes.iter().flatten() {
            for word in address / 4..(address + bytes as u64).div_ceil(4) {
                let bank = (word % BANKS as u64) as usize;
                if first[bank] == u64::MAX {
                    first[bank] = word;
                } else if first[bank] == word || further.contains(&word) {
                    continue;
                } else {
                    further.push(word);
                }
                busy[bank] += 1;
                distinct += 1;
            }
        }
        taken += busy.iter().max().copied().unwrap_or(0);
        ideal += distinct.div_ceil(BANKS as u64);
    }
    (taken, ideal)
}
