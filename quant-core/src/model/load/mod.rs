//! A checkpoint as a model: its architecture, checked against its tensors, and its weights, one block at a time.

mod checks;
mod weights;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::Preparation;
use super::arch::{self, Architecture};
use super::dequantized::Dequantized;
use super::{KvCaching, KvScheme};
use super::{by_columns, fused_experts, names};
use crate::checkpoint::{ConfigFields, ModelDirectory, TensorSource};
use crate::format::{self, Container, PackedReader};
use crate::scheme::KV_CONFIG_KEY;
use crate::{Error, Result};

/// A checkpoint whose configuration and tensors agree.
pub struct Model {
    architecture: Architecture,
    source: Arc<dyn TensorSource>,
    path: PathBuf,
    quantization: Option<Quantization>,
    /// The preparation of the model, and the tensors that it changed.
    prepared: Option<(Preparation, BTreeSet<String>)>,
    untied_by_preparation: bool,
    /// Whether the checkpoint stores a head that differs from the embedding, although its configuration ties them.
    keeps_own_head: bool,
    kv: Option<KvScheme>,
    /// The `quant_method` of the checkpoint, if the model is its [dequantized](Self::dequantized) form.
    source_method: Option<String>,
}

/// The parts of a vision-language model outside its text tower.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Carried {
    /// The class of the model, as in `architectures`.
    pub class: String,
    /// Number of tensors; each is copied byte for byte.
    pub tensors: u64,
    /// The total size in bytes.
    pub bytes: u64,
}

struct Quantization {
    method: String,
    reader: Box<dyn PackedReader>,
}

impl Model {
    /// Opens the model in a directory, float or quantized.
    ///
    /// # Errors
    /// When the configuration is malformed, names an unknown family or quantization format, or disagrees with the
    /// tensors.
    pub fn open(directory: &ModelDirectory) -> Result<Self> {
        Self::open_with(directory, &[])
    }

