"""Loads from S3 and HTTP. A server of moto holds the objects, and a proxy in front of it fails on purpose."""

import gc
import os
import signal
import threading
import time
import urllib.request

import forebay
import numpy
import pytest
from conftest import fixtures, raw_bytes, write_safetensors
from servers import FailingProxy

SERVER = pytest.importorskip(
    "moto.server", reason="OBJECT STORES NOT CHECKED: the package moto[server] is not installed here"
)


@pytest.fixture(scope="module")
def moto():
    server = SERVER.ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    put((host, port), "box", b"")
    yield "127.0.0.1", port
    server.stop()


def put(server, path, content, acl="public-read"):
    request = urllib.request.Request(
        f"http://{server[0]}:{server[1]}/{path}",
        data=content,
        method="PUT",
        headers={"Content-Type": "application/octet-stream", "x-amz-acl": acl},
    )
    urllib.request.urlopen(request, timeout=30).read()


@pytest.fixture
def s3(moto, monkeypatch):
    """A function that starts a proxy and makes it the server for s3:// by the variables that users set."""
    proxies = []

    def started(**behaviour):
        proxy = FailingProxy(moto, **behaviour)
        proxies.append(proxy)
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        return proxy

    for name, value in (("ACCESS_KEY_ID", "me"), ("SECRET_ACCESS_KEY", "word"), ("REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    yield started
    for proxy in proxies:
        proxy.close()


def put_file(server, path, file):
    put(server, path, file.read_bytes())


SHAPES = [(300, 1000), (5,), (), (700, 900), (0, 3), (31,), (1, 1), (2000, 400), (64, 64)] * 3


@pytest.fixture(scope="module")
def stored(moto, tmp_path_factory):
    """A file in the store, and its arrays."""
    rng = numpy.random.default_rng(7)
    arrays = {f"t{at}": rng.standard_normal(shape).astype(numpy.float32) for at, shape in enumerate(SHAPES)}
    path = tmp_path_factory.mktemp("objects") / "m.safetensors"
    write_safetensors(path, {key: ("F32", list(it.shape), it.tobytes()) for key, it in arrays.items()}, {"made": "here"})
    put_file(moto, "box/models/m.safetensors", path)
    return "s3://box/models/m.safetensors", arrays


def same(found, expected):
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("one_in", [20, 3])
def test_failures_cost_no_bytes(s3, stored, one_in):
    url, arrays = stored
    proxy = s3(one_in=one_in)
    # A server goes on with a request that is given up for a second one, so it would count more than eight.
    options = {"request_bytes": "1MiB", "connections": 8, "hedge": False}
    for _ in range(3):
        same(forebay.load(url, framework="np", storage_options=options), arrays)
    assert proxy.failed >= 3
    assert proxy.most_running <= 8
    options["hedge"] = True
    same(forebay.load(url, framework="np", storage_options=options), arrays)
    streamed = dict(forebay.iter_tensors(url, framework="np", budget="16MiB", storage_options=options))
    same(streamed, arrays)
    with forebay.safe_open(url, framework="np", storage_options=options) as file:
        assert file.metadata() == {"made": "here"}
        assert file.get_tensor("t3").tobytes() == arrays["t3"].tobytes()
        numpy.testing.assert_array_equal(file.get_slice("t0")[7:90, 3:5], arrays["t0"][7:90, 3:5])


def test_folders_are_as_on_the_disk(s3, moto):
    s3(one_in=10)
    folder = fixtures() / "models" / "qwen3_moe"
    for path in folder.glob("model*"):
        put_file(moto, f"box/moe/{path.name}", path)
    here, there = forebay.load(folder, framework="raw"), forebay.load("s3://box/moe/", framework="raw")
    assert list(here) == list(there)
    for name, tensor in here.items():
        assert (tensor.dtype, tensor.shape) == (there[name].dtype, there[name].shape)
        assert raw_bytes(tensor) == raw_bytes(there[name]), name
    assert forebay.list_tensors(folder) == forebay.list_tensors("s3://box/moe")
    gguf = next((fixtures() / "gguf").glob("*/*.gguf"))
    put_file(moto, "box/model.gguf", gguf)
    assert forebay.list_tensors("s3://box/model.gguf") == forebay.list_tensors(gguf)
    here, there = (forebay.load(it, dtype="float32", framework="np") for it in (gguf, "s3://box/model.gguf"))
    same(there, here)


def test_only_what_is_asked_for_is_read(s3, stored):
    url, arrays = stored
    proxy = s3()
    forebay.list_tensors(url)
    assert proxy.take_asked() == [("/box/models/m.safetensors", "bytes=0-262143")]
    # A second request where an answer is late would count twice.
    once = {"hedge": False}
    forebay.load(url, tensors=["t3"], slices={"t3": (0, 100, 200)}, framework="np", storage_options=once)
    ranges = [range[6:].split("-") for _, range in proxy.take_asked()[1:]]
    assert sum(int(last) + 1 - int(first) for first, last in ranges) == 100 * 900 * 4


def test_http(moto, stored):
    """A plain server without keys."""
    proxy = FailingProxy(moto, one_in=5)
    url = proxy.url + "/box/models/m.safetensors?signature=secret"
    same(forebay.load(url, framework="np"), stored[1])
    assert all(target.endswith("?signature=secret") for target, _ in proxy.asked)
    with pytest.raises(FileNotFoundError) as missing:
        forebay.load(url.replace("m.safetensors", "none.safetensors"))
    assert "secret" not in str(missing.value)
    proxy.close()


def test_exceptions(s3, stored, moto, tmp_path):
    url, _ = stored
    proxy = s3()
    with pytest.raises(FileNotFoundError, match="s3://box/models/none.gguf"):
        forebay.load("s3://box/models/none.gguf")
    with pytest.raises(FileNotFoundError, match="NoSuchBucket"):
        forebay.load("s3://nobox/m.gguf")
    for options in ({"area": "x"}, {"connections": 0}, {"connections": "many"}, {"request_bytes": 1}, {"hedge": 2}, {"a": []}):
        with pytest.raises(forebay.OptionError):
            forebay.load(url, storage_options=options)
    with pytest.raises(forebay.OptionError, match="ftp"):
        forebay.load("ftp://server/m.gguf")
    with pytest.raises(forebay.OptionError, match="options of a store"):
        forebay.load(tmp_path / "m.safetensors", storage_options={"aws_region": "x"})

    # An object that changes after its header was read.
    changing = tmp_path / "m.safetensors"
    write_safetensors(changing, {"w": ("U8", [3_000_000], bytes(3_000_000))})
    put_file(moto, "box/changing.safetensors", changing)
    with forebay.safe_open("s3://box/changing.safetensors", framework="np") as file:
        write_safetensors(changing, {"w": ("U8", [3_000_000], bytes(2_999_999) + b"1")})
        put_file(moto, "box/changing.safetensors", changing)
        with pytest.raises(forebay.ReadError, match='(?s)tensor "w".*s3://box/changing.safetensors at byte .*changed'):
            file.get_tensor("w")

    # A server that always fails.
    table = forebay.safe_open(url, framework="np", storage_options={"retries": 2})
    proxy.one_in, proxy.faults = 1, ("status 503",)
    with pytest.raises(forebay.ReadError, match="after 3 attempts.*status 503"):
        table.get_tensor("t0")
    proxy.faults = ("cut body",)
    with pytest.raises(forebay.ReadError, match='tensor "t0".*after 3 attempts'):
        table.get_tensor("t0")


def test_denied(s3, moto):
    put(moto, "box/private.gguf", b"GGUF", acl="private")
    proxy = FailingProxy(moto)
    with pytest.raises(PermissionError, match="access is denied.*/box/private.gguf"):
        forebay.load(f"{proxy.url}/box/private.gguf")
    assert len(proxy.asked) == 1, "it is of no use to ask again"
    proxy.close()
    proxy = s3(one_in=1, faults=("status 401",))
    with pytest.raises(PermissionError, match="s3://box/private.gguf"):
        forebay.load("s3://box/private.gguf")
    assert len(proxy.asked) == 1


def test_threads_end_with_their_table(s3, stored):
    def threads():
        return len(os.listdir("/proc/self/task"))

    s3()
    before = threads()
    for _ in range(5):
        forebay.load(stored[0], framework="np")
    gc.collect()
    deadline = time.monotonic() + 5
    while threads() > before + 8 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threads() <= before + 8


@pytest.mark.parametrize("step", ["open", "load", "iterate"])
def test_ctrl_c_ends_requests_at_once(s3, stored, step):
    url, _ = stored
    proxy = s3()
    proxy.latency, proxy.data_latency = (30, 0) if step == "open" else (0, 30)
    timer = threading.Timer(0.7, signal.raise_signal, [signal.SIGINT])
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            if step == "iterate":
                next(forebay.iter_tensors(url, framework="np"))
            else:
                forebay.load(url, framework="np")
        assert 0.5 < time.monotonic() - started < 2.5
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, handler)


def test_a_closed_stream_ends_requests_at_once(s3, stored):
    proxy = s3()
    proxy.data_latency = 30
    stream = forebay.iter_tensors(stored[0], framework="np")
    time.sleep(0.3)
    assert proxy.running > 0
    started = time.monotonic()
    stream.close()
    assert time.monotonic() - started < 2
