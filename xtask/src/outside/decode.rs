//! The outputs that `read` must print, computed from the bytes of a checkpoint as the pages in `docs/formats` describe
//! them. Nothing here is shared with the crates that `read` links.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use crate::support::shards::{Checkpoint, Entry};

/// Bits `4 j` to `4 j + 3` of AWQ's words hold the output `AWQ_ORDER[j]` of eight.
const AWQ_ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
/// The magnitudes of E2M1.
const E2M1: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The outputs of a linear.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Outputs {
    pub(super) name: String,
    pub(super) shape: [usize; 2],
    /// `W · x + b`, with the `x` of `read`.
    pub(super) values: Vec<f64>,
    /// The errors that the kernels may have: see "What is exact" in `docs/kernels.md`.
    pub(super) bounds: Vec<f64>,
}

/// One weight: `(code − zero) · scale`. The kernels subtract `center` from codes first.
struct Weight {
    code: f64,
    zero: f64,
    center: f64,
    scale: f64,
}

/// A linear that was read; the function returns the weight of an output and an input.
type Weights<'a> = ([usize; 2], Box<dyn Fn(usize, usize) -> Weight + 'a>);

/// Computes the outputs of all linears of a checkpoint, in the order of their names.
///
/// # Errors
/// When a tensor is missing or has the wrong size.
pub(super) fn outputs(directory: &Path, format: &str) -> Result<Vec<Outputs>> {
    let checkpoint = Checkpoint::open(directory)?;
    let mut all = Vec::new();
    for (module, _) in modules(&checkpoint) {
        let tensors = Tensors { checkpoint: &checkpoint, module };
        let (shape, weight) = tensors.weights(format).with_context(|| module.to_owned())?;
        let bias = match tensors.find("bias") {
            Some(bias) => tensors.floats(bias)?,
            None => vec![0.0; shape[0]],
        };
        ensure!(bias.len() == shape[0], "{module}: {} biases", bias.len());
        all.push(multiplied(module, shape, &weight, &bias));
    }
    all.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(all)
}

/// The linears with codes: their names, and the tensors with the codes.
pub(super) fn modules(checkpoint: &Checkpoint) -> impl Iterator<Item = (&str, &Entry)> {
    checkpoint.entries().filter_map(|entry| {
        let (module, tensor) = entry.name.rsplit_once('.')?;
        match (tensor, &*entry.dtype) {
            ("qweight" | "weight_packed", _) | ("weight", "I8" | "U8") => Some((module, entry)),
            _ => None,
        }
    })
}

fn multiplied(
    name: &str,
    [n, k]: [usize; 2],
    weight: &dyn Fn(usize, usize) -> Weight,
    bias: &[f64],
) -> Outputs {
    let (mut values, mut bounds) = (Vec::new(), Vec::new());
    let relative = 2.0_f64.powi(-16) + (k as f64 + 4.0) * 2.0_f64.powi(-23);
    for (o, bias) in (0..n).zip(bias) {
        let (mut sum, mut size) = (*bias, bias.abs());
        for i in 0..k {
            let x = (37 * i % 61) as f64 / 32.0 - 1.0;
            let Weight { code, zero, center, scale } = weight(o, i);
            sum += (code - zero) * scale * x;
            size += scale.abs() * ((code - center).abs() + (center - zero).abs()) * x.abs();
        }
        values.push(sum);
        bounds.push(relative * size);
    }
    Outputs { name: name.to_owned(), shape: [n, k], values, bounds }
}

/// The tensors of one linear.
struct Tensors<'a> {
    checkpoint: &'a Checkpoint,
    module: &'a str,
}

