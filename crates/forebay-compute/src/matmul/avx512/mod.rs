//! Kernels for AVX-512 with VNNI. Where these would not be faster, the AVX2 kernels are used.

use std::ops::Range;

use forebay_format::TensorType;
use forebay_ops::RowKind;

use super::avx2;
use super::panel::{CHUNK, PanelKernel};
use super::task::{ChunkRows, Kernel, Plan, Scratch, Task};
use super::types;

mod compact;
mod dot;
mod panel_float;
mod panel_rounded;
mod scales;

/// Returns the kernel for rounded activations, if the type has one.
pub(crate) fn plan_rounded(ty: TensorType, kind: RowKind) -> Option<Plan> {
    if kind == RowKind::Prompt
        && let Some(kernel) = many_tokens(ty)
    {
        return Some(Plan { kernel, rows: CHUNK });
    }
    match few_tokens(ty) {
        Some(kernel) => Some(Plan { kernel, rows: ChunkRows::Any }),
        None => avx2::plan_rounded(ty, kind),
    }
}

/// Returns the kernel for F32 activations.
pub(crate) fn plan_float(ty: TensorType, kind: RowKind) -> Plan {
    let is_prompt = kind == RowKind::Prompt;
    let kernel: Option<Kernel> = match (ty, is_prompt) {
        (TensorType::F32, true) => Some(panels::<panel_float::Plain<avx2::Full>>),
        (TensorType::F16, true) => Some(panels::<panel_float::Plain<avx2::Half>>),
        (TensorType::BF16, true) => Some(panels::<panel_float::Plain<avx2::Brain>>),
        (TensorType::BF16_C2048, true) => Some(
            compact::many_tokens::<avx2::Compact2048>()
                .unwrap_or(panels::<panel_float::Plain<avx2::Compact2048>>),
        ),
        (TensorType::BF16_C256, true) => Some(
            compact::many_tokens::<avx2::Compact256>()
                .unwrap_or(panels::<panel_float::Plain<avx2::Compact256>>),
        ),
        (TensorType::F8_B128, true) => Some(panels::<panel_float::Plain<avx2::F8Blocks<128>>>),
        (TensorType::F8_B32, true) => Some(panels::<panel_float::Plain<avx2::F8Blocks<32>>>),
        (TensorType::NVFP4_F32, true) => Some(panels::<panel_float::Plain<avx2::Nvfp4>>),
        (TensorType::I4_BF16, true) => Some(panels::<panel_float::Plain<avx2::Int4Brain>>),
        (TensorType::I4_Z32, true) => Some(panels::<panel_float::Plain<avx2::Int4Zero<32>>>),
        (TensorType::I4_Z128, true) => Some(panels::<panel_float::Plain<avx2::Int4Zero<128>>>),
        (TensorType::BF16_C2048, false) => compact::few_tokens::<avx2::Compact2048>(),
        (TensorType::BF16_C256, false) => compact::few_tokens::<avx2::Compact256>(),
        _ => None,
    };
    let rows = if is_prompt { CHUNK } else { ChunkRows::Any };
    kernel.map_or_else(|| avx2::plan_float(ty, kind), |kernel| Plan { kernel, rows })
}

/// Returns the kernel for few tokens. IQ4_XS has none here and uses the AVX2 kernel.
fn few_tokens(ty: TensorType) -> Option<Kernel> {
    use dot::{rows32, rows256};
    types::kernel_by_type!(ty, rows32, rows256)
}

fn many_tokens(ty: TensorType) -> Option<Kernel> {
    use panel_rounded::PanelRounded;
    Some(match ty {
        TensorType::Q4_0 => panels::<PanelRounded<types::Q4_0>>,
        TensorType::Q4_1 => panels::<PanelRounded<types::Q4_1>>,
        TensorType::Q5_0 => panels::<PanelRounded<types::Q5_0>>,
        TensorType::Q5_1 => panels::<PanelRounded<types::Q5_1>>,
        TensorType::Q8_0 => panels::<PanelRounded<types::Q8_0>>,
        TensorType::IQ4_NL => panels::<PanelRounded<types::Iq4Nl>>,
        TensorType::MXFP4 => panels::<PanelRounded<types::Mxfp4>>,
        TensorType::Q2_K => panels::<PanelRounded<types::Q2K>>,
        TensorType::Q3_K => panels::<PanelRounded<types::Q3K>>,
        TensorType::Q4_K => panels::<PanelRounded<types::Q4K>>,
        TensorType::Q5_K => panels::<PanelRounded<types::Q5K>>,
        TensorType::Q6_K => panels::<PanelRounded<types::Q6K>>,
        TensorType::IQ4_XS => panels::<PanelRounded<types::Iq4Xs>>,
        _ => return None,
    })
}

/// Runs [`super::panel::rows`] with the instructions of this family.
///
/// # Safety
/// The requirements of [`Kernel`] hold.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn panels<K: PanelKernel>(task: &Task, rows: Range<usize>, scratch: &mut Scratch) {
    // SAFETY: as for this function.
    unsafe { super::panel::rows::<K>(task, rows, scratch) };
}
