//! `forebay verify` checks every checksum of a pack.

use anyhow::anyhow;
use forebay_engine::pack::{self, Damage};

use crate::args::VerifyArgs;
use crate::failure::{Failure, Outcome};
use crate::open;
use crate::output::{self, visible};
use crate::size;

use super::pack::{options, work};

pub fn run(args: VerifyArgs) -> Outcome {
    open::check(&args.file)?;
    let options = options(args.io);
    let verify = |progress: &mut pack::Progress<'_>| pack::verify(&args.file, options, progress);
    let report = work(&args.file, "verifying", verify)?;
    if args.json {
        output::json(&report)?;
    }
    if report.damaged_chunks > 0 {
        let mut first = String::new();
        if !args.json {
            for damage in &report.damage {
                output::print(&format!("{}\n", describe(damage)))?;
            }
        }
        if let Some(damage) = report.damage.first() {
            first = format!(", the first {}", describe(damage));
        }
        return Err(Failure::Work(anyhow!(
            "{}: {} of {} chunks are damaged{first}; get the file again",
            args.file.display(),
            report.damaged_chunks,
            report.chunks
        )));
    }
    if !args.json {
        output::tell!(
            "{}: undamaged; {} in {} blocks, {} checksums, {:.1} s, {}/s",
            report.path.display(),
            size::format(report.bytes),
            output::grouped(report.blocks as u64),
            output::grouped(report.chunks),
            report.seconds,
            size::format_rate(report.bytes_per_second)
        );
    }
    Ok(())
}

fn describe(damage: &Damage) -> String {
    let tensors = match damage.tensors.len() {
        0 => "padding".to_owned(),
        1..=4 => damage.tensors.join(", "),
        count => format!("{} and {} more tensors", damage.tensors[..3].join(", "), count - 3),
    };
    let tensors = visible::line(&tensors);
    format!("{} bytes at byte {}, in {} ({tensors})", damage.bytes, damage.offset, damage.block)
}
