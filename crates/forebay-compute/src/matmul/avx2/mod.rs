//! Kernels for AVX2, FMA and F16C.

use forebay_format::TensorType;

use super::task::{ChunkRows, Kernel, Plan};
use super::types;

mod dot;
mod float;
mod panel;
mod panel256;
mod panel32;
mod panel_float;
mod panel_wide;
pub(crate) mod unpack;
mod vector;

/// The kernel for rounded activations, if the type has one.
pub(crate) fn plan_rounded(ty: TensorType, tokens: usize) -> Option<Plan> {
    if tokens > dot::TOKENS
        && let Some(kernel) = many_tokens(ty)
    {
        return Some(Plan { kernel, rows: panel::CHUNK });
    }
    Some(Plan { kernel: few_tokens(ty)?, rows: ChunkRows::Any })
}

/// The kernel for F32 activations.
pub(crate) fn plan_float(ty: TensorType, tokens: usize) -> Plan {
    if tokens > dot::TOKENS {
        let kernel = match ty {
            TensorType::F32 => panel::rows::<panel_float::Plain<float::Full>>,
            TensorType::F16 => panel::rows::<panel_float::Plain<float::Half>>,
            TensorType::BF16 => panel::rows::<panel_float::Plain<float::Brain>>,
            _ => panel::rows::<panel_float::Dequantised>,
        };
        return Plan { kernel, rows: panel::CHUNK };
    }
    Plan { kernel: float::few_tokens(ty), rows: ChunkRows::Any }
}

fn few_tokens(ty: TensorType) -> Option<Kernel> {
    use dot::{rows32, rows256};
    Some(match ty {
        TensorType::Q4_0 => rows32::<types::Q4_0>,
        TensorType::Q4_1 => rows32::<types::Q4_1>,
        TensorType::Q5_0 => rows32::<types::Q5_0>,
        TensorType::Q5_1 => rows32::<types::Q5_1>,
        TensorType::Q8_0 => rows32::<types::Q8_0>,
        TensorType::IQ4_NL => rows32::<types::Iq4Nl>,
        TensorType::MXFP4 => rows32::<types::Mxfp4>,
        TensorType::Q2_K => rows256::<types::Q2K>,
        TensorType::Q3_K => rows256::<types::Q3K>,
        TensorType::Q4_K => rows256::<types::Q4K>,
        TensorType::Q5_K => rows256::<types::Q5K>,
        TensorType::Q6_K => rows256::<types::Q6K>,
        TensorType::IQ4_XS => rows256::<types::Iq4Xs>,
        _ => return None,
    })
}

fn many_tokens(ty: TensorType) -> Option<Kernel> {
    use panel::rows;
    use panel_wide::PanelWide;
    use panel32::Panel32;
    use panel256::Panel256;
    Some(match ty {
        TensorType::Q8_0 => rows::<PanelWide<types::Q8_0>>,
        TensorType::IQ4_NL => rows::<PanelWide<types::Iq4Nl>>,
        TensorType::IQ4_XS => rows::<PanelWide<types::Iq4Xs>>,
        TensorType::Q4_0 => rows::<Panel32<types::Q4_0>>,
        TensorType::Q4_1 => rows::<Panel32<types::Q4_1>>,
        TensorType::Q5_0 => rows::<Panel32<types::Q5_0>>,
        TensorType::Q5_1 => rows::<Panel32<types::Q5_1>>,
        TensorType::MXFP4 => rows::<Panel32<types::Mxfp4>>,
        TensorType::Q2_K => rows::<Panel256<types::Q2K>>,
        TensorType::Q3_K => rows::<Panel256<types::Q3K>>,
        TensorType::Q4_K => rows::<Panel256<types::Q4K>>,
        TensorType::Q5_K => rows::<Panel256<types::Q5K>>,
        TensorType::Q6_K => rows::<Panel256<types::Q6K>>,
        _ => return None,
    })
}
