//! Global memory: buffers with bounds and an alignment, and for every byte whether it was written.
//!
//! A buffer's address is a multiple of its alignment but of no larger power of two, so that kernels that assume a
//! larger alignment are detected. Buffers are so far apart that an access beyond the end of one reaches no other.

use crate::error::{Error, FaultKind, Result};
use crate::order::{Order, Party};

const FIRST: u64 = 0x10_0000_0000;
/// The smallest unit of DRAM access in bytes.
pub(crate) const SECTOR: u64 = 32;

const WRITTEN_EVER: u8 = 1;
const READ_NOW: u8 = 2;
const WRITTEN_NOW: u8 = 4;
/// Stands for the readers of a byte that several blocks have read.
const MANY: Party = (u32::MAX, 0);

/// The last accesses to a byte in this launch.
#[derive(Debug, Clone, Copy, Default)]
struct Trace {
    writer: Party,
    written: u32,
    /// The last reader, or [`MANY`].
    reader: Party,
    read: u32,
    /// Whether the last write was an atomic or another strong write.
    atomic: bool,
}

struct Buffer {
    name: String,
    base: u64,
    bytes: Vec<u8>,
    flags: Vec<u8>,
    traces: Vec<Trace>,
}

/// Unused addresses after each buffer: more than a 32-bit index can span.
const GAP: u64 = 1 << 35;

/// The memory of the device. Buffers are identified by their addresses, which are passed as kernel arguments.
#[derive(Default)]
pub struct Memory {
    buffers: Vec<Buffer>,
    last: usize,
    next: u64,
    pub(crate) order: Order,
}

fn wrote((block, warp): Party) -> String {
    format!("warp {warp} of block number {} wrote it", block.saturating_sub(1))
}

pub(crate) struct AccessError {
    pub kind: FaultKind,
    pub buffer: Option<String>,
    pub offset: u64,
    pub detail: String,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Touched {
    pub read_bytes: u64,
    pub read_sectors: u64,
    pub written_bytes: u64,
    pub written_sectors: u64,
}

impl Memory {
    /// Creates a memory without buffers.
    pub fn new() -> Self {
        Self { next: FIRST, ..Self::default() }
    }

    /// Adds a buffer of `bytes` unwritten bytes, and returns its device address. `align` is rounded up to a power of
    /// two.
    pub fn buffer(&mut self, name: &str, bytes: usize, align: usize) -> u64 {
        self.add(name, vec![0; bytes], align, 0)
    }

    /// Adds a buffer with these bytes, and returns its device address. `align` as in [`buffer`](Self::buffer).
    pub fn buffer_from(&mut self, name: &str, bytes: &[u8], align: usize) -> u64 {
        self.add(name, bytes.to_vec(), align, WRITTEN_EVER)
    }

    /// Adds a buffer with these bytes at a given address, which other buffers may contain.
    ///
    /// # Errors
    /// When the address is not beyond the last buffer.
    pub fn buffer_at(&mut self, name: &str, bytes: &[u8], address: u64) -> Result<()> {
        let end = self.buffers.last().map_or(1, |last| last.base + last.bytes.len().max(1) as u64);
        if address < end || address.checked_add(bytes.len() as u64 + 2 * GAP).is_none() {
            let message = format!("the address {address:#x} of {name} is not beyond the last buffer");
            return Err(Error::Memory { message });
        }
        self.push(name, bytes.to_vec(), address, WRITTEN_EVER);
        Ok(())
    }

    fn add(&mut self, name: &str, bytes: Vec<u8>, align: usize, flag: u8) -> u64 {
        let align = (align.clamp(1, 1 << 30).next_power_of_two()) as u64;
        // An odd multiple of the alignment is not a multiple of any larger power of two.
        let base = self.next.max(FIRST).next_multiple_of(2 * align) + align;
        self.push(name, bytes, base, flag);
        base
    }

    fn push(&mut self, name: &str, bytes: Vec<u8>, base: u64, flag: u8) {
        self.next = base + bytes.len() as u64 + GAP;
        let flags = vec![flag; bytes.len()];
        self.buffers.push(Buffer { name: name.to_owned(), base, bytes, flags, traces: Vec::new() });
    }

