//! The threads of a stream that bring weights.

use std::sync::{MutexGuard, PoisonError};

use super::{GroupState, POINTS_MAX, Place, Shared, State, StreamError, leave, lock};
use crate::device::Device;
use crate::room::{Choice, Group};

impl<D: Device> Shared<D> {
    /// Brings what a caller waits for, then what callers will use next, until the stream is closed.
    pub(super) fn load_ahead(&self) {
        let mut state = lock(&self.state);
        while !state.closes && state.lost.is_none() {
            self.expect(&state);
            state = match self.next(&state) {
                Some((group, choice)) => self.load(state, group, choice),
                None if self.make_room(&mut state) => state,
                None => {
                    state.loaders_wait += 1;
                    let mut state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                    state.loaders_wait -= 1;
                    state
                }
            };
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
            if state.groups[group].is_absent() && !expected.contains(&group) {
                expected.push(group);
                if expected.len() == most {
                    break;
                }
            }
        }
        self.source.expect(&expected);
    }

    /// Returns the group that comes next, and the ranges in whose place. Groups that stay have their own.
    fn next(&self, state: &State<D>) -> Option<(Group, Option<Choice>)> {
        let is_wanted =
            |group: &Group| state.groups[*group].is_absent() && !state.failed.contains_key(group);
        let next_use = |group: Group| {
            let may_leave = self.may_leave(&state.groups[group]);
            let places = self.users[group].iter().filter_map(|unit| state.order.distance(*unit));
            may_leave.then(|| places.min().unwrap_or(usize::MAX))
        };
        let choose = |group: Group, later_than| {
            let bytes = self.groups[group].bytes;
            Some((group, Some(state.room.choose(bytes, later_than, next_use)?)))
        };
        if let Some(group) = state.demand.as_ref().and_then(|demand| demand.groups.front()) {
            return match state.fixed.contains_key(group) {
                true => Some((*group, None)),
                // What is in the way of a caller leaves, even if it is used soon.
                false => choose(*group, None),
            };
        }
        if state.pauses {
            return None;
        }
        let (distance, group) =
            state.order.upcoming().enumerate().find_map(|(distance, unit)| {
                let group = self.units[unit].iter().copied().find(is_wanted)?;
                Some((distance, group))
            })?;
        match state.fixed.contains_key(&group) {
            true => Some((group, None)),
            false => choose(group, Some(distance)),
        }
    }

    fn may_leave(&self, of: &GroupState<D::Point>) -> bool {
        of.in_use == 0 && of.ready().is_some()
    }

    /// Makes room for what a caller waits for, if there is none and no other caller will free any: what may leave is then between
    /// what is used. Fails what is asked for if there still is none. Returns true if something has changed.
    fn make_room(&self, state: &mut State<D>) -> bool {
        let State { demand: Some(demand), uses, groups, room, failed, fixed, .. } = state else {
            return false;
        };
        let Some(wanted) = demand.groups.front().copied() else { return false };
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
            let points = leave(its);
            room.free(group, points);
            if is_own {
                demand.groups.push_back(group);
            }
        }
        true
    }

    /// Queues a load, without the lock.
    fn load<'a>(
        &'a self,
        mut guard: MutexGuard<'a, State<D>>,
        group: Group,
        choice: Option<Choice>,
    ) -> MutexGuard<'a, State<D>> {
        let State { room, groups, demand, fixed, fixed_bytes, after, .. } = &mut *guard;
        let bytes = self.groups[group].bytes;
        if room.points_len() > POINTS_MAX {
            room.forget(|point| self.device.is_reached(point));
        }
        let (at, after) = match choice {
            None => {
                after.retain(|point| !self.device.is_reached(point));
                (fixed[&group], after.clone())
            }
            Some(choice) => {
                let leaves = |group: Group| leave(&mut groups[group]);
                let (at, after) = room.take(choice, group, bytes, leaves);
                (*fixed_bytes + at, after)
            }
        };
        groups[group].place = Place::Queuing;
        if let Some(demand) = demand {
            demand.groups.retain(|wanted| *wanted != group);
        }
        drop(guard);
        let taken = self.source.take(group);
        let loaded = taken.and_then(|weights| self.device.load(weights, at..at + bytes, &after));
        let mut state = lock(&self.state);
        match loaded {
            Ok(ready) => {
                state.groups[group].place = Place::There { at, ready, is_reached: false };
                state.statistics.loads += 1;
                state.statistics.loaded_bytes += bytes;
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
}
