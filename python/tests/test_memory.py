"""Memory lives as long as its last view, whatever the order, and nothing leaks."""

import gc
import os
import subprocess
import sys
import threading

import forebay
import numpy
import pytest
from conftest import fixtures


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    with open("/proc/self/maps") as file:
        return len(file.readlines())


def test_a_thousand_loads_leak_nothing():
    folder = fixtures() / "models" / "gemma3"

    def once(number):
        if number % 3 == 0:
            forebay.load(folder, framework="raw")
        elif number % 3 == 1:
            list(forebay.iter_tensors(folder, framework="raw", budget="64MiB"))
        else:
            with forebay.safe_open(folder, "np") as file:
                name = file.keys()[0]
                tensor = forebay.load(folder, tensors=[name], framework="raw")[name]
            # A capsule that no consumer takes, of either kind.
            tensor.__dlpack__(max_version=(1, 0))
            tensor.__dlpack__()

    for number in range(60):
        once(number)
    gc.collect()
    before = resident(), open_files(), mappings()
    for number in range(1000):
        once(number)
    gc.collect()
    assert open_files() <= before[1]
    assert mappings() <= before[2] + 20
    assert resident() <= before[0] + (16 << 20)


def test_memory_is_freed_with_the_last_view(random_file):
    path, arrays = random_file([(2048, 2048)] * 4)
    size = arrays["t0"].nbytes
    # The first load makes the memory of threads and of io_uring.
    forebay.load(path)
    before = resident()
    found = forebay.load(path, framework="np")
    assert resident() > before + 3 * size
    views = [found[name][5:, 3:] for name in found]
    del found
    numpy.testing.assert_array_equal(views[2], arrays["t2"][5:, 3:])
    # Each large tensor is freed alone.
    del views[:3]
    gc.collect()
    assert resident() < before + 2 * size
    numpy.testing.assert_array_equal(views[0], arrays["t3"][5:, 3:])
    # The last view may go on another thread.
    holder = [views.pop()]
    thread = threading.Thread(target=holder.clear)
    thread.start()
    thread.join()
    gc.collect()
    assert resident() < before + size


def test_capsules(random_file):
    path, arrays = random_file([(3, 4)])
    tensor = forebay.load(path, framework="raw")["t0"]
    assert tensor.__dlpack_device__() == (1, 0)
    assert '"dltensor"' in repr(tensor.__dlpack__())
    assert '"dltensor_versioned"' in repr(tensor.__dlpack__(max_version=(1, 3)))
    with pytest.raises(BufferError, match="copy"):
        tensor.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="cpu"):
        tensor.__dlpack__(dl_device=(2, 0))
    array = numpy.from_dlpack(tensor)
    array[0, 0] = 7
    assert numpy.from_dlpack(tensor)[0, 0] == 7
    with pytest.raises(forebay.OptionError, match="cannot be seen"):
        tensor.view("U8")
    with pytest.raises(RuntimeError):
        try:
            capsule = tensor.__dlpack__(max_version=(1, 0))
            raise RuntimeError("while a capsule is dropped")
        finally:
            del capsule


def test_exit_with_tensors_alive(random_file):
    path, _ = random_file([(1000, 1000)])
    code = (
        "import forebay, numpy, sys, threading\n"
        f"kept = forebay.load({str(path)!r}, framework='np')\n"
        f"capsule = forebay.load({str(path)!r}, framework='raw')['t0'].__dlpack__()\n"
        f"stream = forebay.iter_tensors({str(path)!r}, budget='8MiB')\n"
        "sys.modules['kept'] = kept\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("how", ["load", "stream"])
def test_ctrl_c(tmp_path, how):
    # A sparse file, which takes no disk. The signal comes when the call has only begun.
    path = tmp_path / "long.safetensors"
    size = 3 << 30
    text = f'{{"t":{{"dtype":"U8","shape":[{size}],"data_offsets":[0,{size}]}}}}'.encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
    call = {
        "load": "forebay.load(path)",
        "stream": "list(forebay.iter_tensors(path, budget='4GiB'))",
    }[how]
    code = (
        "import os, signal, sys, threading, time, forebay\n"
        f"path = {str(path)!r}\n"
        # A shell ignores the signal in what it runs in the background, and programs inherit that.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "asked = []\n"
        "def ask():\n    asked.append(time.monotonic())\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Timer(0.02, ask).start()\n"
        f"try:\n    {call}\n"
        "except KeyboardInterrupt:\n    print(time.monotonic() - asked[0])\n"
        "else:\n    print('finished')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert float(done.stdout) < 5, done
