//! Look-up of rows of the embedding table, and decoding of whole tensors.

use forebay_format::TensorType;

use super::weights::{modules_of, weight_alignment};
use crate::launch::Launch;
use crate::{CopyStream, CudaError, DevicePtr, Gpu};

const THREADS: usize = 64;
/// Number of elements that one thread decodes.
const GROUP: usize = 32;
const TOKENS_MAX: usize = 65_535;

/// An embedding table `[vocabulary, hidden]`, in the format of the file.
#[derive(Clone, Copy)]
pub struct EmbeddingTable {
    pub ty: TensorType,
    /// Device memory, or host memory that the GPU can read, aligned as [`weight_alignment`] requires. Kernels may read
    /// up to 15 bytes before the first row and after the last.
    pub data: DevicePtr<u8>,
    pub vocabulary: usize,
    pub hidden: usize,
}

impl Gpu {
    /// Decodes the rows of `ids [tokens]`, times `factor`, into `out [tokens, hidden]`. An id outside the vocabulary
    /// gives NaN.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small, the type has no kernels, a row is not a whole number of blocks, the table is
    /// not aligned, or there are more than 65,535 tokens.
    pub fn embed(
        &self,
        table: &EmbeddingTable,
        ids: DevicePtr<u32>,
        out: DevicePtr<f32>,
        tokens: usize,
        factor: f32,
    ) -> Result<(), CudaError> {
        let EmbeddingTable { ty, data, vocabulary, hidden } = *table;
        assert!(hidden.is_multiple_of(ty.block_elements()), "rows are whole blocks");
        let alignment = weight_alignment(ty) as u64;
        assert!(data.address().is_multiple_of(alignment), "a table of {ty} is not aligned");
        assert!(tokens <= TOKENS_MAX, "embed: {tokens} tokens");
        let row_bytes = hidden / ty.block_elements() * ty.block_bytes();
        let grid = (hidden.div_ceil(GROUP * THREADS) as u32, tokens as u32, 1);
        let kernel = self.kernel(modules_of(ty).embedding, "embed")?;
        Launch::new(kernel, grid, (THREADS as u32, 1, 1))
            .ptr(data, vocabulary * row_bytes)
            .ptr(ids, tokens)
            .ptr(out, tokens * hidden)
            .int(hidden)
            .int(vocabulary)
            .u64(row_bytes as u64)
            .float(factor)
            .run(self)
    }
}

impl Gpu {
    /// Decodes `elements` weights, whole blocks of type `ty`, to floats of type `to` at `out`, when the work that `copies` has queued is done. `out` is aligned to
    /// 16 bytes.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small or not aligned, if the type has no kernels, or if `to` is not F32, F16 or BF16.
    pub fn expand(
        &self,
        copies: &CopyStream,
        ty: TensorType,
        weights: DevicePtr<u8>,
        to: TensorType,
        out: DevicePtr<u8>,
        elements: usize,
    ) -> Result<(), CudaError> {
        let number = match to {
            TensorType::F32 => 0,
            TensorType::F16 => 1,
            TensorType::BF16 => 2,
            to => panic!("weights do not become {to}"),
        };
        assert!(elements.is_multiple_of(ty.block_elements()), "weights are whole blocks");
        assert!(
            weights.address().is_multiple_of(weight_alignment(ty) as u64),
            "{ty} is not aligned"
        );
        assert!(out.address().is_multiple_of(16), "floats are aligned to 16 bytes");
        out.check(elements * to.block_bytes());
        let blocks = elements.div_ceil(GROUP * THREADS) as u32;
        let kernel = self.kernel(modules_of(ty).embedding, "expand")?;
        Launch::new(kernel, (blocks, 1, 1), (THREADS as u32, 1, 1))
            .ptr(weights, elements / ty.block_elements() * ty.block_bytes())
            .ptr(out, elements * to.block_bytes())
            .int(elements)
            .int(number)
            .run_behind(copies)
    }
}