impl<'a> Tensors<'a> {
    fn find(&self, tensor: &str) -> Option<&'a Entry> {
        let is = |entry: &&Entry| {
            entry.name.rsplit_once('.').is_some_and(|(module, name)| module == self.module && name == tensor)
        };
        self.checkpoint.entries().find(is)
    }

    fn entry(&self, tensor: &str, dtype: &str) -> Result<(&'a Entry, Vec<u8>)> {
        let entry = self.find(tensor).with_context(|| format!("{tensor} is missing"))?;
        ensure!(entry.dtype == dtype, "{tensor} is {}", entry.dtype);
        Ok((entry, self.checkpoint.read(entry)?))
    }

    fn words(&self, tensor: &str) -> Result<(Vec<usize>, Vec<u32>)> {
        let (entry, bytes) = self.entry(tensor, "I32")?;
        let words = bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        Ok((entry.shape.clone(), words.collect()))
    }

    fn floats(&self, entry: &Entry) -> Result<Vec<f64>> {
        let float = entry.float().with_context(|| format!("{} is {}", entry.name, entry.dtype))?;
        Ok(float.widen(&self.checkpoint.read(entry)?).into_iter().map(f64::from).collect())
    }

    fn scales(&self, tensor: &str) -> Result<Vec<f64>> {
        self.floats(self.find(tensor).with_context(|| format!("{tensor} is missing"))?)
    }

    fn weights(&self, format: &str) -> Result<Weights<'a>> {
        match format {
            "awq" => self.awq(),
            "gptq" => self.gptq(),
            "compressed-tensors" if self.find("weight_packed").is_some() => self.packed(),
            "compressed-tensors" => self.int8(),
            "qserve" => self.qserve(),
            "modelopt" => self.nvfp4(),
            _ => bail!("no decoder for {format}"),
        }
    }

    fn awq(&self) -> Result<Weights<'a>> {
        let (shape, codes) = self.words("qweight")?;
        let (_, zeros) = self.words("qzeros")?;
        let scales = self.scales("scales")?;
        let (k, n) = (shape[0], shape[1] * 8);
        ensure!(scales.len().is_multiple_of(n) && zeros.len() * 8 == scales.len(), "scales or zeros");
        let size = k / (scales.len() / n);
        let at = move |o: usize, i: usize| Weight {
            code: awq_code(codes[i * (n / 8) + o / 8], o % 8),
            zero: awq_code(zeros[i / size * (n / 8) + o / 8], o % 8),
            center: 8.0,
            scale: scales[i / size * n + o],
        };
        Ok(([n, k], Box::new(at)))
    }

    fn gptq(&self) -> Result<Weights<'a>> {
        let (shape, codes) = self.words("qweight")?;
        let (_, zeros) = self.words("qzeros")?;
        let (_, groups) = self.words("g_idx")?;
        let scales = self.scales("scales")?;
        let (k, n) = (shape[0] * 8, shape[1]);
        let count = scales.len() / n;
        ensure!(groups.len() == k && zeros.len() * 8 == scales.len(), "groups or zeros");
        ensure!(groups.iter().all(|&group| (group as usize) < count), "an index of a group");
        let at = move |o: usize, i: usize| {
            let group = groups[i] as usize;
            Weight {
                code: nibble(codes[i / 8 * n + o], i % 8),
                zero: nibble(zeros[group * (n / 8) + o / 8], o % 8) + 1.0,
                center: 8.0,
                scale: scales[group * n + o],
            }
        };
        Ok(([n, k], Box::new(at)))
    }

    /// Codes of 4 bits on symmetric grids.
    fn packed(&self) -> Result<Weights<'a>> {
        let (shape, codes) = self.words("weight_packed")?;
        let scales = self.scales("weight_scale")?;
        let (n, k) = (shape[0], shape[1] * 8);
        let count = scales.len() / n;
        let groups: Vec<usize> = match self.find("weight_g_idx") {
            Some(_) => self.words("weight_g_idx")?.1.into_iter().map(|group| group as usize).collect(),
            None => (0..k).map(|i| i / (k / count)).collect(),
        };
        ensure!(groups.len() == k && groups.iter().all(|group| *group < count), "an index of a group");
        let at = move |o: usize, i: usize| Weight {
            code: nibble(codes[o * (k / 8) + i / 8], i % 8),
            zero: 8.0,
            center: 8.0,
            scale: scales[o * count + groups[i]],
        };
        Ok(([n, k], Box::new(at)))
    }

    fn int8(&self) -> Result<Weights<'a>> {
        let (entry, codes) = self.entry("weight", "I8")?;
        let scales = self.scales("weight_scale")?;
        let [n, k] = entry.shape[..] else { bail!("shape {:?}", entry.shape) };
        ensure!(scales.len() == n, "{} scales", scales.len());
        let at = move |o: usize, i: usize| Weight {
            code: f64::from(codes[o * k + i].cast_signed()),
            zero: 0.0,
            center: 0.0,
            scale: scales[o],
        };
        Ok(([n, k], Box::new(at)))
    }

    /// Codes of 4 bits in groups, with two levels of scales.
    fn qserve(&self) -> Result<Weights<'a>> {
        let (entry, codes) = self.entry("qweight", "I8")?;
        let (_, scales) = self.entry("s2_scales", "I8")?;
        let (_, products) = self.entry("s2_zeros", "I8")?;
        let rows = self.scales("s1_scales")?;
        let [n, half] = entry.shape[..] else { bail!("shape {:?}", entry.shape) };
        let k = 2 * half;
        ensure!(rows.len() == n && scales.len() == k / 128 * n && products.len() == scales.len(), "scales");
        let at = move |o: usize, i: usize| {
            let (byte, shift) = qserve_place(o, i, k);
            let group = i / 128 * n + o / 32 * 32 + o % 8 * 4 + o % 32 / 8;
            let scale = f64::from(scales[group].cast_signed());
            // The stored number is −zero · s2 modulo 256; zero is at most 15, and s2 at most 16.
            let product = f64::from(products[group].wrapping_neg());
            let scaled = f64::from(codes[byte] >> shift & 15);
            Weight { code: scaled, zero: product / scale, center: 8.0, scale: scale * rows[o] }
        };
        Ok(([n, k], Box::new(at)))
    }

    fn nvfp4(&self) -> Result<Weights<'a>> {
        let (entry, codes) = self.entry("weight", "U8")?;
        let (_, scales) = self.entry("weight_scale", "F8_E4M3")?;
        let global = self.scales("weight_scale_2")?;
        let [n, half] = entry.shape[..] else { bail!("shape {:?}", entry.shape) };
        let k = 2 * half;
        ensure!(scales.len() * 16 == n * k && global.len() == 1, "scales");
        let at = move |o: usize, i: usize| {
            let code = codes[o * half + i / 2] >> (i % 2 * 4) & 15;
            let magnitude = E2M1[usize::from(code & 7)];
            Weight {
                code: if code & 8 == 0 { magnitude } else { -magnitude },
                zero: 0.0,
                center: 0.0,
                scale: e4m3(scales[o * (k / 16) + i / 16]) * global[0],
            }
        };
        Ok(([n, k], Box::new(at)))
    }
}

