// What the files of the driver share: its types, its errors and its lock. The names and numbers are those of the driver
// API's documentation.
#pragma once

#include <mutex>

namespace emulated {

enum Result : int {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_PTX = 218,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_TIMEOUT = 702,
    LAUNCH_FAILED = 719,
    HOST_MEMORY_ALREADY_REGISTERED = 712,
    HOST_MEMORY_NOT_REGISTERED = 713,
    STREAM_CAPTURE_UNSUPPORTED = 900,
    STREAM_CAPTURE_INVALIDATED = 901,
    ILLEGAL_STATE = 401,
};

// One call at a time: the GPU is one host thread's work.
extern std::recursive_mutex lock;

// Says on stderr what the caller only gets as a number, and answers that number.
Result refuse(Result result, const char *call, const char *why);

// What every call on a context begins with: it is started, current on this thread, and no kernel has failed.
Result ready();
// A failed kernel takes the context with it: every later call answers `why`.
void break_context(Result why);
// Calls that came after that.
int calls_when_broken();

// For calls that may not come while this thread captures: they end the capture, too.
Result outside_capture(const char *call);
// Does all that streams still have to do.
void finish_all();
// For a kernel that waits for the host. False: the watchdog ends it.
bool let_host();

int setting_or(const char *name, int otherwise);
// 90 for compute capability 9.0.
int capability();
// Bytes of shared memory that a block may have in all.
int shared_memory();

}  // namespace emulated

#define EMULATED_READY()                                       \
    std::lock_guard<std::recursive_mutex> guard(emulated::lock); \
    if (const emulated::Result not_ready = emulated::ready()) return not_ready

#define EMULATED_CALL extern "C" __attribute__((visibility("default"))) int
