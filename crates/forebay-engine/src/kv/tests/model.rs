//! Naive model of the pools: it keeps for each position of each block which history of rows it holds.

use std::collections::{HashMap, HashSet};

use forebay_kv::{BlockHash, BlockKey};
use forebay_ops::{KV_BLOCK, RowKind};

use super::super::content::Row;
use super::super::pool::Pool;
use super::super::{BlockId, BlockManager, Changes, GroupConfig, SavedBlock, SequenceId};

/// Rows that a pass reserves beyond those it uses are fewer than this.
pub const MORE_MAX: usize = 40;

/// The hash before the first blocks.
const ROOT: BlockHash = BlockHash([1; 16]);

/// A row together with all rows before it. 0 stands for no row.
pub type History = usize;

pub type BlockContent = [History; KV_BLOCK];

/// All histories that have occurred, each with the history before it and its last row.
#[derive(Default)]
pub struct Histories {
    known: Vec<(History, Row)>,
    numbers: HashMap<(History, u32, bool), History>,
}

impl Histories {
    pub fn after(&mut self, previous: History, token: u32, kind: RowKind) -> History {
        let key = (previous, token, kind == RowKind::Decode);
        *self.numbers.entry(key).or_insert_with(|| {
            self.known.push((previous, Row { token, kind }));
            self.known.len()
        })
    }

    pub fn previous(&self, history: History) -> History {
        self.known[history - 1].0
    }

    pub fn row(&self, history: History) -> Row {
        self.known[history - 1].1
    }
}

pub struct ModelSequence {
    pub id: SequenceId,
    pub histories: Vec<History>,
    /// Tables as a backend has them: the changes applied to empty ones.
    pub tables: Vec<Vec<BlockId>>,
    /// Tokens of the prompt that are not yet computed, last one first.
    pub prompt: Vec<u32>,
}

/// A copy of a sequence outside the pools.
pub struct SavedModel {
    pub histories: Vec<History>,
    prompt: Vec<u32>,
    /// Contents by group and index.
    contents: HashMap<(usize, usize), BlockContent>,
}

impl ModelSequence {
    pub fn entry(&self, group: usize, index: usize) -> BlockId {
        self.tables[group].get(index).copied().unwrap_or(BlockId::NULL)
    }
}

/// Full blocks that can be found: the group, and the history of the last row.
pub type FullBlocks = HashSet<(usize, History)>;

pub struct World {
    pub manager: BlockManager,
    pub groups: Vec<GroupConfig>,
    pub batch: usize,
    pub histories: Histories,
    pub pools: Vec<Vec<BlockContent>>,
    pub sequences: Vec<ModelSequence>,
    pub saved: Vec<SavedModel>,
    /// True if blocks that pools lose are kept.
    keeps: bool,
    /// These blocks.
    below: HashMap<BlockKey, BlockContent>,
    /// Everything that the manager has returned.
    pub log: Vec<String>,
    changes: Changes,
}

impl World {
    pub fn new(groups: &[GroupConfig], batch: usize, keeps: bool) -> World {
        World {
            manager: BlockManager::new(groups, batch),
            groups: groups.to_vec(),
            batch,
            histories: Histories::default(),
            pools: groups.iter().map(|group| vec![[0; KV_BLOCK]; group.blocks]).collect(),
            sequences: Vec::new(),
            saved: Vec::new(),
            keeps,
            below: HashMap::new(),
            log: Vec::new(),
            changes: Changes::default(),
        }
    }

    /// Returns the blocks that must be there to compute position `len`.
    pub fn needed(&self, group: usize, len: usize) -> Vec<usize> {
        let first = self.groups[group].window.map_or(0, |window| (len + 1).saturating_sub(window));
        let mut blocks: Vec<usize> = (first..len).map(|position| position / KV_BLOCK).collect();
        if !len.is_multiple_of(KV_BLOCK) {
            blocks.push(len / KV_BLOCK);
        }
        blocks.dedup();
        blocks
    }

    pub fn full_blocks(&self) -> FullBlocks {
        let mut full = FullBlocks::new();
        for (group, contents) in self.pools.iter().enumerate() {
            let pool = &self.manager.groups[group].pool;
            let found = pool.block_ids().filter(|&block| pool.hash(block).is_some());
            full.extend(found.map(|block| (group, contents[block.index()][KV_BLOCK - 1])));
        }
        full
    }