    /// Returns the bytes of the buffer at that address.
    ///
    /// # Errors
    /// When no buffer begins there, or it has bytes that were never written.
    pub fn bytes(&self, address: u64) -> Result<&[u8]> {
        let buffer = self.at(address)?;
        if let Some(offset) = buffer.flags.iter().position(|f| f & WRITTEN_EVER == 0) {
            let message = format!("byte {offset} of {} was never written", buffer.name);
            return Err(Error::Memory { message });
        }
        Ok(&buffer.bytes)
    }

    /// Returns the bytes of the buffer at that address, with 0 for unwritten ones, and which of them were written.
    ///
    /// # Errors
    /// When no buffer begins there.
    pub fn bytes_and_written(&self, address: u64) -> Result<(&[u8], Vec<bool>)> {
        let buffer = self.at(address)?;
        Ok((&buffer.bytes, buffer.flags.iter().map(|f| f & WRITTEN_EVER != 0).collect()))
    }

    /// Writes bytes from the host to the beginning of the buffer at that address.
    ///
    /// # Errors
    /// When no buffer begins there, or it is too short.
    pub fn write(&mut self, address: u64, bytes: &[u8]) -> Result<()> {
        let Some(buffer) = self.buffers.iter_mut().find(|b| b.base == address) else {
            return Err(Error::Memory { message: format!("no buffer begins at {address:#x}") });
        };
        let Some(target) = buffer.bytes.get_mut(..bytes.len()) else {
            let message = format!(
                "{} bytes do not fit in the {} bytes of {}",
                bytes.len(),
                buffer.bytes.len(),
                buffer.name
            );
            return Err(Error::Memory { message });
        };
        target.copy_from_slice(bytes);
        buffer.flags[..bytes.len()].fill(WRITTEN_EVER);
        Ok(())
    }

    fn at(&self, address: u64) -> Result<&Buffer> {
        self.buffers
            .iter()
            .find(|b| b.base == address)
            .ok_or_else(|| Error::Memory { message: format!("no buffer begins at {address:#x}") })
    }

    pub(crate) fn begin(&mut self) {
        self.order = Order::default();
        for buffer in &mut self.buffers {
            buffer.flags.iter_mut().for_each(|f| *f &= WRITTEN_EVER);
            buffer.traces.clear();
            buffer.traces.resize(buffer.bytes.len(), Trace::default());
        }
    }

    /// Removes the last buffer, which after a launch holds the module's variables.
    pub(crate) fn drop_last(&mut self) {
        self.buffers.pop();
        self.last = 0;
    }

    /// Returns the names of the buffers, and which of their bytes the launch accessed.
    pub(crate) fn touched(&self) -> Vec<(String, Touched)> {
        let one = |buffer: &Buffer| {
            let mut touched = Touched::default();
            let mut sectors = [None, None];
            for (i, flag) in buffer.flags.iter().enumerate() {
                let sector = Some((buffer.base + i as u64) / SECTOR);
                if flag & READ_NOW != 0 {
                    touched.read_bytes += 1;
                    touched.read_sectors += u64::from(sectors[0] != sector);
                    sectors[0] = sector;
                }
                if flag & WRITTEN_NOW != 0 {
                    touched.written_bytes += 1;
                    touched.written_sectors += u64::from(sectors[1] != sector);
                    sectors[1] = sector;
                }
            }
            (buffer.name.clone(), touched)
        };
        self.buffers.iter().map(one).collect()
    }

