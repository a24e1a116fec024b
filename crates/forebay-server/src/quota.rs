//! What callers hold of something that all share, and the bound of each.
//!
//! If there are several callers, each may hold as much as is left for others. A caller alone has half, the second one a quarter, and
//! there is always something left for the next one.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use axum::http::StatusCode;

use crate::caller::{Caller, Share};
use crate::error::ApiError;

/// Something of which all callers together may hold a certain amount.
pub struct Quota {
    /// What it is, for errors: a plural.
    what: &'static str,
    most: usize,
    has_several_callers: bool,
    held: Mutex<Amounts>,
}

#[derive(Default)]
struct Amounts {
    all: usize,
    by_caller: HashMap<Share, usize>,
}

/// A part of a quota. Dropping it gives the part back.
pub struct Held {
    quota: Arc<Quota>,
    share: Share,
    amount: usize,
}

impl Quota {
    pub fn new(what: &'static str, most: usize, has_several_callers: bool) -> Arc<Quota> {
        Arc::new(Quota { what, most, has_several_callers, held: Mutex::default() })
    }

    /// Takes nothing yet. [`Held::add`] takes more.
    pub fn nothing(self: &Arc<Quota>, caller: &Caller) -> Held {
        Held { quota: self.clone(), share: caller.share(), amount: 0 }
    }

    /// Takes one.
    ///
    /// # Errors
    /// Returns an error if the caller holds its part already.
    pub fn take_one(self: &Arc<Quota>, caller: &Caller) -> Result<Held, ApiError> {
        let mut held = self.nothing(caller);
        held.add(1)?;
        Ok(held)
    }
}

impl Held {
    /// Takes more.
    ///
    /// # Errors
    /// Returns an error if the caller would hold more than its part.
    pub fn add(&mut self, amount: usize) -> Result<(), ApiError> {
        let Quota { what, most, has_several_callers, held } = &*self.quota;
        let mut held = held.lock().unwrap_or_else(PoisonError::into_inner);
        let own = held.by_caller.get(&self.share).copied().unwrap_or(0);
        let left = most.saturating_sub(held.all);
        let why = if amount > left {
            format!("this server has room for {most} {what} at a time, and others take it")
        } else if *has_several_callers && own.saturating_add(amount) > left {
            format!("you have {own} {what} already, and the other {left} are left for others")
        } else {
            held.all += amount;
            *held.by_caller.entry(self.share).or_default() += amount;
            self.amount += amount;
            return Ok(());
        };
        let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, format!("{why}: try again later"));
        Err(ApiError { code: Some("too_many_requests"), ..error })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut held = self.quota.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.all -= self.amount;
        if let Some(own) = held.by_caller.get_mut(&self.share) {
            *own -= self.amount;
            if *own == 0 {
                held.by_caller.remove(&self.share);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(share: Share) -> Caller {
        Caller::new("", Vec::new(), share)
    }

    #[test]
    fn there_is_always_something_left_for_the_next_caller() {
        let quota = Quota::new("things", 100, true);
        let fill = |share: Share| -> Vec<Held> {
            std::iter::from_fn(|| quota.take_one(&caller(share)).ok()).collect()
        };
        let all: Vec<Vec<Held>> = (0..4).map(fill).collect();
        assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), [50, 25, 13, 6]);
        assert!(quota.take_one(&caller(0)).is_err() && quota.take_one(&caller(9)).is_ok());
        let mut large = quota.nothing(&caller(9));
        assert!(large.add(7).is_err() && large.add(3).is_ok() && large.add(1).is_err());
        drop((all, large));
        let held = quota.held.lock().unwrap();
        assert!(held.all == 0 && held.by_caller.is_empty());
    }

    #[test]
    fn a_caller_that_is_alone_has_everything() {
        let quota = Quota::new("things", 3, false);
        let all: Vec<Held> = (0..3).map(|_| quota.take_one(&caller(1)).unwrap()).collect();
        let error = quota.take_one(&caller(1)).err().unwrap();
        assert_eq!(error.status, StatusCode::TOO_MANY_REQUESTS);
        drop(all);
        assert!(quota.take_one(&caller(2)).is_ok());
    }
}
