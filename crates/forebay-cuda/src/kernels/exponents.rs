//! Decoding of weights whose exponents are coded, as `docs/codec.md` describes.

use std::ops::Range;
use std::sync::Arc;

use forebay_format::TensorType;

use crate::launch::Launch;
use crate::module::{Kernel, Modules};
use crate::{CopyStream, CudaError, DevicePtr, Gpu};

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

/// A container of codec `exponents` in device memory, and where its weights go. The caller has read its header, and checked
/// where its chunks lie: kernels do not.
#[derive(Clone, Copy)]
pub struct CodedContainer {
    pub ty: TensorType,
    /// The container, aligned to 4 bytes, and the number of its bytes.
    pub from: DevicePtr<u8>,
    pub bytes: usize,
    /// Memory for the weights, aligned to 16 bytes.
    pub to: DevicePtr<u8>,
    /// Number of weights, in whole blocks.
    pub weights: u64,
}

impl CodedContainer {
    /// Number of bytes that describe a container to kernels.
    pub const DESCRIPTION_BYTES: usize = 24;

    /// Writes the description of this container to `out`.
    ///
    /// # Panics
    /// Panics if `out` has another length.
    pub fn describe(&self, out: &mut [u8]) {
        describe([self.from.address(), self.to.address(), self.weights], out);
    }
}

/// A container like [`CodedContainer`], which is in one range of device memory and goes to another one. Both are known only when it is
/// decoded.
#[derive(Clone)]
pub struct ContainerInRange {
    pub ty: TensorType,
    /// The container in its range, from a multiple of 4.
    pub from: Range<usize>,
    /// Where the weights begin in the other range, a multiple of 16.
    pub to: u64,
    /// Number of weights, in whole blocks.
    pub weights: u64,
}

impl ContainerInRange {
    /// Writes the description of this container to `out`.
    ///
    /// # Panics
    /// Panics if `out` has another length than [`CodedContainer::DESCRIPTION_BYTES`].
    pub fn describe(&self, out: &mut [u8]) {
        describe([self.from.start as u64, self.to, self.weights], out);
    }

    fn at(&self, from: DevicePtr<u8>, to: DevicePtr<u8>) -> CodedContainer {
        CodedContainer {
            ty: self.ty,
            from: from.offset(self.from.start),
            bytes: self.from.len(),
            to: to.offset(self.to as usize),
            weights: self.weights,
        }
    }
}

fn describe(words: [u64; 3], out: &mut [u8]) {
    assert_eq!(out.len(), CodedContainer::DESCRIPTION_BYTES);
    for (bytes, word) in out.chunks_exact_mut(8).zip(words) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
}

/// Types of the weights in containers, with the kernels that decode them.
const CONTAINERS: [(TensorType, &str); 6] = [
    (TensorType::BF16, "decode_exponents_bf16_containers"),
    (TensorType::F16, "decode_exponents_f16_containers"),
    (TensorType::F8_E4M3, "decode_exponents_f8_e4m3_containers"),
    (TensorType::F8_E5M2, "decode_exponents_f8_e5m2_containers"),
    (TensorType::BF16_C2048, "decode_exponents_bf16_c2048_containers"),
    (TensorType::BF16_C256, "decode_exponents_bf16_c256_containers"),
];

/// Decodes containers behind the copies that bring them. Several threads may use it at the same time.
pub struct ContainerDecoder {
    kernels: Vec<(TensorType, Kernel)>,
    _modules: Arc<Modules>,
}

impl Gpu {
    /// Loads the kernels that decode containers.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn container_decoder(&self) -> Result<ContainerDecoder, CudaError> {
        let load = |(ty, name)| Ok((ty, self.kernel("exponents", name)?));
        let kernels = CONTAINERS.into_iter().map(load).collect::<Result<_, CudaError>>()?;
        Ok(ContainerDecoder { kernels, _modules: Arc::clone(&self.modules) })
    }
}

impl ContainerDecoder {
    /// Decodes containers of type `ty` when the copies that `copies` has started are done. `descriptions` are those of `containers`, in order. Sets
    /// the word at `flag` to 1 if one is damaged; its weights are then anything.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a container has another type, or a buffer that is too small or not aligned.
    pub fn decode(
        &self,
        copies: &CopyStream,
        ty: TensorType,
        containers: &[CodedContainer],
        descriptions: DevicePtr<u64>,
        flag: DevicePtr<u32>,
    ) -> Result<(), CudaError> {
        self.launch(copies, ty, containers, [DevicePtr::null(); 2], descriptions, flag)
    }

    /// Decodes containers of one range to another range, aligned to 16 bytes, as [`ContainerDecoder::decode`] does.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a container has another type, or a buffer that is too small or not aligned.
    #[expect(clippy::too_many_arguments, reason = "two ranges, and what is decoded")]
    pub fn decode_range(
        &self,
        copies: &CopyStream,
        ty: TensorType,
        containers: &[ContainerInRange],
        from: DevicePtr<u8>,
        to: DevicePtr<u8>,
        descriptions: DevicePtr<u64>,
        flag: DevicePtr<u32>,
    ) -> Result<(), CudaError> {
        let containers: Vec<_> = containers.iter().map(|of| of.at(from, to)).collect();
        self.launch(copies, ty, &containers, [from, to], descriptions, flag)
    }

    /// Checks containers, and decodes them. Descriptions count from the begins of ranges, or from null.
    fn launch(
        &self,
        copies: &CopyStream,
        ty: TensorType,
        containers: &[CodedContainer],
        [from, to]: [DevicePtr<u8>; 2],
        descriptions: DevicePtr<u64>,
        flag: DevicePtr<u32>,
    ) -> Result<(), CudaError> {
        let kernel = self.kernels.iter().find(|(of, _)| *of == ty).map(|(_, kernel)| *kernel);
        let kernel = kernel.unwrap_or_else(|| panic!("{ty} has no coded exponents"));
        for container in containers {
            let CodedContainer { from, bytes, to, weights, .. } = *container;
            from.check(bytes);
            to.check(ty.row_bytes(weights).expect("whole blocks") as usize);
            assert!(container.ty == ty && from.address().is_multiple_of(4));
            assert!(to.address().is_multiple_of(16), "weights are aligned to 16 bytes");
        }
        let most = containers.iter().map(|container| container.weights).max().unwrap_or(0);
        let blocks = most.div_ceil(CHUNK_WEIGHTS * WARPS as u64) as u32;
        let words = containers.len() * CodedContainer::DESCRIPTION_BYTES / 8;
        let grid = (blocks, containers.len() as u32, 1);
        let launch = Launch::new(kernel, grid, (32 * WARPS as u32, 1, 1));
        let launch = launch.ptr(descriptions, words).optional(from, 0).optional(to, 0);
        let mut launch = launch.ptr(flag, 1);
        for container in containers {
            launch = launch.owned(container.from.owner()).owned(container.to.owner());
        }
        launch.run_behind(copies)
    }
}
