//! Parses a pack's front, header and sections, into a catalog. Block data is not read.

use std::io::{BufReader, Read};
use std::path::Path;
use std::sync::Arc;

use forebay_codec::Codec;

use super::chunks::CodedChunk;
use super::restore::FILES;
use super::section::{Section, SectionExtent};
use super::tensors;
use super::{
    Block, BlockKind, CHUNK_BYTES_LIMIT, ChunkIndex, DocumentKind, Embedded, MAGIC, NO_INDEX,
    Origin, PAGE_BYTES, Pack, VERSION_CODED, VERSION_PLAIN, checksum, is_plain_name,
};
use crate::catalog::folder_of;
use crate::huggingface::{Folder, read_metadata};
use crate::{Catalog, FormatError, Source, Storage, TensorInfo, gguf};

const DOCUMENTS_MAX: u64 = 16_384;
const BLOCKS_MAX: u64 = 1 << 20;
/// Most bytes of all blocks after decoding.
const DECODED_BYTES_MAX: u64 = 1 << 56;

/// Returns true if the file begins like a pack.
///
/// # Errors
/// Returns [`FormatError::Io`] if the file cannot be read.
pub fn is_pack(storage: &dyn Storage, path: &Path) -> Result<bool, FormatError> {
    let (file, _) = storage.open(path).map_err(FormatError::io(path))?;
    let mut start = Vec::with_capacity(MAGIC.len());
    file.take(MAGIC.len() as u64).read_to_end(&mut start).map_err(FormatError::io(path))?;
    Ok(start == MAGIC)
}

/// Returns the number of bytes in front of a pack's blocks, by its first [`PAGE_BYTES`]. Returns `None` if these bytes do not
/// begin a pack.
pub fn front_bytes(page: &[u8]) -> Option<u64> {
    (page.starts_with(&MAGIC) && page.len() as u64 >= PAGE_BYTES).then(|| u64_at(page, 24))
}

/// Opens a pack. Reads and checks everything in front of the blocks.
///
/// # Errors
/// Returns an error if the pack cannot be opened, see [`Catalog::open`].
pub fn open(storage: &dyn Storage, path: &Path) -> Result<Catalog, FormatError> {
    let (file, file_bytes) = storage.open(path).map_err(FormatError::io(path))?;
    parse(BufReader::with_capacity(256 << 10, file), path, file_bytes)
}

/// Parses a whole pack that lies in memory.
///
/// # Errors
/// Returns the errors of [`Catalog::open`], with empty paths.
pub fn parse_pack_bytes(bytes: &[u8]) -> Result<Catalog, FormatError> {
    parse(bytes, Path::new(""), bytes.len() as u64)
}

fn parse(mut reader: impl Read, path: &Path, file_bytes: u64) -> Result<Catalog, FormatError> {
    let header = Header::read(&mut reader, path, file_bytes)?;
    let [documents, tensor_rows, blocks, chunks] = header.sections;

    let mut section = Section::new(&mut reader, path, "the documents", documents);
    let outcome = read_documents(&mut section);
    let documents = section.finish(outcome)?;

    let mut section = Section::new(&mut reader, path, "the tensor table", tensor_rows);
    let outcome = tensors::read_rows(&mut section);
    let rows = section.finish(outcome)?;

    let mut section = Section::new(&mut reader, path, "the block table", blocks);
    let outcome = read_blocks(&mut section, &header, file_bytes);
    let blocks = section.finish(outcome)?;

    let mut section = Section::new(&mut reader, path, "the chunk table", chunks);
    let outcome = read_chunks(&mut section, &blocks);
    let (checksums, coded) = section.finish(outcome)?;

    let tensors = tensors::place(path, rows, &blocks)?;
    let source = source(path, header.origin, &documents)?;
    let chunks = Arc::new(ChunkIndex::new(blocks, checksums, coded));
    let pack = Pack { version: header.version, origin: header.origin, documents, chunks };
    catalog(path, file_bytes, source, tensors, pack)
}

fn catalog(
    path: &Path,
    file_bytes: u64,
    source: Source,
    tensors: Vec<TensorInfo>,
    pack: Pack,
) -> Result<Catalog, FormatError> {
    let files = vec![(path.to_owned(), file_bytes)];
    let mut catalog = Catalog::new(folder_of(path).to_owned(), files, source, tensors)?;
    catalog.pack = Some(Arc::new(pack));
    Ok(catalog)
}

/// Returns the source's own metadata from the embedded documents.
fn source(path: &Path, origin: Origin, documents: &[Embedded]) -> Result<Source, FormatError> {
    if origin == Origin::HuggingFace {
        let metadata = read_metadata(&Folder::Pack(path, documents))?;
        return Ok(Source::HuggingFace(Box::new(metadata)));
    }
    let header = documents.iter().find(|document| document.kind == DocumentKind::Header);
    let header = header.ok_or_else(|| FormatError::PackDamaged {
        path: path.to_owned(),
        offset: PAGE_BYTES,
        what: "the header of the GGUF file that it was made from is missing".to_owned(),
    })?;
    let inside = path.join(&header.name);
    let header = gguf::parse::parse_header(&header.content, &inside, header.source_bytes)?;
    Ok(Source::Gguf(header.metadata))
}

