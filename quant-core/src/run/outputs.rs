//! The destinations of checkpoints, and how checkpoints appear there.

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::host::Host;
use super::model_card::{self, model_card};
use crate::calibrate::{Residence, Spill};
use crate::checkpoint::{CheckpointWriter, ModelDirectory, Published, Resume, WriteOptions, printable};
use crate::digest::hex;
use crate::format::CONTAINERS;
use crate::pipeline::{self, Job, Program, QuantReport, SavedStates, StateFiles, TensorReport};
use crate::recipe::{Plan, Recipe};
use crate::wording::counted;
use crate::{Category, Error, Result, TensorSink, system};

/// The minimum time between two saves of hidden states.
const SAVE_EVERY: Duration = Duration::from_secs(20);

/// Returns the destination of each format: `OUT` itself for one, `OUT/FORMAT` for several.
///
/// # Errors
/// [`Error::Usage`] if the directory holds files that are not of the formats, or an interrupted run of one format would
/// be lost because of several, or the other way round; [`Error::Io`].
pub(super) fn outputs(out: &Path, recipe: &Recipe) -> Result<Vec<PathBuf>> {
    let stranded = |target: &Path| {
        let job = CheckpointWriter::unfinished_job(target)?;
        Some(Error::usage(
            format!("{} holds an interrupted run, which this one would not continue", job.display()),
            "continue it with the formats that it had, choose a different output, or remove that directory",
        ))
    };
    if recipe.containers.len() == 1 {
        let mut formats = CONTAINERS.iter().chain(&recipe.containers);
        return match formats.find_map(|c| stranded(&out.join(c.name()))) {
            Some(error) => Err(error),
            None => Ok(vec![out.to_owned()]),
        };
    }
    if let Some(error) = stranded(out) {
        return Err(error);
    }
    let entries = match std::fs::read_dir(out) {
        Ok(entries) => entries,
        Err(e) if e.kind() == ErrorKind::NotFound => {
            return Ok(recipe.containers.iter().map(|c| out.join(c.name())).collect());
        }
        Err(e) => return Err(Error::io("list", out, e)),
    };
    // The directory receives checkpoints, so it must not be one itself, nor hold any other files of the user.
    let ours = |name: &OsStr| {
        let containers = CONTAINERS.iter().chain(&recipe.containers);
        containers.into_iter().any(|c| name == c.name() || name == OsStr::new(&format!("{}.job", c.name())))
    };
    for entry in entries {
        let name = entry.map_err(|e| Error::io("list", out, e))?.file_name();
        if !ours(&name) {
            return Err(Error::usage(
                format!(
                    "{} may contain only one directory per format, but it contains {:?}",
                    out.display(),
                    name.to_string_lossy()
                ),
                "choose a different output",
            ));
        }
    }
    Ok(recipe.containers.iter().map(|c| out.join(c.name())).collect())
}

/// Fails if an output exists and may not be replaced.
///
/// # Errors
/// [`Error::OutputExists`]; [`Error::Usage`] if an output is a mount point, or a run was to be resumed that is finished,
/// entirely or in part.
pub(crate) fn refuse_existing(outputs: &[PathBuf], force: bool, resume: bool) -> Result<()> {
    if let Some(path) = outputs.iter().find(|path| system::is_mount_point(path)) {
        return Err(Error::usage(
            format!("{} is a mount point, which cannot be replaced", path.display()),
            match path.is_dir() {
                true => format!("choose a path in it, such as {}", path.join("model").display()),
                false => "choose another path".to_owned(),
            },
        ));
    }
    let Some(path) = outputs.iter().find(|path| !force && path.exists()) else { return Ok(()) };
    let shown = path.display();
    let is_begun = outputs.iter().any(|output| CheckpointWriter::unfinished_job(output).is_some());
    match (resume || is_begun, outputs) {
        // If a run is killed while it publishes its formats one after another, only some of them exist.
        (true, [_, _, ..]) => Err(Error::usage(
            format!("{shown} already exists, so the interrupted run cannot be resumed"),
            "add ‹force›, which writes existing formats again and resumes the others",
        )),
        (true, _) if resume && CheckpointWriter::is_finished(path) => Err(Error::usage(
            format!("{shown} is finished: there is no interrupted run to resume"),
            "use it as it is, or replace it with ‹force›",
        )),
        _ => Err(Error::OutputExists { path: path.clone() }),
    }
}

/// How a run treats the unfinished work of an earlier one: it is lost only if the caller says so.
pub(super) fn resume(required: bool) -> Resume {
    if required { Resume::Required } else { Resume::IfSame }
}

