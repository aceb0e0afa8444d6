//! Activations of every type: unmodified, normalized or gated, and their products with weights.

use core::fmt::Debug;
use core::ptr::{null, null_mut};

use half::{bf16, f16};
use quant_kernels::*;
use quant_kernels_cpu::{
    Element, FloatRows, GateUp, Int8Rows, Isa, PackedLinear, RmsNorm, RowLayout, Serial, StaticScale,
};

use super::features::number;
use super::weights::Weights;
use crate::common::*;

const M: usize = 14;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Form {
    Plain,
    Norm { residual: bool },
    Gate { joined: bool },
}

const FORMS: [Form; 5] = [
    Form::Plain,
    Form::Norm { residual: false },
    Form::Norm { residual: true },
    Form::Gate { joined: false },
    Form::Gate { joined: true },
];

struct Case<E> {
    kind: u32,
    x: Vec<E>,
    /// Gate and up in one buffer, twice as wide.
    both: Vec<E>,
    up: Vec<E>,
    residual: Vec<E>,
    norm: Vec<f32>,
    bias: Vec<f32>,
    packed: PackedLinear,
    layout: qz1_layout,
}

const EPS: f32 = 1e-5;

fn values_of<E>(kind: u32, of: &[E]) -> qz1_values {
    let data = of.as_ptr().cast();
    qz1_values { struct_size: size_of::<qz1_values>() as u32, kind, data, len: of.len() }
}

impl<E: Element + PartialEq + Debug> Case<E> {
    fn new(kind: u32, of: fn(f32) -> E, weights: &Weights) -> Self {
        let [n, k] = weights.shape;
        let rows = |len: usize, by| noise(len, by).into_iter().map(of).collect::<Vec<E>>();
        Self {
            kind,
            x: rows(M * k, 37),
            both: rows(2 * M * k, 41),
            up: rows(M * k, 43),
            residual: rows(M * k, 47),
            norm: noise(k, 53),
            bias: noise(n, 59),
            packed: weights.packed(),
            layout: weights.layout(),
        }
    }

    fn rows(&self) -> RowLayout {
        RowLayout::of(self.packed.layout())
    }

    fn norm(&self) -> qz1_rms_norm {
        let (struct_size, weight_len) = (size_of::<qz1_rms_norm>() as u32, self.norm.len());
        qz1_rms_norm { struct_size, eps: EPS, weight: self.norm.as_ptr(), weight_len }
    }

    fn residual_of(&self, of: &mut [E]) -> qz1_residual {
        let (struct_size, data) = (size_of::<qz1_residual>() as u32, of.as_mut_ptr().cast());
        qz1_residual { struct_size, kind: self.kind, data, len: of.len() }
    }

    fn int8(&self, form: Form, isa: Isa, by: Option<StaticScale>) -> (Vec<u32>, Vec<E>) {
        let (token, layout, mut residual) = (isa.token().unwrap(), self.rows(), self.residual.clone());
        let mut rows = Int8Rows::new(token);
        let norm = RmsNorm { weight: &self.norm, eps: EPS };
        match form {
            Form::Plain => match by {
                Some(by) => rows.quantize_static(&self.x, layout, by, &Serial),
                None => rows.quantize(&self.x, layout, &Serial),
            },
            Form::Norm { residual: with } => {
                let residual = with.then_some(&mut residual[..]);
                rows.quantize_rms_norm(&self.x, norm, residual, layout, by, &Serial)
            }
            Form::Gate { joined } => rows.quantize_silu_mul(self.gate(joined), layout, by, &Serial),
        }
        .unwrap();
        let mut out = vec![0.0; M * self.bias.len()];
        self.packed.view().multiply(token, &rows, Some(&self.bias), &mut out, &Serial).unwrap();
        (bits(&out), residual)
    }

    fn float(&self, form: Form, isa: Isa) -> (Vec<u32>, Vec<E>) {
        let (layout, mut residual) = (self.rows(), self.residual.clone());
        let mut rows = FloatRows::new(isa.token().unwrap());
        let norm = RmsNorm { weight: &self.norm, eps: EPS };
        match form {
            Form::Plain => rows.pack(&self.x, layout, &Serial),
            Form::Norm { residual: with } => {
                let residual = with.then_some(&mut residual[..]);
                rows.pack_rms_norm(&self.x, norm, residual, layout, &Serial)
            }
            Form::Gate { joined } => rows.pack_silu_mul(self.gate(joined), layout, &Serial),
        }
        .unwrap();
        let mut out = vec![0.0; M * self.bias.len()];
        self.packed.view().multiply_float(&rows, Some(&self.bias), &mut out, &Serial).unwrap();
        (bits(&out), residual)
    }

