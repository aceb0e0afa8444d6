//! Snippets of one or a few instructions, compared with Rust arithmetic.
mod support;

use half::{bf16, f16};
use support::{numbers, over_words};

fn inputs() -> [Vec<u32>; 3] {
    let edges = [
        0u32,
        1,
        2,
        31,
        32,
        33,
        0x7fff_ffff,
        0x8000_0000,
        0x8000_0001,
        0xffff_ffff,
        0x0000_8000,
        0x00ff_ff00,
    ];
    let mut a = numbers(512, 11);
    let mut b = numbers(512, 12);
    let mut c = numbers(512, 13);
    for i in 0..144 {
        a[i] = edges[i % 12];
        b[i] = edges[i / 12];
        c[i] = edges[(i * 5 + 1) % 12];
    }
    for i in 144..300 {
        b[i] %= 40;
        c[i] %= 40;
    }
    [a, b, c]
}

fn floats() -> [Vec<u32>; 3] {
    let edges =
        [0.0, -0.0, 1e-40, -1e-40, 1.0, -1.5, 2.5, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 65504.0, 3e38];
    let mut all = [numbers(512, 21), numbers(512, 22), numbers(512, 23)];
    for i in 0..144 {
        all[0][i] = edges[i % 12].to_bits();
        all[1][i] = edges[i / 12].to_bits();
        all[2][i] = edges[(i * 5 + 3) % 12].to_bits();
    }
    for list in &mut all {
        for (i, v) in list.iter_mut().enumerate().skip(144) {
            let small = (*v % 4001) as f32 / 16.0 - 125.0;
            *v = if i % 3 == 0 { *v } else { small.to_bits() };
        }
    }
    all
}

fn check(inputs: &[Vec<u32>; 3], snippet: &str, expected: impl Fn(u32, u32, u32) -> u32) {
    let [a, b, c] = inputs;
    let got = over_words(snippet, a, b, c);
    for i in 0..a.len() {
        let want = expected(a[i], b[i], c[i]);
        assert_eq!(
            got[i], want,
            "{snippet}: of {:#x}, {:#x}, {:#x}: {:#x}, not {want:#x}",
            a[i], b[i], c[i], got[i]
        );
    }
}

