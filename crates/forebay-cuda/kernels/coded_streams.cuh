// What the decoders of GDeflate and Zstandard share: descriptions of chunks, and lanes of a warp.
#pragma once
#include "common.cuh"

#define WARPS 4
#define ALL (~0u)

static constexpr u32 CHUNK_BYTES = 4 << 20;

__device__ __forceinline__ int lane_of() { return threadIdx.x & 31; }

// A chunk: a stream of `bytes` bytes, `at` bytes behind the first, and its `size` bytes after decoding, `to` bytes behind the first. The
// tiles of GDeflate are numbered from `first_tile` on. A chunk without bytes has one tile for the check of its header.
struct Chunk {
    u64 at, to;
    u32 bytes, size;
    u64 first_tile;

    // Whether the chunk lies within both buffers.
    __device__ __forceinline__ bool fits(u64 from_bytes, u64 out_bytes) const {
        if (size > CHUNK_BYTES || at > from_bytes || bytes > from_bytes - at || at % 4 != 0) return false;
        return to <= out_bytes && size <= out_bytes - to;
    }
};
