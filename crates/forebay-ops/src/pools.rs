//! Which positions a row sees if it chooses among pools of consecutive ones.
//!
//! Pool `p` has the positions from `p * length` on. A row sees the pools that it chooses, and all positions behind the last
//! pool that it may choose. So a row sees its own position whatever the scores are, and how many positions it sees follows
//! from its position alone.

/// Pools of consecutive positions, among which rows choose. A pool of one position is that position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pools {
    /// Number of positions of a pool.
    pub length: usize,
    /// Number of pools that a row chooses.
    pub most: usize,
    /// True if a row does not choose the pool of its own position, which it always sees. Otherwise that is so only while the
    /// pool is not complete.
    pub own_seen: bool,
    /// Number of pools before that of the row's own position that it always chooses.
    pub before_own: usize,
}

impl Pools {
    /// Returns pools of one position, of which a row chooses `most`.
    pub const fn positions(most: usize) -> Pools {
        Pools { length: 1, most, own_seen: false, before_own: 0 }
    }

    /// Returns the number of pools that a row at `position` may choose.
    pub fn candidates(&self, position: usize) -> usize {
        self.candidates_of(position + 1)
    }

    /// Returns the number of pools that a row which `keys` keys precede, its own among them, may choose.
    pub fn candidates_of(&self, keys: usize) -> usize {
        keys.saturating_sub(usize::from(self.own_seen)) / self.length
    }

    /// Returns true if a row at `position` sees all positions up to its own.
    pub fn sees_all(&self, position: usize) -> bool {
        self.candidates(position) <= self.most
    }

    /// Returns the number of positions that a row at `position` sees.
    pub fn seen(&self, position: usize) -> usize {
        let candidates = self.candidates(position);
        position + 1 - (candidates - candidates.min(self.most)) * self.length
    }

    /// Returns the largest number of positions that a row sees.
    pub fn positions_max(&self) -> usize {
        let behind = if self.own_seen { self.length } else { self.length - 1 };
        self.most.saturating_mul(self.length).saturating_add(behind)
    }

    /// Returns position number `index` of those that a row at `position` sees, in order. `list` has the pools that it chooses.
    pub fn position_of(&self, list: &[u32], position: usize, index: usize) -> usize {
        let candidates = self.candidates(position);
        let taken = candidates.min(self.most);
        match index / self.length {
            pool if pool < taken => list[pool] as usize * self.length + index % self.length,
            _ => index + (candidates - taken) * self.length,
        }
    }

    /// Checks that rows can choose among such pools.
    ///
    /// # Panics
    /// Panics if they cannot.
    pub fn check(&self) {
        let Pools { length, most, before_own, .. } = *self;
        assert!(length > 0 && most > 0 && before_own <= most, "{self:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_sees_the_pools_it_chooses_and_all_behind_them() {
        let list = [0_u32, 2];
        let seen = |pools: &Pools, position: usize| -> Vec<usize> {
            let index = 0..pools.seen(position);
            index.map(|index| pools.position_of(&list, position, index)).collect()
        };
        let complete = Pools { length: 4, most: 2, own_seen: false, before_own: 0 };
        assert_eq!(seen(&complete, 14), [0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14]);
        // The pool of position 15 is complete and not chosen.
        assert_eq!(seen(&complete, 15), [0, 1, 2, 3, 8, 9, 10, 11]);
        let apart = Pools { own_seen: true, ..complete };
        assert_eq!(seen(&apart, 15), [0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15]);
        assert_eq!(seen(&apart, 12), [0, 1, 2, 3, 8, 9, 10, 11, 12]);
        assert_eq!(seen(&Pools::positions(2), 5), [0, 2]);
        for (pools, most) in [(complete, 11), (apart, 12), (Pools::positions(2), 2)] {
            assert_eq!((0..50).map(|at| pools.seen(at)).max(), Some(most));
            assert_eq!(pools.positions_max(), most);
            for position in (0..50).filter(|position| pools.sees_all(*position)) {
                assert_eq!(pools.seen(position), position + 1);
            }
        }
    }
}
