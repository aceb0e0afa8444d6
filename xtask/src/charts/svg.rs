//! Two kinds of charts as SVG text.

use std::fmt::Write;

const WIDTH: f64 = 760.0;
const COLORS: [&str; 4] = ["#6b7280", "#b45309", "#1d4ed8", "#15803d"];
const INK: &str = "#1f2937";
const MUTED: &str = "#4b5563";
const GRID: &str = "#e5e7eb";

/// A point, with an optional label.
pub struct Point {
    pub x: f64,
    pub y: f64,
    pub label: String,
}

/// Points of one color. Points without labels are joined by a line.
pub struct Series {
    /// Name in the legend; not shown if empty.
    pub label: String,
    /// Index of the color.
    pub color: usize,
    pub points: Vec<Point>,
}

/// Points over a linear and a logarithmic axis.
pub struct Scatter {
    pub title: String,
    pub subtitle: String,
    pub x: String,
    pub y: String,
    pub series: Vec<Series>,
}

/// A label, a value, and whether the bar is highlighted.
pub type Bar = (String, f64, bool);

/// Horizontal bars in panels, each with its own title and scale.
pub struct Bars {
    pub title: String,
    pub subtitle: String,
    pub unit: String,
    pub panels: Vec<(String, Vec<Bar>)>,
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn text(out: &mut String, (x, y): (f64, f64), attributes: &str, words: &str) {
    let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" {attributes}>{}</text>", escaped(words));
}

fn line(out: &mut String, (x1, y1): (f64, f64), (x2, y2): (f64, f64), color: &str) {
    let _ = writeln!(
        out,
        "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{color}\"/>"
    );
}

fn begin(height: f64, title: &str, subtitle: &str) -> String {
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" \
         font-family=\"system-ui, sans-serif\" font-size=\"14\" fill=\"{INK}\">\n<title>{}</title>\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" rx=\"8\" fill=\"#ffffff\"/>\n",
        escaped(title)
    );
    text(&mut out, (24.0, 34.0), "font-size=\"19\" font-weight=\"600\"", title);
    text(&mut out, (24.0, 56.0), &format!("fill=\"{MUTED}\""), subtitle);
    out
}

impl Scatter {
    /// The SVG text.
    pub fn draw(&self) -> String {
        const HEIGHT: f64 = 440.0;
        let (left, right, top, bottom) = (108.0, WIDTH - 32.0, 104.0, HEIGHT - 62.0);
        let all = || self.series.iter().flat_map(|s| &s.points);
        let low = |of: fn(&Point) -> f64| all().map(of).fold(f64::INFINITY, f64::min);
        let high = |of: fn(&Point) -> f64| all().map(of).fold(f64::NEG_INFINITY, f64::max);
        let (x0, x1) = (low(|p| p.x).floor(), (high(|p| p.x) + 0.5).ceil());
        let (y0, y1) = (low(|p| p.y.log10()).floor(), high(|p| p.y.log10()).ceil());
        let place = |x: f64, y: f64| {
            let across = (x - x0) / (x1 - x0);
            let up = (y.log10() - y0) / (y1 - y0);
            (left + across * (right - left), bottom - up * (bottom - top))
        };
        let mut out = begin(HEIGHT, &self.title, &self.subtitle);
        for exponent in y0 as i32..=y1 as i32 {
            let value = 10f64.powi(exponent);
            let (_, y) = place(x0, value);
            line(&mut out, (left, y), (right, y), GRID);
            text(
                &mut out,
                (left - 10.0, y + 5.0),
                &format!("text-anchor=\"end\" fill=\"{MUTED}\""),
                &value.to_string(),
            );
        }
        for bits in x0 as i32..=x1 as i32 {
            let (x, _) = place(f64::from(bits), 1.0);
            line(&mut out, (x, top), (x, bottom), GRID);
            text(
                &mut out,
                (x, bottom + 22.0),
                &format!("text-anchor=\"middle\" fill=\"{MUTED}\""),
                &bits.to_string(),
            );
        }
        let middle = (left + right) / 2.0;
        text(&mut out, (middle, HEIGHT - 16.0), &format!("text-anchor=\"middle\" fill=\"{MUTED}\""), &self.x);
        let center = (top + bottom) / 2.0;
        let turn =
            format!("text-anchor=\"middle\" fill=\"{MUTED}\" transform=\"rotate(-90 22 {center:.1})\"");
        text(&mut out, (22.0, center), &turn, &self.y);
        let mut legend = left;
        for series in &self.series {
            let color = COLORS[series.color % COLORS.len()];
            if !series.label.is_empty() {
                let _ =
                    writeln!(out, "<circle cx=\"{:.1}\" cy=\"82\" r=\"5\" fill=\"{color}\"/>", legend + 5.0);
                text(&mut out, (legend + 16.0, 87.0), "", &series.label);
                legend += 44.0 + 7.6 * series.label.chars().count() as f64;
            }
            let plain: Vec<_> = series.points.iter().filter(|p| p.label.is_empty()).collect();
            if plain.len() > 1 {
                let path: Vec<String> =
                    plain.iter().map(|p| place(p.x, p.y)).map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
                let _ = writeln!(
                    out,
                    "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"/>",
                    path.join(" ")
                );
            }
            for point in &series.points {
                let (x, y) = place(point.x, point.y);
                let _ = writeln!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"5\" fill=\"{color}\"/>");
                if !point.label.is_empty() {
                    text(&mut out, (x + 10.0, y + 5.0), &format!("fill=\"{color}\""), &point.label);
                }
            }
        }
        out + "</svg>\n"
    }
}

impl Bars {
    /// The SVG text.
    pub fn draw(&self) -> String {
        const ROW: f64 = 30.0;
        const HEAD: f64 = 36.0;
        let bars: usize = self.panels.iter().map(|(_, bars)| bars.len()).sum();
        let height = 88.0 + HEAD * self.panels.len() as f64 + ROW * bars as f64;
        let (left, right) = (210.0, WIDTH - 120.0);
        let mut out = begin(height, &self.title, &self.subtitle);
        let mut y = 72.0;
        for (title, bars) in &self.panels {
            text(&mut out, (24.0, y + 24.0), "font-weight=\"600\"", title);
            y += HEAD;
            let max = bars.iter().map(|(_, value, _)| *value).fold(0.0, f64::max);
            for (label, value, stands_out) in bars {
                let color = if *stands_out { COLORS[2] } else { "#9ca3af" };
                let width = value / max * (right - left);
                text(&mut out, (left - 12.0, y + 19.0), "text-anchor=\"end\"", label);
                let _ = writeln!(
                    out,
                    "<rect x=\"{left}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"20\" rx=\"2\" fill=\"{color}\"/>",
                    y + 4.0
                );
                let shown = if *value < 100.0 { format!("{value:.1}") } else { format!("{value:.0}") };
                text(&mut out, (left + width + 8.0, y + 19.0), "", &format!("{shown} {}", self.unit));
                y += ROW;
            }
        }
        out + "</svg>\n"
    }
}
