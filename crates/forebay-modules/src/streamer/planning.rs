//! Which groups of a stream stay in the device, and how long its passes take.

use std::collections::HashMap;

use super::{BETTER, CodedPlace, GroupState, Measured, Place, Shared, State, StreamError, lock};
use crate::device::{Device, DeviceError};
use crate::order::{Root, Unit};
use crate::plan::{Kept, PlanInput};
use crate::prediction::{Load, PassInput, PassPrediction, predict};
use crate::room::{ALIGNMENT, Group, Room, aligned};
use crate::source::Outside;
use crate::timing::TimedUses;

/// How much longer passes must take than with another plan, because all weights come again then.
const FASTER: f64 = 1.03;

impl<D: Device> Shared<D> {
    /// Chooses the groups that stay, if others than now would save clearly more loads and no module is in use. Returns false if it must wait
    /// for loads to end.
    pub(super) fn plan(&self, state: &mut State<D>) -> bool {
        let always = (0..self.groups.len()).filter(|group| self.groups[*group].stays);
        let (uses, order) = self.used(state);
        let input = self.plan_input(&uses, &order, 0);
        let mut kept = Kept::choose(&input);
        let is_first = state.fixed_bytes == 0 && state.room.bytes() == 0;
        let tell = |kept: &Kept| {
            let stays = |group: &Group| kept.groups.contains(group) || kept.coded.contains(group);
            let comes: Vec<Group> = order.iter().copied().filter(|group| !stays(group)).collect();
            self.source.plan(&comes);
        };
        let value = |kept: &Kept| kept.value(&self.sizes, &uses) as f64;
        let mut saves = value(&kept) > BETTER * value(&state.kept);
        let costs = (saves || state.has_new_times).then(|| self.costs(0, 0));
        if let Some(costs) = &costs {
            let now = self.predict_all(state, &state.kept, costs);
            let (then, fastest) = self.fastest(state, vec![kept], &input, costs);
            saves |= now.zip(then).is_some_and(|(now, then)| now > FASTER * then);
            kept = fastest;
        }
        let in_use = state.groups.iter().any(|of| of.in_use > 0);
        if !is_first && (!saves || in_use) {
            state.has_new_times &= saves;
            tell(&state.kept);
            self.pace(state, costs.as_ref());
            return true;
        }
        if state.groups.iter().any(|of| matches!(of.place, Place::Queuing)) {
            return false;
        }
        state.has_new_times = false;
        tell(&kept);
        // The places of all others change, so everything comes again.
        let mut after = state.room.points();
        after.append(&mut state.after);
        let there = state.groups.iter_mut().filter(|of| of.ready().is_some());
        after.extend(there.flat_map(GroupState::leave));
        for queue in std::mem::take(&mut state.queues) {
            match self.device.mark(queue) {
                Ok(point) => after.push(point),
                Err(error) => drop(state.lost.get_or_insert(error)),
            }
        }
        after.retain(|point| !self.device.is_reached(point));
        (state.fixed, state.coded) = (HashMap::new(), HashMap::new());
        let mut at = 0;
        for group in always.chain(kept.groups.iter().copied()) {
            state.fixed.insert(group, at);
            at += self.aligned[group];
        }
        for group in &kept.coded {
            let bytes = self.source.coded_bytes(*group).map_or(0, aligned);
            state.coded.insert(*group, CodedPlace { range: at..at + bytes, weights: None });
            at += bytes;
        }
        let stays = |unit: &Vec<Group>| unit.iter().all(|group| state.fixed.contains_key(group));
        state.is_fixed = self.units.iter().map(stays).collect();
        (state.fixed_bytes, state.kept) = (at, kept);
        state.room = Room::new(self.bytes - at, after.clone());
        state.after = after;
        state.failed.clear();
        self.pace(state, costs.as_ref());
        true
    }

    /// Tells the device for which part of the work of passes weights are brought, if times are known.
    fn pace(&self, state: &State<D>, costs: Option<&Costs>) {
        let Some(costs) = costs else { return };
        let (mut compute, mut load) = (0.0, 0.0);
        for root in 0..state.measured.len() {
            if let Some(pass) = self.predict_pass(state, root, &state.kept, costs) {
                compute += pass.compute_seconds;
                load += pass.load_seconds;
            }
        }
        if compute > 0.0 {
            self.device.pace(load / compute);
        }
    }

