//! Reads and writes the trace file: JSON lines, compressed with zstd. `docs/io-trace.md` describes
//! it.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;

use forebay_format::at_most;
use forebay_options::OptionName;
use forebay_store::{PageFaults, ReadEnd, ReadRecord, Recording, WaitRecord, Why};
use serde::{Deserialize, Serialize};

use super::blocks::BlockName;
use super::header::{FORMAT, TraceHeader, VERSION};

/// Largest line to read, in bytes. The header is the longest line: a table of a few hundred
/// thousand blocks.
const LINE_BYTES_MAX: u64 = 256 << 20;
/// Largest number of records to read: as many as the largest useful recorder keeps.
const RECORDS_MAX: usize = 1 << 25;

/// Returns the word that the trace uses for a reason.
pub(super) fn why_word(why: Why) -> &'static str {
    match why {
        Why::Demand => "demand",
        Why::ReadAhead => "ahead",
        Why::Load => "load",
        Why::Small => "small",
        Why::KvRead => "kv-read",
        Why::KvWrite => "kv-write",
    }
}

fn why_of(word: &str) -> Option<Why> {
    Why::ALL.into_iter().find(|&w| why_word(w) == word)
}

/// Any line after the header.
#[derive(Serialize, Deserialize)]
struct Line {
    kind: Kind,
    #[serde(default, skip_serializing_if = "is_zero")]
    start_ns: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    duration_ns: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    why: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    block: Option<BlockName>,
    #[serde(default, skip_serializing_if = "is_zero")]
    file: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    offset: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    length: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    bytes: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    attempt: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    errno: Option<i32>,
    #[serde(default, skip_serializing_if = "is_false")]
    lost: bool,
    /// Pages, absent pages, major faults.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    faults: Option<[u32; 3]>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    totals: Option<Totals>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    #[default]
    Read,
    Wait,
    End,
}

/// Totals in the last line, which show a reader that the trace is complete.
#[derive(Serialize, Deserialize)]
struct Totals {
    reads: u64,
    waits: u64,
    bytes: u64,
    dropped_reads: u64,
    dropped_bytes: u64,
    dropped_waits: u64,
}

fn is_zero(value: &u64) -> bool {
    *value == 0
}

fn is_false(value: &bool) -> bool {
    !*value
}

impl Default for Line {
    fn default() -> Line {
        Line {
            kind: Kind::Read,
            start_ns: 0,
            duration_ns: 0,
            why: None,
            block: None,
            file: 0,
            offset: 0,
            length: 0,
            bytes: 0,
            attempt: 0,
            errno: None,
            lost: false,
            faults: None,
            totals: None,
        }
    }
}

impl From<&ReadRecord> for Line {
    fn from(read: &ReadRecord) -> Line {
        Line {
            start_ns: read.start_nanoseconds,
            duration_ns: read.duration_nanoseconds,
            why: Some(why_word(read.why).to_owned()),
            block: read.block.map(BlockName),
            file: read.file.0.into(),
            offset: read.offset,
            length: read.length.into(),
            bytes: read.bytes.into(),
            attempt: read.attempt.into(),
            errno: match read.end {
                ReadEnd::Failed(errno) => Some(errno),
                _ => None,
            },
            lost: read.end == ReadEnd::Lost,
            faults: read.faults.map(|faults| [faults.pages, faults.absent, faults.major]),
            ..Line::default()
        }
    }
}

/// A trace in memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    pub header: TraceHeader,
    pub recording: Recording,
}

/// Reasons why a trace cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[error("cannot be read: {0}")]
    Io(#[from] std::io::Error),
    #[error("is not an I/O trace, the file that {} writes", OptionName::TraceIo)]
    NotATrace,
    #[error("is not an I/O trace, or a damaged one: {0}")]
    Damaged(String),
    #[error("is an I/O trace of version {found}; this program reads version {VERSION}")]
    Version { found: u64 },
    #[error("line {line} is damaged: {why}")]
    Line { line: usize, why: String },
    #[error("is cut off: {0}; the program that wrote it did not end well")]
    CutOff(String),
}

