//! Reads compressed-tensors checkpoints, written by quant or by other tools, into logical order.
//!
//! Unsupported keys are errors, because ignoring them could give wrong results.

use std::collections::HashMap;

use quant_kernels_cpu::StaticScale;
use regex::{Regex, RegexBuilder};
use serde_json::{Map, Value};

use super::group::{activations, fp8_cache, has_group_index, kind_of, reject_padded_words, scheme, storage};
use super::layout::{
    self, CODE_OFFSET, Storage, group_index_name, input_scale_name, input_zero_point_name, packed_name,
    scale_name, shape_name, unpack_zeros, weight_name, zero_point_name,
};
use super::object::Object;
use super::{EMBEDDING, LINEAR, METHOD, REGEX, STATUS, floats};
use crate::allocate;
use crate::checkpoint::{Dtype, TensorSource, TensorSpec, printable, require_finite, require_weight_float};
use crate::format::bits::{unpack_rows, words_for};
use crate::format::checks::check_specs;
use crate::format::numbers::matrix;
use crate::format::{Axis, Contents, PackedReader, PackedWeight, TensorPart, input_order};
use crate::quantize::QuantizedTensor;
use crate::scheme::{ActivationScheme, Granularity, LinearScheme, SchemeRequest};
use crate::{Error, Result};

/// Maximum number of regular expressions among the targets, and among the ignored modules.
const MAX_PATTERNS: usize = 256;
/// Maximum size of a compiled expression in bytes.
const PATTERN_SIZE: usize = 1 << 20;
/// Packed bytes read at a time.
const READ_BYTES: usize = 8 << 20;

/// The scheme of each module. A module's exact name takes precedence over regular expressions, and these over its
/// class. Being ignored takes precedence over all.
#[derive(Debug)]
pub(super) struct Reader {
    targets: Names<Target>,
    ignored: Names<()>,
    fp8_cache: bool,
    notes: Vec<String>,
}

#[derive(Debug, Clone, Copy)]
struct Target {
    scheme: LinearScheme,
    storage: Storage,
    /// Whether an index stores the group of every column.
    indexed: bool,
}

/// Values for modules, by exact name, regular expression or class.
#[derive(Debug)]
struct Names<T> {
    exact: HashMap<String, T>,
    patterns: Vec<(Regex, T)>,
    linear: Option<T>,
    embedding: Option<T>,
}

impl<T: Copy> Names<T> {
    fn new() -> Self {
        Self { exact: HashMap::new(), patterns: Vec::new(), linear: None, embedding: None }
    }

    /// Assigns `what` to `name`. The first matching entry of a module counts.
    fn add(&mut self, name: &str, what: T, path: &str) -> Result<(), String> {
        if let Some(pattern) = name.strip_prefix(REGEX) {
            if self.patterns.len() == MAX_PATTERNS {
                return Err(format!(
                    "`{path}` exceeds the limit of {MAX_PATTERNS} regular expressions in total"
                ));
            }
            let compile = |pattern: &str| {
                RegexBuilder::new(pattern)
                    .size_limit(PATTERN_SIZE)
                    .build()
                    .map_err(|e| format!("`{path}` is not a supported regular expression: {e}"))
            };
            // The pattern is first compiled alone, because `a)|(b` would be well-formed inside the group. `\A` anchors
            // it at the start, as Python's `re.match` does.
            compile(pattern)?;
            self.patterns.push((compile(&format!(r"\A(?:{pattern})"))?, what));
        } else if name == LINEAR {
            self.linear.get_or_insert(what);
        } else if name == EMBEDDING {
            self.embedding.get_or_insert(what);
        } else {
            self.exact.entry(name.to_owned()).or_insert(what);
        }
        Ok(())
    }

    /// Returns the value of a module; `class` is the value for its class.
    fn get(&self, module: &str, class: Option<T>) -> Option<T> {
        self.exact
            .get(module)
            .copied()
            .or_else(|| self.patterns.iter().find(|(regex, _)| regex.is_match(module)).map(|(_, what)| *what))
            .or(class)
    }
}

