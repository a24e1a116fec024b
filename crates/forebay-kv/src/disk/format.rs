//! Bytes of segments, records and index files. All numbers are little-endian.
//!
//! A segment is a file `NUMBER.kv` of records that are only appended. Every record begins at a multiple of 4,096 bytes and
//! is made of a header of 4,096 bytes and the block's bytes, filled up with zeros to a multiple of 4,096.
//!
//! | header | bytes |
//! | --- | --- |
//! | `fbkvrec1` | 0..8 |
//! | tag of the segment, random | 8..24 |
//! | offset of the record in the segment | 24..32 |
//! | length of the block | 32..40 |
//! | description of the block, encrypted if the store is | 40..152 |
//! | zeros | 152..4,088 |
//! | XXH3, 64 bits, of everything before it | 4,088..4,096 |
//!
//! | description | bytes |
//! | --- | --- |
//! | hash of the block | 0..16 |
//! | hash of the block before it | 16..32 |
//! | tag of the model | 32..40 |
//! | layer group | 40..44 |
//! | index of the block in its sequence | 44..48 |
//! | time of writing, seconds since 1970 | 48..56 |
//! | XXH3, 128 bits, of the block's bytes before encryption | 56..72 |
//! | zeros | 72..96 |
//! | tag of the cipher, or zeros | 96..112 |
//!
//! An encrypted block is followed by the 16 bytes of its tag.
//!
//! When a segment is complete, its descriptions are also written to `NUMBER.index`: `fbkvidx1`, the tag of the segment, the
//! length of the segment, the number of records, for each record its offset, its length and its description (not encrypted
//! one by one), 16 bytes for the tag of the cipher over all records, and XXH3, 64 bits, of everything before it.

use twox_hash::{XxHash3_64, XxHash3_128};

use super::seal::{Cipher, Sealed, TAG_BYTES};
use crate::block::{BlockHash, BlockKey, Link};
use crate::buffers::PAGE;

pub const HEADER_BYTES: usize = PAGE;
/// Largest block. The largest of known models are states of recurrent layers, of some 100 MiB.
pub const BLOCK_BYTES_MAX: u64 = 1 << 30;
const RECORD_MAGIC: [u8; 8] = *b"fbkvrec1";
const INDEX_MAGIC: [u8; 8] = *b"fbkvidx1";
const META_BYTES: usize = 112;
const META: std::ops::Range<usize> = 40..40 + META_BYTES;
const INDEX_ENTRY_BYTES: usize = 16 + META_BYTES;

/// Random bytes that a segment has in each of its records.
pub type Tag = [u8; 16];

/// Description of a block in a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Meta {
    pub key: BlockKey,
    pub link: Link,
    /// The first bytes of the model's root hash.
    pub model: u64,
    /// Seconds since 1970.
    pub written: u64,
    /// XXH3 of the block's bytes.
    pub checksum: u128,
}

/// A record: where a block is in its segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// Offset of the header.
    pub offset: u64,
    /// Length of the block.
    pub len: u64,
    pub meta: Meta,
}

impl Record {
    /// Returns true if a segment of this length can hold the record. Every record of a file is checked, so that later sums with
    /// its numbers cannot overflow.
    fn is_inside(&self, segment_bytes: u64, is_sealed: bool) -> bool {
        self.offset.is_multiple_of(PAGE as u64)
            && self.len <= BLOCK_BYTES_MAX
            && self.stored_bytes(is_sealed) <= segment_bytes
            && self.offset <= segment_bytes - self.stored_bytes(is_sealed)
    }

    /// Returns the length of the record in the file.
    pub fn stored_bytes(&self, is_sealed: bool) -> u64 {
        (HEADER_BYTES + payload_bytes(self.len as usize, is_sealed)) as u64
    }
}

/// Returns the length of a block of `len` bytes in the file, without its header. `len` is at most [`BLOCK_BYTES_MAX`].
pub fn payload_bytes(len: usize, is_sealed: bool) -> usize {
    (len + if is_sealed { TAG_BYTES } else { 0 }).next_multiple_of(PAGE)
}

/// Returns the checksum of a block's bytes.
pub fn checksum(block: &[u8]) -> u128 {
    XxHash3_128::oneshot(block)
}

fn bytes<const N: usize>(from: &[u8], at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&from[at..at + N]);
    bytes
}

fn number(from: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes(from, at))
}

impl Meta {
    fn write(&self, to: &mut [u8]) {
        to.fill(0);
        to[..16].copy_from_slice(&self.key.hash.0);
        to[16..32].copy_from_slice(&self.link.previous.0);
        to[32..40].copy_from_slice(&self.model.to_le_bytes());
        to[40..44].copy_from_slice(&self.key.group.to_le_bytes());
        to[44..48].copy_from_slice(&self.link.index.to_le_bytes());
        to[48..56].copy_from_slice(&self.written.to_le_bytes());
        to[56..72].copy_from_slice(&self.checksum.to_le_bytes());
    }

