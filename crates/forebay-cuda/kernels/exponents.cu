// Decodes weights whose exponents are coded: docs/codec.md describes the bytes.
//
// A warp decodes a chunk of up to 4096 weights. It first counts, for every word of a bitmap, the codes before it that another level
// follows. Then every lane finds the codes of its eight weights by itself.
//
// Nothing of a chunk is trusted: lengths and counts are checked before they say where to read. A damaged chunk sets the flag, and what
// its weights get is undefined.
#include "common.cuh"

#define WARPS 8
#define CHUNK 4096
#define CODES 21

// Words of the bitmaps of a whole chunk.
static constexpr int WORDS = CHUNK / 32;

struct Counts {
    u16 before[3][WORDS];  // by level and word
};

// Sum of x over the lanes below this one; `all` receives the sum over all lanes.
__device__ __forceinline__ int sum_below(int x, int &all) {
    const int lane = threadIdx.x & 31;
    int sum = x;
#pragma unroll
    for (int distance = 1; distance < 32; distance <<= 1) {
        const int other = __shfl_up_sync(~0u, sum, distance);
        if (lane >= distance) sum += other;
    }
    all = __shfl_sync(~0u, sum, 31);
    return sum - x;
}

// Returns a word of the codes that are all ones, in MAPS bitmaps of `words` words each.
template <int MAPS> __device__ __forceinline__ u32 full(const u32 *maps, int words, int word) {
    u32 all = maps[word];
#pragma unroll
    for (int map = 1; map < MAPS; map++) all &= maps[map * words + word];
    return all;
}

// Counts such codes before every word. Returns the number of all.
template <int MAPS> __device__ __forceinline__ int count_full(const u32 *maps, int words, u16 (&before)[WORDS]) {
    int total = 0;
    for (int first = 0; first < words; first += 32) {
        const int word = first + (threadIdx.x & 31);
        int all;
        const int below = sum_below(word < words ? __popc(full<MAPS>(maps, words, word)) : 0, all);
        if (word < words) before[word] = (u16)(total + below);
        total += all;
    }
    return total;
}

__device__ __forceinline__ int words_of(int items) { return (items + 31) / 32; }

// Bits of item `bit` of word `word` in MAPS bitmaps.
template <int MAPS> __device__ __forceinline__ u32 code_at(const u32 *maps, int words, int word, int bit) {
    u32 code = 0;
#pragma unroll
    for (int map = 0; map < MAPS; map++) code |= (maps[map * words + word] >> bit & 1) << map;
    return code;
}

