#include "modules.h"

#include <dirent.h>
#include <dlfcn.h>
#include <spawn.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <regex>
#include <sstream>

#include "translate.h"

extern char **environ;

namespace emulated {

namespace {

std::string setting(const char *name) {
    const char *value = getenv(name);
    if (!value || !*value) throw Unknown(std::string(name) + " is not set");
    return value;
}

std::string line_of(const std::string &text) { return text.substr(0, text.find('\n')); }

// A line of `modules.txt`.
struct Listed {
    std::string name, source, architecture;
    std::vector<std::string> options;
};

// Returns true if the manifest lists the module and the source hash that `first`, the first line of a PTX text, names.
bool is_committed(const std::string &kernels, const std::string &first) {
    std::istringstream lines(read_file(kernels + "/ptx.txt"));
    std::string line, name, architecture, hash;
    while (std::getline(lines, line)) {
        std::istringstream words(line);
        if (words >> name >> architecture >> hash && first == "// " + name + " " + hash) return true;
    }
    return false;
}

// Finds the module of a PTX text by its first line: `// NAME HASH`.
Listed recognise(const std::string &kernels, const std::string &ptx) {
    std::istringstream lines(read_file(kernels + "/modules.txt"));
    std::string line, slashes, name;
    std::istringstream(line_of(ptx)) >> slashes >> name;
    const bool known = is_committed(kernels, line_of(ptx));
    while (known && std::getline(lines, line)) {
        std::istringstream words(line);
        Listed module;
        std::string option;
        if (line[0] == '#' || !(words >> module.name >> module.source >> module.architecture)) continue;
        while (words >> option) module.options.push_back(option);
        if (module.name == name) return module;
    }
    throw Unknown("PTX that is not among the committed modules: " + line_of(ptx));
}

// Returns a file name for the compiled form of a text.
std::string name_of(const std::string &text) {
    uint64_t hash = 14695981039346656037u;
    for (unsigned char c : text) hash = (hash ^ c) * 1099511628211u;
    char out[17];
    snprintf(out, sizeof out, "%016llx", (unsigned long long)hash);
    return out;
}

void run(const std::vector<std::string> &command) {
    std::vector<char *> words;
    for (const std::string &word : command) words.push_back(const_cast<char *>(word.c_str()));
    words.push_back(nullptr);
    pid_t child;
    int status = 0;
    if (posix_spawnp(&child, words[0], nullptr, nullptr, words.data(), environ) != 0)
        throw Unknown("cannot run " + command[0]);
    while (waitpid(child, &status, 0) < 0) {
    }
    if (status != 0) throw Unknown(command[0] + " does not compile " + command.back());
}

// Returns the number of bytes of a parameter of a PTX type.
size_t bytes_of(const std::string &type) { return (size_t)atoi(type.c_str() + 1) / 8; }

void read_entries(const std::string &ptx, Module &module) {
    static const std::regex entry(R"(\.entry (\w+)\()"), parameter(R"(\.param \.(?:align \d+ \.)?(\w+) \w+(\[)?)"),
        threads(R"(\.maxntid (\d+), (\d+), (\d+))"), fixed(R"(\.shared \.align \d+ \.b8 \w+\[(\d+)\])");
    // Counts the shared memory that is declared from the start of an entry's body up to the next entry. Declarations
    // before the first entry are not counted.
    for (std::sregex_iterator it(ptx.begin(), ptx.end(), entry), end; it != end; ++it) {
        Kernel kernel;
        kernel.entry.name = (*it)[1];
        const size_t from = (size_t)it->position();
        const size_t body = ptx.find('{', from), next = ptx.find(".entry ", body);
        const std::string head = ptx.substr(from, body - from);
        const std::string code = ptx.substr(body, next == std::string::npos ? next : next - body);
        for (std::sregex_iterator p(head.begin(), head.end(), parameter); p != end; ++p) {
            if ((*p)[2].matched) throw Unknown("a parameter that is no number: " + p->str());
            kernel.parameters.push_back(bytes_of((*p)[1]));
        }
        std::smatch found;
        kernel.threads_max = 1024;
        if (std::regex_search(head, found, threads))
            kernel.threads_max = (unsigned)(stoi(found[1]) * stoi(found[2]) * stoi(found[3]));
        kernel.static_shared = 0;
        for (std::sregex_iterator s(code.begin(), code.end(), fixed); s != end; ++s)
            kernel.static_shared += stoi((*s)[1]);
        kernel.dynamic_shared_max = 48 * 1024 - kernel.static_shared;
        kernel.waits = code.find("\tgriddepcontrol.wait;") != std::string::npos;
        kernel.asks_host = code.find("\tld.acquire.sys.") != std::string::npos;
        module.kernels[kernel.entry.name] = kernel;
    }
}

// More shared memory than a block of any GPU has, and guard pages after it for every page size.
constexpr size_t SHARED_BYTES = 256 << 10, GUARD_BYTES = 64 << 10;

std::string whole_source(const std::string &kernels, const Listed &listed, const Module &module) {
    std::string text = "#include \"device.h\"\n#include \"ptx.h\"\nnamespace emulated { Runtime *device; }\n";
    text += translate(kernels, listed.source);
    text += "#line 1 \"what the driver calls\"\n";
    text += "extern \"C\" { alignas(65536) char emulated_shared_memory[" +
            std::to_string(SHARED_BYTES + GUARD_BYTES) + "]; }\n";
    text += R"(
namespace emulated {
template <class T> T argument(void *const *&next) { return *(T *)*next++; }
template <class... T> void call(void (*kernel)(T...), void *const *next) {
    struct Call {
        void (*kernel)(T...);
        Call(void (*kernel)(T...), T... values) { kernel(values...); }
    };
    // Braces: the arguments are read in their order.
    Call{kernel, argument<T>(next)...};
}
}
extern "C" __attribute__((visibility("default"))) void emulated_start(emulated::Runtime *device) {
    emulated::device = device;
}
)";
    for (const auto &[name, kernel] : module.kernels)
        text += "extern \"C\" __attribute__((visibility(\"default\"))) void emulated_" + name +
                "(void *const *arguments) { emulated::call(" + name + ", arguments); }\n";
    return text;
}

// Returns the library of a source. Compiles it unless it is in the cache.
std::string compile(const std::string &name, const std::string &text, const std::vector<std::string> &options) {
    const std::string shims = setting("FOREBAY_EMULATOR") + "/device", cache = setting("FOREBAY_EMULATOR_CACHE");
    const char *compiler = getenv("CXX");
    std::vector<std::string> command = {compiler ? compiler : "g++", "-std=c++17", "-O3", "-ffp-contract=fast",
                                        "-fno-strict-aliasing", "-fwrapv", "-fPIC", "-shared", "-Wl,-Bsymbolic", "-w",
                                        "-fvisibility=hidden", "-fno-gnu-unique", "-I" + shims};
#if defined(__x86_64__)
    // A GPU fuses products and sums, which needs the FMA instruction here.
    if (__builtin_cpu_supports("fma")) command.push_back("-mfma");
    if (__builtin_cpu_supports("avx2")) command.insert(command.end(), {"-mavx2", "-mf16c"});
#endif
    command.insert(command.end(), options.begin(), options.end());
    std::string key = text;
    for (const std::string &word : command) key += "\n" + word;
    for (const char *shim : {"device.h", "ptx.h", "runtime.h", "cuda_fp16.h"}) key += read_file(shims + "/" + shim);
    mkdir(cache.c_str(), 0777);
    const std::string base = cache + "/" + name + "-" + name_of(key), library = base + ".so";
    if (access(library.c_str(), R_OK) == 0) return library;
    // Several processes may compile the same module. Each writes to a separate file, and the last rename wins.
    const std::string own = base + "." + std::to_string(getpid());
    std::ofstream(own + ".cpp") << text;
    command.insert(command.end(), {"-o", own + ".so", own + ".cpp"});
    run(command);
    unlink((own + ".cpp").c_str());
    if (rename((own + ".so").c_str(), library.c_str()) != 0) throw Unknown("cannot write " + library);
    return library;
}

}  // namespace

