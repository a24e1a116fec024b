// The experts of one token, as a part of recorded work: what is not on the device is copied from pinned host memory, and the
// host, which decides what comes and where it goes, is asked and answers through words that both can reach. Nothing is launched
// or copied by the driver meanwhile.
//
// Budget. A missing expert is some MB, 50 us by PCIe; question and answer cross it twice each, 1 us each time, and the host
// takes some us to decide. 1.5 us of latency at 55 GB/s asks for 80 KB under way; every thread has 64 bytes, a block 32 KB.
#include "common.cuh"

#define THREADS 512
#define CHOSEN_MAX 32
// A missing expert: its place in the table of those that stay, or ~0, where it goes, and where its three parts come from.
#define MISS_WORDS 10
#define RECORD_WORDS (4 + 14 * CHOSEN_MAX)

// Words that the host writes, too.
__device__ __forceinline__ u32 read_acquire(const u32 *from) {
    u32 word;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
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

// `bytes` bytes from anywhere to an address that is a multiple of 16, by all threads of the grid. Words beside them are read, too,
// but only such that share 16 bytes with some of them.
__device__ __forceinline__ void copy_part(u64 to, u64 from, u32 bytes) {
    const u32 first = blockIdx.x * THREADS + threadIdx.x, all = gridDim.x * THREADS;
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
        // 16 bytes out of 32: the words that they begin in, and by how many bits they are further on.
        const u32 word = shift / 4, bits = shift % 4 * 8;
        for (u32 i = first; i < whole; i += 2 * all) {
            uint4 pairs[2][2];
#pragma unroll
            for (int k = 0; k < 2; k++)
                if (i + k * all < whole) {
                    pairs[k][0] = __ldcv(source + i + k * all);
                    pairs[k][1] = __ldcv(source + i + k * all + 1);
                }
#pragma unroll
            for (int k = 0; k < 2; k++) {
                if (i + k * all >= whole) continue;
                const uint4 a = pairs[k][0], b = pairs[k][1];
                const u32 x[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
                u32 y[5];
#pragma unroll
                for (int j = 0; j < 5; j++)
                    y[j] = word == 0 ? x[j] : word == 1 ? x[j + 1] : word == 2 ? x[j + 2] : x[j + 3];
                uint4 out;
                out.x = __funnelshift_r(y[0], y[1], bits);
                out.y = __funnelshift_r(y[1], y[2], bits);
                out.z = __funnelshift_r(y[2], y[3], bits);
                out.w = __funnelshift_r(y[3], y[4], bits);
                target[i + k * all] = out;
            }
        }
    }
    const u32 rest = bytes & 15;
    if (first < rest) ((u8 *)to)[bytes - rest + first] = __ldcv((const u8 *)from + bytes - rest + first);
}

// One token's experts of one layer. Grid (blocks): any number; `tickets` [2] are 0 before and after.
//
// now [2]: the number of this token's run, never 0 and never the one before; whether `forced` [k] are chosen instead of `ids` [k].
// tables: addresses of all experts on the device that stay there, those of the layer from `first` on; 0: not there.
// slots [k]: gets the addresses of the chosen ones; 0: somebody else computes with it.
// asked (host) [2 + k + 2]: gets the run's number, whether an answer is waited for, the chosen ids, and when all is there, how many
// nanoseconds were waited and copied. answer (host) [RECORD_WORDS]: is expected to get the run's number; then the number of misses,
// of words to clear, 0; the addresses for `slots` [k]; misses [MISS_WORDS each]; numbers of words of `tables` to clear. Where all
// chosen experts are on the device, it is not looked at.
extern "C" __global__ void __launch_bounds__(THREADS)
    fetch_experts(const u32 *now, const u32 *ids, const u32 *forced, int k, u64 *tables, int first, u64 *slots,
                  u32 *tickets, u32 *asked, const u32 *answer, u64 part0, u64 part1, u64 part2, int bytes0, int bytes1,
                  int bytes2) {
    wait_for_previous();
    __shared__ __align__(16) u32 record[RECORD_WORDS];
    __shared__ u32 missing, last;
    __shared__ u64 begun, answered;
    const int lane = threadIdx.x;
    const u32 run = now[0];
    u64 slot = 1;
    if (lane < 32) {
        u32 id = 0;
        if (lane < k) {
            id = now[1] ? forced[lane] : ids[lane];
            slot = tables[first + id];
        }
        const bool absent = __any_sync(~0u, slot == 0);
        u32 ticket = 0;
        if (lane == 0) {
            begun = nanoseconds();
            ticket = atomicAdd(tickets, 1u);
        }
        // Whoever comes first asks.
        if (__shfl_sync(~0u, ticket, 0) == 0) {
            if (lane < k) asked[2 + lane] = id;
            if (lane == 0) asked[1] = absent;
            __threadfence_system();
            __syncwarp();
            if (lane == 0) write_release(asked, run);
        }
        if (lane == 0) {
            missing = absent;
            if (absent)
                while (read_acquire(answer) != run) {}
            answered = nanoseconds();
        }
    }
    __syncthreads();
    if (missing) {
        const int words = 4 + (2 + MISS_WORDS + 2) * k;
        for (int i = lane; i < words; i += THREADS) record[i] = __ldcv(answer + i);
        __syncthreads();
        const u32 *miss = record + 4 + 2 * k;
        for (u32 m = 0; m < record[1]; m++, miss += MISS_WORDS) {
            const u64 *const places = (const u64 *)(miss + 2);
            copy_part(places[0] + part0, places[1], bytes0);
            copy_part(places[0] + part1, places[2], bytes1);
            copy_part(places[0] + part2, places[3], bytes2);
        }
    }
    __threadfence();
    __syncthreads();
    if (lane == 0) last = atomicAdd(tickets + 1, 1u) == gridDim.x - 1;
    __syncthreads();
    // The tables change when all blocks have looked.
    if (!last || lane >= 32) return;
    if (missing) {
        const u32 *const misses = record + 4 + 2 * k, *const cleared = misses + MISS_WORDS * k;
        if (lane < k) slot = ((const u64 *)(record + 4))[lane];
        for (u32 i = lane; i < record[2]; i += 32) tables[cleared[i]] = 0;
        __syncwarp();
        if (lane < record[1] && misses[MISS_WORDS * lane] != ~0u)
            tables[misses[MISS_WORDS * lane]] = *(const u64 *)(misses + MISS_WORDS * lane + 2);
    }
    if (lane < k) slots[lane] = slot;
    if (lane == 0) {
        tickets[0] = tickets[1] = 0;
        asked[2 + k] = (u32)(answered - begun);
        asked[3 + k] = (u32)(nanoseconds() - answered);
    }
}
