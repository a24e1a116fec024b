//! `forebay synth`: a model of a real architecture's exact shape with random weights.

use std::io;
use std::num::NonZero;
use std::path::Path;

use anyhow::anyhow;
use forebay_engine::synth::{self, SynthError, SynthOptions, SynthReport};

use crate::args::SynthArgs;
use crate::failure::{Failure, Outcome};
use crate::interrupt;
use crate::output;
use crate::pending;
use crate::progress::BytesProgress;
use crate::size;

pub fn run(args: SynthArgs) -> Outcome {
    if args.out.exists() && !args.force {
        return Err(anyhow!(
            "{}: exists already: choose another name, or replace it with --force",
            args.out.display()
        )
        .into());
    }
    pending::probe(&args.out)?;
    let report = write(&args)?;
    if args.json {
        return output::json(&report);
    }
    output::tell!(
        "{}: {} with {} layers in {}, {} parameters, {} in {:.1} s, {}/s",
        report.path.display(),
        report.shape,
        report.layers,
        report.quantisation,
        output::grouped(report.parameters),
        size::format(report.bytes),
        report.seconds,
        size::format_rate(report.bytes_per_second)
    );
    Ok(())
}

fn write(args: &SynthArgs) -> Outcome<SynthReport> {
    let options = SynthOptions {
        quantisation: args.quantisation.clone(),
        layers: args.layers.map(|layers| u32::try_from(layers).unwrap_or(u32::MAX)),
        experts_used: args.experts_used,
        seed: args.seed,
        threads: std::thread::available_parallelism().map_or(1, NonZero::get),
        ..SynthOptions::default()
    };
    let guard = interrupt::Answer::begin_patient();
    let mut progress = BytesProgress::new("writing");
    let mut room = None;
    let made = synth::synthesize(&args.arch, &args.out, &options, &mut |done, total| {
        progress.update(done, total);
        let enough = *room.get_or_insert_with(|| room_for(&args.out, total));
        enough && !guard.interrupted()
    });
    drop(progress);
    match made {
        Ok(report) => Ok(report),
        Err(SynthError::Interrupted) if room == Some(false) => Err(anyhow!(
            "{}: the disk has not enough room for this model: choose fewer --layers, a smaller \
             --quantisation, or another disk",
            args.out.display()
        )
        .into()),
        Err(SynthError::Interrupted) => Err(Failure::Interrupted),
        Err(
            error @ (SynthError::UnknownArchitecture { .. }
            | SynthError::UnknownQuantisation { .. }
            | SynthError::Layers { .. }),
        ) => Err(Failure::Usage(error.to_string())),
        Err(error) => Err(error.into()),
    }
}

/// Whether the disk has room, so far as it says.
fn room_for(out: &Path, bytes: u64) -> bool {
    let free = || -> io::Result<u64> {
        let system = rustix::fs::statvfs(pending::parent_of(out))?;
        Ok(system.f_bavail.saturating_mul(system.f_frsize))
    };
    free().map_or(true, |free| free >= bytes)
}
