//! `forebay list`: shows the models of the library.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use forebay_library::{Entry, Listing, Others};
use indicatif::HumanDuration;
use serde::Serialize;

use crate::args::ListArgs;
use crate::failure::Outcome;
use crate::output::{self, Align};
use crate::{library, size};

#[derive(Serialize)]
struct Document {
    folder: PathBuf,
    models: Vec<Model>,
    /// Names whose pull is not finished.
    unfinished: Vec<String>,
    /// What is wrong with the other names.
    damaged: Vec<String>,
}

#[derive(Serialize)]
struct Model {
    name: String,
    path: PathBuf,
    size_bytes: u64,
    /// Seconds since 1970.
    modified: u64,
    /// SHA-256 of the list of a pulled model's files.
    #[serde(skip_serializing_if = "String::is_empty")]
    digest: String,
    /// `pulled`, `folder` (the library's), or `other` (of another program).
    origin: &'static str,
}

/// Returns the models that were pulled or lie in the library's folder, and those of other programs, each with its origin.
fn all(listing: Listing) -> Vec<(Entry, &'static str)> {
    let pulled = listing.entries.into_iter().map(|entry| (entry, "pulled"));
    let loose = listing.loose.into_iter().map(|entry| (entry, "folder"));
    let others = Others::of_user().list().into_iter().map(|entry| (entry, "other"));
    pulled.chain(loose).chain(others).collect()
}

pub fn run(args: ListArgs, folder: Option<PathBuf>) -> Outcome {
    let library = library::open(folder)?;
    let mut listing = library.list()?;
    let damaged: Vec<String> = listing.damaged.drain(..).map(|why| why.to_string()).collect();
    let unfinished: Vec<String> = listing.unfinished.iter().map(ToString::to_string).collect();
    let entries = all(listing);
    if args.json {
        let models = entries.into_iter().map(model).collect();
        let folder = library.folder().to_owned();
        return output::json(&Document { folder, models, unfinished, damaged });
    }
    for why in damaged {
        output::tell!("warning: {why}");
    }
    for name in unfinished {
        output::tell!("note: the pull of {name} is not finished: forebay pull {name} resumes it");
    }
    if entries.is_empty() {
        output::tell!(
            "no models in {}: forebay pull OWNER/REPO downloads one",
            library.folder().display()
        );
        return Ok(());
    }
    let mut rows = vec![["NAME", "SIZE", "MODIFIED"].map(String::from).to_vec()];
    rows.extend(entries.iter().map(|(entry, _)| row(entry)));
    output::print(&output::table(&[Align::Left, Align::Right, Align::Left], &rows))
}

fn row(entry: &Entry) -> Vec<String> {
    let age = SystemTime::now().duration_since(entry.modified).unwrap_or_default();
    let age = HumanDuration(Duration::from_secs(age.as_secs()));
    vec![entry.name.clone(), size::format(entry.size_bytes), format!("{age} ago")]
}

fn model((entry, origin): (Entry, &'static str)) -> Model {
    let Entry { name, path, size_bytes, digest, modified } = entry;
    let modified = modified.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    Model { name, path, size_bytes, modified, digest, origin }
}
