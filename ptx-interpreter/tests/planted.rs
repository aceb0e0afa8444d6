//! Faults planted in small kernels, each compared with its correct counterpart, under every order of warps.
mod support;

use quant_ptx_interpreter::{BlockOrder, Error, FaultKind, Launch, Memory, Module, Options, Report};
use support::{bytes_of, fault, kernel, launch, orders, run, words};

/// Runs a text under each order of warps, and checks that all results are equal; returns the last one.
fn under_every_order(
    text: &str,
    launch_of: impl Fn(&mut Memory) -> Launch,
    good: bool,
) -> Result<Report, Error> {
    let module = Module::parse(text).unwrap();
    let mut last = None;
    for options in orders() {
        let mut memory = Memory::new();
        let launch = launch_of(&mut memory);
        let result = module.launch("k", &launch, &mut memory, &options);
        assert_eq!(result.is_ok(), good, "{options:?}: {result:?}");
        last = Some(result);
    }
    last.unwrap()
}

fn good(text: &str, launch_of: impl Fn(&mut Memory) -> Launch) -> Report {
    under_every_order(text, launch_of, true).unwrap()
}

fn bad(text: &str, launch_of: impl Fn(&mut Memory) -> Launch) -> FaultKind {
    fault(under_every_order(text, launch_of, false))
}

const TILE: &str = ".extern .shared .align 128 .b8 tile[];";

/// The shared addresses of this thread's word and of the word of thread `tid ^ 32`.
const WORDS: &str = "mov.u32 %r9, tile;\nshl.b32 %r10, %r1, 2;\nxor.b32 %r11, %r10, 128;\nadd.u32 %r10, %r10, %r9;\n\
                     add.u32 %r11, %r11, %r9;\n";
/// This thread's word of the output `p0`.
const OUT: &str = "mul.wide.u32 %rd20, %r3, 4;\nadd.s64 %rd21, %rd1, %rd20;\n";

fn out_words(count: usize, block: u32, shared: u32) -> impl Fn(&mut Memory) -> Launch {
    move |memory| {
        let out = memory.buffer("out", 4 * count, 4);
        launch(count as u32 / block, block, shared, &[out])
    }
}

#[test]
fn a_missing_barrier() {
    let text = |barrier: &str| {
        let body = format!(
            "{WORDS}{OUT}st.shared.u32 [%r10], %r1;\n{barrier}ld.shared.u32 %r12, [%r11];\nst.global.u32 [%rd21], %r12;"
        );
        kernel(1, TILE, &body)
    };
    good(&text("bar.sync 0;\n"), out_words(128, 64, 256));
    // Depending on the order, the other warp's word may not have been written.
    let kind = bad(&text(""), out_words(128, 64, 256));
    assert!(matches!(kind, FaultKind::SharedRace | FaultKind::Uninitialised), "{kind:?}");
    let named = text("bar.sync 3, 64;\n");
    good(&named, out_words(128, 64, 256));
    // Orders only the lanes of a warp.
    bad(&text("bar.warp.sync 0xffffffff;\n"), out_words(128, 64, 256));
}

#[test]
fn a_missing_barrier_before_the_next_round() {
    let text = |barrier: &str| {
        let body = format!(
            "{WORDS}{OUT}mov.u32 %r13, 0;\nmov.u32 %r14, 0;\nLOOP:\nst.shared.u32 [%r10], %r1;\nbar.sync 0;\n\
             ld.shared.u32 %r12, [%r11];\nadd.u32 %r14, %r14, %r12;\n{barrier}add.u32 %r13, %r13, 1;\n\
             setp.lt.u32 %p1, %r13, 4;\n@%p1 bra LOOP;\nst.global.u32 [%rd21], %r14;"
        );
        kernel(1, TILE, &body)
    };
    let report = good(&text("bar.sync 0;\n"), out_words(64, 64, 256));
    assert_eq!(report.counters.barriers, 8);
    assert_eq!(bad(&text(""), out_words(64, 64, 256)), FaultKind::SharedRace);
}

