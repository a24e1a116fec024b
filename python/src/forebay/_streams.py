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
        run = self._run
        self._end()
        self._deltas.clear()
        if run is not None:
            run.cancel()

    def _end(self) -> None:
        """Nothing more is taken."""
        self._run = None

    def _is_over(self) -> bool:
        if self._run is not None and self._collector.answer is not None:
            self._end()
        return self._run is None


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
        # By number of a request: what waits for it, or whether there is something to take.
        self._requests: dict[int, asyncio.Future[None] | bool] = {}

    @classmethod
    def running(cls) -> Loop:
        loop = asyncio.get_running_loop()
        found = cls._of.get(loop)
        if found is None:
            found = cls._of[loop] = cls()
            loop.add_reader(found.wake.fileno(), found._ready)
        return found

    def begin(self) -> int:
        """Return a number for a request."""
        number = next(self._numbers)
        self._requests[number] = False
        return number

    def forget(self, number: int) -> asyncio.Future[None] | bool:
        """Forget a request, and return what waits for it."""
        return self._requests.pop(number, False)

    def end(self, number: int) -> None:
        """Forget a request, and wake what waits for it."""
        waiting = self.forget(number)
        if not isinstance(waiting, bool) and not waiting.done():
            waiting.set_result(None)

    def _ready(self) -> None:
        requests = self._requests
        for number in self.wake.take():
            waiting = requests.get(number)
            if waiting is None:
                continue  # The request has ended.
            requests[number] = True
            if not isinstance(waiting, bool) and not waiting.done():
                waiting.set_result(None)

    async def wait(self, number: int) -> bool:
        """Wait until a request has something to take, which is then taken. Returns False if the request has ended."""
        if self._requests.get(number) is False:
            waiting = self._requests[number] = asyncio.get_running_loop().create_future()
            await waiting
        if number not in self._requests:
            return False
        self._requests[number] = False
        return True


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
        self._is_closed = False

    def _end(self) -> None:
        super()._end()
        self._is_closed = True
        if self._loop is not None:
            self._loop.end(self._number)

    def __del__(self) -> None:
        # Nothing waits for a stream that nobody has. This may be another thread.
        if self._loop is not None:
            self._loop.forget(self._number)

    def __aiter__(self) -> AsyncStream:
        return self

    async def _start(self) -> None:
        """Queue the request. Long prompts become tokens on a thread of the event loop's pool."""
        self._loop = Loop.running()
        self._number = self._loop.begin()
        engine, request = self._engine, self._request
        self._engine = None

        def submit() -> _native.Run:
            return request.submit(engine, self._loop.wake, self._number)

        run = await asyncio.to_thread(submit)
        if self._is_closed:
            run.cancel()
        else:
            self._run = run

    async def __anext__(self) -> Delta:
        try:
            if self._engine is not None:
                await self._start()
            while not self._deltas:
                if self._is_over():
                    raise StopAsyncIteration
                if await self._loop.wait(self._number):
                    self._take(self._run.take() or [])
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
                if await self._loop.wait(self._number):
                    self._collector.add(self._run.take() or [])
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
