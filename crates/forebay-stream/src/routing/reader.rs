//! Reads a trace. The input is not trusted: memory grows with the bytes read, never with what a record claims.

use std::io::{self, BufRead, BufReader, Cursor, Read};

use super::header::{FORMAT, VERSION};
use super::writer::{BATCH, END, TURN};
use super::{CHOICES_MAX, Phase, RoutingError, RoutingHeader, RoutingTrace, Rows, Turn};

/// Longest header: names and 4096 layers.
const HEADER_BYTES_MAX: u32 = 4 << 20;
/// Most tokens of a batch. A model computes far smaller batches at once, but a batch of the CSV form is a whole prompt.
pub(super) const BATCH_TOKENS_MAX: u32 = 1 << 24;
/// Number of values that are read at a time.
const VALUES_AT_A_TIME: usize = 1 << 14;
/// Start of a zstd frame (RFC 8878, section 3.1.1).
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// Reads a trace in the binary or CSV form.
///
/// # Errors
/// Returns a [`RoutingError`] that says what is wrong and where.
pub fn read_any(input: impl Read) -> Result<RoutingTrace, RoutingError> {
    let mut input = BufReader::with_capacity(1 << 16, input);
    let mut start = [0; 4];
    let mut known = 0;
    while known < start.len() {
        match input.read(&mut start[known..])? {
            0 => break,
            more => known += more,
        }
    }
    let is_binary = start == ZSTD_MAGIC;
    let input = Cursor::new(start[..known].to_vec()).chain(input);
    match is_binary {
        true => read(input),
        // If not even the first line can be read, the input is not a trace.
        false => RoutingTrace::from_csv(BufReader::new(input)).map_err(|error| match error {
            RoutingError::Line { line: 1, why } => {
                RoutingError::NotATrace(format!("line 1: {why}"))
            }
            error => error,
        }),
    }
}

/// Reads a binary trace.
///
/// # Errors
/// Returns the same errors as [`read_any`].
pub fn read(input: impl Read) -> Result<RoutingTrace, RoutingError> {
    read_uncompressed(BufReader::with_capacity(1 << 16, zstd::Decoder::new(input)?))
}

/// Reads the uncompressed content of a binary trace.
///
/// # Errors
/// Returns the same errors as [`read_any`].
pub fn read_uncompressed(mut input: impl BufRead) -> Result<RoutingTrace, RoutingError> {
    let header = header(&mut input)?;
    let mut reader = Records { trace: RoutingTrace::new(header), input, records: 0, batches: 0 };
    while reader.next()? {}
    Ok(reader.trace)
}

fn header(input: &mut impl Read) -> Result<RoutingHeader, RoutingError> {
    let mut magic = [0; FORMAT.len() + 1];
    let not_ours = |_| RoutingError::NotATrace("it begins with something else".into());
    input.read_exact(&mut magic).map_err(not_ours)?;
    if magic.strip_suffix(b"\n") != Some(FORMAT.as_bytes()) {
        return Err(RoutingError::NotATrace("it begins with something else".into()));
    }
    let cut = |error| ended(error, "in its header");
    let mut length = [0; 4];
    input.read_exact(&mut length).map_err(cut)?;
    let length = u32::from_le_bytes(length);
    if length > HEADER_BYTES_MAX {
        return Err(RoutingError::Header(format!("{length} bytes, {HEADER_BYTES_MAX} at most")));
    }
    let mut json = Vec::new();
    input.take(length.into()).read_to_end(&mut json)?;
    if json.len() < length as usize {
        return Err(RoutingError::CutOff("in its header".into()));
    }
    // The version is checked first, because another version may have another header.
    #[derive(serde::Deserialize)]
    struct Versioned {
        format: String,
        version: u64,
    }
    let damaged = |error: serde_json::Error| RoutingError::Header(error.to_string());
    let versioned: Versioned = serde_json::from_slice(&json).map_err(damaged)?;
    if versioned.format != FORMAT {
        return Err(RoutingError::NotATrace("its header names another format".into()));
    }
    if versioned.version != u64::from(VERSION) {
        return Err(RoutingError::Version { found: versioned.version, known: VERSION });
    }
    let header: RoutingHeader = serde_json::from_slice(&json).map_err(damaged)?;
    header.check()?;
    Ok(header)
}

/// Reports an input that ended too early as a trace that is cut off, and returns other errors unchanged.
fn ended(error: io::Error, place: &str) -> RoutingError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => RoutingError::CutOff(place.to_owned()),
        _ => RoutingError::Io(error),
    }
}

