//! Packed weights as a quantized type of candle.

use std::borrow::Cow;
use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QuantizedType};
use candle_core::{CpuStorage, Error, Result, bail};
use half::f16;
use quant_formats::quantize::{InputGrid, restore_input_order};
use quant_kernels_cpu::candle::{QuantizedLinear, Runner};
use quant_kernels_cpu::{Activations, PackedLinear};

/// What candle is given as the type. It reads the bytes of some types itself (`Q4K`, `Q6K` and `Q8_0` on x86-64, also
/// `Q4_0` and `Q5K` on AArch64), and dequantizes float types; of this one, it asks only for products.
const TYPE: GgmlDType = GgmlDType::Q8_1;

/// How the inputs of a weight become the rows that its packed columns are multiplied by.
#[derive(Debug, Clone, Default)]
pub(crate) struct Columns {
    /// The grid that inputs are rounded to.
    pub(crate) grid: Option<InputGrid>,
    /// The input of each column, if they are not in the order of the inputs.
    pub(crate) order: Option<Vec<u32>>,
}

/// A packed weight `[n, k]`.
pub(crate) struct PackedType {
    linear: QuantizedLinear,
    columns: Columns,
}

impl PackedType {
    pub(crate) fn new(packed: PackedLinear, mut columns: Columns, runner: &Runner) -> Result<Self> {
        // The kernels round to integers themselves. They multiply values of other grids as floats.
        let activations = match columns.grid {
            Some(InputGrid::Token) => Activations::PerToken,
            Some(InputGrid::Static(by)) => Activations::Static(by),
            _ => Activations::Float,
        };
        if activations != Activations::Float {
            columns.grid = None;
        }
        let linear = QuantizedLinear::new(Arc::new(packed), activations, runner).map_err(Error::wrap)?;
        Ok(Self { linear, columns })
    }

    /// A weight whose inputs stay as they are.
    pub(crate) fn float(packed: PackedLinear, runner: &Runner) -> Result<Self> {
        Self::new(packed, Columns::default(), runner)
    }

    fn shape(&self) -> [usize; 2] {
        let layout = self.linear.weight().layout();
        [layout.n(), layout.k()]
    }

    /// Rounds rows `[m, k]` to the grid, and moves their values to the order of the columns.
    fn arranged<'a>(&self, x: &'a [f32]) -> Cow<'a, [f32]> {
        let ([_, k], mut x) = (self.shape(), Cow::Borrowed(x));
        if let Some(grid) = self.columns.grid {
            grid.round(x.to_mut(), k);
        }
        match &self.columns.order {
            None => x,
            Some(order) => {
                let row = |row: &[f32]| order.iter().map(|&input| row[input as usize]).collect::<Vec<_>>();
                Cow::Owned(x.chunks_exact(k).flat_map(row).collect())
            }
        }
    }

    fn rows(&self, rows: std::ops::Range<usize>, out: &mut [f32]) -> Result<()> {
        self.linear.weight().view().dequantize_rows(rows, out).map_err(Error::wrap)?;
        if let Some(order) = &self.columns.order {
            restore_input_order(out, order);
        }
        Ok(())
    }
}

impl QuantizedType for PackedType {
    fn dtype(&self) -> GgmlDType {
        TYPE
    }

    fn matmul_t(&self, (m, k, n): (usize, usize, usize), lhs: &[f32], dst: &mut [f32]) -> Result<()> {
        if [n, k] != self.shape()
            || Some(lhs.len()) != m.checked_mul(k)
            || Some(dst.len()) != m.checked_mul(n)
        {
            let ([rows, columns], left, out) = (self.shape(), lhs.len(), dst.len());
            bail!("product {m}x{k}x{n} of {left} into {out} values does not fit a weight of {rows}x{columns}")
        }
        self.linear.multiply::<f32>(&self.arranged(lhs), dst).map_err(Error::wrap)
    }

    fn matmul_t_f16(&self, mkn: (usize, usize, usize), lhs: &[f16], dst: &mut [f16]) -> Result<()> {
        let lhs: Vec<f32> = lhs.iter().map(|x| x.to_f32()).collect();
        let mut sums = vec![0.0; dst.len()];
        self.matmul_t(mkn, &lhs, &mut sums)?;
        dst.iter_mut().zip(sums).for_each(|(dst, sum)| *dst = f16::from_f32(sum));
        Ok(())
    }

    fn embedding(&self, ids: &[u32], rows: usize, hidden: usize) -> Result<CpuStorage> {
        if [rows, hidden] != self.shape() {
            bail!("an embedding of {rows}x{hidden} does not fit a weight of {:?}", self.shape())
        }
        let mut out = vec![0.0; ids.len() * hidden];
        for (&id, out) in ids.iter().zip(out.chunks_exact_mut(hidden)) {
            let id = id as usize;
            if id >= rows {
                bail!("embedding id {id} is out of range for {rows} rows")
            }
            self.rows(id..id + 1, out)?;
        }
        Ok(CpuStorage::F32(out))
    }

    fn dequantize(&self, elem_count: usize) -> Result<CpuStorage> {
        let [n, k] = self.shape();
        if elem_count != n * k {
            bail!("{elem_count} values do not fit a weight of {n}x{k}")
        }
        let mut out = vec![0.0; elem_count];
        self.rows(0..n, &mut out)?;
        Ok(CpuStorage::F32(out))
    }

    fn storage_size_in_bytes(&self) -> usize {
        self.linear.weight().layout().bytes()
    }

    fn as_ptr(&self) -> *const u8 {
        self.linear.weight().view().bytes().as_ptr()
    }

    /// A row may have any width.
    fn block_size(&self) -> usize {
        1
    }

    /// candle calls it only on memory that it has allocated itself.
    fn from_float(&mut self, _: &[f32]) {
        panic!("packed weights cannot be overwritten")
    }

    fn from_float_imatrix(&mut self, _: &[f32], _: &[f32], _: usize) {
        panic!("packed weights cannot be overwritten")
    }

    fn size(&self) -> usize {
        self.storage_size_in_bytes()
    }
}
