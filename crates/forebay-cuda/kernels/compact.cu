// Decodes whole blocks of compact BF16 to BF16. A thread takes eight adjacent weights. The time is that of reading 3 and writing 4
// bytes for every two weights.
#include "weight.cuh"

static constexpr int THREADS = 256;

template <class W> __device__ __forceinline__ void decode(const u8 *from, uint4 *to, u64 eights) {
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < eights; i += (u64)gridDim.x * THREADS) {
        // Blocks follow each other, so the first one of a group of blocks is as good a row as any.
        constexpr u64 EIGHTS = W::COLUMNS / 8;
        const u8 *block = from + i / EIGHTS * W::BYTES;
        const int here = (int)(i % EIGHTS);
        CompactEights<W, 1> eight;
        eight.load(block, here);
        u32 pairs[4];
        eight.pairs(block, here, pairs);
        to[i] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) decode_bf16_c2048(const u8 *from, uint4 *to, u64 eights) {
    wait_for_previous();
    decode<BF16_C2048>(from, to, eights);
}

extern "C" __global__ void __launch_bounds__(THREADS) decode_bf16_c256(const u8 *from, uint4 *to, u64 eights) {
    wait_for_previous();
    decode<BF16_C256>(from, to, eights);
}
