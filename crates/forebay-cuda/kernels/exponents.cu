// Decodes weights whose exponents are coded: docs/codec.md describes the bytes.
//
// A warp decodes a chunk of up to 4096 weights, from the last level to the first: third codes become exponents in shared memory, then
// second codes, which look up those. Then every lane takes words of 32 weights. It knows how many second codes come before its word, and
// looks up the exponents of its weights from there on. Nothing branches, and a weight takes about 20 instructions.
//
// Compact blocks come back as they were: exponents become codes of four bits, and a warp writes pieces of 256 weights.
//
// Nothing of a chunk is trusted: lengths and counts are checked before they say where to read. A damaged chunk sets the flag, and what
// its weights get is undefined.
#include "common.cuh"

#define WARPS 4
#define CHUNK 4096
#define CODES 21

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

__device__ __forceinline__ int words_of(int items) { return (items + 31) / 32; }

// Calls decode(code, place, item) for every item of a level: its code in MAPS bitmaps of `words` words each, and for codes of only ones
// their number among such. Returns the number of all such codes. A step takes 32 items, one for each lane.
template <int MAPS, class F> __device__ __forceinline__ int for_codes(const u32 *maps, int words, int lane, F decode) {
    int total = 0;
#pragma unroll 1
    for (int first = 0; first < words; first += 32) {
        u32 own[MAPS];
#pragma unroll
        for (int map = 0; map < MAPS; map++) own[map] = first + lane < words ? maps[map * words + first + lane] : 0;
        // Words behind the last one are zeros, whose items the caller ignores.
#pragma unroll 2
        for (int word = 0; word < min(32, words - first); word++) {
            u32 code = 0, full = ~0u;
#pragma unroll
            for (int map = 0; map < MAPS; map++) {
                const u32 bits = __shfl_sync(~0u, own[map], word);
                code |= (bits >> lane & 1) << map;
                full &= bits;
            }
            decode(code, total + __popc(full & ((1u << lane) - 1)), 32 * (first + word) + lane);
            total += __popc(full);
        }
    }
    return total;
}

// Compact blocks of WEIGHTS weights, or numbers if there are none.
template <int WEIGHTS> struct Blocks {
    static constexpr int END_WORDS = WEIGHTS == 2048 ? 4 : 2;  // of a block's end
    static constexpr int PIECE = 256, PIECE_BYTES = 384;
    static constexpr int BYTES = WEIGHTS / PIECE * PIECE_BYTES + 4 * END_WORDS;
};

// The ends of a chunk's blocks: a mask of 16 bits, the blocks' bases, and listed ends.
template <int WEIGHTS> struct Ends {
    const u8 *bytes;
    int blocks;
    u32 mask;

    __device__ __forceinline__ u32 list() const { return (2 + blocks + 3) / 4; }
    __device__ __forceinline__ u32 words() const { return list() + __popc(mask) * Blocks<WEIGHTS>::END_WORDS; }
    // The exponent of code 0 of a block.
    __device__ __forceinline__ u32 first_exponent(int block) const { return min((u32)bytes[2 + block], 240u); }

    // Writes the ends of all blocks behind their pieces. A lane writes one word; there are at most 32.
    __device__ __forceinline__ void write(u8 *blocks_out, int lane) const {
        constexpr int WORDS = Blocks<WEIGHTS>::END_WORDS, BYTES = Blocks<WEIGHTS>::BYTES;
        static_assert(CHUNK / WEIGHTS * WORDS <= 32, "a lane has a word");
        const int block = lane / WORDS, word = lane % WORDS;
        if (block >= blocks) return;
        u32 value = word == 0 ? bytes[2 + block] : 0;
        if (mask >> block & 1) value = ((const u32 *)bytes)[list() + __popc(mask & ((1u << block) - 1)) * WORDS + word];
        *(u32 *)(blocks_out + (block + 1) * BYTES - 4 * WORDS + 4 * word) = value;
    }
};

// Spreads the lowest four bits to four bytes.
__device__ __forceinline__ u32 spread(u32 bits) { return (bits & 15) * 0x00204081u & 0x01010101u; }

