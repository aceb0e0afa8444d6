//! Matrix instructions compared with plain products. The positions of elements follow the formulas of the ISA per
//! element index, independently of the interpreter.
mod support;

use quant_ptx_interpreter::{FaultKind, Memory};
use support::{bytes_of, fault, kernel, launch, numbers, run, words};

/// Row and column of element `i` of A's fragment in a lane.
fn a_place(bits: u32, depth: usize, lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane % 4);
    match (bits, depth) {
        (16, 8) => (if i < 2 { group } else { group + 8 }, thread * 2 + (i & 1)),
        (16, 16) => {
            let row = if i < 2 || (4..6).contains(&i) { group } else { group + 8 };
            (row, thread * 2 + (i & 1) + if i >= 4 { 8 } else { 0 })
        }
        (8, 16) => (if i < 4 { group } else { group + 8 }, thread * 4 + (i & 3)),
        (8, 32) => {
            let row = if i < 4 || (8..12).contains(&i) { group } else { group + 8 };
            (row, thread * 4 + (i & 3) + if i >= 8 { 16 } else { 0 })
        }
        (4, 32) => (if i < 8 { group } else { group + 8 }, thread * 8 + (i & 7)),
        (4, 64) => {
            let row = if i < 8 || (16..24).contains(&i) { group } else { group + 8 };
            (row, thread * 8 + (i & 7) + if i >= 16 { 32 } else { 0 })
        }
        _ => unreachable!(),
    }
}

fn b_place(bits: u32, depth: usize, lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane % 4);
    let row = match (bits, depth) {
        (16, 8) => thread * 2 + i,
        (16, 16) => thread * 2 + (i & 1) + if i >= 2 { 8 } else { 0 },
        (8, 16) => thread * 4 + i,
        (8, 32) => thread * 4 + (i & 3) + if i >= 4 { 16 } else { 0 },
        (4, 32) => thread * 8 + i,
        (4, 64) => thread * 8 + (i & 7) + if i >= 8 { 32 } else { 0 },
        _ => unreachable!(),
    };
    (row, group)
}

fn c_place(lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane % 4);
    (if i < 2 { group } else { group + 8 }, thread * 2 + (i & 1))
}

#[derive(Clone, Copy)]
struct Shape {
    types: &'static str,
    a: &'static str,
    b: &'static str,
    bits: u32,
    depth: usize,
    integer: bool,
    half_sums: bool,
}

/// As `[register][lane]`.
fn fragment(
    bits: u32,
    count: usize,
    place: impl Fn(usize, usize) -> (usize, usize),
    at: impl Fn(usize, usize) -> u32,
) -> Vec<u32> {
    let per = (32 / bits) as usize;
    let mut registers = vec![0; count / per * 32];
    for lane in 0..32 {
        for i in 0..count {
            let (row, column) = place(lane, i);
            registers[i / per * 32 + lane] |=
                (at(row, column) & ((1u64 << bits) - 1) as u32) << ((i % per) as u32 * bits);
        }
    }
    registers
}

fn text(shape: Shape, a_count: usize, b_count: usize) -> String {
    let (letter, kind) = if shape.integer || shape.half_sums { ("r", "u32") } else { ("f", "f32") };
    let sums = if shape.half_sums { 2 } else { 4 };
    let mut body = String::from("mul.wide.u32 %rd10, %r1, 4;\n");
    let mut list = |name: &str, pointer: usize, count: usize, first: usize, letter: &str, kind: &str| {
        body += &format!("add.s64 %rd11, %rd{pointer}, %rd10;\n");
        for i in 0..count {
            body += &format!("ld.global.{kind} %{letter}{}, [%rd11+{}];\n", first + i, 128 * i);
        }
        let _ = name;
    };
    list("a", 1, a_count, 10, "r", "u32");
    list("b", 2, b_count, 20, "r", "u32");
    list("c", 3, sums, 30, letter, kind);
    let group = |letter: &str, first: usize, count: usize| {
        let names: Vec<_> = (first..first + count).map(|i| format!("%{letter}{i}")).collect();
        format!("{{{}}}", names.join(", "))
    };
    body += &format!(
        "mma.sync.aligned.m16n8k{}.row.col.{} {}, {}, {}, {};\nadd.s64 %rd11, %rd4, %rd10;\n",
        shape.depth,
        shape.types,
        group(letter, 30, sums),
        group("r", 10, a_count),
        group("r", 20, b_count),
        group(letter, 30, sums)
    );
    for i in 0..sums {
        body += &format!("st.global.{kind} [%rd11+{}], %{letter}{};\n", 128 * i, 30 + i);
    }
    kernel(4, "", &body)
}

