//! Tensors of loaded weights in the form of DLPack.

use std::ptr::null_mut;

use forebay_dlpack::{Description, Unversioned, Versioned};

use crate::status::{Failure, Status};
use crate::weights::{self, Weights};
use crate::{on_thread, out_parameters::put};

/// Returns the description of a tensor of the weights.
fn description(weights: &Weights, index: usize) -> Result<Description, Failure> {
    let it = weights.tensor(index)?;
    Ok(Description {
        data: it.data(),
        gpu: weights.held.device,
        data_type: it.data_type,
        shape: it.dlpack_shape.clone(),
        strides: it.dlpack_strides()?.into(),
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
        let given = description(&weights, index)?.versioned(weights);
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
        let given = description(&weights, index)?.unversioned(weights);
        // SAFETY: as promised.
        unsafe { put(managed, given, "managed") }
    })
}
