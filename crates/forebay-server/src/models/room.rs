//! Memory that loaded models share, and what has to leave when another one comes.

use std::iter::Sum;
use std::ops::{Add, Sub};
use std::time::Instant;

/// Memory of models in bytes: what they hold, or what there is for all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    pub vram_bytes: u64,
    pub ram_bytes: u64,
}

impl Add for Memory {
    type Output = Memory;

    fn add(self, other: Memory) -> Memory {
        Memory {
            vram_bytes: self.vram_bytes.saturating_add(other.vram_bytes),
            ram_bytes: self.ram_bytes.saturating_add(other.ram_bytes),
        }
    }
}

impl Sub for Memory {
    type Output = Memory;

    fn sub(self, other: Memory) -> Memory {
        Memory {
            vram_bytes: self.vram_bytes.saturating_sub(other.vram_bytes),
            ram_bytes: self.ram_bytes.saturating_sub(other.ram_bytes),
        }
    }
}

impl Sum for Memory {
    fn sum<I: Iterator<Item = Memory>>(all: I) -> Memory {
        all.fold(Memory::default(), Add::add)
    }
}

impl Memory {
    /// Returns true if a model that needs this much has room in `free`.
    pub fn fits(self, free: Memory) -> bool {
        self.vram_bytes <= free.vram_bytes && self.ram_bytes <= free.ram_bytes
    }

    /// Returns what a model needs of `all` memory that there is. What VRAM cannot hold at all goes to RAM.
    pub fn within(self, all: Memory) -> Memory {
        let beyond = self.vram_bytes.saturating_sub(all.vram_bytes);
        Memory {
            vram_bytes: self.vram_bytes.min(all.vram_bytes),
            ram_bytes: self.ram_bytes.saturating_add(beyond).min(all.ram_bytes),
        }
    }

    /// Returns true if this model has memory that `needs` lacks in `free`.
    fn would_help(self, needs: Memory, free: Memory) -> bool {
        (needs.vram_bytes > free.vram_bytes && self.vram_bytes > 0)
            || (needs.ram_bytes > free.ram_bytes && self.ram_bytes > 0)
    }
}

/// A loaded model that may have to leave.
#[derive(Clone, Copy, Debug)]
pub struct Holding {
    pub memory: Memory,
    pub is_busy: bool,
    pub last_used: Instant,
}

/// What to do for a model that is to be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Room {
    /// Load it into this memory. `None` means that no other model is loaded. `is_tight` means that it gets less than it
    /// needs because other models are busy.
    Load { room: Option<Memory>, is_tight: bool },
    /// Unload the model with this index, and ask again.
    Unload(usize),
    /// Wait until one of these models is idle.
    Wait(Vec<usize>),
}

/// Decides how a model that `needs` so much gets room within `all` memory beside `loaded` models. `was_too_small` says that
/// it has been tried without success to load it into what is free now.
pub fn next(needs: Memory, all: Memory, loaded: &[Holding], was_too_small: bool) -> Room {
    if loaded.is_empty() {
        return Room::Load { room: None, is_tight: false };
    }
    let free = all - loaded.iter().map(|of| of.memory).sum();
    let needs = needs.within(all);
    if needs.fits(free) && !was_too_small {
        return Room::Load { room: Some(free), is_tight: false };
    }
    let mut helpful: Vec<usize> = (0..loaded.len())
        .filter(|&index| was_too_small || loaded[index].memory.would_help(needs, free))
        .collect();
    helpful.sort_by_key(|&index| loaded[index].last_used);
    if let Some(&idle) = helpful.iter().find(|&&index| !loaded[index].is_busy) {
        return Room::Unload(idle);
    }
    if !was_too_small {
        return Room::Load { room: Some(free), is_tight: !helpful.is_empty() };
    }
    // New requests for models that are waited for wait, too. So no more of them than necessary.
    let mut left = free;
    let needed = helpful.into_iter().take_while(|&index| {
        let is_needed = !needs.fits(left);
        left = left + loaded[index].memory;
        is_needed
    });
    let mut waited: Vec<usize> = needed.collect();
    if waited.is_empty() {
        waited = (0..loaded.len()).collect();
    }
    Room::Wait(waited)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn vram(gib: u64) -> Memory {
        Memory { vram_bytes: gib << 30, ram_bytes: 0 }
    }

    fn memory(vram_gib: u64, ram_gib: u64) -> Memory {
        Memory { ram_bytes: ram_gib << 30, ..vram(vram_gib) }
    }

    /// Models in the order of their last use.
    fn loaded(all: &[(Memory, bool)]) -> Vec<Holding> {
        let start = Instant::now();
        let at = |index: usize| start + Duration::from_secs(index as u64);
        let holding =
            |(index, &(memory, is_busy))| Holding { memory, is_busy, last_used: at(index) };
        all.iter().enumerate().map(holding).collect()
    }

    const ALL: Memory = Memory { vram_bytes: 10 << 30, ram_bytes: 20 << 30 };

    #[test]
    fn the_first_model_gets_everything() {
        let room = next(vram(99), ALL, &[], true);
        assert_eq!(room, Room::Load { room: None, is_tight: false });
    }

    #[test]
    fn a_model_that_fits_beside_others_leaves_them_alone() {
        let others = loaded(&[(vram(2), false), (vram(3), true)]);
        let room = Some(memory(5, 20));
        assert_eq!(next(vram(5), ALL, &others, false), Room::Load { room, is_tight: false });
    }

    #[test]
    fn the_idle_model_that_was_used_longest_ago_leaves() {
        let others =
            loaded(&[(vram(2), true), (memory(0, 5), false), (vram(2), false), (vram(3), false)]);
        assert_eq!(next(vram(4), ALL, &others, false), Room::Unload(2), "RAM would not help");
        assert_eq!(next(memory(4, 16), ALL, &others, false), Room::Unload(1));
    }

    #[test]
    fn a_model_larger_than_vram_takes_ram_for_the_rest() {
        let others = loaded(&[(memory(0, 5), false)]);
        assert_eq!(next(vram(26), ALL, &others, false), Room::Unload(0));
        let room = Some(memory(10, 15));
        assert_eq!(next(vram(25), ALL, &others, false), Room::Load { room, is_tight: false });
    }

    #[test]
    fn busy_models_are_waited_for_only_if_what_is_free_is_too_small() {
        let others = loaded(&[(vram(4), true), (vram(5), true)]);
        let room = Some(memory(1, 20));
        assert_eq!(next(vram(4), ALL, &others, false), Room::Load { room, is_tight: true });
        assert_eq!(next(vram(4), ALL, &others, true), Room::Wait(vec![0]));
        assert_eq!(next(vram(6), ALL, &others, true), Room::Wait(vec![0, 1]));
        // What fits by its weights may still be too small for something else. Then every model may help.
        assert_eq!(next(vram(1), ALL, &others, true), Room::Wait(vec![0, 1]));
        let others = loaded(&[(vram(4), true), (memory(0, 1), false)]);
        assert_eq!(next(vram(1), ALL, &others, true), Room::Unload(1));
    }
}
