// Streams, events, graphs, and the work queued on them. Work normally runs at once. With FOREBAY_EMULATOR_LAZY it runs
// only when the program waits for it, which reveals missing waits. Work that waits for the host runs on a separate
// thread.
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "driver.h"
#include "memory.h"
#include "modules.h"
#include "translate.h"

namespace emulated {

using Work = std::function<void()>;

struct Graph {
    // In the order in which the program queued it, whichever stream it is for.
    std::vector<Work> work;
    // True if a kernel of the graph waits for the host.
    bool asks_host = false;
};

struct Stream {
    std::deque<Work> queue;
    // True while a separate thread works on the queue, and that thread, which a later call joins.
    bool busy = false;
    std::thread thread;
    // The graph that the stream captures, if any, and the thread that captures.
    std::shared_ptr<Graph> captured;
    std::thread::id owner;
    bool invalid = false;
    // True if the stream has joined a capture that another stream began, and that stream does not wait for it yet.
    bool forked = false;
};

struct Event {
    double seconds = 0.0;
    Stream *pending = nullptr;
    // The graph in which it was recorded, if any, and its stream.
    std::shared_ptr<Graph> captured;
    Stream *recorded = nullptr;
};

namespace {

std::set<Stream *> streams;

double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

// Lets other threads run. The driver's state may change during this call.
void let_others() {
    lock.unlock();
    usleep(5);
    lock.lock();
}

void work_off(Stream *stream) {
    while (!stream->queue.empty()) {
        const Work work = std::move(stream->queue.front());
        stream->queue.pop_front();
        work();
    }
}

void finish(Stream *stream) {
    while (stream->busy) let_others();
    // The thread has released the lock and needs it no more.
    if (stream->thread.joinable()) stream->thread.join();
    work_off(stream);
}

// Starts a thread for work that waits for the host, because a call of the host would block it.
void start_thread(Stream *stream) {
    if (stream->thread.joinable()) stream->thread.join();
    stream->busy = true;
    stream->thread = std::thread([stream] {
        std::lock_guard<std::recursive_mutex> guard(lock);
        work_off(stream);
        stream->busy = false;
    });
}

bool is_lazy() {
    static const bool lazy = setting_or("FOREBAY_EMULATOR_LAZY", 0) != 0;
    return lazy;
}

Result queue(Stream *stream, Work work, bool asks_host = false) {
    if (!streams.count(stream)) return refuse(INVALID_HANDLE, "a queued call", "no such stream");
    if (stream->captured) {
        stream->captured->work.push_back(std::move(work));
        stream->captured->asks_host |= asks_host;
        return SUCCESS;
    }
    stream->queue.push_back(std::move(work));
    if (stream->busy) return SUCCESS;
    if (asks_host) {
        start_thread(stream);
    } else if (!is_lazy()) {
        finish(stream);
    }
    return ready();
}

// Handles an invalid address in a kernel. Prints the place before the process ends as it would without the handler.
void say_where(int signal, siginfo_t *info, void *) {
    char text[400];
    const std::string place = where_it_runs();
    if (!place.empty()) {
        const int length = snprintf(text, sizeof text, "emulated driver: a kernel used address %p, where no memory is: %s\n",
                                    info->si_addr, place.c_str());
        if (length > 0 && write(2, text, (size_t)length) < 0) abort();
    }
    ::signal(signal, SIG_DFL);
}

void watch_addresses() {
    static bool watching = false;
    if (watching) return;
    watching = true;
    struct sigaction action = {};
    action.sa_sigaction = say_where;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
}

// With FOREBAY_EMULATOR_WATCHDOG: seconds after which a kernel that waits for the host is ended. Real watchdogs allow
// more.
constexpr double WATCHDOG_SECONDS = 0.5;
// Time at which the running kernel first read a word of the host (0: not yet), and the longest wait of all kernels. The
// flag is true if the watchdog has ended the running kernel.
double first_look = 0.0, longest_wait = 0.0;
bool ended_by_watchdog = false;
// Number of launched kernels, for FOREBAY_EMULATOR_BREAK.
int launches = 0;

// With FOREBAY_EMULATOR_TIMES: the time of each kernel on this machine, to find the slow parts of a check.
struct Times {
    std::map<std::string, std::pair<int, double>> all;

    void add(const std::string &name, double seconds) {
        auto &[launches, sum] = all[name];
        launches++;
        sum += seconds;
    }
    ~Times() {
        if (!setting_or("FOREBAY_EMULATOR_TIMES", 0)) return;
        for (const auto &[name, time] : all)
            fprintf(stderr, "%8.2f s %6d launches %s\n", time.second, time.first, name.c_str());
        fprintf(stderr, "longest wait for the host: %.3f s\n", longest_wait);
        fprintf(stderr, "calls after a failure: %d\n", calls_when_broken());
    }
};

Times times;

// Arguments of a launch, copied when it was queued.
struct Launch {
    const Kernel *kernel;
    Grid grid;
    std::vector<uint64_t> values;

