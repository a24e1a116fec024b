"""Starts a server and asks it, for other scripts here. Only the standard library is needed."""

import contextlib
import http.client
import json
import socket
import subprocess
import sys
import time


@contextlib.contextmanager
def server(command):
    """Starts `command` with a free --port, gives the port when /health answers, and ends the server afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.time() + 300
        while True:
            with contextlib.suppress(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    break
            if process.poll() is not None or time.time() > until:
                sys.exit(f"the server does not start: {' '.join(command)}")
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait(timeout=120)


def ask(port, path, body):
    """Returns the answer to a POST of JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1200)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    if response.status != 200:
        sys.exit(f"{path}: status {response.status}: {text[:300]}")
    return json.loads(text)
