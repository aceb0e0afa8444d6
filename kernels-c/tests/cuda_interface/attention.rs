//! Contents of pages and results of attention on a device.

use core::ptr::null_mut;

use half::f16;
use quant_kernels::*;
use quant_kernels_cpu::attention::KvType;
use quant_kernels_cuda::attention::KvPageLayout;

use crate::common::*;
use crate::driver::{self, Bytes};
use crate::linear::{halves, workspace};

const DIM: usize = 64;
const KV_HEADS: usize = 2;
const QUERY_HEADS: usize = 6;
const PAGE: usize = 16;
const TOKENS: [usize; 2] = [20, 5];
/// Pages of each sequence, out of four in the pool.
const TABLE: [[u32; 2]; 2] = [[2, 0], [1, 3]];
const SCALE: f32 = 0.125;

/// Appends tokens of two sequences, and one token that is skipped. Returns the pool, and keys and values as read back:
/// `[sequence][token][head]`.
#[allow(clippy::type_complexity, reason = "keys and values of each token and head")]
fn appended(kernels: &Kernels) -> (qz1_cuda_kv_layout, Bytes, Vec<Vec<[[Vec<f32>; 2]; KV_HEADS]>>) {
    let mut layout: qz1_cuda_kv_layout = sized();
    // SAFETY: every pointer is null or points to a live value.
    done(|m| unsafe { qz1_cuda_kv_layout_of(QZ1_KV_4BIT, DIM, PAGE, &mut layout, m) });
    let rust = KvPageLayout::new(KvType::Kv4, DIM, PAGE).unwrap();
    assert_eq!((layout.page_bytes, layout.id), (rust.page_bytes() as u64, rust.id()));
    let page_bytes = rust.page_bytes();

    let tokens = TOKENS[0] + TOKENS[1] + 1;
    let sequence: Vec<u32> = (0..tokens).map(|t| u32::from(t >= TOKENS[0])).collect();
    let mut position: Vec<u32> =
        (0..tokens).map(|t| if t < TOKENS[0] { t } else { t - TOKENS[0] } as u32).collect();
    position[tokens - 1] = u32::MAX;
    let width = KV_HEADS * DIM;
    let rows = halves(tokens * 2 * width, 71);
    let shape = qz1_cuda_append_shape {
        x_type: QZ1_TYPE_F16,
        layout: &layout,
        kv_heads: KV_HEADS,
        tokens,
        ..sized()
    };
    let plan = Plan::new(kernels, &shape, qz1_cuda_append_plan);
    assert_eq!(plan.workspace(), (0, 0));
    let [sequence_at, position_at] = [Bytes::of(&sequence), Bytes::of(&position)];
    let (rows_at, table, refused) = (Bytes::of(&rows), Bytes::of(TABLE.as_flattened()), Bytes::of(&[7_u32]));
    let pool = Bytes::filled(4 * KV_HEADS * page_bytes, 0);
    let (keys, skipped) = (rows_at.region(), 2 * width as u64);
    let arguments = qz1_cuda_append_arguments {
        keys,
        values: qz1_cuda_region { address: keys.address + skipped, bytes: keys.bytes - skipped },
        sequence: sequence_at.region(),
        position: position_at.region(),
        table: table.region(),
        pages: pool.region(),
        refused: refused.region(),
        key_stride: 2 * width,
        value_stride: 2 * width,
        table_stride: 2,
        ..sized()
    };
    // SAFETY: device memory stays allocated until after the synchronization.
    done(|m| unsafe { qz1_cuda_append_launch(plan.0, &arguments, null_mut(), m) });
    assert_eq!(refused.read::<u32>(), [7]);

    let bytes = pool.read::<u8>();
    let mut first = 0;
    let read = TABLE.iter().zip(TOKENS).map(|(pages, count)| {
        let tokens = (0..count).map(|t| {
            core::array::from_fn(|head| {
                let at = (pages[t / PAGE] as usize * KV_HEADS + head) * page_bytes;
                let mut read = [vec![0.0; DIM], vec![0.0; DIM]];
                let [key, value] = &mut read;
                rust.read(&bytes[at..at + page_bytes], t % PAGE, key, value).unwrap();
                for (part, read) in read.iter().enumerate() {
                    let from = (first + t) * 2 * width + part * width + head * DIM;
                    let given: Vec<f32> = rows[from..from + DIM].iter().map(|v| v.to_f32()).collect();
                    let step = given.iter().fold(0.0_f32, |most, v| most.max(v.abs())) * 2.0 / 15.0;
                    assert!(given.iter().zip(read).all(|(a, b)| (a - b).abs() <= 0.51 * step));
                }
                read
            })
        });
        let tokens = tokens.collect::<Vec<_>>();
        first += count;
        tokens
    });
    let read = read.collect();
    (layout, pool, read)
}

