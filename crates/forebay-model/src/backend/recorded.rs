//! Rows of what a pass records.

/// Writes the experts `ids` `[tokens, k]` of layer `layer` into rows `[tokens, layers, k]`.
pub fn record_routing(ids: &[u32], routing: &mut [i32], layer: usize, layers: usize, count: usize) {
    record_rows(ids, |id| id as i32, routing, layer, layers, count);
}

/// Writes values `[tokens, k]` of layer `layer` into rows `[tokens, layers, k]`.
pub fn record_rows<T: Copy, R>(
    values: &[T],
    write: impl Fn(T) -> R,
    rows: &mut [R],
    layer: usize,
    layers: usize,
    count: usize,
) {
    let k = rows.len() / (count * layers);
    let used = values.len() / count;
    for (values, row) in values.chunks_exact(used).zip(rows.chunks_exact_mut(layers * k)) {
        for (place, value) in row[layer * k..(layer + 1) * k].iter_mut().zip(values) {
            *place = write(*value);
        }
    }
}