/// The number at place `at` of eight in a word, from the low bits on.
fn nibble(word: u32, at: usize) -> f64 {
    f64::from(word >> (4 * at) & 15)
}

fn awq_code(word: u32, output: usize) -> f64 {
    let at = AWQ_ORDER.iter().position(|&place| place == output).unwrap_or_default();
    nibble(word, at)
}

/// The byte of a code in QServe's tiles, and the position of its lowest bit.
fn qserve_place(o: usize, i: usize, k: usize) -> (usize, usize) {
    let (tile, p, h, nl) = (o / 32, o % 32 / 16, o % 16 / 8, o % 8);
    let (column, kh, kl, kr) = (i / 32, i % 32 / 16, i % 16 / 4, i % 4);
    (((tile * (k / 32) + column) * 32 + 4 * nl + kl) * 16 + 8 * kh + 4 * h + kr, 4 * p)
}

fn e4m3(code: u8) -> f64 {
    let (exponent, fraction) = (i32::from(code >> 3 & 15), f64::from(code & 7) / 8.0);
    let magnitude = match exponent {
        0 => fraction * 2.0_f64.powi(-6),
        _ => (1.0 + fraction) * 2.0_f64.powi(exponent - 7),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The examples of the pages in `docs/formats`.
    #[test]
    fn codes_are_where_the_documents_say() {
        for output in 0..8 {
            assert_eq!(awq_code(0x7531_6420, output), output as f64);
            assert_eq!(nibble(0x7654_3210, output), output as f64);
        }
        let places = [
            ((0, 0), (0, 0)),
            ((16, 0), (0, 4)),
            ((8, 0), (4, 0)),
            ((0, 4), (16, 0)),
            ((0, 16), (8, 0)),
            ((1, 0), (64, 0)),
            ((0, 32), (512, 0)),
            ((32, 0), (65536, 0)),
        ];
        for ((o, i), expected) in places {
            assert_eq!(qserve_place(o, i, 4096), expected);
        }
        let numbers =
            [(0x00, 0.0), (0x01, 2.0_f64.powi(-9)), (0x08, 2.0_f64.powi(-6)), (0x38, 1.0), (0x7e, 448.0)];
        for (code, expected) in numbers {
            assert_eq!((e4m3(code), e4m3(code | 0x80)), (expected, -expected));
        }
    }

    #[test]
    fn rows_are_multiplied() {
        let weight = |o: usize, i: usize| Weight { code: (o + i) as f64, zero: 1.0, center: 8.0, scale: 0.5 };
        let outputs = multiplied("a", [2, 3], &weight, &[0.0, 4.0]);
        // 37 and 74 are 37 and 13 modulo 61.
        let x = [-1.0, 37.0 / 32.0 - 1.0, 13.0 / 32.0 - 1.0];
        let expected = [0.5 * (-x[0] + x[2]), 4.0 + 0.5 * (x[1] + 2.0 * x[2])];
        assert_eq!(outputs.values, expected);
        assert!(outputs.bounds.iter().all(|bound| (1e-5..1e-3).contains(bound)), "{:?}", outputs.bounds);
    }
}
