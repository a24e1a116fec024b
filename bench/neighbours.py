"""One of two keys attacks a server, and the requests of the other one are measured: a part of server-attacks.py."""

import json
import multiprocessing
import os
import statistics
import threading
import time

from attacked import MIB, Server, idle, report

# Limits of how much longer the neighbour's requests may take: a request is too slow if it exceeds both.
RATIO_MAX, MORE_SECONDS_MAX = 2, 0.01


class Attacker:
    """Attacks with one key from several threads until it is told to stop. Dropped connections end its requests."""

    def __init__(self, server, key, once, threads):
        self.server, self.key, self.once, self.stops = server, key, once, threading.Event()
        self.statuses, self.open = {}, []
        self.threads = [threading.Thread(target=self.run, daemon=True) for _ in range(threads)]
        for thread in self.threads:
            thread.start()

    def run(self):
        # In earnest, an attacker's programs are on another machine, and take no processor time from the server.
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
        while not self.stops.is_set():
            try:
                status = self.once(self)
            except OSError as error:
                status = type(error).__name__
            except Exception as error:
                return report(f"neighbours: the attack does not work: {type(error).__name__}: {error}")
            self.statuses[status] = self.statuses.get(status, 0) + 1
            self.stops.wait(0.01)

    def ask(self, method, path, body=b"", headers=()):
        return self.server.ask(method, path, body, [f"X-Api-Key: {self.key}", *headers], 60)[0]

    def begin(self, path, body, length=None):
        """Sends a request whose answer is not read, and keeps the connection."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = self.server.connect(60)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: {self.key}\r\nContent-Length: {length or len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        self.keep(connection)
        return "kept"

    def keep(self, connection, most=400):
        self.open.append(connection)
        while len(self.open) > most:
            self.open.pop(0).close()

    def end(self):
        self.stops.set()
        for thread in self.threads:
            thread.join(90)
        for connection in self.open:
            connection.close()
        return ", ".join(f"{count} x {status}" for status, count in sorted(self.statuses.items(), key=str))


def form(content):
    part = lambda name, more, data: f'--B\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + data + b"\r\n"
    return part("purpose", "", b"batch") + part("file", '; filename="f"', content) + b"--B--\r\n"


FORM = "Content-Type: multipart/form-data; boundary=B"
LONG = {"model": "demo", "prompt": "Once", "max_tokens": 200, "ignore_eos": True}
LINES = [json.dumps({"custom_id": str(at), "method": "POST", "url": "/v1/completions", "body": LONG}).encode() + b"\n" for at in range(200)]


class Neighbour:
    """Asks with the other key and measures the times, in a process of its own: threads of the attacker would hold up this one's."""

    def __init__(self, server, key):
        self.server, self.headers = server, [f"X-Api-Key: {key}"]
        self.plain = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
        self.expected = json.loads(self.ask("POST", "/v1/completions", self.plain)[1])["choices"][0]["text"]
        status, file = self.ask("POST", "/v1/files", form(LINES[0]), [FORM])
        if status != 200:
            raise SystemExit(f"the file is refused: {file}")
        self.file = json.loads(file)["id"]
        self.own, others = multiprocessing.Pipe()
        multiprocessing.Process(target=self.serve, args=(others,), daemon=True).start()

    def ask(self, method, path, body=b"", headers=()):
        return self.server.ask(method, path, body, [*self.headers, *headers])

    def health(self):
        return self.server.ask("GET", "/health")[0] == 200

    def models(self):
        return self.ask("GET", "/v1/models")[0] == 200

    def answer(self):
        status, body = self.ask("POST", "/v1/completions", self.plain)
        return status == 200 and json.loads(body)["choices"][0]["text"] == self.expected

    def data(self):
        return self.ask("GET", f"/v1/files/{self.file}/content") == (200, LINES[0])

    def serve(self, pipe):
        while rounds := pipe.recv():
            times, wrong = {}, set()
            for _ in range(rounds):
                for asked in (self.health, self.models, self.answer, self.data):
                    began = time.perf_counter()
                    if not asked():
                        wrong.add(asked.__name__)
                    times.setdefault(asked.__name__, []).append(time.perf_counter() - began)
            pipe.send((times, wrong))

    def measure(self, rounds=40):
        """Returns the times of each kind of request, in seconds."""
        self.own.send(rounds)
        times, wrong = self.own.recv()
        for name in wrong:
            report(f"neighbours: {name} is wrong")
        return times


