//! Counters, per token and in total.

use forebay_store::IoStatistics;
use serde::Serialize;

use crate::cache::CacheCounters;
use crate::policy::PolicyKind;

/// Statistics of streaming since the start or the last reset.
#[derive(Clone, Debug, Serialize)]
pub struct StreamStatistics {
    pub policy: PolicyKind,
    /// Number of lookups: one for each distinct expert of a layer's batch.
    pub lookups: u64,
    /// Number of lookups that found their expert in memory.
    pub hits: u64,
    pub misses: u64,
    /// Hits per lookup; 0 before the first lookup.
    pub hit_rate: f64,
    /// Number of experts that were evicted, or read and not kept.
    pub evictions: u64,
    /// Blocks read from disk.
    pub experts_read: u64,
    pub dense_blocks_read: u64,
    /// Bytes of completed reads, including the padding read before and after each range.
    pub bytes_read: u64,
    /// Time that the computation waited for blocks.
    pub wait_seconds: f64,
    /// Number of prompt tokens, and of generated tokens.
    pub prompt_tokens: u64,
    pub generated_tokens: u64,
    pub faulted_experts_per_token: FaultedExperts,
    /// Largest number of experts that any layer kept after one of its batches, since the start.
    pub max_resident_per_layer: u32,
    pub peak_bytes: PeakBytes,
    pub prefetch: PrefetchCounters,
    pub io: IoCounters,
}

/// Misses per generated token; `None` before the first token.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct FaultedExperts {
    /// Average over all generated tokens.
    pub all: Option<f64>,
    /// Average without warm-up, which is the first quarter of the generated tokens and at least one.
    pub steady: Option<f64>,
}

/// Peak memory in use, by tier, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct PeakBytes {
    /// Bytes reserved in RAM for slots.
    pub host_reserved: u64,
    /// Largest part of them in slots that held a block or were being read into.
    pub host_occupied: u64,
}

/// Counters of expert prefetching.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct PrefetchCounters {
    pub issued: u64,
    /// Prefetches whose expert was then looked up.
    pub used: u64,
    /// Prefetches that failed or were dropped without use.
    pub wasted: u64,
}

impl PrefetchCounters {
    pub(crate) fn since(&self, from: &PrefetchCounters) -> PrefetchCounters {
        PrefetchCounters {
            issued: self.issued - from.issued,
            used: self.used - from.used,
            wasted: self.wasted - from.wasted,
        }
    }
}

/// Counters of the read engine.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct IoCounters {
    pub bytes_requested: u64,
    pub bytes_read: u64,
    pub requests: u64,
    pub retries: u64,
    /// Bytes verified against their checksums, and the time that took.
    pub bytes_checked: u64,
    pub check_seconds: f64,
    /// Part of `wait_seconds` in which no request was at the disk and checksums were being verified.
    pub check_wait_seconds: f64,
    pub checksum_mismatches: u64,
    /// Bytes converted by relayout, and the summed time of all threads that did it.
    pub bytes_relaid_out: u64,
    pub relayout_seconds: f64,
    /// Time with at least one request at the disk.
    pub busy_seconds: f64,
    /// Wall time of the same period.
    pub elapsed_seconds: f64,
    /// Busy time divided by elapsed time.
    pub busy_fraction: f64,
}

impl IoCounters {
    pub(crate) fn between(
        from: &IoStatistics,
        to: &IoStatistics,
        elapsed_seconds: f64,
    ) -> IoCounters {
        let busy_seconds = (to.busy_seconds - from.busy_seconds).max(0.0);
        let busy_fraction =
            if elapsed_seconds > 0.0 { busy_seconds / elapsed_seconds } else { 0.0 };
        IoCounters {
            bytes_requested: to.bytes_requested - from.bytes_requested,
            bytes_read: to.bytes_read - from.bytes_read,
            requests: to.requests - from.requests,
            retries: to.retries - from.retries,
            bytes_checked: to.bytes_checked - from.bytes_checked,
            check_seconds: (to.check_seconds - from.check_seconds).max(0.0),
            check_wait_seconds: (to.check_wait_seconds - from.check_wait_seconds).max(0.0),
            checksum_mismatches: to.checksum_mismatches - from.checksum_mismatches,
            bytes_relaid_out: to.bytes_relaid_out - from.bytes_relaid_out,
            relayout_seconds: (to.relayout_seconds - from.relayout_seconds).max(0.0),
            busy_seconds,
            elapsed_seconds,
            busy_fraction: busy_fraction.min(1.0),
        }
    }
}

/// One generated token, or several successive ones in long runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct TokenRecord {
    /// Number of tokens that the record sums up.
    pub tokens: u64,
    pub hits: u64,
    pub misses: u64,
    pub bytes_read: u64,
    pub wait_nanoseconds: u64,
}