    void run() {
        // Only one kernel runs at a time. A kernel of another thread may be waiting for the host.
        static bool running = false;
        while (running) let_others();
        running = true;
        std::vector<void *> pointers;
        for (uint64_t &value : values) pointers.push_back(&value);
        const double start = now();
        first_look = 0.0;
        ended_by_watchdog = false;
        static const int breaks = setting_or("FOREBAY_EMULATOR_BREAK", 0);
        if (++launches == breaks) {
            running = false;
            return break_context(ILLEGAL_ADDRESS);
        }
        const std::string failure = run_blocks(kernel->entry, grid, pointers.data());
        running = false;
        times.add(kernel->entry.name, now() - start);
        if (failure.empty()) return;
        const Result result = ended_by_watchdog ? LAUNCH_TIMEOUT : LAUNCH_FAILED;
        refuse(result, "a kernel", failure.c_str());
        break_context(result);
    }
};

Result copy(Stream *stream, void *to, const void *from, size_t bytes, const char *call, const void *host) {
    if (bytes == 0) return SUCCESS;
    const uint64_t device_to = (uint64_t)to, device_from = (uint64_t)from;
    if (host != to && !is_device(device_to, bytes)) return refuse(INVALID_VALUE, call, "to what is not device memory");
    if (host != from && !is_device(device_from, bytes))
        return refuse(INVALID_VALUE, call, "from what is not device memory");
    const bool pageable = host && !is_pinned(host, bytes);
    if (pageable && streams.count(stream) && stream->captured) {
        stream->invalid = true;
        return refuse(STREAM_CAPTURE_UNSUPPORTED, call, "pageable memory in a graph");
    }
    if (pageable && host == from) {
        // The driver has copied the bytes by the time the call returns.
        auto bytes_taken = std::make_shared<std::vector<char>>((const char *)from, (const char *)from + bytes);
        return queue(stream, [=] { memcpy(to, bytes_taken->data(), bytes); });
    }
    const Result result = queue(stream, [=] { memmove(to, from, bytes); });
    // A copy to pageable memory is synchronous.
    if (pageable) finish(stream);
    return result;
}

}  // namespace

Result outside_capture(const char *call) {
    for (Stream *stream : streams)
        if (stream->captured && stream->owner == std::this_thread::get_id()) {
            stream->invalid = true;
            return refuse(STREAM_CAPTURE_UNSUPPORTED, call, "while this thread captures");
        }
    return SUCCESS;
}

void finish_all() {
    for (Stream *stream : streams) finish(stream);
}

bool let_host() {
    if (first_look == 0.0) first_look = now();
    let_others();
    const double waited = now() - first_look;
    longest_wait = waited > longest_wait ? waited : longest_wait;
    static const bool watchdog = setting_or("FOREBAY_EMULATOR_WATCHDOG", 0) != 0;
    ended_by_watchdog = watchdog && waited > WATCHDOG_SECONDS;
    return !ended_by_watchdog;
}

}  // namespace emulated

using namespace emulated;

EMULATED_CALL cuStreamCreate(Stream **stream, unsigned) {
    EMULATED_READY();
    streams.insert(*stream = new Stream);
    return SUCCESS;
}

EMULATED_CALL cuStreamCreateWithPriority(Stream **stream, unsigned flags, int) { return cuStreamCreate(stream, flags); }

EMULATED_CALL cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    EMULATED_READY();
    *least = 0;
    *greatest = -5;
    return SUCCESS;
}

EMULATED_CALL cuStreamDestroy_v2(Stream *stream) {
    EMULATED_READY();
    if (!streams.count(stream)) return INVALID_HANDLE;
    finish(stream);
    streams.erase(stream);
    delete stream;
    return SUCCESS;
}

EMULATED_CALL cuStreamSynchronize(Stream *stream) {
    EMULATED_READY();
    if (!streams.count(stream)) return INVALID_HANDLE;
    if (stream->captured) {
        stream->invalid = true;
        return refuse(STREAM_CAPTURE_UNSUPPORTED, "cuStreamSynchronize", "the stream captures");
    }
    finish(stream);
    return ready();
}

EMULATED_CALL cuStreamQuery(Stream *stream) {
    EMULATED_READY();
    if (!streams.count(stream)) return INVALID_HANDLE;
    if (stream->busy) return NOT_READY;
    // A program that polls must get an answer eventually.
    finish(stream);
    return ready();
}

