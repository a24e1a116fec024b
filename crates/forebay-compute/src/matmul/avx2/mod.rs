//! Kernels for AVX2, FMA and F16C.

use std::ops::Range;

use forebay_format::TensorType;
use forebay_ops::RowKind;

use super::panel::{CHUNK, PanelKernel};
use super::task::{ChunkRows, Kernel, Plan, Scratch, Task};
use super::types;

mod compact;
mod dot;
mod float;
mod panel256;
mod panel32;
mod panel_float;
mod panel_wide;
mod scaled;
pub(crate) mod unpack;
mod vector;

pub(crate) use compact::{Blocks, Compact256, Compact2048, set_exponents};
pub(crate) use dot::{TOKENS, for_tokens, prefetch};
pub(crate) use float::{Brain, Full, Half, Widen};
pub(crate) use panel_float::{pack_eights, pack_floats};
pub(crate) use scaled::{F8Blocks, Int4Brain, Int4Zero, Nvfp4};
pub(crate) use vector::{add_to, store, sum_lanes, transpose, transpose_words};

/// Returns the kernel for rounded activations, if the type has one.
pub(crate) fn plan_rounded(ty: TensorType, kind: RowKind) -> Option<Plan> {
    if kind == RowKind::Prompt
        && let Some(kernel) = many_tokens(ty)
    {
        return Some(Plan { kernel, rows: CHUNK });
    }
    Some(Plan { kernel: few_tokens(ty)?, rows: ChunkRows::Any })
}

/// Returns the kernel for F32 activations.
pub(crate) fn plan_float(ty: TensorType, kind: RowKind) -> Plan {
    if kind == RowKind::Prompt {
        let kernel = match ty {
            TensorType::F32 => panels::<panel_float::Plain<float::Full>>,
            TensorType::F16 => panels::<panel_float::Plain<float::Half>>,
            TensorType::BF16 => panels::<panel_float::Plain<float::Brain>>,
            TensorType::BF16_C2048 => panels::<panel_float::Plain<compact::Compact2048>>,
            TensorType::BF16_C256 => panels::<panel_float::Plain<compact::Compact256>>,
            TensorType::F8_B128 => panels::<panel_float::Plain<F8Blocks<128>>>,
            TensorType::F8_B32 => panels::<panel_float::Plain<F8Blocks<32>>>,
            TensorType::NVFP4_F32 => panels::<panel_float::Plain<Nvfp4>>,
            TensorType::I4_BF16 => panels::<panel_float::Plain<Int4Brain>>,
            TensorType::I4_Z32 => panels::<panel_float::Plain<Int4Zero<32>>>,
            TensorType::I4_Z128 => panels::<panel_float::Plain<Int4Zero<128>>>,
            _ => panels::<panel_float::Dequantised>,
        };
        return Plan { kernel, rows: CHUNK };
    }
    Plan { kernel: float::few_tokens(ty), rows: ChunkRows::Any }
}

fn few_tokens(ty: TensorType) -> Option<Kernel> {
    use dot::{rows32, rows256};
    match ty {
        TensorType::IQ4_XS => Some(rows256::<types::Iq4Xs>),
        _ => types::kernel_by_type!(ty, rows32, rows256),
    }
}

/// Runs [`super::panel::rows`] with the instructions of this family.
///
/// # Safety
/// The requirements of [`Kernel`] hold.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn panels<K: PanelKernel>(task: &Task, rows: Range<usize>, scratch: &mut Scratch) {
    // SAFETY: as for this function.
    unsafe { super::panel::rows::<K>(task, rows, scratch) };
}

fn many_tokens(ty: TensorType) -> Option<Kernel> {
    use panel_wide::PanelWide;
    use panel32::Panel32;
    use panel256::Panel256;
    Some(match ty {
        TensorType::Q8_0 => panels::<PanelWide<types::Q8_0>>,
        TensorType::IQ4_NL => panels::<PanelWide<types::Iq4Nl>>,
        TensorType::IQ4_XS => panels::<PanelWide<types::Iq4Xs>>,
        TensorType::Q4_0 => panels::<Panel32<types::Q4_0>>,
        TensorType::Q4_1 => panels::<Panel32<types::Q4_1>>,
        TensorType::Q5_0 => panels::<Panel32<types::Q5_0>>,
        TensorType::Q5_1 => panels::<Panel32<types::Q5_1>>,
        TensorType::MXFP4 => panels::<Panel32<types::Mxfp4>>,
        TensorType::Q2_K => panels::<Panel256<types::Q2K>>,
        TensorType::Q3_K => panels::<Panel256<types::Q3K>>,
        TensorType::Q4_K => panels::<Panel256<types::Q4K>>,
        TensorType::Q5_K => panels::<Panel256<types::Q5K>>,
        TensorType::Q6_K => panels::<Panel256<types::Q6K>>,
        _ => return None,
    })
}
