//! Threads that copy weights to pinned memory: as many as the passes need, so that the others have the processor.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay_compute::Pool;
use forebay_store::copy_past_cache;

use crate::rate::Rate;

/// Bytes that one thread copies at a time. On 16 cores, 1 MiB at a time was copied at three quarters of this rate.
const THREAD_BYTES: usize = 256 << 10;
/// Time for which threads wait for the next piece before they sleep. With a millisecond, they took the cores from the thread that queues the work of
/// modules: on 16 cores, passes with few loads took 0.09 instead of 0.05 s.
const SPIN: Duration = Duration::from_micros(100);
/// Parts of a pass for which weights are brought: from the first one on, all threads copy, and below the second one only some. On a virtual machine with
/// 16 processors, 12 threads that copied all the time made the thread that queues the work of modules take 2.7 times as long, and 8 threads twice.
const ALL_FROM: f64 = 0.8;
const SOME_BELOW: f64 = 0.6;

pub struct Copiers {
    /// Most threads.
    most: usize,
    copy: fn(&mut [u8], &[u8]),
    pool: Mutex<Arc<Pool>>,
    rate: Rate,
}

fn pool_of(threads: usize) -> Arc<Pool> {
    let pool = Pool::new(threads);
    pool.set_spin(SPIN);
    Arc::new(pool)
}

/// Returns how many of so many threads copy from now on, if weights are brought for such a part of a pass.
fn threads_for(part: f64, now: usize, most: usize) -> usize {
    let some = (2 * most).div_ceil(3);
    match part {
        part if part >= ALL_FROM => most,
        part if part < SOME_BELOW => some,
        _ => now,
    }
}

impl Copiers {
    /// Begins with all threads. The bytes that they copy stay in the last cache of the processor if `stays_in_cache` holds.
    pub fn new(most: usize, stays_in_cache: bool) -> Copiers {
        let most = most.max(1);
        Copiers {
            most,
            copy: if stays_in_cache { <[u8]>::copy_from_slice } else { copy_past_cache },
            pool: Mutex::new(pool_of(most)),
            rate: Rate::default(),
        }
    }

    /// Returns the bytes that a second copies while there is something to copy.
    pub fn bytes_per_second(&self) -> Option<f64> {
        self.rate.bytes_per_second()
    }

    /// Copies bytes to places in `to`, in their order and without overlaps, with all threads. This one runs `first` before.
    pub fn copy<'a>(
        &self,
        parts: impl IntoIterator<Item = (usize, &'a [u8])>,
        to: &mut [u8],
        first: &mut dyn FnMut(),
    ) {
        let (mut rest, mut done, mut copied) = (to, 0, 0);
        let mut copies = Vec::new();
        for (at, bytes) in parts {
            let (_, own) = std::mem::take(&mut rest).split_at_mut(at - done);
            let (own, behind) = own.split_at_mut(bytes.len());
            (rest, done, copied) = (behind, at + bytes.len(), copied + bytes.len());
            copies.extend(own.chunks_mut(THREAD_BYTES).zip(bytes.chunks(THREAD_BYTES)));
        }
        let copies = Mutex::new(copies);
        let next = || copies.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut began = Instant::now();
        let mut first = || {
            // Another caller may have copied until now.
            began = Instant::now();
            first();
        };
        let pool = Arc::clone(&self.pool.lock().unwrap_or_else(PoisonError::into_inner));
        pool.run_after(&mut first, &|_| {
            while let Some((to, from)) = next() {
                (self.copy)(to, from);
            }
        });
        self.rate.add(copied as u64, began.elapsed());
    }

    /// Notes the part of a pass for which weights are brought.
    pub fn pace(&self, part: f64) {
        let mut pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        let (now, then) = (pool.threads(), threads_for(part, pool.threads(), self.most));
        if then != now {
            tracing::debug!("{then} threads copy weights, not {now}, for {part:.2} of a pass");
            *pool = pool_of(then);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_to_their_places() {
        let mut random = fastrand::Rng::with_seed(1);
        for stays_in_cache in [false, true] {
            let copiers = Copiers::new(3, stays_in_cache);
            let (mut expected, mut parts, mut at) = (vec![7; 4 << 20], Vec::new(), 5);
            for length in [0, 1, 63, THREAD_BYTES, THREAD_BYTES + 1, 3 * THREAD_BYTES - 7] {
                let bytes: Vec<u8> = (0..length).map(|_| random.u8(..)).collect();
                expected[at..at + length].copy_from_slice(&bytes);
                parts.push((at, bytes));
                at += length + random.usize(..100);
            }
            let (mut to, mut calls) = (vec![7; 4 << 20], 0);
            let parts = parts.iter().map(|(at, bytes)| (*at, &bytes[..]));
            copiers.copy(parts, &mut to, &mut || calls += 1);
            assert!(to == expected && calls == 1);
        }
    }

    #[test]
    fn fewer_threads_copy_when_passes_do_not_wait_for_them() {
        for (most, some) in [(1, 1), (2, 2), (3, 2), (12, 8), (24, 16)] {
            assert_eq!(threads_for(2.0, some, most), most);
            assert_eq!(threads_for(0.1, most, most), some);
            assert_eq!(threads_for(0.7, most, most), most);
            assert_eq!(threads_for(0.7, some, most), some);
        }
        let copiers = Copiers::new(6, true);
        let rate = |part| {
            copiers.pace(part);
            copiers.pool.lock().unwrap().threads()
        };
        assert_eq!([rate(0.7), rate(0.5), rate(0.7), rate(0.9)], [6, 4, 4, 6]);
    }
}
