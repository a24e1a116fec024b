/* forebay.h: reads of blocks of files, of any place and size, many at a time.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * A reader is a set of open files and an engine (io_uring, or a pool of threads). Requests name a
 * file by its number, counted from 0 in the order of forebay_open. Every function returns a
 * forebay_status: 0, or what went wrong; forebay_last_error gives the words.
 *
 * THE BUFFER RULE. From forebay_submit on, a request's destination belongs to the library. It is
 * yours again when the request's completion was handed out by forebay_poll or forebay_wait, or when
 * forebay_close has returned FOREBAY_OK. One exception: a completion (or forebay_close) that says
 * FOREBAY_STALLED means that the disk never answered and may still write there; that memory must
 * never be freed or used again.
 *
 * No copy is made where offset, length and destination are multiples of forebay_alignment; what
 * does not fit passes through a bounded ring of staging memory. Large reads without a copy want
 * destinations in huge pages (madvise with MADV_HUGEPAGE): with small pages some disks read at half
 * their speed, slower than with the copy.
 *
 * THREADS. Calls on one reader are serialised by a lock of its own: any thread may call at any
 * time. But while an io_uring reader has requests in flight, only the thread that started them may
 * read, submit, poll, wait and close: on others these return FOREBAY_WRONG_THREAD and change
 * nothing. Idle readers may move (the ring is then set up anew, about a millisecond). For several
 * threads open a reader each. After fork the child must not use its parent's readers.
 */
#ifndef FOREBAY_H
#define FOREBAY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Changes when something is added, or a structure or the meaning of a call changes. 2: forebay_load.h. */
#define FOREBAY_ABI_VERSION 2

/* A reader; 0 is none. Numbers are never used twice, so a closed one is refused, not undefined. */
typedef uint64_t forebay_reader;

typedef int32_t forebay_status;
enum {
    FOREBAY_OK = 0,
    FOREBAY_INVALID_ARGUMENT = 1, /* a null pointer, an option out of range */
    FOREBAY_BAD_READER = 2,       /* no such reader, or closed already */
    FOREBAY_CANNOT_OPEN = 3,      /* a file cannot be opened, see the words */
    FOREBAY_UNAVAILABLE = 4,      /* the engine that was asked for does not work here */
    FOREBAY_UNKNOWN_FILE = 5,     /* a file number that was not opened */
    FOREBAY_BEYOND_END = 6,       /* the file ends before the block does */
    FOREBAY_IO_ERROR = 7,         /* the disk failed; the completion has its errno */
    FOREBAY_STALLED = 8,          /* the disk did not answer in time: see the buffer rule */
    FOREBAY_CANCELLED = 9,
    FOREBAY_FULL = 10,            /* too many requests without an answer */
    FOREBAY_WRONG_THREAD = 11,    /* see THREADS */
    FOREBAY_ENGINE_FAILED = 12,   /* the engine as a whole: close the reader */
    FOREBAY_OUT_OF_MEMORY = 13,
    FOREBAY_PANIC = 14,           /* a defect of the library; close the reader, report it */
    /* Of forebay_load.h. */
    FOREBAY_BAD_WEIGHTS = 15,     /* no such weights, or freed already */
    FOREBAY_BAD_FILES = 16,       /* not files of a known kind, or damaged: cut off, wrong checksums */
    FOREBAY_NO_DEVICE = 17,       /* no driver, no such GPU, or one that is too old */
    FOREBAY_DEVICE_FAILED = 18,   /* whatever else the driver says, see the words */
    FOREBAY_UNKNOWN_TENSOR = 19
};

enum { FOREBAY_ENGINE_AUTO = 0, FOREBAY_ENGINE_URING = 1, FOREBAY_ENGINE_PREAD = 2 };

/* The order of requests that were not sent to the disk yet. */
enum { FOREBAY_DEMAND = 0, FOREBAY_READ_AHEAD = 1, FOREBAY_LOAD = 2 };

