// The experts of one token, as a part of recorded work: what is not on the device is copied from pinned host memory, and the
// host, which decides what comes and where it goes, is asked and answers through words that both can reach. Nothing is launched
// or copied by the driver meanwhile.
//
// Budget. A missing expert is some MB, 50 us by PCIe; question and answer cross it once each way and once more to be seen, about
// 1 us each time, and the host takes some us to decide. Reads of one word of the host's by several blocks are done one after the
// other, 1.2 us each, so a single block asks and tells the others. 1.5 us of latency at 55 GB/s asks for 80 KB under way; every
// thread has 64 bytes, a block 32 KB.
#include "common.cuh"

#define THREADS 512
#define CHOSEN_MAX 32
// A missing expert: its place in the table of those that stay, or ~0, where it goes, and where its three parts come from.
#define MISS_WORDS 10
// An expert that goes back to the host: where its three parts are, where they go, and their bytes.
#define BACK_WORDS 16
#define RECORD_WORDS (4 + (4 + MISS_WORDS + BACK_WORDS) * CHOSEN_MAX)

// Words that the host writes, too.
__device__ __forceinline__ u32 read_acquire(const u32 *from) {
    u32 word;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
    return word;
}

// Words that other blocks write.
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

// Waits until the host has written `expected` to `word`. With a `bound`, in nanoseconds, it gives up after that time: a GPU with a
// watchdog ends kernels that take too long, and the host may be waiting for a disk. 0: it waits as long as it takes.
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

// The residual stream as it is when a run gives up, for the host to go on from: later kernels of the run overwrite it.
__device__ __forceinline__ void keep_stream(const float *stream, float *kept, int width) {
    for (int i = threadIdx.x; i < width / 4; i += blockDim.x) ((uint4 *)kept)[i] = ((const uint4 *)stream)[i];
}

// Tells later kernels of the run, and the host, that it has given up, and where.
__device__ __forceinline__ void give_up(u32 run, u32 place, u32 *given_up, u32 *given_up_host) {
    *given_up = run;
    given_up_host[1] = place;
    __threadfence_system();
    write_release(given_up_host, run);
}

// The 16 bytes that begin with byte `shift` of `a`, `b` being the 16 behind it.
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

