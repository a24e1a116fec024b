// Interface between the emulated driver and the kernels that it compiles.
#pragma once

#include <stdint.h>

namespace emulated {

struct Index {
    unsigned x, y, z;
};

// Words that one lane contributes to an operation of its warp, and those of its results. A tensor-core product needs
// 4 + 2 + 4 words; a load of matrices an address, a flag and 4 results.
struct Slot {
    uint32_t words[12];
};

// Operations of a whole warp. If lanes of a warp arrive at different ones, the kernel is wrong.
enum Kind : int { SYNC, SHUFFLE, VOTE, REDUCE, LOAD_MATRICES, MMA_F16, MMA_BF16, MMA_S8 };

// Everything of the device that a running thread sees. A switch of threads changes `thread`.
struct Runtime {
    Index thread, block, block_size, grid_size;
    char *dynamic_shared;
    // Contributes `count` words to an operation of the lanes in `mask`, waits for them, and returns all 32 slots. The
    // slots are valid until the lane's operation after the next.
    Slot *(*exchange)(uint32_t mask, Kind kind, const uint32_t *words, int count);
    // Waits for the whole block. Returns true if any thread passed true.
    int (*barrier)(int value);
    // Starts an asynchronous copy. Its bytes are visible only after `wait_copies`.
    void (*copy)(void *to, const void *from, int bytes, int zeroes);
    void (*commit_copies)();
    void (*wait_copies)(int pending);
    // Lets host threads run: those of the driver, and those that wait for it.
    void (*let_host)();
};

}  // namespace emulated
