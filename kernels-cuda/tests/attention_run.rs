//! The kernels of attention, run instruction by instruction: appending against the CPU bit for bit, decoding against f64.

#[path = "attention/cache.rs"]
mod cache;
#[path = "attention/machine.rs"]
mod machine;
#[path = "attention/reference.rs"]
mod reference;
mod support;

use quant_kernels_cpu::attention::KvType;
use quant_kernels_cuda::attention::{
    AppendArguments, AppendShape, Float, KvPageLayout, MergeArguments, MergeShape, SplitRule,
};

use cache::{
    Case, Sequence, bits, bytes_of, check, check_random, decode, encode, floats, rounded, share, try_decode,
};
use machine::{Machine, Order};
use reference::Random;
use support::has_nvrtc;

const KINDS: [KvType; 3] = [KvType::Kv4, KvType::Kv8, KvType::F16];
/// Splits of 64 tokens, so that short sequences are cut too.
const SHORT: SplitRule = SplitRule { max_splits: 8, min_split: 64 };

/// Heads that are hard to quantize: by turns constant, zero, negative zero, tiny, as wide as can be, nearly constant, and
/// beyond what half floats hold as they are.
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

/// Tokens of three sequences, some skipped, stored by the kernel and by the CPU: the same bytes, and no other is touched.
fn append_case(kind: KvType, head_dim: usize, page_tokens: usize, input: Float) {
    let layout = KvPageLayout::new(kind, head_dim, page_tokens).unwrap();
    let (kv_heads, page_count, width) = (2, 5_u32, 3_u32);
    let table: Vec<u32> = vec![3, 1, 9, 0, 4, 9, 2, 9, 9];
    // Sequence and position of each token; one is skipped, one lies on a page that is none.
    let places: Vec<[u32; 2]> = (0..20)
        .map(|i| [i % 3, if i % 3 == 2 { i / 3 } else { i / 3 + page_tokens as u32 - 3 }])
        .chain([[0, u32::MAX], [2, page_tokens as u32]])
        .collect();
    let mut random = Random(7);
    let row = kv_heads * head_dim;
    let mut rows = |offset: usize| -> Vec<f32> {
        let all = (0..places.len() * kv_heads).flat_map(|i| hard_row(i + offset, head_dim, &mut random));
        all.map(|x| rounded(x, input).clamp(-65504.0, 65504.0)).map(|x| rounded_within(x, input)).collect()
    };
    let (keys, values) = (rows(0), rows(3));
    let mut expected = vec![0xa5_u8; page_count as usize * kv_heads * layout.page_bytes()];
    let before = expected.clone();
    for (i, &[sequence, position]) in places.iter().enumerate() {
        if position == u32::MAX {
            continue;
        }
        let page = table[(sequence * width) as usize + position as usize / page_tokens];
        for head in (0..kv_heads).filter(|_| page < page_count) {
            let at = (page as usize * kv_heads + head) * layout.page_bytes();
            let [key, value] = [&keys, &values].map(|x| &x[i * row + head * head_dim..][..head_dim]);
            let page = &mut expected[at..][..layout.page_bytes()];
            layout.write(page, position as usize % page_tokens, key, value).unwrap();
        }
    }
    let mut machine = Machine::new();
    let column = |i: usize| places.iter().map(|place| place[i]).collect::<Vec<u32>>();
    let arguments = AppendArguments {
        keys: machine.buffer_from("keys", &encode(&keys, input)),
        key_stride: row as u64,
        values: machine.buffer_from("values", &encode(&values, input)),
        value_stride: row as u64,
        sequence: machine.buffer_from("sequence", &bytes_of(&column(0))),
        position: machine.buffer_from("position", &bytes_of(&column(1))),
        table: machine.buffer_from("table", &bytes_of(&table)),
        table_stride: width,
        pages: machine.buffer_from("pages", &before),
        page_stride: (kv_heads * layout.page_bytes()) as u64,
        head_stride: layout.page_bytes() as u64,
        page_count,
        refused: machine.buffer_from("refused", &[0; 4]),
    };
    let plan = AppendShape { layout, kv_heads, tokens: places.len(), input }.plan().unwrap();
    machine.launch(&plan.variant, &plan.launch, &plan.arguments(&arguments), Order::Straight).unwrap();
    let got = machine.bytes(arguments.pages);
    if let Some(at) = (0..got.len()).find(|&i| got[i] != expected[i]) {
        panic!("{kind:?} {head_dim} {input:?}: byte {at} is {:#x} for {:#x}", got[at], expected[at]);
    }
    assert_ne!(got, before);
    assert_eq!(machine.bytes(arguments.refused), [0; 4]);
}

