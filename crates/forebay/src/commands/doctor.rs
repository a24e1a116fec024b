//! `forebay doctor` measures the machine and saves the profile that loads use.

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use forebay_engine::doctor::{
    self, CuFileRates, DoctorReport, DoctorRequest, GpuReport, MachineProfile, PinnedCopyRate,
    QualityState, folder_of,
};
use forebay_engine::load::CuFileRequests;
use forebay_store::{OutputError, OutputFile, Outputs};
use serde::Serialize;

use crate::args::DoctorArgs;
use crate::failure::Outcome;
use crate::interrupt;
use crate::library;
use crate::output::{self, Align};
use crate::size;

#[derive(Serialize)]
struct Document<'a> {
    #[serde(flatten)]
    report: &'a DoctorReport,
    /// Path of the saved profile.
    saved: Option<&'a Path>,
    /// Reason why the profile could not be saved.
    not_saved: Option<String>,
}

/// Runs the command. `models` is the folder of the library, if the user named it.
pub fn run(args: DoctorArgs, models: Option<PathBuf>) -> Outcome {
    let (folder, file) = subject(args.dir, args.file, models)?;
    let measured = file.clone();
    let request = DoctorRequest { folder, file, quick: args.quick, interrupt: interrupt::token() };
    let destination = match args.no_save {
        true => None,
        false => Some(check_destination(&request.folder, measured.as_deref())?),
    };
    let report = doctor::examine(&request, &mut |what| {
        forebay_store::reached(&format!("measuring {what}"));
        if std::io::stderr().is_terminal() {
            output::tell!("measuring: {what}");
        }
    })?;
    let saved = destination
        .map(|path| save(&report.profile, &path, measured.as_deref()).map(|()| path))
        .transpose();
    // Failing to save the profile must not discard minutes of measurements.
    let path = saved.as_ref().ok().and_then(Option::as_deref);
    if args.json {
        let not_saved = saved.as_ref().err().map(|error| format!("{error:#}"));
        output::json(&Document { report: &report, saved: path, not_saved })?;
    } else {
        output::print(&describe(&report, path))?;
        advise(&report.profile);
    }
    saved?;
    Ok(())
}

/// Smallest file that a disk is measured with, in bytes.
const FILE_BYTES_MIN: u64 = 1 << 30;

/// Returns the folder whose disk is measured, and the file to read. Without a folder, these are the library's, and its largest
/// file.
fn subject(
    dir: Option<PathBuf>,
    file: Option<PathBuf>,
    models: Option<PathBuf>,
) -> Outcome<(PathBuf, Option<PathBuf>)> {
    match (dir, &file) {
        (Some(dir), _) => Ok((dir, file)),
        (None, Some(named)) => Ok((folder_of(named).to_owned(), file)),
        (None, None) => {
            let library = library::open(models.clone())?;
            let listing = library.list().unwrap_or_default();
            let entries = listing.entries.into_iter().chain(listing.loose);
            let size = |path: &PathBuf| std::fs::metadata(path).map_or(0, |found| found.len());
            let files = entries.map(|entry| entry.path).filter(|path| path.is_file());
            let files = files.filter(|path| size(path) >= FILE_BYTES_MIN);
            Ok((library::nearest_folder(models)?, files.max_by_key(size)))
        }
    }
}

/// Returns the path for the profile. Writes as much data there as a profile takes and removes it again, so that an
/// unwritable folder or a full disk is detected before minutes of measurements.
fn check_destination(folder: &Path, measured: Option<&Path>) -> anyhow::Result<PathBuf> {
    let path = MachineProfile::path(folder)
        .with_context(|| folder.display().to_string())?
        .context("neither XDG_STATE_HOME nor HOME is set: use --no-save")?;
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).with_context(|| {
            format!(
                "{}: the folder for the profile cannot be made: use --no-save",
                folder.display()
            )
        })?;
    }
    let file = create(&path, measured)
        .map_err(|error| anyhow!("{error:#}; --no-save measures without saving"))?;
    file.write_at(0, &[b' '; PROFILE_BYTES]).with_context(|| {
        format!(
            "{}: the profile cannot be written; --no-save measures without saving",
            path.display()
        )
    })?;
    Ok(path)
}

/// Number of bytes for the test write, larger than any profile.
const PROFILE_BYTES: usize = 32 << 10;

/// Creates the file for the profile. It replaces the previous profile, which is forebay's own file. It must not replace
/// the file that is measured.
fn create(path: &Path, measured: Option<&Path>) -> Result<OutputFile, OutputError> {
    let mut outputs = Outputs::new(true);
    measured.iter().for_each(|file| outputs.protect(file));
    outputs.create(path)
}

fn save(
    profile: &MachineProfile,
    path: &Path,
    measured: Option<&Path>,
) -> Result<(), anyhow::Error> {
    let file = create(path, measured)?;
    file.write_at(0, serde_json::to_string_pretty(profile)?.as_bytes())?;
    Ok(file.commit()?)
}