    /// [`open`](Self::open) with further formats, which take precedence.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(directory: &ModelDirectory, containers: &[&'static dyn Container]) -> Result<Self> {
        Self::new_with(directory.source().clone(), directory.config_path(), directory.config(), containers)
    }

    /// Creates a model from its tensors and the fields of its `config.json`; `path` is used in messages.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn new(source: Arc<dyn TensorSource>, path: &Path, config: &Map<String, Value>) -> Result<Self> {
        Self::new_with(source, path, config, &[])
    }

    /// [`new`](Self::new) with further formats, which take precedence.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn new_with(
        source: Arc<dyn TensorSource>,
        path: &Path,
        config: &Map<String, Value>,
        containers: &[&'static dyn Container],
    ) -> Result<Self> {
        let fields = ConfigFields::new(path, config);
        let architecture = arch::describe(&fields, source.as_ref())?;
        let mut kv = KvScheme::from_config(&fields)?;
        let source = by_columns::by_rows(names::with_base(source, &architecture), &architecture);
        let source = fused_experts::split(source, &architecture)?;
        let quantization = match format::quantization_settings(&fields)? {
            None => None,
            Some(settings) => {
                let mut reader = format::reader_with(settings, containers)
                    .map_err(|reason| Error::UnsupportedQuantization { path: path.to_owned(), reason })?;
                reader.survey(source.as_ref())?;
                if reader.has_fp8_cache() {
                    if kv.is_some() {
                        let reason = "contradicts the FP8 cache in `quantization_config`";
                        return Err(fields.error(KV_CONFIG_KEY, reason));
                    }
                    kv = Some(KvScheme::Kvf8);
                }
                let method = settings.get("quant_method").and_then(Value::as_str).unwrap_or("unknown");
                Some(Quantization { method: method.to_owned(), reader })
            }
        };
        let path = path.to_owned();
        let (prepared, untied_by_preparation, source_method) = (None, false, None);
        let mut model = Self {
            architecture,
            source,
            path,
            quantization,
            prepared,
            untied_by_preparation,
            keeps_own_head: false,
            kv,
            source_method,
        };
        let is_tied = model.architecture.tied;
        model.architecture.tied = model.shares_head()?;
        model.keeps_own_head = is_tied && !model.architecture.tied;
        model.check()?;
        Ok(model)
    }

    /// Returns this float model with the tensors of its prepared equivalent; `modified` names the tensors that differ.
    /// If these contain both a head and an embedding, the head is tied only if both are equal.
    pub(crate) fn prepared(
        &self,
        by: Preparation,
        source: Arc<dyn TensorSource>,
        modified: BTreeSet<String>,
    ) -> Result<Self> {
        let (architecture, path) = (self.architecture.clone(), self.path.clone());
        let (prepared, untied_by_preparation, kv) = (Some((by, modified)), false, self.kv);
        let (quantization, source_method) = (None, self.source_method.clone());
        let mut model = Self {
            architecture,
            source,
            path,
            quantization,
            prepared,
            untied_by_preparation,
            keeps_own_head: self.keeps_own_head,
            kv,
            source_method,
        };
        model.architecture.tied = model.shares_head()?;
        model.untied_by_preparation = self.architecture.tied && !model.architecture.tied;
        model.check()?;
        Ok(model)
    }

    /// Returns this float model with other tensors of the same names and shapes, which compute the same function.
    pub(crate) fn with_tensors(&self, source: Arc<dyn TensorSource>) -> Self {
        Self {
            architecture: self.architecture.clone(),
            source,
            path: self.path.clone(),
            quantization: None,
            prepared: self.prepared.clone(),
            untied_by_preparation: self.untied_by_preparation,
            keeps_own_head: self.keeps_own_head,
            kv: self.kv,
            source_method: self.source_method.clone(),
        }
    }

    /// Converts a quantized model to a float one, with its dequantized weights in F32. A float model is returned
    /// unchanged.
    ///
    /// # Errors
    /// When a tensor that should hold a quantized weight is missing.
    pub fn dequantized(self) -> Result<Self> {
        let Some(method) = self.quantization.as_ref().map(|q| q.method.clone()) else { return Ok(self) };
        // The scales of an FP8 cache are dropped together with those of the weights.
        let kv = self.kv.filter(|kv| *kv != KvScheme::Kvf8);
        let keeps_own_head = self.keeps_own_head;
        let (architecture, path) = (self.architecture.clone(), self.path.clone());
        let source: Arc<dyn TensorSource> = Arc::new(Dequantized::new(self)?);
        let (quantization, prepared, untied_by_preparation, source_method) =
            (None, None, false, Some(method));
        let mut model = Self {
            architecture,
            source,
            path,
            quantization,
            prepared,
            untied_by_preparation,
            keeps_own_head,
            kv,
            source_method,
        };
        model.architecture.tied = model.shares_head()?;
        model.check()?;
        Ok(model)
    }

    /// A warning if the stored head is used although the configuration ties it to the embedding.
    pub(crate) fn head_note(&self) -> Option<String> {
        self.keeps_own_head.then(|| {
            format!(
                "{} ties the head to the embedding, but `{}` is stored and differs: the stored head is used, as \
                loaders do",
                self.path.display(),
                self.head_weight()
            )
        })
    }

    /// The parts of the checkpoint's quantization that are [not followed](PackedReader::notes).
    pub(crate) fn quantization_notes(&self) -> Vec<String> {
        self.quantization.as_ref().map(|quantization| quantization.reader.notes()).unwrap_or_default()
    }

    /// Returns the `quant_method` of the checkpoint if this model is its [dequantized](Self::dequantized) form.
    pub fn dequantized_from(&self) -> Option<&str> {
        self.source_method.as_deref()
    }

    /// Returns whether the preparation changed a tensor.
    pub fn is_modified(&self, name: &str) -> bool {
        self.prepared.as_ref().is_some_and(|(_, modified)| modified.contains(name))
    }

    /// Returns whether the preparation untied a head that is tied to the embedding in the checkpoint.
    pub fn untied_by_preparation(&self) -> bool {
        self.untied_by_preparation
    }

    /// Returns the preparation of the model, if any.
    pub fn preparation(&self) -> Option<Preparation> {
        self.prepared.as_ref().map(|(by, _)| *by)
    }

    /// Returns whether the hidden states are rotated relative to the checkpoint's.
    pub fn is_rotated(&self) -> bool {
        self.preparation() == Some(Preparation::Rotate)
    }

    /// Returns the path of the configuration file, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the family and sizes.
    pub fn architecture(&self) -> &Architecture {
        &self.architecture
    }

    /// Returns the tensors, under the architecture's names.
    pub fn source(&self) -> &Arc<dyn TensorSource> {
        &self.source
    }

    /// Returns the `quant_method`, if the checkpoint is quantized.
    pub fn quant_method(&self) -> Option<&str> {
        self.quantization.as_ref().map(|q| q.method.as_str())
    }

    /// Returns the cache of keys and values that the configuration describes; `None` means floats.
    pub fn kv_scheme(&self) -> Option<KvScheme> {
        self.kv
    }

    /// Returns why the kernels cannot cache the model's keys and values on this machine, if so.
    pub fn kernels_refuse(&self, kv: KvScheme) -> Option<String> {
        KvCaching::refusal(kv.kind(), &self.architecture.attentions())
    }

    /// Returns the scheme of a linear or the embedding, if it is quantized.
    pub fn module_scheme(&self, module: &str) -> Option<crate::scheme::LinearScheme> {
        let reader = &self.quantization.as_ref()?.reader;
        match self.architecture.embedding.strip_suffix(".weight") {
            Some(embedding) if embedding == module => reader.embedding_scheme(module),
            _ => reader.scheme(module),
        }
    }

    /// Checks that the checkpoint is float.
    ///
    /// # Errors
    /// [`Error::AlreadyQuantized`] when it is not.
    pub fn require_float(&self) -> Result<()> {
        match &self.quantization {
            None => Ok(()),
            Some(q) => Err(Error::AlreadyQuantized { path: self.path.clone(), method: q.method.clone() }),
        }
    }

    /// Returns the name of the embedding tensor. Tied checkpoints may store it only under the head's name.
    pub fn embedding_name(&self) -> String {
        let head = self.head_weight();
        let a = &self.architecture;
        let only_head =
            a.tied && self.source.info(&a.embedding).is_none() && self.source.info(&head).is_some();
        if only_head { head } else { a.embedding.clone() }
    }

    /// Returns whether the configuration ties the head to the embedding, and no different head is stored. Loaders do
    /// not tie two tensors that differ.
    fn shares_head(&self) -> Result<bool> {
        let a = &self.architecture;
        let head = self.head_weight();
        if !a.tied || self.source.info(&head).is_none() || self.source.info(&a.embedding).is_none() {
            return Ok(a.tied);
        }
        let len = self.source.require(&head)?.byte_len();
        if self.source.info(&head) != self.source.info(&a.embedding) {
            return Ok(false);
        }
        let piece = len.min(8 << 20);
        let (mut one, mut other) = (vec![0; piece as usize], vec![0; piece as usize]);
        let mut at = 0;
        while at < len {
            let part = piece.min(len - at) as usize;
            self.source.read_range(&head, at, &mut one[..part])?;
            self.source.read_range(&a.embedding, at, &mut other[..part])?;
            if one[..part] != other[..part] {
                return Ok(false);
            }
            at += part as u64;
        }
        Ok(true)
    }

    fn head_weight(&self) -> String {
        format!("{}.weight", self.architecture.head)
    }

    /// Returns all modules whose weights a checkpoint may store quantized, each with its block, its name and its shape
    /// `[n, k]`.
    pub(crate) fn weight_modules(&self) -> Vec<(Option<usize>, String, [usize; 2])> {
        let a = &self.architecture;
        let head = (!a.tied).then(|| (None, a.head.clone(), [a.vocab, a.hidden]));
        let in_blocks = (0..a.layers).flat_map(|layer| {
            let linears = a.graph(layer).linears();
            linears.map(move |(_, name, shape, _)| (Some(layer), a.in_block(layer, name), shape))
        });
        let embedding = (None, a.embedding_module(), [a.vocab, a.hidden]);
        let inputs = a.per_layer_inputs.as_ref();
        let inputs = inputs.map(|i| (None, i.projection.clone(), [a.layers * i.width, a.hidden]));
        in_blocks.chain(head).chain(inputs).chain([embedding]).collect()
    }

    /// Returns the parts of the checkpoint that are outside the decoder and copied, if a larger model wraps it.
    pub fn carried(&self) -> Option<Carried> {
        let wrapper = self.architecture.wrapper.as_ref()?;
        let names = self.source.names().into_iter().filter(|name| self.architecture.is_carried(name));
        let bytes: Vec<u64> = names.filter_map(|name| Some(self.source.info(name)?.byte_len())).collect();
        let (tensors, bytes) = (bytes.len() as u64, bytes.iter().sum());
        Some(Carried { class: wrapper.class.to_owned(), tensors, bytes })
    }
}
