/* A driver whose GPU is memory of the host: what libcuda.so.1 has of the calls that a load makes, so that loads to a GPU
 * are tested where there is none. Copies are done when they are queued. At the end it says what was not given back. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int CUresult;
typedef uint64_t CUdeviceptr;
enum { FINE = 0, INVALID = 1, NO_MEMORY = 2, NO_CONTEXT = 201 };
enum { VIRTUAL_MEMORY = 102, MAJOR = 75, MINOR = 76, MULTIPROCESSORS = 16 };
static const uint64_t TOTAL = 1ull << 30, GRANULARITY = 2 << 20;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t used;
static long reserved, mapped, pinned, contexts, handles;
static __thread void *current;

static void change(long *count, long by) {
    pthread_mutex_lock(&lock);
    *count += by;
    pthread_mutex_unlock(&lock);
}

__attribute__((destructor)) static void report(void) {
    if (reserved || mapped || pinned || contexts || handles || used) {
        fprintf(stderr, "driver: %ld ranges, %ld mappings, %ld pinned ranges, %ld contexts, %ld handles stay\n", reserved,
                mapped, pinned, contexts, handles);
        _exit(3);
    }
}

CUresult cuInit(unsigned flags) { return flags == 0 ? FINE : INVALID; }
CUresult cuDriverGetVersion(int *version) { *version = 12080; return FINE; }
CUresult cuDeviceGetCount(int *count) { *count = 1; return FINE; }
CUresult cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal == 0 ? FINE : INVALID; }
CUresult cuDeviceGetName(char *name, int length, int device) {
    (void)device;
    snprintf(name, (size_t)length, "host memory");
    return FINE;
}
CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    *value = attribute == MAJOR ? 9 : attribute == VIRTUAL_MEMORY || attribute == MULTIPROCESSORS;
    return FINE;
}

static int primary;
CUresult cuDevicePrimaryCtxRetain(void **context, int device) {
    (void)device;
    change(&contexts, 1);
    *context = &primary;
    return FINE;
}
CUresult cuDevicePrimaryCtxRelease_v2(int device) { (void)device; change(&contexts, -1); return FINE; }
CUresult cuCtxGetCurrent(void **context) { *context = current; return FINE; }
CUresult cuCtxSetCurrent(void *context) { current = context; return FINE; }
CUresult cuCtxSynchronize(void) { return current == &primary ? FINE : NO_CONTEXT; }
CUresult cuGetErrorString(CUresult error, const char **text) { *text = error == NO_CONTEXT ? "no context" : "refused"; return FINE; }
CUresult cuGetErrorName(CUresult error, const char **text) { (void)error; *text = "CUDA_ERROR"; return FINE; }

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    if (current != &primary) return NO_CONTEXT;
    *total = TOTAL;
    *free_bytes = TOTAL - used;
    return FINE;
}
CUresult cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) {
    (void)properties, (void)option;
    *bytes = GRANULARITY;
    return FINE;
}
CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr wish, uint64_t flags) {
    (void)alignment, (void)wish, (void)flags;
    void *range = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) return NO_MEMORY;
    change(&reserved, 1);
    *address = (uintptr_t)range;
    return FINE;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    change(&reserved, -1);
    return munmap((void *)address, bytes) == 0 ? FINE : INVALID;
}
CUresult cuMemCreate(uint64_t *handle, size_t bytes, const void *properties, uint64_t flags) {
    (void)properties, (void)flags;
    pthread_mutex_lock(&lock);
    int fits = used + bytes <= TOTAL;
    if (fits) used += bytes, handles++;
    pthread_mutex_unlock(&lock);
    *handle = bytes;
    return fits ? FINE : NO_MEMORY;
}
CUresult cuMemRelease(uint64_t handle) {
    pthread_mutex_lock(&lock);
    used -= handle, handles--;
    pthread_mutex_unlock(&lock);
    return FINE;
}
CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, uint64_t handle, uint64_t flags) {
    if (offset != 0 || handle != bytes || flags != 0) return INVALID;
    (void)address;
    change(&mapped, 1);
    return FINE;
}
CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const void *access, size_t count) {
    (void)access;
    if (count != 1 || mprotect((void *)address, bytes, PROT_READ | PROT_WRITE) != 0) return INVALID;
    memset((void *)address, 0x77, bytes);
    return FINE;
}
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    change(&mapped, -1);
    return mprotect((void *)address, bytes, PROT_NONE) == 0 ? FINE : INVALID;
}
CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags) {
    (void)address, (void)bytes, (void)flags;
    if (current != &primary) return NO_CONTEXT;
    change(&pinned, 1);
    return FINE;
}
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *address, unsigned flags) {
    (void)flags;
    *device = (CUdeviceptr)address;
    return FINE;
}
CUresult cuMemHostUnregister(void *address) { (void)address; change(&pinned, -1); return FINE; }

CUresult cuStreamCreate(void **stream, unsigned flags) { (void)flags; change(&handles, 1); *stream = malloc(1); return FINE; }
CUresult cuStreamDestroy_v2(void *stream) { change(&handles, -1); free(stream); return FINE; }
CUresult cuStreamSynchronize(void *stream) { (void)stream; return current == &primary ? FINE : NO_CONTEXT; }
CUresult cuEventCreate(void **event, unsigned flags) { (void)flags; change(&handles, 1); *event = malloc(1); return FINE; }
CUresult cuEventDestroy_v2(void *event) { change(&handles, -1); free(event); return FINE; }
CUresult cuEventRecord(void *event, void *stream) { (void)event, (void)stream; return current == &primary ? FINE : NO_CONTEXT; }
CUresult cuEventQuery(void *event) { (void)event; return FINE; }
CUresult cuEventSynchronize(void *event) { (void)event; return FINE; }
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, void *stream) {
    (void)stream;
    if (current != &primary) return NO_CONTEXT;
    memcpy((void *)to, from, bytes);
    return FINE;
}
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, void *stream) {
    (void)stream;
    if (current != &primary) return NO_CONTEXT;
    memcpy(to, (void *)from, bytes);
    return FINE;
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, void *stream) {
    (void)stream;
    memset((void *)to, value, bytes);
    return FINE;
}
