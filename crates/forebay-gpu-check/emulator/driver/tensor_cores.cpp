#include "tensor_cores.h"

#include <string.h>

#include "../device/cuda_fp16.h"

namespace emulated {

namespace {

float value_of(uint32_t bits, bool bfloat) {
    return bfloat ? __uint_as_float(bits << 16) : half_to_float((uint16_t)bits);
}

}  // namespace

void multiply_tiles(Slot *slots, bool bfloat) {
    float a[16][16], b[16][8], c[16][8];
    for (int lane = 0; lane < 32; lane++) {
        const uint32_t *words = slots[lane].words;
        const int group = lane / 4, two = lane % 4 * 2;
        for (int i = 0; i < 8; i++) {
            const int row = group + (i / 2 % 2) * 8, column = two + i % 2 + i / 4 * 8;
            a[row][column] = value_of(words[i / 2] >> 16 * (i % 2) & 0xffff, bfloat);
        }
        for (int i = 0; i < 4; i++)
            b[two + i % 2 + i / 2 * 8][group] = value_of(words[4 + i / 2] >> 16 * (i % 2) & 0xffff, bfloat);
        for (int i = 0; i < 4; i++) c[group + i / 2 * 8][two + i % 2] = __uint_as_float(words[6 + i]);
    }
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 16; k++)
            for (int column = 0; column < 8; column++) c[row][column] += a[row][k] * b[k][column];
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++)
            slots[lane].words[6 + i] = __float_as_uint(c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
}

}  // namespace emulated
