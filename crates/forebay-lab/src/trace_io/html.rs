//! The HTML page of a trace: one file without network access, for light and dark colour schemes.

use std::collections::BTreeSet;

use serde_json::json;

use super::blocks::Component;
use super::format::Trace;
use super::report::{Quantiles, Report};
use super::timeline;
use crate::page::{
    Document, Script, bytes, count, escape, fill, percent, script_json, short_name, table, time,
};

/// Largest number of points in the map of offsets. With more points, the map gets a coarser grid.
const POINTS_MAX: usize = 40_000;
/// Columns and rows of the finest map.
const FINEST_GRID: (u32, u32) = (960, 480);

/// Returns the page of a trace. `report` is its analysis.
pub fn page(trace: &Trace, report: &Report) -> String {
    let title = format!("I/O trace of {}", short_name(&report.model));
    let parts = [("@TILES@", tiles(report)), ("@TABLES@", tables(report))];
    let document = Document {
        title: &title,
        style: "",
        head: head(report),
        body: fill(include_str!("page.html"), &parts),
        notes: notes(report),
        script: Some(Script { program: include_str!("page.js"), data: data(trace, report) }),
    };
    document.html()
}

fn head(report: &Report) -> String {
    let mut facts = vec![
        format!("forebay {}", report.command),
        report.architecture.clone(),
        match report.direct {
            true => format!("{}, past the page cache", report.engine),
            false => format!("{}, through the page cache", report.engine),
        },
        time(report.seconds),
    ];
    facts.retain(|fact| !fact.is_empty());
    let facts: Vec<String> =
        facts.iter().map(|fact| format!("<span>{}</span>", escape(fact))).collect();
    format!(
        "<p class=\"kicker\">I/O trace</p><h1>{}</h1><p class=\"facts\">{}</p>",
        escape(short_name(&report.model)),
        facts.join("")
    )
}

fn tiles(report: &Report) -> String {
    let use_ = &report.utilisation;
    let stalls = &report.stalls;
    let demand = report.reasons.iter().find(|reason| reason.why == "demand");
    let busy = if report.seconds > 0.0 { use_.busy_seconds / report.seconds } else { 0.0 };
    let mut tiles = vec![
        ("read", bytes(report.bytes as f64), format!("in {} requests", count(report.requests))),
        (
            "rate while reading",
            format!("{}/s", bytes(use_.busy_bytes_per_second)),
            format!("{} of the limit", percent(use_.busy_share_of_limit)),
        ),
        (
            "disk busy",
            percent(busy),
            format!("{:.1} requests at a time, at most {}", use_.depth_mean, use_.depth_max),
        ),
        (
            "computation waited",
            percent(stalls.share),
            format!("{} in {} waits", time(stalls.seconds), count(stalls.count)),
        ),
    ];
    tiles.push(match demand {
        Some(reason) => (
            "demand latency, p50",
            time(reason.latency.p50_seconds),
            format!("p99 {}", time(reason.latency.p99_seconds)),
        ),
        None => ("demand latency", "–".to_owned(), "no demand reads".to_owned()),
    });
    if report.kv_read_bytes + report.kv_written_bytes > 0 {
        tiles.push((
            "keys and values read",
            bytes(report.kv_read_bytes as f64),
            format!("{} written", bytes(report.kv_written_bytes as f64)),
        ));
    }
    if let Some(pages) = report.pages {
        tiles.push((
            "pages absent",
            percent(pages.absent_pages as f64 / pages.pages.max(1) as f64),
            format!("{} major faults", count(pages.major_faults)),
        ));
    }
    let tile = |(name, figure, more): (&str, String, String)| {
        format!(
            "<div class=\"tile\"><h3>{}</h3><b>{}</b><small>{}</small></div>",
            escape(name),
            escape(&figure),
            escape(&more)
        )
    };
    tiles.into_iter().map(tile).collect()
}

fn tables(report: &Report) -> String {
    let mut html = String::new();
    let kv = report.kv_read_bytes + report.kv_written_bytes;
    let total = (report.bytes + kv).max(1) as f64;
    let with_bar = |part: u64, class: &str| {
        let share = 100.0 * part as f64 / total;
        let figure = bytes(part as f64);
        // A narrower bar would be a speck.
        if share < 1.0 {
            return figure;
        }
        format!(
            "<span class=\"barred\">{figure}<i class=\"{class}\" style=\"width:{share:.1}%\"></i></span>"
        )
    };
    let figures = |latency: &Quantiles| [time(latency.p50_seconds), time(latency.p99_seconds)];
    let mut rows = Vec::new();
    for part in &report.components {
        let [p50, p99] = figures(&part.latency);
        let name = part.component.name();
        rows.push(vec![
            format!("<i class=\"dot c-{name}\"></i>{name}"),
            format!(
                "<span class=\"chip {0}\" title=\"{1} begin where an earlier one ended\">{0}</span>",
                part.pattern.name(),
                percent(part.sequential_share)
            ),
            percent(part.sequential_share),
            count(part.requests),
            bytes(part.mean_request_bytes),
            with_bar(part.bytes, &format!("c-{name}")),
            p50,
            p99,
        ]);
    }
    let head = ["part", "pattern", "sequential", "requests", "mean size", "bytes", "p50", "p99"];
    table(&mut html, "Parts of the model", &head, 2, &rows);

    rows.clear();
    for reason in &report.reasons {
        let [p50, p99] = figures(&reason.latency);
        rows.push(vec![
            format!("<i class=\"dot w-{0}\"></i>{0}", reason.why),
            count(reason.requests),
            with_bar(reason.bytes, &format!("w-{}", reason.why)),
            p50,
            p99,
            time(reason.latency.max_seconds),
        ]);
    }
    let head = ["why", "requests", "bytes", "p50", "p99", "longest"];
    table(&mut html, "Why it was read or written", &head, 1, &rows);

    rows.clear();
    for class in &report.sizes {
        let [p50, p99] = figures(&class.latency);
        rows.push(vec![
            bytes(class.from_bytes as f64),
            count(class.requests),
            with_bar(class.bytes, "plain"),
            p50,
            p99,
        ]);
    }
    table(&mut html, "Request sizes", &["from", "requests", "bytes", "p50", "p99"], 1, &rows);
    html
}

