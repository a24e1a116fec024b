//! Fuzzes whole safetensors files. Every accepted tensor must lie inside the file.

#![no_main]

use forebay_format::parse_safetensors_bytes;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    forebay_fuzz::bounded(data, |data| {
        let Ok(header) = parse_safetensors_bytes(data) else { return };
        for tensor in &header.tensors {
            let (start, length) = (tensor.extent.offset as usize, tensor.extent.length as usize);
            assert!(data.get(start..start + length).is_some());
        }
    });
});
