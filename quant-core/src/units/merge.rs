//! Merging: the results of all units become a checkpoint.
//!
//! Nothing is computed. Each result is verified while its tensors are copied into the staging directory of the
//! checkpoint, together with their reports. The rest is a run in which every tensor is finished already.

use std::path::Path;
use std::time::Instant;

use super::job::{UnitJob, job};
use super::record::{changed, companions};
use super::store::damaged;
use super::unit_file::UnitFile;
use super::work::key;
use crate::calibrate::Residence;
use crate::checkpoint::{CheckpointWriter, TensorSink, refuse_overlap};
use crate::pipeline::report_of;
use crate::recipe::PlanEntry;
use crate::run::{Host, Quantized, StepTimes, is_gguf_name, refuse_existing, write_filled};
use crate::{Category, Error, Event, Result};

const MAX_LISTED: usize = 4;

impl UnitJob {
    /// Writes the checkpoint of a job whose units are finished. `force` and `resume` are those of a
    /// [`QuantizeRequest`](crate::run::QuantizeRequest).
    ///
    /// The result is byte-identical to that of [`run::quantize`](crate::run::quantize).
    ///
    /// # Errors
    /// [`Error::Unavailable`] if units are missing or damaged; [`Error::Usage`] if the model has changed since a unit
    /// read it; as [`run::quantize`](crate::run::quantize) for the output.
    pub fn merge(&self, output: &Path, (force, resume): (bool, bool), host: &Host<'_>) -> Result<Quantized> {
        let started = Instant::now();
        let steps = StepTimes::new(host.observer);
        let host = host.observed(&steps);
        let outputs = [output.to_owned()];
        refuse_existing(&outputs, force, resume)?;
        if is_gguf_name(output) {
            return Err(Error::usage(
                format!(
                    "{} has the name of a GGUF file, but the job writes another format",
                    output.display()
                ),
                "choose an output whose name does not end in .gguf",
            ));
        }
        refuse_overlap(self.opened.directory.path(), output)?;
        if let Some(directory) = self.store.files.directory() {
            refuse_overlap(directory, output)?;
        }
        self.require_all()?;
        self.require_companions(&host)?;
        self.remove_abandoned(&host);
        let job = job(&self.opened, &self.plan, self.windows.as_ref(), (host.observer, host.cancel));
        let mut fill = |writers: &mut [CheckpointWriter]| match writers {
            [writer] => self.fill(writer, &host),
            _ => Err(Error::Internal("a merge writes one checkpoint".into())),
        };
        let outputs = write_filled(
            std::slice::from_ref(&job),
            &self.opened.directory,
            &outputs,
            (force, resume),
            Residence::Memory,
            &host,
            &mut fill,
        );
        let outputs = match outputs {
            Err(Error::InputChanged { tensor }) => match self.unit_of(&tensor) {
                Some(unit) => return Err(self.read_another(unit, &tensor)?),
                None => return Err(Error::InputChanged { tensor }),
            },
            other => other?,
        };
        Ok(Quantized { outputs, steps: steps.times(), seconds: started.elapsed().as_secs_f64() })
    }

    fn require_all(&self) -> Result<()> {
        let status = self.status()?;
        let missing = status.units.iter().filter(|unit| unit.file.is_none()).map(|unit| unit.unit.as_str());
        let missing: Vec<&str> = missing.collect();
        if missing.is_empty() {
            return Ok(());
        }
        let more = if missing.len() > MAX_LISTED { ", …" } else { "" };
        Err(Error::Unavailable {
            what: "the result of the job".into(),
            reason: format!(
                "{} of {} units not finished: {}{more}",
                missing.len(),
                status.total,
                missing[..missing.len().min(MAX_LISTED)].join(", ")
            ),
            remedy: "finish them with ‹job_run(STORE)›, then merge again".into(),
        })
    }

    /// Fails if the files next to the weights are not those with which the job was created.
    fn require_companions(&self, host: &Host<'_>) -> Result<()> {
        let changed = changed(&self.companions, &companions(&self.opened.directory, host.cancel)?);
        if changed.is_empty() {
            return Ok(());
        }
        Err(Error::usage(
            format!(
                "files next to the weights in {} have changed since the job was created: {}",
                self.model_directory().display(),
                changed.join(", ")
            ),
            "restore them, or create a new job",
        ))
    }

    fn fill(&self, writer: &mut CheckpointWriter, host: &Host<'_>) -> Result<()> {
        let units: Vec<_> = self.units().iter().filter(|unit| !unit.is_forward()).collect();
        let count = units.len() as u64;
        host.observer.event(&Event::StageStarted { stage: "merge", unit: "unit", units: count });
        for unit in units {
            host.cancel.check()?;
            let part = unit.part(&self.plan, &self.opened.model)?;
            let is_held = part.entries.iter().all(|entry| {
                let mut outputs = entry.outputs.iter();
                writer.recall(&entry.tensor).is_some() && outputs.all(|o| writer.is_complete(&o.name))
            });
            if !is_held {
                let identity = self.identity(unit)?;
                let identity =
                    identity.ok_or_else(|| Error::Internal(format!("`{}` has no inputs", unit.id)))?;
                // Something else of this name is not set aside.
                self.store.files.exists(&key(&identity))?;
                let copied = self.existing_result(unit, &identity, host).and_then(|path| {
                    let file = UnitFile::open(&path, part.outputs(), &identity)?;
                    let is_reported = |entry: &&PlanEntry| {
                        file.report(&entry.tensor)
                            .is_some_and(|report| report_of(entry, report.clone()).is_some())
                    };
                    if let Some(entry) = part.entries.iter().find(|entry| !is_reported(entry)) {
                        return Err(damaged(&path, format!("has no valid report of `{}`", entry.tensor)));
                    }
                    file.read(host.cancel, &mut |name, at, bytes| writer.write(name, at, bytes))?;
                    file.reports().try_for_each(|(tensor, report)| writer.remember(tensor, report))
                });
                match copied {
                    Err(error) if error.category() == Category::Input => {
                        self.set_aside(unit, &identity, &error, host)?;
                        return Err(Error::Unavailable {
                            what: format!("the result of `{}`", unit.id),
                            reason: error.to_string(),
                            remedy: "compute it again with ‹job_run(STORE)›, then merge again".into(),
                        });
                    }
                    other => other?,
                }
                writer.commit()?;
            }
            host.observer.event(&Event::UnitDone { detail: unit.id.clone() });
        }
        self.compare_sources(writer)?;
        host.observer.event(&Event::StageDone);
        Ok(())
    }
}