/// Writes a trace.
///
/// # Errors
/// Returns an error if writing to `out` fails.
pub fn write(out: impl Write, trace: &Trace) -> std::io::Result<()> {
    let mut encoder = zstd::Encoder::new(out, 3)?;
    encoder.include_checksum(true)?;
    let mut line = |bytes: Result<Vec<u8>, serde_json::Error>| -> std::io::Result<()> {
        let mut bytes = bytes?;
        bytes.push(b'\n');
        encoder.write_all(&bytes)
    };
    line(serde_json::to_vec(&trace.header))?;
    let recording = &trace.recording;
    for read in &recording.reads {
        line(serde_json::to_vec(&Line::from(read)))?;
    }
    for wait in &recording.waits {
        line(serde_json::to_vec(&Line {
            kind: Kind::Wait,
            start_ns: wait.start_nanoseconds,
            duration_ns: wait.duration_nanoseconds,
            why: Some(why_word(wait.why).to_owned()),
            ..Line::default()
        }))?;
    }
    line(serde_json::to_vec(&Line {
        kind: Kind::End,
        duration_ns: recording.nanoseconds,
        totals: Some(Totals {
            reads: recording.reads.len() as u64,
            waits: recording.waits.len() as u64,
            bytes: recording.reads.iter().map(|read| u64::from(read.bytes)).sum(),
            dropped_reads: recording.dropped_reads,
            dropped_bytes: recording.dropped_bytes,
            dropped_waits: recording.dropped_waits,
        }),
        ..Line::default()
    }))?;
    encoder.finish()?.flush()
}

/// Reads a trace file.
///
/// # Errors
/// Returns an error if the file cannot be read, or is not a complete and undamaged trace of this
/// version.
pub fn open(path: &Path) -> Result<Trace, TraceError> {
    read(std::fs::File::open(path)?)
}

/// First bytes of every trace file, because traces are compressed with zstd.
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// Reads a trace.
///
/// # Errors
/// Returns the errors of [`open`].
pub fn read(input: impl Read) -> Result<Trace, TraceError> {
    let mut input = BufReader::new(input);
    let found = input.fill_buf()?;
    if !found.starts_with(&ZSTD_MAGIC[..found.len().min(4)]) || found.is_empty() {
        return Err(TraceError::NotATrace);
    }
    let decoder = zstd::Decoder::with_buffer(input)?;
    let mut lines = Lines { input: BufReader::new(decoder), line: Vec::new() };
    if !lines.next()? {
        return Err(TraceError::Damaged("it is empty".into()));
    }
    let header = header(&lines.line)?;
    let mut recording = Recording::default();
    let mut number = 1;
    while lines.next()? {
        number += 1;
        let damaged = |why: String| TraceError::Line { line: number, why };
        let line: Line =
            serde_json::from_slice(&lines.line).map_err(|error| damaged(error.to_string()))?;
        if recording.reads.len() + recording.waits.len() >= RECORDS_MAX {
            return Err(damaged(format!("there are more than {RECORDS_MAX} records")));
        }
        match line.kind {
            Kind::Read => recording.reads.push(read_of(line, &header).map_err(damaged)?),
            Kind::Wait => recording.waits.push(WaitRecord {
                start_nanoseconds: line.start_ns,
                duration_nanoseconds: line.duration_ns,
                why: why(line.why.as_deref()).map_err(damaged)?,
            }),
            Kind::End => {
                end(line, &mut recording)?;
                return match lines.next()? {
                    false => Ok(Trace { header, recording }),
                    true => Err(damaged("something follows the last record".into())),
                };
            }
        }
    }
    Err(TraceError::CutOff("its last record is missing".into()))
}

struct Lines<R: BufRead> {
    input: R,
    line: Vec<u8>,
}

