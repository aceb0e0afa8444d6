//! Pages of the cache on the GPU match the CPU's definition, and have no bank conflicts in shared memory.

use proptest::prelude::*;
use quant_kernels_cpu::attention::{KvType, dequantize_head, quantize_head};
use quant_kernels_cuda::attention::{KvPageLayout, TILE_TOKENS};

const KINDS: [KvType; 3] = [KvType::Kv4, KvType::Kv8, KvType::F16];

proptest! {
    #[test]
    fn tokens_are_read_as_written_and_leave_others_alone(
        kind in prop::sample::select(KINDS.to_vec()),
        sixteenths in 1_usize..=16,
        page_tokens in prop::sample::select(vec![16_usize, 32, 64]),
        slots in (0_usize..64, 0_usize..64),
        values in prop::collection::vec(-60000.0_f32..60000.0, 256),
        shrink in 0_i32..20,
    ) {
        let d = 16 * sixteenths;
        let layout = KvPageLayout::new(kind, d, page_tokens).unwrap();
        let (slot, other) = (slots.0 % page_tokens, slots.1 % page_tokens);
        prop_assume!(slot != other);
        let x: Vec<f32> = values[..d].iter().map(|v| v * 2.0_f32.powi(-shrink)).collect();
        let y: Vec<f32> = x.iter().rev().map(|v| 1.0 - v / 2.0).collect();
        let mut page = vec![0xff_u8; layout.page_bytes()];
        layout.write(&mut page, other, &y, &x).unwrap();
        layout.write(&mut page, slot, &x, &y).unwrap();
        for (slot, key, value) in [(slot, &x, &y), (other, &y, &x)] {
            let mut read = [vec![0.0; d], vec![0.0; d]];
            let [k, v] = &mut read;
            layout.read(&page, slot, k, v).unwrap();
            for (got, from) in read.iter().zip([key, value]) {
                let mut expected: Vec<f32> = from.iter().map(|x| half::f16::from_f32(*x).to_f32()).collect();
                if kind != KvType::F16 {
                    let mut codes = vec![0; d];
                    let grid = quantize_head(from, layout.bits() as u32, &mut codes).unwrap();
                    dequantize_head(&codes, grid, &mut expected).unwrap();
                }
                prop_assert_eq!(got, &expected);
            }
        }
    }
}

#[test]
fn a_page_is_covered_once() {
    for kind in KINDS {
        for d in (16..=256).step_by(16) {
            let layout = KvPageLayout::new(kind, d, 32).unwrap();
            assert!(layout.tile_bytes().is_multiple_of(128));
            let words = layout.row_bytes() / 4;
            let rows = |place: &dyn Fn(usize, usize) -> usize| {
                let mut seen = vec![false; TILE_TOKENS * words];
                for (token, word) in (0..TILE_TOKENS * words).map(|i| (i / words, i % words)) {
                    let at = place(token, word);
                    assert!(!std::mem::replace(&mut seen[at], true), "{kind:?} {d} {token} {word}");
                    // Chunks of 16 bytes stay contiguous.
                    assert_eq!(at, place(token, word & !3) + word % 4);
                    // The copy kernel checks tokens per chunk, so a chunk must not span two rows.
                    assert_eq!(at / words, place(token, 0) / words);
                }
            };
            rows(&|token, word| layout.key_word(token, word));
            rows(&|token, word| layout.value_word(token, word));
        }
    }
}

/// Replays the loads of the decode kernel, lane by lane.
#[test]
fn loads_meet_no_bank_twice() {
    let wide = |words: usize| if words.is_multiple_of(4) { 4 } else { 2 - words % 2 };
    let check = |what: &str, width: usize, words: Vec<usize>| {
        // A pass serves as many lanes as together read 128 bytes.
        for lanes in words.chunks(32 / width) {
            let mut banks = [None; 32];
            for word in lanes.iter().flat_map(|&from| from..from + width) {
                let met = banks[word % 32].replace(word);
                assert!(met.is_none_or(|met| met == word), "{what}: bank {} twice", word % 32);
            }
        }
    };
    for kind in KINDS {
        for d in (32..=256).step_by(32) {
            let layout = KvPageLayout::new(kind, d, 16).unwrap();
            let words = layout.row_bytes() / 4;
            let what = format!("{kind:?} {d}");
            let (key, value) = (wide(words / 4), wide(words / 8));
            let lanes = || (0..32).map(|lane| (lane / 4, lane % 4));
            for (i, half) in (0..words / 4).step_by(key).flat_map(|i| [(i, 0), (i, 8)]) {
                let from = lanes().map(|(g, t)| layout.key_word(g + half, 4 * i + t * key)).collect();
                check(&format!("keys of {what}"), key, from);
            }
            for (i, token) in (0..words / 8).step_by(value).flat_map(|i| [0, 1, 8, 9].map(|token| (i, token)))
            {
                let from =
                    lanes().map(|(g, t)| layout.value_word(2 * t + token, 8 * i + g * value)).collect();
                check(&format!("values of {what}"), value, from);
            }
            // Two lanes share each of the four remaining words.
            if words % 8 == 4 {
                for token in [0, 1, 8, 9] {
                    let from = lanes().map(|(g, t)| layout.value_word(2 * t + token, words - 4) + g / 2);
                    check(&format!("the last values of {what}"), 1, from.collect());
                }
            }
        }
    }
}

#[test]
fn sizes_and_names() {
    let page = |kind, d, tokens| KvPageLayout::new(kind, d, tokens).unwrap();
    // Bytes per token and head with 128 features, for the key and again for the value: 64 + 4, 128 + 4, and 256.
    assert_eq!(KINDS.map(|kind| page(kind, 128, 64).page_bytes()), [64 * 136, 64 * 264, 64 * 512]);
    assert_eq!(page(KvType::Kv4, 80, 16).tile_bytes(), 2 * 16 * 48 + 128);
    assert_eq!([16, 32, 64].map(|tokens| page(KvType::Kv8, 64, tokens).page_shift()), [0, 1, 2]);
    let ids = [
        page(KvType::Kv4, 128, 64).id(),
        page(KvType::Kv8, 128, 64).id(),
        page(KvType::F16, 128, 64).id(),
        page(KvType::Kv4, 64, 64).id(),
    ];
    assert!((0..4).all(|i| (0..i).all(|j| ids[i] != ids[j])));
    assert_eq!(page(KvType::Kv4, 128, 16).id(), ids[0]);
    for (d, tokens) in [(0, 64), (8, 64), (24, 64), (272, 64), (64, 0), (64, 8), (64, 48), (64, 2048)] {
        assert_eq!(KvPageLayout::new(KvType::Kv4, d, tokens).unwrap_err().code(), 3);
    }
}

#[test]
fn misuse_writes_nothing() {
    let layout = KvPageLayout::new(KvType::F16, 16, 16).unwrap();
    let mut page = vec![7; layout.page_bytes()];
    let (good, mut bad) = ([1.0; 16], [1.0; 16]);
    bad[3] = f32::INFINITY;
    let mut code =
        |slot, key: &[f32], value: &[f32]| layout.write(&mut page, slot, key, value).unwrap_err().code();
    assert_eq!([code(16, &good, &good), code(0, &good[1..], &good), code(0, &good, &bad)], [4, 1, 3]);
    assert!(page.iter().all(|&b| b == 7));
    assert_eq!(layout.write(&mut page[1..], 0, &good, &good).unwrap_err().code(), 1);
    assert_eq!(layout.read(&page, 0, &mut [0.0; 15], &mut [0.0; 16]).unwrap_err().code(), 1);
}
