//! Index of the chunks of a pack: where they lie, how they are coded, and their checksums.

use std::ops::Range;

use forebay_codec::Codec;

use super::Block;

/// A range of bytes that is stored together, with one checksum.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Chunk {
    /// Index in the chunk table.
    pub number: u64,
    /// Offset of the first byte after decoding.
    pub offset: u64,
    /// Number of bytes after decoding.
    pub bytes: u64,
    pub codec: Codec,
    /// Offset in the file, in bytes.
    pub stored_offset: u64,
    /// Number of bytes in the file.
    pub stored_bytes: u64,
    /// Number of zeros at the end of the bytes in the file, which fill the last page of a block.
    pub padding: u64,
    /// XXH3-64 of the bytes in the file.
    pub checksum: u64,
}

impl Chunk {
    /// Returns the offset of the byte after the chunk, after decoding.
    pub fn end(&self) -> u64 {
        self.offset + self.bytes
    }

    /// Returns the offset in the file of the byte after the chunk.
    pub fn stored_end(&self) -> u64 {
        self.stored_offset + self.stored_bytes
    }

    /// Returns the bytes for the codec, without padding, of the chunk's bytes in the file.
    ///
    /// # Panics
    /// Panics if these are fewer than the padding.
    pub fn encoded<'a>(&self, stored: &'a [u8]) -> &'a [u8] {
        &stored[..stored.len() - self.padding as usize]
    }
}

/// A chunk as it is written to the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoredChunk {
    pub codec: Codec,
    /// Number of bytes in the file, with padding.
    pub bytes: u32,
    /// Number of zeros at the end.
    pub padding: u32,
    /// XXH3-64 of the bytes in the file.
    pub checksum: u64,
}

/// A chunk of a coded block, whose place does not follow from the block's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct CodedChunk {
    pub codec: Codec,
    /// Offset after decoding.
    pub offset: u64,
    /// Offset in the file.
    pub stored_offset: u64,
    pub padding: u32,
}

/// Blocks and chunks of a pack. The blocks follow each other without gaps.
///
/// Offsets are those of the decoded bytes: as if every block were stored as it is. The format calls them offsets in the *decoded file*. In
/// a pack without coded blocks they are also offsets in the file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ChunkIndex {
    blocks: Vec<Block>,
    checksums: Vec<u64>,
    /// Chunks of the coded blocks, in order.
    coded: Vec<CodedChunk>,
    /// True if this index is about the file itself, so that nothing is decoded.
    is_of_stored: bool,
}

impl ChunkIndex {
    /// Creates an index. `blocks` must have no gaps, `checksums` holds those of all their chunks in order, and `coded` the
    /// chunks of coded blocks.
    pub(super) fn new(
        blocks: Vec<Block>,
        checksums: Vec<u64>,
        coded: Vec<CodedChunk>,
    ) -> ChunkIndex {
        ChunkIndex { blocks, checksums, coded, is_of_stored: false }
    }

    /// Returns an index whose offsets are those of the file: its chunks are not decoded.
    pub fn of_stored(&self) -> ChunkIndex {
        let block = |block: &Block| Block {
            offset: block.stored_offset,
            bytes: block.stored_bytes,
            ..*block
        };
        let chunk = |chunk: &CodedChunk| CodedChunk {
            codec: Codec::Raw,
            offset: chunk.stored_offset,
            padding: 0,
            ..*chunk
        };
        ChunkIndex {
            blocks: self.blocks.iter().map(block).collect(),
            checksums: self.checksums.clone(),
            coded: self.coded.iter().map(chunk).collect(),
            is_of_stored: true,
        }
    }

    /// Returns the blocks in file order.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Returns the number of chunks in all blocks.
    pub fn len(&self) -> u64 {
        self.checksums.len() as u64
    }

    pub fn is_empty(&self) -> bool {
        self.checksums.is_empty()
    }

    /// Returns true if any block is coded.
    pub fn is_coded(&self) -> bool {
        !self.coded.is_empty() && !self.is_of_stored
    }

    /// Returns the most bytes that a chunk of a coded block has after decoding, or 0 if there is none.
    pub fn coded_bytes_max(&self) -> u64 {
        let blocks = self.blocks.iter().filter(|block| block.is_coded());
        let chunks = blocks.flat_map(|block| self.chunks_of(block));
        chunks.map(|chunk| chunk.bytes.max(chunk.stored_bytes)).max().unwrap_or(0)
    }

    /// Returns the range of bytes that have checksums: all blocks.
    pub fn range(&self) -> Range<u64> {
        let first = self.blocks.first().map_or(0, |block| block.offset);
        first..self.blocks.last().map_or(0, Block::end)
    }

    /// Returns the range of the file that the blocks take.
    pub fn stored_range(&self) -> Range<u64> {
        let first = self.blocks.first().map_or(0, |block| block.stored_offset);
        first..self.blocks.last().map_or(0, Block::stored_end)
    }

    /// Returns the block that holds this byte.
    pub fn block_at(&self, offset: u64) -> Option<&Block> {
        let after = self.blocks.partition_point(|block| block.offset <= offset);
        self.blocks[..after].last().filter(|block| offset < block.end())
    }

