//! Tensors in the form of DLPack, which libraries use to pass tensors to each other. The structures are those of its
//! public header, version 1.1 (github.com/dmlc/dlpack, `include/dlpack/dlpack.h`). Every consumer of major version 1
//! can read them.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;

use forebay_format::{StoredType, TensorType};

const VERSION: PackVersion = PackVersion { major: 1, minor: 1 };
const CPU: i32 = 1;
const CUDA: i32 = 2;

const INT: u8 = 0;
const UINT: u8 = 1;
const FLOAT: u8 = 2;
const BFLOAT: u8 = 4;
const COMPLEX: u8 = 5;
const BOOL: u8 = 6;
const FLOAT8_E4M3FN: u8 = 10;
const FLOAT8_E4M3FNUZ: u8 = 11;
const FLOAT8_E5M2: u8 = 12;
const FLOAT8_E5M2FNUZ: u8 = 13;
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

/// Returns the DLPack type of elements in a file. Elements that share bytes have none, so their type is that of bytes.
pub fn data_type_of_stored(ty: StoredType) -> DataType {
    let (code, bits) = match ty {
        StoredType::Tensor(ty) => return data_type(ty),
        StoredType::F4 | StoredType::F6E2M3 | StoredType::F6E3M2 => (UINT, 8),
        StoredType::F8E4M3Fnuz => (FLOAT8_E4M3FNUZ, 8),
        StoredType::F8E5M2Fnuz => (FLOAT8_E5M2FNUZ, 8),
        StoredType::C64 => (COMPLEX, 64),
    };
    DataType { code, bits, lanes: 1 }
}

/// Returns DLPack's numbers of a device: its kind and its number. `None` means host memory.
pub fn device_numbers(gpu: Option<usize>) -> (i32, i32) {
    (if gpu.is_some() { CUDA } else { CPU }, gpu.unwrap_or(0) as i32)
}

/// Returns the distances in elements: rows are contiguous, and entries of the outermost dimension are `outer` bytes
/// apart. Returns `None` if that is not a whole number of elements.
pub fn strides(shape: &[i64], outer: u64, element_bytes: u64) -> Option<Box<[i64]>> {
    let mut strides = vec![1; shape.len()];
    for at in (0..shape.len().saturating_sub(1)).rev() {
        strides[at] = strides[at + 1] * shape[at + 1];
    }
    let is_one = shape.first().is_none_or(|&outermost| outermost == 1);
    if let (false, Some(first)) = (is_one, strides.first_mut()) {
        if !outer.is_multiple_of(element_bytes) {
            return None;
        }
        *first = (outer / element_bytes) as i64;
    }
    Some(strides.into())
}

/// A tensor that is to be passed on.
#[derive(Clone, Debug)]
pub struct Description {
    /// Address of the first element.
    pub data: *mut c_void,
    /// Ordinal of the GPU. `None` means host memory.
    pub gpu: Option<usize>,
    pub data_type: DataType,
    pub shape: Box<[i64]>,
    /// Distances in elements.
    pub strides: Box<[i64]>,
}

/// A managed tensor with the arrays that it points to, and the owner of its memory.
#[repr(C)]
struct Holder<T, O> {
    managed: T,
    shape: Box<[i64]>,
    strides: Box<[i64]>,
    _owner: O,
}

impl Description {
    /// Returns a managed tensor that keeps `owner` until its deleter is called.
    pub fn versioned<O: Send + 'static>(self, owner: O) -> *mut Versioned {
        give(self, owner, |tensor| Versioned {
            version: VERSION,
            context: null_mut(),
            deleter: Some(delete_versioned::<O>),
            flags: 0,
            tensor,
        })
    }

    /// Returns a managed tensor in the form of DLPack before version 1.0.
    pub fn unversioned<O: Send + 'static>(self, owner: O) -> *mut Unversioned {
        give(self, owner, |tensor| Unversioned {
            tensor,
            context: null_mut(),
            deleter: Some(delete_unversioned::<O>),
        })
    }
}

/// Moves a tensor and its owner to the heap. The managed tensor is the first field, so its address is the holder's.
fn give<T, O>(description: Description, owner: O, managed: impl FnOnce(Tensor) -> T) -> *mut T {
    let Description { data, gpu, data_type, shape, strides } = description;
    let (kind, id) = device_numbers(gpu);
    // Consumers do not write to the arrays, but the C structure has only a pointer to mutable memory.
    let array = |values: &[i64]| match values.is_empty() {
        true => null_mut(),
        false => values.as_ptr().cast_mut(),
    };
    let tensor = Tensor {
        data,
        device: Device { kind, id },
        rank: shape.len() as i32,
        data_type,
        shape: array(&shape),
        strides: array(&strides),
        byte_offset: 0,
    };
    let holder = Holder { managed: managed(tensor), shape, strides, _owner: owner };
    Box::into_raw(Box::new(holder)).cast()
}

