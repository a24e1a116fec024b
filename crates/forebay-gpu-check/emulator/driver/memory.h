// Device memory, which is memory of the process; and host memory that the GPU reaches by itself.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace emulated {

// As the driver counts it, in bytes.
size_t memory_total();
size_t memory_free();
// Counts device memory as used, if there is so much, and as free again.
bool take(size_t bytes);
void give(size_t bytes);

// Whether all of the range is device memory that can be used now.
bool is_device(uint64_t address, size_t bytes);
// Whether all of the range is pinned.
bool is_pinned(const void *address, size_t bytes);

}  // namespace emulated
