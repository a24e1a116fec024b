//! Which kernels a weight type has, and how matrices are named to them.

use forebay_format::{TensorType, can_dequantize};

use crate::{AddressTable, DevicePtr, RoundedActivations};

/// The modules of a type: names that end in the type's, in small letters.
pub(crate) struct TypeModules {
    pub(crate) ty: TensorType,
    /// For one token.
    pub(crate) matvec: &'static str,
    /// For two to eight. `None` for rare types, which take one token after the other.
    pub(crate) matvec_few: Option<&'static str>,
    /// `None` where there are no tensor cores for it.
    pub(crate) matmul: Option<&'static str>,
    pub(crate) exact: &'static str,
    pub(crate) embedding: &'static str,
}

macro_rules! type_modules {
    ($($ty:ident $name:literal),* $(,)?) => {
        &[$(TypeModules {
            ty: TensorType::$ty,
            matvec: concat!("matvec_", $name),
            matvec_few: match TensorType::$ty {
                ty if is_rare(ty) => None,
                _ => Some(concat!("matvec_few_", $name)),
            },
            matmul: match TensorType::$ty {
                TensorType::F32 | TensorType::F64 => None,
                _ => Some(concat!("matmul_", $name)),
            },
            exact: concat!("exact_", $name),
            embedding: concat!("embedding_", $name),
        }),*]
    };
}

/// Types that few models use. Kernels for several tokens are the largest of all, so these types have none.
const fn is_rare(ty: TensorType) -> bool {
    use TensorType as T;
    matches!(ty, T::F64 | T::F8_E5M2 | T::TQ1_0 | T::TQ2_0 | T::IQ1_S | T::IQ1_M)
}

static TYPES: &[TypeModules] = type_modules![
    F64 "f64", F32 "f32", F16 "f16", BF16 "bf16", F8_E4M3 "f8_e4m3", F8_E5M2 "f8_e5m2",
    Q4_0 "q4_0", Q4_1 "q4_1", Q5_0 "q5_0", Q5_1 "q5_1", Q8_0 "q8_0",
    Q2_K "q2_k", Q3_K "q3_k", Q4_K "q4_k", Q5_K "q5_k", Q6_K "q6_k",
    IQ4_NL "iq4_nl", IQ4_XS "iq4_xs", IQ2_XXS "iq2_xxs", IQ2_XS "iq2_xs", IQ2_S "iq2_s",
    IQ3_XXS "iq3_xxs", IQ3_S "iq3_s", IQ1_S "iq1_s", IQ1_M "iq1_m",
    TQ1_0 "tq1_0", TQ2_0 "tq2_0", MXFP4 "mxfp4", NVFP4 "nvfp4", Q1_0 "q1_0", Q2_0 "q2_0",
];

/// The modules of type `ty`.
///
/// # Panics
/// When the type has none.
pub(crate) fn modules_of(ty: TensorType) -> &'static TypeModules {
    TYPES.iter().find(|modules| modules.ty == ty).unwrap_or_else(|| panic!("no kernels for {ty}"))
}

/// Whether products with weights of this type run on the GPU: all that have values.
pub fn supports_weights(ty: TensorType) -> bool {
    can_dequantize(ty)
}

/// Whether [`crate::Gpu::matvec`] reads weights of type `ty` once for two to eight tokens. For rare types it reads them
/// again for every token.
///
/// # Panics
/// When the type has no kernels; see [`supports_weights`].
pub fn shares_reads(ty: TensorType) -> bool {
    modules_of(ty).matvec_few.is_some()
}

/// What a weight's address has to be a multiple of, in bytes: the largest power of two up to 16 that divides a block,
/// so that every row, and every expert of a stack, is aligned like the first.
pub fn weight_alignment(ty: TensorType) -> usize {
    1 << ty.block_bytes().trailing_zeros().min(4)
}

/// One matrix and where its product goes.
#[derive(Clone, Copy)]
pub struct DeviceMatrix {
    /// `rows` rows without gaps, aligned as [`weight_alignment`] says. Up to 15 bytes before the first and after the
    /// last may be read.
    pub data: DevicePtr<u8>,
    pub rows: usize,
    /// `[tokens, rows]`.
    pub out: DevicePtr<f32>,
}

/// The same matrices of many experts, wherever their slots are.
#[derive(Clone, Copy)]
pub struct ExpertTable {
    /// The address of each expert's slot; 0 where an expert has none, which leaves its outputs as they are.
    pub slots: AddressTable,
    /// Rows of each matrix.
    pub rows: usize,
}

/// One matrix in every expert's slot and where its product goes.
#[derive(Clone, Copy)]
pub struct ExpertPart {
    /// From the start of the slot.
    pub offset: u64,
    /// `[pairs, rows]`.
    pub out: DevicePtr<f32>,
}

/// Activations `[rows, cols]` in the form that a weight type needs; see [`takes_rounded`].
#[derive(Clone, Copy)]
pub enum MatvecInput {
    Rounded(RoundedActivations),
    Float(DevicePtr<f32>),
}

impl MatvecInput {
    /// The activations of one token.
    pub(crate) fn token(self, token: usize, cols: usize) -> MatvecInput {
        match self {
            MatvecInput::Rounded(x) => MatvecInput::Rounded(RoundedActivations {
                codes: x.codes.offset(token * cols),
                scales: x.scales.offset(token * cols / 32),
            }),
            MatvecInput::Float(x) => MatvecInput::Float(x.offset(token * cols)),
        }
    }
}

/// Whether mat-vec kernels of this type take activations rounded to 8 bits: all types with blocks do.
pub fn takes_rounded(ty: TensorType) -> bool {
    ty.is_quantized()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_with_values_has_kernels() {
        for &ty in TensorType::all() {
            assert_eq!(TYPES.iter().any(|modules| modules.ty == ty), supports_weights(ty), "{ty}");
        }
        for modules in TYPES {
            let always = [modules.matvec, modules.exact, modules.embedding];
            let all = always.map(Some).into_iter().chain([modules.matvec_few, modules.matmul]);
            assert!(all.flatten().all(crate::ptx::has), "{}", modules.ty);
        }
    }
}
