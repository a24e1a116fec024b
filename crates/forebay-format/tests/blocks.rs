//! Compares the decoder of every block type with reference bytes and values, bit for bit.

mod common;

use forebay_format::{FormatError, TensorType, can_dequantize, dequantize};
use proptest::prelude::*;
use safetensors::SafeTensors;

fn floats(tensors: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let data = tensors.tensor(name).unwrap();
    data.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn check(tensors: &SafeTensors<'_>, ty: TensorType, data: &str, values: &str) {
    let expected = floats(tensors, values);
    let mut found = vec![f32::NAN; expected.len()];
    dequantize(ty, tensors.tensor(data).unwrap().data(), &mut found).unwrap();
    for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert_eq!(
            found.to_bits(),
            expected.to_bits(),
            "{values}, element {i}: found {found:e}, expected {expected:e}"
        );
    }
}

#[test]
fn all_types_decode_bit_for_bit() {
    let Some(folder) = common::fixtures("blocks") else { return };
    let bytes = std::fs::read(folder.join("blocks.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let table = std::fs::read(folder.join("blocks.json")).unwrap();
    let table: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(&table).unwrap();
    assert_eq!(table.len(), 27);
    for (name, facts) in &table {
        let ty = TensorType::from_name(name).unwrap();
        assert_eq!(facts["ggml_type"].as_u64(), ty.ggml_id().map(u64::from), "{name}");
        assert_eq!(facts["block_elements"], ty.block_elements(), "{name}");
        assert_eq!(facts["block_bytes"], ty.block_bytes(), "{name}");
        check(&tensors, ty, &format!("{name}.data"), &format!("{name}.f32"));
        check(&tensors, ty, &format!("{name}.random.data"), &format!("{name}.random.f32"));
    }
}

#[test]
fn lengths_must_fit() {
    let mut out = [0.0; 64];
    assert!(dequantize(TensorType::Q8_0, &[0; 68], &mut out).is_ok());
    for bytes in [0, 34, 67, 69] {
        let result = dequantize(TensorType::Q8_0, &vec![0; bytes], &mut out);
        assert!(matches!(result, Err(FormatError::DequantizeLength { .. })));
    }
    let result = dequantize(TensorType::Q4_K, &[0; 36], &mut out);
    assert!(matches!(result, Err(FormatError::DequantizeLength { .. })));
    let result = dequantize(TensorType::Bool, &[0; 64], &mut out);
    assert!(matches!(result, Err(FormatError::NotDequantizable { .. })));
    assert!(dequantize(TensorType::Q4_K, &[], &mut []).is_ok());
}

proptest! {
    #[test]
    fn any_bytes_decode_without_panic(
        ty in prop::sample::select(TensorType::all()),
        seed in prop::collection::vec(any::<u8>(), 512),
    ) {
        if can_dequantize(ty) {
            let blocks = seed.len() / ty.block_bytes();
            let mut out = vec![0.0; blocks * ty.block_elements()];
            prop_assert!(dequantize(ty, &seed[..blocks * ty.block_bytes()], &mut out).is_ok());
        }
    }
}
