//! A stored reference, so that a gate that runs on every commit evaluates the float model only once.
//!
//! The file holds the inputs of the head at every position, which take far less space than log-probabilities over the
//! vocabulary, and the head. Nothing is rounded, so a comparison with the stored reference is bit-identical to that
//! with the model.
//!
//! ```text
//! magic, 8 bytes │ offset and length of the header, 8 bytes each │ BLAKE3 of the header, 32 bytes
//! the head: weight [vocabulary, width] in its dtype, bias as F32 if there is one
//! hidden states of every window, [scored positions, width] as F32
//! the header, JSON: program, model, text, sizes, and the BLAKE3 of every part above
//! ```
//!
//! All numbers are little-endian. Sizes are checked against the file size before anything is allocated, and parts
//! against their digests before they are used.

use std::fs::File;
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use quant_core::model::{Decoder, FloatProducts, Head, HeadParts, LogitsTransform};
use quant_formats::checkpoint::{Dtype, parse_strictly};
use quant_formats::wording::parser_message;
use quant_formats::{CancelToken, Error, Observer, Result, system};
use serde::{Deserialize, Serialize};

use crate::decoder::Blocks;
use crate::journal::sync_parent;
use crate::score::{Panel, require_finite};
use crate::{EvaluationText, ModelIdentity, NoiseFloor, Scores, TextIdentity, Tool};

const MAGIC: [u8; 8] = *b"QUANTREF";
/// The schema version.
const SCHEMA: &str = "quant-reference/1";
const PRELUDE: u64 = 56;
const MAX_HEADER_BYTES: u64 = 64 << 20;

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    schema: String,
    tool: Tool,
    model: ModelIdentity,
    text: TextIdentity,
    profile: String,
    tokenizer_sha256: String,
    tokens_sha256: String,
    /// Scored positions per window.
    window_tokens: Vec<usize>,
    vocabulary: usize,
    width: usize,
    head_dtype: String,
    head_bias: bool,
    logits_scale: f32,
    logits_softcap: Option<f32>,
    head_blake3: String,
    window_blake3: Vec<String>,
    noise_floor: NoiseFloor,
}

/// A stored reference, opened for reading.
#[derive(Debug)]
pub struct StoredReference {
    path: PathBuf,
    file: File,
    header: Header,
    head: HeadParts,
    offsets: Vec<u64>,
    digest: String,
}

/// Whether a file begins with the magic of a stored reference.
pub fn is_stored_reference(path: &Path) -> bool {
    let mut magic = [0; MAGIC.len()];
    path.is_file() && File::open(path).is_ok_and(|mut f| f.read_exact(&mut magic).is_ok()) && magic == MAGIC
}

