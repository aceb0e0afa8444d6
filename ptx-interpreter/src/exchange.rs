//! Instructions that exchange data between the lanes of a warp: shuffles, votes, reductions, matrix products.

use crate::error::{FaultKind, Result};
use crate::machine::{Machine, Next};
use crate::matrix::{collect, multiply_floats, multiply_integers, narrow, spread, widen};
use crate::operation::{Atomic, Operation, Shuffle, Slots, Vote};
use crate::types::{LANES, Lanes, low_bits};
use crate::warp::{Warp, lanes};

/// The lane that a shuffle reads, and whether it is in range: `shfl.sync` in the ISA.
pub(crate) fn shuffle_source(shuffle: Shuffle, lane: u32, b: u32, c: u32) -> (u32, bool) {
    let (b, clamp, segment) = (b & 31, c & 31, c >> 8 & 31);
    let max = lane & segment | clamp & !segment;
    let min = lane & segment;
    let (from, inside) = match shuffle {
        Shuffle::Up => (lane.wrapping_sub(b), lane as i32 - b as i32 >= max as i32),
        Shuffle::Down => (lane + b, lane + b <= max),
        Shuffle::Butterfly => (lane ^ b, lane ^ b <= max),
        Shuffle::Index => {
            let from = min | b & !segment;
            (from, from <= max)
        }
    };
    if inside { (from & 31, true) } else { (lane, false) }
}

fn copies<const N: usize>(warp: &Warp, slots: &Slots) -> [Lanes; N] {
    let slots = slots.as_slice();
    std::array::from_fn(|i| slots.get(i).map_or([0; LANES], |slot| *warp.get(*slot)))
}

fn fold(atomic: Atomic, signed: bool, a: u32, b: u32) -> u32 {
    match (atomic, signed) {
        (Atomic::Add, _) => a.wrapping_add(b),
        (Atomic::Min, false) => a.min(b),
        (Atomic::Max, false) => a.max(b),
        (Atomic::Min, true) => (a as i32).min(b as i32) as u32,
        (Atomic::Max, true) => (a as i32).max(b as i32) as u32,
        (Atomic::And, _) => a & b,
        (Atomic::Or, _) => a | b,
        _ => a ^ b,
    }
}

