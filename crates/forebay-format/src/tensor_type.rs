//! Encodings of tensor elements and their sizes.

use std::fmt;
use std::path::Path;

use forebay_codec::{Compact, Float, Weights};
use serde::{Serialize, Serializer};

use crate::FormatError;

/// Encoding of a tensor's elements.
///
/// Elements come in blocks: [`block_elements`](Self::block_elements) consecutive elements of a row
/// share [`block_bytes`](Self::block_bytes) bytes. Plain types have blocks of one element. The
/// decoders in `src/quant/` describe the layout of each quantised block.
#[allow(non_camel_case_types, reason = "these are the names that the formats themselves use")]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum TensorType {
    F64,
    F32,
    F16,
    BF16,
    F8_E4M3,
    F8_E5M2,
    F8_E8M0,
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    Bool,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
    IQ2_XXS,
    IQ2_XS,
    IQ2_S,
    IQ3_XXS,
    IQ3_S,
    IQ1_S,
    IQ1_M,
    TQ1_0,
    TQ2_0,
    MXFP4,
    NVFP4,
    Q1_0,
    Q2_0,
    /// BF16 in compact blocks of 2048 weights, as packs have it.
    BF16_C2048,
    /// BF16 in compact blocks of 256 weights, as packs have it.
    BF16_C256,
    /// E4M3 in blocks of 128 elements with an F32 scale, made from safetensors files with scales.
    F8_B128,
    /// E4M3 in blocks of 32 elements with an F32 scale, for rows that are not multiples of 128.
    F8_B32,
    /// NVFP4 with an F32 factor in every block, made from safetensors files with a global scale.
    NVFP4_F32,
    /// 4-bit integers in blocks of 32 with a BF16 scale and the zero point 8.
    I4_BF16,
    /// 4-bit integers in blocks of 32 with a scale and a zero point.
    I4_Z32,
    /// 4-bit integers in blocks of 128 with a scale and a zero point.
    I4_Z128,
}

/// Row of the table of types.
struct Facts {
    ty: TensorType,
    name: &'static str,
    /// Number that names the type in a GGUF file, or `None` for types that only safetensors has.
    ggml_id: Option<u32>,
    block_elements: usize,
    block_bytes: usize,
}

const fn facts(
    ty: TensorType,
    name: &'static str,
    ggml_id: Option<u32>,
    block_elements: usize,
    block_bytes: usize,
) -> Facts {
    Facts { ty, name, ggml_id, block_elements, block_bytes }
}