impl StoredReference {
    /// Opens a file and reads everything except the hidden states.
    ///
    /// # Errors
    /// [`Error::InputFile`] when it is not a stored reference, or is truncated or modified; [`Error::Io`] when it
    /// cannot be read.
    pub fn open(path: &Path) -> Result<Self> {
        let fault = |reason: String| fault(path, reason);
        let io = |e| Error::io("read", path, e);
        let mut file = File::open(path).map_err(io)?;
        let metadata = file.metadata().map_err(io)?;
        if !metadata.is_file() || metadata.len() < PRELUDE {
            return Err(fault("is not a stored reference: it is not a regular file, or is too short".into()));
        }
        let mut prelude = [0; PRELUDE as usize];
        file.read_exact(&mut prelude).map_err(io)?;
        if prelude[..8] != MAGIC {
            return Err(fault("is not a stored reference: it does not begin with the expected bytes".into()));
        }
        let [offset, length] = [8, 16].map(|at| u64_at(&prelude, at));
        if length > MAX_HEADER_BYTES {
            return Err(fault(format!(
                "has a header of {length} bytes; at most {MAX_HEADER_BYTES} are supported"
            )));
        }
        if offset < PRELUDE || offset.checked_add(length) != Some(metadata.len()) {
            return Err(fault(
                "is incomplete or damaged: the header does not end at the end of the file".into(),
            ));
        }
        let mut bytes = vec![0; length as usize];
        system::read_exact_at(&file, &mut bytes, offset).map_err(io)?;
        let digest = blake3::hash(&bytes);
        if digest.as_bytes()[..] != prelude[24..] {
            return Err(fault("is damaged: the header does not match its BLAKE3 hash".into()));
        }
        let header =
            parse_strictly(&bytes).map_err(|e| fault(format!("has a header that is not valid JSON: {e}")))?;
        match header.get("schema").and_then(serde_json::Value::as_str) {
            Some(SCHEMA) => {}
            Some(other) => {
                return Err(fault(format!(
                    "has the schema `{}`; this version reads `{SCHEMA}`",
                    other.escape_default()
                )));
            }
            None => return Err(fault("has no field `schema` in its header".into())),
        }
        let header: Header = serde_json::from_value(header).map_err(|e| {
            fault(format!("has an invalid header: {}", parser_message(&e.to_string(), "an object")))
        })?;
        let sizes = Sizes::of(&header).ok_or_else(|| fault("has invalid sizes in its header".into()))?;
        if sizes.end != offset {
            return Err(fault(format!(
                "has {} bytes before its header, but the header implies {}",
                offset, sizes.end
            )));
        }
        let mut part = vec![0; sizes.weight + sizes.bias];
        system::read_exact_at(&file, &mut part, PRELUDE).map_err(io)?;
        if blake3::hash(&part).to_hex().as_str() != header.head_blake3 {
            return Err(fault("is damaged: the head does not match its BLAKE3 hash".into()));
        }
        let bias = part.split_off(sizes.weight);
        let head = HeadParts {
            shape: [header.vocabulary, header.width],
            dtype: sizes.dtype,
            weight: Arc::new(part),
            bias: header.head_bias.then(|| floats(&bias)),
            transform: LogitsTransform { scale: header.logits_scale, softcap: header.logits_softcap },
        };
        let digest = digest.to_hex().to_string();
        Ok(Self { path: path.to_owned(), file, header, head, offsets: sizes.windows, digest })
    }

    /// Returns the model from which the reference was computed.
    pub fn model(&self) -> &ModelIdentity {
        &self.header.model
    }

    /// Returns the noise floor of that model, measured on some of the windows.
    pub fn noise_floor(&self) -> &NoiseFloor {
        &self.header.noise_floor
    }

    /// Returns the BLAKE3 of the header, which contains the digests of all other parts.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Fails unless the reference was computed on these windows and, if `tokenizer` is set, with the same tokenizer
    /// file.
    ///
    /// # Errors
    /// [`Error::Usage`] that names the difference.
    pub fn check(&self, text: &EvaluationText, tokenizer: bool) -> Result<()> {
        let h = &self.header;
        let differs = if tokenizer && h.tokenizer_sha256 != text.tokenizer_sha256 {
            "with a different tokenizer".to_owned()
        } else if h.text.sha256 != text.text_sha256 {
            format!("on a different text, {}", h.text.name.escape_default())
        } else if h.profile != text.id {
            format!("with a different profile, {}", h.profile.escape_default())
        } else if h.window_tokens.len() != text.windows.len() {
            format!("on {} windows, not {}", h.window_tokens.len(), text.windows.len())
        } else if h.tokens_sha256 != text.tokens_sha256
            || !h.window_tokens.iter().copied().eq(text.windows.iter().map(crate::Window::scored))
        {
            "with different tokens".to_owned()
        } else {
            return self.check_products();
        };
        Err(Error::usage(
            format!("the stored reference {} was created {differs}", self.path.display()),
            "use the settings that it was created with, or create it again: ‹eval(MODEL, text=TEXT, \
            save_reference=FILE)›",
        ))
    }

