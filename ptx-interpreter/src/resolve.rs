//! Resolves names to slots: registers, numbers, special registers, variables and labels of a kernel.

use std::collections::HashMap;

use crate::error::{Error, Result};
use crate::number::number;
use crate::operation::{Address, Initial, Parameter, Slot, Slots};
use crate::statement::{Entry, Operand, Scope, Space, Statement, Variable};
use crate::types::{Type, low_bits};

/// The address of shared memory in the generic address space.
pub(crate) const SHARED_WINDOW: u64 = 1 << 56;
/// The address of local memory in the generic address space.
pub(crate) const LOCAL_WINDOW: u64 = 2 << 56;

pub(crate) struct Resolver<'a> {
    scopes: &'a [Scope<'a>],
    registers: HashMap<(usize, &'a str), (Slot, Type)>,
    initial: HashMap<Initial, Slot>,
    /// The offset of each variable in its state space.
    variables: HashMap<&'a str, (Space, u64)>,
    pub parameters: Vec<Parameter>,
    parameter_names: HashMap<&'a str, usize>,
    pub parameter_bytes: usize,
    pub static_shared: usize,
    pub local_bytes: usize,
    next: Slot,
    /// Slot 0 is for results that are never read.
    pub sink: Slot,
}

fn place<'a>(
    variables: impl Iterator<Item = &'a Variable<'a>>,
    space: Space,
    start: usize,
    into: &mut HashMap<&'a str, (Space, u64)>,
) -> usize {
    let mut end = start;
    for variable in variables.filter(|v| v.space == space && !v.dynamic) {
        let at = end.next_multiple_of(variable.align);
        into.insert(variable.name, (space, at as u64));
        end = at + variable.bytes;
    }
    end
}

/// Adds the offsets of a module's global variables to `into`, contiguous up to alignment, and returns their end.
pub(crate) fn globals<'a>(variables: &'a [Variable<'a>], into: &mut HashMap<&'a str, (Space, u64)>) -> usize {
    place(variables.iter(), Space::Global, 0, into)
}

