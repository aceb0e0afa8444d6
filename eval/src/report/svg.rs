//! Charts as SVG without scripts or fonts. All colors are classes of the page's style.

use maud::{Markup, html};

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 234.0;
const LINE_HEIGHT: f64 = 184.0;
/// Space for the axis labels.
const LEFT: f64 = 56.0;
const BOTTOM: f64 = 54.0;
const TOP: f64 = 12.0;
const RIGHT: f64 = 20.0;

pub(super) struct Series<'a> {
    /// The series' label.
    pub(super) name: &'a str,
    /// The CSS class of its color.
    pub(super) class: &'static str,
    /// Its values; on a logarithmic scale, only positive ones are drawn.
    pub(super) values: Vec<f64>,
}

/// The scale of an axis.
struct Axis {
    from: f64,
    to: f64,
    logarithmic: bool,
}

impl Axis {
    /// Returns an axis that covers these values; a linear axis begins at 0.
    fn of(values: impl Iterator<Item = f64>, logarithmic: bool) -> Self {
        let usable = values.filter(|v| v.is_finite() && (!logarithmic || *v > 0.0));
        let (low, high) = usable.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
        match (low <= high, logarithmic) {
            (false, _) => Self { from: 0.1, to: 1.0, logarithmic },
            (true, true) => {
                let (from, to) = enclosing(low, high);
                Self { from, to, logarithmic }
            }
            (true, false) => {
                let high = if high > 0.0 { high } else { 1.0 };
                let step = round_step(high);
                Self { from: 0.0, to: (high / step).ceil() * step, logarithmic }
            }
        }
    }

    fn place(&self, value: f64) -> f64 {
        let place = match self.logarithmic {
            true => (value / self.from).log10() / (self.to / self.from).log10(),
            false => (value - self.from) / (self.to - self.from),
        };
        if place.is_finite() { place.clamp(0.0, 1.0) } else { 0.0 }
    }

    fn marks(&self) -> Vec<f64> {
        if !self.logarithmic {
            let steps = (self.to / round_step(self.to)).round().max(1.0);
            return (0..=steps as u32).map(|i| self.to * f64::from(i) / steps).collect();
        }
        let (from, to) = (self.from.log10().floor() as i32, self.to.log10().ceil() as i32);
        let step = ((to - from) as usize).div_ceil(6).max(1);
        let within: &[f64] = if self.to / self.from < 150.0 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let marks = (from..=to).step_by(step).flat_map(|d| within.iter().map(move |w| w * 10_f64.powi(d)));
        marks.filter(|m| (self.from * 0.999..=self.to * 1.001).contains(m)).collect()
    }
}

/// A range that contains these bounds, with 1, 2 or 5 times a power of ten at both ends.
fn enclosing(low: f64, high: f64) -> (f64, f64) {
    let marks = |value: f64| {
        let decade = value.log10().floor() as i32;
        (decade - 1..=decade + 1)
            .flat_map(|d| [1.0, 2.0, 5.0].map(|w| w * 10_f64.powi(d)))
            .collect::<Vec<_>>()
    };
    let from = marks(low).into_iter().rfind(|m| *m <= low * 1.000_001).unwrap_or(low);
    let to = marks(high).into_iter().find(|m| *m >= high * 0.999_999 && *m > from * 1.5).unwrap_or(high);
    (from, to)
}

/// A round distance of tick marks from 0 to `high` that gives three to six intervals.
fn round_step(high: f64) -> f64 {
    let decade = 10_f64.powf((high / 3.0).log10().floor());
    let steps = [1.0, 2.0, 2.5, 5.0, 10.0];
    let fits = steps.iter().map(|s| s * decade).find(|step| (high / step).ceil() <= 6.0);
    fits.unwrap_or(10.0 * decade)
}

fn x_of(place: f64) -> f64 {
    LEFT + place * (WIDTH - LEFT - RIGHT)
}

fn y_of(place: f64, height: f64) -> f64 {
    height - BOTTOM - place * (height - BOTTOM - TOP)
}

fn at(value: f64) -> String {
    format!("{value:.2}")
}

pub(super) fn short(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        a if !(1e-3..1e4).contains(&a) => format!("{value:.0e}"),
        a if a < 0.1 => tail(&format!("{value:.3}")),
        a if a < 10.0 => tail(&format!("{value:.2}")),
        a if a < 100.0 => tail(&format!("{value:.1}")),
        _ => format!("{value:.0}"),
    }
}

