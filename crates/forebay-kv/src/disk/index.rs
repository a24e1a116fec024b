//! Which block is in which segment, and which segment goes first.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use super::format::{Record, Tag};
use super::seal::Cipher;
use crate::block::{BlockHash, BlockKey};

/// A file of records.
#[derive(Debug)]
pub struct Segment {
    pub file: Arc<File>,
    pub path: PathBuf,
    pub tag: Tag,
    pub cipher: Option<Arc<Cipher>>,
    /// Length of the records.
    pub bytes: u64,
    pub records: Vec<Record>,
}

/// Where a block is.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    pub segment: u64,
    pub record: Record,
    /// Number of the last use, counted over all blocks.
    last_use: u64,
}

/// All segments and blocks of a folder.
#[derive(Debug, Default)]
pub struct Index {
    segments: BTreeMap<u64, Segment>,
    blocks: HashMap<BlockKey, Place>,
    /// Number of blocks directly behind a block, with those that wait to be written.
    followers: HashMap<BlockHash, u32>,
    /// Blocks that wait to be written, each with the block before it.
    queued: HashMap<BlockKey, BlockHash>,
    bytes: u64,
    uses: u64,
}

impl Index {
    /// Adds a segment with its records. A block that another segment has already is found there.
    pub fn add_segment(&mut self, number: u64, mut segment: Segment) {
        self.bytes += segment.bytes;
        let records = std::mem::take(&mut segment.records);
        self.segments.insert(number, segment);
        records.into_iter().for_each(|record| self.add(number, record));
    }

    /// Adds a record whose bytes are already counted in the segment's.
    fn add(&mut self, number: u64, record: Record) {
        let Some(segment) = self.segments.get_mut(&number) else { return };
        segment.records.push(record);
        self.uses += 1;
        let place = Place { segment: number, record, last_use: self.uses };
        *self.followers.entry(record.meta.link.previous).or_default() += 1;
        if let Some(earlier) = self.blocks.insert(record.meta.key, place) {
            self.end_follower(earlier.record.meta.link.previous);
        }
    }

    /// Adds a record that was appended to a segment.
    pub fn append(&mut self, number: u64, record: Record, stored_bytes: u64) {
        if let Some(segment) = self.segments.get_mut(&number) {
            segment.bytes += stored_bytes;
            self.bytes += stored_bytes;
            self.add(number, record);
        }
        self.dequeue(record.meta.key);
    }

    /// Returns where a block is, and notes the use.
    pub fn find(&mut self, key: BlockKey) -> Option<Place> {
        let place = self.blocks.get_mut(&key)?;
        self.uses += 1;
        place.last_use = self.uses;
        Some(*place)
    }

    /// Returns the length of a block.
    pub fn len_of(&self, key: BlockKey) -> Option<u64> {
        Some(self.blocks.get(&key)?.record.len)
    }

    /// Returns true if a block that follows this one is here or waits to be written.
    pub fn has_followers(&self, hash: BlockHash) -> bool {
        self.followers.contains_key(&hash)
    }

    /// Notes that a block waits to be written. Returns false if it is here already, or waits already.
    pub fn enqueue(&mut self, key: BlockKey, previous: BlockHash) -> bool {
        if self.blocks.contains_key(&key) || self.queued.contains_key(&key) {
            return false;
        }
        self.queued.insert(key, previous);
        *self.followers.entry(previous).or_default() += 1;
        true
    }

    /// Notes that a block does not wait any more.
    pub fn dequeue(&mut self, key: BlockKey) {
        if let Some(previous) = self.queued.remove(&key) {
            self.end_follower(previous);
        }
    }

    /// Forgets a block, because its bytes are damaged or cannot be read.
    pub fn forget(&mut self, key: BlockKey) {
        if let Some(place) = self.blocks.remove(&key) {
            self.end_follower(place.record.meta.link.previous);
        }
    }

    /// Removes the segment whose last use is the longest ago, except the segment `kept`. Returns it.
    pub fn remove_oldest(&mut self, kept: Option<u64>) -> Option<Segment> {
        let number = *self
            .segments
            .iter()
            .filter(|(number, _)| Some(**number) != kept)
            .map(|(number, segment)| (self.last_use(*number, segment), number))
            .min()?
            .1;
        self.remove_segment(number)
    }

    /// Removes a segment with its blocks.
    pub fn remove_segment(&mut self, number: u64) -> Option<Segment> {
        let segment = self.segments.remove(&number)?;
        self.bytes -= segment.bytes;
        for record in &segment.records {
            let key = record.meta.key;
            if self.blocks.get(&key).is_some_and(|place| place.segment == number) {
                self.forget(key);
            }
        }
        Some(segment)
    }

    fn last_use(&self, number: u64, segment: &Segment) -> u64 {
        let place = |record: &Record| self.blocks.get(&record.meta.key);
        let own = segment.records.iter().filter_map(place).filter(|at| at.segment == number);
        own.map(|place| place.last_use).max().unwrap_or(0)
    }

    fn end_follower(&mut self, previous: BlockHash) {
        if let Some(count) = self.followers.get_mut(&previous) {
            *count -= 1;
            if *count == 0 {
                self.followers.remove(&previous);
            }
        }
    }

    pub fn segment(&self, number: u64) -> Option<&Segment> {
        self.segments.get(&number)
    }

    pub fn segments(&self) -> impl Iterator<Item = (u64, &Segment)> {
        self.segments.iter().map(|(number, segment)| (*number, segment))
    }

    /// Returns a number that no segment has had.
    pub fn next_number(&self) -> u64 {
        self.segments.last_key_value().map_or(1, |(number, _)| number + 1)
    }

    /// Returns the bytes of all segments.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the number of blocks.
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }
}
