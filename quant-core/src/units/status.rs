//! The state of a job: the units that are finished, ready or waiting.

use std::collections::BTreeSet;

use serde::Serialize;

use super::job::UnitJob;
use super::store::UNITS;
use super::work::file_name;
use crate::Result;
use crate::checkpoint::printable;

/// The state of a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum State {
    /// Its result exists.
    Done,
    /// It can be computed.
    Ready,
    /// Units that it needs are not finished.
    Waiting,
}

/// A unit and its state.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct UnitStatus {
    /// Its name.
    pub unit: String,
    /// Its state.
    pub state: State,
    /// The file of the result, if it exists.
    pub file: Option<String>,
}

/// The state of a job.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct JobStatus {
    /// Name and version of this format.
    pub schema: &'static str,
    /// The digest of what the job depends on.
    pub job: String,
    /// The number of units.
    pub total: usize,
    /// The number of finished units.
    pub done: usize,
    /// All units.
    pub units: Vec<UnitStatus>,
    /// Files among the results that are not the result of a unit: damaged results, and files of others.
    pub other_files: Vec<String>,
    /// Temporary files of running or killed workers.
    pub temporary_files: usize,
}

impl UnitJob {
    /// Returns the state of every unit. Contents of results are not checked.
    ///
    /// # Errors
    /// [`Error::InputFile`](crate::Error::InputFile) if something else has the name of a result;
    /// [`Error::Io`](crate::Error::Io); [`Error::Unavailable`](crate::Error::Unavailable).
    pub fn status(&self) -> Result<JobStatus> {
        let listed: BTreeSet<String> = self.store.files.list(UNITS)?.into_iter().collect();
        let (mut units, mut names) = (Vec::new(), BTreeSet::new());
        for unit in self.units() {
            let identity = self.identity(unit)?;
            let file = match &identity {
                Some(identity) if self.exists(identity, &listed)? => Some(file_name(identity)),
                _ => None,
            };
            names.extend(file.clone());
            let state = match (&identity, &file) {
                (_, Some(_)) => State::Done,
                (Some(_), None) => State::Ready,
                (None, None) => State::Waiting,
            };
            units.push(UnitStatus { unit: unit.id.clone(), state, file });
        }
        let others = listed.iter().filter(|name| !names.contains(*name));
        let other_files: Vec<String> = others.map(|name| printable(name)).collect();
        Ok(JobStatus {
            schema: "quant-job-status/1",
            job: self.digest().to_owned(),
            total: units.len(),
            done: units.iter().filter(|unit| unit.state == State::Done).count(),
            units,
            other_files,
            temporary_files: self.store.files.temporary_files()?,
        })
    }
}
