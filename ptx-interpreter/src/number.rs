//! Numbers in a PTX text.

use crate::types::Type;

/// `None` for floats and names.
pub(crate) fn integer(word: &str) -> Option<u64> {
    let word = word.strip_suffix('U').unwrap_or(word);
    if let Some(digits) = word.strip_prefix("0x").or_else(|| word.strip_prefix("0X")) {
        u64::from_str_radix(digits, 16).ok()
    } else if let Some(digits) = word.strip_prefix("0b").or_else(|| word.strip_prefix("0B")) {
        u64::from_str_radix(digits, 2).ok()
    } else if word.len() > 1 && word.starts_with('0') && word.bytes().all(|b| b.is_ascii_digit()) {
        u64::from_str_radix(word, 8).ok()
    } else {
        word.parse().ok()
    }
}

/// Parses a number to the bits of a type.
pub(crate) fn number(word: &str, negative: bool, ty: Type) -> Option<u64> {
    let wide = |value: f64| {
        let value = if negative { -value } else { value };
        match ty {
            Type::F64 => value.to_bits(),
            _ => u64::from((value as f32).to_bits()),
        }
    };
    let hex = |prefix: [&str; 2], digits: usize| {
        let rest = word.strip_prefix(prefix[0]).or_else(|| word.strip_prefix(prefix[1]))?;
        (rest.len() == digits).then(|| u64::from_str_radix(rest, 16).ok())?
    };
    if let Some(bits) = hex(["0f", "0F"], 8) {
        let value = f32::from_bits(bits as u32);
        return Some(if ty == Type::F64 { wide(f64::from(value)) } else { bits ^ u64::from(negative) << 31 });
    }
    if let Some(bits) = hex(["0d", "0D"], 16) {
        return Some(if ty == Type::F32 {
            wide(f64::from_bits(bits))
        } else {
            bits ^ u64::from(negative) << 63
        });
    }
    if let Some(value) = integer(word) {
        if ty.is_wide_float() {
            return Some(wide(value as f64));
        }
        return Some(if negative { value.wrapping_neg() } else { value });
    }
    if word.contains('.') && word.starts_with(|c: char| c.is_ascii_digit()) {
        return word.parse().ok().map(wide);
    }
    None
}