/// Content of the first page.
struct Header {
    version: (u16, u16),
    origin: Origin,
    data_offset: u64,
    /// Sections of documents, tensors, blocks and chunks.
    sections: [SectionExtent; 4],
}

impl Header {
    fn read(reader: &mut impl Read, path: &Path, file_bytes: u64) -> Result<Header, FormatError> {
        let mut page = Vec::with_capacity(PAGE_BYTES as usize);
        reader.take(PAGE_BYTES).read_to_end(&mut page).map_err(FormatError::io(path))?;
        if !page.starts_with(&MAGIC) {
            let found = page.iter().copied().take(MAGIC.len()).collect();
            return Err(FormatError::NotAPack { path: path.to_owned(), found });
        }
        let cut_off = |what, offset, needed| FormatError::Truncated {
            path: path.to_owned(),
            what,
            offset,
            needed,
            file_bytes,
        };
        let page: [u8; PAGE_BYTES as usize] =
            page.try_into().map_err(|_| cut_off("the pack's header", 0, PAGE_BYTES))?;
        let (major, minor) = (u16_at(&page, 8), u16_at(&page, 10));
        if ![VERSION_PLAIN.0, VERSION_CODED.0].contains(&major) {
            return Err(FormatError::PackVersion { path: path.to_owned(), major, minor });
        }
        let (expected, found) = (u64_at(&page, 4088), checksum(&page[..4088]));
        if expected != found {
            let what = "the header".to_owned();
            let path = path.to_owned();
            return Err(FormatError::PackChecksum { path, what, offset: 0, expected, found });
        }
        let damaged = |offset: u64, what: String| FormatError::PackDamaged {
            path: path.to_owned(),
            offset,
            what,
        };
        let origin = match u32_at(&page, 12) {
            1 => Origin::Gguf,
            2 => Origin::HuggingFace,
            other => return Err(damaged(12, format!("the kind of source is {other}"))),
        };
        let (said_bytes, data_offset) = (u64_at(&page, 16), u64_at(&page, 24));
        if said_bytes > file_bytes {
            return Err(cut_off("the pack", 0, said_bytes));
        }
        if said_bytes < file_bytes {
            let what = format!("the pack has {said_bytes} bytes, the file {file_bytes}");
            return Err(damaged(16, what));
        }
        let section = |index: usize| {
            let at = 64 + 32 * index;
            let [offset, bytes, count, checksum] =
                [0, 8, 16, 24].map(|field| u64_at(&page, at + field));
            SectionExtent { offset, bytes, count, checksum }
        };
        let sections = [section(0), section(1), section(2), section(3)];
        let mut end = PAGE_BYTES;
        for (index, section) in sections.iter().enumerate() {
            let after = section.end().filter(|after| *after <= file_bytes);
            end = after.filter(|_| section.offset == end).ok_or_else(|| {
                damaged(64 + 32 * index as u64, "sections do not follow each other".to_owned())
            })?;
        }
        if data_offset != end {
            return Err(damaged(24, "the blocks do not follow the sections".to_owned()));
        }
        Ok(Header { version: (major, minor), origin, data_offset, sections })
    }
}

pub(super) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

fn read_documents<R: Read>(section: &mut Section<'_, R>) -> Result<Vec<Embedded>, FormatError> {
    if section.count() > DOCUMENTS_MAX {
        return Err(section.damaged(format!("{} documents are too many", section.count())));
    }
    let mut documents: Vec<Embedded> = Vec::new();
    for _ in 0..section.count() {
        let entry: [u8; 24] = section.array()?;
        let kind = match u32_at(&entry, 0) {
            1 => DocumentKind::File,
            2 => DocumentKind::Header,
            other => return Err(section.damaged(format!("a document is of kind {other}"))),
        };
        let (name_bytes, bytes) = (u32_at(&entry, 4), u64_at(&entry, 8));
        let name = section.text(name_bytes.into())?;
        if !(is_plain_name(&name) || FILES.contains(&name.as_str()))
            || documents.iter().any(|other| other.name == name)
        {
            return Err(section.damaged(format!("the name {name:?} is no or not a new file name")));
        }
        let content = section.bytes(bytes)?.into();
        documents.push(Embedded { kind, name, content, source_bytes: u64_at(&entry, 16) });
    }
    Ok(documents)
}