    fn locate(&mut self, address: u64, bytes: usize) -> Result<(usize, usize), AccessError> {
        let holds = |b: &Buffer| address >= b.base && address - b.base < (b.bytes.len() as u64).max(1);
        if !self.buffers.get(self.last).is_some_and(holds) {
            // Base addresses ascend.
            let index = self.buffers.partition_point(|b| b.base <= address);
            self.last = index.saturating_sub(1);
        }
        let wrong = |kind, buffer: Option<&Buffer>, offset| AccessError {
            kind,
            buffer: buffer.map(|b| b.name.clone()),
            offset,
            detail: format!("{bytes} bytes"),
        };
        let Some(buffer) = self.buffers.get(self.last).filter(|b| address >= b.base) else {
            return Err(wrong(FaultKind::OutOfBounds, None, address));
        };
        let offset = address - buffer.base;
        if offset > buffer.bytes.len() as u64 + GAP / 2 {
            return Err(wrong(FaultKind::OutOfBounds, None, address));
        }
        if !address.is_multiple_of(bytes.next_power_of_two() as u64) {
            return Err(wrong(FaultKind::Misaligned, Some(buffer), offset));
        }
        if offset + bytes as u64 > buffer.bytes.len() as u64 {
            let mut wrong = wrong(FaultKind::OutOfBounds, Some(buffer), offset);
            wrong.detail = format!("{bytes} bytes, the buffer has {}", buffer.bytes.len());
            return Err(wrong);
        }
        Ok((self.last, offset as usize))
    }

    pub(crate) fn index_of(&mut self, address: u64) -> Option<usize> {
        self.locate(address, 1).ok().map(|(index, _)| index)
    }

    /// Atomics, and volatile or relaxed reads, are `strong`: they race only with plain writes.
    pub(crate) fn read(&mut self, address: u64, out: &mut [u8], strong: bool) -> Result<(), AccessError> {
        let (index, offset) = self.locate(address, out.len())?;
        let order = &self.order;
        let buffer = &mut self.buffers[index];
        let range = offset..offset + out.len();
        out.copy_from_slice(&buffer.bytes[range.clone()]);
        let traces = buffer.traces[range.clone()].iter_mut();
        for ((i, flag), trace) in range.clone().zip(&mut buffer.flags[range]).zip(traces) {
            if *flag & WRITTEN_EVER == 0 {
                let kind = FaultKind::Uninitialised;
                let buffer = Some(buffer.name.clone());
                return Err(AccessError {
                    kind,
                    buffer,
                    offset: i as u64,
                    detail: format!("{} bytes", out.len()),
                });
            }
            *flag |= READ_NOW;
            let both_strong = strong && trace.atomic;
            if !both_strong && !order.follows(trace.writer, trace.written) {
                let detail = wrote(trace.writer);
                let (kind, buffer) = (FaultKind::GlobalRace, Some(buffer.name.clone()));
                return Err(AccessError { kind, buffer, offset: i as u64, detail });
            }
            let (party, time) = order.now();
            if order.follows_read(trace.reader, trace.read) {
                (trace.reader, trace.read) = (party, time);
            } else {
                trace.reader = MANY;
            }
        }
        Ok(())
    }

    /// `strong` as in [`read`](Self::read).
    pub(crate) fn store(&mut self, address: u64, bytes: &[u8], strong: bool) -> Result<(), AccessError> {
        let (index, offset) = self.locate(address, bytes.len())?;
        let order = &self.order;
        let buffer = &mut self.buffers[index];
        let range = offset..offset + bytes.len();
        buffer.bytes[range.clone()].copy_from_slice(bytes);
        let traces = buffer.traces[range.clone()].iter_mut();
        for ((i, flag), trace) in range.clone().zip(&mut buffer.flags[range]).zip(traces) {
            *flag |= WRITTEN_EVER | WRITTEN_NOW;
            let both_strong = strong && trace.atomic;
            let write_race = !both_strong && !order.follows(trace.writer, trace.written);
            // If several blocks have read the byte, it is not known which. No race is then reported if the writer has
            // acquired anything from an atomic.
            let unread = if trace.reader == MANY {
                order.has_seen()
            } else {
                order.follows_read(trace.reader, trace.read)
            };
            if write_race || !(both_strong || unread) {
                let detail = match (write_race, trace.reader) {
                    (true, _) => wrote(trace.writer),
                    (false, MANY) => "several blocks read it".to_owned(),
                    (false, (block, warp)) => {
                        format!("warp {warp} of block number {} read it", block.saturating_sub(1))
                    }
                };
                let (kind, buffer) = (FaultKind::GlobalRace, Some(buffer.name.clone()));
                return Err(AccessError { kind, buffer, offset: i as u64, detail });
            }
            let (writer, written) = order.now();
            *trace = Trace { writer, written, atomic: strong, ..Trace::default() };
        }
        Ok(())
    }
}
