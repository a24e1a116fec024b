// Decodes Zstandard: RFC 8878 describes the bytes.
//
// A warp decodes a chunk. Its lanes decode the four streams of literals side by side, and copy together. One lane decodes sequences.
// The literals of a block that has sequences wait at the end of the chunk's place: what is decoded before them can never reach them.
//
// Nothing of a frame is trusted. All lanes leave a damaged chunk together, before anything is read or written outside.
#include "coded_streams.cuh"

static constexpr u32 BLOCK_BYTES = 128 << 10;
static constexpr u32 MAGIC = 0xfd2fb528, SKIPPED = 0x184d2a50;
static constexpr int HUFFMAN_BITS = 11, WEIGHT_BITS = 6, WEIGHTS = 255;
static constexpr int LITERAL_LENGTHS = 0, OFFSETS = 1, MATCH_LENGTHS = 2;
// Symbols of the three codes of sequences, and the most bits of their states.
static constexpr int LENGTH_SYMBOLS = 36, OFFSET_SYMBOLS = 32, MATCH_SYMBOLS = 53, STATE_BITS = 9;

// A state of a finite-state code: what it stands for, and how the next state is found.
struct State {
    u8 symbol, bits;
    u16 base;
};

struct Memory {
    u16 huffman[1 << HUFFMAN_BITS];  // length in bits 0 to 3, symbol above
    State states[3][1 << STATE_BITS];
    State weight_states[1 << WEIGHT_BITS];
    short counts[64];
    u16 next[64];
    u8 weights[WEIGHTS + 1];
    int bits[3];       // of states; -1 if there is no code
    int huffman_bits;  // 0 if there is no code
    u32 place;  // in the chunk, found by lane 0 for all lanes
};

__device__ __forceinline__ int highest_bit(u32 x) { return 31 - __clz((int)x); }

// Bytes of a chunk. Reads behind the end give zeros.
struct In {
    const u8 *bytes;
    u32 size;
    __device__ __forceinline__ u32 byte(u32 at) const { return at < size ? bytes[at] : 0; }
    __device__ __forceinline__ u32 little(u32 at, int count) const {
        u32 value = 0;
        for (int i = 0; i < count; i++) value |= byte(at + i) << 8 * i;
        return value;
    }
};

// Bits that are read from the last one to the first one. The highest bit of the last byte that is set ends them.
struct Backward {
    const u32 *word;   // the word behind `ahead`, downwards
    const u32 *first;  // the first word of the chunk
    u64 bits;          // the next bits, the next one highest
    u32 ahead;         // the next word, loaded before it is needed
    int held;          // number of bits there
    int left;          // number of bits of the stream that are not read yet. Below 0 if too many were.

    // Returns false if there is no such stream. `base` is aligned to 4 bytes, and the stream lies `at` bytes behind it.
    __device__ __forceinline__ bool begin(const u8 *base, u32 at, u32 bytes) {
        first = (const u32 *)base;
        left = -1;
        if (bytes == 0) return false;
        const u32 end = at + bytes;
        const u32 last = base[end - 1];
        if (last == 0) return false;
        word = first + (end - 1) / 4;
        const int valid = 8 * (int)((end - 1) % 4 + 1);
        const int ended = 8 - highest_bit(last);
        bits = (u64)*word-- << (64 - valid);
        bits <<= ended;
        held = valid - ended;
        left = 8 * (int)bytes - ended;
        ahead = word >= first ? *word : 0;
        word--;
        refill();
        return true;
    }
    // Without branches, so that lanes stay together. The loaded word is needed at the next refill only.
    __device__ __forceinline__ void refill() {
        const bool needs = held <= 32;
        bits |= needs ? (u64)ahead << (32 - held) : 0;
        held += needs ? 32 : 0;
        const u32 *const next = needs ? word : word + 1;
        ahead = next >= first ? *next : 0;
        word = next - 1;
    }
    __device__ __forceinline__ u32 peek(int count) const { return count == 0 ? 0 : (u32)(bits >> (64 - count)); }
    // Between refills, at most 32 bits.
    __device__ __forceinline__ void drop(int count) {
        bits <<= count;
        held -= count;
        left -= count;
    }
    __device__ __forceinline__ u32 take(int count) {
        // Bits before the first one are zeros.
        const u32 value = left >= count ? peek(count) : left > 0 ? peek(left) << (count - left) : 0;
        drop(count);
        refill();
        return value;
    }
};

