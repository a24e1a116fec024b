//! `forebay trace-io` shows how a model was read, in figures and as a page.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::Path;

use anyhow::Context as _;
use forebay_engine::doctor::{MachineProfile, folder_of};
use forebay_lab::trace_io::{self, Limit, Quantiles, Report, SizeClass};
use forebay_store::{OutputError, OutputFile, OutputStream};

use crate::args::TraceIoArgs;
use crate::failure::Outcome;
use crate::output::{self, Align, grouped};
use crate::outputs;
use crate::size::{format as bytes, format_rate};
use crate::text_input;

pub fn run(args: TraceIoArgs) -> Outcome {
    let named = [("--html", args.html.as_deref()), ("--chrome", args.chrome.as_deref())];
    let to_standard = named.iter().any(|(_, path)| path.is_some_and(outputs::is_standard));
    let standard = if args.json { "the JSON document" } else { "the page" };
    for (option, path) in named {
        // At most one document can go to standard output.
        let taken = args.json
            || option == "--chrome" && args.html.as_deref().is_some_and(outputs::is_standard);
        if let (true, Some(path)) = (taken, path) {
            outputs::not_standard(option, path, standard)?;
        }
    }
    let mut outputs = outputs::begin(args.force, named.iter().any(|(_, path)| path.is_some()))?;
    outputs.protect(&args.file);
    let [page, events] = named.map(|(_, path)| {
        let create = |path| Ok::<_, OutputError>((outputs::create(&mut outputs, path)?, path));
        path.map(create).transpose()
    });
    let (page, events) = (page?, events?);
    let limit = limit(args.limit, &args.file)?;
    let named = || args.file.display().to_string();
    let trace = trace_io::open(&args.file).with_context(named)?;
    let report = trace_io::analyse(&trace, limit);
    if let Some((file, path)) = page {
        let page = trace_io::page(&trace, &report);
        write(file, path, "in a browser", |out| out.write_all(page.as_bytes()))?;
    }
    if let Some((file, path)) = events {
        write(file, path, "at https://ui.perfetto.dev", |out| trace_io::write_chrome(out, &trace))?;
    }
    match args.json {
        true => output::json(&report),
        false if to_standard => Ok(()),
        false => output::print(&text(&report)),
    }
}

/// Writes an output, and prints to standard error where to open it.
fn write(
    file: OutputFile,
    path: &Path,
    viewer: &str,
    fill: impl FnOnce(&mut OutputStream) -> io::Result<()>,
) -> Outcome {
    let mut out = file.into_stream();
    fill(&mut out).with_context(|| format!("{}: cannot be written", path.display()))?;
    out.commit()?;
    if !outputs::is_standard(path) {
        output::tell!("{}: open it {viewer}", path.display());
    }
    Ok(())
}

/// Returns the limit from the command line, or else the rate of the disk that the trace is on, from the machine profile.
fn limit(asked: Option<u64>, trace: &Path) -> anyhow::Result<Option<Limit>> {
    if let Some(rate) = asked {
        let source = "given with --limit".to_owned();
        return Ok(Some(Limit { bytes_per_second: rate as f64, source, is_given: true }));
    }
    let Ok(profile) = MachineProfile::of_folder(folder_of(trace)) else { return Ok(None) };
    let rate = profile.read.bytes_per_second;
    let source = "the disk rate of this machine's profile".to_owned();
    Ok((rate.is_finite() && rate > 0.0).then_some(Limit {
        bytes_per_second: rate,
        source,
        is_given: false,
    }))
}

fn text(report: &Report) -> String {
    let mut text = summary(report);
    text.push('\n');
    text.push_str(&components(report));
    text.push('\n');
    text.push_str(&reasons(report));
    text.push('\n');
    text.push_str(&sizes("request size", &report.sizes));
    for reason in report.reasons.iter().filter(|reason| reason.sizes.len() > 1) {
        text.push('\n');
        // Keys and values are also written.
        let title = match reason.why.starts_with("kv-") {
            true => reason.why.to_owned(),
            false => format!("{} reads", reason.why),
        };
        text.push_str(&sizes(&title, &reason.sizes));
    }
    text
}

