// What the emulated driver and the kernels that it compiles know of each other.
#pragma once

#include <stdint.h>

namespace emulated {

struct Index {
    unsigned x, y, z;
};

// What one lane brings to an operation of its warp: a tensor core's product needs 4 + 2 + 4 words.
struct Slot {
    uint32_t words[12];
};

// What a warp does together. Lanes that arrive at different ones are a mistake of the kernel.
enum Kind : int { SYNC, SHUFFLE, VOTE, REDUCE, LOAD_MATRICES, MMA_F16, MMA_BF16 };

// Everything that a running thread sees of the device. `thread` is the running thread's: a switch changes it.
struct Runtime {
    Index thread, block, block_size, grid_size;
    char *dynamic_shared;
    // Brings `count` words to an operation of the lanes in `mask`, waits for them, and returns all 32 slots. They stay
    // as they are until the lane's operation after the next.
    Slot *(*exchange)(uint32_t mask, Kind kind, const uint32_t *words, int count);
    // Waits for the whole block; whether any thread brought true.
    int (*barrier)(int value);
    // Copies beside the thread: nothing of them is seen before `wait_copies` says so.
    void (*copy)(void *to, const void *from, int bytes, int zeroes);
    void (*commit_copies)();
    void (*wait_copies)(int pending);
    // Lets the host's threads do something: the driver's, and those that wait for it.
    void (*let_host)();
};

}  // namespace emulated
