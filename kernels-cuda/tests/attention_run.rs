//! The attention kernels on the interpreter: appending is bit-identical to the CPU, decoding is compared with f64.

#[path = "attention/append.rs"]
mod append;
#[path = "attention/cache.rs"]
mod cache;
#[path = "attention/machine.rs"]
mod machine;
#[path = "attention/merge.rs"]
mod merge;
#[path = "attention/planted.rs"]
mod planted;
#[path = "attention/reference.rs"]
mod reference;
#[path = "attention/strides.rs"]
mod strides;
mod support;

use quant_kernels_cpu::attention::KvType;
use quant_kernels_cuda::attention::{Float, SplitRule};

use cache::{Case, Sequence, bits, check, check_random, decode};
use machine::Order;
use reference::Random;
use support::has_nvrtc;

const KINDS: [KvType; 3] = [KvType::Kv4, KvType::Kv8, KvType::F16];
/// The minimum split is 64 tokens, so that short sequences are split too.
const SHORT: SplitRule = SplitRule { max_splits: 8, min_split: 64 };

/// Eight kinds of heads that are hard to quantize, then two that are not, in turn.
fn hard_row(turn: usize, d: usize, random: &mut Random) -> Vec<f32> {
    let around = |centre: f32, by: f32, random: &mut Random| -> Vec<f32> {
        random.normals(d).into_iter().map(|x| (centre + by * x).clamp(-65504.0, 65504.0)).collect()
    };
    match turn % 10 {
        0 => vec![1.0 / 3.0; d],
        1 => vec![0.0; d],
        2 => vec![-0.0; d],
        3 => around(0.0, 1e-8, random),
        4 => (0..d).map(|i| if i % 2 == 0 { 65504.0 } else { -65504.0 }).collect(),
        5 => around(1000.0, 0.01, random),
        6 => around(-60000.0, 3000.0, random),
        7 => around(0.0, 1e-4, random),
        8 => (0..d).map(|i| i as f32 * 0.5).collect(),
        _ => around(0.0, 1.0, random),
    }
}

#[test]
fn decoding_is_within_its_bound() {
    if !has_nvrtc() {
        return;
    }
    for kind in KINDS {
        for (head_dim, group, page_tokens, query, lengths) in [
            (128, 8, 64, Float::F16, vec![1, 63, 64, 65, 200]),
            (128, 1, 16, Float::Bf16, vec![65]),
            (64, 4, 32, Float::F16, vec![200, 0, 17]),
            (64, 7, 64, Float::Bf16, vec![64, 1]),
            (96, 16, 64, Float::F16, vec![63, 80]),
            (256, 8, 64, Float::F16, vec![65, 16]),
            (256, 16, 32, Float::Bf16, vec![40]),
            (80, 20, 16, Float::F16, vec![33]),
            (32, 3, 16, Float::F16, vec![70]),
        ] {
            let mut case = Case { page_tokens, query, ..Case::new(kind, head_dim, group) };
            case.kv_heads = if group < 8 { 2 } else { 1 };
            let sequences: Vec<Sequence> =
                lengths.iter().map(|&tokens| Sequence::random(&case, tokens, tokens as u64)).collect();
            let result = decode(&case, &sequences, None, Order::Straight);
            let share = check_random(&case, &sequences, None, &result);
            println!("{kind:?} {head_dim} {group}: error is {share:.3} of the bound");
            assert!(share > 1e-3, "{case:?}: {share}");
        }
    }
}

#[test]
fn what_was_appended_is_attended_to() {
    if !has_nvrtc() {
        return;
    }
    for kind in KINDS {
        for head_dim in [64, 80, 96, 128, 256] {
            let mut case = Case { page_tokens: 32, kv_heads: 2, ..Case::new(kind, head_dim, 2) };
            case.appended = true;
            let sequences = [45, 3, 64].map(|tokens| Sequence::random(&case, tokens, tokens as u64));
            let result = decode(&case, &sequences, None, Order::Straight);
            check_random(&case, &sequences, None, &result);
            assert!(result.page_bytes_read <= result.page_bytes_held, "{kind:?} {head_dim}");
        }
    }
}

