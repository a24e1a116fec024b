/* A minimal CUDA driver without a GPU, for programs that must find that it cannot work. VERSION is the version that
 * cuDriverGetVersion reports, and INIT is the result of cuInit. */
static int started;

int cuDriverGetVersion(int *version) {
    *version = VERSION;
    return 0;
}

int cuInit(unsigned flags) {
    (void)flags;
    started = 1;
    return INIT;
}

int cuDeviceGetCount(int *count) {
    *count = 0;
    return started ? 0 : 3; /* not initialised */
}

int cuGetErrorName(int error, const char **name) {
    (void)error;
    *name = "CUDA_ERROR_UNKNOWN";
    return 0;
}

int cuGetErrorString(int error, const char **text) {
    (void)error;
    *text = "unknown error";
    return 0;
}
