//! The shape of recurrent layers on a GPU.

use forebay_cuda::{DeltaRule, DeltaShape};

use crate::arch::{HeadOrder, Recurrent, StateRule};

/// Most projections of a recurrent layer.
pub const PRODUCTS_MAX: usize = 8;

/// Returns the shape of recurrent layers as the kernels' side names it.
pub(super) fn device_shape(of: &Recurrent) -> DeltaShape {
    DeltaShape {
        rule: match of.rule {
            StateRule::GatedDelta => DeltaRule::GatedDelta,
            StateRule::KimiDelta => DeltaRule::KimiDelta,
            StateRule::Mamba2 => DeltaRule::Mamba2,
            StateRule::Mamba => DeltaRule::Mamba,
            StateRule::Lightning => DeltaRule::Lightning,
            StateRule::ShortConvolution => DeltaRule::ShortConvolution,
        },
        key_heads: of.key_heads,
        value_heads: of.value_heads,
        key_dim: of.key_dim,
        value_dim: of.value_dim,
        convolution: of.convolution,
        tiled: of.head_order == HeadOrder::Tiled,
        norm_width: of.norm_width,
        sigmoid_gate: of.sigmoid_gate,
        decay_bound: of.decay_bound,
        share_scale: of.share_scale,
    }
}