#[test]
fn splits_join_to_the_whole() {
    if !has_nvrtc() {
        return;
    }
    for kind in KINDS {
        let case = Case { rule: SHORT, query: Float::Bf16, ..Case::new(kind, 64, 5) };
        let sequences = [300, 129, 64].map(|tokens| Sequence::random(&case, tokens, tokens as u64));
        for first in [None, Some([70, 129, 3].as_slice())] {
            let result = decode(&case, &sequences, first, Order::Straight);
            check_random(&case, &sequences, first, &result);
            for order in [Order::Reversed, Order::Seeded(5)] {
                let other = decode(&case, &sequences, first, order);
                assert_eq!(bits(&result.out), bits(&other.out), "{kind:?} {order:?}");
                assert_eq!(bits(&result.lse), bits(&other.lse), "{kind:?} {order:?}");
            }
        }
    }
}

#[test]
fn max_splits_cover_all_tokens() {
    if !has_nvrtc() {
        return;
    }
    for kind in KINDS {
        let case = Case { rule: SHORT, queries: 3, ..Case::new(kind, 64, 2) };
        let sequences = [513, 700].map(|tokens| Sequence::random(&case, tokens, tokens as u64));
        let result = decode(&case, &sequences, Some(&[0, 130]), Order::Straight);
        check_random(&case, &sequences, Some(&[0, 130]), &result);
    }
}

#[test]
fn a_sequence_does_not_see_its_neighbours() {
    if !has_nvrtc() {
        return;
    }
    for kind in KINDS {
        let case = Case { rule: SHORT, kv_heads: 2, page_tokens: 16, ..Case::new(kind, 96, 4) };
        let sequences: Vec<Sequence> =
            [150, 65, 20].iter().map(|&tokens| Sequence::random(&case, tokens, 9 + tokens as u64)).collect();
        let all = decode(&case, &sequences, None, Order::Straight);
        let row = case.heads() * case.head_dim;
        for (i, sequence) in sequences.iter().enumerate() {
            let alone = decode(&case, std::slice::from_ref(sequence), None, Order::Straight);
            assert_eq!(bits(&alone.out), bits(&all.out[i * row..][..row]), "{kind:?} {i}");
            assert_eq!(bits(&alone.lse), bits(&all.lse[i * case.heads()..][..case.heads()]), "{kind:?} {i}");
        }
    }
}

#[test]
fn queries_do_not_see_what_comes_after_them() {
    if !has_nvrtc() {
        return;
    }
    for kind in KINDS {
        let case = Case { rule: SHORT, kv_heads: 2, queries: 7, ..Case::new(kind, 64, 3) };
        let sequences = [150, 64, 5].map(|tokens| Sequence::random(&case, tokens, tokens as u64));
        let first = [4, 0, 0];
        let all = decode(&case, &sequences, Some(&first), Order::Straight);
        check_random(&case, &sequences, Some(&first), &all);
        let alone = Case { queries: 1, ..case };
        let row = case.heads() * case.head_dim;
        let last: Vec<Sequence> =
            sequences.iter().map(|s| Sequence { query: s.query[6 * row..].to_vec(), ..s.clone() }).collect();
        let result = decode(&alone, &last, Some(&first), Order::Straight);
        for i in 0..sequences.len() {
            let of_all = &all.out[(i * 7 + 6) * row..][..row];
            assert_eq!(bits(of_all), bits(&result.out[i * row..][..row]), "{kind:?} {i}");
        }
    }
}

/// Constant heads with scale 0, values of all magnitudes in one sequence, widely different scores.
#[test]
fn extremes_stay_within_the_bound() {
    if !has_nvrtc() {
        return;
    }
    for kind in KINDS {
        let case = Case::new(kind, 64, 8);
        let mut random = Random(3);
        let mut sequence = Sequence::random(&case, 70, 4);
        for t in 0..70 {
            let (key, value) = (hard_row(t + 5, 64, &mut random), hard_row(t, 64, &mut random));
            // Otherwise a single probability would dominate.
            let key: Vec<f32> = key.into_iter().map(|x| x.clamp(-30.0, 30.0)).collect();
            sequence.keys[t * 64..][..64].copy_from_slice(&key);
            sequence.values[t * 64..][..64].copy_from_slice(&value);
        }
        let sequences = [sequence];
        check(&case, &sequences, None, &decode(&case, &sequences, None, Order::Straight));
        // The probabilities sum to one.
        let mut constant = Sequence::random(&case, 40, 5);
        constant.values.fill(-3.0);
        let result = decode(&case, &[constant.clone()], None, Order::Straight);
        check(&case, &[constant], None, &result);
        // Scores grow from tile to tile by far more than the range of an exponential.
        let mut steep = Sequence::random(&case, 100, 6);
        for (t, keys) in steep.keys.chunks_exact_mut(64).enumerate() {
            keys.iter_mut().for_each(|k| *k = *k * 0.1 + 10.0 * t as f32);
        }
        steep.query.iter_mut().for_each(|q| *q = q.abs());
        check(&case, &[steep.clone()], None, &decode(&case, &[steep], None, Order::Straight));
    }
}