    /// Fails if floats were multiplied otherwise than they are now.
    fn check_products(&self) -> Result<()> {
        let now = FloatProducts::detect() == FloatProducts::Bf16Parts;
        let (then, remedy) = match self.header.tool.multiplies_bf16_parts() {
            then if then == now => return Ok(()),
            true => ("bf16 parts", "use the path `amx`, without QUANT_FLOAT_PRODUCTS=f32"),
            false => ("f32", "set QUANT_FLOAT_PRODUCTS=f32"),
        };
        Err(Error::usage(
            format!(
                "the stored reference {} was created with products of floats in {then}",
                self.path.display()
            ),
            format!("{remedy}, or create it again"),
        ))
    }

    pub(crate) fn head(&self) -> Result<Head<'static>> {
        Head::from_parts(self.head.clone())
    }

    /// Reads the inputs of the head for these windows.
    pub(crate) fn inputs(&self, windows: &[usize]) -> Result<Vec<f32>> {
        let mut all = Vec::new();
        for &window in windows {
            let positions = self.header.window_tokens[window];
            let mut bytes = vec![0; positions * self.header.width * 4];
            let read = system::read_exact_at(&self.file, &mut bytes, self.offsets[window]);
            read.map_err(|e| Error::io("read", self.path.as_path(), e))?;
            if blake3::hash(&bytes).to_hex().as_str() != self.header.window_blake3[window] {
                return Err(fault(
                    &self.path,
                    format!("is damaged: window {window} does not match its BLAKE3 hash"),
                ));
            }
            all.extend(floats(&bytes));
        }
        Ok(all)
    }
}

struct Sizes {
    dtype: Dtype,
    weight: usize,
    bias: usize,
    windows: Vec<u64>,
    end: u64,
}

impl Sizes {
    /// Returns `None` if a size is 0 or overflows, the dtype is not a weight type, or the lists differ in length.
    fn of(header: &Header) -> Option<Self> {
        let dtype = Dtype::from_name(&header.head_dtype).filter(|dtype| dtype.is_weight_float())?;
        let weight = header.vocabulary.checked_mul(header.width)?.checked_mul(dtype.size())?;
        let bias = if header.head_bias { header.vocabulary.checked_mul(4)? } else { 0 };
        let mut end = PRELUDE.checked_add(u64::try_from(weight.checked_add(bias)?).ok()?)?;
        let mut windows = Vec::with_capacity(header.window_tokens.len());
        for &positions in &header.window_tokens {
            windows.push(end);
            let bytes = positions.checked_mul(header.width)?.checked_mul(4)?;
            end = end.checked_add(u64::try_from(bytes).ok()?)?;
        }
        let fits = header.vocabulary > 0
            && header.width > 0
            && header.window_blake3.len() == windows.len()
            && !header.window_tokens.contains(&0);
        fits.then_some(Self { dtype, weight, bias, windows, end })
    }
}