// Reads the counts of a code of at most `symbols` symbols, and returns the number of bits of a state, or -1. `at` moves behind them.
__device__ int read_counts(const In &in, u32 &at, u32 end, int symbols, int most_bits, short *counts) {
    u32 place = 8 * at;
    auto take = [&](int count) {
        const u32 value = in.little(place / 8, 4) >> place % 8 & ((1u << count) - 1);
        place += count;
        return (int)value;
    };
    const int bits = 5 + take(4);
    if (bits > most_bits) return -1;
    int left = 1 << bits, symbol = 0;
    while (left > 0) {
        if (symbol >= symbols) return -1;
        const int width = highest_bit((u32)left + 1) + 1;
        int value = take(width);
        const int low = (1 << (width - 1)) - 1, threshold = (1 << width) - 2 - left;
        if ((value & low) < threshold) {
            place--;
            value &= low;
        } else if (value > low) {
            value -= threshold;
        }
        const int count = value - 1;
        left -= count < 0 ? 1 : count;
        counts[symbol++] = (short)count;
        if (count != 0) continue;
        int zeros;
        do {
            zeros = take(2);
            if (symbol + zeros > symbols) return -1;
            for (int i = 0; i < zeros; i++) counts[symbol++] = 0;
        } while (zeros == 3);
    }
    at = (place + 7) / 8;
    if (left != 0 || at > end) return -1;
    while (symbol < symbols) counts[symbol++] = 0;
    return bits;
}

// Makes the states of a code.
__device__ bool make_states(const short *counts, int symbols, int bits, State *states, u16 *next) {
    const int size = 1 << bits, step = (size >> 1) + (size >> 3) + 3, mask = size - 1;
    int high = size;
    for (int symbol = 0; symbol < symbols; symbol++) {
        next[symbol] = (u16)(counts[symbol] < 0 ? 1 : counts[symbol]);
        if (counts[symbol] < 0) states[--high].symbol = (u8)symbol;
    }
    int place = 0;
    for (int symbol = 0; symbol < symbols; symbol++)
        for (int i = 0; i < counts[symbol]; i++) {
            states[place].symbol = (u8)symbol;
            do place = (place + step) & mask;
            while (place >= high);
        }
    if (place != 0) return false;
    for (int i = 0; i < size; i++) {
        const u32 number = next[states[i].symbol]++;
        const int more = bits - highest_bit(number);
        states[i].bits = (u8)more;
        states[i].base = (u16)((number << more) - size);
    }
    return true;
}

// Reads the weights of a Huffman code, and returns their number, or -1. `at` moves behind them.
__device__ int read_weights(const In &in, u32 &at, u32 end, Memory &memory) {
    if (at >= end) return -1;
    const u32 head = in.byte(at++);
    if (head >= 128) {
        const int count = (int)head - 127;
        if ((u32)(count + 1) / 2 > end - at) return -1;
        for (int i = 0; i < count; i++) memory.weights[i] = (u8)(in.byte(at + i / 2) >> (i % 2 ? 0 : 4) & 15);
        at += (u32)(count + 1) / 2;
        return count;
    }
    if (head > end - at) return -1;
    const u32 stop = at + head;
    const int bits = read_counts(in, at, stop, HUFFMAN_BITS + 2, WEIGHT_BITS, memory.counts);
    if (bits < 0 || !make_states(memory.counts, HUFFMAN_BITS + 2, bits, memory.weight_states, memory.next)) return -1;
    Backward stream;
    if (!stream.begin(in.bytes, at, stop - at)) return -1;
    u32 states[2] = {stream.take(bits), 0};
    states[1] = stream.take(bits);
    if (stream.left < 0) return -1;
    int count = 0;
    // Two states take turns. When there are no bits for one of them, the other one gives the last weight.
    for (int turn = 0;; turn ^= 1) {
        if (count >= WEIGHTS) return -1;
        const State state = memory.weight_states[states[turn]];
        memory.weights[count++] = state.symbol;
        states[turn] = state.base + stream.take(state.bits);
        if (stream.left < 0) {
            if (count >= WEIGHTS) return -1;
            memory.weights[count++] = memory.weight_states[states[turn ^ 1]].symbol;
            break;
        }
    }
    at = stop;
    return count;
}