fn summary(report: &Report) -> String {
    let used = &report.utilisation;
    let stalls = &report.stalls;
    let mut lines = vec![
        ("model", format!("{}, {}", report.model, report.architecture)),
        ("command", format!("{}, {} recorded", report.command, time(report.seconds))),
        ("engine", engine(report)),
        ("read", format!("{} in {} requests", bytes(report.bytes), grouped(report.requests))),
        (
            "rate",
            format!(
                "{}/s while the disk was busy, {:.0} % of {}/s ({})",
                format_rate(used.busy_bytes_per_second),
                100.0 * used.busy_share_of_limit,
                format_rate(used.limit.bytes_per_second),
                used.limit.source
            ),
        ),
        (
            "busy",
            format!(
                "{} of {}, with {:.1} requests at a time, at most {}",
                time(used.busy_seconds),
                time(report.seconds),
                used.depth_mean,
                used.depth_max
            ),
        ),
        (
            "stalls",
            format!(
                "{} waits, {} in all ({:.1} % of the time), {} of it on demand; p99 {}, longest {}",
                grouped(stalls.count),
                time(stalls.seconds),
                100.0 * stalls.share,
                time(stalls.demand_seconds),
                time(stalls.length.p99_seconds),
                time(stalls.length.max_seconds)
            ),
        ),
    ];
    if report.kv_read_bytes + report.kv_written_bytes > 0 {
        let (read, written) = (bytes(report.kv_read_bytes), bytes(report.kv_written_bytes));
        lines.push(("kv", format!("{read} of keys and values read, {written} written")));
    }
    lines.extend(remarks(report));
    let mut text = String::new();
    for (name, line) in lines {
        let _ = writeln!(text, "{name:>8}  {line}");
    }
    text
}

/// Returns the lines that only some traces have.
fn remarks(report: &Report) -> Vec<(&'static str, String)> {
    let mut lines = Vec::new();
    if let Some(pages) = report.pages {
        lines.push((
            "pages",
            format!(
                "{} copied, {} of them absent before; {} major faults",
                grouped(pages.pages),
                grouped(pages.absent_pages),
                grouped(pages.major_faults)
            ),
        ));
    }
    if report.repeated + report.failed + report.lost > 0 {
        lines.push((
            "trouble",
            format!(
                "{} failed, {} without an answer, {} repeated or continued another",
                grouped(report.failed),
                grouped(report.lost),
                grouped(report.repeated)
            ),
        ));
    }
    if report.dropped_requests > 0 {
        lines.push((
            "dropped",
            format!(
                "{} requests of {} are missing: the recorder was full",
                grouped(report.dropped_requests),
                bytes(report.dropped_bytes)
            ),
        ));
    }
    lines
}

fn engine(report: &Report) -> String {
    let path = if report.direct { "O_DIRECT" } else { "through the page cache" };
    let why = &report.engine_why;
    match why.is_empty() {
        true => format!("{}, {path}", report.engine),
        false => format!("{}, {path} ({why})", report.engine),
    }
}

fn components(report: &Report) -> String {
    let head = ["part", "pattern", "sequential", "requests", "mean size", "bytes", "p50", "p99"];
    let mut rows = vec![head.map(String::from).to_vec()];
    for part in &report.components {
        let [p50, p99, _] = latencies(&part.latency);
        rows.push(vec![
            part.component.name().into(),
            part.pattern.name().into(),
            format!("{:.0} %", 100.0 * part.sequential_share),
            grouped(part.requests),
            format_rate(part.mean_request_bytes),
            bytes(part.bytes),
            p50,
            p99,
        ]);
    }
    let right = Align::Right;
    let columns = [Align::Left, Align::Left, right, right, right, right, right, right];
    output::table(&columns, &rows)
}

fn reasons(report: &Report) -> String {
    let head = ["why", "requests", "bytes", "p50", "p99", "longest"];
    let mut rows = vec![head.map(String::from).to_vec()];
    for reason in &report.reasons {
        let [p50, p99, longest] = latencies(&reason.latency);
        rows.push(vec![
            reason.why.into(),
            grouped(reason.requests),
            bytes(reason.bytes),
            p50,
            p99,
            longest,
        ]);
    }
    table(&rows)
}

fn sizes(title: &str, classes: &[SizeClass]) -> String {
    let head = [title, "requests", "bytes", "p50", "p99", "longest"];
    let mut rows = vec![head.map(String::from).to_vec()];
    for class in classes {
        let [p50, p99, longest] = latencies(&class.latency);
        rows.push(vec![
            format!("from {}", bytes(class.from_bytes)),
            grouped(class.requests),
            bytes(class.bytes),
            p50,
            p99,
            longest,
        ]);
    }
    table(&rows)
}

fn table(rows: &[Vec<String>]) -> String {
    let mut columns = [Align::Right; 6];
    columns[0] = Align::Left;
    output::table(&columns, rows)
}

fn latencies(latency: &Quantiles) -> [String; 3] {
    [time(latency.p50_seconds), time(latency.p99_seconds), time(latency.max_seconds)]
}

fn time(seconds: f64) -> String {
    match seconds {
        s if s <= 0.0 => "0 s".into(),
        s if s < 1e-3 => format!("{:.0} us", s * 1e6),
        s if s < 1.0 => format!("{:.2} ms", s * 1e3),
        s => format!("{s:.2} s"),
    }
}