/// Two sets of two warps. The barriers of one set do not order accesses of the other.
#[test]
fn sets_of_warps_with_barriers_of_their_own() {
    let text = |first: &str, second: &str, partner: u32| {
        let body = format!(
            "mov.u32 %r9, tile;\nshl.b32 %r10, %r1, 2;\nxor.b32 %r11, %r10, {partner};\nadd.u32 %r10, %r10, %r9;\n\
             add.u32 %r11, %r11, %r9;\n{OUT}shr.u32 %r15, %r1, 6;\nadd.u32 %r15, %r15, 1;\nmov.u32 %r13, 0;\n\
             mov.u32 %r14, 0;\nLOOP:\nst.shared.u32 [%r10], %r1;\n{first}ld.shared.u32 %r12, [%r11];\n\
             ld.shared.u32 %r16, [%r10];\nadd.u32 %r14, %r14, %r12;\n{second}add.u32 %r13, %r13, 1;\n\
             setp.lt.u32 %p1, %r13, 4;\n@%p1 bra LOOP;\nst.global.u32 [%rd21], %r14;"
        );
        kernel(1, TILE, &body)
    };
    let barrier = "bar.sync %r15, 64;\n";
    let report = good(&text(barrier, barrier, 128), out_words(128, 128, 512));
    assert_eq!(report.counters.barriers, 16);
    let kind = bad(&text("", barrier, 128), out_words(128, 128, 512));
    assert!(matches!(kind, FaultKind::SharedRace | FaultKind::Uninitialised), "{kind:?}");
    assert_eq!(bad(&text(barrier, "", 128), out_words(128, 128, 512)), FaultKind::SharedRace);
    let kind = bad(&text(barrier, barrier, 256), out_words(128, 128, 512));
    assert!(matches!(kind, FaultKind::SharedRace | FaultKind::Uninitialised), "{kind:?}");
}

/// Four tiles of 16 bytes per thread, copied asynchronously; after `wait`, tile `tile` is read.
fn copies(wait: &str, tile: u32, barrier: &str, neighbour: u32) -> String {
    let copy = |i: u32| {
        format!(
            "add.u32 %r13, %r10, {};\nadd.s64 %rd12, %rd11, {};\ncp.async.cg.shared.global [%r13], [%rd12], 16;\n\
             cp.async.commit_group;\n",
            512 * i,
            512 * i
        )
    };
    let copies: String = (0..4).map(copy).collect();
    let body = format!(
        "mov.u32 %r9, tile;\nshl.b32 %r10, %r1, 4;\nxor.b32 %r11, %r10, {};\nadd.u32 %r10, %r10, %r9;\n\
         add.u32 %r11, %r11, %r9;\nmul.wide.u32 %rd10, %r1, 16;\nadd.s64 %rd11, %rd2, %rd10;\n{OUT}{copies}\
         cp.async.wait_{wait};\n{barrier}ld.shared.u32 %r12, [%r11+{}];\nst.global.u32 [%rd21], %r12;",
        16 * neighbour,
        512 * tile
    );
    kernel(2, TILE, &body)
}

fn copy_launch(memory: &mut Memory) -> Launch {
    let out = memory.buffer("out", 128, 4);
    let input = memory.buffer_from("in", &bytes_of(&(0..512).collect::<Vec<_>>()), 32);
    launch(1, 32, 2048, &[out, input])
}

#[test]
fn a_wrong_depth_of_waiting() {
    for (left, tile, lands) in
        [(3, 0, true), (3, 1, false), (2, 1, true), (1, 2, true), (1, 3, false), (0, 3, true)]
    {
        let text = copies(&format!("group {left}"), tile, "", 0);
        if lands {
            let report = good(&text, copy_launch);
            assert_eq!(report.counters.buffers["in"].read.unique_bytes, 2048);
            assert_eq!(report.counters.buffers["in"].read.sectors, 64);
        } else {
            assert_eq!(bad(&text, copy_launch), FaultKind::InFlight);
        }
    }
    good(&copies("all", 3, "", 0), copy_launch);
}

