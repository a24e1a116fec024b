//! What tests of loads of chosen tensors share.

use std::ops::ControlFlow;

use forebay_engine::load::LoadedTensor;

/// Progress that ends nothing.
pub fn going_on(_: u64, _: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Returns the bytes of a tensor in host memory.
pub fn bytes(tensor: &LoadedTensor) -> &[u8] {
    if tensor.bytes == 0 {
        return &[];
    }
    let first = std::ptr::with_exposed_provenance(tensor.address as usize);
    // SAFETY: the loader has exposed this memory, which has so many bytes and lives as long as the tensor.
    unsafe { std::slice::from_raw_parts(first, tensor.bytes as usize) }
}
