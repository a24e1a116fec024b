//! Which groups of a stream stay in the device, and how long its passes take.

use super::{BETTER, Place, Shared, State, StreamError, leave, lock};
use crate::device::Device;
use crate::order::Root;
use crate::plan::{Kept, PlanInput};
use crate::prediction::{Load, PassInput, PassPrediction, predict};
use crate::room::{ALIGNMENT, Group, Room};
use crate::source::Outside;

impl<D: Device> Shared<D> {
    /// Chooses the groups that stay, if others than now would save clearly more loads and no module is in use. Returns false if it must wait
    /// for loads to end.
    pub(super) fn plan(&self, state: &mut State<D>) -> bool {
        let always = (0..self.groups.len()).filter(|group| self.groups[*group].stays);
        let (kept, uses, order) = self.choose(state, 0);
        let is_first = state.fixed_bytes == 0 && state.room.bytes() == 0;
        let tell = |kept: &Kept| {
            let comes: Vec<Group> =
                order.iter().copied().filter(|group| !kept.groups.contains(group)).collect();
            self.source.plan(&comes);
        };
        let value = |kept: &Kept| kept.value(&self.sizes, &uses) as f64;
        let saves = value(&kept) > BETTER * value(&state.kept);
        let in_use = state.groups.iter().any(|of| of.in_use > 0);
        if !is_first && (!saves || in_use) {
            tell(&state.kept);
            return true;
        }
        if state.groups.iter().any(|of| matches!(of.place, Place::Queuing)) {
            return false;
        }
        tell(&kept);
        // The places of all others change, so everything comes again.
        let mut after = state.room.points();
        after.append(&mut state.after);
        let there = state.groups.iter_mut().filter(|of| of.ready().is_some());
        after.extend(there.flat_map(leave));
        for queue in std::mem::take(&mut state.queues) {
            match self.device.mark(queue) {
                Ok(point) => after.push(point),
                Err(error) => drop(state.lost.get_or_insert(error)),
            }
        }
        after.retain(|point| !self.device.is_reached(point));
        state.fixed.clear();
        let mut at = 0;
        for group in always.chain(kept.groups.iter().copied()) {
            state.fixed.insert(group, at);
            at += self.aligned[group];
        }
        let stays = |unit: &Vec<Group>| unit.iter().all(|group| state.fixed.contains_key(group));
        state.is_fixed = self.units.iter().map(stays).collect();
        (state.fixed_bytes, state.kept) = (at, kept);
        state.room = Room::new(self.bytes - at, after.clone());
        state.after = after;
        state.failed.clear();
        true
    }

    /// Chooses the groups that stay beside those that always do, if the memory has so many more bytes. Returns how often each group is used,
    /// and the groups in the order of their first use, too.
    fn choose(&self, state: &State<D>, more: u64) -> (Kept, Vec<u64>, Vec<Group>) {
        let (mut uses, mut order) = (vec![0; self.groups.len()], Vec::new());
        for (unit, count) in state.order.uses() {
            for group in &self.coming[unit] {
                if uses[*group] == 0 {
                    order.push(*group);
                }
                uses[*group] += count;
            }
        }
        let room = (self.bytes + more) / ALIGNMENT * ALIGNMENT - self.always_bytes;
        let (bytes, units) = (&self.sizes[..], &self.coming[..]);
        let input = PlanInput { bytes, uses: &uses, order: &order, units, room };
        (Kept::choose(&input), uses, order)
    }

    pub(super) fn predict(
        &self,
        root: Root,
        more: u64,
        more_ram: u64,
    ) -> Result<Option<PassPrediction>, StreamError> {
        let state = lock(&self.state);
        let Some(timing) = &state.measured[root] else { return Ok(None) };
        let timed = timing.resolve(&*self.device)?;
        let expected = state.order.expected(root).iter().copied();
        if !timed.iter().map(|(unit, _)| *unit).eq(expected) {
            return Ok(None);
        }
        let kept = match more {
            0 => state.kept.clone(),
            more => self.choose(&state, more).0,
        };
        let mut is_kept: Vec<bool> = self.groups.iter().map(|of| of.stays).collect();
        kept.groups.iter().for_each(|group| is_kept[*group] = true);
        let groups: Vec<Group> = (0..self.groups.len()).collect();
        let rate = self.device.bytes_per_second();
        let read_rate = self.source.read_bytes_per_second();
        let seconds = |bytes: u64, rate: Option<f64>| rate.map_or(0.0, |rate| bytes as f64 / rate);
        let load = |of: Outside| Load {
            seconds: seconds(of.bytes, rate),
            read_seconds: seconds(of.read_bytes, read_rate),
            read_bytes: of.read_bytes,
        };
        let outside = self.source.outside(&groups, more_ram);
        let loads: Vec<Load> = outside.into_iter().map(load).collect();
        let uses: Vec<(&[Group], f64)> =
            timed.iter().map(|(unit, seconds)| (&self.units[*unit][..], *seconds)).collect();
        Ok(Some(predict(&PassInput {
            uses: &uses,
            bytes: &self.aligned,
            kept: &is_kept,
            room: (self.bytes + more).saturating_sub(self.always_bytes + kept.bytes),
            loads: &loads,
            buffer_bytes: self.source.buffer_bytes(),
        })))
    }
}