// Makes the Huffman code whose first `count` weights are known. Returns its bits, or 0 if there is none.
__device__ int make_huffman(Memory &memory, int count) {
    u32 sum = 0;
    for (int i = 0; i < count; i++) {
        if (memory.weights[i] > HUFFMAN_BITS) return 0;
        if (memory.weights[i] > 0) sum += 1u << (memory.weights[i] - 1);
    }
    if (sum == 0) return 0;
    const int bits = highest_bit(sum) + 1;
    const u32 rest = (1u << bits) - sum;
    if (bits > HUFFMAN_BITS || (rest & (rest - 1)) != 0) return 0;
    memory.weights[count] = (u8)(highest_bit(rest) + 1);
    u32 place = 0;
    for (int weight = 1; weight <= bits; weight++)
        for (int symbol = 0; symbol <= count; symbol++) {
            if (memory.weights[symbol] != weight) continue;
            const u16 entry = (u16)(symbol << 4 | (bits + 1 - weight));
            for (u32 i = 0; i < 1u << (weight - 1); i++) memory.huffman[place++] = entry;
        }
    return bits;
}

// Decodes one stream of literals to `out`. Returns false if it is damaged.
__device__ __forceinline__ bool decode_literals(const In &in, u32 at, u32 bytes, u8 *out, u32 count, const Memory &memory) {
    Backward stream;
    if (!stream.begin(in.bytes, at, bytes)) return false;
    const int bits = memory.huffman_bits;
    // Between refills, at most two.
    auto next = [&] {
        const u32 entry = memory.huffman[stream.peek(bits)];
        stream.drop((int)(entry & 15));
        return entry >> 4;
    };
    u32 done = 0;
    auto bytes_until = [&](u32 end) {
        while (done < end) {
            out[done++] = (u8)next();
            stream.refill();
        }
    };
    // Single bytes until the address is a multiple of 4, then words.
    bytes_until(min((u32)(-(u64)out % 4), count));
    while (count - done >= 4) {
        u32 word = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            word |= next() << 8 * i;
            if (i % 2) stream.refill();
        }
        *(u32 *)(out + done) = word;
        done += 4;
        if (stream.left < 0) return false;
    }
    bytes_until(count);
    return stream.left == 0;
}

// Place of a chunk's bytes after decoding. The literals that are left lie at the end.
struct Out {
    u8 *bytes;
    u32 size, filled;
};

// Copies `BYTES` times 32 literals towards the front, or `count` if there are fewer. Each lane loads all its bytes before it stores one,
// because loads take long.
template <int BYTES> __device__ __forceinline__ void move_some(u8 *to, const u8 *from, u32 count) {
    u8 bytes[BYTES];
#pragma unroll
    for (int i = 0; i < BYTES; i++) {
        const u32 at = 32 * i + (u32)lane_of();
        bytes[i] = at < count ? from[at] : 0;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < BYTES; i++) {
        const u32 at = 32 * i + (u32)lane_of();
        if (at < count) to[at] = bytes[i];
    }
    __syncwarp();
}

__device__ __forceinline__ void move_to(u8 *to, const u8 *from, u32 count) {
    u32 done = 0;
    for (; count - done > 32; done += min(count - done, 512u)) move_some<16>(to + done, from + done, count - done);
    move_some<1>(to + done, from + done, count - done);
}

struct Block {
    u32 at, end;       // in the chunk
    u32 literals;      // number of literals
    u32 start;         // of the current frame, in Out
    u32 repeats[3];
};