#[test]
fn a_copy_that_only_its_own_lane_may_read() {
    good(&copies("all", 2, "bar.warp.sync 0xffffffff;\n", 1), copy_launch);
    good(&copies("all", 2, "bar.sync 0;\n", 1), copy_launch);
    assert_eq!(bad(&copies("all", 2, "", 1), copy_launch), FaultKind::NotVisible);
}

#[test]
fn writes_into_a_copy_in_flight() {
    let text = |wait: &str| {
        let body = format!(
            "mov.u32 %r9, tile;\nshl.b32 %r10, %r1, 4;\nadd.u32 %r10, %r10, %r9;\nmul.wide.u32 %rd10, %r1, 16;\n\
             add.s64 %rd11, %rd2, %rd10;\ncp.async.ca.shared.global [%r10], [%rd11], 16;\ncp.async.commit_group;\n\
             {wait}st.shared.u32 [%r10+4], %r1;"
        );
        kernel(2, TILE, &body)
    };
    good(&text("cp.async.wait_group 0;\n"), copy_launch);
    assert_eq!(bad(&text(""), copy_launch), FaultKind::InFlight);
}

#[test]
fn copies_fill_up_with_zeros() {
    let body = format!(
        "{OUT}mov.u32 %r9, tile;\nshl.b32 %r10, %r1, 4;\nadd.u32 %r10, %r10, %r9;\nmul.wide.u32 %rd10, %r1, 16;\n\
         add.s64 %rd11, %rd2, %rd10;\nsetp.lt.u32 %p1, %r1, 2;\nselp.b32 %r12, 16, 0, %p1;\nsetp.eq.u32 %p2, %r1, 2;\n\
         selp.b32 %r12, 8, %r12, %p2;\ncp.async.cg.shared.global [%r10], [%rd11], 16, %r12;\ncp.async.wait_all;\n\
         ld.shared.v4.u32 {{%r20, %r21, %r22, %r23}}, [%r10];\nadd.u32 %r20, %r20, %r21;\nadd.u32 %r20, %r20, %r22;\n\
         add.u32 %r20, %r20, %r23;\nst.global.u32 [%rd21], %r20;"
    );
    let mut memory = Memory::new();
    let out = memory.buffer("out", 128, 4);
    let input = memory.buffer_from("in", &bytes_of(&[1; 10]), 16);
    run(&kernel(2, TILE, &body), &launch(1, 32, 512, &[out, input]), &mut memory).unwrap();
    let sums = words(memory.bytes(out).unwrap());
    assert_eq!(sums[..4], [4, 4, 2, 0]);
}

/// A pipeline over 8 tiles of 256 bytes in a ring of `stages`, filled `ahead` tiles in advance, with one barrier per
/// tile. Each of two warps reads what the other has copied.
fn ring(stages: u32, ahead: u32) -> String {
    let body = format!(
        "mov.u32 %r9, tile;\nshl.b32 %r10, %r1, 2;\nmul.wide.u32 %rd10, %r1, 4;\nadd.s64 %rd11, %rd2, %rd10;\n{OUT}\
         mov.u32 %r13, 0;\nmov.u32 %r14, 0;\nmov.u32 %r15, 0;\n\
         FILL:\nsetp.ge.u32 %p1, %r13, {ahead};\n@%p1 bra START;\nbra COPY;\n\
         START:\n\
         LOOP:\ncp.async.wait_group {};\nbar.sync 0;\n\
         rem.u32 %r17, %r14, {stages};\nmad.lo.u32 %r17, %r17, 256, %r9;\nxor.b32 %r18, %r10, 128;\nadd.u32 %r17, %r17, %r18;\n\
         bra COPY;\n\
         USE:\nld.shared.u32 %r19, [%r17];\nadd.u32 %r15, %r15, %r19;\nadd.u32 %r14, %r14, 1;\n\
         setp.lt.u32 %p1, %r14, 8;\n@%p1 bra LOOP;\nst.global.u32 [%rd21], %r15;\nret;\n\
         COPY:\nsetp.ge.u32 %p2, %r13, 8;\n@%p2 bra COMMIT;\nrem.u32 %r16, %r13, {stages};\nmad.lo.u32 %r16, %r16, 256, %r9;\n\
         add.u32 %r16, %r16, %r10;\nmul.wide.u32 %rd12, %r13, 256;\nadd.s64 %rd12, %rd12, %rd11;\n\
         cp.async.ca.shared.global [%r16], [%rd12], 4;\n\
         COMMIT:\ncp.async.commit_group;\nadd.u32 %r13, %r13, 1;\nsetp.gt.u32 %p3, %r13, {ahead};\n@%p3 bra USE;\nbra FILL;",
        ahead - 1
    );
    kernel(2, TILE, &body)
}

