//! The files of a job in units: its record, and the results of its units.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use quant_core::calibrate::Corpus;
use quant_core::digest::sha256_hex;
use quant_core::run::{Host, Nothing, RecipeSettings, Text};
use quant_core::units::{JobRequest, Selection, UnitJob, WorkOptions, init};
use quant_core::{CancelToken, Result, Silent};
use tempfile::TempDir;

use crate::input::Input;
use crate::texts::{in_directory, text};

/// Units whose results are replaced.
pub(crate) const UNITS: [&str; 3] = ["forward/0/0", "blocks/1", "outside"];

/// A finished job on a small model.
struct Bench {
    directory: TempDir,
    record: String,
    results: Vec<(PathBuf, Vec<u8>)>,
}

impl Bench {
    /// One input uses it at a time.
    fn shared() -> &'static Mutex<Self> {
        static SHARED: OnceLock<Mutex<Bench>> = OnceLock::new();
        SHARED.get_or_init(|| Mutex::new(Self::new()))
    }

    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let request = request(directory.path());
        let store = directory.path().join("store");
        with_host(directory.path(), |host| {
            init(&request, &store, host)?;
            UnitJob::open(&store, None, host)?.run(&Selection::All, &WorkOptions::default(), host)
        })
        .expect("a job that can be computed");
        let files =
            || std::fs::read_dir(store.join("units")).expect("the results").flatten().map(|e| e.path());
        let result = |unit: &&str| {
            let name = format!("{}.", unit.replace('/', "-"));
            let path =
                files().find(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with(&name)));
            let path = path.expect("a result");
            (path.clone(), std::fs::read(path).expect("a file"))
        };
        let results = UNITS.iter().map(result).collect();
        let record = std::fs::read_to_string(store.join("job.json")).expect("a record");
        Self { directory, record, results }
    }

    fn store(&self) -> PathBuf {
        self.directory.path().join("store")
    }

    fn restore(&self) {
        let entries = std::fs::read_dir(self.store().join("units")).expect("the results");
        for path in entries.flatten().map(|entry| entry.path()) {
            if path.extension().is_none_or(|e| e != "safetensors") {
                std::fs::remove_file(path).expect("a file");
            }
        }
        for (path, intact) in &self.results {
            std::fs::write(path, intact).expect("a file");
        }
    }
}

/// A job on a small model, which is written to a directory.
pub(crate) fn request(directory: &Path) -> JobRequest {
    let model = directory.join("model");
    std::fs::create_dir(&model).expect("a directory");
    crate::parsers::tiny::tiny_llama(&model).expect("a model");
    std::fs::write(directory.join("code"), "code").expect("a file");
    let words: String = (0..400_usize).map(|i| format!("w{} ", i * i % 61)).collect();
    JobRequest {
        model,
        settings: RecipeSettings {
            method: Some("awq".into()),
            scheme: Some("w4a16-g32-sym".into()),
            samples: Some(2),
            seq_len: Some(16),
            ..RecipeSettings::default()
        },
        calibration: Some(Text::Given(Corpus::Texts(vec![words]), "words".into())),
        ..JobRequest::default()
    }
}

