//! Jobs in units: one model is quantized by any number of processes that share a directory or a place in an object
//! store, in any order.
//!
//! ```text
//! init ─► STORE/job.json ─► units ─► STORE/units/*.safetensors ─► merge ─► OUT
//! (plan, tokens)            (part of a plan, by the pipeline)      (verified and published by `run`)
//! ```
//!
//! A *unit* is a part of the job's plan: the tensors of some blocks, the tensors outside the blocks, or the passage of
//! some calibration windows through some blocks of the float model. [`pipeline`](crate::pipeline) computes it, with the
//! same code as a run in one process. Its result is one file, whose name has a hash of everything that it depends on:
//! the job, the unit, and the results that it reads. A file appears complete or not at all. Units may be computed more
//! than once, and the results must be equal byte for byte, so workers do not wait for each other and may be killed at
//! any time.
//!
//! | module | contents |
//! |---|---|
//! | `record` | what a job depends on, as `job.json` |
//! | `windows` | the calibration tokens as a file, so that workers need neither text nor tokenizer |
//! | `graph` | the units of a plan, what each needs, and its predicted time, memory and bytes |
//! | `store` | the files of a job, in a directory or an object store, and how they appear |
//! | `shared` | other files that are shared in the same way, such as the measurements of an evaluation in shards |
//! | `temporary` | directories for files that are being written, and the removal of those of killed workers |
//! | `unit_file` | the file of a unit that writes tensors: a sink for the pipeline, and its reader |
//! | `job` | a job as a worker opens it: model, plan and tokens, compared with the record |
//! | `work` | computes units |
//! | `sources` | compares the weights that units have read |
//! | `status` | which units are finished |
//! | `merge` | passes finished units to the writer of checkpoints |

mod graph;
mod job;
mod merge;
mod record;
mod shared;
mod sources;
mod status;
mod store;
mod temporary;
mod unit_file;
mod windows;
mod work;

pub use graph::{Cost, Unit, Work};
pub use job::{Initialized, JobRequest, UnitJob, init};
pub use shared::SharedFiles;
pub use status::{JobStatus, State, UnitStatus};
pub use store::{check_location, is_url};
pub use work::{Phase, Selection, UnitDone, WorkOptions};