    /// Applies the changes to tables and contents.
    fn apply(&mut self) {
        let mut changes = std::mem::take(&mut self.changes);
        self.log.push(format!("{changes:?}"));
        for entry in &changes.entries {
            let holder = self.sequences.iter_mut().find(|sequence| sequence.id == entry.sequence);
            let table = &mut holder.expect("changes are for living sequences").tables[entry.group];
            table.resize(table.len().max(entry.index + 1), BlockId::NULL);
            assert_ne!(table[entry.index], entry.block, "nothing has changed");
            table[entry.index] = entry.block;
        }
        for lost in changes.lost.iter().filter(|_| self.keeps) {
            let content = self.pools[lost.group][lost.block.index()];
            assert!(!content.contains(&0), "a lost block is full");
            let known = self.below.insert(lost.key(), content);
            assert!(known.is_none_or(|known| known == content));
            assert_eq!(lost.link.index as usize, self.position(content[0]) / KV_BLOCK);
        }
        for copy in &changes.copies {
            assert!(self.manager.groups[copy.group].pool.is_writable(copy.to));
            self.pools[copy.group][copy.to.index()] = self.pools[copy.group][copy.from.index()];
        }
        changes.clear();
        self.changes = changes;
        // What is free must not be relied upon.
        for (group, contents) in self.pools.iter_mut().enumerate() {
            for block in self.manager.groups[group].pool.free_list() {
                contents[block.index()] = [0; KV_BLOCK];
            }
        }
    }

    fn add(&mut self, id: SequenceId, histories: Vec<History>, prompt: Vec<u32>) {
        let tables = vec![Vec::new(); self.groups.len()];
        self.sequences.push(ModelSequence { id, histories, tables, prompt });
    }

    /// Returns the position of a row.
    fn position(&self, mut history: History) -> usize {
        let mut position = 0;
        while self.histories.previous(history) != 0 {
            history = self.histories.previous(history);
            position += 1;
        }
        position
    }

    pub fn admit(&mut self, prompt: &[u32]) {
        let mut histories = vec![0];
        for &token in prompt {
            let last = histories[histories.len() - 1];
            histories.push(self.histories.after(last, token, RowKind::Prompt));
        }
        histories.remove(0);
        self.admit_rows(histories);
    }

    fn rows(&self, histories: &[History]) -> Vec<Row> {
        histories.iter().map(|&history| self.histories.row(history)).collect()
    }

    fn admit_rows(&mut self, mut histories: Vec<History>) {
        let rows = self.rows(&histories);
        let mut full = self.full_blocks();
        full.extend(self.below.iter().map(|(key, content)| (key.group as usize, content[15])));
        let is_hit = |&len: &usize| {
            let there = |group, block| full.contains(&(group, histories[block * KV_BLOCK + 15]));
            (0..self.groups.len())
                .all(|group| self.needed(group, len).iter().all(|&block| there(group, block)))
        };
        let expected = (0..rows.len()).step_by(KV_BLOCK).filter(is_hit).max();

        let is_below = |key| self.below.contains_key(&key);
        let admission = self.manager.admit(ROOT, &rows, is_below, &mut self.changes);
        self.log.push(format!("{admission:?}"));
        assert_eq!(admission.hit_rows, expected.unwrap_or(0));
        let id = admission.sequence;
        let seen = (0..self.groups.len()).map(|group| self.needed(group, admission.hit_rows).len());
        let absent: Vec<usize> =
            seen.zip(self.manager.blocks_held(id)).map(|(seen, held)| seen - held).collect();
        if self.first_short(|group, _| absent[group]).is_some() {
            // Nothing is reported for a sequence that does not begin.
            self.changes.entries.retain(|entry| entry.sequence != id);
            self.manager.release(id);
            return;
        }
        let mut restored = Vec::new();
        self.manager.fill_up(id, &mut restored, &mut self.changes);
        self.log.push(format!("{restored:?}"));
        assert_eq!(restored.len(), absent.iter().sum::<usize>());
        let contents: Vec<_> = restored
            .iter()
            .map(|of| {
                let (key, _) = self.manager.block_key(id, of.group, of.index).unwrap();
                (of.group, of.block, self.below[&key])
            })
            .collect();
        let rest = rows[admission.hit_rows..].iter().rev();
        let rest = rest.filter(|row| row.kind == RowKind::Prompt).map(|row| row.token).collect();
        histories.truncate(admission.hit_rows);
        self.add(id, histories, rest);
        self.apply();
        for (group, block, content) in contents {
            self.pools[group][block.index()] = content;
        }
    }

