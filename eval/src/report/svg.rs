//! Charts as SVG, drawn from numbers alone: no script, no font, no colour that is not a class of the
//! page's style.

use maud::{Markup, html};

/// Width of a chart in its own units; the page scales it.
const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 220.0;
/// Room for the axes' labels.
const LEFT: f64 = 56.0;
const BOTTOM: f64 = 36.0;
const TOP: f64 = 12.0;
const RIGHT: f64 = 12.0;

/// A list of numbers that is drawn in one colour.
pub(super) struct Series<'a> {
    /// What it is called.
    pub(super) name: &'a str,
    /// The class of its colour.
    pub(super) class: &'static str,
    /// Its values; those that are not positive are not drawn where the scale is logarithmic.
    pub(super) values: Vec<f64>,
}

/// Positions on an axis.
struct Axis {
    from: f64,
    to: f64,
    logarithmic: bool,
}

impl Axis {
    /// An axis that holds all of these.
    fn of(values: impl Iterator<Item = f64>, logarithmic: bool) -> Self {
        let usable = values.filter(|v| v.is_finite() && (!logarithmic || *v > 0.0));
        let (low, high) = usable.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
        match (low <= high, logarithmic) {
            (false, _) => Self { from: 0.1, to: 1.0, logarithmic },
            (true, true) => {
                let (from, to) = (low.log10().floor(), high.log10().ceil());
                Self { from: 10_f64.powf(from), to: 10_f64.powf(to.max(from + 1.0)), logarithmic }
            }
            (true, false) => Self { from: 0.0, to: if high > 0.0 { high * 1.08 } else { 1.0 }, logarithmic },
        }
    }

    /// Where a value lies, from 0 to 1.
    fn place(&self, value: f64) -> f64 {
        let place = match self.logarithmic {
            true => (value / self.from).log10() / (self.to / self.from).log10(),
            false => (value - self.from) / (self.to - self.from),
        };
        if place.is_finite() { place.clamp(0.0, 1.0) } else { 0.0 }
    }

    /// Values to mark.
    fn marks(&self) -> Vec<f64> {
        if !self.logarithmic {
            return (0..=4).map(|i| self.from + (self.to - self.from) * f64::from(i) / 4.0).collect();
        }
        let (from, to) = (self.from.log10().round() as i32, self.to.log10().round() as i32);
        let step = ((to - from) as usize).div_ceil(6).max(1);
        (from..=to).step_by(step).map(|d| 10_f64.powi(d)).collect()
    }
}

fn x_of(place: f64) -> f64 {
    LEFT + place * (WIDTH - LEFT - RIGHT)
}

fn y_of(place: f64) -> f64 {
    HEIGHT - BOTTOM - place * (HEIGHT - BOTTOM - TOP)
}

/// A coordinate with two digits, always written the same.
fn at(value: f64) -> String {
    format!("{value:.2}")
}

/// A number on an axis.
pub(super) fn short(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        a if !(1e-3..1e4).contains(&a) => format!("{value:.0e}"),
        a if a < 0.1 => format!("{value:.3}"),
        a if a < 10.0 => format!("{value:.2}"),
        _ => format!("{value:.0}"),
    }
}

fn frame(title: &str, x_name: &str, y: &Axis, x_marks: &[(f64, String)], inside: &Markup) -> Markup {
    html! {
        div.wide { svg viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="img" aria-label=(title) {
            title { (title) }
            @for mark in y.marks() {
                @let height = at(y_of(y.place(mark)));
                line.grid x1=(at(LEFT)) x2=(at(WIDTH - RIGHT)) y1=(height) y2=(height) {}
                text.label x=(at(LEFT - 6.0)) y=(height) dy="4" text-anchor="end" { (short(mark)) }
            }
            @for (place, name) in x_marks {
                text.label x=(at(x_of(*place))) y=(at(HEIGHT - BOTTOM + 15.0)) text-anchor="middle" { (name) }
            }
            text.label x=(at((LEFT + WIDTH - RIGHT) / 2.0)) y=(at(HEIGHT - 5.0)) text-anchor="middle" { (x_name) }
            (inside)
        } }
    }
}

