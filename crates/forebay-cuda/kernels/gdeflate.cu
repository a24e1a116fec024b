// Decodes GDeflate: docs/codec.md describes the bytes.
//
// A warp decodes a tile of 64 KiB, and its 32 threads are the lanes of the format. In a round, each lane decodes a literal, a length or a
// distance. A sum over the lanes below says where its bytes go. Lanes take words of the tile in their order, from two registers that
// hold the next 64 words, so that no round waits for memory. Matches are copied by their lanes where they do not depend on each other.
//
// Nothing of a stream is trusted. All lanes leave a damaged tile together, before anything is read or written outside.
#include "coded_streams.cuh"

static constexpr u32 TILE = 1 << 16;
static constexpr int MAX_BITS = 15, LITERALS = 288, DISTANCES = 32, BLOCKS = 1024;
static constexpr int LITERAL_BITS = 10, DISTANCE_BITS = 8, LENGTH_BITS = 7;
// Matches up to this length are copied by one lane, longer ones by all.
static constexpr u32 SHORT = 32;

// A Huffman code. Words of up to BITS bits are in a table by their bits: the length in bits 0 to 3, 0 if there is no such word or a longer
// one, and the symbol above. Others are found by comparison, because words of the same length are consecutive numbers.
template <int BITS, int SYMBOLS> struct Code {
    u16 table[1 << BITS];
    u16 sorted[SYMBOLS];  // symbols by length, then by number
    // Words of 15 bits, the first bit highest, are below limit[l] if they begin with a word of up to l bits.
    u16 limit[MAX_BITS + 1];
    // Added to a word of l bits, gives its place in `sorted`.
    short place[MAX_BITS + 1];
};

struct Memory {
    Code<LITERAL_BITS, LITERALS> literals;
    Code<DISTANCE_BITS, DISTANCES> distances;  // also of code lengths
    u8 lengths[LITERALS + DISTANCES];
};

__device__ __forceinline__ u32 below(int lane) { return (1u << lane) - 1; }

// Sum of x over the lanes below this one; `all` receives the sum over all lanes.
__device__ __forceinline__ u32 sum_below(u32 x, u32 &all) {
    const int lane = lane_of();
    u32 sum = x;
#pragma unroll
    for (int distance = 1; distance < 32; distance <<= 1) {
        const u32 other = __shfl_up_sync(ALL, sum, distance);
        if (lane >= distance) sum += other;
    }
    all = __shfl_sync(ALL, sum, 31);
    return sum - x;
}

// Returns the entry for the word that begins with the lowest of `bits` by comparison, or 0.
template <class C> __device__ __forceinline__ u32 entry_by_comparison(const C &code, u32 bits, int first, int last) {
    const u32 word = __brev(bits) >> (32 - MAX_BITS);
    for (int length = first; length <= last; length++)
        if (word < code.limit[length]) {
            const int at = code.place[length] + (int)(word >> (MAX_BITS - length));
            return (u32)length | (u32)code.sorted[at] << 4;
        }
    return 0;
}

// Makes the code with these lengths of `count` symbols. Returns false if there is no such code, or if it is incomplete and has more than
// one symbol, or one of more than one bit.
template <class C> __device__ __noinline__ bool make_code(C &code, const u8 *lengths, int count, int table_bits) {
    const int lane = lane_of();
    // Lane l counts words of l bits.
    u32 words = 0;
    for (int first = 0; first < count; first += 32) {
        const u32 own = first + lane < count ? lengths[first + lane] : 0;
        for (int length = 1; length <= MAX_BITS; length++) {
            const u32 equal = __ballot_sync(ALL, own == (u32)length);
            if (lane == length) words += __popc(equal);
        }
    }
    const bool is_length = lane >= 1 && lane <= MAX_BITS;
    const u32 each = is_length ? 1u << (MAX_BITS - lane) : 0;
    u32 space, symbols;
    const u32 start = sum_below(words * each, space);
    const u32 place = sum_below(words, symbols);
    const u32 of_one_bit = __shfl_sync(ALL, words, 1);
    if (space != 1u << MAX_BITS && !(symbols == 0 || (symbols == 1 && of_one_bit == 1))) return false;
    if (is_length) {
        code.limit[lane] = (u16)(start + words * each);
        code.place[lane] = (short)((int)place - (int)(start >> (MAX_BITS - lane)));
    }
    u32 next = place;
    for (int first = 0; first < count; first += 32) {
        const u32 own = first + lane < count ? lengths[first + lane] : 0;
        u32 rank = 0, here = 0;
        for (int length = 1; length <= MAX_BITS; length++) {
            const u32 equal = __ballot_sync(ALL, own == (u32)length);
            if (own == (u32)length) rank = __popc(equal & below(lane));
            if (lane == length) here = __popc(equal);
        }
        const u32 to = __shfl_sync(ALL, next, (int)own) + rank;
        if (own > 0) code.sorted[to] = (u16)(first + lane);
        next += here;
    }
    __syncwarp();
    for (int word = lane; word < 1 << table_bits; word += 32)
        code.table[word] = (u16)entry_by_comparison(code, (u32)word, 1, table_bits);
    __syncwarp();
    return true;
}

