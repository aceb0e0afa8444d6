//! The instructions that the kernels use, with their inputs and the comparison of their results.

use half::{bf16, f16};

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Inputs {
    /// Any bits.
    Bits,
    /// f32: half of them from −4 to 4, the others of any bits or special: zeros, infinities, NaN, and the ends of the
    /// range.
    Float,
    /// Positive f32 with exponents from −60 to 59.
    Positive,
    /// f32 from −30 to 30.
    Small,
    /// Two f16 that are integers from −8 to 8, so that sums of their products are exact in any order.
    WholeHalves,
    /// Two bf16 that are integers from −8 to 8.
    WholeBfloats,
    /// Two f16 from −1 to 1.
    Halves,
    /// Two bf16 from −1 to 1.
    Bfloats,
    /// Two f16 of any bits.
    AnyHalves,
    /// Integral f32 from −1000 to 1000.
    WholeFloat,
    /// Integers below this number.
    Below(u32),
}

impl Inputs {
    pub fn word(self, i: usize, next: &mut impl FnMut() -> u32) -> u32 {
        let bits = next();
        let unit = |bits: u32| f64::from(bits) / f64::from(1_u32 << 31) - 1.0;
        let whole = |bits: u32| (bits % 17) as f32 - 8.0;
        let both = |low: u16, high: u16| u32::from(low) | u32::from(high) << 16;
        match self {
            Self::Bits | Self::AnyHalves => bits,
            Self::Float => match i % 16 {
                0 => [
                    0.0,
                    -0.0,
                    f32::INFINITY,
                    f32::NEG_INFINITY,
                    f32::NAN,
                    f32::MAX,
                    f32::MIN_POSITIVE,
                    1e-42,
                ][bits as usize % 8]
                    .to_bits(),
                1..8 => bits,
                _ => ((unit(bits) * 4.0) as f32).to_bits(),
            },
            Self::Positive => {
                let exponent = 127 - 60 + next() % 120;
                exponent << 23 | bits & 0x7f_ffff
            }
            Self::Small => ((unit(bits) * 30.0) as f32).to_bits(),
            Self::WholeHalves => {
                both(f16::from_f32(whole(bits)).to_bits(), f16::from_f32(whole(bits >> 8)).to_bits())
            }
            Self::WholeBfloats => {
                both(bf16::from_f32(whole(bits)).to_bits(), bf16::from_f32(whole(bits >> 8)).to_bits())
            }
            Self::Halves => {
                let other = next();
                both(f16::from_f64(unit(bits)).to_bits(), f16::from_f64(unit(other)).to_bits())
            }
            Self::Bfloats => {
                let other = next();
                both(bf16::from_f64(unit(bits)).to_bits(), bf16::from_f64(unit(other)).to_bits())
            }
            Self::WholeFloat => ((bits % 2001) as f32 - 1000.0).to_bits(),
            Self::Below(max) => bits % max,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Judge {
    /// All bits.
    Bits,
    /// All bits of f32; any NaN equals any other.
    Float,
    /// All bits of pairs of f16; any NaN equals any other.
    Halves,
    /// f32 within this many units in the last place; zeros of either sign are equal.
    Last(u32),
    /// f32 within this tolerance times (1 + magnitude).
    Near(f64),
    /// Sums that may be added in a different order, of terms whose magnitudes add up to this number.
    Sum(f64),
}

impl Judge {
    /// Compares results; returns a report if they are equal or close enough.
    ///
    /// # Errors
    /// A description of the difference, if it is too large.
    pub fn compare(self, got: &[u32], expected: &[u32]) -> Result<String, String> {
        let float = |bits| f64::from(f32::from_bits(bits));
        // In units in the last place.
        let place = |bits: u32| {
            let magnitude = i64::from(bits & 0x7fff_ffff);
            if bits >> 31 == 1 { -magnitude } else { magnitude }
        };
        let half_nan = |bits: u32| bits & 0x7c00 == 0x7c00 && bits & 0x3ff != 0;
        let both_nan = |a: u32, b: u32| float(a).is_nan() && float(b).is_nan();
        let mut worst = 0.0_f64;
        for (i, (&a, &b)) in got.iter().zip(expected).enumerate() {
            let is_fine = match self {
                Self::Bits => a == b,
                Self::Float => a == b || both_nan(a, b),
                Self::Halves => [0, 16].iter().all(|by| {
                    let [a, b] = [a >> by & 0xffff, b >> by & 0xffff];
                    a == b || half_nan(a) && half_nan(b)
                }),
                Self::Last(max) => {
                    let difference = (place(a) - place(b)).unsigned_abs();
                    worst = if both_nan(a, b) { worst } else { worst.max(difference as f64) };
                    both_nan(a, b) || difference <= u64::from(max)
                }
                Self::Near(max) => {
                    let difference = (float(a) - float(b)).abs() / (1.0 + float(b).abs());
                    worst = worst.max(difference);
                    difference <= max
                }
                Self::Sum(magnitude) => {
                    let difference = (float(a) - float(b)).abs();
                    worst = worst.max(difference / magnitude);
                    // A tensor core may truncate where the interpreter rounds, and adds in a different order.
                    difference <= magnitude * 2_f64.powi(-20)
                }
            };
            if !is_fine {
                return Err(format!("word {i}: {a:#010x} ({}) for {b:#010x} ({})", float(a), float(b)));
            }
        }
        Ok(match self {
            Self::Last(_) => format!("within {worst} units in the last place"),
            Self::Near(_) => format!("within {worst:.1e} · (1 + magnitude)"),
            Self::Sum(_) => format!("within {worst:.1e} of the sum of magnitudes"),
            _ => "bit-identical".to_owned(),
        })
    }
}

/// An instruction: registers `%a0`… hold the inputs, `%d0`… the results.
pub struct Instruction {
    /// Its name in reports.
    pub name: String,
    /// The PTX.
    pub body: String,
    /// The contents of each input word of a lane.
    pub inputs: Vec<Inputs>,
    /// The number of result words of a lane.
    pub outputs: usize,
    /// How results are compared.
    pub judge: Judge,
}

fn one(name: &str, inputs: &[Inputs], judge: Judge) -> Instruction {
    let operands: String = (0..inputs.len()).map(|i| format!(", %a{i}")).collect();
    let body = format!("{name} %d0{operands};");
    Instruction { name: name.to_owned(), body, inputs: inputs.to_vec(), outputs: 1, judge }
}

/// A conversion from or to 16 bits, which are in the low half of a word.
fn narrow(name: &str, from_16: bool, input: Inputs, judge: Judge) -> Instruction {
    let body = if from_16 {
        format!("mov.b32 {{%h0, %h1}}, %a0;\n{name} %d0, %h0;")
    } else {
        format!("{name} %h0, %a0;\nmov.u16 %h1, 0;\nmov.b32 %d0, {{%h0, %h1}};")
    };
    Instruction { name: name.to_owned(), body, inputs: vec![input], outputs: 1, judge }
}

fn multiply(name: &str, a: Inputs, c: Inputs, judge: Judge, what: &str) -> Instruction {
    Instruction {
        name: format!("{name} {what}").trim().to_owned(),
        body: format!(
            "{name} {{%d0, %d1, %d2, %d3}}, {{%a0, %a1, %a2, %a3}}, {{%a4, %a5}}, {{%a6, %a7, %a8, %a9}};"
        ),
        inputs: [[a; 6].as_slice(), &[c; 4]].concat(),
        outputs: 4,
        judge,
    }
}

/// Stores four words per lane to shared memory, and loads matrices from rows in a different order.
fn matrices(count: usize, transposed: bool) -> Instruction {
    let name =
        format!("ldmatrix.sync.aligned.m8n8.x{count}{}.shared.b16", if transposed { ".trans" } else { "" });
    let registers: Vec<String> = (0..count).map(|i| format!("%d{i}")).collect();
    let stores: String = (0..4).map(|i| format!("st.shared.u32 [%t4+{}], %a{i};\n", i * 128)).collect();
    Instruction {
        body: format!(
            "mov.u32 %t3, words;\nshl.b32 %t4, %t1, 2;\nadd.s32 %t4, %t4, %t3;\n{stores}bar.sync 0;\n\
             shl.b32 %t5, %t1, 4;\nxor.b32 %t5, %t5, 48;\nadd.s32 %t5, %t5, %t3;\n{name} {{{}}}, [%t5];",
            registers.join(", ")
        ),
        name,
        inputs: vec![Inputs::Bits; 4],
        outputs: count,
        judge: Judge::Bits,
    }
}

/// Asynchronously copies the first `%a1` of 16 bytes; the others become zero.
fn copy() -> Instruction {
    let name = "cp.async.cg.shared.global 16 bytes, fewer read";
    let loads: String = (0..4).map(|i| format!("\nld.shared.u32 %d{i}, [%t4+{}];", i * 4)).collect();
    Instruction {
        name: name.to_owned(),
        // The source is within the first input; each lane copies 16 bytes.
        body: format!(
            "mov.u32 %t3, words;\nshl.b32 %t4, %t1, 4;\nadd.s32 %t4, %t4, %t3;\nand.b32 %t5, %t2, 511;\nmul.wide.u32 %rd6, %t5, 16;\n\
             add.s64 %rd6, %rd1, %rd6;\ncp.async.cg.shared.global [%t4], [%rd6], 16, %a1;\ncp.async.commit_group;\n\
             cp.async.wait_group 0;\nbar.sync 0;{loads}"
        ),
        inputs: vec![Inputs::Bits, Inputs::Below(17)],
        outputs: 4,
        judge: Judge::Bits,
    }
}

pub fn all() -> Vec<Instruction> {
    use Inputs::{
        AnyHalves, Below, Bfloats, Bits, Float, Halves, Positive, Small, WholeBfloats, WholeFloat,
        WholeHalves,
    };
    let exact = Judge::Bits;
    let mut all = vec![
        multiply(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
            WholeHalves,
            WholeFloat,
            exact,
            "whole",
        ),
        multiply(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
            WholeBfloats,
            WholeFloat,
            exact,
            "whole",
        ),
        multiply("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", Halves, Small, Judge::Sum(46.0), ""),
        multiply("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", Bfloats, Small, Judge::Sum(46.0), ""),
        multiply("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", Bits, Bits, exact, ""),
        multiply("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32", Bits, Bits, exact, ""),
        one("movmatrix.sync.aligned.m8n8.trans.b16", &[Bits], exact),
        copy(),
        one("lop3.b32", &[Bits, Bits, Bits], exact),
        one("prmt.b32", &[Bits, Bits, Below(1 << 16)], exact),
        one("shf.l.wrap.b32", &[Bits, Bits, Bits], exact),
        one("shf.r.wrap.b32", &[Bits, Bits, Bits], exact),
        one("bfi.b32", &[Bits, Bits, Below(33), Below(33)], exact),
        one("bfe.u32", &[Bits, Below(33), Below(33)], exact),
        one("bfe.s32", &[Bits, Below(33), Below(33)], exact),
        one("dp4a.s32.s32", &[Bits, Bits, Bits], exact),
        one("mad.lo.s32", &[Bits, Bits, Bits], exact),
        one("min.s32", &[Bits, Bits], exact),
        one("max.u32", &[Bits, Bits], exact),
        one("shfl.sync.bfly.b32", &[Bits], exact),
        one("shfl.sync.idx.b32", &[Bits, Below(32)], exact),
        narrow("cvt.f32.f16", true, AnyHalves, Judge::Float),
        narrow("cvt.rn.f16.f32", false, Float, Judge::Halves),
        narrow("cvt.rm.f16.f32", false, Float, Judge::Halves),
        narrow("cvt.rp.f16.f32", false, Float, Judge::Halves),
        narrow("cvt.rn.f16.f32", false, Small, Judge::Halves),
        narrow("cvt.rn.bf16.f32", false, Small, exact),
        one("cvt.rn.f16x2.f32", &[Small, Small], exact),
        one("cvt.rn.bf16x2.f32", &[Small, Small], exact),
        one("cvt.rni.s32.f32", &[Float], exact),
        one("cvt.rn.f32.s32", &[Bits], exact),
        one("cvt.rn.f32.u32", &[Bits], exact),
        one("cvt.rni.f32.f32", &[Float], Judge::Float),
        one("add.f32", &[Float, Float], Judge::Float),
        one("sub.f32", &[Float, Float], Judge::Float),
        one("mul.f32", &[Float, Float], Judge::Float),
        one("fma.rn.f32", &[Float, Float, Float], Judge::Float),
        one("div.rn.f32", &[Float, Float], Judge::Float),
        one("rcp.rn.f32", &[Float], Judge::Float),
        one("sqrt.rn.f32", &[Float], Judge::Float),
        one("min.f32", &[Float, Float], Judge::Last(0)),
        one("max.f32", &[Float, Float], Judge::Last(0)),
        one("ex2.approx.ftz.f32", &[Small], Judge::Last(4)),
        one("lg2.approx.ftz.f32", &[Positive], Judge::Near(2_f64.powi(-21))),
        one("rsqrt.approx.f32", &[Positive], Judge::Last(4)),
        one("rcp.approx.ftz.f32", &[Positive], Judge::Last(2)),
    ];
    for count in [1, 2, 4] {
        all.extend([matrices(count, false), matrices(count, true)]);
    }
    for instruction in &mut all {
        let more = match instruction.name.as_str() {
            "lop3.b32" => ", 0xea",
            "shfl.sync.bfly.b32" => ", 5, 31, -1",
            "shfl.sync.idx.b32" => ", 31, -1",
            _ => continue,
        };
        instruction.body = instruction.body.replace(';', &format!("{more};"));
    }
    all
}