def attacks(server, attacker, plain):
    """Returns the attacks: name, number of threads, and one step."""
    def batches(own):
        status, made = server.ask("POST", "/v1/files", form(b"".join(LINES)), [f"X-Api-Key: {attacker}", FORM])
        if status != 200:
            return f"{status} for the file"
        body = {"input_file_id": json.loads(made)["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        return own.ask("POST", "/v1/batches", body)

    def silent(own):
        own.keep(server.connect(60), 1500)
        return "kept"

    long = {**plain, "max_tokens": 200, "ignore_eos": True, "stream": True}
    return [
        ("files", 4, lambda own: own.ask("POST", "/v1/files", form(b"x" * MIB), [FORM])),
        ("batches", 2, batches),
        ("grammars", 8, lambda own: own.ask("POST", "/v1/completions", {**plain, "guided_regex": "(ab)?" * 12000})),
        ("schemas", 8, lambda own: own.ask("POST", "/v1/completions", {**plain, "guided_json": {"enum": list(range(30000))}})),
        ("queue", 8, lambda own: own.ask("POST", "/v1/completions", {**long, "stream": False})),
        ("long prompts", 8, lambda own: own.ask("POST", "/v1/completions", {**plain, "prompt": [9] * 240})),
        ("answers that nobody reads", 4, lambda own: own.begin("/v1/completions", long)),
        ("bodies that do not end", 4, lambda own: own.begin("/v1/completions", b"{" * MIB, 30 * MIB)),
        ("silent connections", 8, silent),
        ("lists", 8, lambda own: own.ask("GET", "/v1/models")),
    ]


def clear(server, attacker):
    """Cancels the attacker's batches and deletes its files, so that the next attack begins as the first one."""
    headers = [f"X-Api-Key: {attacker}"]
    for batch in json.loads(server.ask("GET", "/v1/batches?limit=100", headers=headers)[1])["data"]:
        if batch["status"] in ("validating", "in_progress", "finalizing"):
            server.ask("POST", f"/v1/batches/{batch['id']}/cancel", headers=headers)
    while files := json.loads(server.ask("GET", "/v1/files?limit=100", headers=headers)[1])["data"]:
        for file in files:
            if server.ask("DELETE", f"/v1/files/{file['id']}", headers=headers)[0] not in (200, 404):
                time.sleep(0.2)  # A batch that ends still uses it.


def neighbours(program, demo, place):
    """Attacks with one key, and measures the requests of another one before, meanwhile and afterwards."""
    keys = attacker, neighbour = "attacker-0123456789", "neighbour-0123456789"
    (place / "two-keys").write_text("\n".join(keys) + "\n")
    server = Server(program, str(demo), "--name", "demo", "--api-key-file", str(place / "two-keys"), "--files", str(place / "files"),
                    "--files-size", "64MiB", "--queue", "256")
    other = Neighbour(server, neighbour)
    table, kinds = [], ["health", "models", "answer", "data"]
    for name, threads, once in attacks(server, attacker, other.plain):
        # What is too slow is measured once more, because other programs of the machine may have been in the way.
        for _ in range(2):
            print(f"neighbours: {name} ...", flush=True)
            before = other.measure()
            own = Attacker(server, attacker, once, threads)
            time.sleep(3)
            under = other.measure()
            note = own.end()
            clear(server, attacker)
            idle(server, other.headers)
            after = other.measure()
            rest = {kind: statistics.median(before[kind] + after[kind]) for kind in kinds}
            under = {kind: statistics.median(under[kind]) for kind in kinds}
            table.append((name, os.getloadavg()[0], rest, under, note))
            slow = [kind for kind in kinds if under[kind] > RATIO_MAX * rest[kind] and under[kind] > rest[kind] + MORE_SECONDS_MAX]
            if not slow:
                break
        for kind in slow:
            report(f"neighbours: {name}: {kind} takes {1e3 * under[kind]:.1f} ms, at rest {1e3 * rest[kind]:.1f} ms")
    if "panicked" in server.text() or server.stop() != 0:
        report("the server of the neighbours: " + server.text()[-600:])
    print("\n| attack | load |" + "".join(f" {kind}: rest, ms | attacked, ms | ratio |" for kind in kinds) + " attacker's answers |")
    print("| --- | --- |" + " --- |" * (3 * len(kinds) + 1))
    for name, load, rest, under, note in table:
        cells = "".join(f" {1e3 * rest[kind]:.1f} | {1e3 * under[kind]:.1f} | {under[kind] / rest[kind]:.1f} |" for kind in kinds)
        print(f"| {name} | {load:.1f} |{cells} {note} |")
