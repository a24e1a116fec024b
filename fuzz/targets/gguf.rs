//! Fuzzes whole GGUF files. Every accepted table entry must lie inside the file and must decode.

#![no_main]

use forebay_format::{can_dequantize, dequantize, parse_gguf_bytes};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    forebay_fuzz::bounded(data, |data| {
        let Ok(header) = parse_gguf_bytes(data) else { return };
        for (key, value) in header.metadata.iter() {
            // The reference must be the same, because a NaN does not equal itself.
            assert!(header.metadata.get(key).is_some_and(|found| std::ptr::eq(found, value)));
        }
        for tensor in &header.tensors {
            let (start, length) = (tensor.extent.offset as usize, tensor.extent.length as usize);
            let bytes = &data[start..start + length];
            if can_dequantize(tensor.ty) && length >= tensor.ty.block_bytes() {
                let mut values = vec![0.0; tensor.ty.block_elements()];
                dequantize(tensor.ty, &bytes[..tensor.ty.block_bytes()], &mut values)
                    .expect("one whole block");
            }
        }
    });
});
