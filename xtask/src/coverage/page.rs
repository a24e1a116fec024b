//! The part of the page that compares names, and the page's table of families.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::ops::Range;

use anyhow::{Context as _, Result, ensure};

use super::families::Families;
use super::record::{Names, Record};

const START: &str = "<!-- `cargo xtask coverage` writes the lines up to the next mark. -->\n";
const END: &str = "<!-- End of these lines. -->\n";
const LINE_CHARACTERS: usize = 140;

/// Names that other programs know, by what they are here.
#[derive(Debug, Default, PartialEq, Eq)]
struct Comparison<'a> {
    /// Names with experts that run with experts.
    with_experts: Vec<&'a str>,
    /// Names without experts that run.
    without_experts: Vec<&'a str>,
    /// Names with experts that run only if a file has none.
    dense_only: Vec<&'a str>,
    missing_with_experts: Vec<&'a str>,
    missing: Vec<&'a str>,
    /// Names that run here and are not known there.
    only_here: Vec<&'a str>,
}

impl<'a> Comparison<'a> {
    fn new(theirs: &'a Names, ours: &'a Names) -> Self {
        let mut all = Comparison::default();
        for (name, experts) in theirs {
            let list = match (experts, ours.get(name)) {
                (true, Some(true)) => &mut all.with_experts,
                (true, Some(false)) => &mut all.dense_only,
                (false, Some(_)) => &mut all.without_experts,
                (true, None) => &mut all.missing_with_experts,
                (false, None) => &mut all.missing,
            };
            list.push(name);
        }
        let is_new = |name: &&'a String| !theirs.contains_key(*name);
        all.only_here = ours.keys().filter(is_new).map(String::as_str).collect();
        all
    }

    /// Returns the number of names that run, of all names, of names that run with experts, and of all names with experts.
    fn counts(&self) -> [usize; 4] {
        let experts = self.with_experts.len();
        let run = experts + self.without_experts.len() + self.dense_only.len();
        let all_experts = experts + self.dense_only.len() + self.missing_with_experts.len();
        [run, run + self.missing_with_experts.len() + self.missing.len(), experts, all_experts]
    }

    fn lists(&self) -> String {
        let mut text = String::new();
        for (title, names) in [
            ("Run, with experts", &self.with_experts),
            ("Run, without experts", &self.without_experts),
            ("Run only without experts", &self.dense_only),
            ("Missing, with experts", &self.missing_with_experts),
            ("Missing, without experts", &self.missing),
            ("Run here and unknown there", &self.only_here),
        ] {
            if !names.is_empty() {
                let item = format!("- {title} ({}): {}", names.len(), names.join(", "));
                text += &wrapped(&item);
            }
        }
        text
    }
}

/// Returns the comparison as the page has it, with its marks.
///
/// # Errors
/// Returns an error if the record lacks the version of a package.
pub fn render(record: &Record, families: &Families) -> Result<String> {
    let gguf = Comparison::new(&record.gguf, &families.gguf);
    let model_types = Comparison::new(&record.model_types, &families.model_types);
    let llama_cpp = record.version("llama-cpp-python")?;
    let gguf_version = record.version("gguf")?;
    let transformers = record.version("transformers")?;
    let mut text = START.to_owned();
    let _ = writeln!(
        text,
        "\n| names on {} | run here | with experts |\n| --- | --- | --- |",
        record.date
    );
    for (of, comparison) in [
        (format!("GGUF files: llama-cpp-python {llama_cpp}, gguf {gguf_version}"), &gguf),
        (format!("folders: transformers {transformers}"), &model_types),
    ] {
        let [run, all, experts, all_experts] = comparison.counts();
        let _ = writeln!(text, "| {of} | {run} of {all} | {experts} of {all_experts} |");
    }
    let gguf = gguf.lists();
    let model_types = model_types.lists();
    let _ = write!(
        text,
        "\n### Names of GGUF files\n\nThe names are values of `general.architecture`. A name has experts if `gguf` lists tensors of routed \
         experts for it.\nThe names include encoders and projectors, which forebay does not run.\n\n{gguf}\n### Names of folders\n\nThe \
         names are values of `model_type`, in `text_config` if a folder has it. A name has experts if its configuration in\ntransformers \
         has a number of experts. The names include encoders, which forebay does not run.\n\n{model_types}\n"
    );
    Ok(text + END)
}

