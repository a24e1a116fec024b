// Fetches the experts of one or more rows from inside a CUDA graph. The kernel copies experts that are not on the device from
// pinned host memory. The host decides which experts to copy and where they go. The kernel asks it, and it answers,
// through words that both sides can access, so the driver launches and copies nothing in between.
//
// Time budget. A missing expert is a few MB and takes 50 us over PCIe. The question and the answer each cross PCIe
// once, and the answer once more to be seen, about 1 us each time. The host takes a few us to decide. When several
// blocks read one word of host memory, the reads run one after the other, 1.2 us each. So a single block asks and tells
// the others. A latency of 1.5 us at 55 GB/s needs 80 KB in flight; each thread has 64 bytes in flight, a block 32 KB.
#include "common.cuh"

#define THREADS 512
// Words of a missing expert: its index in the table of retained experts (or ~0), its destination, and the sources of
// its three parts, or 0 if an earlier kernel has copied it there.
#define MISS_WORDS 10
// Words of an expert that goes back to the host: the sources, destinations and sizes in bytes of its three parts.
#define BACK_WORDS 16

// Reads a word that the host also writes.
__device__ __forceinline__ u32 read_acquire(const u32 *from) {
    u32 word;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
    return word;
}

// Reads a word that other blocks write.
__device__ __forceinline__ u32 read_acquire_device(const u32 *from) {
    u32 word;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
    return word;
}

__device__ __forceinline__ void write_release(u32 *to, u32 word) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

