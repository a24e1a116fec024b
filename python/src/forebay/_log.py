"""Messages of the engine, for the logger `forebay`.

Threads of the engine never take the GIL: they leave their messages in a queue, and a thread of Python hands them to the
logger. Opening and closing an engine and loads do so, too, so that their messages come before the call returns.
"""

from __future__ import annotations

import atexit
import logging
import select
import threading

from . import _native

LOGGER = logging.getLogger("forebay")

_levels = ((10, "trace"), (20, "debug"), (30, "info"), (40, "warn"), (50, "error"))
_lock = threading.Lock()
_delivering = threading.RLock()
_level: str | None = None
_thread: threading.Thread | None = None


def follow() -> None:
    """Log what the logger shows now, and start the thread."""
    global _level, _thread
    effective = LOGGER.getEffectiveLevel() if not LOGGER.disabled else logging.CRITICAL
    level = next((name for bound, name in _levels if effective < bound), "off")
    with _lock:
        if level == _level and _thread is not None and _thread.is_alive():
            return
        descriptor = _native.log_start(level)
        if _thread is None:
            atexit.register(deliver)
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_wait, args=(descriptor,), name="forebay-log", daemon=True)
            _thread.start()
        _level = level


def follow_loads() -> None:
    """Do the same for a load, which only has messages about its phases."""
    if LOGGER.isEnabledFor(logging.DEBUG):
        follow()


def deliver_loads() -> None:
    """Hand the messages of a load to the logger before it returns."""
    if _level is not None:
        deliver()


def deliver(patience: float = 1.0) -> None:
    """Hand all messages that wait to the logger. If another thread does that now, wait for it, but not longer than
    `patience` seconds: a handler may wait for this thread. A handler may also call this."""
    if not _delivering.acquire(timeout=patience):
        return
    try:
        for level, line in _native.log_take():
            LOGGER.log(level, "%s", line)
    finally:
        _delivering.release()


def _wait(descriptor: int) -> None:
    while True:
        select.select([descriptor], [], [])
        deliver(patience=-1)