/// Weights must stay within f16 when scores and value scales grow, by less and by more than the limit at which the
/// kernel rescales.
#[test]
fn scores_and_scales_grow_together() {
    if !has_nvrtc() {
        return;
    }
    for kind in KINDS {
        let case = Case::new(kind, 64, 1);
        for (by, doublings) in [(3.9_f32, 5.8_f32), (3.9, 15.0), (30.0, 5.8), (500.0, 40.0)] {
            let mut sequence = Sequence::random(&case, 80, 9);
            sequence.query.fill(1.0);
            // Tokens 64 and later are in the first warp's second tile; the score is 64 k / 8.
            for (t, (key, value)) in
                sequence.keys.chunks_mut(64).zip(sequence.values.chunks_mut(64)).enumerate()
            {
                let later = t >= 64;
                key.fill(if later { doublings * std::f32::consts::LN_2 / 8.0 } else { 0.0 });
                value.iter_mut().for_each(|v| *v *= if later { by } else { 1.0 });
            }
            let sequences = [sequence];
            let result = decode(&case, &sequences, None, Order::Straight);
            check(&case, &sequences, None, &result);
        }
    }
}

#[test]
fn budgets_are_kept() {
    if !has_nvrtc() {
        return;
    }
    for (kind, head_dim) in KINDS.into_iter().flat_map(|kind| [64, 96, 128, 256].map(|d| (kind, d))) {
        let case = Case::new(kind, head_dim, 8);
        let runs = [256, 512].map(|tokens| {
            let sequence = Sequence::random(&case, tokens, 2);
            decode(&case, &[sequence], None, Order::Straight)
        });
        for run in &runs {
            assert!(run.page_bytes_read as f64 <= 1.03 * run.page_bytes_held as f64, "{kind:?} {head_dim}");
        }
        // The cost of 16 more tiles in the main loop.
        let more = |of: &dyn Fn(&machine::Counters) -> u64| of(&runs[1].counters) - of(&runs[0].counters);
        let (wavefronts, ideal) = (more(&|c| c.shared_read_wavefronts), more(&|c| c.shared_read_ideal));
        assert_eq!(wavefronts, ideal, "{kind:?} {head_dim}");
        assert!(ideal > 0);
        let extraction = more(&|c| c.of("lop3") + c.of("prmt"));
        // The limit is per 8 codes of a lane; an instruction of a warp covers 32 lanes.
        let codes = 256 * 2 * head_dim as u64;
        let per_eight = (extraction * 32 * 8) as f64 / codes as f64;
        assert!(per_eight <= 7.0, "{kind:?} {head_dim}: {per_eight} instructions per 8 codes");
        let per_token = more(&|c| c.total()) as f64 / 256.0;
        assert!(per_token <= 32.0, "{kind:?} {head_dim}: {per_token} warp instructions per token and head");
        println!("{kind:?} {head_dim}: {per_eight} per 8 codes, {per_token} per token and head");
    }
}

#[test]
fn bytes_of_a_workspace_are_kept() {
    if !has_nvrtc() {
        return;
    }
    for (head_dim, group) in [(64, 8), (128, 3)] {
        let case = Case { rule: SHORT, ..Case::new(KvType::Kv4, head_dim, group) };
        let result = decode(&case, &[Sequence::random(&case, 500, 2)], None, Order::Straight);
        let splits = SHORT.splits(500);
        assert_eq!(splits, 8);
        let floor = (splits * group * (4 * head_dim + 8)) as u64;
        let traffic = result.counters.traffic("workspace");
        assert_eq!((traffic.read.unique_bytes, traffic.written.unique_bytes), (floor, floor));
        let ticket = result.counters.traffic("tickets");
        assert_eq!((ticket.read.unique_bytes, ticket.written.unique_bytes), (4, 4));
    }
}
