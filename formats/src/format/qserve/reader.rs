//! Reads QServe checkpoints, written by quant or by other tools, back into logical order.
//!
//! The tensors do not determine the order of group scales, or that zero points are integers, so unknown keys and values
//! that no kernel could use are errors.

use serde_json::{Map, Value};

use super::layout::{
    self, CODE_OFFSET, Kind, S2Order, byte_scales_name, bytes_name, codes_name, group_scales_name,
    group_zeros_name, outlier, row_scales_name, row_zeros_name, unpack_nibbles,
};
use super::manifest::LAYOUT_VERSION;
use super::{GROUP, HEAD, METHOD, QUANT_METHOD, TILE};
use crate::allocate::zeros;
use crate::checkpoint::{Dtype, TensorSource, TensorSpec, require_finite};
use crate::format::checks::{check_specs, modules_to_not_convert};
use crate::format::numbers::matrix;
use crate::format::{Axis, PackedReader, PackedWeight, TensorPart};
use crate::quantize::{Levels, QuantizedTensor};
use crate::scheme::LinearScheme;
use crate::{Error, Result};

const KEYS: [&str; 7] = [
    "quant_method",
    "wbits",
    "group_size",
    "layout_version",
    "s2_order",
    "modules_to_not_convert",
    "manifest",
];

#[derive(Debug)]
pub(super) struct Reader {
    kind: Kind,
    order: S2Order,
    /// Modules that stay float.
    float: Vec<String>,
}

impl Reader {
    /// Returns the reader for a checkpoint with this `quantization_config`; `None` for other methods.
    ///
    /// # Errors
    /// A reason that names the key, when the configuration uses a feature that this reader does not implement.
    pub(super) fn new(config: &Value) -> Result<Option<Self>, String> {
        let Some(map) = config.as_object() else { return Ok(None) };
        if map.get("quant_method").and_then(Value::as_str) != Some(QUANT_METHOD) {
            return Ok(None);
        }
        let refuse = |key: &str, reason: &str| Err(format!("`quantization_config.{key}` {reason}"));
        if let Some(key) = map.keys().find(|key| !KEYS.contains(&key.as_str())) {
            return refuse(key, "is an unknown key");
        }
        let get = |key: &str| map.get(key).filter(|v| !v.is_null());
        let size = get("group_size").map(Value::as_i64);
        let kind = match (get("wbits").and_then(Value::as_u64), size) {
            (Some(4), Some(Some(size))) if size == GROUP as i64 => Kind::Group,
            (Some(4), Some(Some(-1))) => Kind::Channel,
            (Some(8), Some(Some(-1))) => Kind::Bytes,
            (Some(8), _) => return refuse("group_size", "must be -1 for 8 bits"),
            (Some(4), _) => return refuse("group_size", "must be 128 or -1"),
            _ => return refuse("wbits", "must be 4 or 8"),
        };
        if get("layout_version").is_some_and(|v| v.as_u64() != Some(LAYOUT_VERSION)) {
            return refuse("layout_version", "must be 1");
        }
        Ok(Some(Self { kind, order: order(map, kind)?, float: modules_to_not_convert(map)? }))
    }

    fn broken(source: &dyn TensorSource, tensor: &str, reason: &str, remedy: &str) -> Error {
        Error::InputFile {
            path: source.location(tensor),
            line: None,
            reason: format!("`{tensor}` {reason}"),
            remedy: remedy.into(),
        }
    }

    fn row_scales(source: &dyn TensorSource, name: &str, n: usize) -> Result<Vec<f32>> {
        let scales = half_precision(source, name, n)?;
        match scales.iter().position(|s| *s <= 0.0) {
            None => Ok(scales),
            Some(row) => Err(Self::broken(
                source,
                name,
                &format!("has a scale of {} in row {row}; scales must be positive", scales[row]),
                "quantize the float model again",
            )),
        }
    }

