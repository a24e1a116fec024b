// Types whose products take f32 activations. `at` returns element i of a row. F64, F32, F16, BF16, F8_E4M3 (weight_f8.cuh) and
// F8_E5M2 have no blocks. BF16_C2048 and BF16_C256 are BF16 in compact blocks of COLUMNS weights and BYTES bytes, which docs/codec.md describes.
// ELEMENTS is 1, because `at` takes any element.
#pragma once

struct F64 {
    static constexpr int ELEMENTS = 1, BYTES = 8, ALIGN = 8;
    static __device__ __forceinline__ float at(const u8 *row, size_t i) { return (float)((const double *)row)[i]; }
};

struct F32 {
    static constexpr int ELEMENTS = 1, BYTES = 4, ALIGN = 4;
    static __device__ __forceinline__ float at(const u8 *row, size_t i) { return ((const float *)row)[i]; }
};

struct F16 {
    static constexpr int ELEMENTS = 1, BYTES = 2, ALIGN = 2;
    static __device__ __forceinline__ float at(const u8 *row, size_t i) { return half_at(row + 2 * i); }
};

struct BF16 {
    static constexpr int ELEMENTS = 1, BYTES = 2, ALIGN = 2;
    static __device__ __forceinline__ float at(const u8 *row, size_t i) {
        return __uint_as_float((u32)((const u16 *)row)[i] << 16);
    }
};

struct F8_E5M2 {
    static constexpr int ELEMENTS = 1, BYTES = 1, ALIGN = 1;
    // The byte is the upper byte of a half.
    static __device__ __forceinline__ float at(const u8 *row, size_t i) { return half_of(row[i] << 8); }
};

template <class W> struct IsCompact {
    static constexpr bool VALUE = false;
};

// Decodes eight adjacent weights of a compact block to pairs of bfloats, without exceptions. `low` has a byte of each: the lowest
// bit of its exponent code, and its mantissa. Rotations of `word` bring signs and the upper bits of the codes to their places.
__device__ __forceinline__ void compact_pairs(uint2 low, u32 word, u32 base, u32 (&pairs)[4]) {
    const u32 both = base << 7 | base << 23;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 high = i == 0 ? word : __funnelshift_r(word, word, 32 - 4 * i);
        pairs[i] = (high & 0x87008700u) + (__byte_perm(i < 2 ? low.x : low.y, 0, i & 1 ? 0x4342 : 0x4140) + both);
    }
}

// The exponent that an entry of a block's list means.
__device__ __forceinline__ u32 compact_exponent(u32 entry, u32 base) {
    const u32 code = entry >> 11;
    return (code == 0 ? 0 : code < 25 ? base - code : base + code - 9) & 255;
}

// The end of a compact block: its lowest exponent, the number of exceptions, and their list of up to MOST entries, two in a word.
template <int MOST> struct CompactHeader {
    static constexpr int WORDS = (1 + MOST) / 2;
    u32 words[WORDS];

    __device__ __forceinline__ void load(const u8 *p) { load_words<4 * WORDS, WORDS>(p, words); }
    __device__ __forceinline__ u32 base() const { return words[0] & 255; }
    __device__ __forceinline__ u32 exceptions() const { return words[0] >> 8 & 255; }

    // Returns true if the list names a weight of run number `run` of 2^SHIFT weights, and rarely in other cases. So the list is
    // in registers, and a loop over it is seldom needed.
    template <int SHIFT> __device__ __forceinline__ bool may_name(u32 run) const {
        constexpr u32 RUNS = (2047u >> SHIFT << SHIFT) * 0x00010001u;
        u32 found = 0;
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            u32 apart = words[i] & RUNS ^ run * (0x00010001u << SHIFT);
            // The lower half of the first word is not an entry.
            if (i == 0) apart |= 1;
            // The highest bit of a half is set if the half was 0.
            found |= apart - 0x00010001u;
        }
        return (found & 0x80008000u) != 0 && exceptions() > 0;
    }

    // Sets the exponents of those of the weights 8 * eight to 8 * eight + 7 of the block that the list names. `p` is where the
    // header is: a list in registers has no index.
    __device__ __forceinline__ void correct(const u8 *p, int eight, u32 (&pairs)[4]) const {
#pragma unroll 1
        for (u32 i = 0; i < min(exceptions(), (u32)MOST); i++) {
            const u32 entry = ((const u16 *)p)[1 + i], column = entry & 2047;
            if ((int)(column >> 3) != eight) continue;
            const u32 mask = 0x7f80u << 16 * (column & 1), bits = compact_exponent(entry, base()) * 0x00800080u;
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                // Every pair is written, so that pairs stay in registers.
                const u32 here = (column >> 1 & 3) == j ? mask : 0;
                pairs[j] = pairs[j] & ~here | bits & here;
            }
        }
    }
};