impl TokenRecord {
    fn add(&mut self, other: &TokenRecord) {
        self.tokens += other.tokens;
        self.hits += other.hits;
        self.misses += other.misses;
        self.bytes_read += other.bytes_read;
        self.wait_nanoseconds += other.wait_nanoseconds;
    }
}

/// Totals that are sampled at the end of every token.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    pub cache: CacheCounters,
    pub experts_read: u64,
    pub dense_blocks_read: u64,
    pub bytes_read: u64,
    pub wait_nanoseconds: u64,
    pub prefetch: PrefetchCounters,
}

/// Records of generated tokens, bounded in number. When the log is full, neighbouring records are merged.
#[derive(Clone, Debug)]
pub(crate) struct TokenLog {
    records: Vec<TokenRecord>,
    /// Number of tokens that a new record sums up.
    tokens_per_record: u64,
    sampled: Totals,
    pub prompt_tokens: u64,
}

const RECORDS_MAX: usize = 4096;

impl TokenLog {
    pub fn new() -> TokenLog {
        TokenLog {
            records: Vec::with_capacity(RECORDS_MAX),
            tokens_per_record: 1,
            sampled: Totals::default(),
            prompt_tokens: 0,
        }
    }

    /// Forgets everything before `now`.
    pub fn reset(&mut self, now: &Totals) {
        self.records.clear();
        self.tokens_per_record = 1;
        self.sampled = *now;
        self.prompt_tokens = 0;
    }

    /// Attributes the counts since the last sample to a prompt.
    pub fn end_prompt(&mut self, tokens: u64, now: &Totals) {
        self.prompt_tokens += tokens;
        self.sampled = *now;
    }

    /// Attributes the counts since the last sample to a generated token.
    pub fn end_token(&mut self, now: &Totals) {
        let before = std::mem::replace(&mut self.sampled, *now);
        let record = TokenRecord {
            tokens: 1,
            hits: now.cache.hits - before.cache.hits,
            misses: now.cache.misses() - before.cache.misses(),
            bytes_read: now.bytes_read - before.bytes_read,
            wait_nanoseconds: now.wait_nanoseconds - before.wait_nanoseconds,
        };
        match self.records.last_mut() {
            Some(last) if last.tokens < self.tokens_per_record => last.add(&record),
            _ => {
                if self.records.len() == RECORDS_MAX {
                    self.halve();
                }
                self.records.push(record);
            }
        }
    }

    pub fn records(&self) -> &[TokenRecord] {
        &self.records
    }

    pub fn generated_tokens(&self) -> u64 {
        self.records.iter().map(|record| record.tokens).sum()
    }

    pub fn faulted_experts(&self) -> FaultedExperts {
        let warm_up = self.generated_tokens().div_ceil(4);
        let mut passed = 0;
        let steady = self.records.iter().position(|record| {
            let is_warm = passed >= warm_up;
            passed += record.tokens;
            is_warm
        });
        FaultedExperts {
            all: misses_per_token(&self.records),
            steady: steady.and_then(|first| misses_per_token(&self.records[first..])),
        }
    }

    fn halve(&mut self) {
        for index in 0..RECORDS_MAX / 2 {
            let mut sum = self.records[2 * index];
            sum.add(&self.records[2 * index + 1]);
            self.records[index] = sum;
        }
        self.records.truncate(RECORDS_MAX / 2);
        self.tokens_per_record *= 2;
    }
}

fn misses_per_token(records: &[TokenRecord]) -> Option<f64> {
    let misses: u64 = records.iter().map(|record| record.misses).sum();
    let tokens: u64 = records.iter().map(|record| record.tokens).sum();
    (tokens > 0).then(|| misses as f64 / tokens as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_stays_bounded_and_exact_in_sum() {
        let mut log = TokenLog::new();
        let mut totals = Totals::default();
        let tokens = 3 * RECORDS_MAX as u64 + 5;
        for token in 0..tokens {
            totals.cache.lookups += 10;
            // The first quarter misses everything, then half.
            totals.cache.hits += if token < tokens / 4 { 0 } else { 5 };
            log.end_token(&totals);
        }
        assert!(log.records().len() <= RECORDS_MAX);
        assert_eq!(log.generated_tokens(), tokens);
        let misses: u64 = log.records().iter().map(|record| record.misses).sum();
        assert_eq!(misses, totals.cache.misses());
        assert_eq!(log.faulted_experts().steady, Some(5.0));
    }

    #[test]
    fn prompts_do_not_count_as_generated() {
        let mut log = TokenLog::new();
        let mut totals = Totals::default();
        assert_eq!(log.faulted_experts(), FaultedExperts::default());
        totals.cache.lookups = 100;
        log.end_prompt(7, &totals);
        totals.cache.lookups += 4;
        log.end_token(&totals);
        assert_eq!(log.faulted_experts(), FaultedExperts { all: Some(4.0), steady: None });
        assert_eq!((log.prompt_tokens, log.generated_tokens()), (7, 1));
    }
}
