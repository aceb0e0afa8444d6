//! Parts of a weight, read from the file without the rest, as tensor-parallel engines need them.
//!
//! A reader says [how the tensors of a weight are divided](super::PackedReader::parts). [`PartSource`] presents the
//! part of each tensor as a whole tensor, from which the reader reads a smaller weight.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

use crate::checkpoint::{Dtype, TensorInfo, TensorSource};
use crate::quantize::QuantizedTensor;
use crate::scheme::{BLOCK, Granularity, LinearScheme};
use crate::{Error, Result};

/// A dimension of a stored tensor that runs over outputs or inputs of the weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Axis {
    /// The dimension.
    pub dimension: usize,
    /// The number of outputs or inputs that are stored together: parts begin at multiples of it, and end at multiples or
    /// at the end of the weight.
    pub features: usize,
    /// The size of the dimension for these outputs or inputs.
    pub elements: usize,
}

impl Axis {
    /// A dimension with `elements` per `features`: 1 per 8 if a word holds 8 codes. 0 features count as 1.
    pub fn new(dimension: usize, features: usize, elements: usize) -> Self {
        Self { dimension, features: features.max(1), elements }
    }

    /// A dimension of 32-bit words that hold codes of this many bits as a dense stream.
    pub fn of_words(dimension: usize, bits: u8) -> Self {
        let bits = usize::from(bits);
        let shared = 1 << bits.trailing_zeros().min(5);
        Self::new(dimension, 32 / shared, bits / shared)
    }

    /// A dimension that runs over the groups of inputs that share a scale; `None` if a scale is for whole rows.
    pub fn of_groups(dimension: usize, scheme: LinearScheme) -> Option<Self> {
        match scheme.granularity {
            Granularity::Group(size) => Some(Self::new(dimension, size, 1)),
            Granularity::Block => Some(Self::new(dimension, BLOCK, 1)),
            Granularity::Channel | Granularity::Tensor => None,
        }
    }

    /// Converts a range of `total` features to a range of the dimension, which has this size. `None` if the storage
    /// cannot be divided there.
    fn range(self, part: &Range<usize>, total: usize, size: usize) -> Option<Range<usize>> {
        let place = |feature: usize| {
            let divides = self.features > 0 && feature.is_multiple_of(self.features);
            let at = divides.then(|| feature / self.features * self.elements);
            if feature == total { Some(size) } else { at.filter(|at| *at <= size) }
        };
        Some(place(part.start)?..place(part.end)?)
    }
}

/// How a stored tensor is divided among the outputs and inputs of its weight.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TensorPart {
    /// The name of the tensor.
    pub name: String,
    /// The dimension of outputs, if there is one.
    pub outputs: Option<Axis>,
    /// The dimension of inputs, if there is one.
    pub inputs: Option<Axis>,
    /// What the tensor holds in a part of the weight.
    pub contents: Contents,
}

/// The contents of a tensor in a part of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Contents {
    /// The stored numbers.
    Stored,
    /// The shape of the weight, as integers.
    Shape,
    /// Indices of groups of this many inputs, counted from the first group of the part.
    Groups(usize),
}

impl TensorPart {
    /// A tensor with these dimensions, whose numbers are as stored.
    pub fn new(name: String, outputs: Option<Axis>, inputs: Option<Axis>) -> Self {
        Self { name, outputs, inputs, contents: Contents::Stored }
    }

    /// The tensor with other contents.
    pub fn with_contents(self, contents: Contents) -> Self {
        Self { contents, ..self }
    }
}

/// Returns the multiples at which parts of a weight may begin and end: of outputs, and of inputs.
pub(super) fn multiples(parts: &[TensorPart]) -> [usize; 2] {
    let least = |axes: &dyn Fn(&TensorPart) -> Option<Axis>| {
        parts.iter().filter_map(axes).fold(1, |all, axis| common_multiple(all, axis.features))
    };
    [least(&|part| part.outputs), least(&|part| part.inputs)]
}

pub(super) fn common_multiple(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x.max(1)).saturating_mul(b)
}

/// Whether a range of outputs or inputs begins and ends at these multiples, or at the end of the weight.
pub(super) fn divides(part: &Range<usize>, total: usize, multiple: usize) -> bool {
    [part.start, part.end].into_iter().all(|at| at == total || at.is_multiple_of(multiple))
}

