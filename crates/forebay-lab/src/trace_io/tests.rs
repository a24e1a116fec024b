//! Tests with a trace that is small enough to be counted by hand.

use forebay_store::{BlockLabel, FileIndex, ReadEnd, ReadRecord, Recording, WaitRecord, Why};

use super::*;

const MS: u64 = 1_000_000;

fn read(start_ms: u64, took_ms: u64, offset: u64, length: u32, block: BlockLabel) -> ReadRecord {
    ReadRecord {
        start_nanoseconds: start_ms * MS,
        duration_nanoseconds: took_ms * MS,
        file: FileIndex(0),
        offset,
        length,
        bytes: length,
        block: Some(block),
        why: Why::Demand,
        attempt: 0,
        end: ReadEnd::Done,
        faults: None,
    }
}

fn expert(layer: u32, expert: u32) -> BlockLabel {
    BlockLabel::Expert { layer, expert }
}

fn tensor(name: &str, component: Component, offset: u64, length: u64) -> TensorEntry {
    TensorEntry { name: name.into(), ty: "F32".into(), component, file: 0, offset, length }
}

/// Returns a trace of 1 s: the dense block of layer 0 in four pieces, experts at odd offsets, one
/// retry, one small read.
fn trace() -> Trace {
    let dense = BlockLabel::Dense(0);
    let reads = vec![
        ReadRecord { why: Why::Load, ..read(0, 100, 0, 65_536, dense) },
        ReadRecord { why: Why::Load, ..read(0, 200, 65_536, 65_536, dense) },
        ReadRecord { why: Why::Load, ..read(100, 100, 131_072, 65_536, dense) },
        ReadRecord { why: Why::Load, ..read(200, 100, 196_608, 65_536, dense) },
        ReadRecord {
            bytes: 0,
            end: ReadEnd::Failed(5),
            ..read(500, 10, 400_000, 8192, expert(0, 2))
        },
        ReadRecord { attempt: 1, ..read(510, 30, 400_000, 8192, expert(0, 2)) },
        ReadRecord { why: Why::ReadAhead, ..read(500, 40, 300_000, 8192, expert(0, 1)) },
        read(600, 100, 500_000, 16_384, expert(0, 2)),
        ReadRecord { block: None, why: Why::Small, ..read(450, 1, 900_100, 100, dense) },
    ];
    let wait = |start: u64, took: u64, why| WaitRecord {
        start_nanoseconds: start * MS,
        duration_nanoseconds: took * MS,
        why,
    };
    let waits =
        vec![wait(0, 300, Why::Load), wait(500, 40, Why::Demand), wait(600, 100, Why::Demand)];
    let recording = Recording { reads, waits, nanoseconds: 1000 * MS, ..Recording::default() };
    let header = TraceHeader {
        format: header::FORMAT.into(),
        version: header::VERSION,
        forebay: "0".into(),
        command: "run".into(),
        model: "/models/</script><img src=x onerror=alert(1)>&\"'.gguf".into(),
        architecture: "qwen3moe".into(),
        files: vec![FileEntry { path: "a".into(), bytes: 1_000_000 }],
        engine: EngineEntry {
            name: "io_uring".into(),
            direct: true,
            registered_buffers: true,
            why: "<b>because</b>".into(),
        },
        layers: 1,
        experts_per_layer: 3,
        tensors: vec![
            tensor("blk.0.attn_q.weight", Component::Attention, 0, 262_144),
            tensor("blk.0.ffn_up_exps.weight", Component::Experts, 262_144, 600_000),
            tensor("token_embd.weight", Component::Embedding, 900_000, 100_000),
        ],
        blocks: vec![BlockEntry {
            block: BlockName(dense),
            component: Component::Attention,
            extents: vec![(0, 0, 262_144)],
        }],
    };
    Trace { header, recording }
}

fn close(a: f64, b: f64) {
    assert!((a - b).abs() <= 1e-9 * b.abs().max(1.0), "{a} is not {b}");
}

