//! Estimates how long a run that writes a GGUF file takes: operations and values are counted from shapes, and divided
//! by rates that are measured on this machine.

use std::time::Instant;

use super::plan::GgufPlan;
use crate::blocks::{BlockSearch, BlockType};
use crate::calibrate::{Residence, Sampling};
use crate::model::Model;
use crate::recipe::{PASSES, Rates};
use crate::scheme::LinearScheme;
use crate::transform::Workload;

/// What a run computes, counted from shapes.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct GgufWork {
    /// Floating-point operations of matrix products.
    pub operations: f64,
    /// The number of values that are encoded, by type; those that a search encodes count each time.
    pub encoded: Vec<(&'static BlockType, f64)>,
    /// Bytes of the tensors that are read and written.
    pub bytes: f64,
    search: BlockSearch,
    is_weighted: bool,
}

/// Where the importance matrix of a run comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ImportanceOrigin {
    /// The run has none.
    Absent,
    /// A file.
    File,
    /// A pass of the calibration text.
    Text,
}

impl GgufPlan {
    /// Counts what a run computes, with the windows of its calibration text if it has one. `importance` says whether
    /// it has an importance matrix.
    pub fn work(&self, model: &Model, sampling: Option<Sampling>, importance: ImportanceOrigin) -> GgufWork {
        let mut work = GgufWork {
            operations: 0.0,
            encoded: Vec::new(),
            bytes: model
                .source()
                .names()
                .into_iter()
                .filter_map(|name| model.source().info(name))
                .fold(self.output_bytes() as f64, |sum, info| sum + info.byte_len() as f64),
            search: self.request.search,
            is_weighted: importance != ImportanceOrigin::Absent,
        };
        for tensor in self.tensors.iter().filter(|tensor| !tensor.keeps_codes()) {
            work.encode(tensor.kind, tensor.shape.iter().map(|n| *n as f64).product());
        }
        if let Some(sampling) = sampling {
            self.add_passes(model, sampling, importance == ImportanceOrigin::Text, &mut work);
        }
        work
    }

    /// Adds the passes of the calibration batch.
    fn add_passes(&self, model: &Model, sampling: Sampling, gathers_importance: bool, work: &mut GgufWork) {
        let (a, method, settings) = (model.architecture(), &self.request.method, &self.request.settings);
        let compensates = self.request.compensation().is_some();
        for kind in a.blocks.kinds_in(0..a.layers) {
            let layers = kind.layers as f64;
            let mut load = Workload {
                graph: kind.graph,
                sampling,
                settings,
                schemes: Default::default(),
                residence: Residence::Memory,
                experts_apart: false,
            };
            // One pass each for the importance, the steps and the Hessians.
            let passes = [gathers_importance, !method.transforms.is_empty(), compensates];
            let passes = passes.into_iter().filter(|is_run| *is_run);
            let mut operations = passes.count() as f64 * load.block_operations();
            for transform in method.transforms.iter() {
                let of_search = transform.work(&load);
                operations += of_search.operations;
                work.encode(self.mixture().base, layers * of_search.rounded);
            }
            if compensates {
                let linears =
                    kind.graph.linears().filter(|(id, ..)| kind.graph.nodes()[*id].op.is_quantizable());
                load.schemes = linears.map(|(id, ..)| (id, LinearScheme::default())).collect();
                operations += method.rounding.operations(&load);
            }
            work.operations += layers * operations;
        }
    }
}

impl GgufWork {
    fn encode(&mut self, kind: &'static BlockType, values: f64) {
        match self.encoded.iter_mut().find(|(known, _)| known.name == kind.name) {
            Some((_, sum)) => *sum += values,
            None => self.encoded.push((kind, values)),
        }
    }

    /// The approximate duration in seconds, on an otherwise idle machine whose disk keeps up. The types are encoded on
    /// the threads of the current rayon pool for a short time, to measure how fast that is.
    pub fn seconds(&self, rates: Rates) -> f64 {
        let encoding = self.encoded.iter().map(|(kind, values)| values / self.encoded_per_second(kind));
        self.operations / rates.operations + encoding.sum::<f64>() + PASSES * self.bytes / rates.hashed
    }

    /// Encodes and decodes ever more rows, until that takes long enough to be measured.
    fn encoded_per_second(&self, kind: &BlockType) -> f64 {
        use rayon::prelude::*;
        const COLUMNS: usize = 1024;
        const MIN_SECONDS: f64 = 0.02;
        const MAX_ROWS: usize = 1 << 12;
        let Some(bytes) = kind.row_bytes(COLUMNS) else { return f64::INFINITY };
        let importance = vec![1.0; COLUMNS];
        let importance = self.is_weighted.then_some(&importance[..]);
        let mut rows = 2 * rayon::current_num_threads();
        loop {
            let values: Vec<f32> =
                (0..rows * COLUMNS).map(|i| (i * 7919 % 2003) as f32 * 1e-4 - 0.1).collect();
            let mut stored = vec![0; rows * bytes];
            let started = Instant::now();
            values.par_chunks_exact(COLUMNS).zip(stored.par_chunks_exact_mut(bytes)).for_each(
                |(row, out)| {
                    kind.encode_by(self.search, row, importance, out);
                    let mut back = vec![0.0; COLUMNS];
                    kind.decode(out, &mut back);
                    std::hint::black_box(back);
                },
            );
            let seconds = started.elapsed().as_secs_f64().max(1e-9);
            if seconds >= MIN_SECONDS || rows >= MAX_ROWS {
                return (rows * COLUMNS) as f64 / seconds;
            }
            rows *= 4;
        }
    }
}
