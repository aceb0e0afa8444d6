//! The resources that a calling program provides to a run, and the opening of models with them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::quantize::is_gguf_name;
use super::settings::RecipeSettings;
use crate::calibrate::InProcess;
use crate::checkpoint::{ModelDirectory, refuse_overlap};
use crate::model::Model;
use crate::pipeline::Program;
use crate::recipe::{Extensions, Recipe};
use crate::wording::{CommandLine, Wording};
use crate::worker::TextWorkers;
use crate::{CancelToken, Error, Event, Observer, Result, gguf};

/// The resources that the calling program provides to a run. Create it with [`Host::new`] and set the fields that
/// differ.
#[non_exhaustive]
pub struct Host<'a> {
    /// Receives progress events.
    pub observer: &'a dyn Observer,
    /// Cancels the run at a point where nothing is lost.
    pub cancel: &'a CancelToken,
    /// Resolves the names of models and texts.
    pub catalog: &'a dyn Catalog,
    /// Runs the tokenizers and chat templates of models.
    pub text_workers: Arc<dyn TextWorkers>,
    /// The file that holds this crate's code, if that is not the executable.
    pub code: Option<&'a Path>,
    /// The directory for temporary files that need not be next to an output; by default, that of the system.
    pub scratch: Option<&'a Path>,
    /// The object store in which [jobs in units](crate::units) are, whatever bucket their URLs name. By default, a job
    /// opens the bucket in its URL with the credentials and settings in the environment.
    #[cfg(feature = "store")]
    pub object_store: Option<&'a Arc<dyn object_store::ObjectStore>>,
    /// Spells settings and commands in the model card. Messages to the calling program keep their marks, see
    /// [`crate::wording`].
    pub wording: &'a dyn Wording,
}

/// The models and texts that a program knows by name.
///
/// ```
/// use quant_core::run::Catalog;
/// use quant_core::Result;
///
/// /// Offers the texts of a service by name.
/// struct Texts;
///
/// impl Catalog for Texts {
///     fn built_in(&self, name: &str) -> Option<Vec<String>> {
///         (name == "support-chats").then(|| vec!["How do I reset my password?".to_owned()])
///     }
///
///     fn texts(&self) -> Result<Vec<String>> {
///         Ok(vec!["support-chats".to_owned()])
///     }
/// }
///
/// assert!(Texts.built_in("support-chats").is_some() && Texts.built_in("file.txt").is_none());
/// ```
pub trait Catalog: Sync {
    /// Returns whether the argument is the name of a model to be fetched, not a path.
    fn is_named(&self, model: &Path) -> bool {
        let _ = model;
        false
    }

    /// Returns the directory of a model: the path that was given, or where the named model was fetched to.
    ///
    /// # Errors
    /// When the model cannot be fetched.
    fn model_directory(&self, given: &Path) -> Result<PathBuf> {
        Ok(given.to_owned())
    }

    /// Returns the documents of a text that is built into the program. Such a name takes precedence over a file of that
    /// name.
    fn built_in(&self, name: &str) -> Option<Vec<String>> {
        let _ = name;
        None
    }

    /// Returns the documents of a text that is fetched; `None` if the name is unknown.
    ///
    /// # Errors
    /// When the text cannot be fetched.
    fn fetched(&self, name: &str) -> Result<Option<Vec<String>>> {
        let _ = name;
        Ok(None)
    }

    /// Lists the names of all texts, for messages.
    ///
    /// # Errors
    /// When the list itself is invalid.
    fn texts(&self) -> Result<Vec<String>> {
        Ok(Vec::new())
    }
}

/// A [`Catalog`] without names: everything is a path.
#[derive(Debug, Clone, Copy, Default)]
pub struct Nothing;

impl Catalog for Nothing {}

impl<'a> Host<'a> {
    /// Creates a host that runs tokenizers in its own process, and spells commands as on the command line.
    pub fn new(observer: &'a dyn Observer, cancel: &'a CancelToken, catalog: &'a dyn Catalog) -> Self {
        Self {
            observer,
            cancel,
            catalog,
            text_workers: Arc::new(InProcess),
            code: None,
            scratch: None,
            #[cfg(feature = "store")]
            object_store: None,
            wording: &CommandLine,
        }
    }

    /// Returns the same host with a different observer.
    pub fn observed<'b>(&'b self, observer: &'b dyn Observer) -> Host<'b> {
        Host { observer, text_workers: self.text_workers.clone(), ..*self }
    }

