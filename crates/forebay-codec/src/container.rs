//! The container of codec `exponents`: a chunk of a file with the table, and with sub-chunks that are decoded independently.

use std::ops::Range;

use crate::bits::table_word;
use crate::encode::encode_with_base;
use crate::{CHUNK_WEIGHTS, CodecError, Isa, Table, Weights, chunk_bytes_max, decode_chunk_with};

/// Bytes before the starts of the sub-chunks: the type, three zeros, decoded bytes, the table, three zeros.
const HEADER: usize = 32;
const TABLE_AT: usize = 8;

/// A chunk of codec `exponents` that was read, but not yet decoded.
///
/// Sub-chunk `i` has the weights `CHUNK_WEIGHTS * i ..`, and each is decoded without the others: by several threads, or by a GPU.
#[derive(Debug, Clone)]
pub struct Container<'a> {
    bytes: &'a [u8],
    weights: Weights,
    table: Table,
    decoded_bytes: usize,
}

/// Returns the number of weights in whole numbers or blocks, of sub-chunks, and of bytes behind the last weight.
fn parts_of(weights: Weights, bytes: usize) -> (usize, usize, usize) {
    let count = weights.whole_weights(bytes);
    (count, count.div_ceil(CHUNK_WEIGHTS), bytes - weights.bytes_of(count))
}

/// Returns the place of sub-chunk number `index` in the decoded bytes.
fn place_of(weights: Weights, count: usize, index: usize) -> Range<usize> {
    let first = index * CHUNK_WEIGHTS;
    let end = count.min(first + CHUNK_WEIGHTS);
    weights.bytes_of(first)..weights.bytes_of(end)
}

/// Returns the most bytes that a container for `bytes` bytes has.
pub(crate) fn container_bytes_max(weights: Weights, bytes: usize) -> usize {
    let (count, parts, rest) = parts_of(weights, bytes);
    let last = match count % CHUNK_WEIGHTS {
        0 => 0,
        last => chunk_bytes_max(weights, last),
    };
    let whole = count / CHUNK_WEIGHTS * chunk_bytes_max(weights, CHUNK_WEIGHTS);
    HEADER + 4 * (parts + 1) + whole + last + rest
}

/// Appends a container with `bytes`, which are such weights, to `out`.
pub(crate) fn encode_container(
    weights: Weights,
    bytes: &[u8],
    out: &mut Vec<u8>,
) -> Result<(), CodecError> {
    let (count, parts, rest) = parts_of(weights, bytes.len());
    let (whole, behind) = bytes.split_at(bytes.len() - rest);
    let (table, bases) = Table::with_bases(weights, whole)?;
    let isa = Isa::best();
    let start = out.len();
    out.extend([weights.number(), 0, 0, 0]);
    out.extend((bytes.len() as u32).to_le_bytes());
    out.extend(table.to_bytes());
    out.extend([0; 3]);
    let starts = start + HEADER;
    out.resize(starts + 4 * (parts + 1), 0);
    for index in 0..=parts {
        let at = (out.len() - start) as u32;
        out[starts + 4 * index..][..4].copy_from_slice(&at.to_le_bytes());
        if index < parts {
            let own = &whole[place_of(weights, count, index)];
            encode_with_base(isa, weights, &table, bases.get(index), own, out)?;
        }
    }
    out.extend(behind);
    Ok(())
}

impl<'a> Container<'a> {
    /// Reads the header and checks where all sub-chunks lie. `decoded_bytes` is the number of bytes that the caller expects.
    ///
    /// # Errors
    /// Returns an error if these bytes are no such container.
    pub fn read(bytes: &'a [u8], decoded_bytes: usize) -> Result<Container<'a>, CodecError> {
        let Some((header, _)) = bytes.split_first_chunk::<HEADER>() else {
            return Err(CodecError::ChunkLength { bytes: bytes.len(), needed: HEADER });
        };
        let number = header[0];
        let weights = Weights::from_number(number).ok_or(CodecError::FloatNumber { number })?;
        let zeros = [header[1], header[2], header[3], header[29], header[30], header[31]];
        if zeros != [0; 6] {
            return Err(CodecError::NotZero);
        }
        let said = u32::from_le_bytes([header[4], header[5], header[6], header[7]]) as usize;
        if said != decoded_bytes {
            return Err(CodecError::DecodedBytes { bytes: said, expected: decoded_bytes });
        }
        let table = Table::from_bytes(&header[TABLE_AT..TABLE_AT + Table::BYTES])?;
        let container = Container { bytes, weights, table, decoded_bytes };
        container.check_places()?;
        Ok(container)
    }

    fn check_places(&self) -> Result<(), CodecError> {
        let (_, parts, rest) = parts_of(self.weights, self.decoded_bytes);
        let first = HEADER + 4 * (parts + 1);
        if self.bytes.len() < first + rest {
            return Err(CodecError::ChunkLength { bytes: self.bytes.len(), needed: first + rest });
        }
        let end = self.bytes.len() - rest;
        let mut last = first;
        for part in 0..=parts {
            let at = self.start(part);
            let wrong = match part {
                0 => at != first,
                _ => at < last || !at.is_multiple_of(4),
            };
            if wrong || at > end || (part == parts && at != end) {
                return Err(CodecError::PartPlace { part, at });
            }
            last = at;
        }
        Ok(())
    }

    /// Returns where sub-chunk number `part` begins. The number after the last gives the end of the last.
    fn start(&self, part: usize) -> usize {
        table_word(&self.bytes[HEADER..], part)
    }

    /// Returns the number of bytes after decoding.
    pub fn decoded_bytes(&self) -> usize {
        self.decoded_bytes
    }

    pub fn weights(&self) -> Weights {
        self.weights
    }

    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Returns the number of sub-chunks.
    pub fn parts(&self) -> usize {
        parts_of(self.weights, self.decoded_bytes).1
    }

    /// Returns sub-chunk number `part` as it is stored, and the place of its weights in the decoded bytes.
    ///
    /// # Panics
    /// Panics if there is no such sub-chunk.
    pub fn part(&self, part: usize) -> (&'a [u8], Range<usize>) {
        let (count, parts, _) = parts_of(self.weights, self.decoded_bytes);
        assert!(part < parts, "sub-chunk {part} of {parts}");
        let stored = &self.bytes[self.start(part)..self.start(part + 1)];
        (stored, place_of(self.weights, count, part))
    }

    /// Returns the bytes behind the last whole weight or block, which are stored as they are.
    pub fn rest(&self) -> &'a [u8] {
        let (_, _, rest) = parts_of(self.weights, self.decoded_bytes);
        &self.bytes[self.bytes.len() - rest..]
    }

    /// Decodes all sub-chunks to `decoded`.
    ///
    /// # Errors
    /// Returns an error if a sub-chunk is damaged, or if `decoded` has another length than [`Container::read`] was told.
    pub fn decode(&self, decoded: &mut [u8]) -> Result<(), CodecError> {
        if decoded.len() != self.decoded_bytes {
            let (bytes, expected) = (self.decoded_bytes, decoded.len());
            return Err(CodecError::DecodedBytes { bytes, expected });
        }
        let isa = Isa::best();
        for part in 0..self.parts() {
            let (stored, place) = self.part(part);
            decode_chunk_with(isa, self.weights, &self.table, stored, &mut decoded[place])?;
        }
        let rest = self.rest();
        decoded[self.decoded_bytes - rest.len()..].copy_from_slice(rest);
        Ok(())
    }
}
