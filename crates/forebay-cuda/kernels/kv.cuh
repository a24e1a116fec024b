// The paged KV cache. A block holds KV_BLOCK positions of one sequence, for all layers of a group. A sequence's table
// gives the number of the block of the pool that holds positions 16n ... 16n + 15, or 0. Block 0 of every pool is
// the null block: it is all zeroes and never written.
//
// A block is one piece of memory. It contains the keys of the group's first layer, then its values, then the next
// layer's. A plane (the keys or the values of a layer) is [kv_heads, KV_BLOCK, stride] elements. f16 and f32 rows are
// padded with zeroes to a multiple of 8 elements. q8_0 rows are padded to 32 and hold bytes. q4_0 rows are padded to 32
// and hold two elements in a byte, the first in its low half. Quantised types have a half-float scale for every 32
// elements. The scales follow the elements of the plane: [kv_heads, KV_BLOCK, stride / 32]. All of these pieces are
// multiples of 16 bytes long.
//
// If the values are the first elements of the keys, both planes are the same memory.
//
// The last blocks of a pool may lie elsewhere, in host memory. There, the blocks of each layer follow each other.
#pragma once
#include <cuda_fp16.h>
#include "common.cuh"

// Positions of a block.
static constexpr int KV_BLOCK = 16;

struct KvF16 {
    typedef __half Element;
    static constexpr int PADDING = 8, BITS = 16;
};
struct KvF32 {
    typedef float Element;
    static constexpr int PADDING = 8, BITS = 32;
};
struct KvQ8 {
    typedef i8 Element;
    static constexpr int PADDING = 32, BITS = 8;
};
struct KvQ4 {
    typedef u8 Element;
    static constexpr int PADDING = 32, BITS = 4;
};

// KV_F16, KV_F32, KV_Q8_0 or KV_Q4_0 selects the type of a module.
#if defined(KV_F32)
typedef KvF32 KvType;
#elif defined(KV_Q8_0)
typedef KvQ8 KvType;
#elif defined(KV_Q4_0)
typedef KvQ4 KvType;
#else
typedef KvF16 KvType;
#endif

// Returns the number of elements from one row to the next.
template <class T> __device__ inline int kv_stride(int dim) {
    return (dim + T::PADDING - 1) / T::PADDING * T::PADDING;
}

// Rows of one head in one block. Row i is position 16n + i.
template <class T> struct KvBlock {
    u8 *rows;
    // `scales` is the distance from the rows to their scales.
    int stride, scales;

    __device__ inline typename T::Element *row(int i) const {
        return (typename T::Element *)rows + i * (T::BITS == 4 ? stride / 2 : stride);
    }
    // Only for types that have scales.
    __device__ inline __half *row_scales(int i) const { return (__half *)(rows + scales) + i * (stride / 32); }
};

// Where the blocks of a layer are. Block n is n * `bytes` behind block 0, or n * `bytes_elsewhere` + `elsewhere` if it is
// block `own` or a later one.
struct KvPlaces {
    u32 bytes, own, bytes_elsewhere;
    u64 elsewhere;

    __device__ inline u64 operator[](u32 number) const {
        return number < own ? (u64)number * bytes : (u64)number * bytes_elsewhere + elsewhere;
    }
};

// Rows of one head in all blocks.
template <class T> struct KvHead {
    u8 *rows;  // in block 0
    KvPlaces places;
    int stride, scales;

    __device__ inline KvBlock<T> block(u32 number) const { return KvBlock<T>{rows + places[number], stride, scales}; }
};

// Returns the rows of head `head` of the plane at `plane` in block 0.
template <class T>
__device__ inline KvHead<T> kv_head(u8 *plane, const KvPlaces &places, int dim, int head, int heads) {
    const int stride = kv_stride<T>(dim);
    const int head_bytes = KV_BLOCK * stride * T::BITS / 8, scale_bytes = KV_BLOCK * (stride / 32) * 2;
    return KvHead<T>{plane + head * head_bytes, places, stride, (heads - head) * head_bytes + head * scale_bytes};
}

// Kernel parameters for one layer of the cache, and for where the rows of a pass belong in it.
// - key_plane, value_plane: the planes in block 0
// - block_bytes, own_blocks, elsewhere_bytes, elsewhere: KvPlaces
// - tables [tables, table_stride]: block numbers. table_stride is a multiple of 4, and `tables` of 16 bytes.
// - table_of_row, positions: the table and the position of each row of the pass
#define KV_PARAMETERS                                                                                          \
    u8 *key_plane, u8 *value_plane, u32 block_bytes, u32 own_blocks, u32 elsewhere_bytes, u64 elsewhere,       \
        const u32 *tables, int table_stride, const u32 *table_of_row, const u32 *positions
#define KV_PLACES KvPlaces{block_bytes, own_blocks, elsewhere_bytes, elsewhere}
#define KV_ARGUMENTS key_plane, value_plane, KV_PLACES, tables, table_stride, table_of_row, positions

struct KvLayer {
    u8 *key_plane, *value_plane;
    KvPlaces places;
    const u32 *tables;
    int table_stride;
    const u32 *table_of_row, *positions;

    // Returns the table with this number.
    __device__ inline const u32 *table_at(u32 number) const { return tables + (size_t)number * table_stride; }
    // Returns the table of a row's sequence.
    __device__ inline const u32 *table(int row) const { return table_at(table_of_row[row]); }
    __device__ inline KvHead<KvType> keys_of(int dim_k, int head, int heads) const {
        return kv_head<KvType>(key_plane, places, dim_k, head, heads);
    }
    // Only the first `dim_v` elements of each row are values.
    __device__ inline KvHead<KvType> values_of(int dim_k, int dim_v, int head, int heads) const {
        return kv_head<KvType>(value_plane, places, value_plane == key_plane ? dim_k : dim_v, head, heads);
    }
};

// Returns element i of row `row` as f32.
template <class T> __device__ inline float kv_element(const KvBlock<T> &block, int row, int i) {
    if constexpr (T::BITS == 4)
        return __half2float(block.row_scales(row)[i / 32]) *
               (float)((block.row(row)[i / 2] >> i % 2 * 4 & 15) - 8);
    else if constexpr (T::BITS == 8)
        return __half2float(block.row_scales(row)[i / 32]) * (float)block.row(row)[i];
    else if constexpr (T::BITS == 16)
        return __half2float(block.row(row)[i]);
    else
        return block.row(row)[i];
}
