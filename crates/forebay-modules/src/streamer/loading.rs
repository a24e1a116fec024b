//! The threads of a stream that bring weights.

use std::sync::{MutexGuard, PoisonError};

use super::{GroupState, Near, POINTS_MAX, Place, Shared, State, StreamError, TRUSTED, lock};
use crate::device::{Device, DeviceError, Loaded};
use crate::room::{Choice, Group};

impl<D: Device> Shared<D> {
    /// Brings what a caller waits for, then what callers will use next, until the stream is closed.
    pub(super) fn load_ahead(&self) {
        let mut state = lock(&self.state);
        while !state.closes && state.lost.is_none() {
            self.expect(&state);
            if let Some((group, choice)) = self.next(&state) {
                state = self.load(state, group, choice);
            } else if let Some(group) = self.next_to_stage(&mut state) {
                state = self.stage(state, group);
            } else if !self.make_room(&mut state) {
                state.loaders_wait += 1;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.loaders_wait -= 1;
            }
        }
        self.changed.notify_all();
    }

    /// Tells the source of weights which groups come next, as far as is known.
    fn expect(&self, state: &State<D>) {
        let most = self.source.expects_max();
        if most == 0 {
            return;
        }
        let demanded = state.demand.iter().flat_map(|demand| demand.groups.iter().copied());
        let units = state.order.upcoming();
        let upcoming = units.flat_map(|unit| self.units[unit].iter().copied());
        let mut expected: Vec<Group> = Vec::new();
        for group in demanded.chain(upcoming) {
            let comes = state.groups[group].is_absent() && !self.is_near(state, group);
            if comes && !expected.contains(&group) {
                expected.push(group);
                if expected.len() == most {
                    break;
                }
            }
        }
        self.source.expect(&expected);
    }

    /// Returns after how many other uses a group is used.
    fn distance(&self, state: &State<D>, group: Group) -> usize {
        let places = self.users[group].iter().filter_map(|unit| state.order.distance(*unit));
        places.min().unwrap_or(usize::MAX)
    }

    /// Returns the first expected group that is absent, has not failed, and for which `is` holds, and after how many other uses it is used.
    fn first_absent(&self, state: &State<D>, is: impl Fn(Group) -> bool) -> Option<(usize, Group)> {
        let is_wanted = |group: &Group| {
            state.groups[*group].is_absent() && !state.failed.contains_key(group) && is(*group)
        };
        state.order.upcoming().enumerate().find_map(|(distance, unit)| {
            let group = self.units[unit].iter().copied().find(is_wanted)?;
            Some((distance, group))
        })
    }

    /// Returns the group that gets a place next, and the ranges in whose place. Groups that stay have their own.
    pub(super) fn next(&self, state: &State<D>) -> Option<(Group, Option<Choice>)> {
        let next_use = |group: Group| {
            let may_leave = self.may_leave(&state.groups[group]);
            may_leave.then(|| self.distance(state, group))
        };
        let choose = |group: Group, later_than| {
            let bytes = self.groups[group].bytes;
            Some((group, Some(state.room.choose(bytes, later_than, next_use)?)))
        };
        // What is being staged gets its place when that has ended.
        let is_free = |group: &&Group| !state.groups[**group].is_coming_near();
        if let Some(demand) = state.demand.as_ref().filter(|demand| !demand.groups.is_empty()) {
            let group = demand.groups.iter().find(is_free)?;
            return match state.fixed.contains_key(group) {
                true => Some((*group, None)),
                // What is in the way of a caller leaves, even if it is used soon.
                false => choose(*group, None),
            };
        }
        if state.pauses {
            return None;
        }
        let (distance, group) = self.first_absent(state, |_| true)?;
        if state.groups[group].is_coming_near() {
            return None;
        }
        match state.fixed.contains_key(&group) {
            true => Some((group, None)),
            false => choose(group, Some(distance)),
        }
    }

    /// Returns the group whose weights are staged next, because it has no place yet.
    fn next_to_stage(&self, state: &mut State<D>) -> Option<Group> {
        let is_trusted = state.order.expected_in_a_row() >= TRUSTED;
        if state.pauses || !is_trusted || state.loaders_stage == self.staging_max {
            return None;
        }
        let is_missing =
            |group: Group| !state.groups[group].is_coming_near() && !self.is_near(state, group);
        let (distance, group) = self.first_absent(state, is_missing)?;
        if self.device.can_stage() {
            return Some(group);
        }
        // After a deviation, what was staged may be used later than this.
        let is_staged = |group: &Group| matches!(state.groups[*group].near, Near::Staged { .. });
        let staged = (0..state.groups.len()).filter(is_staged);
        let (last_distance, last) = staged.map(|of| (self.distance(state, of), of)).max()?;
        if last_distance <= distance {
            return None;
        }
        state.groups[last].near = Near::No;
        self.device.can_stage().then_some(group)
    }

    fn may_leave(&self, of: &GroupState<D>) -> bool {
        of.in_use == 0 && of.ready().is_some()
    }

