//! Encodes the front of a pack, which `parse` reads.

use super::tensors::TensorRow;
use super::{
    Block, MAGIC, NO_INDEX, PAGE_BYTES, PackPlan, StoredChunk, VERSION_CODED, VERSION_PLAIN,
    checksum,
};

const DOCUMENT_ENTRY_BYTES: usize = 24;
const TENSOR_ENTRY_BYTES: usize = 24;
const BLOCK_ENTRY_BYTES: usize = 48;
const CHUNK_ENTRY_BYTES: usize = 24;

/// Returns the number of bytes before the first block. It is the same before and after offsets are
/// known.
pub fn front_bytes(plan: &PackPlan) -> u64 {
    let page = PAGE_BYTES as usize;
    let documents: usize = plan
        .documents
        .iter()
        .map(|document| DOCUMENT_ENTRY_BYTES + document.name.len() + document.content.len())
        .sum();
    let tensors: usize = plan.rows.iter().map(row_bytes).sum();
    let blocks = plan.blocks.len() * BLOCK_ENTRY_BYTES;
    let chunks = chunk_count(plan) * CHUNK_ENTRY_BYTES;
    let sections = [documents, tensors, blocks, chunks];
    sections.into_iter().fold(page, |end, bytes| end + bytes.next_multiple_of(page)) as u64
}

fn chunk_count(plan: &PackPlan) -> usize {
    plan.blocks.last().map_or(0, |block| block.first_chunk + block.chunks) as usize
}

fn row_bytes(row: &TensorRow) -> usize {
    TENSOR_ENTRY_BYTES + 8 * row.shape.len() + row.ty.name().len() + row.name.len()
}

/// Returns the header and all sections.
pub fn front(plan: &PackPlan, chunks: &[StoredChunk]) -> Vec<u8> {
    assert_eq!(chunks.len(), chunk_count(plan), "every chunk of the plan was stored");
    let mut out = vec![0; PAGE_BYTES as usize];
    let mut header = Header { page: vec![0; PAGE_BYTES as usize], sections: 0 };
    out.reserve(plan.data_offset() as usize);
    header.section(&mut out, plan.documents.len(), |out| put_documents(out, plan));
    header.section(&mut out, plan.rows.len(), |out| put_rows(out, plan));
    header.section(&mut out, plan.blocks.len(), |out| put_blocks(out, plan, chunks));
    header.section(&mut out, chunks.len(), |out| put_chunks(out, plan, chunks));
    let stored: u64 = chunks.iter().map(|chunk| u64::from(chunk.bytes)).sum();
    let file_bytes = plan.data_offset() + stored;
    let version = if plan.is_coded() { VERSION_CODED } else { VERSION_PLAIN };

    header.put(0, &MAGIC);
    header.put(8, &version.0.to_le_bytes());
    header.put(10, &version.1.to_le_bytes());
    header.put(12, &(plan.origin as u32).to_le_bytes());
    header.put(16, &file_bytes.to_le_bytes());
    header.put(24, &(out.len() as u64).to_le_bytes());
    let sum = checksum(&header.page[..4088]);
    header.put(4088, &sum.to_le_bytes());
    out[..PAGE_BYTES as usize].copy_from_slice(&header.page);
    out
}

struct Header {
    page: Vec<u8>,
    sections: usize,
}

impl Header {
    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.page[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Appends a section, pads it to whole pages and records it in the header.
    fn section(&mut self, out: &mut Vec<u8>, count: usize, write: impl FnOnce(&mut Vec<u8>)) {
        let offset = out.len();
        write(out);
        let bytes = out.len() - offset;
        out.resize(out.len().next_multiple_of(PAGE_BYTES as usize), 0);
        let fields = [offset as u64, bytes as u64, count as u64, checksum(&out[offset..])];
        for (index, field) in fields.into_iter().enumerate() {
            self.put(64 + 32 * self.sections + 8 * index, &field.to_le_bytes());
        }
        self.sections += 1;
    }
}

fn put_documents(out: &mut Vec<u8>, plan: &PackPlan) {
    for document in &plan.documents {
        out.extend((document.kind as u32).to_le_bytes());
        out.extend((document.name.len() as u32).to_le_bytes());
        out.extend((document.content.len() as u64).to_le_bytes());
        out.extend(document.source_bytes.to_le_bytes());
        out.extend(document.name.as_bytes());
        out.extend(&document.content[..]);
    }
}

fn put_rows(out: &mut Vec<u8>, plan: &PackPlan) {
    for row in &plan.rows {
        out.extend((row.name.len() as u32).to_le_bytes());
        out.extend([row.ty.name().len() as u8, row.shape.len() as u8, 0, 0]);
        out.extend(row.block.to_le_bytes());
        out.extend(row.pieces.to_le_bytes());
        out.extend(row.offset.to_le_bytes());
        row.shape.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
        out.extend(row.ty.name().as_bytes());
        out.extend(row.name.as_bytes());
    }
}

fn put_blocks(out: &mut Vec<u8>, plan: &PackPlan, chunks: &[StoredChunk]) {
    let mut stored_offset = plan.data_offset();
    for block in &plan.blocks {
        let stored: u64 = chunks_of(plan, block, chunks).map(|(_, it)| u64::from(it.bytes)).sum();
        out.extend((block.kind as u32).to_le_bytes());
        out.extend(block.layer.unwrap_or(NO_INDEX).to_le_bytes());
        out.extend(block.expert.unwrap_or(NO_INDEX).to_le_bytes());
        out.extend(block.chunk_bytes.to_le_bytes());
        out.extend(stored_offset.to_le_bytes());
        out.extend(stored.to_le_bytes());
        out.extend(block.bytes.to_le_bytes());
        out.extend(block.first_chunk.to_le_bytes());
        stored_offset += stored;
    }
}

fn put_chunks(out: &mut Vec<u8>, plan: &PackPlan, chunks: &[StoredChunk]) {
    for block in &plan.blocks {
        for (bytes, chunk) in chunks_of(plan, block, chunks) {
            out.extend(chunk.codec.number().to_le_bytes());
            out.extend(chunk.codec.version().to_le_bytes());
            out.extend((bytes as u32).to_le_bytes());
            out.extend(chunk.bytes.to_le_bytes());
            out.extend(chunk.padding.to_le_bytes());
            out.extend(chunk.checksum.to_le_bytes());
        }
    }
}

/// Returns the chunks of a block, each with its number of bytes after decoding.
fn chunks_of<'a>(
    plan: &'a PackPlan,
    block: &Block,
    chunks: &'a [StoredChunk],
) -> impl Iterator<Item = (u64, &'a StoredChunk)> {
    plan.index.chunks_of(block).map(|chunk| (chunk.bytes, &chunks[chunk.number as usize]))
}
