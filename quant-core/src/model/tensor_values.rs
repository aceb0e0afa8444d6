//! Tensor values as slices.

use candle_core::{Layout, Storage, Tensor};

use crate::{Error, Result};

/// Passes the values of a tensor to `work`, row-major. They are only copied if they are not contiguous.
pub(crate) fn with_values<T>(tensor: &Tensor, work: impl FnOnce(&[f32]) -> Result<T>) -> Result<T> {
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    work(values(&storage, layout)?)
}

/// Passes the values of three tensors, as [`with_values`] does for one.
pub(crate) fn with_slices<T>(
    tensors: [&Tensor; 3],
    work: impl FnOnce([&[f32]; 3]) -> Result<T>,
) -> Result<T> {
    let [a, b, c] = tensors.map(Tensor::contiguous);
    let (a, b, c) = (a?, b?, c?);
    let (a, b, c) = (a.storage_and_layout(), b.storage_and_layout(), c.storage_and_layout());
    work([values(&a.0, a.1)?, values(&b.0, b.1)?, values(&c.0, c.1)?])
}

fn values<'a>(storage: &'a Storage, layout: &Layout) -> Result<&'a [f32]> {
    match (storage, layout.contiguous_offsets()) {
        (Storage::Cpu(storage), Some((start, end))) => Ok(&storage.as_slice::<f32>()?[start..end]),
        _ => Err(Error::Internal("contiguous tensors in main memory expected".into())),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    #[test]
    fn values_are_row_major_however_a_tensor_lies() {
        let whole = Tensor::from_vec(vec![1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0], (2, 3), &Device::Cpu).unwrap();
        let lent = |tensor: &Tensor| with_values(tensor, |values| Ok(values.to_vec()));
        assert_eq!(lent(&whole.narrow(0, 1, 1).unwrap()).unwrap(), [4.0, 5.0, 6.0]);
        assert_eq!(lent(&whole.t().unwrap()).unwrap(), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
        assert!(lent(&whole.to_dtype(DType::F64).unwrap()).is_err());
    }
}