// A lane's bits, and the tile's words.
struct Lanes {
    const u32 *words;
    u32 count;  // of the tile's words
    u32 next;   // that a lane takes, the same for all lanes
    u32 base;   // word `base + lane` is `now`, and 32 later ones are `later`
    u32 now, later;
    u64 bits;
    int bit_count;

    __device__ __forceinline__ u32 word(u32 at) const { return at < count ? words[at] : 0; }

    __device__ __forceinline__ void begin(const u32 *tile, u32 tile_words) {
        words = tile, count = tile_words;
        const int lane = lane_of();
        bits = word(lane), bit_count = 32;
        next = base = 32;
        now = word(base + lane), later = word(base + 32 + lane);
    }

    // Gives a word to those of the active lanes that have fewer than 32 bits, in their order. Behind the tile, words are zeros, and
    // `is_short` is true.
    __device__ __forceinline__ void refill(bool active) {
        const int lane = lane_of();
        const bool needed = active && bit_count < 32;
        const u32 lanes = __ballot_sync(ALL, needed);
        const u32 at = next - base + __popc(lanes & below(lane));
        const u32 first = __shfl_sync(ALL, now, at & 31), second = __shfl_sync(ALL, later, at & 31);
        if (needed) {
            bits |= (u64)(at < 32 ? first : second) << bit_count;
            bit_count += 32;
        }
        next += __popc(lanes);
        if (next - base >= 32) {
            base += 32;
            now = later;
            later = word(base + 32 + lane);
        }
    }

    __device__ __forceinline__ bool is_short() const { return next > count; }

    __device__ __forceinline__ u32 take(u32 taken) {
        const u32 value = (u32)bits & ((1u << taken) - 1);
        drop(taken);
        return value;
    }

    __device__ __forceinline__ void drop(u32 taken) {
        bits >>= taken;
        bit_count -= (int)taken;
    }
};

// A tile's output.
struct Out {
    u8 *bytes;
    u32 size, filled;
};

// Copies matches of up to 32 lanes: `length` bytes to `to` from `distance` bytes before, which is inside. Places ascend with the lanes.
// A match may overlap itself, and may have bytes of matches of lanes below.
__device__ __forceinline__ void copy_matches(u8 *out, bool open, u32 to, u32 distance, u32 length) {
    const int lane = lane_of();
    const u32 from = to - distance, end = min(from + length, to);
    // What was written before is visible to all lanes.
    __syncwarp();
    u32 waiting = __ballot_sync(ALL, open);
    while (waiting) {
        const int lowest = __ffs((int)waiting) - 1;
        const u32 filled_to = __shfl_sync(ALL, to, lowest);
        const bool ready = open && (lane == lowest || end <= filled_to);
        const u32 long_ones = __ballot_sync(ALL, ready && length > SHORT);
        waiting &= ~__ballot_sync(ALL, ready);
        if (ready && length <= SHORT) {
            u8 *const target = out + to;
            const u8 *const source = out + from;
            if (distance >= 8) {
                // All loads of a step come before its stores.
                for (u32 at = 0; at < length; at += 8) {
                    u8 some[8];
#pragma unroll
                    for (u32 i = 0; i < 8; i++) some[i] = at + i < length ? source[at + i] : 0;
#pragma unroll
                    for (u32 i = 0; i < 8; i++)
                        if (at + i < length) target[at + i] = some[i];
                }
            } else {
                for (u32 at = 0; at < length; at++) target[at] = source[at];
            }
        }
        open = open && !ready;
        for (u32 left = long_ones; left; left &= left - 1) {
            const int of = __ffs((int)left) - 1;
            const u32 to_all = __shfl_sync(ALL, to, of), distance_all = __shfl_sync(ALL, distance, of);
            const u32 length_all = __shfl_sync(ALL, length, of);
            const u8 *const source = out + (to_all - distance_all);
            for (u32 at = lane; at < length_all; at += 32)
                out[to_all + at] = source[distance_all >= length_all ? at : at % distance_all];
        }
        __syncwarp();
    }
}