    fn read(from: &[u8]) -> Meta {
        Meta {
            key: BlockKey {
                hash: BlockHash(bytes(from, 0)),
                group: u32::from_le_bytes(bytes(from, 40)),
            },
            link: Link {
                previous: BlockHash(bytes(from, 16)),
                index: u32::from_le_bytes(bytes(from, 44)),
            },
            model: number(from, 32),
            written: number(from, 48),
            checksum: u128::from_le_bytes(bytes(from, 56)),
        }
    }
}

/// Writes a record to `buffer`, which begins with room for the header. Its block is copied behind it. Returns the length of
/// the record.
pub fn write_record(
    buffer: &mut [u8],
    tag: &Tag,
    record: &Record,
    cipher: Option<&Cipher>,
) -> usize {
    let len = record.len as usize;
    let stored = payload_bytes(len, cipher.is_some());
    let (header, payload) = buffer[..HEADER_BYTES + stored].split_at_mut(HEADER_BYTES);
    header.fill(0);
    header[..8].copy_from_slice(&RECORD_MAGIC);
    header[8..24].copy_from_slice(tag);
    header[24..32].copy_from_slice(&record.offset.to_le_bytes());
    header[32..40].copy_from_slice(&record.len.to_le_bytes());
    record.meta.write(&mut header[META]);
    payload[len..].fill(0);
    if let Some(cipher) = cipher {
        cipher.seal(Sealed::Meta, record.offset, &mut header[META]);
        cipher.seal(Sealed::Payload, record.offset, &mut payload[..len + TAG_BYTES]);
    }
    let sum = XxHash3_64::oneshot(&header[..HEADER_BYTES - 8]);
    header[HEADER_BYTES - 8..].copy_from_slice(&sum.to_le_bytes());
    HEADER_BYTES + stored
}

/// Reads a header that stands at `offset` of the segment with this tag and length. Returns `None` if it is not one, or if its
/// block would end outside the segment.
pub fn read_header(
    header: &[u8],
    tag: &Tag,
    offset: u64,
    segment_bytes: u64,
    cipher: Option<&Cipher>,
) -> Option<Record> {
    let sum = number(header, HEADER_BYTES - 8);
    let fits = header[..8] == RECORD_MAGIC && header[8..24] == *tag && number(header, 24) == offset;
    if !fits || XxHash3_64::oneshot(&header[..HEADER_BYTES - 8]) != sum {
        return None;
    }
    let mut meta: [u8; META_BYTES] = bytes(header, META.start);
    if let Some(cipher) = cipher
        && !cipher.open(Sealed::Meta, offset, &mut meta)
    {
        return None;
    }
    let record = Record { offset, len: number(header, 32), meta: Meta::read(&meta) };
    record.is_inside(segment_bytes, cipher.is_some()).then_some(record)
}

/// Returns the tag of the segment that begins with this header, if it is one.
pub fn tag_of(header: &[u8]) -> Option<Tag> {
    (header[..8] == RECORD_MAGIC && number(header, 24) == 0).then(|| bytes(header, 8))
}

/// Decrypts the block of a record, which is at the start of `payload`, and returns true if these are its bytes.
pub fn check_payload(record: &Record, payload: &mut [u8], cipher: Option<&Cipher>) -> bool {
    let len = record.len as usize;
    if let Some(cipher) = cipher
        && !cipher.open(Sealed::Payload, record.offset, &mut payload[..len + TAG_BYTES])
    {
        return false;
    }
    checksum(&payload[..len]) == record.meta.checksum
}

/// Returns the content of a segment's index file.
pub fn write_index(
    tag: &Tag,
    segment_bytes: u64,
    records: &[Record],
    cipher: Option<&Cipher>,
) -> Vec<u8> {
    let mut index = INDEX_MAGIC.to_vec();
    index.extend(tag);
    index.extend(segment_bytes.to_le_bytes());
    index.extend((records.len() as u64).to_le_bytes());
    let first = index.len();
    for record in records {
        index.extend(record.offset.to_le_bytes());
        index.extend(record.len.to_le_bytes());
        let at = index.len();
        index.resize(at + META_BYTES, 0);
        record.meta.write(&mut index[at..]);
    }
    index.resize(index.len() + TAG_BYTES, 0);
    if let Some(cipher) = cipher {
        cipher.seal(Sealed::Index, segment_bytes, &mut index[first..]);
    }
    let sum = XxHash3_64::oneshot(&index);
    index.extend(sum.to_le_bytes());
    index
}

