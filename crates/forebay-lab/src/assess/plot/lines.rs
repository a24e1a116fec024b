//! Line charts and bar charts.

use super::svg::{Anchor, LEFT, RIGHT, Svg, step};

/// One line of a chart.
pub(super) struct Series {
    pub name: String,
    /// Index of the line's colour.
    pub colour: usize,
    pub style: &'static str,
    /// Points: `x`, `y` and the tooltip.
    pub points: Vec<(f64, f64, String)>,
}

/// Range, ticks and labels of an axis.
pub(super) struct Axis<'a> {
    pub least: f64,
    pub most: f64,
    /// True for bytes: the distance of ticks is a power of two.
    pub is_binary: bool,
    pub ticks: f64,
    pub text: &'a dyn Fn(f64) -> String,
    pub name: &'a str,
}

/// A vertical line with a name.
pub(super) struct Mark {
    pub x: f64,
    pub name: String,
}

const HEIGHT: f64 = 190.0;

/// Draws lines. `second` formats a second label in another unit for each x tick.
pub(super) fn chart(
    label: &str,
    x_axis: &Axis<'_>,
    y_axis: &Axis<'_>,
    series: &[Series],
    mark: Option<&Mark>,
    second: Option<&dyn Fn(f64) -> String>,
) -> String {
    let mut svg = Svg::new();
    let entry = |s: &Series| (s.name.clone(), format!("line s{} {}", s.colour, s.style));
    let top = svg.legend(&series.iter().map(entry).collect::<Vec<_>>()) + 6.0;
    let bottom = top + HEIGHT;
    let at = |x: f64, y: f64| {
        let share = |value: f64, axis: &Axis<'_>| match axis.most > axis.least {
            true => (value - axis.least) / (axis.most - axis.least),
            false => 0.0,
        };
        let across = LEFT + (RIGHT - LEFT) * share(x, x_axis);
        (across, bottom - (bottom - top) * share(y, y_axis))
    };
    frame(&mut svg, x_axis, y_axis, (top, bottom), &at, second);
    if let Some(mark) = mark.filter(|mark| mark.x <= x_axis.most) {
        let x = at(mark.x, 0.0).0;
        svg.line("mark", (x, top), (x, bottom));
        // The name is on the side of the line that has room, at the top because curves fall.
        match x < (LEFT + RIGHT) / 2.0 {
            true => svg.text(x + 4.0, top + 10.0, Anchor::Start, &mark.name),
            false => svg.text(x - 4.0, top + 10.0, Anchor::End, &mark.name),
        }
    }
    for one in series {
        let points: Vec<(f64, f64)> = one.points.iter().map(|(x, y, _)| at(*x, *y)).collect();
        svg.polyline(&format!("line s{} {}", one.colour, one.style), &points);
        for (point, (_, _, tip)) in points.iter().zip(&one.points).filter(|(_, p)| !p.2.is_empty())
        {
            svg.dot(&format!("dot s{}", one.colour), *point, tip);
        }
    }
    svg.finish(label)
}

fn frame(
    svg: &mut Svg,
    x_axis: &Axis<'_>,
    y_axis: &Axis<'_>,
    (top, bottom): (f64, f64),
    at: &dyn Fn(f64, f64) -> (f64, f64),
    second: Option<&dyn Fn(f64) -> String>,
) {
    for value in ticks(y_axis) {
        let y = at(x_axis.least, value).1;
        svg.line("grid", (LEFT, y), (RIGHT, y));
        svg.text(LEFT - 6.0, y + 3.5, Anchor::End, &(y_axis.text)(value));
    }
    for (index, value) in ticks(x_axis).into_iter().enumerate() {
        let x = at(value, y_axis.least).0;
        svg.line("grid", (x, top), (x, bottom));
        let anchor = match () {
            () if x > RIGHT - 14.0 => Anchor::End,
            () => Anchor::Middle,
        };
        svg.text(x, bottom + 14.0, anchor, &(x_axis.text)(value));
        // Byte counts are long, so only every other one is drawn.
        if let Some(second) = second.filter(|_| index % 2 == 0) {
            svg.text(x, bottom + 27.0, anchor, &second(value));
        }
    }
    let below = bottom + if second.is_some() { 42.0 } else { 29.0 };
    svg.text((LEFT + RIGHT) / 2.0, below, Anchor::Middle, x_axis.name);
    svg.reach(below + 6.0);
}

fn ticks(axis: &Axis<'_>) -> Vec<f64> {
    let span = axis.most - axis.least;
    let by = match axis.is_binary {
        true => (span / axis.ticks).max(1.0).log2().ceil().exp2(),
        false => step(span, axis.ticks),
    };
    let first = (axis.least / by).ceil() * by;
    let count = ((axis.most - first) / by + 1e-6).floor().clamp(0.0, 50.0) as usize;
    (0..=count).map(|index| first + index as f64 * by).collect()
}

/// Draws bars. Each has a name, a share and a tooltip.
pub(super) fn bars(label: &str, name: &str, bars: &[(String, f64, String)]) -> String {
    let mut svg = Svg::new();
    let most = bars.iter().map(|bar| bar.1).fold(0.0, f64::max).max(1e-9);
    let by = step(most, 4.0);
    let most = (most / by).ceil() * by;
    let (top, bottom) = (10.0, 10.0 + HEIGHT);
    let percent = |value: f64| crate::page::percent(value);
    let y_axis = Axis { least: 0.0, most, is_binary: false, ticks: 4.0, text: &percent, name: "" };
    let at = |_: f64, y: f64| (LEFT, bottom - (bottom - top) * y / most);
    for value in ticks(&y_axis) {
        let y = at(0.0, value).1;
        svg.line("grid", (LEFT, y), (RIGHT, y));
        svg.text(LEFT - 6.0, y + 3.5, Anchor::End, &percent(value));
    }
    let width = (RIGHT - LEFT) / bars.len().max(1) as f64;
    for (index, (name, value, tip)) in bars.iter().enumerate() {
        let (x, y) = (LEFT + width * index as f64, at(0.0, *value).1);
        svg.rect("fill s0", [x + width * 0.12, y, width * 0.76, bottom - y], 1.0, tip);
        svg.text(x + width / 2.0, bottom + 14.0, Anchor::Middle, name);
    }
    svg.text((LEFT + RIGHT) / 2.0, bottom + 29.0, Anchor::Middle, name);
    svg.reach(bottom + 35.0);
    svg.finish(label)
}
