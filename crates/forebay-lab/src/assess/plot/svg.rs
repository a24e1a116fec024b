//! Builder for an SVG drawing. All text from outside goes through [`escape`].

use std::fmt::Write as _;

use crate::page::escape;

/// Width of every drawing in its own units. It is about a phone's width, so that text stays readable there.
pub(super) const WIDTH: f64 = 440.0;
pub(super) const LEFT: f64 = 46.0;
pub(super) const RIGHT: f64 = WIDTH - 10.0;
const LEGEND_LINE: f64 = 17.0;
/// Mean width of a character in the legend.
const CHARACTER: f64 = 5.9;

/// Side of its point on which a text lies.
#[derive(Clone, Copy)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

/// An SVG drawing.
pub(super) struct Svg {
    body: String,
    height: f64,
}

impl Svg {
    pub fn new() -> Svg {
        Svg { body: String::new(), height: 0.0 }
    }

    /// Returns the SVG element, with `label` as its text for screen readers. [`super::Figure::standalone`] adds the
    /// colours that make it a complete document.
    pub fn finish(self, label: &str) -> String {
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {:.0}\" role=\"img\" aria-label=\"{}\">{}</svg>",
            self.height,
            escape(label),
            self.body
        )
    }

    /// Makes the drawing reach down to `y` at least.
    pub fn reach(&mut self, y: f64) {
        self.height = self.height.max(y);
    }

    pub fn text(&mut self, x: f64, y: f64, anchor: Anchor, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let _ = write!(
            self.body,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>",
            escape(text)
        );
    }

    pub fn line(&mut self, class: &str, from: (f64, f64), to: (f64, f64)) {
        let _ = write!(
            self.body,
            "<path class=\"{class}\" d=\"M{:.1} {:.1}L{:.1} {:.1}\"/>",
            from.0, from.1, to.0, to.1
        );
    }

    pub fn polyline(&mut self, class: &str, points: &[(f64, f64)]) {
        let mut path = String::new();
        for (index, (x, y)) in points.iter().enumerate() {
            let _ = write!(path, "{}{x:.1} {y:.1}", if index == 0 { 'M' } else { 'L' });
        }
        if !path.is_empty() {
            self.path(class, &path);
        }
    }

    pub fn path(&mut self, class: &str, path: &str) {
        let _ = write!(self.body, "<path class=\"{class}\" d=\"{path}\"/>");
    }

    /// Adds a rectangle `[x, y, width, height]`. `tip` is its tooltip.
    pub fn rect(&mut self, class: &str, [x, y, width, height]: [f64; 4], opacity: f64, tip: &str) {
        let opacity =
            if opacity < 1.0 { format!(" opacity=\"{opacity:.2}\"") } else { String::new() };
        let _ = write!(
            self.body,
            "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.2}\" height=\"{height:.2}\"{opacity}"
        );
        self.close("rect", tip);
    }

    pub fn dot(&mut self, class: &str, (x, y): (f64, f64), tip: &str) {
        let _ =
            write!(self.body, "<circle class=\"{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.2\"");
        self.close("circle", tip);
    }

    fn close(&mut self, element: &str, tip: &str) {
        match tip.is_empty() {
            true => self.body.push_str("/>"),
            false => {
                let _ = write!(self.body, "><title>{}</title></{element}>", escape(tip));
            }
        }
    }

    /// Adds a legend of `(name, class of a small mark)` entries, in as many lines as they need. Returns the y below the
    /// legend.
    pub fn legend(&mut self, entries: &[(String, String)]) -> f64 {
        let (mut x, mut y) = (LEFT, 12.0);
        for (name, class) in entries {
            let width = 17.0 + CHARACTER * name.chars().map(columns).sum::<f64>();
            if x > LEFT && x + width > RIGHT {
                x = LEFT;
                y += LEGEND_LINE;
            }
            match class.contains("line") {
                true => self.line(class, (x, y - 4.0), (x + 12.0, y - 4.0)),
                false => self.rect(class, [x, y - 9.0, 10.0, 10.0], 1.0, ""),
            }
            self.text(x + 16.0, y, Anchor::Start, name);
            x += width + 12.0;
        }
        if entries.is_empty() { 4.0 } else { y + 12.0 }
    }
}

/// Returns the width of a character in columns; wide scripts take two.
fn columns(c: char) -> f64 {
    if c as u32 >= 0x1100 { 2.0 } else { 1.0 }
}

/// Returns a step that makes about `count` round ticks up to `most`.
pub(super) fn step(most: f64, count: f64) -> f64 {
    let rough = most / count;
    if !(rough > 0.0 && rough.is_finite()) {
        return 1.0;
    }
    let power = 10_f64.powf(rough.log10().floor());
    let round = [1.0, 2.0, 5.0, 10.0].into_iter().find(|m| m * power >= rough * 0.999);
    power * round.unwrap_or(10.0)
}
