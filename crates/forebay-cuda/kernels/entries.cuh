// Rows of the cache that stand for several positions: compressed entries, and the keys by which these are chosen. They have one
// head. A row is in the block of its last position, so a block has max(1, KV_BLOCK / span) of them.
#pragma once
#include "kv.cuh"

// Returns the rows of a layer whose rows stand for `span` positions each. `plane` is that of block 0.
template <class T>
__device__ inline KvHead<T> spanned_head(u8 *plane, const KvPlaces &places, int dim, int span) {
    const int stride = kv_stride<T>(dim), rows = max(1, KV_BLOCK / span);
    return KvHead<T>{plane, places, stride, rows * stride * T::BITS / 8};
}

// Where a row is: the index in the sequence's table, and the row of the block.
struct SpannedRow {
    int index, row;

    __device__ inline SpannedRow(int number, int span) {
        const int last = (number + 1) * span - 1;
        index = last / KV_BLOCK;
        row = last % KV_BLOCK / span;
    }
};

// Kernel parameters for a second layer of the cache, whose rows stand for `span` positions. `span` is 0 if there is none. Its sequences have the numbers and
// the table stride of the first layer.
#define SPANNED_PARAMETERS                                                                                     \
    u8 *spanned_plane, u32 spanned_bytes, u32 spanned_own, u32 spanned_elsewhere_bytes, u64 spanned_elsewhere, \
        const u32 *spanned_tables, int span
#define SPANNED_ARGUMENTS                                                                                      \
    spanned_plane, KvPlaces{spanned_bytes, spanned_own, spanned_elsewhere_bytes, spanned_elsewhere},           \
        spanned_tables, span

struct SpannedLayer {
    u8 *plane;
    KvPlaces places;
    const u32 *tables;
    int span;

    __device__ inline KvHead<KvType> rows(int dim) const { return spanned_head<KvType>(plane, places, dim, max(span, 1)); }
};
