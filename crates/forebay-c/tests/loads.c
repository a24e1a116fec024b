/* Loads through forebay_load.h, compared with pread. GPU_IS_HOST_MEMORY in the environment: with the driver of driver.c.
 *
 *   loads check DEVICE PATH...   everything below for each path; prints "ok"
 *   loads same DEVICE A B        every tensor of A is in B, with the same elements; prints "ok"
 *   loads errors FOLDER          bad input, in a folder to write to
 */
#define _GNU_SOURCE
#include "forebay_load.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* As dlpack.h has them. */
typedef struct { int32_t device_type, device_id; } DLDevice;
typedef struct { uint8_t code, bits; uint16_t lanes; } DLDataType;
typedef struct {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;
typedef struct DLManagedTensor {
    DLTensor dl_tensor;
    void *manager_ctx;
    void (*deleter)(struct DLManagedTensor *);
} DLManagedTensor;
typedef struct DLManagedTensorVersioned {
    struct { uint32_t major, minor; } version;
    void *manager_ctx;
    void (*deleter)(struct DLManagedTensorVersioned *);
    uint64_t flags;
    DLTensor dl_tensor;
} DLManagedTensorVersioned;

_Static_assert(sizeof(void *) != 8 || sizeof(forebay_load_options) == 56, "the library expects 56 bytes");
_Static_assert(sizeof(void *) != 8 || sizeof(forebay_tensor) == 88, "the library expects 88 bytes");
_Static_assert(sizeof(forebay_load_statistics) == 88, "the library expects 88 bytes");
_Static_assert(sizeof(void *) != 8 || sizeof(DLManagedTensor) == 64, "the library expects 64 bytes");
_Static_assert(sizeof(void *) != 8 || sizeof(DLManagedTensorVersioned) == 80, "the library expects 80 bytes");

static void fail(int line, const char *what) {
    char words[512] = "";
    forebay_last_error(0, words, sizeof words);
    fprintf(stderr, "line %d: %s (last error: %s)\n", line, what, words);
    exit(1);
}
#define CHECK(condition) \
    do { if (!(condition)) fail(__LINE__, #condition); } while (0)

static int says(const char *part) {
    char words[512] = "";
    CHECK(forebay_last_error(0, words, sizeof words) == FOREBAY_OK);
    return strstr(words, part) != NULL;
}

static int readable(const char *device) {
    return strcmp(device, "cpu") == 0 || getenv("GPU_IS_HOST_MEMORY") != NULL;
}

/* This thread has no context, and keeps none. */
static void check_context(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), *context = NULL;
    if (driver == NULL) return;
    int (*current)(void **);
    *(void **)&current = dlsym(driver, "cuCtxGetCurrent");
    CHECK(current != NULL && current(&context) == 0 && context == NULL);
    dlclose(driver);
}

/* The driver of driver.c runs no kernels, so nothing is decoded there. */
static forebay_weights load(const char *path, const char *device) {
    forebay_weights weights = 0;
    forebay_load_options options;
    CHECK(forebay_load_options_init(&options, sizeof options) == FOREBAY_OK && options.stored == 0);
    options.stored = getenv("GPU_IS_HOST_MEMORY") != NULL;
    CHECK(forebay_load(path, device, &options, &weights) == FOREBAY_OK && weights != 0);
    check_context();
    return weights;
}

static forebay_tensor describe(forebay_weights weights, size_t index) {
    forebay_tensor tensor;
    CHECK(forebay_weights_tensor(weights, index, &tensor, sizeof tensor) == FOREBAY_OK);
    return tensor;
}

/* Every byte is the file's, unless the tensor was decoded: see same. */
static void compare(forebay_weights weights, const forebay_tensor *t) {
    char path[4096];
    if (t->flags & FOREBAY_TENSOR_DECODED) return;
    CHECK(forebay_weights_file(weights, t->file, path, sizeof path) == FOREBAY_OK);
    int fd = open(path, O_RDONLY);
    CHECK(fd >= 0);
    uint64_t entries = t->rank > 0 ? (uint64_t)t->shape[0] : 1, length = t->bytes / entries;
    CHECK(length * entries == t->bytes && t->stride_bytes >= length);
    CHECK(((t->flags & FOREBAY_TENSOR_APART) != 0) == (entries > 1 && t->stride_bytes > length));
    unsigned char *expected = malloc(length);
    for (uint64_t entry = 0; entry < entries; entry++) {
        off_t at = (off_t)(t->file_offset + entry * t->file_stride_bytes);
        CHECK(pread(fd, expected, length, at) == (ssize_t)length);
        CHECK(memcmp(expected, (unsigned char *)t->data + entry * t->stride_bytes, length) == 0);
    }
    free(expected);
    close(fd);
}

/* The DLPack tensor is the one that was described. */
static void compare_dlpack(const DLTensor *d, const forebay_tensor *t, int on_gpu) {
    CHECK(d->data == t->data && d->byte_offset == 0);
    CHECK(d->device.device_type == (on_gpu ? 2 : 1) && d->device.device_id == 0);
    CHECK(d->ndim == t->rank && d->dtype.lanes == 1);
    CHECK(d->dtype.code == t->dlpack_code && d->dtype.bits == t->dlpack_bits);
    uint64_t element = d->dtype.bits / 8, bytes = element, blocks = t->flags & FOREBAY_TENSOR_BLOCKS;
    CHECK(!blocks || (d->dtype.code == 1 && d->dtype.bits == 8));
    CHECK((uintptr_t)d->data % (on_gpu ? 256 : element) == 0);
    int64_t stride = 1;
    for (int i = d->ndim - 1; i >= 0; i--) {
        CHECK(d->shape[i] == t->shape[i] || (blocks && i == d->ndim - 1));
        if (i == 0 && d->shape[0] > 1) {
            CHECK((uint64_t)d->strides[0] * element == t->stride_bytes);
        } else {
            CHECK(d->strides[i] == stride);
        }
        stride *= d->shape[i];
        bytes *= (uint64_t)d->shape[i];
    }
    CHECK(bytes == t->bytes);
}

static int told;
static int tell(void *user, uint64_t done, uint64_t total) {
    CHECK(done <= total);
    told++;
    return user == NULL ? 0 : 7;
}

static void *delete_elsewhere(void *argument) {
    DLManagedTensorVersioned *managed = argument;
    managed->deleter(managed);
    check_context();
    return NULL;
}

static void check_orders(const char *path, const char *device) {
    int on_gpu = strcmp(device, "cpu") != 0;
    /* Tensors first, then the weights. */
    forebay_weights weights = load(path, device);
    size_t count = 0;
    CHECK(forebay_weights_count(weights, &count) == FOREBAY_OK && count > 0);
    for (size_t i = 0; i < count; i++) {
        forebay_tensor t = describe(weights, i);
        DLManagedTensorVersioned *managed = NULL;
        DLManagedTensor *old = NULL;
        CHECK(forebay_tensor_dlpack(weights, i, &managed) == FOREBAY_OK);
        CHECK(managed->version.major == 1 && managed->version.minor == 1 && managed->flags == 0);
        compare_dlpack(&managed->dl_tensor, &t, on_gpu);
        CHECK(forebay_tensor_dlpack_unversioned(weights, i, &old) == FOREBAY_OK);
        compare_dlpack(&old->dl_tensor, &t, on_gpu);
        if (i % 2) old->deleter(old);
        managed->deleter(managed);
        if (i % 2 == 0) old->deleter(old);
    }
    CHECK(forebay_weights_free(weights) == FOREBAY_OK);
    CHECK(forebay_weights_free(weights) == FOREBAY_BAD_WEIGHTS && says("freed"));

    /* The weights first: a tensor keeps all of their memory, and what describes it. */
    weights = load(path, device);
    DLManagedTensorVersioned *kept = NULL, *none = NULL;
    DLManagedTensor *old = NULL;
    CHECK(forebay_tensor_dlpack(weights, 0, &kept) == FOREBAY_OK);
    CHECK(forebay_tensor_dlpack_unversioned(weights, count - 1, &old) == FOREBAY_OK);
    forebay_tensor first = describe(weights, 0), last = describe(weights, count - 1);
    CHECK(forebay_weights_free(weights) == FOREBAY_OK);
    CHECK(forebay_tensor_dlpack(weights, 0, &none) == FOREBAY_BAD_WEIGHTS && none == NULL);
    forebay_weights other = load(path, device);
    CHECK(other != weights);
    forebay_tensor again = describe(other, 0);
    CHECK(strcmp(again.name, first.name) == 0 && again.data != first.data);
    compare_dlpack(&old->dl_tensor, &last, on_gpu);
    old->deleter(old);
    compare_dlpack(&kept->dl_tensor, &first, on_gpu);
    if (readable(device)) {
        /* The file's paths are those of both. */
        compare(other, &first);
        compare(other, &last);
        memset(last.data, 0x5c, 1);
    }
    CHECK(forebay_weights_free(other) == FOREBAY_OK);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, delete_elsewhere, kept) == 0 && pthread_join(thread, NULL) == 0);
}

