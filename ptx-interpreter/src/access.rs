//! Instructions that access memory, lane by lane, with their checks and counters.

use crate::atomic::combine;
use crate::counters::Wavefronts;
use crate::error::{FaultKind, Result};
use crate::machine::Machine;
use crate::matrix::{collect, spread};
use crate::memory::{AccessError, SECTOR};
use crate::operation::{Address, MemorySpace, Operation};
use crate::resolve::{LOCAL_WINDOW, SHARED_WINDOW};
use crate::shared::{Actor, wavefronts};
use crate::types::{LANES, Lanes, low_bits};
use crate::warp::{Copy, lanes};

/// The location that an address refers to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Location {
    Global(u64),
    Shared(u64),
    Local(u64),
}

impl Machine<'_> {
    fn actor(&self, w: usize, lane: usize) -> Actor {
        Actor { warp: w, lane, warp_barriers: self.warps[w].warp_barriers }
    }

    fn location(&self, w: usize, lane: usize, place: MemorySpace, address: Address) -> Location {
        let value = self.warps[w].get(address.base)[lane].wrapping_add(address.offset as u64);
        match place {
            MemorySpace::Global => Location::Global(value),
            // Shared addresses may be 32-bit numbers, so a sum below 0 wraps around at 32 bits.
            MemorySpace::Shared => {
                Location::Shared(if value >> 32 == 0xffff_ffff { value & low_bits(32) } else { value })
            }
            MemorySpace::Local => Location::Local(value),
            MemorySpace::Generic if value >= LOCAL_WINDOW => Location::Local(value - LOCAL_WINDOW),
            MemorySpace::Generic if value >= SHARED_WINDOW => Location::Shared(value - SHARED_WINDOW),
            MemorySpace::Generic => Location::Global(value),
        }
    }

    fn local(&self, lane: usize, address: u64, bytes: usize) -> Result<usize, AccessError> {
        let kind = if !address.is_multiple_of(bytes.next_power_of_two() as u64) {
            FaultKind::Misaligned
        } else if address.saturating_add(bytes as u64) > self.kernel.local_bytes as u64 {
            FaultKind::OutOfBounds
        } else {
            return Ok(lane * self.kernel.local_bytes + address as usize);
        };
        let detail = format!("{bytes} bytes, a thread has {}", self.kernel.local_bytes);
        Err(AccessError { kind, buffer: Some("local".to_owned()), offset: address, detail })
    }

    fn read(
        &mut self,
        w: usize,
        lane: usize,
        location: Location,
        out: &mut [u8],
        strong: bool,
    ) -> Result<(), AccessError> {
        match location {
            Location::Global(address) => self.memory.read(address, out, strong),
            Location::Shared(address) => {
                let actor = self.actor(w, lane);
                self.shared.read(address, out, actor)
            }
            Location::Local(address) => {
                let at = self.local(lane, address, out.len())?;
                out.copy_from_slice(&self.warps[w].local[at..at + out.len()]);
                Ok(())
            }
        }
    }

    fn store(
        &mut self,
        w: usize,
        lane: usize,
        location: Location,
        bytes: &[u8],
        strong: bool,
    ) -> Result<(), AccessError> {
        match location {
            Location::Global(address) => self.memory.store(address, bytes, strong),
            Location::Shared(address) => {
                let actor = self.actor(w, lane);
                self.shared.store(address, bytes, actor)
            }
            Location::Local(address) => {
                let at = self.local(lane, address, bytes.len())?;
                self.warps[w].local[at..at + bytes.len()].copy_from_slice(bytes);
                Ok(())
            }
        }
    }

    fn count(&mut self, pc: usize, locations: &[Option<Location>; LANES], bytes: usize, written: bool) {
        let mut shared = [None; LANES];
        let mut any_shared = false;
        let (mut sectors, mut global) = (Vec::new(), Vec::new());
        for (lane, location) in locations.iter().enumerate() {
            match *location {
                // Addresses far out of range are faults. They are not counted as accesses.
                Some(Location::Shared(address)) if address <= low_bits(32) => {
                    shared[lane] = Some(address);
                    any_shared = true;
                }
                Some(Location::Global(address)) => {
                    let Some(buffer) = self.memory.index_of(address) else { continue };
                    global.push((buffer, address));
                    let last = (address + bytes.max(1) as u64 - 1) / SECTOR;
                    sectors.extend((address / SECTOR..=last).map(|sector| (buffer, sector)));
                }
                _ => {}
            }
        }
        if any_shared {
            let (taken, ideal) = wavefronts(&shared, bytes);
            let counts = if written { &mut self.tally.writes } else { &mut self.tally.reads };
            let Wavefronts { taken: t, ideal: i } = counts[pc];
            counts[pc] = Wavefronts { taken: t + taken, ideal: i + ideal };
        }
        if !global.is_empty() {
            self.tally.traffic(written, bytes, &mut sectors, &global);
        }
    }

    fn locations(
        &self,
        w: usize,
        active: u32,
        place: MemorySpace,
        address: Address,
    ) -> [Option<Location>; LANES] {
        let mut locations = [None; LANES];
        for lane in lanes(active) {
            locations[lane] = Some(self.location(w, lane, place, address));
        }
        locations
    }

    pub(crate) fn access(&mut self, w: usize, pc: usize, active: u32, operation: &Operation) -> Result<()> {
        match operation {
            Operation::Load { place, d, from, ty, keep, strong, acquire } => {
                let each = ty.bytes();
                let bytes = each * d.as_slice().len();
                let locations = self.locations(w, active, *place, *from);
                self.count(pc, &locations, bytes, false);
                let mut out = [[0u64; LANES]; 8];
                for lane in lanes(active) {
                    let Some(location) = locations[lane] else { continue };
                    let mut data = [0u8; 64];
                    if let Location::Global(address) = location
                        && (*acquire || *strong)
                    {
                        self.memory.order.meet(address, false);
                    }
                    if let Err(wrong) = self.read(w, lane, location, &mut data[..bytes], *strong) {
                        self.report(w, pc, Some(lane), wrong)?;
                    }
                    for (i, out) in out.iter_mut().enumerate().take(d.as_slice().len()) {
                        let mut one = [0; 8];
                        one[..each].copy_from_slice(&data[i * each..(i + 1) * each]);
                        let value = u64::from_le_bytes(one);
                        out[lane] = crate::integer::extend(value, ty.bits(), ty.is_signed()) & keep;
                    }
                }
                for (d, out) in d.as_slice().iter().zip(&out) {
                    self.warps[w].set(*d, active, out);
                }
            }
            Operation::Store { place, to, values, ty, strong, release } => {
                let each = ty.bytes();
                let bytes = each * values.as_slice().len();
                let locations = self.locations(w, active, *place, *to);
                self.count(pc, &locations, bytes, true);
                if *release {
                    self.memory.order.fence();
                }
                for lane in lanes(active) {
                    let Some(location) = locations[lane] else { continue };
                    let mut data = [0u8; 64];
                    for (i, value) in values.as_slice().iter().enumerate() {
                        let value = self.warps[w].get(*value)[lane].to_le_bytes();
                        data[i * each..(i + 1) * each].copy_from_slice(&value[..each]);
                    }
                    if let Err(wrong) = self.store(w, lane, location, &data[..bytes], *strong) {
                        self.report(w, pc, Some(lane), wrong)?;
                    }
                    if let Location::Global(address) = location
                        && *strong
                    {
                        self.memory.order.meet(address, true);
                    }
                }
            }
            Operation::Atomic { .. } => self.atomic(w, pc, active, operation)?,
            Operation::CopyAsync { to, from, bytes, size, ignore } => {
                let (targets, sources) = (
                    self.locations(w, active, MemorySpace::Shared, *to),
                    self.locations(w, active, MemorySpace::Global, *from),
                );
                self.count(pc, &targets, *bytes, true);
                let sizes: Lanes = size.map_or([*bytes as u64; LANES], |s| *self.warps[w].get(s));
                let ignored = ignore.map_or(0, |p| self.warps[w].holds(p, false));
                let read = |lane: usize| {
                    if ignored >> lane & 1 != 0 { 0 } else { (sizes[lane] as u32 as usize).min(*bytes) }
                };
                let mut reading = sources;
                (0..LANES).filter(|l| read(*l) == 0).for_each(|l| reading[l] = None);
                self.count(pc, &reading, *bytes, false);
                for lane in lanes(active) {
                    let (Some(Location::Shared(target)), Some(source)) = (targets[lane], sources[lane])
                    else {
                        continue;
                    };
                    let actor = self.actor(w, lane);
                    if let Err(wrong) = self.shared.set_out(target, *bytes, actor) {
                        self.report(w, pc, Some(lane), wrong)?;
                        continue;
                    }
                    let mut data = [0u8; 16];
                    let count = read(lane);
                    if let Err(wrong) = self.read_aligned(w, lane, source, &mut data[..count], *bytes) {
                        self.report(w, pc, Some(lane), wrong)?;
                    }
                    let group = self.warps[w].closed[lane];
                    let copy = Copy { lane, group, address: target, bytes: data, count: *bytes };
                    self.warps[w].copies.push(copy);
                }
            }
            Operation::CopyCommit => lanes(active).for_each(|lane| self.warps[w].closed[lane] += 1),
            Operation::CopyWait { left } => self.land(w, active, *left),
            Operation::CopyWaitAll => {
                lanes(active).for_each(|lane| self.warps[w].closed[lane] += 1);
                self.land(w, active, 0);
            }
            Operation::Fence => self.memory.order.fence(),
            Operation::LoadMatrix { d, from, transposed, place } => {
                self.load_matrix(w, pc, d.as_slice(), *from, *transposed, *place)?;
            }
            Operation::StoreMatrix { to, values, transposed, place } => {
                self.store_matrix(w, pc, values.as_slice(), *to, *transposed, *place)?;
            }
            _ => {}
        }
        Ok(())
    }

    /// The source of a copy must be aligned to the size of the copy even if fewer bytes are read.
    fn read_aligned(
        &mut self,
        w: usize,
        lane: usize,
        location: Location,
        out: &mut [u8],
        align: usize,
    ) -> Result<(), AccessError> {
        let Location::Global(address) = location else { return Ok(()) };
        if out.is_empty() {
            return Ok(());
        }
        if !address.is_multiple_of(align as u64) {
            let detail = format!("a copy of {align} bytes from {address:#x}");
            return Err(AccessError { kind: FaultKind::Misaligned, buffer: None, offset: address, detail });
        }
        for (i, byte) in out.iter_mut().enumerate() {
            let mut one = [0];
            self.read(w, lane, Location::Global(address + i as u64), &mut one, false)?;
            *byte = one[0];
        }
        Ok(())
    }

    /// Completes the copies of all committed groups of each lane except the last `left` ones.
    fn land(&mut self, w: usize, active: u32, left: u32) {
        let warp = &mut self.warps[w];
        let (closed, barriers) = (warp.closed, warp.warp_barriers);
        let shared = &mut self.shared;
        warp.copies.retain(|copy| {
            let lands = active >> copy.lane & 1 != 0 && copy.group.saturating_add(left) < closed[copy.lane];
            if lands {
                let actor = Actor { warp: w, lane: copy.lane, warp_barriers: barriers };
                shared.land(copy.address, &copy.bytes[..copy.count], actor);
            }
            !lands
        });
    }

    fn atomic(&mut self, w: usize, pc: usize, active: u32, operation: &Operation) -> Result<()> {
        let Operation::Atomic { place, atomic, ty, d, at, a, b, fence } = operation else { return Ok(()) };
        let bytes = ty.bytes();
        let locations = self.locations(w, active, *place, *at);
        self.count(pc, &locations, bytes, false);
        self.count(pc, &locations, bytes, true);
        if *fence {
            self.memory.order.fence();
        }
        let mut out = [0; LANES];
        for lane in lanes(active) {
            let Some(location) = locations[lane] else { continue };
            let (a, b) = (self.warps[w].get(*a)[lane], self.warps[w].get(*b)[lane]);
            let mut data = [0u8; 8];
            let actor = self.actor(w, lane);
            let read = match location {
                Location::Shared(address) => self.shared.atomic(address, &mut data[..bytes], actor),
                Location::Global(address) => {
                    self.memory.order.meet(address, true);
                    self.memory.read(address, &mut data[..bytes], true)
                }
                Location::Local(_) => self.read(w, lane, location, &mut data[..bytes], true),
            };
            if let Err(wrong) = read {
                self.report(w, pc, Some(lane), wrong)?;
                continue;
            }
            let old = u64::from_le_bytes(data);
            let Some(new) = combine(*atomic, *ty, old, a, b) else {
                let name = self.kernel.opcodes[self.kernel.instructions[pc].opcode].clone();
                let wrong = Self::plain(FaultKind::Unsupported(name), String::new());
                return Err(self.fault(w, pc, Some(lane), wrong).into());
            };
            let new = new.to_le_bytes();
            let stored = match location {
                Location::Shared(address) => {
                    self.shared.atomic_store(address, &new[..bytes]);
                    Ok(())
                }
                _ => self.store(w, lane, location, &new[..bytes], true),
            };
            if let Err(wrong) = stored {
                self.report(w, pc, Some(lane), wrong)?;
            }
            out[lane] = old;
        }
        if let Some(d) = d {
            self.warps[w].set(*d, active, &out);
        }
        Ok(())
    }

    /// Loads matrices; lanes 8i to 8i + 7 provide the row addresses of matrix `i`.
    fn load_matrix(
        &mut self,
        w: usize,
        pc: usize,
        d: &[u32],
        from: Address,
        transposed: bool,
        place: MemorySpace,
    ) -> Result<()> {
        let locations = self.locations(w, low_bits(8 * d.len() as u32) as u32, place, from);
        self.count(pc, &locations, 16, false);
        for (i, d) in d.iter().enumerate() {
            let mut rows = [[0u16; 8]; 8];
            for (r, row) in rows.iter_mut().enumerate() {
                let lane = 8 * i + r;
                let Some(location) = locations[lane] else { continue };
                let mut data = [0u8; 16];
                if let Err(wrong) = self.read_row(w, lane, location, &mut data) {
                    self.report(w, pc, Some(lane), wrong)?;
                }
                for (value, pair) in row.iter_mut().zip(data.chunks_exact(2)) {
                    *value = u16::from_le_bytes([pair[0], pair[1]]);
                }
            }
            self.warps[w].set(*d, u32::MAX, &spread(&rows, transposed));
        }
        Ok(())
    }

    /// Reads a row for the lane that provides its address. Bytes that a different lane copied asynchronously require a
    /// warp barrier first.
    fn read_row(
        &mut self,
        w: usize,
        lane: usize,
        location: Location,
        out: &mut [u8],
    ) -> Result<(), AccessError> {
        self.read(w, lane, location, out, false)
    }

    fn store_matrix(
        &mut self,
        w: usize,
        pc: usize,
        values: &[u32],
        to: Address,
        transposed: bool,
        place: MemorySpace,
    ) -> Result<()> {
        let locations = self.locations(w, low_bits(8 * values.len() as u32) as u32, place, to);
        self.count(pc, &locations, 16, true);
        for (i, value) in values.iter().enumerate() {
            let rows = collect(self.warps[w].get(*value), transposed);
            for (r, row) in rows.iter().enumerate() {
                let lane = 8 * i + r;
                let Some(location) = locations[lane] else { continue };
                let data: Vec<u8> = row.iter().flat_map(|v| v.to_le_bytes()).collect();
                if let Err(wrong) = self.store(w, lane, location, &data, false) {
                    self.report(w, pc, Some(lane), wrong)?;
                }
            }
        }
        Ok(())
    }
}