impl Reader {
    /// Returns the reader for a checkpoint with this `quantization_config`; `None` for other methods.
    ///
    /// # Errors
    /// A reason that names the key, when the configuration uses a feature that this reader does not implement.
    pub(super) fn new(config: &Value) -> Result<Option<Self>, String> {
        if config.get("quant_method").and_then(Value::as_str) != Some(METHOD) {
            return Ok(None);
        }
        let root = Object::new(config, "quantization_config".into())?;
        let storage = storage(&root, true)?;
        root.require("quantization_status", STATUS)?;
        let fp8_cache = fp8_cache(&root)?;
        match root.get("sparsity_config") {
            None => {}
            Some(Value::Object(sparsity)) if sparsity.is_empty() => {}
            Some(_) => root.object("sparsity_config")?.require("format", "dense")?,
        }
        if let Some(transform) = root.get("transform_config") {
            let empty = |v: &Value| v.as_object().is_some_and(Map::is_empty);
            if !empty(transform) && !transform.get("config_groups").is_some_and(empty) {
                return Err(root.refuse("transform_config", "is not supported"));
            }
        }

        let (mut targets, mut notes) = (Names::new(), Vec::new());
        let groups = root.object("config_groups")?;
        for name in groups.map.keys() {
            let group = groups.object(name)?;
            group.allow_only(&["targets", "weights", "input_activations", "output_activations", "format"])?;
            group.require_absent("output_activations")?;
            let own = if group.get("format").is_some() { self::storage(&group, false)? } else { storage };
            let storage = own.ok_or_else(|| {
                group.refuse("format", "is missing, but required because the checkpoint mixes formats")
            })?;
            let weights = group.object("weights")?;
            let scheme = scheme(&weights)?;
            let activations = activations(&group, scheme)?;
            let scheme = LinearScheme { activations: activations.scheme, ..scheme };
            if let Some(described) = activations.left_float {
                notes.push(format!(
                    "`config_groups.{}` describes activations in {described}, which stay float here: its linears are \
                    read as {scheme}",
                    printable(name)
                ));
            }
            if let Err(error) = SchemeRequest::from(scheme).check() {
                return Err(
                    group.refuse("weights", &format!("with these activations is not supported: {error}"))
                );
            }
            if storage == Storage::Packed && !scheme.bits().is_power_of_two() {
                reject_padded_words(&root)?;
            }
            let is_float = scheme.float_format().is_some();
            if storage.is_float() != is_float || (is_float && storage != Storage::of(scheme)) {
                return Err(group.refuse(
                    "format",
                    &format!(
                        "is {}, which does not support {} weights ({scheme})",
                        storage.name(),
                        kind_of(scheme)
                    ),
                ));
            }
            if storage == Storage::Int8 && !(scheme.bits() == 8 && scheme.is_symmetric()) {
                return Err(group.refuse(
                    "format",
                    &format!("is {}, which supports symmetric 8-bit weights only", storage.name()),
                ));
            }
            if storage == Storage::Packed && scheme.activations.is_static() {
                return Err(group
                    .refuse("input_activations", "are static, which is not supported for packed weights"));
            }
            let indexed = has_group_index(&weights)?;
            let is_grouped = matches!(scheme.granularity, Granularity::Group(_));
            if indexed && !(storage == Storage::Packed && is_grouped) {
                return Err(weights.refuse(
                    "actorder",
                    "permutes columns across groups, which is supported only for packed integers with groups",
                ));
            }
            let scheme = Target { scheme, storage, indexed };
            for (path, target) in group.strings("targets")? {
                targets.add(target, scheme, &path)?;
            }
        }
        let mut ignored = Names::new();
        if root.get("ignore").is_some() {
            for (path, name) in root.strings("ignore")? {
                ignored.add(name, (), &path)?;
            }
        }
        Ok(Some(Self { targets, ignored, fp8_cache, notes }))
    }
}

impl Reader {
    fn linear(&self, module: &str) -> Option<Target> {
        let ignored = self.ignored.get(module, self.ignored.linear).is_some();
        if ignored { None } else { self.targets.get(module, self.targets.linear) }
    }

    fn embedding(&self, module: &str) -> Option<Target> {
        let ignored = self.ignored.get(module, self.ignored.embedding).is_some();
        if ignored { None } else { self.targets.get(module, self.targets.embedding) }
    }

    fn storage(&self, weight: PackedWeight<'_>) -> Storage {
        self.target(weight).map_or_else(|| Storage::of(weight.scheme), |target| target.storage)
    }

    /// Returns the entry of the configuration for a weight, which is a linear or an embedding.
    fn target(&self, weight: PackedWeight<'_>) -> Option<Target> {
        let configured = [self.linear(weight.module), self.embedding(weight.module)];
        configured.into_iter().flatten().find(|target| target.scheme == weight.scheme)
    }

