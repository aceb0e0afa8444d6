//! Pages of keys and values, and tokens in them, with invalid arguments.

use core::ptr::{null, null_mut};

use quant_kernels::qz1_status::*;
use quant_kernels::*;

use crate::common::attention::*;
use crate::common::*;

#[test]
fn layouts_that_are_none() {
    let mut layout = layout_of(QZ1_KV_4BIT);
    assert_eq!(layout.page_bytes, 64 * (D as u64 + 8));
    // SAFETY: every pointer is null or points to a live value.
    unsafe {
        assert_eq!(qz1_kv_layout_of(0, D, &mut layout, null()), Scheme);
        assert_eq!(qz1_kv_layout_of(4, D, &mut layout, null()), Scheme);
        for d in [0, 8, 33, 528, usize::MAX] {
            assert_eq!(qz1_kv_layout_of(QZ1_KV_4BIT, d, &mut layout, null()), Scheme);
        }
        assert_eq!(qz1_kv_layout_of(QZ1_KV_4BIT, D, null_mut(), null()), Null);
        let odd = (&raw mut layout).wrapping_byte_add(1);
        assert_eq!(qz1_kv_layout_of(QZ1_KV_4BIT, D, odd, null()), Misaligned);
        layout.struct_size -= 1;
        assert_eq!(qz1_kv_layout_of(QZ1_KV_4BIT, D, &mut layout, null()), StructSize);
    }
    let mut case = Case::new(QZ1_KV_4BIT);
    let changes: [&dyn Fn(&mut qz1_kv_layout); 8] = [
        &|l| l.kind = QZ1_KV_8BIT,
        &|l| l.kind = 99,
        &|l| l.head_dim = 48,
        &|l| l.head_dim = 0,
        &|l| l.head_dim = u32::MAX,
        &|l| l.page_tokens = 32,
        &|l| l.page_bytes += 64,
        &|l| l.id ^= 1,
    ];
    for (i, change) in changes.into_iter().enumerate() {
        let mut layout = case.layout;
        change(&mut layout);
        assert_eq!(case.with(|call| call.layout = &layout), LayoutId, "change {i}");
    }
    let short = qz1_kv_layout { struct_size: 8, ..case.layout };
    assert_eq!(case.with(|call| call.layout = &short), StructSize);
}

#[test]
fn tokens_are_written_and_read() {
    let layout = layout_of(QZ1_KV_8BIT);
    let len = layout.page_bytes as usize;
    let (mut page, key, value) = (vec![7_u8; len], noise(D, 3), noise(D, 5));
    let at = page.as_mut_ptr();
    let (mut k, mut v) = (vec![0.0; D], vec![0.0; D]);
    let (k_at, v_at) = (k.as_mut_ptr(), v.as_mut_ptr());
    let write = |layout: *const qz1_kv_layout, at, len, slot, key: (*const f32, usize), value: &[f32]| {
        let (v, v_len) = (value.as_ptr(), value.len());
        // SAFETY: every pointer is null or points to a live value, which is as long as any length that the call
        // accepts.
        unsafe { qz1_kv_write(layout, at, len, slot, key.0, key.1, v, v_len, null()) }
    };
    let read = |at, len, slot, key: (*mut f32, usize), value: (*mut f32, usize)| {
        // SAFETY: this test upholds the pointer contract of the C interface.
        unsafe { qz1_kv_read(&layout, at, len, slot, key.0, key.1, value.0, value.1, null()) }
    };
    let good = (key.as_ptr(), D);
    assert_eq!(write(null(), at, len, 0, good, &value), Null);
    assert_eq!(write(&layout, null_mut(), len, 0, good, &value), Null);
    assert_eq!(write(&layout, at, len - 1, 0, good, &value), Length);
    assert_eq!(write(&layout, at, usize::MAX, 0, good, &value), TooLarge);
    assert_eq!(write(&layout, at, len, 64, good, &value), Mismatch);
    assert_eq!(write(&layout, at, len, usize::MAX, good, &value), Mismatch);
    assert_eq!(write(&layout, at, len, 0, (null(), D), &value), Null);
    assert_eq!(write(&layout, at, len, 0, (key.as_ptr().wrapping_byte_add(2), D - 1), &value), Misaligned);
    assert_eq!(write(&layout, at, len, 0, (key.as_ptr(), D - 1), &value), Length);
    assert_eq!(write(&layout, at, len, 0, good, &value[1..]), Length);
    let whole = at.cast::<f32>().cast_const();
    if whole.is_aligned() {
        assert_eq!(write(&layout, at, len, 0, (whole, D), &value), Overlap);
    }
    for (bad, status) in [(f32::NAN, Scheme), (f32::INFINITY, Scheme), (65505.0, TooLarge)] {
        let mut value = value.clone();
        value[9] = bad;
        assert_eq!(write(&layout, at, len, 0, good, &value), status);
    }
    assert!(page.iter().all(|b| *b == 7));
    assert_eq!(write(&layout, at, len, 63, good, &value), Ok);
    let (to_k, to_v) = ((k_at, D), (v_at, D));
    assert_eq!(read(null(), len, 63, to_k, to_v), Null);
    assert_eq!(read(at, len - 1, 63, to_k, to_v), Length);
    assert_eq!(read(at, len, 64, to_k, to_v), Mismatch);
    assert_eq!(read(at, len, 63, (k_at, D - 1), to_v), Length);
    assert_eq!(read(at, len, 63, (null_mut(), D), to_v), Null);
    assert_eq!(read(at, len, 63, to_k, (k_at.wrapping_add(D - 1), D)), Overlap);
    assert_eq!(read(at, len, 63, to_k, to_v), Ok);
    for (got, x) in [(&k, &key), (&v, &value)] {
        // The error is at most half a step of a grid of 255 steps over a range of 3.2.
        assert!(got.iter().zip(x).all(|(got, x)| (got - x).abs() <= 3.2 / 255.0 / 2.0 + 1e-3));
    }
}