    /// Returns true if this byte belongs to a coded block.
    pub fn is_coded_at(&self, offset: u64) -> bool {
        self.is_coded() && self.block_at(offset).is_some_and(Block::is_coded)
    }

    /// Returns the chunk that holds this byte.
    pub fn chunk_at(&self, offset: u64) -> Option<Chunk> {
        let block = self.block_at(offset)?;
        self.chunk_in(block, offset - block.offset, |chunk| chunk.offset - block.offset)
    }

    /// Returns the chunk that holds the byte at this offset in the file.
    pub fn stored_chunk_at(&self, stored_offset: u64) -> Option<Chunk> {
        let after = self.blocks.partition_point(|block| block.stored_offset <= stored_offset);
        let block =
            self.blocks[..after].last().filter(|block| stored_offset < block.stored_end())?;
        let start = block.stored_offset;
        self.chunk_in(block, stored_offset - start, |chunk| chunk.stored_offset - start)
    }

    /// Returns the chunk of a block that holds byte `at` of it. `start` returns the first byte of a coded chunk, counted in the same way.
    fn chunk_in(
        &self,
        block: &Block,
        at: u64,
        start: impl Fn(&CodedChunk) -> u64,
    ) -> Option<Chunk> {
        let index = match block.is_coded() {
            false => at / u64::from(block.chunk_bytes),
            true => {
                let after = self.coded_of(block).partition_point(|chunk| start(chunk) <= at);
                after.checked_sub(1)? as u64
            }
        };
        self.chunk(block, index)
    }

    fn coded_of(&self, block: &Block) -> &[CodedChunk] {
        let (first, count) = (block.first_coded as usize, block.chunks as usize);
        self.coded.get(first..first + count).unwrap_or(&[])
    }

    /// Returns the chunk with this number in its block.
    fn chunk(&self, block: &Block, index: u64) -> Option<Chunk> {
        let number = block.first_chunk + index;
        let checksum = *self.checksums.get(number as usize)?;
        if !block.is_coded() {
            let size = u64::from(block.chunk_bytes);
            let (offset, stored_offset) =
                (block.offset + index * size, block.stored_offset + index * size);
            let bytes = size.min(block.end() - offset);
            let (codec, stored_bytes, padding) = (Codec::Raw, bytes, 0);
            return Some(Chunk {
                number,
                offset,
                bytes,
                codec,
                stored_offset,
                stored_bytes,
                padding,
                checksum,
            });
        }
        let chunks = self.coded_of(block);
        let chunk = chunks.get(index as usize)?;
        let (end, stored_end) = match chunks.get(index as usize + 1) {
            Some(next) => (next.offset, next.stored_offset),
            None => (block.end(), block.stored_end()),
        };
        Some(Chunk {
            number,
            offset: chunk.offset,
            bytes: end - chunk.offset,
            codec: chunk.codec,
            stored_offset: chunk.stored_offset,
            stored_bytes: stored_end - chunk.stored_offset,
            padding: chunk.padding.into(),
            checksum,
        })
    }

    /// Returns the chunks of a block, in order.
    pub fn chunks_of(&self, block: &Block) -> impl Iterator<Item = Chunk> + '_ {
        let block = *block;
        (0..block.chunks).map_while(move |index| self.chunk(&block, index))
    }

    /// Returns the chunks that share a byte with `start..end`, in order.
    pub fn chunks(&self, start: u64, end: u64) -> impl Iterator<Item = Chunk> + '_ {
        let mut next = start;
        std::iter::from_fn(move || {
            let chunk = self.chunk_at(next).filter(|_| next < end)?;
            next = chunk.end();
            Some(chunk)
        })
    }

    /// Returns the chunks that share a byte with the range `start..end` of the file, in order.
    pub fn stored_chunks(&self, start: u64, end: u64) -> impl Iterator<Item = Chunk> + '_ {
        let mut next = start;
        std::iter::from_fn(move || {
            let chunk = self.stored_chunk_at(next).filter(|_| next < end)?;
            next = chunk.stored_end();
            Some(chunk)
        })
    }

    /// Extends `start..end` to whole chunks. Returns `None` if the range is empty or not entirely
    /// inside blocks.
    pub fn cover(&self, start: u64, end: u64) -> Option<(u64, u64)> {
        let last = end.checked_sub(1).filter(|last| *last >= start)?;
        Some((self.chunk_at(start)?.offset, self.chunk_at(last)?.end()))
    }

    /// Returns the range of the file that must be read for `start..end`: these bytes of blocks that are stored as they are, and whole chunks
    /// of coded blocks.
    pub fn stored_for(&self, start: u64, end: u64) -> Option<Range<u64>> {
        let last = end.checked_sub(1).filter(|last| *last >= start)?;
        let (first, last) = (self.chunk_at(start)?, self.chunk_at(last)?);
        let from = match self.is_coded_at(start) {
            true => first.stored_offset,
            false => first.stored_offset + (start - first.offset),
        };
        let to = match self.is_coded_at(end - 1) {
            true => last.stored_end(),
            false => last.stored_end() - (last.end() - end),
        };
        Some(from..to)
    }
}

