//! Appending gives the same bytes as the CPU for any order of blocks, and planted bugs are detected.

use quant_kernels_cpu::attention::KvType;
use quant_kernels_cuda::attention::{AppendArguments, AppendShape, Float, KvPageLayout};

use crate::cache::{bytes_of, encode, rounded, with_text};
use crate::machine::{Machine, Order};
use crate::reference::Random;
use crate::support::has_nvrtc;
use crate::{KINDS, hard_row};

/// Stores tokens of three sequences, some of which are skipped, with the kernel and with the CPU. With `planted`, a
/// part of the source is replaced. Returns a description of the difference, if any.
fn append_case(
    (kind, head_dim, page_tokens, input): (KvType, usize, usize, Float),
    order: Order,
    planted: Option<[&str; 2]>,
) -> Result<(), String> {
    let layout = KvPageLayout::new(kind, head_dim, page_tokens).unwrap();
    let (kv_heads, page_count, width) = (2, 5_u32, 3_u32);
    let table: Vec<u32> = vec![3, 1, 9, 0, 4, 9, 2, 9, 9];
    // Sequence and position. Two tokens are skipped, one is on a page that does not exist, and the last block is not
    // full.
    let places: Vec<[u32; 2]> = (0..20)
        .map(|i| [i % 3, if i % 3 == 2 { i / 3 } else { i / 3 + page_tokens as u32 - 3 }])
        .chain([[0, u32::MAX], [2, page_tokens as u32], [1, u32::MAX]])
        .collect();
    let mut random = Random(7);
    let row = kv_heads * head_dim;
    let mut rows = |offset: usize| -> Vec<f32> {
        let all = (0..places.len() * kv_heads).flat_map(|i| hard_row(i + offset, head_dim, &mut random));
        all.map(|x| rounded(x, input).clamp(-65504.0, 65504.0)).map(|x| rounded_within(x, input)).collect()
    };
    let (keys, values) = (rows(0), rows(3));
    // The gaps contain values that must not be stored anywhere.
    let strides = [row + 8, row + 24];
    let with_stride = |values: &[f32], stride: usize| -> Vec<f32> {
        values.chunks(row).flat_map(|of| of.iter().copied().chain(vec![f32::NAN; stride - row])).collect()
    };
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
        keys: machine.buffer_from("keys", &encode(&with_stride(&keys, strides[0]), input)),
        key_stride: strides[0] as u64,
        values: machine.buffer_from("values", &encode(&with_stride(&values, strides[1]), input)),
        value_stride: strides[1] as u64,
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
    let mut variant = plan.variant.clone();
    if let Some(planted) = planted {
        variant.source = with_text(variant.source, planted);
    }
    machine.launch(&variant, &plan.launch, &plan.arguments(&arguments), order)?;
    let got = machine.bytes(arguments.pages);
    if let Some(at) = (0..got.len()).find(|&i| got[i] != expected[i]) {
        return Err(format!(
            "{kind:?} {head_dim} {input:?}: byte {at} is {:#x} for {:#x}",
            got[at], expected[at]
        ));
    }
    assert_ne!(got, before);
    assert_eq!(machine.bytes(arguments.refused), [0; 4]);
    Ok(())
}

/// Rounds to a type, to at most the largest f16: bf16 has no values between 65280 and 65536.
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
            (64, 1024, Float::F16),
        ] {
            append_case((kind, head_dim, page_tokens, input), Order::Straight, None).unwrap();
        }
    }
}

#[test]
fn orders_of_blocks_change_no_byte() {
    if !has_nvrtc() {
        return;
    }
    for kind in KINDS {
        for order in [Order::Reversed, Order::Seeded(3)] {
            append_case((kind, 96, 32, Float::Bf16), order, None).unwrap();
        }
    }
}

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

