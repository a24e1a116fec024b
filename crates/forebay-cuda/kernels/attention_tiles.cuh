// Tiles of the KV cache in shared memory, as halves, for kernels whose warps share what they read.
#pragma once
#include "attention_mma.cuh"
#include "pipeline.cuh"

__device__ inline void load_matrices(u32 (&r)[4], const __half *from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(from))
                 : "memory");
}

__device__ inline void load_matrices_transposed(u32 (&r)[4], const __half *from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(from))
                 : "memory");
}

// A number below all scores. Subtracting it from -inf leaves -inf.
static constexpr float LOWEST = -1e38f;

// exp2 to within 2 units in the last place. Results below the normal numbers are 0.
__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Loads eight elements, or zeroes if `there` is false. The address must be readable in either case.
__device__ inline void load_eight_to(__half *target, const KvBlock<KvF16> &block, int row, int i, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(target)),
                 "l"(block.row(row) + i), "r"(there ? 16 : 0)
                 : "memory");
}

template <class T>
__device__ inline void load_eight_to(__half *target, const KvBlock<T> &block, int row, int i, bool there) {
    Eight<T> x;
    x.load(block, row, i);
    *(uint4 *)target = there ? x.halves() : make_uint4(0, 0, 0, 0);
}

// Commits the copies that this thread has started for a tile.
__device__ inline void commit_tile() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the newest PENDING tiles of this thread are loaded.
template <int PENDING> __device__ inline void wait_for_tiles() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