// Copies a stored block.
__device__ __forceinline__ bool stored(Lanes &lanes, Out &out) {
    const int lane = lane_of();
    u32 bytes = 0;
    if (lane == 0) bytes = lanes.take(16);
    bytes = __shfl_sync(ALL, bytes, 0);
    if (bytes > out.size - out.filled) return false;
    for (u32 done = 0; done < bytes; done += 32) {
        const bool active = done + lane < bytes;
        if (active) out.bytes[out.filled + done + lane] = (u8)lanes.take(8);
        lanes.refill(active);
        if (lanes.is_short()) return false;
    }
    // A block without bytes has not refilled the lane yet.
    lanes.refill(lane == 0);
    out.filled += bytes;
    return true;
}

// Reads the codes of a block that has its own.
__device__ __forceinline__ bool read_codes(Lanes &lanes, Memory &memory) {
    const int lane = lane_of();
    u32 numbers = 0;
    if (lane == 0) numbers = lanes.take(14);
    numbers = __shfl_sync(ALL, numbers, 0);
    lanes.refill(lane == 0);
    const int literals = (int)(numbers & 31) + 257, all = literals + (int)(numbers >> 5 & 31) + 1;
    const int stored = (int)(numbers >> 10) + 4;
    u8 *const lengths = memory.lengths;
    // The code for code lengths: their order is 16 17 18 0 8 7 9 6 10 5 11 4 12 3 13 2 14 1 15.
    if (lane < 19) {
        const int later = (lane - 3) >> 1;
        const int symbol = lane < 3 ? 16 + lane : lane == 3 ? 0 : lane & 1 ? 7 - (later - 1) : 8 + later;
        lengths[symbol] = lane < stored ? (u8)lanes.take(3) : 0;
    }
    lanes.refill(lane < stored);
    __syncwarp();
    if (!make_code(memory.distances, lengths, 19, LENGTH_BITS)) return false;
    int known = 0;
    u32 last = 0;
    while (known < all) {
        // A lane's code length or repetition, if those below have not said all lengths. No word has more than seven bits.
        const u32 entry = memory.distances.table[(u32)lanes.bits & ((1 << LENGTH_BITS) - 1)];
        const u32 bits = entry & 15, symbol = entry >> 4;
        const u32 extra = symbol < 16 ? 0 : symbol == 16 ? 2 : symbol == 17 ? 3 : 7;
        const u32 more = (u32)(lanes.bits >> bits) & ((1u << extra) - 1);
        const u32 times = symbol < 16 ? 1 : symbol == 18 ? 11 + more : 3 + more;
        u32 sum;
        const int start = known + (int)sum_below(times, sum);
        const bool active = start < all;
        const int end = start + (int)times;
        const bool wrong = active && (bits == 0 || end > all || (symbol == 16 && start == 0));
        // Lane 0 is always active, and has the length before.
        const u32 values = __ballot_sync(ALL, active && symbol != 16) & (below(lane) << 1 | 1);
        const u32 own = symbol < 16 ? symbol : 0;
        const u32 other = __shfl_sync(ALL, own, values ? 31 - __clz((int)values) : 0);
        const u32 length = values ? other : last;
        if (__any_sync(ALL, wrong)) return false;
        if (active) {
            for (int at = start; at < end; at++) lengths[at] = (u8)length;
            lanes.drop(bits + extra);
        }
        const int last_active = 31 - __clz((int)__ballot_sync(ALL, active));
        known = __shfl_sync(ALL, end, last_active);
        last = __shfl_sync(ALL, length, last_active);
        lanes.refill(active);
    }
    if (lanes.is_short()) return false;
    __syncwarp();
    return make_code(memory.literals, lengths, literals, LITERAL_BITS) &&
           make_code(memory.distances, lengths + literals, all - literals, DISTANCE_BITS);
}

