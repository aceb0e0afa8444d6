//! The shared memory of a block: bytes, their last accesses, copies in flight, and bank conflicts.
//!
//! Accesses of different warps are ordered only by barriers. Every access is recorded with the time of the block, which
//! advances when a barrier completes and when a warp arrives at a barrier without waiting. Accesses of warp `u` whose
//! time is below `seen[w][u]` are ordered before the next access of warp `w`.

use crate::error::FaultKind;
use crate::memory::AccessError;
use crate::types::LANES;

/// The number of banks of shared memory, each 4 bytes wide.
const BANKS: usize = 32;
/// The lane of a byte that was not written by a copy.
const NO_LANE: u8 = u8::MAX;

#[derive(Debug, Clone, Copy, Default)]
struct Trace {
    /// The time of the last write; 0 if the byte was never written.
    written: u32,
    /// The time of the last reads; 0 if there were none.
    read: u32,
    /// The warps of those reads.
    readers: u32,
    /// The number of warp barriers that the copying warp had passed when its copy completed.
    landed: u32,
    writer: u8,
    /// The lane whose copy wrote the byte.
    lane: u8,
    /// Whether a copy is in flight.
    in_flight: bool,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Actor {
    pub warp: usize,
    pub lane: usize,
    pub warp_barriers: u32,
}

pub(crate) struct Shared {
    bytes: Vec<u8>,
    traces: Vec<Trace>,
    /// The current time, at least 1.
    pub epoch: u32,
    /// `seen[w][u]`, as described in the module documentation.
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

    pub fn clear(&mut self) {
        self.bytes.fill(0);
        self.traces.fill(Trace { lane: NO_LANE, ..Trace::default() });
        self.epoch = 1;
        self.seen.iter_mut().for_each(|row| row.fill(0));
    }

    /// Returns the time before which others may rely on the accesses of a warp that reaches a barrier. A warp that does
    /// not wait continues at a later time.
    pub fn arrive(&mut self, waits: bool) -> u32 {
        let time = self.epoch + 1;
        self.epoch += u32::from(!waits);
        time
    }

    /// `met` holds each warp with its time from [`arrive`](Self::arrive), and whether it waited.
    pub fn barrier(&mut self, met: &[(usize, u32, bool)]) {
        self.epoch += 1;
        let mut all = vec![0; self.seen.len()];
        for (w, time, waited) in met {
            for (all, seen) in all.iter_mut().zip(&self.seen[*w]) {
                *all = (*all).max(*seen);
            }
            // A warp that waited has accessed nothing since it arrived, but other barriers may have advanced the time.
            all[*w] = all[*w].max(if *waited { self.epoch } else { *time });
        }
        for (w, ..) in met.iter().filter(|(.., waited)| *waited) {
            self.seen[*w].copy_from_slice(&all);
        }
    }

    fn wrong(&self, kind: FaultKind, offset: usize, detail: String) -> AccessError {
        AccessError { kind, buffer: Some("shared".to_owned()), offset: offset as u64, detail }
    }

    fn locate(&self, address: u64, bytes: usize) -> Result<usize, AccessError> {
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

    fn ordered(&self, warp: usize, other: usize, time: u32) -> bool {
        warp == other || time < self.seen[warp][other]
    }

    pub fn read(&mut self, address: u64, out: &mut [u8], who: Actor) -> Result<(), AccessError> {
        let start = self.locate(address, out.len())?;
        let range = start..start + out.len();
        let (own, epoch) = (1u32 << who.warp, self.epoch);
        let seen = &self.seen[who.warp];
        // Fast path: written, not by a copy, and read by this warp only.
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

    fn read_byte(&mut self, i: usize, bytes: usize, who: Actor) -> Result<(), AccessError> {
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

    fn check_write(&self, i: usize, who: Actor) -> Result<(), AccessError> {
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

    pub fn store(&mut self, address: u64, bytes: &[u8], who: Actor) -> Result<(), AccessError> {
        let start = self.locate(address, bytes.len())?;
        for i in start..start + bytes.len() {
            self.check_write(i, who)?;
            let writer = who.warp as u8;
            self.traces[i] = Trace { written: self.epoch, writer, lane: NO_LANE, ..Trace::default() };
        }
        self.bytes[start..start + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    /// Reads the old value of an atomic. Atomics of other warps do not race with it.
    pub fn atomic(&mut self, address: u64, old: &mut [u8], who: Actor) -> Result<(), AccessError> {
        let start = self.locate(address, old.len())?;
        for i in start..start + old.len() {
            let trace = self.traces[i];
            if trace.in_flight || trace.written == 0 {
                return self.read(address, old, who);
            }
            // Bytes that only atomics have written since the last ordered write.
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

    /// Stores the new value of an atomic, after [`atomic`](Self::atomic).
    pub fn atomic_store(&mut self, address: u64, new: &[u8]) {
        let start = address as usize;
        if let Some(target) = self.bytes.get_mut(start..start + new.len()) {
            target.copy_from_slice(new);
        }
    }

    /// The bytes must not be accessed until the copy completes.
    pub fn set_out(&mut self, address: u64, bytes: usize, who: Actor) -> Result<(), AccessError> {
        let start = self.locate(address, bytes)?;
        for i in start..start + bytes {
            self.check_write(i, who)?;
            let (written, writer, lane) = (self.epoch, who.warp as u8, who.lane as u8);
            self.traces[i] = Trace { written, writer, lane, in_flight: true, ..Trace::default() };
        }
        Ok(())
    }

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

/// Returns the number of wavefronts of an access, and the minimum for its distinct words.
///
/// Lanes are processed in passes, with fewer lanes for wider accesses. A pass needs as many wavefronts as the busiest
/// bank has distinct words. Devices may merge passes whose lanes read the same words; this is not modelled.
pub(crate) fn wavefronts(addresses: &[Option<u64>; LANES], bytes: usize) -> (u64, u64) {
    let group = match bytes {
        0..=4 => 32,
        5..=8 => 16,
        _ => 8,
    };
    let (mut taken, mut ideal) = (0, 0);
    for lanes in addresses.chunks(group) {
        // Most banks have only one word.
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
