// The subset of CUDA C++ that forebay's kernels use, for the host's compiler. It is included before every kernel's
// source.
#pragma once

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
// Only one block runs at a time, so memory of a block can be static memory of the module.
#define __shared__ static
#define __builtin_assume(x) ((void)0)

namespace emulated {
extern Runtime *device;

template <class To, class From> inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
}  // namespace emulated

#define threadIdx (emulated::device->thread)
#define blockIdx (emulated::device->block)
#define blockDim (emulated::device->block_size)
#define gridDim (emulated::device->grid_size)

struct __align__(8) int2 { int x, y; };
struct __align__(16) int4 { int x, y, z, w; };
struct __align__(8) uint2 { unsigned x, y; };
struct __align__(16) uint4 { unsigned x, y, z, w; };
struct __align__(8) float2 { float x, y; };
struct __align__(16) float4 { float x, y, z, w; };
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#define EMULATED_MIN_MAX(T)                              \
    inline T min(T a, T b) { return b < a ? b : a; }     \
    inline T max(T a, T b) { return a < b ? b : a; }
EMULATED_MIN_MAX(int)
EMULATED_MIN_MAX(unsigned)
EMULATED_MIN_MAX(long)
EMULATED_MIN_MAX(unsigned long)
EMULATED_MIN_MAX(long long)
EMULATED_MIN_MAX(unsigned long long)
#undef EMULATED_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline unsigned min(int a, unsigned b) { return min((unsigned)a, b); }
inline unsigned min(unsigned a, int b) { return min(a, (unsigned)b); }
inline unsigned max(int a, unsigned b) { return max((unsigned)a, b); }
inline unsigned max(unsigned a, int b) { return max(a, (unsigned)b); }

inline float __uint_as_float(unsigned x) { return emulated::bits<float>(x); }
inline float __int_as_float(int x) { return emulated::bits<float>(x); }
inline unsigned __float_as_uint(float x) { return emulated::bits<unsigned>(x); }
inline int __float_as_int(float x) { return emulated::bits<int>(x); }
inline int __float2int_rn(float x) {
    if (x != x) return 0;
    if (x >= 0x1p31f) return INT_MAX;
    return x < -0x1p31f ? INT_MIN : (int)lrintf(x);
}

// Rounds each operation: the empty statement keeps the compiler from fusing two of them.
inline float emulated_rounded(float x) {
    __asm__("" : "+m"(x));
    return x;
}
inline float __fmul_rn(float a, float b) { return emulated_rounded(a * b); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return emulated_rounded(a + b); }
inline float __fsub_rn(float a, float b) { return emulated_rounded(a - b); }
inline float __fdiv_rn(float a, float b) { return emulated_rounded(a / b); }
inline float __fdividef(float a, float b) { return a / b; }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __brev(unsigned x) {
    unsigned out = 0;
    for (int i = 0; i < 32; i++) out |= (x >> i & 1) << (31 - i);
    return out;
}
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (shift & 31));
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (shift < 32 ? shift : 32));
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = (uint64_t)b << 32 | a;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) out |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return out;
}
inline unsigned __vsub4(unsigned a, unsigned b) {
    unsigned out = 0;
    for (int i = 0; i < 32; i += 8) out |= (((a >> i) - (b >> i)) & 0xff) << i;
    return out;
}
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 32; i += 8) c += (int)(int8_t)(a >> i) * (int8_t)(b >> i);
    return c;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
    for (int i = 0; i < 32; i += 8) c += (a >> i & 0xff) * (b >> i & 0xff);
    return c;
}

template <class T> inline T __ldg(const T *p) { return *p; }
template <class T> inline T __ldcg(const T *p) { return *p; }
template <class T> inline T __ldcs(const T *p) { return *p; }
template <class T> inline T __ldcv(const T *p) { return *(const volatile T *)p; }
inline uint4 __ldcv(const uint4 *p) { return *p; }
inline bool __isGlobal(const void *) { return true; }
inline size_t __cvta_generic_to_shared(const void *p) { return (size_t)p; }

// Threads switch only where they wait, so whole memory operations are never interrupted.
template <class T> inline T atomicAdd(T *p, T x) {
    const T old = *p;
    *p = old + x;
    return old;
}
template <class T> inline T atomicExch(T *p, T x) {
    const T old = *p;
    *p = x;
    return old;
}
inline unsigned atomicMin(unsigned *p, unsigned x) {
    const unsigned old = *p;
    *p = min(old, x);
    return old;
}
inline void __threadfence() { __asm__ volatile("" ::: "memory"); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

inline void __trap() { abort(); }
inline void __syncthreads() { emulated::device->barrier(0); }
inline int __syncthreads_or(int value) { return emulated::device->barrier(value != 0); }
inline void __syncwarp(unsigned mask = ~0u) { emulated::device->exchange(mask, emulated::SYNC, nullptr, 0); }

namespace emulated {
inline int lane() {
    const Runtime &r = *device;
    return (int)((r.thread.x + r.block_size.x * (r.thread.y + r.block_size.y * r.thread.z)) & 31);
}

template <class T> inline T shuffle(unsigned mask, T value, int from) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "words");
    uint32_t words[sizeof(T) / 4];
    memcpy(words, &value, sizeof value);
    const Slot *slots = device->exchange(mask, SHUFFLE, words, sizeof(T) / 4);
    memcpy(&value, slots[from].words, sizeof value);
    return value;
}

template <class Step> inline unsigned of_all(unsigned mask, Kind kind, unsigned value, unsigned start, Step step) {
    const Slot *slots = device->exchange(mask, kind, &value, 1);
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1) start = step(start, slots[i].words[0], i);
    return start;
}
}  // namespace emulated

template <class T> inline T __shfl_sync(unsigned mask, T value, int from) {
    return emulated::shuffle(mask, value, from & 31);
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T value, int distance) {
    return emulated::shuffle(mask, value, (emulated::lane() ^ distance) & 31);
}
template <class T> inline T __shfl_up_sync(unsigned mask, T value, int distance) {
    const int own = emulated::lane();
    return emulated::shuffle(mask, value, own < distance ? own : own - distance);
}
template <class T> inline T __shfl_down_sync(unsigned mask, T value, int distance) {
    const int own = emulated::lane();
    return emulated::shuffle(mask, value, own + distance > 31 ? own : own + distance);
}
inline unsigned __ballot_sync(unsigned mask, int value) {
    return emulated::of_all(mask, emulated::VOTE, value != 0, 0,
                            [](unsigned all, unsigned one, int i) { return all | one << i; });
}
inline int __any_sync(unsigned mask, int value) { return __ballot_sync(mask, value) != 0; }
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    return emulated::of_all(mask, emulated::REDUCE, value, 0, [](unsigned a, unsigned b, int) { return max(a, b); });
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value) {
    return emulated::of_all(mask, emulated::REDUCE, value, ~0u, [](unsigned a, unsigned b, int) { return min(a, b); });
}
