//! Device memory of a fixed size, cut into ranges: which one the next weights get, and whose weights leave for them.

use std::ops::Range;

/// Number of weights that are in the device together, such as those of one module.
pub type Group = usize;

/// Ranges begin at multiples of this many bytes.
pub const ALIGNMENT: u64 = 512;

/// Memory that is cut into ranges, each free or with weights. `P` is a point in a queue of the device that must be reached before a
/// free range is written.
#[derive(Debug)]
pub struct Room<P> {
    /// In the order of their addresses, without gaps. Two free ranges are never beside each other.
    ranges: Vec<Part<P>>,
    bytes: u64,
}

#[derive(Debug)]
struct Part<P> {
    first: u64,
    bytes: u64,
    holds: Holds<P>,
}

#[derive(Debug)]
enum Holds<P> {
    Nothing { after: Vec<P> },
    Weights(Group),
}

/// Ranges beside each other that can be given to other weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice(Range<usize>);

/// Returns the bytes that weights take up.
pub fn aligned(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGNMENT).max(ALIGNMENT)
}

impl<P: Clone> Room<P> {
    /// Returns free memory of so many bytes, rounded down to whole units of [`ALIGNMENT`]. It may be written after these points.
    pub fn new(bytes: u64, after: Vec<P>) -> Room<P> {
        let bytes = bytes / ALIGNMENT * ALIGNMENT;
        let free = Part { first: 0, bytes, holds: Holds::Nothing { after } };
        Room { ranges: if bytes > 0 { vec![free] } else { Vec::new() }, bytes }
    }

    /// Returns the points after which free ranges may be written.
    pub fn points(&self) -> Vec<P> {
        let points = self.ranges.iter().filter_map(|range| match &range.holds {
            Holds::Nothing { after } => Some(after.iter().cloned()),
            Holds::Weights(_) => None,
        });
        points.flatten().collect()
    }

