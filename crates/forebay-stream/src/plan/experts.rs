//! Expert pools: equal slots for each size class, and how a budget is spent on them.
//!
//! A pool has `kept` slots, which the policy fills, and `transient` slots, into which misses are read. The pool makes
//! no difference between the two: a miss takes any free slot, and the end of the batch decides which experts are kept.

use serde::Serialize;

/// Slots of one size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ExpertPool {
    pub slot_bytes: u64,
    /// Layers whose experts use this pool.
    pub layers: Vec<u32>,
    /// Number of slots for experts that are kept.
    pub kept_slots: u32,
    /// Number of slots for experts in transit: at least those of one token, or 0 if every expert has a slot.
    pub transient_slots: u32,
}

impl ExpertPool {
    /// Returns the number of slots of both kinds.
    pub fn slots(&self) -> u32 {
        self.kept_slots + self.transient_slots
    }

    /// Returns the bytes of all slots.
    pub fn bytes(&self) -> u64 {
        self.slot_bytes.saturating_mul(u64::from(self.slots()))
    }
}

/// Layers whose experts have about the same size.
#[derive(Clone, Debug)]
struct Class {
    slot_bytes: u64,
    layers: Vec<u32>,
    experts: u32,
    /// Smallest and largest number of transient slots.
    transient: (u32, u32),
}

/// A division of the layers into size classes.
#[derive(Clone, Debug)]
pub(super) struct Classes {
    classes: Vec<Class>,
    experts_per_layer: Vec<u32>,
}

/// Slots bought so far.
#[derive(Clone, Debug)]
pub(super) struct Growth {
    pub kept_per_layer: Vec<u32>,
    /// `(kept, transient)` of every class.
    slots: Vec<(u32, u32)>,
}

impl Growth {
    pub fn kept(&self) -> u64 {
        self.slots.iter().map(|&(kept, _)| u64::from(kept)).sum()
    }
}

/// One transient slot is added for this many kept slots, up to twice what a token needs. Transient slots let prompts
/// read further ahead and make room for prefetches, but a kept slot saves more reads.
const KEPT_PER_TRANSIENT: u32 = 64;

/// Sizes that differ by at most one part in this many share a class.
const CLASS_TOLERANCE: u64 = 32;

impl Classes {
    /// Creates classes in which layers with slot sizes within a few percent share a pool.
    pub fn by_size(experts: &[(u32, u64)], per_token: u32) -> Classes {
        let mut sizes: Vec<u64> = experts.iter().filter(|l| l.0 > 0).map(|l| l.1).collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        let mut tops: Vec<u64> = Vec::new();
        for size in sizes {
            let near = tops.last().is_some_and(|&top| size >= top - top / CLASS_TOLERANCE);
            if !near {
                tops.push(size);
            }
        }
        Classes::with_tops(experts, &tops, per_token)
    }

    /// Creates one class whose slots hold any expert.
    pub fn one_for_all(experts: &[(u32, u64)], per_token: u32) -> Classes {
        let top = experts.iter().filter(|l| l.0 > 0).map(|l| l.1).max();
        Classes::with_tops(experts, top.as_slice(), per_token)
    }

    /// Creates classes with the slot sizes `tops`, in falling order. A layer belongs to the smallest size that holds
    /// its experts.
    fn with_tops(experts: &[(u32, u64)], tops: &[u64], per_token: u32) -> Classes {
        let mut classes: Vec<Class> = tops
            .iter()
            .map(|&slot_bytes| Class {
                slot_bytes,
                layers: Vec::new(),
                experts: 0,
                transient: (0, 0),
            })
            .collect();
        for (layer, &(count, bytes)) in experts.iter().enumerate().filter(|(_, l)| l.0 > 0) {
            let fits = |class: &&mut Class| class.slot_bytes >= bytes;
            if let Some(class) = classes.iter_mut().rev().find(fits) {
                class.layers.push(layer as u32);
                class.experts = class.experts.saturating_add(count);
            }
        }
        for class in &mut classes {
            let in_a_layer = class.layers.iter().map(|&layer| experts[layer as usize].0).max();
            let least = per_token.min(in_a_layer.unwrap_or(0));
            class.transient = (least, per_token.saturating_mul(2).min(class.experts));
        }
        Classes { classes, experts_per_layer: experts.iter().map(|l| l.0).collect() }
    }

