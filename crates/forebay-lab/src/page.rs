//! Parts that the HTML reports share: style, escaping, numbers, tables.

use std::fmt::Write as _;

use serde::Serialize;

/// Style sheet with colours for light and dark, cards and tables.
pub(crate) const STYLE: &str = include_str!("page.css");

/// Report: one HTML file that needs no other file.
pub(crate) struct Document<'a> {
    /// Title as plain text. All other parts are HTML.
    pub title: &'a str,
    /// Style sheet that is added to [`STYLE`].
    pub style: &'a str,
    pub head: String,
    pub body: String,
    pub notes: String,
    pub script: Option<Script<'a>>,
}

/// Program that a report runs in the browser.
pub(crate) struct Script<'a> {
    /// Source of the program.
    pub program: &'a str,
    /// JSON that the program finds in the element `data`.
    pub data: String,
}

impl Document<'_> {
    pub fn html(self) -> String {
        let (policy, script) = match self.script {
            None => ("", String::new()),
            Some(Script { program, data }) => (
                "; script-src 'unsafe-inline'",
                format!(
                    "<script type=\"application/json\" id=\"data\">{data}</script>\n<script>\n{program}\n</script>\n"
                ),
            ),
        };
        let parts = [
            ("@POLICY@", policy.to_owned()),
            ("@TITLE@", escape(self.title)),
            ("@STYLE@", format!("{STYLE}{}", self.style)),
            ("@HEAD@", self.head),
            ("@BODY@", self.body),
            ("@NOTES@", self.notes),
            ("@SCRIPT@", script),
        ];
        fill(include_str!("page.html"), &parts)
    }
}

/// Fills the placeholders of a page, in order and each once. A name that contains a placeholder is therefore never
/// filled.
pub(crate) fn fill(page: &str, parts: &[(&str, String)]) -> String {
    let mut html = String::with_capacity(1 << 18);
    let mut rest = page;
    for (place, text) in parts {
        let Some((before, after)) = rest.split_once(place) else { continue };
        html.push_str(before);
        html.push_str(text);
        rest = after;
    }
    html.push_str(rest);
    html
}

/// Escapes text for use in an element or an attribute.
pub(crate) fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            c if c.is_control() => safe.push('\u{fffd}'),
            c => safe.push(c),
        }
    }
    safe
}

/// Escapes a sentence and joins each number to its unit with a no-break space.
pub(crate) fn sentence(text: &str) -> String {
    let units = ["%", "KiB", "MiB", "GiB", "TiB", "GB/s", "tokens/s", "ms"];
    let with =
        |text: String, unit: &str| text.replace(&format!(" {unit}"), &format!("\u{a0}{unit}"));
    units.into_iter().fold(escape(text), with)
}

/// Returns JSON that is safe inside a script element.
pub(crate) fn script_json(value: &impl Serialize) -> String {
    let text = serde_json::to_string(value).unwrap_or_else(|_| "null".to_owned());
    text.replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026")
}

/// Returns the last part of a path.
pub(crate) fn short_name(path: &str) -> &str {
    path.rsplit('/').find(|part| !part.is_empty()).unwrap_or(path)
}

/// Formats a byte count in the unit that leaves few digits.
pub(crate) fn bytes(value: f64) -> String {
    let mut value = value;
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = if unit == 0 || value >= 100.0 { 0 } else { 1 + usize::from(value < 10.0) };
    format!("{value:.digits$} {}", units[unit])
}

/// Formats a duration with its unit.
pub(crate) fn time(seconds: f64) -> String {
    match seconds {
        s if s <= 0.0 => "0".to_owned(),
        s if s < 1e-3 => format!("{:.0} µs", s * 1e6),
        s if s < 0.1 => format!("{:.2} ms", s * 1e3),
        s if s < 1.0 => format!("{:.0} ms", s * 1e3),
        s if s < 100.0 => format!("{s:.2} s"),
        s => format!("{s:.0} s"),
    }
}

/// Formats a share in percent. Shares between 0 and 10 % get one decimal.
pub(crate) fn percent(share: f64) -> String {
    let digits = if share > 0.0 && share < 0.1 { 1 } else { 0 };
    format!("{:.digits$} %", share * 100.0)
}

/// Formats a number with its digits in groups of three, separated by thin spaces.
pub(crate) fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

/// Appends a table. Cells are HTML. The first `text_columns` columns are aligned left.
pub(crate) fn table(
    html: &mut String,
    title: &str,
    head: &[&str],
    text_columns: usize,
    rows: &[Vec<String>],
) {
    let class = |column: usize| if column < text_columns { "" } else { " class=\"n\"" };
    let _ = write!(html, "<section><h2>{}</h2><div class=\"scroll\"><table><tr>", escape(title));
    for (column, name) in head.iter().enumerate() {
        let _ = write!(html, "<th{}>{}</th>", class(column), escape(name));
    }
    html.push_str("</tr>");
    for row in rows {
        html.push_str("<tr>");
        for (column, cell) in row.iter().enumerate() {
            let _ = write!(html, "<td{}>{cell}</td>", class(column));
        }
        html.push_str("</tr>");
    }
    html.push_str("</table></div></section>");
}
