//! Bytes a second, as measured.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Bytes and seconds of late.
#[derive(Default)]
pub struct Rate(Mutex<(f64, f64)>);

/// Bytes after which older ones count half.
const LATE_BYTES: f64 = (8_u64 << 30) as f64;

impl Rate {
    pub fn add(&self, bytes: u64, time: Duration) {
        let mut sums = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *sums = (sums.0 + bytes as f64, sums.1 + time.as_secs_f64());
        if sums.0 > LATE_BYTES {
            *sums = (sums.0 / 2.0, sums.1 / 2.0);
        }
    }

    pub fn bytes_per_second(&self) -> Option<f64> {
        let (bytes, seconds) = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (bytes > 0.0 && seconds > 0.0).then(|| bytes / seconds)
    }
}
