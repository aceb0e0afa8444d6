//! The calibration tokens of a job as a file.
//!
//! It is a safetensors file with `tokens` U32 `[windows, length]`, and optionally `uses` U8 and `starts` U32 of the
//! same shape, as in [`TokenWindows::with_layout`].

use std::path::Path;

use safetensors::tensor::{Dtype as FileDtype, TensorView};

use super::store::{damaged, is_regular};
use crate::calibrate::{TokenUse, TokenWindows};
use crate::checkpoint::{Dtype, ShardedCheckpoint, TensorSource};
use crate::{Error, Result};

const TOKENS: &str = "tokens";
const USES: &str = "uses";
const STARTS: &str = "starts";

fn little_endian(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub(super) fn to_bytes(windows: &TokenWindows) -> Result<Vec<u8>> {
    let shape = vec![windows.len(), windows.length()];
    let uses = windows.token_uses().map(|uses| uses.iter().map(|u| *u as u8).collect::<Vec<_>>());
    let starts = windows.document_starts().map(little_endian);
    let tensors = [
        (TOKENS, FileDtype::U32, Some(little_endian(windows.tokens()))),
        (USES, FileDtype::U8, uses),
        (STARTS, FileDtype::U32, starts),
    ];
    let internal = |e: &dyn std::error::Error| Error::Internal(format!("windows cannot be written: {e}"));
    let mut views = Vec::new();
    for (name, dtype, bytes) in &tensors {
        if let Some(bytes) = bytes {
            views.push((*name, TensorView::new(*dtype, shape.clone(), bytes).map_err(|e| internal(&e))?));
        }
    }
    safetensors::serialize(views, None).map_err(|e| internal(&e))
}

pub(super) fn read(path: &Path) -> Result<TokenWindows> {
    is_regular(path)?;
    let source = ShardedCheckpoint::open_file(path)?;
    let shape = source.require(TOKENS)?.shape.clone();
    let &[_, length] = &shape[..] else {
        return Err(damaged(path, format!("has tokens of shape {shape:?}")));
    };
    let checked = |name: &str, dtype: Dtype| -> Result<Option<Vec<u8>>> {
        match source.info(name) {
            None => Ok(None),
            Some(info) if info.dtype == dtype && info.shape == shape => source.read(name).map(Some),
            Some(info) => Err(damaged(path, format!("has `{name}` {} {:?}", info.dtype, info.shape))),
        }
    };
    let numbers = |bytes: Vec<u8>| -> Vec<u32> {
        bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    };
    let tokens = checked(TOKENS, Dtype::U32)?.map(numbers).unwrap_or_default();
    if length == 0 || tokens.is_empty() {
        return Err(damaged(path, "has no tokens".into()));
    }
    let uses = checked(USES, Dtype::U8)?;
    let uses = uses.map(|uses| uses.into_iter().map(token_use).collect::<Option<Vec<_>>>());
    let uses = match uses {
        Some(None) => return Err(damaged(path, "has an unknown use of a token".into())),
        Some(uses) => uses,
        None => None,
    };
    let starts = checked(STARTS, Dtype::U32)?.map(numbers);
    let windows = TokenWindows::cut(tokens, length).with_layout(uses, starts);
    windows.map_err(|e| damaged(path, e.to_string()))
}

fn token_use(value: u8) -> Option<TokenUse> {
    [TokenUse::Counted, TokenUse::Context, TokenUse::Padding].into_iter().find(|u| *u as u8 == value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_come_back() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("windows");
        let plain = TokenWindows::cut((0..12).collect(), 4);
        let mut uses = vec![TokenUse::Counted; 12];
        (uses[1], uses[11]) = (TokenUse::Context, TokenUse::Padding);
        let starts = vec![0, 0, 2, 2, 0, 0, 0, 0, 0, 1, 1, 1];
        let packed = plain.clone().with_layout(Some(uses), Some(starts)).unwrap();
        for windows in [plain, packed] {
            std::fs::write(&path, to_bytes(&windows).unwrap()).unwrap();
            assert_eq!(read(&path).unwrap(), windows);
            let back = read(&path).unwrap();
            assert_eq!(back.layout_sha256(), windows.layout_sha256());
        }
        let mut bytes = std::fs::read(&path).unwrap();
        bytes.truncate(bytes.len() - 1);
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(read(&path).unwrap_err().category(), crate::Category::Input);
        let linked = directory.path().join("link");
        std::os::unix::fs::symlink(&path, &linked).unwrap();
        assert!(read(&linked).is_err());
    }
}
