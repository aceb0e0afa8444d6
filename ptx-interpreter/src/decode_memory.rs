//! Decodes statements to operations: loads, stores, atomics, fences and asynchronous copies.

use crate::decode::{Opcode, operand};
use crate::error::Result;
use crate::number::integer;
use crate::operation::{Atomic, MemorySpace, Operation};
use crate::resolve::Resolver;
use crate::statement::{Operand, Statement};
use crate::types::{Type, low_bits};

const CACHE: &[&str] = &[
    "global",
    "shared",
    "shared::cta",
    "local",
    "const",
    "nc",
    "ca",
    "cg",
    "cs",
    "cv",
    "lu",
    "wb",
    "wt",
    "weak",
    "volatile",
    "relaxed",
    "acquire",
    "release",
    "cta",
    "gpu",
    "sys",
    "v2",
    "v4",
    "v8",
    "L1::evict_normal",
    "L1::evict_last",
    "L1::evict_first",
    "L1::no_allocate",
    "L1::evict_unchanged",
    "L2::evict_last",
    "L2::evict_normal",
    "L2::evict_first",
    "L2::cache_hint",
    "L2::64B",
    "L2::128B",
    "L2::256B",
];

fn place(o: &Opcode<'_>) -> MemorySpace {
    if o.has("shared") || o.has("shared::cta") {
        MemorySpace::Shared
    } else if o.has("local") {
        MemorySpace::Local
    } else if o.has("global") || o.has("const") {
        MemorySpace::Global
    } else {
        MemorySpace::Generic
    }
}

/// `None` if the statement is of a different kind or has unsupported modifiers.
pub(crate) fn memory<'a>(
    r: &mut Resolver<'a>,
    s: &Statement<'a>,
    o: &Opcode<'_>,
) -> Result<Option<Operation>> {
    Ok(match o.name {
        "ld" | "ldu" => load(r, s, o)?,
        "st" => store(r, s, o)?,
        "atom" | "red" => atomic(r, s, o)?,
        "fence" if o.only(&["acq_rel", "sc", "acquire", "release", "cta", "gpu", "sys", "cluster"]) => {
            // A fence of block scope does not order accesses between blocks.
            Some(if o.has("cta") { Operation::Nothing } else { Operation::Fence })
        }
        "membar" if o.only(&["gl", "sys"]) => Some(Operation::Fence),
        "membar" if o.only(&["cta"]) => Some(Operation::Nothing),
        "cp" if o.has("async") => copy(r, s, o)?,
        _ => None,
    })
}

fn load<'a>(r: &mut Resolver<'a>, s: &Statement<'a>, o: &Opcode<'_>) -> Result<Option<Operation>> {
    let &[ty] = o.types.as_slice() else { return Ok(None) };
    if ty == Type::B128 {
        return Ok(None);
    }
    let (d, register) = r.destinations(s, operand(s, 0)?)?;
    let keep = low_bits(register.bits());
    if o.has("param") || o.has("param::entry") {
        let offset = r.parameter(s, operand(s, 1)?)?;
        if offset + ty.bytes() * d.as_slice().len() > r.parameter_bytes {
            return Resolver::wrong(s, "beyond the end of the parameters");
        }
        return Ok(Some(Operation::LoadParameter { d, offset, ty, keep }));
    }
    if !o.only(CACHE) {
        return Ok(None);
    }
    let from = r.address(s, operand(s, 1)?)?;
    let strong = o.has("volatile") || o.has("relaxed") || o.has("acquire");
    Ok(Some(Operation::Load { place: place(o), d, from, ty, keep, strong, acquire: o.has("acquire") }))
}

fn store<'a>(r: &mut Resolver<'a>, s: &Statement<'a>, o: &Opcode<'_>) -> Result<Option<Operation>> {
    let &[ty] = o.types.as_slice() else { return Ok(None) };
    if ty == Type::B128 || !o.only(CACHE) {
        return Ok(None);
    }
    let to = r.address(s, operand(s, 0)?)?;
    let values = r.sources(s, operand(s, 1)?, ty)?;
    let strong = o.has("volatile") || o.has("relaxed") || o.has("release");
    Ok(Some(Operation::Store { place: place(o), to, values, ty, strong, release: o.has("release") }))
}