/// The nearest number of a type below the largest f16 in magnitude: bf16 has none between 65280 and 65536.
fn rounded_within(x: f32, float: Float) -> f32 {
    if float == Float::Bf16 && x.abs() > 65280.0 { 65280.0_f32.copysign(x) } else { rounded(x, float) }
}

#[test]
fn appended_bytes_equal_those_of_the_cpu() {
    if !has_nvrtc() {
        return;
    }
    for kind in KINDS {
        for (head_dim, page_tokens, input) in [
            (64, 16, Float::F16),
            (128, 64, Float::Bf16),
            (96, 32, Float::F32),
            (256, 64, Float::F16),
            (80, 16, Float::F32),
        ] {
            append_case(kind, head_dim, page_tokens, input);
        }
    }
}

/// What cannot be stored is limited, and counted.
#[test]
fn values_that_cannot_be_stored_are_counted() {
    if !has_nvrtc() {
        return;
    }
    let layout = KvPageLayout::new(KvType::Kv8, 64, 16).unwrap();
    let mut keys = vec![1.0_f32; 4 * 64];
    (keys[5], keys[64 + 9], keys[128]) = (f32::INFINITY, f32::NAN, -70000.0);
    let values = vec![0.5_f32; 4 * 64];
    let mut machine = Machine::new();
    let arguments = AppendArguments {
        keys: machine.buffer_from("keys", &encode(&keys, Float::F32)),
        key_stride: 64,
        values: machine.buffer_from("values", &encode(&values, Float::F32)),
        value_stride: 64,
        sequence: machine.buffer_from("sequence", &[0; 16]),
        position: machine.buffer_from("position", &bytes_of(&[0, 1, 2, 3])),
        table: machine.buffer_from("table", &[0; 4]),
        table_stride: 1,
        pages: machine.buffer_from("pages", &vec![0; layout.page_bytes()]),
        page_stride: layout.page_bytes() as u64,
        head_stride: layout.page_bytes() as u64,
        page_count: 1,
        refused: machine.buffer_from("refused", &[0; 4]),
    };
    let plan = AppendShape { layout, kv_heads: 1, tokens: 4, input: Float::F32 }.plan().unwrap();
    machine.launch(&plan.variant, &plan.launch, &plan.arguments(&arguments), Order::Straight).unwrap();
    assert_eq!(machine.bytes(arguments.refused), 3_u32.to_le_bytes());
    let (mut key, mut value) = (vec![0.0; 64], vec![0.0; 64]);
    layout.read(&machine.bytes(arguments.pages), 2, &mut key, &mut value).unwrap();
    assert_eq!((key[0], value[0]), (-65504.0, 0.5));
}

/// All kinds, sizes of heads and groups, lengths about the ends of tiles and pages, several sequences at once.
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
            println!("{kind:?} {head_dim} {group}: {share:.3} of what is expected");
            assert!(share > 1e-3, "{case:?}: {share}");
        }
    }
}

/// What the append kernel stored is what decode reads, and it reads no byte that was not stored.
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

/// Cut into splits, joined in order, whatever the order of blocks and warps; and a part of the list unseen.
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

/// A sequence alone gives the bits that it gives among others, wherever its pages lie.
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

/// Several queries of a sequence: none sees a token after its own, and each gives the bits that it gives alone.
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