#[test]
fn a_ring_that_is_too_short() {
    let with = |memory: &mut Memory| {
        let out = memory.buffer("out", 256, 4);
        let input = memory.buffer_from("in", &bytes_of(&(0..512).collect::<Vec<_>>()), 16);
        launch(1, 64, 1024, &[out, input])
    };
    let report = good(&ring(3, 2), with);
    assert_eq!(report.counters.barriers, 8);
    assert_eq!(report.counters.opcode("cp.async.ca"), 16);
    good(&ring(4, 3), with);
    let kind = bad(&ring(3, 3), with);
    assert!(matches!(kind, FaultKind::SharedRace | FaultKind::InFlight), "{kind:?}");
    let kind = bad(&ring(2, 2), with);
    assert!(matches!(kind, FaultKind::SharedRace | FaultKind::InFlight), "{kind:?}");
}

/// Eight rows of 128 bytes; ldmatrix reads the same 16-byte column of eight rows.
fn swizzled(place: &str) -> String {
    let body = format!(
        "mov.u32 %r9, tile;\nand.b32 %r10, %r1, 7;\nshr.u32 %r11, %r1, 3;\n\
         // Every lane fills two chunks: row lane % 8, columns lane / 8 and lane / 8 + 4.\n\
         mov.u32 %r12, %r11;\n{place}st.shared.v4.u32 [%r13], {{%r1, %r1, %r1, %r1}};\nadd.u32 %r12, %r11, 4;\n{place}\
         st.shared.v4.u32 [%r13], {{%r1, %r1, %r1, %r1}};\nbar.warp.sync 0xffffffff;\n\
         mov.u32 %r12, %r11;\n{place}ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r20, %r21, %r22, %r23}}, [%r13];"
    );
    kernel(0, TILE, &body)
}

#[test]
fn a_wrong_swizzle() {
    let plain = "shl.b32 %r13, %r10, 7;\nmad.lo.u32 %r13, %r12, 16, %r13;\nadd.u32 %r13, %r13, %r9;\n";
    let swizzle = "shl.b32 %r13, %r10, 7;\nxor.b32 %r14, %r12, %r10;\nmad.lo.u32 %r13, %r14, 16, %r13;\nadd.u32 %r13, %r13, %r9;\n";
    let with = |_: &mut Memory| launch(1, 32, 1024, &[]);
    let counters = good(&swizzled(swizzle), with).counters;
    assert_eq!((counters.shared_reads.taken, counters.shared_reads.ideal), (4, 4));
    assert_eq!((counters.shared_writes.taken, counters.shared_writes.ideal), (8, 8));
    let counters = good(&swizzled(plain), with).counters;
    assert_eq!((counters.shared_reads.taken, counters.shared_reads.ideal), (32, 4));
    assert_eq!((counters.shared_writes.taken, counters.shared_writes.ideal), (64, 8));
}