impl<R: BufRead> Lines<R> {
    /// Reads the next line. Returns false at the end.
    fn next(&mut self) -> Result<bool, TraceError> {
        self.line.clear();
        let mut limited = (&mut self.input).take(LINE_BYTES_MAX);
        let read =
            limited.read_until(b'\n', &mut self.line).map_err(|error| match error.kind() {
                std::io::ErrorKind::UnexpectedEof => {
                    TraceError::CutOff("the compressed data ends in the middle".into())
                }
                _ => TraceError::Damaged(error.to_string()),
            })?;
        if read as u64 == LINE_BYTES_MAX {
            let most = at_most(LINE_BYTES_MAX);
            return Err(TraceError::Damaged(format!("a line has {most} or more")));
        }
        Ok(read > 0)
    }
}

fn header(line: &[u8]) -> Result<TraceHeader, TraceError> {
    #[derive(Deserialize)]
    struct Stamp {
        format: String,
        version: u64,
    }
    let damaged = |error: serde_json::Error| TraceError::Damaged(format!("its header: {error}"));
    let stamp: Stamp = serde_json::from_slice(line).map_err(damaged)?;
    if stamp.format != FORMAT {
        let shown: String = stamp.format.chars().take(40).collect();
        return Err(TraceError::Damaged(format!("it calls itself {shown:?}")));
    }
    if stamp.version != u64::from(VERSION) {
        return Err(TraceError::Version { found: stamp.version });
    }
    let mut header: TraceHeader = serde_json::from_slice(line).map_err(damaged)?;
    header.tensors.sort_by_key(|tensor| (tensor.file, tensor.offset));
    Ok(header)
}

fn why(word: Option<&str>) -> Result<Why, String> {
    word.and_then(why_of).ok_or_else(|| format!("`why` is {word:?}"))
}

fn read_of(line: Line, header: &TraceHeader) -> Result<ReadRecord, String> {
    let small =
        |name: &str, value: u64| u32::try_from(value).map_err(|_| format!("`{name}` is {value}"));
    if line.file >= header.files.len() as u64 {
        return Err(format!("file {} of {} is read", line.file, header.files.len()));
    }
    if line.offset.checked_add(line.length).is_none()
        || line.start_ns.checked_add(line.duration_ns).is_none()
    {
        return Err("a span or a time passes the 64-bit range".into());
    }
    if line.bytes > line.length {
        return Err(format!("it has {} bytes of a span of {}", line.bytes, line.length));
    }
    Ok(ReadRecord {
        start_nanoseconds: line.start_ns,
        duration_nanoseconds: line.duration_ns,
        file: forebay_store::FileIndex(small("file", line.file)?),
        offset: line.offset,
        length: small("length", line.length)?,
        bytes: small("bytes", line.bytes)?,
        block: line.block.map(|name| name.0),
        why: why(line.why.as_deref())?,
        attempt: small("attempt", line.attempt)?,
        end: match (line.errno, line.lost) {
            (Some(errno), _) => ReadEnd::Failed(errno),
            (None, true) => ReadEnd::Lost,
            (None, false) => ReadEnd::Done,
        },
        faults: line.faults.map(|[pages, absent, major]| PageFaults { pages, absent, major }),
    })
}

/// Checks the totals of the last line against the records that were read.
fn end(line: Line, recording: &mut Recording) -> Result<(), TraceError> {
    let Some(totals) = line.totals else {
        return Err(TraceError::CutOff("its last record has no totals".into()));
    };
    let bytes: u64 = recording.reads.iter().map(|read| u64::from(read.bytes)).sum();
    let found = (recording.reads.len() as u64, recording.waits.len() as u64, bytes);
    if found != (totals.reads, totals.waits, totals.bytes) {
        return Err(TraceError::Damaged(format!(
            "it says that it holds {} reads of {} bytes and {} waits, but it holds {} of {} and {}",
            totals.reads, totals.bytes, totals.waits, found.0, found.2, found.1
        )));
    }
    recording.nanoseconds = line.duration_ns;
    recording.dropped_reads = totals.dropped_reads;
    recording.dropped_bytes = totals.dropped_bytes;
    recording.dropped_waits = totals.dropped_waits;
    Ok(())
}