/// Constant heads with scale 0, values of all magnitudes in one sequence, scores far apart.
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
            // Keys of moderate size, or all scores but one are nothing.
            let key: Vec<f32> = key.into_iter().map(|x| x.clamp(-30.0, 30.0)).collect();
            sequence.keys[t * 64..][..64].copy_from_slice(&key);
            sequence.values[t * 64..][..64].copy_from_slice(&value);
        }
        let sequences = [sequence];
        check(&case, &sequences, None, &decode(&case, &sequences, None, Order::Straight));
        // A constant is kept: all weights sum to one.
        let mut constant = Sequence::random(&case, 40, 5);
        constant.values.fill(-3.0);
        let result = decode(&case, &[constant.clone()], None, Order::Straight);
        check(&case, &[constant], None, &result);
        // Scores that grow by far more than an exponential spans, tile by tile.
        let mut steep = Sequence::random(&case, 100, 6);
        for (t, keys) in steep.keys.chunks_exact_mut(64).enumerate() {
            keys.iter_mut().for_each(|k| *k = *k * 0.1 + 10.0 * t as f32);
        }
        steep.query.iter_mut().for_each(|q| *q = q.abs());
        check(&case, &[steep.clone()], None, &decode(&case, &[steep], None, Order::Straight));
    }
}

/// Results on the halves of a list become that of the whole.
#[test]
fn parts_of_a_list_merge() {
    if !has_nvrtc() {
        return;
    }
    let case = Case { page_tokens: 16, ..Case::new(KvType::Kv4, 64, 8) };
    let whole = Sequence::random(&case, 96, 1);
    let row = case.kv_heads * case.head_dim;
    let part = |from: usize, to: usize| Sequence {
        tokens: to - from,
        keys: whole.keys[from * row..to * row].to_vec(),
        values: whole.values[from * row..to * row].to_vec(),
        query: whole.query.clone(),
    };
    let parts = [part(0, 48), part(48, 48), part(48, 96)];
    let results = parts.map(|part| decode(&case, &[part], None, Order::Straight));
    let (rows, d) = (case.heads(), case.head_dim);
    let mut machine = Machine::new();
    let all = |of: fn(&cache::Result) -> &Vec<f32>| -> Vec<u8> {
        results.iter().flat_map(|result| encode(of(result), Float::F32)).collect()
    };
    let arguments = MergeArguments {
        sums: machine.buffer_from("sums", &all(|r| &r.out)),
        logs: machine.buffer_from("logs", &all(|r| &r.lse)),
        out: machine.buffer("out", 4 * rows * d, 0),
        lse: machine.buffer("lse", 4 * rows, 0),
    };
    let plan = MergeShape { parts: 3, rows, head_dim: d, out: Float::F32 }.plan().unwrap();
    machine.launch(&plan.variant, &plan.launch, &plan.arguments(&arguments), Order::Straight).unwrap();
    let mut result = decode(&case, std::slice::from_ref(&whole), None, Order::Straight);
    result.out = floats(&machine.bytes(arguments.out));
    result.lse = floats(&machine.bytes(arguments.lse));
    check_random(&case, &[whole], None, &result);
    // And as the CPU joins them.
    let (mut out, mut lse) = (results[0].out.clone(), results[0].lse.clone());
    quant_kernels_cpu::attention::merge(d, &mut out, &mut lse, &results[2].out, &results[2].lse).unwrap();
    for (got, wanted) in result.out.iter().zip(&out).chain(result.lse.iter().zip(&lse)) {
        assert!((got - wanted).abs() <= 2e-6 * wanted.abs().max(1.0), "{got} {wanted}");
    }
}

