//! Decodes statements to operations: arithmetic, moves, comparisons and control flow.

use crate::convert::{Conversion, fast_pack};
use crate::decode_memory::memory;
use crate::decode_warp::warp;
use crate::error::Result;
use crate::float::Modifiers;
use crate::operation::{Instruction, Join, Kernel, Operation};
use crate::resolve::{LOCAL_WINDOW, Resolver, SHARED_WINDOW};
use crate::rounding::Direction;
use crate::statement::{Entry, Operand, Statement, Variable};
use crate::types::{Type, low_bits, two};
use crate::{float, integer};

pub(crate) struct Opcode<'a> {
    pub name: &'a str,
    pub modifiers: Vec<&'a str>,
    pub types: Vec<Type>,
}

impl<'a> Opcode<'a> {
    fn new(text: &'a str) -> Self {
        let mut parts = text.split('.');
        let name = parts.next().unwrap_or_default();
        let (mut modifiers, mut types) = (Vec::new(), Vec::new());
        for part in parts {
            match Type::named(part) {
                Some(ty) => types.push(ty),
                None => modifiers.push(part),
            }
        }
        Self { name, modifiers, types }
    }

    pub fn has(&self, modifier: &str) -> bool {
        self.modifiers.contains(&modifier)
    }

    /// Whether every modifier is one of these. An unknown modifier could change the meaning.
    pub fn only(&self, known: &[&str]) -> bool {
        self.modifiers.iter().all(|m| known.contains(m))
    }

    fn direction(&self) -> Option<Direction> {
        self.modifiers.iter().find_map(|m| Direction::named(m))
    }

    fn modifiers(&self) -> Modifiers {
        Modifiers {
            ftz: self.has("ftz"),
            sat: self.has("sat"),
            relu: self.has("relu"),
            nan: self.has("NaN"),
            direction: self.direction().unwrap_or(Direction::Nearest),
        }
    }
}

pub(crate) fn operand<'s, 'a>(statement: &'s Statement<'a>, index: usize) -> Result<&'s Operand<'a>> {
    match statement.operands.get(index) {
        Some(operand) => Ok(operand),
        None => Resolver::wrong(statement, format!("operand {index} is missing")),
    }
}

const FLOAT_MODIFIERS: &[&str] = &["rn", "rz", "rm", "rp", "ftz", "sat", "relu", "NaN", "approx", "full"];

pub(crate) fn kernel<'a>(entry: &'a Entry<'a>, module: &'a [Variable<'a>]) -> Result<Kernel> {
    let mut resolver = Resolver::new(entry, module);
    let mut opcodes: Vec<String> = Vec::new();
    let mut numbers = std::collections::HashMap::new();
    let mut instructions = Vec::with_capacity(entry.statements.len() + 1);
    for statement in &entry.statements {
        let opcode = *numbers.entry(statement.opcode).or_insert_with(|| {
            opcodes.push(statement.opcode.to_owned());
            opcodes.len() - 1
        });
        let guard = match statement.guard {
            None => None,
            Some((name, negative)) => {
                Some((resolver.source(statement, &Operand::Name(name), Type::Pred)?, negative))
            }
        };
        let operation = decode(&mut resolver, statement)?;
        let (line, source) = (statement.line, statement.source);
        instructions.push(Instruction { operation, guard, opcode, line, source });
    }
    // A label may follow the last statement, and a text may lack the final `ret`.
    let (line, source) = entry.statements.last().map_or((0, (0, 0)), |s| (s.line, s.source));
    opcodes.push("(end)".to_owned());
    let opcode = opcodes.len() - 1;
    instructions.push(Instruction { operation: Operation::Exit, guard: None, opcode, line, source });
    Ok(Kernel {
        name: entry.name.to_owned(),
        parameters: std::mem::take(&mut resolver.parameters),
        parameter_bytes: resolver.parameter_bytes,
        max_threads: entry.max_threads,
        static_shared: resolver.static_shared,
        local_bytes: resolver.local_bytes,
        slots: resolver.slots(),
        initial: resolver.initial(),
        opcodes,
        instructions,
    })
}