/// Scores a text with a model, and stores the data that later comparisons with the model need. `tool`, `model` and
/// `name` identify the program, the model and the text. The file appears when it is complete.
///
/// # Errors
/// When the model or its noise floor fails or is not finite, the file cannot be written, or when cancelled.
pub fn store_reference(
    decoder: &Decoder,
    text: &EvaluationText,
    (tool, model, name): (&Tool, &ModelIdentity, &str),
    path: &Path,
    observer: &dyn Observer,
    cancel: &CancelToken,
) -> Result<Scores> {
    let panel = Panel::new([Box::new(Blocks(decoder, None)) as _])?.with_floor(text.windows.len());
    let parts = decoder.head()?.to_parts()?;
    let mut partial = Partial::create(path)?;
    let mut head = parts.weight.to_vec();
    parts.bias.iter().flatten().for_each(|b| head.extend(b.to_le_bytes()));
    partial.write(&[0; PRELUDE as usize])?;
    let head_blake3 = partial.write(&head)?;
    drop(head);
    let mut window_blake3 = Vec::with_capacity(text.windows.len());
    let positions = panel.run(
        (&text.windows, 0..text.windows.len()),
        Vec::new(),
        (observer, cancel),
        |models, noise| (models[0].nll(), noise.map(|noise| noise.divergence_from(&models[0]))),
        |windows| {
            let positions = windows.iter().flatten();
            require_finite(positions.flat_map(|(nll, floor)| [*nll].into_iter().chain(*floor)))
        },
        &mut |_, states| {
            let bytes: Vec<u8> = states.iter().flat_map(|v| v.to_le_bytes()).collect();
            window_blake3.push(partial.write(&bytes)?);
            Ok(())
        },
    )?;
    let nll: Vec<Vec<f64>> = positions.iter().map(|w| w.iter().map(|(nll, _)| *nll).collect()).collect();
    let scores = Scores::new(text, &nll)?;
    let noise_floor = NoiseFloor::of(&positions, |(_, floor)| *floor)
        .ok_or_else(|| Error::Internal("the reference has no noise floor".into()))?;
    let header = Header {
        schema: SCHEMA.into(),
        tool: tool.clone(),
        model: model.clone(),
        text: TextIdentity { name: name.into(), sha256: text.text_sha256.clone(), bytes: text.text_bytes },
        profile: text.id.clone(),
        tokenizer_sha256: text.tokenizer_sha256.clone(),
        tokens_sha256: text.tokens_sha256.clone(),
        window_tokens: text.windows.iter().map(crate::Window::scored).collect(),
        vocabulary: parts.shape[0],
        width: parts.shape[1],
        head_dtype: parts.dtype.name().into(),
        head_bias: parts.bias.is_some(),
        logits_scale: parts.transform.scale,
        logits_softcap: parts.transform.softcap,
        head_blake3,
        window_blake3,
        noise_floor,
    };
    let header = serde_json::to_vec(&header).map_err(|e| Error::Internal(e.to_string()))?;
    partial.finish(&header)?;
    Ok(scores)
}

struct Partial {
    target: PathBuf,
    path: PathBuf,
    file: BufWriter<File>,
    written: u64,
    whole: bool,
}

impl Partial {
    fn create(target: &Path) -> Result<Self> {
        let mut name = target.as_os_str().to_owned();
        name.push(".part");
        let path = PathBuf::from(name);
        let file = File::create(&path).map_err(|e| Error::io("create", path.as_path(), e))?;
        Ok(Self { target: target.to_owned(), path, file: BufWriter::new(file), written: 0, whole: false })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<String> {
        self.file.write_all(bytes).map_err(|e| Error::io("write", self.path.as_path(), e))?;
        self.written += bytes.len() as u64;
        Ok(blake3::hash(bytes).to_hex().to_string())
    }

    /// Appends the header, writes its location, and renames the file.
    fn finish(mut self, header: &[u8]) -> Result<()> {
        let offset = self.written;
        self.write(header)?;
        let mut prelude = MAGIC.to_vec();
        prelude.extend(offset.to_le_bytes());
        prelude.extend((header.len() as u64).to_le_bytes());
        prelude.extend(blake3::hash(header).as_bytes());
        let file = &mut self.file;
        let sealed = file
            .seek(SeekFrom::Start(0))
            .and_then(|_| file.write_all(&prelude))
            .and_then(|()| file.flush())
            .and_then(|()| file.get_ref().sync_all());
        sealed.map_err(|e| Error::io("write", self.path.as_path(), e))?;
        std::fs::rename(&self.path, &self.target).map_err(|e| Error::io("rename", self.path.as_path(), e))?;
        self.whole = true;
        sync_parent(&self.target)
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.whole {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].iter().rev().fold(0, |n, &b| n << 8 | u64::from(b))
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

fn fault(path: &Path, reason: String) -> Error {
    Error::InputFile {
        path: path.to_owned(),
        line: None,
        reason,
        remedy: "create it again: ‹eval(MODEL, text=TEXT, save_reference=FILE)›".into(),
    }
}