#[test]
fn figures_are_those_counted_by_hand() {
    let report = analyse(&trace(), None);
    assert_eq!((report.requests, report.bytes), (9, 4 * 65_536 + 8192 + 8192 + 16_384 + 100));
    assert_eq!((report.repeated, report.failed, report.lost), (1, 1, 0));
    let parts: Vec<_> = report
        .components
        .iter()
        .map(|part| (part.component, part.requests, part.bytes, part.pattern))
        .collect();
    assert_eq!(
        parts,
        [
            (Component::Embedding, 1, 100, Pattern::Single),
            (Component::Attention, 4, 262_144, Pattern::Sequential),
            (Component::Experts, 4, 32_768, Pattern::Random),
        ]
    );
    close(report.components[1].sequential_share, 1.0);
    close(report.components[2].mean_request_bytes, (3.0 * 8192.0 + 16_384.0) / 4.0);

    let sizes: Vec<_> =
        report.sizes.iter().map(|class| (class.from_bytes, class.requests, class.bytes)).collect();
    assert_eq!(sizes, [(64, 1, 100), (8192, 3, 16_384), (16_384, 1, 16_384), (65_536, 4, 262_144)]);
    let reasons: Vec<_> = report.reasons.iter().map(|r| (r.why, r.requests, r.bytes)).collect();
    assert_eq!(
        reasons,
        [("demand", 3, 24_576), ("ahead", 1, 8192), ("load", 4, 262_144), ("small", 1, 100)]
    );
    let demand = report.reasons[0].latency;
    close(demand.p50_seconds, 0.03);
    close(demand.p99_seconds, 0.1);
    close(report.reasons[2].latency.p50_seconds, 0.1);

    // Busy from 0 to 300, 500 to 540 and 600 to 700 ms.
    let used = &report.utilisation;
    close(used.busy_seconds, 0.44);
    close(used.busy_bytes_per_second, 294_912.0 / 0.44);
    close(used.depth_mean, (0.1 + 0.2 + 0.1 + 0.1 + 0.01 + 0.03 + 0.04 + 0.1) / 0.44);
    assert_eq!(used.depth_max, 2);
    // Between 0 and 100 ms there are one whole request and half of another one.
    close(used.limit.bytes_per_second, 65_536.0 * 1.5 / 0.1);

    assert_eq!((report.stalls.count, report.stalls.demand_count), (3, 2));
    close(report.stalls.seconds, 0.44);
    close(report.stalls.demand_seconds, 0.14);
    close(report.stalls.share, 0.44);
    let experts = report.experts.expect("experts were read");
    assert_eq!(experts.requests, [0, 1, 3]);
    assert_eq!(experts.bytes, [0, 8192, 24_576]);
    let timeline = &report.timeline;
    close(timeline.bytes.iter().flatten().sum(), report.bytes as f64);
    close(timeline.busy.iter().sum::<f64>() * timeline.slice_seconds, 0.44);
    close(timeline.waiting.iter().sum::<f64>() * timeline.slice_seconds, 0.44);
    close(timeline.depth.iter().sum::<f64>() * timeline.slice_seconds, 0.68);
}

#[test]
fn patterns_have_their_thresholds() {
    let shares = [(10, Pattern::Sequential), (8, Pattern::Sequential), (5, Pattern::Hybrid)];
    for (sequential, wanted) in shares.into_iter().chain([(2, Pattern::Random)]) {
        let mut trace = trace();
        let mut offset = 0;
        trace.recording.reads = (0..11_u64)
            .map(|i| {
                offset += if i <= sequential { 4096 } else { 50_000 };
                read(i, 1, offset, 4096, expert(0, 0))
            })
            .collect();
        let report = analyse(&trace, None);
        assert_eq!(report.components[0].pattern, wanted, "{sequential} of 10");
    }
}

#[test]
fn a_limit_that_is_given_is_used() {
    let limit = |factor: f64, is_given| Limit {
        bytes_per_second: 294_912.0 / 0.44 * factor,
        source: "a profile".into(),
        is_given,
    };
    let utilisation = |limit| analyse(&trace(), Some(limit)).utilisation;
    close(utilisation(limit(2.0, true)).busy_share_of_limit, 0.5);
    close(utilisation(limit(0.5, true)).busy_share_of_limit, 2.0);
    // What was measured at another time is no limit if the trace itself is faster.
    let faster = utilisation(limit(0.5, false));
    assert!(faster.busy_share_of_limit <= 1.0, "{faster:?}");
    assert!(faster.limit.source.ends_with("faster than a profile"), "{faster:?}");
    let slower = utilisation(limit(1000.0, false));
    assert_eq!(slower.limit.source, "a profile");
}

#[test]
fn the_file_brings_everything_back() {
    let mut trace = trace();
    trace.recording.dropped_reads = 3;
    trace.recording.dropped_bytes = 77;
    trace.recording.reads[2].end = ReadEnd::Lost;
    trace.recording.reads[3].faults =
        Some(forebay_store::PageFaults { pages: 16, absent: 9, major: 2 });
    let mut file = Vec::new();
    write(&mut file, &trace).unwrap();
    assert_eq!(super::read(&file[..]).unwrap(), trace);
}

