//! Writes a trace incrementally. It holds one batch in memory, whatever the trace's length.

use std::io::{self, Write};

use super::header::FORMAT;
use super::{Phase, RoutingHeader, RoutingTrace, Rows, Turn};

/// Tag bytes before each kind of record.
pub(super) const TURN: u8 = 1;
pub(super) const BATCH: u8 = 2;
pub(super) const END: u8 = 3;

/// Compression level. It is low because writing a token's record must take only microseconds.
const LEVEL: i32 = 3;

/// Writes a routing trace, record by record.
pub struct RoutingWriter<W: Write> {
    out: zstd::Encoder<'static, W>,
    header: RoutingHeader,
    offsets: Vec<usize>,
    turns: u64,
    batches: u64,
    tokens: u64,
    /// Buffer for a record, reused from batch to batch.
    record: Vec<u8>,
}

impl<W: Write> RoutingWriter<W> {
    /// Creates a writer and writes the header.
    ///
    /// # Errors
    /// Returns an error if `out` fails. A header that no reader would accept is [`io::ErrorKind::InvalidInput`].
    pub fn new(out: W, header: RoutingHeader) -> io::Result<RoutingWriter<W>> {
        header.check().map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        let mut out = zstd::Encoder::new(out, LEVEL)?;
        out.include_checksum(true)?;
        let json = serde_json::to_vec(&header)?;
        out.write_all(FORMAT.as_bytes())?;
        out.write_all(b"\n")?;
        out.write_all(&(json.len() as u32).to_le_bytes())?;
        out.write_all(&json)?;
        let offsets = RoutingTrace::new(header.clone()).offsets;
        Ok(RoutingWriter { out, header, offsets, turns: 0, batches: 0, tokens: 0, record: vec![] })
    }

    /// Begins a turn.
    ///
    /// # Errors
    /// Returns an error if the output fails.
    pub fn turn(&mut self, turn: Turn) -> io::Result<()> {
        self.turns += 1;
        self.record.clear();
        self.record.push(TURN);
        self.record.push(turn.prompt_hash.is_some().into());
        self.record.extend(turn.prompt_hash.unwrap_or(0).to_le_bytes());
        self.record.extend(turn.prompt_tokens.to_le_bytes());
        self.out.write_all(&self.record)
    }

    /// Writes tokens that went through the model together.
    ///
    /// # Errors
    /// Returns an error if the output fails. Rows that do not match the header are [`io::ErrorKind::InvalidInput`].
    pub fn batch(&mut self, phase: Phase, rows: Rows<'_>) -> io::Result<()> {
        let wrong = |why: String| io::Error::new(io::ErrorKind::InvalidInput, why);
        rows.check(&self.header, &self.offsets).map_err(wrong)?;
        if self.turns == 0 {
            return Err(wrong("a batch before the first turn".to_owned()));
        }
        self.batches += 1;
        self.tokens += rows.tokens as u64;
        self.record.clear();
        self.record.push(BATCH);
        self.record.push((phase == Phase::Generate).into());
        self.record.extend((rows.tokens as u32).to_le_bytes());
        self.record.extend(rows.choices.iter().flat_map(|id| id.to_le_bytes()));
        let floats = rows.weights.iter().chain(rows.scores);
        self.record.extend(floats.flat_map(|value| value.to_le_bytes()));
        self.out.write_all(&self.record)
    }

    /// Writes the end record, which tells a reader that the trace is complete, and returns the output.
    ///
    /// # Errors
    /// Returns an error if the output fails.
    pub fn finish(mut self) -> io::Result<W> {
        self.record.clear();
        self.record.push(END);
        for count in [self.turns, self.batches, self.tokens] {
            self.record.extend(count.to_le_bytes());
        }
        self.out.write_all(&self.record)?;
        let mut out = self.out.finish()?;
        out.flush()?;
        Ok(out)
    }
}

impl RoutingTrace {
    /// Writes the whole trace.
    ///
    /// # Errors
    /// Returns an error if `out` fails.
    pub fn write<W: Write>(&self, out: W) -> io::Result<W> {
        let mut writer = RoutingWriter::new(out, self.header.clone())?;
        let mut turns = 0;
        for batch in self.batches() {
            while turns <= batch.turn {
                writer.turn(self.turns[turns])?;
                turns += 1;
            }
            writer.batch(batch.phase, self.rows(batch.tokens))?;
        }
        for turn in &self.turns[turns..] {
            writer.turn(*turn)?;
        }
        writer.finish()
    }
}
