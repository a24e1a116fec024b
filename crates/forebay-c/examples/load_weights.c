/* Loads all weights of a model into memory and prints the largest tensor.
 *
 *   cargo build --release -p forebay-c
 *   cc -I crates/forebay-c/include crates/forebay-c/examples/load_weights.c -L target/release -lforebay -o load_weights
 *   LD_LIBRARY_PATH=target/release ./load_weights models/tales-moe-sticky-Q4_K_M.gguf cpu
 *
 * MODEL is a GGUF file, a folder with safetensors, or a pack. DEVICE is "cpu", "cuda" or "cuda:N".
 */
#include <stdio.h>

#include "forebay_load.h"

/* Prints why the last call failed. */
static int failed(const char *call, forebay_status status) {
    char why[512] = "";
    forebay_last_error(0, why, sizeof why);
    fprintf(stderr, "%s: %s: %s\n", call, forebay_status_name(status), why);
    return 1;
}

int main(int count, char **arguments) {
    if (count != 3) {
        fprintf(stderr, "usage: load_weights MODEL DEVICE\n");
        return 2;
    }
    forebay_weights weights = 0;
    forebay_status status = forebay_load(arguments[1], arguments[2], NULL, &weights);
    if (status != FOREBAY_OK) return failed("forebay_load", status);

    size_t tensors = 0;
    status = forebay_weights_count(weights, &tensors);
    if (status != FOREBAY_OK) return failed("forebay_weights_count", status);

    forebay_tensor largest = {0};
    for (size_t i = 0; i < tensors; i++) {
        /* tensor.data points to the weights: in host memory for "cpu", in GPU memory for "cuda". */
        forebay_tensor tensor;
        status = forebay_weights_tensor(weights, i, &tensor, sizeof tensor);
        if (status != FOREBAY_OK) return failed("forebay_weights_tensor", status);
        if (tensor.bytes > largest.bytes) largest = tensor;
    }

    forebay_load_statistics statistics;
    status = forebay_weights_statistics(weights, &statistics, sizeof statistics);
    if (status != FOREBAY_OK) return failed("forebay_weights_statistics", status);
    printf("%zu tensors, %llu bytes, %.2f GB/s; the largest is %s (%s)\n", tensors,
           (unsigned long long)statistics.bytes, statistics.bytes_per_second / 1e9, largest.name, largest.type);

    /* Frees the memory, unless a DLPack tensor still uses it. */
    status = forebay_weights_free(weights);
    return status == FOREBAY_OK ? 0 : failed("forebay_weights_free", status);
}
