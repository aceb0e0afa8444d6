//! Images of kernels on disk: compiled once on a machine, loaded by every later process.
//!
//! An image belongs to a variant with all its texts, an architecture, a form, the version of this crate, and that of the
//! compiler. What is found is checked against its own hash, and made anew where it is damaged. Files appear whole or not at
//! all, so that processes may share a directory, also one that is read-only and was filled elsewhere: where there is no
//! compiler, images of any version are taken.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::Result;
use crate::compile::{Architecture, Form, Image, Variant, compile, compiler_version};

/// The environment variable that names the directory of [`ImageCache::from_environment`]; empty: nothing is kept.
pub const DIRECTORY: &str = "QUANT_CUDA_CACHE";

/// What files begin with.
const MAGIC: &[u8; 16] = b"quant cuda img 1";
const HASH: usize = 32;
/// Magic, key, lengths of bytes and log.
const HEADER: usize = MAGIC.len() + HASH + 16;
/// No image is so large.
const MOST_BYTES: u64 = 64 << 20;

/// What makes images.
pub trait Compiler: Send + Sync {
    /// Major and minor.
    ///
    /// # Errors
    /// When there is no compiler.
    fn version(&self) -> Result<[u32; 2]>;

    /// Compiles a variant.
    ///
    /// # Errors
    /// When it cannot.
    fn compile(&self, variant: &Variant, architecture: Architecture, form: Form) -> Result<Image>;
}

/// The run-time compiler of CUDA.
#[derive(Debug, Clone, Copy, Default)]
pub struct RunTimeCompiler;

impl Compiler for RunTimeCompiler {
    fn version(&self) -> Result<[u32; 2]> {
        compiler_version()
    }

    fn compile(&self, variant: &Variant, architecture: Architecture, form: Form) -> Result<Image> {
        compile(variant, architecture, form)
    }
}

/// A directory of images, or none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageCache {
    directory: Option<PathBuf>,
}

impl ImageCache {
    /// Keeps images in a directory, which is made when there is something to keep.
    pub fn at(directory: impl Into<PathBuf>) -> Self {
        Self { directory: Some(directory.into()) }
    }

    /// Keeps nothing.
    pub fn none() -> Self {
        Self { directory: None }
    }

    /// Keeps images where [`DIRECTORY`] says, else among the user's caches: `$XDG_CACHE_HOME` or `~/.cache`, on Windows
    /// `%LOCALAPPDATA%`, in `quant/cuda`. Where there is none of these, nothing is kept.
    pub fn from_environment() -> Self {
        Self { directory: directory_by(|name| std::env::var_os(name)) }
    }

    /// Where images are kept.
    pub fn directory(&self) -> Option<&Path> {
        self.directory.as_deref()
    }

    /// The image of a variant: from the directory, or else compiled and, where that is possible, kept.
    ///
    /// # Errors
    /// When it is not there, and the compiler is missing or refuses it.
    pub fn image(
        &self,
        compiler: &dyn Compiler,
        variant: &Variant,
        architecture: Architecture,
        form: Form,
    ) -> Result<Image> {
        let Some(directory) = &self.directory else {
            return compiler.compile(variant, architecture, form);
        };
        let key = key(variant, architecture, form);
        let name = Name { variant, architecture, form, key: &key };
        let version = match compiler.version() {
            Ok(version) => version,
            Err(e) => return name.newest(directory).ok_or(e),
        };
        let path = directory.join(name.file(version));
        if let Some(image) = read(&path, &key) {
            return Ok(image);
        }
        let image = compiler.compile(variant, architecture, form)?;
        // A cache that cannot be written costs time, not results.
        let _ = write(&path, &key, &image);
        Ok(image)
    }
}

fn directory_by(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    if let Some(own) = variable(DIRECTORY) {
        return Some(PathBuf::from(own)).filter(|path| !path.as_os_str().is_empty());
    }
    let of = |name| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let caches = if cfg!(windows) {
        of("LOCALAPPDATA")
    } else {
        of("XDG_CACHE_HOME").or_else(|| of("HOME").map(|home| home.join(".cache")))
    };
    Some(caches?.join("quant").join("cuda"))
}