    /// Reads zero points and scales of groups `[n, k/128]`.
    fn groups(&self, source: &dyn TensorSource, module: &str, n: usize, k: usize) -> Result<[Vec<u8>; 2]> {
        let groups = k / GROUP;
        let (scales_name, zeros_name) = (group_scales_name(module), group_zeros_name(module));
        let scales = self.order.restore(&source.read(&scales_name)?, n, groups)?;
        let place = |i: usize| format!("output {}, group {}", i / groups, i % groups);
        if let Some(i) = scales.iter().position(|s| !(1..=16).contains(s)) {
            return Err(Self::broken(
                source,
                &scales_name,
                &format!(
                    "has a scale of {} for {}; scales of groups must be from 1 to 16",
                    scales[i] as i8,
                    place(i)
                ),
                "quantize the float model again, with 8-bit weights clipped to the protective range of ±119",
            ));
        }
        let stored = self.order.restore(&source.read(&zeros_name)?, n, groups)?;
        let zero = |(i, (stored, scale)): (usize, (&u8, &u8))| {
            let scaled = stored.wrapping_neg();
            let zero = scaled / scale;
            if scaled.is_multiple_of(*scale) && zero <= 15 {
                return Ok(zero);
            }
            Err(Self::broken(
                source,
                &zeros_name,
                &format!(
                    "has {} for {}, expected the negative product of the scale {scale} and a zero point \
                    from 0 to 15",
                    *stored as i8,
                    place(i)
                ),
                "8-bit zero points (deepcompressor's `zero_point: PostScale`) are not supported: quantize \
                again with `PreScale`, or quantize the float model with quant",
            ))
        };
        let zeros = stored.iter().zip(&scales).enumerate().map(zero).collect::<Result<Vec<u8>>>()?;
        Ok([scales, zeros])
    }

    /// Reads the zero points of rows, which are stored multiplied by their scales.
    fn row_zeros(source: &dyn TensorSource, module: &str, n: usize) -> Result<Vec<u8>> {
        let scales = Self::row_scales(source, &row_scales_name(module), n)?;
        let name = row_zeros_name(module);
        let stored = half_precision(source, &name, n)?;
        let zero = |(row, (stored, scale)): (usize, (&f32, &f32))| {
            let zero = (stored / scale).round();
            // Rounding to F16 moves a zero point by less than a hundredth, so the nearest integer is the original.
            if (0.0..=15.0).contains(&zero) && Dtype::F16.round(zero * scale) == *stored {
                return Ok(zero as u8);
            }
            Err(Self::broken(
                source,
                &name,
                &format!(
                    "has {stored} in row {row}, expected the product of the scale {scale} and a zero point \
                    from 0 to 15, in F16"
                ),
                "zero points that are not 4-bit codes (deepcompressor's `zero_point: PostScale`) are not \
                supported: quantize again with `PreScale`, or quantize the float model with quant",
            ))
        };
        stored.iter().zip(&scales).enumerate().map(zero).collect()
    }
}

fn order(map: &Map<String, Value>, kind: Kind) -> Result<S2Order, String> {
    let Some(order) = map.get("s2_order").filter(|v| !v.is_null()) else { return Ok(S2Order::default()) };
    if kind != Kind::Group {
        return Err("`quantization_config.s2_order` is set, but the weights have no groups".into());
    }
    S2Order::ALL.into_iter().find(|known| order.as_str() == Some(known.name())).ok_or_else(|| {
        let known = S2Order::ALL.map(S2Order::name).join(" or ");
        format!("`quantization_config.s2_order` must be {known}")
    })
}

fn half_precision(source: &dyn TensorSource, name: &str, len: usize) -> Result<Vec<f32>> {
    let mut values: Vec<f32> = zeros(len, "the scales of a weight")?;
    Dtype::F16.widen(&source.read(name)?, &mut values);
    require_finite(source.location(name), name, &values)?;
    Ok(values)
}

