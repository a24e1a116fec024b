// Device memory, which is memory of the process, and host memory that the GPU can access.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace emulated {

// Bytes of device memory as reported by the driver.
size_t memory_total();
size_t memory_free();
// Counts device memory as used; returns false if there is too little. `give` counts it as free again.
bool take(size_t bytes);
void give(size_t bytes);

// Returns true if the whole range is usable device memory.
bool is_device(uint64_t address, size_t bytes);
// Returns true if the whole range is pinned.
bool is_pinned(const void *address, size_t bytes);

}  // namespace emulated
