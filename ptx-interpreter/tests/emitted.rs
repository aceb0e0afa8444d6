//! More instructions that compilers emit, compared with Rust arithmetic.
mod support;

use quant_ptx_interpreter::Memory;
use support::{bytes_of, kernel, launch, numbers, over_words, run, words};

/// Words that combine extreme values, equal values and random ones.
fn inputs() -> [Vec<u32>; 3] {
    let ends = [0, 1, 2, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff, 0xffff, 0x8000];
    let mut all = [numbers(256, 1), numbers(256, 2), numbers(256, 3)];
    for i in 0..64 {
        (all[0][i], all[1][i], all[2][i]) = (ends[i % 8], ends[i / 8], ends[(i * 3 + 1) % 8]);
        all[1][64 + i] = all[0][64 + i];
    }
    all
}

fn check(inputs: &[Vec<u32>; 3], snippet: &str, expected: impl Fn(u32, u32, u32) -> u32) {
    let [a, b, c] = inputs;
    for (i, got) in over_words(snippet, a, b, c).into_iter().enumerate() {
        let want = expected(a[i], b[i], c[i]);
        assert_eq!(got, want, "{snippet}: of {:#x}, {:#x}, {:#x}", a[i], b[i], c[i]);
    }
}

fn either_is_nan(a: f32, b: f32) -> bool {
    a.is_nan() || b.is_nan()
}

fn compares(inputs: &[Vec<u32>; 3], opcode: &str, letter: &str, expected: impl Fn(u32, u32) -> bool) {
    let snippet = format!("{opcode} %p1, %{letter}10, %{letter}11;\nselp.u32 %r20, 1, 0, %p1;");
    check(inputs, &snippet, |a, b, _| u32::from(expected(a, b)));
}

#[test]
fn comparisons_of_integers() {
    let x = inputs();
    compares(&x, "setp.eq.b32", "r", |a, b| a == b);
    compares(&x, "setp.eq.s32", "r", |a, b| a == b);
    compares(&x, "setp.ne.s32", "r", |a, b| a != b);
    compares(&x, "setp.lt.s32", "r", |a, b| (a as i32) < b as i32);
    compares(&x, "setp.le.s32", "r", |a, b| a as i32 <= b as i32);
    compares(&x, "setp.gt.s32", "r", |a, b| a as i32 > b as i32);
    compares(&x, "setp.ge.s32", "r", |a, b| a as i32 >= b as i32);
    compares(&x, "setp.lt.u32", "r", |a, b| a < b);
    compares(&x, "setp.le.u32", "r", |a, b| a <= b);
    compares(&x, "setp.gt.u32", "r", |a, b| a > b);
    compares(&x, "setp.ge.u32", "r", |a, b| a >= b);
    check(&x, "min.u32 %r20, %r10, %r11;", |a, b, _| a.min(b));
    check(&x, "max.s32 %r20, %r10, %r11;", |a, b, _| (a as i32).max(b as i32) as u32);
}

