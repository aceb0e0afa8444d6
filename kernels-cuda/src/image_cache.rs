//! A cache of compiled kernels on disk.
//!
//! An image is found by a hash of everything that determines it, and the version of the compiler. Several programs can
//! share a directory. Damaged files are compiled again.
//!
//! Images of any compiler are accepted if there is no compiler, if it rejects the source, or if the directory contains
//! a file [`ANY_COMPILER`]. So a directory that was filled on one machine can be used on others.

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::Result;
use crate::compile::{self, Form, GpuArchitecture, Image, Variant};

/// The environment variable that names the directory. If it is empty, nothing is cached.
pub const CACHE_DIRECTORY: &str = "QUANT_CUDA_CACHE";

/// If the cache directory contains a file with this name, cached images of any compiler version are used. So the images
/// that run are those that were shipped and tested.
pub const ANY_COMPILER: &str = "any-compiler";

const HEAD: &[u8; 8] = b"QUANTCU1";
const HASH: usize = 32;

/// A compiler that generates images.
pub trait Compiler {
    /// The compiler's version, major and minor, which distinguishes its images from those of other versions.
    ///
    /// # Errors
    /// When there is no compiler.
    fn version(&self) -> Result<[u32; 2]>;

    /// Compiles a variant.
    ///
    /// # Errors
    /// When there is no compiler, or it rejects the source.
    fn compile(&self, variant: &Variant, architecture: GpuArchitecture, form: Form) -> Result<Image>;
}

/// The run-time compiler of CUDA.
#[derive(Debug, Clone, Copy, Default)]
pub struct Nvrtc;

impl Compiler for Nvrtc {
    fn version(&self) -> Result<[u32; 2]> {
        compile::compiler_version()
    }

    fn compile(&self, variant: &Variant, architecture: GpuArchitecture, form: Form) -> Result<Image> {
        compile::compile(variant, architecture, form)
    }
}

/// A cache of images in a directory.
#[derive(Debug, Clone)]
pub struct ImageCache<C = Nvrtc> {
    directory: Option<PathBuf>,
    compiler: C,
}

impl ImageCache {
    /// Creates a cache of images of the run-time compiler, in [`default_directory`].
    pub fn new() -> Self {
        Self::in_directory(default_directory(), Nvrtc)
    }
}

impl Default for ImageCache {
    fn default() -> Self {
        Self::new()
    }
}

impl<C: Compiler> ImageCache<C> {
    /// Creates a cache in a directory, which need not exist. Without a directory, every image is compiled.
    pub fn in_directory(directory: Option<PathBuf>, compiler: C) -> Self {
        Self { directory, compiler }
    }

    /// Returns the image of a variant: read from the directory, or compiled and stored.
    ///
    /// # Errors
    /// When the compiler fails, and the directory has no image of this variant from a different compiler version.
    pub fn image(&self, variant: &Variant, architecture: GpuArchitecture, form: Form) -> Result<Image> {
        let Some(directory) = &self.directory else {
            return self.compiler.compile(variant, architecture, form);
        };
        let key = key(variant, architecture, form);
        let version = match self.compiler.version() {
            Ok(version) => version,
            Err(e) => return newest(directory, &key).ok_or(e),
        };
        let path = directory.join(file_name(&key, version));
        let found = load(&path).or_else(|| match directory.join(ANY_COMPILER).exists() {
            true => newest(directory, &key),
            false => None,
        });
        if let Some(image) = found {
            return Ok(image);
        }
        let image = match self.compiler.compile(variant, architecture, form) {
            Ok(image) => image,
            // For example, an older compiler may not know the architecture.
            Err(e) => return newest(directory, &key).ok_or(e),
        };
        // The image is usable even if it cannot be stored.
        let _ = store(&path, &encode(&image));
        Ok(image)
    }
}

/// The default directory of images: `QUANT_CUDA_CACHE`, or `quant/cuda` in the user's cache directory; `None` if that
/// variable is empty, or there is no cache directory.
pub fn default_directory() -> Option<PathBuf> {
    directory_of(|name| std::env::var_os(name))
}

fn directory_of(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    if let Some(own) = variable(CACHE_DIRECTORY) {
        return (!own.is_empty()).then(|| own.into());
    }
    // The XDG base directory specification says to ignore relative paths.
    let absolute = |name| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let caches = absolute("XDG_CACHE_HOME")
        .or_else(|| absolute("LOCALAPPDATA"))
        .or_else(|| absolute("HOME").map(|home| home.join(".cache")))?;
    Some(caches.join("quant").join("cuda"))
}