static void check_load(const char *path, const char *device) {
    int on_gpu = strcmp(device, "cpu") != 0;
    forebay_weights weights = 0;
    forebay_load_options options;
    CHECK(forebay_load_options_init(&options, sizeof options) == FOREBAY_OK);
    options.progress = tell;
    options.stored = 1;
    options.engine = FOREBAY_ENGINE_PREAD;
    if (on_gpu) {
        options.read_back = 1;
        options.pinned_bytes = 8 << 20;
    }
    told = 0;
    CHECK(forebay_load(path, device, &options, &weights) == FOREBAY_OK && told > 0);
    size_t count = 0;
    uint64_t bytes = 0;
    CHECK(forebay_weights_count(weights, &count) == FOREBAY_OK);
    for (size_t i = 0; i < count; i++) {
        forebay_tensor t = describe(weights, i);
        size_t found = count;
        CHECK(forebay_weights_find(weights, t.name, &found) == FOREBAY_OK && found == i);
        CHECK(!(t.flags & FOREBAY_TENSOR_DECODED));
        if (readable(device)) compare(weights, &t);
        bytes += t.bytes;
    }
    forebay_load_statistics statistics;
    CHECK(forebay_weights_statistics(weights, &statistics, sizeof statistics) == FOREBAY_OK);
    CHECK(statistics.tensors == count && statistics.bytes >= bytes && statistics.memory_bytes >= bytes);
    CHECK(statistics.read_bytes + statistics.cached_bytes >= statistics.bytes && statistics.seconds > 0);
    CHECK(on_gpu ? statistics.pinned_bytes > 0 && statistics.pinned_bytes <= 8 << 20 : statistics.pinned_bytes == 0);
    char words[256];
    CHECK(forebay_weights_describe(weights, words, sizeof words) == FOREBAY_OK);
    /* A load to a GPU opens no engine if everything is in the page cache. */
    CHECK(strncmp(words, "pread", 5) == 0 || (on_gpu && statistics.read_bytes == 0 && strcmp(words, "page cache") == 0));
    CHECK(forebay_weights_find(weights, "no.such.weight", &count) == FOREBAY_UNKNOWN_TENSOR && says("no.such.weight"));
    CHECK(forebay_weights_free(weights) == FOREBAY_OK);

    options.progress_user = &options;
    CHECK(forebay_load(path, device, &options, &weights) == FOREBAY_CANCELLED && weights == 0);
    CHECK(says("interrupted"));
    check_context();
    if (on_gpu) {
        options.vram_bytes = 1;
        CHECK(forebay_load(path, device, &options, &weights) == FOREBAY_OUT_OF_MEMORY && weights == 0);
        CHECK(says("vram_bytes must be at least"));
        check_context();
    }
}