// `chunks` lie one after the other, at multiples of 4: chunk i from byte starts[i] to byte starts[i + 1]. Every one but the last has
// CHUNK weights. Grid: any number of blocks. `table` [CODES]; `out` is aligned to 16 bytes. `flag` is set to 1 if a chunk is damaged.
template <int EXPONENT_BITS, int BYTES>
__device__ __forceinline__ void decode(const u8 *bytes, const u32 *starts, const u8 *table, u8 *out, int chunks, u64 weights,
                                       u32 *flag) {
    constexpr int REST_BITS = 8 * BYTES - EXPONENT_BITS, MANTISSA_BITS = REST_BITS - 1;
    constexpr int REST_MAPS = REST_BITS % 8;
    constexpr bool REST_BYTES = REST_BITS >= 8;
    __shared__ Counts all_counts[WARPS];
    __shared__ u8 offsets[CODES];
    wait_for_previous();
    if (threadIdx.x < CODES) offsets[threadIdx.x] = table[threadIdx.x];
    __syncthreads();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    Counts &counts = all_counts[warp];
    for (int chunk = blockIdx.x * WARPS + warp; chunk < chunks; chunk += gridDim.x * WARPS) {
        const u64 first_weight = (u64)chunk * CHUNK;
        const int count = (int)min(weights - first_weight, (u64)CHUNK);
        const u32 start = starts[chunk], length = starts[chunk + 1] - start;
        __syncwarp();
        if (length < 8) {
            if (lane == 0) *flag = 1;
            continue;
        }
        const u32 *const head = (const u32 *)(bytes + start);
        const u32 one = head[0], two = head[1];
        const u32 base = one & 255;
        const int second_items = (int)(one >> 16), third_items = (int)(two & 0xffff), raws = (int)(two >> 16);
        const int words = words_of(count), second_words = words_of(second_items), third_words = words_of(third_items);
        const u32 *const rest_bytes = head + 2;
        const u32 *const rest_maps = rest_bytes + (REST_BYTES ? 8 * words : 0);
        const u32 *const first = rest_maps + REST_MAPS * words;
        const u32 *const second = first + 2 * words;
        const u32 *const third = second + 2 * second_words;
        const u8 *const raw = (const u8 *)(third + 4 * third_words);
        const u32 needed = (u32)(raw - (const u8 *)head) + (raws + 3) / 4 * 4;
        // Counts are at most those of a level before, so nothing is read beyond the chunk, nor written beyond `before`.
        bool fits = length == needed && second_items <= count && third_items <= second_items;
        if (fits) fits = count_full<2>(first, words, counts.before[0]) == second_items;
        if (fits) fits = count_full<2>(second, second_words, counts.before[1]) == third_items;
        if (fits) fits = count_full<4>(third, third_words, counts.before[2]) == raws;
        if (!fits) {
            if (lane == 0) *flag = 1;
            continue;
        }
        __syncwarp();
        const auto known = [&](u32 code) { return base + offsets[code] & 255; };
        const u32 own[3] = {known(0), known(1), known(2)};
        u32 largest = 0;
        for (int at = 8 * lane; at < count; at += 256) {
            const int word = at / 32, shift = at % 32;
            const u32 low = first[word] >> shift, high = first[words + word] >> shift;
            int place = counts.before[0][word] + __popc(full<2>(first, words, word) & ((1u << shift) - 1));
            u32 rest_low[2] = {};
            if constexpr (REST_BYTES) {
                rest_low[0] = rest_bytes[at / 4];
                rest_low[1] = rest_bytes[at / 4 + 1];
            }
            u32 maps[REST_MAPS > 0 ? REST_MAPS : 1];
#pragma unroll
            for (int map = 0; map < REST_MAPS; map++) maps[map] = rest_maps[map * words + word] >> shift;
            u32 values[4] = {};
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const u32 code = (low >> i & 1) | (high >> i & 1) << 1;
                u32 exponent = code == 0 ? own[0] : code == 1 ? own[1] : own[2];
                if (code == 3) {
                    const int of = place >> 5, bit = place & 31;
                    place++;
                    const u32 next = code_at<2>(second, second_words, of, bit);
                    exponent = known(next < 3 ? 3 + next : 0);
                    if (next == 3) {
                        const u32 below = full<2>(second, second_words, of) & ((1u << bit) - 1);
                        const int item = counts.before[1][of] + __popc(below), at_word = item >> 5, at_bit = item & 31;
                        const u32 last = code_at<4>(third, third_words, at_word, at_bit);
                        exponent = known(last < 15 ? 6 + last : 0);
                        if (last == 15) {
                            const u32 under = full<4>(third, third_words, at_word) & ((1u << at_bit) - 1);
                            exponent = raw[counts.before[2][at_word] + __popc(under)];
                        }
                    }
                }
                u32 rest = REST_BYTES ? rest_low[i / 4] >> 8 * (i % 4) & 255 : 0;
#pragma unroll
                for (int map = 0; map < REST_MAPS; map++) rest |= (maps[map] >> i & 1) << (REST_BYTES ? 8 + map : map);
                // Places behind the last weight have codes, too, but they may be anything.
                if (at + i < count) largest = max(largest, exponent);
                const u32 value = (rest >> MANTISSA_BITS) << (8 * BYTES - 1) | exponent << MANTISSA_BITS |
                                  rest & ((1 << MANTISSA_BITS) - 1);
                values[i * BYTES / 4] |= (value & ((1u << 8 * BYTES) - 1)) << 8 * (i * BYTES % 4);
            }
            u8 *const to = out + (first_weight + at) * BYTES;
            if (at + 8 <= count) {
                if constexpr (BYTES == 2)
                    *(uint4 *)to = make_uint4(values[0], values[1], values[2], values[3]);
                else
                    *(uint2 *)to = make_uint2(values[0], values[1]);
            } else {
                for (int i = 0; i < (count - at) * BYTES; i++) to[i] = (u8)(values[i / 4] >> 8 * (i % 4));
            }
        }
        if (EXPONENT_BITS < 8 && largest >> EXPONENT_BITS) *flag = 1;
    }
}

#define KERNEL(NAME, EXPONENT_BITS, BYTES)                                                                     \
    extern "C" __global__ void __launch_bounds__(32 * WARPS)                                                   \
        NAME(const u8 *bytes, const u32 *starts, const u8 *table, u8 *out, int chunks, u64 weights, u32 *flag) { \
        decode<EXPONENT_BITS, BYTES>(bytes, starts, table, out, chunks, weights, flag);                        \
    }
KERNEL(decode_exponents_bf16, 8, 2)
KERNEL(decode_exponents_f16, 5, 2)
KERNEL(decode_exponents_f8_e4m3, 4, 1)
KERNEL(decode_exponents_f8_e5m2, 5, 1)
