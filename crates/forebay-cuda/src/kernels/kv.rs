//! The KV cache of one layer on the device: its layout and its size.

use crate::DevicePtr;
use crate::launch::Launch;

/// Storage format of one element of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvElement {
    F16,
    F32,
    /// 8-bit integers, with a half-precision scale for every 32.
    Q8_0,
    /// 4-bit integers, with a half-precision scale for every 32.
    Q4_0,
}

/// Dimensions of one layer's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvLayerShape {
    pub element: KvElement,
    pub kv_heads: usize,
    /// Number of elements of a key.
    pub dim_k: usize,
    /// Number of elements of a value.
    pub dim_v: usize,
    /// True if a value is the first `dim_v` elements of its key, so that nothing is stored twice. DeepSeek's latent
    /// rows, which all query heads share, are stored so.
    pub values_in_keys: bool,
    /// Maximum number of positions.
    pub context: usize,
    /// Number of rows that are kept, with position `p` in row `p % rows`. This is `context` if every position is kept,
    /// otherwise [`KvLayerShape::rows_for_window`].
    pub rows: usize,
}

/// The number of rows is a multiple of this if rows wrap.
const ROWS_MULTIPLE: usize = 64;

impl KvLayerShape {
    /// Returns the number of rows for a layer whose tokens see themselves and the `window - 1` positions before. Up to
    /// `batch` tokens are written at once, before the first of them looks back. Never returns more than `context`.
    pub fn rows_for_window(window: usize, batch: usize, context: usize) -> usize {
        let rows = window.saturating_add(batch.max(1) - 1).checked_next_multiple_of(ROWS_MULTIPLE);
        rows.map_or(context, |rows| rows.min(context))
    }

    /// Returns the number of bytes of the key plane, `[kv_heads, rows, row]`.
    pub fn key_bytes(&self) -> u64 {
        self.plane_bytes(self.dim_k)
    }

    /// Returns the number of bytes of the value plane, which is 0 if values lie in the keys.
    pub fn value_bytes(&self) -> u64 {
        if self.values_in_keys { 0 } else { self.plane_bytes(self.dim_v) }
    }

    fn plane_bytes(&self, dim: usize) -> u64 {
        let rows = (self.kv_heads * self.rows) as u64;
        let dim = dim as u64;
        rows * match self.element {
            KvElement::F16 => 2 * dim.next_multiple_of(8),
            KvElement::F32 => 4 * dim.next_multiple_of(8),
            // The scales are stored behind all rows.
            KvElement::Q8_0 => 34 * dim.div_ceil(32),
            KvElement::Q4_0 => 18 * dim.div_ceil(32),
        }
    }
}

impl Launch {
    /// Passes both planes of a layer.
    pub(super) fn planes(self, layer: &KvLayer) -> Launch {
        let KvLayerShape { values_in_keys, .. } = layer.shape;
        let key_bytes = layer.shape.key_bytes() as usize;
        let value_bytes =
            if values_in_keys { key_bytes } else { layer.shape.value_bytes() as usize };
        self.ptr(layer.keys, key_bytes).ptr(layer.value_plane(), value_bytes)
    }
}

/// One layer's cache. Both planes are aligned to 16 bytes. Their initial contents do not matter, because kernels read
/// only rows that were written.
#[derive(Clone, Copy)]
pub struct KvLayer {
    pub shape: KvLayerShape,
    /// Key plane of [`KvLayerShape::key_bytes`] bytes.
    pub keys: DevicePtr<u8>,
    /// Value plane of [`KvLayerShape::value_bytes`] bytes. It is ignored if values lie in the keys.
    pub values: DevicePtr<u8>,
}

impl KvLayer {
    /// Returns the plane from which kernels read values: the key plane if values lie in the keys.
    pub(crate) fn value_plane(&self) -> DevicePtr<u8> {
        if self.shape.values_in_keys { self.keys } else { self.values }
    }

    pub(crate) fn check(&self) {
        let aligned = |pointer: DevicePtr<u8>| pointer.address().is_multiple_of(16);
        assert!(
            aligned(self.keys) && aligned(self.value_plane()),
            "planes begin at multiples of 16 bytes"
        );
        let shape = &self.shape;
        assert!(shape.kv_heads > 0 && shape.dim_k > 0 && shape.dim_v > 0, "{shape:?} is empty");
        assert!(
            !shape.values_in_keys || shape.dim_v <= shape.dim_k,
            "{shape:?}: values are longer"
        );
        assert!((1..=shape.context).contains(&shape.rows), "{shape:?}: rows do not fit");
        // Kernels count positions and a plane's rows in 32 bits.
        assert!(shape.context < 1 << 31, "{shape:?} has too many positions");
        assert!(shape.kv_heads * shape.rows < 1 << 31, "{shape:?} has too many rows");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_padded_and_scales_counted() {
        let shape = |element| KvLayerShape {
            element,
            kv_heads: 3,
            dim_k: 80,
            dim_v: 20,
            values_in_keys: false,
            context: 10,
            rows: 10,
        };
        assert_eq!(shape(KvElement::F16).key_bytes(), 30 * 160);
        assert_eq!(shape(KvElement::F16).value_bytes(), 30 * 48);
        assert_eq!(shape(KvElement::F32).value_bytes(), 30 * 96);
        assert_eq!(shape(KvElement::Q8_0).key_bytes(), 30 * (96 + 6));
        assert_eq!(shape(KvElement::Q8_0).value_bytes(), 30 * (32 + 2));
        assert_eq!(shape(KvElement::Q4_0).key_bytes(), 30 * (48 + 6));
        let latent = KvLayerShape { values_in_keys: true, ..shape(KvElement::F16) };
        assert_eq!((latent.key_bytes(), latent.value_bytes()), (30 * 160, 0));
        let few = KvLayerShape { context: 100, ..shape(KvElement::F16) };
        assert_eq!(few.key_bytes(), 30 * 160);
    }

    #[test]
    fn a_window_has_rows_for_itself_and_a_batch_beside_it() {
        let rows = KvLayerShape::rows_for_window;
        assert_eq!((rows(128, 512, 131_072), rows(128, 513, 131_072)), (640, 640));
        assert_eq!((rows(128, 514, 131_072), rows(1024, 1, 4096)), (704, 1024));
        assert_eq!((rows(128, 512, 500), rows(usize::MAX, 2, 500)), (500, 500));
    }
}
