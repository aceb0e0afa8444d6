//! Checks whether this process may use the tile unit (AMX): the processor must have it, and the operating system must
//! save its state and permit its use.
//!
//! Tiles are 8 KiB of state per thread, which Linux saves only for processes that request it. The request is made once,
//! when the instruction set is first queried. If it is refused, the path counts as unavailable.
#![allow(unsafe_code, reason = "CPUID, XGETBV and a system call")]

/// Whether all threads of this process may use tiles of 8-bit integers and of bf16.
#[cfg(target_os = "linux")]
pub(super) fn is_usable() -> bool {
    use std::sync::LazyLock;
    static USABLE: LazyLock<bool> =
        LazyLock::new(|| linux::processor_has_it() && linux::system_saves_it() && linux::permitted());
    *USABLE
}

#[cfg(not(target_os = "linux"))]
pub(super) fn is_usable() -> bool {
    false
}

#[cfg(target_os = "linux")]
mod linux {
    use core::arch::asm;
    use core::arch::x86_64::{__cpuid, __cpuid_count};

    /// The component of the extended state with the tile configuration.
    const TILE_CONFIG: u64 = 1 << 17;
    /// The component of the extended state with the tile data.
    const TILE_DATA: u64 = 1 << 18;

    /// The number of the system call `arch_prctl`.
    const ARCH_PRCTL: usize = 158;
    /// Its request for permission to use a component that is off by default.
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;

    /// Whether the processor has the instructions (leaf 7 of CPUID), and tiles of the sizes that the kernels assume
    /// (leaf 0x1d, palette 1).
    #[allow(unused_unsafe, reason = "CPUID is unsafe to call before Rust 1.94")]
    pub(super) fn processor_has_it() -> bool {
        // SAFETY: every x86-64 processor has CPUID, and only leaves up to the largest that it reports are read.
        unsafe {
            if __cpuid(0).eax < 0x1d {
                return false;
            }
            let (flags, palette) = (__cpuid_count(7, 0).edx, __cpuid_count(0x1d, 1));
            let [bf16, tile, int8] = [22, 24, 25].map(|bit| flags >> bit & 1 == 1);
            let sizes = [palette.eax, palette.ebx, palette.ecx & 0xffff];
            tile && int8 && bf16 && sizes == [1024 << 16 | 8192, 8 << 16 | 64, 16]
        }
    }

    /// Whether the system saves both components, according to XCR0.
    #[allow(unused_unsafe, reason = "CPUID is unsafe to call before Rust 1.94")]
    pub(super) fn system_saves_it() -> bool {
        // SAFETY: every x86-64 processor has CPUID; XGETBV exists if CPUID reports that the system uses XSAVE (bit 27).
        unsafe {
            if __cpuid(1).ecx >> 27 & 1 == 0 {
                return false;
            }
            let (low, high): (u32, u32);
            asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high,
                 options(nomem, nostack, preserves_flags));
            let saved = u64::from(high) << 32 | u64::from(low);
            saved & (TILE_CONFIG | TILE_DATA) == TILE_CONFIG | TILE_DATA
        }
    }

    /// Requests permission for all threads of the process; returns whether it is granted.
    pub(super) fn permitted() -> bool {
        let refused: isize;
        // SAFETY: the request accesses no memory of this process; a system call changes only rax, rcx and r11.
        unsafe {
            asm!("syscall", inlateout("rax") ARCH_PRCTL => refused, in("rdi") ARCH_REQ_XCOMP_PERM,
                 in("rsi") TILE_DATA.trailing_zeros() as usize, lateout("rcx") _, lateout("r11") _,
                 options(nostack));
        }
        refused == 0
    }
}
