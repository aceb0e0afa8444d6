//! In place of the reports of quantization, which need the feature `decoders`.

use maud::Markup;

/// The report of a quantization, which needs the feature `decoders`.
#[derive(Debug)]
#[non_exhaustive]
pub enum QuantReport {}

pub(super) fn in_one_line(report: &QuantReport, _schemes: &str) -> String {
    match *report {}
}

pub(super) fn tensor_errors(report: &QuantReport, _shown: usize) -> Markup {
    match *report {}
}