/// Of all that decides about an image but the compiler; each part with its length.
fn key(variant: &Variant, architecture: Architecture, form: Form) -> [u8; HASH] {
    let mut hasher = blake3::Hasher::new();
    let mut add = |part: &str| {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    };
    let source = variant.source;
    for part in [env!("CARGO_PKG_VERSION"), source.name, source.text, variant.kernel, suffix(form)] {
        add(part);
    }
    add(&architecture.to_string());
    add(&source.headers.len().to_string());
    for (name, text) in source.headers {
        add(name);
        add(text);
    }
    for (name, value) in &variant.defines {
        add(name);
        add(value);
    }
    *hasher.finalize().as_bytes()
}

fn suffix(form: Form) -> &'static str {
    match form {
        Form::Ptx => "ptx",
        Form::Cubin => "cubin",
    }
}

struct Name<'a> {
    variant: &'a Variant,
    architecture: Architecture,
    form: Form,
    key: &'a [u8; HASH],
}

impl Name<'_> {
    fn stem(&self) -> String {
        let hex = blake3::Hash::from_bytes(*self.key).to_hex();
        format!("{}-{}-{}-", self.variant.kernel, self.architecture, &hex[..40])
    }

    fn file(&self, [major, minor]: [u32; 2]) -> String {
        format!("{}{major}.{minor}.{}", self.stem(), suffix(self.form))
    }

    /// The sound image of the newest compiler.
    fn newest(&self, directory: &Path) -> Option<Image> {
        let (stem, end) = (self.stem(), format!(".{}", suffix(self.form)));
        let version = |path: &Path| -> Option<[u32; 2]> {
            let name = path.file_name()?.to_str()?;
            let (major, minor) = name.strip_prefix(&stem)?.strip_suffix(&end)?.split_once('.')?;
            Some([major.parse().ok()?, minor.parse().ok()?])
        };
        let entries = fs::read_dir(directory).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
        let mut found: Vec<_> = entries.filter_map(|path| Some((version(&path)?, path))).collect();
        found.sort();
        found.iter().rev().find_map(|(_, path)| read(path, self.key))
    }
}

/// The image that a file holds; `None` unless it is whole, and that of this key.
fn read(path: &Path, key: &[u8; HASH]) -> Option<Image> {
    let metadata = fs::metadata(path).ok()?;
    if !metadata.is_file() || metadata.len() > MOST_BYTES {
        return None;
    }
    let file = fs::read(path).ok()?;
    let (content, hash) = file.split_at_checked(file.len().checked_sub(HASH)?)?;
    if blake3::hash(content).as_bytes() != hash {
        return None;
    }
    let (header, body) = content.split_at_checked(HEADER)?;
    let (magic, header) = header.split_at(MAGIC.len());
    let (of, lengths) = header.split_at(HASH);
    if magic != MAGIC || of != key {
        return None;
    }
    let length = |at: usize| usize::try_from(u64::from_le_bytes(lengths[at..at + 8].try_into().ok()?)).ok();
    let (bytes, log) = body.split_at_checked(length(0)?)?;
    if log.len() != length(8)? {
        return None;
    }
    Some(Image { bytes: bytes.to_vec(), log: String::from_utf8(log.to_vec()).ok()? })
}

/// Writes beside the place, then renames.
fn write(path: &Path, key: &[u8; HASH], image: &Image) -> io::Result<()> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let directory = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    make(directory)?;
    let mut file = Vec::with_capacity(HEADER + image.bytes.len() + image.log.len() + HASH);
    file.extend(MAGIC);
    file.extend(key);
    for part in [image.bytes.len(), image.log.len()] {
        file.extend((part as u64).to_le_bytes());
    }
    file.extend(&image.bytes);
    file.extend(image.log.as_bytes());
    let hash = blake3::hash(&file);
    file.extend(hash.as_bytes());
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let beside = directory.join(format!(".{}-{number}.part", std::process::id()));
    let written = fs::write(&beside, file).and_then(|()| fs::rename(&beside, path));
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written
}

