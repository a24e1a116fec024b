//! `cargo xtask coverage` compares the architecture names that run here with those that other programs know.
//!
//! What others know is a record in the repository, so that the comparison needs no network. `--fetch` renews the record. The
//! comparison is a part of a page, and `cargo xtask tidy` fails if that part is out of date.

mod configurations;
mod families;
mod packages;
mod page;
mod python;
mod record;

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail};

pub use families::Families;
pub use page::{families_of, part_of, render};
pub use record::Record;

use crate::workspace;

/// Names that other programs know.
pub const RECORD: &str = "xtask/coverage.txt";
/// The page with the comparison and the table of families.
pub const PAGE: &str = "docs/models.md";

const USAGE: &str = "\
usage: cargo xtask coverage [--fetch]
  prints which architecture names run here and which do not, and writes them into docs/models.md
  --fetch  first read the names in the newest gguf, llama-cpp-python and transformers from PyPI; needs python3 with pip";

/// Writes the comparison into its page and prints it.
///
/// # Errors
/// Returns an error if a package cannot be fetched or read, or if the page has no place for the comparison.
pub fn run(root: &Path, arguments: &[String]) -> Result<bool> {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let at = root.join(RECORD);
    match arguments[..] {
        [] => {}
        ["--fetch"] => {
            let record = packages::fetch(&workspace::target(root).join("coverage"))?;
            fs::write(&at, record.to_text()).with_context(|| RECORD.to_owned())?;
        }
        ["--help" | "-h"] => {
            println!("{USAGE}");
            return Ok(true);
        }
        _ => bail!("{}: there is no such option\n{USAGE}", arguments.join(" ")),
    }
    let record = fs::read_to_string(&at).with_context(|| RECORD.to_owned())?;
    let record = Record::parse(&record)?;
    let families = Families::ask(&workspace::build(root)?)?;
    let rendered = render(&record, &families)?;
    print!("{rendered}");
    let page = fs::read_to_string(root.join(PAGE)).with_context(|| PAGE.to_owned())?;
    let part = part_of(&page).with_context(|| PAGE.to_owned())?;
    let page = [&page[..part.start], &rendered, &page[part.end..]].concat();
    fs::write(root.join(PAGE), page).with_context(|| PAGE.to_owned())?;
    Ok(true)
}