fn decode<'a>(r: &mut Resolver<'a>, s: &Statement<'a>) -> Result<Operation> {
    let opcode = Opcode::new(s.opcode);
    let found = match opcode.name {
        "mov" => Some(movement(r, s, &opcode)?),
        "cvta" => Some(window(r, s, &opcode)?),
        "cvt" => conversion(r, s, &opcode)?,
        "selp" | "slct" => selection(r, s, &opcode)?,
        "setp" => comparison(r, s, &opcode)?,
        "set" => set(r, s, &opcode)?,
        "bra" | "brx" | "ret" | "exit" | "trap" => control(r, s, &opcode)?,
        "lop3" if opcode.modifiers.is_empty() && opcode.types == [Type::B32] => Some(logic3(r, s)?),
        "bfi" if matches!(opcode.types[..], [Type::B32 | Type::B64]) => insert(r, s, &opcode)?,
        "nop" | "griddepcontrol" | "prefetch" | "prefetchu" | "nanosleep" | "pmevent" | "setmaxnreg"
        | "applypriority" | "discard" => Some(Operation::Nothing),
        _ => {
            let found = arithmetic(r, s, &opcode)?;
            let found = if found.is_none() { memory(r, s, &opcode)? } else { found };
            if found.is_none() { warp(r, s, &opcode)? } else { found }
        }
    };
    Ok(found.unwrap_or(Operation::Unsupported))
}

fn arithmetic<'a>(r: &mut Resolver<'a>, s: &Statement<'a>, o: &Opcode<'_>) -> Result<Option<Operation>> {
    let Some(&ty) = o.types.first() else { return Ok(None) };
    let is_float = ty.is_wide_float() || matches!(ty, Type::F16 | Type::F16x2 | Type::Bf16 | Type::Bf16x2);
    if is_float && !o.only(FLOAT_MODIFIERS) {
        return Ok(None);
    }
    let modifiers = o.modifiers();
    let name = if o.modifiers.is_empty() {
        o.name.to_owned()
    } else {
        format!("{}.{}", o.name, o.modifiers.join("."))
    };
    let part = o.modifiers.first().copied().unwrap_or_default();
    let one = if is_float { float::unary(o.name, ty, modifiers) } else { integer::unary(&name, ty) };
    if let Some(f) = one {
        let (d, _) = r.destination(s, operand(s, 0)?)?;
        return Ok(Some(Operation::One { f, d, a: r.source(s, operand(s, 1)?, ty)? }));
    }
    let two = match (is_float, o.name) {
        (true, _) => float::binary(o.name, ty, modifiers),
        (false, "mul") if o.modifiers.len() == 1 => integer::multiply(part, ty),
        (false, _) => integer::binary(&name, ty),
    };
    if let Some(f) = two {
        let (d, _) = r.destination(s, operand(s, 0)?)?;
        let a = r.source(s, operand(s, 1)?, ty)?;
        let second = if matches!(o.name, "shl" | "shr") { Type::U32 } else { ty };
        return Ok(Some(Operation::Two { f, d, a, b: r.source(s, operand(s, 2)?, second)? }));
    }
    let three = match (is_float, o.name) {
        (true, "fma" | "mad") => float::multiply_add(ty, modifiers),
        (false, "mad") if o.modifiers.len() == 1 => integer::multiply_add(part, ty),
        (false, _) => integer::ternary(&name, &o.types),
        _ => None,
    };
    let Some(f) = three else { return Ok(None) };
    let (d, _) = r.destination(s, operand(s, 0)?)?;
    let a = r.source(s, operand(s, 1)?, ty)?;
    let small = o.name == "bfe";
    let b = r.source(s, operand(s, 2)?, if small { Type::U32 } else { ty })?;
    let last = match (o.name, part, ty) {
        ("mad", "wide", _) => Type::U64,
        _ if small => Type::U32,
        _ => ty,
    };
    Ok(Some(Operation::Three { f, d, a, b, c: r.source(s, operand(s, 3)?, last)? }))
}

fn movement<'a>(r: &mut Resolver<'a>, s: &Statement<'a>, o: &Opcode<'_>) -> Result<Operation> {
    let ty = o.types.first().copied().unwrap_or(Type::B32);
    let (to, from) = (operand(s, 0)?, operand(s, 1)?);
    if !o.modifiers.is_empty() || o.types.len() != 1 || ty == Type::B128 {
        return Ok(Operation::Unsupported);
    }
    if let Operand::Vector(parts) = from {
        let bits = ty.bits() / parts.len().max(1) as u32;
        let part = match bits {
            8 => Type::B8,
            16 => Type::B16,
            32 => Type::B32,
            _ => return Resolver::wrong(s, "a vector does not fill its type"),
        };
        let (d, _) = r.destination(s, to)?;
        return Ok(Operation::Pack { d, parts: r.sources(s, from, part)?, bits });
    }
    if let Operand::Vector(parts) = to {
        let bits = ty.bits() / parts.len().max(1) as u32;
        let (parts, _) = r.destinations(s, to)?;
        return Ok(Operation::Unpack { parts, a: r.source(s, from, ty)?, bits });
    }
    let (d, _) = r.destination(s, to)?;
    // An unsupported special register is like an unsupported instruction.
    if let Operand::Name(name) = from
        && name.starts_with('%')
        && !r.knows(s, name)
    {
        return Ok(Operation::Unsupported);
    }
    let a = r.source(s, from, ty)?;
    Ok(Operation::Move { d, a, keep: low_bits(ty.bits()) })
}