/// Hashes everything that determines an image except the compiler. Lengths are included, so that a text cannot be
/// divided differently.
fn key(variant: &Variant, architecture: GpuArchitecture, form: Form) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    let mut add = |text: &str| {
        hasher.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
    };
    add(env!("CARGO_PKG_VERSION"));
    add(&architecture.to_string());
    add(match form {
        Form::Ptx => "ptx",
        Form::Cubin => "cubin",
    });
    let options = compile::options(architecture, form);
    add(&options.len().to_string());
    options.iter().for_each(|option| add(option));
    add(variant.source.name);
    add(variant.source.text);
    add(&variant.source.headers.len().to_string());
    for (name, text) in variant.source.headers {
        add(name);
        add(text);
    }
    add(variant.kernel);
    for (name, value) in &variant.defines {
        add(name);
        add(value);
    }
    hasher.finalize()
}

fn file_name(key: &blake3::Hash, [major, minor]: [u32; 2]) -> String {
    format!("{}-{major}.{minor}.image", key.to_hex())
}

fn load(path: &Path) -> Option<Image> {
    decode(&std::fs::read(path).ok()?)
}

/// Returns the undamaged image of the newest compiler, if there is one.
fn newest(directory: &Path, key: &blake3::Hash) -> Option<Image> {
    let stem = format!("{}-", key.to_hex());
    let version = |path: &Path| -> Option<[u32; 2]> {
        let name = path.file_name()?.to_str()?;
        let (major, minor) = name.strip_prefix(&stem)?.strip_suffix(".image")?.split_once('.')?;
        Some([major.parse().ok()?, minor.parse().ok()?])
    };
    let files = std::fs::read_dir(directory).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let mut found: Vec<_> = files.filter_map(|path| Some((version(&path)?, path))).collect();
    found.sort();
    found.iter().rev().find_map(|(_, path)| load(path))
}

/// Head, length of the log, log, image, and a hash of all these.
fn encode(image: &Image) -> Vec<u8> {
    let mut out = HEAD.to_vec();
    out.extend((image.log.len() as u64).to_le_bytes());
    out.extend(image.log.as_bytes());
    out.extend(&image.bytes);
    let hash = blake3::hash(&out);
    out.extend(hash.as_bytes());
    out
}

/// Decodes a file; `None` if it is damaged.
fn decode(file: &[u8]) -> Option<Image> {
    let (body, hash) = file.split_at_checked(file.len().checked_sub(HASH)?)?;
    if blake3::hash(body).as_bytes() != hash {
        return None;
    }
    let rest = body.strip_prefix(HEAD)?;
    let (len, rest) = rest.split_first_chunk::<8>()?;
    let (log, bytes) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
    Some(Image { log: String::from_utf8(log.to_vec()).ok()?, bytes: bytes.to_vec() })
}

