//! Checks whether a framework's tensor is a valid input of a linear.

use crate::float::Float;
use crate::layout::{Order, WeightLayout};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Input {
    /// Number of tokens.
    pub m: usize,
    /// Number of elements.
    pub elements: usize,
    /// The dimensions of the results, `[.., n]`.
    pub results: Vec<usize>,
    /// Whether kernels need a copy, because the input is not contiguous or does not begin at a multiple of 16 bytes.
    pub copied: bool,
}

/// Checks an input of these dimensions; `start` is the index of its first element if it is contiguous.
///
/// # Errors
/// A message if the input is not `[.., k]`, or is larger than the address space.
pub(crate) fn input(
    name: &str,
    layout: &WeightLayout,
    dims: &[usize],
    start: Option<usize>,
    element: Float,
) -> Result<Input, String> {
    let (n, k) = (layout.n(), layout.k());
    let mut results = dims.to_vec();
    match results.last_mut() {
        Some(last) if *last == k => *last = n,
        _ => return Err(format!("{name}: expected an input of shape [.., {k}], got {dims:?}")),
    }
    // An expanded tensor repeats elements, so its dimensions can exceed memory.
    let bytes = |dims: &[usize]| {
        let elements = dims.iter().try_fold(1_usize, |all, &dim| all.checked_mul(dim))?;
        let bytes = elements.checked_mul(element.bytes())?;
        isize::try_from(bytes).ok().map(|_| elements)
    };
    let elements = bytes(dims).ok_or_else(|| format!("{name}: the input {dims:?} is too large"))?;
    bytes(&results).ok_or_else(|| format!("{name}: the output {results:?} is too large"))?;
    let straight = start.is_some_and(|at| at.wrapping_mul(element.bytes()).is_multiple_of(16));
    Ok(Input { m: elements / k, elements, results, copied: elements > 0 && !straight })
}

/// The input types that weights of this order can be multiplied with, for messages.
pub(crate) fn types(order: Order) -> &'static str {
    match order {
        Order::Float => "f16 or bf16",
        Order::Int8 => "f32, f16 or bf16",
    }
}

#[cfg(test)]
mod tests {
    use quant_kernels_cpu::ScaleType;

    use super::*;

    fn check(dims: &[usize], start: Option<usize>, element: Float) -> Result<Input, String> {
        let layout =
            WeightLayout::from_parts([24, 128], 4, 128, ScaleType::F16, Some(8), Order::Float, false);
        input("quantized-linear", &layout.unwrap(), dims, start, element)
    }

    #[test]
    fn any_rank_from_one_is_rows() {
        for (dims, m, results) in [
            (&[128][..], 1, &[24][..]),
            (&[5, 128], 5, &[5, 24]),
            (&[2, 3, 128], 6, &[2, 3, 24]),
            (&[2, 1, 3, 128], 6, &[2, 1, 3, 24]),
            (&[2, 0, 128], 0, &[2, 0, 24]),
        ] {
            let input = check(dims, Some(0), Float::Bf16).unwrap();
            let expected = Input { m, elements: 128 * m, results: results.to_vec(), copied: false };
            assert_eq!(input, expected, "{dims:?}");
        }
    }

    #[test]
    fn what_kernels_cannot_read_is_copied() {
        let copied = |start, element| check(&[5, 128], start, element).unwrap().copied;
        assert!(copied(None, Float::F16));
        for (start, half, single) in [(0, false, false), (4, true, false), (8, false, false), (3, true, true)]
        {
            assert_eq!(copied(Some(start), Float::F16), half, "{start}");
            assert_eq!(copied(Some(start), Float::F32), single, "{start}");
        }
        assert!(!check(&[0, 128], None, Float::F16).unwrap().copied);
    }

    #[test]
    fn other_inputs_are_reported() {
        for dims in [&[][..], &[127], &[128, 5]] {
            let message = check(dims, Some(0), Float::F16).unwrap_err();
            assert_eq!(
                message,
                format!("quantized-linear: expected an input of shape [.., 128], got {dims:?}")
            );
        }
        let message = check(&[1 << 60, 128], None, Float::F16).unwrap_err();
        assert!(message.contains("the input") && message.contains("too large"), "{message}");
        assert_eq!(types(Order::Float), "f16 or bf16");
        assert_eq!(types(Order::Int8), "f32, f16 or bf16");
    }

    #[test]
    fn results_may_be_too_large_where_inputs_are_not() {
        let wide =
            WeightLayout::from_parts([1 << 20, 128], 4, 128, ScaleType::F16, Some(8), Order::Float, false);
        let message = input("linear", &wide.unwrap(), &[1 << 50, 128], Some(0), Float::F16).unwrap_err();
        assert!(message.starts_with("linear: the output"), "{message}");
    }
}
