//! Writes a trace as Chrome trace events, which Perfetto and chrome://tracing open.
//!
//! "Trace Event Format" of the Chromium project describes the format. Slices of one thread must not overlap unless one
//! contains the other. So every read takes the first row of its process that is free when it starts, and the number of
//! rows is the queue depth.

use std::collections::BTreeMap;
use std::io::{Result, Write};

use forebay_store::{PageFaults, ReadEnd, ReadRecord, Why};
use serde::Serialize;

use super::blocks::{BlockName, Component};
use super::format::{Trace, why_word};
use super::header::TraceHeader;

/// A process of the viewer: a group of rows.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Group {
    Computation = 1,
    Reads = 2,
    SmallReads = 3,
    Kv = 4,
}

impl Group {
    const ALL: [Group; 4] = [Group::Computation, Group::Reads, Group::SmallReads, Group::Kv];

    fn name(self) -> &'static str {
        match self {
            Group::Computation => "computation",
            Group::Reads => "reads",
            Group::SmallReads => "small reads",
            Group::Kv => "keys and values",
        }
    }

    fn row_name(self, row: usize) -> String {
        match self {
            Group::Computation => "waiting for reads".to_owned(),
            Group::Reads | Group::SmallReads | Group::Kv => format!("request {row}"),
        }
    }
}

/// One event. Times are in microseconds.
#[derive(Serialize)]
struct Event<'a, A> {
    name: &'a str,
    ph: &'static str,
    pid: u32,
    tid: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    cat: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    args: A,
}

#[derive(Serialize)]
struct ReadArguments<'a> {
    file: &'a str,
    offset: u64,
    /// Requested bytes.
    length: u32,
    /// Bytes that the read returned.
    bytes: u32,
    /// Reason of the read: `demand`, `ahead`, `load` or `small`; `kv-read` or `kv-write` for keys and values.
    why: &'static str,
    component: Component,
    path: &'static str,
    attempt: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    errno: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lost: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    absent_pages: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    major_faults: Option<u32>,
}

#[derive(Serialize)]
struct WaitArguments {
    /// Reason of the most urgent read in flight.
    why: &'static str,
}

#[derive(Serialize)]
struct NameArguments<'a> {
    name: &'a str,
}

#[derive(Serialize)]
struct About<'a> {
    forebay: &'a str,
    command: &'a str,
    model: &'a str,
    engine: &'a str,
    dropped_reads: u64,
    dropped_waits: u64,
}

/// Writes the trace as one JSON document of Chrome trace events. It has a slice for each read, with its file, offset
/// and path, and a slice for each wait.
///
/// # Errors
/// Returns an error if writing to `out` fails.
pub fn write_chrome(mut out: impl Write, trace: &Trace) -> Result<()> {
    let Trace { header, recording } = trace;
    let about = About {
        forebay: &header.forebay,
        command: &header.command,
        model: &header.model,
        engine: &header.engine.name,
        dropped_reads: recording.dropped_reads,
        dropped_waits: recording.dropped_waits,
    };
    out.write_all(b"{\"displayTimeUnit\":\"ms\",\"otherData\":")?;
    serde_json::to_writer(&mut out, &about)?;
    out.write_all(b",\"traceEvents\":[\n")?;
    let mut events = Events { out, rows: BTreeMap::new(), any: false };
    for wait in &recording.waits {
        let span = (wait.start_nanoseconds, wait.duration_nanoseconds);
        let why = why_word(wait.why);
        events.slice(Group::Computation, "wait", why, span, WaitArguments { why })?;
    }
    let mut reads: Vec<&ReadRecord> = recording.reads.iter().collect();
    reads.sort_by_key(|read| read.start_nanoseconds);
    for read in reads {
        let name = read.block.map(|block| BlockName(block).to_string());
        let group = match read.why {
            Why::Small => Group::SmallReads,
            Why::KvRead | Why::KvWrite => Group::Kv,
            Why::Demand | Why::ReadAhead | Why::Load => Group::Reads,
        };
        let span = (read.start_nanoseconds, read.duration_nanoseconds);
        let (name, arguments) =
            (name.as_deref().unwrap_or(why_word(read.why)), arguments(header, read));
        events.slice(group, name, arguments.why, span, arguments)?;
    }
    events.finish()
}

fn arguments<'a>(header: &'a TraceHeader, read: &ReadRecord) -> ReadArguments<'a> {
    ReadArguments {
        file: header.files.get(read.file.0 as usize).map_or("", |file| &file.path),
        offset: read.offset,
        length: read.length,
        bytes: read.bytes,
        why: why_word(read.why),
        component: header.component(read),
        path: path(header, read),
        attempt: read.attempt,
        errno: match read.end {
            ReadEnd::Failed(errno) => Some(errno),
            ReadEnd::Done | ReadEnd::Lost => None,
        },
        lost: (read.end == ReadEnd::Lost).then_some(true),
        absent_pages: read.faults.map(|faults| faults.absent),
        major_faults: read.faults.map(|faults| faults.major),
    }
}

/// Returns the source of the bytes, as far as the trace shows it.
fn path(header: &TraceHeader, read: &ReadRecord) -> &'static str {
    match read.faults {
        _ if read.why == Why::Small => "through the page cache",
        _ if read.why.is_kv() => "disk, past the page cache where the file system can",
        Some(PageFaults { absent: 0, .. }) => "page cache",
        Some(_) => "disk, page fault by page fault",
        None if header.engine.direct => "disk, past the page cache",
        None => "through the page cache",
    }
}

struct Events<W> {
    out: W,
    /// End of the last slice in each row of a group, in nanoseconds.
    rows: BTreeMap<u32, Vec<u64>>,
    any: bool,
}

impl<W: Write> Events<W> {
    /// Adds a slice of `duration` nanoseconds from `start` in the first free row. Slices of a group must come sorted by
    /// their start.
    fn slice(
        &mut self,
        group: Group,
        name: &str,
        category: &'static str,
        (start, duration): (u64, u64),
        args: impl Serialize,
    ) -> Result<()> {
        let rows = self.rows.entry(group as u32).or_default();
        let free = rows.iter().position(|end| *end <= start);
        let row = free.unwrap_or_else(|| {
            rows.push(0);
            rows.len() - 1
        });
        rows[row] = start + duration;
        self.write(&Event {
            name,
            ph: "X",
            pid: group as u32,
            tid: row + 1,
            cat: Some(category),
            ts: Some(start as f64 / 1e3),
            dur: Some(duration as f64 / 1e3),
            args,
        })
    }

    fn write<A: Serialize>(&mut self, event: &Event<'_, A>) -> Result<()> {
        if self.any {
            self.out.write_all(b",\n")?;
        }
        self.any = true;
        Ok(serde_json::to_writer(&mut self.out, event)?)
    }

    /// Names the processes and rows that have slices, and ends the document.
    fn finish(mut self) -> Result<()> {
        for group in Group::ALL {
            let rows = self.rows.get(&(group as u32)).map_or(0, Vec::len);
            for row in 1..=rows {
                if row == 1 {
                    self.name("process_name", group, row, group.name())?;
                }
                self.name("thread_name", group, row, &group.row_name(row))?;
            }
        }
        self.out.write_all(b"\n]}\n")?;
        self.out.flush()
    }

    fn name(&mut self, kind: &str, group: Group, row: usize, name: &str) -> Result<()> {
        let args = NameArguments { name };
        let (pid, tid) = (group as u32, row);
        self.write(&Event { name: kind, ph: "M", pid, tid, cat: None, ts: None, dur: None, args })
    }
}