    /// Whether an index stores the group of every column of a weight.
    fn is_indexed(&self, weight: PackedWeight<'_>) -> bool {
        self.target(weight).is_some_and(|target| target.indexed)
    }
}

impl PackedReader for Reader {
    fn code_suffixes(&self) -> &'static [&'static str] {
        &[".weight_packed", ".weight"]
    }

    fn parameter_suffixes(&self) -> &'static [&'static str] {
        &[".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx", ".weight_global_scale"]
    }

    fn scheme(&self, module: &str) -> Option<LinearScheme> {
        self.linear(module).map(|target| target.scheme)
    }

    fn embedding_scheme(&self, module: &str) -> Option<LinearScheme> {
        self.embedding(module).map(|target| target.scheme)
    }

    fn has_fp8_cache(&self) -> bool {
        self.fp8_cache
    }

    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }

    fn scale_dtype(&self, source: &dyn TensorSource, module: &str) -> Result<Dtype> {
        // Exponents are stored as plain bytes.
        match source.require(&scale_name(module))?.dtype {
            Dtype::U8 => Ok(Dtype::F8E8M0),
            dtype => Ok(dtype),
        }
    }

    fn shape(&self, source: &dyn TensorSource, module: &str) -> Result<Option<[usize; 2]>> {
        let Some(Target { storage, .. }) = self.linear(module) else { return Ok(None) };
        let (packed, plain) = (packed_name(module), weight_name(module));
        match storage {
            Storage::Packed if source.info(&packed).is_none() => Ok(None),
            Storage::Packed => stated_shape(source, module).map(Some),
            Storage::Int8 => matrix(source, &plain, Dtype::I8, [1, 1]),
            Storage::Float | Storage::Mxfp8 => matrix(source, &plain, Dtype::F8E4M3, [1, 1]),
            Storage::Nvfp4 | Storage::Mxfp4 => matrix(source, &packed, Dtype::U8, [1, 2]),
        }
    }

    fn tensors(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<Vec<TensorSpec>> {
        let PackedWeight { module, shape, scheme } = weight;
        let storage = self.storage(weight);
        let scale_name = scale_name(module);
        let stored_dtype = source.require(&scale_name)?.dtype;
        let scale_dtype = match scheme.fixed_scales() {
            Some(fixed) => fixed.dtype(),
            None => {
                require_weight_float(source.location(&scale_name), &scale_name, stored_dtype)?;
                stored_dtype
            }
        };

        // The expected tensors are those that quant would write, except that the last group of activations of a token may
        // be smaller: no tensor depends on it.
        let activations = match scheme.activations {
            ActivationScheme::Fp8Group => ActivationScheme::Float,
            other => other,
        };
        let stored = LinearScheme { activations, ..scheme };
        let mut specs = layout::layout_as(storage, module, shape, stored, scale_dtype).map_err(|e| {
            Error::UnsupportedQuantization {
                path: source.location(&scale_name),
                reason: format!("`{module}` cannot have the scheme {scheme}: {e}"),
            }
        })?;
        let mut foreign = Vec::new();
        match self.is_indexed(weight) {
            true => specs.push(TensorSpec::new(group_index_name(module), Dtype::I32, [shape[1]])),
            false => foreign.push((
                group_index_name(module),
                "it permutes columns across groups, but `actorder` is not group".to_owned(),
            )),
        }
        for spec in &specs {
            check_spec(source, spec, module)?;
        }
        if scheme.is_symmetric() && !has_null_zero_points(source, storage, module)? {
            foreign.push((
                zero_point_name(module),
                format!("{scheme} is symmetric, so it must not have zero points"),
            ));
        }
        if let Some((name, reason)) = foreign.into_iter().find(|(name, _)| source.info(name).is_some()) {
            return Err(Error::UnsupportedQuantization {
                path: source.location(&name),
                reason: format!("tensor `{name}` is not supported: {reason}"),
            });
        }
        if storage == Storage::Packed {
            check_weight_shape(source, module, shape)?;
        }
        Ok(specs)
    }

    fn parts(&self, _source: &dyn TensorSource, weight: PackedWeight<'_>) -> Option<Vec<TensorPart>> {
        let PackedWeight { module, scheme, .. } = weight;
        let storage = self.storage(weight);
        let (rows, columns) = (Axis::new(0, 1, 1), Axis::new(1, 1, 1));
        let (codes, inputs) = match storage {
            Storage::Packed => (packed_name(module), Axis::of_words(1, scheme.bits())),
            Storage::Nvfp4 | Storage::Mxfp4 => (packed_name(module), Axis::new(1, 2, 1)),
            Storage::Int8 | Storage::Float | Storage::Mxfp8 => (weight_name(module), columns),
        };
        let groups = Axis::of_groups(1, scheme);
        let outputs = match scheme.granularity {
            Granularity::Tensor => None,
            Granularity::Block => Axis::of_groups(0, scheme),
            Granularity::Group(_) | Granularity::Channel => Some(rows),
        };
        let mut parts = vec![
            TensorPart::new(codes, Some(rows), Some(inputs)),
            TensorPart::new(scale_name(module), outputs, groups),
        ];
        if storage == Storage::Packed {
            let shape = TensorPart::new(shape_name(module), None, None);
            parts.push(shape.with_contents(Contents::Shape));
            if !scheme.is_symmetric() {
                let words = Axis::of_words(0, scheme.bits());
                parts.push(TensorPart::new(zero_point_name(module), Some(words), groups));
            }
            if self.is_indexed(weight) {
                let index = TensorPart::new(group_index_name(module), None, Some(Axis::new(0, 1, 1)));
                parts.push(match scheme.granularity {
                    Granularity::Group(size) => index.with_contents(Contents::Groups(size)),
                    _ => index,
                });
            }
        }
        Some(parts)
    }

    fn input_order(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<Option<Vec<u32>>> {
        let (k, granularity) = (weight.shape[1], weight.scheme.granularity);
        match self.is_indexed(weight) {
            true => input_order::read(source, &group_index_name(weight.module), k, granularity.group_size(k)),
            false => Ok(None),
        }
    }

    fn zeros(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<Option<Vec<u8>>> {
        let PackedWeight { module, shape: [n, k], scheme } = weight;
        if scheme.is_symmetric() {
            return Ok(None);
        }
        let groups = k / scheme.granularity.group_size(k);
        unpack_zeros(&source.read(&zero_point_name(module))?, n, groups, scheme.bits()).map(Some)
    }

    fn read(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<QuantizedTensor> {
        self.tensors(source, weight)?;
        if weight.scheme.float_format().is_some() {
            return floats::read(source, weight);
        }
        let PackedWeight { module, shape, scheme } = weight;
        let [n, k] = shape;
        let scale_name = scale_name(module);
        let scale_dtype = source.require(&scale_name)?.dtype;
        let groups = k / scheme.granularity.group_size(k);
        let mut scales: Vec<f32> = allocate::zeros(n * groups, "the scales of a weight")?;
        scale_dtype.widen(&source.read(&scale_name)?, &mut scales);
        require_finite(source.location(&scale_name), &scale_name, &scales)?;
        let zeros = self.zeros(source, weight)?;
        let codes = match self.storage(weight) {
            Storage::Int8 => {
                let mut codes = source.read(&weight_name(module))?;
                codes.iter_mut().for_each(|code| *code ^= CODE_OFFSET);
                codes
            }
            _ => read_codes(source, &packed_name(module), shape, scheme.bits())?,
        };
        let input = read_input(source, module, scheme)?;
        let tensor = QuantizedTensor {
            shape,
            scheme,
            codes,
            scales,
            scale_dtype,
            zeros,
            levels: None,
            global: None,
            input,
            input_order: None,
        };
        tensor.view()?;
        Ok(input_order::apply(tensor, self.input_order(source, weight)?))
    }
}

/// Some versions write zero points of 0 for symmetric byte weights.
fn has_null_zero_points(source: &dyn TensorSource, storage: Storage, module: &str) -> Result<bool> {
    let name = zero_point_name(module);
    match source.info(&name) {
        Some(info) if storage == Storage::Int8 && info.dtype == Dtype::I8 => {
            Ok(source.read(&name)?.iter().all(|zero| *zero == 0))
        }
        _ => Ok(false),
    }
}

/// Reads the static int8 grid of the input, if the scheme has one.
fn read_input(source: &dyn TensorSource, module: &str, scheme: LinearScheme) -> Result<Option<StaticScale>> {
    let ActivationScheme::Static { symmetric } = scheme.activations else { return Ok(None) };
    let name = input_scale_name(module);
    let scale = source.read_f32(&name)?.first().copied().unwrap_or(f32::NAN);
    let zero = match symmetric {
        true => 0,
        false => source.read(&input_zero_point_name(module))?.first().map_or(0, |zero| zero.cast_signed()),
    };
    if !(scale > 0.0 && scale.is_finite() && (1.0 / scale).is_finite()) {
        return Err(Error::UnsupportedQuantization {
            path: source.location(&name),
            reason: format!(
                "tensor `{name}` is {scale}; an input scale and its reciprocal must be positive and finite"
            ),
        });
    }
    Ok(Some(StaticScale { scale, zero }))
}

fn check_spec(source: &dyn TensorSource, spec: &TensorSpec, module: &str) -> Result<()> {
    // Files of other tools differ from quant's in these dtypes.
    check_specs(source, std::slice::from_ref(spec), |spec, dtype| {
        (spec.name == shape_name(module) && dtype == Dtype::I32)
            || (spec.name == group_index_name(module) && dtype == Dtype::I64)
            || (spec.name == input_scale_name(module) && dtype.is_weight_float())
            || (spec.name == scale_name(module) && spec.info.dtype == Dtype::U8 && dtype == Dtype::F8E8M0)
    })
}

/// Reads the numbers of a `weight_shape` without checking them.
fn read_weight_shape(source: &dyn TensorSource, name: &str) -> Result<Vec<i64>> {
    let size = source.require(name)?.dtype.size();
    let number = |b: &[u8]| match b.try_into() {
        Ok(wide) => i64::from_le_bytes(wide),
        Err(_) => b.try_into().map_or(-1, |narrow| i64::from(i32::from_le_bytes(narrow))),
    };
    Ok(source.read(name)?.chunks_exact(size).map(number).collect())
}

/// The shape of a packed weight according to its `weight_shape`, which is not compared with the codes here.
fn stated_shape(source: &dyn TensorSource, module: &str) -> Result<[usize; 2]> {
    let name = shape_name(module);
    let info = source.require(&name)?;
    let refuse = |reason: String| Error::UnsupportedQuantization { path: source.location(&name), reason };
    if info.shape != [2] || !matches!(info.dtype, Dtype::I64 | Dtype::I32) {
        return Err(refuse(format!(
            "tensor `{name}` is {} {:?}; expected two integers (I64 or I32)",
            info.dtype, info.shape
        )));
    }
    let stated = read_weight_shape(source, &name)?;
    if let [n, k] = stated[..]
        && let (Ok(n), Ok(k)) = (usize::try_from(n), usize::try_from(k))
        && n.checked_mul(k).is_some()
    {
        return Ok([n, k]);
    }
    Err(refuse(format!("tensor `{name}` contains {stated:?}, which is not the shape of a matrix")))
}

/// Compares `weight_shape` with the shape that the model implies: the packed size determines the number of columns only
/// up to a full word.
fn check_weight_shape(source: &dyn TensorSource, module: &str, expected: [usize; 2]) -> Result<()> {
    let name = shape_name(module);
    let stated = read_weight_shape(source, &name)?;
    if stated.iter().map(|&d| usize::try_from(d).ok()).eq(expected.iter().map(|&d| Some(d))) {
        return Ok(());
    }
    Err(Error::UnsupportedQuantization {
        path: source.location(&name),
        reason: format!("tensor `{name}` is {stated:?}, but config.json implies {expected:?}"),
    })
}

/// Unpacks codes some rows at a time, so that a large weight is not in memory twice. The caller has checked the
/// tensor's dtype and shape.
fn read_codes(source: &dyn TensorSource, name: &str, [n, k]: [usize; 2], bits: u8) -> Result<Vec<u8>> {
    let row_bytes = words_for(k, bits) * 4;
    let rows = (READ_BYTES / row_bytes).max(1);
    let mut codes = allocate::zeros(n * k, "the codes of a weight")?;
    let mut buffer = allocate::zeros(rows.min(n) * row_bytes, "the words of a weight")?;
    for (i, codes) in codes.chunks_mut(rows * k).enumerate() {
        let bytes = &mut buffer[..codes.len() / k * row_bytes];
        source.read_range(name, (i * rows * row_bytes) as u64, bytes)?;
        unpack_rows(bytes, k, bits, codes).map_err(|e| Error::Internal(format!("tensor `{name}`: {e}")))?;
    }
    Ok(codes)
}

#[cfg(test)]
#[path = "reader_tests.rs"]
mod tests;
