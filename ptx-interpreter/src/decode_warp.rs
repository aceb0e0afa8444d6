//! Decodes statements to operations: barriers, exchanges between lanes, and matrix instructions.

use crate::decode::{Opcode, operand};
use crate::error::Result;
use crate::matrix::Element;
use crate::operation::{Atomic, MemorySpace, Operation, Shuffle, Vote};
use crate::resolve::Resolver;
use crate::statement::{Operand, Statement};
use crate::types::Type;

/// `None` if the statement is of a different kind or has unsupported modifiers.
pub(crate) fn warp<'a>(r: &mut Resolver<'a>, s: &Statement<'a>, o: &Opcode<'_>) -> Result<Option<Operation>> {
    Ok(match o.name {
        "bar" | "barrier" => barrier(r, s, o)?,
        "shfl" => shuffle(r, s, o)?,
        "vote" => vote(r, s, o)?,
        "match" => matches(r, s, o)?,
        "redux" => reduce(r, s, o)?,
        "activemask" => Some(Operation::ActiveMask { d: r.destination(s, operand(s, 0)?)?.0 }),
        "elect" => {
            let (d, p) = both(r, s)?;
            let mask = r.source(s, operand(s, 1)?, Type::U32)?;
            p.map(|p| Operation::Elect { d, p, mask })
        }
        "ldmatrix" | "stmatrix" => matrix_access(r, s, o)?,
        "movmatrix" if o.modifiers == ["sync", "aligned", "m8n8", "trans"] => {
            let (d, _) = r.destination(s, operand(s, 0)?)?;
            Some(Operation::MoveMatrix { d, a: r.source(s, operand(s, 1)?, Type::B32)? })
        }
        "mma" => multiply(r, s, o)?,
        _ => None,
    })
}

/// Decodes a destination `d|p` or `d`.
fn both<'a>(r: &mut Resolver<'a>, s: &Statement<'a>) -> Result<(u32, Option<u32>)> {
    match operand(s, 0)? {
        Operand::Both(d, p) => {
            let (d, _) = r.destination(s, &Operand::Name(d))?;
            Ok((d, Some(r.destination(s, &Operand::Name(p))?.0)))
        }
        single => Ok((r.destination(s, single)?.0, None)),
    }
}

fn barrier<'a>(r: &mut Resolver<'a>, s: &Statement<'a>, o: &Opcode<'_>) -> Result<Option<Operation>> {
    let parts: Vec<_> = o.modifiers.iter().copied().filter(|m| !matches!(*m, "cta" | "aligned")).collect();
    Ok(match parts.as_slice() {
        ["warp", "sync"] => Some(Operation::WarpBarrier { mask: r.source(s, operand(s, 0)?, Type::U32)? }),
        ["sync"] | ["arrive"] => {
            let id = r.source(s, operand(s, 0)?, Type::U32)?;
            let threads = s.operands.get(1).map(|t| r.source(s, t, Type::U32)).transpose()?;
            Some(Operation::Barrier { id, threads, waits: parts == ["sync"] })
        }
        ["red", which] if s.operands.len() == 3 => {
            let vote = match *which {
                "popc" => Vote::Ballot,
                "and" => Vote::All,
                "or" => Vote::Any,
                _ => return Ok(None),
            };
            let (d, _) = r.destination(s, operand(s, 0)?)?;
            let id = r.source(s, operand(s, 1)?, Type::U32)?;
            let (p, negated) = r.predicate(s, operand(s, 2)?)?;
            Some(Operation::BarrierReduce { id, d, p, negated, vote })
        }
        _ => None,
    })
}

fn shuffle<'a>(r: &mut Resolver<'a>, s: &Statement<'a>, o: &Opcode<'_>) -> Result<Option<Operation>> {
    let shuffle = match o.modifiers.as_slice() {
        ["sync", "up"] => Shuffle::Up,
        ["sync", "down"] => Shuffle::Down,
        ["sync", "bfly"] => Shuffle::Butterfly,
        ["sync", "idx"] => Shuffle::Index,
        _ => return Ok(None),
    };
    let (d, p) = both(r, s)?;
    let a = r.source(s, operand(s, 1)?, Type::B32)?;
    let b = r.source(s, operand(s, 2)?, Type::U32)?;
    let c = r.source(s, operand(s, 3)?, Type::U32)?;
    let mask = r.source(s, operand(s, 4)?, Type::U32)?;
    Ok(Some(Operation::Shuffle { shuffle, d, p, a, b, c, mask }))
}

fn vote<'a>(r: &mut Resolver<'a>, s: &Statement<'a>, o: &Opcode<'_>) -> Result<Option<Operation>> {
    let vote = match o.modifiers.as_slice() {
        ["sync", "all"] => Vote::All,
        ["sync", "any"] => Vote::Any,
        ["sync", "uni"] => Vote::Uniform,
        ["sync", "ballot"] => Vote::Ballot,
        _ => return Ok(None),
    };
    let (d, _) = r.destination(s, operand(s, 0)?)?;
    let (p, negated) = r.predicate(s, operand(s, 1)?)?;
    let mask = r.source(s, operand(s, 2)?, Type::U32)?;
    Ok(Some(Operation::Vote { vote, d, p, negated, mask }))
}

