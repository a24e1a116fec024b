// The kernels' inline PTX, with one function for each statement. `translate.cpp` maps statements to functions. Operands
// are in the order of the statement, outputs first.
#pragma once

#include <time.h>

#include "cuda_fp16.h"

// The module's shared memory. Shared addresses have only 32 bits; the upper bits are those of this array.
extern "C" __attribute__((visibility("default"))) char emulated_shared_memory[];

namespace ptx {

inline char *shared(uint32_t address) {
    return emulated_shared_memory + (int32_t)(address - (uint32_t)(size_t)emulated_shared_memory);
}

inline void nothing() {}
// A value that the compiler must not know.
inline void hidden(uint32_t &) {}
inline void cvt_f32_f16(float &x, uint16_t bits) { x = emulated::half_to_float(bits); }
inline void cvt_f16x2_f32(uint32_t &packed, float high, float low) {
    packed = (uint32_t)emulated::float_to_half(high) << 16 | emulated::float_to_half(low);
}
inline void cvt_bf16_f32_twice(uint32_t &packed, float x) { packed = emulated::float_to_bfloat(x) * 0x10001u; }
inline void hidden_03020100(uint32_t &x) { x = 0x03020100; }
inline void ex2_approx_ftz(float &y, float x) {
    y = exp2f(x);
    if (y < 0x1p-126f) y = 0.0f;
}
// Does what __byte_perm does. In addition, a selector nibble with its top bit set replicates the byte's sign.
inline void prmt(uint32_t &out, uint32_t a, uint32_t b, uint32_t selector) {
    out = __byte_perm(a, b, selector);
    for (int i = 0; i < 4; i++)
        if (selector >> 4 * i & 8) {
            const uint32_t byte = out >> 8 * i & 0xff;
            out = (out & ~(0xffu << 8 * i)) | (byte & 0x80 ? 0xffu : 0) << 8 * i;
        }
}

inline void ld_v4(uint32_t &x, uint32_t &y, uint32_t &z, uint32_t &w, const uint4 *from) {
    const uint4 all = *from;
    x = all.x, y = all.y, z = all.z, w = all.w;
}
inline void ld_v2(uint32_t &x, uint32_t &y, const uint2 *from) {
    const uint2 all = *from;
    x = all.x, y = all.y;
}
inline void ld_shared_v4(float &x, float &y, float &z, float &w, uint32_t address) {
    const float *const from = (const float *)shared(address);
    x = from[0], y = from[1], z = from[2], w = from[3];
}
inline void ld_shared_v2(float &x, float &y, uint32_t address) {
    const float *const from = (const float *)shared(address);
    x = from[0], y = from[1];
}
// Reads a word that the host writes at the same time. A thread that polls lets the host run.
inline void ld_acquire_sys(uint32_t &x, const uint32_t *from) {
    emulated::device->let_host();
    x = __atomic_load_n(from, __ATOMIC_ACQUIRE);
}
inline void ld_acquire_gpu(uint32_t &x, const uint32_t *from) { x = __atomic_load_n(from, __ATOMIC_ACQUIRE); }
inline void st_release_sys(uint32_t *to, uint32_t x) { __atomic_store_n(to, x, __ATOMIC_RELEASE); }
inline void nanoseconds(uint64_t &time) {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    time = (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}
inline void nanoseconds(unsigned long long &time) {
    uint64_t now;
    nanoseconds(now);
    time = now;
}
inline void ld_u32(uint32_t &x, const uint32_t *from) { x = *from; }
inline void prefetch(const void *) {}
inline void ld_u16(uint16_t &x, const uint16_t *from) { x = *from; }

inline void cp_async(uint32_t to, uint64_t from) { emulated::device->copy(shared(to), (const void *)from, 16, 0); }
inline void cp_async_zero(uint32_t to, const void *from, int bytes) {
    emulated::device->copy(shared(to), from, bytes, 16 - bytes);
}
inline void cp_async_4(uint32_t to, uint64_t from) { emulated::device->copy(shared(to), (const void *)from, 4, 0); }
inline void cp_async_commit() { emulated::device->commit_copies(); }
inline void cp_async_wait(int pending) { emulated::device->wait_copies(pending); }

// Lane l gives the address of row l % 8 of matrix l / 8.
inline void load_matrices(uint32_t *out[4], uint32_t address, bool transposed) {
    using namespace emulated;
    const uint64_t row = (uint64_t)(size_t)shared(address);
    const uint32_t words[] = {(uint32_t)row, (uint32_t)(row >> 32), transposed};
    const Slot *slots = device->exchange(~0u, LOAD_MATRICES, words, 3);
    for (int i = 0; i < 4; i++) *out[i] = slots[emulated::lane()].words[3 + i];
}
inline void ldmatrix(uint32_t &a, uint32_t &b, uint32_t &c, uint32_t &d, uint32_t address) {
    uint32_t *out[4] = {&a, &b, &c, &d};
    load_matrices(out, address, false);
}
inline void ldmatrix_transposed(uint32_t &a, uint32_t &b, uint32_t &c, uint32_t &d, uint32_t address) {
    uint32_t *out[4] = {&a, &b, &c, &d};
    load_matrices(out, address, true);
}

template <class T> inline void mma(emulated::Kind kind, T *const (&c)[4], const uint32_t (&ab)[6]) {
    uint32_t words[10];
    memcpy(words, ab, sizeof ab);
    for (int i = 0; i < 4; i++) memcpy(words + 6 + i, c[i], 4);
    const emulated::Slot *slots = emulated::device->exchange(~0u, kind, words, 10);
    for (int i = 0; i < 4; i++) memcpy(c[i], slots[emulated::lane()].words + 6 + i, 4);
}
inline void mma_f16(float &c0, float &c1, float &c2, float &c3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                    uint32_t b0, uint32_t b1) {
    float *c[4] = {&c0, &c1, &c2, &c3};
    mma(emulated::MMA_F16, c, {a0, a1, a2, a3, b0, b1});
}
inline void mma_bf16(float &c0, float &c1, float &c2, float &c3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                     uint32_t b0, uint32_t b1) {
    float *c[4] = {&c0, &c1, &c2, &c3};
    mma(emulated::MMA_BF16, c, {a0, a1, a2, a3, b0, b1});
}

inline void mma_s8(int &c0, int &c1, int &c2, int &c3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                   uint32_t b1) {
    int *const c[4] = {&c0, &c1, &c2, &c3};
    mma(emulated::MMA_S8, c, {a0, a1, a2, a3, b0, b1});
}
// The other 16 codes are 0.
inline void mma_s8_half(int &c0, int &c1, int &c2, int &c3, uint32_t a0, uint32_t a1, uint32_t b) {
    mma_s8(c0, c1, c2, c3, a0, a1, 0, 0, b, 0);
}

}  // namespace ptx
