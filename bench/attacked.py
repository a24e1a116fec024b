"""A server to attack, a hub for its pulls, and what is found: shared by server-attacks.py and neighbours.py. Only the standard library is
needed."""

import hashlib
import http.server
import json
import os
import pathlib
import re
import resource
import signal
import socket
import subprocess
import tempfile
import time

MIB = 1 << 20
found = []


def report(what):
    """Notes something that must not happen."""
    found.append(what)
    print(f"FOUND  {what}"[:600], flush=True)


class Server:
    def __init__(self, program, *options, environment=None):
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [program, "serve", *options, "--device", "cpu", "--ctx", "256", "--parallel", "4", "--port", "0"],
            stderr=self.log, env={**os.environ, **(environment or {})})
        started = time.monotonic()
        while not (line := re.search(r"answers at http://127\.0\.0\.1:(\d+)", self.text())):
            if self.process.poll() is not None or time.monotonic() - started > 60:
                self.process.kill()
                raise SystemExit("the server does not start:\n" + self.text())
            time.sleep(0.05)
        self.port = int(line[1])

    def text(self):
        # The program writes at the position of the same file, which reading must not move.
        return os.pread(self.log.fileno(), os.fstat(self.log.fileno()).st_size, 0).decode(errors="replace")

    def resident(self):
        return int(pathlib.Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * resource.getpagesize()

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def connect(self, timeout=30):
        connection = socket.create_connection(("127.0.0.1", self.port), timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def raw(self, data, timeout=3):
        """Sends bytes, and returns all that is answered until the connection is closed or silent, and if it was silent."""
        with self.connect(timeout) as connection:
            answer = b""
            try:
                connection.sendall(data)
            except OSError:
                pass  # The server may refuse before it has read everything.
            try:
                while part := connection.recv(65536):
                    answer += part
            except TimeoutError:
                return answer, True
            except ConnectionResetError:
                pass
            return answer, False

    def ask(self, method, path, body=b"", headers=(), timeout=120):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", "Connection: close", *headers, "", ""]
        with self.connect(timeout) as connection:
            connection.sendall("\r\n".join(lines).encode() + body)
            answer = b""
            while part := connection.recv(65536):
                answer += part
        head, _, rest = answer.partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head.lower():
            rest = unchunked(rest)
        return int(head.split()[1]), rest

    def stop(self):
        """Ends the server, and returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return None


def unchunked(data):
    body = b""
    while data:
        size, _, rest = data.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            break
        body, data = body + rest[:length], rest[length + 2:]
    return body


def idle(server, headers=()):
    """Waits until no request runs or waits."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        slots = json.loads(server.ask("GET", "/slots", headers=headers)[1])
        if (slots["running"], slots["waiting"]) == (0, 0):
            return True
        time.sleep(0.05)
    report(f"requests still run: {slots['running']} and {slots['waiting']}")
    return False


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub with one model in every repository, which sends slowly those whose name begins with `slow`."""

    protocol_version = "HTTP/1.1"
    content = b""

    def log_message(self, *_):
        pass

    def do_GET(self):
        if not self.path.startswith(("/api/models/o/", "/o/")):
            return self.send(404, b"{}", {})
        if self.path.startswith("/api/models/"):
            item = {"type": "file", "path": "m-Q4_K_M.gguf", "size": len(self.content), "oid": "0" * 40,
                    "lfs": {"oid": hashlib.sha256(self.content).hexdigest(), "size": len(self.content)}}
            return self.send(200, json.dumps([item]).encode(), {})
        first, last = 0, len(self.content) - 1
        if wanted := re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            first, last = int(wanted[1]), min(int(wanted[2]), last)
        where = {"Content-Range": f"bytes {first}-{last}/{len(self.content)}"} if wanted else {}
        self.send(206 if wanted else 200, self.content[first:last + 1], where, 0.2 if "/slow" in self.path else 0)

    def send(self, status, body, headers, pause=0):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            for at in range(0, len(body), MIB):
                self.wfile.write(body[at:at + MIB])
                time.sleep(pause)
        except OSError:
            self.close_connection = True