#[test]
fn a_missing_guard() {
    let text = |guard: &str| {
        kernel(1, "", &format!("{OUT}setp.lt.u32 %p1, %r3, 50;\n{guard}st.global.u32 [%rd21], %r3;"))
    };
    let with = |memory: &mut Memory| {
        let out = memory.buffer("out", 200, 4);
        memory.buffer("behind", 200, 4);
        launch(2, 32, 0, &[out])
    };
    let report = good(&text("@%p1 "), with);
    assert_eq!(report.counters.buffers["out"].written.unique_bytes, 200);
    assert_eq!(bad(&text(""), with), FaultKind::OutOfBounds);
    // However far beyond the buffer an access is, it never reaches another buffer.
    for words in [1 << 10, 1 << 16, (1_u64 << 31) - 64] {
        let far =
            text("@%p1 ").replace("st.global.u32 [%rd21]", &format!("st.global.u32 [%rd21+{}]", 4 * words));
        assert_eq!(bad(&far, with), FaultKind::OutOfBounds);
    }
    // With `fault_is_error` false, all faults are reported, and the launch continues.
    let mut memory = Memory::new();
    let launch = with(&mut memory);
    let options = Options { fault_is_error: false, ..Options::default() };
    let report = Module::parse(&text("")).unwrap().launch("k", &launch, &mut memory, &options).unwrap();
    assert_eq!(report.faults.len(), 14);
    let first = &report.faults[0];
    assert_eq!((first.block, first.warp, first.lane), ([1, 0, 0], 0, Some(18)));
    assert_eq!((first.buffer.as_deref(), first.offset), (Some("out"), 200));
}

/// Blocks store partial sums. The last block to take a ticket adds them up.
fn tickets(fence: &str, ticket: &str) -> String {
    let body = format!(
        "mul.wide.u32 %rd10, %r2, 4;\nadd.s64 %rd11, %rd2, %rd10;\nadd.u32 %r10, %r2, 1;\nsetp.ne.u32 %p1, %r1, 0;\n\
         @%p1 bra END;\nst.global.u32 [%rd11], %r10;\n{fence}{ticket}mov.u32 %r12, %nctaid.x;\nsub.u32 %r13, %r12, 1;\n\
         setp.ne.u32 %p2, %r11, %r13;\n@%p2 bra END;\n{fence}mov.u32 %r14, 0;\nmov.u32 %r15, 0;\nLOOP:\n\
         mul.wide.u32 %rd12, %r15, 4;\nadd.s64 %rd12, %rd12, %rd2;\nld.global.cg.u32 %r16, [%rd12];\n\
         add.u32 %r14, %r14, %r16;\nadd.u32 %r15, %r15, 1;\nsetp.lt.u32 %p3, %r15, %r12;\n@%p3 bra LOOP;\n\
         st.global.u32 [%rd1], %r14;\nst.global.u32 [%rd3], 0;\nEND:"
    );
    kernel(3, "", &body)
}

#[test]
fn a_reduction_over_blocks() {
    let with = |memory: &mut Memory| {
        let out = memory.buffer("out", 4, 4);
        let partial = memory.buffer("partial", 32, 4);
        let ticket = memory.buffer_from("ticket", &[0; 4], 4);
        launch(8, 32, 0, &[out, partial, ticket])
    };
    let (fence, atomic) = ("membar.gl;\n", "atom.global.add.u32 %r11, [%rd3], 1;\n");
    good(&tickets(fence, atomic), with);
    good(&tickets("fence.acq_rel.gpu;\n", atomic), with);
    good(&tickets("", "atom.acq_rel.gpu.global.add.u32 %r11, [%rd3], 1;\n"), with);
    assert_eq!(bad(&tickets("", atomic), with), FaultKind::GlobalRace);
    let plain = "ld.global.u32 %r11, [%rd3];\nadd.u32 %r12, %r11, 1;\nst.global.u32 [%rd3], %r12;\n";
    assert_eq!(bad(&tickets(fence, plain), with), FaultKind::GlobalRace);
    let module = Module::parse(&tickets(fence, atomic)).unwrap();
    for block_order in
        [BlockOrder::Forward, BlockOrder::Reverse, BlockOrder::Seeded(3), BlockOrder::Seeded(4)]
    {
        let mut memory = Memory::new();
        let launch = with(&mut memory);
        let options = Options { block_order, ..Options::default() };
        let out = launch.arguments[0].clone();
        module.launch("k", &launch, &mut memory, &options).unwrap();
        let quant_ptx_interpreter::Argument::U64(out) = out else { unreachable!() };
        assert_eq!(words(memory.bytes(out).unwrap()), [36]);
    }
}

