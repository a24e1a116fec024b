//! The kernels that each weight type has, and the types that describe matrices to them.

use forebay_format::{TensorType, can_dequantize};

use crate::{AddressTable, DevicePtr, RoundedActivations, TiledActivations};

/// Modules of a type, whose names end in the type's name in lower case.
pub(crate) struct TypeModules {
    pub(crate) ty: TensorType,
    /// Module for products of one token at once.
    pub(crate) matvec: &'static str,
    /// Module for products of two to four tokens at once, and of more with weights that are floats. `None` for rare types.
    pub(crate) matvec_few: Option<&'static str>,
    /// Module for products of more tokens, by tensor cores. `None` for rare types and for floats.
    pub(crate) matvec_many: Option<&'static str>,
    /// Module for prompt rows. `None` if tensor cores cannot compute with the type.
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
            matvec_many: match TensorType::$ty {
                ty if is_rare(ty) || is_float(ty) => None,
                _ => Some(concat!("matvec_many_", $name)),
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

/// Returns true for types that few models use. Kernels for several tokens are the largest of all, so these types have
/// none.
const fn is_rare(ty: TensorType) -> bool {
    use TensorType as T;
    matches!(ty, T::F64 | T::F8_E5M2 | T::TQ1_0 | T::TQ2_0 | T::IQ1_S | T::IQ1_M)
}

const fn is_float(ty: TensorType) -> bool {
    use TensorType as T;
    matches!(
        ty,
        T::F64
            | T::F32
            | T::F16
            | T::BF16
            | T::F8_E4M3
            | T::F8_E5M2
            | T::BF16_C2048
            | T::BF16_C256
            | T::F8_B128
            | T::F8_B32
    )
}

static TYPES: &[TypeModules] = type_modules![
    F64 "f64", F32 "f32", F16 "f16", BF16 "bf16", BF16_C2048 "bf16_c2048", BF16_C256 "bf16_c256", F8_E4M3 "f8_e4m3", F8_E5M2 "f8_e5m2",
    Q4_0 "q4_0", Q4_1 "q4_1", Q5_0 "q5_0", Q5_1 "q5_1", Q8_0 "q8_0",
    Q2_K "q2_k", Q3_K "q3_k", Q4_K "q4_k", Q5_K "q5_k", Q6_K "q6_k",
    IQ4_NL "iq4_nl", IQ4_XS "iq4_xs", IQ2_XXS "iq2_xxs", IQ2_XS "iq2_xs", IQ2_S "iq2_s",
    IQ3_XXS "iq3_xxs", IQ3_S "iq3_s", IQ1_S "iq1_s", IQ1_M "iq1_m",
    TQ1_0 "tq1_0", TQ2_0 "tq2_0", MXFP4 "mxfp4", NVFP4 "nvfp4", Q1_0 "q1_0", Q2_0 "q2_0",
    F8_B128 "f8_b128", F8_B32 "f8_b32", NVFP4_F32 "nvfp4_f32", I4_BF16 "i4_bf16", I4_Z32 "i4_z32", I4_Z128 "i4_z128",
];

/// Returns the modules of type `ty`.
///
/// # Panics
/// Panics if the type has none.
pub(crate) fn modules_of(ty: TensorType) -> &'static TypeModules {
    TYPES.iter().find(|modules| modules.ty == ty).unwrap_or_else(|| panic!("no kernels for {ty}"))
}

/// Returns the modules that multiply decode rows, however many, by weights of type `ty`.
///
/// # Panics
/// Panics if the type has none.
pub fn decode_modules(ty: TensorType) -> impl Iterator<Item = &'static str> {
    let of = modules_of(ty);
    [Some(of.matvec), of.matvec_few, of.matvec_many].into_iter().flatten()
}

/// Returns true if the GPU computes products with weights of this type, which holds for all types that can be
/// dequantised.
pub fn supports_weights(ty: TensorType) -> bool {
    can_dequantize(ty)
}