fn atomic<'a>(r: &mut Resolver<'a>, s: &Statement<'a>, o: &Opcode<'_>) -> Result<Option<Operation>> {
    let &[ty] = o.types.as_slice() else { return Ok(None) };
    let known = [
        "global",
        "shared",
        "shared::cta",
        "relaxed",
        "acquire",
        "release",
        "acq_rel",
        "cta",
        "gpu",
        "sys",
        "noftz",
        "L2::cache_hint",
        "add",
        "and",
        "or",
        "xor",
        "min",
        "max",
        "exch",
        "cas",
        "inc",
        "dec",
    ];
    if !o.only(&known) || ty == Type::B128 {
        return Ok(None);
    }
    let which = o.modifiers.iter().find_map(|m| {
        Some(match *m {
            "add" => Atomic::Add,
            "and" => Atomic::And,
            "or" => Atomic::Or,
            "xor" => Atomic::Xor,
            "min" => Atomic::Min,
            "max" => Atomic::Max,
            "exch" => Atomic::Exchange,
            "cas" => Atomic::Compare,
            "inc" => Atomic::Increment,
            "dec" => Atomic::Decrement,
            _ => return None,
        })
    });
    let Some(which) = which else { return Ok(None) };
    let first = usize::from(o.name == "atom");
    let d = if first == 1 { Some(r.destination(s, operand(s, 0)?)?.0) } else { None };
    let at = r.address(s, operand(s, first)?)?;
    let a = r.source(s, operand(s, first + 1)?, ty)?;
    let b = if which == Atomic::Compare { r.source(s, operand(s, first + 2)?, ty)? } else { a };
    let fence = o.has("acq_rel") || o.has("release") || o.has("acquire");
    Ok(Some(Operation::Atomic { place: place(o), atomic: which, ty, d, at, a, b, fence }))
}

fn constant(s: &Statement<'_>, index: usize) -> Result<u64> {
    if let Operand::Number(word, false) = operand(s, index)?
        && let Some(value) = integer(word)
    {
        return Ok(value);
    }
    Resolver::wrong(s, format!("operand {index} is not a constant"))
}

fn copy<'a>(r: &mut Resolver<'a>, s: &Statement<'a>, o: &Opcode<'_>) -> Result<Option<Operation>> {
    match o.modifiers.as_slice() {
        ["async", "commit_group"] => return Ok(Some(Operation::CopyCommit)),
        ["async", "wait_all"] => return Ok(Some(Operation::CopyWaitAll)),
        ["async", "wait_group"] => {
            let left = constant(s, 0)?.min(u64::from(u32::MAX)) as u32;
            return Ok(Some(Operation::CopyWait { left }));
        }
        ["async", "ca" | "cg", "shared" | "shared::cta", "global", ..] => {}
        _ => return Ok(None),
    }
    if !o.types.is_empty() || !o.modifiers[4..].iter().all(|m| m.starts_with("L2::")) {
        return Ok(None);
    }
    let to = r.address(s, operand(s, 0)?)?;
    let from = r.address(s, operand(s, 1)?)?;
    let bytes = constant(s, 2)? as usize;
    if !matches!(bytes, 4 | 8 | 16) || (o.has("cg") && bytes != 16) {
        return Resolver::wrong(s, format!("copies must have 4, 8 or 16 bytes (`cg`: 16), not {bytes}"));
    }
    // A fourth operand is the number of bytes to read, or a predicate that disables the read. A cache policy comes
    // last.
    let (mut size, mut ignore) = (None, None);
    let policy = usize::from(o.has("L2::cache_hint"));
    if s.operands.len() > 3 + policy {
        let operand = operand(s, 3)?;
        let is_predicate = match operand {
            Operand::Name(name) => r.register(s, name).is_some_and(|(_, ty)| ty == Type::Pred),
            _ => false,
        };
        let slot = r.source(s, operand, Type::U32)?;
        if is_predicate { ignore = Some(slot) } else { size = Some(slot) }
    }
    Ok(Some(Operation::CopyAsync { to, from, bytes, size, ignore }))
}
