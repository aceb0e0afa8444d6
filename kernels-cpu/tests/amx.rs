//! Tile state is per thread, and other code in the process may use it.
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]

mod common;

use std::arch::asm;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU8;

use common::{Panics, Stream, Threads};
use quant_kernels_cpu::{
    FloatRows, Int8Rows, Isa, IsaToken, PackedLinear, Parallel, Product, RowLayout, Serial, WeightView,
    multiply_each,
};

const N: usize = 16 * 9 + 5;
const K: usize = 192;
const M: usize = 40;

#[repr(C, align(64))]
#[derive(Clone, Copy, PartialEq, Debug)]
struct Config([u8; 64]);

impl Config {
    /// Reads the configuration of this thread.
    fn current() -> Self {
        let mut config = Self([0xa5; 64]);
        // SAFETY: the callers check for `Isa::Amx` first; the instruction writes the 64 bytes of `config`.
        unsafe { asm!("sttilecfg [{0}]", in(reg) &raw mut config, options(nostack, preserves_flags)) };
        config
    }

    fn is_released(self) -> bool {
        self.0 == [0; 64]
    }

    fn whole() -> Self {
        let mut config = Self([0; 64]);
        config.0[0] = 1;
        for tile in 0..8 {
            (config.0[16 + 2 * tile], config.0[48 + tile]) = (64, 16);
        }
        config
    }
}

fn amx() -> Option<IsaToken> {
    Isa::Amx.token().ok()
}

fn weights(bits: u8) -> PackedLinear {
    let mut s = Stream(u64::from(bits));
    let codes: Vec<u8> = (0..N * K).map(|_| s.below(1 << bits) as u8).collect();
    let scales: Vec<f32> = (0..N * 3).map(|_| s.float()).collect();
    let view = WeightView::new([N, K], bits, 64, &codes, &scales, None).unwrap();
    PackedLinear::pack(&view, None, false, &Serial).unwrap()
}

fn activations() -> Vec<f32> {
    let mut s = Stream(7);
    (0..M * K).map(|_| s.float()).collect()
}

fn multiply(token: IsaToken, weight: &PackedLinear, parallel: &dyn Parallel) -> [Vec<f32>; 2] {
    let (x, layout) = (activations(), RowLayout::of(weight.layout()));
    let (mut whole, mut floats) = (Int8Rows::new(token), FloatRows::new(token));
    whole.quantize(&x, layout, &Serial).unwrap();
    floats.pack(&x, layout, &Serial).unwrap();
    let mut out = [vec![f32::NAN; M * N], vec![f32::NAN; M * N]];
    weight.view().multiply(token, &whole, None, &mut out[0], parallel).unwrap();
    weight.view().multiply_float(&floats, None, &mut out[1], parallel).unwrap();
    out
}

/// Checks after every piece that the tile unit is released, on the thread that ran the piece.
struct Watched;

// SAFETY: `for_each` calls each number once, and returns when all calls have returned.
unsafe impl Parallel for Watched {
    fn threads(&self) -> usize {
        2
    }

    fn for_each(&self, count: usize, piece: &(dyn Fn(usize) + Sync)) {
        Threads(2).for_each(count, &|i| {
            piece(i);
            assert!(Config::current().is_released(), "after piece {i}");
        });
    }
}

#[test]
fn tiles_are_released_after_every_piece() {
    let Some(token) = amx() else { return };
    for bits in [4, 8] {
        let weight = weights(bits);
        assert_eq!(multiply(token, &weight, &Watched), multiply(token, &weight, &Serial));
        assert!(Config::current().is_released());
    }
}

#[test]
fn tiles_are_released_after_errors_and_panics() {
    let Some(token) = amx() else { return };
    let weight = weights(4);
    let mut x = Int8Rows::new(token);
    x.quantize(&activations(), RowLayout::of(weight.layout()), &Serial).unwrap();
    let (mut right, mut short) = (vec![0.0; M * N], vec![0.0; M * N - 1]);
    let of = |out| Product { weight: weight.view(), bias: None, out };
    assert!(multiply_each(token, &x, &mut [of(&mut right[..]), of(&mut short[..])], &Serial).is_err());
    assert!(Config::current().is_released());
    for pieces in 0..4 {
        let panics = catch_unwind(AssertUnwindSafe(|| multiply(token, &weight, &Panics(pieces))));
        assert!(panics.is_err() && Config::current().is_released());
    }
}

