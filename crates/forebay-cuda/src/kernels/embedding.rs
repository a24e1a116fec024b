//! Looking up rows of the embedding table.

use forebay_format::TensorType;

use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

const THREADS: usize = 256;
const TOKENS_MAX: usize = 65_535;

/// An embedding table `[vocabulary, hidden]`, as it lies in the file.
#[derive(Clone, Copy)]
pub struct EmbeddingTable {
    pub ty: TensorType,
    /// Device memory, or host memory that the GPU can read; even, for F32 a multiple of 4.
    pub data: DevicePtr<u8>,
    pub vocabulary: usize,
    pub hidden: usize,
}

impl EmbeddingTable {
    /// Whether rows of this type can be looked up on the device.
    pub fn supports(ty: TensorType) -> bool {
        kernel_of(ty).is_some()
    }
}

fn kernel_of(ty: TensorType) -> Option<&'static str> {
    Some(match ty {
        TensorType::F32 => "embed_f32",
        TensorType::F16 => "embed_f16",
        TensorType::BF16 => "embed_bf16",
        TensorType::Q4_0 => "embed_q4_0",
        TensorType::Q4_1 => "embed_q4_1",
        TensorType::Q5_0 => "embed_q5_0",
        TensorType::Q5_1 => "embed_q5_1",
        TensorType::Q8_0 => "embed_q8_0",
        TensorType::Q2_K => "embed_q2_k",
        TensorType::Q3_K => "embed_q3_k",
        TensorType::Q4_K => "embed_q4_k",
        TensorType::Q5_K => "embed_q5_k",
        TensorType::Q6_K => "embed_q6_k",
        TensorType::IQ4_NL => "embed_iq4_nl",
        TensorType::IQ4_XS => "embed_iq4_xs",
        TensorType::MXFP4 => "embed_mxfp4",
        _ => return None,
    })
}

impl Gpu {
    /// Decodes the rows of `ids [tokens]` into `out [tokens, hidden]`. An id outside of the vocabulary gives NaN.
    ///
    /// # Errors
    /// Whatever the driver says.
    ///
    /// # Panics
    /// When the type is not [supported](EmbeddingTable::supports), a row is no whole number of blocks, the table is
    /// not aligned, or there are more than 65,535 tokens.
    pub fn embed(
        &self,
        table: &EmbeddingTable,
        ids: DevicePtr<u32>,
        out: DevicePtr<f32>,
        tokens: usize,
    ) -> Result<(), CudaError> {
        let kernel = kernel_of(table.ty)
            .unwrap_or_else(|| panic!("no look-up of rows of type {}", table.ty));
        assert!(table.hidden.is_multiple_of(table.ty.block_elements()), "rows are whole blocks");
        let alignment = if table.ty == TensorType::F32 { 4 } else { 2 };
        assert!(table.data.address().is_multiple_of(alignment), "the table is not aligned");
        assert!(tokens <= TOKENS_MAX, "embed: {tokens} tokens");
        let grid = (table.hidden.div_ceil(THREADS) as u32, tokens as u32, 1);
        Launch::new(self.kernel("embedding", kernel)?, grid, (THREADS as u32, 1, 1))
            .ptr(table.data)
            .ptr(ids)
            .ptr(out)
            .int(table.hidden)
            .int(table.vocabulary)
            .run(self)
    }
}