fn window<'a>(r: &mut Resolver<'a>, s: &Statement<'a>, o: &Opcode<'_>) -> Result<Operation> {
    let ty = o.types.first().copied().unwrap_or(Type::U64);
    let (d, _) = r.destination(s, operand(s, 0)?)?;
    let a = r.source(s, operand(s, 1)?, ty)?;
    if !o.only(&["to", "global", "const", "shared", "shared::cta", "local", "param"]) || o.has("param") {
        return Ok(Operation::Unsupported);
    }
    let base = if o.has("shared") || o.has("shared::cta") {
        SHARED_WINDOW
    } else if o.has("local") {
        LOCAL_WINDOW
    } else {
        return Ok(Operation::Move { d, a, keep: low_bits(ty.bits()) });
    };
    let b = r.constant(crate::operation::Initial::Constant(base));
    let f =
        if o.has("to") { two!(u64, |a, b| a.wrapping_sub(b)) } else { two!(u64, |a, b| a.wrapping_add(b)) };
    Ok(Operation::Two { f, d, a, b })
}

fn conversion<'a>(r: &mut Resolver<'a>, s: &Statement<'a>, o: &Opcode<'_>) -> Result<Option<Operation>> {
    let known = ["rn", "rna", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "ftz", "sat", "relu"];
    let &[to, from] = o.types.as_slice() else { return Ok(None) };
    if !o.only(&known) {
        return Ok(None);
    }
    let integral = o.modifiers.iter().any(|m| matches!(*m, "rni" | "rzi" | "rmi" | "rpi"));
    let conversion = Conversion {
        to,
        from,
        direction: o.direction(),
        integral,
        ftz: o.has("ftz"),
        sat: o.has("sat"),
        relu: o.has("relu"),
    };
    let (d, register) = r.destination(s, operand(s, 0)?)?;
    let a = r.source(s, operand(s, 1)?, from)?;
    if matches!(to, Type::F16x2 | Type::Bf16x2) {
        if from != Type::F32 {
            return Ok(None);
        }
        let b = r.source(s, operand(s, 2)?, from)?;
        return Ok(Some(match fast_pack(&conversion) {
            Some(f) => Operation::Two { f, d, a, b },
            None => Operation::ConvertPair { conversion, d, a, b },
        }));
    }
    if !conversion.is_known() {
        return Ok(None);
    }
    // A fast function does not extend the sign to a wider register.
    let same = register.bits() == to.bits() || !to.is_signed();
    if let Some(f) = conversion.fast().filter(|_| same) {
        return Ok(Some(Operation::One { f, d, a }));
    }
    Ok(Some(Operation::Convert { conversion, d, a, keep: low_bits(register.bits()) }))
}

fn selection<'a>(r: &mut Resolver<'a>, s: &Statement<'a>, o: &Opcode<'_>) -> Result<Option<Operation>> {
    let Some(&ty) = o.types.first() else { return Ok(None) };
    let (d, _) = r.destination(s, operand(s, 0)?)?;
    let a = r.source(s, operand(s, 1)?, ty)?;
    let b = r.source(s, operand(s, 2)?, ty)?;
    if o.name == "slct" || !o.modifiers.is_empty() {
        return Ok(None);
    }
    let p = r.source(s, operand(s, 3)?, Type::Pred)?;
    Ok(Some(Operation::Select { d, a, b, p, keep: low_bits(ty.bits()) }))
}

fn join(o: &Opcode<'_>) -> Option<Join> {
    o.modifiers.iter().find_map(|m| match *m {
        "and" => Some(Join::And),
        "or" => Some(Join::Or),
        "xor" => Some(Join::Xor),
        _ => None,
    })
}