/// Fails unless a range of outputs or inputs is not empty, within the weight, and divides it at these multiples.
pub(super) fn check_range(what: &str, part: &Range<usize>, total: usize, multiple: usize) -> Result<()> {
    let wrong = if part.start >= part.end || part.end > total {
        format!("are not a part of a weight with {total} {what}")
    } else if !divides(part, total, multiple) {
        format!("do not begin and end at multiples of {multiple}, or at the end of the weight")
    } else {
        return Ok(());
    };
    Err(Error::usage(
        format!("{what} {}..{} {wrong}", part.start, part.end),
        format!(
            "choose a range within 0..{total} that begins and ends at multiples of {multiple}, or at {total}"
        ),
    ))
}

/// The error for some inputs of a weight with an [order of inputs](QuantizedTensor::input_order).
pub(super) fn not_divided_by_inputs() -> Error {
    Error::usage(
        "a weight whose groups of inputs are not adjacent cannot be divided by inputs",
        "divide it by outputs, or dequantize it",
    )
}

/// A part of a stored tensor.
struct Part {
    info: TensorInfo,
    /// Stored rows and columns; a vector is a single row.
    rows: Range<usize>,
    columns: Range<usize>,
    width: usize,
    /// The bytes, if they differ from the stored ones.
    bytes: Option<Vec<u8>>,
}

/// The tensors of a part of a weight. Other tensors of the source are unchanged.
pub(super) struct PartSource<'a> {
    source: &'a dyn TensorSource,
    parts: BTreeMap<String, Part>,
}

impl<'a> PartSource<'a> {
    /// Presents these outputs and inputs of a weight of this shape.
    ///
    /// # Errors
    /// [`Error::Internal`] if a tensor does not have the described dimensions; when indices of groups cannot be read.
    pub(super) fn new(
        source: &'a dyn TensorSource,
        parts: Vec<TensorPart>,
        shape: [usize; 2],
        [rows, columns]: [&Range<usize>; 2],
    ) -> Result<Self> {
        let mut found = BTreeMap::new();
        for part in parts {
            let info = source.require(&part.name)?;
            let internal = || Error::Internal(format!("`{}` cannot be divided", part.name));
            let mut ranges: Vec<Range<usize>> = info.shape.iter().map(|&size| 0..size).collect();
            let axes = [(part.outputs, rows, shape[0]), (part.inputs, columns, shape[1])];
            for (axis, asked, total) in axes {
                let Some(axis) = axis else { continue };
                let range = ranges.get_mut(axis.dimension).ok_or_else(internal)?;
                *range = axis.range(asked, total, range.end).ok_or_else(internal)?;
            }
            let sizes: Vec<usize> = ranges.iter().map(Range::len).collect();
            let (rows, columns) = match &ranges[..] {
                [] => (0..1, 0..1),
                [one] => (0..1, one.clone()),
                [first, second] => (first.clone(), second.clone()),
                _ => return Err(internal()),
            };
            let width = info.shape.last().copied().unwrap_or(1);
            let info = TensorInfo { dtype: info.dtype, shape: sizes };
            let one = Part { info, rows, columns, width, bytes: None };
            found.insert(part.name.clone(), (one, part.contents));
        }
        let mut all = Self { source, parts: BTreeMap::new() };
        let mut contents = Vec::new();
        for (name, (part, replaced)) in found {
            contents.push((name.clone(), replaced));
            all.parts.insert(name, part);
        }
        for (name, replaced) in contents {
            let bytes = match replaced {
                Contents::Stored => continue,
                Contents::Shape => {
                    let dtype = all.require(&name)?.dtype;
                    [rows.len(), columns.len()].iter().flat_map(|&size| integer(dtype, size as i64)).collect()
                }
                Contents::Groups(size) => {
                    let dtype = all.require(&name)?.dtype;
                    let first = (columns.start / size.max(1)) as i64;
                    let stored = all.read(&name)?;
                    // -1 stands for inputs without a group, so a group before the part must not become one of them.
                    let less = |bytes: &[u8]| match number(bytes) {
                        -1 => integer(dtype, -1),
                        group if group >= first => integer(dtype, group - first),
                        _ => integer(dtype, i64::from(i32::MIN)),
                    };
                    stored.chunks_exact(dtype.size()).flat_map(less).collect::<Vec<u8>>()
                }
            };
            if let Some(part) = all.parts.get_mut(&name) {
                part.bytes = Some(bytes);
            }
        }
        Ok(all)
    }
}

fn integer(dtype: Dtype, value: i64) -> Vec<u8> {
    match dtype {
        Dtype::I64 => value.to_le_bytes().to_vec(),
        _ => (value as i32).to_le_bytes().to_vec(),
    }
}