// `chunks` lie one after the other, at multiples of 4: chunk i from byte starts[i] to byte starts[i + 1]. Every one but the last has
// CHUNK weights. Grid: any number of blocks. `table` [CODES]; `out` is aligned to 16 bytes. `flag` is set to 1 if a chunk is damaged.
// Where BLOCK is not 0, weights are those of whole compact blocks of so many weights.
template <int EXPONENT_BITS, int BYTES, int BLOCK = 0>
__device__ __forceinline__ void decode(const u8 *bytes, const u32 *starts, const u8 *table, u8 *out, int chunks, u64 weights,
                                       u32 *flag) {
    constexpr int REST_BITS = 8 * BYTES - EXPONENT_BITS, MANTISSA_BITS = REST_BITS - 1;
    constexpr int REST_MAPS = REST_BITS % 8;
    constexpr bool REST_BYTES = REST_BITS >= 8;
    // Exponents of the second codes of each warp's chunk, in order. Before, those of the third codes, so that the last one is where that of
    // the last second code goes: as many second codes as third ones come at least after a place, so none is overwritten before it is used.
    __shared__ u8 all_exponents[WARPS][CHUNK];
    // Exponents of 32 words of weights.
    __shared__ uint4 all_ordered[WARPS][64];
    __shared__ u8 offsets[CODES];
    wait_for_previous();
    if (threadIdx.x < CODES) offsets[threadIdx.x] = table[threadIdx.x];
    __syncthreads();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u8 *const exponents = all_exponents[warp];
    uint4 *const ordered = all_ordered[warp];
    for (int chunk = blockIdx.x * WARPS + warp; chunk < chunks; chunk += gridDim.x * WARPS) {
        const u64 first_weight = (u64)chunk * CHUNK;
        const int count = (int)min(weights - first_weight, (u64)CHUNK);
        const u32 start = starts[chunk], length = starts[chunk + 1] - start;
        __syncwarp();
        if (length < (BLOCK > 0 ? 12 : 8)) {
            if (lane == 0) *flag = 1;
            continue;
        }
        const u32 *const head = (const u32 *)(bytes + start);
        const u32 one = head[0], two = head[1];
        const u32 base = one & 255;
        const int second_items = (int)(one >> 16), third_items = (int)(two & 0xffff), raws = (int)(two >> 16);
        const int words = words_of(count), second_words = words_of(second_items), third_words = words_of(third_items);
        Ends<BLOCK> ends = {};
        if constexpr (BLOCK > 0) {
            ends.bytes = (const u8 *)(head + 2);
            ends.blocks = count / BLOCK;
            ends.mask = head[2] & 0xffff;
        }
        const u32 *const rest_bytes = head + 2 + (BLOCK > 0 ? ends.words() : 0);
        const u32 *const rest_maps = rest_bytes + (REST_BYTES ? 8 * words : 0);
        const u32 *const first = rest_maps + REST_MAPS * words;
        const u32 *const second = first + 2 * words;
        const u32 *const third = second + 2 * second_words;
        const u8 *const raw = (const u8 *)(third + 4 * third_words);
        const u32 needed = (u32)(raw - (const u8 *)head) + (raws + 3) / 4 * 4;
        // Counts are at most those of a level before, so nothing is read beyond the chunk, nor written beyond `exponents`.
        bool fits = length == needed && second_items <= count && third_items <= second_items && raws <= third_items;
        if constexpr (BLOCK > 0) fits = fits && ends.mask >> ends.blocks == 0;
        const auto known = [&](u32 code) { return base + offsets[code] & 255; };
        u8 *const thirds = exponents + max(second_items - third_items, 0);
        if (fits) {
            fits = raws == for_codes<4>(third, third_words, lane, [&](u32 code, int place, int item) {
                       u32 exponent = known(code < 15 ? 6 + code : 0);
                       if (code == 15 && place < raws) exponent = raw[place];
                       if (item < third_items) thirds[item] = (u8)exponent;
                   });
        }
        __syncwarp();
        if (fits) {
            const u32 own[3] = {known(3), known(4), known(5)};
            fits = third_items == for_codes<2>(second, second_words, lane, [&](u32 code, int place, int item) {
                       u32 exponent = code == 0 ? own[0] : code == 1 ? own[1] : own[2];
                       if (code == 3 && place < third_items) exponent = thirds[place];
                       __syncwarp();
                       if (item < second_items) exponents[item] = (u8)exponent;
                       __syncwarp();
                   });
        }
        __syncwarp();
        int total = 0;
        u32 found = 0;  // bits of exponents, or of codes of blocks
        u8 *chunk_out = out + first_weight * BYTES;
        if constexpr (BLOCK > 0) {
            chunk_out = out + (u64)chunk * (CHUNK / BLOCK * Blocks<BLOCK>::BYTES);
            if (fits) ends.write(chunk_out, lane);
        }
        // Four times the exponent of code 0, and the bits in which those of codes 1 and 2 differ from it.
        const u32 own = known(0) * 0x01010101u, with_low = known(1) * 0x01010101u ^ own, with_high = known(2) * 0x01010101u ^ own;
        for (int step = 0; fits && step < words; step += 32) {
            const int word = step + lane;
            const bool present = word < words;
            const u32 low = present ? first[word] : 0, high = present ? first[words + word] : 0, listed = low & high;
            int all;
            const u8 *next = exponents + total + sum_below(__popc(listed), all);
            total += all;
            // Then places are beyond the second codes.
            if (total > second_items) {
                fits = false;
                break;
            }
            u32 coded[8];
#pragma unroll
            for (int four = 0; four < 8; four++) {
                // All bits of a byte are the code's low or high one.
                const u32 lows = spread(low >> 4 * four) * 255, highs = spread(high >> 4 * four) * 255;
                coded[four] = own ^ lows & with_low ^ highs & with_high;
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (listed & 1u << (4 * four + i))
                        coded[four] = __byte_perm(coded[four], *next++, i == 0 ? 0x3214 : i == 1 ? 0x3240 : i == 2 ? 0x3410 : 0x4210);
            }
            if constexpr (BLOCK > 0) {
                // Codes of the block of this word. If a byte is too small, the lowest such byte has a bit above the lowest four after
                // the subtraction, because no base is above 240.
                const u32 first_exponents = present ? ends.first_exponent(word / (BLOCK / 32)) * 0x01010101u : 0;
#pragma unroll
                for (int four = 0; four < 8; four++) {
                    coded[four] -= first_exponents;
                    if (present) found |= coded[four];
                }
            }
            // From here on, a lane has eight adjacent weights, so that lanes read and write adjacent bytes.
            ordered[2 * lane] = make_uint4(coded[0], coded[1], coded[2], coded[3]);
            ordered[2 * lane + 1] = make_uint4(coded[4], coded[5], coded[6], coded[7]);
            __syncwarp();
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int at = 32 * step + 256 * k + 8 * lane, here = min(count - at, 8);
                if (here <= 0) break;
                const uint2 both = ((const uint2 *)ordered)[32 * k + lane];
                if constexpr (BLOCK > 0) {
                    // All lanes write one piece.
                    constexpr int PIECE = Blocks<BLOCK>::PIECE, PIECES = BLOCK / PIECE;
                    const int piece = at / PIECE;
                    u8 *const to = chunk_out + piece / PIECES * Blocks<BLOCK>::BYTES + piece % PIECES * Blocks<BLOCK>::PIECE_BYTES;
                    const u32 rest[2] = {rest_bytes[at / 4], rest_bytes[at / 4 + 1]};
                    // The upper bits of a weight's code, and the bit above them in the word of eight weights.
                    const u32 four[2] = {both.x >> 1 & 0x07070707u | rest[0] >> 4 & 0x08080808u,
                                         both.y >> 1 & 0x07070707u | rest[1] >> 4 & 0x08080808u};
                    const u32 even = __byte_perm(four[0], four[1], 0x1504), odd = __byte_perm(four[0], four[1], 0x6372);
                    ((uint2 *)to)[lane] = make_uint2(both.x << 7 & 0x80808080u | rest[0] & 0x7f7f7f7fu,
                                                     both.y << 7 & 0x80808080u | rest[1] & 0x7f7f7f7fu);
                    ((u32 *)(to + PIECE))[lane] = even | odd << 4;
                } else {
                    if constexpr (EXPONENT_BITS < 8) {
                        // Places behind the last weight have codes, too, but they may be anything.
#pragma unroll
                        for (int i = 0; i < 8; i++)
                            if (i < here) found |= (i < 4 ? both.x : both.y) & 255u << 8 * (i % 4);
                    }
                    u32 maps[REST_MAPS > 0 ? REST_MAPS : 1];
#pragma unroll
                    for (int map = 0; map < REST_MAPS; map++) maps[map] = ((const u8 *)(rest_maps + map * words))[at / 8];
                    u32 values[4] = {};
#pragma unroll
                    for (int four = 0; four < 2; four++) {
                        const u32 coded = four ? both.y : both.x;
                        u32 rest = 0;
#pragma unroll
                        for (int map = 0; map < REST_MAPS; map++) rest |= spread(maps[map] >> 4 * four) << map;
                        if constexpr (BYTES == 1) {
                            const u32 sign = rest >> MANTISSA_BITS & 0x01010101u;
                            const u32 mantissa = rest & ((1 << MANTISSA_BITS) - 1) * 0x01010101u;
                            values[four] = sign << 7 | coded << MANTISSA_BITS | mantissa;
                        } else {
                            const u32 byte = rest_bytes[at / 4 + four];
#pragma unroll
                            for (int pair = 0; pair < 2; pair++) {
                                const u32 bytes_of = pair ? 0x4342 : 0x4140;
                                const u32 e = __byte_perm(coded, 0, bytes_of), r = __byte_perm(byte, 0, bytes_of);
                                const u32 upper = REST_MAPS > 0 ? __byte_perm(rest, 0, bytes_of) << 8 : 0;
                                // Sign and mantissa as one number, in 16 bits each.
                                const u32 signed_mantissa = r | upper;
                                constexpr u32 MANTISSAS = ((1 << MANTISSA_BITS) - 1) * 0x00010001u;
                                values[2 * four + pair] = (signed_mantissa & ~MANTISSAS) << (15 - MANTISSA_BITS) | e << MANTISSA_BITS |
                                                          signed_mantissa & MANTISSAS;
                            }
                        }
                    }
                    u8 *const to = chunk_out + at * BYTES;
                    if (here == 8) {
                        if constexpr (BYTES == 2)
                            *(uint4 *)to = make_uint4(values[0], values[1], values[2], values[3]);
                        else
                            *(uint2 *)to = make_uint2(values[0], values[1]);
                    } else {
#pragma unroll
                        for (int i = 0; i < 8 * BYTES; i++)
                            if (i < here * BYTES) to[i] = (u8)(values[i / 4] >> 8 * (i % 4));
                    }
                }
            }
            __syncwarp();
        }
        constexpr int BITS = BLOCK > 0 ? 4 : EXPONENT_BITS;
        if (!fits || total != second_items || found & (255u << BITS & 255) * 0x01010101u) *flag = 1;
    }
}

