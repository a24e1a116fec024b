//! Index of the chunks of a pack and their checksums.

use super::Block;

/// A range of bytes with one checksum.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Chunk {
    /// Index in the chunk table.
    pub number: u64,
    /// Offset from the start of the file, in bytes.
    pub offset: u64,
    pub bytes: u64,
    /// XXH3-64 of the bytes.
    pub checksum: u64,
}

impl Chunk {
    /// Returns the offset of the byte after the chunk.
    pub fn end(&self) -> u64 {
        self.offset + self.bytes
    }
}

/// Blocks and checksums of a pack. The blocks follow each other without gaps.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ChunkIndex {
    blocks: Vec<Block>,
    checksums: Vec<u64>,
}

impl ChunkIndex {
    /// Creates an index. `blocks` must have no gaps, and `checksums` holds those of all their
    /// chunks in order.
    pub(super) fn new(blocks: Vec<Block>, checksums: Vec<u64>) -> ChunkIndex {
        ChunkIndex { blocks, checksums }
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

    /// Returns the range of bytes that have checksums: from the first block to the end of the file.
    pub fn range(&self) -> std::ops::Range<u64> {
        let first = self.blocks.first().map_or(0, |block| block.offset);
        first..self.blocks.last().map_or(0, Block::end)
    }

    /// Returns the block that holds this byte.
    pub fn block_at(&self, offset: u64) -> Option<&Block> {
        let after = self.blocks.partition_point(|block| block.offset <= offset);
        self.blocks[..after].last().filter(|block| offset < block.end())
    }

    /// Returns the chunk that holds this byte.
    pub fn chunk_at(&self, offset: u64) -> Option<Chunk> {
        let block = self.block_at(offset)?;
        let size = u64::from(block.chunk_bytes);
        let index = (offset - block.offset) / size;
        let start = block.offset + index * size;
        Some(Chunk {
            number: block.first_chunk + index,
            offset: start,
            bytes: size.min(block.end() - start),
            checksum: *self.checksums.get((block.first_chunk + index) as usize)?,
        })
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

    /// Extends `start..end` to whole chunks. Returns `None` if the range is empty or not entirely
    /// inside blocks.
    pub fn cover(&self, start: u64, end: u64) -> Option<(u64, u64)> {
        let last = end.checked_sub(1).filter(|last| *last >= start)?;
        Some((self.chunk_at(start)?.offset, self.chunk_at(last)?.end()))
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
            chunk_bytes,
            first_chunk,
        };
        ChunkIndex::new(
            vec![block(4096, 12288, 8192, 0), block(16384, 8192, 4096, 2)],
            vec![10, 11, 12, 13],
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
}
