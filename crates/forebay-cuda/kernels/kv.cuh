// The KV cache of one layer: a sequence of rows for each key/value head. Position p is stored in row p % count: a layer
// with sliding-window attention keeps fewer rows than there are positions.
//
// A plane (the keys or the values) is [kv_heads, count, stride] elements. f16 and f32 rows are padded with zeroes to a
// multiple of 8 elements. q8_0 rows are padded to 32 and hold bytes. q4_0 rows are padded to 32 and hold two elements
// in a byte, the first in its low half. Quantised types have a half-float scale for every 32 elements. The scales
// follow the whole plane, at an address that is a multiple of 16: [kv_heads, count, stride / 32].
//
// If the values are the first elements of the keys, both planes are the same memory.
#pragma once
#include <cuda_fp16.h>
#include "common.cuh"

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

// Returns an offset that can be subtracted from every position that is at least `first`. It is a multiple of `count`,
// so rows stay the same. All positions of a window that begins at `first` are then below twice `count`.
__device__ inline int turns_before(int first, int count) { return first / count * count; }

// Rows of one head. Positions must be below twice `count`.
template <class T> struct KvRows {
    typename T::Element *rows;
    __half *scales;
    int stride, count;

    // Position modulo `count`, for a position below twice `count`: as unsigned numbers, the smaller of the position and
    // the position minus `count` is below `count`.
    __device__ inline size_t index(int position) const { return min((u32)position, (u32)(position - count)); }
    __device__ inline typename T::Element *row(int position) const {
        return rows + index(position) * (T::BITS == 4 ? stride / 2 : stride);
    }
    // Only for types that have scales.
    __device__ inline __half *row_scales(int position) const { return scales + index(position) * (stride / 32); }
};

// Returns the rows of head `head` of the plane at `plane`.
template <class T>
__device__ inline KvRows<T> kv_head(void *plane, int dim, int head, int heads, int count) {
    const int stride = kv_stride<T>(dim);
    const size_t first = (size_t)head * count * stride;
    KvRows<T> rows;
    rows.rows = (typename T::Element *)plane + (T::BITS == 4 ? first / 2 : first);
    rows.scales = nullptr;
    rows.stride = stride;
    rows.count = count;
    if constexpr (T::BITS <= 8)
        rows.scales = (__half *)((u8 *)plane + (size_t)heads * count * stride * T::BITS / 8) + first / 32;
    return rows;
}

// Returns the rows of the values of head `head`. Only the first `dim_v` elements of each row are values.
template <class T>
__device__ inline KvRows<T> kv_values(void *key_plane, void *value_plane, int dim_k, int dim_v, int head,
                                      int heads, int count) {
    return kv_head<T>(value_plane, value_plane == key_plane ? dim_k : dim_v, head, heads, count);
}

// Returns one element as f32.
template <class T> __device__ inline float kv_element(const KvRows<T> &rows, int position, int i) {
    if constexpr (T::BITS == 4)
        return __half2float(rows.row_scales(position)[i / 32]) *
               (float)((rows.row(position)[i / 2] >> i % 2 * 4 & 15) - 8);
    else if constexpr (T::BITS == 8)
        return __half2float(rows.row_scales(position)[i / 32]) * (float)rows.row(position)[i];
    else if constexpr (T::BITS == 16)
        return __half2float(rows.row(position)[i]);
    else
        return rows.row(position)[i];
}
