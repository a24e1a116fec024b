//! Experts of all layers in one list.

/// First entry of every layer, and the number of entries: layers one after the other.
pub(super) fn flat(layers: impl Iterator<Item = u32>) -> (Vec<usize>, usize) {
    let mut end = 0;
    let mut first = Vec::new();
    for experts in layers {
        first.push(end);
        end += experts as usize;
    }
    (first, end)
}
