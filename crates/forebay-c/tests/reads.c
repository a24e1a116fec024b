/* Reads through forebay.h, compared with pread.
 *
 *   reads check FILE SECOND ENGINE CACHED   everything below; prints "ok"
 *   reads latency FILE BYTES COUNT          one block at a time; prints p50 and p99 in microseconds
 *   reads rate FILE odd|aligned|huge        1 MiB blocks at depth 32, into memory of odd alignment, of small or
 *                                           of huge pages; prints MB and processor seconds
 */
#define _GNU_SOURCE
#include "forebay.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

_Static_assert(sizeof(forebay_options) == 48, "the library expects 48 bytes");
_Static_assert(sizeof(void *) != 8 || sizeof(forebay_request) == 40, "the library expects 40 bytes");
_Static_assert(sizeof(forebay_completion) == 24, "the library expects 24 bytes");

static void fail(int line, const char *what, forebay_reader reader) {
    char words[512] = "";
    forebay_last_error(reader, words, sizeof words);
    fprintf(stderr, "line %d: %s (last error: %s)\n", line, what, words);
    exit(1);
}
#define CHECK(condition) \
    do { if (!(condition)) fail(__LINE__, #condition, reader); } while (0)

static uint64_t state = 88172645463325252ull;
static uint64_t below(uint64_t limit) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % limit;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static forebay_reader open_with(const char **paths, size_t count, uint32_t engine, uint32_t cached) {
    forebay_reader reader = 0;
    forebay_options options;
    CHECK(forebay_options_init(&options) == FOREBAY_OK);
    options.engine = engine;
    options.cached = cached;
    options.staging_bytes = 4 << 20;
    CHECK(forebay_open(paths, count, &options, &reader) == FOREBAY_OK);
    return reader;
}

enum { READS = 1000 };
static unsigned char *memory[READS];
static forebay_request requests[READS];
static int answered[READS];

/* Odd sizes, odd alignments; every fourth one fits without a copy, every tenth is large. */
static void make_requests(forebay_reader reader, int fd, int second, uint64_t unit) {
    for (int i = 0; i < READS; i++) {
        uint32_t file = (uint32_t)below(2);
        struct stat status;
        CHECK(fstat(file ? second : fd, &status) == 0);
        uint64_t size = (uint64_t)status.st_size;
        uint64_t length = i % 10 == 0 ? 1 + below(900000) : below(9000);
        if (length > size) length = size;
        uint64_t offset = below(size - length + 1);
        size_t skew = below(64);
        if (i % 4 == 0) {
            length = length / unit * unit;
            offset = offset / unit * unit;
            skew = 0;
        } else if (i % 10 == 0 && i % 20 != 0) {
            /* The middle fits. */
            skew = offset % unit;
        }
        free(memory[i]);
        CHECK(posix_memalign((void **)&memory[i], 4096, skew + length + 64) == 0);
        memset(memory[i], 0xA5, skew + length + 64);
        requests[i] = (forebay_request){ .offset = offset, .length = length, .destination = memory[i] + skew,
                                         .user_data = (uint64_t)i, .file = file, .priority = (uint32_t)below(3) };
        answered[i] = 0;
    }
}

static void compare(forebay_reader reader, const forebay_request *r, int i, int fd) {
    unsigned char *expected = malloc(r->length + 1);
    CHECK(pread(fd, expected, r->length, (off_t)r->offset) == (ssize_t)r->length);
    const unsigned char *got = r->destination;
    CHECK(memcmp(expected, got, r->length) == 0);
    /* Nothing was written around it. */
    for (const unsigned char *p = memory[i]; p < got; p++) CHECK(*p == 0xA5);
    for (int k = 0; k < 64; k++) CHECK(got[r->length + k] == 0xA5);
    free(expected);
}

static void check_batch(forebay_reader reader, int fd, int second) {
    uint64_t unit = 0;
    CHECK(forebay_alignment(reader, 0, &unit) == FOREBAY_OK && unit >= 1);
    make_requests(reader, fd, second, unit);
    size_t accepted = 0;
    CHECK(forebay_submit(reader, requests, READS, &accepted) == FOREBAY_OK && accepted == READS);
    /* A read that waits, in the middle of others. */
    unsigned char now_bytes[777], expected[777];
    CHECK(forebay_read(reader, 0, 12345, sizeof now_bytes, now_bytes) == FOREBAY_OK);
    CHECK(pread(fd, expected, sizeof expected, 12345) == (ssize_t)sizeof expected);
    CHECK(memcmp(now_bytes, expected, sizeof expected) == 0);
    size_t all = 0;
    for (;;) {
        forebay_completion done[37];
        size_t count = 0;
        CHECK((all % 2 ? forebay_poll : forebay_wait)(reader, done, 37, &count) == FOREBAY_OK);
        if (count == 0 && all == READS) break;
        for (size_t k = 0; k < count; k++) {
            int i = (int)done[k].user_data;
            CHECK(done[k].status == FOREBAY_OK && done[k].bytes == requests[i].length);
            CHECK(answered[i]++ == 0);
            compare(reader, &requests[i], i, requests[i].file ? second : fd);
        }
        all += count;
        CHECK(all <= READS);
        if (all == READS) {
            CHECK(forebay_wait(reader, done, 1, &count) == FOREBAY_OK && count == 0);
        }
    }
}

static forebay_completion one(forebay_reader reader, forebay_request request) {
    forebay_completion done;
    size_t count = 0;
    CHECK(forebay_submit(reader, &request, 1, NULL) == FOREBAY_OK);
    CHECK(forebay_wait(reader, &done, 1, &count) == FOREBAY_OK && count == 1);
    return done;
}

static void check_errors(forebay_reader reader, const char *path) {
    unsigned char byte[8192];
    uint64_t size = 0;
    forebay_reader other = 7;
    const char *missing[] = { "no/such/file" };
    const char *none[] = { NULL };
    char words[256];
    CHECK(forebay_open(missing, 1, NULL, &other) == FOREBAY_CANNOT_OPEN && other == 0);
    CHECK(forebay_last_error(0, words, sizeof words) == FOREBAY_OK && strstr(words, "no/such/file"));
    CHECK(forebay_last_error(0, words, 5) == FOREBAY_OK && strlen(words) == 4);
    CHECK(forebay_open(none, 1, NULL, &other) == FOREBAY_INVALID_ARGUMENT);
    CHECK(forebay_open(NULL, 1, NULL, &other) == FOREBAY_INVALID_ARGUMENT);
    CHECK(forebay_open(&path, 1, NULL, NULL) == FOREBAY_INVALID_ARGUMENT);
    forebay_options options;
    CHECK(forebay_options_init(NULL) == FOREBAY_INVALID_ARGUMENT);
    CHECK(forebay_options_init(&options) == FOREBAY_OK);
    options.queue_depth = 0;
    CHECK(forebay_open(&path, 1, &options, &other) == FOREBAY_INVALID_ARGUMENT);
    options.queue_depth = 8;
    options.engine = 99;
    CHECK(forebay_open(&path, 1, &options, &other) == FOREBAY_INVALID_ARGUMENT);

    CHECK(forebay_file_bytes(reader, 0, &size) == FOREBAY_OK && size > 0);
    CHECK(forebay_file_bytes(reader, 0, NULL) == FOREBAY_INVALID_ARGUMENT);
    CHECK(forebay_file_bytes(reader, 9, &size) == FOREBAY_UNKNOWN_FILE);
    CHECK(forebay_read(reader, 9, 0, 1, byte) == FOREBAY_UNKNOWN_FILE);
    CHECK(forebay_read(reader, 0, 0, 1, NULL) == FOREBAY_INVALID_ARGUMENT);
    CHECK(forebay_read(reader, 0, 0, 0, NULL) == FOREBAY_OK);
    CHECK(forebay_read(reader, 0, size - 1, 1, byte) == FOREBAY_OK);
    CHECK(forebay_read(reader, 0, size - 1, 2, byte) == FOREBAY_BEYOND_END);
    CHECK(forebay_last_error(reader, words, sizeof words) == FOREBAY_OK && strstr(words, "ends at byte"));
    CHECK(forebay_read(reader, 0, UINT64_MAX, UINT64_MAX, byte) == FOREBAY_BEYOND_END);
    forebay_request far = { .offset = size, .length = 1, .destination = byte, .user_data = 5 };
    forebay_completion done = one(reader, far);
    CHECK(done.status == FOREBAY_BEYOND_END && done.user_data == 5 && done.bytes == 0);
    far.destination = NULL;
    size_t accepted = 7;
    CHECK(forebay_submit(reader, &far, 1, &accepted) == FOREBAY_INVALID_ARGUMENT && accepted == 0);
    far.destination = byte;
    far.priority = 77;
    CHECK(forebay_submit(reader, &far, 1, &accepted) == FOREBAY_INVALID_ARGUMENT);
    CHECK(forebay_submit(reader, NULL, 1, &accepted) == FOREBAY_INVALID_ARGUMENT);
    CHECK(forebay_wait(reader, NULL, 1, &accepted) == FOREBAY_INVALID_ARGUMENT);
    CHECK(forebay_poll(reader, &done, 1, NULL) == FOREBAY_INVALID_ARGUMENT);
    CHECK(forebay_cancel(reader, 12345) == FOREBAY_OK);

    /* Readers that are none. */
    for (forebay_reader bad = 0; bad < 3; bad++) {
        forebay_reader number = bad ? UINT64_MAX - bad : 0;
        CHECK(forebay_read(number, 0, 0, 1, byte) == FOREBAY_BAD_READER);
        CHECK(forebay_submit(number, &far, 1, NULL) == FOREBAY_BAD_READER);
        CHECK(forebay_wait(number, &done, 1, &accepted) == FOREBAY_BAD_READER);
        CHECK(forebay_close(number) == FOREBAY_BAD_READER);
    }
    CHECK(strcmp(forebay_status_name(FOREBAY_STALLED), "FOREBAY_STALLED") == 0);
    CHECK(strcmp(forebay_status_name(-5), "unknown status") == 0);
}

struct elsewhere {
    forebay_reader reader;
    forebay_status read, close;
};

static void *use_elsewhere(void *argument) {
    struct elsewhere *it = argument;
    unsigned char byte;
    it->read = forebay_read(it->reader, 0, 0, 1, &byte);
    it->close = forebay_close(it->reader);
    return NULL;
}

/* Close and cancel while much is in flight: afterwards nothing writes to the memory any more. */
static void check_in_flight(const char **paths, uint32_t engine, uint32_t cached) {
    forebay_reader reader = open_with(paths, 2, engine, cached);
    uint64_t size = 0;
    CHECK(forebay_file_bytes(reader, 0, &size) == FOREBAY_OK);
    enum { MANY = 64 };
    size_t length = 1 << 20;
    if (length > size / 2) length = (size_t)(size / 2);
    unsigned char *block = NULL;
    CHECK(posix_memalign((void **)&block, 4096, MANY * (size_t)(1 << 20) + 4096) == 0);
    forebay_request many[MANY];
    for (int i = 0; i < MANY; i++) {
        many[i] = (forebay_request){ .offset = (i % 2) ? 4096 : 4097, .length = length,
                                     .destination = block + (size_t)i * (1 << 20), .user_data = (uint64_t)(i % 8) };
    }
    size_t accepted = 0, count = 0, cancelled = 0, fine = 0;
    CHECK(forebay_submit(reader, many, MANY, &accepted) == FOREBAY_OK && accepted == MANY);
    char words[512];
    CHECK(forebay_describe(reader, words, sizeof words) == FOREBAY_OK);
    if (strncmp(words, "io_uring", 8) == 0) {
        struct elsewhere it = { .reader = reader };
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, use_elsewhere, &it) == 0 && pthread_join(thread, NULL) == 0);
        CHECK(it.read == FOREBAY_WRONG_THREAD && it.close == FOREBAY_WRONG_THREAD);
    }
    CHECK(forebay_cancel(reader, 3) == FOREBAY_OK);
    forebay_completion done[8];
    while (cancelled + fine < MANY / 2) {
        CHECK(forebay_wait(reader, done, 8, &count) == FOREBAY_OK && count > 0);
        for (size_t k = 0; k < count; k++) {
            CHECK(done[k].status == FOREBAY_OK || (done[k].status == FOREBAY_CANCELLED && done[k].user_data == 3));
            cancelled += done[k].status == FOREBAY_CANCELLED;
            fine += done[k].status == FOREBAY_OK;
        }
    }
    CHECK(forebay_close(reader) == FOREBAY_OK);
    memset(block, 0x5C, MANY * (size_t)(1 << 20));
    usleep(20000);
    for (size_t i = 0; i < MANY * (size_t)(1 << 20); i++) CHECK(block[i] == 0x5C);
    free(block);
    CHECK(forebay_close(reader) == FOREBAY_BAD_READER);
}