#[test]
fn integers() {
    let x = inputs();
    let check = |snippet: &str, f: fn(u32, u32, u32) -> u32| check(&x, snippet, f);
    check("sub.s32 %r20, %r10, %r11;", |a, b, _| a.wrapping_sub(b));
    check("mul.lo.s32 %r20, %r10, %r11;", |a, b, _| a.wrapping_mul(b));
    check("mul.hi.u32 %r20, %r10, %r11;", |a, b, _| ((a as u64 * b as u64) >> 32) as u32);
    check("mul.hi.s32 %r20, %r10, %r11;", |a, b, _| ((a as i32 as i64 * b as i32 as i64) >> 32) as u32);
    check("mad.lo.s32 %r20, %r10, %r11, %r12;", |a, b, c| a.wrapping_mul(b).wrapping_add(c));
    check(
        "mul.wide.s32 %rd20, %r10, %r11;\nshr.u64 %rd20, %rd20, 16;\ncvt.u32.u64 %r20, %rd20;",
        |a, b, _| ((a as i32 as i64).wrapping_mul(b as i32 as i64) as u64 >> 16) as u32,
    );
    check("div.u32 %r20, %r10, %r11;", |a, b, _| a.checked_div(b).unwrap_or(u32::MAX));
    check("rem.u32 %r20, %r10, %r11;", |a, b, _| a.checked_rem(b).unwrap_or(a));
    check("div.s32 %r20, %r10, %r11;", |a, b, _| {
        if b == 0 { u32::MAX } else { (a as i32).wrapping_div(b as i32) as u32 }
    });
    check("min.s32 %r20, %r10, %r11;", |a, b, _| (a as i32).min(b as i32) as u32);
    check("max.u32 %r20, %r10, %r11;", |a, b, _| a.max(b));
    check("abs.s32 %r20, %r10;", |a, _, _| (a as i32).wrapping_abs() as u32);
    check("neg.s32 %r20, %r10;", |a, _, _| 0u32.wrapping_sub(a));
    check("not.b32 %r20, %r10;", |a, _, _| !a);
    check("shl.b32 %r20, %r10, %r11;", |a, b, _| if b > 31 { 0 } else { a << b });
    check("shr.u32 %r20, %r10, %r11;", |a, b, _| if b > 31 { 0 } else { a >> b });
    check("shr.s32 %r20, %r10, %r11;", |a, b, _| ((a as i32) >> b.min(31)) as u32);
    check("shf.r.wrap.b32 %r20, %r10, %r11, %r12;", |a, b, c| {
        (((b as u64) << 32 | a as u64) >> (c % 32)) as u32
    });
    check("shf.l.clamp.b32 %r20, %r10, %r11, %r12;", |a, b, c| match c.min(32) {
        0 => b,
        32 => a,
        n => b << n | a >> (32 - n),
    });
    check("popc.b32 %r20, %r10;", |a, _, _| a.count_ones());
    check("clz.b32 %r20, %r10;", |a, _, _| a.leading_zeros());
    check("brev.b32 %r20, %r10;", |a, _, _| a.reverse_bits());
    check("sad.u32 %r20, %r10, %r11, %r12;", |a, b, c| a.abs_diff(b).wrapping_add(c));
    check("add.sat.s32 %r20, %r10, %r11;", |a, b, _| (a as i32).saturating_add(b as i32) as u32);
    check("add.s32 %r20, %r10, -5;", |a, _, _| a.wrapping_sub(5));
    check("setp.lt.s32 %p1, %r10, %r11;\nselp.b32 %r20, %r11, %r12, %p1;", |a, b, c| {
        if (a as i32) < b as i32 { b } else { c }
    });
    check(
        "setp.gt.u32 %p3, %r12, 7;\nsetp.le.and.u32 %p1|%p2, %r10, %r11, !%p3;\nselp.u32 %r20, 1, 0, %p1;\n\
         @%p2 add.u32 %r20, %r20, 2;",
        |a, b, c| u32::from(a <= b && c <= 7) + 2 * u32::from(a > b && c <= 7),
    );
}

