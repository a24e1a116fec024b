//! Decoding of weights whose exponents are coded, as `docs/codec.md` describes.

use forebay_format::TensorType;

use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

/// Most weights of a chunk.
const CHUNK_WEIGHTS: u64 = 4096;
/// Bytes of the table of a tensor.
const TABLE_BYTES: usize = 21;
/// Warps of a block. Each decodes one chunk at a time.
const WARPS: usize = 4;

/// Coded weights of a tensor in device memory.
#[derive(Clone, Copy)]
pub struct CodedExponents {
    /// BF16, F16, F8_E4M3, F8_E5M2, or compact BF16.
    pub ty: TensorType,
    /// Number of weights, in whole blocks. All chunks but the last have 4096.
    pub weights: u64,
    /// The chunks, one after the other, aligned to 4 bytes.
    pub bytes: DevicePtr<u8>,
    /// Number of bytes of all chunks.
    pub byte_count: usize,
    /// Number of chunks.
    pub chunks: usize,
    /// Where each chunk begins, and the end of the last one `[chunks + 1]`, ascending multiples of 4 up to `byte_count`. Kernels do not
    /// check them.
    pub starts: DevicePtr<u32>,
    /// The table of the tensor.
    pub table: DevicePtr<u8>,
}

impl Gpu {
    /// Decodes weights to `out`, aligned to 16 bytes. Compact blocks come back as they are. Sets the word at `flag` to 1 if a chunk is damaged; `out` then holds anything.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if the type has no such codec, if the number of chunks is wrong, or if a buffer is too small or not aligned.
    pub fn decode_exponents(
        &self,
        coded: &CodedExponents,
        out: DevicePtr<u8>,
        flag: DevicePtr<u32>,
    ) -> Result<(), CudaError> {
        let name = match coded.ty {
            TensorType::BF16 => "decode_exponents_bf16",
            TensorType::F16 => "decode_exponents_f16",
            TensorType::F8_E4M3 => "decode_exponents_f8_e4m3",
            TensorType::F8_E5M2 => "decode_exponents_f8_e5m2",
            TensorType::BF16_C2048 => "decode_exponents_bf16_c2048",
            TensorType::BF16_C256 => "decode_exponents_bf16_c256",
            ty => panic!("{ty} has no coded exponents"),
        };
        let CodedExponents { weights, chunks, .. } = *coded;
        assert_eq!(chunks as u64, weights.div_ceil(CHUNK_WEIGHTS), "chunks of {weights} weights");
        let Some(bytes) = coded.ty.row_bytes(weights) else {
            panic!("{weights} weights are no whole blocks of {}", coded.ty);
        };
        assert!(out.address().is_multiple_of(16) && coded.bytes.address().is_multiple_of(4));
        let resident = 9 * self.multiprocessors() as usize;
        let blocks = chunks.div_ceil(WARPS).min(resident);
        let kernel = self.kernel("exponents", name)?;
        Launch::new(kernel, (blocks as u32, 1, 1), (32 * WARPS as u32, 1, 1))
            .ptr(coded.bytes, coded.byte_count)
            .ptr(coded.starts, chunks + 1)
            .ptr(coded.table, TABLE_BYTES)
            .ptr(out, bytes as usize)
            .int(chunks)
            .u64(weights)
            .ptr(flag, 1)
            .run(self)
    }
}
