/* forebay_load.h: all weights of a file or folder in memory of the host or of a GPU, tensor by tensor, and as DLPack.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * forebay_load takes a folder of safetensors files (with an index, a single model.safetensors, or else all that lie
 * there; no configuration is needed), one .safetensors file, a GGUF file (any file of a split set), or a pack (.fbay).
 * Every function returns a forebay_status of forebay.h; forebay_last_error(0, ...) on the same thread gives the words.
 *
 * LOADS ARE COMPLETE. When forebay_load returns FOREBAY_OK every byte is in its place, on a GPU, too: nothing is queued
 * any more, and no stream has to be waited for. A consumer may use the tensors on whatever stream it likes.
 *
 * WHO OWNS WHAT. Weights own all memory of their tensors. forebay_weights_free gives the number back; the memory goes
 * when the number is freed and the deleter of every DLPack tensor has run, in whatever order and on whatever threads.
 * Addresses inside forebay_tensor (name, type, shape, data) are valid until forebay_weights_free, or as long as a DLPack
 * tensor of the same weights lives. The memory may be written to: nothing else reads it. Memory of a GPU is given back
 * after the whole GPU has been waited for, so kernels that are queued may go on using it; while a CUDA graph is being
 * captured that is impossible, and then the memory stays until the process ends.
 *
 * WHERE TENSORS LIE. On a GPU every tensor is in one piece, at a multiple of 256 bytes. In host memory tensors lie as in
 * their file, which saves a copy: at a multiple of their element's size at least, those of packs at multiples of 256.
 * In host memory the entries of a pack's stack of experts lie apart (stride_bytes, FOREBAY_TENSOR_APART); nothing else does.
 *
 * PACKS MAY HAVE COMPACT WEIGHTS. They take three quarters of the bytes of BF16 and become BF16 as the load ends, in the
 * memory of the tensor: on a GPU with at most 64 MiB beside it. vram_bytes counts those. With the option stored they are
 * blocks of bytes, as docs/codec.md describes them.
 *
 * THREADS. Every function may be called by any thread at any time, for the same weights, too. forebay_load works with
 * threads of its own and calls progress on the calling thread only. The calling thread's current CUDA context is the same
 * after every call and every deleter as before. After fork the child must not use what its parent loaded.
 */
#ifndef FOREBAY_LOAD_H
#define FOREBAY_LOAD_H

#include "forebay.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Declared by dlpack.h (github.com/dmlc/dlpack), which programs that use them include. */
struct DLManagedTensor;
struct DLManagedTensorVersioned;

/* Weights in memory; 0 is none. Numbers are never used twice, and none is a reader's. */
typedef uint64_t forebay_weights;

/* Told bytes that are done and bytes in all, several times a second at least; anything but 0 ends the load, which then
 * returns FOREBAY_CANCELLED. It must return: no longjmp, no exception of C++. */
typedef int (*forebay_progress)(void *user, uint64_t done_bytes, uint64_t total_bytes);

/* Fill it with forebay_load_options_init, then change what you like. What cannot take effect is refused. */
typedef struct forebay_load_options {
    uint64_t struct_bytes;      /* which version of this structure it is: leave it */
    uint32_t engine;            /* FOREBAY_ENGINE_... */
    uint32_t verify;            /* 1: compare packs with their checksums; only packs may have 0 */
    uint32_t read_back;         /* 1: read everything back from the GPU and compare it with the files, which takes seconds */
    uint32_t stored;            /* 1: compact BF16 of packs stays as the pack has it; 0: it becomes BF16 */
    uint64_t vram_bytes;        /* GPU: memory that may be in use when the weights are there, others' included; 0: no bound */
    uint64_t pinned_bytes;      /* GPU: host memory pinned while the load goes on, 1 MiB at least; 0: 128 MiB at most */
    forebay_progress progress;  /* may be null */
    void *progress_user;        /* for progress */
} forebay_load_options;

enum {
    /* Elements share blocks, as in Q4_K: there is no element by itself, and DLPack has no type for them. DLPack tensors
     * are unsigned bytes then, the innermost dimension that of a row in bytes. */
    FOREBAY_TENSOR_BLOCKS = 1,
    /* Entries of the outermost dimension are further apart than they are long. */
    FOREBAY_TENSOR_APART = 2,
    /* The file has the elements compressed, so their bytes are not those at file_offset. Entries are then at no regular distance in it. */
    FOREBAY_TENSOR_DECODED = 4
};