// Weights whose bytes and words lie together in a block, and the bytes of both.
#define COMPACT_PIECE 256
#define COMPACT_PIECE_BYTES 384

// The weights 8 * i to 8 * (i + N) - 1 of a row, all of one block of type W, as stored. N divides i and is 1 or 4.
template <class W, int N> struct CompactEights {
    u32 low[2 * N], words[N];
    typename W::Header header;

    static __device__ __forceinline__ const u8 *block_of(const u8 *row, int i) {
        return row + (size_t)(i / (W::COLUMNS / 8)) * W::BYTES;
    }

    __device__ __forceinline__ void load(const u8 *row, int i) {
        const u8 *block = block_of(row, i);
        const int first = i % (W::COLUMNS / 8);
        const u8 *piece = block + first / (COMPACT_PIECE / 8) * COMPACT_PIECE_BYTES;
        const int in_piece = first % (COMPACT_PIECE / 8);
        load_words<W::ALIGN, 2 * N>(piece + 8 * in_piece, low);
        load_words<W::ALIGN, N>(piece + COMPACT_PIECE + 4 * in_piece, words);
        header.load(block + W::HEADER);
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int k = 0; k < N; k++) low[2 * k] = low[2 * k + 1] = words[k] = 0;
#pragma unroll
        for (int k = 0; k < W::Header::WORDS; k++) header.words[k] = 0;
    }

    // Decodes to pairs of bfloats. `row` and `i` are those of `load`; they are not used after `clear`.
    __device__ __forceinline__ void pairs(const u8 *row, int i, u32 (&out)[4 * N]) const {
        const int first = i % (W::COLUMNS / 8);
        const bool has_exceptions = header.template may_name<N == 4 ? 5 : 3>(first / N);
#pragma unroll
        for (int k = 0; k < N; k++) {
            u32 four[4];
            compact_pairs(make_uint2(low[2 * k], low[2 * k + 1]), words[k], header.base(), four);
            if (has_exceptions) header.correct(block_of(row, i) + W::HEADER, first + k, four);
#pragma unroll
            for (int j = 0; j < 4; j++) out[4 * k + j] = four[j];
        }
    }
};

// Blocks of COLUMNS weights: for every 256 of them a byte of each and a word of every eight, and then the header, whose list has room for
// MOST entries.
template <int COLUMNS_, int MOST> struct Compact {
    static constexpr int COLUMNS = COLUMNS_, ELEMENTS = 1, HEADER = COLUMNS / 2 * 3, BYTES = HEADER + 2 + 2 * MOST;
    // The blocks of a row begin at multiples of ALIGN, if the first one does.
    static constexpr int ALIGN = BYTES % 16 == 0 ? 16 : 8;
    typedef CompactHeader<MOST> Header;

    static __device__ __forceinline__ float at(const u8 *row, size_t i) {
        u32 pairs[4];
        CompactEights<Compact, 1> eight;
        eight.load(row, (int)(i >> 3));
        eight.pairs(row, (int)(i >> 3), pairs);
        u32 pair = pairs[0];
#pragma unroll
        for (u32 j = 1; j < 4; j++) pair = (i >> 1 & 3) == j ? pairs[j] : pair;
        return __uint_as_float(i & 1 ? pair & 0xffff0000u : pair << 16);
    }
};

struct BF16_C2048 : Compact<2048, 7> {};
struct BF16_C256 : Compact<256, 3> {};

template <> struct IsCompact<BF16_C2048> {
    static constexpr bool VALUE = true;
};
template <> struct IsCompact<BF16_C256> {
    static constexpr bool VALUE = true;
};