fn notes(report: &Report) -> String {
    let limit = &report.utilisation.limit;
    let mut notes = vec![format!(
        "The limit is {}/s: {}. Busy is the time with at least one request at the disk; small reads \
         through the page cache are counted apart.",
        bytes(limit.bytes_per_second),
        limit.source
    )];
    if !report.engine_why.is_empty() {
        notes.push(format!("{}: {}.", report.engine, report.engine_why));
    }
    if report.failed + report.lost + report.repeated > 0 {
        notes.push(format!(
            "{} requests failed, {} had no answer, {} repeated or continued another one.",
            count(report.failed),
            count(report.lost),
            count(report.repeated)
        ));
    }
    if report.dropped_requests > 0 {
        notes.push(format!(
            "The recorder was full: {} requests of {} are missing here.",
            count(report.dropped_requests),
            bytes(report.dropped_bytes as f64)
        ));
    }
    notes.iter().map(|note| format!("<p>{}</p>", escape(note))).collect()
}

fn data(trace: &Trace, report: &Report) -> String {
    let mut grid = FINEST_GRID;
    let mut points = map(trace, report.seconds, grid);
    while points.iter().map(|(_, cells)| cells.len()).sum::<usize>() > POINTS_MAX {
        grid = (grid.0 / 2, grid.1 / 2);
        points = map(trace, report.seconds, grid);
    }
    let files = trace.header.files.iter().map(|file| json!([short_name(&file.path), file.bytes]));
    let points = points.iter().map(|(component, cells)| {
        // Differences take fewer characters than the numbers.
        let mut last = 0;
        let steps: Vec<u32> = cells.iter().map(|&c| c - std::mem::replace(&mut last, c)).collect();
        json!([component.name(), steps])
    });
    // Three digits are finer than any screen.
    let rounded = |values: &[f64]| -> Vec<f64> {
        values.iter().map(|v| (v * 1000.0).round() / 1000.0).collect()
    };
    let reasons = report.reasons.iter().map(|r| json!([r.why, r.latency_histogram]));
    script_json(&json!({
        "seconds": report.seconds,
        "limit": report.utilisation.limit.bytes_per_second,
        "slice": report.timeline.slice_seconds,
        "bytes": report.timeline.bytes.iter().map(|b| rounded(b)).collect::<Vec<_>>(),
        "busy": rounded(&report.timeline.busy),
        "waiting": rounded(&report.timeline.waiting),
        "depth": rounded(&report.timeline.depth),
        "files": files.collect::<Vec<_>>(),
        "grid": [grid.0, grid.1],
        "points": points.collect::<Vec<_>>(),
        "latency": reasons.collect::<Vec<_>>(),
        "experts": report.experts.as_ref().map(|e| json!({
            "layers": e.layers,
            "experts": e.experts,
            "requests": e.requests,
            "bytes": e.bytes,
        })),
    }))
}

/// Returns the cells, `column * rows + row`, in which each part of the model was read.
fn map(trace: &Trace, total: f64, (columns, rows): (u32, u32)) -> Vec<(Component, BTreeSet<u32>)> {
    let mut before = 0.0;
    let starts: Vec<f64> = trace
        .header
        .files
        .iter()
        .map(|file| {
            let start = before;
            before += file.bytes as f64;
            start
        })
        .collect();
    let mut found: Vec<(Component, BTreeSet<u32>)> =
        Component::ALL.map(|component| (component, BTreeSet::new())).into();
    for read in &trace.recording.reads {
        let start = timeline::seconds(read.start_nanoseconds);
        let place = starts.get(read.file.0 as usize).unwrap_or(&0.0) + read.offset as f64;
        let cell = |value: f64, whole: f64, cells: u32| {
            ((value / whole.max(f64::MIN_POSITIVE) * f64::from(cells)) as u32).min(cells - 1)
        };
        let at = cell(start, total, columns) * rows + cell(place, before, rows);
        let component = trace.header.component(read);
        if let Some((_, cells)) = found.iter_mut().find(|(of, _)| *of == component) {
            cells.insert(at);
        }
    }
    found.retain(|(_, cells)| !cells.is_empty());
    found
}
