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

// How a module is called: `call` runs the current thread of a kernel.
struct Entry {
    std::string name;
    void (*call)(void *const *arguments);
    // The end of what blocks have as dynamic shared memory; behind it lies a page that nobody may touch.
    char *shared_end;
};

extern Runtime runtime;

// All blocks, one after the other. What went wrong, or nothing.
std::string run_blocks(const Entry &entry, const Grid &grid, void *const *arguments);

// The kernel's name, block and thread, for messages; empty when none runs.
std::string where_it_runs();

}  // namespace emulated
