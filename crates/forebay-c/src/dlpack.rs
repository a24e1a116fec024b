//! Tensors in the form of DLPack, which libraries use to pass tensors to each other. The structures are those of its
//! public header, version 1.1 (github.com/dmlc/dlpack, `include/dlpack/dlpack.h`). Every consumer of major version 1
//! can read them.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::Arc;

use forebay_format::TensorType;

use crate::status::{Failure, Status};
use crate::weights::{self, Weights};
use crate::{on_thread, out_parameters::put};

const VERSION: PackVersion = PackVersion { major: 1, minor: 1 };
const CPU: i32 = 1;
const CUDA: i32 = 2;

const INT: u8 = 0;
const UINT: u8 = 1;
const FLOAT: u8 = 2;
const BFLOAT: u8 = 4;
const BOOL: u8 = 6;
const FLOAT8_E4M3FN: u8 = 10;
const FLOAT8_E5M2: u8 = 12;
const FLOAT8_E8M0FNU: u8 = 14;

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataType {
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
}

/// `DLDevice`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    kind: i32,
    id: i32,
}

/// `DLTensor`.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    rank: i32,
    data_type: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLPackVersion`.
#[repr(C)]
#[derive(Clone, Copy)]
struct PackVersion {
    major: u32,
    minor: u32,
}

/// `DLManagedTensor`.
#[repr(C)]
pub struct Unversioned {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Unversioned)>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
pub struct Versioned {
    version: PackVersion,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    flags: u64,
    tensor: Tensor,
}

// The C test asserts the same sizes of the header's structures.
const _: () = assert!(size_of::<*mut c_void>() != 8 || size_of::<Tensor>() == 48);
const _: () = assert!(size_of::<*mut c_void>() != 8 || size_of::<Unversioned>() == 64);
const _: () = assert!(size_of::<*mut c_void>() != 8 || size_of::<Versioned>() == 80);

/// Returns the DLPack type of elements. Elements that share a block have none, so their type is that of bytes.
pub fn data_type(ty: TensorType) -> DataType {
    let code = match ty {
        TensorType::F64 | TensorType::F32 | TensorType::F16 => FLOAT,
        TensorType::BF16 => BFLOAT,
        TensorType::F8_E4M3 => FLOAT8_E4M3FN,
        TensorType::F8_E5M2 => FLOAT8_E5M2,
        TensorType::F8_E8M0 => FLOAT8_E8M0FNU,
        TensorType::I8 | TensorType::I16 | TensorType::I32 | TensorType::I64 => INT,
        TensorType::Bool => BOOL,
        _ => UINT,
    };
    let bits = if ty.is_quantized() { 8 } else { 8 * ty.block_bytes() as u8 };
    DataType { code, bits, lanes: 1 }
}

/// A managed tensor with the weights that keep its memory alive. The weights also own its shape and strides.
#[repr(C)]
struct Holder<T> {
    managed: T,
    _weights: Arc<Weights>,
}

/// Moves a holder to the heap and hands it to the caller of the API. `set` stores its address in the managed tensor.
fn give<T>(managed: T, weights: Arc<Weights>, set: impl FnOnce(&mut T, *mut c_void)) -> *mut T {
    let holder = Box::into_raw(Box::new(Holder { managed, _weights: weights }));
    // SAFETY: the holder was created above, and nothing else refers to it yet.
    let managed = unsafe { &mut (*holder).managed };
    set(managed, holder.cast());
    managed
}

/// # Safety
/// `context` is the address that [`give`] passed for a managed tensor of type `T`, and is passed here only once.
unsafe fn take_back<T>(context: *mut c_void) {
    // A panic must not cross the border, and there is no caller to report it to.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: as promised.
        drop(unsafe { Box::from_raw(context.cast::<Holder<T>>()) });
    }));
}

/// # Safety
/// `managed` is null, or came from `forebay_tensor_dlpack` and is deleted once.
unsafe extern "C" fn delete_versioned(managed: *mut Versioned) {
    if !managed.is_null() {
        // SAFETY: as promised. `context` holds the address of the whole holder.
        unsafe { take_back::<Versioned>((*managed).context) };
    }
}

/// # Safety
/// `managed` is null, or came from `forebay_tensor_dlpack_unversioned` and is deleted once.
unsafe extern "C" fn delete_unversioned(managed: *mut Unversioned) {
    if !managed.is_null() {
        // SAFETY: as promised. `context` holds the address of the whole holder.
        unsafe { take_back::<Unversioned>((*managed).context) };
    }
}

/// Returns an unmanaged tensor of the weights.
fn tensor(weights: &Weights, index: usize) -> Result<Tensor, Failure> {
    let it = weights.tensor(index)?;
    let kind = if weights.held.device.is_some() { CUDA } else { CPU };
    let device = Device { kind, id: weights.held.device.unwrap_or(0) as i32 };
    // Consumers do not write to the arrays, but the C structure has only a pointer to mutable memory.
    let array = |values: &[i64]| match values.is_empty() {
        true => null_mut(),
        false => values.as_ptr().cast_mut(),
    };
    Ok(Tensor {
        data: it.data(),
        device,
        rank: it.dlpack_shape.len() as i32,
        data_type: it.data_type,
        shape: array(&it.dlpack_shape),
        strides: array(it.dlpack_strides()?),
        byte_offset: 0,
    })
}

/// # Safety
/// `managed` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_tensor_dlpack(
    weights: u64,
    index: usize,
    managed: *mut *mut Versioned,
) -> Status {
    on_thread(|| {
        // SAFETY: as promised.
        unsafe { put(managed, null_mut(), "managed") }?;
        let weights = weights::find(weights)?;
        let tensor = tensor(&weights, index)?;
        let deleter: unsafe extern "C" fn(*mut Versioned) = delete_versioned;
        let (version, context, deleter) = (VERSION, null_mut(), Some(deleter));
        let value = Versioned { version, context, deleter, flags: 0, tensor };
        let given = give(value, weights, |value, context| value.context = context);
        // SAFETY: as promised.
        unsafe { put(managed, given, "managed") }
    })
}

/// # Safety
/// `managed` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_tensor_dlpack_unversioned(
    weights: u64,
    index: usize,
    managed: *mut *mut Unversioned,
) -> Status {
    on_thread(|| {
        // SAFETY: as promised.
        unsafe { put(managed, null_mut(), "managed") }?;
        let weights = weights::find(weights)?;
        let tensor = tensor(&weights, index)?;
        let deleter: unsafe extern "C" fn(*mut Unversioned) = delete_unversioned;
        let value = Unversioned { tensor, context: null_mut(), deleter: Some(deleter) };
        let given = give(value, weights, |value, context| value.context = context);
        // SAFETY: as promised.
        unsafe { put(managed, given, "managed") }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_has_a_name_and_its_width() {
        let of = |ty| {
            let DataType { code, bits, lanes } = data_type(ty);
            (code, bits, lanes)
        };
        assert_eq!(of(TensorType::BF16), (4, 16, 1));
        assert_eq!(of(TensorType::F16), (2, 16, 1));
        assert_eq!(of(TensorType::F64), (2, 64, 1));
        assert_eq!(of(TensorType::I64), (0, 64, 1));
        assert_eq!(of(TensorType::U32), (1, 32, 1));
        assert_eq!(of(TensorType::Bool), (6, 8, 1));
        assert_eq!(of(TensorType::F8_E4M3), (10, 8, 1));
        assert_eq!(of(TensorType::F8_E5M2), (12, 8, 1));
        assert_eq!(of(TensorType::F8_E8M0), (14, 8, 1));
        for &ty in TensorType::all().iter().filter(|ty| ty.is_quantized()) {
            assert_eq!(of(ty), (1, 8, 1), "{ty}");
        }
    }
}
