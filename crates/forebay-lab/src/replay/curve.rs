//! LRU at every capacity in one pass, by stack distances (Mattson, Gecsei, Slutz, Traiger 1970).
//!
//! The resident experts of an LRU list are always the youngest of its stack: as many as fit. This also holds for
//! experts of different sizes. The bytes above an expert only grow until it is used again, so an expert that did not
//! fit once does not fit later. A lookup therefore hits at every capacity of at least its distance. The distance is
//! the bytes of the experts used since the last use, plus those of the expert itself.

use forebay_stream::{CacheShape, Lookups, Phase, Scope};

use super::layers::flat;

/// Largest number of steps in which distances are counted.
const STEPS_MAX: u64 = 1 << 21;

/// Hits of an LRU cache at every capacity in bytes.
#[derive(Clone, Debug)]
pub struct LruCurve {
    /// Size of a step. Distances are rounded up to multiples of it. It is the greatest common divisor of the experts'
    /// sizes if that needs at most `STEPS_MAX` steps, and the curve is then exact.
    pub resolution_bytes: u64,
    /// Number of LRU lists that share the capacity: the number of layers with experts, or 1.
    pub lists: u64,
    /// Number of lookups by distance in steps: `[prompt, generate]`.
    by_distance: Vec<[u64; 2]>,
    lookups: [u64; 2],
}

impl LruCurve {
    /// Computes the curve in one pass over the lookups. If `batch_may_exceed` is true (see
    /// [`CacheShape::batch_may_exceed`]), an expert of its list's last batch hits at every capacity.
    pub fn of(lookups: &Lookups, scope: Scope, batch_may_exceed: bool) -> LruCurve {
        let shape = CacheShape::from_bytes(scope, lookups.layers(), 0);
        let with_experts = lookups.layers().iter().filter(|layer| layer.0 > 0).count().max(1);
        let used = shape.layers.iter().filter(|layer| layer.experts > 0 && layer.cost > 0);
        let divisor = used.clone().map(|layer| layer.cost).fold(0, greatest_common_divisor).max(1);
        let mut largest = vec![0_u64; shape.groups.len()];
        used.for_each(|of| largest[of.group] += u64::from(of.experts) * of.cost);
        let most = largest.iter().copied().max().unwrap_or(0);
        let resolution_bytes = divisor.max(most.div_ceil(STEPS_MAX));
        let mut curve = LruCurve {
            resolution_bytes,
            lists: if scope == Scope::PerLayer { with_experts as u64 } else { 1 },
            by_distance: vec![[0; 2]; (most / resolution_bytes + 2) as usize],
            lookups: [0; 2],
        };
        curve.go_through(lookups, &shape, batch_may_exceed);
        curve
    }

    fn go_through(&mut self, lookups: &Lookups, shape: &CacheShape, batch_may_exceed: bool) {
        let (first, entries) = flat(shape.layers.iter().map(|layer| layer.experts));
        let mut members = vec![0; shape.groups.len()];
        shape
            .layers
            .iter()
            .filter(|of| of.experts > 0)
            .for_each(|of| members[of.group] += of.experts);
        let mut stacks: Vec<Stack> = members.into_iter().map(Stack::new).collect();
        // Number of the batch of its list that last used an entry, or 0 if there is none.
        let mut used_by = vec![0_u64; entries];
        let mut batches = vec![0_u64; shape.groups.len()];
        let mut place = vec![NOWHERE; entries];
        for (phase, layer, experts) in lookups.batches() {
            let (of, phase) =
                (&shape.layers[layer.0 as usize], (phase == Phase::Generate) as usize);
            let base = first[layer.0 as usize];
            let stack = &mut stacks[of.group];
            for expert in experts {
                let entry = base + expert.0 as usize;
                self.lookups[phase] += 1;
                if place[entry] == NOWHERE {
                    continue;
                }
                let stays = batch_may_exceed && used_by[entry] == batches[of.group];
                let distance = if stays { 0 } else { stack.distance(place[entry]) };
                let step = distance.div_ceil(self.resolution_bytes) as usize;
                self.by_distance[step][phase] += 1;
            }
            batches[of.group] += 1;
            for expert in experts {
                let entry = base + expert.0 as usize;
                used_by[entry] = batches[of.group];
                stack.use_entry(entry as u32, of.cost, &mut place);
            }
        }
    }

