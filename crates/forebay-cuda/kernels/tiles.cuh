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
    // A lane looks at this many experts at a time. Their loads do not wait for each other.
    constexpr int EACH = 4;
    __shared__ int found[3];
    if (threadIdx.x < 32) {
        const int lane = threadIdx.x;
        int before = 0;
        bool is_found = false;
        for (int base = 0; base < experts && !is_found; base += 32 * EACH) {
            u32 bounds[EACH + 1];
#pragma unroll
            for (int i = 0; i <= EACH; i++) bounds[i] = starts[min(base + lane * EACH + i, experts)];
            int own = 0;
#pragma unroll
            for (int i = 0; i < EACH; i++) own += ((int)(bounds[i + 1] - bounds[i]) + size - 1) / size;
            int sum = own;  // over the experts of this lane and those of the lower lanes
#pragma unroll
            for (int distance = 1; distance < 32; distance <<= 1) {
                const int other = __shfl_up_sync(~0u, sum, distance);
                if (lane >= distance) sum += other;
            }
            const u32 past = __ballot_sync(~0u, wanted < before + sum);
            is_found = past != 0;
            if (is_found && lane == __ffs((int)past) - 1) {
                int within = wanted - before - (sum - own);
                bool is_here = false;
#pragma unroll
                for (int i = 0; i < EACH; i++) {
                    const int tiles = ((int)(bounds[i + 1] - bounds[i]) + size - 1) / size;
                    if (!is_here && within < tiles) {
                        is_here = true;
                        const u32 first = min(bounds[i] + (u32)(within * size), (u32)tokens);
                        found[0] = base + lane * EACH + i;
                        found[1] = (int)first;
                        found[2] = (int)min(min(bounds[i + 1], (u32)tokens), first + (u32)size);
                    }
                    within -= tiles;
                }
            }
            before += __shfl_sync(~0u, sum, 31);
        }
        if (lane == 0 && !is_found) found[0] = -1;
    }
    __syncthreads();
    if (found[0] < 0) return false;
    const u64 slot = table[found[0]];
    tile = {weights + slot, found[1], found[2]};
    return slot != 0;
}
