// The device, its context, and errors.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"
#include "memory.h"

namespace emulated {

std::recursive_mutex lock;

namespace {

bool started = false;
Result broken = SUCCESS;
int broken_calls = 0;
int retained = 0;
char context;  // the only context; its address is the handle
thread_local void *current = nullptr;

const char *name_of(int error) {
    switch (error) {
        case SUCCESS: return "CUDA_SUCCESS";
        case INVALID_VALUE: return "CUDA_ERROR_INVALID_VALUE";
        case OUT_OF_MEMORY: return "CUDA_ERROR_OUT_OF_MEMORY";
        case NOT_INITIALIZED: return "CUDA_ERROR_NOT_INITIALIZED";
        case INVALID_DEVICE: return "CUDA_ERROR_INVALID_DEVICE";
        case INVALID_CONTEXT: return "CUDA_ERROR_INVALID_CONTEXT";
        case INVALID_PTX: return "CUDA_ERROR_INVALID_PTX";
        case NOT_FOUND: return "CUDA_ERROR_NOT_FOUND";
        case ILLEGAL_ADDRESS: return "CUDA_ERROR_ILLEGAL_ADDRESS";
        case LAUNCH_TIMEOUT: return "CUDA_ERROR_LAUNCH_TIMEOUT";
        case LAUNCH_FAILED: return "CUDA_ERROR_LAUNCH_FAILED";
        case STREAM_CAPTURE_UNSUPPORTED: return "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
        case STREAM_CAPTURE_INVALIDATED: return "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED";
        default: return "an error of the emulated driver";
    }
}

}  // namespace

Result refuse(Result result, const char *call, const char *why) {
    fprintf(stderr, "emulated driver: %s: %s: %s\n", call, name_of(result), why);
    return result;
}

Result ready() {
    if (!started) return refuse(NOT_INITIALIZED, "a call", "before cuInit");
    if (!current || !retained) return refuse(INVALID_CONTEXT, "a call", "no context is current on this thread");
    broken_calls += broken != SUCCESS;
    return broken;
}

void break_context(Result why) { broken = why; }

int calls_when_broken() { return broken_calls; }

int setting_or(const char *name, int otherwise) {
    const char *value = getenv(name);
    return value && *value ? atoi(value) : otherwise;
}

int capability() { return setting_or("FOREBAY_EMULATOR_CAPABILITY", 90); }

// 227 KiB on 9.0, 163 on 8.0, 99 on 8.6 and 8.9.
int shared_memory() { return (capability() == 90 ? 227 : capability() == 80 ? 163 : 99) * 1024; }

}  // namespace emulated

using namespace emulated;

EMULATED_CALL cuDriverGetVersion(int *version) {
    *version = 12040;
    return SUCCESS;
}

EMULATED_CALL cuInit(unsigned) {
    started = true;
    return SUCCESS;
}

EMULATED_CALL cuDeviceGetCount(int *count) {
    *count = 1;
    return started ? SUCCESS : NOT_INITIALIZED;
}

EMULATED_CALL cuDeviceGet(int *device, int ordinal) {
    *device = 0;
    return ordinal == 0 ? SUCCESS : INVALID_DEVICE;
}

EMULATED_CALL cuDeviceGetName(char *name, int length, int) {
    snprintf(name, (size_t)length, "emulated GPU");
    return SUCCESS;
}

EMULATED_CALL cuDeviceGetPCIBusId(char *name, int length, int) {
    snprintf(name, (size_t)length, "0000:00:00.0");
    return SUCCESS;
}

EMULATED_CALL cuDeviceTotalMem_v2(size_t *bytes, int) {
    *bytes = memory_total();
    return SUCCESS;
}

EMULATED_CALL cuDeviceGetAttribute(int *value, int attribute, int) {
    switch (attribute) {
        case 16: *value = setting_or("FOREBAY_EMULATOR_MULTIPROCESSORS", 8); return SUCCESS;
        case 17: *value = setting_or("FOREBAY_EMULATOR_WATCHDOG", 0); return SUCCESS;  // kernels that run long are ended
        case 75: *value = capability() / 10; return SUCCESS;
        case 76: *value = capability() % 10; return SUCCESS;
        case 97: *value = shared_memory(); return SUCCESS;
        case 102: *value = setting_or("FOREBAY_EMULATOR_MAPS", 1); return SUCCESS;  // virtual addresses
        case 115: *value = 0; return SUCCESS;                                      // memory pools
        default: return refuse(INVALID_VALUE, "cuDeviceGetAttribute", "not emulated");
    }
}

EMULATED_CALL cuDevicePrimaryCtxRetain(void **out, int) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    retained++;
    *out = &context;
    return SUCCESS;
}

EMULATED_CALL cuDevicePrimaryCtxRelease_v2(int) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (retained == 0) return INVALID_CONTEXT;
    // The last release destroys the context, and its errors with it.
    if (--retained == 0) broken = SUCCESS;
    return SUCCESS;
}

EMULATED_CALL cuCtxSetCurrent(void *which) {
    current = which;
    return SUCCESS;
}

EMULATED_CALL cuCtxGetCurrent(void **which) {
    *which = current;
    return SUCCESS;
}

EMULATED_CALL cuCtxSynchronize() {
    EMULATED_READY();
    if (const Result no = outside_capture("cuCtxSynchronize")) return no;
    finish_all();
    return ready();
}

EMULATED_CALL cuGetErrorName(int error, const char **name) {
    *name = name_of(error);
    return SUCCESS;
}

EMULATED_CALL cuGetErrorString(int error, const char **text) {
    *text = name_of(error);
    return SUCCESS;
}
