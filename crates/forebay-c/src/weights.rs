//! Weights by number, with descriptions in the form that C and DLPack need.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::{Arc, LazyLock, Mutex};

use forebay_dlpack::{DataType, data_type, strides};
use forebay_engine::load::{HeldTensor, HeldWeights};

use crate::registry::{lock, next_number};
use crate::status::{self, Failure};

/// Loaded weights. This value owns their memory.
pub struct Weights {
    pub held: HeldWeights,
    tensors: Vec<Described>,
}

// A consumer may delete a managed tensor on any thread.
const _: () = {
    const fn crosses_threads<T: Send + Sync>() {}
    crosses_threads::<Weights>();
};

/// A tensor with its description.
pub struct Described {
    address: u64,
    /// Name, terminated by a zero byte.
    pub name: CString,
    pub type_name: CString,
    /// Number of elements in each dimension, outermost first.
    pub shape: Box<[i64]>,
    pub data_type: DataType,
    /// The shape in elements of `data_type`. Rows of blocks become rows of bytes.
    pub dlpack_shape: Box<[i64]>,
    /// Strides, or `None` if entries of the outermost dimension are not a whole number of elements apart.
    strides: Option<Box<[i64]>>,
}

static WEIGHTS: LazyLock<Mutex<HashMap<u64, Arc<Weights>>>> = LazyLock::new(Mutex::default);

pub fn add(held: HeldWeights) -> u64 {
    let tensors = held.tensors.iter().map(Described::new).collect();
    let number = next_number();
    lock(&WEIGHTS).insert(number, Arc::new(Weights { held, tensors }));
    number
}

pub fn find(number: u64) -> Result<Arc<Weights>, Failure> {
    lock(&WEIGHTS).get(&number).cloned().ok_or_else(|| bad(number))
}

/// Removes a number. The memory is released with the last reference to the weights.
pub fn remove(number: u64) -> Result<(), Failure> {
    // The drop is not under the lock, because releasing memory may wait for a GPU.
    let removed = lock(&WEIGHTS).remove(&number);
    removed.map(drop).ok_or_else(|| bad(number))
}

fn bad(number: u64) -> Failure {
    let words = format!("there are no weights {number}: they were freed or never loaded");
    Failure::new(status::BAD_WEIGHTS, words)
}

impl Weights {
    pub fn tensor(&self, index: usize) -> Result<&Described, Failure> {
        self.tensors.get(index).ok_or_else(|| {
            let words = format!("there is no tensor {index}: there are {}", self.tensors.len());
            Failure::new(status::UNKNOWN_TENSOR, words)
        })
    }
}

impl Described {
    fn new(tensor: &HeldTensor) -> Described {
        let HeldTensor { info, ty, address, stride, .. } = tensor;
        // A name in a JSON file may contain a zero byte. For C the name ends there.
        let text = |text: &str| {
            let bytes: Vec<u8> = text.bytes().take_while(|&byte| byte != 0).collect();
            CString::new(bytes).unwrap_or_default()
        };
        let data_type = data_type(*ty);
        let shape: Box<[i64]> = info.shape.iter().map(|&dim| dim as i64).collect();
        let mut dlpack_shape = shape.clone();
        if let (true, Some(last)) = (ty.is_quantized(), dlpack_shape.last_mut()) {
            *last = ty.row_bytes(*last as u64).unwrap_or(0) as i64;
        }
        let strides = strides(&dlpack_shape, *stride, u64::from(data_type.bits) / 8);
        Described {
            address: *address,
            name: text(&info.name),
            type_name: text(ty.name()),
            shape,
            data_type,
            dlpack_shape,
            strides,
        }
    }

    pub fn data(&self) -> *mut c_void {
        // On the host, the loader has exposed the provenance of this memory. On a GPU, the address is the device's.
        std::ptr::with_exposed_provenance_mut(self.address as usize)
    }

    pub fn dlpack_strides(&self) -> Result<&[i64], Failure> {
        self.strides.as_deref().ok_or_else(|| {
            Failure::new(status::BAD_FILES, "its entries are no whole number of elements apart")
        })
    }
}
