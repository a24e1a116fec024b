#!/usr/bin/env python3
"""Loads a file from an S3 server on this machine that answers late and often fails, with forebay and with a plain
parallel downloader, in turn.

    python3 bench/object-store.py [MEGABYTES] [ROUNDS] [--latency SECONDS] [--failures SHARE] [--connections N]
                                  [--rate MEGABYTES_PER_SECOND]

It needs the packages forebay and numpy. The server makes the latency before each answer, and a share of the requests
fail: status 500 or 503, a body that ends in the middle, a connection that is reset, an answer that takes a second more.
`--rate` is what each connection gets. The downloader has threads with a connection each, asks for the size first, and
repeats what fails with the same pauses; it puts bytes into one buffer and makes no tensors. Every byte is compared.
"""

import argparse
import hashlib
import http.client
import json
import os
import queue
import random
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time

LAYERS = 24


def write_model(path, megabytes, rng):
    """Write a safetensors file with the tensors of a model: few large ones, and small ones between them."""
    unit = max(1, megabytes * 1_000_000 // LAYERS // 2 // 22) // 64 * 64
    entries, at = {}, 0
    for layer in range(LAYERS):
        for name, elements in (
            ("input_layernorm", 2048), ("mlp.down_proj", 5 * unit), ("mlp.gate_proj", 5 * unit),
            ("mlp.up_proj", 5 * unit), ("post_attention_layernorm", 2048), ("self_attn.k_norm", 128),
            ("self_attn.k_proj", unit // 2), ("self_attn.o_proj", 3 * unit), ("self_attn.q_norm", 128),
            ("self_attn.q_proj", 3 * unit), ("self_attn.v_proj", unit // 2),
        ):  # fmt: skip
            entry = {"dtype": "BF16", "shape": [elements], "data_offsets": [at, at + 2 * elements]}
            entries[f"model.layers.{layer:02}.{name}.weight"] = entry
            at += 2 * elements
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        left = at
        while left:
            part = rng.randbytes(min(left, 1 << 24))
            file.write(part)
            left -= len(part)
    return at


def serve(path, latency, failures, rate, seed, port_out):
    """Answer requests for the file until this process is killed."""
    rng, lock = random.Random(seed), threading.Lock()
    size = os.path.getsize(path)
    file = os.open(path, os.O_RDONLY)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)

    def send(connection, offset, end):
        while offset < end:
            step = min(end - offset, 1 << 20 if not rate else 256 << 10)
            started = time.monotonic()
            while step:
                sent = os.sendfile(connection.fileno(), file, offset, step)
                offset, step = offset + sent, step - sent
            if rate:
                time.sleep(max(0.0, (256 << 10) / (rate * 1e6) - (time.monotonic() - started)))

    def client(connection):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader = connection.makefile("rb")
        try:
            while line := reader.readline():
                method, headers = line.split()[0], {}
                while (header := reader.readline().strip()):
                    name, _, value = header.partition(b":")
                    headers[name.lower()] = value.strip()
                time.sleep(latency)
                with lock:
                    chance, kind = rng.random(), rng.randrange(5)
                fault = kind if chance < failures and method == b"GET" else None
                if fault in (0, 1):
                    code = (500, 503)[fault]
                    connection.sendall(b"HTTP/1.1 %d On Purpose\r\nContent-Length: 0\r\n\r\n" % code)
                    continue
                if fault == 2:
                    time.sleep(1)
                about = b'ETag: "x"\r\nLast-Modified: Tue, 01 Jan 2030 00:00:00 GMT\r\n'
                if method == b"HEAD":
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%s\r\n" % (size, about))
                    continue
                first, last = headers[b"range"].removeprefix(b"bytes=").split(b"-")
                first, last = int(first), min(int(last), size - 1)
                head = b"HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\nContent-Range: bytes %d-%d/%d\r\n%s\r\n"
                connection.sendall(head % (last - first + 1, first, last, size, about))
                if fault in (3, 4):
                    send(connection, first, first + (last - first) // 2)
                    if fault == 4:
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return
                send(connection, first, last + 1)
        except OSError:
            pass
        finally:
            reader.close()
            connection.close()

    os.write(port_out, struct.pack("i", listener.getsockname()[1]))
    while True:
        threading.Thread(target=client, args=(listener.accept()[0],), daemon=True).start()


def download(port, size, connections, part_bytes):
    """Return the bytes of the object, fetched in ranges by threads."""
    asker = http.client.HTTPConnection("127.0.0.1", port)
    asker.request("HEAD", "/box/model.safetensors")
    answer = asker.getresponse()
    answer.read()
    assert int(answer.headers["Content-Length"]) == size
    numpy = sys.modules["numpy"]
    buffer = memoryview(numpy.empty(size, numpy.uint8))
    parts = queue.SimpleQueue()
    for start in range(0, size, part_bytes):
        parts.put((start, min(start + part_bytes, size)))

    def work():
        connection = None
        while True:
            try:
                start, end = parts.get_nowait()
            except queue.Empty:
                return
            attempt = 0
            while start < end:
                try:
                    if connection is None:
                        connection = http.client.HTTPConnection("127.0.0.1", port)
                        connection.connect()
                        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    range_ = {"Range": f"bytes={start}-{end - 1}"}
                    connection.request("GET", "/box/model.safetensors", headers=range_)
                    answer = connection.getresponse()
                    if answer.status != 206:
                        answer.read()
                        raise OSError(f"status {answer.status}")
                    while start < end:
                        count = answer.readinto(buffer[start:end])
                        if count == 0:
                            raise OSError("the body ended early")
                        start += count
                except (OSError, http.client.HTTPException) as error:
                    if not str(error).startswith("status"):
                        connection = None
                    pause = min(0.1 * 2**attempt, 5) * (0.5 + 0.5 * random.random())
                    attempt += 1
                    if attempt > 10:
                        raise
                    time.sleep(pause)

    threads = [threading.Thread(target=work) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return buffer


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("megabytes", nargs="?", type=int, default=1000)
    parser.add_argument("rounds", nargs="?", type=int, default=5)
    parser.add_argument("--latency", type=float, default=0.2)
    parser.add_argument("--failures", type=float, default=0.05)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--rate", type=float, default=0)
    options = parser.parse_args()
    import forebay
    import numpy  # noqa: F401

    folder = tempfile.TemporaryDirectory()
    path = os.path.join(folder.name, "model.safetensors")
    data_bytes = write_model(path, options.megabytes, random.Random(7))
    with open(path, "rb") as file:
        content = file.read()
    header_bytes = len(content) - data_bytes
    expected = {}
    for name, entry in json.loads(content[8:header_bytes]).items():
        start, end = (header_bytes + at for at in entry["data_offsets"])
        expected[name] = hashlib.blake2b(memoryview(content)[start:end]).digest()
    whole = hashlib.blake2b(content).digest()
    size = len(content)
    del content

    read_end, write_end = os.pipe()
    server = os.fork()
    if server == 0:
        try:
            serve(path, options.latency, options.failures, options.rate, 3, write_end)
        finally:
            os._exit(1)
    port = struct.unpack("i", os.read(read_end, 4))[0]
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "word",
        "AWS_REGION": "us-east-1",
    }  # fmt: skip
    storage = {"connections": options.connections}

    def plain():
        started = time.monotonic()
        buffer = download(port, size, options.connections, 8 << 20)
        seconds = time.monotonic() - started
        assert hashlib.blake2b(buffer).digest() == whole, "the downloader has other bytes"
        return seconds

    def ours():
        started = time.monotonic()
        tensors = forebay.load("s3://box/model.safetensors", framework="raw", storage_options=storage)
        seconds = time.monotonic() - started
        numpy = sys.modules["numpy"]
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            found = numpy.from_dlpack(tensor.view("U16"))
            assert hashlib.blake2b(found).digest() == expected[name], name
        return seconds

    try:
        ratios = []
        print(f"{size / 1e6:.0f} MB, latency {options.latency} s, failures {options.failures:.0%},")
        print(f"{options.connections} connections" + (f" of {options.rate} MB/s" if options.rate else ""))
        print("round  downloader s  forebay s  forebay / downloader (rate)")
        for number in range(options.rounds):
            if number % 2:
                mine, theirs = ours(), plain()
            else:
                theirs, mine = plain(), ours()
            ratios.append(theirs / mine)
            print(f"{number + 1:5}  {theirs:12.2f}  {mine:9.2f}  {ratios[-1]:.3f}", flush=True)
        print(f"median of the ratios: {statistics.median(ratios):.3f}")
    finally:
        os.kill(server, 9)
        os.waitpid(server, 0)


main()