// The fixed codes.
__device__ __forceinline__ bool fixed_codes(Memory &memory) {
    for (int symbol = lane_of(); symbol < LITERALS + DISTANCES; symbol += 32)
        memory.lengths[symbol] = symbol < 144 ? 8 : symbol < 256 ? 9 : symbol < 280 ? 7 : symbol < LITERALS ? 8 : 5;
    __syncwarp();
    return make_code(memory.literals, memory.lengths, LITERALS, LITERAL_BITS) &&
           make_code(memory.distances, memory.lengths + LITERALS, DISTANCES, DISTANCE_BITS);
}

// Reads a distance where `active`. Returns 0 if there is no such word.
__device__ __forceinline__ u32 read_distance(Lanes &lanes, const Memory &memory, bool active) {
    if (!active) return 0;
    u32 entry = memory.distances.table[(u32)lanes.bits & ((1 << DISTANCE_BITS) - 1)];
    if ((entry & 15) == 0) entry = entry_by_comparison(memory.distances, (u32)lanes.bits, DISTANCE_BITS + 1, MAX_BITS);
    const u32 bits = entry & 15, symbol = entry >> 4;
    const u32 extra = symbol < 4 ? 0 : (symbol >> 1) - 1;
    const u32 least = symbol < 4 ? symbol + 1 : ((2 + (symbol & 1)) << extra) + 1;
    const u32 more = (u32)(lanes.bits >> bits) & ((1u << extra) - 1);
    lanes.drop(bits + extra);
    return bits == 0 ? 0 : least + more;
}

// Decodes a block with codes.
__device__ __forceinline__ bool coded(Lanes &lanes, Out &out, const Memory &memory) {
    const int lane = lane_of();
    // A lane's match whose distance comes next.
    bool open = false;
    u32 to = 0, length = 0;
    while (true) {
        if (lanes.is_short()) return false;
        u32 entry = 0;
        if (!open) {
            entry = memory.literals.table[(u32)lanes.bits & ((1 << LITERAL_BITS) - 1)];
            if ((entry & 15) == 0) entry = entry_by_comparison(memory.literals, (u32)lanes.bits, LITERAL_BITS + 1, MAX_BITS);
        }
        const u32 bits = entry & 15, symbol = entry >> 4;
        if (__ballot_sync(ALL, open || symbol >= 256) == 0) {
            // Literals of all lanes.
            if (__any_sync(ALL, bits == 0) || out.size - out.filled < 32) return false;
            out.bytes[out.filled + lane] = (u8)symbol;
            out.filled += 32;
            lanes.drop(bits);
            lanes.refill(true);
            continue;
        }
        // Lanes behind the end of the block decode no symbol.
        const u32 ends = __ballot_sync(ALL, !open && symbol == 256 && bits > 0);
        const int last = ends ? __ffs((int)ends) - 1 : 31;
        const bool coding = !open && lane <= last;
        const bool is_match = coding && symbol > 256;
        const u32 number = symbol - 257;
        u32 extra = 0, least = number + 3;
        if (number == 28) {
            extra = 16, least = 3;
        } else if (number >= 8) {
            extra = ((number >> 2) - 1) & 7;
            least = ((4 + (number & 3)) << extra) + 3;
        }
        const u32 more = (u32)(lanes.bits >> bits) & ((1u << extra) - 1);
        const u32 given = is_match ? least + more : coding && symbol < 256 ? 1 : 0;
        u32 sum;
        const u32 at = out.filled + sum_below(given, sum);
        bool wrong = coding && (bits == 0 || symbol >= 286);
        if (coding) lanes.drop(is_match ? bits + extra : bits);
        const u32 distance = read_distance(lanes, memory, open);
        wrong = wrong || (open && (distance == 0 || distance > to));
        if (__any_sync(ALL, wrong) || sum > out.size - out.filled) return false;
        if (coding && symbol < 256) out.bytes[at] = (u8)symbol;
        copy_matches(out.bytes, open, to, distance, length);
        out.filled += sum;
        lanes.refill(open || coding);
        open = is_match, to = at, length = given;
        if (ends) break;
    }
    // Distances that are left.
    const u32 distance = read_distance(lanes, memory, open);
    if (__any_sync(ALL, open && (distance == 0 || distance > to))) return false;
    copy_matches(out.bytes, open, to, distance, length);
    lanes.refill(open);
    return true;
}

