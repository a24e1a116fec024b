"""Measures how fast nvCOMP decodes weights on a GPU, and how small they become, as a Markdown table.

    python3 nvcomp.py [MEGABYTES] [CHUNK_KIB]

Weights are MEGABYTES (256) of BF16, like those of crates/forebay-codec/tests/support: Gaussian rows of 4096 with a scale each. INT8 has a
scale per row, too. nvCOMP decodes chunks of CHUNK_KIB (64) in parallel. Compressed and decoded bytes are in device memory. GB/s are of
decoded bytes; the fastest of several rounds counts. `gpu-check --bench --only exponents --only gdeflate` prints forebay's.

Needs numpy and nvidia-nvcomp-cu12, but neither torch nor cupy.
"""

import ctypes
import sys
import time

import numpy

ROUNDS, CALLS = 7, 5
# Weights repeat after this many bytes, which is far more than a chunk.
PERIOD = 16 << 20


class Driver:
    """The CUDA driver, to wait for the GPU."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self.check(self.cuda.cuInit(0))
        # The context that nvCOMP uses.
        self.check(self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
        self.check(self.cuda.cuCtxSetCurrent(context))

    def check(self, code):
        if code:
            raise OSError(f"CUDA error {code}")

    def wait(self):
        self.check(self.cuda.cuCtxSynchronize())

    def name(self):
        name = ctypes.create_string_buffer(100)
        self.check(self.cuda.cuDeviceGetName(name, 100, 0))
        return name.value.decode()


def gaussian(count):
    return numpy.random.default_rng(1).standard_normal(count, dtype=numpy.float32).reshape(-1, 4096)


def bf16():
    rows = gaussian(PERIOD // 2)
    scales = 0.02 * (0.5 + numpy.random.default_rng(2).random((len(rows), 1), dtype=numpy.float32))
    bits = (rows * scales).view(numpy.uint32)
    # To the nearest, ties to even.
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(numpy.uint16).view(numpy.uint8).ravel()


def int8():
    """The largest number of a row is about five standard deviations away."""
    return numpy.clip(numpy.rint(gaussian(PERIOD) * 25.4), -127, 127).astype(numpy.int8).view(numpy.uint8).ravel()


def measure(nvcomp, driver, parts, chunk, options):
    """Returns the compressed bytes of all parts together, and the seconds to decode them."""
    stored, work = 0, []
    for part in parts:
        codec = nvcomp.Codec(uncomp_chunk_size=chunk, **options)
        compressed = codec.encode(nvcomp.as_array(part).cuda())
        driver.wait()
        stored += compressed.buffer_size
        decoded = codec.decode(compressed)
        driver.wait()
        if not numpy.array_equal(numpy.asarray(decoded.cpu()).view(numpy.uint8).ravel(), part):
            raise ValueError("other bytes come back")
        extra = {}
        try:
            # Without this, each call waits for what the header says.
            codec.decode(compressed, out=decoded, decompression_config=codec.decompression_config(compressed))
            extra = {"out": decoded, "decompression_config": codec.decompression_config(compressed)}
        except (AttributeError, TypeError):
            pass  # an older version
        work.append((codec, compressed, decoded, extra))
    seconds = []
    for _ in range(ROUNDS):
        driver.wait()
        began = time.perf_counter()
        for _ in range(CALLS):
            for codec, compressed, _, extra in work:
                codec.decode(compressed, **extra)
        driver.wait()
        seconds.append((time.perf_counter() - began) / CALLS)
    return stored, min(seconds)


def main():
    size = (int(sys.argv[1]) if len(sys.argv) > 1 else 256) << 20
    chunk = (int(sys.argv[2]) if len(sys.argv) > 2 else 64) << 10
    from nvidia import nvcomp

    driver = Driver()
    print(f"nvCOMP {nvcomp.__version__}, {driver.name()}, {size >> 20} MiB in chunks of {chunk >> 10} KiB\n")
    print("| weights | nvCOMP | ratio | decode GB/s |")
    print("| --- | --- | --- | --- |")
    failed = False
    for name, make in (("BF16", bf16), ("INT8", int8)):
        weights = numpy.tile(make(), max(size // PERIOD, 1))[:size]
        rows = [(algorithm, [weights], {"algorithm": algorithm}) for algorithm in ("ANS", "GDeflate", "Zstd")]
        if name == "BF16":
            # Exponents without the noise of mantissas: the upper and lower bytes of all weights apart. The decoder's output is not put together.
            planes = [numpy.ascontiguousarray(weights[1::2]), numpy.ascontiguousarray(weights[::2])]
            rows.insert(1, ("ANS, upper and lower bytes apart", planes, {"algorithm": "ANS"}))
            rows.insert(2, ("ANS, 16-bit floats", [weights], {"algorithm": "ANS", "data_type": "<f2"}))
        for label, parts, options in rows:
            try:
                stored, seconds = measure(nvcomp, driver, parts, chunk, options)
                print(f"| {name} | {label} | {len(weights) / stored:.3f} | {len(weights) / seconds / 1e9:.1f} |", flush=True)
            except Exception as error:  # one codec may not know these options
                failed = True
                print(f"| {name} | {label} | failed: {error} | |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