// `bytes` bytes from anywhere to an address that is a multiple of 16, by `all` threads, of which this is number `first`. Words beside
// them are read, too, but only such that share 16 bytes with some of them.
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
        // The next 16 bytes are the next lane's.
        const u32 lane = threadIdx.x & 31;
        for (u32 i = first; i - lane < whole; i += 2 * all) {
            uint4 own[2], beyond[2];
#pragma unroll
            for (int k = 0; k < 2; k++) {
                // The last lane with something to copy has a neighbour that only reads.
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

// `bytes` bytes from an address that is a multiple of 16 to anywhere, likewise. Up to 15 bytes behind them are read, none are
// written.
__device__ __forceinline__ void copy_back(u64 to, u64 from, u32 bytes, u32 first, u32 all) {
    // Bytes before the first multiple of 16.
    const u32 head = min(-(u32)to & 15, bytes), whole = (bytes - head) / 16;
    const uint4 *const source = (const uint4 *)from;
    uint4 *const target = (uint4 *)(to + head);
    // Several reads under way for each thread: they take longer than the writes, which nobody waits for.
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

// One token's experts of one layer. Grid (blocks): any number; `tickets` [2] and the first word of `desk` [4 + RECORD_WORDS] are 0
// before and after.
//
// now [2]: the number of this token's run, never 0 and never the one before; whether `forced` [k] are chosen instead of `ids` [k].
// tables: addresses of all experts on the device that stay there, those of the layer from `first` on; 0: not there.
// slots [k]: gets the addresses of the chosen ones; 0: somebody else computes with it.
// asked (host) [2 + k + 2]: gets the run's number, whether an answer is waited for, the chosen ids, and when all is there, how many
// nanoseconds were waited and copied. x [hidden], if there is one, goes to x_host (host) with a question that waits.
// answer (host) [RECORD_WORDS]: is expected to get the run's number; then the number of misses, of words to clear, of experts that go
// back; the addresses for `slots` [k]; misses [k][MISS_WORDS]; numbers of words of `tables` to clear [2k]; experts that go
// back [k][BACK_WORDS], from and to where nothing else is written and read. Where all chosen experts are on the device, it is
// not looked at.
// bound: nanoseconds that it waits for an answer at most; 0: as long as it takes. If none came, `stream` [width] is copied to
// `kept`, `given_up` [1] gets the run's number and `given_up_host` [2] that number and `place`. A run that has given up waits for
// nothing more, copies nothing and leaves the tables as they are; all `slots` are 0, and `asked` says 2.
extern "C" __global__ void __launch_bounds__(THREADS)
    fetch_experts(const u32 *now, const u32 *ids, const u32 *forced, int k, u64 *tables, int first, u64 *slots,
                  u32 *tickets, u32 *desk, u32 *asked, const u32 *answer, const float *x, float *x_host, int hidden,
                  u64 part0, u64 part1, u64 part2, int bytes0, int bytes1, int bytes2, u32 bound, int place,
                  const float *stream, float *kept, int width, u32 *given_up, u32 *given_up_host) {
    wait_for_previous();
    __shared__ __align__(16) u32 record[RECORD_WORDS];
    __shared__ u32 missing, asks, last, told_word;
    // Also in a block that begins after another one of this kernel has given up: it would find that out below.
    const bool is_over = bound != 0 && *(const volatile u32 *)given_up == now[0];
    const int lane = threadIdx.x, pieces = (4 + (4 + MISS_WORDS + BACK_WORDS) * k + 3) / 4;
    uint4 *const told = (uint4 *)desk + 1;
    u64 *const answered = (u64 *)desk + 1;
    u64 slot = 1;
    if (lane < 32) {
        if (lane < k && !is_over) slot = tables[first + (now[1] ? forced : ids)[lane]];
        const bool absent = __any_sync(~0u, slot == 0);
        if (lane == 0) {
            missing = absent;
            // Whoever comes first asks.
            asks = atomicAdd(tickets, 1u) == 0;
        }
    }
    __syncthreads();
    if (asks) {
        const u64 begun = nanoseconds();
        if (x && missing)
            for (int i = lane; i < hidden / 4; i += THREADS) ((uint4 *)x_host)[i] = ((const uint4 *)x)[i];
        if (lane < k) asked[2 + lane] = (now[1] ? forced : ids)[lane];
        if (lane == 0) asked[1] = is_over ? 2 : missing;
        __threadfence_system();
        __syncthreads();
        if (lane == 0) {
            const u32 run = now[0];
            write_release(asked, run);
            told_word = !missing || wait_for_host(answer, run, bound) ? 1 : 2;
            const u64 end = nanoseconds();
            *answered = end;
            asked[2 + k] = missing ? (u32)(end - begun) : 0;
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
        // No bound: the block that asks always ends this.
        if (lane == 0)
            while ((told_word = read_acquire_device(desk)) == 0) {}
        __syncthreads();
    }
    const bool has_answer = missing && told_word == 1;
    if (has_answer) {
        for (int i = lane; i < pieces; i += THREADS) ((uint4 *)record)[i] = __ldcg(told + i);
        __syncthreads();
        // PCIe goes both ways at a time if different blocks do; half of them are enough for either.
        const u32 outward = record[3] == 0 ? 0 : record[1] == 0 ? gridDim.x : gridDim.x / 2, inward = gridDim.x - outward;
        const bool is_outward = blockIdx.x >= inward;
        const u32 all = (is_outward ? outward : inward) * THREADS;
        const u32 first = (is_outward ? blockIdx.x - inward : blockIdx.x) * THREADS + threadIdx.x;
        const u32 *const misses = record + 4 + 2 * k, *const backs = misses + (2 + MISS_WORDS) * k;
        for (u32 m = 0; m < record[3] && is_outward; m++) {
            const u32 *const back = backs + m * BACK_WORDS;
            const u64 *const places = (const u64 *)back;
            for (int part = 0; part < 3; part++) copy_back(places[3 + part], places[part], back[12 + part], first, all);
        }
        for (u32 m = 0; m < record[1] && !is_outward; m++) {
            const u64 *const places = (const u64 *)(misses + m * MISS_WORDS + 2);
            copy_part(places[0] + part0, places[1], bytes0, first, all);
            copy_part(places[0] + part1, places[2], bytes1, first, all);
            copy_part(places[0] + part2, places[3], bytes2, first, all);
        }
    }
    // The host looks at what went back once a later kernel has asked it something.
    __threadfence_system();
    __syncthreads();
    if (lane == 0) last = atomicAdd(tickets + 1, 1u) == gridDim.x - 1;
    __syncthreads();
    // The tables change when all blocks have looked.
    if (!last || lane >= 32) return;
    __threadfence();
    if (has_answer) {
        const u32 *const misses = record + 4 + 2 * k, *const cleared = misses + MISS_WORDS * k;
        if (lane < k) slot = ((const u64 *)(record + 4))[lane];
        for (u32 i = lane; i < record[2]; i += 32) tables[cleared[i]] = 0;
        __syncwarp();
        if (lane < record[1] && misses[MISS_WORDS * lane] != ~0u)
            tables[misses[MISS_WORDS * lane]] = *(const u64 *)(misses + MISS_WORDS * lane + 2);
    }
    if (lane < k) slots[lane] = is_over || (missing && !has_answer) ? 0 : slot;
    if (lane == 0) {
        tickets[0] = tickets[1] = desk[0] = 0;
        asked[3 + k] = has_answer ? (u32)(nanoseconds() - *(const volatile u64 *)answered) : 0;
    }
}

// Rows of `out` [k, hidden] that the host has computed: those whose slot is 0. Grid (k). `done` (host) gets the number of the run
// when `rows` (host) [k, hidden] are there. The others as in fetch_experts: a run that gives up, or has, leaves `out` as it is.
extern "C" __global__ void __launch_bounds__(256)
    take_rows(const u32 *now, const u64 *slots, const u32 *done, const float *rows, float *out, int hidden, u32 bound, int place,
              const float *stream, float *kept, int width, u32 *given_up, u32 *given_up_host) {
    wait_for_previous();
    __shared__ u32 is_there, tells;
    if (slots[blockIdx.x] != 0) return;
    if (threadIdx.x == 0) {
        const u32 run = now[0];
        tells = 0;
        is_there = bound != 0 && *(const volatile u32 *)given_up == run ? 0 : 1;
        if (is_there && !wait_for_host(done, run, bound)) {
            is_there = 0;
            // One block keeps the stream.
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