static int check(char **arguments) {
    const char *paths[] = { arguments[0], arguments[1] };
    uint32_t engine = (uint32_t)atoi(arguments[2]), cached = (uint32_t)atoi(arguments[3]);
    forebay_reader reader = 0;
    CHECK(forebay_abi_version() == FOREBAY_ABI_VERSION);
    int fd = open(paths[0], O_RDONLY), second = open(paths[1], O_RDONLY);
    CHECK(fd >= 0 && second >= 0);
    reader = open_with(paths, 2, engine, cached);
    char words[512];
    CHECK(forebay_describe(reader, words, sizeof words) == FOREBAY_OK);
    check_batch(reader, fd, second);
    check_errors(reader, paths[0]);
    check_batch(reader, fd, second);
    CHECK(forebay_close(reader) == FOREBAY_OK);
    check_in_flight(paths, engine, cached);
    for (int i = 0; i < READS; i++) free(memory[i]);
    printf("ok %s\n", words);
    return 0;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int latency(char **arguments) {
    const char *paths[] = { arguments[0] };
    uint64_t length = strtoull(arguments[1], NULL, 10), size = 0;
    int count = atoi(arguments[2]);
    int fd = open(paths[0], O_RDONLY);
    forebay_reader reader = 0;
    CHECK(fd >= 0 && fsync(fd) == 0 && posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
    reader = open_with(paths, 1, FOREBAY_ENGINE_AUTO, 0);
    CHECK(forebay_file_bytes(reader, 0, &size) == FOREBAY_OK && size > 2 * length);
    unsigned char *block = NULL;
    CHECK(posix_memalign((void **)&block, 4096, length + 4096) == 0);
    double *took = malloc(sizeof(double) * (size_t)count);
    char words[512];
    CHECK(forebay_describe(reader, words, sizeof words) == FOREBAY_OK);
    printf("%s\n", words);
    for (int odd = 0; odd < 2; odd++) {
        for (int i = 0; i < count; i++) {
            uint64_t offset = below((size - length) / 4096) * 4096 + (odd ? 1234 : 0);
            double start = now();
            CHECK(forebay_read(reader, 0, offset, length, block + (odd ? 77 : 0)) == FOREBAY_OK);
            took[i] = 1e6 * (now() - start);
        }
        qsort(took, (size_t)count, sizeof *took, by_value);
        printf("%s: p50 %.0f us, p99 %.0f us\n", odd ? "odd offset and memory, one copy" : "aligned, no copy",
               took[count / 2], took[count * 99 / 100]);
    }
    CHECK(forebay_close(reader) == FOREBAY_OK);
    return 0;
}

static int rate(char **arguments) {
    const char *paths[] = { arguments[0] };
    int skew = strcmp(arguments[1], "odd") == 0 ? 33 : 0;
    int huge = strcmp(arguments[1], "huge") == 0;
    enum { DEPTH = 32 };
    uint64_t size = 0, at = 0, done_bytes = 0, length = 1 << 20;
    int fd = open(paths[0], O_RDONLY);
    forebay_reader reader = 0;
    CHECK(fd >= 0 && fsync(fd) == 0 && posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
    reader = open_with(paths, 1, FOREBAY_ENGINE_AUTO, 0);
    CHECK(forebay_file_bytes(reader, 0, &size) == FOREBAY_OK);
    unsigned char *block = NULL;
    CHECK(posix_memalign((void **)&block, 2 << 20, DEPTH * (length + 4096)) == 0);
    CHECK(madvise(block, DEPTH * (length + 4096), huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE) == 0);
    memset(block, 1, DEPTH * (length + 4096));
    double start = now();
    int flying = 0;
    for (uint64_t i = 0; i < DEPTH && at + 2 * length < size; i++, at += length, flying++) {
        forebay_request r = { .offset = at + (uint64_t)skew, .length = length, .user_data = i,
                              .destination = block + i * (length + 4096) + 2 * skew };
        CHECK(forebay_submit(reader, &r, 1, NULL) == FOREBAY_OK);
    }
    while (flying > 0) {
        forebay_completion done[DEPTH];
        size_t count = 0;
        CHECK(forebay_wait(reader, done, DEPTH, &count) == FOREBAY_OK);
        for (size_t k = 0; k < count; k++) {
            CHECK(done[k].status == FOREBAY_OK);
            done_bytes += done[k].bytes;
            flying--;
            if (at + 2 * length >= size) continue;
            forebay_request r = { .offset = at + (uint64_t)skew, .length = length, .user_data = done[k].user_data,
                                  .destination = block + done[k].user_data * (length + 4096) + 2 * skew };
            CHECK(forebay_submit(reader, &r, 1, NULL) == FOREBAY_OK);
            at += length;
            flying++;
        }
    }
    double took = now() - start;
    struct rusage used;
    CHECK(getrusage(RUSAGE_SELF, &used) == 0);
    printf("%s: %.0f MB/s, %.3f processor seconds per GB\n", arguments[1], 1e-6 * (double)done_bytes / took,
           ((double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
            1e-6 * (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec)) / (1e-9 * (double)done_bytes));
    CHECK(forebay_close(reader) == FOREBAY_OK);
    return 0;
}

int main(int count, char **arguments) {
    if (count == 6 && strcmp(arguments[1], "check") == 0) return check(arguments + 2);
    if (count == 5 && strcmp(arguments[1], "latency") == 0) return latency(arguments + 2);
    if (count == 4 && strcmp(arguments[1], "rate") == 0) return rate(arguments + 2);
    fprintf(stderr, "usage: see the head of the source\n");
    return 2;
}