    /// Runs a pass of some sequences, each with up to `rows` rows, and reserves `more` than it uses. Sequences without
    /// enough room are left out.
    pub fn pass(&mut self, chosen: &[usize], rows: &[usize], more: usize, tokens: &[u32]) {
        let mut batches = Vec::new();
        for (&index, &rows) in chosen.iter().zip(rows) {
            let sequence = &mut self.sequences[index];
            let left = sequence.prompt.len();
            let (kind, batch) = if left > 0 {
                let batch = sequence.prompt[left - rows.min(left)..].iter().rev().copied();
                (RowKind::Prompt, batch.collect())
            } else {
                (RowKind::Decode, tokens[..rows.min(tokens.len())].to_vec())
            };
            if self.reserve(index, batch.len() + more) {
                batches.push((index, kind, batch));
            }
        }
        self.apply();
        for (index, kind, batch) in &batches {
            self.write(*index, *kind, batch);
        }
        for (index, kind, batch) in batches {
            let sequence = &mut self.sequences[index];
            if kind == RowKind::Prompt {
                sequence.prompt.truncate(sequence.prompt.len() - batch.len());
            }
            self.manager.commit(sequence.id, &batch, kind, &mut self.changes);
            if sequence.prompt.is_empty() && kind == RowKind::Prompt {
                self.manager.note_end_of_turn(sequence.id);
            }
        }
        self.apply();
    }

    /// Returns the first group that needs more blocks than it has, and their number.
    fn first_short(&self, needed: impl Fn(usize, &Pool) -> usize) -> Option<(usize, usize)> {
        self.manager.groups.iter().enumerate().find_map(|(group, state)| {
            let needed = needed(group, &state.pool);
            (needed > state.pool.available()).then_some((group, needed))
        })
    }

    fn reserve(&mut self, index: usize, rows: usize) -> bool {
        let sequence = &self.sequences[index];
        let (len, upto) = (sequence.histories.len(), sequence.histories.len() + rows);
        let short = self.first_short(|group, pool| {
            let table = self.manager.table(sequence.id, group);
            let partial = table.get(len / KV_BLOCK).filter(|_| !len.is_multiple_of(KV_BLOCK));
            let shared = partial.is_some_and(|&block| pool.references(block) > 1);
            upto.div_ceil(KV_BLOCK).saturating_sub(table.len()) + usize::from(shared)
        });
        let before = format!("{:?} {:?}", self.manager, self.changes);
        let reserved = self.manager.reserve(sequence.id, upto, &mut self.changes);
        self.log.push(format!("{reserved:?}"));
        assert_eq!(reserved.err().map(|error| (error.group, error.needed)), short);
        if short.is_some() {
            assert_eq!(before, format!("{:?} {:?}", self.manager, self.changes));
        } else {
            for (group, held) in
                self.manager.groups.iter().zip(self.manager.blocks_held(sequence.id))
            {
                assert!(
                    held <= group.blocks_needed(upto.max(len + MORE_MAX), self.batch + MORE_MAX)
                );
            }
        }
        short.is_none()
    }

    fn write(&mut self, index: usize, kind: RowKind, tokens: &[u32]) {
        let sequence = &mut self.sequences[index];
        for &token in tokens {
            let position = sequence.histories.len();
            let last = sequence.histories.last().copied().unwrap_or(0);
            let history = self.histories.after(last, token, kind);
            for group in 0..self.groups.len() {
                let block = sequence.entry(group, position / KV_BLOCK);
                let pool = &self.manager.groups[group].pool;
                assert!(pool.is_writable(block), "a shared or full block is written");
                self.pools[group][block.index()][position % KV_BLOCK] = history;
            }
            sequence.histories.push(history);
        }
    }

    /// Returns the largest position up to `len` from which a sequence can resume, by trying all.
    fn resumable(&self, index: usize, len: usize) -> usize {
        let (full, sequence) = (self.full_blocks(), &self.sequences[index]);
        let len = len.min(sequence.histories.len());
        let there = |group, block: usize| {
            let last = sequence.histories.get(block * KV_BLOCK + 15);
            sequence.entry(group, block) != BlockId::NULL
                || last.is_some_and(|&last| full.contains(&(group, last)))
        };
        let resumes = |&len: &usize| {
            (0..self.groups.len())
                .all(|group| self.needed(group, len).iter().all(|&block| there(group, block)))
        };
        (0..len)
            .filter(|len| len.is_multiple_of(KV_BLOCK))
            .chain([len])
            .filter(resumes)
            .max()
            .unwrap_or(0)
    }