struct Records<R: BufRead> {
    trace: RoutingTrace,
    input: R,
    records: u64,
    batches: u64,
}

impl<R: BufRead> Records<R> {
    /// Reads one record. Returns `false` after the last.
    fn next(&mut self) -> Result<bool, RoutingError> {
        self.records += 1;
        let [tag] = self.bytes()?;
        match tag {
            TURN => self.turn()?,
            BATCH => self.batch()?,
            END => {
                self.end()?;
                return Ok(false);
            }
            other => return Err(self.damaged(format!("there are no records of kind {other}"))),
        }
        Ok(true)
    }

    fn turn(&mut self) -> Result<(), RoutingError> {
        let [has_hash] = self.bytes()?;
        let hash = u64::from_le_bytes(self.bytes()?);
        let prompt_tokens = u32::from_le_bytes(self.bytes()?);
        if has_hash > 1 {
            return Err(self.damaged(format!("a flag is {has_hash}")));
        }
        if self.trace.turns.len() == u32::MAX as usize {
            return Err(self.damaged("there are too many turns".into()));
        }
        let prompt_hash = (has_hash == 1).then_some(hash);
        self.trace.begin_turn(Turn { prompt_hash, prompt_tokens });
        Ok(())
    }

    fn batch(&mut self) -> Result<(), RoutingError> {
        let [phase] = self.bytes()?;
        let phase = match phase {
            0 => Phase::Prompt,
            1 => Phase::Generate,
            other => return Err(self.damaged(format!("phase {other}: there are 0 and 1"))),
        };
        let tokens = u32::from_le_bytes(self.bytes()?);
        if tokens == 0 || tokens > BATCH_TOKENS_MAX {
            let why = format!("a batch of {tokens} tokens: 1 to {BATCH_TOKENS_MAX} are possible");
            return Err(self.damaged(why));
        }
        let tokens = tokens as usize;
        let width = self.trace.width();
        if self.trace.choices.len().saturating_add(tokens * width) > CHOICES_MAX {
            return Err(RoutingError::TooLarge { limit: CHOICES_MAX });
        }
        let header = &self.trace.header;
        let scored: usize = header.layers.iter().map(|layer| layer.experts as usize).sum();
        let weights = if header.weights { tokens * width } else { 0 };
        let scores = if header.scores { tokens * scored } else { 0 };
        let mut choices = Vec::new();
        self.fill(tokens * width, &mut choices, u16::from_le_bytes)?;
        let (mut weight_rows, mut score_rows) = (Vec::new(), Vec::new());
        self.fill(weights, &mut weight_rows, f32::from_le_bytes)?;
        self.fill(scores, &mut score_rows, f32::from_le_bytes)?;
        let rows = Rows { tokens, choices: &choices, weights: &weight_rows, scores: &score_rows };
        self.trace.push(phase, rows).map_err(|why| self.damaged(why))?;
        self.batches += 1;
        Ok(())
    }

    /// Reads `count` values in small chunks.
    fn fill<T, const N: usize>(
        &mut self,
        count: usize,
        out: &mut Vec<T>,
        value: impl Fn([u8; N]) -> T,
    ) -> Result<(), RoutingError> {
        let mut bytes = Vec::new();
        while out.len() < count {
            let wanted = (count - out.len()).min(VALUES_AT_A_TIME) * N;
            bytes.resize(wanted, 0);
            self.input.read_exact(&mut bytes).map_err(|error| ended(error, "in a batch"))?;
            let (values, _) = bytes.as_chunks::<N>();
            out.extend(values.iter().map(|bytes| value(*bytes)));
        }
        Ok(())
    }

    fn end(&mut self) -> Result<(), RoutingError> {
        let mut claimed = [0_u64; 3];
        for count in &mut claimed {
            *count = u64::from_le_bytes(self.bytes()?);
        }
        let found = [self.trace.turns.len() as u64, self.batches, self.trace.tokens as u64];
        if claimed != found {
            return Err(self.damaged(format!(
                "{found:?} turns, batches and tokens were found where {claimed:?} were written"
            )));
        }
        // Reading to the end also makes the decoder verify its checksum.
        match self.input.fill_buf()?.is_empty() {
            true => Ok(()),
            false => Err(self.damaged("something follows the last record".into())),
        }
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], RoutingError> {
        let mut bytes = [0; N];
        let read = self.input.read_exact(&mut bytes);
        read.map_err(|error| ended(error, "its last record is missing"))?;
        Ok(bytes)
    }

    fn damaged(&self, why: String) -> RoutingError {
        RoutingError::Record { record: self.records, why }
    }
}