    pub(crate) fn program(&self) -> Result<Program> {
        match self.code {
            Some(path) => Program::at(path, self.cancel),
            None => Program::current(self.cancel),
        }
    }

    pub(crate) fn note(&self, message: impl Into<String>) {
        self.observer.event(&Event::Note { label: "note", message: message.into() });
    }

    pub(crate) fn warn(&self, message: impl Into<String>) {
        self.observer.event(&Event::Warning { message: message.into() });
    }
}

/// A model directory or a GGUF file, and its model.
#[non_exhaustive]
pub struct Opened {
    /// The directory.
    pub directory: ModelDirectory,
    /// Its model.
    pub model: Model,
}

/// Opens a GGUF file or a model directory, which is fetched first if a name was given, and warns about anything unusual
/// in it. A directory without `config.json` in which there is one GGUF model stands for that model.
///
/// # Errors
/// As [`ModelDirectory::open`], [`gguf::model_in`], [`gguf::open`] and [`Model::open`]; when a named model cannot be
/// fetched.
pub fn open(path: &Path, host: &Host<'_>) -> Result<Opened> {
    open_with(path, &Extensions::default(), host)
}

/// [`open`] with the formats of the calling program.
///
/// # Errors
/// As [`open`].
pub fn open_with(path: &Path, extensions: &Extensions, host: &Host<'_>) -> Result<Opened> {
    // A damaged file may lack the first bytes by which it is recognized.
    let is_file = gguf::is_gguf(path) || is_gguf_name(path) && path.is_file();
    let directory = match if is_file { Some(path.to_owned()) } else { gguf::model_in(path)? } {
        Some(file) => gguf::open(&file)?,
        None => ModelDirectory::open(&host.catalog.model_directory(path)?)?,
    }
    .with_text_workers(host.text_workers.clone());
    for warning in directory.warnings() {
        host.warn(warning.to_string());
    }
    let model = Model::open_with(&directory, &extensions.containers)?;
    let notes = model.quantization_notes().into_iter().chain(model.head_note());
    for warning in notes.chain(model.differing_scales()?).chain(model.uncomputed_tensors()?) {
        host.warn(warning);
    }
    Ok(Opened { directory, model })
}

impl Opened {
    /// Fails if the output overlaps the model that was opened at `path`, or the directory in which its GGUF file was found.
    pub(super) fn refuse_overlap(&self, path: &Path, output: &Path) -> Result<()> {
        if path.is_dir() {
            refuse_overlap(path, output)?;
        }
        refuse_overlap(self.directory.path(), output)
    }
}

/// Dequantizes the opened model if it is quantized and will be rounded again. A checkpoint whose codes may be kept is
/// unchanged unless [`RecipeSettings::requantize`] is set.
pub(super) fn as_floats(opened: Opened, settings: &RecipeSettings, host: &Host<'_>) -> Result<Opened> {
    let rounded = opened.directory.rounded_to();
    let Some(method) = opened.model.quant_method().or(rounded).map(str::to_owned) else {
        return match settings.requantize {
            true => {
                Err(Error::usage("‹requantize› has no effect: the model is not quantized", "leave it out"))
            }
            false => Ok(opened),
        };
    };
    if !settings.requantize {
        return match rounded {
            None => Ok(opened),
            Some(types) => Err(Error::usage(
                format!(
                    "{} is already quantized: it contains {types} blocks",
                    opened.directory.path().display()
                ),
                "quantize the original float model, or set ‹requantize› to round the dequantized values \
                again, which adds a second rounding error",
            )),
        };
    }
    host.note(format!(
        "the model is already quantized ({method}): its dequantized values are rounded again, which adds a \
        second rounding error"
    ));
    Ok(Opened { model: opened.model.dequantized()?, ..opened })
}

/// Returns the opened model as the recipe prepares it.
///
/// # Errors
/// [`Error::Usage`] if a float model would be requantized, or quantized GGUF blocks would be rounded again without
/// [`RecipeSettings::requantize`]; as [`Recipe::prepared`].
pub fn prepared(
    opened: Opened,
    recipe: &Recipe,
    settings: &RecipeSettings,
    host: &Host<'_>,
) -> Result<Opened> {
    let opened = as_floats(opened, settings, host)?;
    Ok(Opened { model: recipe.prepared(opened.model)?, ..opened })
}
