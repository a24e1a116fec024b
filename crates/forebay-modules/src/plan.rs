//! Which weights stay in the device from pass to pass.

use crate::room::{Group, aligned};

/// Memory for weights that come and go, in multiples of the largest of them: one in use, one that is next, and one that comes.
const WINDOW: u64 = 3;

/// Groups of at most so many bytes stay first, if they take at most this part of the memory.
const SMALL_BYTES: u64 = 256 << 10;
const SMALL_SHARE: u64 = 16;

/// The part of the best choice's bytes that another one must save, and the most choices that are compared.
const NEARLY: f64 = 0.95;
const CHOICES_MAX: usize = 16;
/// The highest rate, in multiples of the mean one, and the steps in which the lowest possible one is looked for.
const RATES: f64 = 64.0;
const STEPS: usize = 30;

/// What a plan is made from.
pub struct PlanInput<'a> {
    /// Bytes of each group in the device, and where it stays coded, if it can.
    pub bytes: &'a [u64],
    pub coded: Option<&'a [Option<u64>]>,
    /// How often each group is used, in any unit.
    pub uses: &'a [u64],
    /// The groups in the order of their first use. Those that are not among them are not chosen.
    pub order: &'a [Group],
    /// The groups that are needed together.
    pub units: &'a [Vec<Group>],
    /// Bytes of device memory for all of them.
    pub room: u64,
    /// Seconds of work for which each group is used in a pass, if they are known, and bytes that may come ahead of their use.
    pub work: Option<&'a [f64]>,
    pub ahead: u64,
}

/// The groups that stay in the device from pass to pass, in the order of their first use. The others come and go in the rest of the
/// memory, where at least each unit fits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Kept {
    pub groups: Vec<Group>,
    /// Those that stay coded. They are decoded to the rest of the memory before each use.
    pub coded: Vec<Group>,
    /// Bytes that all take up.
    pub bytes: u64,
}

impl PlanInput<'_> {
    /// Returns the work between each of these groups, which are in the order of their first use, and the one before it.
    fn before(&self, groups: &[(Group, u64)], work: &[f64]) -> Vec<f64> {
        let (mut before, mut sum) = (Vec::new(), 0.0);
        for group in self.order {
            if groups.get(before.len()).is_some_and(|(next, _)| next == group) {
                before.push(std::mem::take(&mut sum));
            }
            sum += work[*group];
        }
        // Passes follow each other.
        if let Some(first) = before.first_mut() {
            *first += sum;
        }
        before
    }
}

impl Kept {
    /// Chooses those that save most loads. Groups that are used equally often are chosen evenly over a pass, so that those between them
    /// can come while they are in use.
    pub fn choose(input: &PlanInput<'_>) -> Kept {
        // The first one of those that save as much.
        let choices = Kept::choices(input).into_iter().rev();
        choices.max_by_key(|kept| kept.value(input.bytes, input.uses)).unwrap_or_default()
    }

    /// Returns the choice for each size of the largest group that comes and goes: the larger it is, the less room there is for those that stay.
    fn choices(input: &PlanInput<'_>) -> Vec<Kept> {
        let mut sizes: Vec<u64> =
            input.order.iter().map(|group| aligned(input.bytes[*group])).collect();
        sizes.sort_unstable();
        sizes.dedup();
        // As if all that is expected stayed.
        sizes.insert(0, 0);
        sizes.into_iter().map(|largest| Kept::with_largest(input, largest)).collect()
    }

    /// Returns choices that save nearly as many loads as others can, so that the bytes which come are spread over the time of a pass.
    ///
    /// # Panics
    /// Panics if the work is not known.
    pub fn over_work(input: &PlanInput<'_>) -> Vec<Kept> {
        assert!(input.work.is_some());
        let mut choices = Kept::choices(input);
        let value = |kept: &Kept| kept.value(input.bytes, input.uses);
        choices.sort_by_key(|kept| std::cmp::Reverse(value(kept)));
        let best = choices.first().map_or(0, value);
        choices.retain(|kept| value(kept) as f64 >= NEARLY * best as f64);
        choices.truncate(CHOICES_MAX);
        choices
    }

