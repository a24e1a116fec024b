//! `forebay synth` writes a model with the exact shape of a real architecture and random weights.

use std::num::NonZero;

use forebay_lab::synth::{self, SynthError, SynthOptions, SynthReport};
use forebay_store::OutputFile;

use crate::args::SynthArgs;
use crate::failure::{Failure, Outcome};
use crate::interrupt;
use crate::output;
use crate::outputs;
use crate::progress::BytesProgress;
use crate::size;

pub fn run(args: SynthArgs) -> Outcome {
    if args.json {
        outputs::not_standard("OUT", &args.out, "the JSON document")?;
    }
    let out = outputs::create(&mut outputs::begin(args.force, true)?, &args.out)?;
    let report = write(&args, out)?;
    if args.json {
        return output::json(&report);
    }
    output::tell!(
        "{}: {} with {} layers in {}, {} parameters, {} in {:.1} s, {}/s",
        outputs::shown(&report.path),
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

fn write(args: &SynthArgs, out: OutputFile) -> Outcome<SynthReport> {
    let options = SynthOptions {
        quantisation: args.quantisation.clone(),
        layers: args.layers.map(|layers| u32::try_from(layers).unwrap_or(u32::MAX)),
        experts_used: args.experts_used,
        context: args.context,
        mtp: args.mtp,
        seed: args.seed,
        threads: std::thread::available_parallelism().map_or(1, NonZero::get),
        ..SynthOptions::default()
    };
    let interrupt = interrupt::token();
    let mut progress = BytesProgress::new("writing");
    let made = synth::synthesize(&args.arch, out, &options, &mut |done, total| {
        progress.update(done, total);
        !interrupt.is_requested()
    });
    drop(progress);
    match made {
        Ok(report) => Ok(report),
        Err(
            error @ (SynthError::UnknownArchitecture { .. }
            | SynthError::UnknownQuantisation { .. }
            | SynthError::Layers { .. }
            | SynthError::ExpertsUsed { .. }
            | SynthError::NoExperts { .. }
            | SynthError::NoMtp { .. }),
        ) => Err(Failure::Usage(error.to_string())),
        Err(error) => Err(error.into()),
    }
}
