//! `{% generation %}` blocks, which mark the assistant's text for training.
//!
//! They change nothing in a prompt. A `with` block without variables is the same block for the
//! engine: it prints its body, keeps assignments inside, and handles the whitespace around its
//! tags.

/// The source with its generation tags turned into `with` tags.
pub fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        match replaced(tag) {
            Some((replacement, behind)) => {
                out.push_str(&replacement);
                rest = behind;
            }
            None => {
                out.push_str("{%");
                rest = &tag[2..];
            }
        }
    }
    out.push_str(rest);
    out
}

/// If `tag` begins with a generation tag: what takes its place, and the source behind it.
fn replaced(tag: &str) -> Option<(String, &str)> {
    // The end is searched behind the beginning: `{%}` is no tag.
    let (inside, behind) = tag.strip_prefix("{%")?.split_once("%}")?;
    let word = inside.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
    let replacement = match word {
        "generation" => "with",
        "endgeneration" => "endwith",
        _ => return None,
    };
    Some((format!("{{%{}%}}", inside.replacen(word, replacement, 1)), behind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_tags_change() {
        let source =
            "a{% generation %}{{ generation }}{%- endgeneration -%} {%generation%} {% if x %}{% ";
        let expected = "a{% with %}{{ generation }}{%- endwith -%} {%with%} {% if x %}{% ";
        assert_eq!(without_generation_tags(source), expected);
    }

    #[test]
    fn a_percent_sign_does_not_begin_and_end_a_tag() {
        assert_eq!(without_generation_tags("{%}x"), "{%}x");
        assert_eq!(without_generation_tags("{%} generation %}"), "{%} generation %}");
    }
}