#[test]
fn comparisons_of_floats() {
    let mut x = inputs();
    let ends = [0.0, -0.0, 1.0, -1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e-40];
    for i in 0..64 {
        (x[0][i], x[1][i]) = (ends[i % 8].to_bits(), ends[i / 8].to_bits());
    }
    let of = |opcode: &str, f: fn(f32, f32) -> bool| {
        compares(&x, opcode, "f", |a, b| f(f32::from_bits(a), f32::from_bits(b)));
    };
    of("setp.eq.f32", |a, b| a == b);
    of("setp.lt.f32", |a, b| a < b);
    of("setp.le.f32", |a, b| a <= b);
    of("setp.gt.f32", |a, b| a > b);
    of("setp.ge.f32", |a, b| a >= b);
    of("setp.neu.f32", |a, b| a != b);
    of("setp.ltu.f32", |a, b| a < b || either_is_nan(a, b));
    of("setp.leu.f32", |a, b| a <= b || either_is_nan(a, b));
    of("setp.gtu.f32", |a, b| a > b || either_is_nan(a, b));
    of("setp.geu.f32", |a, b| a >= b || either_is_nan(a, b));
    of("setp.nan.f32", either_is_nan);
    let same = |x: f32| if x.is_nan() { 0x7fff_ffff } else { x.to_bits() };
    for (opcode, f) in [
        ("add.rn.f32", (|a, b| a + b) as fn(f32, f32) -> f32),
        ("mul.rn.f32", |a, b| a * b),
        ("sub.f32", |a, b| a - b),
    ] {
        let snippet = format!("{opcode} %f20, %f10, %f11;\nmov.f32 %f21, %f20;\nmov.b32 %r20, %f21;");
        check(&x, &snippet, |a, b, _| same(f(f32::from_bits(a), f32::from_bits(b))));
    }
    let snippet = "setp.lt.f32 %p1, %f10, %f11;\nselp.f32 %f20, %f10, %f12, %p1;\nmov.b32 %r20, %f20;";
    check(&x, snippet, |a, b, c| if f32::from_bits(a) < f32::from_bits(b) { a } else { c });
}

#[test]
fn predicates() {
    let x = inputs();
    let two = "setp.lt.u32 %p1, %r10, %r11;\nsetp.lt.u32 %p2, %r11, %r12;\n";
    let of = |rest: &str, f: fn(bool, bool) -> bool| {
        let snippet = format!("{two}{rest}\nselp.u32 %r20, 1, 0, %p3;");
        check(&x, &snippet, |a, b, c| u32::from(f(a < b, b < c)));
    };
    of("and.pred %p3, %p1, %p2;", |p, q| p && q);
    of("or.pred %p3, %p1, %p2;", |p, q| p || q);
    of("xor.pred %p3, %p1, %p2;", |p, q| p != q);
    of("not.pred %p3, %p1;", |p, _| !p);
    of("mov.pred %p3, %p2;", |_, q| q);
    of("mov.pred %p3, 0;\n@%p1 mov.pred %p3, -1;", |p, _| p);
    of("mov.pred %p3, %p1;\n@%p2 bra.uni OVER;\nnot.pred %p3, %p3;\nOVER:", |p, q| if q { p } else { !p });
}

#[test]
fn sixteen_bits() {
    let x = inputs();
    let of = |rest: &str, f: fn(u16, u16) -> u32| {
        let snippet = format!("cvt.u16.u32 %rs1, %r10;\ncvt.u16.u32 %rs2, %r11;\n{rest}");
        check(&x, &snippet, |a, b, _| f(a as u16, b as u16));
    };
    for (opcode, f) in [
        ("add.s16", (|a, b| u32::from(a.wrapping_add(b))) as fn(u16, u16) -> u32),
        ("and.b16", |a, b| u32::from(a & b)),
        ("or.b16", |a, b| u32::from(a | b)),
    ] {
        of(&format!("{opcode} %rs3, %rs1, %rs2;\ncvt.u32.u16 %r20, %rs3;"), f);
    }
    of("shl.b16 %rs3, %rs1, 3;\ncvt.u32.u16 %r20, %rs3;", |a, _| u32::from(a << 3));
    of("shr.u16 %rs3, %rs1, 3;\ncvt.u32.u16 %r20, %rs3;", |a, _| u32::from(a >> 3));
    of("mul.wide.u16 %r20, %rs1, %rs2;", |a, b| u32::from(a) * u32::from(b));
    for (opcode, f) in [
        ("setp.eq.s16", (|a, b| a == b) as fn(u16, u16) -> bool),
        ("setp.ne.s16", |a, b| a != b),
        ("setp.lt.s16", |a, b| (a as i16) < b as i16),
        ("setp.lt.u16", |a, b| a < b),
    ] {
        let snippet = format!(
            "cvt.u16.u32 %rs1, %r10;\ncvt.u16.u32 %rs2, %r11;\n{opcode} %p1, %rs1, %rs2;\n\
             selp.b16 %rs3, %rs1, %rs2, %p1;\nselp.u16 %rs4, 1, 0, %p1;\ncvt.u32.u16 %r21, %rs3;\n\
             cvt.u32.u16 %r22, %rs4;\nshl.b32 %r22, %r22, 16;\nor.b32 %r20, %r21, %r22;"
        );
        check(&x, &snippet, |a, b, _| {
            let (a, b) = (a as u16, b as u16);
            if f(a, b) { 0x1_0000 | u32::from(a) } else { u32::from(b) }
        });
    }
}