/// Keys and values are read once, and each token's bytes are written once.
#[test]
fn bytes_are_the_floor() {
    if !has_nvrtc() {
        return;
    }
    let (tokens, kv_heads) = (16, 2);
    for (kind, head_dim) in [(KvType::Kv4, 128), (KvType::Kv8, 64), (KvType::F16, 128)] {
        let layout = KvPageLayout::new(kind, head_dim, 16).unwrap();
        let row = kv_heads * head_dim;
        let values = vec![0.25_f32; tokens * row];
        let mut machine = Machine::new();
        let arguments = AppendArguments {
            keys: machine.buffer_from("keys", &encode(&values, Float::F16)),
            key_stride: row as u64,
            values: machine.buffer_from("values", &encode(&values, Float::F16)),
            value_stride: row as u64,
            sequence: machine.buffer_from("sequence", &bytes_of(&[0; 16])),
            position: machine.buffer_from("position", &bytes_of(&(0..16).collect::<Vec<u32>>())),
            table: machine.buffer_from("table", &[0; 4]),
            table_stride: 1,
            pages: machine.buffer("pages", kv_heads * layout.page_bytes()),
            page_stride: (kv_heads * layout.page_bytes()) as u64,
            head_stride: layout.page_bytes() as u64,
            page_count: 1,
            refused: 0,
        };
        let plan = AppendShape { layout, kv_heads, tokens, input: Float::F16 }.plan().unwrap();
        let counters = machine
            .launch(&plan.variant, &plan.launch, &plan.arguments(&arguments), Order::Straight)
            .unwrap();
        for name in ["keys", "values"] {
            let read = counters.traffic(name).read;
            let floor = (2 * tokens * row) as u64;
            assert_eq!((read.unique_bytes, read.bytes_asked), (floor, floor));
            // A buffer begins in the middle of a sector.
            assert!(32 * read.unique_sectors <= floor + 32);
        }
        let pages = counters.traffic("pages");
        let floor = (kv_heads * layout.page_bytes()) as u64;
        assert_eq!((pages.written.unique_bytes, pages.written.bytes_asked), (floor, floor), "{kind:?}");
        assert_eq!(pages.read.unique_bytes, 0);
    }
}

/// This kernel has no ring and no barrier.
#[test]
fn planted_bugs_are_found() {
    if !has_nvrtc() {
        return;
    }
    // Rows of 80 features are padded to 96.
    let case = |kind| (kind, 80, 16, Float::F32);
    for kind in [KvType::Kv4, KvType::Kv8] {
        append_case(case(kind), Order::Straight, None).unwrap();
    }
    for (kind, planted, found) in [
        (
            KvType::Kv4,
            ["bool wanted = token < tokens;", "bool wanted = true;"],
            ["out of bounds", "position+"],
        ),
        (KvType::Kv4, ["wanted = at != SKIPPED;", "wanted = true;"], ["out of bounds", "ld.global"]),
        (KvType::Kv4, ["wanted = page < page_count;", "wanted = true;"], ["out of bounds", "pages+"]),
        (KvType::Kv8, ["wanted && lane * SHARE < HEAD_DIM", "wanted"], ["byte", "for 0x0"]),
        (
            KvType::Kv8,
            ["if (!wanted || lane * SHARE >= DIM) return;", "if (!wanted) return;"],
            ["race in global memory", "pages+"],
        ),
        // All lanes must take part in an exchange.
        (
            KvType::Kv4,
            [
                "        low = fminf(low, __shfl_xor_sync",
                "        if (holds) low = fminf(low, __shfl_xor_sync",
            ],
            ["warp divergence", "shfl"],
        ),
        (
            KvType::Kv4,
            ["for (int step = 1; step < LANES; step *= 2)", "for (int step = 2; step < LANES; step *= 2)"],
            ["byte", "is"],
        ),
    ] {
        let message = append_case(case(kind), Order::Straight, Some(planted)).expect_err(planted[0]);
        assert!(found.iter().all(|words| message.contains(words)), "{}: {message}", planted[1]);
    }
}