typedef struct forebay_tensor {
    const char *name;
    const char *type;            /* in memory: what the formats call it, as "BF16", "F8_E4M3", "Q4_K" */
    const int64_t *shape;        /* rank numbers of elements, outermost dimension first */
    void *data;                  /* the first byte; on a GPU an address of the device */
    uint64_t bytes;              /* of all elements */
    uint64_t stride_bytes;       /* from one entry of the outermost dimension to the next; inside there are no gaps */
    uint64_t file_offset;        /* where in its file the first byte comes from */
    uint64_t file_stride_bytes;  /* as stride_bytes, in the file */
    uint32_t file;               /* see forebay_weights_file */
    int32_t rank;                /* 0: one element */
    uint32_t flags;              /* FOREBAY_TENSOR_... */
    int32_t ggml_type;           /* the type's number in GGUF files; -1 if it has none */
    uint8_t dlpack_code;         /* DLDataType of its DLPack tensor */
    uint8_t dlpack_bits;
    uint16_t dlpack_lanes;
    uint32_t reserved;
} forebay_tensor;

typedef struct forebay_load_statistics {
    uint64_t tensors;
    uint64_t files;
    uint64_t bytes;           /* of weights */
    uint64_t read_bytes;      /* read by the engine: from the disk where it reads past the page cache */
    uint64_t cached_bytes;    /* copied from the page cache. Both with the little that lies between tensors */
    uint64_t memory_bytes;    /* taken for the weights, with what alignment leaves unused */
    uint64_t pinned_bytes;    /* host memory that was pinned meanwhile */
    double seconds;           /* of the load */
    double setup_seconds;     /* before it: opening the GPU, pinning and mapping memory */
    double bytes_per_second;  /* bytes in seconds */
    double cpu_seconds;       /* processor time of the process in seconds */
} forebay_load_statistics;

/* bytes is sizeof *options: a library with another structure refuses instead of writing beyond. */
forebay_status forebay_load_options_init(forebay_load_options *options, size_t bytes);

/* Loads path to device: "cpu" for host memory, "cuda" for the first GPU, or "cuda:N". options may be null for the
 * defaults. On an error no memory stays taken and *weights is 0: FOREBAY_CANNOT_OPEN for a file that is not there,
 * FOREBAY_BAD_FILES for one that is damaged, FOREBAY_NO_DEVICE, FOREBAY_OUT_OF_MEMORY if the weights do not fit. */
forebay_status forebay_load(const char *path, const char *device, const forebay_load_options *options,
                            forebay_weights *weights);

/* How many tensors there are. They are numbered from 0 in the order of the files and of their places there. */
forebay_status forebay_weights_count(forebay_weights weights, size_t *count);

/* Describes a tensor; bytes is sizeof *tensor. */
forebay_status forebay_weights_tensor(forebay_weights weights, size_t index, forebay_tensor *tensor, size_t bytes);

/* The number of the tensor of this name; FOREBAY_UNKNOWN_TENSOR if there is none. */
forebay_status forebay_weights_find(forebay_weights weights, const char *name, size_t *index);

/* Copies the path of a file, ended by a zero byte and cut to capacity. */
forebay_status forebay_weights_file(forebay_weights weights, uint32_t file, char *text, size_t capacity);

/* What the load did; bytes is sizeof *statistics. */
forebay_status forebay_weights_statistics(forebay_weights weights, forebay_load_statistics *statistics, size_t bytes);

/* Copies a line about the engine that read and why, ended by a zero byte and cut to capacity: "page cache" if everything was
 * there. */
forebay_status forebay_weights_describe(forebay_weights weights, char *text, size_t capacity);

/* Gives the number back; see WHO OWNS WHAT. */
forebay_status forebay_weights_free(forebay_weights weights);

/* A tensor for another library: of version 1.1, on kDLCPU or kDLCUDA, with strides always given, byte_offset 0 and
 * flags 0. It is the caller's until a consumer takes it. Its holder calls its deleter once, on any thread. */
forebay_status forebay_tensor_dlpack(forebay_weights weights, size_t index, struct DLManagedTensorVersioned **managed);

/* The same in the structure of DLPack before 1.0, for consumers that do not know the other. */
forebay_status forebay_tensor_dlpack_unversioned(forebay_weights weights, size_t index,
                                                 struct DLManagedTensor **managed);

#ifdef __cplusplus
}
#endif

#endif