fn matches<'a>(r: &mut Resolver<'a>, s: &Statement<'a>, o: &Opcode<'_>) -> Result<Option<Operation>> {
    let all = match o.modifiers.as_slice() {
        ["any", "sync"] => false,
        ["all", "sync"] => true,
        _ => return Ok(None),
    };
    let Some(ty) = o.types.first() else { return Ok(None) };
    let (d, p) = both(r, s)?;
    let a = r.source(s, operand(s, 1)?, *ty)?;
    let mask = r.source(s, operand(s, 2)?, Type::U32)?;
    Ok(Some(Operation::Match { d, p, a, all, bits: ty.bits(), mask }))
}

fn reduce<'a>(r: &mut Resolver<'a>, s: &Statement<'a>, o: &Opcode<'_>) -> Result<Option<Operation>> {
    let atomic = match o.modifiers.as_slice() {
        ["sync", "add"] => Atomic::Add,
        ["sync", "min"] => Atomic::Min,
        ["sync", "max"] => Atomic::Max,
        ["sync", "and"] => Atomic::And,
        ["sync", "or"] => Atomic::Or,
        ["sync", "xor"] => Atomic::Xor,
        _ => return Ok(None),
    };
    let Some(ty) = o.types.first().filter(|ty| ty.bits() == 32 && **ty != Type::F32) else { return Ok(None) };
    let (d, _) = r.destination(s, operand(s, 0)?)?;
    let a = r.source(s, operand(s, 1)?, *ty)?;
    let mask = r.source(s, operand(s, 2)?, Type::U32)?;
    Ok(Some(Operation::Reduce { atomic, signed: ty.is_signed(), d, a, mask }))
}

fn matrix_access<'a>(r: &mut Resolver<'a>, s: &Statement<'a>, o: &Opcode<'_>) -> Result<Option<Operation>> {
    let known = ["sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta"];
    if !o.only(&known) || !o.has("m8n8") || o.types != [Type::B16] {
        return Ok(None);
    }
    let count = if o.has("x4") {
        4
    } else if o.has("x2") {
        2
    } else {
        1
    };
    let place =
        if o.has("shared") || o.has("shared::cta") { MemorySpace::Shared } else { MemorySpace::Generic };
    let transposed = o.has("trans");
    let (operation, got) = if o.name == "ldmatrix" {
        let (d, _) = r.destinations(s, operand(s, 0)?)?;
        let from = r.address(s, operand(s, 1)?)?;
        (Operation::LoadMatrix { d, from, transposed, place }, d.as_slice().len())
    } else {
        let to = r.address(s, operand(s, 0)?)?;
        let values = r.sources(s, operand(s, 1)?, Type::B32)?;
        (Operation::StoreMatrix { to, values, transposed, place }, values.as_slice().len())
    };
    if got != count {
        return Resolver::wrong(s, format!("{got} registers for {count} matrices"));
    }
    Ok(Some(operation))
}

fn multiply<'a>(r: &mut Resolver<'a>, s: &Statement<'a>, o: &Opcode<'_>) -> Result<Option<Operation>> {
    // Element types such as `s4` are not fundamental types. Their order is D, A, B, C.
    let names: Vec<_> = s.opcode.split('.').skip(1).collect();
    let ["sync", "aligned", shape, "row", "col", rest @ ..] = names.as_slice() else { return Ok(None) };
    let saturate = rest.first() == Some(&"satfinite");
    let [d_name, a_name, b_name, c_name] = rest[usize::from(saturate)..] else { return Ok(None) };
    let (Some(ea), Some(eb)) = (Element::named(a_name), Element::named(b_name)) else { return Ok(None) };
    let _ = o;
    let depth = match *shape {
        "m16n8k8" => 8,
        "m16n8k16" => 16,
        "m16n8k32" => 32,
        "m16n8k64" => 64,
        _ => return Ok(None),
    };
    // B has `8 · depth` elements in registers of 32 bits in 32 lanes.
    let b_count = depth * ea.bits() / 128;
    let float = ea.is_float() && ea == eb && !saturate;
    let sums = match (d_name, c_name) {
        ("f32", "f32") if float => 4,
        ("f16", "f16") if float && ea == Element::F16 => 2,
        ("s32", "s32") if !ea.is_float() && ea.bits() == eb.bits() => 4,
        _ => return Ok(None),
    };
    if !matches!(b_count, 1 | 2) || b_count * 128 != depth * ea.bits() {
        return Ok(None);
    }
    let (d, _) = r.destinations(s, operand(s, 0)?)?;
    let a = r.sources(s, operand(s, 1)?, Type::B32)?;
    let b = r.sources(s, operand(s, 2)?, Type::B32)?;
    let ty = if d_name == "f32" { Type::F32 } else { Type::B32 };
    let c = r.sources(s, operand(s, 3)?, ty)?;
    let counts = [d, a, b, c].map(|slots| slots.as_slice().len());
    if counts != [sums, 2 * b_count, b_count, sums] {
        return Resolver::wrong(s, format!("fragments of {counts:?} registers do not fit the shape"));
    }
    Ok(Some(if float {
        Operation::MultiplyFloats { element: ea, d, a, b, c }
    } else {
        Operation::MultiplyIntegers { elements: [ea, eb], d, a, b, c, saturate }
    }))
}