/// Calls `work` with a host for a job on the model in a directory.
pub(crate) fn with_host<T>(directory: &Path, work: impl FnOnce(&Host<'_>) -> Result<T>) -> Result<T> {
    let (cancel, code) = (CancelToken::new(), directory.join("code"));
    let mut host = Host::new(&Silent, &cancel, &Nothing);
    // The executable takes long to hash.
    host.code = Some(&code);
    work(&host)
}

/// The record of a job. Its model does not exist, so only the record is read.
///
/// # Panics
/// If a property does not hold.
pub fn job_record(data: &[u8]) {
    let bench = Bench::shared().lock().unwrap_or_else(PoisonError::into_inner);
    let bytes = text(data, &[&bench.record]);
    in_directory(|directory| {
        let store = directory.join("store");
        std::fs::create_dir_all(&store).expect("a directory");
        std::fs::write(store.join("job.json"), bytes).expect("a file");
        let opened = with_host(bench.directory.path(), |host| {
            UnitJob::open(&store, Some(Path::new("/no/such/model")), host).map(drop)
        });
        assert!(opened.is_err());
    });
}

/// The tokens of a job, under the name that their hash requires: other tokens than those of the job are refused.
///
/// # Panics
/// If a property does not hold.
pub fn job_tokens(data: &[u8]) {
    let bench = Bench::shared().lock().unwrap_or_else(PoisonError::into_inner);
    let name = serde_json::from_str::<serde_json::Value>(&bench.record).expect("a record")["windows"]
        .as_str()
        .expect("the job has tokens")
        .to_owned();
    let intact = std::fs::read(bench.store().join("inputs").join(&name)).expect("the tokens");
    let (len, rest) = intact.split_first_chunk().expect("a safetensors file");
    let len = usize::try_from(u64::from_le_bytes(*len)).expect("a short header");
    let (header, values) = rest.split_at(len);
    let header = text(data, &[std::str::from_utf8(header).expect("a header")]);
    let framed = [&(header.len() as u64).to_le_bytes()[..], &header, values].concat();
    for bytes in [data, &framed] {
        let renamed = format!("windows-{}.safetensors", &sha256_hex(bytes)[..32]);
        in_directory(|directory| {
            let store = directory.join("with-tokens");
            std::fs::create_dir_all(store.join("inputs")).expect("a directory");
            let path = store.join("inputs").join(&renamed);
            std::fs::write(&path, bytes).expect("a file");
            std::fs::write(store.join("job.json"), bench.record.replace(&name, &renamed)).expect("a file");
            let opened =
                with_host(bench.directory.path(), |host| UnitJob::open(&store, None, host).map(drop));
            std::fs::remove_file(path).expect("the file was written");
            if let Err(error) = &opened {
                let code = error.category().exit_code();
                assert!([2, 4].contains(&code), "{error}");
            }
            assert!(opened.is_ok() || bytes != intact, "the tokens of the job were refused");
        });
    }
}

/// The result of a unit: a damaged one is computed again, byte for byte, or is an error.
///
/// # Panics
/// If a property does not hold.
pub fn unit_files(data: &[u8]) {
    let bench = Bench::shared().lock().unwrap_or_else(PoisonError::into_inner);
    let mut input = Input::new(data);
    let which = input.below(UNITS.len());
    let (path, intact) = &bench.results[which];
    let mut bytes = intact.clone();
    let is_sealed = match input.below(4) {
        0 => {
            bytes = data.to_vec();
            false
        }
        1 => {
            bytes.truncate(input.below(bytes.len()));
            false
        }
        kind => {
            for _ in 0..input.size(4) {
                let near = input.below(600.min(bytes.len()));
                let at = if input.flag() { near } else { bytes.len() - 1 - near };
                bytes[at] = input.byte();
            }
            if kind == 3 {
                seal(&mut bytes);
            }
            kind == 3
        }
    };
    std::fs::write(path, &bytes).expect("a file");
    let run = |unit: &str| {
        with_host(bench.directory.path(), |host| {
            let job = UnitJob::open(&bench.store(), None, host)?;
            job.run(&Selection::Unit(unit.into()), &WorkOptions::default(), host)
        })
    };
    if UNITS[which].starts_with("forward") && input.flag() {
        let _ = run("blocks/1");
    }
    let done = run(UNITS[which]);
    if done.is_ok() && !is_sealed {
        assert!(std::fs::read(path).expect("a result") == *intact, "a damaged result was accepted");
    }
    bench.restore();
}

/// Gives a result the hash that its contents require.
fn seal(bytes: &mut [u8]) {
    let Some(header) = bytes.first_chunk().map(|len| u64::from_le_bytes(*len)) else { return };
    let start = usize::try_from(header).ok().and_then(|header| header.checked_add(8));
    let end = bytes.len().saturating_sub(32);
    let Some(hash) = start.and_then(|start| bytes.get(start..end)).map(sha256_hex) else { return };
    for (byte, digits) in bytes[end..].iter_mut().zip(hash.as_bytes().chunks_exact(2)) {
        let digits = std::str::from_utf8(digits).unwrap_or("00");
        *byte = u8::from_str_radix(digits, 16).unwrap_or(0);
    }
}
