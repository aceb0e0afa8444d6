//! A decoded kernel: operations on register slots.
//!
//! Every operand is a slot. Immediates, special registers and addresses of variables have slots too, which are filled
//! when a warp begins.

use crate::convert::Conversion;
use crate::matrix::Element;
use crate::types::{One, Three, Two, Type};

pub(crate) type Slot = u32;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Initial {
    Constant(u64),
    /// `%tid` along an axis; the next three are `%ntid`, `%ctaid` and `%nctaid`.
    Thread(u8),
    Threads(u8),
    Block(u8),
    Blocks(u8),
    LaneNumber,
    WarpNumber,
    Warps,
    /// `%lanemask_eq`, `lt`, `le`, `gt`, `ge`.
    LaneMask(u8),
    DynamicShared,
    TotalShared,
    /// The offset of a module's variable, which is replaced by its address.
    Variable(u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemorySpace {
    Generic,
    Global,
    Shared,
    Local,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Address {
    pub base: Slot,
    pub offset: i64,
}

/// A list of up to eight slots.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slots {
    slots: [Slot; 8],
    count: u8,
}

impl Slots {
    pub fn new(from: &[Slot]) -> Option<Self> {
        let mut slots = [0; 8];
        slots.get_mut(..from.len())?.copy_from_slice(from);
        Some(Self { slots, count: from.len() as u8 })
    }

    pub fn as_slice(&self) -> &[Slot] {
        &self.slots[..usize::from(self.count)]
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Join {
    And,
    Or,
    Xor,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Atomic {
    Add,
    And,
    Or,
    Xor,
    Min,
    Max,
    Exchange,
    Compare,
    Increment,
    Decrement,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Vote {
    All,
    Any,
    Uniform,
    Ballot,
}

#[derive(Debug, Clone)]
pub(crate) enum Operation {
    One {
        f: One,
        d: Slot,
        a: Slot,
    },
    Two {
        f: Two,
        d: Slot,
        a: Slot,
        b: Slot,
    },
    Three {
        f: Three,
        d: Slot,
        a: Slot,
        b: Slot,
        c: Slot,
    },
    Move {
        d: Slot,
        a: Slot,
        keep: u64,
    },
    /// Parts of `bits` bits each.
    Pack {
        d: Slot,
        parts: Slots,
        bits: u32,
    },
    Unpack {
        parts: Slots,
        a: Slot,
        bits: u32,
    },
    Select {
        d: Slot,
        a: Slot,
        b: Slot,
        p: Slot,
        keep: u64,
    },
    /// Sets `d` to the comparison combined with `with`, and `other` to the negated comparison combined with `with`.
    Compare {
        f: Two,
        d: Slot,
        other: Option<Slot>,
        a: Slot,
        b: Slot,
        with: Option<(Join, Slot, bool)>,
    },
    /// `set`: the result is all ones (or 1.0) if the comparison holds.
    Set {
        f: Two,
        d: Slot,
        a: Slot,
        b: Slot,
        yes: u64,
    },
    Convert {
        conversion: Conversion,
        d: Slot,
        a: Slot,
        keep: u64,
    },
    ConvertPair {
        conversion: Conversion,
        d: Slot,
        a: Slot,
        b: Slot,
    },
    Insert {
        d: Slot,
        a: Slot,
        b: Slot,
        position: Slot,
        length: Slot,
        width: u32,
    },
    Logic3 {
        d: Slot,
        a: Slot,
        b: Slot,
        c: Slot,
        table: u8,
    },
    LoadParameter {
        d: Slots,
        offset: usize,
        ty: Type,
        keep: u64,
    },
    Load {
        place: MemorySpace,
        d: Slots,
        from: Address,
        ty: Type,
        keep: u64,
        strong: bool,
        acquire: bool,
    },
    Store {
        place: MemorySpace,
        to: Address,
        values: Slots,
        ty: Type,
        strong: bool,
        release: bool,
    },
    Atomic {
        place: MemorySpace,
        atomic: Atomic,
        ty: Type,
        d: Option<Slot>,
        at: Address,
        a: Slot,
        b: Slot,
        fence: bool,
    },
    /// Copies `bytes` bytes, of which `size` (a slot) are read, or none if `ignore` holds. The others become zero.
    CopyAsync {
        to: Address,
        from: Address,
        bytes: usize,
        size: Option<Slot>,
        ignore: Option<Slot>,
    },
    CopyCommit,
    /// Waits for all copy groups except the last `left`.
    CopyWait {
        left: u32,
    },
    CopyWaitAll,
    Branch {
        target: usize,
    },
    BranchIndex {
        index: Slot,
        targets: Vec<usize>,
    },
    Exit,
    Trap,
    /// `bar.sync`, or `bar.arrive` if not `waits`. `threads` is absent for the whole block.
    Barrier {
        id: Slot,
        threads: Option<Slot>,
        waits: bool,
    },
    /// `bar.red`: `popc` (count), `and`, `or` over the block.
    BarrierReduce {
        id: Slot,
        d: Slot,
        p: Slot,
        negated: bool,
        vote: Vote,
    },
    WarpBarrier {
        mask: Slot,
    },
    Shuffle {
        shuffle: Shuffle,
        d: Slot,
        p: Option<Slot>,
        a: Slot,
        b: Slot,
        c: Slot,
        mask: Slot,
    },
    Vote {
        vote: Vote,
        d: Slot,
        p: Slot,
        negated: bool,
        mask: Slot,
    },
    /// `match.any`, or `match.all` with its predicate.
    Match {
        d: Slot,
        p: Option<Slot>,
        a: Slot,
        all: bool,
        bits: u32,
        mask: Slot,
    },
    Reduce {
        atomic: Atomic,
        signed: bool,
        d: Slot,
        a: Slot,
        mask: Slot,
    },
    ActiveMask {
        d: Slot,
    },
    Elect {
        d: Slot,
        p: Slot,
        mask: Slot,
    },
    Fence,
    LoadMatrix {
        d: Slots,
        from: Address,
        transposed: bool,
        place: MemorySpace,
    },
    StoreMatrix {
        to: Address,
        values: Slots,
        transposed: bool,
        place: MemorySpace,
    },
    MoveMatrix {
        d: Slot,
        a: Slot,
    },
    MultiplyFloats {
        element: Element,
        d: Slots,
        a: Slots,
        b: Slots,
        c: Slots,
    },
    MultiplyIntegers {
        elements: [Element; 2],
        d: Slots,
        a: Slots,
        b: Slots,
        c: Slots,
        saturate: bool,
    },
    Nothing,
    Unsupported,
}

impl Operation {
    /// Whether other warps may run after this operation.
    pub fn yields(&self) -> bool {
        matches!(
            self,
            Self::Load { .. }
                | Self::Store { .. }
                | Self::Atomic { .. }
                | Self::CopyAsync { .. }
                | Self::CopyWait { .. }
                | Self::CopyWaitAll
                | Self::LoadMatrix { .. }
                | Self::StoreMatrix { .. }
                | Self::Fence
        )
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Instruction {
    pub operation: Operation,
    /// A predicate, and whether it is negated.
    pub guard: Option<(Slot, bool)>,
    /// The index in the kernel's list of opcode names.
    pub opcode: usize,
    pub line: u32,
    pub source: (u32, u32),
}

#[derive(Debug, Clone)]
pub(crate) struct Parameter {
    pub ty: Type,
    pub offset: usize,
    pub bytes: usize,
}

#[derive(Debug, Clone)]
pub(crate) struct Kernel {
    pub name: String,
    pub parameters: Vec<Parameter>,
    pub parameter_bytes: usize,
    pub max_threads: Option<[u32; 3]>,
    /// In bytes; dynamic shared memory follows.
    pub static_shared: usize,
    pub local_bytes: usize,
    pub slots: usize,
    pub initial: Vec<(Slot, Initial)>,
    pub opcodes: Vec<String>,
    pub instructions: Vec<Instruction>,
}