impl<'a> Resolver<'a> {
    pub fn new(entry: &'a Entry<'a>, module: &'a [Variable<'a>]) -> Self {
        let mut variables = HashMap::new();
        globals(module, &mut variables);
        let own = || entry.scopes.iter().flat_map(|s| &s.variables);
        let shared = place(module.iter(), Space::Shared, 0, &mut variables);
        let shared = place(own(), Space::Shared, shared, &mut variables);
        let local_bytes = place(own(), Space::Local, 0, &mut variables);
        // All dynamic arrays begin at the end of the static part.
        let dynamic: Vec<_> = module.iter().filter(|v| v.space == Space::Shared && v.dynamic).collect();
        let align = dynamic.iter().map(|v| v.align).max().unwrap_or(1);
        let static_shared = shared.next_multiple_of(align);
        for variable in dynamic {
            variables.insert(variable.name, (Space::Shared, static_shared as u64));
        }
        let mut parameters = Vec::new();
        let mut parameter_names = HashMap::new();
        let mut offset = 0usize;
        for variable in &entry.parameters {
            offset = offset.next_multiple_of(variable.align);
            parameter_names.insert(variable.name, offset);
            parameters.push(Parameter { ty: variable.ty, offset, bytes: variable.bytes });
            offset += variable.bytes;
        }
        Self {
            scopes: &entry.scopes,
            registers: HashMap::new(),
            initial: HashMap::new(),
            variables,
            parameters,
            parameter_names,
            parameter_bytes: offset,
            static_shared,
            local_bytes,
            next: 1,
            sink: 0,
        }
    }

    pub fn slots(&self) -> usize {
        self.next as usize
    }

    pub fn initial(&self) -> Vec<(Slot, Initial)> {
        let mut list: Vec<_> = self.initial.iter().map(|(initial, slot)| (*slot, *initial)).collect();
        list.sort_unstable_by_key(|(slot, _)| *slot);
        list
    }

    pub fn wrong<T>(statement: &Statement<'_>, message: impl std::fmt::Display) -> Result<T> {
        Err(Error::Parse { line: statement.line, message: format!("{}: {message}", statement.opcode) })
    }

    fn find<T>(&self, from: usize, look: impl Fn(&'a Scope<'a>) -> Option<T>) -> Option<(usize, T)> {
        let mut at = Some(from);
        while let Some(index) = at {
            let scope = &self.scopes[index];
            if let Some(found) = look(scope) {
                return Some((index, found));
            }
            at = scope.parent;
        }
        None
    }

    pub fn label(&self, statement: &Statement<'_>, name: &str) -> Result<usize> {
        match self.find(statement.scope, |scope| scope.labels.get(name).copied()) {
            Some((_, target)) => Ok(target),
            None => Self::wrong(statement, format!("no label `{name}`")),
        }
    }

    pub fn targets(&self, statement: &Statement<'_>, name: &str) -> Result<&'a [&'a str]> {
        match self.find(statement.scope, |scope| scope.targets.get(name)) {
            Some((_, list)) => Ok(list),
            None => Self::wrong(statement, format!("no list of targets `{name}`")),
        }
    }

    pub fn register(&mut self, statement: &Statement<'a>, name: &'a str) -> Option<(Slot, Type)> {
        let declared = |scope: &'a Scope<'a>| {
            scope.registers.get(name).copied().or_else(|| {
                let of = |(prefix, count, ty): &(&str, u64, Type)| {
                    let rest = name.strip_prefix(*prefix)?;
                    let plain =
                        rest.bytes().all(|b| b.is_ascii_digit()) && (rest == "0" || !rest.starts_with('0'));
                    (plain && rest.parse::<u64>().ok()? < *count).then_some(*ty)
                };
                scope.ranges.iter().find_map(of)
            })
        };
        let (scope, ty) = self.find(statement.scope, declared)?;
        let next = &mut self.next;
        let found = self.registers.entry((scope, name)).or_insert_with(|| {
            *next += 1;
            (*next - 1, ty)
        });
        Some(*found)
    }

    pub fn knows(&mut self, statement: &Statement<'a>, name: &'a str) -> bool {
        special(name).is_some() || self.register(statement, name).is_some()
    }

    pub fn constant(&mut self, initial: Initial) -> Slot {
        let next = &mut self.next;
        *self.initial.entry(initial).or_insert_with(|| {
            *next += 1;
            *next - 1
        })
    }

    pub fn destination(&mut self, statement: &Statement<'a>, operand: &Operand<'a>) -> Result<(Slot, Type)> {
        match operand {
            Operand::Name("_") => Ok((self.sink, Type::B64)),
            Operand::Name(name) => match self.register(statement, name) {
                Some(found) => Ok(found),
                None => Self::wrong(statement, format!("no register `{name}`")),
            },
            other => Self::wrong(statement, format!("{other:?} is not a destination")),
        }
    }

    /// Numbers are parsed with the given type.
    pub fn source(&mut self, statement: &Statement<'a>, operand: &Operand<'a>, ty: Type) -> Result<Slot> {
        match operand {
            Operand::Number(word, negative) => match number(word, *negative, ty) {
                Some(bits) => Ok(self.constant(Initial::Constant(bits & low_bits(ty.bits().max(8))))),
                None => Self::wrong(statement, format!("`{word}` is not a number")),
            },
            Operand::Name(name) => {
                if let Some((slot, _)) = self.register(statement, name) {
                    return Ok(slot);
                }
                if let Some(initial) = special(name) {
                    return Ok(self.constant(initial));
                }
                match self.variables.get(name) {
                    Some((Space::Global, offset)) => {
                        let initial = Initial::Variable(*offset);
                        Ok(self.constant(initial))
                    }
                    Some((_, offset)) => {
                        let initial = Initial::Constant(*offset);
                        Ok(self.constant(initial))
                    }
                    None => Self::wrong(statement, format!("no register or variable `{name}`")),
                }
            }
            other => Self::wrong(statement, format!("{other:?} is not a source")),
        }
    }

    /// Resolves a predicate, optionally negated by `!`.
    pub fn predicate(&mut self, statement: &Statement<'a>, operand: &Operand<'a>) -> Result<(Slot, bool)> {
        match operand {
            Operand::Not(name) => Ok((self.source(statement, &Operand::Name(name), Type::Pred)?, true)),
            other => Ok((self.source(statement, other, Type::Pred)?, false)),
        }
    }

    pub fn address(&mut self, statement: &Statement<'a>, operand: &Operand<'a>) -> Result<Address> {
        match operand {
            Operand::Address(base, offset) => {
                Ok(Address { base: self.source(statement, base, Type::U64)?, offset: *offset })
            }
            other => Self::wrong(statement, format!("{other:?} is not an address")),
        }
    }

    pub fn parameter(&self, statement: &Statement<'a>, operand: &Operand<'a>) -> Result<usize> {
        if let Operand::Address(base, offset) = operand
            && let Operand::Name(name) = **base
            && let Some(at) = self.parameter_names.get(name)
            && let Ok(sum) = usize::try_from(*at as i64 + (*offset).clamp(-(1 << 30), 1 << 30))
        {
            return Ok(sum);
        }
        Self::wrong(statement, "parameters can only be addressed by name")
    }

    /// The type is that of the first register.
    pub fn destinations(
        &mut self,
        statement: &Statement<'a>,
        operand: &Operand<'a>,
    ) -> Result<(Slots, Type)> {
        let parts = if let Operand::Vector(parts) = operand {
            parts.as_slice()
        } else {
            std::slice::from_ref(operand)
        };
        let mut slots = Vec::new();
        let mut first = Type::B32;
        for part in parts.iter().rev() {
            let (slot, ty) = self.destination(statement, part)?;
            slots.insert(0, slot);
            if slot != self.sink {
                first = ty;
            }
        }
        match Slots::new(&slots) {
            Some(slots) if !parts.is_empty() => Ok((slots, first)),
            _ => Self::wrong(statement, "a vector must have 1 to 8 parts"),
        }
    }

    pub fn sources(&mut self, statement: &Statement<'a>, operand: &Operand<'a>, ty: Type) -> Result<Slots> {
        let parts = if let Operand::Vector(parts) = operand {
            parts.as_slice()
        } else {
            std::slice::from_ref(operand)
        };
        let slots = parts.iter().map(|p| self.source(statement, p, ty)).collect::<Result<Vec<_>>>()?;
        match Slots::new(&slots) {
            Some(slots) if !parts.is_empty() => Ok(slots),
            _ => Self::wrong(statement, "a vector must have 1 to 8 parts"),
        }
    }
}

fn special(name: &str) -> Option<Initial> {
    let axis = |rest: &str| match rest {
        "x" => Some(0),
        "y" => Some(1),
        "z" => Some(2),
        _ => None,
    };
    if let Some((name, rest)) = name.split_once('.') {
        let axis = axis(rest)?;
        return Some(match name {
            "%tid" => Initial::Thread(axis),
            "%ntid" => Initial::Threads(axis),
            "%ctaid" => Initial::Block(axis),
            "%nctaid" => Initial::Blocks(axis),
            _ => return None,
        });
    }
    Some(match name {
        "%laneid" => Initial::LaneNumber,
        "%warpid" => Initial::WarpNumber,
        "%nwarpid" => Initial::Warps,
        "WARP_SZ" => Initial::Constant(32),
        "%lanemask_eq" => Initial::LaneMask(0),
        "%lanemask_lt" => Initial::LaneMask(1),
        "%lanemask_le" => Initial::LaneMask(2),
        "%lanemask_gt" => Initial::LaneMask(3),
        "%lanemask_ge" => Initial::LaneMask(4),
        "%dynamic_smem_size" => Initial::DynamicShared,
        "%total_smem_size" => Initial::TotalShared,
        _ => return None,
    })
}