    /// Makes room for what a caller waits for, if there is none and no other caller will free any: what may leave is then between
    /// what is used. Fails what is asked for if there still is none. Returns true if something has changed.
    fn make_room(&self, state: &mut State<D>) -> bool {
        let State { demand: Some(demand), uses, groups, room, failed, fixed, .. } = state else {
            return false;
        };
        let is_free = |group: &&Group| !groups[**group].is_coming_near();
        let Some(wanted) = demand.groups.iter().find(is_free).copied() else { return false };
        if uses.keys().any(|thread| *thread != demand.thread) {
            return false;
        }
        // What another loader brings is in the way until it is there.
        if groups.iter().any(|of| matches!(of.place, Place::Queuing)) {
            return false;
        }
        let is_last_try = std::mem::replace(&mut demand.is_last_try, true);
        if is_last_try {
            let needed = self.groups[wanted].bytes;
            demand.groups.clear();
            failed.insert(wanted, StreamError::InUse { needed });
            self.wake_callers(state);
            return true;
        }
        // Weights of the same module that are there already may be in the way, too. Nothing else uses them yet.
        let own = &self.units[demand.unit];
        for (group, its) in groups.iter_mut().enumerate() {
            let is_own = own.contains(&group) && its.in_use == 1;
            let stays = fixed.contains_key(&group);
            if stays || its.ready().is_none() || its.in_use > 0 && !is_own {
                continue;
            }
            let points = its.leave();
            room.free(group, points);
            if is_own {
                demand.groups.push_back(group);
            }
        }
        true
    }

    /// Returns the weights of a group, of which some may be staged.
    fn take(&self, group: Group, near: Near<D::Staged>) -> Result<D::Staged, DeviceError> {
        match near {
            Near::Staged { weights, .. } => Ok(weights),
            _ => self.source.take(group).map(D::Staged::from),
        }
    }

    /// Returns true if the load of a group is only work of the device.
    pub(super) fn is_near(&self, state: &State<D>, group: Group) -> bool {
        let is_whole = matches!(state.groups[group].near, Near::Staged { is_whole: true, .. });
        is_whole || state.coded.get(&group).is_some_and(|of| of.weights.is_some())
    }

    /// Queues a load, without the lock.
    pub(super) fn load<'a>(
        &'a self,
        mut guard: MutexGuard<'a, State<D>>,
        group: Group,
        choice: Option<Choice>,
    ) -> MutexGuard<'a, State<D>> {
        let State { room, groups, demand, fixed, fixed_bytes, after, coded, .. } = &mut *guard;
        let bytes = self.groups[group].bytes;
        if room.points_len() > POINTS_MAX {
            room.forget(|point| self.device.is_reached(point));
        }
        let mut keep = coded.get_mut(&group);
        let here = keep.as_mut().and_then(|keep| keep.weights.take());
        let keep = keep.map(|keep| keep.range.clone()).filter(|_| here.is_none());
        if choice.is_none() || keep.is_some() {
            after.retain(|point| !self.device.is_reached(point));
        }
        let (at, after) = match choice {
            None => (fixed[&group], after.clone()),
            Some(choice) => {
                let leaves = |group: Group| groups[group].leave();
                let (at, mut points) = room.take(choice, group, bytes, leaves);
                if keep.is_some() {
                    points.extend(after.iter().cloned());
                }
                (*fixed_bytes + at, points)
            }
        };
        groups[group].place = Place::Queuing;
        let near = std::mem::replace(&mut groups[group].near, Near::No);
        if let Some(demand) = demand {
            demand.groups.retain(|wanted| *wanted != group);
        }
        drop(guard);
        let to = at..at + bytes;
        let is_here = here.is_some();
        let loaded = match here {
            Some(coded) => {
                let decoded = self.device.decode(&coded, to, &after);
                decoded.map(|ready| Loaded { ready, coded: Some(coded) })
            }
            None => {
                let taken = self.take(group, near);
                taken.and_then(|weights| self.device.load(weights, to, keep, &after))
            }
        };
        let mut state = lock(&self.state);
        match loaded {
            Ok(Loaded { ready, coded }) => {
                state.groups[group].place = Place::There { at, ready, is_reached: false };
                if let Some(keep) = state.coded.get_mut(&group) {
                    keep.weights = coded;
                }
                if is_here {
                    state.statistics.decoded += 1;
                } else {
                    state.statistics.loads += 1;
                    state.statistics.loaded_bytes += bytes;
                }
            }
            Err(error) => {
                tracing::debug!("weights do not come: {error}");
                state.groups[group].place = Place::Absent;
                if !state.fixed.contains_key(&group) {
                    state.room.free(group, after);
                }
                state.failed.insert(group, error.into());
            }
        }
        self.wake_callers(&state);
        if state.demand.is_some() {
            self.wake_loader(&state);
        }
        state
    }

    /// Stages a group, without the lock.
    fn stage<'a>(
        &'a self,
        mut guard: MutexGuard<'a, State<D>>,
        group: Group,
    ) -> MutexGuard<'a, State<D>> {
        guard.loaders_stage += 1;
        let near = std::mem::replace(&mut guard.groups[group].near, Near::Coming);
        drop(guard);
        let staged = self.take(group, near).and_then(|mut weights| {
            let is_whole = self.device.stage(&mut weights)?;
            Ok(Near::Staged { weights, is_whole })
        });
        let mut state = lock(&self.state);
        state.loaders_stage -= 1;
        match staged {
            Ok(staged) => state.groups[group].near = staged,
            Err(error) => {
                tracing::debug!("weights do not come: {error}");
                state.groups[group].near = Near::No;
                state.failed.insert(group, error.into());
                self.wake_callers(&state);
            }
        }
        self.wake_loader(&state);
        state
    }
}
