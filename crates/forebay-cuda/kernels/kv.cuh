// The key/value cache of one layer: for each key/value head a run of rows, one for each position.
//
// A plane (the keys or the values) is [kv_heads, context, stride] elements. f16 and f32 rows are padded with zeroes to
// 8 elements. q8_0 rows are padded to 32 and hold bytes; their scales, half floats, one for every 32 elements, follow
// the whole plane, at an address that is a multiple of 16: [kv_heads, context, stride / 32].
//
// Where values lie in the keys, as a key's first elements, both planes are one.
#pragma once
#include <cuda_fp16.h>
#include "common.cuh"

struct KvF16 {
    typedef __half Element;
    static constexpr int PADDING = 8;
};
struct KvF32 {
    typedef float Element;
    static constexpr int PADDING = 8;
};
struct KvQ8 {
    typedef i8 Element;
    static constexpr int PADDING = 32;
};

// KV_F16, KV_F32 or KV_Q8_0 chooses the type of a module.
#if defined(KV_F32)
typedef KvF32 KvType;
#elif defined(KV_Q8_0)
typedef KvQ8 KvType;
#else
typedef KvF16 KvType;
#endif

// Elements from one row to the next.
template <class T> __device__ inline int kv_stride(int dim) {
    return (dim + T::PADDING - 1) / T::PADDING * T::PADDING;
}

// Rows of one head, or of a whole plane.
template <class T> struct KvRows {
    typename T::Element *rows;
    int stride;

    __device__ inline typename T::Element *row(int position) const {
        return rows + (size_t)position * stride;
    }
};

template <> struct KvRows<KvQ8> {
    i8 *rows;
    __half *scales;
    int stride;

    __device__ inline i8 *row(int position) const { return rows + (size_t)position * stride; }
    __device__ inline __half *row_scales(int position) const {
        return scales + (size_t)position * (stride / 32);
    }
};

// Rows of head `head` of the plane at `plane`.
template <class T>
__device__ inline KvRows<T> kv_head(void *plane, int dim, int head, int heads, int context) {
    const int stride = kv_stride<T>(dim);
    const size_t first = (size_t)head * context * stride;
    KvRows<T> rows;
    rows.rows = (typename T::Element *)plane + first;
    rows.stride = stride;
    if constexpr (sizeof(typename T::Element) == 1)
        rows.scales = (__half *)((u8 *)plane + (size_t)heads * context * stride) + first / 32;
    return rows;
}

// Rows of the values of head `head`, of which the first elements count.
template <class T>
__device__ inline KvRows<T> kv_values(void *key_plane, void *value_plane, int dim_k, int dim_v, int head,
                                      int heads, int context) {
    return kv_head<T>(value_plane, value_plane == key_plane ? dim_k : dim_v, head, heads, context);
}

// One element, widened.
template <class T> __device__ inline float kv_element(const KvRows<T> &rows, int position, int i) {
    if constexpr (sizeof(typename T::Element) == 1)
        return __half2float(rows.row_scales(position)[i / 32]) * (float)rows.row(position)[i];
    else if constexpr (sizeof(typename T::Element) == 2)
        return __half2float(rows.row(position)[i]);
    else
        return rows.row(position)[i];
}