impl PackedReader for Reader {
    fn code_suffixes(&self) -> &'static [&'static str] {
        &[".qweight", ".weight"]
    }

    fn parameter_suffixes(&self) -> &'static [&'static str] {
        &[".s1_scales", ".s1_szeros", ".s2_scales", ".s2_zeros", ".dequant_scale"]
    }

    fn scheme(&self, module: &str) -> Option<LinearScheme> {
        let float = module == HEAD || self.float.iter().any(|name| name == module);
        (!float).then(|| self.kind.scheme())
    }

    fn scale_dtype(&self, source: &dyn TensorSource, module: &str) -> Result<Dtype> {
        let name = match self.kind {
            Kind::Group | Kind::Channel => row_scales_name(module),
            Kind::Bytes => byte_scales_name(module),
        };
        Ok(source.require(&name)?.dtype)
    }

    fn shape(&self, source: &dyn TensorSource, module: &str) -> Result<Option<[usize; 2]>> {
        match self.kind {
            Kind::Bytes => matrix(source, &bytes_name(module), Dtype::I8, [1, 1]),
            Kind::Group | Kind::Channel => matrix(source, &codes_name(module), Dtype::I8, [1, 2]),
        }
    }

    fn tensors(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<Vec<TensorSpec>> {
        let PackedWeight { module, shape, scheme } = weight;
        let specs = layout::layout(module, shape, scheme, Dtype::F16).map_err(|e| {
            Error::UnsupportedQuantization {
                path: source.location(&codes_name(module)),
                reason: format!("`{module}` cannot have the scheme {scheme} in the {METHOD} format: {e}"),
            }
        })?;
        check_specs(source, &specs, |_, _| false)?;
        Ok(specs)
    }

    fn parts(&self, _source: &dyn TensorSource, weight: PackedWeight<'_>) -> Option<Vec<TensorPart>> {
        let PackedWeight { module, shape: [_, k], .. } = weight;
        let rows = Some(Axis::new(0, 1, 1));
        // Codes are in tiles over all inputs, and group scales in runs of 32 outputs.
        let tiles = |dimension| Some(Axis::new(dimension, TILE, TILE));
        let codes = TensorPart::new(codes_name(module), tiles(0), Some(Axis::new(1, k.max(1), k / 2)));
        Some(match self.kind {
            Kind::Group => vec![
                codes,
                TensorPart::new(row_scales_name(module), rows, None),
                TensorPart::new(group_scales_name(module), tiles(1), Some(Axis::new(0, GROUP, 1))),
                TensorPart::new(group_zeros_name(module), tiles(1), Some(Axis::new(0, GROUP, 1))),
            ],
            Kind::Channel => vec![
                codes,
                TensorPart::new(row_scales_name(module), rows, None),
                TensorPart::new(row_zeros_name(module), rows, None),
            ],
            Kind::Bytes => vec![
                TensorPart::new(bytes_name(module), tiles(0), tiles(1)),
                TensorPart::new(byte_scales_name(module), rows, None),
            ],
        })
    }

    fn zeros(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<Option<Vec<u8>>> {
        self.tensors(source, weight)?;
        let PackedWeight { module, shape: [n, k], .. } = weight;
        Ok(match self.kind {
            Kind::Group => {
                let [_, zeros] = self.groups(source, module, n, k)?;
                Some(zeros)
            }
            Kind::Channel => Some(Self::row_zeros(source, module, n)?),
            Kind::Bytes => None,
        })
    }

    fn read(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<QuantizedTensor> {
        self.tensors(source, weight)?;
        let PackedWeight { module, shape, scheme } = weight;
        let [n, k] = shape;
        let (codes, scales, levels, zeros) = match self.kind {
            Kind::Group => {
                let name = codes_name(module);
                let codes = unpack_nibbles(&source.read(&name)?, n, k)?;
                let rows = Self::row_scales(source, &row_scales_name(module), n)?;
                let [groups, zeros] = self.groups(source, module, n, k)?;
                if let Some(outlier) = outlier(&codes, &groups, &zeros, k / GROUP) {
                    return Err(Self::broken(
                        source,
                        &name,
                        &format!("does not match the group scales: {outlier}, which exceeds 8 bits"),
                        "if deepcompressor's converter wrote it, set \"s2_order\": \"deepcompressor\" in \
                         quantization_config; else quantize the float model again",
                    ));
                }
                let levels = Levels { groups, rows };
                (codes, levels.products(), Some(levels), Some(zeros))
            }
            Kind::Channel => {
                let codes = unpack_nibbles(&source.read(&codes_name(module))?, n, k)?;
                let scales = Self::row_scales(source, &row_scales_name(module), n)?;
                (codes, scales, None, Some(Self::row_zeros(source, module, n)?))
            }
            Kind::Bytes => {
                let mut codes = source.read(&bytes_name(module))?;
                codes.iter_mut().for_each(|code| *code ^= CODE_OFFSET);
                let scales = Self::row_scales(source, &byte_scales_name(module), n)?;
                (codes, scales, None, None)
            }
        };
        let scale_dtype = Dtype::F16;
        let tensor = QuantizedTensor {
            shape,
            scheme,
            codes,
            scales,
            scale_dtype,
            zeros,
            levels,
            global: None,
            input: None,
            input_order: None,
        };
        tensor.view()?;
        Ok(tensor)
    }
}

#[cfg(test)]
#[path = "reader_tests.rs"]
mod tests;