#[test]
fn appending() {
    let mut case = Case::new(QZ1_KV_4BIT);
    case.pages.fill(7);
    let to = (case.pages.as_mut_ptr(), case.pages.len());
    let [x, y] = [&case.keys, &case.values].map(|x| (x.as_ptr(), x.len()));
    let lists = case.lists(0);
    let good = (lists.as_ptr(), KV);
    let run = |to, lists, x, y| case.append(&case.layout, to, lists, x, y, null());
    assert_eq!(case.append(null(), to, good, x, y, null()), Null);
    assert_eq!(run((null_mut(), to.1), good, x, y), Null);
    assert_eq!(run((to.0, to.1 - 1), good, x, y), Length);
    assert_eq!(run(to, (null(), KV), x, y), Null);
    assert_eq!(run(to, (good.0.wrapping_byte_add(4), KV - 1), x, y), Misaligned);
    assert_eq!(run(to, (good.0, usize::MAX), x, y), TooLarge);
    assert_eq!(run(to, (good.0, 0), x, y), Mismatch);
    assert_eq!(run(to, good, (null(), x.1), y), Null);
    assert_eq!(run(to, good, (x.0, x.1 - 1), y), Length);
    assert_eq!(run(to, good, x, (y.0, y.1 - 1)), Length);
    assert_eq!(run(to, good, (x.0, usize::MAX / 2), y), TooLarge);
    assert_eq!(run((x.0.cast_mut().cast(), to.1), good, x, y), Overlap);
    let with = |change: &dyn Fn(&mut [qz1_page_list; KV])| {
        let mut lists = lists;
        change(&mut lists);
        run(to, (lists.as_ptr(), KV), x, y)
    };
    assert_eq!(with(&|l| l[1].pages_len = 1), Mismatch);
    assert_eq!(with(&|l| l[1].pages = l[0].pages), Mismatch);
    assert_eq!(with(&|l| l[1].pages = null()), Null);
    assert_eq!(with(&|l| l[1].tokens = 64), Mismatch);
    assert_eq!(with(&|l| l[1].tokens = usize::MAX), TooLarge);
    assert_eq!(with(&|l| l[1].struct_size = 8), StructSize);
    let beyond = [1, PAGES as u32];
    assert_eq!(with(&|l| l[0].pages = beyond.as_ptr()), Mismatch);
    let mut bad = case.keys.clone();
    bad[1000] = f32::NAN;
    assert_eq!(run(to, good, (bad.as_ptr(), bad.len()), y), Scheme);
    assert!(case.pages.iter().all(|b| *b == 7));
    assert_eq!(case.append(&case.layout, to, good, x, y, &threads(&Manner::LeaveOne)), ForEach);
    assert_eq!(case.append(&case.layout, to, good, x, y, &threads(&Manner::Right)), Ok);
}
