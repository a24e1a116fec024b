//! `forebay load` loads all weights into the memory of the host or of a GPU, and compares the rate with the limit of
//! the path.

use forebay_engine::load::LoadError;
use forebay_engine::load::{
    self, CuFileUse, DecodedBy, DeviceReport, DeviceRequest, LoadLimit, LoadReport, LoadRequest,
    LoadRun,
};
use forebay_store::IoKind;

use crate::args::{Device, LoadArgs, LoadIoArg};
use crate::failure::{Failure, Outcome, usage};
use crate::interrupt;
use crate::open;
use crate::output::{self, Align};
use crate::outputs;
use crate::progress::BytesProgress;
use crate::size;
use crate::tracing_file::TracingFile;

pub fn run(args: LoadArgs) -> Outcome {
    let device = device(&args)?;
    open::check(&args.model)?;
    let mut outputs = outputs::begin(args.tracing.force, args.tracing.trace_io.is_some())?;
    outputs::protect_model(&mut outputs, &args.model);
    let tracing = TracingFile::create(args.tracing.trace_io.as_deref(), &mut outputs)?;
    let request = LoadRequest {
        io: io_kind(args.io),
        cold: args.cold,
        limit: !args.no_limit,
        repeat: args.repeat,
        verify: !args.no_verify,
        decode: args.decode,
        device,
        recorder: tracing.recorder().cloned(),
        interrupt: interrupt::token(),
    };
    let mut progress = BytesProgress::new("reading weights");
    let report = load::load(&args.model, &request, &mut |done, total| progress.update(done, total));
    drop(progress);
    let mut report = report.map_err(|error| match error {
        LoadError::Option(_) => Failure::Usage(error.to_string()),
        error => open::named(error, &args.model),
    })?;
    if let Some(traced) = report.traced.take() {
        tracing.write(&traced, "load", None)?;
    }
    if args.json {
        return output::json(&report);
    }
    output::print(&describe(&report))
}

/// Returns the read engine that is used where cuFile is not.
fn io_kind(io: LoadIoArg) -> IoKind {
    match io {
        LoadIoArg::Auto | LoadIoArg::Cufile => IoKind::Auto,
        LoadIoArg::Uring => IoKind::Uring,
        LoadIoArg::Pread => IoKind::Pread,
        LoadIoArg::Mmap => IoKind::Mmap,
    }
}

/// Returns the GPU to load to, or `None` for host memory.
fn device(args: &LoadArgs) -> Outcome<Option<DeviceRequest>> {
    let cufile = match args.io {
        LoadIoArg::Auto => CuFileUse::WhereFaster,
        LoadIoArg::Cufile => CuFileUse::Always,
        LoadIoArg::Uring | LoadIoArg::Pread | LoadIoArg::Mmap => CuFileUse::Never,
    };
    let ordinal = match args.device {
        Device::Cpu | Device::Auto if cufile == CuFileUse::Always => {
            return usage("--io cufile reads to a GPU: give --device cuda, too");
        }
        Device::Cpu if args.vram.is_some() => {
            return usage("--vram bounds the memory of a GPU: give --device cuda, too");
        }
        Device::Cpu if args.check => {
            return usage("--check reads weights back from a GPU: give --device cuda, too");
        }
        Device::Cpu => return Ok(None),
        Device::Auto => {
            return usage("--device auto is not supported here: use cpu, cuda or cuda:N");
        }
        Device::Cuda(ordinal) => ordinal.unwrap_or(0) as usize,
    };
    let (vram_bytes, check) = (args.vram, args.check);
    Ok(Some(DeviceRequest { vram_bytes, check, cufile, ..DeviceRequest::new(ordinal) }))
}

fn by_cufile(report: &LoadReport) -> bool {
    report.engine.name == "cufile"
}

/// Formats a rate in decimal units, in which disks and links are sold.
fn rate(bytes_per_second: f64) -> String {
    format!("{:.2} GB/s", bytes_per_second * 1e-9)
}

fn describe(report: &LoadReport) -> String {
    let head = ["run", "seconds", "rate", "of the limit", "from disk", "from cache", "CPU s/GB"];
    let mut rows = vec![head.map(String::from).to_vec()];
    for (index, run) in report.runs.iter().enumerate() {
        rows.push(row(index, run));
    }
    let mut columns = [Align::Right; 7];
    columns[0] = Align::Left;
    let mut text = output::table(&columns, &rows);
    text.push_str(&about(report));
    text
}

fn row(index: usize, run: &LoadRun) -> Vec<String> {
    let statistics = &run.statistics;
    let memory = if run.memory_was_resident { "memory in place" } else { "new memory" };
    vec![
        format!("{}, {memory}", index + 1),
        format!("{:.3}", statistics.seconds),
        rate(run.bytes_per_second),
        run.share_of_limit.map_or_else(|| "-".into(), |share| format!("{:.0} %", 100.0 * share)),
        size::format(statistics.engine_stored_bytes),
        size::format(statistics.cached_stored_bytes),
        format!("{:.3}", run.cpu_seconds_per_gigabyte),
    ]
}

