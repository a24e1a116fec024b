//! Decoding of the codecs `gdeflate` and `zstd`, as `docs/codec.md` describes.

use std::sync::Arc;

use crate::launch::Launch;
use crate::module::{Kernel, Modules};
use crate::{CopyStream, CudaError, DevicePtr, Gpu};

/// Modules and kernels of the two codecs.
const GDEFLATE: (&str, &str) = ("gdeflate", "decode_gdeflate");
const ZSTD: (&str, &str) = ("zstd", "decode_zstd");
/// Bytes of a tile of `gdeflate` after decoding. A warp decodes one.
const TILE: u64 = 1 << 16;
/// Most bytes of a stream after decoding.
const STREAM_BYTES: u32 = 4 << 20;
/// Warps of a block.
const WARPS: u64 = 4;

/// A stream in device memory, and where its bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CodedStream {
    /// Offset of the stream's first byte, a multiple of 4.
    pub at: u64,
    /// Bytes of the stream.
    pub bytes: u32,
    /// Offset of the first byte after decoding.
    pub to: u64,
    /// Bytes after decoding, at most 4 MiB.
    pub decoded_bytes: u32,
}

impl CodedStream {
    /// Number of words of 64 bits with which kernels describe a stream.
    pub const WORDS: usize = 4;

    /// Replaces `words` by those that describe `streams` for [`CodedStreams::words`], and returns the number of tiles of all streams.
    ///
    /// # Panics
    /// Panics if a stream has more than 4 MiB after decoding, or an offset that is no multiple of 4.
    pub fn describe(streams: &[CodedStream], words: &mut Vec<u64>) -> u64 {
        words.clear();
        let mut tiles = 0;
        for stream in streams {
            let CodedStream { at, bytes, to, decoded_bytes } = *stream;
            assert!(decoded_bytes <= STREAM_BYTES && at.is_multiple_of(4), "{stream:?}");
            words.extend([at, to, u64::from(bytes) | u64::from(decoded_bytes) << 32, tiles]);
            // The header of a stream without bytes is checked, too.
            tiles += u64::from(decoded_bytes).div_ceil(TILE).max(1);
        }
        tiles
    }
}

/// Streams of one codec that are decoded together.
#[derive(Clone, Copy)]
pub struct CodedStreams {
    /// Streams, aligned to 4 bytes, and the number of bytes there.
    pub from: DevicePtr<u8>,
    pub from_bytes: usize,
    /// Memory for what is decoded, and the number of bytes there. Places of streams may not overlap.
    pub to: DevicePtr<u8>,
    pub to_bytes: usize,
    /// Number of streams.
    pub count: usize,
    /// What [`CodedStream::describe`] gives `[count * CodedStream::WORDS]`.
    pub words: DevicePtr<u64>,
    /// Number of tiles of all streams, as [`CodedStream::describe`] returns it.
    pub tiles: u64,
}

impl CodedStreams {
    /// # Panics
    /// Panics if a buffer is too small or not aligned.
    fn launch(&self, kernel: Kernel, warps: u64) -> Launch {
        assert!(self.from.address().is_multiple_of(4), "streams are aligned to 4 bytes");
        let blocks = u32::try_from(warps.div_ceil(WARPS)).expect("a grid of 32 bits");
        Launch::new(kernel, (blocks, 1, 1), (32 * WARPS as u32, 1, 1))
            .ptr(self.from, self.from_bytes)
            .u64(self.from_bytes as u64)
            .ptr(self.to, self.to_bytes)
            .u64(self.to_bytes as u64)
            .ptr(self.words, self.count * CodedStream::WORDS)
            .int(self.count)
    }

    fn gdeflate(&self, kernel: Kernel, damaged: DevicePtr<u32>) -> Launch {
        self.launch(kernel, self.tiles).u64(self.tiles).ptr(damaged, self.count)
    }

    fn zstd(&self, kernel: Kernel, damaged: DevicePtr<u32>) -> Launch {
        self.launch(kernel, self.count as u64).ptr(damaged, self.count)
    }
}

impl Gpu {
    /// Decodes streams of codec `gdeflate`. Sets the word of each damaged one in `damaged` `[streams.count]` to 1, and leaves the others. What is
    /// decoded from a damaged stream is undefined, but nothing outside of its place is written.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small or not aligned.
    pub fn decode_gdeflate(
        &self,
        streams: &CodedStreams,
        damaged: DevicePtr<u32>,
    ) -> Result<(), CudaError> {
        streams.gdeflate(self.kernel(GDEFLATE.0, GDEFLATE.1)?, damaged).run(self)
    }

    /// Decodes streams of codec `zstd` in the same way as [`Gpu::decode_gdeflate`]. Checksums of frames are not verified.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small or not aligned.
    pub fn decode_zstd(
        &self,
        streams: &CodedStreams,
        damaged: DevicePtr<u32>,
    ) -> Result<(), CudaError> {
        streams.zstd(self.kernel(ZSTD.0, ZSTD.1)?, damaged).run(self)
    }

    /// Loads the kernel that decodes streams of codec `gdeflate`.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn gdeflate_decoder(&self) -> Result<GdeflateDecoder, CudaError> {
        let kernel = self.kernel(GDEFLATE.0, GDEFLATE.1)?;
        Ok(GdeflateDecoder { kernel, _modules: Arc::clone(&self.modules) })
    }
}

/// Decodes streams of codec `gdeflate` behind the copies that bring them. Several threads may use it at the same time.
pub struct GdeflateDecoder {
    kernel: Kernel,
    _modules: Arc<Modules>,
}

impl GdeflateDecoder {
    /// Does the same as [`Gpu::decode_gdeflate`] when the copies that `copies` has started are done.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics like [`Gpu::decode_gdeflate`].
    pub fn decode(
        &self,
        copies: &CopyStream,
        streams: &CodedStreams,
        damaged: DevicePtr<u32>,
    ) -> Result<(), CudaError> {
        streams.gdeflate(self.kernel, damaged).run_behind(copies)
    }
}