    /// Returns the number of points after which free ranges may be written.
    pub fn points_len(&self) -> usize {
        let points = self.ranges.iter().map(|range| match &range.holds {
            Holds::Nothing { after } => after.len(),
            Holds::Weights(_) => 0,
        });
        points.sum()
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Chooses ranges with room for so many bytes. `next_use` returns after how many other uses weights are used again, or `None` if
    /// they must stay. Of all choices, the one whose weights are used again last; then the one that is least too large. `None` if
    /// there is no room, or if all choices have weights that are used again before `later_than` other uses.
    pub fn choose(
        &self,
        bytes: u64,
        later_than: Option<usize>,
        next_use: impl Fn(Group) -> Option<usize>,
    ) -> Option<Choice> {
        let bytes = aligned(bytes);
        let next_uses: Vec<Option<usize>> = self
            .ranges
            .iter()
            .map(|range| match range.holds {
                Holds::Nothing { .. } => Some(usize::MAX),
                Holds::Weights(group) => {
                    next_use(group).filter(|next| later_than.is_none_or(|bound| *next > bound))
                }
            })
            .collect();
        let mut best: Option<((usize, u64), Range<usize>)> = None;
        for first in 0..self.ranges.len() {
            let (mut total, mut soonest) = (0, usize::MAX);
            let from_first = self.ranges.iter().zip(&next_uses).enumerate().skip(first);
            for (last, (range, next)) in from_first {
                let Some(next) = *next else { break };
                soonest = soonest.min(next);
                if best.as_ref().is_some_and(|((found, _), _)| soonest < *found) {
                    break;
                }
                total += range.bytes;
                if total >= bytes {
                    let value = (soonest, u64::MAX - (total - bytes));
                    if best.as_ref().is_none_or(|(found, _)| value > *found) {
                        best = Some((value, first..last + 1));
                    }
                    break;
                }
            }
        }
        best.map(|(_, chosen)| Choice(chosen))
    }

    /// Gives the ranges of a choice to weights. `leave` is called for the weights that were there, and returns the points after which
    /// their range may be written. Returns where the new weights begin, and all these points.
    pub fn take(
        &mut self,
        choice: Choice,
        group: Group,
        bytes: u64,
        mut leave: impl FnMut(Group) -> Vec<P>,
    ) -> (u64, Vec<P>) {
        let bytes = aligned(bytes);
        let chosen = &self.ranges[choice.0.clone()];
        let (first, total) = (chosen[0].first, chosen.iter().map(|range| range.bytes).sum::<u64>());
        let mut points = Vec::new();
        for range in chosen {
            match &range.holds {
                Holds::Nothing { after } => points.extend(after.iter().cloned()),
                Holds::Weights(group) => points.extend(leave(*group)),
            }
        }
        let taken = Part { first, bytes, holds: Holds::Weights(group) };
        let rest = (total > bytes).then(|| Part {
            first: first + bytes,
            bytes: total - bytes,
            holds: Holds::Nothing { after: points.clone() },
        });
        let at = choice.0.start;
        self.ranges.splice(choice.0, [Some(taken), rest].into_iter().flatten());
        self.join(at + 1);
        (first, points)
    }

    /// Frees the range of weights. It may be written after these points.
    ///
    /// # Panics
    /// Panics if there are no such weights.
    pub fn free(&mut self, group: Group, after: Vec<P>) {
        let holds = |range: &Part<P>| matches!(range.holds, Holds::Weights(of) if of == group);
        let at = self.ranges.iter().position(holds).expect("the weights are in this memory");
        self.ranges[at].holds = Holds::Nothing { after };
        self.join(at);
    }

    /// Joins a range with those beside it, if they are free.
    fn join(&mut self, at: usize) {
        let is_free = |range: &Part<P>| matches!(range.holds, Holds::Nothing { .. });
        for second in [at + 1, at] {
            let Some([before, after]) =
                second.checked_sub(1).and_then(|first| self.ranges.get_mut(first..=second))
            else {
                continue;
            };
            if !is_free(before) || !is_free(after) {
                continue;
            }
            before.bytes += after.bytes;
            let (Holds::Nothing { after: points }, Holds::Nothing { after: more }) =
                (&mut before.holds, &mut after.holds)
            else {
                unreachable!("both are free");
            };
            points.append(more);
            self.ranges.remove(second);
        }
    }

    /// Forgets points that are reached.
    pub fn forget(&mut self, is_reached: impl Fn(&P) -> bool) {
        for range in &mut self.ranges {
            if let Holds::Nothing { after } = &mut range.holds {
                after.retain(|point| !is_reached(point));
            }
        }
    }

    #[cfg(test)]
    fn check(&self) {
        let mut end = 0;
        let mut was_free = false;
        for range in &self.ranges {
            let is_free = matches!(range.holds, Holds::Nothing { .. });
            assert!(range.first == end && range.bytes > 0 && !(is_free && was_free));
            (end, was_free) = (end + range.bytes, is_free);
        }
        assert_eq!(end, self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    const UNIT: u64 = ALIGNMENT;

    fn put(
        room: &mut Room<u32>,
        group: Group,
        units: u64,
        next: &[Option<usize>],
    ) -> Option<(u64, Vec<Group>)> {
        let choice = room.choose(units * UNIT, None, |group| next[group])?;
        let mut left = Vec::new();
        let (first, points) = room.take(choice, group, units * UNIT, |group| {
            left.push(group);
            vec![group as u32]
        });
        assert!(left.iter().all(|group| points.contains(&(*group as u32))));
        room.check();
        Some((first / UNIT, left))
    }

    #[test]
    fn weights_that_are_used_last_leave_first() {
        let mut room = Room::new(10 * UNIT + 7, vec![]);
        assert_eq!(room.bytes(), 10 * UNIT);
        let next = [Some(3), Some(9), Some(5), None];
        assert_eq!(put(&mut room, 0, 4, &next), Some((0, vec![])));
        assert_eq!(put(&mut room, 1, 3, &next), Some((4, vec![])));
        assert_eq!(put(&mut room, 2, 2, &next), Some((7, vec![])));
        // One unit is free, so 2 is enough to leave for 3 units, and 1 is used later.
        assert_eq!(put(&mut room, 3, 3, &next), Some((4, vec![1])));
        // 3 must stay, and 2 with what is free is too small.
        let next = [None, None, Some(5), None];
        assert_eq!(put(&mut room, 1, 4, &next), None);
        assert_eq!(put(&mut room, 1, 3, &next), Some((7, vec![2])));
    }

    #[test]
    fn nothing_leaves_that_is_used_before() {
        let mut room = Room::<u32>::new(4 * UNIT, vec![]);
        put(&mut room, 0, 4, &[Some(2)]);
        assert_eq!(room.choose(1, Some(2), |_| Some(2)), None);
        assert!(room.choose(1, Some(1), |_| Some(2)).is_some());
        assert!(room.choose(5 * UNIT, None, |_| Some(2)).is_none(), "too large");
    }

    #[test]
    fn what_is_least_too_large_is_chosen() {
        let mut room = Room::<u32>::new(10 * UNIT, vec![]);
        for (group, units) in [(0, 3), (1, 1), (2, 2), (3, 4)] {
            put(&mut room, group, units, &[None; 4]);
        }
        room.free(0, vec![7]);
        room.free(2, vec![8]);
        room.check();
        let choice = room.choose(2 * UNIT, None, |_| None).unwrap();
        assert_eq!(room.take(choice, 0, 2 * UNIT, |_| vec![]), (4 * UNIT, vec![8]));
        room.free(1, vec![9]);
        room.check();
        // Points of what is joined stay until they are reached.
        let choice = room.choose(4 * UNIT, None, |_| None).unwrap();
        assert_eq!(room.take(choice, 1, UNIT, |_| vec![]), (0, vec![7, 9]));
        room.forget(|point| *point == 7);
        let choice = room.choose(3 * UNIT, None, |_| None).unwrap();
        assert_eq!(room.take(choice, 2, UNIT, |_| vec![]), (UNIT, vec![9]));
    }

    #[test]
    fn ranges_never_overlap() {
        let mut random = fastrand::Rng::with_seed(3);
        for _ in 0..50 {
            let mut room = Room::<u32>::new(random.u64(1..60) * UNIT, vec![]);
            let mut held: HashMap<Group, Range<u64>> = HashMap::new();
            let mut next: Vec<Option<usize>> = vec![None; 30];
            for _ in 0..300 {
                let group = random.usize(..30);
                next[group] = random.bool().then(|| random.usize(..50));
                let bytes = random.u64(1..20 * UNIT);
                if held.contains_key(&group) {
                    held.remove(&group);
                    room.free(group, vec![]);
                } else if let Some(choice) = room.choose(bytes, None, |of| next[of]) {
                    let (first, _) = room.take(choice, group, bytes, |of| {
                        assert!(next[of].is_some() && held.remove(&of).is_some());
                        vec![]
                    });
                    let range = first..first + aligned(bytes);
                    assert!(range.end <= room.bytes());
                    assert!(held.values().all(|of| of.end <= range.start || of.start >= range.end));
                    held.insert(group, range);
                }
                room.check();
            }
        }
    }
}
