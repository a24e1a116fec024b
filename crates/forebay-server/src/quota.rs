//! What callers hold of something that all share, and the bound of each.
//!
//! If there are several callers, each may hold as much as is left for others. A caller alone has half, the second one a quarter, and
//! there is always something left for the next one.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use axum::http::StatusCode;
use forebay_format::at_most;

use crate::caller::{Caller, Share};
use crate::error::ApiError;

/// Something of which all callers together may hold a certain amount.
pub struct Quota {
    /// What it is, for errors: a plural.
    what: &'static str,
    /// True if amounts are bytes of it.
    is_in_bytes: bool,
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
        Quota::create(what, false, most, has_several_callers)
    }

    /// Creates a quota whose amounts are bytes.
    pub fn of_bytes(what: &'static str, most: usize, has_several_callers: bool) -> Arc<Quota> {
        Quota::create(what, true, most, has_several_callers)
    }

    fn create(
        what: &'static str,
        is_in_bytes: bool,
        most: usize,
        has_several_callers: bool,
    ) -> Arc<Quota> {
        let held = Mutex::default();
        Arc::new(Quota { what, is_in_bytes, most, has_several_callers, held })
    }

    /// Returns an amount in words.
    fn words(&self, amount: usize) -> String {
        match self.is_in_bytes {
            true => format!("{} of {}", at_most(amount as u64), self.what),
            false => format!("{amount} {}", self.what),
        }
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
        let quota = &*self.quota;
        let mut held = quota.held.lock().unwrap_or_else(PoisonError::into_inner);
        let own = held.by_caller.get(&self.share).copied().unwrap_or(0);
        let left = quota.most.saturating_sub(held.all);
        let why = if amount > left {
            let most = quota.words(quota.most);
            format!("this server has room for {most} at a time, and others take it")
        } else if quota.has_several_callers && own.saturating_add(amount) > left {
            let (own, left) = (quota.words(own), quota.words(left));
            format!("you have {own} already, and {left} are left for others")
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
        assert!(error.message.starts_with("this server has room for 3 things at"), "{error}");
        drop(all);
        assert!(quota.take_one(&caller(2)).is_ok());
    }

    #[test]
    fn bytes_are_written_for_people() {
        let quota = Quota::of_bytes("requests", 512 << 20, true);
        let (mut first, mut second) = (quota.nothing(&caller(1)), quota.nothing(&caller(2)));
        assert!(first.add(256 << 20).is_ok());
        let said = |error: Option<ApiError>| error.unwrap().message;
        let all = "this server has room for 512.00 MiB of requests at a time, and others take it";
        assert!(said(second.add(257 << 20).err()).starts_with(all));
        let own = "you have 256.00 MiB of requests already, and 256.00 MiB of requests are left";
        assert!(said(first.add(1).err()).starts_with(own));
    }
}