fn value(kind: &str, bits: u32) -> f64 {
    match kind {
        "f16" => half::f16::from_bits(bits as u16).to_f64(),
        "bf16" => half::bf16::from_bits(bits as u16).to_f64(),
        "s8" => f64::from(bits as u8 as i8),
        "u8" => f64::from(bits as u8),
        "s4" => f64::from(((bits << 28) as i32) >> 28),
        "u4" => f64::from(bits & 15),
        _ => unreachable!(),
    }
}

/// Small values, so that every sum is exact in f32.
fn element(kind: &str, random: u32) -> u32 {
    let small = random % 17;
    match kind {
        "f16" => u32::from(half::f16::from_f32(small as f32 - 8.0).to_bits()),
        "bf16" => u32::from(half::bf16::from_f32(small as f32 - 8.0).to_bits()),
        "s8" | "u8" => random & 0xff,
        _ => random & 15,
    }
}

fn check(shape: Shape, a: &[u32], b: &[u32], c: &[i32]) {
    let depth = shape.depth;
    let per = 32 / shape.bits as usize;
    let (a_count, b_count) = (16 * depth / 32, 8 * depth / 32);
    let a_registers =
        fragment(shape.bits, a_count, |l, i| a_place(shape.bits, depth, l, i), |row, k| a[row * depth + k]);
    let b_registers =
        fragment(shape.bits, b_count, |l, i| b_place(shape.bits, depth, l, i), |k, n| b[k * 8 + n]);
    let c_bits = |row: usize, n: usize| {
        let v = c[row * 8 + n];
        match (shape.integer, shape.half_sums) {
            (true, _) => v as u32,
            (false, true) => u32::from(half::f16::from_f32(v as f32).to_bits()),
            (false, false) => (v as f32).to_bits(),
        }
    };
    let c_registers = fragment(if shape.half_sums { 16 } else { 32 }, 4, c_place, c_bits);
    let mut memory = Memory::new();
    let inputs =
        [&a_registers, &b_registers, &c_registers].map(|v| memory.buffer_from("in", &bytes_of(v), 4));
    let out = memory.buffer("out", c_registers.len() * 4, 4);
    let arguments = launch(1, 32, 0, &[inputs[0], inputs[1], inputs[2], out]);
    run(&text(shape, a_count / per, b_count / per), &arguments, &mut memory).unwrap();
    let got = words(memory.bytes(out).unwrap());
    for lane in 0..32 {
        for i in 0..4 {
            let (row, n) = c_place(lane, i);
            let sum: f64 =
                (0..depth).map(|k| value(shape.a, a[row * depth + k]) * value(shape.b, b[k * 8 + n])).sum();
            let sum = sum + f64::from(c[row * 8 + n]);
            let got = match (shape.integer, shape.half_sums) {
                (true, _) => f64::from(got[i * 32 + lane] as i32),
                (false, true) => {
                    half::f16::from_bits((got[i / 2 * 32 + lane] >> (16 * (i % 2))) as u16).to_f64()
                }
                (false, false) => f64::from(f32::from_bits(got[i * 32 + lane])),
            };
            let sum = if shape.half_sums { half::f16::from_f64(sum).to_f64() } else { sum };
            assert_eq!(got, sum, "{} k{depth} row {row} column {n}", shape.types);
        }
    }
}

const fn shape(types: &'static str, a: &'static str, b: &'static str, bits: u32, depth: usize) -> Shape {
    Shape { types, a, b, bits, depth, integer: bits < 16, half_sums: false }
}

