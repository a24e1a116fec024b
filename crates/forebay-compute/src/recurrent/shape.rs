//! Checks of shapes.

use forebay_ops::{DeltaRule, DeltaShape};

use crate::simd::LANES;

/// Checks that the CPU computes this shape.
///
/// # Panics
/// Panics if it does not.
pub(super) fn check(shape: &DeltaShape) {
    let dims = [shape.key_dim, shape.value_dim];
    let fits = dims.iter().all(|dim| *dim > 0 && dim.is_multiple_of(LANES));
    let heads = shape.key_heads > 0 && shape.value_heads.is_multiple_of(shape.key_heads);
    let norms = match shape.rule {
        DeltaRule::Mamba2 => {
            shape.norm_width == 0 || shape.value_width().is_multiple_of(shape.norm_width)
        }
        DeltaRule::GatedDelta | DeltaRule::KimiDelta => shape.norm_width == shape.value_dim,
        DeltaRule::Lightning => shape.norm_width == shape.value_width(),
        DeltaRule::Mamba | DeltaRule::ShortConvolution => true,
    };
    let fits = match shape.rule {
        DeltaRule::ShortConvolution => {
            shape.key_dim == 0 && shape.value_dim > 0 && shape.value_dim.is_multiple_of(LANES)
        }
        _ => fits,
    };
    let heads = heads && (shape.rule != DeltaRule::Mamba || shape.value_heads == 1);
    let bounded = shape.decay_bound == 0.0 || shape.rule == DeltaRule::KimiDelta;
    let scaled = shape.share_scale == 1.0 || shape.rule == DeltaRule::GatedDelta;
    let fits = fits && heads && norms && bounded && scaled;
    let least = if shape.rule == DeltaRule::Lightning { 1 } else { 2 };
    assert!(fits && shape.convolution >= least, "gated_delta: {shape:?}");
}