    fn gate(&self, joined: bool) -> GateUp<'_, E> {
        match joined {
            true => GateUp::Joined(&self.both),
            false => GateUp::Apart { gate: &self.x, up: &self.up },
        }
    }

    /// The inputs of an operation: the rows or the gate, and `up` if it is separate.
    fn parts(&self, form: Form) -> (qz1_values, Option<qz1_values>) {
        match form {
            Form::Gate { joined: true } => (values_of(self.kind, &self.both), None),
            Form::Gate { joined: false } => {
                (values_of(self.kind, &self.x), Some(values_of(self.kind, &self.up)))
            }
            _ => (values_of(self.kind, &self.x), None),
        }
    }

    fn c_int8(&self, form: Form, isa: u32, by: Option<StaticScale>, parallel: P) -> (Vec<u32>, Vec<E>) {
        let struct_size = size_of::<qz1_static_scale>() as u32;
        let by =
            by.map(|by| qz1_static_scale { struct_size, scale: by.scale, zero: by.zero.into(), reserved: 0 });
        let (by, mut rows, layout, norm) = (pointer(by.as_ref()), null_mut(), &self.layout, self.norm());
        let mut residual = self.residual.clone();
        let to_residual = self.residual_of(&mut residual);
        let (x, up) = self.parts(form);
        let (up, none) = (pointer(up.as_ref()), null());
        let (mut out, bias) = (vec![0.0_f32; M * self.bias.len()], &self.bias);
        let (to, len, bytes) = (out.as_mut_ptr(), out.len(), self.packed.view().bytes());
        let (at, bytes_len) = (bytes.as_ptr(), bytes.len());
        // SAFETY: every pointer is null or points to a live value.
        unsafe {
            assert_eq!(qz1_int8_rows_new(isa, &mut rows, null()), qz1_status::Ok);
            let status = match form {
                Form::Plain => qz1_int8_rows_quantize(rows, layout, &x, by, parallel, none),
                Form::Norm { residual } => {
                    let to = if residual { &raw const to_residual } else { null() };
                    qz1_int8_rows_quantize_rms_norm(rows, layout, &x, &norm, to, by, parallel, none)
                }
                Form::Gate { .. } => {
                    qz1_int8_rows_quantize_silu_mul(rows, layout, &x, up, by, parallel, none)
                }
            };
            assert_eq!(status, qz1_status::Ok);
            let (b, b_len) = (bias.as_ptr(), bias.len());
            let status = qz1_multiply(layout, at, bytes_len, rows, b, b_len, to, len, isa, parallel, null());
            assert_eq!(status, qz1_status::Ok);
            qz1_int8_rows_free(rows);
        }
        (bits(&out), residual)
    }

    fn c_float(&self, form: Form, isa: u32, parallel: P) -> (Vec<u32>, Vec<E>) {
        let (mut rows, layout, norm) = (null_mut(), &self.layout, self.norm());
        let mut residual = self.residual.clone();
        let to_residual = self.residual_of(&mut residual);
        let (x, up) = self.parts(form);
        let (up, none) = (pointer(up.as_ref()), null());
        let (mut out, bias) = (vec![0.0_f32; M * self.bias.len()], &self.bias);
        let (to, len, bytes) = (out.as_mut_ptr(), out.len(), self.packed.view().bytes());
        let (at, bytes_len) = (bytes.as_ptr(), bytes.len());
        // SAFETY: every pointer is null or points to a live value.
        unsafe {
            assert_eq!(qz1_float_rows_new(isa, &mut rows, null()), qz1_status::Ok);
            let status = match form {
                Form::Plain => qz1_float_rows_pack(rows, layout, &x, parallel, none),
                Form::Norm { residual } => {
                    let to = if residual { &raw const to_residual } else { null() };
                    qz1_float_rows_pack_rms_norm(rows, layout, &x, &norm, to, parallel, none)
                }
                Form::Gate { .. } => qz1_float_rows_pack_silu_mul(rows, layout, &x, up, parallel, none),
            };
            assert_eq!(status, qz1_status::Ok);
            let (b, b_len) = (bias.as_ptr(), bias.len());
            let status = qz1_multiply_float(layout, at, bytes_len, rows, b, b_len, to, len, parallel, null());
            assert_eq!(status, qz1_status::Ok);
            qz1_float_rows_free(rows);
        }
        (bits(&out), residual)
    }

    fn check(&self) {
        let threads = threads(&Manner::Right);
        // A static zero point requires a layout with sums.
        let zero = if self.layout.sums == 1 { -9 } else { 0 };
        for (form, isa) in FORMS.into_iter().flat_map(|form| Isa::available().map(move |isa| (form, isa))) {
            let integers = self.layout.format != QZ1_CODES_E4M3;
            for by in [None, Some(StaticScale { scale: 0.02, zero })].into_iter().filter(|_| integers) {
                let expected = self.int8(form, isa, by);
                for parallel in [null(), &raw const threads] {
                    assert!(
                        self.c_int8(form, number(isa), by, parallel) == expected,
                        "{form:?} {isa:?} {by:?}"
                    );
                }
                assert!((expected.1 != self.residual) == (form == Form::Norm { residual: true }));
            }
            let expected = self.float(form, isa);
            for parallel in [null(), &raw const threads] {
                assert!(self.c_float(form, number(isa), parallel) == expected, "{form:?} {isa:?} of floats");
            }
            assert!(form == Form::Plain || self.float(Form::Plain, isa).0 != expected.0);
        }
    }
}

type P = *const qz1_parallel;

#[test]
fn products_are_those_of_rust() {
    for weights in Weights::all() {
        Case::<f32>::new(QZ1_TYPE_F32, |x| x, &weights).check();
    }
}

#[test]
fn products_of_halves_are_those_of_rust() {
    for progressive in [false, true] {
        let weights = Weights::new(4, 32, progressive, true, true);
        Case::<f16>::new(QZ1_TYPE_F16, f16::from_f32, &weights).check();
        Case::<bf16>::new(QZ1_TYPE_BF16, bf16::from_f32, &weights).check();
    }
}
