//! Memory plans of sessions. Both sessions and predictions get their plans from here.

use forebay_model::{Weights, largest_context};
use forebay_stream::{Budget, MemoryPlan, ModelBlocks, PolicyKind, StreamError};

use super::PlanError;
use crate::memory::DoesNotFit;

/// Returns the blocks that are in host memory when a GPU computes: the experts only.
pub(crate) fn experts(weights: &Weights) -> ModelBlocks {
    ModelBlocks { dense: Vec::new(), ..weights.blocks.clone() }
}

/// Plans host memory for `blocks`: all blocks of a model, or those that do not fit in VRAM.
///
/// # Errors
/// Returns an error if the budget is too small. The error names the smallest budget that works.
pub(crate) fn host(
    weights: &Weights,
    blocks: &ModelBlocks,
    ram_bytes: u64,
    policy: PolicyKind,
) -> Result<MemoryPlan, StreamError> {
    Budget::plan(blocks, Some(ram_bytes), weights.small_bytes, policy)
}

/// Checks that the keys and values of `context` positions fit in RAM beside the memory reserved for weights. `bytes_of`
/// returns the bytes for a number of positions.
///
/// The operating system provides the memory only when it is first written, and would kill the process at that time.
///
/// # Errors
/// Returns [`PlanError::CacheDoesNotFit`] if they do not fit. The error has the largest context that does.
pub(crate) fn check_cache(
    context: usize,
    weights_bytes: u64,
    free_bytes: u64,
    bytes_of: impl Fn(usize) -> u64,
) -> Result<(), PlanError> {
    let fits = |context| bytes_of(context) <= free_bytes.saturating_sub(weights_bytes);
    if fits(context) {
        return Ok(());
    }
    Err(PlanError::CacheDoesNotFit {
        context,
        cache_bytes: bytes_of(context),
        weights_bytes,
        free_bytes,
        largest_context: largest_context(context, fits),
    })
}

/// Returns an error if weights in RAM, and beside them `kv_bytes` of a GPU's keys and values for `context` positions, do
/// not fit there.
pub(crate) fn check_cache_on_gpu(
    context: usize,
    weights_bytes: u64,
    free_bytes: u64,
    kv_bytes: u64,
) -> Result<(), PlanError> {
    if kv_bytes == 0 {
        return match weights_bytes <= free_bytes {
            true => Ok(()),
            false => {
                Err(PlanError::DoesNotFit(DoesNotFit { needed_bytes: weights_bytes, free_bytes }))
            }
        };
    }
    let share = |other: usize| (kv_bytes as f64 * other as f64 / context as f64) as u64;
    check_cache(context, weights_bytes, free_bytes, share)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_that_does_not_fit_is_refused_with_one_that_does() {
        let bytes_of = |context: usize| 10 * context as u64 + 7;
        assert!(check_cache(100, 500, 1507, bytes_of).is_ok());
        for (free_bytes, expected) in [(1506, Some(99)), (520, Some(1)), (516, None), (3, None)] {
            let error = check_cache(100, 500, free_bytes, bytes_of).unwrap_err();
            let PlanError::CacheDoesNotFit { largest_context, .. } = error else {
                panic!("{error}")
            };
            assert_eq!(largest_context, expected, "{free_bytes}");
            let words = error.to_string();
            let advice = expected.map(|most| format!("a context of at most {most}, "));
            assert!(
                words.contains(advice.as_deref().unwrap_or("give a smaller budget of RAM")),
                "{words}"
            );
        }
    }
}