fn compare_function(o: &Opcode<'_>, ty: Type) -> Option<crate::types::Two> {
    let name = *o.modifiers.first()?;
    let is_float = ty.is_wide_float() || matches!(ty, Type::F16 | Type::Bf16);
    if !o.modifiers[1..].iter().all(|m| matches!(*m, "and" | "or" | "xor" | "ftz")) {
        return None;
    }
    if is_float { float::compare(name, ty, o.has("ftz")) } else { integer::compare(name, ty) }
}

fn comparison<'a>(r: &mut Resolver<'a>, s: &Statement<'a>, o: &Opcode<'_>) -> Result<Option<Operation>> {
    let Some(&ty) = o.types.last() else { return Ok(None) };
    let Some(f) = compare_function(o, ty) else { return Ok(None) };
    let (d, other) = match operand(s, 0)? {
        Operand::Both(d, other) => {
            let (other, _) = r.destination(s, &Operand::Name(other))?;
            (r.destination(s, &Operand::Name(d))?.0, Some(other))
        }
        single => (r.destination(s, single)?.0, None),
    };
    let a = r.source(s, operand(s, 1)?, ty)?;
    let b = r.source(s, operand(s, 2)?, ty)?;
    let with = match join(o) {
        None => None,
        Some(join) => {
            let (p, negated) = r.predicate(s, operand(s, 3)?)?;
            Some((join, p, negated))
        }
    };
    Ok(Some(Operation::Compare { f, d, other, a, b, with }))
}

fn set<'a>(r: &mut Resolver<'a>, s: &Statement<'a>, o: &Opcode<'_>) -> Result<Option<Operation>> {
    let &[to, ty] = o.types.as_slice() else { return Ok(None) };
    let Some(f) = compare_function(o, ty).filter(|_| join(o).is_none()) else { return Ok(None) };
    let yes = match to {
        Type::U32 | Type::S32 => low_bits(32),
        Type::F32 => u64::from(1f32.to_bits()),
        _ => return Ok(None),
    };
    let (d, _) = r.destination(s, operand(s, 0)?)?;
    let a = r.source(s, operand(s, 1)?, ty)?;
    Ok(Some(Operation::Set { f, d, a, b: r.source(s, operand(s, 2)?, ty)?, yes }))
}

fn control<'a>(r: &mut Resolver<'a>, s: &Statement<'a>, o: &Opcode<'_>) -> Result<Option<Operation>> {
    Ok(Some(match o.name {
        "bra" => match operand(s, 0)? {
            Operand::Name(name) => Operation::Branch { target: r.label(s, name)? },
            other => return Resolver::wrong(s, format!("{other:?} is not a label")),
        },
        "brx" => {
            let index = r.source(s, operand(s, 0)?, Type::U32)?;
            let Operand::Name(list) = operand(s, 1)? else {
                return Resolver::wrong(s, "the second operand must name a list of targets");
            };
            let targets = r.targets(s, list)?.iter().map(|name| r.label(s, name)).collect::<Result<_>>()?;
            Operation::BranchIndex { index, targets }
        }
        "trap" => Operation::Trap,
        _ => Operation::Exit,
    }))
}

fn logic3<'a>(r: &mut Resolver<'a>, s: &Statement<'a>) -> Result<Operation> {
    let (d, _) = r.destination(s, operand(s, 0)?)?;
    let a = r.source(s, operand(s, 1)?, Type::B32)?;
    let b = r.source(s, operand(s, 2)?, Type::B32)?;
    let c = r.source(s, operand(s, 3)?, Type::B32)?;
    let table = match operand(s, 4)? {
        Operand::Number(word, false) => crate::number::integer(word).and_then(|v| u8::try_from(v).ok()),
        _ => None,
    };
    match table {
        Some(table) => Ok(Operation::Logic3 { d, a, b, c, table }),
        None => Resolver::wrong(s, "the lookup table must be a number below 256"),
    }
}

fn insert<'a>(r: &mut Resolver<'a>, s: &Statement<'a>, o: &Opcode<'_>) -> Result<Option<Operation>> {
    let Some(&ty) = o.types.first() else { return Ok(None) };
    let (d, _) = r.destination(s, operand(s, 0)?)?;
    let a = r.source(s, operand(s, 1)?, ty)?;
    let b = r.source(s, operand(s, 2)?, ty)?;
    let position = r.source(s, operand(s, 3)?, Type::U32)?;
    let length = r.source(s, operand(s, 4)?, Type::U32)?;
    Ok(Some(Operation::Insert { d, a, b, position, length, width: ty.bits() }))
}
