//! `forebay pull`: downloads a model into the library.

use std::cell::RefCell;
use std::path::PathBuf;

use forebay_library::{Entry, Error, Library, Name, Options, Progress};
use serde::Serialize;

use crate::args::PullArgs;
use crate::failure::{Failure, Outcome};
use crate::progress::BytesProgress;
use crate::{interrupt, library, output, size};

#[derive(Serialize)]
struct Document<'a> {
    name: &'a str,
    path: &'a PathBuf,
    size_bytes: u64,
    digest: &'a str,
}

pub fn run(args: PullArgs, folder: Option<PathBuf>) -> Outcome {
    let library = library::open(folder)?;
    let name: Name = args.name.parse().map_err(library::failed)?;
    let options =
        Options { revision: args.revision, connections: args.jobs, ..Options::from_environment() };
    let token = interrupt::token();
    let shown = RefCell::new(Shown::Nothing);
    let progress = |now| shown.borrow_mut().update(now);
    let pulled =
        forebay_library::pull(&library, &name, &options, &progress, &|| token.is_requested());
    *shown.borrow_mut() = Shown::Nothing;
    let entry = pulled.map_err(|error| failed(error, &library, &name))?;
    report(&entry, args.json)
}

/// The progress bar of the current work.
enum Shown {
    Nothing,
    Downloading(BytesProgress),
    Verifying(BytesProgress),
}

impl Shown {
    fn update(&mut self, now: Progress) {
        match now {
            Progress::Listing => {}
            Progress::Downloading { done_bytes, total_bytes } => {
                if let Shown::Nothing = self {
                    *self = Shown::Downloading(BytesProgress::new("downloading"));
                }
                self.draw(done_bytes, total_bytes);
            }
            Progress::Verifying { done_bytes, total_bytes } => {
                if !matches!(self, Shown::Verifying(_)) {
                    *self = Shown::Verifying(BytesProgress::new("checking"));
                }
                self.draw(done_bytes, total_bytes);
            }
        }
    }

    fn draw(&mut self, done_bytes: u64, total_bytes: u64) {
        if let Shown::Downloading(bar) | Shown::Verifying(bar) = self {
            bar.update(done_bytes, total_bytes);
        }
    }
}

/// Returns the failure of a pull. If it left something to resume, the message says how.
fn failed(error: Error, library: &Library, name: &Name) -> Failure {
    let is_unfinished = library.list().is_ok_and(|listing| {
        listing.unfinished.iter().any(|other| other.repository() == name.repository())
    });
    match error {
        Error::Cancelled if is_unfinished => {
            output::tell!("note: forebay pull {name} resumes this pull");
            Failure::Interrupted
        }
        Error::Network { .. } | Error::Status { .. } if is_unfinished => {
            anyhow::anyhow!("{error}; forebay pull {name} resumes this pull").into()
        }
        error => library::failed(error),
    }
}

fn report(entry: &Entry, json: bool) -> Outcome {
    let Entry { name, path, size_bytes, digest, .. } = entry;
    if json {
        return output::json(&Document { name, path, size_bytes: *size_bytes, digest });
    }
    output::print(&format!("{name}: {} in {}\n", size::format(*size_bytes), path.display()))
}
