//! Pages, lists, merging and the cache through the C interface: calls in any order, with correct lengths.

use core::ptr::null_mut;

use quant_kernels::*;

use crate::c::{empty, is_valid_status, threads};
use crate::input::Input;

/// Calls the functions for pages, lists and a cache through the C interface.
///
/// # Panics
/// If a property does not hold.
pub fn c_attention(data: &[u8]) {
    let mut input = Input::new(data);
    let mut text = [0_u8; 24];
    let message = qz1_message { text: text.as_mut_ptr().cast(), capacity: text.len(), ..empty!(qz1_message) };
    let mut layout = empty!(qz1_kv_layout);
    let odd = input.rarely(8);
    let (kind, d) = match odd {
        true => (input.word() as u32, input.word()),
        false => (1 + input.below(3) as u32, 16 * input.size(4)),
    };
    // SAFETY: every length is that of the slice that its pointer comes from.
    let made = is_valid_status(unsafe { qz1_kv_layout_of(kind, d, &mut layout, &message) });
    assert!(made || odd);
    let d = if made { d } else { 16 };
    let (kv, group, blocks, m) = (input.size(3), input.size(4), input.size(3), input.below(70));
    let mut heads = qz1_heads { query: kv * group, kv, scale: 0.25, ..empty!(qz1_heads) };
    let mut pages = vec![0xff_u8; kv * blocks * if made { layout.page_bytes as usize } else { 64 }];
    let numbers: Vec<u32> = (0..(kv * blocks) as u32).collect();
    let mut lists: Vec<qz1_page_list> = numbers
        .chunks(blocks)
        .map(|pages| qz1_page_list {
            pages: pages.as_ptr(),
            pages_len: pages.len(),
            seen: isize::MAX,
            ..empty!(qz1_page_list)
        })
        .collect();
    let few = input.floats(kv * d + 3);
    let x: Vec<f32> = few.into_iter().cycle().take(m * kv * d).collect();
    for _ in 0..input.below(3) {
        let which = input.below(kv);
        let list = &mut lists[which];
        match input.below(10) {
            0 => list.tokens = input.word(),
            1 => list.first = input.word(),
            2 => list.seen = input.word() as isize,
            3 => list.pages_len = input.below(blocks + 1),
            4 => list.struct_size = input.word() as u32 % size_of::<qz1_page_list>() as u32,
            5 => heads.query = input.word(),
            6 => heads.kv = input.word(),
            7 => heads.scale = input.floats(1)[0],
            8 => layout.kind = input.word() as u32,
            _ => layout.page_bytes = input.word() as u64,
        }
    }
    let (isa, queries) = (u32::from(input.byte() % 10), input.below(4));
    let q = input.floats(queries * kv * group * d);
    let (mut out, mut lse) = (vec![0.0_f32; q.len()], vec![0.0_f32; queries * kv * group]);
    let lists_len = if input.rarely(4) { input.below(kv + 1) } else { kv };
    let on = threads(1 + u32::from(input.byte() % 9));
    let on = if input.flag() { &raw const on } else { core::ptr::null() };
    // SAFETY: all pointers come from live slices and handles, and are passed with their lengths.
    unsafe {
        let at = pages.as_mut_ptr();
        let appended = is_valid_status(qz1_kv_append(
            &layout,
            at,
            pages.len(),
            lists.as_ptr(),
            lists_len,
            x.as_ptr(),
            x.len(),
            x.as_ptr(),
            x.len(),
            on,
            &message,
        ));
        if appended {
            lists.iter_mut().for_each(|list| list.tokens = list.tokens.saturating_add(m));
        }
        let (mut key, mut value) = (vec![0.0; d], vec![0.0; d]);
        let slot = input.word();
        let page = pages.len() / (kv * blocks);
        let (key_at, value_at) = (key.as_mut_ptr(), value.as_mut_ptr());
        is_valid_status(qz1_kv_read(&layout, at, page, slot, key_at, d, value_at, d, &message));
        is_valid_status(qz1_kv_write(&layout, at, page, slot, key_at, d, value_at, d, &message));

        let max = lists.iter().map(|list| list.tokens).max().unwrap_or(0);
        let mut words = 0;
        is_valid_status(qz1_attend_workspace(&layout, &heads, queries, max, &mut words, &message));
        let mut workspace = vec![u32::MAX; words.min(1 << 20)];
        is_valid_status(qz1_attend(
            &layout,
            pages.as_ptr(),
            pages.len(),
            &heads,
            lists.as_ptr(),
            lists_len,
            q.as_ptr(),
            q.len(),
            out.as_mut_ptr(),
            out.len(),
            lse.as_mut_ptr(),
            lse.len(),
            workspace.as_mut_ptr(),
            workspace.len(),
            isa,
            on,
            &message,
        ));
        let (other, other_lse) = (out.clone(), lse.clone());
        let width = if input.rarely(4) { input.word() } else { d };
        let (out_at, lse_at) = (out.as_mut_ptr(), lse.as_mut_ptr());
        is_valid_status(qz1_attend_merge(
            width,
            out_at,
            out.len(),
            lse_at,
            lse.len(),
            other.as_ptr(),
            other.len(),
            other_lse.as_ptr(),
            other_lse.len(),
            &message,
        ));

        let mut cache = null_mut();
        let max = if input.rarely(4) { input.word() } else { 200 };
        let made = is_valid_status(qz1_kv_cache_new(&layout, &heads, max, &mut cache, &message));
        assert_eq!(made, !cache.is_null());
        for _ in 0..input.below(6) {
            let before = qz1_kv_cache_tokens(cache);
            let (x_at, q_at) = (x.as_ptr(), q.as_ptr());
            let (q_len, lse_len) = (q.len(), lse.len());
            match input.below(5) {
                0 => {
                    let done = is_valid_status(qz1_kv_cache_append(
                        cache,
                        x_at,
                        x.len(),
                        x_at,
                        x.len(),
                        on,
                        &message,
                    ));
                    assert!(done || qz1_kv_cache_tokens(cache) == before);
                }
                1 => {
                    is_valid_status(qz1_kv_cache_prefill(
                        cache, q_at, q_len, out_at, q_len, lse_at, lse_len, on, &message,
                    ));
                }
                2 => {
                    is_valid_status(qz1_kv_cache_decode(
                        cache, q_at, q_len, out_at, q_len, lse_at, lse_len, on, &message,
                    ));
                }
                3 => {
                    let to = input.word();
                    let done = is_valid_status(qz1_kv_cache_truncate(cache, to, &message));
                    assert_eq!(qz1_kv_cache_tokens(cache), if done { to } else { before });
                }
                _ => {
                    is_valid_status(qz1_kv_cache_clear(cache, &message));
                    assert_eq!(qz1_kv_cache_tokens(cache), 0);
                }
            }
        }
        qz1_kv_cache_free(cache);
    }
}