impl Machine<'_> {
    /// A matrix instruction requires the whole warp.
    pub(crate) fn exchange(
        &mut self,
        w: usize,
        pc: usize,
        active: u32,
        mask: u32,
        operation: &Operation,
    ) -> Result<Option<Next>> {
        let wanted = match operation {
            Operation::WarpBarrier { mask }
            | Operation::Shuffle { mask, .. }
            | Operation::Vote { mask, .. }
            | Operation::Match { mask, .. }
            | Operation::Reduce { mask, .. }
            | Operation::Elect { mask, .. } => Some(*mask),
            Operation::ActiveMask { d } => {
                self.warps[w].set(*d, active, &[u64::from(mask); LANES]);
                return Ok(Some(Next::On));
            }
            Operation::LoadMatrix { .. }
            | Operation::StoreMatrix { .. }
            | Operation::MoveMatrix { .. }
            | Operation::MultiplyFloats { .. }
            | Operation::MultiplyIntegers { .. } => None,
            _ => return Ok(None),
        };
        if let Some(next) = self.together(w, pc, active, wanted)? {
            return Ok(Some(next));
        }
        if wanted.is_none() && active != u32::MAX {
            let detail = format!("lanes {active:#010x} of a whole warp");
            return Err(self.fault(w, pc, None, Self::plain(FaultKind::WarpDivergence, detail)).into());
        }
        let warp = &mut self.warps[w];
        match operation {
            Operation::WarpBarrier { .. } => warp.warp_barriers += 1,
            Operation::Shuffle { shuffle, d, p, a, b, c, .. } => {
                let (a, b, c) = (*warp.get(*a), *warp.get(*b), *warp.get(*c));
                let (mut out, mut inside) = ([0; LANES], [0; LANES]);
                let mut missing = None;
                for lane in lanes(active) {
                    let (from, within) =
                        shuffle_source(*shuffle, lane as u32, b[lane] as u32, c[lane] as u32);
                    if active >> from & 1 == 0 {
                        missing = Some((lane, from));
                    }
                    out[lane] = a[from as usize] & low_bits(32);
                    inside[lane] = u64::from(within);
                }
                warp.set(*d, active, &out);
                if let Some(p) = p {
                    warp.set(*p, active, &inside);
                }
                if let Some((lane, from)) = missing {
                    let detail = format!("it reads lane {from}, which does not participate");
                    self.report(w, pc, Some(lane), Self::plain(FaultKind::WarpDivergence, detail))?;
                }
            }
            Operation::Vote { vote, d, p, negated, .. } => {
                let holds = warp.holds(*p, *negated) & active;
                let value = match vote {
                    Vote::All => u64::from(holds == active),
                    Vote::Any => u64::from(holds != 0),
                    Vote::Uniform => u64::from(holds == active || holds == 0),
                    Vote::Ballot => u64::from(holds),
                };
                warp.set(*d, active, &[value; LANES]);
            }
            Operation::Match { d, p, a, all, bits, .. } => {
                let a = warp.get(*a).map(|v| v & low_bits(*bits));
                let equal =
                    |lane: usize| lanes(active).filter(|l| a[*l] == a[lane]).fold(0u32, |m, l| m | 1 << l);
                let mut out = [0; LANES];
                for lane in lanes(active) {
                    let same = equal(lane);
                    out[lane] = u64::from(if *all && same != active { 0 } else { same });
                }
                warp.set(*d, active, &out);
                if let Some(p) = p {
                    warp.set(*p, active, &out.map(|v| u64::from(v != 0)));
                }
            }
            Operation::Reduce { atomic, signed, d, a, .. } => {
                let a = *warp.get(*a);
                let folded = lanes(active).map(|l| a[l] as u32).reduce(|x, y| fold(*atomic, *signed, x, y));
                warp.set(*d, active, &[u64::from(folded.unwrap_or(0)); LANES]);
            }
            Operation::Elect { d, p, .. } => {
                let first = active.trailing_zeros() as usize;
                warp.set(*d, active, &[first as u64; LANES]);
                let mut chosen = [0; LANES];
                chosen[first % LANES] = 1;
                warp.set(*p, active, &chosen);
            }
            Operation::MoveMatrix { d, a } => {
                let out = spread(&collect(warp.get(*a), false), true);
                warp.set(*d, active, &out);
            }
            Operation::MultiplyFloats { element, d, a, b, c } => {
                let (a_regs, b_regs): ([Lanes; 4], [Lanes; 2]) = (copies(warp, a), copies(warp, b));
                let a_refs: Vec<&Lanes> = a_regs.iter().take(a.as_slice().len()).collect();
                let b_refs: Vec<&Lanes> = b_regs.iter().take(b.as_slice().len()).collect();
                let sums: [Lanes; 4] = copies(warp, c);
                if c.as_slice().len() == 2 {
                    let sums = widen([&sums[0], &sums[1]]);
                    let out = narrow(&multiply_floats(*element, &a_refs, &b_refs, &sums));
                    d.as_slice().iter().zip(&out).for_each(|(d, out)| warp.set(*d, active, out));
                } else {
                    let out = multiply_floats(*element, &a_refs, &b_refs, &sums);
                    d.as_slice().iter().zip(&out).for_each(|(d, out)| warp.set(*d, active, out));
                }
            }
            Operation::MultiplyIntegers { elements, d, a, b, c, saturate } => {
                let (a_regs, b_regs): ([Lanes; 4], [Lanes; 2]) = (copies(warp, a), copies(warp, b));
                let a_refs: Vec<&Lanes> = a_regs.iter().take(a.as_slice().len()).collect();
                let b_refs: Vec<&Lanes> = b_regs.iter().take(b.as_slice().len()).collect();
                let sums: [Lanes; 4] = copies(warp, c);
                let out = multiply_integers(*elements, &a_refs, &b_refs, &sums, *saturate);
                d.as_slice().iter().zip(&out).for_each(|(d, out)| warp.set(*d, active, out));
            }
            _ => return Ok(None),
        }
        Ok(Some(Next::On))
    }
}
