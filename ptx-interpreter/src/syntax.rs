//! Parses tokens to statements.

use crate::error::{Error, Result};
use crate::number::{integer, number};
use crate::statement::{Entry, Operand, Scope, Space, Statement, Text, Variable};
use crate::token::{Located, Token, tokenize};
use crate::types::Type;

/// In bytes; also the maximum number of registers in a declaration.
const MAX_BYTES: u64 = 1 << 24;
const MAX_DEPTH: usize = 64;

struct Reader<'a> {
    tokens: Vec<Located<'a>>,
    at: usize,
}

impl<'a> Reader<'a> {
    fn line(&self) -> u32 {
        self.tokens.get(self.at).or(self.tokens.last()).map_or(1, |t| t.line)
    }

    fn wrong<T>(&self, message: impl Into<String>) -> Result<T> {
        Err(Error::Parse { line: self.line(), message: message.into() })
    }

    fn peek(&self) -> Option<Token<'a>> {
        self.tokens.get(self.at).map(|t| t.token)
    }

    fn next(&mut self) -> Result<Token<'a>> {
        let Some(token) = self.peek() else { return self.wrong("unexpected end of the text") };
        self.at += 1;
        Ok(token)
    }

    fn takes(&mut self, mark: char) -> bool {
        let there = self.peek() == Some(Token::Mark(mark));
        self.at += usize::from(there);
        there
    }

    fn mark(&mut self, mark: char) -> Result<()> {
        if self.takes(mark) {
            return Ok(());
        }
        self.wrong(format!("expected `{mark}`, found {:?}", self.peek()))
    }

    fn word(&mut self) -> Result<&'a str> {
        match self.next()? {
            Token::Word(word) => Ok(word),
            other => {
                self.at -= 1;
                self.wrong(format!("expected a name, found {other:?}"))
            }
        }
    }

    fn count(&mut self) -> Result<u64> {
        let word = self.word()?;
        match integer(word) {
            Some(value) => Ok(value),
            None => self.wrong(format!("expected a number, found `{word}`")),
        }
    }

    fn skip_line(&mut self) {
        let line = self.line();
        while self.tokens.get(self.at).is_some_and(|t| t.line == line) {
            self.at += 1;
        }
    }

    fn skip_braces(&mut self) -> Result<()> {
        let mut depth = 0;
        loop {
            match self.next()? {
                Token::Mark('{') => depth += 1,
                Token::Mark('}') => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                return Ok(());
            }
        }
    }

    /// The space has already been read: `.align n .type name[size] = initial`.
    fn variable(&mut self, space: Space, external: bool) -> Result<Variable<'a>> {
        let (mut align, mut ty, mut vector) = (None, None, 1);
        let name = loop {
            let word = self.word()?;
            match word {
                ".align" => align = Some(self.count()?.clamp(1, 1 << 20) as usize),
                ".ptr" | ".const" | ".global" | ".shared" | ".local" | ".surfref" | ".samplerref" => {}
                ".v2" => vector = 2,
                ".v4" => vector = 4,
                _ if word.starts_with('.') => match Type::named(&word[1..]) {
                    Some(named) => ty = Some(named),
                    None => return self.wrong(format!("unknown `{word}` in a declaration")),
                },
                _ => break word,
            }
        };
        let Some(ty) = ty else { return self.wrong(format!("`{name}` has no type")) };
        let mut elements = vector as u64;
        let mut dynamic = false;
        while self.takes('[') {
            if self.takes(']') {
                dynamic = true;
            } else {
                elements = elements.saturating_mul(self.count()?);
                self.mark(']')?;
            }
        }
        let bytes = elements.saturating_mul(ty.bytes() as u64);
        if bytes > MAX_BYTES {
            return self.wrong(format!("`{name}` is too large"));
        }
        let mut initial = Vec::new();
        if self.takes('=') {
            self.initial(ty, &mut initial)?;
        }
        let mut bytes = if dynamic { 0 } else { bytes as usize };
        if !external {
            bytes = bytes.max(initial.len());
        }
        let align = align.unwrap_or(ty.bytes() * vector).next_power_of_two();
        Ok(Variable { name, space, ty, align, bytes, initial, dynamic: dynamic && external })
    }

    fn initial(&mut self, ty: Type, out: &mut Vec<u8>) -> Result<()> {
        let mut depth = 0;
        loop {
            if self.takes('{') {
                depth += 1;
            } else if self.takes('}') {
                depth -= 1;
            } else if !self.takes(',') {
                let negative = self.takes('-');
                let word = self.word()?;
                let Some(bits) = number(word, negative, ty) else {
                    return self.wrong(format!("initial value `{word}` is not a number"));
                };
                out.extend_from_slice(&bits.to_le_bytes()[..ty.bytes().min(8)]);
            }
            if depth <= 0 {
                return Ok(());
            }
            if out.len() as u64 > MAX_BYTES {
                return self.wrong("too many initial values");
            }
        }
    }

    fn operand(&mut self, depth: usize) -> Result<Operand<'a>> {
        if depth > MAX_DEPTH {
            return self.wrong(format!("braces nested more than {MAX_DEPTH} deep"));
        }
        match self.next()? {
            Token::Word(word) => {
                if word.starts_with(|c: char| c.is_ascii_digit()) {
                    return Ok(Operand::Number(word, false));
                }
                if self.takes('|') {
                    return Ok(Operand::Both(word, self.word()?));
                }
                Ok(Operand::Name(word))
            }
            Token::Mark('-') => Ok(Operand::Number(self.word()?, true)),
            Token::Mark('!') => Ok(Operand::Not(self.word()?)),
            Token::Mark('{') => {
                let mut parts = Vec::new();
                while !self.takes('}') {
                    parts.push(self.operand(depth + 1)?);
                    self.takes(',');
                }
                Ok(Operand::Vector(parts))
            }
            Token::Mark('[') => {
                let base = self.operand(depth + 1)?;
                let mut offset = 0i64;
                while !self.takes(']') {
                    let plus = self.takes('+');
                    let minus = self.takes('-');
                    if !plus && !minus {
                        return self.wrong("expected `]` or an offset");
                    }
                    let count = self.count()? as i64;
                    offset = if minus { offset.wrapping_sub(count) } else { offset.wrapping_add(count) };
                }
                Ok(Operand::Address(Box::new(base), offset))
            }
            other => {
                self.at -= 1;
                self.wrong(format!("expected an operand, found {other:?}"))
            }
        }
    }

    /// `.reg .type %name<count>, name;`
    fn registers(&mut self, scope: &mut Scope<'a>) -> Result<()> {
        let mut word = self.word()?;
        while word == ".v2" || word == ".v4" {
            word = self.word()?;
        }
        let Some(ty) = word.strip_prefix('.').and_then(Type::named) else {
            return self.wrong(format!("unknown type `{word}` of a register"));
        };
        loop {
            let name = self.word()?;
            if self.takes('<') {
                let count = self.count()?;
                self.mark('>')?;
                scope.ranges.push((name, count, ty));
            } else {
                scope.registers.insert(name, ty);
            }
            if !self.takes(',') {
                return self.mark(';');
            }
        }
    }

    fn body(&mut self, entry: &mut Entry<'a>) -> Result<()> {
        self.mark('{')?;
        entry.scopes.push(Scope::default());
        let (mut scope, mut depth, mut source) = (0, 1, (0, 0));
        loop {
            match self.next()? {
                Token::Mark('{') => {
                    entry.scopes.push(Scope { parent: Some(scope), ..Scope::default() });
                    scope = entry.scopes.len() - 1;
                    depth += 1;
                    if depth > MAX_DEPTH {
                        return self.wrong(format!("blocks nested more than {MAX_DEPTH} deep"));
                    }
                }
                Token::Mark('}') => match entry.scopes[scope].parent {
                    Some(parent) => {
                        scope = parent;
                        depth -= 1;
                    }
                    None => return Ok(()),
                },
                Token::Mark(';') => {}
                Token::Mark('@') => {
                    let negative = self.takes('!');
                    let name = self.word()?;
                    let opcode = self.word()?;
                    self.statement(entry, scope, source, Some((name, negative)), opcode)?;
                }
                Token::Word(".reg") => self.registers(&mut entry.scopes[scope])?,
                Token::Word(".loc") => {
                    let file = self.count()?;
                    source = (file as u32, self.count()? as u32);
                    self.skip_line();
                }
                Token::Word(".pragma") => {
                    while !self.takes(';') {
                        self.next()?;
                    }
                }
                Token::Word(word @ (".shared" | ".local" | ".param" | ".global" | ".const")) => {
                    let space = match word {
                        ".shared" => Space::Shared,
                        ".local" => Space::Local,
                        ".param" => Space::Param,
                        _ => Space::Global,
                    };
                    let variable = self.variable(space, false)?;
                    entry.scopes[scope].variables.push(variable);
                    self.mark(';')?;
                }
                Token::Word(word) if self.takes(':') => {
                    if self.peek() == Some(Token::Word(".branchtargets")) {
                        self.at += 1;
                        let mut list = Vec::new();
                        while !self.takes(';') {
                            list.push(self.word()?);
                            self.takes(',');
                        }
                        entry.scopes[scope].targets.insert(word, list);
                    } else {
                        entry.scopes[scope].labels.insert(word, entry.statements.len());
                    }
                }
                Token::Word(word) if word.starts_with('.') => {
                    self.at -= 1;
                    return self.wrong(format!("unknown directive `{word}` in a kernel"));
                }
                Token::Word(opcode) => self.statement(entry, scope, source, None, opcode)?,
                other => {
                    self.at -= 1;
                    return self.wrong(format!("expected an instruction, found {other:?}"));
                }
            }
        }
    }

    fn statement(
        &mut self,
        entry: &mut Entry<'a>,
        scope: usize,
        source: (u32, u32),
        guard: Option<(&'a str, bool)>,
        opcode: &'a str,
    ) -> Result<()> {
        let line = self.tokens[self.at - 1].line;
        let mut operands = Vec::new();
        while !self.takes(';') {
            operands.push(self.operand(0)?);
            if !self.takes(',') && self.peek() != Some(Token::Mark(';')) {
                return self.wrong(format!("expected `,` or `;` after an operand of `{opcode}`"));
            }
        }
        entry.statements.push(Statement { line, source, scope, guard, opcode, operands });
        Ok(())
    }

    fn entry(&mut self) -> Result<Entry<'a>> {
        let name = self.word()?;
        let mut entry = Entry {
            name,
            parameters: Vec::new(),
            max_threads: None,
            scopes: Vec::new(),
            statements: Vec::new(),
        };
        if self.takes('(') {
            while !self.takes(')') {
                if self.word()? != ".param" {
                    return self.wrong("expected `.param`");
                }
                entry.parameters.push(self.variable(Space::Param, false)?);
                self.takes(',');
            }
        }
        while self.peek() != Some(Token::Mark('{')) {
            let directive = self.word()?;
            let mut numbers = Vec::new();
            while let Some(Token::Word(word)) = self.peek() {
                let Some(value) = integer(word) else { break };
                numbers.push(value as u32);
                self.at += 1;
                self.takes(',');
            }
            if matches!(directive, ".maxntid" | ".reqntid") {
                let get = |i: usize| numbers.get(i).copied().unwrap_or(1);
                entry.max_threads = Some([get(0), get(1), get(2)]);
            }
        }
        self.body(&mut entry)?;
        Ok(entry)
    }
}

