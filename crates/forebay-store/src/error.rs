//! Error types, which carry the file, offset and block as data.

use std::path::PathBuf;
use std::time::Duration;

use forebay_format::at_least;

use crate::engine::BlockLabel;
use crate::load::UploadError;
use crate::output_file::OutputError;

/// What is wrong with a chunk of a pack.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    #[error("its checksum is {found:016x}, {expected:016x} was written")]
    Checksum { expected: u64, found: u64 },
    #[error("it cannot be decoded: {0}")]
    Coding(Box<forebay_codec::CodecError>),
}

/// Error of a file, an arena or an engine as a whole. The error of one block's read is a [`ReadError`].
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("cannot open {}: {source}", file.display())]
    Open { file: PathBuf, source: std::io::Error },
    #[error("cannot use {url}: {why}")]
    Url { url: String, why: String },
    #[error("{}: is a folder or a device, and a regular file is needed", file.display())]
    NotAFile { file: PathBuf },
    #[error("cannot read {} at byte {offset}: {source}", file.display())]
    Read { file: PathBuf, offset: u64, source: std::io::Error },
    #[error(
        "{} ends too early: {length} bytes were wanted at byte {offset}, the file has {file_bytes}",
        file.display()
    )]
    UnexpectedEnd { file: PathBuf, offset: u64, length: u64, file_bytes: u64 },
    #[error(
        "{} is damaged at byte {offset}, in {place}: {damage}; get the file again (forebay verify lists all damage)",
        file.display()
    )]
    Corrupt { file: PathBuf, offset: u64, place: String, damage: Damage },
    #[error(transparent)]
    Output(#[from] OutputError),
    #[error("cannot copy weights to the device: {source}")]
    Upload { source: UploadError },
    #[error("interrupted")]
    Interrupted,
    #[error(transparent)]
    Block(#[from] ReadError),
    #[error("an extent names file number {index}, but only {files} files are open")]
    UnknownFile { index: u32, files: usize },
    #[error("an extent of {extent_bytes} bytes was to be read into a buffer of {buffer_bytes}")]
    BufferLength { extent_bytes: u64, buffer_bytes: usize },
    #[error("cannot query or drop the cached pages of {}: {source}", file.display())]
    PageCache { file: PathBuf, source: std::io::Error },
    #[error(
        "{bytes} bytes of {} stay in the page cache although they were dropped: another program has \
         the file mapped, locked or open for writing; end it (fuser -v names it) and try again",
        file.display()
    )]
    StillCached { file: PathBuf, bytes: u64 },
    #[error("the measurement failed: {why}")]
    Probe { why: String },
    #[error("cannot reserve {} of memory: {source}", at_least(*bytes as u64))]
    Memory { bytes: usize, source: std::io::Error },
    #[error("the arena has {free} bytes left, a slot of {wanted} bytes does not fit")]
    ArenaFull { wanted: usize, free: usize },
    #[error("read engine option {option} is {given}: {remedy}")]
    Option { option: &'static str, given: String, remedy: &'static str },
    #[error("the {engine} engine cannot be used: {why}")]
    Unavailable { engine: &'static str, why: String },
    #[error("the {engine} engine failed: {source}")]
    Engine { engine: &'static str, source: std::io::Error },
    #[error(
        "the io_uring engine was moved to another thread while {writing} requests were in the kernel; \
         wait for them before moving it"
    )]
    WrongThread { writing: usize },
}

/// Error of one block's read. The bytes of the block's slot must not be used.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("cannot read {block} from {} at byte {offset}, after {attempts} attempts: {source}", file.display())]
    Io { file: PathBuf, offset: u64, block: BlockLabel, attempts: u32, source: std::io::Error },
    #[error(
        "{block} needs {} up to byte {wanted_end}, but the file ends at byte {file_end}; \
         it is truncated or changed while it was open",
        file.display()
    )]
    UnexpectedEnd { file: PathBuf, file_end: u64, wanted_end: u64, block: BlockLabel },
    #[error(
        "the read of {block} from {} at byte {offset} has not finished within {:.1} s; \
         the disk hangs or is far too slow",
        file.display(),
        waited.as_secs_f64()
    )]
    Stalled { file: PathBuf, offset: u64, block: BlockLabel, waited: Duration },
    #[error(
        "{block} is damaged in {} at byte {offset} (in {place}): {damage}, also when read again; \
         get the file again (forebay verify lists all damage)",
        file.display()
    )]
    Corrupt { file: PathBuf, offset: u64, place: String, block: BlockLabel, damage: Damage },
    #[error(
        "the layout of {block} would read only a part of a chunk of {} at byte {offset}; \
         plan it with the files that it is read from",
        file.display()
    )]
    PartOfChunk { file: PathBuf, offset: u64, block: BlockLabel },
    #[error("the read of {block} was cancelled")]
    Cancelled { block: BlockLabel },
    #[error("{block} names file number {index}, but only {files} files are open")]
    UnknownFile { index: u32, files: usize, block: BlockLabel },
    #[error("{block} needs a slot of {needed_bytes} bytes, its buffer has {given_bytes}")]
    SlotTooSmall { needed_bytes: usize, given_bytes: usize, block: BlockLabel },
    #[error(
        "the relayout of {block} needs a buffer of {needed_bytes} bytes, the engine has {given_bytes}"
    )]
    ScratchTooSmall { needed_bytes: usize, given_bytes: usize, block: BlockLabel },
    #[error(
        "the layout of {block} was planned for alignment {planned}, {} needs {needed}",
        file.display()
    )]
    Misaligned { file: PathBuf, planned: usize, needed: usize, block: BlockLabel },
}