/// The driver runs what lies here, so others may not write to it.
fn make(directory: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(directory)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::Error;
    use crate::compile::Source;

    static SOURCE: Source = Source { name: "a.cu", text: "text", headers: &[("b.cuh", "header")] };

    fn variant() -> Variant {
        Variant { source: &SOURCE, kernel: "k", defines: vec![("A", "1".into())] }
    }

    /// Counts what it compiles; the image says what was asked for.
    struct Fake {
        version: Result<[u32; 2]>,
        compiled: Mutex<usize>,
    }

    impl Fake {
        fn new(version: Result<[u32; 2]>) -> Self {
            Self { version, compiled: Mutex::new(0) }
        }

        fn compiled(&self) -> usize {
            *self.compiled.lock().unwrap()
        }
    }

    impl Compiler for Fake {
        fn version(&self) -> Result<[u32; 2]> {
            self.version.clone()
        }

        fn compile(&self, variant: &Variant, architecture: Architecture, form: Form) -> Result<Image> {
            let version = self.version()?;
            *self.compiled.lock().unwrap() += 1;
            Ok(Image {
                bytes: format!("{variant} {architecture} {form:?} {version:?}").into_bytes(),
                log: "log".into(),
            })
        }
    }

    fn files(directory: &Path) -> Vec<PathBuf> {
        let mut all: Vec<_> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
        all.sort();
        all
    }

    fn get(cache: &ImageCache, compiler: &Fake) -> Image {
        cache.image(compiler, &variant(), Architecture::Sm80, Form::Cubin).unwrap()
    }

    #[test]
    fn an_image_is_compiled_once() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("made/when/needed");
        let compiler = Fake::new(Ok([13, 0]));
        let first = get(&ImageCache::at(&directory), &compiler);
        assert_eq!(get(&ImageCache::at(&directory), &compiler), first);
        assert_eq!((compiler.compiled(), first.log.as_str()), (1, "log"));
        // Nothing half-written stays behind.
        assert_eq!(files(&directory).len(), 1);
        let without = ImageCache::none();
        assert_eq!(get(&without, &compiler), first);
        assert_eq!(get(&without, &compiler), first);
        assert_eq!(compiler.compiled(), 3);
    }

    #[test]
    fn whatever_differs_is_another_image() {
        static OTHER_NAME: Source = Source { name: "c.cu", ..SOURCE };
        static OTHER_TEXT: Source = Source { text: "texts", ..SOURCE };
        static OTHER_HEADER: Source = Source { headers: &[("b.cuh", "other")], ..SOURCE };
        static NO_HEADER: Source = Source { headers: &[], ..SOURCE };
        let base = variant();
        let of = |variant: &Variant| key(variant, Architecture::Sm80, Form::Cubin);
        let mut keys = vec![
            of(&base),
            key(&base, Architecture::Sm86, Form::Cubin),
            key(&base, Architecture::Sm80, Form::Ptx),
            of(&Variant { kernel: "l", ..base.clone() }),
            of(&Variant { defines: vec![("A", "2".into())], ..base.clone() }),
            of(&Variant { defines: vec![("A1", String::new())], ..base.clone() }),
            of(&Variant { defines: Vec::new(), ..base.clone() }),
        ];
        keys.extend(
            [&OTHER_NAME, &OTHER_TEXT, &OTHER_HEADER, &NO_HEADER]
                .map(|source| of(&Variant { source, ..base.clone() })),
        );
        let count = keys.len();
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), count);

        let root = tempfile::tempdir().unwrap();
        let cache = ImageCache::at(root.path());
        for version in [[13, 0], [12, 9], [13, 1]] {
            let compiler = Fake::new(Ok(version));
            let text = String::from_utf8(get(&cache, &compiler).bytes).unwrap();
            assert!(text.ends_with(&format!("{version:?}")));
            assert_eq!(compiler.compiled(), 1);
        }
        assert_eq!(files(root.path()).len(), 3);
    }

    #[test]
    fn what_is_damaged_is_made_anew() {
        let root = tempfile::tempdir().unwrap();
        let cache = ImageCache::at(root.path());
        let compiler = Fake::new(Ok([13, 0]));
        let image = get(&cache, &compiler);
        let path = files(root.path()).remove(0);
        let whole = fs::read(&path).unwrap();
        let mut damages: Vec<Vec<u8>> = (0..whole.len()).map(|length| whole[..length].to_vec()).collect();
        damages.extend((0..whole.len()).map(|at| {
            let mut other = whole.clone();
            other[at] ^= 0x10;
            other
        }));
        damages.push([&whole[..], b"more"].concat());
        for (i, damaged) in damages.iter().enumerate() {
            fs::write(&path, damaged).unwrap();
            assert_eq!(get(&cache, &compiler), image, "{i}");
            assert_eq!(compiler.compiled(), i + 2, "{i}");
            assert_eq!(fs::read(&path).unwrap(), whole, "{i}");
        }
        // A sound file in another's place is none either.
        let other = Variant { kernel: "other", ..variant() };
        cache.image(&compiler, &other, Architecture::Sm80, Form::Cubin).unwrap();
        let its = files(root.path()).into_iter().find(|p| *p != path).unwrap();
        fs::copy(its, &path).unwrap();
        assert_eq!(get(&cache, &compiler), image);
    }

    #[test]
    fn lengths_that_a_sound_hash_covers_are_still_looked_at() {
        let root = tempfile::tempdir().unwrap();
        let cache = ImageCache::at(root.path());
        let compiler = Fake::new(Ok([13, 0]));
        get(&cache, &compiler);
        let path = files(root.path()).remove(0);
        let whole = fs::read(&path).unwrap();
        for length in [0, 1, u64::MAX, u64::MAX - 7] {
            for at in [HEADER - 16, HEADER - 8] {
                let mut other = whole[..whole.len() - HASH].to_vec();
                other[at..at + 8].copy_from_slice(&length.to_le_bytes());
                let hash = blake3::hash(&other);
                other.extend(hash.as_bytes());
                fs::write(&path, other).unwrap();
                assert_eq!(read(&path, &key(&variant(), Architecture::Sm80, Form::Cubin)), None);
            }
        }
    }

    #[test]
    fn without_a_compiler_the_newest_sound_image_is_taken() {
        let root = tempfile::tempdir().unwrap();
        let cache = ImageCache::at(root.path());
        let missing = Fake::new(Err(Error::NvrtcMissing));
        let ask = || cache.image(&missing, &variant(), Architecture::Sm80, Form::Cubin);
        assert_eq!(ask(), Err(Error::NvrtcMissing));
        for version in [[12, 9], [13, 0], [12, 10]] {
            get(&cache, &Fake::new(Ok(version)));
        }
        let text = |image: Image| String::from_utf8(image.bytes).unwrap();
        assert!(text(ask().unwrap()).ends_with("[13, 0]"));
        let newest = files(root.path()).into_iter().find(|p| p.to_string_lossy().contains("13.0")).unwrap();
        fs::write(newest, "damaged").unwrap();
        assert!(text(ask().unwrap()).ends_with("[12, 10]"));
        // Another architecture's is none.
        let other = cache.image(&missing, &variant(), Architecture::Sm90, Form::Cubin);
        assert_eq!(other, Err(Error::NvrtcMissing));
    }

    #[test]
    fn where_nothing_can_be_kept_there_still_is_an_image() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("file");
        fs::write(&file, "").unwrap();
        let cache = ImageCache::at(file.join("below"));
        let compiler = Fake::new(Ok([13, 0]));
        assert_eq!(get(&cache, &compiler), get(&cache, &compiler));
        assert_eq!(compiler.compiled(), 2);
    }

    #[test]
    fn many_threads_leave_one_sound_file() {
        let root = tempfile::tempdir().unwrap();
        let cache = ImageCache::at(root.path());
        let compiler = Fake::new(Ok([13, 0]));
        let images = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| get(&cache, &compiler))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        assert!(images.iter().all(|image| *image == images[0]));
        assert_eq!(files(root.path()).len(), 1);
    }

    #[test]
    #[cfg(not(windows))]
    fn the_environment_names_the_directory() {
        let by = |set: &[(&str, &str)]| {
            directory_by(|name| set.iter().find(|(n, _)| *n == name).map(|(_, value)| OsString::from(value)))
        };
        let home = ("HOME", "/home/a");
        assert_eq!(by(&[home]), Some("/home/a/.cache/quant/cuda".into()));
        assert_eq!(by(&[home, ("XDG_CACHE_HOME", "/c")]), Some("/c/quant/cuda".into()));
        // As that specification has it, paths that are not absolute are not looked at.
        assert_eq!(by(&[home, ("XDG_CACHE_HOME", "c")]), Some("/home/a/.cache/quant/cuda".into()));
        assert_eq!(by(&[home, (DIRECTORY, "here")]), Some("here".into()));
        assert_eq!(by(&[home, (DIRECTORY, "")]), None);
        assert_eq!(by(&[]), None);
    }
}
