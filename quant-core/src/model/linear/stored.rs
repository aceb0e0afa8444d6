//! A weight that is read from its checkpoint on first use.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::checkpoint::{Dtype, TensorSource, require_finite_bytes, require_weight_float};
use crate::{Error, Result};

/// A float weight `[n, k]` of a checkpoint.
///
/// It is read completely on first use and checked to be finite. The bytes are kept until they are
/// [released](Self::release).
pub struct StoredWeight {
    source: Arc<dyn TensorSource>,
    name: String,
    shape: [usize; 2],
    dtype: Dtype,
    held: Mutex<Option<Arc<Vec<u8>>>>,
    was_read: AtomicBool,
}

impl StoredWeight {
    /// Creates a weight from the tensor `name` of a checkpoint, without reading its data.
    ///
    /// # Errors
    /// When there is no such tensor, its shape does not match, or its dtype is not F32, F16 or BF16.
    pub fn new(source: Arc<dyn TensorSource>, name: String, shape: [usize; 2]) -> Result<Self> {
        let info = source.require(&name)?;
        let dtype = info.dtype;
        require_weight_float(source.location(&name), &name, dtype)?;
        if info.shape != shape {
            return Err(Error::TensorShape {
                path: source.location(&name),
                expected: shape.to_vec(),
                got: info.shape.clone(),
                tensor: name,
            });
        }
        let (held, was_read) = (Mutex::new(None), AtomicBool::new(false));
        Ok(Self { source, name, shape, dtype, held, was_read })
    }

    /// Returns the tensor's name in the checkpoint.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the shape `[n, k]`.
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Returns the dtype: F32, F16 or BF16.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Returns the bytes of the tensor, row-major, after reading them if necessary.
    ///
    /// # Errors
    /// When they cannot be read, or a value is NaN or infinite.
    pub fn bytes(&self) -> Result<Arc<Vec<u8>>> {
        if let Some(bytes) = &*self.lock() {
            return Ok(bytes.clone());
        }
        // Reading must not hold the lock: a source may compute on a thread pool, and one of its threads may call this
        // function.
        let bytes = self.source.read(&self.name)?;
        require_finite_bytes(self.source.location(&self.name), &self.name, self.dtype, &bytes)?;
        let mut held = self.lock();
        self.was_read.store(true, Ordering::Release);
        Ok(held.get_or_insert_with(|| Arc::new(bytes)).clone())
    }

    /// Returns the bytes, if they are in memory.
    pub fn held(&self) -> Option<Arc<Vec<u8>>> {
        self.lock().clone()
    }

    /// Returns the bytes, if they are in memory, and releases them. Later uses read the weight again.
    pub fn release(&self) -> Option<Arc<Vec<u8>>> {
        self.lock().take()
    }

    /// Whether the bytes have been read, even if they have been released since.
    pub(crate) fn was_read(&self) -> bool {
        self.was_read.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<Vec<u8>>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for StoredWeight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoredWeight")
            .field("name", &self.name)
            .field("dtype", &self.dtype)
            .field("shape", &self.shape)
            .field("held", &self.lock().is_some())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::MemorySource;

    fn source(values: &[f32]) -> Arc<dyn TensorSource> {
        let mut source = MemorySource::new();
        source.insert_f32("w", Dtype::Bf16, vec![2, 2], values).unwrap();
        source.insert("i", Dtype::I32, vec![2, 2], vec![0; 16]).unwrap();
        Arc::new(source)
    }

    #[test]
    fn bytes_are_read_when_needed_and_kept_until_released() {
        let weight = StoredWeight::new(source(&[1.0, 2.0, 3.0, 4.0]), "w".into(), [2, 2]).unwrap();
        assert!(weight.held().is_none() && !weight.was_read());
        let bytes = weight.bytes().unwrap();
        assert_eq!(*bytes, Dtype::Bf16.narrow(&[1.0, 2.0, 3.0, 4.0]));
        assert!(Arc::ptr_eq(&bytes, &weight.bytes().unwrap()));
        assert!(Arc::ptr_eq(&bytes, &weight.release().unwrap()));
        assert!(weight.held().is_none() && weight.release().is_none() && weight.was_read());
        assert_eq!(weight.bytes().unwrap(), bytes);
    }

    #[test]
    fn only_float_matrices_of_the_shape_are_accepted() {
        let source = source(&[1.0, f32::NAN, 3.0, f32::INFINITY]);
        let new = |name: &str, shape| StoredWeight::new(source.clone(), name.into(), shape);
        assert!(matches!(new("gone", [2, 2]), Err(Error::MissingTensor { .. })));
        assert!(matches!(new("w", [4, 1]), Err(Error::TensorShape { .. })));
        assert!(matches!(new("i", [2, 2]), Err(Error::TensorDtype { .. })));
        let weight = new("w", [2, 2]).unwrap();
        let error = weight.bytes().unwrap_err();
        assert!(matches!(error, Error::NonFinite { count: 2, first_index: 1, .. }), "{error}");
        assert!(weight.held().is_none());
    }
}