/// # Safety
/// `managed` is null, or the address of a holder of `T` and `O` that [`give`] returned, and is passed here only once.
unsafe fn take_back<T, O>(managed: *mut T) {
    if managed.is_null() {
        return;
    }
    // A panic must not cross the border, and there is no caller to report it to.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: as promised.
        let holder = unsafe { Box::from_raw(managed.cast::<Holder<T, O>>()) };
        // The arrays are freed with the tensor that points to them.
        let Holder { managed, shape, strides, _owner } = *holder;
        drop((managed, shape, strides));
    }));
}

/// # Safety
/// `managed` is null, or came from [`Description::versioned`] with an owner of type `O` and is deleted once.
unsafe extern "C" fn delete_versioned<O>(managed: *mut Versioned) {
    // SAFETY: as promised.
    unsafe { take_back::<Versioned, O>(managed) };
}

/// # Safety
/// `managed` is null, or came from [`Description::unversioned`] with an owner of type `O` and is deleted once.
unsafe extern "C" fn delete_unversioned<O>(managed: *mut Unversioned) {
    // SAFETY: as promised.
    unsafe { take_back::<Unversioned, O>(managed) };
}

/// Calls the deleter of a managed tensor that no consumer has taken.
///
/// # Safety
/// `managed` came from [`Description::versioned`] and was not deleted.
pub unsafe fn drop_versioned(managed: *mut Versioned) {
    // SAFETY: as promised, it is valid.
    if let Some(deleter) = unsafe { (*managed).deleter } {
        // SAFETY: as promised, it was not deleted.
        unsafe { deleter(managed) };
    }
}

/// Calls the deleter of a managed tensor that no consumer has taken.
///
/// # Safety
/// `managed` came from [`Description::unversioned`] and was not deleted.
pub unsafe fn drop_unversioned(managed: *mut Unversioned) {
    // SAFETY: as promised, it is valid.
    if let Some(deleter) = unsafe { (*managed).deleter } {
        // SAFETY: as promised, it was not deleted.
        unsafe { deleter(managed) };
    }
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

    #[test]
    fn strides_are_in_elements_and_only_the_outermost_may_have_gaps() {
        let of = |shape: &[i64], outer, bytes| strides(shape, outer, bytes).map(Vec::from);
        assert_eq!(of(&[], 2, 2), Some(vec![]));
        assert_eq!(of(&[5], 4, 4), Some(vec![1]));
        assert_eq!(of(&[4, 3, 2], 24, 4), Some(vec![6, 2, 1]));
        assert_eq!(of(&[4, 3, 2], 4096, 4), Some(vec![1024, 2, 1]));
        assert_eq!(of(&[4, 3, 2], 25, 4), None);
        assert_eq!(of(&[1, 3, 2], 25, 4), Some(vec![6, 2, 1]));
    }

    #[test]
    fn owners_live_until_the_deleter() {
        let owner = std::sync::Arc::new(());
        let description = Description {
            data: null_mut(),
            gpu: Some(3),
            data_type: data_type_of_stored(StoredType::C64),
            shape: [2, 3].into(),
            strides: [3, 1].into(),
        };
        let versioned = description.clone().versioned(owner.clone());
        let unversioned = description.unversioned(owner.clone());
        assert_eq!(std::sync::Arc::strong_count(&owner), 3);
        // SAFETY: both were made above.
        let (a, b) = unsafe { (&(*versioned).tensor, &(*unversioned).tensor) };
        for tensor in [a, b] {
            assert_eq!((tensor.rank, tensor.device.kind, tensor.device.id), (2, CUDA, 3));
            // SAFETY: the shape has two entries.
            assert_eq!(unsafe { std::slice::from_raw_parts(tensor.shape, 2) }, [2, 3]);
            assert_eq!((tensor.data_type.code, tensor.data_type.bits), (5, 64));
        }
        // SAFETY: both were made above and not deleted.
        unsafe { drop_versioned(versioned) };
        // SAFETY: as above.
        unsafe { drop_unversioned(unversioned) };
        assert_eq!(std::sync::Arc::strong_count(&owner), 1);
    }
}