#[test]
fn bits_and_bytes() {
    let x = inputs();
    let check = |snippet: &str, f: fn(u32, u32, u32) -> u32| check(&x, snippet, f);
    check("lop3.b32 %r20, %r10, %r11, %r12, 0xea;", |a, b, c| (a & b) | c);
    check("lop3.b32 %r20, %r10, %r11, %r12, 0x96;", |a, b, c| a ^ b ^ c);
    check("lop3.b32 %r20, %r10, %r11, %r12, 0xca;", |a, b, c| (a & b) | (!a & c));
    check("prmt.b32 %r20, %r10, %r11, 0x7531;", |a, b, _| {
        let (a, b) = (a.to_le_bytes(), b.to_le_bytes());
        u32::from_le_bytes([a[1], a[3], b[1], b[3]])
    });
    check("prmt.b32 %r20, %r10, %r11, 0x4ba8;", |a, b, _| {
        let sign = |byte: u32| if byte & 0x80 != 0 { 0xff } else { 0 };
        sign(a & 0xff) | sign(a >> 16 & 0xff) << 8 | sign(a >> 24) << 16 | (b & 0xff) << 24
    });
    check("bfe.u32 %r20, %r10, %r11, %r12;", |a, b, c| {
        let (b, c) = (b & 0xff, c & 0xff);
        (0..c.min(32)).filter(|i| b + i < 32 && a >> (b + i) & 1 != 0).fold(0, |v, i| v | 1 << i)
    });
    check("bfe.s32 %r20, %r10, %r11, %r12;", |a, b, c| {
        let (b, c) = (b & 0xff, c & 0xff);
        let sign = c != 0 && a >> (b + c - 1).min(31) & 1 != 0;
        let bit = |i: u32| if i < c && b + i < 32 { a >> (b + i) & 1 != 0 } else { sign };
        (0..32).filter(|i| bit(*i)).fold(0, |v, i| v | 1 << i)
    });
    check("bfi.b32 %r20, %r10, %r11, %r12, 5;", |a, b, c| {
        let at = c & 0xff;
        (0..5).filter(|i| at + i < 32).fold(b, |v, i| v & !(1 << (at + i)) | (a >> i & 1) << (at + i))
    });
    check("dp4a.s32.s32 %r20, %r10, %r11, %r12;", |a, b, c| {
        (0..4).fold(c, |s, i| {
            s.wrapping_add(((a >> (8 * i)) as i8 as i32 * (b >> (8 * i)) as i8 as i32) as u32)
        })
    });
    check("dp4a.u32.s32 %r20, %r10, %r11, %r12;", |a, b, c| {
        (0..4).fold(c, |s, i| {
            s.wrapping_add(((a >> (8 * i)) as u8 as i32 * (b >> (8 * i)) as i8 as i32) as u32)
        })
    });
    check("mov.b32 {%rs1, %rs2}, %r10;\nmov.b32 %r20, {%rs2, %rs1};", |a, _, _| a.rotate_left(16));
    check("mov.b32 {%rs1, %rs2}, %r10;\ncvt.s32.s16 %r20, %rs2;", |a, _, _| ((a as i32) >> 16) as u32);
    check("cvt.u16.u32 %rs1, %r10;\nadd.s16 %rs2, %rs1, 1;\ncvt.u32.u16 %r20, %rs2;", |a, _, _| {
        u32::from((a as u16).wrapping_add(1))
    });
    check("cvt.s32.s8 %r20, %r10;", |a, _, _| a as i8 as i32 as u32);
    check("cvt.sat.u8.s32 %r20, %r10;", |a, _, _| (a as i32).clamp(0, 255) as u32);
    check("cvt.sat.s8.s32 %r20, %r10;", |a, _, _| (a as i32).clamp(-128, 127) as u32);
}

fn same(x: f32) -> u32 {
    if x.is_nan() { 0x7fff_ffff } else { x.to_bits() }
}

fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

fn lesser(a: f32, b: f32) -> f32 {
    match (a.is_nan(), b.is_nan()) {
        (true, _) => b,
        (_, true) => a,
        _ if a == 0.0 && b == 0.0 => {
            if a.is_sign_negative() {
                a
            } else {
                b
            }
        }
        _ => {
            if a < b {
                a
            } else {
                b
            }
        }
    }
}