fn read_blocks<R: Read>(
    section: &mut Section<'_, R>,
    header: &Header,
    file_bytes: u64,
) -> Result<Vec<Block>, FormatError> {
    let count = section.count();
    if count > BLOCKS_MAX || section.left() / 48 < count {
        return Err(section.damaged(format!("{count} blocks are too many")));
    }
    let mut entries: Vec<[u8; 48]> = Vec::with_capacity(count as usize);
    for _ in 0..count {
        entries.push(section.array()?);
    }
    let chunks = header.sections[3].count;
    let mut blocks = Vec::with_capacity(count as usize);
    let (mut offset, mut stored_offset) = (header.data_offset, header.data_offset);
    let (mut first_chunk, mut first_coded) = (0, 0);
    for (number, entry) in entries.iter().enumerate() {
        let index = |at| Some(u32_at(entry, at)).filter(|index| *index != NO_INDEX);
        let next_chunk = entries.get(number + 1).map_or(chunks, |next| u64_at(next, 40));
        let block = Block {
            kind: BlockKind::from_id(u32_at(entry, 0)),
            layer: index(4),
            expert: index(8),
            offset,
            bytes: u64_at(entry, 32),
            stored_offset: u64_at(entry, 16),
            stored_bytes: u64_at(entry, 24),
            chunk_bytes: u32_at(entry, 12),
            first_chunk: u64_at(entry, 40),
            chunks: next_chunk.saturating_sub(first_chunk),
            first_coded,
        };
        let sizes = match block.is_coded() {
            true => {
                let most = block.chunks.saturating_mul(CHUNK_BYTES_LIMIT);
                header.version.0 == VERSION_CODED.0 && block.bytes <= most
            }
            false => {
                let chunk_bytes = u64::from(block.chunk_bytes);
                (PAGE_BYTES..=CHUNK_BYTES_LIMIT).contains(&chunk_bytes)
                    && chunk_bytes.is_multiple_of(PAGE_BYTES)
                    && block.bytes == block.stored_bytes
                    && block.chunks == block.bytes.div_ceil(chunk_bytes)
            }
        };
        let whole_pages = [block.bytes, block.stored_bytes]
            .iter()
            .all(|bytes| *bytes > 0 && bytes.is_multiple_of(PAGE_BYTES));
        let end = offset.checked_add(block.bytes).filter(|end| *end <= DECODED_BYTES_MAX);
        let stored_end = block.stored_offset.checked_add(block.stored_bytes);
        let stored_end = stored_end.filter(|end| *end <= file_bytes);
        let in_place = block.stored_offset == stored_offset && block.first_chunk == first_chunk;
        let (Some(end), Some(stored_end), true) =
            (end, stored_end, whole_pages && sizes && in_place)
        else {
            return Err(section.damaged(format!("block {number} is not where it must be")));
        };
        (offset, stored_offset) = (end, stored_end);
        first_chunk += block.chunks;
        first_coded += if block.is_coded() { block.chunks } else { 0 };
        blocks.push(block);
    }
    match stored_offset == file_bytes {
        true => Ok(blocks),
        false => Err(section.damaged("the blocks do not reach the end of the file")),
    }
}

/// Reads the checksums of all chunks, and the places of those of coded blocks.
fn read_chunks<R: Read>(
    section: &mut Section<'_, R>,
    blocks: &[Block],
) -> Result<(Vec<u64>, Vec<CodedChunk>), FormatError> {
    let expected = blocks.last().map_or(0, |block| block.first_chunk + block.chunks);
    if section.count() != expected || section.left() / 24 < expected {
        return Err(section.damaged(format!("{} chunks, not {expected}", section.count())));
    }
    let mut checksums = Vec::with_capacity(expected as usize);
    let mut coded = Vec::new();
    for block in blocks {
        let (mut offset, mut stored_offset) = (block.offset, block.stored_offset);
        for _ in 0..block.chunks {
            let entry: [u8; 24] = section.array()?;
            let (number, version) = (u16_at(&entry, 0), u16_at(&entry, 2));
            let codec = Codec::from_number(number).ok().filter(|codec| {
                codec.version() == version && (block.is_coded() || *codec == Codec::Raw)
            });
            let Some(codec) = codec else {
                let (path, block) = (section.path().to_owned(), block.to_string());
                return Err(FormatError::PackCodec { path, block, codec: number, version });
            };
            let (bytes, stored) = (u64::from(u32_at(&entry, 4)), u64::from(u32_at(&entry, 8)));
            let padding = u32_at(&entry, 12);
            let right = match block.is_coded() {
                false => {
                    let size = u64::from(block.chunk_bytes).min(block.end() - offset);
                    bytes == size && stored == size && padding == 0
                }
                true => {
                    let own = stored.checked_sub(padding.into());
                    let fits = own.is_some_and(|own| match codec {
                        Codec::Raw => own == bytes,
                        _ => own > 0 && own <= bytes,
                    });
                    fits && (1..=CHUNK_BYTES_LIMIT).contains(&bytes)
                        && u64::from(padding) < PAGE_BYTES
                        && bytes <= block.end() - offset
                        && stored <= block.stored_end() - stored_offset
                }
            };
            if !right {
                return Err(section.damaged(format!("a chunk of {block} has the wrong size")));
            }
            if block.is_coded() {
                coded.push(CodedChunk { codec, offset, stored_offset, padding });
            }
            checksums.push(u64_at(&entry, 16));
            offset += bytes;
            stored_offset += stored;
        }
        if offset != block.end() || stored_offset != block.stored_end() {
            return Err(section.damaged(format!("the chunks of {block} do not fill it")));
        }
    }
    Ok((checksums, coded))
}