/// The rows are in the order of the enum, so that a type's discriminant is its index here.
const TABLE: [Facts; 49] = [
    facts(TensorType::F64, "F64", Some(28), 1, 8),
    facts(TensorType::F32, "F32", Some(0), 1, 4),
    facts(TensorType::F16, "F16", Some(1), 1, 2),
    facts(TensorType::BF16, "BF16", Some(30), 1, 2),
    facts(TensorType::F8_E4M3, "F8_E4M3", None, 1, 1),
    facts(TensorType::F8_E5M2, "F8_E5M2", None, 1, 1),
    facts(TensorType::F8_E8M0, "F8_E8M0", None, 1, 1),
    facts(TensorType::I8, "I8", Some(24), 1, 1),
    facts(TensorType::I16, "I16", Some(25), 1, 2),
    facts(TensorType::I32, "I32", Some(26), 1, 4),
    facts(TensorType::I64, "I64", Some(27), 1, 8),
    facts(TensorType::U8, "U8", None, 1, 1),
    facts(TensorType::U16, "U16", None, 1, 2),
    facts(TensorType::U32, "U32", None, 1, 4),
    facts(TensorType::U64, "U64", None, 1, 8),
    facts(TensorType::Bool, "BOOL", None, 1, 1),
    facts(TensorType::Q4_0, "Q4_0", Some(2), 32, 18),
    facts(TensorType::Q4_1, "Q4_1", Some(3), 32, 20),
    facts(TensorType::Q5_0, "Q5_0", Some(6), 32, 22),
    facts(TensorType::Q5_1, "Q5_1", Some(7), 32, 24),
    facts(TensorType::Q8_0, "Q8_0", Some(8), 32, 34),
    facts(TensorType::Q2_K, "Q2_K", Some(10), 256, 84),
    facts(TensorType::Q3_K, "Q3_K", Some(11), 256, 110),
    facts(TensorType::Q4_K, "Q4_K", Some(12), 256, 144),
    facts(TensorType::Q5_K, "Q5_K", Some(13), 256, 176),
    facts(TensorType::Q6_K, "Q6_K", Some(14), 256, 210),
    facts(TensorType::IQ4_NL, "IQ4_NL", Some(20), 32, 18),
    facts(TensorType::IQ4_XS, "IQ4_XS", Some(23), 256, 136),
    facts(TensorType::IQ2_XXS, "IQ2_XXS", Some(16), 256, 66),
    facts(TensorType::IQ2_XS, "IQ2_XS", Some(17), 256, 74),
    facts(TensorType::IQ2_S, "IQ2_S", Some(22), 256, 82),
    facts(TensorType::IQ3_XXS, "IQ3_XXS", Some(18), 256, 98),
    facts(TensorType::IQ3_S, "IQ3_S", Some(21), 256, 110),
    facts(TensorType::IQ1_S, "IQ1_S", Some(19), 256, 50),
    facts(TensorType::IQ1_M, "IQ1_M", Some(29), 256, 56),
    facts(TensorType::TQ1_0, "TQ1_0", Some(34), 256, 54),
    facts(TensorType::TQ2_0, "TQ2_0", Some(35), 256, 66),
    facts(TensorType::MXFP4, "MXFP4", Some(39), 32, 17),
    facts(TensorType::NVFP4, "NVFP4", Some(40), 64, 36),
    facts(TensorType::Q1_0, "Q1_0", Some(41), 128, 18),
    facts(TensorType::Q2_0, "Q2_0", Some(42), 64, 18),
    facts(TensorType::BF16_C2048, "BF16_C2048", None, 2048, Compact::C2048.bytes()),
    facts(TensorType::BF16_C256, "BF16_C256", None, 256, Compact::C256.bytes()),
    facts(TensorType::F8_B128, "F8_B128", None, 128, 132),
    facts(TensorType::F8_B32, "F8_B32", None, 32, 36),
    facts(TensorType::NVFP4_F32, "NVFP4_F32", None, 64, 40),
    facts(TensorType::I4_BF16, "I4_BF16", None, 32, 18),
    facts(TensorType::I4_Z32, "I4_Z32", None, 32, 20),
    facts(TensorType::I4_Z128, "I4_Z128", None, 128, 68),
];

const ALL: [TensorType; TABLE.len()] = {
    let mut all = [TensorType::F64; TABLE.len()];
    let mut i = 0;
    while i < TABLE.len() {
        // The table is indexed by discriminant, so a misplaced row must not compile.
        assert!(TABLE[i].ty as usize == i);
        all[i] = TABLE[i].ty;
        i += 1;
    }
    all
};