#[test]
fn single_precision() {
    let x = floats();
    let check = |snippet: &str, f: fn(f32, f32, f32) -> u32| {
        let snippet = format!("{snippet}\nmov.b32 %r20, %f20;");
        check(&x, &snippet, |a, b, c| f(f32::from_bits(a), f32::from_bits(b), f32::from_bits(c)));
    };
    check("add.f32 %f20, %f10, %f11;", |a, b, _| same(a + b));
    check("sub.rn.f32 %f20, %f10, %f11;", |a, b, _| same(a - b));
    check("mul.f32 %f20, %f10, %f11;", |a, b, _| same(a * b));
    check("mul.ftz.f32 %f20, %f10, %f11;", |a, b, _| same(flush(flush(a) * flush(b))));
    check("fma.rn.f32 %f20, %f10, %f11, %f12;", |a, b, c| same(a.mul_add(b, c)));
    check("div.rn.f32 %f20, %f10, %f11;", |a, b, _| same(a / b));
    check("rcp.rn.f32 %f20, %f10;", |a, _, _| same(1.0 / a));
    check("sqrt.rn.f32 %f20, %f10;", |a, _, _| same(a.sqrt()));
    check("ex2.approx.ftz.f32 %f20, %f10;", |a, _, _| same(flush((flush(a) as f64).exp2() as f32)));
    check("lg2.approx.f32 %f20, %f10;", |a, _, _| same((a as f64).log2() as f32));
    check("neg.f32 %f20, %f10;", |a, _, _| (-a).to_bits());
    check("abs.f32 %f20, %f10;", |a, _, _| a.abs().to_bits());
    check("min.f32 %f20, %f10, %f11;", |a, b, _| same(lesser(a, b)));
    check("max.f32 %f20, %f10, %f11;", |a, b, _| same(-lesser(-a, -b)));
    check("min.NaN.f32 %f20, %f10, %f11;", |a, b, _| {
        if a.is_nan() || b.is_nan() { 0x7fff_ffff } else { lesser(a, b).to_bits() }
    });
    check(
        "add.sat.f32 %f20, %f10, %f11;",
        |a, b, _| if a + b > 0.0 { (a + b).min(1.0).to_bits() } else { 0 },
    );
    check("setp.gtu.f32 %p1, %f10, %f11;\nselp.f32 %f20, 0f3F800000, 0f00000000, %p1;", |a, b, _| {
        if a > b || a.is_nan() || b.is_nan() { 1f32.to_bits() } else { 0 }
    });
    check("setp.ne.f32 %p1, %f10, %f11;\nselp.f32 %f20, 1.0, 0.0, %p1;", |a, b, _| {
        if a != b && !a.is_nan() && !b.is_nan() { 1f32.to_bits() } else { 0 }
    });
    check("cvt.rni.f32.f32 %f20, %f10;", |a, _, _| same(a.round_ties_even()));
}

#[test]
fn directed_roundings_enclose_the_exact_result() {
    let [a, b, c] = floats();
    for op in ["add", "mul", "fma"] {
        let third = if op == "fma" { ", %f12" } else { "" };
        let run = |mode: &str| {
            over_words(&format!("{op}.{mode}.f32 %f20, %f10, %f11{third};\nmov.b32 %r20, %f20;"), &a, &b, &c)
        };
        let (down, near, up, zero) = (run("rm"), run("rn"), run("rp"), run("rz"));
        for i in 0..a.len() {
            let [d, n, u, z] = [down[i], near[i], up[i], zero[i]].map(f32::from_bits);
            if n.is_nan() {
                assert!(d.is_nan() && u.is_nan());
                continue;
            }
            assert!(d <= n && n <= u, "{op} {i}: {d} {n} {u}");
            assert!(d == u || d.next_up() == u, "{op} {i}: {d} {u}");
            assert_eq!(z.abs(), d.abs().min(u.abs()), "{op} {i}");
        }
    }
}

#[test]
fn conversions() {
    let [x, y] = [floats(), inputs()];
    let of_floats = |snippet: &str, f: fn(f32) -> u32| check(&x, snippet, |a, _, _| f(f32::from_bits(a)));
    of_floats("cvt.rni.s32.f32 %r20, %f10;", |a| a.round_ties_even() as i32 as u32);
    of_floats("cvt.rzi.u32.f32 %r20, %f10;", |a| a.trunc() as u32);
    of_floats("cvt.rmi.s32.f32 %r20, %f10;", |a| a.floor() as i32 as u32);
    of_floats("cvt.rn.f16.f32 %rs1, %f10;\ncvt.u32.u16 %r20, %rs1;", |a| {
        if a.is_nan() { 0x7fff } else { u32::from(f16::from_f32(a).to_bits()) }
    });
    of_floats("cvt.rn.bf16.f32 %rs1, %f10;\ncvt.u32.u16 %r20, %rs1;", |a| {
        if a.is_nan() { 0x7fff } else { u32::from(bf16::from_f32(a).to_bits()) }
    });
    check(&x, "cvt.rn.f16x2.f32 %r20, %f10, %f11;", |a, b, _| {
        let half = |v: u32| {
            let v = f32::from_bits(v);
            if v.is_nan() { 0x7fff } else { u32::from(f16::from_f32(v).to_bits()) }
        };
        half(a) << 16 | half(b)
    });
    let of_words = |snippet: &str, f: fn(u32) -> u32| check(&y, snippet, |a, _, _| f(a));
    of_words("cvt.rn.f32.s32 %f20, %r10;\nmov.b32 %r20, %f20;", |a| (a as i32 as f32).to_bits());
    of_words("cvt.rn.f32.u32 %f20, %r10;\nmov.b32 %r20, %f20;", |a| (a as f32).to_bits());
    of_words("cvt.u16.u32 %rs1, %r10;\ncvt.f32.f16 %f20, %rs1;\nmov.b32 %r20, %f20;", |a| {
        same(f16::from_bits(a as u16).to_f32())
    });
    of_words(
        "cvt.u64.u32 %rd20, %r10;\nmul.lo.s64 %rd20, %rd20, 4294967297;\ncvt.rn.f32.u64 %f20, %rd20;\nmov.b32 %r20, %f20;",
        |a| (u64::from(a).wrapping_mul(0x1_0000_0001) as f32).to_bits(),
    );
}