/// 64-bit operations on `b:a` and `c:b`.
#[test]
fn sixty_four_bits() {
    let x = inputs();
    let of = |rest: &str, f: fn(u64, u64) -> u64| {
        let wide = format!("mov.b64 %rd20, {{%r10, %r11}};\nmov.b64 %rd21, {{%r11, %r12}};\n{rest}\n");
        let value =
            |a: u32, b: u32, c: u32| f(u64::from(b) << 32 | u64::from(a), u64::from(c) << 32 | u64::from(b));
        check(&x, &format!("{wide}cvt.u32.u64 %r20, %rd22;"), |a, b, c| value(a, b, c) as u32);
        let upper = format!("{wide}shr.u64 %rd22, %rd22, 32;\ncvt.u32.u64 %r20, %rd22;");
        check(&x, &upper, |a, b, c| (value(a, b, c) >> 32) as u32);
    };
    of("and.b64 %rd22, %rd20, %rd21;", |a, b| a & b);
    of("or.b64 %rd22, %rd20, %rd21;", |a, b| a | b);
    of("shl.b64 %rd22, %rd20, 13;", |a, _| a << 13);
    of("shr.u64 %rd22, %rd20, 13;", |a, _| a >> 13);
    of("add.s64 %rd22, %rd20, %rd21;", u64::wrapping_add);
    of("sub.s64 %rd22, %rd20, %rd21;", u64::wrapping_sub);
    of("mul.lo.s64 %rd22, %rd20, %rd21;", u64::wrapping_mul);
    of("mad.lo.s64 %rd22, %rd20, %rd21, 7;", |a, b| a.wrapping_mul(b).wrapping_add(7));
    of("div.u64 %rd22, %rd20, %rd21;", |a, b| a.checked_div(b).unwrap_or(u64::MAX));
    of("rem.u64 %rd22, %rd20, %rd21;", |a, b| a.checked_rem(b).unwrap_or(a));
    of("cvt.u32.u64 %r21, %rd20;\ncvt.s64.s32 %rd22, %r21;", |a, _| a as i32 as i64 as u64);
    of("cvt.u32.u64 %r21, %rd20;\ncvt.u64.u32 %rd22, %r21;", |a, _| u64::from(a as u32));
    for (opcode, f) in [
        ("setp.eq.s64", (|a, b| a == b) as fn(u64, u64) -> bool),
        ("setp.ne.s64", |a, b| a != b),
        ("setp.ge.u64", |a, b| a >= b),
        ("setp.lt.u64", |a, b| a < b),
        ("setp.gt.s64", |a, b| a as i64 > b as i64),
    ] {
        let snippet = format!(
            "mov.b64 %rd20, {{%r10, %r11}};\nmov.b64 %rd21, {{%r11, %r12}};\n{opcode} %p1, %rd20, %rd21;\n\
             selp.b64 %rd22, %rd20, %rd21, %p1;\nshr.u64 %rd22, %rd22, 16;\ncvt.u32.u64 %r20, %rd22;"
        );
        check(&x, &snippet, |a, b, c| {
            let (a, b) = (u64::from(b) << 32 | u64::from(a), u64::from(c) << 32 | u64::from(b));
            (if f(a, b) { a } else { b } >> 16) as u32
        });
    }
}