/// Reads an index file of a segment with this tag and length. Returns `None` if it is damaged or of another segment.
pub fn read_index(
    index: &[u8],
    tag: &Tag,
    segment_bytes: u64,
    cipher: Option<&Cipher>,
) -> Option<Vec<Record>> {
    let (content, sum) = index.split_last_chunk()?;
    let (head, records) = content.split_at_checked(40)?;
    let fits = head[..8] == INDEX_MAGIC && head[8..24] == *tag && number(head, 24) == segment_bytes;
    if !fits || XxHash3_64::oneshot(content) != u64::from_le_bytes(*sum) {
        return None;
    }
    let count = usize::try_from(number(head, 32)).ok()?;
    if Some(records.len()) != count.checked_mul(INDEX_ENTRY_BYTES)?.checked_add(TAG_BYTES) {
        return None;
    }
    let mut records = records.to_vec();
    if let Some(cipher) = cipher
        && !cipher.open(Sealed::Index, segment_bytes, &mut records)
    {
        return None;
    }
    let entries = records[..count * INDEX_ENTRY_BYTES].chunks_exact(INDEX_ENTRY_BYTES);
    let read = |entry: &[u8]| Record {
        offset: number(entry, 0),
        len: number(entry, 8),
        meta: Meta::read(&entry[16..]),
    };
    let records: Vec<Record> = entries.map(read).collect();
    let is_inside = |record: &Record| record.is_inside(segment_bytes, cipher.is_some());
    records.iter().all(is_inside).then_some(records)
}

#[cfg(test)]
mod tests {
    use super::super::seal::Secret;
    use super::*;

    fn record(offset: u64, len: u64, block: &[u8]) -> Record {
        let key = BlockKey { hash: BlockHash([7; 16]), group: 3 };
        let link = Link { previous: BlockHash([9; 16]), index: 12 };
        let meta = Meta { key, link, model: 5, written: 1_700_000_000, checksum: checksum(block) };
        Record { offset, len, meta }
    }

    fn ciphers() -> [Option<Cipher>; 2] {
        [None, Some(Secret::new(&[1; 32]).unwrap().cipher(&[2; 16]))]
    }

    #[test]
    fn a_record_comes_back_and_every_flipped_bit_is_noticed() {
        for cipher in ciphers() {
            let cipher = cipher.as_ref();
            let block: Vec<u8> = (0..5000_u32).map(|at| (at * 7) as u8).collect();
            let (tag, record) = ([4; 16], record(8192, 5000, &block));
            let mut bytes = vec![0xAA; HEADER_BYTES + 8192];
            bytes[HEADER_BYTES..][..5000].copy_from_slice(&block);
            let len = write_record(&mut bytes, &tag, &record, cipher);
            assert_eq!(len as u64, record.stored_bytes(cipher.is_some()));
            assert_eq!(cipher.is_none(), bytes[HEADER_BYTES..][..5000] == block);
            assert_eq!(read_header(&bytes, &tag, 8192, 1 << 20, cipher), Some(record));
            assert_eq!(read_header(&bytes, &tag, 4096, 1 << 20, cipher), None);
            assert_eq!(read_header(&bytes, &[5; 16], 8192, 1 << 20, cipher), None);
            for at in (0..HEADER_BYTES).step_by(3) {
                bytes[at] ^= 1 << (at % 8);
                assert_eq!(read_header(&bytes, &tag, 8192, 1 << 20, cipher), None, "{at}");
                bytes[at] ^= 1 << (at % 8);
            }
            for at in [0, 2500, 4999] {
                let mut payload = bytes[HEADER_BYTES..].to_vec();
                payload[at] ^= 0x10;
                assert!(!check_payload(&record, &mut payload, cipher), "{at}");
            }
            let mut payload = bytes[HEADER_BYTES..].to_vec();
            assert!(check_payload(&record, &mut payload, cipher));
            assert_eq!(payload[..5000], block);
        }
    }

    #[test]
    fn an_index_comes_back_and_others_are_refused() {
        for cipher in ciphers() {
            let cipher = cipher.as_ref();
            let records = [record(0, 100, b"x"), record(8192, 5000, b"y")];
            let (tag, bytes) = ([4; 16], 1 << 20);
            let index = write_index(&tag, bytes, &records, cipher);
            assert_eq!(read_index(&index, &tag, bytes, cipher).as_deref(), Some(&records[..]));
            assert_eq!(read_index(&index, &tag, bytes + 4096, cipher), None);
            assert_eq!(read_index(&index, &[0; 16], bytes, cipher), None);
            for at in 0..index.len() {
                let mut index = index.clone();
                index[at] ^= 0x20;
                assert_eq!(read_index(&index, &tag, bytes, cipher), None, "{at}");
                assert_eq!(read_index(&index[..at], &tag, bytes, cipher), None, "{at}");
            }
            // Records outside the segment.
            let index = write_index(&tag, 8192, &records, cipher);
            assert_eq!(read_index(&index, &tag, 8192, cipher), None);
        }
    }
}