    fn keep(&mut self, index: usize, kept: usize) {
        let sequence = &mut self.sequences[index];
        for &history in sequence.histories[kept..].iter().rev() {
            if self.histories.row(history).kind == RowKind::Prompt {
                sequence.prompt.push(self.histories.row(history).token);
            }
        }
        sequence.histories.truncate(kept);
        self.log.push(format!("{kept}"));
        self.apply();
    }

    pub fn truncate(&mut self, index: usize, len: usize) {
        let expected = self.resumable(index, len);
        let kept = self.manager.truncate(self.sequences[index].id, len, &mut self.changes);
        assert_eq!(kept, expected);
        self.keep(index, kept);
    }

    pub fn fork(&mut self, index: usize) {
        let id = self.manager.fork(self.sequences[index].id, &mut self.changes);
        let parent = &self.sequences[index];
        let (histories, prompt) = (parent.histories.clone(), parent.prompt.clone());
        self.add(id, histories, prompt);
        self.apply();
    }

    pub fn release(&mut self, index: usize) {
        let sequence = self.sequences.swap_remove(index);
        self.manager.release(sequence.id);
        self.apply();
    }

    /// Copies what a sequence needs out of the pools.
    pub fn save(&mut self, index: usize) {
        let sequence = &self.sequences[index];
        let saved: Vec<SavedBlock> = self.manager.blocks_to_save(sequence.id).collect();
        self.log.push(format!("{saved:?}"));
        let indices: Vec<_> = saved.iter().map(|block| (block.group, block.index)).collect();
        let needed = (0..self.groups.len()).flat_map(|group| {
            let blocks = self.needed(group, sequence.histories.len());
            blocks.into_iter().map(move |index| (group, index))
        });
        assert_eq!(indices, needed.collect::<Vec<_>>());
        assert_eq!(self.manager.rows(sequence.id), self.rows(&sequence.histories));
        let content = |block: &SavedBlock| {
            ((block.group, block.index), self.pools[block.group][block.block.index()])
        };
        self.saved.push(SavedModel {
            histories: sequence.histories.clone(),
            prompt: sequence.prompt.clone(),
            contents: saved.iter().map(content).collect(),
        });
    }

    pub fn restore(&mut self, index: usize) {
        let saved = &self.saved[index];
        let (histories, rows) = (saved.histories.clone(), self.rows(&saved.histories));
        let short = self.first_short(|group, pool| {
            let referenced = pool.block_ids().filter(|&block| pool.references(block) > 0);
            let full = referenced.filter(|&block| pool.hash(block).is_some());
            let held: HashSet<History> =
                full.map(|block| self.pools[group][block.index()][KV_BLOCK - 1]).collect();
            let last_row = |block: usize| histories.get(block * KV_BLOCK + 15);
            let needed = self.needed(group, histories.len());
            let is_held = |block: usize| last_row(block).is_some_and(|last| held.contains(last));
            needed.into_iter().filter(|&block| !is_held(block)).count()
        });
        let mut restored = Vec::new();
        let before = format!("{:?}", self.manager);
        let id = self.manager.restore(ROOT, &rows, &mut restored, &mut self.changes);
        self.log.push(format!("{id:?} {restored:?}"));
        assert_eq!(id.err().map(|error| (error.group, error.needed)), short);
        match id {
            Err(_) => {
                assert_eq!(before, format!("{:?}", self.manager));
                assert!(restored.is_empty());
            }
            Ok(id) => {
                let saved = &self.saved[index];
                let (prompt, contents) = (saved.prompt.clone(), saved.contents.clone());
                let len = histories.len();
                self.add(id, histories, prompt);
                // What the pools lose is copied before other content comes.
                self.apply();
                for block in restored {
                    assert_eq!(self.manager.groups[block.group].pool.references(block.block), 1);
                    let content = contents[&(block.group, block.index)];
                    let used = (len - block.index * KV_BLOCK).min(KV_BLOCK);
                    assert!(!content[..used].contains(&0));
                    self.pools[block.group][block.block.index()] = content;
                }
            }
        }
        self.apply();
    }

    /// Begins a saved sequence with what is still in the pools.
    pub fn admit_again(&mut self, index: usize) {
        self.admit_rows(self.saved[index].histories.clone());
    }
}
