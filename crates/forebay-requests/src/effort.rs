//! Amounts of reasoning by OpenAI's names.

use forebay_chat::Think;

/// Reads an amount of reasoning. Models have fewer steps than OpenAI names, so `none` and `minimal` are no reasoning, and all
/// above `high` is `high`.
///
/// # Errors
/// Returns what the amount must be.
pub fn think(effort: &str) -> Result<Think, String> {
    match effort {
        "none" | "minimal" => Ok(Think::Off),
        "xhigh" | "max" => Ok(Think::High),
        _ => effort.parse().map_err(|_| {
            format!("{effort:?} is not known: it must be none, minimal, low, medium, high or xhigh")
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_names_are_known() {
        for (name, amount) in [
            ("none", Think::Off),
            ("minimal", Think::Off),
            ("off", Think::Off),
            ("low", Think::Low),
            ("high", Think::High),
            ("xhigh", Think::High),
        ] {
            assert_eq!(think(name), Ok(amount), "{name}");
        }
        assert!(think("None").unwrap_err().contains("minimal"));
    }
}
