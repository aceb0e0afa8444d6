//! A device, and the kernels that were loaded for it: from a variant to a launch on the caller's stream.
//!
//! [`Device::kernel`] compiles or finds, and loads, a variant when it is first asked for; that takes from a millisecond to a
//! second. [`Kernel::launch`] takes addresses and a stream as numbers, from whatever framework they come; it allocates
//! nothing, waits for nothing, and may be captured in a graph once its kernel was asked for.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::compile::{Architecture, Form, Variant};
use crate::driver::{Cuda, Driver, Handle};
use crate::image_cache::{Compiler, ImageCache, RunTimeCompiler};
use crate::launch::{Argument, LaunchShape};
use crate::{Error, Result};

pub use crate::driver::Properties;

/// The most arguments of a kernel.
pub const MAX_ARGUMENTS: usize = 40;
/// Bytes of shared memory that a kernel may have without asking for them.
const SHARED_UNASKED: u32 = 48 * 1024;
/// Threads of a block, and blocks of a grid, on every device.
const MAX_BLOCK: u32 = 1024;
const MAX_GRID: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];

/// A stream of the caller's, `CUstream` or `cudaStream_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream(usize);

impl Stream {
    /// The default one.
    pub const DEFAULT: Self = Self(0);

    /// That of another framework: what candle's `cu_stream()` or torch's `cuda_stream` give.
    pub fn from_raw(stream: *mut c_void) -> Self {
        Self(stream as usize)
    }
}

/// A device in a context that belongs to the caller.
pub struct Device {
    driver: Arc<dyn Driver>,
    compiler: Box<dyn Compiler>,
    cache: ImageCache,
    properties: Properties,
    architecture: Architecture,
    kernels: Mutex<HashMap<Variant, Slot>>,
}

/// Threads that ask for the same kernel wait for one of them.
type Slot = Arc<Mutex<Option<Kernel>>>;

impl Device {
    /// That of the context which is current in this thread.
    ///
    /// # Errors
    /// When there is no driver or no context, or the device is older than all kernels.
    ///
    /// # Safety
    /// The context must exist for as long as the device and its kernels do. A primary context does, which is what
    /// frameworks use.
    pub unsafe fn of_this_thread(cache: ImageCache) -> Result<Self> {
        Self::new(Arc::new(Cuda::of_this_thread()?), Box::new(RunTimeCompiler), cache)
    }

    fn new(driver: Arc<dyn Driver>, compiler: Box<dyn Compiler>, cache: ImageCache) -> Result<Self> {
        let properties = driver.properties()?;
        let [major, minor] = properties.capability;
        let architecture = Architecture::of_device(major, minor).ok_or(Error::TooOld { major, minor })?;
        Ok(Self { driver, compiler, cache, properties, architecture, kernels: Mutex::default() })
    }

    /// What plans depend on.
    pub fn properties(&self) -> Properties {
        self.properties
    }

    /// What kernels are compiled for.
    pub fn architecture(&self) -> Architecture {
        self.architecture
    }

    /// The form in which the device takes kernels: machine code, or what the driver compiles for a device newer than these.
    pub fn form(&self) -> Form {
        let [major, minor] = self.properties.capability;
        if self.architecture.runs_on(major, minor) { Form::Cubin } else { Form::Ptx }
    }

    /// A kernel, loaded. Another call for the same variant gives the same one.
    ///
    /// # Errors
    /// When it cannot be compiled or loaded; the next call tries again.
    pub fn kernel(&self, variant: &Variant) -> Result<Kernel> {
        let slot = {
            let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
            match kernels.get(variant) {
                Some(slot) => Arc::clone(slot),
                None => Arc::clone(kernels.entry(variant.clone()).or_default()),
            }
        };
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = &*slot {
            return Ok(kernel.clone());
        }
        let kernel = self.load(variant)?;
        *slot = Some(kernel.clone());
        Ok(kernel)
    }