fn about(report: &LoadReport) -> String {
    let engine = &report.engine;
    let path = match (engine.direct, engine.registered_buffers) {
        _ if by_cufile(report) => "past the page cache",
        (true, true) => "past the page cache, into registered memory",
        (true, false) => "past the page cache",
        (false, _) => "through the page cache",
    };
    let requests = size::format(report.request_bytes as u64);
    let mut read_by = format!("{}, {path}, requests of {requests}", engine.name);
    // A mapping has as many requests in flight as threads, and its own description says so.
    if engine.name != "mmap" {
        read_by.push_str(&format!(", {} at a time", report.queue_depth));
    }
    let mut lines = vec![("read by", read_by)];
    let staging = report.runs.iter().map(|run| run.statistics.staging_bytes).max().unwrap_or(0);
    lines.push(("chosen by", report.chosen_by.clone()));
    if !engine.why.is_empty() {
        // cuFile's text describes how it works. Other engines' text says why a faster one is not used.
        let about = if by_cufile(report) { "how" } else { "because" };
        lines.push((about, engine.why.clone()));
    }
    let limit = &report.limit;
    lines.extend(disk(limit));
    if let (Some(copy), Some(threads)) = (limit.copy_bytes_per_second, limit.copy_threads) {
        let plural = if threads == 1 { "" } else { "s" };
        lines.push(("this page cache", format!("{} with {threads} thread{plural}", rate(copy))));
    }
    if let Some(copy) = limit.device_bytes_per_second {
        lines.push(("this GPU", format!("{} from pinned memory", rate(copy))));
    }
    if !limit.why.is_empty() {
        lines.push(("limit", limit.why.clone()));
    }
    if report.runs.iter().any(|run| run.faster_than_readings) {
        let note = "a run that is faster than the readings beside it is its own limit: this disk's rate varies";
        lines.push(("note", note.to_owned()));
    }
    let weights = size::format(report.weights_bytes);
    match &report.device {
        None => {
            let memory = format!("{weights} of weights, {} of staging", size::format(staging));
            lines.push(("memory", memory));
        }
        Some(device) => lines.extend(about_device(device, &weights, report)),
    }
    let rows: Vec<Vec<String>> =
        lines.into_iter().map(|(key, value)| vec![key.to_owned(), value]).collect();
    output::table(&[Align::Left, Align::Left], &rows)
}

/// Describes the rate of plain reads from the disk, and the part that runs are compared with.
fn disk(limit: &LoadLimit) -> Vec<(&'static str, String)> {
    let Some(best) = limit.disk.as_ref().map(|disk| disk.bytes_per_second) else {
        return Vec::new();
    };
    let least = limit.disk_bytes_per_second_min.unwrap_or(best);
    let readings = limit.disk_readings.len();
    let longest = limit.disk_readings.iter().map(|reading| reading.seconds).fold(0.0, f64::max);
    match limit.disk_sustained_bytes_per_second {
        Some(sustained) => vec![
            (
                "this disk",
                format!(
                    "{} sustained: the median of {readings} plain readings of up to {longest:.1} s (least {}, best {})",
                    rate(sustained),
                    rate(least),
                    rate(best)
                ),
            ),
            ("", "each run is compared with the readings directly before and after it".to_owned()),
        ],
        None => vec![(
            "this disk",
            format!(
                "{} at best in {longest:.1} s, which may be a burst (least {}; --cold reads as long as it loads)",
                rate(best),
                rate(least)
            ),
        )],
    }
}

fn about_device(
    device: &DeviceReport,
    weights: &str,
    report: &LoadReport,
) -> Vec<(&'static str, String)> {
    let resident = report.peak_resident_bytes.map_or_else(|| "-".into(), size::format);
    let (major, minor) = device.compute_capability;
    let mut lines = vec![
        ("GPU", format!("{}: {}, compute capability {major}.{minor}", device.ordinal, device.name)),
        (
            "its memory",
            format!(
                "{weights} of weights; {} of {} in use, {} without them",
                size::format(device.used_bytes),
                size::format(device.memory_bytes),
                size::format(device.used_before_bytes)
            ),
        ),
        (
            "host memory",
            match by_cufile(report) {
                true => format!("cuFile's own, at most {resident} resident"),
                false => {
                    let pinned = size::format(device.pinned_bytes);
                    format!("{pinned} pinned, at most {resident} resident")
                }
            },
        ),
        (
            "beforehand",
            match by_cufile(report) {
                true => format!(
                    "GPU opened in {:.3} s, cuFile and memory in {:.3} s",
                    device.open_seconds, device.pin_seconds
                ),
                false => format!(
                    "GPU opened in {:.3} s, memory pinned in {:.3} s, mapped in {:.3} s",
                    device.open_seconds, device.pin_seconds, device.map_seconds
                ),
            },
        ),
    ];
    if !device.pool_is_elastic && !by_cufile(report) {
        lines.push(("mapped", "not at all: the driver gives whole allocations only".to_owned()));
    }
    if let Some(by) = device.decoded_by {
        let by = match by {
            DecodedBy::Gpu => "the GPU, as their bytes in the file arrive",
            DecodedBy::Cpu => "the CPU",
        };
        lines.push(("decoded by", by.to_owned()));
    }
    if let Some(read_back) = &device.read_back {
        let bytes = size::format(read_back.bytes);
        lines.push(("read back", format!("{bytes}, equal to the files")));
    }
    lines
}