    /// Chooses groups so that those which come and go have at most so many bytes. Returns none if there is no room for this.
    fn with_largest(input: &PlanInput<'_>, largest: u64) -> Kept {
        let size = |group: &Group| aligned(input.bytes[*group]);
        let mut is_kept = vec![false; input.bytes.len()];
        let coded_size = |group: &Group| {
            let bytes = input.coded.and_then(|coded| coded[*group])?;
            Some(aligned(bytes)).filter(|bytes| *bytes < size(group))
        };
        for group in input.order.iter().filter(|group| size(group) > largest) {
            is_kept[*group] = true;
        }
        // Each load takes some time beside that for its bytes.
        let mut small: Vec<Group> = input.order.to_vec();
        small.retain(|group| size(group) <= SMALL_BYTES && input.uses[*group] > 0);
        let small_bytes: u64 = small.iter().map(size).sum();
        if SMALL_SHARE * small_bytes <= input.room {
            small.iter().for_each(|group| is_kept[*group] = true);
        }
        let comes =
            |unit: &Vec<Group>| unit.iter().filter(|group| !is_kept[**group]).map(size).sum();
        let together: u64 = input.units.iter().map(comes).max().unwrap_or(0);
        let window = (WINDOW * largest).max(together);
        let large: u64 = input.order.iter().filter(|group| is_kept[**group]).map(size).sum();
        let Some(mut left) = input.room.checked_sub(window + large) else { return Kept::default() };
        let (mut is_coded, mut coded_bytes) = (vec![false; input.bytes.len()], 0);
        let mut uses: Vec<u64> = input.order.iter().map(|group| input.uses[*group]).collect();
        uses.sort_unstable();
        uses.dedup();
        for uses in uses.into_iter().rev().filter(|uses| *uses > 0) {
            let class =
                input.order.iter().filter(|group| !is_kept[**group] && input.uses[**group] == uses);
            let class: Vec<(Group, u64)> = class
                .map(|group| (*group, coded_size(group).unwrap_or_else(|| size(group))))
                .collect();
            let chosen = match input.work {
                Some(work) => {
                    spread_over_work(&class, &input.before(&class, work), left, input.ahead)
                }
                None => spread(&class, left),
            };
            for group in chosen {
                match coded_size(&group) {
                    Some(bytes) => {
                        is_coded[group] = true;
                        (left, coded_bytes) = (left - bytes, coded_bytes + bytes);
                    }
                    None => {
                        is_kept[group] = true;
                        left -= size(&group);
                    }
                }
            }
        }
        let those = |is: &[bool]| -> Vec<Group> {
            input.order.iter().copied().filter(|group| is[*group]).collect()
        };
        let (groups, coded) = (those(&is_kept), those(&is_coded));
        Kept { bytes: groups.iter().map(size).sum::<u64>() + coded_bytes, groups, coded }
    }

    /// Returns the bytes that need not be loaded, for each use.
    pub fn value(&self, bytes: &[u64], uses: &[u64]) -> u128 {
        let value = |group: &Group| u128::from(bytes[*group]) * u128::from(uses[*group]);
        self.groups.iter().chain(&self.coded).map(value).sum()
    }
}

/// Chooses groups that have at most so many bytes together, evenly over their order.
pub fn spread(groups: &[(Group, u64)], room: u64) -> Vec<Group> {
    let total: u64 = groups.iter().map(|(_, bytes)| bytes).sum();
    let (mut seen, mut kept, mut chosen) = (0, 0, Vec::new());
    for (group, bytes) in groups {
        seen += bytes;
        let share = u128::from(seen) * u128::from(room.min(total));
        if u128::from(kept + bytes) * u128::from(total) <= share {
            chosen.push(*group);
            kept += bytes;
        }
    }
    chosen
}