/// Prints a warning if the quality of the profile is not good, with the consequences.
fn advise(profile: &MachineProfile) {
    let Some(quality) = profile.quality.as_ref().filter(|quality| !quality.is_good()) else {
        return;
    };
    let what = match quality.state {
        QualityState::Busy => "the machine was busy",
        QualityState::Unstable | QualityState::Good => "readings of the same rate disagree",
    };
    output::tell!("warning: {what}: run forebay doctor again when the machine is idle");
}

fn rate(bytes_per_second: f64) -> String {
    format!("{:.2} GB/s", bytes_per_second * 1e-9)
}

fn describe(report: &DoctorReport, saved: Option<&Path>) -> String {
    let machine = &report.machine;
    let mut text = format!(
        "{}, {} processors, Linux {}, {}\n\n",
        machine.cpu,
        machine.processors,
        machine.kernel,
        report.folder.display()
    );
    text.push_str(&disk(report));
    text.push('\n');
    text.push_str(&memory(report));
    text.push('\n');
    text.push_str(&gpu(&report.gpu));
    text.push('\n');
    text.push_str(&paths(report));
    let best = &report.disk.best;
    text.push_str(&format!(
        "\nloads use {} with requests of {}, {} at a time: {}\n",
        best.engine,
        size::format(best.request_bytes as u64),
        best.queue_depth,
        rate(best.bytes_per_second)
    ));
    let places = &report.disk.places;
    let side_by_side = format!(
        "reads into the final memory: {}, alternating with reads into a ring: {}",
        rate(places.in_place_bytes_per_second),
        rate(places.ring_bytes_per_second)
    );
    text.push_str(&match best.staging_bytes {
        0 => format!("{side_by_side}: loads to host memory need no ring\n"),
        bytes => {
            format!(
                "{side_by_side}: loads to host memory use a ring of {}\n",
                size::format(bytes as u64)
            )
        }
    });
    text.push_str(&quality(&report.profile));
    text.push_str(&match saved {
        Some(path) => format!("saved in {}\n", path.display()),
        None => "not saved\n".to_owned(),
    });
    text
}

fn quality(profile: &MachineProfile) -> String {
    let Some(quality) = &profile.quality else { return String::new() };
    let state = match quality.state {
        QualityState::Good => "good: the machine was idle and repeated readings agree",
        QualityState::Busy => "busy",
        QualityState::Unstable => "unstable",
    };
    let reasons = quality.reasons.iter().map(|reason| format!("\n  {reason}"));
    format!("quality of this measurement: {state}{}\n", reasons.collect::<String>())
}

fn disk(report: &DoctorReport) -> String {
    let head = ["disk", "request", "at a time", "rate", "least", "best", "CPU s/GB"];
    let mut rows = vec![head.map(String::from).to_vec()];
    for case in &report.disk.cases {
        rows.push(vec![
            case.engine.clone(),
            size::format(case.request_bytes as u64),
            case.queue_depth.to_string(),
            rate(case.bytes_per_second),
            rate(case.bytes_per_second_min),
            rate(case.bytes_per_second_max),
            format!("{:.3}", case.cpu_seconds_per_gigabyte),
        ]);
    }
    let mut columns = [Align::Right; 7];
    columns[0] = Align::Left;
    let mut text = output::table(&columns, &rows);
    let bursts = &report.disk.bursts;
    if bursts.bursty {
        text.push_str(&format!(
            "this disk bursts to {} and sustains {}: each rate above is a median of several readings\n",
            rate(bursts.burst_bytes_per_second),
            rate(bursts.sustained_bytes_per_second)
        ));
    }
    let small = &report.disk.latency_64kib;
    text.push_str(&format!(
        "latency of single 64 KiB reads: median {:.0} us, p99 {:.0} us, of {} reads\n",
        small.p50_seconds * 1e6,
        small.p99_seconds * 1e6,
        small.reads
    ));
    text
}

fn memory(report: &DoctorReport) -> String {
    let copies = report.disk.copies.iter();
    let copies: Vec<String> =
        copies.map(|copy| format!("{} x {}", copy.threads, rate(copy.bytes_per_second))).collect();
    let compute = &report.compute;
    let kernels = compute.kernels.iter();
    let kernels: Vec<String> = kernels
        .map(|kernel| format!("{} {:.1}", kernel.name, kernel.bytes_per_second * 1e-9))
        .collect();
    let (one, two) = kernels.split_at(kernels.len().div_ceil(2));
    let decoders = compute.decoders.iter();
    let decoders: Vec<String> = decoders
        .map(|rate| format!("{} {:.1}", rate.codec, rate.bytes_per_second * 1e-9))
        .collect();
    let lines = [
        ("page cache", format!("threads x rate: {}", copies.join(", "))),
        (
            "memory",
            format!(
                "read {}, copy {} ({} threads, {})",
                rate(compute.memory.read_bytes_per_second),
                rate(compute.memory.copy_bytes_per_second),
                compute.threads,
                compute.isa
            ),
        ),
        ("kernels", format!("GB/s of weights, one token: {}", one.join(", "))),
        ("", two.join(", ")),
        ("decoders", format!("GB/s after decoding, one core: {}", decoders.join(", "))),
    ];
    let rows: Vec<Vec<String>> =
        lines.into_iter().map(|(key, value)| vec![key.to_owned(), value]).collect();
    output::table(&[Align::Left, Align::Left], &rows)
}