static int check(char **arguments) {
    const char *device = *arguments++;
    CHECK(forebay_abi_version() == FOREBAY_ABI_VERSION);
    for (; *arguments != NULL; arguments++) {
        check_load(*arguments, device);
        check_orders(*arguments, device);
    }
    puts("ok");
    return 0;
}

static int same(char **arguments) {
    const char *device = arguments[0];
    forebay_weights a = load(arguments[1], device), b = load(arguments[2], device);
    size_t count = 0, decoded = 0;
    CHECK(forebay_weights_count(a, &count) == FOREBAY_OK && count > 0);
    for (size_t i = 0; i < count; i++) {
        size_t other = 0;
        forebay_tensor s = describe(a, i), t;
        CHECK(forebay_weights_find(b, s.name, &other) == FOREBAY_OK);
        t = describe(b, other);
        CHECK(strcmp(s.type, t.type) == 0 && s.bytes == t.bytes && s.rank == t.rank && s.ggml_type == t.ggml_type);
        CHECK(memcmp(s.shape, t.shape, (size_t)s.rank * sizeof *s.shape) == 0);
        uint64_t entries = s.rank > 0 ? (uint64_t)s.shape[0] : 1, length = s.bytes / entries;
        for (uint64_t entry = 0; entry < entries; entry++) {
            const char *p = s.data, *q = t.data;
            CHECK(memcmp(p + entry * s.stride_bytes, q + entry * t.stride_bytes, length) == 0);
        }
        decoded += (t.flags & FOREBAY_TENSOR_DECODED) != 0;
    }
    CHECK(decoded > 0);
    CHECK(forebay_weights_free(a) == FOREBAY_OK && forebay_weights_free(b) == FOREBAY_OK);
    puts("ok");
    return 0;
}

