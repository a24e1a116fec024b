//! `{% generation %}` blocks, which mark the assistant's text for training.
//!
//! The blocks change nothing in a prompt. For the engine, a `with` block without variables is
//! equivalent: it prints its body, keeps assignments inside, and handles the whitespace around its
//! tags.

/// Returns the source with its generation tags turned into `with` tags.
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

/// Returns the replacement of a generation tag and the source after it, if `tag` begins with one.
fn replaced(tag: &str) -> Option<(String, &str)> {
    // The end is searched after the beginning, because `{%}` is not a tag.
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
