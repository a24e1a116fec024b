//! The documentation page of all fields.

use std::fmt::Write as _;

use super::{FORMS, Field, Form, Kind, Rule, Tagged, Variant};

const HEAD: &str = "# Fields of requests

Each interface has a table. The server checks every request by it:

- **followed**: the field does what its interface says.
- **no effect**: the field is accepted, and does not change the answer, for the reason given.
- **refused**: a request with the field gets status 400, which names it. A value that asks for nothing is fine: `null`, something
  empty, or a value named in the table. So are `false` and 0, unless the table names another flag or number.
- Any other field gets status 400, too, as from OpenAI and Anthropic. So no answer ignores what a request says.

`null` is the same as no field, 2.0 the same as 2, and words such as roles may have capital letters. The same table makes the schemas of
`/openapi.json`, and a test sends every field to a server. `cargo test -p forebay-requests` writes this page with `FOREBAY_WRITE_PAGE=1`.
";

/// Returns the page.
pub fn page() -> String {
    let mut out = HEAD.to_owned();
    let mut parts = Vec::new();
    for form in FORMS {
        let paths: Vec<String> = form.paths.iter().map(|path| format!("`{path}`")).collect();
        let _ = write!(out, "\n## {}\n\n", paths.join(", "));
        if form.name == "ApplyTemplateRequest" {
            out.push_str(
                "The fields of a chat. Those that are not about the prompt have no effect.\n",
            );
            continue;
        }
        table(form, &mut out, &mut parts);
    }
    out.push_str("\n## Parts of requests\n");
    let mut next = 0;
    while let Some(part) = parts.get(next).copied() {
        next += 1;
        match part {
            Part::Form(form) => {
                let _ = write!(out, "\n### {}\n\n", form.name);
                table(form, &mut out, &mut parts);
            }
            Part::Tagged(of) => {
                let _ = write!(out, "\n### {}\n\n", of.name);
                variants(of, &mut out, &mut parts);
            }
        }
    }
    out
}

/// A part of a request that has a table of its own.
#[derive(Clone, Copy)]
enum Part {
    Form(&'static Form),
    Tagged(&'static Tagged),
}

fn table(form: &'static Form, out: &mut String, parts: &mut Vec<Part>) {
    out.push_str("| field | takes | what happens |\n| --- | --- | --- |\n");
    for field in form.fields() {
        let takes = match field.rule {
            Rule::Harmless(_) => "anything".to_owned(),
            Rule::Refused { .. } => String::new(),
            _ => takes(&field.kind, parts),
        };
        let _ = writeln!(out, "| `{}` | {takes} | {} |", field.name, happens(field));
    }
    if form.fields().next().is_none() {
        out.push_str("| none | | |\n");
    }
}

fn happens(field: &Field) -> String {
    match field.rule {
        Rule::Honoured => "followed".to_owned(),
        Rule::Required => "followed; it must be there".to_owned(),
        Rule::Alias(of) => format!("followed as `{of}`"),
        Rule::Harmless(why) => format!("no effect: {why}"),
        Rule::Refused { off: [], why } => format!("refused: {why}"),
        Rule::Refused { off, why } => {
            let off: Vec<String> = off.iter().map(|value| format!("`{value}`")).collect();
            format!("refused unless {}: {why}", off.join(" or "))
        }
    }
}

/// Says what a field takes, with links to the parts that have tables of their own.
fn takes(kind: &'static Kind, parts: &mut Vec<Part>) -> String {
    match kind {
        Kind::Object(form) => link(form, parts),
        Kind::Tagged(of) => link_tagged(of, parts),
        Kind::List(of) => format!("a list, each item {}", takes(of, parts)),
        Kind::Map(of) => format!("an object, each value {}", takes(of, parts)),
        Kind::OneOf(kinds) => {
            let of: Vec<String> = kinds.iter().map(|kind| takes(kind, parts)).collect();
            of.join(", or ")
        }
        Kind::Word(words) => {
            let words: Vec<String> = words.iter().map(|word| format!("`{word}`")).collect();
            words.join(", ")
        }
        kind => kind.words(),
    }
}

fn link(form: &'static Form, parts: &mut Vec<Part>) -> String {
    let is_listed = |part: &Part| matches!(part, Part::Form(of) if std::ptr::eq(*of, form));
    if !parts.iter().any(is_listed) {
        parts.push(Part::Form(form));
    }
    format!("[{}](#{})", form.name, form.name.to_lowercase())
}

fn link_tagged(of: &'static Tagged, parts: &mut Vec<Part>) -> String {
    let is_listed = |part: &Part| matches!(part, Part::Tagged(other) if std::ptr::eq(*other, of));
    if !parts.iter().any(is_listed) {
        parts.push(Part::Tagged(of));
    }
    format!("[{}](#{})", of.name, of.name.to_lowercase())
}

fn variants(of: &'static Tagged, out: &mut String, parts: &mut Vec<Part>) {
    let _ = write!(out, "| `{}` | what happens |\n| --- | --- |\n", of.tag);
    let mut row = |tag: &str, variant: &'static Variant| {
        let what = match variant {
            Variant::Form(form) => link(form, parts),
            Variant::LeftOut(why) => format!("left out: {why}"),
            Variant::Refused(why) => format!("refused: {why}"),
        };
        let _ = writeln!(out, "| {tag} | {what} |");
    };
    for (tag, variant) in of.variants {
        let usual = if of.default == Some(tag) { ", the usual one" } else { "" };
        row(&format!("`{tag}`{usual}"), variant);
    }
    row("any other", &of.others);
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_page_is_made_from_the_table() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/request-fields.md");
        let page = page();
        if std::env::var_os("FOREBAY_WRITE_PAGE").is_some() {
            std::fs::write(&path, &page).unwrap();
        }
        let found = std::fs::read_to_string(&path).unwrap_or_default();
        let differs = page.lines().zip(found.lines()).find(|(new, old)| new != old);
        assert!(
            page == found,
            "docs/request-fields.md is old: run this test with FOREBAY_WRITE_PAGE=1; first difference: {differs:?}"
        );
    }
}
