//! `forebay pack` converts a model into the container made for streaming, and back.

use std::path::Path;

use forebay_engine::pack::{self, Codec, PackError, PackOptions, PackReport, RestoreReport, Saved};
use forebay_store::{OutputFile, Outputs};

use crate::args::{CodecArg, IoArg, PackArgs};
use crate::config;
use crate::failure::{Failure, Outcome};
use crate::interrupt;
use crate::open;
use crate::output;
use crate::outputs;
use crate::progress::BytesProgress;
use crate::size;

pub fn run(args: PackArgs) -> Outcome {
    open::check(&args.model)?;
    let codec = match args.codec {
        CodecArg::Auto => Codec::Auto,
        CodecArg::None => Codec::None,
        CodecArg::Compact => Codec::Compact,
        CodecArg::Exponents => Codec::Exponents,
        CodecArg::Zstd => Codec::Zstd,
        CodecArg::Gdeflate => Codec::Gdeflate,
    };
    let options = PackOptions { codec, ..options(args.io) };
    let mut outputs = Outputs::new(args.force);
    outputs::protect_model(&mut outputs, &args.model);
    if let Some(out) = &args.output {
        let out = create(&mut outputs, out, &args)?;
        let report = work(&args.model, "packing", |progress| {
            pack::pack(&args.model, out, options, progress)
        })?;
        return if args.json { output::json(&report) } else { tell_packed(&report) };
    }
    let report = restore(&args, outputs, options)?;
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

fn restore(args: &PackArgs, mut outputs: Outputs, options: PackOptions) -> Outcome<RestoreReport> {
    if let Some(out) = &args.to_gguf {
        let out = create(&mut outputs, out, args)?;
        return work(&args.model, "writing", |progress| {
            pack::to_gguf(&args.model, out, options, progress)
        });
    }
    match &args.to_huggingface {
        Some(folder) => {
            outputs.check_folder(folder)?;
            work(&args.model, "writing", |progress| {
                pack::to_hugging_face(&args.model, folder, options, progress)
            })
        }
        None => Err(Failure::Usage("name what to write: -o, --to-gguf or --to-huggingface".into())),
    }
}

/// Creates an output that can be written in any order: packs and GGUF files are not written front to back.
fn create(outputs: &mut Outputs, out: &Path, args: &PackArgs) -> Outcome<OutputFile> {
    if args.json {
        outputs::not_standard("-o", out, "the JSON document")?;
    }
    Ok(outputs::create(outputs, out)?.seekable()?)
}

/// Returns the options for reading packs. Ctrl-C interrupts the reads.
pub fn options(io: IoArg) -> PackOptions {
    PackOptions { io: config::io_kind(io), interrupt: interrupt::token(), ..PackOptions::default() }
}

/// Runs long work with a progress bar.
pub fn work<T>(
    model: &Path,
    what: &'static str,
    run: impl FnOnce(&mut pack::Progress<'_>) -> Result<T, PackError>,
) -> Outcome<T> {
    let mut bar = BytesProgress::new(what);
    let done = run(&mut |done, total| {
        bar.update(done, total);
        true
    });
    drop(bar);
    match done {
        Ok(report) => Ok(report),
        Err(PackError::Output(error)) => Err(error.into()),
        // These errors name their own file, which may be the output.
        Err(PackError::Store(error)) => Err(error.into()),
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
    if !report.saved.is_empty() {
        let ratios = |of: &dyn Fn(&Saved) -> u64| {
            let ratio = |saved: &Saved| {
                let ratio = saved.source_bytes as f64 / of(saved).max(1) as f64;
                (ratio > 1.0).then(|| format!("{} {ratio:.2}", saved.kind))
            };
            report.saved.iter().filter_map(ratio).collect::<Vec<_>>().join(", ")
        };
        let saved: u64 = report.saved.iter().map(|of| of.source_bytes - of.bytes).sum();
        let in_pack = ratios(&|of| of.bytes);
        output::tell!("{} smaller than the weights; ratios: {in_pack}", size::format(saved));
        let in_memory = ratios(&|of| of.memory_bytes);
        if !in_memory.is_empty() {
            output::tell!("ratios in memory, as compact BF16: {in_memory}");
        }
    }
    if report.left_plain > 0 {
        output::tell!(
            "left as BF16: {}, because exponents in them, or in others of their layer, lie too far apart",
            output::counted(report.left_plain, "tensor")
        );
    }
    Ok(())
}