__device__ __forceinline__ u64 nanoseconds() {
    u64 time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

// Waits until the host has written `expected` to `word`, and returns true if it has. If `bound` (nanoseconds) is not 0,
// gives up after that time: a GPU with a watchdog ends kernels that take too long, and the host may be waiting for a
// disk. If `bound` is 0, waits as long as it takes.
__device__ __forceinline__ bool wait_for_host(const u32 *word, u32 expected, u32 bound) {
    if (bound == 0) {
        while (read_acquire(word) != expected) {}
        return true;
    }
    const u64 begun = nanoseconds();
    while (read_acquire(word) != expected)
        if (nanoseconds() - begun >= bound) return read_acquire(word) == expected;
    return true;
}

// Saves the residual stream when a run gives up, because later kernels of the run overwrite it. The host continues from
// this copy.
__device__ __forceinline__ void keep_stream(const float *stream, float *kept, int width) {
    for (int i = threadIdx.x; i < width / 4; i += blockDim.x) ((uint4 *)kept)[i] = ((const uint4 *)stream)[i];
}

// Tells later kernels of the run, and the host, that the run has given up, and at which place.
__device__ __forceinline__ void give_up(u32 run, u32 place, u32 *given_up, u32 *given_up_host) {
    *given_up = run;
    given_up_host[1] = place;
    __threadfence_system();
    write_release(given_up_host, run);
}

// Returns 16 bytes, starting at byte `shift` of `a`. `b` holds the 16 bytes after `a`.
__device__ __forceinline__ uint4 sixteen_from(const uint4 a, const uint4 b, u32 shift) {
    const u32 word = shift / 4, bits = shift % 4 * 8;
    const u32 x[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    u32 y[5];
#pragma unroll
    for (int j = 0; j < 5; j++) y[j] = word == 0 ? x[j] : word == 1 ? x[j + 1] : word == 2 ? x[j + 2] : x[j + 3];
    uint4 out;
    out.x = __funnelshift_r(y[0], y[1], bits);
    out.y = __funnelshift_r(y[1], y[2], bits);
    out.z = __funnelshift_r(y[2], y[3], bits);
    out.w = __funnelshift_r(y[3], y[4], bits);
    return out;
}

// Copies `bytes` bytes from any address to an address that is a multiple of 16. `all` threads share the copy, and
// `first` is the index of this thread. It may read beyond the source, but only bytes in the same aligned 16-byte words.
__device__ __forceinline__ void copy_part(u64 to, u64 from, u32 bytes, u32 first, u32 all) {
    const u32 whole = bytes / 16, shift = (u32)from & 15;
    const uint4 *const source = (const uint4 *)(from - shift);
    uint4 *const target = (uint4 *)to;
    if (shift == 0) {
        for (u32 i = first; i < whole; i += 4 * all) {
            uint4 words[4];
#pragma unroll
            for (int k = 0; k < 4; k++)
                if (i + k * all < whole) words[k] = __ldcv(source + i + k * all);
#pragma unroll
            for (int k = 0; k < 4; k++)
                if (i + k * all < whole) target[i + k * all] = words[k];
        }
    } else {
        // The next lane holds the next 16 bytes.
        const u32 lane = threadIdx.x & 31;
        for (u32 i = first; i - lane < whole; i += 2 * all) {
            uint4 own[2], beyond[2];
#pragma unroll
            for (int k = 0; k < 2; k++) {
                // The lane after the last one that copies only reads.
                if (i + k * all <= whole) own[k] = __ldcv(source + i + k * all);
                if (lane == 31 && i + k * all < whole) beyond[k] = __ldcv(source + i + k * all + 1);
            }
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const uint4 a = own[k];
                uint4 b;
                b.x = __shfl_down_sync(~0u, a.x, 1), b.y = __shfl_down_sync(~0u, a.y, 1);
                b.z = __shfl_down_sync(~0u, a.z, 1), b.w = __shfl_down_sync(~0u, a.w, 1);
                if (lane == 31) b = beyond[k];
                const uint4 out = sixteen_from(a, b, shift);
                if (i + k * all < whole) target[i + k * all] = out;
            }
        }
    }
    const u32 rest = bytes & 15;
    if (first < rest) ((u8 *)to)[bytes - rest + first] = __ldcv((const u8 *)from + bytes - rest + first);
}

// Copies `bytes` bytes from an address that is a multiple of 16 to any address; `first` and `all` as in `copy_part`. It
// may read up to 15 bytes beyond the source and writes nothing beyond the destination.
__device__ __forceinline__ void copy_back(u64 to, u64 from, u32 bytes, u32 first, u32 all) {
    // Bytes before the first multiple of 16.
    const u32 head = min(-(u32)to & 15, bytes), whole = (bytes - head) / 16;
    const uint4 *const source = (const uint4 *)from;
    uint4 *const target = (uint4 *)(to + head);
    // Each thread keeps several reads in flight. Reads take longer than writes, and nothing waits for the writes.
    for (u32 i = first; i < whole; i += 4 * all) {
        uint4 words[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (i + k * all < whole) {
                words[k] = __ldcg(source + i + k * all);
                if (head != 0) words[k] = sixteen_from(words[k], __ldcg(source + i + k * all + 1), head);
            }
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (i + k * all < whole) target[i + k * all] = words[k];
    }
    const u32 rest = bytes - head - 16 * whole, behind = bytes - rest;
    if (first < head) ((u8 *)to)[first] = __ldcg((const u8 *)from + first);
    if (first < rest) ((u8 *)to)[behind + first] = __ldcg((const u8 *)from + behind + first);
}

// Names the chosen experts that are on the device, so that kernels can compute them while `fetch_experts` fetches the others.
// `slots` [experts] receives their addresses by id, and 0 for chosen experts that are not there. If `asked` is not null, the
// ids go to the host, so that it may answer before `fetch_experts` runs; asked [1] receives 3. With k = 0, this only tells the
// host how far the run is. Grid (1). The other parameters are those of fetch_experts.
extern "C" __global__ void __launch_bounds__(THREADS)
    find_experts(const u32 *now, u32 *ids, const u32 *forced, int k, const u64 *tables, int first, u64 *slots, u32 *asked) {
    wait_for_previous();
    const int lane = threadIdx.x;
    if (lane < k) {
        const bool is_forced = now[1];
        const u32 id = (is_forced ? forced : ids)[lane];
        if (is_forced) ids[lane] = id;
        slots[id] = tables[first + id];
        if (asked) asked[4 + lane] = id;
    }
    if (!asked) return;
    if (lane == 0) asked[1] = 3;
    __threadfence_system();
    __syncthreads();
    if (lane == 0) write_release(asked, now[0]);
}

// Fetches the experts of one layer that a run's rows chose: k pairs of a row and an expert, at most THREADS. Two pairs
// may have the same expert. Grid (blocks): any number. Dynamic shared memory: R = 4 + (4 + MISS_WORDS + BACK_WORDS) * room
// words; k <= room <= THREADS. `tickets` [2] and the first word of `desk` [4 + R] are 0 before and after.
//
// - now [2]: the number of this run (never 0, never that of the previous run), and 1 if `forced` [k] replaces `ids` [k],
//   else 0. If it does, `ids` is overwritten.
// - tables: addresses of all experts that are retained on the device, those of this layer from index `first` on; 0
//   means not on the device.
// - slots [experts]: receives the addresses of the chosen experts, by id; 0 means that the host computes this expert. If
//   `only_fetched` is 1, experts that were on the device get 0, too: `find_experts` has named them.
// - asked (host) [4 + k]: receives the run's number, 1 if the kernel waits for an answer, and from word 4 on the chosen
//   ids. When all experts are there, words 2 and 3 receive the nanoseconds spent waiting and copying.
// - x [hidden]: if not null, it is copied to x_host (host) with a question that waits.
// - answer (host) [R]: the run's number, which the host writes last; room * 65536 + the number of misses; the number of
//   words to clear, and of experts that go back; the address of each pair's expert [k]; misses [room][MISS_WORDS]; indices
//   of words of `tables` to clear [2 * room]; and experts that go back [room][BACK_WORDS]. Nothing else may access the
//   memory that those are copied from and to. The kernel does not read the answer if all chosen experts are on the device,
//   unless `always` is 1.
// - bound: longest wait for an answer in nanoseconds; 0: no limit. If no answer comes, `stream` [width] is copied to
//   `kept`, `given_up` [1] receives the run's number, and `given_up_host` [2] that number and `place`. A run that has
//   given up waits for nothing more, copies nothing and leaves the tables unchanged. The `slots` of its experts are 0, and
//   `asked` [1] is 2.
extern "C" __global__ void __launch_bounds__(THREADS)
    fetch_experts(const u32 *now, u32 *ids, const u32 *forced, int k, u64 *tables, int first, int room, int always, u64 *slots,
                  int only_fetched, u32 *tickets, u32 *desk, u32 *asked, const u32 *answer, const float *x, float *x_host, int hidden,
                  u64 part0, u64 part1, u64 part2, int bytes0, int bytes1, int bytes2, u32 bound, int place,
                  const float *stream, float *kept, int width, u32 *given_up, u32 *given_up_host) {
    wait_for_previous();
    extern __shared__ __align__(16) u32 record[];
    __shared__ u32 asks, last, told_word;
    // This is also true in a block that begins after another block of this kernel has given up. Such a block
    // would otherwise find out below.
    const bool is_over = bound != 0 && *(const volatile u32 *)given_up == now[0];
    const int lane = threadIdx.x, pieces = (4 + (4 + MISS_WORDS + BACK_WORDS) * room + 3) / 4;
    uint4 *const told = (uint4 *)desk + 1;
    u64 *const answered = (u64 *)desk + 1;
    const u32 id = lane < k ? (now[1] ? forced : ids)[lane] : 0;
    u64 slot = 1;
    if (lane < k && !is_over) slot = tables[first + id];
    // The first block to arrive asks.
    if (lane == 0) asks = atomicAdd(tickets, 1u) == 0;
    const bool missing = __syncthreads_or(slot == 0 || always);
    if (asks) {
        const u64 begun = nanoseconds();
        if (x && missing)
            for (int i = lane; i < hidden / 4; i += THREADS) ((uint4 *)x_host)[i] = ((const uint4 *)x)[i];
        if (lane < k) asked[4 + lane] = id;
        if (lane == 0) asked[1] = is_over ? 2 : missing;
        __threadfence_system();
        __syncthreads();
        if (lane == 0) {
            const u32 run = now[0];
            write_release(asked, run);
            told_word = !missing || wait_for_host(answer, run, bound) ? 1 : 2;
            const u64 end = nanoseconds();
            *answered = end;
            asked[2] = missing ? (u32)(end - begun) : 0;
        }
        __syncthreads();
        if (missing && told_word == 1)
            for (int i = lane; i < pieces; i += THREADS) told[i] = __ldcv((const uint4 *)answer + i);
        if (told_word != 1) keep_stream(stream, kept, width);
        __threadfence();
        __syncthreads();
        if (lane == 0) {
            if (told_word != 1) give_up(now[0], place, given_up, given_up_host);
            __threadfence();
            *(volatile u32 *)desk = told_word;
        }
    } else if (missing) {
        // This loop needs no bound: the block that asks always writes the word.
        if (lane == 0)
            while ((told_word = read_acquire_device(desk)) == 0) {}
        __syncthreads();
    }
    const bool has_answer = missing && told_word == 1;
    u32 missed = 0;
    if (has_answer) {
        for (int i = lane; i < pieces; i += THREADS) ((uint4 *)record)[i] = __ldcg(told + i);
        __syncthreads();
        // The entries of an answer with other room would be elsewhere.
        if (record[1] >> 16 != room) __trap();
        missed = record[1] & 0xffff;
        // PCIe transfers in both directions at once if different blocks copy. Half of the blocks saturate either
        // direction.
        const u32 outward = record[3] == 0 ? 0 : missed == 0 ? gridDim.x : gridDim.x / 2, inward = gridDim.x - outward;
        const bool is_outward = blockIdx.x >= inward;
        const u32 all = (is_outward ? outward : inward) * THREADS;
        const u32 first = (is_outward ? blockIdx.x - inward : blockIdx.x) * THREADS + threadIdx.x;
        const u32 *const misses = record + 4 + 2 * room, *const backs = misses + (2 + MISS_WORDS) * room;
        for (u32 m = 0; m < record[3] && is_outward; m++) {
            const u32 *const back = backs + m * BACK_WORDS;
            const u64 *const places = (const u64 *)back;
            for (int part = 0; part < 3; part++) copy_back(places[3 + part], places[part], back[12 + part], first, all);
        }
        for (u32 m = 0; m < missed && !is_outward; m++) {
            const u64 *const places = (const u64 *)(misses + m * MISS_WORDS + 2);
            if (places[1] == 0) continue;
            copy_part(places[0] + part0, places[1], bytes0, first, all);
            copy_part(places[0] + part1, places[2], bytes1, first, all);
            copy_part(places[0] + part2, places[3], bytes2, first, all);
        }
    }
    // The host reads what went back after a later kernel has asked it something.
    __threadfence_system();
    __syncthreads();
    if (lane == 0) last = atomicAdd(tickets + 1, 1u) == gridDim.x - 1;
    __syncthreads();
    // The last block changes the tables, after all blocks have read them.
    if (!last) return;
    __threadfence();
    const bool was_there = slot != 0;
    if (has_answer) {
        const u32 *const misses = record + 4 + 2 * room, *const cleared = misses + MISS_WORDS * room;
        if (lane < k) slot = ((const u64 *)(record + 4))[lane];
        for (u32 i = lane; i < record[2]; i += THREADS) tables[cleared[i]] = 0;
        __syncthreads();
        if (lane < missed && misses[MISS_WORDS * lane] != ~0u)
            tables[misses[MISS_WORDS * lane]] = *(const u64 *)(misses + MISS_WORDS * lane + 2);
    }
    if (lane < k) {
        slots[id] = is_over || (missing && !has_answer) || (only_fetched && was_there) ? 0 : slot;
        // Later kernels read the ids, too. `find_experts` may have written them, and then others read them now.
        if (now[1] && !only_fetched) ids[lane] = id;
    }
    if (lane == 0) {
        tickets[0] = tickets[1] = desk[0] = 0;
        asked[3] = has_answer ? (u32)(nanoseconds() - *(const volatile u64 *)answered) : 0;
    }
}

// Copies the rows of `out` [k, hidden] that the host has computed: those whose expert's slot is 0. Grid (k). The host writes the
// run's number to `done` (host) when `rows` (host) [k, hidden] are ready. The other parameters are those of
// fetch_experts. A run that gives up, or has given up, leaves `out` unchanged.
extern "C" __global__ void __launch_bounds__(256)
    take_rows(const u32 *now, const u32 *ids, const u64 *slots, const u32 *done, const float *rows, float *out, int hidden,
              u32 bound, int place, const float *stream, float *kept, int width, u32 *given_up, u32 *given_up_host) {
    wait_for_previous();
    __shared__ u32 is_there, tells;
    if (slots[ids[blockIdx.x]] != 0) return;
    if (threadIdx.x == 0) {
        const u32 run = now[0];
        tells = 0;
        is_there = bound != 0 && *(const volatile u32 *)given_up == run ? 0 : 1;
        if (is_there && !wait_for_host(done, run, bound)) {
            is_there = 0;
            // Only one block saves the stream.
            tells = atomicExch(given_up, run) != run;
        }
    }
    __syncthreads();
    if (tells) {
        keep_stream(stream, kept, width);
        __syncthreads();
        if (threadIdx.x == 0) give_up(now[0], place, given_up, given_up_host);
    }
    if (!is_there) return;
    const size_t from = (size_t)blockIdx.x * hidden;
    for (int i = threadIdx.x; i < hidden / 4; i += 256)
        ((uint4 *)(out + from))[i] = __ldcv((const uint4 *)(rows + from) + i);
}