#[test]
fn damaged_files_are_refused_in_words() {
    let mut file = Vec::new();
    write(&mut file, &trace()).unwrap();
    for end in 0..file.len() {
        let error = super::read(&file[..end]).unwrap_err();
        assert!(error.to_string().len() > 20, "{error}");
    }
    for at in 0..file.len() {
        let mut damaged = file.clone();
        damaged[at] ^= 0x10;
        // A flag in the zstd frame header may have no effect. Then the trace must read back
        // unchanged.
        if let Ok(read) = super::read(&damaged[..]) {
            assert_eq!(read, trace(), "byte {at}");
        }
    }
    let refused = |text: &str| {
        let file = zstd::encode_all(text.as_bytes(), 1).unwrap();
        super::read(&file[..]).unwrap_err().to_string()
    };
    assert!(refused("").contains("empty"));
    assert!(refused("{}\n").contains("header"));
    assert!(refused("{\"format\":\"other\",\"version\":1}\n").contains("other"));
    let newer = refused("{\"format\":\"forebay-io-trace\",\"version\":2}\n");
    assert!(newer.contains("version 2"), "{newer}");
    let header = serde_json::to_string(&trace().header).unwrap();
    let unknown =
        refused(&format!("{header}\n{{\"kind\":\"read\",\"file\":1,\"why\":\"load\"}}\n"));
    assert!(unknown.contains("line 2"), "{unknown}");
    assert!(refused(&format!("{header}\n")).contains("cut off"));
    assert!(super::read(&b"GGUF and so on"[..]).is_err());
}

#[test]
fn hostile_names_stay_text() {
    let trace = trace();
    let html = page(&trace, &analyse(&trace, None));
    assert!(!html.contains("<img"), "a model's name became an element");
    assert!(!html.contains("<b>because"), "a reason became an element");
    assert!(html.contains("&lt;img src=x"));
    // The page has its own two scripts, and nothing from outside.
    assert_eq!(html.matches("</script>").count(), 2);
    for outside in ["http://", "https://", "src=\"", "@import", "url("] {
        assert!(!html.contains(outside), "{outside}");
    }
}

#[test]
fn an_empty_trace_is_reported_and_drawn() {
    let mut trace = trace();
    trace.recording = Recording::default();
    let report = analyse(&trace, None);
    assert_eq!((report.requests, report.stalls.count), (0, 0));
    assert!(page(&trace, &report).contains("</html>"));
}

/// Returns every event of a document. Checks the fields that the format requires of all events.
fn chrome_events(trace: &Trace) -> Vec<serde_json::Value> {
    let mut written = Vec::new();
    write_chrome(&mut written, trace).unwrap();
    let document: serde_json::Value = serde_json::from_slice(&written).unwrap();
    assert_eq!(document["displayTimeUnit"], "ms");
    let events = document["traceEvents"].as_array().unwrap().clone();
    for event in &events {
        assert!(event["name"].is_string() && event["args"].is_object(), "{event}");
        assert!(event["pid"].is_u64() && event["tid"].is_u64(), "{event}");
        match event["ph"].as_str().unwrap() {
            "X" => {
                let times = [&event["ts"], &event["dur"]].map(|time| time.as_f64().unwrap());
                assert!(
                    times.iter().all(|time| *time >= 0.0) && event["cat"].is_string(),
                    "{event}"
                );
            }
            "M" => {
                let names = ["process_name", "thread_name"];
                assert!(names.contains(&event["name"].as_str().unwrap()), "{event}");
                assert!(event["args"]["name"].is_string(), "{event}");
            }
            other => panic!("a phase {other:?}: {event}"),
        }
    }
    events
}

#[test]
fn chrome_events_are_slices_that_do_not_overlap() {
    let trace = trace();
    let events = chrome_events(&trace);
    let slices: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
    let (reads, waits) = (trace.recording.reads.len(), trace.recording.waits.len());
    assert_eq!(slices.len(), reads + waits);
    let mut ends = std::collections::HashMap::new();
    for slice in &slices {
        let row = (slice["pid"].as_u64(), slice["tid"].as_u64());
        let (start, took) = (slice["ts"].as_f64().unwrap(), slice["dur"].as_f64().unwrap());
        let end = ends.insert(row, start + took).unwrap_or(0.0);
        assert!(start >= end, "{slice} begins before {end}");
        let named = |kind: &str| {
            events.iter().any(|event| event["name"] == kind && event["pid"] == slice["pid"])
        };
        assert!(named("process_name") && named("thread_name"), "{slice}");
    }
    // At most two reads overlap; small reads and waits have rows of their own.
    assert_eq!(ends.len(), 4);
    let failed = slices.iter().find(|slice| slice["args"]["errno"] == 5).unwrap();
    assert_eq!((&failed["name"], &failed["cat"]), (&"expert.0.2".into(), &"demand".into()));
    assert_eq!((failed["ts"].as_f64(), failed["dur"].as_f64()), (Some(500_000.0), Some(10_000.0)));
    let arguments = &failed["args"];
    assert_eq!((&arguments["offset"], &arguments["length"]), (&400_000.into(), &8192.into()));
    assert_eq!((&arguments["bytes"], &arguments["component"]), (&0.into(), &"experts".into()));
    let small = slices.iter().find(|slice| slice["name"] == "small").unwrap();
    assert_eq!(small["args"]["path"], "through the page cache");
}

#[test]
fn a_trace_without_records_is_a_document_too() {
    let empty = Trace { recording: Recording::default(), ..trace() };
    assert!(chrome_events(&empty).is_empty());
}