const SHAPES: [Shape; 15] = [
    shape("f32.f16.f16.f32", "f16", "f16", 16, 16),
    shape("f32.bf16.bf16.f32", "bf16", "bf16", 16, 16),
    shape("f32.f16.f16.f32", "f16", "f16", 16, 8),
    shape("f32.bf16.bf16.f32", "bf16", "bf16", 16, 8),
    Shape { half_sums: true, ..shape("f16.f16.f16.f16", "f16", "f16", 16, 16) },
    shape("s32.s8.s8.s32", "s8", "s8", 8, 32),
    shape("s32.u8.s8.s32", "u8", "s8", 8, 32),
    shape("s32.s8.u8.s32", "s8", "u8", 8, 32),
    shape("s32.u8.u8.s32", "u8", "u8", 8, 32),
    shape("s32.s8.s8.s32", "s8", "s8", 8, 16),
    shape("s32.u8.s8.s32", "u8", "s8", 8, 16),
    shape("s32.s8.u8.s32", "s8", "u8", 8, 16),
    shape("s32.s4.s4.s32", "s4", "s4", 4, 64),
    shape("s32.u4.s4.s32", "u4", "s4", 4, 64),
    shape("s32.s4.u4.s32", "s4", "u4", 4, 32),
];

#[test]
fn random_products_are_those_of_plain_loops() {
    for (seed, shape) in SHAPES.into_iter().enumerate() {
        let random = numbers(16 * shape.depth + 8 * shape.depth + 128, seed as u64 + 1);
        let (a, rest) = random.split_at(16 * shape.depth);
        let (b, c) = rest.split_at(8 * shape.depth);
        let a: Vec<u32> = a.iter().map(|v| element(shape.a, *v)).collect();
        let b: Vec<u32> = b.iter().map(|v| element(shape.b, *v)).collect();
        let c: Vec<i32> = c.iter().map(|v| (*v % 201) as i32 - 100).collect();
        check(shape, &a, &b, &c);
    }
}

#[test]
fn single_elements_are_where_the_isa_has_them() {
    for shape in SHAPES {
        let one = |kind: &str| match kind {
            "f16" => u32::from(half::f16::ONE.to_bits()),
            "bf16" => u32::from(half::bf16::ONE.to_bits()),
            _ => 1,
        };
        // All elements of the other factor are different.
        let count = |kind: &str, i: usize| match kind {
            "f16" => u32::from(half::f16::from_f32((i % 128) as f32).to_bits()),
            "bf16" => u32::from(half::bf16::from_f32((i % 128) as f32).to_bits()),
            "s4" | "u4" => (i % 8) as u32,
            _ => (i % 128) as u32,
        };
        let b: Vec<u32> = (0..8 * shape.depth).map(|i| count(shape.b, i)).collect();
        for i in (0..16 * shape.depth).step_by(7) {
            let mut a = vec![0; 16 * shape.depth];
            a[i] = one(shape.a);
            check(shape, &a, &b, &[0; 128]);
        }
        let a: Vec<u32> = (0..16 * shape.depth).map(|i| count(shape.a, i)).collect();
        for i in (0..8 * shape.depth).step_by(5) {
            let mut b = vec![0; 8 * shape.depth];
            b[i] = one(shape.b);
            check(shape, &a, &b, &[0; 128]);
        }
    }
}

#[test]
fn integer_sums_wrap_and_saturate_when_asked() {
    for (suffix, expected) in [("", i32::MIN + 31), (".satfinite", i32::MAX)] {
        let group = "{%r30, %r31, %r32, %r33}";
        let body = format!(
            "mov.u32 %r10, 16843009;\nmov.u32 %r30, 2147483647;\nmov.u32 %r31, %r30;\nmov.u32 %r32, %r30;\n\
             mov.u32 %r33, %r30;\nmma.sync.aligned.m16n8k32.row.col{suffix}.s32.s8.s8.s32 {group}, \
             {{%r10, %r10, %r10, %r10}}, {{%r10, %r10}}, {group};\nmul.wide.u32 %rd10, %r1, 4;\n\
             add.s64 %rd11, %rd1, %rd10;\nst.global.u32 [%rd11], %r30;"
        );
        let mut memory = Memory::new();
        let out = memory.buffer("out", 128, 4);
        run(&kernel(1, "", &body), &launch(1, 32, 0, &[out]), &mut memory).unwrap();
        assert_eq!(words(memory.bytes(out).unwrap()), vec![expected as u32; 32]);
    }
}