    pub fn len(&self) -> usize {
        self.classes.len()
    }

    /// Returns the bytes of one token's experts, summed over all classes.
    pub fn smallest_bytes(&self) -> u64 {
        self.classes.iter().fold(0_u64, |sum, class| {
            sum.saturating_add(class.slot_bytes.saturating_mul(u64::from(class.transient.0)))
        })
    }

    fn start(&self) -> Growth {
        let slots = self.classes.iter().map(|class| (0, class.transient.0)).collect();
        Growth { kept_per_layer: vec![0; self.experts_per_layer.len()], slots }
    }

    /// Spends the bytes that remain on transient slots, for a plan that keeps no experts.
    pub fn widen(&self, bytes: u64) -> Growth {
        let mut growth = self.start();
        let mut left = bytes.saturating_sub(self.smallest_bytes());
        for (class, slots) in self.classes.iter().zip(&mut growth.slots) {
            let affordable = left.checked_div(class.slot_bytes).unwrap_or(0);
            let more = affordable.min(u64::from(class.transient.1 - class.transient.0));
            slots.1 += more as u32;
            left -= more * class.slot_bytes;
        }
        growth
    }

    /// Buys slots in a fixed order, one more expert for each layer in turn, until one does not fit.
    pub fn grow(&self, bytes: u64) -> Growth {
        let mut growth = self.start();
        let mut spent = self.smallest_bytes();
        let class_of = self.class_of_layers();
        let rounds = self.experts_per_layer.iter().copied().max().unwrap_or(0);
        for round in 1..=rounds {
            for (layer, class) in class_of.iter().enumerate() {
                let Some(class) = *class else { continue };
                if growth.kept_per_layer[layer] >= round || self.experts_per_layer[layer] < round {
                    continue;
                }
                let before = growth.slots[class];
                let after = self.classes[class].with_one_more(before);
                let more = u64::from(after.0 + after.1 - before.0 - before.1);
                let price = self.classes[class].slot_bytes.saturating_mul(more);
                match spent.checked_add(price).filter(|&sum| sum <= bytes) {
                    Some(sum) => spent = sum,
                    None => return growth,
                }
                growth.slots[class] = after;
                growth.kept_per_layer[layer] += 1;
                if after == (self.classes[class].experts, 0) {
                    self.keep_all(class, &mut growth);
                }
            }
        }
        growth
    }

    /// Marks all experts of a class as kept. Every expert then has a slot, and nothing is ever evicted.
    fn keep_all(&self, class: usize, growth: &mut Growth) {
        for &layer in &self.classes[class].layers {
            growth.kept_per_layer[layer as usize] = self.experts_per_layer[layer as usize];
        }
    }

    pub fn all_kept(&self, growth: &Growth) -> bool {
        self.classes.iter().zip(&growth.slots).all(|(class, slots)| slots.0 == class.experts)
    }

    pub fn pools(&self, growth: &Growth) -> Vec<ExpertPool> {
        let pool = |(class, &(kept_slots, transient_slots)): (&Class, &(u32, u32))| ExpertPool {
            slot_bytes: class.slot_bytes,
            layers: class.layers.clone(),
            kept_slots,
            transient_slots,
        };
        self.classes.iter().zip(&growth.slots).map(pool).collect()
    }

    fn class_of_layers(&self) -> Vec<Option<usize>> {
        let mut class_of = vec![None; self.experts_per_layer.len()];
        for (index, class) in self.classes.iter().enumerate() {
            for &layer in &class.layers {
                class_of[layer as usize] = Some(index);
            }
        }
        class_of
    }
}

impl Class {
    /// Returns `(kept, transient)` with one more kept slot. All are kept once there are as many slots as experts.
    fn with_one_more(&self, (kept, transient): (u32, u32)) -> (u32, u32) {
        let kept = kept + 1;
        let transient = transient.max((kept / KEPT_PER_TRANSIENT).min(self.transient.1));
        match kept.saturating_add(transient) >= self.experts {
            true => (self.experts, 0),
            false => (kept, transient),
        }
    }
}
