/* As much of a CUDA driver as loads of weights call, with host memory for the device's: one GPU, no kernels. Queued work
 * is done at once. Built by tests as libcuda.so.1. */
#include <stdlib.h>
#include <string.h>

typedef unsigned long long address;

int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuInit(unsigned flags) { return (int)flags; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }

int cuDeviceGetName(char *name, int length, int device) {
    (void)device;
    strncpy(name, "Imagined GPU", length);
    return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    switch (attribute) {
    case 75: *value = 9; return 0;  /* compute capability, major */
    case 16: *value = 4; return 0;  /* multiprocessors */
    default: *value = 0; return 0;  /* memory cannot be mapped, among others */
    }
}

static __thread void *current;
int cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; *context = (void *)8; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return 0; }
int cuCtxGetCurrent(void **context) { *context = current; return 0; }
int cuCtxSetCurrent(void *context) { current = context; return 0; }
int cuCtxSynchronize(void) { return 0; }

int cuStreamCreate(void **stream, unsigned flags) { (void)flags; *stream = (void *)16; return 0; }
int cuStreamDestroy_v2(void *stream) { (void)stream; return 0; }
int cuStreamSynchronize(void *stream) { (void)stream; return 0; }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { (void)stream; (void)event; (void)flags; return 0; }
int cuEventCreate(void **event, unsigned flags) { (void)flags; *event = (void *)24; return 0; }
int cuEventDestroy_v2(void *event) { (void)event; return 0; }
int cuEventRecord(void *event, void *stream) { (void)event; (void)stream; return 0; }
int cuEventSynchronize(void *event) { (void)event; return 0; }
int cuEventQuery(void *event) { (void)event; return 0; }

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { *free_bytes = 6ul << 30; *total = 8ul << 30; return 0; }

int cuMemAlloc_v2(address *at, size_t bytes) {
    void *memory = NULL;
    if (posix_memalign(&memory, 512, bytes)) return 2;
    *at = (address)memory;
    return 0;
}
int cuMemFree_v2(address at) { free((void *)at); return 0; }
int cuMemHostAlloc(void **memory, size_t bytes, unsigned flags) { (void)flags; *memory = malloc(bytes); return 0; }
int cuMemFreeHost(void *memory) { free(memory); return 0; }
int cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags) { (void)memory; (void)bytes; (void)flags; return 0; }
int cuMemHostGetDevicePointer_v2(unsigned long long *address, void *memory, unsigned flags) { (void)flags; *address = (unsigned long long)memory; return 0; }
int cuMemHostUnregister(void *memory) { (void)memory; return 0; }
int cuMemcpyHtoDAsync_v2(address to, const void *from, size_t bytes, void *stream) {
    (void)stream;
    memcpy((void *)to, from, bytes);
    return 0;
}
int cuMemcpyDtoHAsync_v2(void *to, address from, size_t bytes, void *stream) {
    (void)stream;
    memcpy(to, (void *)from, bytes);
    return 0;
}
int cuMemcpyDtoDAsync_v2(address to, address from, size_t bytes, void *stream) {
    (void)stream;
    memcpy((void *)to, (void *)from, bytes);
    return 0;
}
int cuMemsetD8Async(address to, unsigned char value, size_t bytes, void *stream) {
    (void)stream;
    memset((void *)to, value, bytes);
    return 0;
}

int cuGetErrorName(int error, const char **name) { (void)error; *name = "CUDA_ERROR"; return 0; }
int cuGetErrorString(int error, const char **text) { (void)error; *text = "an error"; return 0; }
