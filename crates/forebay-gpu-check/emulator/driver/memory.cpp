// Every allocation ends at the end of a page, so a kernel that accesses bytes beyond it is caught at once. Unwritten
// memory is NaN.
#include "memory.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <map>

#include "driver.h"

namespace emulated {

namespace {

constexpr size_t ALIGNMENT = 256, CHUNK = 2 << 20;

struct Allocation {
    size_t bytes;
    char *pages;
    size_t page_bytes;
};

struct Ranges {
    // Maps the start of each range to its end. Adjacent ranges are not joined.
    std::map<uint64_t, uint64_t> all;

    bool holds(uint64_t from, size_t bytes) const {
        for (uint64_t at = from; at < from + bytes;) {
            auto next = all.upper_bound(at);
            if (next == all.begin() || at >= (--next)->second) return false;
            at = next->second;
        }
        return true;
    }
};

std::map<uint64_t, Allocation> allocations;
std::map<uint64_t, size_t> reserved, mapped;  // reserved addresses, and those with memory mapped
std::map<uint64_t, size_t> chunks;            // bytes of each memory handle
Ranges device, pinned;
size_t used = 0;
uint64_t next_handle = 1;

}  // namespace

bool take(size_t bytes) {
    if (bytes > memory_free()) return false;
    used += bytes;
    return true;
}

void give(size_t bytes) { used -= bytes; }

size_t memory_total() { return (size_t)setting_or("FOREBAY_EMULATOR_MIB", 1024) << 20; }
size_t memory_free() { return memory_total() - used; }
bool is_device(uint64_t address, size_t bytes) { return device.holds(address, bytes); }
bool is_pinned(const void *address, size_t bytes) { return pinned.holds((uint64_t)address, bytes); }

}  // namespace emulated

using namespace emulated;

EMULATED_CALL cuMemGetInfo_v2(size_t *free, size_t *total) {
    EMULATED_READY();
    *free = memory_free();
    *total = memory_total();
    return SUCCESS;
}

EMULATED_CALL cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    EMULATED_READY();
    if (const Result no = outside_capture("cuMemAlloc")) return no;
    if (bytes == 0) return INVALID_VALUE;
    const size_t rounded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (!take(rounded)) return OUT_OF_MEMORY;
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), inner = (rounded + page - 1) / page * page;
    void *pages = mmap(nullptr, inner + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) return OUT_OF_MEMORY;
    mprotect((char *)pages + page, inner, PROT_READ | PROT_WRITE);
    char *const first = (char *)pages + page + inner - rounded;
    memset(first, 0xff, rounded);
    *address = (uint64_t)first;
    allocations[*address] = {rounded, (char *)pages, inner + 2 * page};
    device.all[*address] = *address + rounded;
    return SUCCESS;
}

EMULATED_CALL cuMemFree_v2(uint64_t address) {
    EMULATED_READY();
    if (const Result no = outside_capture("cuMemFree")) return no;
    const auto found = allocations.find(address);
    if (found == allocations.end()) return refuse(INVALID_VALUE, "cuMemFree", "no such allocation");
    finish_all();
    munmap(found->second.pages, found->second.page_bytes);
    used -= found->second.bytes;
    device.all.erase(address);
    allocations.erase(found);
    return SUCCESS;
}

EMULATED_CALL cuMemHostAlloc(void **address, size_t bytes, unsigned) {
    EMULATED_READY();
    if (const Result no = outside_capture("cuMemHostAlloc")) return no;
    void *pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) return OUT_OF_MEMORY;
    *address = pages;
    pinned.all[(uint64_t)pages] = (uint64_t)pages + bytes;
    return SUCCESS;
}

EMULATED_CALL cuMemFreeHost(void *address) {
    EMULATED_READY();
    const auto found = pinned.all.find((uint64_t)address);
    if (found == pinned.all.end()) return refuse(INVALID_VALUE, "cuMemFreeHost", "no such allocation");
    finish_all();
    munmap(address, found->second - found->first);
    pinned.all.erase(found);
    return SUCCESS;
}

EMULATED_CALL cuMemHostRegister_v2(void *address, size_t bytes, unsigned) {
    EMULATED_READY();
    const uint64_t from = (uint64_t)address, page = (uint64_t)sysconf(_SC_PAGESIZE), to = from + bytes;
    const auto next = pinned.all.lower_bound(from);
    const bool before = next != pinned.all.begin() && std::prev(next)->second > from;
    if (before || (next != pinned.all.end() && next->first < to)) return HOST_MEMORY_ALREADY_REGISTERED;
    // The real call fails for memory that is not mapped, so this checks the mapping.
    if (msync((void *)(from / page * page), to - from / page * page, MS_ASYNC) != 0)
        return refuse(INVALID_VALUE, "cuMemHostRegister", "memory that is not mapped");
    pinned.all[from] = to;
    return SUCCESS;
}