    fn load(&self, variant: &Variant) -> Result<Kernel> {
        let form = self.form();
        let mut image = self.cache.image(&*self.compiler, variant, self.architecture, form)?.bytes;
        if form == Form::Ptx {
            image.push(0);
        }
        let failed = |e: Error| Error::Load {
            variant: variant.to_string(),
            architecture: self.architecture,
            reason: e.to_string(),
        };
        let module = self.driver.load(&image).map_err(failed)?;
        let mut loaded = Loaded {
            driver: Arc::clone(&self.driver),
            module,
            function: 0,
            name: variant.kernel,
            most_shared: self.properties.shared_of_block,
            allowed: AtomicU32::new(SHARED_UNASKED),
            allowing: Mutex::default(),
        };
        let name = CString::new(variant.kernel).map_err(|e| {
            failed(Error::Driver { action: "find a kernel in its image", reason: e.to_string() })
        })?;
        loaded.function = self.driver.function(module, &name).map_err(failed)?;
        Ok(Kernel(Arc::new(loaded)))
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = (&self.architecture, &self.properties);
        f.debug_struct("Device").field("architecture", of.0).field("properties", of.1).finish_non_exhaustive()
    }
}

/// A kernel that was loaded. Copies are the same kernel, which is unloaded when the device and all copies are gone.
#[derive(Clone)]
pub struct Kernel(Arc<Loaded>);

struct Loaded {
    driver: Arc<dyn Driver>,
    module: Handle,
    function: Handle,
    name: &'static str,
    most_shared: u32,
    /// Bytes of dynamic shared memory that it may have.
    allowed: AtomicU32,
    /// Held while the driver is asked for more.
    allowing: Mutex<()>,
}

impl Drop for Loaded {
    fn drop(&mut self) {
        self.driver.unload(self.module);
    }
}

impl Kernel {
    /// Launches it. Nothing is launched where a number of blocks is 0.
    ///
    /// # Errors
    /// When a number is more than devices have, or the driver refuses.
    ///
    /// # Safety
    /// Arguments are those of the kernel, in its order; what they point to is there, and used by nobody else in a way that
    /// the stream does not order, until the stream has run the launch. The kernel and the context exist until then too. The
    /// stream is one of the context's.
    pub unsafe fn launch(&self, shape: &LaunchShape, arguments: &[Argument], stream: Stream) -> Result<()> {
        let kernel = &*self.0;
        kernel.check(shape, arguments.len())?;
        if shape.grid.contains(&0) || shape.block == 0 {
            return Ok(());
        }
        kernel.allow(shape.shared_bytes)?;
        let mut values = pack(arguments);
        let mut pointers = [ptr::null_mut(); MAX_ARGUMENTS];
        for (pointer, value) in pointers.iter_mut().zip(&mut values) {
            *pointer = ptr::from_mut(value).cast();
        }
        let pointers = &mut pointers[..arguments.len()];
        // SAFETY: there is an 8-byte place for each argument, with its value in the first bytes; the rest is as the caller says.
        unsafe { kernel.driver.launch(kernel.function, shape, stream.0 as *mut c_void, pointers) }
    }

    /// The kernel's name.
    pub fn name(&self) -> &'static str {
        self.0.name
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Kernel").field(&self.name()).finish()
    }
}

impl Loaded {
    fn check(&self, shape: &LaunchShape, arguments: usize) -> Result<()> {
        let [x, y, z] = shape.grid;
        let numbers = [
            ("the first number of blocks", x, MAX_GRID[0]),
            ("the second number of blocks", y, MAX_GRID[1]),
            ("the third number of blocks", z, MAX_GRID[2]),
            ("the number of threads of a block", shape.block, MAX_BLOCK),
            ("a block's shared memory in bytes", shape.shared_bytes, self.most_shared),
            ("the number of arguments", u32::try_from(arguments).unwrap_or(u32::MAX), MAX_ARGUMENTS as u32),
        ];
        match numbers.into_iter().find(|&(_, got, limit)| got > limit) {
            None => Ok(()),
            Some((what, got, limit)) => Err(Error::Launch {
                kernel: self.name.to_owned(),
                what,
                got: got.into(),
                limit: limit.into(),
            }),
        }
    }

