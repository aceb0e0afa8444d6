//! Attention with invalid arguments.

use core::ptr::{null, null_mut};

use quant_kernels::qz1_status::*;
use quant_kernels::*;

use crate::common::attention::*;
use crate::common::*;

#[test]
fn workspaces() {
    let case = Case::new(QZ1_KV_8BIT);
    let mut words = 77;
    let mut run = |layout: *const qz1_kv_layout, heads: *const qz1_heads, queries, tokens| {
        // SAFETY: every pointer is null or points to a live value.
        unsafe { qz1_attend_workspace(layout, heads, queries, tokens, &mut words, null()) }
    };
    let heads = &raw const case.heads;
    assert_eq!(run(null(), heads, 1, 1), Null);
    assert_eq!(run(&case.layout, null(), 1, 1), Null);
    assert_eq!(run(&case.layout, heads, usize::MAX, 1), TooLarge);
    assert_eq!(run(&case.layout, heads, 1, usize::MAX), TooLarge);
    let with = |heads| run(&case.layout, &raw const heads, 1, 1);
    let changed: [(qz1_heads, qz1_status); 7] = [
        (qz1_heads { query: 3, ..case.heads }, Mismatch),
        (qz1_heads { query: 0, ..case.heads }, Mismatch),
        (qz1_heads { kv: 0, ..case.heads }, Mismatch),
        (qz1_heads { query: usize::MAX - 1, ..case.heads }, TooLarge),
        (qz1_heads { scale: f32::NAN, ..case.heads }, Scheme),
        (qz1_heads { scale: f32::INFINITY, ..case.heads }, Scheme),
        (qz1_heads { struct_size: 4, ..case.heads }, StructSize),
    ];
    let got: Vec<_> = changed.map(|(heads, _)| heads).into_iter().map(with).collect();
    assert_eq!(got, changed.map(|(_, status)| status));
    assert_eq!(words, 77);
    // SAFETY: every pointer is null or points to a live value.
    let status = unsafe { qz1_attend_workspace(&case.layout, heads, 1, 1, null_mut(), null()) };
    assert_eq!(status, Null);
}

#[test]
fn attending() {
    let mut case = Case::new(QZ1_KV_4BIT);
    assert_eq!(case.with(|_| {}), Ok);
    assert_eq!(case.with(|c| c.isa = QZ1_ISA_SCALAR), Ok);
    assert_eq!(case.with(|c| c.isa = 77), Isa);
    assert_eq!(case.with(|c| c.layout = null()), Null);
    assert_eq!(case.with(|c| c.pages.0 = null()), Null);
    assert_eq!(case.with(|c| c.pages.1 -= 1), Length);
    assert_eq!(case.with(|c| c.pages.1 -= case_page()), Mismatch);
    assert_eq!(case.with(|c| c.pages.1 = 0), Mismatch);
    assert_eq!(case.with(|c| c.heads = null()), Null);
    assert_eq!(case.with(|c| c.heads = c.heads.wrapping_byte_add(1)), Misaligned);
    let odd = qz1_heads { query: 5, ..case.heads };
    assert_eq!(case.with(|c| c.heads = &odd), Mismatch);
    assert_eq!(case.with(|c| c.lists.0 = null()), Null);
    assert_eq!(case.with(|c| c.lists.1 -= 1), Length);
    assert_eq!(case.with(|c| c.q.0 = null()), Null);
    assert_eq!(case.with(|c| c.q.1 -= 1), Length);
    assert_eq!(case.with(|c| c.q.0 = c.q.0.wrapping_byte_add(1)), Misaligned);
    assert_eq!(case.with(|c| c.out.0 = null_mut()), Null);
    assert_eq!(case.with(|c| c.out.1 -= 1), Length);
    assert_eq!(case.with(|c| c.out.0 = c.out.0.wrapping_byte_add(2)), Misaligned);
    assert_eq!(case.with(|c| c.out.1 = usize::MAX / 2), TooLarge);
    assert_eq!(case.with(|c| c.out.0 = c.q.0.cast_mut()), Overlap);
    assert_eq!(case.with(|c| c.out.0 = c.lse.0), Overlap);
    assert_eq!(case.with(|c| c.out.0 = c.workspace.0.cast()), Overlap);
    assert_eq!(case.with(|c| c.lse.0 = null_mut()), Null);
    assert_eq!(case.with(|c| c.lse.1 -= 1), Length);
    assert_eq!(case.with(|c| c.lse.0 = c.workspace.0.cast()), Overlap);
    assert_eq!(case.with(|c| c.lse.0 = c.pages.0.cast_mut().cast()), Overlap);
    assert_eq!(case.with(|c| c.workspace.0 = null_mut()), Null);
    assert_eq!(case.with(|c| c.workspace.1 -= 1), Length);
    assert_eq!(case.with(|c| c.workspace.0 = c.workspace.0.wrapping_byte_add(1)), Misaligned);
    assert_eq!(case.with(|c| c.workspace.0 = c.q.0.cast_mut().cast()), Overlap);
    let (forgetful, all) = (threads(&Manner::LeaveOne), threads(&Manner::Right));
    assert_eq!(case.with(|c| c.parallel = &forgetful), ForEach);
    assert_eq!(case.with(|c| c.parallel = &all), Ok);
}

