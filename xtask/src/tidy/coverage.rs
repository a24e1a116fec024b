//! The page about models names the families that the code has, and compares their names with those that other programs know.

use super::Finding;
use super::files::Repository;
use crate::coverage::{Families, PAGE, RECORD, Record, families_of, part_of, render};

pub fn check(repository: &Repository, families: &Families, findings: &mut Vec<Finding>) {
    let page = repository.text(PAGE).unwrap_or_default();
    let mut fail = |message: String| findings.push(Finding::fail(PAGE, 0, message));
    let listed = families_of(page);
    for name in families.families.difference(&listed) {
        fail(format!("the table of families lacks {name}"));
    }
    for name in listed.difference(&families.families) {
        fail(format!("the table of families has {name}, which is no family"));
    }
    let record = Record::parse(repository.text(RECORD).unwrap_or_default());
    let compared = record.and_then(|record| {
        let part = part_of(page)?;
        Ok((render(&record, families)?, &page[part]))
    });
    match compared {
        Ok((expected, found)) if expected == found => {}
        Ok(_) => {
            fail("the comparison of names is out of date: run `cargo xtask coverage`".to_owned())
        }
        Err(error) => fail(format!("the comparison of names: {error:#}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORDED: &str = "date 2026-01-31\npackage gguf 1\npackage llama-cpp-python 1\npackage transformers 1\ngguf a experts\n\
                            gguf b\nmodel_type a\n";
    const NAMES: &str = "family a\ngguf a experts\nmodel_type a experts\n";

    fn messages(page: &str, recorded: &str, names: &str) -> Vec<String> {
        let repository = Repository::from_texts(&[(PAGE, page), (RECORD, recorded)]);
        let mut findings = Vec::new();
        check(&repository, &Families::parse(names).unwrap(), &mut findings);
        findings.into_iter().map(|finding| finding.message).collect()
    }

    #[test]
    fn a_page_that_differs_from_the_families_fails() {
        let record = Record::parse(RECORDED).unwrap();
        let rendered = render(&record, &Families::parse(NAMES).unwrap()).unwrap();
        let table = "## Families\n\n| family | notes |\n| --- | --- |\n| a | |\n\n## Names\n\n";
        let page = format!("{table}{rendered}");
        assert!(messages(&page, RECORDED, NAMES).is_empty());
        let more = format!("{NAMES}family b\ngguf b dense\n");
        let found = messages(&page, RECORDED, &more);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("lacks b") && found[1].contains("out of date"), "{found:?}");
        assert_eq!(messages(&page.replace("| a |", "| a, c |"), RECORDED, NAMES).len(), 1);
        assert_eq!(messages(&page, &RECORDED.replace("gguf b", "gguf c"), NAMES).len(), 1);
        assert_eq!(messages(table, RECORDED, NAMES).len(), 1);
        assert_eq!(messages(&page, "", NAMES).len(), 1);
    }
}