/// Rounding the result again gives the correctly rounded sum.
fn rounded_to_odd(a: f64, b: f64) -> f32 {
    let sum = a + b;
    let shifted = sum - a;
    let error = (a - (sum - shifted)) + (b - shifted);
    let single = sum as f32;
    let rest = (sum - f64::from(single)) + error;
    if !single.is_finite() || rest == 0.0 || single.to_bits() & 1 == 1 {
        return single;
    }
    let away = (rest > 0.0) == (single > 0.0 || (single == 0.0 && rest > 0.0));
    f32::from_bits(if away { single.to_bits() + 1 } else { single.to_bits() - 1 })
}

#[test]
fn pairs_of_halves() {
    let x = inputs();
    let halves = |a: u32, b: u32, c: u32, f: fn(f64, f64, f64) -> f64| {
        let one = |shift: u32| {
            let v = |bits: u32| f16::from_bits((bits >> shift) as u16);
            let exact = f(v(a).to_f64(), v(b).to_f64(), v(c).to_f64());
            if exact.is_nan() { 0x7fff } else { u32::from(f16::from_f64(exact).to_bits()) }
        };
        one(0) | one(16) << 16
    };
    check(&x, "add.f16x2 %r20, %r10, %r11;", |a, b, c| halves(a, b, c, |a, b, _| a + b));
    check(&x, "mul.f16x2 %r20, %r10, %r11;", |a, b, c| halves(a, b, c, |a, b, _| a * b));
    check(&x, "sub.f16x2 %r20, %r10, %r11;", |a, b, c| halves(a, b, c, |a, b, _| a - b));
    check(&x, "add.rn.bf16x2 %r20, %r10, %r11;", |a, b, _| {
        let one = |shift: u32| {
            let v = |bits: u32| bf16::from_bits((bits >> shift) as u16).to_f32();
            let sum = v(a) + v(b);
            if sum.is_nan() { 0x7fff } else { u32::from(bf16::from_f32(sum).to_bits()) }
        };
        one(0) | one(16) << 16
    });
    check(&x, "fma.rn.bf16x2 %r20, %r10, %r11, %r12;", |a, b, c| {
        let one = |shift: u32| {
            let v = |bits: u32| bf16::from_bits((bits >> shift) as u16).to_f64();
            let sum = rounded_to_odd(v(a) * v(b), v(c));
            if sum.is_nan() { 0x7fff } else { u32::from(bf16::from_f32(sum).to_bits()) }
        };
        one(0) | one(16) << 16
    });
}