/* Fill it with forebay_options_init, then change what you like. */
typedef struct forebay_options {
    uint32_t engine;         /* FOREBAY_ENGINE_... */
    uint32_t cached;         /* 0: past the page cache where the file system can (O_DIRECT); 1: through it */
    uint32_t queue_depth;    /* requests at the disk, 1 to 4096 */
    uint32_t threads;        /* of the pread engine, 1 to 256 */
    uint64_t request_bytes;  /* largest request, a multiple of 4096 */
    uint64_t staging_bytes;  /* memory for reads that need a copy */
    uint64_t requests_max;   /* requests without an answer, at most */
    uint64_t stall_milliseconds; /* how long the disk may keep a request */
} forebay_options;

typedef struct forebay_request {
    uint64_t offset;      /* bytes from the start of the file, of any alignment */
    uint64_t length;      /* bytes, any number */
    void *destination;    /* length bytes, of any alignment; see the buffer rule */
    uint64_t user_data;   /* comes back in the completion */
    uint32_t file;        /* number of the file */
    uint32_t priority;    /* FOREBAY_DEMAND, ... */
} forebay_request;

typedef struct forebay_completion {
    uint64_t user_data;
    uint64_t bytes;        /* length of the request if the status is FOREBAY_OK, else 0 */
    forebay_status status;
    int32_t error_number;  /* errno behind FOREBAY_IO_ERROR, else 0 */
} forebay_completion;

/* FOREBAY_ABI_VERSION of the library that is linked. */
uint32_t forebay_abi_version(void);

/* The name of a status, as in "FOREBAY_OK"; never null. */
const char *forebay_status_name(forebay_status status);

forebay_status forebay_options_init(forebay_options *options);

/* Opens files. options may be null for the defaults. */
forebay_status forebay_open(const char *const *paths, size_t count, const forebay_options *options,
                            forebay_reader *reader);

forebay_status forebay_file_bytes(forebay_reader reader, uint32_t file, uint64_t *bytes);

/* What offset, length and destination must be multiples of for a read without a copy. */
forebay_status forebay_alignment(forebay_reader reader, uint32_t file, uint64_t *bytes);

/* Copies a line about the engine in use and why, ended by a zero byte and cut to capacity. */
forebay_status forebay_describe(forebay_reader reader, char *text, size_t capacity);

/* Reads one block and waits for it, whatever else is in flight. */
forebay_status forebay_read(forebay_reader reader, uint32_t file, uint64_t offset, uint64_t length,
                            void *destination);

/* Starts a batch. *accepted (may be null) says how many were taken, from the first one on; fewer
 * than count only with FOREBAY_FULL or a null destination. What is wrong with a block comes as its
 * completion. */
forebay_status forebay_submit(forebay_reader reader, const forebay_request *requests, size_t count,
                              size_t *accepted);

/* Hands out up to capacity completions that are there, in any order, without waiting. */
forebay_status forebay_poll(forebay_reader reader, forebay_completion *completions, size_t capacity,
                            size_t *count);

/* As forebay_poll, but waits for the first one. *count is 0 only when nothing is in flight. */
forebay_status forebay_wait(forebay_reader reader, forebay_completion *completions, size_t capacity,
                            size_t *count);

/* Gives up the requests with this user_data. Their completions still come: FOREBAY_CANCELLED, or
 * FOREBAY_OK if nothing was left to give up. */
forebay_status forebay_cancel(forebay_reader reader, uint64_t user_data);

/* Gives up everything, waits until the disk writes to no destination any more, and closes.
 * Completions that were not handed out are lost. FOREBAY_WRONG_THREAD leaves the reader open. */
forebay_status forebay_close(forebay_reader reader);

/* Copies the words of the reader's last error, or for reader 0 of this thread's last failed
 * forebay_open or call of forebay_load.h, ended by a zero byte and cut to capacity. */
forebay_status forebay_last_error(forebay_reader reader, char *text, size_t capacity);

#ifdef __cplusplus
}
#endif

#endif
