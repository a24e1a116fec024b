"""Answers that come in parts, for threads and for event loops."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Any

from . import _native
from ._answer import Answer, Collector, Delta
from ._errors import EngineError


class _Parts:
    def __init__(self, run: _native.Run, collector: Collector) -> None:
        self._run: _native.Run | None = run
        self._collector = collector
        self._deltas: deque[Delta] = deque()

    @property
    def answer(self) -> Answer:
        """The whole answer, after the last part."""
        if self._collector.answer is None:
            raise EngineError("the answer has not ended")
        return self._collector.answer

    def _take(self, updates: list[Any]) -> None:
        self._deltas.extend(self._collector.deltas(updates))

    def _cancel(self) -> None:
        run, self._run = self._run, None
        self._deltas.clear()
        if run is not None:
            run.cancel()

    def _is_over(self) -> bool:
        if self._run is None:
            return True
        if self._collector.answer is not None:
            self._run = None
            return True
        return False


class Stream(_Parts, Iterator[Delta]):
    """Parts of an answer, as they are generated. `Engine.stream` makes it.

    Closing or dropping it ends the request. It may be used in a `with` statement.
    """

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Delta:
        while not self._deltas:
            if self._is_over():
                raise StopIteration
            try:
                self._take(self._run.next())
            except BaseException:
                self._cancel()
                raise
        return self._deltas.popleft()

    def close(self) -> None:
        """End the request. Does nothing if it has ended."""
        self._cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Loop:
    """What the requests of one event loop wait with.

    The engine's thread writes a byte to a socket, which the loop watches. It never takes the GIL.
    """

    _of: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Loop] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self.wake = _native.Wake()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[None]] = {}

    @classmethod
    def running(cls) -> Loop:
        loop = asyncio.get_running_loop()
        found = cls._of.get(loop)
        if found is None:
            found = cls._of[loop] = cls()
            loop.add_reader(found.wake.fileno(), found._ready)
        return found

    def number(self) -> int:
        return next(self._numbers)

    def _ready(self) -> None:
        for number in self.wake.take():
            future = self._waiting.get(number)
            if future is not None and not future.done():
                future.set_result(None)

    async def wait(self, number: int) -> None:
        """Wait until a request has something to take."""
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await future
        finally:
            del self._waiting[number]


class AsyncStream(_Parts, AsyncIterator[Delta]):
    """Parts of an answer, as they are generated. `Engine.astream` makes it.

    Closing or dropping it, or cancelling the task that waits for a part, ends the request. It may be used in an
    `async with` statement.
    """

    def __init__(self, engine: Any, request: Any) -> None:
        super().__init__(None, request.collector())  # type: ignore[arg-type]
        self._engine = engine
        self._request = request
        self._loop: Loop | None = None
        self._number = 0

    def __aiter__(self) -> AsyncStream:
        return self

    async def _start(self) -> None:
        """Queue the request. Long prompts become tokens on a thread of the event loop's pool."""
        self._loop = Loop.running()
        self._number = self._loop.number()
        engine, request = self._engine, self._request
        self._engine = None

        def submit() -> _native.Run:
            return request.submit(engine, self._loop.wake, self._number)

        self._run = await asyncio.to_thread(submit)

    async def __anext__(self) -> Delta:
        try:
            if self._engine is not None:
                await self._start()
            while not self._deltas:
                if self._is_over():
                    raise StopAsyncIteration
                updates = self._run.take()
                if updates is None:
                    await self._loop.wait(self._number)
                else:
                    self._take(updates)
        except StopAsyncIteration:
            raise
        except BaseException:
            self._cancel()
            raise
        return self._deltas.popleft()

    async def whole(self) -> Answer:
        """Wait for the end, and return the whole answer."""
        try:
            if self._engine is not None:
                await self._start()
            if self._run is not None:
                self._run.wait_for_end()
            while not self._is_over():
                updates = self._run.take()
                if updates is None:
                    await self._loop.wait(self._number)
                else:
                    self._collector.add(updates)
        except BaseException:
            self._cancel()
            raise
        return self.answer

    async def aclose(self) -> None:
        """End the request. Does nothing if it has ended."""
        self._engine = None
        self._cancel()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