static const char *write_file(const char *folder, const char *name, const void *bytes, size_t length) {
    static char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    CHECK(fd >= 0 && write(fd, bytes, length) == (ssize_t)length && close(fd) == 0);
    return path;
}

/* An odd number of bytes in front of elements of two: the loader moves them. */
static const char *write_odd(const char *folder, size_t cut) {
    const char *head = "{\"bytes\":{\"dtype\":\"F8_E4M3\",\"shape\":[3],\"data_offsets\":[0,3]},"
                       "\"words\":{\"dtype\":\"BF16\",\"shape\":[2,2],\"data_offsets\":[3,11]},"
                       "\"one\":{\"dtype\":\"BOOL\",\"shape\":[],\"data_offsets\":[11,12]}}";
    unsigned char file[1024] = { 0 };
    uint64_t length = strlen(head);
    memcpy(file, &length, 8);
    memcpy(file + 8, head, length);
    for (unsigned i = 0; i < 12; i++) file[8 + length + i] = (unsigned char)(i + 1);
    return write_file(folder, "odd.safetensors", file, 8 + length + 12 - cut);
}

static int errors(char **arguments) {
    const char *folder = arguments[0], *path;
    forebay_weights weights = 7;
    forebay_load_options options;
    CHECK(forebay_load("no/such/file", "cpu", NULL, &weights) == FOREBAY_CANNOT_OPEN && weights == 0);
    CHECK(says("no/such/file"));
    CHECK(forebay_load(folder, "cpu", NULL, &weights) == FOREBAY_BAD_FILES && says("no safetensors files"));
    path = write_file(folder, "noise.gguf", "noise and more noise", 20);
    CHECK(forebay_load(path, "cpu", NULL, &weights) == FOREBAY_BAD_FILES && says("GGUF"));
    path = write_odd(folder, 1);
    CHECK(forebay_load(path, "cpu", NULL, &weights) == FOREBAY_BAD_FILES && says("odd.safetensors"));
    path = write_odd(folder, 0);
    check_load(path, "cpu");
    check_orders(path, "cpu");
    check_load(folder, "cpu");

    CHECK(forebay_load(path, "tpu", NULL, &weights) == FOREBAY_INVALID_ARGUMENT && says("\"tpu\""));
    CHECK(forebay_load(path, "cuda:4000", NULL, &weights) == FOREBAY_NO_DEVICE && weights == 0);
    CHECK(says("driver") || says("GPU 4000"));
    CHECK(forebay_load(NULL, "cpu", NULL, &weights) == FOREBAY_INVALID_ARGUMENT);
    CHECK(forebay_load(path, NULL, NULL, &weights) == FOREBAY_INVALID_ARGUMENT);
    CHECK(forebay_load(path, "cpu", NULL, NULL) == FOREBAY_INVALID_ARGUMENT);
    CHECK(forebay_load_options_init(NULL, sizeof options) == FOREBAY_INVALID_ARGUMENT);
    CHECK(forebay_load_options_init(&options, sizeof options - 8) == FOREBAY_INVALID_ARGUMENT);
    CHECK(forebay_load_options_init(&options, sizeof options) == FOREBAY_OK);
    options.struct_bytes = 8;
    CHECK(forebay_load(path, "cpu", &options, &weights) == FOREBAY_INVALID_ARGUMENT);
    CHECK(forebay_load_options_init(&options, sizeof options) == FOREBAY_OK);
    options.vram_bytes = 1;
    CHECK(forebay_load(path, "cpu", &options, &weights) == FOREBAY_INVALID_ARGUMENT && says("vram_bytes"));
    CHECK(forebay_load_options_init(&options, sizeof options) == FOREBAY_OK);
    options.pinned_bytes = 4096;
    CHECK(forebay_load(path, "cuda", &options, &weights) == FOREBAY_INVALID_ARGUMENT && says("pinned_bytes"));
    options.pinned_bytes = 0;
    options.engine = 9;
    CHECK(forebay_load(path, "cpu", &options, &weights) == FOREBAY_INVALID_ARGUMENT);
    options.engine = 0;
    options.verify = 0;
    CHECK(forebay_load(path, "cpu", &options, &weights) == FOREBAY_INVALID_ARGUMENT && says("checksums"));
    options.verify = 1;
    options.stored = 2;
    CHECK(forebay_load(path, "cpu", &options, &weights) == FOREBAY_INVALID_ARGUMENT && says("stored"));

    forebay_tensor tensor;
    DLManagedTensorVersioned *managed;
    size_t index;
    char text[8];
    weights = load(path, "cpu");
    CHECK(forebay_weights_tensor(weights, 3, &tensor, sizeof tensor) == FOREBAY_UNKNOWN_TENSOR);
    CHECK(forebay_weights_tensor(weights, 0, &tensor, 8) == FOREBAY_INVALID_ARGUMENT);
    CHECK(forebay_weights_tensor(weights, 0, NULL, sizeof tensor) == FOREBAY_INVALID_ARGUMENT);
    CHECK(forebay_tensor_dlpack(weights, 3, &managed) == FOREBAY_UNKNOWN_TENSOR && managed == NULL);
    CHECK(forebay_tensor_dlpack(weights, 0, NULL) == FOREBAY_INVALID_ARGUMENT);
    CHECK(forebay_tensor_dlpack_unversioned(weights, 0, NULL) == FOREBAY_INVALID_ARGUMENT);
    CHECK(forebay_weights_find(weights, NULL, &index) == FOREBAY_INVALID_ARGUMENT);
    CHECK(forebay_weights_count(weights, NULL) == FOREBAY_INVALID_ARGUMENT);
    CHECK(forebay_weights_file(weights, 1, text, sizeof text) == FOREBAY_UNKNOWN_FILE);
    CHECK(forebay_weights_file(weights, 0, text, sizeof text) == FOREBAY_OK && strlen(text) == 7);
    /* Neither is the other. */
    CHECK(forebay_close(weights) == FOREBAY_BAD_READER);
    CHECK(forebay_weights_free(weights + 1) == FOREBAY_BAD_WEIGHTS);
    CHECK(forebay_weights_free(weights) == FOREBAY_OK);
    puts("ok");
    return 0;
}

int main(int count, char **arguments) {
    if (count >= 4 && strcmp(arguments[1], "check") == 0) return check(arguments + 2);
    if (count == 5 && strcmp(arguments[1], "same") == 0) return same(arguments + 2);
    if (count == 3 && strcmp(arguments[1], "errors") == 0) return errors(arguments + 2);
    fprintf(stderr, "usage: loads check DEVICE PATH... | loads same DEVICE A B | loads errors FOLDER\n");
    return 2;
}
