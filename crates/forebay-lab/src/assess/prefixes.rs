//! Finds how small a prefix cache may be for a log of requests: replays their prompts through caches of all sizes.
//!
//! A cache holds blocks of 16 positions. A request finds the longest prefix of its prompt whose blocks are all held. Then
//! all full blocks of its prompt are held, as far as they fit.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};

use forebay_kv::{BlockHash, BlockKey, Link, RamIndex};
use serde::Serialize;

/// Positions of a block, as in the engine.
pub const BLOCK: usize = 16;
/// Sizes of the caches, as shares of all different blocks.
const SHARES: [f64; 14] = [
    1.0 / 128.0,
    1.0 / 64.0,
    1.0 / 32.0,
    1.0 / 16.0,
    0.125,
    0.1875,
    0.25,
    0.375,
    0.5,
    0.625,
    0.75,
    0.875,
    0.9375,
    1.0,
];

/// What caches of all sizes find of the prompts of a log.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PrefixAssessment {
    pub model: String,
    pub requests: usize,
    pub prompt_tokens: u64,
    /// Positions in different blocks: what a cache without a limit holds at the end.
    pub distinct_positions: u64,
    /// Bytes of keys and values for a position.
    pub bytes_per_position: u64,
    /// Prompt tokens that a cache without a limit finds.
    pub most_found_tokens: u64,
    /// Curves of policies; the first is the one that forebay uses in RAM, the last a bound.
    pub curves: Vec<PrefixCurve>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PrefixCurve {
    pub policy: &'static str,
    /// True if the policy knows the future.
    pub is_bound: bool,
    pub points: Vec<PrefixPoint>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct PrefixPoint {
    /// Capacity in positions, in bytes, and as a share of the different positions of the log.
    pub positions: u64,
    pub bytes: u64,
    pub share: f64,
    /// Prompt tokens that were found, and as a share of all.
    pub found_tokens: u64,
    pub found: f64,
}

impl PrefixAssessment {
    /// Replays prompts in their order.
    pub fn new(model: String, prompts: &[Vec<u32>], bytes_per_position: u64) -> PrefixAssessment {
        let log = Log::new(prompts);
        let prompt_tokens = prompts.iter().map(|prompt| prompt.len() as u64).sum();
        let all = log.links.len();
        let mut capacities: Vec<usize> =
            SHARES.iter().map(|share| ((share * all as f64).round() as usize).max(1)).collect();
        capacities.dedup();
        let curve = |policy, is_bound, replay: fn(&Log, usize) -> u64| {
            let point = |&blocks: &usize| {
                let found_tokens = replay(&log, blocks) * BLOCK as u64;
                let positions = (blocks * BLOCK) as u64;
                PrefixPoint {
                    positions,
                    bytes: positions * bytes_per_position,
                    share: blocks as f64 / all.max(1) as f64,
                    found_tokens,
                    found: found_tokens as f64 / (prompt_tokens as f64).max(1.0),
                }
            };
            PrefixCurve { policy, is_bound, points: capacities.iter().map(point).collect() }
        };
        PrefixAssessment {
            model,
            requests: prompts.len(),
            prompt_tokens,
            distinct_positions: (all * BLOCK) as u64,
            bytes_per_position,
            most_found_tokens: lru(&log, usize::MAX) * BLOCK as u64,
            curves: vec![
                curve("forebay", false, forebay),
                curve("lru", false, lru),
                curve("belady", true, belady),
            ],
        }
    }

    /// Returns the smallest measured capacity that finds this share of what a cache without a limit finds.
    pub fn enough(&self, share: f64) -> Option<&PrefixPoint> {
        let wanted = share * self.most_found_tokens as f64;
        self.curves[0].points.iter().find(|point| point.found_tokens as f64 >= wanted)
    }
}

/// Prompts as numbers of blocks. Equal prefixes have equal numbers.
struct Log {
    requests: Vec<Entry>,
    /// Place of each block.
    links: Vec<Link>,
    hashes: Vec<BlockHash>,
}

struct Entry {
    blocks: Vec<u32>,
    /// Blocks that the request may find: at least one token is left to compute.
    usable: usize,
}

impl Log {
    fn new(prompts: &[Vec<u32>]) -> Log {
        let root = BlockHash::root(&[]);
        let mut numbers: HashMap<BlockHash, u32> = HashMap::new();
        let (mut links, mut hashes) = (Vec::new(), Vec::new());
        let requests = prompts.iter().map(|prompt| {
            let mut previous = root;
            let blocks = prompt.chunks_exact(BLOCK).enumerate().map(|(index, tokens)| {
                let bytes: Vec<u8> = tokens.iter().flat_map(|id| id.to_le_bytes()).collect();
                let link = Link { previous, index: index as u32 };
                previous = previous.then(&bytes);
                *numbers.entry(previous).or_insert_with(|| {
                    links.push(link);
                    hashes.push(previous);
                    links.len() as u32 - 1
                })
            });
            let blocks: Vec<u32> = blocks.collect();
            Entry { blocks, usable: prompt.len().saturating_sub(1) / BLOCK }
        });
        let requests = requests.collect();
        Log { requests, links, hashes }
    }
}

/// Returns the number of blocks at the start of a prompt that are held and usable.
fn hits(entry: &Entry, is_held: impl Fn(u32) -> bool) -> usize {
    entry.blocks.iter().take(entry.usable).take_while(|block| is_held(**block)).count()
}

/// The policy of the tier in RAM, which is the engine's own code. Returns the number of blocks found.
fn forebay(log: &Log, capacity: usize) -> u64 {
    let mut index = RamIndex::new([false].into_iter());
    let key = |block: u32| BlockKey { hash: log.hashes[block as usize], group: 0 };
    let (mut held, mut found, mut evicted) = (0, 0, Vec::new());
    for entry in &log.requests {
        let hit = hits(entry, |block| index.find(key(block)).is_some());
        found += hit as u64;
        let mut leased = Vec::new();
        for &block in &entry.blocks {
            let key = key(block);
            if index.find(key).is_some() {
                index.note_use(key.hash);
            } else {
                // The blocks of the request itself do not make room for those behind them.
                if held == capacity {
                    evicted.clear();
                    if !index.evict(0, &mut evicted) {
                        break;
                    }
                    held -= evicted.len();
                }
                index.insert(key, log.links[block as usize], block as usize, 0);
                held += 1;
            }
            index.lease(key.hash);
            leased.push(key.hash);
        }
        leased.into_iter().for_each(|hash| index.end_lease(hash));
    }
    found
}

/// Evicts what was used longest ago; of the blocks of one request, the last first.
fn lru(log: &Log, capacity: usize) -> u64 {
    let mut used: Vec<Option<usize>> = vec![None; log.links.len()];
    let mut order: BTreeSet<(usize, Reverse<u32>, u32)> = BTreeSet::new();
    let mut found = 0;
    for (now, entry) in log.requests.iter().enumerate() {
        found += hits(entry, |block| used[block as usize].is_some()) as u64;
        for &block in &entry.blocks {
            let depth = Reverse(log.links[block as usize].index);
            if let Some(before) = used[block as usize].take() {
                order.remove(&(before, depth, block));
            } else if order.len() == capacity {
                // Blocks of this request stay.
                match order.first() {
                    Some(&(before, _, victim)) if before < now => {
                        used[victim as usize] = None;
                        order.pop_first();
                    }
                    _ => break,
                }
            }
            used[block as usize] = Some(now);
            order.insert((now, depth, block));
        }
    }
    found
}

/// Evicts what is used again last, or never. No policy finds more: all blocks have one size, and a block is never used later
/// than those behind it.
fn belady(log: &Log, capacity: usize) -> u64 {
    // For every block, the requests that use it, the next one last.
    let mut uses: Vec<Vec<u32>> = vec![Vec::new(); log.links.len()];
    for (now, entry) in log.requests.iter().enumerate().rev() {
        // The last block of a prompt may be of no use to it.
        entry
            .blocks
            .iter()
            .take(entry.usable)
            .for_each(|block| uses[*block as usize].push(now as u32));
    }
    let mut held: Vec<Option<u32>> = vec![None; log.links.len()];
    let mut order: BTreeSet<(u32, u32, u32)> = BTreeSet::new();
    let mut found = 0;
    for (now, entry) in log.requests.iter().enumerate() {
        found += hits(entry, |block| held[block as usize].is_some()) as u64;
        for &block in &entry.blocks {
            let (at, depth) = (block as usize, log.links[block as usize].index);
            if uses[at].last() == Some(&(now as u32)) {
                uses[at].pop();
            }
            if let Some(before) = held[at].take() {
                order.remove(&(before, depth, block));
            }
            let Some(&next) = uses[at].last() else { continue };
            held[at] = Some(next);
            order.insert((next, depth, block));
        }
        while order.len() > capacity {
            if let Some((_, _, victim)) = order.pop_last() {
                held[victim as usize] = None;
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn prompt(parts: &[(u32, usize)]) -> Vec<u32> {
        parts.iter().flat_map(|&(token, count)| std::iter::repeat_n(token, count)).collect()
    }

    #[test]
    fn a_shared_start_is_found_as_far_as_whole_blocks_go() {
        let prompts = [
            prompt(&[(1, 40), (2, 30)]),
            prompt(&[(1, 40), (3, 30)]),
            // All of it is known, but its last token is computed again.
            prompt(&[(1, 32)]),
            prompt(&[(1, 33)]),
        ];
        let all = PrefixAssessment::new("m".into(), &prompts, 100);
        assert_eq!((all.requests, all.prompt_tokens), (4, 205));
        assert_eq!(all.most_found_tokens, 32 + 16 + 32);
        // Two shared blocks, and two of their own for each of the first two requests.
        assert_eq!(all.distinct_positions, 6 * 16);
        for curve in &all.curves {
            let last = curve.points.last().unwrap();
            assert_eq!((last.found_tokens, last.bytes), (80, 9600), "{}", curve.policy);
        }
        assert_eq!(all.enough(1.0).map(|point| point.positions <= 96), Some(true));
    }

    #[test]
    fn an_empty_log_and_short_prompts_find_nothing() {
        for prompts in [Vec::new(), vec![vec![1; 15]; 3]] {
            let all = PrefixAssessment::new("m".into(), &prompts, 1);
            assert_eq!((all.most_found_tokens, all.distinct_positions), (0, 0));
        }
    }

    #[test]
    fn one_long_prompt_does_not_drive_out_a_popular_start() {
        // A system prompt of 10 blocks has been used once more. It comes again and again; between, two prompts of 30 blocks come
        // only once.
        let mut prompts = vec![prompt(&[(7, 160), (1, 16)])];
        for round in 0..40 {
            prompts.push(prompt(&[(7, 160), (1000 + round, 16), (1, 1)]));
            prompts.push(prompt(&[(2000 + round, 480)]));
            prompts.push(prompt(&[(3000 + round, 480)]));
        }
        let log = Log::new(&prompts);
        let most = 40 * 10;
        assert_eq!(lru(&log, usize::MAX), most);
        let [own, plain, best] = [forebay(&log, 45), lru(&log, 45), belady(&log, 45)];
        assert!(own > most * 9 / 10, "{own} of {most}");
        assert_eq!((plain, best), (10, most));
    }

    proptest! {
        /// No policy finds more than the bound, no cache more than one without a limit, and one that holds all finds all.
        #[test]
        fn the_bound_is_a_bound(
            shapes in proptest::collection::vec((0_u32..4, 0_usize..70, 0_u32..3, 0_usize..70), 1..30),
            capacity in 1_usize..40,
        ) {
            let prompts: Vec<Vec<u32>> =
                shapes.iter().map(|&(a, n, b, m)| prompt(&[(a, n), (10 + b, m)])).collect();
            let log = Log::new(&prompts);
            let most = lru(&log, usize::MAX);
            let best = belady(&log, capacity);
            prop_assert!(best <= most);
            for policy in [forebay, lru] {
                prop_assert!(policy(&log, capacity) <= best);
                prop_assert_eq!(policy(&log, log.links.len().max(1)), most);
            }
            prop_assert_eq!(belady(&log, log.links.len().max(1)), most);
        }
    }
}