fn moved(load: &str, store: &str, registers: &str, bytes: usize) {
    let names: Vec<String> = match load.contains(".v4") {
        true => (10..14).map(|i| format!("%{registers}{i}")).collect(),
        false if load.contains(".v2") => (10..12).map(|i| format!("%{registers}{i}")).collect(),
        false => vec![format!("%{registers}10")],
    };
    let list = if names.len() > 1 { format!("{{{}}}", names.join(", ")) } else { names.concat() };
    let (from, to) = (
        if load.contains("shared") { "%r21" } else { "%rd11" },
        if store.contains("shared") { "%r21" } else { "%rd12" },
    );
    let body = format!(
        "mul.wide.u32 %rd10, %r1, 16;\ncvta.to.global.u64 %rd11, %rd1;\nadd.s64 %rd11, %rd11, %rd10;\n\
         cvta.to.global.u64 %rd12, %rd2;\nadd.s64 %rd12, %rd12, %rd10;\nshl.b32 %r21, %r1, 4;\nmov.u32 %r22, tile;\n\
         add.s32 %r21, %r21, %r22;\nld.global.v4.u32 {{%r30, %r31, %r32, %r33}}, [%rd11];\n\
         st.shared.v4.u32 [%r21], {{{first}}};\n{load} {list}, [{from}];\n{store} [{to}], {list};\n\
         ld.shared.v4.u32 {{%r30, %r31, %r32, %r33}}, [%r21];\n{last}",
        first = if load.contains("shared") { "%r30, %r31, %r32, %r33" } else { "0, 0, 0, 0" },
        last =
            if store.contains("shared") { "st.global.v4.u32 [%rd12], {%r30, %r31, %r32, %r33};" } else { "" },
    );
    let text = kernel(2, ".shared .align 16 .b8 tile[512];", &body);
    let input = numbers(128, 9);
    let mut memory = Memory::new();
    let from = memory.buffer_from("from", &bytes_of(&input), 16);
    let to = memory.buffer_from("to", &[0; 512], 16);
    run(&text, &launch(1, 32, 0, &[from, to]), &mut memory).unwrap_or_else(|e| panic!("{load} {store}: {e}"));
    let got = memory.bytes(to).unwrap();
    for (i, &got) in got.iter().enumerate() {
        let own = bytes_of(&input)[i];
        assert_eq!(got, if i % 16 < bytes { own } else { 0 }, "{load} {store}: byte {i}");
    }
}

#[test]
fn loads_and_stores() {
    moved("ld.global.u8", "st.global.u8", "rs", 1);
    moved("ld.global.u16", "st.global.u16", "rs", 2);
    moved("ld.global.u32", "st.global.u32", "r", 4);
    moved("ld.global.f32", "st.global.f32", "f", 4);
    moved("ld.global.v2.u32", "st.global.v2.u32", "r", 8);
    moved("ld.global.v4.u32", "st.global.v4.u32", "r", 16);
    moved("ld.global.v4.f32", "st.global.v4.f32", "f", 16);
    moved("ld.global.cg.v2.u32", "st.global.v2.f32", "r", 8);
    moved("ld.global.nc.u32", "st.shared.u32", "r", 4);
    moved("ld.global.nc.f32", "st.shared.f32", "f", 4);
    moved("ld.global.nc.v4.u16", "st.shared.v4.u16", "rs", 8);
    moved("ld.global.nc.v4.u32", "st.shared.v4.u32", "r", 16);
    moved("ld.global.nc.v4.f32", "st.shared.v4.f32", "f", 16);
    moved("ld.global.v2.f32", "st.shared.v2.f32", "f", 8);
    moved("ld.global.v2.u32", "st.shared.v2.u32", "r", 8);
    moved("ld.global.u64", "st.global.u64", "rd", 8);
    moved("ld.global.v2.u64", "st.global.v2.u64", "rd", 16);
    moved("ld.f32", "st.global.f32", "f", 4);
    moved("ld.u8", "st.global.u8", "rs", 1);
    moved("ld.u32", "st.global.u32", "r", 4);
    moved("ld.shared.u8", "st.global.u8", "rs", 1);
    moved("ld.shared.u16", "st.global.u16", "rs", 2);
    moved("ld.shared.u32", "st.global.u32", "r", 4);
    moved("ld.shared.f32", "st.global.f32", "f", 4);
    moved("ld.shared.v2.f32", "st.global.v2.f32", "f", 8);
    moved("ld.shared.v2.u32", "st.global.v2.u32", "r", 8);
    moved("ld.shared.v4.f32", "st.global.v4.f32", "f", 16);
}