    /// Returns the number of lookups of prompts and of generated tokens.
    pub fn lookups(&self) -> [u64; 2] {
        self.lookups
    }

    /// Returns the number of hits of prompts and of generated tokens at a capacity in bytes.
    pub fn hits(&self, capacity_bytes: u64) -> [u64; 2] {
        let steps = (capacity_bytes / self.lists / self.resolution_bytes) as usize;
        let reached = &self.by_distance[..self.by_distance.len().min(steps.saturating_add(1))];
        reached.iter().fold([0; 2], |sum, at| [sum[0] + at[0], sum[1] + at[1]])
    }

    /// Returns `(capacity in bytes, [hits of prompts, hits of generated tokens])` wherever the hits change, in
    /// ascending order.
    pub fn points(&self) -> impl Iterator<Item = (u64, [u64; 2])> + '_ {
        let mut sum = [0; 2];
        let changes = self.by_distance.iter().enumerate().filter(|(_, at)| **at != [0, 0]);
        changes.map(move |(step, at)| {
            sum = [sum[0] + at[0], sum[1] + at[1]];
            (step as u64 * self.resolution_bytes * self.lists, sum)
        })
    }
}

const NOWHERE: u32 = u32::MAX;

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// LRU stack: bytes by time of last use, in a Fenwick tree (1994). Times are renumbered when they run out, so the
/// memory depends only on the number of entries.
struct Stack {
    /// `sums[i]` is the sum of the `i & -i` positions that end at `i`. Positions count from 1.
    sums: Vec<u64>,
    /// Entry at every position, and its bytes.
    at: Vec<(u32, u64)>,
    next: u32,
    total: u64,
}

impl Stack {
    fn new(entries: u32) -> Stack {
        // With twice the entries, renumbering adds a constant cost to each use.
        let places = (2 * entries as usize + 2).next_power_of_two();
        Stack { sums: vec![0; places], at: vec![(NOWHERE, 0); places], next: 1, total: 0 }
    }

    /// Returns the bytes of the entries used since the entry at `place`, plus its own.
    fn distance(&self, place: u32) -> u64 {
        let mut before = 0;
        let mut index = place as usize - 1;
        while index > 0 {
            before += self.sums[index];
            index &= index - 1;
        }
        self.total - before
    }

    fn add(&mut self, place: u32, bytes: u64, negative: bool) {
        let mut index = place as usize;
        while index < self.sums.len() {
            let sum = &mut self.sums[index];
            *sum = if negative { *sum - bytes } else { *sum + bytes };
            index += index & index.wrapping_neg();
        }
    }

    /// Makes an entry the youngest of the stack.
    fn use_entry(&mut self, entry: u32, bytes: u64, place: &mut [u32]) {
        let old = place[entry as usize];
        if old != NOWHERE {
            self.add(old, bytes, true);
            self.at[old as usize] = (NOWHERE, 0);
        } else {
            self.total += bytes;
        }
        if self.next as usize == self.at.len() {
            self.pack(place);
        }
        let new = self.next;
        self.next += 1;
        self.at[new as usize] = (entry, bytes);
        place[entry as usize] = new;
        self.add(new, bytes, false);
    }

    fn pack(&mut self, place: &mut [u32]) {
        let mut kept = 1;
        for from in 1..self.at.len() {
            let (entry, bytes) = std::mem::replace(&mut self.at[from], (NOWHERE, 0));
            if entry != NOWHERE {
                self.at[kept] = (entry, bytes);
                place[entry as usize] = kept as u32;
                kept += 1;
            }
        }
        self.next = kept as u32;
        // This builds the tree of all positions in one sweep.
        self.sums.iter_mut().zip(&self.at).for_each(|(sum, at)| *sum = at.1);
        for index in 1..self.sums.len() {
            let parent = index + (index & index.wrapping_neg());
            if parent < self.sums.len() {
                self.sums[parent] += self.sums[index];
            }
        }
    }
}