fn gpu(report: &GpuReport) -> String {
    let Some(gpu) = &report.first else {
        return format!("GPU: no usable GPU: {}\n", report.why);
    };
    let (major, minor) = gpu.compute_capability;
    let mut about = format!(
        "{}, {}, compute capability {major}.{minor}, {} multiprocessors",
        gpu.name,
        size::format(gpu.memory_bytes),
        gpu.multiprocessors
    );
    if report.count > 1 {
        about.push_str(&format!(" (the first of {})", report.count));
    }
    let unknown = || "unknown".to_owned();
    let link = match &gpu.pcie {
        Some(link) => format!("{} x {} at {}", link.lanes, link.speed, link.address),
        None => unknown(),
    };
    let copies = |rate_of: &dyn Fn(&PinnedCopyRate) -> f64| {
        let copies = gpu
            .pinned_copies
            .iter()
            .map(|copy| format!("{} {:.1}", size::format(copy.bytes as u64), rate_of(copy) * 1e-9));
        format!("GB/s of pinned copies by size: {}", copies.collect::<Vec<_>>().join(", "))
    };
    let beside = gpu.beside_cpu.map(|both| {
        let (copy, cpu) = (both.copy_bytes_per_second, both.cpu_bytes_per_second);
        let both = format!("{} to the GPU while the CPU goes through weights at", rate(copy));
        ("beside CPU", format!("{both} {}", rate(cpu)))
    });
    let mut lines = vec![
        ("GPU", about),
        ("driver", gpu.driver.clone().unwrap_or_else(unknown)),
        ("PCIe", link),
        ("to the GPU", copies(&|copy| copy.to_device_bytes_per_second)),
        ("from the GPU", copies(&|copy| copy.from_device_bytes_per_second)),
        ("not pinned", format!("{} to the GPU", rate(gpu.pageable_copy_bytes_per_second))),
        (
            "its memory",
            format!(
                "read {}, copy {}",
                rate(gpu.memory_read_bytes_per_second),
                rate(gpu.memory_copy_bytes_per_second)
            ),
        ),
    ];
    lines.extend(beside);
    let kernels: Vec<String> = gpu
        .kernels
        .iter()
        .map(|kernel| format!("{} {:.0}", kernel.name, kernel.bytes_per_second * 1e-9))
        .collect();
    let (one, two) = kernels.split_at(kernels.len().div_ceil(2));
    lines.push(("its kernels", format!("GB/s of weights, one token: {}", one.join(", "))));
    lines.push(("", two.join(", ")));
    match &gpu.cufile {
        Some(rates) => lines.extend(cufile(rates)),
        None => lines.push(("cuFile", format!("not measured: {}", report.why_not_cufile))),
    }
    let rows: Vec<Vec<String>> =
        lines.into_iter().map(|(key, value)| vec![key.to_owned(), value]).collect();
    output::table(&[Align::Left, Align::Left], &rows)
}

/// Compares cuFile with the ring that loads use without it.
fn cufile(rates: &CuFileRates) -> [(&'static str, String); 2] {
    let version = rates.version.as_ref().map_or_else(String::new, |version| format!("{version}, "));
    let cases: Vec<String> = rates
        .cases
        .iter()
        .map(|case| {
            let CuFileRequests { request_bytes, threads } = case.requests;
            let request = size::format(request_bytes as u64);
            format!("{threads} x {request} {:.2}", case.bytes_per_second * 1e-9)
        })
        .collect();
    let best = rates.best.bytes_per_second;
    let against = format!(
        "{} from disk to GPU, the ring {}: loads use {} (GB/s by threads x request: {})",
        rate(best),
        rate(rates.ring_bytes_per_second),
        if rates.wins() { "cuFile" } else { "the ring" },
        cases.join(", ")
    );
    [("cuFile", format!("{version}{}", rates.mode)), ("", against)]
}

fn paths(report: &DoctorReport) -> String {
    let row = |path: &doctor::IoPath| {
        let works = if path.works { "yes" } else { "no" };
        vec![path.name.to_owned(), works.to_owned(), path.about.clone()]
    };
    let rows: Vec<Vec<String>> = report.paths.iter().map(row).collect();
    output::table(&[Align::Left, Align::Left, Align::Left], &rows)
}
