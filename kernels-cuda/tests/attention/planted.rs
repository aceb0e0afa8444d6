//! Bugs planted into decoding.

use quant_kernels_cpu::attention::KvType;
use quant_kernels_cuda::attention::SplitRule;

use crate::cache::{Case, Sequence, share, try_decode};
use crate::machine::Order;
use crate::support::has_nvrtc;

#[test]
fn planted_bugs_are_found() {
    if !has_nvrtc() {
        return;
    }
    // A warp has five tiles, one more than its ring holds.
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
    for (what, planted, named) in [
        (
            "waits for too few copies",
            ["copy_async_wait<STAGES - 2>();", "copy_async_wait<STAGES - 1>();"],
            ["copy in flight", "shared+"],
        ),
        (
            "copies over the tile that is read",
            ["slot == 0 ? STAGES - 1 : slot - 1", "slot"],
            ["copy in flight", "shared+"],
        ),
        (
            "no barrier before the results of warps are combined",
            ["    __syncthreads();\n    float* meet", "    float* meet"],
            ["race in shared memory", "st.shared"],
        ),
        (
            "no barrier after warps stored their results",
            ["        }\n    __syncthreads();\n\n    for (u32 item", "        }\n\n    for (u32 item"],
            ["race in shared memory", "shared+"],
        ),
        (
            "no fence before the ticket",
            ["        fence_device();\n        const bool is_last", "        const bool is_last"],
            ["race in global memory", "workspace+"],
        ),
        (
            "no barrier before the ticket",
            ["    __syncthreads();\n    u32* is_joiner", "    u32* is_joiner"],
            ["race in", ""],
        ),
        (
            "the first block merges",
            ["add_device(ticket, 1) == splits - 1", "add_device(ticket, 1) == 0"],
            ["uninitialised", "workspace+"],
        ),
        ("a ticket that is not reset", ["if (is_last) *ticket = 0;", ""], ["second launch", ""]),
        (
            "rows beyond the end are read",
            ["token >= skipped && token < valid ? 16 : 0", "16"],
            [" bytes read of ", ""],
        ),
        (
            "grids beyond the end are read",
            ["            bytes = min(max(4 * (valid", "            bytes = 16 + 0 * min(max(4 * (valid"],
            [" bytes read of ", ""],
        ),
        (
            "grids of the last tile are not copied",
            ["            bytes = min(max(4 * (valid", "            bytes = 0 * min(max(4 * (valid"],
            ["lse", " for "],
        ),
        (
            "the halves of keys are swapped in the wrong layouts",
            ["ROW_WORDS % 32 == 0 ? 16 : 0", "ROW_WORDS % 16 == 0 ? 16 : 0"],
            ["lse", " for "],
        ),
        (
            "blocks of values are swapped in the wrong rows",
            ["row >> 1 & 1 : 0;", "row & 1 : 0;"],
            ["row", " for "],
        ),
        (
            "a warp's tiles are skipped",
            ["next += WARPS;", "next += WARPS + 1;"],
            ["out of bounds", "cp.async"],
        ),
        (
            "tiles are copied incompletely",
            ["constexpr int CHUNKS = TILE_BYTES / 16;", "constexpr int CHUNKS = TILE_BYTES / 16 - 1;"],
            ["uninitialised", "shared+"],
        ),
    ] {
        match run(Some(planted)) {
            Ok(()) => panic!("{what}: not found"),
            Err(found) => {
                println!("{what}: {}", found.lines().next().unwrap_or_default());
                assert!(named.iter().all(|words| found.contains(words)), "{what}: {found}");
            }
        }
    }
}
