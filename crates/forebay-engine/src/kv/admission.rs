//! Admission of a prompt: the longest prefix that the pools already hold.

use forebay_compute::RowKind;

use super::content::{BlockHash, Content, KV_BLOCK, Row};
use super::manager::{BlockManager, Changes, TableEntry};
use super::sequence::SequenceId;

/// A sequence that has begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Admission {
    pub sequence: SequenceId,
    /// Tokens at the start of the prompt that need not be computed: a multiple of [`KV_BLOCK`], less than the prompt.
    pub hit_tokens: usize,
}

impl BlockManager {
    /// Begins a sequence with the longest prefix of a prompt that is in the pools.
    ///
    /// A prefix of `p` tokens is a hit if all groups have the full blocks that a token at position `p` sees, computed as
    /// prompt rows. The last token is never part of it, because its logits are needed.
    ///
    /// The sequence has `hit_tokens` committed positions. The caller computes the rest of the prompt. This takes no block
    /// from the free ones, but cached blocks that are hit can no longer be evicted.
    pub fn admit(&mut self, prompt: &[u32], changes: &mut Changes) -> Admission {
        let id = self.sequences.start();
        let hit_blocks = self.find_prefix(id, prompt);
        let sequence = self.sequences.running(id);
        for group in 0..self.groups.len() {
            let first = self.groups[group].first_seen(hit_blocks * KV_BLOCK);
            sequence.tables[group].resize(hit_blocks, Default::default());
            for index in first..hit_blocks {
                let (hash, rows) = (sequence.hashes[index], sequence.block_rows(index));
                let pool = self.groups.pool(group);
                let block = pool.find(hash, rows).expect("the search has found it");
                pool.acquire(block);
                sequence.tables[group][index] = block;
                changes.entries.push(TableEntry { sequence: id, group, index, block });
            }
        }
        let hit_tokens = hit_blocks * KV_BLOCK;
        self.statistics.prompt_tokens_total += prompt.len() as u64;
        self.statistics.hit_tokens_total += hit_tokens as u64;
        Admission { sequence: id, hit_tokens }
    }

    /// Fills the rows and hashes of a new sequence with the longest hit, and returns its length in blocks.
    fn find_prefix(&mut self, id: SequenceId, prompt: &[u32]) -> usize {
        let sequence = self.sequences.running(id);
        // For each group, the number of consecutive blocks found up to the current one.
        self.marks.clear();
        self.marks.resize(self.groups.len(), 0);
        let (mut hit_blocks, mut hash) = (0, BlockHash::ROOT);
        let shareable = &prompt[..prompt.len().saturating_sub(1)];
        'blocks: for (index, tokens) in shareable.chunks_exact(KV_BLOCK).enumerate() {
            let rows = tokens.iter().map(|&token| Row { token, kind: RowKind::Prompt });
            sequence.rows.extend(rows);
            hash = Content::new(self.salt, hash, sequence.block_rows(index)).hash;
            sequence.hashes.push(hash);
            let end = index + 1;
            let mut is_hit = true;
            for (group, run) in self.groups.iter().zip(&mut self.marks) {
                let found = group.pool.find(hash, sequence.block_rows(index)).is_some();
                if !found && group.window.is_none() {
                    break 'blocks;
                }
                *run = if found { *run + 1 } else { 0 };
                is_hit &= *run >= end - group.first_seen(end * KV_BLOCK);
            }
            if is_hit {
                hit_blocks = end;
            }
        }
        sequence.rows.truncate(hit_blocks * KV_BLOCK);
        sequence.hashes.truncate(hit_blocks);
        hit_blocks
    }
}
