use super::*;

/// A structure that has grown twice since its first version.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
struct Grown {
    struct_size: u32,
    reserved: u32,
    first: u64,
    second: u64,
    third: u64,
}
fields!(Grown, first, reserved);

const WHOLE: Grown =
    Grown { struct_size: size_of::<Grown>() as u32, reserved: 0, first: 1, second: 2, third: 3 };

fn read(of: &Grown) -> Result<Grown, qz1_status> {
    // SAFETY: every size in these tests is rejected or is at most that of the structure.
    unsafe { Scope::new().read(of, "it") }.map_err(|fault| fault.status())
}

#[test]
fn older_structures_are_filled_with_zeros() {
    assert_eq!((Grown::FIRST_SIZE, size_of::<Grown>()), (16, 32));
    assert_eq!(read(&WHOLE), Ok(WHOLE));
    let old = |struct_size| Grown { struct_size, ..WHOLE };
    assert_eq!(read(&old(24)), Ok(Grown { third: 0, ..old(24) }));
    assert_eq!(read(&old(16)), Ok(Grown { second: 0, third: 0, ..old(16) }));
    for size in [0, 4, 8, 15, 17, 20, 28, u32::MAX] {
        assert_eq!(read(&old(size)), Err(qz1_status::StructSize), "{size}");
    }
    assert_eq!(read(&Grown { reserved: 1, ..WHOLE }), Err(qz1_status::StructSize));
}

#[test]
fn newer_structures_are_taken_where_the_rest_is_zero() {
    #[repr(C)]
    struct Later(Grown, [u64; 2]);
    let mut later = Later(Grown { struct_size: size_of::<Later>() as u32, ..WHOLE }, [0; 2]);
    // SAFETY: there are as many bytes as the size field says.
    let run = |later: &Later| unsafe { Scope::new().read((&raw const *later).cast::<Grown>(), "it") };
    assert_eq!(run(&later).map_err(|fault| fault.status()), Ok(later.0));
    later.1[1] = 1;
    assert_eq!(run(&later).map_err(|fault| fault.status()), Err(qz1_status::StructSize));
}

#[test]
fn arrays_of_older_structures_have_their_step() {
    let words = [24_u64, 1, 2, 24, 3, 4].map(u64::to_le);
    let mut got = Vec::new();
    // SAFETY: there are two structures of 24 bytes that consist of numbers only.
    let status = unsafe {
        Scope::new().each(words.as_ptr().cast::<Grown>(), 2, "it", |i, of| {
            got.push((i, of.first, of.second, of.third));
            Ok(())
        })
    };
    assert!(status.is_ok());
    assert_eq!(got, [(0, 1, 2, 0), (1, 3, 4, 0)]);
}

#[test]
fn older_outputs_are_written_as_far_as_they_go() {
    let mut of = Grown { struct_size: 24, ..WHOLE };
    // SAFETY: there are as many bytes as the size field says.
    unsafe {
        let place = Scope::new().place(&raw mut of, "it");
        place.map_err(|fault| fault.status()).unwrap().put(Grown { first: 7, second: 8, third: 9, ..WHOLE });
    }
    assert_eq!(of, Grown { struct_size: 24, reserved: 0, first: 7, second: 8, third: 3 });
}

/// The size that callers compiled with the first header pass.
#[test]
#[cfg(target_pointer_width = "64")]
fn first_versions_keep_their_size() {
    use crate::*;
    let sizes = [
        qz1_message::FIRST_SIZE,
        qz1_parallel::FIRST_SIZE,
        qz1_weights::FIRST_SIZE,
        qz1_layout::FIRST_SIZE,
        qz1_parts::FIRST_SIZE,
        qz1_values::FIRST_SIZE,
        qz1_residual::FIRST_SIZE,
        qz1_static_scale::FIRST_SIZE,
        qz1_rms_norm::FIRST_SIZE,
        qz1_kv_layout::FIRST_SIZE,
        qz1_heads::FIRST_SIZE,
        qz1_page_list::FIRST_SIZE,
    ];
    assert_eq!(sizes, [24, 24, 96, 80, 72, 24, 24, 16, 24, 32, 24, 48]);
}
