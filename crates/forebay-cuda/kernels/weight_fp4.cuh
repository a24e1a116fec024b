// Four-bit floats with a shared scale: MXFP4, NVFP4. Codes are 16 plus twice the values, and scales are half as large.
#pragma once

// PRMT without masking the selector: a selector nibble with its top bit set replicates the sign of the chosen byte
// eight times.
__device__ __forceinline__ u32 permute(u32 a, u32 b, u32 selector) {
    u32 out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(selector));
    return out;
}

// Decodes byte k from nibble k, k < 4. The table holds twice the absolute values in eight bytes, without signs, so a
// nibble with its sign bit set finds 0. Looking up the nibbles gives the positive values; looking them up with flipped
// signs gives the negative ones. The bytes of sum and difference stay between 4 and 28, so nothing carries.
__device__ __forceinline__ u32 fp4_four(u32 nibbles, u32 flipped) {
    // PRMT takes only one constant. The code adds a 0 that the compiler cannot see. Otherwise the compiler would move
    // the other half of the table to a register again for each PRMT.
    u32 table;
    asm("{.reg .u32 zero; mov.u32 zero, %%laneid; shr.u32 zero, zero, 5; add.u32 %0, zero, 0x03020100;}" : "=r"(table));
    return permute(table, 0x0c080604u, nibbles) + 0x10101010u - permute(table, 0x0c080604u, flipped);
}

// Decodes eight nibbles: the low nibbles of bytes to `low`, the high nibbles to `high`.
__device__ __forceinline__ void fp4_eight(u32 nibbles, u32 &low, u32 &high) {
    const u32 flipped = nibbles ^ 0x88888888u;
    const u32 first = fp4_four(nibbles, flipped), second = fp4_four(nibbles >> 16, flipped >> 16);
    low = __byte_perm(first, second, 0x6420);
    high = __byte_perm(first, second, 0x7531);
}

struct MXFP4 {
    static constexpr int ELEMENTS = 32, BYTES = 17, ALIGN = 1, ZERO = 16;
    static constexpr bool SIGNED = false, HALVES = false, OFFSET = false;
    // Five aligned words hold all 17 bytes.
    static constexpr int RAW = 5;
    static __device__ __forceinline__ void fetch(const u8 *block, RawBlock<MXFP4> &raw) {
        raw.past = (u32)(size_t)block & 3;
        load_words<4, RAW>(block - raw.past, raw.words);
    }
    static __device__ __forceinline__ void decode(const RawBlock<MXFP4> &raw, Group &out) {
        const u32 e = raw.words[0] >> 8 * raw.past & 255;
        // 2^(e - 128); the lowest two are subnormal.
        out.scale[0] = __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 nibbles = __funnelshift_rc(raw.words[i], raw.words[i + 1], 8 * raw.past + 8);
            fp4_eight(nibbles, out.codes[i], out.codes[i + 4]);
        }
    }
    static __device__ __forceinline__ void unpack(const u8 *block, int, Group &out) {
        RawBlock<MXFP4> raw;
        fetch(block, raw);
        decode(raw, out);
    }
};

// Half of an E4M3 scale, without its sign; 0x7f, which is NaN, becomes 0.
__device__ __forceinline__ float half_of_e4m3(u32 bits) {
    const u32 exponent = bits >> 3 & 15, mantissa = bits & 7;
    if (bits == 0x7f) return 0.0f;
    if (exponent == 0) return (float)mantissa * (1.0f / 1024.0f);
    return __uint_as_float((exponent + 119) << 23 | mantissa << 20);
}

struct NVFP4 {
    static constexpr int ELEMENTS = 64, BYTES = 36, ALIGN = 4, ZERO = 16;
    static constexpr bool SIGNED = false, HALVES = true, OFFSET = false;
    static __device__ __forceinline__ void unpack(const u8 *block, int g, Group &out) {
        u32 words[4];
        load_words<4, 4>(block + 4 + 16 * g, words);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            out.scale[h] = half_of_e4m3(block[2 * g + h]);
            u32 *codes = out.codes + 4 * h;
            fp4_eight(words[2 * h], codes[0], codes[2]);
            fp4_eight(words[2 * h + 1], codes[1], codes[3]);
        }
    }
};

// NVFP4 with a factor of type f32 before every block, and with the sign of scales.
struct NVFP4_F32 {
    static constexpr int ELEMENTS = 64, BYTES = 40, ALIGN = 8, ZERO = 16;
    static constexpr bool SIGNED = false, HALVES = true, OFFSET = false;
    static __device__ __forceinline__ void unpack(const u8 *block, int g, Group &out) {
        u32 header[2], words[4];
        load_words<8, 2>(block, header);
        load_words<8, 4>(block + 8 + 16 * g, words);
        const float factor = __uint_as_float(header[0]);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            // Codes are twice the values.
            out.scale[h] = __fmul_rn(factor, 0.5f * F8_E4M3::value(header[1] >> 8 * (2 * g + h) & 255));
            u32 *codes = out.codes + 4 * h;
            fp4_eight(words[2 * h], codes[0], codes[2]);
            fp4_eight(words[2 * h + 1], codes[1], codes[3]);
        }
    }
};
