// The threads of a block are fibers. Each runs until it has to wait for other threads of its warp or block. The order
// of threads is fixed, so a kernel gives the same bits every time. Blocks run to their end one after the other.
// Therefore a kernel must not wait for a later block, and forebay's do not.
#include "blocks.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <vector>

#include "driver.h"
#include "fibers.h"
#include "tensor_cores.h"

namespace emulated {

Runtime runtime;

namespace {

constexpr int THREADS_MAX = 1024;
constexpr size_t STACK_BYTES = 256 << 10, GUARD_BYTES = 4096;

struct Copy {
    void *to;
    const void *from;
    int bytes, zeroes;
    int group;
};

struct Thread {
    Fiber fiber;
    Index index;
    // Copies that may still be in flight, and the number of committed groups of copies.
    std::vector<Copy> copies;
    int groups;
};

struct Warp {
    uint32_t alive, ready, arrived, at_barrier;
    Kind kind;
    unsigned operations;
    // Slots of even and odd operations. A lane that has gone on may contribute to the next operation before all have
    // read this one's slots.
    Slot slots[2][32];
};

struct Block {
    std::vector<Thread> threads = std::vector<Thread>(THREADS_MAX);
    Warp warps[THREADS_MAX / 32];
    int count, warp_count, alive;
    int barrier_arrived, barrier_value, barrier_result;
    int current;
    char *stacks = nullptr;
    Fiber host;
    const Entry *entry = nullptr;
    void *const *arguments;
    std::string failure;
    bool backward;
};

Block block;

inline void go_to(int thread) {
    const int from = block.current;
    block.current = thread;
    runtime.thread = block.threads[thread].index;
    if (thread != from) block.threads[from].fiber.switch_to(block.threads[thread].fiber);
}

[[noreturn]] void fail(const std::string &what) {
    block.failure = what + " (" + where_it_runs() + ")";
    block.threads[block.current].fiber.switch_to(block.host);
    abort();
}

// Returns the next lane after `lane` that can run, or -1.
inline int next_lane(const Warp &warp, int lane) {
    if (!warp.ready) return -1;
    if (block.backward) {
        const uint32_t before = warp.ready & ((1u << lane) - 1);
        return 31 - __builtin_clz(before ? before : warp.ready);
    }
    const uint32_t after = lane < 31 ? warp.ready & ~0u << (lane + 1) : 0;
    return __builtin_ctz(after ? after : warp.ready);
}

// Lets a thread of another warp run.
__attribute__((noinline)) void go_to_another_warp() {
    const int own = block.current / 32, step = block.backward ? block.warp_count - 1 : 1;
    for (int i = 1, warp = own; i < block.warp_count; i++) {
        warp = (warp + step) % block.warp_count;
        const int lane = next_lane(block.warps[warp], block.backward ? 0 : 31);
        if (lane >= 0) return go_to(warp * 32 + lane);
    }
    fail("all threads of the block wait for others");
}

// Lets other threads run until the current one is ready again.
inline void wait() {
    const int own = block.current / 32, lane = next_lane(block.warps[own], block.current % 32);
    if (lane >= 0) return go_to(own * 32 + lane);
    go_to_another_warp();
}

void release(uint32_t &waiting, Warp &warp) {
    warp.ready |= waiting;
    waiting = 0;
}

void finish_operation(Warp &warp) {
    Slot *slots = warp.slots[warp.operations % 2];
    if (warp.kind == MMA_F16 || warp.kind == MMA_BF16) multiply_tiles(slots, warp.kind == MMA_BF16);
    if (warp.kind == MMA_S8) multiply_codes(slots);
    if (warp.kind == LOAD_MATRICES) load_tiles(slots);
    warp.operations++;
    release(warp.arrived, warp);
}

Slot *exchange(uint32_t mask, Kind kind, const uint32_t *words, int count) {
    Warp &warp = block.warps[block.current / 32];
    const int lane = block.current % 32;
    const uint32_t bit = 1u << lane;
    if (!(mask & bit)) fail("a lane is not in the mask of its own operation");
    if (warp.arrived && warp.kind != kind) fail("lanes of a warp have come to different operations");
    if (mask != ~0u) fail("operations of some lanes only are not emulated");
    if ((kind >= LOAD_MATRICES) && warp.alive != ~0u)
        fail("lanes are missing at an operation that needs all");
    Slot *slots = warp.slots[warp.operations % 2];
    for (int i = 0; i < count; i++) slots[lane].words[i] = words[i];
    warp.kind = kind;
    warp.arrived |= bit;
    if (warp.arrived == warp.alive) {
        finish_operation(warp);
    } else {
        warp.ready &= ~bit;
        wait();
    }
    return slots;
}

void finish_barrier() {
    block.barrier_result = block.barrier_value;
    block.barrier_value = block.barrier_arrived = 0;
    for (int i = 0; i < block.warp_count; i++) release(block.warps[i].at_barrier, block.warps[i]);
}

int barrier(int value) {
    Warp &warp = block.warps[block.current / 32];
    const uint32_t bit = 1u << block.current % 32;
    block.barrier_value |= value;
    warp.at_barrier |= bit;
    if (++block.barrier_arrived == block.alive) {
        finish_barrier();
    } else {
        warp.ready &= ~bit;
        wait();
    }
    return block.barrier_result;
}

void do_copy(const Copy &copy) {
    memcpy(copy.to, copy.from, (size_t)copy.bytes);
    memset((char *)copy.to + copy.bytes, 0, (size_t)copy.zeroes);
}

void copy(void *to, const void *from, int bytes, int zeroes) {
    if (((uintptr_t)to | (uintptr_t)from) & (uintptr_t)(bytes + zeroes - 1)) fail("a copy to shared memory is not aligned to its size");
    Thread &thread = block.threads[block.current];
    thread.copies.push_back({to, from, bytes, zeroes, thread.groups});
    // Copies as early as a GPU may, which reveals kernels that still read the overwritten bytes.
    if (block.backward) do_copy(thread.copies.back());
}

void commit_copies() { block.threads[block.current].groups++; }

// In forward order, copies as late as a GPU may. Bytes that a kernel reads without waiting for them are then never
// there.
void wait_copies(int pending) {
    Thread &thread = block.threads[block.current];
    size_t done = 0;
    for (; done < thread.copies.size() && thread.copies[done].group < thread.groups - pending; done++)
        if (!block.backward) do_copy(thread.copies[done]);
    thread.copies.erase(thread.copies.begin(), thread.copies.begin() + (ptrdiff_t)done);
}

void wait_for_host() {
    if (!let_host()) fail("the watchdog has ended it: it waited for the host");
}

// Runs a thread from start to end.
void run_thread() {
    block.entry->call(block.arguments);
    Warp &warp = block.warps[block.current / 32];
    const uint32_t bit = 1u << block.current % 32;
    warp.alive &= ~bit;
    warp.ready &= ~bit;
    block.alive--;
    if (warp.arrived && warp.arrived == warp.alive) finish_operation(warp);
    if (block.alive == 0) block.threads[block.current].fiber.switch_to(block.host);
    if (block.barrier_arrived == block.alive) finish_barrier();
    wait();
    abort();
}

void start() {
    const size_t each = STACK_BYTES + GUARD_BYTES;
    void *memory = mmap(nullptr, each * THREADS_MAX, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) abort();
    block.stacks = (char *)memory;
    for (int i = 0; i < THREADS_MAX; i++) mprotect(block.stacks + each * (size_t)i, GUARD_BYTES, PROT_NONE);
    runtime.exchange = exchange;
    runtime.barrier = barrier;
    runtime.copy = copy;
    runtime.commit_copies = commit_copies;
    runtime.wait_copies = wait_copies;
    runtime.let_host = wait_for_host;
    const char *order = getenv("FOREBAY_EMULATOR_ORDER");
    block.backward = order && !strcmp(order, "backward");
}

void run_block(const Grid &grid) {
    block.alive = block.count;
    block.barrier_arrived = block.barrier_value = 0;
    for (int w = 0; w < block.warp_count; w++) {
        Warp &warp = block.warps[w];
        const int lanes = block.count - 32 * w;
        warp.alive = warp.ready = lanes < 32 ? (1u << lanes) - 1 : ~0u;
        warp.arrived = warp.at_barrier = 0;
    }
    for (int i = 0; i < block.count; i++) {
        Thread &thread = block.threads[(size_t)i];
        thread.copies.clear();
        thread.groups = 0;
        char *stack = block.stacks + (STACK_BYTES + GUARD_BYTES) * (size_t)i + GUARD_BYTES;
        // Stacks start at different offsets of a page. Otherwise they would evict each other from the CPU cache.
        thread.fiber.prepare(stack, STACK_BYTES - (size_t)i % 32 * 320, run_thread);
    }
    // Shared memory is undefined on a GPU: here, unwritten words are NaN.
    memset(runtime.dynamic_shared, 0xff, grid.shared_bytes);
    block.current = block.backward ? block.count - 1 : 0;
    Thread &first = block.threads[(size_t)block.current];
    runtime.thread = first.index;
    block.host.switch_to(first.fiber);
}

}  // namespace

std::string where_it_runs() {
    if (!block.entry) return "";
    const auto text = [](Index i) {
        return std::to_string(i.x) + "," + std::to_string(i.y) + "," + std::to_string(i.z);
    };
    return block.entry->name + ", block " + text(runtime.block) + " of " + text(runtime.grid_size) + ", thread " +
           text(runtime.thread) + " of " + text(runtime.block_size);
}

std::string run_blocks(const Entry &entry, const Grid &grid, void *const *arguments) {
    if (!block.stacks) start();
    const Index threads = grid.threads, blocks = grid.blocks;
    block.entry = &entry;
    block.arguments = arguments;
    block.failure.clear();
    block.count = (int)(threads.x * threads.y * threads.z);
    block.warp_count = (block.count + 31) / 32;
    for (unsigned i = 0; i < (unsigned)block.count; i++)
        block.threads[i].index = {i % threads.x, i / threads.x % threads.y, i / threads.x / threads.y};
    runtime.block_size = threads;
    runtime.grid_size = blocks;
    runtime.dynamic_shared = entry.shared_end - (grid.shared_bytes + 15) / 16 * 16;
    const uint64_t count = (uint64_t)blocks.x * blocks.y * blocks.z;
    for (uint64_t i = 0; i < count && block.failure.empty(); i++) {
        const uint64_t at = block.backward ? count - 1 - i : i;
        const uint64_t rows = at / blocks.x;
        runtime.block = {(unsigned)(at % blocks.x), (unsigned)(rows % blocks.y), (unsigned)(rows / blocks.y)};
        run_block(grid);
    }
    block.entry = nullptr;
    return block.failure;
}

}  // namespace emulated
