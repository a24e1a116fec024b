//! Names of the ways in which whole models are quantised.

use forebay_format::{Catalog, TensorInfo};

/// Values of `general.file_type` with their names. Source: llama.cpp, `llama_ftype` in `include/llama.h`.
const FILE_TYPES: [(u64, &str); 32] = [
    (0, "F32"),
    (1, "F16"),
    (2, "Q4_0"),
    (3, "Q4_1"),
    (7, "Q8_0"),
    (8, "Q5_0"),
    (9, "Q5_1"),
    (10, "Q2_K"),
    (11, "Q3_K_S"),
    (12, "Q3_K_M"),
    (13, "Q3_K_L"),
    (14, "Q4_K_S"),
    (15, "Q4_K_M"),
    (16, "Q5_K_S"),
    (17, "Q5_K_M"),
    (18, "Q6_K"),
    (19, "IQ2_XXS"),
    (20, "IQ2_XS"),
    (21, "Q2_K_S"),
    (22, "IQ3_XS"),
    (23, "IQ3_XXS"),
    (24, "IQ1_S"),
    (25, "IQ4_NL"),
    (26, "IQ3_S"),
    (27, "IQ3_M"),
    (28, "IQ2_S"),
    (29, "IQ2_M"),
    (30, "IQ4_XS"),
    (31, "IQ1_M"),
    (32, "BF16"),
    (36, "TQ1_0"),
    (38, "MXFP4_MOE"),
];

/// Added to a file type that a converter derived from the tensors.
const DERIVED: u64 = 1024;

/// Returns the name of a model's quantisation: that of its GGUF file type if a tensor has this type, else the type of most weights.
pub(crate) fn name(catalog: &Catalog, weights: impl Fn(&TensorInfo) -> u64) -> &'static str {
    let file_type = catalog.gguf().and_then(|metadata| metadata.u64("general.file_type"));
    let named = file_type.and_then(|of| {
        let of = if of >= DERIVED { of - DERIVED } else { of };
        FILE_TYPES.iter().find(|(number, _)| *number == of).map(|(_, name)| *name)
    });
    let tensors = catalog.tensors();
    named.filter(|name| fits(name, tensors)).unwrap_or_else(|| of_most_weights(tensors, weights))
}

/// Returns true if tensors can be those of a file of this type. The types of fewer than four bits are mixtures of others.
fn fits(name: &str, tensors: &[TensorInfo]) -> bool {
    let base = name.strip_suffix("_MOE").unwrap_or(name);
    let base = match base.find("_K_") {
        Some(at) => &base[..at + 2],
        None => base,
    };
    base.starts_with("IQ") || tensors.iter().any(|tensor| tensor.ty.name() == base)
}

fn of_most_weights(tensors: &[TensorInfo], weights: impl Fn(&TensorInfo) -> u64) -> &'static str {
    let mut counts: Vec<(&'static str, u64)> = Vec::new();
    for tensor in tensors {
        let name = tensor.ty.name();
        match counts.iter_mut().find(|(of, _)| *of == name) {
            Some((_, count)) => *count += weights(tensor),
            None => counts.push((name, weights(tensor))),
        }
    }
    counts.into_iter().max_by_key(|(_, count)| *count).map_or("", |(name, _)| name)
}

#[cfg(test)]
mod tests {
    use forebay_format::{Extent, FileIndex, TensorType};

    use super::*;

    #[test]
    fn a_file_type_needs_its_tensors() {
        let extent = Extent { file: FileIndex(0), offset: 0, length: 4 };
        let tensor = |ty, len| TensorInfo::contiguous("x".into(), ty, vec![len], extent);
        let tensors = [tensor(TensorType::Q8_0, 64), tensor(TensorType::Q4_K, 512)];
        for (name, expected) in
            [("Q4_K_M", true), ("Q4_K_S", true), ("Q8_0", true), ("Q6_K", false), ("IQ3_M", true)]
        {
            assert_eq!(fits(name, &tensors), expected, "{name}");
        }
        assert_eq!(of_most_weights(&tensors, TensorInfo::elements), "Q4_K");
    }
}
