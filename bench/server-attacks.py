#!/usr/bin/env python3
"""Attacks a `forebay serve` on this machine, and checks that it neither crashes, leaks nor serves what it must not.

    bench/server-attacks.py FOREBAY [--requests N] [--only NAME...] [--seed N]

Starts its own servers on free ports of 127.0.0.1, with the demo model and the tiny models of bench/client-models.py, and a hub for
pulls. Sends N malformed requests (10,000 unless given), then holds connections open, sends huge bodies, cuts streams, tries wrong keys,
paths and names, smuggles requests, asks for costly grammars, and kills a pull. Another process asks for /health meanwhile; the table
shows its times for each attack. Then one of two keys attacks, and a second table shows how much longer the other one's requests take
(`--only neighbours` is this part alone). Needs no packages. Takes about ten minutes. Exit status 1 if something was found.
"""

import argparse
import concurrent.futures
import copy
import http.server
import json
import multiprocessing
import pathlib
import random
import re
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from attacked import MIB, Hub, Server, found, idle, report
from neighbours import neighbours

parser = argparse.ArgumentParser()
parser.add_argument("forebay")
parser.add_argument("--requests", type=int, default=10000)
parser.add_argument("--only", nargs="+")
parser.add_argument("--seed", type=int, default=1)
arguments = parser.parse_args()
ROOT = pathlib.Path(__file__).parent.parent
CANARY = "CANARY-5ab1c0de"
resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)


def watch(port, pipe):
    """Asks for /health every 20 ms on a new connection, in a process of its own. Sends the times to the pipe when it is asked to."""
    times, failures = [], 0
    while not pipe.poll(0.02):
        began = time.perf_counter()
        try:
            with socket.create_connection(("127.0.0.1", port), 10) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                answer = b""
                while part := connection.recv(4096):
                    answer += part
            failures += b" 200 " not in answer
        except OSError:
            failures += 1
        times.append(time.perf_counter() - began)
    pipe.send((times, failures))


rows = []


def attack(name, server, work, more_max=64 * MIB):
    """Runs an attack while /health is watched, and checks that the server lives and holds no more than before."""
    if arguments.only and name not in arguments.only:
        return
    print(f"{name} ...", flush=True)
    began, before, descriptors = time.monotonic(), server.resident(), server.descriptors()
    own, others = multiprocessing.Pipe()
    watcher = multiprocessing.Process(target=watch, args=(server.port, others), daemon=True)
    watcher.start()
    time.sleep(0.3)
    try:
        note = work() or ""
    except Exception as error:
        report(f"{name}: {type(error).__name__}: {error}")
        note = ""
    own.send(None)
    times, failures = own.recv()
    watcher.join()
    if server.process.poll() is not None:
        report(f"{name}: the server has ended with status {server.process.returncode}: {server.text()[-400:]}")
        sys.exit(1)
    if failures:
        report(f"{name}: /health failed {failures} times")
    times.sort()
    at = lambda share: 1e3 * times[min(len(times) - 1, int(share * len(times)))]
    if at(0.99) > 100:
        report(f"{name}: /health took {at(0.99):.0f} ms at the 99th percentile")
    # Connections that are closed on this side are noticed soon, and memory is given back within some seconds.
    settle(server, descriptors, before + more_max)
    if server.descriptors() > descriptors:
        report(f"{name}: {server.descriptors() - descriptors} descriptors stay open")
    if (more := server.resident() - before) > more_max:
        report(f"{name}: {more // MIB} MiB more stay resident")
    rows.append((name, time.monotonic() - began, len(times), at(0.5), at(0.99), at(1), (server.resident() - before) / MIB, note))


def settle(server, descriptors, resident, seconds=60):
    until = time.monotonic() + seconds
    while time.monotonic() < until and (server.descriptors() > descriptors or server.resident() > resident):
        time.sleep(0.2)


MESSAGES = [{"role": "user", "content": "A fox"}, {"role": "assistant", "content": "x", "tool_calls": [
    {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}]}, {"role": "tool", "tool_call_id": "a", "content": "y"}]