fn number(bytes: &[u8]) -> i64 {
    match (<[u8; 8]>::try_from(bytes), <[u8; 4]>::try_from(bytes)) {
        (Ok(wide), _) => i64::from_le_bytes(wide),
        (_, Ok(narrow)) => i64::from(i32::from_le_bytes(narrow)),
        _ => -1,
    }
}

impl TensorSource for PartSource<'_> {
    fn names(&self) -> Vec<&str> {
        self.source.names()
    }

    fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.parts.get(name).map(|part| &part.info).or_else(|| self.source.info(name))
    }

    fn read_range(&self, name: &str, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let Some(part) = self.parts.get(name) else { return self.source.read_range(name, offset, buffer) };
        let outside = || Error::Internal(format!("a range of tensor `{name}` exceeds its part"));
        let start = usize::try_from(offset).map_err(|_| outside())?;
        let end = start.checked_add(buffer.len()).ok_or_else(outside)?;
        if end as u64 > part.info.byte_len() {
            return Err(outside());
        }
        if let Some(bytes) = &part.bytes {
            buffer.copy_from_slice(bytes.get(start..end).ok_or_else(outside)?);
            return Ok(());
        }
        let size = part.info.dtype.size();
        let (row, stored_row) = (part.columns.len() * size, part.width * size);
        let place = |row: usize| (row * stored_row + part.columns.start * size) as u64;
        if row == stored_row {
            return self.source.read_range(name, place(part.rows.start) + offset, buffer);
        }
        let (mut at, mut rest) = (start, buffer);
        while !rest.is_empty() {
            let (index, within) = (at / row, at % row);
            let (piece, after) = rest.split_at_mut((row - within).min(rest.len()));
            self.source.read_range(name, place(part.rows.start + index) + within as u64, piece)?;
            at += piece.len();
            rest = after;
        }
        Ok(())
    }

    fn location(&self, name: &str) -> PathBuf {
        self.source.location(name)
    }
}

impl QuantizedTensor {
    /// The multiples of rows and columns at which a scheme can be divided: columns of a group, and blocks.
    pub fn part_multiples(scheme: LinearScheme) -> [usize; 2] {
        match scheme.granularity {
            Granularity::Group(size) => [1, size],
            Granularity::Block => [BLOCK, BLOCK],
            Granularity::Channel | Granularity::Tensor => [1, 1],
        }
    }

    /// Returns some rows and columns of the weight, with the scales and zero points of their groups.
    ///
    /// # Errors
    /// [`Error::Usage`] if the ranges are empty or exceed the weight, columns do not begin and end with groups, or some
    /// columns are left out of a weight with an [order of inputs](Self::input_order);
    /// [`Error::Internal`] if the parts of the tensor are inconsistent.
    pub fn part(&self, rows: Range<usize>, columns: Range<usize>) -> Result<Self> {
        self.sorted_view()?;
        let [n, k] = self.shape;
        let [row_multiple, column_multiple] = Self::part_multiples(self.scheme);
        check_range("rows", &rows, n, row_multiple)?;
        check_range("columns", &columns, k, column_multiple)?;
        if self.input_order.is_some() && columns != (0..k) {
            return Err(not_divided_by_inputs());
        }
        // Where blocks are cut off by the end of a row, groups of the part may be longer than those of the weight.
        let size = self.scheme.granularity.group_size(k);
        let part_size = self.scheme.granularity.group_size(columns.len());
        let first = columns.start;
        let pick = |row: usize| {
            (0..columns.len() / part_size).map(move |g| row * (k / size) + (first + g * part_size) / size)
        };
        let shape = [rows.len(), columns.len()];
        let codes = rows.clone().flat_map(|row| self.codes[row * k..][columns.clone()].iter().copied());
        let mut part = Self::new(
            shape,
            self.scheme,
            codes.collect(),
            rows.clone().flat_map(pick).map(|at| self.scales[at]).collect(),
            self.scale_dtype,
        );
        part.zeros =
            self.zeros.as_ref().map(|zeros| rows.clone().flat_map(pick).map(|at| zeros[at]).collect());
        part.levels = self.levels.as_ref().map(|levels| crate::quantize::Levels {
            groups: rows.clone().flat_map(pick).map(|at| levels.groups[at]).collect(),
            rows: levels.rows[rows.clone()].to_vec(),
        });
        (part.global, part.input) = (self.global, self.input);
        part.input_order.clone_from(&self.input_order);
        part.sorted_view()?;
        Ok(part)
    }
}
