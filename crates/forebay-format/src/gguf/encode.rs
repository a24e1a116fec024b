//! Encodes the header of a GGUF file, which `parse` reads.

use super::MAGIC;
use super::metadata::GgufMetadata;
use super::value::{Array, Value};
use crate::TensorInfo;

/// Returns everything before the padding in front of the tensor data. Extents must count from the
/// start of the data section. The caller must refuse types that have no GGUF number.
pub fn header_bytes(metadata: &GgufMetadata, tensors: &[TensorInfo]) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend(metadata.version.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata.iter() {
        put_string(&mut out, key.as_bytes());
        out.extend((value.value_type() as u32).to_le_bytes());
        put_value(&mut out, value);
    }
    for tensor in tensors {
        put_string(&mut out, tensor.name.as_bytes());
        out.extend((tensor.shape.len() as u32).to_le_bytes());
        // The file stores the contiguous dimension first.
        tensor.shape.iter().rev().for_each(|dim| out.extend(dim.to_le_bytes()));
        out.extend(tensor.ty.ggml_id().unwrap_or(u32::MAX).to_le_bytes());
        out.extend(tensor.extent.offset.to_le_bytes());
    }
    out
}

fn put_string(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend((bytes.len() as u64).to_le_bytes());
    out.extend(bytes);
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U8(value) => out.extend(value.to_le_bytes()),
        Value::I8(value) => out.extend(value.to_le_bytes()),
        Value::U16(value) => out.extend(value.to_le_bytes()),
        Value::I16(value) => out.extend(value.to_le_bytes()),
        Value::U32(value) => out.extend(value.to_le_bytes()),
        Value::I32(value) => out.extend(value.to_le_bytes()),
        Value::U64(value) => out.extend(value.to_le_bytes()),
        Value::I64(value) => out.extend(value.to_le_bytes()),
        Value::F32(value) => out.extend(value.to_le_bytes()),
        Value::F64(value) => out.extend(value.to_le_bytes()),
        Value::Bool(value) => out.push(u8::from(*value)),
        Value::String(bytes) => put_string(out, bytes),
        Value::Array(array) => put_array(out, array),
    }
}

fn put_array(out: &mut Vec<u8>, array: &Array) {
    out.extend((array.element_type() as u32).to_le_bytes());
    out.extend((array.len() as u64).to_le_bytes());
    match array {
        Array::U8(values) => out.extend(values),
        Array::I8(values) => out.extend(values.iter().flat_map(|value| value.to_le_bytes())),
        Array::U16(values) => out.extend(values.iter().flat_map(|value| value.to_le_bytes())),
        Array::I16(values) => out.extend(values.iter().flat_map(|value| value.to_le_bytes())),
        Array::U32(values) => out.extend(values.iter().flat_map(|value| value.to_le_bytes())),
        Array::I32(values) => out.extend(values.iter().flat_map(|value| value.to_le_bytes())),
        Array::U64(values) => out.extend(values.iter().flat_map(|value| value.to_le_bytes())),
        Array::I64(values) => out.extend(values.iter().flat_map(|value| value.to_le_bytes())),
        Array::F32(values) => out.extend(values.iter().flat_map(|value| value.to_le_bytes())),
        Array::F64(values) => out.extend(values.iter().flat_map(|value| value.to_le_bytes())),
        Array::Bool(values) => out.extend(values.iter().map(|value| u8::from(*value))),
        Array::String(strings) => strings.iter().for_each(|string| put_string(out, string)),
        Array::Array(arrays) => arrays.iter().for_each(|array| put_array(out, array)),
    }
}
