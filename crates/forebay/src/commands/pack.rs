//! `forebay pack`: a model into the container made for streaming, and back.

use std::path::Path;

use anyhow::anyhow;
use forebay_engine::EngineError;
use forebay_engine::pack::{self, PackReport, RestoreReport};
use forebay_store::{IoKind, StoreError};

use crate::args::PackArgs;
use crate::config;
use crate::failure::{Failure, Outcome};
use crate::interrupt;
use crate::open;
use crate::output;
use crate::pending;
use crate::progress::BytesProgress;
use crate::size;

pub fn run(args: PackArgs) -> Outcome {
    open::check(&args.model)?;
    let io = config::io_kind(args.io);
    if let Some(out) = &args.output {
        may_write(out, args.force)?;
        let report =
            work(&args.model, "packing", |progress| pack::pack(&args.model, out, io, progress))?;
        return if args.json { output::json(&report) } else { tell_packed(&report) };
    }
    let report = restore(&args, io)?;
    if args.json {
        return output::json(&report);
    }
    output::tell!(
        "{}: {} in {} file{}, {:.1} s, {}/s",
        report.path.display(),
        size::format(report.bytes),
        report.files,
        if report.files == 1 { "" } else { "s" },
        report.seconds,
        size::format_rate(report.bytes_per_second)
    );
    Ok(())
}

fn restore(args: &PackArgs, io: IoKind) -> Outcome<RestoreReport> {
    if let Some(out) = &args.to_gguf {
        may_write(out, args.force)?;
        return work(&args.model, "writing", |progress| {
            pack::to_gguf(&args.model, out, io, progress)
        });
    }
    match &args.to_huggingface {
        Some(folder) => work(&args.model, "writing", |progress| {
            pack::to_hugging_face(&args.model, folder, io, progress)
        }),
        None => Err(Failure::Usage("name what to write: -o, --to-gguf or --to-huggingface".into())),
    }
}

fn may_write(out: &Path, force: bool) -> Outcome {
    if out.exists() && !force {
        return Err(anyhow!(
            "{}: exists already: choose another name, or replace it with --force",
            out.display()
        )
        .into());
    }
    pending::probe(out)?;
    Ok(())
}

/// Runs long work with a progress bar; Ctrl-C ends it after it has cleaned up.
pub fn work<T>(
    model: &Path,
    what: &'static str,
    run: impl FnOnce(&mut pack::Progress<'_>) -> Result<T, EngineError>,
) -> Outcome<T> {
    let guard = interrupt::Answer::begin_patient();
    let mut bar = BytesProgress::new(what);
    let done = run(&mut |done, total| {
        bar.update(done, total);
        !guard.interrupted()
    });
    drop(bar);
    match done {
        Ok(report) => Ok(report),
        Err(EngineError::Store(StoreError::Interrupted)) => Err(Failure::Interrupted),
        // These name their file, which may be the output.
        Err(EngineError::Store(error)) => Err(error.into()),
        Err(error) => Err(open::named(error, model)),
    }
}

fn tell_packed(report: &PackReport) -> Outcome {
    let experts = match report.experts {
        0 => String::new(),
        count => format!(", {} of them experts", output::grouped(count as u64)),
    };
    let how = match report.direct_writes {
        true => "",
        false => ", written through the page cache (the file system refuses O_DIRECT)",
    };
    output::tell!(
        "{}: {} in {} blocks{experts}; {:.1} s, {}/s{how}",
        report.path.display(),
        size::format(report.bytes),
        output::grouped(report.blocks as u64),
        report.seconds,
        size::format_rate(report.bytes_per_second)
    );
    Ok(())
}