/// Breaks an item of a list into lines.
fn wrapped(item: &str) -> String {
    let mut lines = String::new();
    let mut length = 0;
    for word in item.split(' ') {
        if length + 1 + word.len() > LINE_CHARACTERS {
            lines += "\n ";
            length = 1;
        }
        if length > 0 {
            lines.push(' ');
        }
        lines += word;
        length += word.len() + 1;
    }
    lines + "\n"
}

/// Returns where a page has the comparison, with its marks.
///
/// # Errors
/// Returns an error if the page does not have both marks.
pub fn part_of(page: &str) -> Result<Range<usize>> {
    let start = page.find(START).with_context(|| format!("has no line {}", START.trim_end()))?;
    let end = page.find(END).with_context(|| format!("has no line {}", END.trim_end()))?;
    ensure!(start < end, "the marks are in the wrong order");
    Ok(start..end + END.len())
}

/// Returns the names in the first column of the page's table of families.
pub fn families_of(page: &str) -> BTreeSet<String> {
    let lines = page.lines().skip_while(|line| *line != "## Families").skip(1);
    let rows = lines.take_while(|line| !line.starts_with("## "));
    // The first two rows are the table's head.
    let cells = rows.filter_map(|line| line.strip_prefix("| ")?.split(" |").next()).skip(2);
    cells.flat_map(|cell| cell.split(", ")).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn names(names: &[(&str, bool)]) -> Names {
        names.iter().map(|(name, experts)| ((*name).to_owned(), *experts)).collect()
    }

    fn record() -> Record {
        let packages = ["gguf", "llama-cpp-python", "transformers"];
        Record {
            date: "2026-01-31".to_owned(),
            packages: packages.map(|name| (name.to_owned(), "1.0".to_owned())).into(),
            gguf: names(&[("a", true), ("b", true), ("c", true), ("d", false), ("e", false)]),
            model_types: names(&[("a_text", true)]),
        }
    }

    #[test]
    fn names_are_sorted_by_what_they_are_here() {
        let record = record();
        let ours = names(&[("a", true), ("b", false), ("d", true), ("z", false)]);
        let comparison = Comparison::new(&record.gguf, &ours);
        let expected = Comparison {
            with_experts: vec!["a"],
            without_experts: vec!["d"],
            dense_only: vec!["b"],
            missing_with_experts: vec!["c"],
            missing: vec!["e"],
            only_here: vec!["z"],
        };
        assert_eq!(comparison, expected);
        assert_eq!(comparison.counts(), [3, 5, 1, 3]);
        assert!(
            comparison.lists().contains("\n- Missing, with experts (1): c\n- Missing, without")
        );
    }

    #[test]
    fn a_page_has_the_comparison_between_its_marks() {
        let families = Families { gguf: names(&[("a", true)]), ..Families::default() };
        let rendered = render(&record(), &families).unwrap();
        assert!(rendered.contains("| 1 of 5 | 1 of 3 |"), "{rendered}");
        assert!(rendered.contains("| 0 of 1 | 0 of 1 |"), "{rendered}");
        let page = format!("# A\n\n{rendered}\n## B\n");
        assert_eq!(&page[part_of(&page).unwrap()], rendered);
        assert!(part_of(&page.replace(END, "")).is_err());
        assert!(part_of(&format!("{END}{START}")).is_err());
        let without = Record { packages: BTreeMap::new(), ..record() };
        assert!(render(&without, &families).is_err());
    }

    #[test]
    fn long_lists_are_broken() {
        let item = format!("- {}", ["name"; 60].join(", "));
        let lines = wrapped(&item);
        assert!(lines.lines().all(|line| line.len() <= LINE_CHARACTERS), "{lines}");
        assert!(lines.lines().skip(1).all(|line| line.starts_with("  name")), "{lines}");
        assert_eq!(lines.split_whitespace().collect::<Vec<_>>().join(" "), item);
    }

    #[test]
    fn families_are_read_from_their_table() {
        let page = "| x | y |\n\n## Families\n\n| family | notes |\n| --- | --- |\n| a, b-1 | c, d |\n| e | |\n\nText.\n\n## More\n\n\
                    | f | |\n";
        assert_eq!(families_of(page), ["a", "b-1", "e"].map(str::to_owned).into());
    }
}