/// Four 8x8 matrices of numbered elements in shared memory, with rows 16 bytes apart, of which `count` are loaded.
fn loaded(count: usize, trans: bool) -> Vec<u32> {
    let names: Vec<_> = (0..count).map(|i| format!("%r{}", 30 + i)).collect();
    let stores: String = (0..4)
        .map(|i| {
            format!("add.u32 %r12, %r11, {};\nst.shared.u32 [%r10+{}], %r12;\n", i * 0x0040_0040, 128 * i)
        })
        .collect();
    let saves: String =
        (0..count).map(|i| format!("st.global.u32 [%rd11+{}], %r{};\n", 128 * i, 30 + i)).collect();
    let body = format!(
        "mov.u32 %r9, tile;\nshl.b32 %r10, %r1, 2;\nadd.u32 %r10, %r10, %r9;\nshl.b32 %r11, %r1, 1;\n\
         mad.lo.u32 %r11, %r1, 131072, %r11;\nadd.u32 %r11, %r11, 65536;\n{stores}bar.warp.sync 0xffffffff;\n\
         shl.b32 %r13, %r1, 4;\nadd.u32 %r13, %r13, %r9;\nldmatrix.sync.aligned.m8n8.x{count}{}.shared.b16 {{{}}}, [%r13];\n\
         mul.wide.u32 %rd10, %r1, 4;\nadd.s64 %rd11, %rd1, %rd10;\n{saves}",
        if trans { ".trans" } else { "" },
        names.join(", ")
    );
    let text = kernel(1, ".shared .align 16 .b8 tile[512];", &body);
    let mut memory = Memory::new();
    let out = memory.buffer("out", 128 * count, 4);
    let report = run(&text, &launch(1, 32, 0, &[out]), &mut memory).unwrap();
    // The eight rows of a matrix take one wavefront, and so does each of the four stores.
    assert_eq!(report.counters.shared_reads.taken, count as u64);
    assert_eq!(report.counters.shared_writes.taken, 4);
    words(memory.bytes(out).unwrap())
}

#[test]
fn ldmatrix_gives_rows_and_transposed_columns() {
    for count in [1, 2, 4] {
        for trans in [false, true] {
            let got = loaded(count, trans);
            for matrix in 0..count {
                for lane in 0..32 {
                    let (g, t) = (lane / 4, 2 * (lane % 4));
                    let at = |row: usize, column: usize| (64 * matrix + 8 * row + column) as u32;
                    let (low, high) = if trans { (at(t, g), at(t + 1, g)) } else { (at(g, t), at(g, t + 1)) };
                    assert_eq!(got[matrix * 32 + lane], low | high << 16, "x{count} {trans} lane {lane}");
                }
            }
        }
    }
}

#[test]
fn movmatrix_transposes() {
    let body = "shl.b32 %r10, %r1, 1;\nmad.lo.u32 %r10, %r1, 131072, %r10;\nadd.u32 %r10, %r10, 65536;\n\
                movmatrix.sync.aligned.m8n8.trans.b16 %r11, %r10;\nmul.wide.u32 %rd10, %r1, 4;\n\
                add.s64 %rd11, %rd1, %rd10;\nst.global.u32 [%rd11], %r11;";
    let mut memory = Memory::new();
    let out = memory.buffer("out", 128, 4);
    run(&kernel(1, "", body), &launch(1, 32, 0, &[out]), &mut memory).unwrap();
    for (lane, got) in words(memory.bytes(out).unwrap()).into_iter().enumerate() {
        let (g, t) = (lane as u32 / 4, 2 * (lane as u32 % 4));
        assert_eq!(got, (8 * t + g) | (8 * (t + 1) + g) << 16);
    }
}

#[test]
fn a_part_of_a_warp_cannot_multiply() {
    let body = "setp.lt.u32 %p1, %r1, 16;\n@%p1 movmatrix.sync.aligned.m8n8.trans.b16 %r11, %r1;";
    let result = run(&kernel(0, "", body), &launch(1, 32, 0, &[]), &mut Memory::new());
    assert_eq!(fault(result), FaultKind::WarpDivergence);
}