/// Every byte of the cache is read once and no other; shared memory without conflicts; few instructions a code.
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
        // What 16 tiles more take: the main loop alone.
        let more = |of: &dyn Fn(&machine::Counters) -> u64| of(&runs[1].counters) - of(&runs[0].counters);
        let (wavefronts, ideal) = (more(&|c| c.shared_read_wavefronts), more(&|c| c.shared_read_ideal));
        assert_eq!(wavefronts, ideal, "{kind:?} {head_dim}");
        assert!(ideal > 0);
        let extraction = more(&|c| c.of("lop3") + c.of("prmt"));
        // Eight codes of every lane: 256.
        let codes = 256 * 2 * head_dim as u64;
        let per_eight = (extraction * 32 * 8) as f64 / codes as f64;
        assert!(per_eight <= 7.0, "{kind:?} {head_dim}: {per_eight} instructions for 8 codes");
        let per_token = more(&|c| c.total()) as f64 / 256.0;
        assert!(
            per_token <= 32.0,
            "{kind:?} {head_dim}: {per_token} instructions of a warp for a token and head"
        );
        println!("{kind:?} {head_dim}: {per_eight} for 8 codes, {per_token} a token and head");
    }
}

/// Mistakes that are easily made are found, by a fault, a bound, or a budget.
#[test]
fn planted_bugs_are_found() {
    if !has_nvrtc() {
        return;
    }
    // Two splits of twenty tiles: five a warp, one more than its ring holds.
    let rule = SplitRule { max_splits: 2, min_split: 320 };
    let case = Case { rule, page_tokens: 16, ..Case::new(KvType::Kv4, 128, 8) };
    let sequences = [Sequence::random(&case, 598, 1)];
    let run = |planted: Option<[&str; 2]>| -> Result<(), String> {
        let result = try_decode(&case, &sequences, None, Order::Straight, planted)?;
        share(&case, &sequences, None, &result, true)?;
        if result.page_bytes_read > result.page_bytes_held {
            return Err(format!("{} bytes read of {}", result.page_bytes_read, result.page_bytes_held));
        }
        match (result.counters.shared_read_wavefronts, result.counters.shared_read_ideal) {
            (taken, ideal) if taken as f64 > 1.2 * ideal as f64 => {
                Err(format!("{taken} wavefronts for {ideal}"))
            }
            _ => Ok(()),
        }
    };
    assert_eq!(run(None), Ok(()));
    for (what, planted) in [
        ("waits for too few copies", ["copy_async_wait<STAGES - 2>();", "copy_async_wait<STAGES - 1>();"]),
        ("copies over the tile that is read", ["slot == 0 ? STAGES - 1 : slot - 1", "slot"]),
        ("no barrier before warps meet", ["    __syncthreads();\n    float* meet", "    float* meet"]),
        (
            "no barrier after warps met",
            ["        }\n    __syncthreads();\n\n    for (u32 item", "        }\n\n    for (u32 item"],
        ),
        ("no fence before the ticket", ["    fence_device();\n    __syncthreads();", "    __syncthreads();"]),
        ("the first block joins", ["add_device(ticket, 1) == splits - 1", "add_device(ticket, 1) == 0"]),
        ("rows beyond the end are read", ["token >= skipped && token < valid ? 16 : 0", "16"]),
        (
            "grids beyond the end are read",
            ["            bytes = min(max(4 * (valid", "            bytes = 0 * min(max(4 * (valid"],
        ),
        ("keys are not exchanged back", ["ROW_WORDS % 32 == 0 ? 16 : 0", "ROW_WORDS % 16 == 0 ? 16 : 0"]),
        ("values are exchanged otherwise", ["row >> 1 & 1 : 0;", "row & 1 : 0;"]),
        ("a warp's tiles are skipped", ["next += WARPS;", "next += WARPS + 1;"]),
        (
            "too few bytes of the ring",
            ["constexpr int CHUNKS = TILE_BYTES / 16;", "constexpr int CHUNKS = TILE_BYTES / 16 - 1;"],
        ),
    ] {
        match run(Some(planted)) {
            Ok(()) => panic!("{what}: not found"),
            Err(found) => println!("{what}: {}", found.lines().next().unwrap_or_default()),
        }
    }
}
