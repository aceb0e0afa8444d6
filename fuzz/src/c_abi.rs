//! Numbers of any kind through the C interface, with lengths that are true: a status, never a failure of the library,
//! and no memory but the caller's.

use core::ptr::{null, null_mut};

use quant_kernels::*;

use crate::input::Input;

/// A structure of zeros that knows its size.
macro_rules! empty {
    ($of:ty) => {{
        // SAFETY: numbers and pointers only, of which zero is one.
        let mut it: $of = unsafe { core::mem::zeroed() };
        it.struct_size = size_of::<$of>() as u32;
        it
    }};
}

/// A status of which the library is not to blame.
fn fair(status: qz1_status) -> bool {
    assert!(!matches!(status, qz1_status::Internal | qz1_status::ForEach), "{status:?}");
    status == qz1_status::Ok
}

/// A pointer and a length, null where there is none.
fn optional<T>(of: Option<&Vec<T>>) -> (*const T, usize) {
    of.map_or((null(), 0), |v| (v.as_ptr(), v.len()))
}

/// Something of a layout is wrong.
fn spoil(layout: &mut qz1_layout, input: &mut Input<'_>) {
    let word = input.word() as u64;
    match input.below(12) {
        0 => layout.code_bits = word as u32,
        1 => layout.scales = word as u32,
        2 => layout.zeros = word as u32,
        3 => layout.middle = word as u32,
        4 => layout.sums = word as u32,
        5 => layout.n = word,
        6 => layout.k = word,
        7 => layout.group_size = word,
        8 => layout.panels = word,
        9 => layout.panel_bytes = word,
        10 => layout.bytes = word,
        _ => layout.id = word,
    }
}

/// Weights, activations and products through C.
///
/// # Panics
/// When something is wrong.
pub fn c_abi(data: &[u8]) {
    let mut input = Input::new(data);
    let fitting = !input.rarely(3);
    let (n, groups, group_size) = (input.size(40), input.size(4), input.size(72));
    let (k, bits) = (groups * group_size, 2 + input.below(7) as u8);
    let mut codes = input.codes(bits, n * k);
    let mut scales = input.floats(n * groups);
    let mut zeros = input.flag().then(|| input.codes(bits, n * groups));
    let mut weights = qz1_weights { n, k, group_size, bits: bits.into(), ..empty!(qz1_weights) };
    if !fitting {
        match input.below(7) {
            0 => weights.n = input.word(),
            1 => weights.k = input.word(),
            2 => weights.group_size = input.word(),
            3 => weights.bits = input.word() as u32,
            4 => codes.truncate(input.below(codes.len() + 1)),
            5 => scales.truncate(input.below(scales.len() + 1)),
            _ => zeros = Some(input.codes(bits, 3)),
        }
    }
    (weights.codes, weights.codes_len) = (codes.as_ptr(), codes.len());
    (weights.scales, weights.scales_len) = (scales.as_ptr(), scales.len());
    (weights.zeros, weights.zeros_len) = optional(zeros.as_ref());
    let mut text = [0_u8; 24];
    let message = qz1_message { text: text.as_mut_ptr().cast(), capacity: text.len(), ..empty!(qz1_message) };
    let mut layout = empty!(qz1_layout);
    // SAFETY: lengths are those of what is there, here and below.
    let made = fair(unsafe { qz1_layout_of(&weights, input.byte().into(), &mut layout, &message) });
    assert!(made || !fitting);
    let spoiled = !made || input.rarely(4);
    // The size of another thing, but no more of it than there is.
    let len = if made { layout.bytes as usize } else { 4096 };
    if spoiled {
        spoil(&mut layout, &mut input);
    }
    let mut packed = vec![0x5a_u8; len];
    let (first, panels) = match input.rarely(4) {
        true => (input.word(), input.word()),
        false => (0, layout.panels as usize),
    };
    // SAFETY: as above.
    fair(unsafe { qz1_pack(&weights, &layout, first, panels, packed.as_mut_ptr(), len, null(), &message) });

    let (m, isa) = (input.below(6), u32::from(input.byte() % 10));
    let odd = usize::from(input.rarely(8));
    let mut x = input.floats(m * k + odd);
    let x = qz1_values {
        kind: if input.rarely(4) { input.byte().into() } else { QZ1_TYPE_F32 },
        data: x.as_mut_ptr().cast(),
        len: x.len(),
        ..empty!(qz1_values)
    };
    let by = qz1_static_scale {
        scale: input.floats(1)[0],
        zero: i32::from(input.byte() as i8) * 2,
        ..empty!(qz1_static_scale)
    };
    let by = if input.flag() { &raw const by } else { null() };
    let bias = input.flag().then(|| input.floats(n));
    let (bias_at, bias_len) = optional(bias.as_ref());
    let mut out = vec![0.0_f32; if input.rarely(4) { input.below(200) } else { m * n }];
    let (to, out_len) = (out.as_mut_ptr(), out.len());
    let (parts, nothing) = ((n * k, n * groups), empty!(qz1_parts));
    let (mut codes_out, mut scales_out, mut zeros_out) =
        (vec![0; parts.0], vec![0.0; parts.1], zeros.as_ref().map(|_| vec![0; parts.1]));
    // SAFETY: as above.
    unsafe {
        let (mut rows, mut floats) = (null_mut(), null_mut());
        assert!(fair(qz1_int8_rows_new(QZ1_ISA_DETECT, &mut rows, null())));
        assert_eq!(fair(qz1_float_rows_new(isa, &mut floats, &message)), !floats.is_null());
        fair(qz1_int8_rows_quantize(rows, &layout, &x, by, null(), &message));
        let at = packed.as_ptr();
        fair(qz1_multiply(&layout, at, len, rows, bias_at, bias_len, to, out_len, isa, null(), &message));
        if !floats.is_null() {
            fair(qz1_float_rows_pack(floats, &layout, &x, null(), &message));
            fair(qz1_multiply_float(
                &layout,
                at,
                len,
                floats,
                bias_at,
                bias_len,
                to,
                out_len,
                null(),
                &message,
            ));
        }
        fair(qz1_dequantize_rows(&layout, at, len, first, panels, to, out_len, &message));
        let (zeros_at, zeros_len) = match &mut zeros_out {
            Some(zeros) => (zeros.as_mut_ptr(), zeros.len()),
            None => (null_mut(), 0),
        };
        let parts = qz1_parts {
            codes: codes_out.as_mut_ptr(),
            codes_len: codes_out.len(),
            scales: scales_out.as_mut_ptr(),
            scales_len: scales_out.len(),
            zeros: zeros_at,
            zeros_len,
            ..nothing
        };
        fair(qz1_unpack(&layout, at, len, &parts, &message));
        qz1_int8_rows_free(rows);
        qz1_float_rows_free(floats);
    }
}

