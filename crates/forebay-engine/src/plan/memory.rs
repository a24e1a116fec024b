//! Memory plans of sessions: the one place where both a session and a prediction get them.

use forebay_model::{Weights, largest_context};
use forebay_stream::{Budget, MemoryPlan, ModelBlocks, PolicyKind, StreamError};

use crate::EngineError;

/// The blocks that are in host memory where a GPU computes: experts, and nothing else.
pub(crate) fn experts(weights: &Weights) -> ModelBlocks {
    ModelBlocks { dense: Vec::new(), ..weights.blocks.clone() }
}

/// Host memory for `blocks`: all of a model's, or those that a GPU has no room for.
///
/// # Errors
/// A budget that is too small, with the smallest that works.
pub(crate) fn host(
    weights: &Weights,
    blocks: &ModelBlocks,
    ram_bytes: u64,
    policy: PolicyKind,
) -> Result<MemoryPlan, StreamError> {
    Budget::plan(blocks, Some(ram_bytes), weights.small_bytes, policy)
}

/// Whether keys and values of `context` positions have room in RAM beside what is reserved for weights; `bytes_of` is
/// what so many positions take. The system gives them memory when they are first written, and would end the
/// program then.
///
/// # Errors
/// [`EngineError::CacheDoesNotFit`], with the largest context that has.
pub(crate) fn check_cache(
    context: usize,
    weights_bytes: u64,
    free_bytes: u64,
    bytes_of: impl Fn(usize) -> u64,
) -> Result<(), EngineError> {
    let fits = |context| bytes_of(context) <= free_bytes.saturating_sub(weights_bytes);
    if fits(context) {
        return Ok(());
    }
    Err(EngineError::CacheDoesNotFit {
        context,
        cache_bytes: bytes_of(context),
        weights_bytes,
        free_bytes,
        largest_context: largest_context(context, fits),
    })
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
            let EngineError::CacheDoesNotFit { largest_context, .. } = error else {
                panic!("{error}")
            };
            assert_eq!(largest_context, expected, "{free_bytes}");
            let words = error.to_string();
            let advice = expected.map(|most| format!("a --ctx of at most {most}, "));
            assert!(words.contains(advice.as_deref().unwrap_or("give a smaller --ram")), "{words}");
        }
    }
}