EMULATED_CALL cuStreamWaitEvent(Stream *stream, Event *event, unsigned) {
    EMULATED_READY();
    if (!streams.count(stream)) return INVALID_HANDLE;
    if (event->captured) {
        if (stream->captured && stream->captured != event->captured)
            return refuse(STREAM_CAPTURE_UNSUPPORTED, "cuStreamWaitEvent", "the event is part of another capture");
        if (!stream->captured) {
            stream->captured = event->captured;
            stream->owner = std::this_thread::get_id();
            stream->forked = true;
        } else if (streams.count(event->recorded)) {
            event->recorded->forked = false;
        }
        return SUCCESS;
    }
    if (event->pending) finish(event->pending);
    return SUCCESS;
}

EMULATED_CALL cuStreamBeginCapture_v2(Stream *stream, int) {
    EMULATED_READY();
    if (!streams.count(stream) || stream->captured) return ILLEGAL_STATE;
    stream->captured = std::make_shared<Graph>();
    stream->owner = std::this_thread::get_id();
    stream->invalid = false;
    return SUCCESS;
}

EMULATED_CALL cuStreamEndCapture(Stream *stream, Graph **graph) {
    EMULATED_READY();
    *graph = nullptr;
    if (!streams.count(stream) || !stream->captured) return ILLEGAL_STATE;
    const std::shared_ptr<Graph> captured = std::move(stream->captured);
    stream->captured = nullptr;
    // Other streams leave the capture with it.
    for (Stream *const other : streams) {
        if (other->captured != captured) continue;
        other->captured = nullptr;
        if (other->forked) stream->invalid = true;
        other->forked = false;
    }
    if (stream->invalid) return STREAM_CAPTURE_INVALIDATED;
    *graph = new Graph(*captured);
    return SUCCESS;
}

EMULATED_CALL cuGraphInstantiateWithFlags(Graph **executable, Graph *graph, unsigned long long) {
    EMULATED_READY();
    *executable = new Graph(*graph);
    return SUCCESS;
}

EMULATED_CALL cuGraphDestroy(Graph *graph) {
    EMULATED_READY();
    delete graph;
    return SUCCESS;
}

EMULATED_CALL cuGraphExecDestroy(Graph *executable) {
    EMULATED_READY();
    finish_all();
    delete executable;
    return SUCCESS;
}

EMULATED_CALL cuGraphLaunch(Graph *executable, Stream *stream) {
    EMULATED_READY();
    const auto run = [=] {
        for (const Work &work : executable->work) work();
    };
    return queue(stream, run, executable->asks_host);
}

EMULATED_CALL cuEventCreate(Event **event, unsigned) {
    EMULATED_READY();
    *event = new Event;
    return SUCCESS;
}

EMULATED_CALL cuEventDestroy_v2(Event *event) {
    EMULATED_READY();
    if (event->pending) finish(event->pending);
    delete event;
    return SUCCESS;
}

EMULATED_CALL cuEventRecord(Event *event, Stream *stream) {
    EMULATED_READY();
    if (!streams.count(stream)) return INVALID_HANDLE;
    event->captured = stream->captured;
    event->recorded = stream;
    if (stream->captured) return SUCCESS;
    event->pending = stream;
    return queue(stream, [=] {
        event->pending = nullptr;
        event->seconds = now();
    });
}

EMULATED_CALL cuEventQuery(Event *event) {
    EMULATED_READY();
    // A program that polls must get an answer eventually.
    if (event->pending) finish(event->pending);
    return ready();
}

EMULATED_CALL cuEventSynchronize(Event *event) {
    EMULATED_READY();
    if (const Result no = outside_capture("cuEventSynchronize")) return no;
    if (event->pending) finish(event->pending);
    return ready();
}

EMULATED_CALL cuEventElapsedTime(float *milliseconds, Event *from, Event *to) {
    EMULATED_READY();
    *milliseconds = (float)((to->seconds - from->seconds) * 1e3);
    return SUCCESS;
}

EMULATED_CALL cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, Stream *stream) {
    EMULATED_READY();
    return copy(stream, (void *)to, from, bytes, "cuMemcpyHtoDAsync", from);
}

EMULATED_CALL cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, Stream *stream) {
    EMULATED_READY();
    return copy(stream, to, (const void *)from, bytes, "cuMemcpyDtoHAsync", to);
}

EMULATED_CALL cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, Stream *stream) {
    EMULATED_READY();
    return copy(stream, (void *)to, (const void *)from, bytes, "cuMemcpyDtoDAsync", nullptr);
}

EMULATED_CALL cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, Stream *stream) {
    EMULATED_READY();
    if (!is_device(to, bytes)) return refuse(INVALID_VALUE, "cuMemsetD8Async", "not device memory");
    return queue(stream, [=] { memset((void *)to, value, bytes); });
}