SCHEMA = {"type": "object", "properties": {"legs": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "x", "parameters": SCHEMA}}]
# A request for every endpoint with every field that it knows.
BODIES = {
    "/v1/chat/completions": {
        "model": "demo", "messages": MESSAGES, "max_tokens": 2, "max_completion_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 4,
        "min_p": 0.1, "repetition_penalty": 1.1, "n": 1, "stop": ["x"], "seed": 1, "tools": TOOLS, "tool_choice": "auto",
        "reasoning_effort": "low", "chat_template_kwargs": {}, "stream": False, "stream_options": {"include_usage": True},
        "include_statistics": True, "logprobs": True, "top_logprobs": 2, "presence_penalty": 0.1, "frequency_penalty": 0.1,
        "logit_bias": {"5": 1}, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        "parallel_tool_calls": False, "user": "x", "metadata": {}},
    "/v1/completions": {
        "model": "demo", "prompt": "A fox", "max_tokens": 2, "temperature": 0, "n": 1, "stop": "x", "seed": 1, "stream": True, "logprobs": 1,
        "echo": False, "best_of": 1, "logit_bias": {}, "guided_regex": "[a-z]{1,9}", "stream_options": {}},
    "/v1/responses": {
        "model": "demo", "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "A fox"}]}],
        "instructions": "x", "max_output_tokens": 2, "temperature": 0, "top_p": 1, "tools": [{"type": "function", "name": "look"}],
        "tool_choice": "auto", "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "stream": False, "store": True,
        "previous_response_id": None, "parallel_tool_calls": True, "metadata": {}},
    "/v1/embeddings": {"model": "demo", "input": ["A fox"], "encoding_format": "float", "dimensions": 8, "pooling": "mean"},
    "/v1/messages": {
        "model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": [{"type": "text", "text": "A fox"}]}], "system": "x",
        "stream": False, "temperature": 0.5, "top_p": 1, "top_k": 1, "stop_sequences": ["x"], "tools": [
            {"name": "look", "description": "x", "input_schema": SCHEMA}], "tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "/v1/messages/count_tokens": {"model": "demo", "messages": [{"role": "user", "content": "A fox"}]},
    "/api/chat": {
        "model": "demo", "messages": [{"role": "user", "content": "A fox", "images": []}], "stream": False, "format": "json", "think": False,
        "tools": TOOLS, "keep_alive": "5m", "options": {"num_predict": 2, "temperature": 0, "top_k": 1, "seed": 1, "stop": ["x"]}},
    "/api/generate": {
        "model": "demo", "prompt": "A fox", "suffix": "", "system": "x", "raw": False, "stream": False, "format": "", "think": None,
        "images": [], "keep_alive": 300, "options": {"num_predict": 2, "repeat_penalty": 1.1, "repeat_last_n": 8}},
    "/api/embed": {"model": "demo", "input": ["A fox"], "truncate": True, "dimensions": 4, "keep_alive": "5m"},
    "/api/embeddings": {"model": "demo", "prompt": "A fox"},
    "/api/show": {"model": "demo", "name": "demo", "verbose": True},
    "/api/copy": {"source": "none", "destination": "none2"},
    "/api/pull": {"model": "none", "name": "none", "stream": False, "insecure": True},
    "/api/create": {"model": "x"},
    "/api/push": {"model": "x"},
    "/tokenize": {"model": "demo", "content": "A fox", "add_special": True, "parse_special": True},
    "/detokenize": {"model": "demo", "tokens": [1, 2]},
    "/apply-template": {"model": "demo", "messages": MESSAGES, "tools": TOOLS},
    "/rerank": {"query": "x", "documents": ["y"]},
}
GETS = ["/", "/health", "/ready", "/metrics", "/slots", "/live", "/v1/models", "/v1/models/demo", "/api/tags", "/api/ps", "/api/version",
        "/page/app.js", "/v1/responses/resp_0"]
WRONG = [None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -2**63 - 1, 10**40, 1e308, -1e-308, 0.5, "", "x", "\u0000", "\ud83e\udd8a" * 50,
         "x" * 70000, [], [None], [[]], [[1]], ["x", 1], {}, {"a": {}}, {"type": "x"}, {"type": None}, [{}], [{"role": "user"}],
         [{"role": 7, "content": 7}], {"": ""}, "NaN", "Infinity", "../../etc/passwd", "demo\n", ["x"] * 3000]