/// Returns true if [`crate::Gpu::matvec`] reads weights of type `ty` once for several tokens. Weights of rare types are
/// read again for every token.
///
/// # Panics
/// Panics if the type has no kernels; see [`supports_weights`].
pub fn shares_reads(ty: TensorType) -> bool {
    modules_of(ty).matvec_few.is_some()
}

/// Returns the alignment in bytes that a weight's address needs. It is the largest power of two up to 16 that divides
/// the size of a block. Every row, and every expert of a stack, is then aligned like the first.
pub fn weight_alignment(ty: TensorType) -> usize {
    1 << ty.block_bytes().trailing_zeros().min(4)
}

/// One matrix, and the buffer for its product.
#[derive(Clone, Copy)]
pub struct DeviceMatrix {
    /// Matrix of `rows` rows without gaps, aligned as [`weight_alignment`] requires. Kernels may read up to 15 bytes
    /// before the first row and after the last.
    pub data: DevicePtr<u8>,
    pub rows: usize,
    /// `[tokens, rows]`.
    pub out: DevicePtr<f32>,
}

/// The same matrices of many experts, each in the expert's slot.
#[derive(Clone, Copy)]
pub struct ExpertTable {
    /// Address of each expert's slot. It is 0 for an expert without a slot, whose outputs are left unchanged.
    pub slots: AddressTable,
    /// Number of rows of each matrix.
    pub rows: usize,
}

/// The expert id of a (token, slot) pair that has no expert, because its row only pads a CUDA graph.
pub const NO_EXPERT: u32 = u32::MAX;

/// The (token, slot) pairs of a product with experts. Outputs are in the order of pairs.
#[derive(Clone, Copy)]
pub struct ExpertPairs {
    /// Expert of each pair `[count]`. The outputs of a pair with [`NO_EXPERT`] are left unchanged.
    pub ids: DevicePtr<u32>,
    /// Order in which the pairs are computed, a permutation of them; null for ascending order. Pairs of one expert that
    /// are adjacent share reads through the L2 cache.
    pub order: DevicePtr<u32>,
    pub count: usize,
    /// Number of adjacent pairs that use one row of the activations: the number of experts per token if there is a row
    /// for each token, and 1 if there is one for each pair.
    pub per_row: usize,
}

/// One matrix in every expert's slot, and the buffer for its product.
#[derive(Clone, Copy)]
pub struct ExpertPart {
    /// Offset in bytes from the start of the slot.
    pub offset: u64,
    /// `[pairs, rows]`.
    pub out: DevicePtr<f32>,
}

/// Activations `[rows, cols]` in the form that a weight type needs; see [`takes_rounded`].
#[derive(Clone, Copy)]
pub enum MatvecInput {
    Rounded(RoundedActivations),
    /// For as many rows as [`takes_tiles`] says.
    Tiled(TiledActivations),
    Float(DevicePtr<f32>),
}

/// Least number of rows that are multiplied by tensor cores. Measured on an H100 with llama-8b: 8 rows are 7 % faster, 4 are
/// slower.
const TILED_ROWS_MIN: usize = 5;

/// Returns true if [`crate::Gpu::matvec`] takes `rows` rows in the order of tensor cores.
///
/// # Panics
/// Panics if the type has no kernels.
pub fn takes_tiles(ty: TensorType, rows: usize) -> bool {
    rows >= TILED_ROWS_MIN && modules_of(ty).matvec_many.is_some()
}

/// Returns true if mat-vec kernels of this type take activations rounded to 8 bits, as they do for all quantised types.
pub fn takes_rounded(ty: TensorType) -> bool {
    !is_float(ty)
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
            assert_eq!(takes_rounded(modules.ty), !is_float(modules.ty), "{}", modules.ty);
            let some = [modules.matvec_few, modules.matvec_many, modules.matmul];
            let all = always.map(Some).into_iter().chain(some);
            assert!(all.flatten().all(crate::ptx::has), "{}", modules.ty);
        }
    }
}