// Decodes a tile. Returns false if it is damaged.
__device__ __forceinline__ bool decode_tile(const u32 *tile, u32 words, u8 *bytes, u32 size, Memory &memory) {
    const int lane = lane_of();
    Lanes lanes;
    lanes.begin(tile, words);
    Out out = {bytes, size, 0};
    for (int block = 0; block < BLOCKS; block++) {
        if (lanes.is_short()) return false;
        u32 head = 0;
        if (lane == 0) head = lanes.take(3);
        head = __shfl_sync(ALL, head, 0);
        lanes.refill(lane == 0);
        const u32 kind = head >> 1;
        bool fits = false;
        if (kind == 0) {
            fits = stored(lanes, out);
        } else if (kind < 3) {
            fits = kind == 1 ? fixed_codes(memory) : read_codes(lanes, memory);
            fits = fits && coded(lanes, out, memory);
        }
        if (!fits) return false;
        if (head & 1) return !lanes.is_short() && out.filled == out.size;
    }
    return false;
}

// Decodes the tile of one warp. Returns false if it, or what the stream says about its tiles, is damaged.
__device__ __forceinline__ bool decode_tile_of(const Chunk &chunk, u32 tile, const u8 *from, u64 from_bytes, u8 *out, u64 out_bytes,
                                               Memory &memory) {
    if (!chunk.fits(from_bytes, out_bytes)) return false;
    const u32 tiles = (chunk.size + TILE - 1) / TILE;
    if (tile >= max(tiles, 1u)) return false;
    if (chunk.bytes < 8 + 4 * tiles) return false;
    const u32 *const head = (const u32 *)(from + chunk.at);
    if (head[0] != (0xfb04u | tiles << 16) || head[1] != (1 | chunk.size % TILE << 2)) return false;
    const u32 *const offsets = head + 2;
    const u32 data = chunk.bytes - 8 - 4 * tiles;
    if (tiles == 0) return data == 0;
    // The place of the first tile's offset, which is 0, has the length of the last tile.
    const u32 start = tile == 0 ? 0 : offsets[tile];
    if (start > data) return false;
    const u32 length = tile + 1 < tiles ? offsets[tile + 1] - start : offsets[0];
    if (length > data - start || (tile + 1 == tiles && length != data - start)) return false;
    if (start % 4 != 0 || length % 4 != 0) return false;
    const u32 size = min(chunk.size - tile * TILE, TILE);
    return decode_tile(offsets + tiles + start / 4, length / 4, out + chunk.to + (u64)tile * TILE, size, memory);
}

// Decodes chunks [chunks] of `tiles` tiles together. Grid: a warp for each tile. `damaged` [chunks] gets a 1 for each damaged one.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    decode_gdeflate(const u8 *from, u64 from_bytes, u8 *out, u64 out_bytes, const Chunk *chunks, int count, u64 tiles, u32 *damaged) {
    __shared__ Memory memories[WARPS];
    wait_for_previous();
    const int warp = threadIdx.x >> 5;
    const u64 tile = (u64)blockIdx.x * WARPS + warp;
    if (tile >= tiles) return;
    // The last chunk that does not begin behind the tile.
    int low = 0, high = count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (chunks[middle].first_tile <= tile)
            low = middle;
        else
            high = middle;
    }
    const Chunk chunk = chunks[low];
    const u32 of_chunk = (u32)(tile - chunk.first_tile);
    const bool good = decode_tile_of(chunk, of_chunk, from, from_bytes, out, out_bytes, memories[warp]);
    if (!good && lane_of() == 0) damaged[low] = 1;
}