/// Two warps of each block store their parts. Warp 0 then takes the ticket, after the instructions in `meeting`.
#[test]
fn a_ticket_taken_before_the_other_warps_have_stored() {
    let text = |meeting: &str| {
        let body = format!(
            "mul.wide.u32 %rd10, %r3, 4;\nadd.s64 %rd11, %rd2, %rd10;\nst.global.u32 [%rd11], %r1;\n{meeting}\
             setp.ne.u32 %p1, %r1, 0;\n@%p1 bra END;\natom.global.inc.u32 %r11, [%rd3], 3;\n\
             setp.ne.u32 %p2, %r11, 3;\n@%p2 bra END;\nmembar.gl;\nmov.u32 %r14, 0;\nmov.u32 %r15, 0;\nLOOP:\n\
             mul.wide.u32 %rd12, %r15, 4;\nadd.s64 %rd12, %rd12, %rd2;\nld.global.u32 %r16, [%rd12];\n\
             add.u32 %r14, %r14, %r16;\nadd.u32 %r15, %r15, 1;\nsetp.lt.u32 %p3, %r15, LAST;\n@%p3 bra LOOP;\n\
             st.global.u32 [%rd1], %r14;\nEND:"
        );
        kernel(3, "", &body.replace("LAST", "192"))
    };
    let with = |memory: &mut Memory| {
        let out = memory.buffer("out", 4, 4);
        let parts = memory.buffer_from("parts", &[0; 1024], 4);
        let ticket = memory.buffer_from("ticket", &[0; 4], 4);
        launch(4, 64, 0, &[out, parts, ticket])
    };
    good(&text("membar.gl;\nbar.sync 0;\n"), with);
    good(&text("bar.sync 0;\nmembar.gl;\n"), with);
    assert_eq!(bad(&text("membar.gl;\n"), with), FaultKind::GlobalRace);
    assert_eq!(bad(&text("bar.sync 0;\n"), with), FaultKind::GlobalRace);
}

#[test]
fn a_missing_barrier_before_another_warps_global_bytes() {
    let text = |barrier: &str| {
        let body = format!(
            "{OUT}st.global.u32 [%rd21], %r1;\n{barrier}xor.b32 %r10, %r3, 32;\nmul.wide.u32 %rd10, %r10, 4;\n\
            add.s64 %rd10, %rd10, %rd1;\nld.global.u32 %r11, [%rd10];"
        );
        kernel(1, "", &body)
    };
    good(&text("bar.sync 0;\n"), out_words(64, 64, 0));
    let kind = bad(&text(""), out_words(64, 64, 0));
    assert!(matches!(kind, FaultKind::GlobalRace | FaultKind::Uninitialised), "{kind:?}");
}

#[test]
fn blocks_that_write_the_same_place() {
    let plain = "ld.global.u32 %r10, [%rd1];\nadd.u32 %r10, %r10, 1;\nst.global.u32 [%rd1], %r10;";
    let with = |memory: &mut Memory| {
        let sum = memory.buffer_from("sum", &[0; 4], 4);
        launch(4, 1, 0, &[sum])
    };
    assert_eq!(bad(&kernel(1, "", plain), with), FaultKind::GlobalRace);
    good(&kernel(1, "", "red.global.add.u32 [%rd1], 1;"), with);
}

#[test]
fn sums_in_shared_memory() {
    let text = |add: &str| {
        let body = format!(
            "mov.u32 %r9, tile;\nsetp.eq.u32 %p1, %r1, 0;\n@%p1 st.shared.u32 [%r9], 0;\nbar.sync 0;\n{add}bar.sync 0;\n\
             {OUT}ld.shared.u32 %r10, [%r9];\nst.global.u32 [%rd21], %r10;"
        );
        kernel(1, TILE, &body)
    };
    let plain = "ld.shared.u32 %r10, [%r9];\nadd.u32 %r10, %r10, 1;\nst.shared.u32 [%r9], %r10;\n";
    good(&text("atom.shared.add.u32 %r10, [%r9], 1;\n"), out_words(96, 96, 4));
    assert_eq!(bad(&text(plain), out_words(96, 96, 4)), FaultKind::SharedRace);
}

