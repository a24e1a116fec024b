// Pools of consecutive positions, among which rows choose. A row sees the pools that it chooses and all positions behind the
// last pool that it may choose, so how many it sees follows from its position alone. A pool of one position is that position.
#pragma once
#include "common.cuh"

struct Pools {
    // Number of positions of a pool, and of pools that a row chooses.
    int length, most;
    // 1 if a row does not choose the pool of its own position, which it always sees; otherwise it does if that is complete.
    int own_seen;
    // Number of last candidates that are always chosen.
    int before_own;

    // Returns the number of pools that a row may choose which has so many keys up to its own.
    __device__ inline int candidates_of(int keys) const { return max(keys - own_seen, 0) / length; }

    // Returns the number of pools that a row at `position` may choose.
    __device__ inline int candidates(int position) const { return candidates_of(position + 1); }

    // Returns the number of positions that a row at `position` sees.
    __device__ inline int seen(int position) const {
        const int all = candidates(position);
        return position + 1 - (all - min(all, most)) * length;
    }

    // Returns position number `index` of those that a row at `position` sees. `list` has the pools that it chooses.
    __device__ inline u32 position_of(const u32 *list, int position, int index) const {
        if (length == 1) return list[index];
        const int all = candidates(position), taken = min(all, most), pool = index / length;
        return pool < taken ? list[pool] * length + index % length : index + (all - taken) * length;
    }
};

#define POOL_PARAMETERS int length, int most, int own_seen, int before_own
#define POOLS Pools{length, most, own_seen, before_own}
