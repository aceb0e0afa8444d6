//! Merging results on parts of sequences.

use quant_kernels_cpu::attention::KvType;
use quant_kernels_cuda::attention::{Float, MergeArguments, MergeShape};

use crate::cache::{
    Case, Result as Outcome, Sequence, bits, check_random, decode, encode, floats, with_text,
};
use crate::machine::{Counters, Machine, Order};
use crate::reference::Random;
use crate::support::has_nvrtc;

type Joined = (Vec<f32>, Vec<f32>);

/// Merges sums `[parts, rows, d]` and log-sum-exps `[parts, rows]`.
fn merge(
    [parts, rows, d]: [usize; 3],
    sums: &[f32],
    logs: &[f32],
    order: Order,
    planted: Option<[&str; 2]>,
) -> Result<Joined, String> {
    merge_counted([parts, rows, d], sums, logs, order, planted).map(|(joined, _)| joined)
}

/// [`merge`] that also returns counters.
fn merge_counted(
    [parts, rows, d]: [usize; 3],
    sums: &[f32],
    logs: &[f32],
    order: Order,
    planted: Option<[&str; 2]>,
) -> Result<(Joined, Counters), String> {
    let mut machine = Machine::new();
    let arguments = MergeArguments {
        sums: machine.buffer_from("sums", &encode(sums, Float::F32)),
        logs: machine.buffer_from("logs", &encode(logs, Float::F32)),
        out: machine.buffer("out", 4 * rows * d),
        lse: machine.buffer("lse", 4 * rows),
    };
    let plan = MergeShape { parts, rows, head_dim: d, out: Float::F32 }.plan().unwrap();
    let mut variant = plan.variant.clone();
    if let Some(planted) = planted {
        variant.source = with_text(variant.source, planted);
    }
    let counters = machine.launch(&variant, &plan.launch, &plan.arguments(&arguments), order)?;
    Ok(((floats(&machine.bytes(arguments.out)), floats(&machine.bytes(arguments.lse))), counters))
}

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
    let all = |of: fn(&Outcome) -> &Vec<f32>| -> Vec<f32> {
        results.iter().flat_map(|result| of(result).clone()).collect()
    };
    let (sums, logs) = (all(|r| &r.out), all(|r| &r.lse));
    let (joined, joined_lse) = merge([3, rows, d], &sums, &logs, Order::Straight, None).unwrap();
    let mut result = decode(&case, std::slice::from_ref(&whole), None, Order::Straight);
    (result.out, result.lse) = (joined, joined_lse);
    check_random(&case, &[whole], None, &result);
    let (mut out, mut lse) = (results[0].out.clone(), results[0].lse.clone());
    quant_kernels_cpu::attention::merge(d, &mut out, &mut lse, &results[2].out, &results[2].lse).unwrap();
    for (got, wanted) in result.out.iter().zip(&out).chain(result.lse.iter().zip(&lse)) {
        assert!((got - wanted).abs() <= 2e-6 * wanted.abs().max(1.0), "{got} {wanted}");
    }
}

#[test]
fn a_row_does_not_see_its_neighbours() {
    if !has_nvrtc() {
        return;
    }
    let ([parts, rows, d], mut random) = ([4, 7, 80], Random(8));
    let (sums, mut logs) = (random.normals(parts * rows * d), random.normals(parts * rows));
    // One row has no tokens in one part, another in none of the parts.
    logs[rows + 2] = f32::NEG_INFINITY;
    (0..parts).for_each(|part| logs[part * rows + 5] = f32::NEG_INFINITY);
    let all = merge([parts, rows, d], &sums, &logs, Order::Straight, None).unwrap();
    assert!(all.0[5 * d..6 * d].iter().all(|x| *x == 0.0) && all.1[5] == f32::NEG_INFINITY);
    for order in [Order::Reversed, Order::Seeded(2)] {
        let other = merge([parts, rows, d], &sums, &logs, order, None).unwrap();
        assert_eq!((bits(&all.0), bits(&all.1)), (bits(&other.0), bits(&other.1)), "{order:?}");
    }
    for row in 0..rows {
        let own = |values: &[f32], width: usize| -> Vec<f32> {
            (0..parts).flat_map(|part| values[(part * rows + row) * width..][..width].to_vec()).collect()
        };
        let alone = merge([parts, 1, d], &own(&sums, d), &own(&logs, 1), Order::Straight, None).unwrap();
        assert_eq!(bits(&alone.0), bits(&all.0[row * d..][..d]), "{row}");
        assert_eq!(alone.1[0].to_bits(), all.1[row].to_bits(), "{row}");
    }
}

/// Every sum is read once and every result written once. Log-sum-exps are read repeatedly, from the caches.
#[test]
fn bytes_are_the_floor() {
    if !has_nvrtc() {
        return;
    }
    let [parts, rows, d] = [3, 8, 128];
    let (sums, logs) = (vec![1.0; parts * rows * d], vec![0.5; parts * rows]);
    let (_, counters) = merge_counted([parts, rows, d], &sums, &logs, Order::Straight, None).unwrap();
    let (read, written) = (counters.traffic("sums").read, counters.traffic("out").written);
    assert_eq!((read.unique_bytes, read.bytes_asked), (4 * sums.len() as u64, 4 * sums.len() as u64));
    assert_eq!((written.unique_bytes, written.bytes_asked), (4 * (rows * d) as u64, 4 * (rows * d) as u64));
    assert_eq!(counters.traffic("logs").read.unique_bytes, 4 * logs.len() as u64);
}

/// This kernel has no ring and no barrier.
#[test]
fn planted_bugs_are_found() {
    if !has_nvrtc() {
        return;
    }
    let (sums, logs) = (vec![1.0; 2 * 3 * 80], [0.5, 0.0, f32::NEG_INFINITY, 0.5, 1.0, f32::NEG_INFINITY]);
    let run = |planted| merge([2, 3, 80], &sums, &logs, Order::Straight, planted);
    let expected = run(None).unwrap();
    assert!(expected.0[2 * 80..].iter().all(|x| *x == 0.0));
    let guard = run(Some(["if (item >= items) return;", ""])).unwrap_err();
    assert!(guard.contains("out of bounds") && guard.contains("logs+"), "{guard}");
    let nothing = run(Some(["if (log == none) continue;", ""])).unwrap();
    assert!(nothing.0[2 * 80].is_nan());
    let order =
        run(Some(["for (u32 i = 0; i < parts; ++i) {", "for (u32 i = 1; i < parts; ++i) {"])).unwrap();
    assert_ne!(bits(&order.1), bits(&expected.1));
}
