// Selects the rows of activations and the weights that a block multiplies: a dense matrix, or that of one expert.
#pragma once

#include "common.cuh"

// Kernel parameters.
// - Dense: `weights` is the matrix's address, and the rows of x and of the output are 0 ... tokens.
// - Experts: `weights` is an offset in the slot table[expert]. Entries starts[e] ... starts[e + 1] belong to expert e.
//   Entry i reads row token_rows[i] of x (i if null) and writes row out_rows[i] (i if null).
//
// The output has `tokens` rows in both cases. Entries and rows beyond them are skipped, whatever starts and out_rows
// contain.
#define TILE_PARAMETERS                                                                                        \
    u64 weights, const u64 *table, const u32 *starts, const u32 *token_rows, const u32 *out_rows, int experts, \
        int tokens
#define TILE_ARGUMENTS weights, table, starts, token_rows, out_rows, experts, tokens

struct Tile {
    u64 weights;
    int first, end;  // entries

    __device__ __forceinline__ int x_row(int entry, const u32 *rows) const { return rows ? rows[entry] : entry; }
};

// Finds the tile of blockIdx.x, with at most `size` entries. Tiles of consecutive experts are consecutive, so a block
// finds its own from `starts` alone. Returns false for a surplus block and for an expert without a slot. All threads of
// a block must call this.
__device__ __forceinline__ bool find_tile(Tile &tile, int size, TILE_PARAMETERS) {
    const int wanted = blockIdx.x;
    if (!table) {
        tile = {weights, wanted * size, min(tokens, (wanted + 1) * size)};
        return tile.first < tile.end;
    }
    __shared__ int found[3];
    if (threadIdx.x < 32) {
        const int lane = threadIdx.x;
        int before = 0, expert = -1, within = 0;
        for (int base = 0; base < experts && expert < 0; base += 32) {
            const int e = base + lane;
            const int count = e < experts ? (int)(starts[e + 1] - starts[e]) : 0;
            const int own = (count + size - 1) / size;
            int sum = own;  // over this expert and those of the lower lanes
#pragma unroll
            for (int distance = 1; distance < 32; distance <<= 1) {
                const int other = __shfl_up_sync(~0u, sum, distance);
                if (lane >= distance) sum += other;
            }
            const u32 past = __ballot_sync(~0u, wanted < before + sum);
            if (past) {
                const int lowest = __ffs((int)past) - 1;
                expert = base + lowest;
                within = wanted - before - __shfl_sync(~0u, sum - own, lowest);
            }
            before += __shfl_sync(~0u, sum, 31);
        }
        if (lane == 0) {
            found[0] = expert;
            if (expert >= 0) {
                const u32 first = min(starts[expert] + (u32)(within * size), (u32)tokens);
                found[1] = (int)first;
                found[2] = (int)min(min(starts[expert + 1], (u32)tokens), first + (u32)size);
            }
        }
    }
    __syncthreads();
    if (found[0] < 0) return false;
    const u64 slot = table[found[0]];
    tile = {weights + slot, found[1], found[2]};
    return slot != 0;
}