    /// Returns how often each group is used, and the groups in the order of their first use.
    fn used(&self, state: &State<D>) -> (Vec<u64>, Vec<Group>) {
        let (mut uses, mut order) = (vec![0; self.groups.len()], Vec::new());
        for (unit, count) in state.order.uses() {
            for group in &self.coming[unit] {
                if uses[*group] == 0 {
                    order.push(*group);
                }
                uses[*group] += count;
            }
        }
        (uses, order)
    }

    /// Returns what groups are chosen from that stay beside those which always do, if the memory has so many more bytes.
    fn plan_input<'a>(&'a self, uses: &'a [u64], order: &'a [Group], more: u64) -> PlanInput<'a> {
        let room = (self.bytes + more) / ALIGNMENT * ALIGNMENT - self.always_bytes;
        let (bytes, units, ahead) = (&self.sizes[..], &self.coming[..], self.stage_bytes());
        PlanInput { bytes, coded: None, uses, order, units, room, work: None, ahead }
    }

    /// Returns the choice with the fastest passes, and their seconds: the first one of these, another one, or one that is made from the times of
    /// passes, if they are known.
    fn fastest(
        &self,
        state: &State<D>,
        mut choices: Vec<Kept>,
        input: &PlanInput<'_>,
        costs: &Costs,
    ) -> (Option<f64>, Kept) {
        let Some(work) = self.work(state) else { return (None, choices.swap_remove(0)) };
        let input = PlanInput { work: Some(&work), ..*input };
        let groups = 0..self.groups.len();
        let coded: Option<Vec<_>> = self
            .device
            .can_keep_coded()
            .then(|| groups.map(|group| self.source.coded_bytes(group)).collect());
        let coded = coded.as_ref().map(|coded| PlanInput { coded: Some(coded), ..input });
        let inputs = [Some(input), coded].into_iter().flatten();
        choices.extend(inputs.flat_map(|input| Kept::over_work(&input)));
        let seconds = |kept: &Kept| self.predict_all(state, kept, costs).unwrap_or(f64::INFINITY);
        let predicted = choices.into_iter().map(|kept| (seconds(&kept), kept));
        let (seconds, kept) =
            predicted.min_by(|(one, _), (other, _)| one.total_cmp(other)).expect("one is chosen");
        (Some(seconds), kept)
    }

    pub(super) fn predict(
        &self,
        root: Root,
        more: u64,
        more_ram: u64,
    ) -> Result<Option<PassPrediction>, StreamError> {
        let mut state = lock(&self.state);
        self.resolve_times(&mut state)?;
        let costs = self.costs(more, more_ram);
        let kept = match more {
            0 => state.kept.clone(),
            more => {
                let (uses, order) = self.used(&state);
                let input = self.plan_input(&uses, &order, more);
                let choices = vec![Kept::choose(&input), state.kept.clone()];
                self.fastest(&state, choices, &input, &costs).1
            }
        };
        Ok(self.predict_pass(&state, root, &kept, &costs))
    }

    /// Reads the times of passes that were measured. This waits for the device if it is more than a pass behind.
    pub(super) fn resolve_times(&self, state: &mut State<D>) -> Result<(), DeviceError> {
        for measured in &mut state.measured {
            if let Measured::Timing(timing, stayed) = measured {
                let times = timing.resolve(&*self.device)?;
                *measured = Measured::Times(times, std::mem::take(stayed));
                state.has_new_times = true;
            }
        }
        Ok(())
    }

    /// Returns the times of the uses of a pass that is like the last one, if such a pass was measured, and which groups stayed decoded then.
    fn times<'a>(&self, state: &'a State<D>, root: Root) -> Option<(&'a TimedUses, &'a [bool])> {
        let Measured::Times(times, stayed) = &state.measured[root] else { return None };
        let expected = state.order.expected(root).iter().copied();
        times.iter().map(|(unit, _)| *unit).eq(expected).then_some((times, stayed))
    }

    /// Returns the seconds for which a pass uses each group, if they are known for all roots. A module's time is divided by the bytes of its groups.
    fn work(&self, state: &State<D>) -> Option<Vec<f64>> {
        let (mut work, mut last) = (vec![0.0; self.groups.len()], None);
        for root in 0..state.measured.len() {
            if state.order.expected(root).is_empty() {
                continue;
            }
            for (unit, seconds) in self.times(state, root)?.0 {
                let groups = &self.coming[*unit];
                let bytes: u64 = groups.iter().map(|group| self.sizes[*group]).sum();
                for group in groups {
                    work[*group] += seconds * self.sizes[*group] as f64 / bytes.max(1) as f64;
                }
                last = groups.last().copied().or(last);
                if let (true, Some(last)) = (groups.is_empty(), last) {
                    work[last] += seconds;
                }
            }
        }
        Some(work)
    }

    /// Returns what passes are predicted from beside their work, if there are so many more bytes of memory in the device and of RAM.
    fn costs(&self, more: u64, more_ram: u64) -> Costs {
        let groups: Vec<Group> = (0..self.groups.len()).collect();
        let rate = self.device.bytes_per_second();
        let read_rate = self.source.read_bytes_per_second();
        let decode_rate = self.device.decoded_bytes_per_second();
        let seconds = |bytes: u64, rate: Option<f64>| rate.map_or(0.0, |rate| bytes as f64 / rate);
        let load = |of: &Outside| Load {
            seconds: seconds(of.bytes, rate),
            bytes: of.bytes,
            read_seconds: seconds(of.read_bytes, read_rate),
            read_bytes: of.read_bytes,
        };
        let outside = self.source.outside(&groups, more_ram);
        Costs {
            loads: outside.iter().map(load).collect(),
            decode_seconds: outside.iter().map(|of| seconds(of.bytes, decode_rate)).collect(),
            room: self.bytes + more,
        }
    }

    /// Predicts a pass of a root while these groups stay, if its times are known.
    fn predict_pass(
        &self,
        state: &State<D>,
        root: Root,
        kept: &Kept,
        costs: &Costs,
    ) -> Option<PassPrediction> {
        let (times, stayed) = self.times(state, root)?;
        let mut is_kept: Vec<bool> = self.groups.iter().map(|of| of.stays).collect();
        kept.groups.iter().for_each(|group| is_kept[*group] = true);
        let mut loads = costs.loads.clone();
        kept.coded.iter().for_each(|group| loads[*group] = Load::default());
        // The device decodes beside the work of the modules, which takes longer by as much.
        let of_use = |(unit, measured): &(Unit, f64)| {
            let groups = &self.units[*unit][..];
            let sum = |stays: &[bool]| -> f64 {
                let decoded = groups.iter().filter(|group| !stays[**group]);
                decoded.map(|group| costs.decode_seconds[*group]).sum()
            };
            (groups, (measured - sum(stayed)).max(0.0) + sum(&is_kept))
        };
        let uses: Vec<(&[Group], f64)> = times.iter().map(of_use).collect();
        Some(predict(&PassInput {
            uses: &uses,
            bytes: &self.aligned,
            kept: &is_kept,
            room: costs.room.saturating_sub(self.always_bytes + kept.bytes),
            loads: &loads,
            stage_bytes: self.stage_bytes(),
            buffer_bytes: self.source.buffer_bytes(),
        }))
    }

    /// Returns the bytes of weights that may be staged.
    fn stage_bytes(&self) -> u64 {
        if self.staging_max > 0 { self.device.stage_bytes() } else { 0 }
    }

    /// Predicts the seconds of all passes of late while these groups stay, if all times are known.
    fn predict_all(&self, state: &State<D>, kept: &Kept, costs: &Costs) -> Option<f64> {
        let roots = 0..state.measured.len();
        let mut used = roots.filter(|root| !state.order.expected(*root).is_empty());
        used.try_fold(0.0, |sum, root| {
            let passes = state.order.passes(root) as f64;
            Some(sum + passes * self.predict_pass(state, root, kept, costs)?.seconds)
        })
    }
}

/// What passes are predicted from beside their work.
struct Costs {
    /// Cost of bringing each group, and seconds for which the device decodes it.
    loads: Vec<Load>,
    decode_seconds: Vec<f64>,
    /// Bytes of device memory.
    room: u64,
}
