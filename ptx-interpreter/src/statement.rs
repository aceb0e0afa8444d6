//! A parsed module, in which operands are still names.

use std::collections::HashMap;

use crate::types::Type;

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Operand<'a> {
    /// A register, label, variable or special register.
    Name(&'a str),
    /// `!p`.
    Not(&'a str),
    /// A number, possibly negated.
    Number(&'a str, bool),
    /// `{a, b}`.
    Vector(Vec<Operand<'a>>),
    /// `[base + offset]`.
    Address(Box<Operand<'a>>, i64),
    /// `d|p`.
    Both(&'a str, &'a str),
}

#[derive(Debug, Clone)]
pub(crate) struct Statement<'a> {
    pub line: u32,
    /// The file and line of the last `.loc`; 0 before the first one.
    pub source: (u32, u32),
    pub scope: usize,
    pub guard: Option<(&'a str, bool)>,
    pub opcode: &'a str,
    pub operands: Vec<Operand<'a>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Space {
    Global,
    Shared,
    Local,
    Param,
}

#[derive(Debug, Clone)]
pub(crate) struct Variable<'a> {
    pub name: &'a str,
    pub space: Space,
    pub ty: Type,
    pub align: usize,
    pub bytes: usize,
    /// For global variables, the initial bytes; the rest are zeros.
    pub initial: Vec<u8>,
    /// Whether it is declared as `.extern .shared x[]`; its size is then defined by the launch.
    pub dynamic: bool,
}

/// The names of a block between braces.
#[derive(Debug, Default)]
pub(crate) struct Scope<'a> {
    pub parent: Option<usize>,
    pub registers: HashMap<&'a str, Type>,
    /// `%r<100>`: prefix, count, type.
    pub ranges: Vec<(&'a str, u64, Type)>,
    /// Labels, with the index of the statement that follows.
    pub labels: HashMap<&'a str, usize>,
    /// The lists of `.branchtargets`.
    pub targets: HashMap<&'a str, Vec<&'a str>>,
    pub variables: Vec<Variable<'a>>,
}

#[derive(Debug)]
pub(crate) struct Entry<'a> {
    pub name: &'a str,
    pub parameters: Vec<Variable<'a>>,
    pub max_threads: Option<[u32; 3]>,
    pub scopes: Vec<Scope<'a>>,
    pub statements: Vec<Statement<'a>>,
}

#[derive(Debug, Default)]
pub(crate) struct Text<'a> {
    pub variables: Vec<Variable<'a>>,
    pub entries: Vec<Entry<'a>>,
}
