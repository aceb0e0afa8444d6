//! The order of accesses to global memory, between blocks and between the warps of a block.
//!
//! Every access is recorded with its block, its warp and the block's time, which every fence and barrier advances. A
//! barrier passes what each of its warps knows to those that wait at it. A fence makes the accesses that its warp knows
//! publishable; barriers pass this on, too. An atomic or a strong store publishes the publishable accesses at its
//! address. An atomic or another strong access acquires the accesses that others have published at its address.

use std::collections::HashMap;
use std::rc::Rc;

/// The block's number plus one, and the warp's index. If the first number is 0, there is no warp.
pub(crate) type Party = (u32, u32);

type Seen = Rc<HashMap<Party, u32>>;

/// The accesses that are ordered before the next access of a warp of the running block.
#[derive(Debug, Clone, Default)]
struct View {
    /// For each warp of the block, the time before which this warp knows its accesses.
    known: Vec<u32>,
    /// As `known`, for accesses that were followed by a fence.
    fenced: Vec<u32>,
    /// The accesses that this warp acquired.
    seen: Seen,
}

#[derive(Debug, Default)]
pub(crate) struct Order {
    block: u32,
    pub warp: usize,
    time: u32,
    views: Vec<View>,
    published: HashMap<u64, Seen>,
}

fn raise(all: &mut [u32], others: &[u32]) {
    for (all, other) in all.iter_mut().zip(others) {
        *all = (*all).max(*other);
    }
}

/// Shares memory if one map is empty.
fn join(into: &mut Seen, from: &Seen) {
    if from.is_empty() || Rc::ptr_eq(into, from) {
        return;
    }
    if into.is_empty() {
        *into = Rc::clone(from);
        return;
    }
    let into = Rc::make_mut(into);
    for (party, time) in from.iter() {
        let there = into.entry(*party).or_default();
        *there = (*there).max(*time);
    }
}

impl Order {
    pub fn begin(&mut self, block: u32, warps: usize) {
        self.block = block + 1;
        self.time = 1;
        let view = View { known: vec![0; warps], fenced: vec![0; warps], seen: Seen::default() };
        self.views.clear();
        self.views.resize(warps, view);
    }

    pub fn now(&self) -> (Party, u32) {
        ((self.block, self.warp as u32), self.time)
    }

    pub fn fence(&mut self) {
        self.time += 1;
        if let Some(view) = self.views.get_mut(self.warp) {
            view.known[self.warp] = self.time;
            raise(&mut view.fenced, &view.known);
        }
    }

    /// The barrier passes on the accesses so far.
    pub fn arrive(&mut self) {
        self.time += 1;
        if let Some(view) = self.views.get_mut(self.warp) {
            view.known[self.warp] = self.time;
        }
    }

    /// Warps that waited learn of the accesses that the others know.
    pub fn barrier(&mut self, met: impl Iterator<Item = (usize, bool)> + Clone) {
        let warps = self.views.len();
        let mut all = View { known: vec![0; warps], fenced: vec![0; warps], seen: Seen::default() };
        for (w, _) in met.clone() {
            raise(&mut all.known, &self.views[w].known);
            raise(&mut all.fenced, &self.views[w].fenced);
            join(&mut all.seen, &self.views[w].seen);
        }
        self.time += 1;
        for (w, _) in met.filter(|(_, waits)| *waits) {
            self.views[w].clone_from(&all);
        }
    }

    /// Records an atomic or another strong access of the running warp to an address.
    pub fn meet(&mut self, address: u64, publishes: bool) {
        let Some(view) = self.views.get_mut(self.warp) else { return };
        if !publishes {
            if let Some(there) = self.published.get(&address) {
                join(&mut view.seen, there);
            }
            return;
        }
        let there = self.published.entry(address).or_default();
        join(&mut view.seen, there);
        join(there, &view.seen);
        let block = self.block;
        for (w, &time) in view.fenced.iter().enumerate() {
            let party = (block, w as u32);
            if time > there.get(&party).copied().unwrap_or(0) {
                Rc::make_mut(there).insert(party, time);
            }
        }
    }

    /// Whether an access by `party` at a given time is ordered before the current access of the running warp.
    pub fn follows(&self, party: Party, time: u32) -> bool {
        let (block, warp) = party;
        let Some(view) = self.views.get(self.warp) else { return true };
        block == 0
            || party == (self.block, self.warp as u32)
            || (block == self.block && view.known.get(warp as usize).is_some_and(|known| time < *known))
            || view.seen.get(&party).is_some_and(|seen| time < *seen)
    }

    /// As [`follows`](Self::follows), for a read. Reads by warps of the same block are not checked.
    pub fn follows_read(&self, party: Party, time: u32) -> bool {
        party.0 == self.block || self.follows(party, time)
    }

    pub fn has_seen(&self) -> bool {
        self.views.get(self.warp).is_some_and(|view| !view.seen.is_empty())
    }
}
