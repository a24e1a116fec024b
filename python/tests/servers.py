"""A proxy in front of an HTTP server, which makes answers late, and some of them fail on purpose; and such a server."""

import http.client
import http.server
import pathlib
import socket
import socketserver
import struct
import threading
import time

FAULTS = ("status 503", "cut body", "reset", "status 500", "cut body", "slow", "no answer")


class FailingProxy:
    """A proxy on a port of its own. `one_in` requests for ranges one fails, in each of the ways of `FAULTS` in turn."""

    def __init__(self, upstream: tuple[str, int], latency: float = 0.0, one_in: int = 0, faults=FAULTS) -> None:
        self.upstream = upstream
        self.latency = latency
        # Seconds more for every range that does not begin with the first byte.
        self.data_latency = 0.0
        self.one_in = one_in
        self.faults = faults
        self.asked: list[tuple[str, str | None]] = []
        self.failed = 0
        self.running = 0
        self.most_running = 0
        self._lock = threading.Lock()
        proxy = self

        class Handler(socketserver.StreamRequestHandler):
            disable_nagle_algorithm = True

            def handle(self) -> None:
                try:
                    while proxy.answer(self):
                        pass
                except OSError:
                    pass

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True
            request_queue_size = 256

        self._server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def take_asked(self) -> list[tuple[str, str | None]]:
        """Return the targets and ranges of all requests since the last call."""
        with self._lock:
            asked, self.asked = self.asked, []
        return asked

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, handler: socketserver.StreamRequestHandler) -> bool:
        """Answer one request. Return False if the connection ends."""
        line = handler.rfile.readline().decode("latin-1")
        if not line:
            return False
        method, target, _ = line.split(" ", 2)
        headers = {}
        while (header := handler.rfile.readline().decode("latin-1").strip()) != "":
            name, _, value = header.partition(":")
            headers[name.strip().lower()] = value.strip()
        body = handler.rfile.read(int(headers.get("content-length", 0)))
        with self._lock:
            self.asked.append((target, headers.get("range")))
            number = sum(range is not None for _, range in self.asked)
            fails = self.one_in > 0 and "range" in headers and number % self.one_in == 0
            fault = self.faults[self.failed % len(self.faults)] if fails else None
            self.failed += fails
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        try:
            answer, goes_on = self._answer(handler, method, target, headers, body, fault)
            # A client that has the whole answer may begin its next request at once. So the end is sent when this one counts
            # as answered.
            handler.wfile.write(answer[:-1])
        finally:
            with self._lock:
                self.running -= 1
        handler.wfile.write(answer[-1:])
        return goes_on

    def _answer(self, handler, method, target, headers, body, fault) -> tuple[bytes, bool]:
        """Return the bytes of an answer, and whether the connection goes on."""
        is_data = not headers.get("range", "bytes=0-").startswith("bytes=0-")
        time.sleep(self.latency + (self.data_latency if is_data else 0))
        if fault == "no answer":
            return b"", False
        if fault is not None and fault.startswith("status"):
            return f"HTTP/1.1 {fault[7:]} On Purpose\r\nContent-Length: 0\r\n\r\n".encode(), True
        upstream = http.client.HTTPConnection(*self.upstream, timeout=60)
        upstream.request(method, target, body=body, headers=headers)
        found = upstream.getresponse()
        content = found.read()
        upstream.close()
        kept = [(name, value) for name, value in found.getheaders() if name.lower() not in ("connection", "server")]
        head = "".join(f"{name}: {value}\r\n" for name, value in kept)
        if "content-length" not in found.headers:
            head += f"Content-Length: {len(content)}\r\n"
        if fault == "slow":
            time.sleep(0.5)
        start = f"HTTP/1.1 {found.status} {found.reason}\r\n{head}\r\n".encode("latin-1")
        if fault in ("cut body", "reset"):
            if fault == "reset":
                linger = struct.pack("ii", 1, 0)
                handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            return start + content[: len(content) // 2], False
        return start if method == "HEAD" else start + content, True


class RangeServer(http.server.ThreadingHTTPServer):
    """A server of the files in a folder that answers ranges, as http.server does not."""

    daemon_threads = True

    def __init__(self, folder: pathlib.Path) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = folder / self.path.lstrip("/")
                if not path.is_file():
                    return self.send_error(404)
                content = path.read_bytes()
                first, last = self.headers["Range"].removeprefix("bytes=").split("-")
                part = content[int(first) : int(last) + 1]
                self.send_response(206)
                self.send_header("Content-Length", str(len(part)))
                self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}")
                self.end_headers()
                self.wfile.write(part)

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"
