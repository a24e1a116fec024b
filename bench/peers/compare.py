"""What load.sh runs: rounds of loads, each in a process of its own, and the table.

    python3 compare.py FOREBAY FOLDER ROUNDS [PEER...]
"""

import contextlib
import ctypes
import glob
import importlib.metadata
import importlib.util
import json
import mmap
import os
import socket
import statistics
import subprocess
import sys
import threading
import time

PACKAGES = {
    "safetensors": "safetensors", "prefetch": "safetensors", "fastsafetensors": "fastsafetensors",
    "runai": "runai-model-streamer", "instanttensor": "instanttensor", "forebay_python": "forebay",
}
# The command line and the Python package.
OURS = ("forebay", "forebay_python")
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
# What forebay reads of the disk before a load that needs it, to know the limit.
PROBE_SECONDS, PROBE_BYTES, PROBE_DEPTH = 0.6, 4 << 20, 8
# A load that takes longer has failed.
PATIENCE = float(os.environ.get("PATIENCE", 120))


def say(text):
    print(text, file=sys.stderr, flush=True)


def weights(folder):
    return sorted(glob.glob(os.path.join(folder, "*.safetensors")))


def cached(files):
    """The share of the files that is in the page cache."""
    pages = found = 0
    for name in files:
        with open(name, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            count = -(-size // mmap.PAGESIZE)
            at = LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
            present = ctypes.create_string_buffer(count)
            if LIBC.mincore(at, size, present):
                raise OSError(ctypes.get_errno(), "mincore")
            LIBC.munmap(at, size)
        pages += count
        found += sum(byte & 1 for byte in present.raw[:count:64]) * 64
    return min(found / pages, 1.0)


def drop(files):
    for name in files:
        file = os.open(name, os.O_RDONLY)
        # Only pages that are written back can go.
        os.fdatasync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
    if cached(files) > 0.01:
        say(f"{cached(files):.0%} of the files stayed in the page cache")


def fill(files):
    """Puts all of the files into the page cache. They are read twice: the kernel moves a page to another list when it is used again,
    and the first load after one reading would pay for that."""
    if cached(files) > 0.999:
        return
    buffer = bytearray(16 << 20)
    for name in files * 2:
        with open(name, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def probe(files):
    """Reads the largest file past the page cache for a moment: bytes per second. Forebay does so before it loads, on the same
    file; a disk that remembers what was read last, or that allows only so much in a row, treats all loaders alike then."""
    name = max(files, key=os.path.getsize)
    file = os.open(name, os.O_RDONLY | os.O_DIRECT)
    steps = max(os.path.getsize(name) // PROBE_BYTES, 1)
    memory = mmap.mmap(-1, PROBE_DEPTH * PROBE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Into small pages the disk of a virtual machine reads at half the rate or less.
    memory.madvise(mmap.MADV_HUGEPAGE)
    for at in range(0, len(memory), mmap.PAGESIZE):
        memory[at] = 1
    lock, place, done = threading.Lock(), [0], [0]
    started = time.perf_counter()

    def read(slot):
        buffer = memoryview(memory)[slot * PROBE_BYTES : (slot + 1) * PROBE_BYTES]
        while time.perf_counter() - started < PROBE_SECONDS:
            with lock:
                step, place[0] = place[0] % steps, place[0] + 1
            count = os.preadv(file, [buffer], step * PROBE_BYTES)
            with lock:
                done[0] += count

    threads = [threading.Thread(target=read, args=(slot,)) for slot in range(PROBE_DEPTH)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(file)
    return done[0] / (time.perf_counter() - started)


def host_bytes():
    """Memory of the machine that is in use, without its page cache; pinned memory counts, which no process's size shows."""
    with open("/proc/meminfo") as lines:
        fields = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return 1024 * (fields["MemTotal"] - sum(fields[name] for name in ("MemFree", "Buffers", "Cached", "SReclaimable")))


def run(command):
    """Runs it: what it printed, why it failed or None, how much memory of the machine was in use at most beyond what was in use
    before, and how much beyond what was in use when the process was ready to load (None if it did not say so)."""
    parent, child = socket.socketpair()
    parent.setblocking(False)
    before = peak = host_bytes()
    ready = None
    environment = {**os.environ, "READY": str(child.fileno())}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, pass_fds=[child.fileno()]
    )
    child.close()
    output = []
    reader = threading.Thread(target=lambda: output.extend(process.communicate()))
    started = time.monotonic()
    reader.start()
    while reader.is_alive():
        peak = max(peak, host_bytes())
        if ready is None:
            with contextlib.suppress(BlockingIOError, ConnectionError):
                if parent.recv(1):
                    ready = peak_since = host_bytes()
                    parent.send(b"r")
        else:
            peak_since = max(peak_since, host_bytes())
        if time.monotonic() - started > PATIENCE:
            process.kill()
        reader.join(0.01)
    parent.close()
    since_ready = None if ready is None else peak_since - ready
    if process.returncode != 0:
        lines = [line for line in output[1].splitlines() if line.strip()]
        return None, (lines[-1] if lines else f"exit status {process.returncode}"), peak - before, since_ready
    return output[0], None, peak - before, since_ready


def forebay(program, folder):
    output, failure, host, _ = run([program, "load", folder, "--device", "cuda", "--json"])
    if failure:
        return {"failure": failure}
    answer = json.loads(output)
    load, device = answer["runs"][0], answer["device"]
    # Peers pin and allocate within their time.
    seconds = load["seconds"] + device["pin_seconds"] + device["map_seconds"]
    return {
        "bytes": load["bytes"], "seconds": seconds, "peak_resident_bytes": answer["peak_resident_bytes"], "host_bytes": host,
        "pinned_bytes": device["pinned_bytes"], "answer": answer,
    }


def peer(name, state, folder):
    python = os.environ.get("PYTHON", "python3")
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "load.py")
    output, failure, host, since_ready = run([python, script, name, state, folder])
    if failure:
        return {"failure": failure}
    return {**json.loads(output.splitlines()[-1]), "host_bytes": host, "load_host_bytes": since_ready}


def installed():
    """The peers that are there."""
    found = [name for name, package in PACKAGES.items() if importlib.util.find_spec(package.replace("-", "_"))]
    if "prefetch" in found:
        from safetensors import safe_open

        if not hasattr(safe_open, "prefetch"):
            found.remove("prefetch")
    return found


def measure(program, folder, rounds, names):
    """Loads until all rounds are done or the time is up: the answers in order."""
    files, answers = weights(folder), []
    ends = time.monotonic() + float(os.environ.get("LIMIT", "inf"))
    raw = open(os.environ["RAW"], "w") if "RAW" in os.environ else None
    for round in range(1, rounds + 1):
        for state in os.environ.get("STATES", "cold,warm").split(","):
            # Every second round runs in reverse order.
            for name in names if round % 2 else reversed(names):
                if time.monotonic() > ends:
                    say("the time is up")
                    return answers
                disk = None
                if state == "warm":
                    fill(files)
                else:
                    drop(files)
                    disk = None if name == "forebay" else probe(files)
                share = cached(files)
                answer = forebay(program, folder) if name == "forebay" else peer(name, state, folder)
                answer = {"name": name, "state": state, "round": round, "cached_before": share, "disk": disk, **answer}
                answers.append(answer)
                if raw:
                    print(json.dumps(answer), file=raw, flush=True)
                rate = answer.get("failure") or f"{answer['bytes'] / answer['seconds'] / 1e9:.2f} GB/s"
                say(f"round {round}, {state}, {name}: {rate}")
    return answers


def table(answers, names):
    def of(name, state):
        return [one for one in answers if (one["name"], one["state"]) == (name, state) and "failure" not in one]

    def rates(runs):
        return [run["bytes"] / run["seconds"] / 1e9 for run in runs]

    def cell(runs):
        if not runs:
            return "none"
        found = rates(runs)
        return f"**{statistics.median(found):.2f}** ({min(found):.2f}-{max(found):.2f})"

    def mebibytes(runs, key):
        found = [run[key] for run in runs if key in run]
        return f"{max(found) / 2**20:.0f}" if found else ""

    print("| loader | cold GB/s | warm GB/s | peak resident MiB | of that before the load | host memory MiB | of that in the load | pinned MiB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in names:
        cold, warm = of(name, "cold"), of(name, "warm")
        keys = ("peak_resident_bytes", "resident_before_bytes", "host_bytes", "load_host_bytes", "pinned_bytes")
        cells = [cell(cold), cell(warm), *(mebibytes(cold + warm, key) for key in keys)]
        print(f"| {name} | " + " | ".join(cells) + " |")
    print()
    for state in ("cold", "warm"):
        medians = {name: statistics.median(rates(of(name, state))) for name in names if of(name, state)}
        peers = {name: rate for name, rate in medians.items() if name not in OURS}
        for ours in OURS:
            if ours in medians and peers:
                best = max(peers, key=peers.get)
                print(f"{state}: {ours} {medians[ours] / peers[best]:.2f}x of {best}, the best peer")
    disk = [one["disk"] / 1e9 for one in answers if one["disk"]]
    if disk:
        print(f"disk, before cold loads: {statistics.median(disk):.2f} GB/s ({min(disk):.2f}-{max(disk):.2f})")
    # prefetch_pread is prefetch with an option.
    versions = {PACKAGES.get(name) or PACKAGES[name.split("_")[0]] for name in names if name != "forebay"}
    print("versions:", ", ".join(f"{name} {importlib.metadata.version(name)}" for name in sorted(versions)))
    digests = {one["digest"] for one in answers if "digest" in one}
    if len(digests) > 1:
        print(f"NOT ALL LOADED THE SAME: {digests}")
    for one in answers:
        if "failure" in one:
            print(f"{one['name']}, {one['state']}, round {one['round']}: {one['failure']}")


def main():
    program, folder, rounds, *peers = sys.argv[1:]
    # NO_PROGRAM=1 leaves the command line out, and compares the Python package with its peers.
    names = [*([] if "NO_PROGRAM" in os.environ else ["forebay"]), *(peers or installed())]
    answers = measure(program, folder, int(rounds), names)
    table(answers, names)


if __name__ == "__main__":
    main()