fn legend(series: &[Series<'_>]) -> Markup {
    html! {
        p.legend {
            @for s in series {
                span { span class=(format!("key {}", s.class)) {} " " (s.name) }
            }
        }
    }
}

/// Bars side by side, from the bottom; `edges` names where bars begin that are to be marked.
pub(super) fn bars(title: &str, x_name: &str, edges: &[(usize, String)], series: &[Series<'_>]) -> Markup {
    let count = series.iter().map(|s| s.values.len()).max().unwrap_or(0).max(1);
    let y = Axis::of(series.iter().flat_map(|s| s.values.iter().copied()), false);
    let slot = 1.0 / count as f64;
    let width = slot * 0.86 / series.len().max(1) as f64;
    let marks: Vec<(f64, String)> = edges.iter().map(|(i, name)| (*i as f64 * slot, name.clone())).collect();
    let inside = html! {
        @for (n, s) in series.iter().enumerate() {
            @for (i, value) in s.values.iter().enumerate().filter(|(_, v)| **v > 0.0) {
                @let left = x_of(i as f64 * slot + slot * 0.07 + n as f64 * width);
                @let top = y_of(y.place(*value));
                rect class=(s.class) x=(at(left)) y=(at(top)) width=(at(width * (WIDTH - LEFT - RIGHT)))
                    height=(at(y_of(0.0) - top)) {
                    title { (s.name) ": " (short(*value)) }
                }
            }
        }
    };
    html! { (legend(series)) (frame(title, x_name, &y, &marks, &inside)) }
}

/// Lines over the numbers 0, 1, 2 …
pub(super) fn lines(title: &str, x_name: &str, logarithmic: bool, series: &[Series<'_>]) -> Markup {
    let count = series.iter().map(|s| s.values.len()).max().unwrap_or(0).max(1);
    let y = Axis::of(series.iter().flat_map(|s| s.values.iter().copied()), logarithmic);
    let place = |i: usize| (i as f64 + 0.5) / count as f64;
    let step = count.div_ceil(12).max(1);
    let marks: Vec<(f64, String)> = (0..count).step_by(step).map(|i| (place(i), i.to_string())).collect();
    let inside = html! {
        @for s in series {
            @let points: Vec<(f64, f64, f64)> = s.values.iter().enumerate().filter(|(_, v)| !logarithmic || **v > 0.0).map(|(i, v)| (x_of(place(i)), y_of(y.place(*v)), *v)).collect();
            polyline class=(format!("line {}", s.class))
                points=(points.iter().map(|(x, y, _)| format!("{},{}", at(*x), at(*y))).collect::<Vec<_>>().join(" ")) {}
            @for (x, y, v) in &points {
                circle class=(s.class) cx=(at(*x)) cy=(at(*y)) r="3" { title { (s.name) ": " (short(*v)) } }
            }
        }
    };
    html! { (legend(series)) (frame(title, x_name, &y, &marks, &inside)) }
}

/// Named points.
pub(super) fn points(
    title: &str,
    x_name: &str,
    y_logarithmic: bool,
    points: &[(String, f64, f64, bool)],
) -> Markup {
    let x = Axis::of(points.iter().map(|p| p.1), false);
    let y = Axis::of(points.iter().map(|p| p.2), y_logarithmic);
    let marks: Vec<(f64, String)> = x.marks().into_iter().map(|m| (x.place(m), short(m))).collect();
    let inside = html! {
        @for (name, px, py, best) in points {
            @let (left, top) = (x_of(x.place(*px)), y_of(y.place(*py)));
            circle class=(if *best { "model" } else { "other" }) cx=(at(left)) cy=(at(top)) r="5" { title { (name) } }
            text.label x=(at(left)) y=(at(top - 9.0)) text-anchor=(if left > WIDTH * 0.8 { "end" } else { "start" }) { (name) }
        }
    };
    frame(title, x_name, &y, &marks, &inside)
}