class Malformed:
    """Makes requests that are wrong in one way or several."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def places(self, value, path=()):
        yield path
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in items:
            yield from self.places(inner, (*path, key))

    def change(self, body):
        """Replaces, removes or copies a random part of a body."""
        path = self.random.choice(list(self.places(body)))
        wrong = copy.deepcopy(self.random.choice(WRONG))
        if not path:
            return wrong if self.random.random() < 0.2 else body
        holder = body
        for key in path[:-1]:
            holder = holder[key]
        kind = self.random.random()
        if kind < 0.75:
            holder[path[-1]] = wrong
        elif kind < 0.9:
            del holder[path[-1]]
        elif isinstance(holder, dict):
            holder[self.random.choice(["x", "\u0000", "x" * 3000, "__proto__"])] = holder[path[-1]]
        return body

    def body(self, path):
        body = json.loads(json.dumps(BODIES[path]))
        if self.random.random() < 0.5 and "model" in body and path not in ("/api/pull", "/api/copy"):
            body["model"] = self.random.choice(["random", "caller"])
        for _ in range(self.random.choice([1, 1, 1, 2, 4])):
            if isinstance(body, (dict, list)):
                body = self.change(body)
        data = bytearray(json.dumps(body, ensure_ascii=self.random.random() < 0.5).encode("utf-8", "surrogatepass"))
        kind = self.random.random()
        if kind < 0.15 and data:
            for _ in range(self.random.choice([1, 3, 10])):
                data[self.random.randrange(len(data))] = self.random.randrange(256)
        elif kind < 0.2:
            data = data[:self.random.randrange(len(data) + 1)]
        elif kind < 0.23:
            depth = self.random.choice([100, 127, 128, 200, 100000])
            data = b'{"model": "demo", "messages": ' + b"[" * depth + b"]" * depth + b"}"
        elif kind < 0.26:
            data = b'{"model": "demo", "prompt": "x", "max_tokens": ' + b"9" * self.random.choice([20, 400, 100000]) + b"}"
        elif kind < 0.28:
            data = b"\xef\xbb\xbf" + bytes(data)
        elif kind < 0.3:
            data = json.dumps(body).encode("utf-16")
        elif kind < 0.32:
            data = b'{"model": "demo", "model": "random", "prompt": "\xff\xfe", "prompt": "x"}'
        return bytes(data)

    def request(self):
        path = self.random.choice(list(BODIES))
        body = self.body(path)
        method, version, headers = "POST", "HTTP/1.1", [b"Host: localhost", b"Connection: close"]
        length = [b"Content-Length: %d" % len(body)]
        kind = self.random.random()
        if kind < 0.1:
            path = self.random.choice([*GETS, path + "/", path + "/x", "//" + path, path + "?x=%00", "/%ff", "/v1/models/%ff", "*", "x",
                                       "http://localhost" + path, "/" + "a" * 70000, path.upper(), "/v1/models/" + "%2e%2e/" * 9])
            method = self.random.choice(["GET", "HEAD", "POST", "PUT", "PATCH", "OPTIONS", "TRACE", "CONNECT", "DELETE", "PRI", "X" * 300, "ge t"])
        elif kind < 0.15:
            headers.append(self.random.choice([
                b"Content-Encoding: gzip", b"Content-Type: text/xml", b"Expect: 100-continue", b"Expect: x", b"Upgrade: h2c", b"X: " + b"x" * 70000,
                b"Range: bytes=0-1", b"Authorization: Bearer \xff", b"Authorization:", b"Origin: null", b"Cookie: \x7f", b"X\x00: y", b": y", b" x",
                b"Accept: text/html", b"TE: trailers", b"Connection: upgrade", b"X-Request-Id: " + b"y" * 500, b"Host: other"] ))
            headers += [b"X-%d: y" % at for at in range(self.random.choice([0, 0, 99, 500]))]
        elif kind < 0.2:
            length = self.random.choice([
                [], [b"Content-Length: -1"], [b"Content-Length: x"], [b"Content-Length: 99999999999999999999"], [b"Content-Length: +5"],
                [*length, b"Content-Length: 3"], [b"Content-Length: 5, 5"], [b"Transfer-Encoding: chunked"], [b"Transfer-Encoding: gzip"],
                [b"Transfer-Encoding: chunked", *length], [b"Content-Length: %d" % (len(body) + 10)], [b"Content-Length: 0"]])
        elif kind < 0.22:
            version = self.random.choice(["HTTP/1.0", "HTTP/2.0", "HTTP/9.9", "http/1.1", "", "HTTP/1.1 x"])
        return b"\r\n".join([f"{method} {path} {version}".encode(), *headers, *length, b"", body])


def malformed(server):
    maker, statuses = Malformed(arguments.seed), {}
    lock = threading.Lock()

    def one(_):
        with lock:
            request = maker.request()
        answer, waits = server.raw(request)
        if answer == b"":
            status = "waits for more" if waits else "closed"
        elif not (line := re.match(rb"HTTP/1\.[01] (\d\d\d) ", answer)):
            return report(f"malformed: {request[:300]!r} is answered with {answer[:200]!r}")
        else:
            status = line[1].decode()
            if status in ("500", "502", "504"):
                report(f"malformed: status {status} for {request[:1200]!r}: {answer[-300:]!r}")
            body = answer.partition(b"\r\n\r\n")[2]
            if CANARY.encode() in answer or b"root:x:" in answer:
                report(f"malformed: a file is served: {request[:300]!r}")
            if status[0] == "4" and body and not body.startswith(b"{") and not request.startswith(b"HEAD"):
                report(f"malformed: status {status} without JSON for {request[:200]!r}: {body[:200]!r}")
        with lock:
            statuses[status] = statuses.get(status, 0) + 1

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(arguments.requests)))
    idle(server)
    # A connection that is closed without an answer is right for what is no request, but not for most.
    if statuses.get("closed", 0) > arguments.requests // 20:
        report(f"malformed: {statuses['closed']} requests got no answer")
    return ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))


def slow(server):
    """Holds 500 connections open with heads that come slowly, and 500 with bodies that do not come. All must be closed in 20 to 40 s."""
    body = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"
    heads = [server.connect() for _ in range(500)]
    bodies = [server.connect() for _ in range(500)]
    for connection in bodies:
        connection.sendall(body)
    began, closed = time.monotonic(), {}
    text = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX: "
    at = 0
    open_ones = dict.fromkeys([*heads, *bodies])
    while open_ones and time.monotonic() - began < 45:
        for connection in list(open_ones):
            try:
                if connection in closed or at and connection in bodies:
                    pass
                else:
                    connection.send(text[at:at + 1] or b"x")
                connection.setblocking(False)
                while connection.recv(4096):
                    pass
            except BlockingIOError:
                connection.setblocking(True)
                continue
            except OSError:
                pass
            del open_ones[connection]
            closed[connection] = time.monotonic() - began
            connection.close()
        at += 1
        time.sleep(0.5)
    if open_ones:
        report(f"slow: {len(open_ones)} connections are still open after 45 s")
    for connection in open_ones:
        connection.close()
    return f"closed after {min(closed.values(), default=0):.0f} to {max(closed.values(), default=0):.0f} s"


def huge(server):
    """Sends 4 GiB in each form that HTTP has. The server must refuse them, and hold little.

    It discards 1 GiB at most of a body that is too large, because most clients read no answer before. It reads nothing of one that
    announces more.
    """
    block, before, peak, notes = b"x" * MIB, server.resident(), 0, []
    forms = {"length": (b"Content-Length: 4294967296", 64), "no length": (b"X: y", 64), "chunked": (b"Transfer-Encoding: chunked", 1200)}
    for name, (header, sent_max) in forms.items():
        with server.connect() as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + header + b"\r\n\r\n")
            sent = 0
            try:
                for _ in range(4096):
                    connection.sendall(b"%x\r\n%s\r\n" % (MIB, block) if name == "chunked" else block)
                    sent += 1
                    peak = max(peak, server.resident())
            except OSError:
                pass
            try:
                answer = connection.recv(4096)
            except OSError:
                answer = b""
        status = answer[9:12].decode() or "closed"
        notes.append(f"{name}: {status} after {sent} MiB")
        if sent > sent_max or status not in ("413", "400", "closed"):
            report(f"huge: {notes[-1]}")
    if peak > before + 64 * MIB:
        report(f"huge: {(peak - before) // MIB} MiB more are resident meanwhile")
    # As many as may come are held at a time; the peak is what 8 of the largest need.
    small = b'{"model": "demo", "max_tokens": 1, "prompt": "' + b"x" * (31 * MIB) + b'"}'
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        statuses = {status for status, _ in pool.map(lambda _: server.ask("POST", "/v1/completions", small, timeout=300), range(8))}
    if statuses != {400}:
        report(f"huge: 8 bodies of 31 MiB: {statuses}")
    return "; ".join(notes)


def cut(server):
    """Goes away in the middle of 200 streams, politely and not."""
    forms = [("/v1/chat/completions", {**BODIES["/v1/chat/completions"], "response_format": None, "max_completion_tokens": 200}),
             ("/v1/messages", {**BODIES["/v1/messages"], "output_config": None, "max_tokens": 200}),
             ("/api/generate", {"model": "demo", "prompt": "A fox", "options": {"num_predict": 200}}),
             ("/v1/responses", {"model": "demo", "input": "A fox", "max_output_tokens": 200}),
             ("/v1/completions", {"model": "demo", "prompt": "A fox", "max_tokens": 200, "n": 3})]

    def one(number):
        path, body = forms[number % len(forms)]
        data = json.dumps({**body, "stream": True}).encode()
        with server.connect() as connection:
            connection.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
            if number % 3:
                connection.recv(1 + number % 500)
            if number % 2:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(200)))
    began = time.monotonic()
    if idle(server):
        return f"idle {time.monotonic() - began:.1f} s later"


def keys(server, key):
    """Asks every endpoint without a key and with wrong ones."""
    wrong = [[], ["Authorization: Bearer " + key[:-1]], ["Authorization: Bearer " + key + "x"], ["Authorization: Bearer " + key.upper()],
             ["Authorization: " + key], ["Authorization: Basic " + key], ["X-Api-Key: "], ["X-Api-Key: # comment"], ["X-Api-Key: " + "x" * 60000],
             ["Authorization: Bearer wrong", "X-Api-Key: " + key], ["Authorization: Bearer \u00e9"], ["Cookie: key=" + key]]
    public = {"/", "/health", "/ready", "//health"}
    for path in [*BODIES, *GETS, "/v1/responses/x", "/api/delete", "/nothing", "/health/x", "/page/../slots", "/%2e/slots", "//health", "/HEALTH"]:
        for headers in wrong:
            method = "GET" if path in GETS else "DELETE" if path == "/api/delete" else "POST"
            status, body = server.ask(method, path, b"" if method == "GET" else BODIES.get(path, {}), headers)
            if path not in public and not path.startswith("/page/app") and status not in (401, 404 if path.startswith("/page/") else 401):
                report(f"keys: {method} {path} with {str(headers)[:80]}: status {status}, {body[:80]!r}")
    if server.ask("GET", f"/v1/models?key={key}&api_key={key}")[0] != 401:
        report("keys: a key in the address lets a request in")
    if server.ask("GET", "/v1/models", headers=["Authorization: Bearer " + key])[0] != 200:
        report("keys: the right key does not let a request in")
    times = {}
    wrong_keys = {"first letter wrong": "#" + key[1:], "last letter wrong": key[:-1] + "#"}
    for _ in range(1000):
        for name, wrong_key in wrong_keys.items():
            began = time.perf_counter()
            server.ask("GET", "/v1/models", headers=["X-Api-Key: " + wrong_key])
            times.setdefault(name, []).append(time.perf_counter() - began)
    return ", ".join(f"{name}: {1e6 * statistics.median(all):.0f} us" for name, all in times.items())


NAMES = ["../canary", "../canary.gguf", "..%2fcanary", "%2e%2e%2fcanary", "/etc/passwd", "etc/passwd", "./demo", "demo/../demo", "demo.gguf", "link",
         "link.gguf", "folder", "folder/passwd", "demo\u0000", "demo\u0000.gguf", "\u0000", ".", "..", "", "/", "\\", "..\\canary", "C:\\x", "a" * 300,
         "a/b/c/d", "demo:../canary", "file:///etc/passwd", "http://127.0.0.1:1/x", "hf.co/../canary", "hf.co//etc/passwd", "%00", "d\u00e9mo", "demo\n",
         "manifests/x", "locks/library.lock", "\ud83e\udd8a", "-", "--help", "$(id)", "`id`", "'; drop", "*", "d?mo", "~", "~root/x", "o/r:../../x"]


def paths(server, folder):
    """Asks for files by every path and name that could lead out of the folder of models."""
    outside = folder.parent
    before = sorted(str(path) for path in outside.rglob("*") if folder not in path.parents)
    inside = sorted(path.name for path in folder.iterdir())
    tricks = ["/../canary", "/..%2fcanary", "/page/../canary", "/page/..%2fcanary", "/page/..%5ccanary", "/page/%2e%2e/%2e%2e/etc/passwd", "/page//etc/passwd",
              "/page/%00", "/page/app.js%00", "/page/.", "/page/..", "//etc/passwd", "/./health/../v1/models", "/v1/models/../../etc/passwd",
              "/v1/models/..%2f..%2fcanary", "/v1/models/link", "/v1/models/folder%2fpasswd", "/%c0%ae%c0%ae/canary", "/v1/responses/..%2f..%2fcanary",
              "http://127.0.0.1/etc/passwd", "file:///etc/passwd", "/\\..\\canary"]

    def look(what, status, body):
        if CANARY.encode() in body or b"root:x:" in body:
            report(f"paths: {what}: a file is served: {body[:200]!r}")
        if status in (500, 502) and b"link" not in what.encode() and b"folder" not in what.encode():
            report(f"paths: {what}: status {status}: {body[:200]!r}")

    for trick in tricks:
        answer, _ = server.raw(f"GET {trick} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        status = int(answer[9:12] or 0)
        look(trick, status, answer)
        if status == 200 and b'"id"' not in answer:
            report(f"paths: {trick}: status 200: {answer[-100:]!r}")
    for name in NAMES:
        for path in BODIES:
            body = json.loads(json.dumps(BODIES[path]))
            if path in ("/api/create", "/api/push", "/rerank"):
                continue
            fields = ["source", "destination"] if path == "/api/copy" else ["model", "name"] if path == "/api/show" else ["model"]
            for field in fields:
                asked = {**body, field: name}
                if path == "/api/copy" and field == "destination":
                    asked["source"] = "demo"
                status, answer = server.ask("POST", path, asked)
                look(f"{path} {field} {name!r}", status, answer)
                if status == 200 and field != "name" and path != "/api/show" and name not in ("", "demo"):
                    report(f"paths: {path} with {field} {name!r}: status 200: {answer[:100]!r}")
        status, answer = server.ask("DELETE", "/api/delete", {"model": name})
        look(f"/api/delete {name!r}", status, answer)
        if status == 200:
            report(f"paths: /api/delete of {name!r}: status 200")
    after = sorted(str(path) for path in outside.rglob("*") if folder not in path.parents)
    if before != after or (outside / "canary").read_text() != CANARY:
        report(f"paths: files outside changed: {set(before) ^ set(after)}")
    gone = set(inside) - {path.name for path in folder.iterdir()}
    new = {path.name for path in folder.iterdir()} - set(inside) - {"locks", "manifests", "pulls", "files"}
    if gone or new:
        report(f"paths: files inside changed: gone {gone}, new {new}")


def smuggle(server, key):
    """Hides requests in others. None may be answered without its own key, and what could be read in two ways must be refused."""
    host, own = b"Host: localhost\r\n", b"X-Api-Key: " + key.encode() + b"\r\n"
    inner = b"GET /slots HTTP/1.1\r\n" + host + b"\r\n"
    answers, _ = server.raw(b"GET /health HTTP/1.1\r\n" + host + b"\r\n" + b"GET /v1/models HTTP/1.1\r\n" + host + own + b"\r\n" + inner, 1)
    statuses = re.findall(rb"HTTP/1\.1 (\d+)", answers)
    if statuses != [b"200", b"200", b"401"]:
        report(f"smuggle: three requests in a row: {statuses}")
    post = b"POST /tokenize HTTP/1.1\r\n" + host + own
    cases = {
        "two lengths": post + b"Content-Length: 2\r\nContent-Length: %d\r\n\r\n{}" % (2 + len(inner)) + inner,
        "length, then chunked": post + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + inner,
        "chunked, then length": post + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n0\r\n\r\n" + inner,
        "other coding": post + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + inner,
        "chunked is not last": post + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + inner,
        "space before the colon": post + b"Content-Length : %d\r\n\r\n" % len(inner) + inner,
        "tab before the coding": post + b"Transfer-Encoding:\tchunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n" + inner,
        "folded line": post + b"X: y\r\n Content-Length: 2\r\n\r\n" + inner,
        "line feeds alone": post.replace(b"\r\n", b"\n") + b"Content-Length: 2\n\n{}" + inner,
        "carriage return in a value": post + b"X: a\rContent-Length: 50\r\nContent-Length: 2\r\n\r\n{}" + inner,
        "plus": post + b"Content-Length: +2\r\n\r\n{}" + inner,
        "list of lengths": post + b"Content-Length: 2, 2\r\n\r\n{}" + inner,
        "negative": post + b"Content-Length: -1\r\n\r\n" + inner,
        "too large": post + b"Content-Length: 18446744073709551618\r\n\r\n{}" + inner,
        "chunk size too large": post + b"Transfer-Encoding: chunked\r\n\r\n10000000000000002\r\n{}\r\n0\r\n\r\n" + inner,
        "chunk size with a sign": post + b"Transfer-Encoding: chunked\r\n\r\n+2\r\n{}\r\n0\r\n\r\n" + inner,
        "chunk without an end": post + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}0\r\n\r\n" + inner,
        "chunk extension": post + b"Transfer-Encoding: chunked\r\n\r\n2;x=\n\r\n{}\r\n0\r\n\r\n" + inner,
        "body on a GET": b"GET /health HTTP/1.1\r\n" + host + b"Content-Length: %d\r\n\r\n" % len(inner) + inner,
        "upgrade": post + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\n{}" + inner,
        "no host": b"GET /slots HTTP/1.1\r\n" + own + b"\r\n" + inner,
        "absolute address": b"GET http://other/slots HTTP/1.1\r\n" + host + b"\r\n" + inner,
    }
    ambiguous = {"two lengths", "other coding", "chunked is not last", "space before the colon", "folded line", "plus", "list of lengths", "negative",
                 "too large", "chunk size too large", "chunk size with a sign", "chunk without an end"}
    notes = []
    for name, data in cases.items():
        answer, _ = server.raw(data, 1)
        statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", answer)]
        if b'"uptime_seconds"' in answer and name != "no host":
            report(f"smuggle: {name}: a request without a key was answered")
        if name in ambiguous and (len(statuses) > 1 or statuses and statuses[0] < 400):
            report(f"smuggle: {name}: {statuses}")
        notes.append(f"{name} {statuses}")
    print("  " + "; ".join(notes))


def costly(server):
    """Asks for grammars, prompts and numbers that cost much. Each must be answered within 30 s."""
    plain = {"model": "demo", "prompt": "A", "max_tokens": 4}

    def nested(depth):
        schema = {"type": "string"}
        for _ in range(depth):
            schema = {"type": "object", "properties": {str(at) * 3: schema for at in range(6)}, "required": ["000"]}
        return schema

    rules = {
        "repeated repetition": {"guided_regex": "(a{1000}){1000}"}, "optional letters": {"guided_regex": "((a?){100}){100}b"},
        "long expression": {"guided_regex": "ab|" * 1000000 + "c"}, "many choices": {"guided_choice": [f"choice {at}" for at in range(300000)]},
        "some choices": {"guided_choice": [f"choice {at}" for at in range(30000)]}, "nested schema": {"guided_json": nested(6)},
        "long array": {"guided_json": {"type": "array", "items": {"type": "string", "maxLength": 10**8}, "minItems": 10**6, "maxItems": 2 * 10**9}},
        "all of any": {"guided_json": {"allOf": [{"anyOf": [{"properties": {f"p{a}{b}": {"minimum": a}}} for a in range(8)]} for b in range(12)]}},
        "reference to itself": {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
        "reference elsewhere": {"guided_json": {"$ref": "http://127.0.0.1:1/x"}}, "reference to a file": {"guided_json": {"$ref": "file:///etc/passwd"}},
        "large enum": {"guided_json": {"enum": list(range(1000000))}},
        "many properties": {"guided_json": {"type": "object", "properties": {f"p{at}": {"pattern": "a{50}[bc]{30}"} for at in range(3000)}}},
        "doubled rules": {"guided_grammar": "start: a\n" + "".join(f"{chr(97 + at)}: {chr(98 + at)} {chr(98 + at)}\n" for at in range(24)) + 'y: "x"'},
        "many small properties": {"guided_json": {"type": "object", "properties": {f"p{at}": {} for at in range(20000)}}},
        "chain of references": {"guided_json": {"$ref": "#/$defs/d0", "$defs": {
            **{f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(9000)}, "d9000": {"type": "null"}}}},
        "chain of rules": {"guided_grammar": "start: r0\n" + "".join(f'r{at}: r{at + 1} "a"\n' for at in range(3000)) + 'r3000: "x"\n'},
        "optional pairs": {"guided_regex": "(ab)?" * 100000}, "optional pairs again": {"guided_regex": "(ab)?" * 100000},
        "rule of itself": {"guided_grammar": 'start: start start | start start start | "x" | ""'}, "endless rule": {"guided_grammar": "start: start"},
        "many stops": {"stop": ["x" * 1500000] * 16}, "much bias": {"logit_bias": {str(at): 1 for at in range(300000)}},
        "numbers": {"top_k": 2**64 - 1, "max_tokens": 2**63, "seed": -1}, "many answers": {"n": 128, "max_tokens": 1},
    }
    many = {"role": "user", "content": "x"}
    cases = [(name, "/v1/completions", {**plain, **more}) for name, more in rules.items()]
    cases += [(f"many messages, {model}", "/v1/chat/completions", {"model": model, "max_tokens": 1, "messages": [many] * 700000})
              for model in ("demo", "random")]
    cases += [("many tools", "/v1/chat/completions", {"model": "random", "max_tokens": 1, "messages": [many], "tool_choice": "required", "tools": [
        {"type": "function", "function": {"name": f"f{at}", "parameters": {"type": "object"}}} for at in range(20000)]}),
        ("many ids", "/v1/embeddings", {"model": "demo", "input": [1] * 5000000}), ("digits", "/tokenize", {"model": "demo", "content": "1" * 5000000}),
        ("spaces", "/tokenize", {"model": "demo", "content": " " * 5000000}), ("ids", "/detokenize", {"model": "demo", "tokens": [1] * 8000000})]
    slowest = {}
    for name, path, body in cases:
        data = json.dumps(body).encode()
        began = time.perf_counter()
        try:
            status, answer = server.ask("POST", path, data)
        except TimeoutError:
            report(f"costly: {name}: no answer in 120 s")
            continue
        slowest[name] = time.perf_counter() - began
        # The parser meets some of its limits in the middle of an answer only.
        if status >= 500 and b"by its grammar" not in answer or slowest[name] > 30 or b"root:x:" in answer:
            report(f"costly: {name}: status {status} after {slowest[name]:.1f} s: {answer[:200]!r}")
    return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in sorted(slowest.items(), key=lambda of: -of[1])[:4])


def pulls(server):
    """Begins more slow pulls than there are threads for. The server must answer others meanwhile."""
    connections = []
    for number in range(12):
        connection = server.connect()
        data = json.dumps({"model": f"o/slow{number}"}).encode()
        connection.sendall(b"POST /api/pull HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        connections.append(connection)
    time.sleep(0.5)
    statuses = [connection.recv(4096)[9:12].decode() for connection in connections]
    began = time.monotonic()
    for _ in range(5):
        server.ask("GET", "/v1/models", timeout=20)
        server.ask("POST", "/v1/completions", {"model": "demo", "prompt": "A", "max_tokens": 2}, timeout=20)
    seconds = (time.monotonic() - began) / 5
    if seconds > 2:
        report(f"pulls: a request takes {seconds:.1f} s beside pulls")
    for connection in connections:
        connection.close()
    return f"statuses {sorted(set(statuses))}; a list and a completion take {1e3 * seconds:.0f} ms meanwhile"


def kill_in_pull(folder, environment):
    """Kills a server in the middle of a pull, and starts another one on the same folder."""
    if arguments.only and "kill" not in arguments.only:
        return
    print("kill ...", flush=True)
    server = Server(arguments.forebay, "--models", str(folder), environment=environment)
    with server.connect() as connection:
        data = json.dumps({"model": "o/slow"}).encode()
        connection.sendall(b"POST /api/pull HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        text = b""
        while b'"completed":0,' in text or b'"completed"' not in text:
            text = connection.recv(65536)
        server.process.kill()
        server.process.wait()
    server = Server(arguments.forebay, "--models", str(folder), environment=environment)
    names = lambda: [model["name"] for model in json.loads(server.ask("GET", "/api/tags")[1])["models"]]
    # Models of the attack before this one may be complete.
    if any(name.startswith("o/slow:") for name in names()):
        report("kill: a model that is not complete is listed")
    status, answer = server.ask("POST", "/api/pull", {"model": "o/slow", "stream": False})
    if status != 200 or "o/slow:Q4_K_M" not in names():
        report(f"kill: the next pull: status {status}, {answer[:200]!r}, {names()}")
    status, answer = server.ask("POST", "/v1/completions", {"model": "o/slow", "prompt": "A", "max_tokens": 2})
    if status != 200:
        report(f"kill: the pulled model: status {status}, {answer[:200]!r}")
    # Those of the attack before this one stay, because nobody pulled these models again.
    if stay := [path for path in folder.rglob("*.partial*") if path.parent.name == "slow"]:
        report(f"kill: files stay: {stay}")
    server.stop()


def main():
    place = pathlib.Path(tempfile.mkdtemp())
    folder = place / "models"
    folder.mkdir()
    demo = ROOT / "models/tales-moe-sticky-Q4_K_M.gguf"
    shutil.copy(demo, folder / "demo.gguf")
    subprocess.run([sys.executable, ROOT / "bench/client-models.py", str(folder)], check=True, stdout=subprocess.DEVNULL)
    (place / "canary").write_text(CANARY)
    (place / "canary.gguf").write_text(CANARY)
    (folder / "link.gguf").symlink_to(place / "canary")
    (folder / "folder").symlink_to("/etc")
    key = "k3y-" + "".join(random.choices("abcdefghij", k=40))
    (place / "keys").write_text(f"# comment\n{key}\n")
    Hub.content = demo.read_bytes()
    hub = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    hub.daemon_threads, hub.handle_error = True, lambda *_: None
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    environment = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HOME": str(place), "HF_TOKEN": "t"}
    try:
        server = Server(arguments.forebay, "--models", str(folder), "--keep-alive", "-1", environment=environment)
        for model in ("demo", "random", "caller"):
            for path, body in BODIES.items():
                server.ask("POST", path, {**body, "model": model})
        idle(server)
        attack("nothing", server, lambda: time.sleep(5))
        attack("malformed", server, lambda: malformed(server))
        attack("slow", server, lambda: slow(server))
        attack("huge", server, lambda: huge(server))
        attack("cut", server, lambda: cut(server))
        attack("paths", server, lambda: paths(server, folder))
        # The first time also makes tables of each vocabulary, which stay. The second time tells them from a leak.
        attack("costly", server, lambda: costly(server), 256 * MIB)
        attack("costly again", server, lambda: costly(server))
        attack("pulls", server, lambda: pulls(server))
        if "panicked" in server.text():
            report("the server panicked: " + server.text()[-600:])
        if (status := server.stop()) != 0:
            report(f"the server ends with status {status}")
        kill_in_pull(folder, environment)
        if not arguments.only or "neighbours" in arguments.only:
            neighbours(arguments.forebay, demo, place)
        server = Server(arguments.forebay, str(demo), "--name", "demo", "--api-key-file", str(place / "keys"))
        attack("keys", server, lambda: keys(server, key))
        attack("smuggle", server, lambda: smuggle(server, key))
        if "panicked" in server.text() or server.stop() != 0:
            report("the server with keys: " + server.text()[-600:])
    finally:
        hub.shutdown()
        for _ in range(3):
            shutil.rmtree(place, ignore_errors=True)
    print("\n| attack | seconds | times of /health | median, ms | p99, ms | most, ms | more resident, MiB | |\n| --- |" + " --- |" * 7)
    for name, seconds, count, median, p99, most, more, note in rows:
        print(f"| {name} | {seconds:.0f} | {count} | {median:.1f} | {p99:.1f} | {most:.1f} | {more:.0f} | {note} |")
    print(f"{len(found)} found" if found else "nothing found")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
