"""Loads equal what safetensors returns, and wrong calls are errors in words."""

import json
import logging
import os
import re
import sys
import threading
import types

import forebay
import forebay.numpy
import numpy
import pytest
import safetensors
import safetensors.numpy
from conftest import BITS, fixtures, raw_bytes, write_safetensors
from forebay._load import bytes_of


def folders():
    found = [path for path in (fixtures() / "models").iterdir() if list(path.glob("*.safetensors"))]
    assert len(found) >= 5
    return sorted(found)


def oracle(files):
    """Return type, shape and bytes of every tensor of some files, as safetensors reads them."""
    found = {}
    for file in files:
        for name, it in safetensors.deserialize(file.read_bytes()):
            found[name] = (it["dtype"], list(it["shape"]), bytes(it["data"]))
    return found


def weights_of(folder):
    """Return the files that a folder's weights are in."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    return sorted(folder.glob("*.safetensors"))


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: folder.name)
def test_fixtures_equal_safetensors(folder):
    wanted = oracle(weights_of(folder))
    found = forebay.load(folder, framework="raw")
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        dtype, shape, content = wanted[name]
        assert (tensor.dtype, tensor.shape) == (dtype, shape), name
        assert raw_bytes(tensor) == content, name
    listed = forebay.list_tensors(folder)
    assert {name: (it.dtype, list(it.shape), it.nbytes) for name, it in listed.items()} == {
        name: (dtype, shape, len(content)) for name, (dtype, shape, content) in wanted.items()
    }
    streamed = dict(forebay.iter_tensors(folder, framework="raw", budget="16MiB"))
    assert list(streamed) == list(listed)
    assert all(raw_bytes(tensor) == wanted[name][2] for name, tensor in streamed.items())


def test_every_type(every_type):
    path, tensors = every_type
    try:
        assert oracle([path]) == {name: (dtype, shape, content) for name, (dtype, shape, content) in tensors.items()}
    except safetensors.SafetensorError:
        pytest.skip("this version of safetensors lacks a type")
    found = forebay.load(path, framework="raw")
    for name, (dtype, shape, content) in tensors.items():
        tensor = found[name]
        assert (tensor.dtype, tensor.element_shape, tensor.nbytes) == (dtype, shape, len(content))
        in_bytes = [*shape[:-1], shape[-1] * BITS[dtype] // 8] if BITS[dtype] < 8 else shape
        assert tensor.shape == in_bytes
        assert raw_bytes(tensor) == content, name


def test_numpy_equals_safetensors(tmp_path):
    rng = numpy.random.default_rng(1)
    types = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "c8", "?"]
    arrays = {kind: (rng.standard_normal((5, 3, 7)) * 50).astype(kind) for kind in types}
    arrays |= {f"{kind}.scalar": numpy.array(array[0, 0, 0]) for kind, array in arrays.items()}
    arrays |= {f"{kind}.empty": numpy.zeros((2, 0), kind) for kind in types}
    theirs, ours = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
    safetensors.numpy.save_file(arrays, theirs, {"a": "b"})
    forebay.numpy.save_file(arrays, ours, {"a": "b"})
    assert ours.read_bytes() == theirs.read_bytes()
    wanted, found = safetensors.numpy.load_file(theirs), forebay.numpy.load_file(theirs)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        numpy.testing.assert_array_equal(found[name], array)


def test_float32_of_gguf_and_of_every_float(every_type):
    path, tensors = every_type
    found = forebay.load(path, dtype="float32", framework="raw", tensors=["BF16.matrix", "I16.matrix", "F8_E8M0.matrix"])
    assert [tensor.dtype for tensor in found.values()] == ["F32", "I16", "F8_E8M0"]
    content = tensors["BF16.matrix"][2]
    wanted = (numpy.frombuffer(content, "<u2").astype("<u4") << 16).view("<f4").reshape(6, 8)
    numpy.testing.assert_array_equal(numpy.from_dlpack(found["BF16.matrix"]), wanted)
    files = sorted((fixtures() / "gguf").rglob("*.gguf"))
    compared = 0
    for file in files:
        raw = forebay.load(file, framework="raw")
        floats = forebay.load(file, framework="raw", dtype=numpy.float32)
        for name, tensor in raw.items():
            listed = forebay.list_tensors(file)[name]
            assert floats[name].element_shape == list(listed.shape)
            if tensor.dtype != "Q8_0":
                continue
            blocks = numpy.from_dlpack(tensor).reshape(-1, 34)
            scales = blocks[:, :2].copy().view("<f2").astype("f4")
            wanted = scales * blocks[:, 2:].copy().view("i1").astype("f4")
            numpy.testing.assert_array_equal(numpy.from_dlpack(floats[name]).reshape(-1), wanted.reshape(-1))
            compared += 1
    assert compared > 0


def test_chosen_tensors_and_slices(random_file):
    path, arrays = random_file([(7, 5), (4, 6, 8), (3,), (0, 5)])
    slices = {"t1": (1, 2, 5), "t0": (-1, 1, 3)}
    found = forebay.load(path, tensors=["t2", "t1", "t0"], slices=slices, framework="np")
    assert list(found) == ["t2", "t1", "t0"]
    numpy.testing.assert_array_equal(found["t2"], arrays["t2"])
    numpy.testing.assert_array_equal(found["t1"], arrays["t1"][:, 2:5])
    numpy.testing.assert_array_equal(found["t0"], arrays["t0"][:, 1:3])
    streamed = dict(forebay.iter_tensors(path, slices=slices, framework="np"))
    numpy.testing.assert_array_equal(streamed["t1"], arrays["t1"][:, 2:5])
    for slices, words in [
        ({"t0": (0, 3, 8)}, "3:8 of dimension 0"),
        ({"t0": (2, 0, 1)}, "fewer dimensions"),
        ({"t0": (0, -1, 1)}, "negative"),
        ({"t0": 3}, "start, stop"),
    ]:
        with pytest.raises(forebay.OptionError, match=words):
            forebay.load(path, slices=slices)
    with pytest.raises(forebay.OptionError, match="not among"):
        forebay.load(path, tensors=["t1"], slices={"t0": (0, 0, 1)})
    with pytest.raises(forebay.TensorNotFoundError, match="there is no tensor \"t9\" in .*random.safetensors"):
        forebay.load(path, tensors=["t9"])
    with pytest.raises(KeyError):
        forebay.load(path, slices={"t9": (0, 0, 1)})


def test_several_files(random_file):
    first, arrays = random_file([(3, 4)], "a.safetensors")
    second = first.with_name("b.safetensors")
    write_safetensors(second, {"u": ("I8", [2], b"\x01\xff")})
    found = forebay.load([first, str(second)], framework="np")
    assert list(found) == ["t0", "u"] and found["u"].tolist() == [1, -1]
    assert list(forebay.load(first.parent, framework="np")) == ["t0", "u"]
    with pytest.raises(forebay.FormatError, match="twice"):
        forebay.load([first, first])
    with pytest.raises(forebay.FormatError):
        forebay.load([])


def test_wrong_files(tmp_path, random_file):
    with pytest.raises(FileNotFoundError) as missing:
        forebay.load(tmp_path / "none.safetensors")
    assert missing.value.filename.endswith("none.safetensors")
    with pytest.raises(FileNotFoundError):
        forebay.safe_open(tmp_path / "none", "np")
    with pytest.raises(forebay.FormatError, match="no safetensors files"):
        forebay.load(tmp_path)
    wrong = tmp_path / "wrong.safetensors"
    for content, words in [
        (b"", "wrong.safetensors"),
        (b"\xff" * 64, "wrong.safetensors"),
        (b"\x08\0\0\0\0\0\0\0{\"a\": 1}", "wrong.safetensors"),
    ]:
        wrong.write_bytes(content)
        with pytest.raises(forebay.FormatError, match=words):
            forebay.load(wrong)
    if os.geteuid() != 0:
        wrong.chmod(0)
        with pytest.raises(PermissionError):
            forebay.load(wrong)
    path, _ = random_file([(1000, 1000), (500, 1000)])
    for action in (
        lambda opened: opened.get_tensor("t1"),
        lambda opened: opened.get_slice("t1")[400:500],
    ):
        with forebay.safe_open(path, "np") as opened:
            size = path.stat().st_size
            os.truncate(path, size - 100_000)
            with pytest.raises(forebay.ReadError, match="t1.*random.safetensors|random.safetensors.*t1"):
                action(opened)
            os.truncate(path, size)
    stream = forebay.iter_tensors(path, budget="8MiB", framework="np")
    os.truncate(path, 5_000_000)
    with pytest.raises((forebay.ReadError, StopIteration)):
        for _ in range(3):
            next(stream)


def test_wrong_arguments(random_file):
    path, _ = random_file([(1000, 1000), (5,)])
    for call, words in [
        (lambda: forebay.load(path, device="gpu"), "device is"),
        (lambda: forebay.load(path, device="cuda:x"), "device is"),
        (lambda: forebay.load(path, dtype="float16"), "dtype is"),
        (lambda: forebay.load(path, framework="tf"), "framework is"),
        (lambda: forebay.iter_tensors(path, budget="3 pigs"), "no size"),
        (lambda: forebay.iter_tensors(path, budget="1MiB"), "\"t0\" alone needs"),
    ]:
        with pytest.raises(forebay.OptionError, match=words):
            call()


def test_too_large_for_the_memory(tmp_path):
    # A sparse file of 8 TiB in a header that says so.
    path = tmp_path / "large.safetensors"
    text = b'{"t":{"dtype":"U8","shape":[8796093022208],"data_offsets":[0,8796093022208]}}'
    try:
        with open(path, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + 8796093022208)
    except OSError:
        pytest.skip("this file system has no sparse files of 8 TiB")
    with pytest.raises(forebay.OutOfMemoryError, match="8.01 TiB"):
        forebay.load(path)


def test_progress(random_file):
    path, _ = random_file([(1000, 1000)])
    seen = []
    forebay.load(path, progress=lambda done, total: seen.append((done, total)), framework="np")
    assert seen[-1] == (4_000_000, 4_000_000) and seen == sorted(seen)

    class Enough(Exception):
        pass

    def stop(done, total):
        raise Enough(f"{done} of {total}")

    with pytest.raises(Enough):
        forebay.load(path, progress=stop)


def test_progress_of_a_stream(random_file):
    path, arrays = random_file([(1000, 1000), (500, 500), (10,), (700, 300)])
    total = sum(array.nbytes for array in arrays.values())
    seen = []
    found = dict(
        forebay.iter_tensors(path, progress=lambda *of: seen.append(of), framework="np", budget="9MiB")
    )
    assert found.keys() == arrays.keys()
    assert seen[-1] == (total, total) and {of for _, of in seen} == {total}
    # Nothing is reported twice.
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    # Slices count what is wanted of them.
    seen.clear()
    slices = {"t0": [(0, 0, 10), (1, 5, 6)]}
    tensors = forebay.iter_tensors(
        path, tensors=["t0"], slices=slices, progress=lambda *of: seen.append(of), framework="np"
    )
    assert len(list(tensors)) == 2 and seen[-1] == (44_000, 44_000)

    class Enough(Exception):
        pass

    def stop(done, total):
        raise Enough(f"{done} of {total}")

    with forebay.iter_tensors(path, progress=stop, framework="np") as tensors:
        with pytest.raises(Enough):
            next(tensors)
        with pytest.raises(forebay.Error, match="closed"):
            next(tensors)


def test_twenty_threads(random_file):
    path, arrays = random_file([(100, 100), (300, 7), (5,)])
    failures = []

    def work(number):
        try:
            for _ in range(5):
                if number % 2:
                    found = forebay.load(path, framework="np")
                else:
                    found = dict(forebay.iter_tensors(path, framework="np", budget="1MiB"))
                for name, array in arrays.items():
                    numpy.testing.assert_array_equal(found[name], array)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_several_slices_of_a_tensor(random_file):
    path, arrays = random_file([(5,), (300, 7), (2, 3)])
    ranges = [(0, 0, 100), (0, 100, 300), (1, 2, 4)]
    found = list(forebay.iter_tensors(path, slices={"t1": ranges}, framework="np"))
    assert [name for name, _ in found] == ["t0", "t1", "t1", "t1", "t2"]
    wanted = [arrays["t0"], arrays["t1"][:100], arrays["t1"][100:], arrays["t1"][:, 2:4], arrays["t2"]]
    assert all(numpy.array_equal(tensor, it) for (_, tensor), it in zip(found, wanted, strict=True))
    with pytest.raises(forebay.OptionError, match="list of slices, which only iter_tensors takes"):
        forebay.load(path, slices={"t1": ranges})
    with pytest.raises(forebay.OptionError, match="not among the tensors"):
        forebay.iter_tensors(path, tensors=["t0"], slices={"t1": ranges})


def test_phases_of_a_load_reach_the_logger(random_file, caplog):
    path, _ = random_file([(1000, 1000)])
    forebay.load(path, framework="raw")
    assert caplog.records == []
    with caplog.at_level(logging.DEBUG, logger="forebay"):
        forebay.load(path, framework="raw")
    phases = [record.message for record in caplog.records if record.levelname == "DEBUG"]
    assert any("open_files" in line for line in phases)
    assert any(re.search(r"fill\{bytes=\d+ .*time\.busy=[0-9.]+(ns|µs|ms|s)", line) for line in phases), phases


@pytest.mark.parametrize("size", ["8", " 8 ", "1.5", "-1", "GiB", "8 XiB", -1, True, None])
def test_sizes_without_a_unit_are_refused(size):
    with pytest.raises(forebay.OptionError, match="GiB|512MiB"):
        bytes_of(size)


def test_sizes():
    assert [bytes_of(size) for size in (8, "0", "2GB", "1.5 KiB")] == [8, 0, 2_000_000_000, 1536]


def test_a_bar_of_progress(monkeypatch, tmp_path):
    model = folders()[0]
    shown = []

    class Bar:
        def __init__(self, **options):
            self.n, self.total = 0, None
            shown.append(self)

        def __enter__(self):
            return self

        def __exit__(self, *of):
            self.closed = True

        def update(self, more):
            self.n += more

    monkeypatch.setitem(sys.modules, "tqdm", types.ModuleType("tqdm"))
    monkeypatch.setitem(sys.modules, "tqdm.auto", types.SimpleNamespace(tqdm=Bar))
    assert forebay.load(model, progress=True, framework="raw")
    assert shown[0].n == shown[0].total > 0 and shown[0].closed
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(forebay.OptionError, match="pip install tqdm"):
        forebay.load(model, progress=True, framework="raw")
