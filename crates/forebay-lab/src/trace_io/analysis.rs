//! Computes a report from the records of a trace.

use std::collections::BTreeMap;

use forebay_store::{BlockLabel, ReadEnd, ReadRecord, Recording, Why};

use super::blocks::Component;
use super::format::{Trace, why_word};
use super::header::TraceHeader;
use super::pattern::Follower;
use super::report::{
    ComponentReport, ExpertReads, Limit, PageReport, Quantiles, ReasonReport, Report, SizeClass,
    Stalls, Utilisation,
};
use super::timeline::{self, Depth, seconds};

/// Number of classes in a latency histogram. They reach 2^(96/4) microseconds, 17 seconds.
const LATENCY_CLASSES: usize = 96;
/// Largest number of experts that are counted one by one.
const EXPERTS_MAX: u64 = 1 << 20;

/// Computes the report of a trace. Without a `limit`, the best 100 ms of the trace itself are the
/// limit.
pub fn analyse(trace: &Trace, limit: Option<Limit>) -> Report {
    let Trace { header, recording } = trace;
    let depth = timeline::depth(recording);
    let total = timeline::duration(recording);
    let reads = &recording.reads;
    let count =
        |wanted: fn(&ReadRecord) -> bool| reads.iter().filter(|read| wanted(read)).count() as u64;
    Report {
        model: header.model.clone(),
        architecture: header.architecture.clone(),
        command: header.command.clone(),
        engine: header.engine.name.clone(),
        direct: header.engine.direct,
        engine_why: header.engine.why.clone(),
        seconds: total,
        requests: count(|read| !read.why.is_kv()),
        bytes: bytes(reads.iter().filter(|read| !read.why.is_kv())),
        kv_read_bytes: bytes(reads.iter().filter(|read| read.why == Why::KvRead)),
        kv_written_bytes: bytes(reads.iter().filter(|read| read.why == Why::KvWrite)),
        repeated: count(|read| read.attempt > 0),
        failed: count(|read| matches!(read.end, ReadEnd::Failed(_))),
        lost: count(|read| read.end == ReadEnd::Lost),
        dropped_requests: recording.dropped_reads,
        dropped_bytes: recording.dropped_bytes,
        sizes: sizes(reads.iter()),
        components: components(header, recording),
        reasons: reasons(recording),
        utilisation: utilisation(recording, &depth, limit),
        stalls: stalls(recording, total),
        pages: pages(recording),
        experts: experts(header, recording),
        timeline: timeline::timeline(recording, &depth),
    }
}

fn bytes<'a>(reads: impl Iterator<Item = &'a ReadRecord>) -> u64 {
    reads.map(|read| u64::from(read.bytes)).sum()
}

fn quantiles(mut nanoseconds: Vec<u64>) -> Quantiles {
    nanoseconds.sort_unstable();
    let rank = |share: f64| {
        let index = (share * nanoseconds.len() as f64).ceil() as usize;
        nanoseconds.get(index.saturating_sub(1)).map_or(0.0, |&value| seconds(value))
    };
    Quantiles {
        p50_seconds: rank(0.5),
        p90_seconds: rank(0.9),
        p99_seconds: rank(0.99),
        max_seconds: rank(1.0),
    }
}

fn latency<'a>(reads: impl Iterator<Item = &'a ReadRecord>) -> Quantiles {
    quantiles(reads.map(|read| read.duration_nanoseconds).collect())
}

fn sizes<'a>(reads: impl Iterator<Item = &'a ReadRecord>) -> Vec<SizeClass> {
    let mut classes: BTreeMap<u64, Vec<&ReadRecord>> = BTreeMap::new();
    for read in reads {
        let class = 1_u64 << read.length.checked_ilog2().unwrap_or(0);
        classes.entry(class).or_default().push(read);
    }
    let class = |(from_bytes, members): (u64, Vec<&ReadRecord>)| SizeClass {
        from_bytes,
        requests: members.len() as u64,
        bytes: bytes(members.iter().copied()),
        latency: latency(members.iter().copied()),
    };
    classes.into_iter().map(class).collect()
}

fn components(header: &TraceHeader, recording: &Recording) -> Vec<ComponentReport> {
    let mut order: Vec<&ReadRecord> = recording.reads.iter().collect();
    order.sort_by_key(|read| read.start_nanoseconds);
    let mut members: BTreeMap<Component, (Follower, Vec<&ReadRecord>)> = BTreeMap::new();
    for read in order {
        let (follower, reads) = members.entry(header.component(read)).or_default();
        // Repeated reads do not show in which pattern the model is read.
        if read.attempt == 0 {
            follower.add(read);
        }
        reads.push(read);
    }
    let report = |(component, (follower, reads)): (Component, (Follower, Vec<&ReadRecord>))| {
        let asked: u64 = reads.iter().map(|read| u64::from(read.length)).sum();
        ComponentReport {
            component,
            requests: reads.len() as u64,
            bytes: bytes(reads.iter().copied()),
            mean_request_bytes: asked as f64 / reads.len().max(1) as f64,
            sequential_share: follower.share(),
            pattern: follower.pattern(),
            latency: latency(reads.iter().copied()),
        }
    };
    members.into_iter().map(report).collect()
}