// Bytes of device memory that a module's code takes.
static const size_t MODULE_BYTES = 256 << 10;

EMULATED_CALL cuModuleLoadData(Module **module, const void *image) {
    EMULATED_READY();
    if (const Result no = outside_capture("cuModuleLoadData")) return no;
    watch_addresses();
    // Code takes device memory, too.
    if (!take(MODULE_BYTES)) return OUT_OF_MEMORY;
    try {
        *module = load_module((const char *)image, capability());
    } catch (const Unknown &unknown) {
        return refuse(INVALID_PTX, "cuModuleLoadData", unknown.what());
    }
    return SUCCESS;
}

EMULATED_CALL cuModuleUnload(Module *module) {
    EMULATED_READY();
    if (const Result no = outside_capture("cuModuleUnload")) return no;
    delete module;
    give(MODULE_BYTES);
    return SUCCESS;
}

EMULATED_CALL cuModuleGetFunction(Kernel **kernel, Module *module, const char *name) {
    EMULATED_READY();
    const auto found = module->kernels.find(name);
    if (found == module->kernels.end()) return refuse(NOT_FOUND, "cuModuleGetFunction", name);
    *kernel = &found->second;
    return SUCCESS;
}

EMULATED_CALL cuFuncGetAttribute(int *value, int attribute, Kernel *kernel) {
    EMULATED_READY();
    switch (attribute) {
        case 0: *value = (int)kernel->threads_max; return SUCCESS;
        case 1: *value = kernel->static_shared; return SUCCESS;
        case 8: *value = kernel->dynamic_shared_max; return SUCCESS;
        default: return refuse(INVALID_VALUE, "cuFuncGetAttribute", "not emulated");
    }
}

EMULATED_CALL cuFuncSetAttribute(Kernel *kernel, int attribute, int value) {
    EMULATED_READY();
    if (attribute != 8 || value < 0 || value + kernel->static_shared > shared_memory())
        return refuse(INVALID_VALUE, "cuFuncSetAttribute", "more shared memory than a block may have");
    kernel->dynamic_shared_max = value;
    return SUCCESS;
}

namespace {

struct LaunchAttribute {
    int id;
    char pad[4];
    union {
        char bytes[64];
        int programmatic_serialization;
    } value;
};

struct LaunchConfig {
    unsigned grid[3], block[3], shared_bytes;
    Stream *stream;
    LaunchAttribute *attributes;
    unsigned attribute_count;
};

const char *wrong_launch(const LaunchConfig &config, const Kernel &kernel) {
    const unsigned long long threads = 1ull * config.block[0] * config.block[1] * config.block[2];
    if (threads == 0 || threads > kernel.threads_max) return "no threads, or more than the kernel is made for";
    if (config.block[2] > 64) return "blocks are too deep";
    if (config.grid[0] == 0 || config.grid[1] == 0 || config.grid[2] == 0) return "an empty grid";
    if (config.grid[0] > 0x7fffffff || config.grid[1] > 65535 || config.grid[2] > 65535) return "too many blocks";
    if ((int)config.shared_bytes > kernel.dynamic_shared_max) return "more shared memory than was asked for";
    for (unsigned i = 0; i < config.attribute_count; i++) {
        // Attribute 6 is programmatic stream serialization, which exists from 9.0 on.
        if (config.attributes[i].id != 6) return "an attribute that is not emulated";
        if (capability() < 90) return "an attribute of newer GPUs";
        if (config.attributes[i].value.programmatic_serialization && !kernel.waits)
            return "it may start before the kernel before has ended, and does not wait for that";
    }
    return nullptr;
}

}  // namespace

EMULATED_CALL cuLaunchKernelEx(const LaunchConfig *config, Kernel *kernel, void **arguments, void **) {
    EMULATED_READY();
    if (const char *why = wrong_launch(*config, *kernel)) {
        const std::string text = kernel->entry.name + ": " + why;
        return refuse(INVALID_VALUE, "cuLaunchKernelEx", text.c_str());
    }
    Launch launch{kernel, {}, {}};
    launch.grid.blocks = {config->grid[0], config->grid[1], config->grid[2]};
    launch.grid.threads = {config->block[0], config->block[1], config->block[2]};
    launch.grid.shared_bytes = config->shared_bytes;
    for (size_t i = 0; i < kernel->parameters.size(); i++) {
        uint64_t value = 0;
        memcpy(&value, arguments[i], kernel->parameters[i]);
        launch.values.push_back(value);
    }
    return queue(config->stream, [launch]() mutable { launch.run(); }, kernel->asks_host);
}