#[test]
fn unwritten_bytes() {
    let with = |memory: &mut Memory| {
        let out = memory.buffer("out", 128, 4);
        let input = memory.buffer("in", 128, 4);
        launch(1, 32, 128, &[out, input])
    };
    assert_eq!(bad(&kernel(2, "", "ld.global.u32 %r10, [%rd2];"), with), FaultKind::Uninitialised);
    let shared = "mov.u32 %r9, tile;\nst.shared.u32 [%r9+8], %r1;\nld.shared.u32 %r10, [%r9+OFFSET];";
    assert_eq!(bad(&kernel(2, TILE, &shared.replace("OFFSET", "12")), with), FaultKind::Uninitialised);
    good(&kernel(2, TILE, &shared.replace("OFFSET", "8")), with);
    let mut memory = Memory::new();
    let arguments = with(&mut memory);
    run(&kernel(2, "", "mov.u32 %r9, 0;"), &arguments, &mut memory).unwrap();
    let quant_ptx_interpreter::Argument::U64(out) = arguments.arguments[0] else { unreachable!() };
    assert!(memory.bytes(out).is_err());
}

#[test]
fn addresses_that_are_not_aligned() {
    let text = |offset: u32| kernel(1, "", &format!("ld.global.v2.u32 {{%r10, %r11}}, [%rd1+{offset}];"));
    let with = |align: usize| {
        move |memory: &mut Memory| {
            let input = memory.buffer_from("in", &[0; 64], align);
            launch(1, 32, 0, &[input])
        }
    };
    good(&text(8), with(8));
    assert_eq!(bad(&text(4), with(8)), FaultKind::Misaligned);
    assert_eq!(bad(&text(8), with(4)), FaultKind::Misaligned);
}

#[test]
fn divergent_control_flow() {
    let with = |_: &mut Memory| launch(1, 64, 0, &[]);
    let text = |body: &str| kernel(0, "", body);
    good(&text("setp.lt.u32 %p1, %r1, 32;\n@%p1 bra A;\nnop;\nA:\nbar.sync 0;"), with);
    assert_eq!(bad(&text("setp.lt.u32 %p1, %r1, 32;\n@%p1 bar.sync 0;"), with), FaultKind::BarrierDivergence);
    assert_eq!(bad(&text("setp.lt.u32 %p1, %r1, 48;\n@%p1 bar.sync 0;"), with), FaultKind::BarrierDivergence);
    let astray = "and.b32 %r10, %r1, 1;\nsetp.eq.u32 %p1, %r10, 0;\n@%p1 bra A;\nshfl.sync.bfly.b32 %r11, %r1, 1, 31, -1;\nbra B;\n\
                  A:\nadd.u32 %r11, %r1, 1;\nvote.sync.any.pred %p2, %p1, -1;\nB:";
    assert_eq!(bad(&text(astray), with), FaultKind::WarpDivergence);
    let options = Options { max_instructions: 1000, ..Options::default() };
    let endless = Module::parse(&text("A:\nbra A;")).unwrap();
    assert_eq!(
        fault(endless.launch("k", &with(&mut Memory::new()), &mut Memory::new(), &options)),
        FaultKind::Runaway
    );
    let unknown = "tcgen05.alloc.sync.b32 [%r1], 32;";
    assert_eq!(bad(&text(unknown), with), FaultKind::Unsupported("tcgen05.alloc.sync.b32".to_owned()));
    good(&text(&format!("setp.eq.u32 %p1, %r1, 99;\n@%p1 {unknown}")), with);
    assert_eq!(Module::parse(&text(unknown)).unwrap().unsupported("k").unwrap().len(), 1);
    assert_eq!(bad(&text("trap;"), with), FaultKind::Trap);
}
