//! Names of devices.

use std::fmt;
use std::sync::{Mutex, PoisonError};

/// A device of this process, such as `cuda:0`. Devices are equal if their names are.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceId(u32);

/// The names of all devices so far. There are few.
static NAMES: Mutex<Vec<(&'static str, usize)>> = Mutex::new(Vec::new());

impl DeviceId {
    /// Names device number `ordinal` of a kind, counted from 0.
    ///
    /// # Panics
    /// Panics if there are four billion names.
    pub fn new(kind: &'static str, ordinal: usize) -> DeviceId {
        let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
        let at = names.iter().position(|name| *name == (kind, ordinal)).unwrap_or_else(|| {
            names.push((kind, ordinal));
            names.len() - 1
        });
        DeviceId(u32::try_from(at).expect("devices are few"))
    }

    /// Returns a number for the device, below `u32::MAX`.
    pub(crate) fn number(self) -> u32 {
        self.0
    }

    /// Returns the device with this number; `None` for `u32::MAX`.
    pub(crate) fn numbered(number: u32) -> Option<DeviceId> {
        (number != u32::MAX).then_some(DeviceId(number))
    }

    /// Returns the kind of the device, such as `cuda`, and its number.
    pub fn name(self) -> (&'static str, usize) {
        NAMES.lock().unwrap_or_else(PoisonError::into_inner)[self.0 as usize]
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, ordinal) = self.name();
        f.pad(&format!("{kind}:{ordinal}"))
    }
}

impl fmt::Debug for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_names() {
        let (one, other) = (DeviceId::new("some", 0), DeviceId::new("some", 1));
        assert_eq!([one.to_string(), other.to_string()], ["some:0", "some:1"]);
        assert!(one == DeviceId::new("some", 0) && one != other && one != DeviceId::new("any", 0));
        assert_eq!(other.name(), ("some", 1));
    }
}