impl TensorType {
    fn facts(self) -> &'static Facts {
        &TABLE[self as usize]
    }

    /// Returns every type, the plain ones first.
    pub fn all() -> &'static [TensorType] {
        &ALL
    }

    /// Returns the type that has the number `id` in GGUF files.
    pub fn from_ggml_id(id: u32) -> Option<Self> {
        TABLE.iter().find(|facts| facts.ggml_id == Some(id)).map(|facts| facts.ty)
    }

    /// Returns the number of this type in GGUF files, or `None` if GGUF cannot hold it.
    pub fn ggml_id(self) -> Option<u32> {
        self.facts().ggml_id
    }

    /// Returns the name that the formats use, such as `Q4_K` or `BF16`.
    pub fn name(self) -> &'static str {
        self.facts().name
    }

    /// Returns the type of this name, regardless of case.
    pub fn from_name(name: &str) -> Option<Self> {
        TABLE.iter().find(|facts| facts.name.eq_ignore_ascii_case(name)).map(|facts| facts.ty)
    }

    /// Returns the number of elements that share one block.
    pub fn block_elements(self) -> usize {
        self.facts().block_elements
    }

    /// Returns the number of bytes of one block.
    pub fn block_bytes(self) -> usize {
        self.facts().block_bytes
    }

    /// Returns the blocks of compact BF16, which hold exactly the numbers of BF16.
    pub fn compact(self) -> Option<Compact> {
        match self {
            TensorType::BF16_C2048 => Some(Compact::C2048),
            TensorType::BF16_C256 => Some(Compact::C256),
            _ => None,
        }
    }

    /// Returns the type of compact BF16 with these blocks.
    pub fn from_compact(of: Compact) -> TensorType {
        match of {
            Compact::C2048 => TensorType::BF16_C2048,
            Compact::C256 => TensorType::BF16_C256,
        }
    }

    /// Returns the type of weights that codec `exponents` knows.
    pub fn from_weights(weights: Weights) -> TensorType {
        match weights {
            Weights::Plain(Float::Bf16) => TensorType::BF16,
            Weights::Plain(Float::F16) => TensorType::F16,
            Weights::Plain(Float::F8E4M3) => TensorType::F8_E4M3,
            Weights::Plain(Float::F8E5M2) => TensorType::F8_E5M2,
            Weights::Compact(of) => TensorType::from_compact(of),
        }
    }

    /// Returns what elements of this type are to codec `exponents`, if it knows them.
    pub fn weights(self) -> Option<Weights> {
        Weights::ALL.into_iter().find(|weights| TensorType::from_weights(*weights) == self)
    }

    /// Returns the type of the same numbers without compression.
    pub fn plain(self) -> TensorType {
        self.compact().map_or(self, |_| TensorType::BF16)
    }

    /// Returns true if several elements share a block, as in all `Q`, `IQ`, `TQ` and `FP4` types.
    pub fn is_quantized(self) -> bool {
        self.block_elements() > 1
    }

    /// Returns the number of bytes of a row of `cols` elements. Returns `None` if the row does not
    /// end on a block boundary, or if the number overflows.
    pub fn row_bytes(self, cols: u64) -> Option<u64> {
        let block = self.block_elements() as u64;
        if !cols.is_multiple_of(block) {
            return None;
        }
        (cols / block).checked_mul(self.block_bytes() as u64)
    }

    /// Returns the number of bytes of a tensor of this shape, outermost dimension first. An empty
    /// shape means one element. Returns `None` in the same cases as [`row_bytes`](Self::row_bytes).
    pub fn tensor_bytes(self, shape: &[u64]) -> Option<u64> {
        let (cols, outer) = shape.split_last().unwrap_or((&1, &[]));
        outer.iter().try_fold(self.row_bytes(*cols)?, |bytes, dim| bytes.checked_mul(*dim))
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Serialize for TensorType {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// Returns the number of bytes of a tensor with the type and shape that a file claims.
///
/// # Errors
/// Returns [`FormatError::InvalidShape`] if a dimension is zero, a row ends inside a block, or the
/// size overflows.
pub(crate) fn checked_bytes(
    path: &Path,
    tensor: &str,
    ty: TensorType,
    shape: &[u64],
) -> Result<u64, FormatError> {
    let why = if shape.contains(&0) {
        "a dimension is zero"
    } else if !shape.last().unwrap_or(&1).is_multiple_of(ty.block_elements() as u64) {
        "the innermost dimension is not a whole number of blocks"
    } else if let Some(bytes) = ty.tensor_bytes(shape) {
        return Ok(bytes);
    } else {
        "its size overflows"
    };
    Err(FormatError::InvalidShape {
        path: path.to_owned(),
        tensor: tensor.to_owned(),
        ty,
        shape: shape.to_vec(),
        why,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_and_names_lead_back() {
        for &ty in TensorType::all() {
            assert_eq!(TensorType::from_name(ty.name()), Some(ty));
            assert_eq!(TensorType::from_name(&ty.name().to_lowercase()), Some(ty));
            if let Some(id) = ty.ggml_id() {
                assert_eq!(TensorType::from_ggml_id(id), Some(ty));
            }
        }
        assert_eq!(TensorType::from_ggml_id(4), None);
        assert_eq!(TensorType::from_name("Q9_K"), None);
    }

    #[test]
    fn row_bytes_need_whole_blocks() {
        assert_eq!(TensorType::Q4_K.row_bytes(512), Some(288));
        assert_eq!(TensorType::Q4_K.row_bytes(511), None);
        assert_eq!(TensorType::F32.row_bytes(u64::MAX), None);
        assert_eq!(TensorType::Q8_0.tensor_bytes(&[3, 2, 32]), Some(204));
        assert_eq!(TensorType::F32.tensor_bytes(&[]), Some(4));
        assert_eq!(TensorType::F32.tensor_bytes(&[1 << 32, 1 << 32]), None);
    }

    #[test]
    fn serialises_as_its_name() {
        assert_eq!(serde_json::to_string(&TensorType::IQ2_XXS).unwrap(), "\"IQ2_XXS\"");
    }
}