#[test]
fn lanes_exchange() {
    let a = numbers(64, 5);
    let of = |snippet: &str, f: &dyn Fn(usize, usize) -> u32| {
        let got = over_words(snippet, &a, &a, &a);
        for (i, got) in got.iter().enumerate() {
            assert_eq!(*got, f(i / 32 * 32, i % 32), "{snippet} {i}");
        }
    };
    let at = |i: usize| a[i];
    of("shfl.sync.bfly.b32 %r20|%p1, %r10, 4, 31, -1;", &|w, l| at(w + (l ^ 4)));
    of("shfl.sync.idx.b32 %r20, %r10, 3, 31, -1;", &|w, _| at(w + 3));
    of("shfl.sync.up.b32 %r20, %r10, 2, 0, -1;", &|w, l| at(w + if l < 2 { l } else { l - 2 }));
    of("shfl.sync.down.b32 %r20, %r10, 1, 6175, -1;", &|w, l| at(w + if l % 8 == 7 { l } else { l + 1 }));
    of("shfl.sync.idx.b32 %r20, %r10, 1, 6175, -1;", &|w, l| at(w + l / 8 * 8 + 1));
    let odd = |w: usize| (0..32).filter(|l| at(w + l) & 1 != 0).fold(0u32, |m, l| m | 1 << l);
    of("and.b32 %r13, %r10, 1;\nsetp.ne.s32 %p1, %r13, 0;\nvote.sync.ballot.b32 %r20, %p1, -1;", &|w, _| {
        odd(w)
    });
    of(
        "and.b32 %r13, %r10, 1;\nsetp.ne.s32 %p1, %r13, 0;\nvote.sync.all.pred %p2, !%p1, -1;\nselp.u32 %r20, 1, 0, %p2;",
        &|w, _| u32::from(odd(w) == 0),
    );
    of("redux.sync.add.s32 %r20, %r10, -1;", &|w, _| (0..32).fold(0u32, |s, l| s.wrapping_add(at(w + l))));
    of("redux.sync.max.s32 %r20, %r10, -1;", &|w, _| (0..32).map(|l| at(w + l) as i32).max().unwrap() as u32);
    of("and.b32 %r13, %r10, 3;\nmatch.any.sync.b32 %r20, %r13, -1;", &|w, l| {
        (0..32).filter(|o| at(w + o) & 3 == at(w + l) & 3).fold(0u32, |m, o| m | 1 << o)
    });
}

#[test]
fn divergent_loops_meet_again() {
    let a = numbers(64, 6);
    let snippet = "and.b32 %r13, %r10, 15;\nmov.u32 %r14, 0;\nLOOP:\nsetp.eq.u32 %p1, %r13, 0;\n@%p1 bra DONE;\n\
                   add.u32 %r14, %r14, %r13;\nsub.u32 %r13, %r13, 1;\nbra LOOP;\nDONE:\nredux.sync.add.u32 %r20, %r14, -1;";
    let got = over_words(snippet, &a, &a, &a);
    let sum = |w: usize| (0..32).map(|l| a[w + l] & 15).map(|n| n * (n + 1) / 2).sum::<u32>();
    assert!(got.iter().enumerate().all(|(i, v)| *v == sum(i / 32 * 32)));
}

#[test]
fn tables_of_branches_and_local_memory() {
    let a = numbers(64, 7);
    let snippet = ".local .align 16 .b8 spill[32];\n.reg .b64 %here;\nand.b32 %r13, %r10, 3;\nLIST: .branchtargets A, B, C, A;\n\
                   mov.u64 %here, spill;\nst.local.v4.u32 [%here+16], {%r10, %r11, %r12, %r13};\nbrx.idx %r13, LIST;\n\
                   A: mov.u32 %r20, 5;\nbra END;\nB: ld.local.u32 %r20, [%here+16];\nbra END;\n\
                   C: cvta.local.u64 %here, %here;\nld.u16 %r20, [%here+18];\nEND:";
    let got = over_words(snippet, &a, &a, &a);
    for (a, got) in a.iter().zip(got) {
        let want = match a & 3 {
            1 => *a,
            2 => a >> 16,
            _ => 5,
        };
        assert_eq!(got, want);
    }
}
