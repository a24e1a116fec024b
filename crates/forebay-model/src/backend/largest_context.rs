//! The largest context for which there is room.

/// Returns the largest context below `context` for which `fits` returns true. `fits` must be monotonic: a context smaller
/// than one that fits also fits.
pub fn largest_context(context: usize, fits: impl Fn(usize) -> bool) -> Option<usize> {
    // `largest` is 0 or fits; `beyond` does not fit.
    let (mut largest, mut beyond) = (0, context);
    while beyond > largest + 1 {
        let middle = largest.midpoint(beyond);
        if fits(middle) {
            largest = middle;
        } else {
            beyond = middle;
        }
    }
    (largest > 0).then_some(largest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_context_is_found() {
        for context in [1, 2, 3, 100, 131_072] {
            for most in [0, 1, 2, 57, 99, 131_071].into_iter().filter(|most| *most < context) {
                let expected = (most > 0).then_some(most);
                assert_eq!(largest_context(context, |tried| tried <= most), expected, "{context}");
            }
        }
    }
}