#[cfg(test)]
mod tests {
    use super::super::BlockKind;
    use super::*;

    fn index() -> ChunkIndex {
        let block = |offset, bytes, chunk_bytes, first_chunk| Block {
            kind: BlockKind::Other,
            layer: None,
            expert: None,
            offset,
            bytes,
            stored_offset: offset,
            stored_bytes: bytes,
            chunk_bytes,
            first_chunk,
            chunks: bytes / u64::from(chunk_bytes) + 1,
            first_coded: 0,
        };
        ChunkIndex::new(
            vec![block(4096, 12288, 8192, 0), block(16384, 8192, 4096, 2)],
            vec![10, 11, 12, 13],
            Vec::new(),
        )
    }

    #[test]
    fn chunks_tile_their_blocks() {
        let index = index();
        let all: Vec<_> = index.chunks(0, u64::MAX).collect();
        assert!(all.is_empty(), "byte 0 is in no block");
        let all: Vec<_> =
            index.chunks(4096, u64::MAX).map(|c| (c.offset, c.bytes, c.checksum)).collect();
        let expected = [(4096, 8192, 10), (12288, 4096, 11), (16384, 4096, 12), (20480, 4096, 13)];
        assert_eq!(all, expected);
        assert_eq!(index.range(), 4096..24576);
    }

    #[test]
    fn ranges_grow_to_whole_chunks() {
        let index = index();
        assert_eq!(index.cover(5000, 5001), Some((4096, 12288)));
        assert_eq!(index.cover(12287, 16385), Some((4096, 20480)));
        assert_eq!(index.cover(16384, 20480), Some((16384, 20480)));
        assert_eq!(index.cover(4095, 5000), None);
        assert_eq!(index.cover(24575, 24577), None);
        assert_eq!(index.cover(5000, 5000), None);
    }

    /// A block that is stored as it is between two coded ones.
    fn coded() -> ChunkIndex {
        let block = |offset, bytes, stored_offset, stored_bytes, first_chunk, chunks| Block {
            kind: BlockKind::Layer,
            layer: Some(0),
            expert: None,
            offset,
            bytes,
            stored_offset,
            stored_bytes,
            chunk_bytes: 0,
            first_chunk,
            chunks,
            first_coded: if first_chunk == 0 { 0 } else { 2 },
        };
        let chunk = |offset, stored_offset, padding| CodedChunk {
            codec: Codec::Zstd,
            offset,
            stored_offset,
            padding,
        };
        let plain = Block { chunk_bytes: 4096, ..block(12288, 8192, 8192, 8192, 2, 2) };
        ChunkIndex::new(
            vec![block(4096, 8192, 4096, 4096, 0, 2), plain, block(20480, 8192, 16384, 8192, 4, 1)],
            vec![10, 11, 12, 13, 14],
            vec![chunk(4096, 4096, 0), chunk(9000, 6000, 700), chunk(20480, 16384, 5)],
        )
    }

    #[test]
    fn chunks_of_coded_blocks_have_places_of_their_own() {
        let index = coded();
        let all: Vec<_> = index.chunks(4096, u64::MAX).collect();
        let places: Vec<_> =
            all.iter().map(|c| (c.offset, c.bytes, c.stored_offset, c.stored_bytes)).collect();
        let expected = [
            (4096, 4904, 4096, 1904),
            (9000, 3288, 6000, 2192),
            (12288, 4096, 8192, 4096),
            (16384, 4096, 12288, 4096),
            (20480, 8192, 16384, 8192),
        ];
        assert_eq!(places, expected);
        assert_eq!(all[1].padding, 700);
        assert_eq!(index.stored_chunks(4096, u64::MAX).collect::<Vec<_>>(), all);
        assert_eq!((index.range(), index.stored_range()), (4096..28672, 4096..24576));
        assert_eq!(index.chunk_at(8999).unwrap().checksum, 10);
        assert_eq!(index.coded_bytes_max(), 8192);
    }

    #[test]
    fn coded_bytes_are_read_by_whole_chunks() {
        let index = coded();
        assert_eq!(index.stored_for(5000, 5001), Some(4096..6000));
        assert_eq!(index.stored_for(9000, 12300), Some(6000..8204));
        assert_eq!(index.stored_for(13000, 13100), Some(8904..9004));
        assert_eq!(index.stored_for(13000, 20481), Some(8904..24576));
        assert_eq!(index.stored_for(0, 5000), None);
    }

    #[test]
    fn the_index_of_the_file_itself_decodes_nothing() {
        let (index, stored) = (coded(), coded().of_stored());
        assert!(index.is_coded() && !stored.is_coded());
        assert_eq!(stored.range(), index.stored_range());
        for (of, chunk) in stored.chunks(4096, u64::MAX).zip(index.chunks(4096, u64::MAX)) {
            assert_eq!((of.offset, of.bytes), (chunk.stored_offset, chunk.stored_bytes));
            assert_eq!((of.codec, of.checksum), (Codec::Raw, chunk.checksum));
        }
        assert_eq!(stored.stored_for(5000, 5001), Some(5000..5001));
    }
}
