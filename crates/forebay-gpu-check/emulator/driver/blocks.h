// Runs the blocks of a kernel.
#pragma once

#include <functional>
#include <string>

#include "../device/runtime.h"

namespace emulated {

struct Grid {
    Index blocks, threads;
    unsigned shared_bytes;
};

// Entry point of a kernel: `call` runs its current thread.
struct Entry {
    std::string name;
    void (*call)(void *const *arguments);
    // The end of the blocks' dynamic shared memory. The page after it must not be accessed.
    char *shared_end;
};

extern Runtime runtime;

// Runs all blocks, one after the other. Returns an error message, or an empty string.
std::string run_blocks(const Entry &entry, const Grid &grid, void *const *arguments);

// Returns the kernel's name, block and thread, for messages; an empty string if none runs.
std::string where_it_runs();

}  // namespace emulated