Module *load_module(const std::string &ptx, int capability) {
    std::smatch target;
    static const std::regex pattern(R"(\n\.target sm_(\d+))");
    if (!std::regex_search(ptx, target, pattern)) throw Unknown("PTX without a target");
    if (stoi(target[1]) > capability) throw Unknown("PTX for sm_" + target[1].str() + " on an older GPU");
    if (stoi(target[1]) < 90 && ptx.find("\tgriddepcontrol") != std::string::npos)
        throw Unknown("griddepcontrol in PTX for an older GPU");
    const std::string kernels = setting("FOREBAY_EMULATOR") + "/../../forebay-cuda/kernels";
    const Listed listed = recognise(kernels, ptx);
    auto *module = new Module;
    read_entries(ptx, *module);
    const std::string library = compile(listed.name, whole_source(kernels, listed, *module), listed.options);
    void *handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) throw Unknown(dlerror());
    const auto symbol = [&](const std::string &name) {
        void *found = dlsym(handle, name.c_str());
        if (!found) throw Unknown(library + " has no " + name);
        return found;
    };
    ((void (*)(Runtime *))symbol("emulated_start"))(&runtime);
    char *const end = (char *)symbol("emulated_shared_memory") + SHARED_BYTES;
    mprotect(end, GUARD_BYTES, PROT_NONE);
    for (auto &[name, kernel] : module->kernels) {
        kernel.entry.call = (void (*)(void *const *))symbol("emulated_" + name);
        kernel.entry.shared_end = end;
    }
    return module;
}

}  // namespace emulated