/// Other programs must not see a part of a file.
fn store(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let directory = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(directory)?;
    let own = format!(".{}-{}.part", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let part = directory.join(own);
    let written = std::fs::File::create(&part)
        .and_then(|mut file| file.write_all(bytes))
        .and_then(|()| std::fs::rename(&part, path));
    if written.is_err() {
        let _ = std::fs::remove_file(&part);
    }
    written
}

impl<C: Compiler> Compiler for &C {
    fn version(&self) -> Result<[u32; 2]> {
        (**self).version()
    }

    fn compile(&self, variant: &Variant, architecture: GpuArchitecture, form: Form) -> Result<Image> {
        (**self).compile(variant, architecture, form)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::Error;
    use crate::compile::Source;

    static SOURCE: Source = Source { name: "a.cu", text: "text", headers: &[("b.cuh", "head")] };
    static OTHER: Source = Source { name: "a.cu", text: "text", headers: &[("b.cuh", "heads")] };
    /// The text and the header, joined, are those of `SOURCE`.
    static SHIFTED: Source = Source { name: "a.cu", text: "textb", headers: &[(".cuh", "head")] };

    struct Fake {
        version: [u32; 2],
        compiled: Cell<usize>,
        fails: bool,
        refuses: bool,
    }

    impl Fake {
        fn new(version: [u32; 2]) -> Self {
            Self { version, compiled: Cell::new(0), fails: false, refuses: false }
        }
    }

    impl Compiler for Fake {
        fn version(&self) -> Result<[u32; 2]> {
            if self.fails { Err(Error::NvrtcMissing) } else { Ok(self.version) }
        }

        fn compile(&self, variant: &Variant, architecture: GpuArchitecture, form: Form) -> Result<Image> {
            if self.refuses {
                let log = "no such architecture".into();
                return Err(Error::Compile { variant: variant.to_string(), architecture, log });
            }
            self.compiled.set(self.compiled.get() + 1);
            let bytes = format!("{variant} {architecture} {form:?} {}", variant.source.text).into_bytes();
            Ok(Image { bytes, log: format!("log of {:?}", self.version) })
        }
    }

    fn variant(value: &str) -> Variant {
        Variant { source: &SOURCE, kernel: "k", defines: vec![("A", value.into())] }
    }

    const SM: GpuArchitecture = GpuArchitecture::Sm80;

    #[test]
    fn an_image_is_compiled_once() {
        let dir = tempfile::tempdir().unwrap();
        let (fake, at) = (Fake::new([13, 0]), dir.path().join("deep/er"));
        let cache = ImageCache::in_directory(Some(at.clone()), &fake);
        let first = cache.image(&variant("1"), SM, Form::Cubin).unwrap();
        assert_eq!(cache.image(&variant("1"), SM, Form::Cubin).unwrap(), first);
        assert_eq!(fake.compiled.get(), 1);
        let again = ImageCache::in_directory(Some(at.clone()), &fake);
        assert_eq!(again.image(&variant("1"), SM, Form::Cubin).unwrap(), first);
        assert_eq!(fake.compiled.get(), 1);
        let names: Vec<_> = std::fs::read_dir(&at).unwrap().map(|f| f.unwrap().file_name()).collect();
        assert!(names.len() == 1 && names[0].to_str().unwrap().ends_with(".image"), "{names:?}");
    }

    #[test]
    fn images_differ_in_whatever_they_depend_on() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (Fake::new([13, 0]), Fake::new([13, 1]));
        let cache = ImageCache::in_directory(Some(dir.path().into()), &one);
        let newer = ImageCache::in_directory(Some(dir.path().into()), &two);
        let base = variant("1");
        let images = [
            cache.image(&base, SM, Form::Cubin),
            cache.image(&variant("2"), SM, Form::Cubin),
            cache.image(&Variant { kernel: "l", ..base.clone() }, SM, Form::Cubin),
            cache.image(&Variant { defines: Vec::new(), ..base.clone() }, SM, Form::Cubin),
            cache.image(&Variant { source: &OTHER, ..base.clone() }, SM, Form::Cubin),
            cache.image(&Variant { source: &SHIFTED, ..base.clone() }, SM, Form::Cubin),
            cache.image(&base, GpuArchitecture::Sm90, Form::Cubin),
            cache.image(&base, SM, Form::Ptx),
            newer.image(&base, SM, Form::Cubin),
        ];
        assert!(images.iter().all(Result::is_ok));
        assert_eq!((one.compiled.get(), two.compiled.get()), (8, 1));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 9);
    }

    #[test]
    fn what_is_damaged_is_compiled_again() {
        let dir = tempfile::tempdir().unwrap();
        let fake = Fake::new([13, 0]);
        let cache = ImageCache::in_directory(Some(dir.path().into()), &fake);
        let image = cache.image(&variant("1"), SM, Form::Cubin).unwrap();
        let file = std::fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap().path();
        let whole = std::fs::read(&file).unwrap();
        let mut damaged: Vec<Vec<u8>> = [0, 1, 8, 40, whole.len() - 1].map(|n| whole[..n].to_vec()).into();
        for at in [0, 9, 20, whole.len() - 1] {
            let mut one = whole.clone();
            one[at] ^= 1;
            damaged.push(one);
        }
        damaged.push([&whole[..], b"more"].concat());
        for (i, bytes) in damaged.iter().enumerate() {
            std::fs::write(&file, bytes).unwrap();
            assert_eq!(cache.image(&variant("1"), SM, Form::Cubin).unwrap(), image);
            assert_eq!(fake.compiled.get(), i + 2);
            assert_eq!(std::fs::read(&file).unwrap(), whole);
        }
    }

    #[test]
    fn lengths_beyond_a_file_are_no_image() {
        let mut file = HEAD.to_vec();
        file.extend(u64::MAX.to_le_bytes());
        let hash = blake3::hash(&file);
        file.extend(hash.as_bytes());
        assert_eq!(decode(&file), None);
        let image = Image { bytes: vec![0, 255, 7], log: "ä".into() };
        assert_eq!(decode(&encode(&image)), Some(image));
    }

    #[test]
    fn a_directory_that_cannot_be_written_costs_time_only() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        let fake = Fake::new([13, 0]);
        for directory in [Some(file.join("below a file")), None] {
            let cache = ImageCache::in_directory(directory, &fake);
            let first = cache.image(&variant("1"), SM, Form::Ptx).unwrap();
            assert_eq!(cache.image(&variant("1"), SM, Form::Ptx).unwrap(), first);
        }
        assert_eq!(fake.compiled.get(), 4);
    }

    #[test]
    fn a_missing_compiler_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let fake = Fake { fails: true, ..Fake::new([13, 0]) };
        let cache = ImageCache::in_directory(Some(dir.path().into()), &fake);
        assert_eq!(cache.image(&variant("1"), SM, Form::Ptx), Err(Error::NvrtcMissing));
    }

    #[test]
    fn without_a_compiler_the_newest_valid_image_is_taken() {
        let dir = tempfile::tempdir().unwrap();
        for version in [[12, 9], [13, 0], [12, 10]] {
            let cache = ImageCache::in_directory(Some(dir.path().into()), Fake::new(version));
            cache.image(&variant("1"), SM, Form::Cubin).unwrap();
        }
        let missing = Fake { fails: true, ..Fake::new([13, 0]) };
        let cache = ImageCache::in_directory(Some(dir.path().into()), &missing);
        let log = || cache.image(&variant("1"), SM, Form::Cubin).map(|image| image.log);
        assert_eq!(log(), Ok("log of [13, 0]".into()));
        let newest = dir.path().join(file_name(&key(&variant("1"), SM, Form::Cubin), [13, 0]));
        std::fs::write(newest, "damaged").unwrap();
        assert_eq!(log(), Ok("log of [12, 10]".into()));
        assert_eq!(cache.image(&variant("2"), SM, Form::Cubin), Err(Error::NvrtcMissing));
        assert_eq!(cache.image(&variant("1"), GpuArchitecture::Sm86, Form::Cubin), Err(Error::NvrtcMissing));
        assert_eq!(cache.image(&variant("1"), SM, Form::Ptx), Err(Error::NvrtcMissing));
        assert_eq!(missing.compiled.get(), 0);
        // As if there were no compiler.
        let old =
            ImageCache::in_directory(Some(dir.path().into()), Fake { refuses: true, ..Fake::new([12, 0]) });
        assert_eq!(old.image(&variant("1"), SM, Form::Cubin).unwrap().log, "log of [12, 10]");
        assert!(matches!(old.image(&variant("2"), SM, Form::Cubin), Err(Error::Compile { .. })));
    }

    #[test]
    fn images_that_are_shipped_are_taken_whatever_compiler_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let at = Some(dir.path().to_path_buf());
        let (shipped, own) = (Fake::new([13, 0]), Fake::new([12, 8]));
        ImageCache::in_directory(at.clone(), &shipped).image(&variant("1"), SM, Form::Cubin).unwrap();
        std::fs::write(dir.path().join(ANY_COMPILER), "").unwrap();
        let cache = ImageCache::in_directory(at, &own);
        assert_eq!(cache.image(&variant("1"), SM, Form::Cubin).unwrap().log, "log of [13, 0]");
        assert_eq!(own.compiled.get(), 0);
        assert_eq!(cache.image(&variant("2"), SM, Form::Cubin).unwrap().log, "log of [12, 8]");
        std::fs::remove_file(dir.path().join(ANY_COMPILER)).unwrap();
        assert_eq!(cache.image(&variant("1"), SM, Form::Cubin).unwrap().log, "log of [12, 8]");
    }

    #[test]
    fn threads_may_share_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let cache = ImageCache::in_directory(Some(dir.path().into()), Fake::new([13, 0]));
                    for i in 0..20 {
                        let image = cache.image(&variant(&(i % 5).to_string()), SM, Form::Ptx).unwrap();
                        assert!(String::from_utf8(image.bytes).unwrap().contains(&format!("A={}", i % 5)));
                    }
                });
            }
        });
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 5);
    }

    #[test]
    fn the_directory_is_the_first_that_is_named() {
        let of = |pairs: &[(&str, &str)]| {
            let pairs: Vec<(String, OsString)> =
                pairs.iter().map(|(n, v)| ((*n).into(), (*v).into())).collect();
            directory_of(|name| pairs.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone()))
        };
        let root = if cfg!(windows) { "C:\\" } else { "/" };
        let (own, xdg, home) = (format!("{root}own"), format!("{root}xdg"), format!("{root}home"));
        let all = [(CACHE_DIRECTORY, own.as_str()), ("XDG_CACHE_HOME", &xdg), ("HOME", &home)];
        assert_eq!(of(&all), Some(PathBuf::from(&own)));
        assert_eq!(of(&all[1..]), Some(Path::new(&xdg).join("quant/cuda")));
        assert_eq!(of(&all[2..]), Some(Path::new(&home).join(".cache/quant/cuda")));
        assert_eq!(of(&[("XDG_CACHE_HOME", "relative"), all[2]]), of(&all[2..]));
        assert_eq!(of(&[(CACHE_DIRECTORY, ""), all[2]]), None);
        assert_eq!(of(&[]), None);
    }
}
