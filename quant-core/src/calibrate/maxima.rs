//! Files of channel maxima: `max |x|` of the inputs of linears, gathered once and reused.
//!
//! A file is in the safetensors format and has one vector `[k]` per linear, under the linear's name in the model, as in
//! SmoothQuant's `act_scales` files.

use std::collections::{BTreeMap, HashMap};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::checkpoint::{ShardedCheckpoint, TensorSource};
use crate::digest::sha256_hex;
use crate::{Error, Result};

const REMEDY: &str =
    "give a file written by ‹save_channel_maxima›, or a safetensors file with one vector per linear";

/// `max |x|` of every input channel, per linear name.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ChannelMaxima {
    path: Option<PathBuf>,
    linears: BTreeMap<String, Vec<f32>>,
}

impl ChannelMaxima {
    /// Reads a file.
    ///
    /// # Errors
    /// If it does not exist, or is not a safetensors file, or a tensor is not a vector of finite, non-negative floats; [`Error::Io`] if it
    /// cannot be read.
    pub fn read(path: &Path) -> Result<Self> {
        let source = match ShardedCheckpoint::open_file(path) {
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {
                return Err(Error::InputFile {
                    path: path.to_owned(),
                    line: None,
                    reason: "does not exist".into(),
                    remedy: REMEDY.into(),
                });
            }
            opened => opened?,
        };
        let mut linears = BTreeMap::new();
        for name in source.names() {
            let info = source.require(name)?;
            let broken = |reason: String| Error::InputFile {
                path: path.to_owned(),
                line: None,
                reason,
                remedy: REMEDY.into(),
            };
            if info.shape.len() != 1 || !info.dtype.is_weight_float() {
                return Err(broken(format!(
                    "tensor `{name}` is {} {:?}, expected a vector of floats",
                    info.dtype, info.shape
                )));
            }
            let values = source.read_f32(name).map_err(|e| match e {
                Error::NonFinite { .. } => broken(format!("tensor `{name}` contains NaN or infinite maxima")),
                other => other,
            })?;
            if let Some(channel) = values.iter().position(|v| v.is_sign_negative() && *v != 0.0) {
                return Err(broken(format!(
                    "tensor `{name}` has a maximum of {} for channel {channel}; maxima must not be negative",
                    values[channel]
                )));
            }
            linears.insert(name.to_owned(), values);
        }
        Ok(Self { path: Some(path.to_owned()), linears })
    }

    /// The maxima of a linear with `k` inputs.
    ///
    /// # Errors
    /// When the linear is missing, or the number of its maxima is not `k`.
    pub fn of(&self, linear: &str, k: usize) -> Result<&[f32]> {
        let path = || self.path.clone().unwrap_or_default();
        let broken = |reason: String| Error::InputFile {
            path: path(),
            line: None,
            reason,
            remedy: "give the channel maxima of the same model, or omit ‹channel_maxima› to collect them"
                .into(),
        };
        let values =
            self.linears.get(linear).ok_or_else(|| broken(format!("has no maxima for `{linear}`")))?;
        match values.len() == k {
            true => Ok(values),
            false => Err(broken(format!("has {} maxima for `{linear}`, which has {k} inputs", values.len()))),
        }
    }

    /// Sets the maxima of a linear.
    pub fn insert(&mut self, linear: String, maxima: Vec<f32>) {
        self.linears.insert(linear, maxima);
    }

    /// The number of linears.
    pub fn len(&self) -> usize {
        self.linears.len()
    }

    /// Whether there are no linears.
    pub fn is_empty(&self) -> bool {
        self.linears.is_empty()
    }

    /// The SHA-256 of names and values.
    pub fn sha256(&self) -> String {
        let mut bytes = Vec::new();
        for (name, values) in &self.linears {
            bytes.extend_from_slice(format!("{name}\n{}\n", values.len()).as_bytes());
            bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        }
        sha256_hex(bytes)
    }

    /// Returns the maxima as the content of a safetensors file.
    ///
    /// # Errors
    /// [`Error::Internal`] when serialization fails, which only a bug can cause.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let failed = |e: safetensors::SafeTensorError| Error::Internal(e.to_string());
        let bytes: BTreeMap<&String, Vec<u8>> = (self.linears.iter())
            .map(|(name, values)| (name, values.iter().flat_map(|v| v.to_le_bytes()).collect()))
            .collect();
        let views = bytes.iter().map(|(name, bytes)| {
            let shape = vec![bytes.len() / 4];
            let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape, bytes);
            view.map(|view| (name.as_str(), view)).map_err(failed)
        });
        let views = views.collect::<Result<Vec<_>>>()?;
        let about = HashMap::from([("holds".to_owned(), "max |x| of the inputs of linears".to_owned())]);
        safetensors::serialize(views, Some(about)).map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some() -> ChannelMaxima {
        let mut maxima = ChannelMaxima::default();
        maxima.insert("m.layers.0.q_proj".into(), vec![1.0, 0.0, 2.5]);
        maxima.insert("m.layers.0.down_proj".into(), vec![4.0; 7]);
        maxima
    }

    #[test]
    fn what_is_written_is_read_back() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("maxima.safetensors");
        std::fs::write(&path, some().to_bytes().unwrap()).unwrap();
        let back = ChannelMaxima::read(&path).unwrap();
        assert_eq!((back.len(), back.sha256()), (2, some().sha256()));
        assert_eq!(back.of("m.layers.0.q_proj", 3).unwrap(), [1.0, 0.0, 2.5]);
        let missing = back.of("m.layers.1.q_proj", 3).unwrap_err().to_string();
        assert!(missing.contains("maxima.safetensors") && missing.contains("m.layers.1.q_proj"), "{missing}");
        assert!(back.of("m.layers.0.q_proj", 4).unwrap_err().to_string().contains("4 inputs"));
    }

    #[test]
    fn what_are_no_magnitudes_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("maxima.safetensors");
        for bad in [-1.0, f32::NAN, f32::INFINITY] {
            let mut maxima = some();
            maxima.insert("x".into(), vec![1.0, bad]);
            std::fs::write(&path, maxima.to_bytes().unwrap()).unwrap();
            let message = ChannelMaxima::read(&path).unwrap_err().to_string();
            assert!(message.contains("`x`"), "{message}");
        }
        std::fs::write(&path, b"no safetensors").unwrap();
        assert!(ChannelMaxima::read(&path).is_err());
    }
}
