// Types, errors and the lock that the files of the driver share. Names and numbers are those of the driver API's
// documentation.
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

// Held during each call: the emulated GPU runs on one host thread at a time.
extern std::recursive_mutex lock;

// Prints the reason to stderr, because the caller gets only a number. Returns that number.
Result refuse(Result result, const char *call, const char *why);

// Checks that every call on a context makes first: the driver is initialised, the context is current on this thread,
// and no kernel has failed.
Result ready();
// Makes every later call return `why`, because a failed kernel destroys the context.
void break_context(Result why);
// Returns the number of calls since then.
int calls_when_broken();

// Check for calls that are not allowed while this thread captures. Such a call also invalidates the capture.
Result outside_capture(const char *call);
// Runs all queued work of all streams.
void finish_all();
// Called by a kernel that waits for the host. Returns false if the watchdog ends it.
bool let_host();

int setting_or(const char *name, int otherwise);
// Returns the compute capability, such as 90 for 9.0.
int capability();
// Returns the largest amount of shared memory of a block, in bytes.
int shared_memory();

}  // namespace emulated

#define EMULATED_READY()                                       \
    std::lock_guard<std::recursive_mutex> guard(emulated::lock); \
    if (const emulated::Result not_ready = emulated::ready()) return not_ready

#define EMULATED_CALL extern "C" __attribute__((visibility("default"))) int