// Decodes the literals of a block to the end of `out`, or straight to their place if the block has no sequences. Returns false if they are
// damaged. `block.at` moves behind them.
__device__ bool literals(const In &in, Block &block, Out &out, Memory &memory) {
    const int lane = lane_of();
    if (block.at >= block.end) return false;
    const u32 left = block.end - block.at;
    const u32 kind = in.byte(block.at) & 3, format = in.byte(block.at) >> 2 & 3;
    u32 head, count, bytes;
    if (kind < 2) {
        head = format == 1 ? 2 : format == 3 ? 3 : 1;
        count = in.little(block.at, (int)head) >> (head == 1 ? 3 : 4);
        bytes = kind == 0 ? count : 1;
    } else {
        head = format < 2 ? 3 : format + 2;
        const int width = format < 2 ? 10 : format == 2 ? 14 : 18;
        const u64 word = (u64)in.little(block.at, 4) | (u64)in.byte(block.at + 4) << 32;
        count = (u32)(word >> 4) & ((1u << width) - 1);
        bytes = (u32)(word >> (4 + width)) & ((1u << width) - 1);
    }
    if (head > left || bytes > left - head) return false;
    if (count > BLOCK_BYTES || count > out.size - out.filled) return false;
    u32 at = block.at + head;
    const u32 end = at + bytes;
    block.at = end, block.literals = count;
    // Without sequences, the literals are what the block gives.
    const bool in_place = end < block.end && in.byte(end) == 0;
    u8 *const to = in_place ? out.bytes + out.filled : out.bytes + out.size - count;
    if (kind < 2) {
        for (u32 i = (u32)lane; i < count; i += 32) to[i] = in.bytes[kind == 0 ? at + i : at];
        __syncwarp();
        return true;
    }
    if (kind == 2) {
        __syncwarp();
        if (lane == 0) {
            const int weights = read_weights(in, at, end, memory);
            memory.huffman_bits = weights < 0 ? 0 : make_huffman(memory, weights);
            memory.place = at;
        }
        __syncwarp();
        at = memory.place;
    }
    if (memory.huffman_bits == 0) return false;
    bool good = true;
    if (format == 0) {
        if (lane == 0) good = decode_literals(in, at, end - at, to, count, memory);
    } else {
        if (end - at < 6) return false;
        u32 sizes[4] = {in.little(at, 2), in.little(at + 2, 2), in.little(at + 4, 2), 0};
        const u32 given = sizes[0] + sizes[1] + sizes[2], all = end - at - 6, each = (count + 3) / 4;
        if (given > all || 3 * each > count) return false;
        sizes[3] = all - given;
        u32 from = at + 6, own = 0;
        for (int i = 0; i < 4; i++) {
            if (i < lane) from += sizes[i];
            if (i == lane) own = sizes[i];
        }
        const u32 number = lane < 3 ? each : count - 3 * each;
        // The lanes decode side by side.
        if (lane < 4) good = decode_literals(in, from, own, to + (u32)lane * each, number, memory);
    }
    return !__any_sync(ALL, !good);
}

// Counts of the codes that frames need not have.
__device__ const signed char USUAL_LENGTHS[LENGTH_SYMBOLS] = {4, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 2, 2,
                                                              2, 2, 2, 2, 2, 2, 2, 3, 2, 1, 1, 1, 1, 1, -1, -1, -1, -1};
__device__ const signed char USUAL_OFFSETS[29] = {1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1};
__device__ const signed char USUAL_MATCHES[MATCH_SYMBOLS] = {1, 4, 3, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                                             1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1};