#[test]
fn what_was_appended_is_attended_to() {
    if !on_gpu() {
        return;
    }
    driver::context();
    let kernels = Kernels::new();
    let (layout, pool, stored) = appended(&kernels);
    let rows = TOKENS.len() * QUERY_HEADS;
    let query = halves(rows * DIM, 41);
    let shape = qz1_cuda_decode_shape {
        query_type: QZ1_TYPE_F16,
        out_type: QZ1_TYPE_F32,
        layout: &layout,
        query_heads: QUERY_HEADS,
        kv_heads: KV_HEADS,
        sequences: TOKENS.len(),
        queries: 1,
        max_tokens: 2000,
        ..sized()
    };
    let plan = Plan::new(&kernels, &shape, qz1_cuda_decode_plan);
    assert!(plan.workspace().0 > 0 && plan.workspace().1 > 0);
    let (query_at, table) = (Bytes::of(&query), Bytes::of(TABLE.as_flattened()));
    let [workspace, tickets] = workspace(&plan);
    // Attends to all tokens at once, then to two parts in one buffer: up to 16 tokens of each list, and the rest.
    let [out, lse] = [3 * rows * DIM * 4, 3 * rows * 4].map(|len| Bytes::filled(len, 0x5a));
    let part = |of: &Bytes, i: u64| {
        let bytes = of.region().bytes / 3;
        qz1_cuda_region { address: of.region().address + i * bytes, bytes }
    };
    let all = TOKENS.map(|t| t as u32);
    let cut = TOKENS.map(|t| t.min(16) as u32);
    for (i, (tokens, first)) in [(all, [0, 0]), (cut, [0, 0]), (all, cut)].into_iter().enumerate() {
        let (tokens, first_at) = (Bytes::of(&tokens), Bytes::of(&first));
        let arguments = qz1_cuda_decode_arguments {
            scale: SCALE,
            query: query_at.region(),
            pages: pool.region(),
            table: table.region(),
            tokens: tokens.region(),
            first: if first == [0, 0] { NONE } else { first_at.region() },
            out: part(&out, i as u64),
            lse: part(&lse, i as u64),
            tickets: tickets.region(),
            workspace: workspace.region(),
            table_stride: 2,
            count_stride: 1,
            ..sized()
        };
        // SAFETY: this test upholds the pointer contract of the C interface.
        done(|m| unsafe { qz1_cuda_decode_launch(plan.0, &arguments, null_mut(), m) });
        driver::wait();
    }
    let (whole, whole_lse) = (out.read::<f32>(), lse.read::<f32>());
    for row in 0..rows {
        let (sequence, head) = (row / QUERY_HEADS, row % QUERY_HEADS);
        let of = |t: usize| &stored[sequence][t][head / (QUERY_HEADS / KV_HEADS)];
        let q = &query[row * DIM..][..DIM];
        let scores: Vec<f64> = (0..TOKENS[sequence])
            .map(|t| {
                let dot = q.iter().zip(&of(t)[0]).map(|(q, k)| q.to_f64() * f64::from(*k)).sum::<f64>();
                f64::from(SCALE) * dot
            })
            .collect();
        let total = scores.iter().map(|s| s.exp()).sum::<f64>();
        assert!((f64::from(whole_lse[row]) - total.ln()).abs() < 1e-3, "{row}");
        for i in 0..DIM {
            let exact =
                scores.iter().enumerate().map(|(t, s)| s.exp() / total * f64::from(of(t)[1][i])).sum::<f64>();
            let got = f64::from(whole[row * DIM + i]);
            assert!((got - exact).abs() < 5e-3, "{row} {i}: {got} and {exact}");
        }
    }
    assert!(whole_lse[3 * rows - QUERY_HEADS..].iter().all(|&l| l == f32::NEG_INFINITY));

    let shape = qz1_cuda_merge_shape { out_type: QZ1_TYPE_F16, parts: 2, rows, head_dim: DIM, ..sized() };
    let plan = Plan::new(&kernels, &shape, qz1_cuda_merge_plan);
    let behind = |of: &Bytes| {
        let (first, rest) = (part(of, 0), part(of, 1));
        qz1_cuda_region { bytes: 2 * first.bytes, ..rest }
    };
    let [joined, joined_lse] = [rows * DIM * 2, rows * 4].map(|len| Bytes::filled(len, 0x5a));
    let arguments = qz1_cuda_merge_arguments {
        sums: behind(&out),
        logs: behind(&lse),
        out: joined.region(),
        lse: joined_lse.region(),
        ..sized()
    };
    // SAFETY: this test upholds the pointer contract of the C interface.
    done(|m| unsafe { qz1_cuda_merge_launch(plan.0, &arguments, null_mut(), m) });
    for (got, expected) in joined.read::<u16>().into_iter().map(f16::from_bits).zip(&whole) {
        assert!((got.to_f32() - expected).abs() < 8e-3, "{got} and {expected}");
    }
    for (got, expected) in joined_lse.read::<f32>().iter().zip(&whole_lse) {
        assert!((got - expected).abs() < 1e-3, "{got} and {expected}");
    }
}
