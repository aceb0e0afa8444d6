//! Strides of queries, lists and results, and lists that are longer than planned.

use half::{bf16, f16};
use quant_kernels_cuda::attention::{
    DecodeArguments, DecodeShape, Float, KvPageLayout, MergeArguments, MergeShape,
};

use crate::cache::{bits, bytes_of, encode, floats};
use crate::machine::{Machine, Order};
use crate::reference::Random;
use crate::support::has_nvrtc;
use crate::{KINDS, SHORT};

const DIM: usize = 64;
const PAGE: usize = 16;
const PAGES: usize = 24;
const KV_HEADS: usize = 2;
const GROUP: usize = 3;
const SEQUENCES: usize = 2;

struct Cache {
    layout: KvPageLayout,
    pages: Vec<u8>,
    /// `[sequences, query heads, DIM]`
    queries: Vec<f32>,
}

/// Lists: page numbers and numbers of tokens, by sequence and key-value head.
type Lists = [[(Vec<u32>, u32); KV_HEADS]; SEQUENCES];

impl Cache {
    fn new(kind: quant_kernels_cpu::attention::KvType) -> Self {
        let layout = KvPageLayout::new(kind, DIM, PAGE).unwrap();
        let mut random = Random(11);
        let mut pages = vec![0; PAGES * KV_HEADS * layout.page_bytes()];
        for page in pages.chunks_exact_mut(layout.page_bytes()) {
            for token in 0..PAGE {
                let [key, value] = [(); 2].map(|()| random.normals(DIM));
                layout.write(page, token, &key, &value).unwrap();
            }
        }
        Self { layout, pages, queries: random.normals(SEQUENCES * KV_HEADS * GROUP * DIM) }
    }

    /// Result bytes `[sequences, query heads, DIM]` for separate lists per head, with gaps of `gap` elements between
    /// queries.
    fn decode(&self, lists: &Lists, out: Float, gap: usize, max_tokens: usize) -> Vec<u8> {
        let shape = DecodeShape {
            layout: self.layout,
            query_heads: KV_HEADS * GROUP,
            kv_heads: KV_HEADS,
            sequences: SEQUENCES,
            queries: 1,
            max_tokens,
            query: Float::F16,
            out,
        };
        let plan = shape.plan_with(SHORT).unwrap();
        let width = lists.iter().flatten().map(|(pages, _)| pages.len()).max().unwrap();
        // In the table, all sequences of a head are followed by those of the next head. Counts have gaps of one entry.
        let (mut table, mut tokens) =
            (vec![u32::MAX; KV_HEADS * SEQUENCES * width], vec![0; KV_HEADS * 2 * SEQUENCES]);
        for (s, of) in lists.iter().enumerate() {
            for (h, (pages, count)) in of.iter().enumerate() {
                table[(h * SEQUENCES + s) * width..][..pages.len()].copy_from_slice(pages);
                tokens[h * 2 * SEQUENCES + 2 * s] = *count;
            }
        }
        let row = KV_HEADS * GROUP * DIM;
        let padded = self.queries.chunks(row).flat_map(|q| q.iter().copied().chain(vec![f32::NAN; gap]));
        let rows = SEQUENCES * KV_HEADS * GROUP;
        let mut machine = Machine::new();
        let arguments = DecodeArguments {
            query: machine.buffer_from("query", &encode(&padded.collect::<Vec<f32>>(), Float::F16)),
            query_stride: (row + gap) as u64,
            pages: machine.buffer_from("pages", &self.pages),
            page_stride: (KV_HEADS * self.layout.page_bytes()) as u64,
            head_stride: self.layout.page_bytes() as u64,
            table: machine.buffer_from("table", &bytes_of(&table)),
            table_stride: width as u32,
            table_head_stride: (SEQUENCES * width) as u32,
            tokens: machine.buffer_from("tokens", &bytes_of(&tokens)),
            first: 0,
            count_stride: 2,
            count_head_stride: 2 * SEQUENCES as u32,
            scale: 0.125,
            out: machine.buffer("out", rows * DIM * out.bytes()),
            lse: machine.buffer("lse", 4 * rows),
            tickets: machine.buffer_from("tickets", &vec![0; plan.tickets()]),
            workspace: machine.buffer("workspace", plan.workspace()),
        };
        machine.launch(&plan.variant, &plan.launch, &plan.arguments(&arguments), Order::Straight).unwrap();
        assert!(plan.tickets() == 0 || machine.bytes(arguments.tickets).iter().all(|&byte| byte == 0));
        machine.bytes(arguments.out)
    }
}