// Bits that follow the codes of lengths from 16 and of matches from 32 on, and the least lengths.
__device__ const u8 LENGTH_BITS[20] = {1, 1, 1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
__device__ const u32 LENGTH_LEAST[20] = {16, 18, 20, 22, 24, 28, 32, 40, 48, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536};
__device__ const u8 MATCH_BITS[21] = {1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
__device__ const u32 MATCH_LEAST[21] = {35, 37, 39, 41, 43, 47, 51, 59, 67, 83, 99, 131, 259, 515, 1027, 2051, 4099, 8195, 16387, 32771, 65539};

// Reads the code `which` of sequences. `at` moves behind it.
__device__ bool read_code(const In &in, u32 &at, u32 end, int which, u32 mode, Memory &memory) {
    const int symbols = which == OFFSETS ? OFFSET_SYMBOLS : which == LITERAL_LENGTHS ? LENGTH_SYMBOLS : MATCH_SYMBOLS;
    if (mode == 3) return memory.bits[which] >= 0;
    memory.bits[which] = -1;
    State *const states = memory.states[which];
    int bits;
    if (mode == 0) {
        const signed char *const usual = which == OFFSETS ? USUAL_OFFSETS : which == LITERAL_LENGTHS ? USUAL_LENGTHS : USUAL_MATCHES;
        for (int i = 0; i < symbols; i++) memory.counts[i] = which == OFFSETS && i >= 29 ? 0 : usual[i];
        bits = which == OFFSETS ? 5 : 6;
    } else if (mode == 1) {
        if (at >= end || in.byte(at) >= (u32)symbols) return false;
        states[0] = {(u8)in.byte(at++), 0, 0};
        memory.bits[which] = 0;
        return true;
    } else {
        bits = read_counts(in, at, end, symbols, which == OFFSETS ? STATE_BITS - 1 : STATE_BITS, memory.counts);
    }
    if (bits < 0 || !make_states(memory.counts, symbols, bits, states, memory.next)) return false;
    memory.bits[which] = bits;
    return true;
}

// Decodes the sequences of a block. Returns false if they are damaged.
__device__ bool sequences(const In &in, Block &block, Out &out, Memory &memory) {
    const int lane = lane_of();
    u32 at = block.at;
    if (at >= block.end) return false;
    const u32 head = in.byte(at);
    if (head == 0) {
        out.filled += block.literals;
        return at + 1 == block.end;
    }
    u32 count = head;
    if (head < 128) {
        at += 1;
    } else if (head < 255) {
        count = (head - 128) << 8 | in.byte(at + 1);
        at += 2;
    } else {
        count = in.little(at + 1, 2) + 0x7f00;
        at += 3;
    }
    if (count == 0 || at >= block.end) return false;
    const u32 modes = in.byte(at++);
    __syncwarp();
    if (lane == 0) {
        bool good = (modes & 3) == 0;
        good = good && read_code(in, at, block.end, LITERAL_LENGTHS, modes >> 6, memory);
        good = good && read_code(in, at, block.end, OFFSETS, modes >> 4 & 3, memory);
        good = good && read_code(in, at, block.end, MATCH_LENGTHS, modes >> 2 & 3, memory);
        memory.place = good ? at : block.end;
    }
    __syncwarp();
    at = memory.place;
    if (at >= block.end) return false;
    // Only lane 0 reads the stream, and keeps the states.
    Backward stream;
    u32 states[3] = {0, 0, 0};
    bool good = true;
    if (lane == 0) {
        good = stream.begin(in.bytes, at, block.end - at);
        if (good)
            for (int i = 0; i < 3; i++) states[i] = stream.take(memory.bits[i]);
        good = good && stream.left >= 0;
    }
    if (__any_sync(ALL, !good)) return false;
    u32 literals = block.literals;
    const u32 start = out.filled;
    for (u32 i = 0; i < count; i++) {
        u32 length = 0, match = 0, offset = 0;
        if (lane == 0) {
            const State of = memory.states[OFFSETS][states[OFFSETS]];
            const State own = memory.states[LITERAL_LENGTHS][states[LITERAL_LENGTHS]];
            const State same = memory.states[MATCH_LENGTHS][states[MATCH_LENGTHS]];
            const u32 value = (1u << of.symbol) + stream.take(of.symbol);
            match = same.symbol < 32 ? same.symbol + 3u : MATCH_LEAST[same.symbol - 32] + stream.take(MATCH_BITS[same.symbol - 32]);
            length = own.symbol < 16 ? own.symbol : LENGTH_LEAST[own.symbol - 16] + stream.take(LENGTH_BITS[own.symbol - 16]);
            u32 *const repeats = block.repeats;
            if (value > 3) {
                offset = value - 3;
                repeats[2] = repeats[1], repeats[1] = repeats[0], repeats[0] = offset;
            } else {
                const u32 which = value - 1 + (length == 0);
                offset = which == 0 ? repeats[0] : which == 1 ? repeats[1] : which == 2 ? repeats[2] : repeats[0] - 1;
                if (which > 1) repeats[2] = repeats[1];
                if (which > 0) repeats[1] = repeats[0];
                repeats[0] = offset;
            }
            if (i + 1 < count) {
                states[LITERAL_LENGTHS] = own.base + stream.take(own.bits);
                states[MATCH_LENGTHS] = same.base + stream.take(same.bits);
                states[OFFSETS] = of.base + stream.take(of.bits);
            }
            if (stream.left < 0) offset = 0;
        }
        length = __shfl_sync(ALL, length, 0);
        match = __shfl_sync(ALL, match, 0);
        offset = __shfl_sync(ALL, offset, 0);
        if (length > literals) return false;
        move_to(out.bytes + out.filled, out.bytes + out.size - literals, length);
        out.filled += length, literals -= length;
        // What is left must have room for the literals that follow.
        if (offset == 0 || offset > out.filled - block.start || match > out.size - out.filled - literals) return false;
        u8 *const to = out.bytes + out.filled;
        const u8 *const from = to - offset;
        for (u32 j = (u32)lane; j < match; j += 32) to[j] = from[offset < match ? j % offset : j];
        __syncwarp();
        out.filled += match;
        if (out.filled - start > BLOCK_BYTES) return false;
    }
    if (__any_sync(ALL, lane == 0 && stream.left != 0)) return false;
    if (out.filled - start > BLOCK_BYTES - literals) return false;
    move_to(out.bytes + out.filled, out.bytes + out.size - literals, literals);
    out.filled += literals;
    return true;
}

// Decodes the frame that begins at `at`, which moves behind it. Returns false if it is damaged.
__device__ bool frame(const In &in, u32 &at, Out &out, Memory &memory) {
    const u32 descriptor = in.byte(at + 4);
    const u32 single = descriptor >> 5 & 1, size_format = descriptor >> 6;
    if ((descriptor & 8) != 0) return false;
    at += 5 + (single ? 0 : 1);
    const u32 dictionary = (1u << (descriptor & 3)) >> 1;
    if (in.little(at, (int)dictionary) != 0) return false;
    at += dictionary;
    const u32 size_bytes = size_format == 0 ? single : 1u << size_format;
    const u64 low = in.little(at, (int)min(size_bytes, 4u));
    const u64 high = size_bytes == 8 ? in.little(at + 4, 4) : 0;
    const u64 size = (low | high << 32) + (size_bytes == 2 ? 256 : 0);
    at += size_bytes;
    Block block;
    block.start = out.filled;
    block.repeats[0] = 1, block.repeats[1] = 4, block.repeats[2] = 8;
    __syncwarp();
    if (lane_of() == 0) {
        memory.huffman_bits = 0;
        for (int i = 0; i < 3; i++) memory.bits[i] = -1;
    }
    __syncwarp();
    bool is_last = false;
    while (!is_last) {
        if (at > in.size || in.size - at < 3) return false;
        const u32 head = in.little(at, 3);
        at += 3;
        is_last = head & 1;
        const u32 kind = head >> 1 & 3, bytes = head >> 3;
        if (bytes > BLOCK_BYTES || kind == 3) return false;
        const u32 stored = kind == 1 ? 1 : bytes;
        if (stored > in.size - at) return false;
        if (kind < 2) {
            if (bytes > out.size - out.filled) return false;
            u8 *const to = out.bytes + out.filled;
            for (u32 i = (u32)lane_of(); i < bytes; i += 32) to[i] = in.bytes[kind == 0 ? at + i : at];
            __syncwarp();
            out.filled += bytes;
        } else {
            block.at = at, block.end = at + bytes;
            if (!literals(in, block, out, memory) || !sequences(in, block, out, memory)) return false;
        }
        at += stored;
    }
    // The checksum is not verified: those of the pack are.
    if (descriptor & 4) at += 4;
    return at <= in.size && (size_bytes == 0 || size == out.filled - block.start);
}

// Decodes all frames of a chunk.
__device__ bool frames(const In &in, Out out, Memory &memory) {
    u32 at = 0;
    if (in.size == 0) return false;
    while (at < in.size) {
        if (in.size - at < 8) return false;
        const u32 magic = in.little(at, 4);
        if ((magic & ~15u) == SKIPPED) {
            const u32 bytes = in.little(at + 4, 4);
            if (bytes > in.size - at - 8) return false;
            at += 8 + bytes;
        } else if (magic != MAGIC || !frame(in, at, out, memory)) {
            return false;
        }
    }
    return out.filled == out.size;
}

// Decodes chunks [chunks] together. Grid: a warp for each chunk. `damaged` [chunks] gets a 1 for each damaged one.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    decode_zstd(const u8 *from, u64 from_bytes, u8 *out, u64 out_bytes, const Chunk *chunks, int count, u32 *damaged) {
    __shared__ Memory memories[WARPS];
    wait_for_previous();
    const int warp = threadIdx.x >> 5;
    const u64 index = (u64)blockIdx.x * WARPS + warp;
    if (index >= (u64)count) return;
    const Chunk chunk = chunks[index];
    const bool good = chunk.fits(from_bytes, out_bytes) &&
                      frames({from + chunk.at, chunk.bytes}, {out + chunk.to, chunk.size, 0}, memories[warp]);
    if (!good && lane_of() == 0) damaged[index] = 1;
}
