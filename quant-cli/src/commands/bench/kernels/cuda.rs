//! `quant bench kernels --device cuda`: the limits of a GPU, and how close the kernels come to them.

use quant_core::model::CudaRunner;
use quant_core::{Error, Result};
use quant_kernels_cuda::linear::PlanLimits;
use quant_kernels_cuda::measure::{Bound, Case, Ceilings, Meter, Times, cases};
use serde::Serialize;

use super::super::Session;
use super::{Only, refused};
use crate::output::{JsonOption, table};

#[derive(Serialize)]
struct Report {
    schema: &'static str,
    device: Device,
    ceilings: Limits,
    kernels: Vec<Measured>,
    failed: Vec<Failed>,
}

#[derive(Serialize)]
struct Device {
    name: String,
    /// For example `9.0`.
    compute_capability: String,
    multiprocessors: u32,
    memory_bytes: usize,
    /// The newest CUDA version that the driver supports, for example `13.0`.
    driver_cuda: String,
}

#[derive(Serialize)]
struct Limits {
    read_gb_per_second: f64,
    copy_gb_per_second: f64,
    f16_tops: f64,
    bf16_tops: f64,
    int8_tops: f64,
    /// Seconds of a launch that does nothing.
    launch_seconds: f64,
}

impl From<&Ceilings> for Limits {
    fn from(c: &Ceilings) -> Self {
        Self {
            read_gb_per_second: c.read / 1e9,
            copy_gb_per_second: c.copy / 1e9,
            f16_tops: c.f16 / 1e12,
            bf16_tops: c.bf16 / 1e12,
            int8_tops: c.int8 / 1e12,
            launch_seconds: c.launch,
        }
    }
}

#[derive(Serialize)]
struct Measured {
    kernel: String,
    shape: String,
    tokens: usize,
    /// Seconds per launch: the mean of each measurement, sorted from the shortest.
    all_seconds: Vec<f64>,
    seconds: f64,
    gb_per_second: f64,
    tops: f64,
    /// The time that the case would take at the ceilings: for its bytes or for its products, whichever takes longer.
    floor_seconds: f64,
    /// What determines `floor_seconds`: `bytes` or `products`.
    bound: &'static str,
    share: f64,
}

impl Measured {
    fn new(case: &Case, ceilings: &Ceilings, times: Times) -> Self {
        let (floor_seconds, bound) = case.floor(ceilings);
        let seconds = times.median();
        Self {
            kernel: case.name.clone(),
            shape: case.shape.clone(),
            tokens: case.tokens,
            seconds,
            gb_per_second: case.bytes as f64 / seconds / 1e9,
            tops: case.operations / seconds / 1e12,
            floor_seconds,
            bound: match bound {
                Bound::Bytes => "bytes",
                Bound::Products => "products",
            },
            share: floor_seconds / seconds,
            all_seconds: times.seconds,
        }
    }
}

#[derive(Serialize)]
struct Failed {
    kernel: String,
    shape: String,
    tokens: usize,
    reason: String,
}

/// Measures the kernels on a GPU.
pub(super) fn run(only: &Only, json: &JsonOption, session: &Session) -> Result<()> {
    // Report a missing driver before anything else.
    CudaRunner::new()?;
    let meter = Meter::new().map_err(|e| unavailable(&e))?;
    let gpu = meter.gpu();
    let mut cases = cases(&PlanLimits::from(&gpu.limits)).map_err(refused)?;
    cases.retain(|case| only.takes(&format!("{} {} {}", case.name, case.shape, case.tokens)));
    only.check(cases.len())?;
    session.progress.note("measuring the peak rates of the device");
    let ceilings = meter.ceilings().map_err(|e| unavailable(&e))?;
    let [major, minor] = gpu.limits.capability;
    let version = gpu.driver_version().map_err(|e| unavailable(&e))?;
    let mut report = Report {
        schema: "quant-bench-kernels-cuda/1",
        device: Device {
            name: gpu.name.clone(),
            compute_capability: format!("{major}.{minor}"),
            multiprocessors: gpu.limits.multiprocessors,
            memory_bytes: gpu.memory().map_err(|e| unavailable(&e))?.total,
            driver_cuda: format!("{}.{}", version / 1000, version % 1000 / 10),
        },
        ceilings: Limits::from(&ceilings),
        kernels: Vec::new(),
        failed: Vec::new(),
    };
    for case in &cases {
        session.cancel.check()?;
        session.progress.note(&format!("{} {}, {} token(s)", case.name, case.shape, case.tokens));
        match meter.time(case) {
            Ok(times) => report.kernels.push(Measured::new(case, &ceilings, times)),
            Err(e) => report.failed.push(Failed {
                kernel: case.name.clone(),
                shape: case.shape.clone(),
                tokens: case.tokens,
                reason: e.to_string(),
            }),
        }
    }
    json.emit(&report, || show(&report))?;
    match report.failed.first() {
        None => Ok(()),
        Some(first) => Err(Error::Unavailable {
            what: format!("{} of {} kernels", report.failed.len(), cases.len()),
            reason: first.reason.clone(),
            remedy: REMEDY.into(),
        }),
    }
}

const REMEDY: &str =
    "see docs/kernels/cuda-host.md for what the GPU must support; --only TEXT measures fewer kernels";

fn unavailable(error: &quant_kernels_cuda::Error) -> Error {
    Error::Unavailable { what: "a GPU".into(), reason: error.to_string(), remedy: REMEDY.into() }
}

fn show(report: &Report) -> String {
    let time = |seconds: f64| format!("{:.2}", 1e6 * seconds);
    let rows: Vec<Vec<String>> = report
        .kernels
        .iter()
        .map(|m| {
            // Half the difference between the slowest and the fastest measurement.
            let ends = m.all_seconds.first().zip(m.all_seconds.last());
            let spread = ends.map_or(0.0, |(min, max)| 50.0 * (max - min) / m.seconds);
            let rate = match m.bound {
                "bytes" => format!("{:.0} GB/s", m.gb_per_second),
                _ => format!("{:.1} TOPS", m.tops),
            };
            vec![
                m.kernel.clone(),
                m.shape.clone(),
                m.tokens.to_string(),
                format!("{} ± {spread:.0} %", time(m.seconds)),
                time(m.floor_seconds),
                rate,
                format!("{:.0} %", 100.0 * m.share),
            ]
        })
        .chain(report.failed.iter().map(|f| {
            let none = || "-".to_owned();
            vec![
                f.kernel.clone(),
                f.shape.clone(),
                f.tokens.to_string(),
                "failed".into(),
                none(),
                none(),
                none(),
            ]
        }))
        .collect();
    let (device, limits) = (&report.device, &report.ceilings);
    format!(
        "{}\n{}, compute capability {}, {} multiprocessors, driver for CUDA {}: reads {:.0} GB/s, copies \
        {:.0} GB/s, products f16 {:.1}, bf16 {:.1}, int8 {:.1} TOPS, kernel launch {} µs; percentages are \
        relative to these rates\n",
        table(&["kernel", "shape", "tokens", "µs", "floor µs", "rate", "share"], &rows),
        device.name,
        device.compute_capability,
        device.multiprocessors,
        device.driver_cuda,
        limits.read_gb_per_second,
        limits.copy_gb_per_second,
        limits.f16_tops,
        limits.bf16_tops,
        limits.int8_tops,
        time(limits.launch_seconds)
    )
}
