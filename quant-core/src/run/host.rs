//! What a run needs of the program that it is part of, and models as it opens them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::settings::RecipeSettings;
use crate::calibrate::InProcess;
use crate::checkpoint::ModelDirectory;
use crate::model::Model;
use crate::pipeline::Program;
use crate::recipe::Recipe;
use crate::worker::TextWorkers;
use crate::{CancelToken, Error, Event, Observer, Result, gguf};

/// What a run is given by its program.
pub struct Host<'a> {
    /// Reported to.
    pub observer: &'a dyn Observer,
    /// Stops the run where nothing is lost.
    pub cancel: &'a CancelToken,
    /// Models and texts by name.
    pub catalog: &'a dyn Catalog,
    /// Where the tokenizers and chat templates of models run.
    pub text_workers: Arc<dyn TextWorkers>,
    /// The file that holds this crate's code, where that is not the executable.
    pub code: Option<&'a Path>,
}

/// Models and texts that a program knows by name.
pub trait Catalog: Sync {
    /// Whether what was given is the name of a model that is fetched, and no path.
    fn is_named(&self, model: &Path) -> bool {
        let _ = model;
        false
    }

    /// The directory of a model: what was given, or where a model of that name was fetched to.
    ///
    /// # Errors
    /// When it cannot be fetched.
    fn model_directory(&self, given: &Path) -> Result<PathBuf> {
        Ok(given.to_owned())
    }

    /// The documents of a text that the program has itself. Such a name wins over a file of that name.
    fn built_in(&self, name: &str) -> Option<Vec<String>> {
        let _ = name;
        None
    }

    /// The documents of a text that is fetched.
    ///
    /// # Errors
    /// When it cannot be fetched.
    fn fetched(&self, name: &str) -> Result<Option<Vec<String>>> {
        let _ = name;
        Ok(None)
    }

    /// The names of all these texts, for messages.
    ///
    /// # Errors
    /// When the list itself is broken.
    fn texts(&self) -> Result<Vec<String>> {
        Ok(Vec::new())
    }
}

/// A [`Catalog`] that knows no names: everything is a path.
#[derive(Debug, Clone, Copy, Default)]
pub struct Nothing;

impl Catalog for Nothing {}

impl<'a> Host<'a> {
    /// A program that runs tokenizers in its own process.
    pub fn new(observer: &'a dyn Observer, cancel: &'a CancelToken, catalog: &'a dyn Catalog) -> Self {
        Self { observer, cancel, catalog, text_workers: Arc::new(InProcess), code: None }
    }

    /// The same run with another observer.
    pub fn observed<'b>(&'b self, observer: &'b dyn Observer) -> Host<'b> {
        Host { observer, text_workers: self.text_workers.clone(), ..*self }
    }

    pub(super) fn program(&self) -> Result<Program> {
        match self.code {
            Some(path) => Program::at(path, self.cancel),
            None => Program::current(self.cancel),
        }
    }

    pub(super) fn note(&self, message: impl Into<String>) {
        self.observer.event(&Event::Note { label: "note", message: message.into() });
    }

    pub(super) fn warn(&self, message: impl Into<String>) {
        self.observer.event(&Event::Warning { message: message.into() });
    }
}

/// A model directory, or a GGUF file, and the model in it.
pub struct Opened {
    /// The directory.
    pub directory: ModelDirectory,
    /// Its model.
    pub model: Model,
}

/// Opens a GGUF file, or a model directory, fetched first where a name for it was given, and warns of what is odd about
/// it.
///
/// # Errors
/// As [`ModelDirectory::open`] and [`Model::open`]; when a named model cannot be fetched.
pub fn open(path: &Path, host: &Host<'_>) -> Result<Opened> {
    let directory = match gguf::is_gguf(path) {
        true => gguf::open(path)?,
        false => ModelDirectory::open(&host.catalog.model_directory(path)?)?,
    }
    .with_text_workers(host.text_workers.clone());
    for warning in directory.warnings() {
        host.warn(warning.to_string());
    }
    let model = Model::open(&directory)?;
    Ok(Opened { directory, model })
}

/// What was opened, as floats where it is quantized and is to be rounded again. A checkpoint whose codes may be kept stays
/// as it is unless [`RecipeSettings::requantize`] asks for that.
///
/// # Errors
/// [`Error::Usage`] when it is asked for in vain, and when the floats are what blocks of a GGUF file stand for and nobody
/// asked.
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
                    "{} is quantized already: it holds blocks of {types}",
                    opened.directory.path().display()
                ),
                "quantize the original float model; ‹requantize› rounds what the blocks stand for once more, and loses \
                 twice",
            )),
        };
    }
    host.note(format!(
        "the model is quantized ({method}): what its codes stand for is rounded once more, and loses twice"
    ));
    Ok(Opened { model: opened.model.dequantized()?, ..opened })
}

/// What was opened, with the model that the recipe works on.
///
/// # Errors
/// [`Error::Usage`] where a float model is to be requantized; as [`Recipe::prepared`].
pub fn prepared(
    opened: Opened,
    recipe: &Recipe,
    settings: &RecipeSettings,
    host: &Host<'_>,
) -> Result<Opened> {
    let opened = as_floats(opened, settings, host)?;
    Ok(Opened { model: recipe.prepared(opened.model)?, ..opened })
}