EMULATED_CALL cuMemHostGetDevicePointer_v2(uint64_t *address, void *host, unsigned) {
    EMULATED_READY();
    if (!is_pinned(host, 1)) return refuse(INVALID_VALUE, "cuMemHostGetDevicePointer", "memory that is not pinned");
    *address = (uint64_t)host;
    return SUCCESS;
}

EMULATED_CALL cuMemHostUnregister(void *address) {
    EMULATED_READY();
    finish_all();
    return pinned.all.erase((uint64_t)address) ? SUCCESS : HOST_MEMORY_NOT_REGISTERED;
}

// Reserved addresses are pages that must not be accessed until memory is mapped to them.

EMULATED_CALL cuMemGetAllocationGranularity(size_t *bytes, const void *, int) {
    *bytes = CHUNK;
    return SUCCESS;
}

EMULATED_CALL cuMemAddressReserve(uint64_t *address, size_t bytes, size_t, uint64_t, unsigned long long) {
    EMULATED_READY();
    if (bytes == 0 || bytes % CHUNK) return refuse(INVALID_VALUE, "cuMemAddressReserve", "not a multiple of 2 MiB");
    void *pages = mmap(nullptr, bytes + CHUNK, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) return OUT_OF_MEMORY;
    *address = ((uint64_t)pages + CHUNK - 1) / CHUNK * CHUNK;
    // The pages before and after the aligned range stay mapped as guards.
    reserved[*address] = bytes;
    return SUCCESS;
}

EMULATED_CALL cuMemAddressFree(uint64_t address, size_t bytes) {
    EMULATED_READY();
    const auto found = reserved.find(address);
    if (found == reserved.end() || found->second != bytes)
        return refuse(INVALID_VALUE, "cuMemAddressFree", "not what was reserved");
    const auto inside = mapped.lower_bound(address);
    if (inside != mapped.end() && inside->first < address + bytes)
        return refuse(INVALID_VALUE, "cuMemAddressFree", "memory is still mapped there");
    munmap((void *)address, bytes);
    reserved.erase(found);
    return SUCCESS;
}

EMULATED_CALL cuMemCreate(uint64_t *handle, size_t bytes, const void *, unsigned long long) {
    EMULATED_READY();
    if (bytes == 0 || bytes % CHUNK) return refuse(INVALID_VALUE, "cuMemCreate", "not a multiple of 2 MiB");
    if (!take(bytes)) return OUT_OF_MEMORY;
    *handle = next_handle++;
    chunks[*handle] = bytes;
    return SUCCESS;
}

EMULATED_CALL cuMemRelease(uint64_t handle) {
    EMULATED_READY();
    const auto found = chunks.find(handle);
    if (found == chunks.end()) return refuse(INVALID_VALUE, "cuMemRelease", "no such memory");
    used -= found->second;
    chunks.erase(found);
    return SUCCESS;
}

EMULATED_CALL cuMemMap(uint64_t address, size_t bytes, size_t, uint64_t handle, unsigned long long) {
    EMULATED_READY();
    const auto chunk = chunks.find(handle);
    auto range = reserved.upper_bound(address);
    const bool inside = range != reserved.begin() && address + bytes <= (--range)->first + range->second;
    if (chunk == chunks.end() || chunk->second != bytes || !inside || mapped.count(address))
        return refuse(INVALID_VALUE, "cuMemMap", "not a chunk in a reserved, free range");
    mapped[address] = bytes;
    return SUCCESS;
}

EMULATED_CALL cuMemSetAccess(uint64_t address, size_t bytes, const void *, size_t) {
    EMULATED_READY();
    const auto found = mapped.find(address);
    if (found == mapped.end() || found->second != bytes)
        return refuse(INVALID_VALUE, "cuMemSetAccess", "nothing is mapped there");
    mprotect((void *)address, bytes, PROT_READ | PROT_WRITE);
    memset((void *)address, 0xff, bytes);
    device.all[address] = address + bytes;
    return SUCCESS;
}

EMULATED_CALL cuMemUnmap(uint64_t address, size_t bytes) {
    EMULATED_READY();
    const auto found = mapped.find(address);
    if (found == mapped.end() || found->second != bytes)
        return refuse(INVALID_VALUE, "cuMemUnmap", "nothing is mapped there");
    // New pages replace the old ones, whose memory is returned to the system.
    mmap((void *)address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    device.all.erase(address);
    mapped.erase(found);
    return SUCCESS;
}