fn case_page() -> usize {
    layout_of(QZ1_KV_4BIT).page_bytes as usize
}

#[test]
fn lists_that_do_not_fit() {
    let mut case = Case::new(QZ1_KV_4BIT);
    assert_eq!(case.with_lists(|_| {}), Ok);
    let expected = case.out.clone();
    let beyond = [0, PAGES as u32];
    assert_eq!(case.with_lists(|l| l[1].pages = beyond.as_ptr()), Mismatch);
    let beyond = [u32::MAX; 2];
    assert_eq!(case.with_lists(|l| l[0].pages = beyond.as_ptr()), Mismatch);
    assert_eq!(case.with_lists(|l| l[0].pages = null()), Null);
    assert_eq!(case.with_lists(|l| l[0].pages = l[0].pages.wrapping_byte_add(1)), Misaligned);
    assert_eq!(case.with_lists(|l| l[0].pages_len = 1), Mismatch);
    assert_eq!(case.with_lists(|l| l[0].pages_len = usize::MAX), TooLarge);
    assert_eq!(case.with_lists(|l| l[0].tokens = 129), Mismatch);
    assert_eq!(case.with_lists(|l| l[0].tokens = usize::MAX), Mismatch);
    assert_eq!(case.with_lists(|l| l[0].first = TOKENS + 1), Mismatch);
    for size in [0, 8, u32::MAX] {
        assert_eq!(case.with_lists(|l| l[0].struct_size = size), StructSize);
        assert_eq!(case.with_lists(|l| l[1].struct_size = size), StructSize);
    }
    let size = size_of::<qz1_page_list>() as u32;
    assert_eq!(case.with_lists(|l| l[0].struct_size = size + 4), StructSize);
    assert_eq!(case.out, expected);
    assert_eq!(case.with_lists(|l| l[1].seen = isize::MIN), Ok);
    assert!(case.lse[2..4].iter().all(|v| *v == f32::NEG_INFINITY) && case.out[2 * D] == 0.0);
    assert_eq!(case.out[..2 * D], expected[..2 * D]);
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Later {
        list: qz1_page_list,
        new: u64,
    }
    let mut later = case.lists(TOKENS).map(|list| Later { list, new: 0 });
    later.iter_mut().for_each(|l| l.list.struct_size = size_of::<Later>() as u32);
    assert_eq!(Call { lists: (later.as_ptr().cast(), KV), ..case.call() }.run(), Ok);
    assert_eq!(case.out, expected);
    later[1].new = 1;
    assert_eq!(Call { lists: (later.as_ptr().cast(), KV), ..case.call() }.run(), StructSize);
}

#[test]
fn merging() {
    let (mut out, mut lse) = (vec![1.0_f32; 2 * D], vec![0.0_f32; 2]);
    let (other, other_lse) = (vec![3.0_f32; 2 * D], vec![f32::NEG_INFINITY, 0.0]);
    let (n, to, to_lse) = (2 * D, out.as_mut_ptr(), lse.as_mut_ptr());
    let run = |d,
               out: (*mut f32, usize),
               lse: (*mut f32, usize),
               x: (*const f32, usize),
               y: (*const f32, usize)| {
        // SAFETY: every pointer is null or points to a live value, which is as long as any length that the call
        // accepts.
        unsafe { qz1_attend_merge(d, out.0, out.1, lse.0, lse.1, x.0, x.1, y.0, y.1, null()) }
    };
    let (x, y) = ((other.as_ptr(), n), (other_lse.as_ptr(), 2));
    assert_eq!(run(D, (null_mut(), n), (to_lse, 2), x, y), Null);
    assert_eq!(run(D, (to, n), (null_mut(), 2), x, y), Null);
    assert_eq!(run(D, (to, n), (to_lse, 2), (null(), n), y), Null);
    assert_eq!(run(D, (to, n), (to_lse, 2), x, (null(), 2)), Null);
    assert_eq!(run(D, (to, n - 1), (to_lse, 2), x, y), Length);
    assert_eq!(run(D, (to, n), (to_lse, 1), x, y), Length);
    assert_eq!(run(D, (to, n), (to_lse, 2), (x.0, n - 1), y), Length);
    assert_eq!(run(D, (to, n), (to_lse, 2), x, (y.0, 1)), Length);
    assert_eq!(run(usize::MAX, (to, n), (to_lse, 2), x, y), TooLarge);
    assert_eq!(run(D, (to, n), (to, 2), x, y), Overlap);
    assert_eq!(run(D, (to, n), (to_lse, 2), (to, n), y), Overlap);
    assert_eq!(run(D, (to.wrapping_byte_add(1), n - 1), (to_lse, 2), x, y), Misaligned);
    assert_eq!(run(D, (to, n), (to_lse, 2), x, y), Ok);
    assert!(out[..D].iter().all(|v| *v == 1.0) && out[D..].iter().all(|v| *v == 2.0));
    assert_eq!(lse, [0.0, 2.0_f32.ln()]);
}