// Decodes containers: `list` says where each begins in `from`, where its weights begin in `to`, and their number. Grid: blocks for the chunks of
// the largest, and the number of containers. Starts were checked by the host.
template <int EXPONENT_BITS, int BYTES, int BLOCK = 0>
__device__ __forceinline__ void decode_container(const u64 *list, const u8 *from, u8 *to, u32 *flag) {
    constexpr int TABLE = 8, STARTS = 32;
    const u64 *const entry = list + 3 * blockIdx.y;
    const u8 *const bytes = from + entry[0];
    const u64 weights = entry[2];
    decode<EXPONENT_BITS, BYTES, BLOCK>(bytes, (const u32 *)(bytes + STARTS), bytes + TABLE, to + entry[1],
                                        (int)((weights + CHUNK - 1) / CHUNK), weights, flag);
}

#define KERNEL(NAME, ...)                                                                                      \
    extern "C" __global__ void __launch_bounds__(32 * WARPS)                                                   \
        NAME(const u8 *bytes, const u32 *starts, const u8 *table, u8 *out, int chunks, u64 weights, u32 *flag) { \
        decode<__VA_ARGS__>(bytes, starts, table, out, chunks, weights, flag);                                 \
    }                                                                                                          \
    extern "C" __global__ void __launch_bounds__(32 * WARPS) NAME##_containers(const u64 *list, const u8 *from, u8 *to, u32 *flag) { \
        decode_container<__VA_ARGS__>(list, from, to, flag);                                                   \
    }
KERNEL(decode_exponents_bf16, 8, 2)
KERNEL(decode_exponents_f16, 5, 2)
KERNEL(decode_exponents_f8_e4m3, 4, 1)
KERNEL(decode_exponents_f8_e5m2, 5, 1)
KERNEL(decode_exponents_bf16_c2048, 8, 2, 2048)
KERNEL(decode_exponents_bf16_c256, 8, 2, 256)
