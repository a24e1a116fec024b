#include "tensor_cores.h"

#include <string.h>

#include "../device/cuda_fp16.h"

namespace emulated {

namespace {

// Converts the two halves of each of `count` words, low half first.
void values_of(const uint32_t *words, int count, bool bfloat, float *out) {
    for (int i = 0; i < count; i++) {
        const uint32_t low = words[i] & 0xffff, high = words[i] >> 16;
        out[2 * i] = bfloat ? __uint_as_float(low << 16) : half_to_float((uint16_t)low);
        out[2 * i + 1] = bfloat ? __uint_as_float(high << 16) : half_to_float((uint16_t)high);
    }
}

}  // namespace

void multiply_tiles(Slot *slots, bool bfloat) {
    typedef float Row __attribute__((vector_size(32)));
    float a[16][16];
    Row b[16], c[16];
    for (int lane = 0; lane < 32; lane++) {
        const uint32_t *words = slots[lane].words;
        const int group = lane / 4, two = lane % 4 * 2;
        float values[12];
        values_of(words, 6, bfloat, values);
        for (int i = 0; i < 8; i++) a[group + i / 2 % 2 * 8][two + i % 2 + i / 4 * 8] = values[i];
        for (int i = 0; i < 4; i++) b[two + i % 2 + i / 2 * 8][group] = values[8 + i];
        for (int i = 0; i < 4; i++) c[group + i / 2 * 8][two + i % 2] = __uint_as_float(words[6 + i]);
    }
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 16; k++) c[row] += a[row][k] * b[k];
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++)
            slots[lane].words[6 + i] = __float_as_uint(c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
}

void multiply_codes(Slot *slots) {
    int8_t a[16][32], b[32][8];
    for (int lane = 0; lane < 32; lane++) {
        const int group = lane / 4, four = lane % 4 * 4;
        int8_t codes[24];
        memcpy(codes, slots[lane].words, sizeof codes);
        for (int i = 0; i < 16; i++) a[group + i / 4 % 2 * 8][four + i % 4 + i / 8 * 16] = codes[i];
        for (int i = 0; i < 8; i++) b[four + i % 4 + i / 4 * 16][group] = codes[16 + i];
    }
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) {
            const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            int32_t sum = (int32_t)slots[lane].words[6 + i];
            for (int k = 0; k < 32; k++) sum += a[row][k] * b[k][column];
            slots[lane].words[6 + i] = (uint32_t)sum;
        }
}

void load_tiles(Slot *slots) {
    const bool transposed = slots[0].words[2];
    for (int i = 0; i < 4; i++) {
        uint16_t matrix[8][8];
        for (int row = 0; row < 8; row++) {
            uint64_t address;
            memcpy(&address, slots[8 * i + row].words, sizeof address);
            memcpy(matrix[row], (const void *)address, sizeof matrix[row]);
        }
        for (int lane = 0; lane < 32; lane++) {
            const int row = lane / 4, column = lane % 4 * 2;
            slots[lane].words[3 + i] = transposed ? matrix[column][row] | (uint32_t)matrix[column + 1][row] << 16
                                                  : matrix[row][column] | (uint32_t)matrix[row][column + 1] << 16;
        }
    }
}

}  // namespace emulated