    /// Asks the driver where a launch takes more than all before it did.
    fn allow(&self, bytes: u32) -> Result<()> {
        if bytes <= self.allowed.load(Ordering::Acquire) {
            return Ok(());
        }
        let _held = self.allowing.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes > self.allowed.load(Ordering::Acquire) {
            self.driver.allow_shared(self.function, bytes)?;
            self.allowed.store(bytes, Ordering::Release);
        }
        Ok(())
    }
}

/// Each argument's bytes, first in a place of 8.
fn pack(arguments: &[Argument]) -> [u64; MAX_ARGUMENTS] {
    let half = |[a, b, c, d]: [u8; 4]| u64::from_ne_bytes([a, b, c, d, 0, 0, 0, 0]);
    let mut values = [0; MAX_ARGUMENTS];
    for (value, argument) in values.iter_mut().zip(arguments) {
        *value = match *argument {
            Argument::U64(number) => number,
            Argument::U32(number) => half(number.to_ne_bytes()),
            Argument::F32(number) => half(number.to_ne_bytes()),
        };
    }
    values
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;
    use crate::compile::{Image, Source};

    static SOURCE: Source = Source { name: "a.cu", text: "", headers: &[] };

    fn variant(value: &str) -> Variant {
        Variant { source: &SOURCE, kernel: "k", defines: vec![("A", value.into())] }
    }

    #[derive(Debug, Clone, PartialEq)]
    enum Call {
        Load(Vec<u8>),
        Allow(Handle, u32),
        /// Function, shape, stream, and 8 bytes of each parameter.
        Launch(Handle, LaunchShape, usize, Vec<u64>),
        Unload(Handle),
    }

    /// Notes what it is asked for; modules are numbered from 1, a function's number is ten times its module's.
    struct Fake {
        properties: Properties,
        calls: Mutex<Vec<Call>>,
        modules: AtomicU32,
        refuses: Option<&'static str>,
    }

    impl Fake {
        fn note(&self, call: Call) {
            self.calls.lock().unwrap().push(call);
        }

        fn refuse(&self, action: &'static str) -> Result<()> {
            match self.refuses {
                Some(refused) if refused == action => Err(Error::Driver { action, reason: "no".into() }),
                _ => Ok(()),
            }
        }
    }

    impl Driver for Fake {
        fn properties(&self) -> Result<Properties> {
            Ok(self.properties)
        }

        fn load(&self, image: &[u8]) -> Result<Handle> {
            self.refuse("load")?;
            self.note(Call::Load(image.to_vec()));
            Ok(self.modules.fetch_add(1, Ordering::Relaxed) as Handle + 1)
        }

        fn function(&self, module: Handle, name: &CStr) -> Result<Handle> {
            self.refuse("function")?;
            assert_eq!(name, c"k");
            Ok(10 * module)
        }

        fn allow_shared(&self, function: Handle, bytes: u32) -> Result<()> {
            self.refuse("allow")?;
            self.note(Call::Allow(function, bytes));
            Ok(())
        }

        unsafe fn launch(
            &self,
            function: Handle,
            shape: &LaunchShape,
            stream: *mut c_void,
            parameters: &mut [*mut c_void],
        ) -> Result<()> {
            self.refuse("launch")?;
            // SAFETY: `Kernel::launch` points to 8 bytes for each.
            let values = parameters.iter().map(|p| unsafe { p.cast::<u64>().read() }).collect();
            self.note(Call::Launch(function, *shape, stream as usize, values));
            Ok(())
        }

        fn unload(&self, module: Handle) {
            self.note(Call::Unload(module));
        }
    }

    struct Text;

    impl Compiler for Text {
        fn version(&self) -> Result<[u32; 2]> {
            Ok([13, 0])
        }

        fn compile(&self, variant: &Variant, architecture: Architecture, form: Form) -> Result<Image> {
            if variant.defines[0].1 == "bad" {
                return Err(Error::NvrtcMissing);
            }
            Ok(Image { bytes: format!("{variant} {architecture} {form:?}").into_bytes(), log: String::new() })
        }
    }

    fn fake(capability: [u32; 2], refuses: Option<&'static str>) -> (Arc<Fake>, Result<Device>) {
        let properties = Properties {
            capability,
            multiprocessors: 100,
            shared_of_block: 100_000,
            shared_of_multiprocessor: 101_024,
        };
        let driver =
            Arc::new(Fake { properties, calls: Mutex::default(), modules: AtomicU32::new(0), refuses });
        let device = Device::new(driver.clone(), Box::new(Text), ImageCache::none());
        (driver, device)
    }

    fn calls(driver: &Fake) -> Vec<Call> {
        std::mem::take(&mut driver.calls.lock().unwrap())
    }

    const SHAPE: LaunchShape = LaunchShape { grid: [7, 2, 1], block: 128, shared_bytes: 0 };

    fn launch(kernel: &Kernel, shape: LaunchShape, arguments: &[Argument]) -> Result<()> {
        // SAFETY: the fake driver reads the arguments and nothing that they point to.
        unsafe { kernel.launch(&shape, arguments, Stream::from_raw(0x50 as *mut c_void)) }
    }

    #[test]
    fn devices_take_machine_code_or_else_text() {
        for (capability, image) in [
            ([8, 0], "k[A=1] sm_80 Cubin"),
            ([8, 9], "k[A=1] sm_89 Cubin"),
            ([9, 0], "k[A=1] sm_90 Cubin"),
            // A text is closed by a zero.
            ([10, 0], "k[A=1] sm_90 Ptx\0"),
            ([12, 1], "k[A=1] sm_120 Cubin"),
        ] {
            let (driver, device) = fake(capability, None);
            device.unwrap().kernel(&variant("1")).unwrap();
            assert_eq!(calls(&driver)[0], Call::Load(image.into()));
        }
        assert_eq!(fake([7, 5], None).1.unwrap_err(), Error::TooOld { major: 7, minor: 5 });
    }

    #[test]
    fn a_variant_is_loaded_once_and_unloaded_with_its_last_copy() {
        let (driver, device) = fake([9, 0], None);
        let device = device.unwrap();
        let kernels = std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..4).map(|_| scope.spawn(|| device.kernel(&variant("1")).unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        assert_eq!(calls(&driver).len(), 1);
        device.kernel(&variant("2")).unwrap();
        assert_eq!(calls(&driver).len(), 1);
        drop(device);
        assert_eq!(calls(&driver), [Call::Unload(2)]);
        drop(kernels);
        assert_eq!(calls(&driver), [Call::Unload(1)]);
    }

    #[test]
    fn arguments_arrive_in_order_and_whole() {
        let (driver, device) = fake([9, 0], None);
        let kernel = device.unwrap().kernel(&variant("1")).unwrap();
        calls(&driver);
        let arguments = [
            Argument::U64(0x1122_3344_5566_7788),
            Argument::U32(0x99aa_bbcc),
            Argument::F32(-1.5),
            Argument::U64(u64::MAX),
        ];
        launch(&kernel, SHAPE, &arguments).unwrap();
        let [Call::Launch(function, shape, stream, values)] = &calls(&driver)[..] else { panic!() };
        assert_eq!((*function, *shape, *stream), (10, SHAPE, 0x50));
        assert_eq!((values[0], values[3]), (0x1122_3344_5566_7788, u64::MAX));
        assert_eq!(values[1].to_ne_bytes()[..4], 0x99aa_bbcc_u32.to_ne_bytes());
        assert_eq!(values[2].to_ne_bytes()[..4], (-1.5_f32).to_ne_bytes());
        assert_eq!(values.len(), 4);
        let most = [Argument::U32(3); MAX_ARGUMENTS];
        launch(&kernel, SHAPE, &most).unwrap();
        assert!(matches!(&calls(&driver)[..], [Call::Launch(.., values)] if values.len() == MAX_ARGUMENTS));
    }

    #[test]
    fn shared_memory_is_asked_for_when_a_launch_takes_more() {
        let (driver, device) = fake([9, 0], None);
        let kernel = device.unwrap().kernel(&variant("1")).unwrap();
        calls(&driver);
        let mut asked = Vec::new();
        for shared_bytes in [0, SHARED_UNASKED, 60_000, 50_000, 60_000, 100_000] {
            launch(&kernel, LaunchShape { shared_bytes, ..SHAPE }, &[]).unwrap();
            asked.extend(calls(&driver).into_iter().filter(|call| matches!(call, Call::Allow(..))));
        }
        assert_eq!(asked, [Call::Allow(10, 60_000), Call::Allow(10, 100_000)]);
    }

    #[test]
    fn nothing_is_launched_where_there_is_nothing_to_do() {
        let (driver, device) = fake([9, 0], None);
        let kernel = device.unwrap().kernel(&variant("1")).unwrap();
        calls(&driver);
        for at in 0..3 {
            let mut shape = SHAPE;
            shape.grid[at] = 0;
            launch(&kernel, shape, &[]).unwrap();
        }
        assert_eq!(calls(&driver), []);
    }

    #[test]
    fn what_no_device_has_is_an_error_before_the_driver_is_asked() {
        let (driver, device) = fake([9, 0], None);
        let kernel = device.unwrap().kernel(&variant("1")).unwrap();
        calls(&driver);
        let many = [Argument::U32(0); MAX_ARGUMENTS + 1];
        for (shape, arguments, limit) in [
            (LaunchShape { grid: [1 << 31, 1, 1], ..SHAPE }, &many[..0], 0x7fff_ffff),
            (LaunchShape { grid: [1, 65_536, 1], ..SHAPE }, &many[..0], 65_535),
            (LaunchShape { grid: [1, 1, 65_536], ..SHAPE }, &many[..0], 65_535),
            (LaunchShape { block: 1025, ..SHAPE }, &many[..0], 1024),
            (LaunchShape { shared_bytes: 100_001, ..SHAPE }, &many[..0], 100_000),
            (SHAPE, &many[..], MAX_ARGUMENTS as u64),
        ] {
            match launch(&kernel, shape, arguments) {
                Err(Error::Launch { limit: told, .. }) => assert_eq!(told, limit),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(calls(&driver), []);
    }

    #[test]
    fn failures_are_told_and_the_next_call_tries_again() {
        let (driver, device) = fake([9, 0], None);
        let device = device.unwrap();
        assert_eq!(device.kernel(&variant("bad")).unwrap_err(), Error::NvrtcMissing);
        assert_eq!(device.kernel(&variant("bad")).unwrap_err(), Error::NvrtcMissing);
        assert_eq!(calls(&driver), []);
        for refused in ["load", "function"] {
            let (driver, device) = fake([9, 0], Some(refused));
            let error = device.unwrap().kernel(&variant("1")).unwrap_err();
            assert!(matches!(error, Error::Load { .. }), "{error:?}");
            // What was loaded is not left behind.
            let count =
                |call: fn(&Call) -> bool| driver.calls.lock().unwrap().iter().filter(|c| call(c)).count();
            assert_eq!(count(|c| matches!(c, Call::Load(_))), count(|c| matches!(c, Call::Unload(_))));
        }
        for refused in ["allow", "launch"] {
            let kernel = fake([9, 0], Some(refused)).1.unwrap().kernel(&variant("1")).unwrap();
            let shape = LaunchShape { shared_bytes: 90_000, ..SHAPE };
            for _ in 0..2 {
                let refusal = Err(Error::Driver { action: refused, reason: "no".into() });
                assert_eq!(launch(&kernel, shape, &[]), refusal);
            }
        }
    }

    /// Where there is neither driver nor context the answer is an error.
    #[test]
    fn asking_for_a_device_never_panics() {
        // SAFETY: nothing is launched.
        let device = unsafe { Device::of_this_thread(ImageCache::none()) };
        match device {
            Ok(device) => assert!(device.properties().multiprocessors > 0),
            Err(e) => assert!(
                matches!(
                    e,
                    Error::DriverMissing
                        | Error::FunctionMissing { .. }
                        | Error::NoContext
                        | Error::Driver { .. }
                ),
                "{e:?}"
            ),
        }
    }
}
