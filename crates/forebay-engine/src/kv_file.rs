//! Files with the keys and values of a session: a conversation that is saved with them need not be read again.

use std::hash::Hasher as _;
use std::io::{self, Read, Write};

use forebay_ops::RowKind;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use twox_hash::XxHash3_64;

use crate::kv::Row;
use crate::{EngineError, Session};

/// First bytes of a file, with the version of its format.
const MAGIC: [u8; 8] = *b"fbaykvs1";
/// Most bytes of a header: more than the tokens of any context take.
const HEADER_BYTES: u64 = 256 << 20;

/// Errors of files with keys and values.
#[derive(Debug, thiserror::Error)]
pub enum KvFileError {
    #[error("these keys and values cannot be used: {why}")]
    Bad { why: String },
    #[error("keys and values cannot be read or written: {0}")]
    Io(std::io::Error),
}

/// Everything before the blocks.
#[derive(Debug, Serialize, Deserialize)]
struct Header {
    /// Hash of everything on which keys and values depend beside the tokens.
    identity: String,
    tokens: Vec<u32>,
    /// Consecutive tokens of a prompt (false) or that were generated (true), and their number.
    generated: Vec<(bool, usize)>,
}

impl Header {
    fn new(identity: String, rows: &[Row]) -> Header {
        let runs = rows.chunk_by(|a, b| a.kind == b.kind);
        Header {
            identity,
            tokens: rows.iter().map(|row| row.token).collect(),
            generated: runs.map(|run| (run[0].kind == RowKind::Decode, run.len())).collect(),
        }
    }

    /// Returns the rows, or `None` if the counts contradict each other.
    fn rows(&self) -> Option<Vec<Row>> {
        let total =
            self.generated.iter().try_fold(0_usize, |sum, (_, count)| sum.checked_add(*count));
        if total != Some(self.tokens.len()) {
            return None;
        }
        let kinds = self.generated.iter().flat_map(|&(generated, count)| {
            let kind = if generated { RowKind::Decode } else { RowKind::Prompt };
            std::iter::repeat_n(kind, count)
        });
        let rows = self.tokens.iter().zip(kinds).map(|(&token, kind)| Row { token, kind });
        Some(rows.collect())
    }
}

/// Hashes what is read or written.
struct Hashed<T> {
    inner: T,
    hash: XxHash3_64,
    bytes: u64,
}

impl<T> Hashed<T> {
    fn new(inner: T) -> Hashed<T> {
        Hashed { inner, hash: XxHash3_64::new(), bytes: 0 }
    }

    fn note(&mut self, bytes: &[u8]) {
        self.hash.write(bytes);
        self.bytes += bytes.len() as u64;
    }
}

impl<T: Write> Write for Hashed<T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.note(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl<T: Read> Read for Hashed<T> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(bytes)?;
        self.note(&bytes[..read]);
        Ok(read)
    }
}

impl Session {
    /// Writes the keys and values of the cached tokens: a magic number, the length of a header in JSON, the header, the blocks,
    /// and a checksum (XXH3, 64 bits) of everything before it. Returns the number of bytes.
    ///
    /// # Errors
    /// Returns an error if the device fails, if the model's files cannot be read, or if `to` fails.
    pub fn write_kv(&mut self, to: &mut dyn Write) -> Result<u64, EngineError> {
        let header = Header::new(self.kv_file_identity()?, self.runner.rows(self.sequence));
        let header = serde_json::to_vec(&header).expect("the header has no maps");
        let mut to = Hashed::new(to);
        let mut write = |bytes: &[u8]| to.write_all(bytes).map_err(KvFileError::Io);
        write(&MAGIC)?;
        write(&(header.len() as u64).to_le_bytes())?;
        write(&header)?;
        self.runner.write_blocks(self.sequence, &mut to)?;
        let checksum = to.hash.finish();
        to.write_all(&checksum.to_le_bytes()).map_err(KvFileError::Io)?;
        Ok(to.bytes)
    }

    /// Takes keys and values that [`Session::write_kv`] has written, in place of the cached tokens. Returns the number of tokens.
    /// What follows has the bits that it would have had in the session that wrote them.
    ///
    /// # Errors
    /// Returns [`KvFileError::Bad`] if `from` has other bytes than were written, or was made with another model, KV type,
    /// device or build, or if the context is too small. Returns other errors if `from` or the device fails. The cache is empty
    /// then.
    pub fn read_kv(&mut self, from: &mut dyn Read) -> Result<usize, EngineError> {
        let bad = |why: &str| EngineError::from(KvFileError::Bad { why: why.into() });
        let cut = |error: io::Error| match error.kind() {
            io::ErrorKind::UnexpectedEof => bad("it is cut off"),
            _ => KvFileError::Io(error).into(),
        };
        self.reset();
        let mut from = Hashed::new(from);
        let (mut magic, mut length) = ([0; 8], [0; 8]);
        from.read_exact(&mut magic).map_err(cut)?;
        if magic != MAGIC {
            return Err(bad("it has not the first bytes of such a file"));
        }
        from.read_exact(&mut length).map_err(cut)?;
        let length = u64::from_le_bytes(length);
        if length > HEADER_BYTES {
            return Err(bad("its header is too long"));
        }
        let mut header = Vec::new();
        (&mut from).take(length).read_to_end(&mut header).map_err(KvFileError::Io)?;
        if header.len() as u64 != length {
            return Err(bad("it is cut off"));
        }
        let header: Header = serde_json::from_slice(&header)
            .map_err(|error| bad(&format!("its header: {error}")))?;
        if header.identity != self.kv_file_identity()? {
            return Err(bad(
                "it was made with another model, device, type of keys and values or build",
            ));
        }
        let rows =
            header.rows().ok_or_else(|| bad("its counts of tokens contradict each other"))?;
        let (context, vocabulary) = (self.context(), self.vocab_size());
        if rows.len() > context {
            let why = format!("it has {} tokens, and the context holds {context}", rows.len());
            return Err(bad(&why));
        }
        if rows.iter().any(|row| row.token as usize >= vocabulary) {
            return Err(bad("it has tokens that the model does not know"));
        }
        // A session has a single sequence.
        self.end_sequence();
        let read = self.runner.read_blocks(&rows, &mut from, |from| {
            let (own, mut checksum) = (from.hash.finish(), [0; 8]);
            from.read_exact(&mut checksum).map_err(KvFileError::Io)?;
            match u64::from_le_bytes(checksum) == own && from.read(&mut [0]).is_ok_and(|n| n == 0) {
                true => Ok(()),
                false => Err(KvFileError::Bad { why: "its checksum does not match".into() }.into()),
            }
        });
        match read {
            Ok(sequence) => self.sequence = sequence,
            Err(error) => {
                self.begin_sequence();
                return Err(match error {
                    EngineError::KvFile(KvFileError::Io(error)) => cut(error),
                    error => error,
                });
            }
        }
        self.cached.extend(rows.iter().map(|row| row.token));
        Ok(rows.len())
    }

    fn kv_file_identity(&self) -> Result<String, EngineError> {
        let hash = Sha256::digest(self.strong_identity()?);
        Ok(hash.iter().map(|byte| format!("{byte:02x}")).collect())
    }
}