/// Pages, lists and a cache through C.
///
/// # Panics
/// When something is wrong.
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
    // SAFETY: lengths are those of what is there, here and below.
    let made = fair(unsafe { qz1_kv_layout_of(kind, d, &mut layout, &message) });
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
    // SAFETY: as above.
    unsafe {
        let at = pages.as_mut_ptr();
        let appended = fair(qz1_kv_append(
            &layout,
            at,
            pages.len(),
            lists.as_ptr(),
            lists_len,
            x.as_ptr(),
            x.len(),
            x.as_ptr(),
            x.len(),
            null(),
            &message,
        ));
        if appended {
            lists.iter_mut().for_each(|list| list.tokens = list.tokens.saturating_add(m));
        }
        let (mut key, mut value) = (vec![0.0; d], vec![0.0; d]);
        let slot = input.word();
        let page = pages.len() / (kv * blocks);
        let (key_at, value_at) = (key.as_mut_ptr(), value.as_mut_ptr());
        fair(qz1_kv_read(&layout, at, page, slot, key_at, d, value_at, d, &message));
        fair(qz1_kv_write(&layout, at, page, slot, key_at, d, value_at, d, &message));

        let most = lists.iter().map(|list| list.tokens).max().unwrap_or(0);
        let mut words = 0;
        fair(qz1_attend_workspace(&layout, &heads, queries, most, &mut words, &message));
        let mut workspace = vec![u32::MAX; words.min(1 << 20)];
        fair(qz1_attend(
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
            null(),
            &message,
        ));
        let (other, other_lse) = (out.clone(), lse.clone());
        let width = if input.rarely(4) { input.word() } else { d };
        let (out_at, lse_at) = (out.as_mut_ptr(), lse.as_mut_ptr());
        fair(qz1_attend_merge(
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
        let most = if input.rarely(4) { input.word() } else { 200 };
        let made = fair(qz1_kv_cache_new(&layout, &heads, most, &mut cache, &message));
        assert_eq!(made, !cache.is_null());
        for _ in 0..input.below(6) {
            let before = qz1_kv_cache_tokens(cache);
            let (x_at, q_at) = (x.as_ptr(), q.as_ptr());
            let (q_len, lse_len) = (q.len(), lse.len());
            match input.below(5) {
                0 => {
                    let done =
                        fair(qz1_kv_cache_append(cache, x_at, x.len(), x_at, x.len(), null(), &message));
                    assert!(done || qz1_kv_cache_tokens(cache) == before);
                }
                1 => {
                    fair(qz1_kv_cache_prefill(
                        cache,
                        q_at,
                        q_len,
                        out_at,
                        q_len,
                        lse_at,
                        lse_len,
                        null(),
                        &message,
                    ));
                }
                2 => {
                    fair(qz1_kv_cache_decode(
                        cache,
                        q_at,
                        q_len,
                        out_at,
                        q_len,
                        lse_at,
                        lse_len,
                        null(),
                        &message,
                    ));
                }
                3 => {
                    let to = input.word();
                    let done = fair(qz1_kv_cache_truncate(cache, to, &message));
                    assert_eq!(qz1_kv_cache_tokens(cache), if done { to } else { before });
                }
                _ => {
                    fair(qz1_kv_cache_clear(cache, &message));
                    assert_eq!(qz1_kv_cache_tokens(cache), 0);
                }
            }
        }
        qz1_kv_cache_free(cache);
    }
}
