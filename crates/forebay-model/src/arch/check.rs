//! Checks of the numbers that files give.

use crate::ModelError;

/// Checks a size. The limit is far above any model, and keeps products of hostile values within `usize`.
pub(super) fn check_size(key: &str, value: usize) -> Result<(), ModelError> {
    check(key, value, value > 0 && value < 1 << 24, "it must be from 1 to 16 million")
}

pub(super) fn check<T: ToString>(
    key: &str,
    value: T,
    holds: bool,
    expected: &str,
) -> Result<(), ModelError> {
    if holds {
        return Ok(());
    }
    Err(ModelError::BadValue {
        key: key.into(),
        value: value.to_string(),
        expected: expected.into(),
    })
}