fn tail(number: &str) -> String {
    number.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn frame(
    (title, x_name): (&str, &str),
    height: f64,
    y: &Axis,
    x_marks: &[(f64, String)],
    inside: &Markup,
) -> Markup {
    html! {
        div.wide { svg viewBox=(format!("0 0 {WIDTH} {height}")) role="img" aria-label=(title) {
            title { (title) }
            @for mark in y.marks() {
                @let place = at(y_of(y.place(mark), height));
                line.grid x1=(at(LEFT)) x2=(at(WIDTH - RIGHT)) y1=(place) y2=(place) {}
                text.label x=(at(LEFT - 6.0)) y=(place) dy="4" text-anchor="end" { (short(mark)) }
            }
            @for (place, name) in x_marks {
                text.label x=(at(x_of(*place))) y=(at(height - BOTTOM + 26.0)) text-anchor="middle" { (name) }
            }
            text.label x=(at((LEFT + WIDTH - RIGHT) / 2.0)) y=(at(height - 6.0)) text-anchor="middle" { (x_name) }
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

/// A bar chart; `edges` holds the bars whose left edge is marked, with their labels.
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
                @let top = y_of(y.place(*value), HEIGHT);
                rect class=(s.class) x=(at(left)) y=(at(top)) width=(at(width * (WIDTH - LEFT - RIGHT)))
                    height=(at(y_of(0.0, HEIGHT) - top)) {
                    title { (s.name) ": " (short(*value)) }
                }
            }
        }
    };
    html! { (legend(series)) (frame((title, x_name), HEIGHT, &y, &marks, &inside)) }
}

pub(super) fn lines(title: &str, x_name: &str, logarithmic: bool, series: &[Series<'_>]) -> Markup {
    let count = series.iter().map(|s| s.values.len()).max().unwrap_or(0).max(1);
    let y = Axis::of(series.iter().flat_map(|s| s.values.iter().copied()), logarithmic);
    let place = |i: usize| (i as f64 + 0.5) / count as f64;
    let step = count.div_ceil(12).max(1);
    let marks: Vec<(f64, String)> = (0..count).step_by(step).map(|i| (place(i), i.to_string())).collect();
    let inside = html! {
        @for s in series {
            @let points: Vec<(f64, f64, f64)> = s.values.iter().enumerate().filter(|(_, v)| !logarithmic || **v > 0.0).map(|(i, v)| (x_of(place(i)), y_of(y.place(*v), LINE_HEIGHT), *v)).collect();
            polyline class=(format!("line {}", s.class))
                points=(points.iter().map(|(x, y, _)| format!("{},{}", at(*x), at(*y))).collect::<Vec<_>>().join(" ")) {}
            @for (x, y, v) in &points {
                circle class=(s.class) cx=(at(*x)) cy=(at(*y)) r="3" { title { (s.name) ": " (short(*v)) } }
            }
        }
    };
    html! { (legend(series)) (frame((title, x_name), LINE_HEIGHT, &y, &marks, &inside)) }
}

/// A point of a scatter plot.
pub(super) struct Point {
    /// Position on the horizontal axis, which begins at zero.
    pub(super) x: f64,
    /// Position on the vertical axis, which is logarithmic.
    pub(super) y: f64,
    /// The point's tooltip.
    pub(super) name: String,
    /// Whether it is highlighted.
    pub(super) marked: bool,
}

/// A scatter plot with points numbered from 1.
pub(super) fn points(title: &str, x_name: &str, points: &[Point]) -> Markup {
    let x = Axis::of(points.iter().map(|p| p.x), false);
    let y = Axis::of(points.iter().map(|p| p.y), true);
    let marks: Vec<(f64, String)> = x.marks().into_iter().map(|m| (x.place(m), short(m))).collect();
    let mut taken: Vec<(f64, f64)> = Vec::new();
    let mut placed = Vec::new();
    for point in points {
        let (left, top) = (x_of(x.place(point.x)), y_of(y.place(point.y), HEIGHT));
        // The number goes next to the point, if possible where there is no other.
        let offsets = [(12.0, 0.0), (-12.0, 0.0), (12.0, 16.0), (12.0, -16.0), (-12.0, 16.0), (-12.0, -16.0)];
        let free = |at: &(f64, f64)| {
            let inside = (LEFT..WIDTH).contains(&at.0) && (TOP..HEIGHT - BOTTOM).contains(&at.1);
            inside && taken.iter().all(|t| (t.0 - at.0).abs() > 16.0 || (t.1 - at.1).abs() > 14.0)
        };
        let places = offsets.map(|(dx, dy)| (left + dx, top + dy));
        let label = places.iter().copied().find(free).unwrap_or(places[0]);
        taken.push(label);
        placed.push((point, (left, top), label));
    }
    let inside = html! {
        @for (number, (point, (left, top), label)) in placed.iter().enumerate() {
            circle class=(if point.marked { "model" } else { "other" }) cx=(at(*left)) cy=(at(*top)) r="5" { title { (point.name) } }
            text.label x=(at(label.0)) y=(at(label.1)) dy="4" text-anchor="middle" { (number + 1) }
        }
    };
    frame((title, x_name), HEIGHT, &y, &marks, &inside)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_are_marked_at_round_numbers() {
        for (high, marks) in [
            (36.0, vec!["0", "10", "20", "30", "40"]),
            (0.034, vec!["0", "0.01", "0.02", "0.03", "0.04"]),
            (1.0, vec!["0", "0.2", "0.4", "0.6", "0.8", "1"]),
            (12.6, vec!["0", "2.5", "5", "7.5", "10", "12.5", "15"]),
        ] {
            let axis = Axis::of([high].into_iter(), false);
            assert_eq!(axis.marks().into_iter().map(short).collect::<Vec<_>>(), marks, "{high}");
            assert!(axis.to >= high);
        }
        for step in 1..2000 {
            let axis = Axis::of([f64::from(step) * 0.37].into_iter(), false);
            assert!((3..=7).contains(&axis.marks().len()), "{step}: {:?}", axis.marks());
        }
        let log = |low, high| {
            Axis::of([low, high].into_iter(), true).marks().into_iter().map(short).collect::<Vec<_>>()
        };
        assert_eq!(log(0.074, 0.08), ["0.05", "0.1"]);
        assert_eq!(log(1.2, 45.0), ["1", "2", "5", "10", "20", "50"]);
        assert_eq!(log(1e-9, 0.5), ["1e-9", "1e-7", "1e-5", "0.001", "0.1"]);
        assert_eq!(log(3.0, 3.0), ["2", "5"]);
        assert_eq!(Axis::of(std::iter::empty(), true).marks().len(), 4);
    }
}
