//! Decoding of compact BF16 to BF16.

use forebay_format::TensorType;

use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

/// Number of threads of a block; the same as in the kernel.
const THREADS: usize = 256;
/// Number of weights of a thread.
const EIGHT: usize = 8;
/// Most bytes of the workspace of [`Gpu::expand_compact`].
const WORKSPACE_BYTES: usize = 64 << 20;

impl Gpu {
    /// Decodes `blocks` blocks of compact type `ty` from `from` to BF16 at `to`, which may not overlap. Both are aligned to 16 bytes,
    /// `from` to 8 for [`TensorType::BF16_C256`].
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if the type is not compact, or if a buffer is too small or not aligned.
    pub fn decode_compact(
        &self,
        ty: TensorType,
        from: DevicePtr<u8>,
        to: DevicePtr<u8>,
        blocks: usize,
    ) -> Result<(), CudaError> {
        let (name, alignment) = match ty {
            TensorType::BF16_C2048 => ("decode_bf16_c2048", 16),
            TensorType::BF16_C256 => ("decode_bf16_c256", 8),
            ty => panic!("{ty} is not compact"),
        };
        let aligned = from.address().is_multiple_of(alignment) && to.address().is_multiple_of(16);
        assert!(aligned, "blocks of {ty} are not aligned");
        if blocks == 0 {
            return Ok(());
        }
        let eights = blocks * ty.block_elements() / EIGHT;
        let resident = 8 * self.multiprocessors() as usize;
        let grid = eights.div_ceil(THREADS).min(resident);
        Launch::new(self.kernel("compact", name)?, (grid as u32, 1, 1), (THREADS as u32, 1, 1))
            .ptr(from, blocks * ty.block_bytes())
            .ptr(to, blocks * plain_bytes(ty))
            .u64(eights as u64)
            .run(self)
    }

    /// Decodes `blocks` blocks of compact type `ty` to BF16 in the same memory: before, the blocks end where the BF16 weights end afterwards.
    ///
    /// A launch decodes as many blocks as fit before the first one that is still to be read. The rest gets smaller by a quarter each time.
    /// The last blocks, which fit into `workspace`, are moved there first.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics in the cases of [`Gpu::decode_compact`], and if `workspace` has no room for all blocks nor for a few; see
    /// [`compact_workspace_bytes`].
    pub fn expand_compact(
        &self,
        ty: TensorType,
        memory: DevicePtr<u8>,
        blocks: usize,
        workspace: DevicePtr<u8>,
    ) -> Result<(), CudaError> {
        let (compact, plain) = (ty.block_bytes(), plain_bytes(ty));
        let in_workspace = blocks.min(workspace.len() / compact);
        let always_goes_on = in_workspace * (plain - compact) >= plain;
        assert!(
            in_workspace == blocks || always_goes_on,
            "{in_workspace} blocks fit into the workspace"
        );
        // Where the blocks begin.
        let first = blocks * (plain - compact);
        let mut done = 0;
        while blocks - done > in_workspace {
            let end = (first + done * compact) / plain;
            let from = memory.offset(first + done * compact);
            self.decode_compact(ty, from, memory.offset(done * plain), end - done)?;
            done = end;
        }
        let rest = blocks - done;
        self.copy(memory.offset(first + done * compact), workspace, rest * compact)?;
        self.decode_compact(ty, workspace, memory.offset(done * plain), rest)
    }
}

/// Returns the bytes of the weights of a block in BF16.
fn plain_bytes(ty: TensorType) -> usize {
    2 * ty.block_elements()
}

/// Returns the bytes of the workspace with which [`Gpu::expand_compact`] decodes `blocks` blocks in few launches.
pub fn compact_workspace_bytes(ty: TensorType, blocks: usize) -> usize {
    blocks.min(WORKSPACE_BYTES / ty.block_bytes()) * ty.block_bytes()
}
