/* cuFile over pread, for device memory that is host memory. FAKE_CUFILE says how it misbehaves; when it is closed, it
 * writes what it was asked for, and what nobody has given back, to the file FAKE_CUFILE_LOG. Built by tests as
 * libcufile.so.0. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { int code, cuda; } status;
static status answer(int code) { return (status){code, 0}; }

static atomic_int files, memories, reads;
static int is(const char *trouble) {
    const char *given = getenv("FAKE_CUFILE");
    return given && !strcmp(given, trouble);
}

status cuFileDriverOpen(void) {
    while (is("hangs")) sleep(1);
    return answer(is("no-driver") ? 5001 : 0);
}

status cuFileDriverClose_v2(void) {
    const char *name = getenv("FAKE_CUFILE_LOG");
    FILE *log = name ? fopen(name, "w") : NULL;
    if (log) {
        fprintf(log, "files left %d, memory left %d, reads %d\n", files, memories, reads);
        fclose(log);
    }
    return answer(0);
}

struct properties {
    unsigned nvfs_major, nvfs_minor;
    size_t poll_threshold, max_direct_io;
    unsigned status_flags, control_flags, feature_flags, limits[5];
};

status cuFileDriverGetProperties(struct properties *properties) {
    memset(properties, 0, sizeof *properties);
    properties->control_flags = 2;
    if (is("gds") || is("gds-unregistered")) properties->nvfs_major = 2, properties->nvfs_minor = 24;
    if (is("peer")) properties->status_flags = 1u << 11;
    if (is("peer-13")) properties->feature_flags = 1u << 4;
    return answer(0);
}

status cuFileGetVersion(int *version) { *version = 1152; return answer(0); }

struct description { int kind; union { int descriptor; void *handle; } handle; const void *operations; };

status cuFileHandleRegister(void **handle, struct description *description) {
    char path[64];
    int given = description->handle.descriptor;
    if (description->kind != 1) return answer(5018);
    if (!(fcntl(given, F_GETFL) & O_DIRECT)) return answer(5020);
    if (is("refuses")) return answer(5008);
    if (is("no-udev")) return answer(5027);
    /* Any offset and any memory, as the library does it. */
    snprintf(path, sizeof path, "/proc/self/fd/%d", given);
    int mine = open(path, O_RDONLY);
    if (mine < 0) return answer(5031);
    *handle = (void *)(long)mine;
    files++;
    return answer(0);
}

void cuFileHandleDeregister(void *handle) { close((int)(long)handle); files--; }

status cuFileBufRegister(const void *base, size_t bytes, int flags) {
    (void)base; (void)bytes; (void)flags;
    if (is("gds-unregistered")) return answer(5016);
    memories++;
    return answer(0);
}

status cuFileBufDeregister(const void *base) { (void)base; memories--; return answer(0); }

ssize_t cuFileRead(void *handle, void *base, size_t bytes, off_t offset, off_t at) {
    int number = reads++;
    if (is("errno")) { errno = EIO; return -1; }
    if (is("fails")) return -5011;
    if (is("sometimes") && number % 3 == 0) return -5030;
    if (is("short") && bytes > 1) bytes = 1 + (bytes - 1) / (1 + number % 5);
    ssize_t count = pread((int)(long)handle, (char *)base + at, bytes, offset);
    if (is("wrong") && number == 0 && count > 0) ((char *)base + at)[count / 2] ^= 1;
    return count;
}
