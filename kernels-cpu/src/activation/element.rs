//! Element types of activations.

use half::{bf16, f16};

/// An element type of activations: `f32`, [`half::f16`] or [`half::bf16`]. Each converts to `f32` exactly, and all
/// arithmetic is in `f32`.
pub trait Element: sealed::Values {}

impl Element for f32 {}
impl Element for f16 {}
impl Element for bf16 {}

pub(crate) mod sealed {
    use super::*;

    #[derive(Debug, Clone, Copy, PartialEq)]
    pub enum Kind {
        F32,
        F16,
        Bf16,
    }

    pub trait Values: Copy + Send + Sync + 'static {
        const KIND: Kind;
        const ZERO: Self;

        fn as_f32(_: &[Self]) -> Option<&[f32]> {
            None
        }
    }

    impl Values for f32 {
        const KIND: Kind = Kind::F32;
        const ZERO: Self = 0.0;

        fn as_f32(x: &[Self]) -> Option<&[f32]> {
            Some(x)
        }
    }

    impl Values for f16 {
        const KIND: Kind = Kind::F16;
        const ZERO: Self = f16::ZERO;
    }

    impl Values for bf16 {
        const KIND: Kind = Kind::Bf16;
        const ZERO: Self = bf16::ZERO;
    }
}