/// Chooses groups that have at most so many bytes together, so that the bytes of the others are spread over the time of a pass. `before` is the
/// work before each group's use, in which it can come. At most `ahead` bytes come earlier than that.
fn spread_over_work(groups: &[(Group, u64)], before: &[f64], room: u64, ahead: u64) -> Vec<Group> {
    let largest = groups.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0);
    let ahead = ahead.max(largest) as f64;
    let total: u64 = groups.iter().map(|(_, bytes)| bytes).sum();
    let work: f64 = before.iter().sum();
    // If so many bytes can come in a unit of work, which groups need not stay? The second of two passes tells, which begins with what the first one
    // has left.
    let stay = |rate: f64, ahead: f64| -> Vec<(Group, u64)> {
        let (mut can_come, mut kept) = (0.0_f64, Vec::new());
        for _ in 0..2 {
            kept.clear();
            for ((group, bytes), before) in groups.iter().zip(before) {
                can_come = (can_come + rate * before).min(ahead);
                match can_come >= *bytes as f64 {
                    true => can_come -= *bytes as f64,
                    false => kept.push((*group, *bytes)),
                }
            }
        }
        kept
    };
    let sum = |kept: &[(Group, u64)]| -> u64 { kept.iter().map(|(_, bytes)| bytes).sum() };
    // If those that stay have no room at any rate, others come long before their use.
    let (mut low, mut high) = (0.0, RATES * total as f64 / work);
    let rates = [ahead, f64::INFINITY].into_iter();
    let found = rates.filter(|_| high.is_finite()).map(|ahead| (ahead, stay(high, ahead)));
    let Some((ahead, mut best)) = found.into_iter().find(|(_, kept)| sum(kept) <= room) else {
        return spread(groups, room);
    };
    // The lowest rate at which they have room.
    for _ in 0..STEPS {
        let rate = f64::midpoint(low, high);
        let kept = stay(rate, ahead);
        match sum(&kept) <= room {
            true => (best, high) = (kept, rate),
            false => low = rate,
        }
    }
    let mut left = room - sum(&best);
    let mut chosen: Vec<Group> = best.into_iter().map(|(group, _)| group).collect();
    let others = groups.iter().filter(|(group, _)| !chosen.contains(group)).copied();
    let mut others: Vec<(Group, u64)> = others.collect();
    others.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    for (group, bytes) in others {
        if bytes <= left {
            left -= bytes;
            chosen.push(group);
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;
    use crate::room::ALIGNMENT;

    fn kept(units: &[u64], uses: &[u64], room: u64) -> Vec<Group> {
        let bytes: Vec<u64> = units.iter().map(|units| units * ALIGNMENT).collect();
        let order: Vec<Group> = (0..bytes.len()).collect();
        let units: Vec<Vec<Group>> = order.iter().map(|group| vec![*group]).collect();
        let room = room * ALIGNMENT;
        let (bytes, order) = (&bytes[..], &order[..]);
        let input = PlanInput {
            bytes,
            coded: None,
            uses,
            order,
            units: &units,
            room,
            work: None,
            ahead: 0,
        };
        let kept = Kept::choose(&input);
        assert_eq!(kept.bytes, kept.groups.iter().map(|group| bytes[*group]).sum::<u64>());
        let rest = bytes.iter().enumerate().filter(|(group, _)| !kept.groups.contains(group));
        assert!(kept.bytes + rest.map(|(_, bytes)| *bytes).max().unwrap_or(0) <= room);
        kept.groups
    }

    #[test]
    fn groups_are_chosen_evenly() {
        let groups: Vec<(Group, u64)> = (0..8).map(|group| (group, 10)).collect();
        assert_eq!(spread(&groups, 40), [1, 3, 5, 7]);
        assert_eq!(spread(&groups, 80), (0..8).collect::<Vec<_>>());
        assert_eq!(spread(&groups, 1000), (0..8).collect::<Vec<_>>());
        assert_eq!(spread(&groups, 9), Vec::<Group>::new());
        assert_eq!(spread(&[(3, 30), (4, 5), (5, 5)], 10), [4, 5]);
    }

    #[test]
    fn groups_that_stay_are_spread_over_a_pass() {
        assert_eq!(kept(&[1; 12], &[1; 12], 12), (0..12).collect::<Vec<_>>(), "all fit");
        assert_eq!(kept(&[1; 12], &[1; 12], 7), [2, 5, 8, 11]);
        assert_eq!(kept(&[1; 12], &[1; 12], 9), [1, 3, 5, 7, 9, 11]);
        assert_eq!(kept(&[1; 12], &[1; 12], 3), Vec::<Group>::new());
        assert_eq!(kept(&[1; 12], &[1; 12], 1), Vec::<Group>::new());
    }

    #[test]
    fn large_groups_stay_if_that_leaves_more_room() {
        // If the largest one came and went, it would need 90.
        assert_eq!(kept(&[10, 2, 2, 2, 2, 2, 2, 2, 30], &[1; 9], 46), [0, 8]);
        assert_eq!(kept(&[10, 2, 2, 2, 2, 2, 2, 2, 2], &[1; 9], 20), [0, 4, 8]);
        assert_eq!(kept(&[30, 30, 30], &[1; 3], 45), Vec::<Group>::new());
    }

    #[test]
    fn what_is_used_more_often_stays() {
        let uses = [1, 1, 1, 30, 30, 30, 30, 1];
        assert_eq!(kept(&[1; 8], &uses, 5), [4, 6]);
        assert_eq!(kept(&[1; 8], &uses, 7), [3, 4, 5, 6]);
        assert_eq!(kept(&[1, 1, 1, 1, 1], &[0, 0, 5, 5, 0], 4), [3], "one of two that are used");
    }

    #[test]
    fn what_comes_is_spread_over_the_time_of_a_pass() {
        // In the first half, groups are used for a third of the time of those in the second half.
        let work: Vec<f64> = (0..40).map(|group| if group < 20 { 1.0 } else { 3.0 }).collect();
        let (bytes, uses, order) = ([ALIGNMENT; 40], [1; 40], (0..40).collect::<Vec<_>>());
        let units: Vec<Vec<Group>> = order.iter().map(|group| vec![*group]).collect();
        let kept = |room, ahead| -> [usize; 2] {
            let work = Some(&work[..]);
            let (room, ahead) = (room * ALIGNMENT, ahead * ALIGNMENT);
            let input = PlanInput {
                bytes: &bytes,
                coded: None,
                uses: &uses,
                order: &order,
                units: &units,
                room,
                work,
                ahead,
            };
            let all = Kept::over_work(&input);
            let count = |groups: Range<usize>| {
                all[0].groups.iter().filter(|group| groups.contains(group)).count()
            };
            [count(0..20), count(20..40)]
        };
        assert_eq!(kept(40, 0), [20, 20]);
        // 20 stay, so 20 come: a quarter of them in the first half.
        assert_eq!(kept(23, 2), [15, 5]);
        assert_eq!(kept(13, 2), [10, 0], "three in four come, which are all of the second half");
        assert_eq!(kept(3, 2), [0, 0]);
    }

    #[test]
    fn each_unit_fits_beside_what_stays() {
        let mut random = fastrand::Rng::with_seed(5);
        for _ in 0..500 {
            let count = random.usize(1..15);
            let bytes: Vec<u64> = (0..count).map(|_| random.u64(1..9 * ALIGNMENT)).collect();
            let uses: Vec<u64> = (0..count).map(|_| random.u64(..3)).collect();
            let mut order: Vec<Group> = (0..count).collect();
            random.shuffle(&mut order);
            let unit = |first: usize| match random.usize(..count) {
                second if second != first => vec![first, second],
                _ => vec![first],
            };
            let units: Vec<Vec<Group>> = (0..count).map(unit).collect();
            let size = |group: &Group| aligned(bytes[*group]);
            let needed: u64 = units.iter().map(|unit| unit.iter().map(size).sum()).max().unwrap();
            let room = needed + random.u64(..20) * ALIGNMENT;
            let work: Vec<f64> = (0..count).map(|_| random.f64() * random.f64()).collect();
            let work = random.bool().then_some(&work[..]);
            let ahead = random.u64(..9) * ALIGNMENT;
            let (bytes, uses, order) = (&bytes[..], &uses[..], &order[..]);
            let coded: Vec<Option<u64>> = bytes
                .iter()
                .map(|bytes| random.bool().then(|| random.u64(1..=bytes + 600)))
                .collect();
            let coded = random.bool().then_some(&coded[..]);
            let input = PlanInput { bytes, coded, uses, order, units: &units, room, work, ahead };
            let over_work = work.map(|_| Kept::over_work(&input)).unwrap_or_default();
            for kept in [Kept::choose(&input)].into_iter().chain(over_work) {
                let coded = kept.coded.iter().map(|group| aligned(coded.unwrap()[*group].unwrap()));
                let decoded = kept.groups.iter().map(size);
                assert_eq!(kept.bytes, decoded.chain(coded).sum::<u64>());
                assert!(kept.coded.iter().all(|group| !kept.groups.contains(group)));
                for unit in &units {
                    let comes = unit.iter().filter(|group| !kept.groups.contains(group));
                    assert!(kept.bytes + comes.map(size).sum::<u64>() <= room);
                }
            }
        }
    }
}