fn reasons(recording: &Recording) -> Vec<ReasonReport> {
    let report = |why: Why| {
        let reads = || recording.reads.iter().filter(move |read| read.why == why);
        let mut latency_histogram = vec![0; LATENCY_CLASSES];
        for read in reads() {
            let microseconds = read.duration_nanoseconds as f64 / 1000.0;
            let class = (microseconds.max(1.0).log2() * 4.0) as usize;
            latency_histogram[class.min(LATENCY_CLASSES - 1)] += 1;
        }
        ReasonReport {
            why: why_word(why),
            requests: reads().count() as u64,
            bytes: bytes(reads()),
            latency: latency(reads()),
            sizes: sizes(reads()),
            latency_histogram,
        }
    };
    let all = Why::ALL.into_iter().map(report);
    all.filter(|reason| reason.requests > 0).collect()
}

fn utilisation(recording: &Recording, depth: &Depth, limit: Option<Limit>) -> Utilisation {
    let best = timeline::best_rate(recording, depth.busy_seconds);
    let source = match &limit {
        Some(less) if !less.is_given => {
            format!("the best 100 ms of this trace, which were faster than {}", less.source)
        }
        _ => "the best 100 ms of this trace".to_owned(),
    };
    let limit = limit.filter(|limit| limit.is_given || limit.bytes_per_second >= best);
    let limit = limit.unwrap_or(Limit { bytes_per_second: best, source, is_given: false });
    let bytes = bytes(timeline::at_engine(recording)) as f64;
    let per = |bytes: f64, seconds: f64| if seconds > 0.0 { bytes / seconds } else { 0.0 };
    let busy_bytes_per_second = per(bytes, depth.busy_seconds);
    Utilisation {
        busy_seconds: depth.busy_seconds,
        bytes_per_second: per(bytes, timeline::duration(recording)),
        busy_bytes_per_second,
        busy_share_of_limit: per(busy_bytes_per_second, limit.bytes_per_second),
        depth_mean: per(depth.request_seconds, depth.busy_seconds),
        depth_max: depth.max,
        limit,
    }
}

fn stalls(recording: &Recording, total: f64) -> Stalls {
    let waits = || recording.waits.iter();
    let demand = || waits().filter(|wait| wait.why == Why::Demand);
    let sum = |durations: &mut dyn Iterator<Item = u64>| durations.map(seconds).sum::<f64>();
    let all = sum(&mut waits().map(|wait| wait.duration_nanoseconds));
    Stalls {
        count: waits().count() as u64,
        seconds: all,
        share: if total > 0.0 { all / total } else { 0.0 },
        demand_count: demand().count() as u64,
        demand_seconds: sum(&mut demand().map(|wait| wait.duration_nanoseconds)),
        length: quantiles(waits().map(|wait| wait.duration_nanoseconds).collect()),
        dropped: recording.dropped_waits,
    }
}

fn pages(recording: &Recording) -> Option<PageReport> {
    let mut faults = recording.reads.iter().filter_map(|read| read.faults).peekable();
    faults.peek()?;
    Some(faults.fold(PageReport::default(), |sum, one| PageReport {
        pages: sum.pages + u64::from(one.pages),
        absent_pages: sum.absent_pages + u64::from(one.absent),
        major_faults: sum.major_faults + u64::from(one.major),
    }))
}

fn experts(header: &TraceHeader, recording: &Recording) -> Option<ExpertReads> {
    let (layers, experts) = (header.layers, header.experts_per_layer);
    let cells = u64::from(layers) * u64::from(experts);
    if cells == 0 || cells > EXPERTS_MAX {
        return None;
    }
    let mut map = ExpertReads {
        layers,
        experts,
        requests: vec![0; cells as usize],
        bytes: vec![0; cells as usize],
    };
    for read in &recording.reads {
        let Some(BlockLabel::Expert { layer, expert }) = read.block else { continue };
        if layer < layers && expert < experts {
            let cell = (layer * experts + expert) as usize;
            map.requests[cell] = map.requests[cell].saturating_add(1);
            map.bytes[cell] += u64::from(read.bytes);
        }
    }
    map.requests.iter().any(|&requests| requests > 0).then_some(map)
}
