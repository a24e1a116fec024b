// Modules: PTX that is recognised, and its source, compiled for this machine.
#pragma once

#include <stddef.h>

#include <map>
#include <string>
#include <vector>

#include "blocks.h"

namespace emulated {

struct Kernel {
    Entry entry;
    // Bytes of each parameter.
    std::vector<size_t> parameters;
    // `.maxntid`.
    unsigned most_threads;
    // What the PTX declares.
    int static_shared;
    // How much it may be given beyond; callers may change it.
    int dynamic_shared_max;
    // It waits by itself for the kernel before.
    bool waits;
    // It waits for words that the host writes.
    bool asks_host;
};

struct Module {
    std::map<std::string, Kernel> kernels;
};

// The module whose PTX this is, for a GPU of `capability`, 90 for 9.0. Throws `Unknown`.
Module *load_module(const std::string &ptx, int capability);

}  // namespace emulated