#[test]
fn parameters_of_every_type() {
    let text = ".version 9.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 to, .param .u32 word, .param .f32 float)\n{\n\
                .reg .b32 %r<4>;\n.reg .f32 %f<4>;\n.reg .b64 %rd<4>;\nld.param.u64 %rd1, [to];\nld.param.u32 %r1, [word];\n\
                ld.param.f32 %f1, [float];\nst.global.u32 [%rd1], %r1;\nst.global.f32 [%rd1+4], %f1;\nret;\n}\n";
    let mut memory = Memory::new();
    let to = memory.buffer("to", 8, 4);
    let mut launch = launch(1, 1, 0, &[to]);
    let more =
        [quant_ptx_interpreter::Argument::U32(0xdead_beef), quant_ptx_interpreter::Argument::F32(-1.5)];
    launch.arguments.extend(more);
    run(text, &launch, &mut memory).unwrap();
    assert_eq!(words(memory.bytes(to).unwrap()), [0xdead_beef, (-1.5_f32).to_bits()]);
}

#[test]
fn all_lanes() {
    let a = numbers(64, 5);
    let warp = |i: usize| &a[i / 32 * 32..][..32];
    let of = |snippet: &str, f: &dyn Fn(usize) -> u32| {
        for (i, got) in over_words(snippet, &a, &a, &a).iter().enumerate() {
            assert_eq!(*got, f(i), "{snippet} {i}");
        }
    };
    of("redux.sync.max.u32 %r20, %r10, -1;", &|i| *warp(i).iter().max().unwrap());
    let min = warp(0).iter().min().unwrap() + 1;
    let any =
        format!("setp.lt.u32 %p1, %r10, {min};\nvote.sync.any.pred %p2, %p1, -1;\nselp.u32 %r20, 1, 0, %p2;");
    of(&any, &|i| u32::from(warp(i).iter().any(|&word| word < min)));
    assert!(warp(0).iter().any(|&word| word < min));
}

/// An atomic counter that wraps: lanes and blocks get 0, 1, 2, 0, 1, 2, ….
#[test]
fn tickets_go_round() {
    let body = "mul.wide.u32 %rd10, %r3, 4;\nadd.s64 %rd11, %rd1, %rd10;\natom.global.inc.u32 %r10, [%rd2], 2;\n\
                st.global.u32 [%rd11], %r10;";
    let mut memory = Memory::new();
    let out = memory.buffer("out", 4 * 64, 4);
    let ticket = memory.buffer_from("ticket", &[0; 4], 4);
    run(&kernel(2, "", body), &launch(2, 32, 0, &[out, ticket]), &mut memory).unwrap();
    let mut taken = words(memory.bytes(out).unwrap());
    taken.sort_unstable();
    let expected: Vec<u32> = (0..64).map(|i| i % 3).collect();
    let count = |of: &[u32], n| of.iter().filter(|&&taken| taken == n).count();
    (0..3).for_each(|n| assert_eq!(count(&taken, n), count(&expected, n)));
    assert_eq!(words(memory.bytes(ticket).unwrap()), [64 % 3]);
}