/// Runs jobs on one model, each into a directory that appears only when its contents are verified; none appears before
/// all are. `replacing` is `(force, resume)`, as in
/// [`QuantizeRequest`](super::QuantizeRequest).
///
/// # Errors
/// As [`pipeline::quantize_each`] and [`CheckpointWriter`]. Finished work is kept if the same jobs can succeed later.
pub fn write(
    jobs: &[Job<'_>],
    directory: &ModelDirectory,
    outputs: &[PathBuf],
    replacing: (bool, bool),
    residence: Residence,
    host: &Host<'_>,
) -> Result<Vec<(Published, QuantReport)>> {
    write_filled(jobs, directory, outputs, replacing, residence, host, &mut |_| Ok(()))
}

/// Like [`write`], but `fill` may first write tensors that were computed elsewhere, with their reports as records. Only
/// the rest is computed; the input of every tensor is compared with its report.
pub(crate) fn write_filled(
    jobs: &[Job<'_>],
    directory: &ModelDirectory,
    outputs: &[PathBuf],
    (force, resume): (bool, bool),
    residence: Residence,
    host: &Host<'_>,
    fill: &mut dyn FnMut(&mut [CheckpointWriter]) -> Result<()>,
) -> Result<Vec<(Published, QuantReport)>> {
    let program = host.program()?;
    let mut writers: Vec<CheckpointWriter> = Vec::with_capacity(jobs.len());
    for (i, (job, output)) in jobs.iter().zip(outputs).enumerate() {
        // The check of free disk space includes the files next to the weights.
        let others: u64 = jobs[i + 1..].iter().map(|j| j.plan.output_bytes()).sum();
        let scratch = match residence {
            Residence::Files { .. } if i == 0 => {
                Plan::scratch_bytes(std::slice::from_ref(job.plan), job.model, residence)
            }
            _ => 0,
        };
        let options = WriteOptions {
            force,
            resume: self::resume(resume),
            fingerprint: pipeline::fingerprint(job, directory, &program),
            companion_bytes: pipeline::companion_bytes(directory, job.plan)?
                .saturating_add(others)
                .saturating_add(scratch),
            ..WriteOptions::default()
        };
        let writer = match CheckpointWriter::create(output, job.plan.outputs(), options) {
            Ok(writer) => writer,
            Err(error) => return Err(given_up(writers, error)),
        };
        for note in writer.notes() {
            host.note(note.as_str());
        }
        writers.push(writer);
    }
    if let Err(error) = fill(&mut writers) {
        return Err(given_up(writers, error));
    }
    let states = states(&writers, jobs, directory, &program, residence);
    let sinks = writers.iter_mut().map(|w| w as &mut dyn TensorSink).collect();
    let outcome = pipeline::quantize_each_with(jobs, sinks, &states).and_then(|reports| {
        for report in &reports {
            warn_of_weights(report, host);
        }
        for ((job, report), writer) in jobs.iter().zip(&reports).zip(&mut writers) {
            pipeline::add_companions(directory, job.plan, report, writer)?;
            let card = model_card(directory, job, report, host.wording);
            writer.add_file(model_card::NAME, card.as_bytes())?;
        }
        Ok(reports)
    });
    let reports = match outcome {
        Ok(reports) => reports,
        Err(error) => return Err(given_up(writers, error)),
    };
    let prepared = writers.into_iter().map(|w| w.prepare(host.observer, host.cancel));
    let prepared = prepared.collect::<Result<Vec<_>>>()?;
    prepared.into_iter().zip(reports).map(|(p, report)| Ok((p.publish()?, report))).collect()
}

/// Warns of weights that are all zero, and of groups in which at most one weight is not rounded to zero.
fn warn_of_weights(report: &QuantReport, host: &Host<'_>) {
    const MAX_LISTED: usize = 4;
    let list = |names: Vec<String>| {
        let more = if names.len() > MAX_LISTED { ", …" } else { "" };
        format!("{}{more}", names[..names.len().min(MAX_LISTED)].join(", "))
    };
    let zero: Vec<String> =
        report.tensors.iter().filter(|t| t.all_zero).map(|t| printable(&t.tensor)).collect();
    if !zero.is_empty() {
        host.warn(format!("all weights are zero in {}: {}", counted(zero.len(), "linear"), list(zero)));
    }
    let with_outliers = report.tensors.iter().filter(|t| t.vanished_groups > 0);
    let groups: u64 = with_outliers.clone().map(|t| t.vanished_groups).sum();
    if groups > 0 {
        let named = |t: &TensorReport| format!("{} ({})", printable(&t.tensor), t.vanished_groups);
        host.warn(format!(
            "in {}, all weights, or all but one, are rounded to zero: {}; smaller groups lose less",
            counted(groups as usize, "group"),
            list(with_outliers.map(named).collect())
        ));
    }
}

/// Returns where the run keeps hidden states. Those that are saved for resuming the run are always in the first job
/// directory.
fn states(
    writers: &[CheckpointWriter],
    jobs: &[Job<'_>],
    directory: &ModelDirectory,
    program: &Program,
    residence: Residence,
) -> StateFiles {
    let (Some(writer), Some(job)) = (writers.first(), jobs.first()) else { return StateFiles::default() };
    let spill = match residence {
        Residence::Memory => None,
        Residence::Files { round_bytes, experts_apart } => {
            Some(Spill::new(writer.job_directory(), round_bytes).with_experts_apart(experts_apart))
        }
    };
    let fingerprint = pipeline::fingerprint(job, directory, program).to_string();
    StateFiles {
        depends_on: hex(&Sha256::digest(fingerprint)).into(),
        spill,
        saved: Some(SavedStates { path: writer.saved_states(), every: SAVE_EVERY }),
        ..StateFiles::default()
    }
}

/// Removes unfinished outputs, unless the same job can succeed later. The work of earlier runs is always kept: the
/// error may be that an input has changed since, and the user can restore it.
pub(super) fn given_up(writers: Vec<CheckpointWriter>, error: Error) -> Error {
    let resumable = matches!(error.category(), Category::Interrupted | Category::Environment);
    if !resumable {
        for writer in writers.into_iter().filter(|writer| !writer.is_resumed()) {
            if let Err(worse) = writer.abandon() {
                return worse;
            }
        }
    }
    error
}
