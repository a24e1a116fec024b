//! Numbering of the experts of all layers in one list.

/// Returns the index of every layer's first entry, and the number of entries. The layers follow each other.
pub(super) fn flat(layers: impl Iterator<Item = u32>) -> (Vec<usize>, usize) {
    let mut end = 0;
    let mut first = Vec::new();
    for experts in layers {
        first.push(end);
        end += experts as usize;
    }
    (first, end)
}