/// The product of two tiles as `[16, 16]` sums, computed as a host program might do.
fn product_of_host(left: &[i8; 1024], right: &[i8; 1024]) -> [i32; 256] {
    let mut sums = [0; 256];
    let config = Config::whole();
    // SAFETY: the caller checked for `Isa::Amx`; all buffers are tiles of 16 rows of 64 bytes.
    unsafe {
        asm!("ldtilecfg [{0}]", in(reg) &raw const config, options(nostack, preserves_flags));
        asm!("tilezero tmm0", "tileloadd tmm1, [{0} + {2}*1]", "tileloadd tmm2, [{1} + {2}*1]", "tdpbssd tmm0, tmm1, tmm2",
             in(reg) left, in(reg) right, in(reg) 64_usize, options(nostack, preserves_flags));
        asm!("tilestored [{0} + {1}*1], tmm0", in(reg) &raw mut sums, in(reg) 64_usize,
             options(nostack, preserves_flags));
    }
    sums
}

/// A host program that configures the unit before each of its own products still gets unchanged results, and the
/// configuration that it leaves does not disturb the kernels.
#[test]
fn a_host_may_use_tiles_itself() {
    let Some(token) = amx() else { return };
    let mut s = Stream(3);
    let mut bytes = || std::array::from_fn::<i8, 1024, _>(|_| s.below(256) as i8);
    let (left, right) = (bytes(), bytes());
    let weight = weights(4);
    let expected = multiply(token, &weight, &Serial);
    let own = product_of_host(&left, &right);
    for (n, sum) in own[..16].iter().enumerate() {
        let terms = (0..64).map(|k| i32::from(left[k]) * i32::from(right[k / 4 * 64 + 4 * n + k % 4]));
        assert_eq!(*sum, terms.sum::<i32>());
    }
    for _ in 0..3 {
        assert_eq!(Config::current(), Config::whole());
        assert_eq!(multiply(token, &weight, &Serial), expected);
        assert!(Config::current().is_released());
        assert_eq!(product_of_host(&left, &right), own);
    }
    // SAFETY: releasing is always allowed on a processor with AMX, which was checked above.
    unsafe { asm!("tilerelease", options(nostack, preserves_flags)) };
}

/// Linux refuses tiles to a process that has a signal stack too small for them.
#[test]
fn refused_permission_takes_the_next_path() {
    if amx().is_none() {
        return;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    let ended = child
        .args(["--ignored", "--exact", "without_permission", "--nocapture"])
        .env_remove("QUANT_ISA")
        .env_remove("QUANT_EXPECTED_ISAS")
        // AddressSanitizer installs a signal stack per thread, and at the end of the thread unmaps whichever stack is
        // installed then.
        .env("ASAN_OPTIONS", "use_sigaltstack=0")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&ended.stdout);
    let errors = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success() && text.contains("1 passed"), "{text}{errors}");
}

#[test]
#[ignore = "must run before any request for tiles: `refused_permission_takes_the_next_path` runs it"]
fn without_permission() {
    /// `stack_t`
    #[repr(C)]
    struct Stack {
        at: *mut u8,
        flags: i32,
        size: usize,
    }
    const SIGALTSTACK: usize = 131;
    // Large enough for a signal frame without tiles.
    static SMALL: OnceLock<Vec<AtomicU8>> = OnceLock::new();
    let small = SMALL.get_or_init(|| (0..8192).map(|_| AtomicU8::new(0)).collect());
    let stack = Stack { at: small[0].as_ptr(), flags: 0, size: small.len() };
    let refused: isize;
    // SAFETY: the structure has the layout that the call reads, and the memory lives as long as the process.
    unsafe {
        asm!("syscall", inlateout("rax") SIGALTSTACK => refused, in("rdi") &raw const stack, in("rsi") 0_usize,
             lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    assert_eq!(refused, 0);
    assert!(!Isa::Amx.is_available() && Isa::Amx.token().is_err());
    let instead = Isa::detect();
    assert_eq!(Isa::detect_checked(), Ok(instead));
    assert!(instead.is_available() && instead != Isa::Amx && instead != Isa::Scalar, "{instead:?}");
    let (weight, scalar) = (weights(4), Isa::Scalar.token().unwrap());
    let [integers, _] = multiply(instead.token().unwrap(), &weight, &Serial);
    assert_eq!(integers, multiply(scalar, &weight, &Serial)[0]);
}
