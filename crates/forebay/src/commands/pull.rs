//! `forebay pull`: downloads a model into the library.

use std::cell::RefCell;
use std::io::Write as _;
use std::path::PathBuf;

use forebay_library::{Entry, Error, Library, Name, Progress};
use serde::Serialize;

use crate::args::PullArgs;
use crate::commands::plan::{self, Offer};
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
    let library = library::open(folder.clone())?;
    let name: Name = args.name.parse().map_err(library::failed)?;
    let mut offer = plan::offer(&name, &args.revision, folder, !args.no_check)?;
    offer.repository.set_connections(args.jobs);
    let entry = pull(&library, &name, &offer)?;
    report(&entry, args.json)
}

/// Says what a download would bring, and downloads the model if the user agrees.
pub fn ask_and_pull(name: &Name, folder: Option<PathBuf>) -> Outcome<Entry> {
    let library = library::open(folder.clone())?;
    let offer = plan::offer(name, "main", folder, true)?;
    let bytes = size::format(offer.model.size_bytes());
    let speed = offer.speed.as_ref().map_or(String::new(), |speed| format!(", predicted {speed}"));
    output::say(format_args!("Download {} ({bytes}{speed}) now? [Y/n] ", offer.name));
    if !agrees()? {
        let why = anyhow::anyhow!("not downloaded: forebay pull {} does it later", offer.name);
        return Err(why.into());
    }
    pull(&library, name, &offer)
}

/// Reads an answer from the terminal. Enter means yes, the end of input no.
fn agrees() -> Outcome<bool> {
    let _waiting = interrupt::waiting_for_input();
    let _ = std::io::stderr().flush();
    let mut answer = String::new();
    if std::io::stdin().read_line(&mut answer)? == 0 {
        output::tell!();
        return Ok(false);
    }
    Ok(matches!(answer.trim().to_ascii_lowercase().as_str(), "" | "y" | "yes"))
}

/// Downloads what was offered, with a progress bar.
fn pull(library: &Library, asked: &Name, offer: &Offer) -> Outcome<Entry> {
    let token = interrupt::token();
    let shown = RefCell::new(Shown::Nothing);
    let progress = |now| shown.borrow_mut().update(now);
    let cancelled = || token.is_requested();
    let pulled = offer.repository.pull(library, &offer.model, &progress, &cancelled);
    *shown.borrow_mut() = Shown::Nothing;
    pulled.map_err(|error| failed(error, library, asked))
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
        error if error.is_passing() && is_unfinished => {
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
    output::print(&format!("{name}: {} in {}\n", size::format(*size_bytes), path.display()))?;
    output::tell!("forebay run {name} starts a chat with it");
    Ok(())
}