fn lists() -> Lists {
    [
        [((0..8).collect(), 120), ((8..11).rev().collect(), 33)],
        [((11..13).collect(), 17), ((13..24).rev().collect(), 170)],
    ]
}

#[test]
fn every_head_has_its_list() {
    if !has_nvrtc() {
        return;
    }
    for kind in KINDS {
        let cache = Cache::new(kind);
        let all = floats(&cache.decode(&lists(), Float::F32, 12, 176));
        for sequence in 0..SEQUENCES {
            for head in 0..KV_HEADS {
                let list = lists()[sequence][head].clone();
                let same: Lists = core::array::from_fn(|_| core::array::from_fn(|_| list.clone()));
                let alone = floats(&cache.decode(&same, Float::F32, 0, 176));
                let at = (sequence * KV_HEADS + head) * GROUP * DIM;
                let of = |values: &[f32]| bits(&values[at..][..GROUP * DIM]);
                assert_eq!(of(&all), of(&alone), "{kind:?} {sequence} {head}");
                assert!(all[at..][..GROUP * DIM].iter().any(|&v| v != 0.0));
            }
        }
    }
}

/// From a single block, and from merged splits.
#[test]
fn results_have_their_type() {
    if !has_nvrtc() {
        return;
    }
    let halves =
        |bytes: &[u8]| bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect::<Vec<_>>();
    for kind in KINDS {
        let cache = Cache::new(kind);
        let whole = floats(&cache.decode(&lists(), Float::F32, 0, 176));
        let expected: Vec<u16> = whole.iter().map(|&v| f16::from_f32(v).to_bits()).collect();
        assert_eq!(halves(&cache.decode(&lists(), Float::F16, 0, 176)), expected, "{kind:?}");
        let expected: Vec<u16> = whole.iter().map(|&v| bf16::from_f32(v).to_bits()).collect();
        assert_eq!(halves(&cache.decode(&lists(), Float::Bf16, 0, 176)), expected, "{kind:?}");
    }
    let (parts, rows) = (3, 5);
    let mut random = Random(5);
    let (sums, logs) = (random.normals(parts * rows * DIM), random.normals(parts * rows));
    let merged = |out: Float| {
        let mut machine = Machine::new();
        let arguments = MergeArguments {
            sums: machine.buffer_from("sums", &encode(&sums, Float::F32)),
            logs: machine.buffer_from("logs", &encode(&logs, Float::F32)),
            out: machine.buffer("out", rows * DIM * out.bytes()),
            lse: 0,
        };
        let plan = MergeShape { parts, rows, head_dim: DIM, out }.plan().unwrap();
        machine.launch(&plan.variant, &plan.launch, &plan.arguments(&arguments), Order::Straight).unwrap();
        machine.bytes(arguments.out)
    };
    let whole = floats(&merged(Float::F32));
    let expected: Vec<u16> = whole.iter().map(|&v| f16::from_f32(v).to_bits()).collect();
    assert_eq!(halves(&merged(Float::F16)), expected);
    let expected: Vec<u16> = whole.iter().map(|&v| bf16::from_f32(v).to_bits()).collect();
    assert_eq!(halves(&merged(Float::Bf16)), expected);
}

#[test]
fn lists_beyond_the_plan_harm_no_other() {
    if !has_nvrtc() {
        return;
    }
    let cache = Cache::new(KINDS[0]);
    let whole = floats(&cache.decode(&lists(), Float::F32, 0, 176));
    // Two splits, although the last list needs three; then none.
    for max_tokens in [128, 64] {
        let some = floats(&cache.decode(&lists(), Float::F32, 0, max_tokens));
        let at = KV_HEADS * GROUP * DIM;
        assert_eq!(bits(&whole[at / 2..][..at]), bits(&some[at / 2..][..at]));
        assert!(some.iter().all(|v| v.is_finite()));
    }
}
