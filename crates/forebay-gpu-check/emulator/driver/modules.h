// Modules: PTX is recognised by its first line, and its CUDA source is compiled for this machine.
#pragma once

#include <stddef.h>

#include <map>
#include <string>
#include <vector>

#include "blocks.h"

namespace emulated {

struct Kernel {
    Entry entry;
    // Number of bytes of each parameter.
    std::vector<size_t> parameters;
    // Largest number of threads of a block, from `.maxntid`.
    unsigned threads_max;
    // Bytes of shared memory that the PTX declares.
    int static_shared;
    // Largest number of bytes of dynamic shared memory, which callers may change.
    int dynamic_shared_max;
    // True if the kernel itself waits for the previous one.
    bool waits;
    // True if the kernel waits for words that the host writes.
    bool asks_host;
};

struct Module {
    std::map<std::string, Kernel> kernels;
};

// Loads the module of this PTX text for a GPU of `capability`, such as 90 for 9.0. Throws `Unknown`.
Module *load_module(const std::string &ptx, int capability);

}  // namespace emulated
