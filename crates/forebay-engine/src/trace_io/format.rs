//! The trace file: JSON lines, compressed with zstd. `docs/io-trace.md` describes it.

use std::fmt;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;

use forebay_store::{BlockLabel, PageFaults, ReadEnd, ReadRecord, Recording, WaitRecord, Why};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::blocks::{BlockEntry, TensorEntry};

pub(super) const FORMAT: &str = "forebay-io-trace";
pub(super) const VERSION: u32 = 1;

/// The longest line that is read, the header's: a table of a few hundred thousand blocks.
const LINE_BYTES_MAX: u64 = 256 << 20;
/// The most records that are read: what a recorder of the largest useful size keeps.
const RECORDS_MAX: usize = 1 << 25;

/// What the records are about: the first line of a trace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TraceHeader {
    pub format: String,
    pub version: u32,
    /// Version of the program that wrote the trace.
    pub forebay: String,
    /// What was run, as in "run" or "bench".
    pub command: String,
    pub model: String,
    pub architecture: String,
    pub files: Vec<FileEntry>,
    pub engine: EngineEntry,
    /// Layers of the model; dense blocks from this number on are the output projection.
    pub layers: u32,
    /// Most experts of any layer.
    pub experts_per_layer: u32,
    /// Sorted by file and offset.
    pub tensors: Vec<TensorEntry>,
    pub blocks: Vec<BlockEntry>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    pub path: String,
    pub bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineEntry {
    pub name: String,
    pub direct: bool,
    pub registered_buffers: bool,
    pub why: String,
}

/// A block's name in a trace: `dense.3`, `expert.4.17` or `other.5`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockName(pub BlockLabel);

impl fmt::Display for BlockName {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            BlockLabel::Dense(index) => write!(out, "dense.{index}"),
            BlockLabel::Expert { layer, expert } => write!(out, "expert.{layer}.{expert}"),
            BlockLabel::Other(index) => write!(out, "other.{index}"),
        }
    }
}

impl BlockName {
    fn parse(text: &str) -> Option<BlockName> {
        let (kind, rest) = text.split_once('.')?;
        Some(BlockName(match kind {
            "dense" => BlockLabel::Dense(rest.parse().ok()?),
            "other" => BlockLabel::Other(rest.parse().ok()?),
            "expert" => {
                let (layer, expert) = rest.split_once('.')?;
                BlockLabel::Expert { layer: layer.parse().ok()?, expert: expert.parse().ok()? }
            }
            _ => return None,
        }))
    }
}

impl Serialize for BlockName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for BlockName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<BlockName, D::Error> {
        let text = String::deserialize(deserializer)?;
        BlockName::parse(&text).ok_or_else(|| D::Error::custom(format!("no block is {text:?}")))
    }
}

/// Why, in the words of the trace.
pub(super) fn why_word(why: Why) -> &'static str {
    match why {
        Why::Demand => "demand",
        Why::ReadAhead => "ahead",
        Why::Load => "load",
        Why::Small => "small",
    }
}

fn why_of(word: &str) -> Option<Why> {
    [Why::Demand, Why::ReadAhead, Why::Load, Why::Small].into_iter().find(|&w| why_word(w) == word)
}

/// Every line after the header.
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

/// The last line's: whoever reads the trace can see that it is whole.
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

/// Why a trace cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[error("cannot be read: {0}")]
    Io(#[from] std::io::Error),
    #[error("is no I/O trace, or a damaged one: {0}")]
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
/// Those of `out`.
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
/// [`TraceError`], in words that say what is wrong with it.
pub fn open(path: &Path) -> Result<Trace, TraceError> {
    read(std::fs::File::open(path)?)
}

/// Reads a trace.
///
/// # Errors
/// As [`open`].
pub fn read(input: impl Read) -> Result<Trace, TraceError> {
    let mut lines = Lines { input: BufReader::new(zstd::Decoder::new(input)?), line: Vec::new() };
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
    /// Reads the next line; false at the end.
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
            return Err(TraceError::Damaged(format!("a line has over {LINE_BYTES_MAX} bytes")));
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
        return Err(format!("{} bytes came of {}", line.bytes, line.length));
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

/// Compares what the last line says with what was read.
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
