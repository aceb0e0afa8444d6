//! The scheme of a variant: types of activations, weights and results, and the groups of weights.

use quant_kernels_cpu::{FloatFormat, KernelError, ScaleType};

use crate::layout::{Order, SUPER_BLOCKS, TILE_K, WeightLayout};

/// Activations as the kernel reads them: `[m, x_stride]` row-major, in rows at multiples of 16 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum InputType {
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// 8-bit integers with a scale per token.
    Int8 {
        /// Whether there is a zero point, the same for all tokens.
        zero: bool,
    },
}

/// The type that results are rounded to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Output {
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// Single precision.
    F32,
}

/// The properties of weights, activations and results that are compiled into a variant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KernelScheme {
    pub(super) activation: InputType,
    pub(super) output: Output,
    /// The format of floating-point codes.
    pub(super) float: Option<FloatFormat>,
    pub(super) code_bits: usize,
    /// Features per group: 32, 64, 128, with floating-point codes also 16, or `None` if a row is one group.
    pub(super) group: Option<usize>,
    pub(super) scale: Scale,
    pub(super) zeros: bool,
    /// Whether products are summed over all of `k` as integers.
    pub(super) whole: bool,
    sums_activations: bool,
    pub(super) parameter_bytes: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Scale {
    F16,
    Bf16,
    F32,
    Progressive,
    E4m3,
    E8m0,
}

impl KernelScheme {
    /// The scheme of packed weights with these activations and results.
    ///
    /// # Errors
    /// When the weights are packed for different activations, or without the sums that a zero point needs.
    pub fn new(layout: &WeightLayout, activation: InputType, output: Output) -> Result<Self, KernelError> {
        let (order, zero) = match activation {
            InputType::Int8 { zero } => (Order::Int8, zero),
            InputType::F16 | InputType::Bf16 => (Order::Float, false),
        };
        if order != layout.order() {
            return Err(KernelError::Scheme("the weights are packed for different activations"));
        }
        if zero && !layout.has_sums() {
            return Err(KernelError::Scheme(
                "activations with a zero point need weights that were packed with sums",
            ));
        }
        let activation = match activation {
            // Sums change the offsets within a tile's parameters, even if they are not used.
            InputType::Int8 { .. } => InputType::Int8 { zero: layout.has_sums() },
            float => float,
        };
        let row = layout.row_is_group();
        let scale = match layout.scales() {
            _ if row => Scale::F32,
            ScaleType::F16 => Scale::F16,
            ScaleType::Bf16 => Scale::Bf16,
            ScaleType::F32 => Scale::F32,
            ScaleType::Progressive => Scale::Progressive,
            ScaleType::E4m3 => Scale::E4m3,
            ScaleType::E8m0 => Scale::E8m0,
            ScaleType::Super | ScaleType::SuperMins => return Err(KernelError::Scheme(SUPER_BLOCKS)),
        };
        Ok(Self {
            activation,
            output,
            float: layout.float_format(),
            code_bits: layout.code_bits(),
            group: (!row).then(|| layout.group_size().min(TILE_K)),
            scale,
            zeros: layout.zero_point().is_none(),
            whole: layout.summed_whole(),
            sums_activations: !layout.signed() && layout.float_format().is_none(),
            parameter_bytes: layout.parameter_bytes(),
        })
    }

    /// Bytes per activation.
    pub fn activation_bytes(&self) -> usize {
        if self.is_float() { 2 } else { 1 }
    }

    /// Bytes per result.
    pub fn output_bytes(&self) -> usize {
        if self.output == Output::F32 { 4 } else { 2 }
    }

    pub(super) fn is_float(&self) -> bool {
        !matches!(self.activation, InputType::Int8 { .. })
    }

    /// Whether sums of activations are computed.
    pub(super) fn sums_activations(&self) -> bool {
        self.sums_activations
    }

    pub(super) fn tile_groups(&self) -> usize {
        self.group.map_or(1, |g| TILE_K / g)
    }

    /// The name according to `docs/naming.md`, such as `w4a16_g128_gemm_f16_asym_f16`.
    pub fn name(&self) -> String {
        let (bits, kind) = match self.activation {
            InputType::F16 => ("a16", "_f16"),
            InputType::Bf16 => ("a16", "_bf16"),
            InputType::Int8 { zero: false } => ("a8", ""),
            InputType::Int8 { zero: true } => ("a8", "_static"),
        };
        let group = self.group.map_or("channel".to_owned(), |g| format!("g{g}"));
        let scale = match self.scale {
            Scale::Progressive => "_progressive",
            Scale::E4m3 => "_nv",
            Scale::E8m0 => "_mx",
            Scale::Bf16 => "_sbf16",
            Scale::F32 if self.group.is_some() => "_sf32",
            _ => "",
        };
        let zeros = if self.zeros { "_asym" } else { "" };
        let output = match self.output {
            Output::F16 => "f16",
            Output::Bf16 => "bf16",
            Output::F32 => "f32",
        };
        let codes = self.float.map_or(self.code_bits.to_string(), |format| format.name().to_owned());
        format!("w{codes}{bits}_{group}_gemm{kind}{scale}{zeros}_{output}")
    }
}