pub(crate) fn read(text: &str) -> Result<Text<'_>> {
    let mut reader = Reader { tokens: tokenize(text)?, at: 0 };
    let mut module = Text::default();
    let mut external = false;
    while let Some(token) = reader.peek() {
        let Token::Word(word) = token else {
            return reader.wrong(format!("expected a directive, found {token:?}"));
        };
        reader.at += 1;
        match word {
            ".version" | ".address_size" => drop(reader.word()?),
            ".target" => {
                reader.word()?;
                while reader.takes(',') {
                    reader.word()?;
                }
            }
            ".file" | ".loc" => {
                reader.at -= 1;
                reader.skip_line();
            }
            ".visible" | ".weak" | ".common" => {}
            ".extern" => external = true,
            ".entry" => {
                let entry = reader.entry()?;
                module.entries.push(entry);
                external = false;
            }
            ".func" => {
                while reader.peek() != Some(Token::Mark('{')) && reader.peek() != Some(Token::Mark(';')) {
                    reader.next()?;
                }
                if !reader.takes(';') {
                    reader.skip_braces()?;
                }
                external = false;
            }
            ".global" | ".const" | ".shared" => {
                let space = if word == ".shared" { Space::Shared } else { Space::Global };
                let variable = reader.variable(space, external)?;
                module.variables.push(variable);
                reader.mark(';')?;
                external = false;
            }
            ".section" => reader.skip_section()?,
            _ => {
                reader.at -= 1;
                return reader.wrong(format!("unknown directive `{word}`"));
            }
        }
    }
    Ok(module)
}

impl Reader<'_> {
    fn skip_section(&mut self) -> Result<()> {
        while self.peek() != Some(Token::Mark('{')) {
            self.next()?;
        }
        self.skip_braces()
    }
}
