"""Models that answer requests."""

from __future__ import annotations

import asyncio
import json
import os
from collections import deque
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from . import _log, _native, _requests
from ._answer import Answer
from ._load import Path
from ._measure import Assessment, Plan, assess, engine_options, numpy_module, plan
from ._progress import Progress, watched
from ._requests import ChatOptions, Messages, Options, Prompt, Request, TextToEmbed
from ._streams import AsyncStream, Stream

if TYPE_CHECKING:
    from ._measure import Array


class Engine:
    """Open a model, and answer requests with it.

    Requests of several threads and event loops run together, by continuous batching. What a request generates does not
    depend on the others. The engine runs on a thread of its own, which never takes the GIL.

    Use it in a `with` statement, or call `close`.

    Args:
        model: A GGUF file (or one file of a split set), a pack, or a folder of Hugging Face. If no such path exists, the name
            of a model in the model library (FOREBAY_MODELS, or the usual folder), or of another program ("ollama:NAME").
        vram: VRAM for everything on the GPU, such as "8GiB" or a number of bytes. None is what is free.
        ram: RAM for weights. None is what the model needs, at most three quarters of the free RAM.
        device: "auto", "cpu", "cuda" or "cuda:N". "auto" takes the first GPU if it can be used.
        context: Positions of context of a request. None is what the model was trained for, at most 4096.
        threads: Compute threads of the CPU. None is one per physical core.
        parallel: Requests that run together. None is 8, or fewer if memory has no room for their contexts.
        kv_tokens: Positions of the KV cache for all requests together. None is `context` for each.
        kv_type: "f16", "q8_0" or "q4_0".
        kv_vram: VRAM for the KV cache. The rest is in RAM. None takes what fits.
        kv_ram: RAM for keys and values that the device has no room for.
        snapshot_every: Rows of a prompt after which the states of recurrent layers are kept.
        kv_disk: Folder in which keys and values are kept, too, also after the end. Engines that open the same model later
            continue from there. A new folder can be read by you only.
        kv_disk_size: Bytes of this folder; what was not used for the longest time goes first.
        kv_disk_type: "as-cached", or "q8_0", which makes f16 about half as large and rounds it, so an answer may depend on
            what was in the folder.
        kv_disk_writes_per_day: Bytes that are written to this folder on one day at most.
        kv_disk_encrypt: File of at least 32 random bytes, whose key encrypts the folder.
        cpu_experts: True lets the CPU always compute some of the experts that are not in VRAM, False never. None decides
            by the machine profile.
        cuda_graphs: False launches every kernel by itself.
        policy: Eviction policy of experts, such as "layer-lfu" or "lru".
        prefetch: True prefetches the experts of the next layer.
        mtp: True loads the model's first layer for multi-token prediction, and checks what it proposes together with the
            next token. Answers stay the same, and may be faster. One request runs at a time.
        io: "auto", "uring", "pread" or "mmap".
        verify: False does not verify the checksums of a pack.
        exact: True computes with f32 activations and an f32 KV cache.
        max_latency: Seconds between two tokens of an answer that the engine aims for.
        queue: Requests that may wait. More are a QueueFullError.
        special_tokens_in_messages: True lets special tokens in messages, such as "<|im_end|>", be special tokens. The
            author of a part of a message can then end it and begin another one. False reads them as text.
        progress: Called about 20 times per second while the model is read, with the bytes that are done and those in
            total. An exception that it raises ends the load. True shows a bar (needs tqdm).

    Raises:
        FileNotFoundError: There is no such path, and no model of this name.
        FormatError: A file is damaged, or of an unknown format.
        OptionError: An argument is wrong, does not fit the model, or is a name that stands for several models.
        OutOfMemoryError: A budget is too small. The message names the smallest that works.
        DeviceError: The GPU cannot be used.
        KeyboardInterrupt: The user pressed Ctrl-C.
    """

    def __init__(
        self,
        model: Path,
        *,
        vram: int | str | None = None,
        ram: int | str | None = None,
        device: str = "auto",
        context: int | None = None,
        threads: int | None = None,
        parallel: int | None = None,
        kv_tokens: int | None = None,
        kv_type: str = "f16",
        kv_vram: int | str | None = None,
        kv_ram: int | str | None = None,
        snapshot_every: int | None = None,
        kv_disk: Path | None = None,
        kv_disk_size: int | str = "32GiB",
        kv_disk_type: str = "as-cached",
        kv_disk_writes_per_day: int | str = "100GiB",
        kv_disk_encrypt: Path | None = None,
        cpu_experts: bool | None = None,
        cuda_graphs: bool = True,
        policy: str | None = None,
        prefetch: bool = False,
        mtp: bool = False,
        io: str | None = None,
        verify: bool = True,
        exact: bool = False,
        max_latency: float | None = None,
        queue: int = 1024,
        special_tokens_in_messages: bool = False,
        progress: Progress = None,
    ) -> None:
        given = {
            "vram": vram, "ram": ram, "device": device, "context": context, "threads": threads, "parallel": parallel,
            "kv_tokens": kv_tokens, "kv_type": kv_type, "kv_vram": kv_vram, "kv_ram": kv_ram,
            "snapshot_every": snapshot_every, "kv_disk": kv_disk, "kv_disk_size": kv_disk_size,
            "kv_disk_type": kv_disk_type, "kv_disk_writes_per_day": kv_disk_writes_per_day,
            "kv_disk_encrypt": kv_disk_encrypt, "cpu_experts": cpu_experts, "cuda_graphs": cuda_graphs,
            "policy": policy, "prefetch": prefetch, "mtp": mtp, "io": io, "verify": verify, "exact": exact,
            "max_latency": max_latency, "queue": queue,
            "special_tokens_in_messages": special_tokens_in_messages,
        }  # fmt: skip
        self._path, self._given = model, given
        self._queue = queue
        _log.follow()
        with watched(progress, f"Loading {os.path.basename(os.fspath(model))}", "B") as update:
            self._native = _native.Engine(os.fspath(model), engine_options(**given), update)
        _log.deliver()

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Answer:
        """Continue a text, and return what follows it.

        Args:
            prompt: Text, or token ids.
            options: See `forebay.Options`.

        Raises:
            OptionError: An option is wrong, or the prompt does not fit the context.
            QueueFullError: Too many requests wait.
            EngineError: The engine is closed, or failed.
            KeyboardInterrupt: The user pressed Ctrl-C. The request ends.
        """
        return self._whole(_requests.completion(prompt, options))

    def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> Answer:
        """Answer a conversation.

        Args:
            messages: Messages in the form of the OpenAI API, or the text of one message of a user.
            options: See `forebay.ChatOptions`.

        The exceptions are those of `generate`.
        """
        return self._whole(_requests.chat(messages, options))

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Return an iterator over the parts of what `generate` returns."""
        return self._stream(_requests.completion(prompt, options))

    def chat_stream(self, messages: Messages, **options: Unpack[ChatOptions]) -> Stream:
        """Return an iterator over the parts of what `chat` returns."""
        return self._stream(_requests.chat(messages, options))

    async def agenerate(self, prompt: Prompt, **options: Unpack[Options]) -> Answer:
        """Do the same as `generate` in an event loop. Cancelling the task ends the request."""
        return await self.astream(prompt, **options).whole()

    async def achat(self, messages: Messages, **options: Unpack[ChatOptions]) -> Answer:
        """Do the same as `chat` in an event loop. Cancelling the task ends the request."""
        return await self.achat_stream(messages, **options).whole()

    def astream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncStream:
        """Return an asynchronous iterator over the parts of what `generate` returns. It begins at the first part."""
        return AsyncStream(self._native, _requests.completion(prompt, options))

    def achat_stream(self, messages: Messages, **options: Unpack[ChatOptions]) -> AsyncStream:
        """Return an asynchronous iterator over the parts of what `chat` returns. It begins at the first part."""
        return AsyncStream(self._native, _requests.chat(messages, options))

    def batch(
        self,
        requests: Iterable[Prompt | Mapping[str, Any]],
        *,
        return_exceptions: bool = False,
        **options: Unpack[ChatOptions],
    ) -> list[Any]:
        """Answer many requests, and return the answers in their order. As many run together as there is room for.

        Args:
            requests: Each is a prompt as of `generate`, or a dict with "prompt" or "messages" and options of its own.
            return_exceptions: True puts the exception of a request that fails in its place. Otherwise the first one
                is raised, and all requests end.
            options: Options of requests that do not name them.
        """
        answers: list[Any] = []
        pending: deque[tuple[_native.Run, Request] | Exception] = deque()

        def finish() -> None:
            started = pending.popleft()
            try:
                if isinstance(started, Exception):
                    raise started
                run, request = started
                collector = request.collector()
                collector.add(run.all())
                answers.append(collector.answer)
            except Exception as error:
                if not return_exceptions:
                    raise
                answers.append(error)

        for given in requests:
            if len(pending) >= max(self._queue, 1):
                finish()
            try:
                request = _of_batch(given, options)
                pending.append((self._submit(request), request))
            except Exception as error:
                if not return_exceptions:
                    raise
                pending.append(error)
        while pending:
            finish()
        return answers

    async def abatch(
        self,
        requests: Iterable[Prompt | Mapping[str, Any]],
        *,
        return_exceptions: bool = False,
        **options: Unpack[ChatOptions],
    ) -> list[Any]:
        """Do the same as `batch` in an event loop."""
        room = asyncio.Semaphore(max(self._queue, 1))

        async def one(given: Prompt | Mapping[str, Any]) -> Answer:
            async with room:
                return await AsyncStream(self._native, _of_batch(given, options)).whole()

        return await _together((one(given) for given in requests), return_exceptions)

    def embed(
        self,
        texts: Prompt | Iterable[Prompt],
        *,
        pooling: str = "mean",
        dimensions: int | None = None,
        normalize: bool = True,
        truncate: bool = False,
        priority: int = 0,
    ) -> Array:
        """Return embeddings of texts: float32, [texts, dimensions].

        They are made of the states of a text's tokens after the last layer. Texts run together, beside other requests. A
        row does not depend on the other texts.

        Args:
            texts: Texts, or lists of token ids. One text, or the token ids of one, gives one row.
            pooling: "mean" of the states, or the "last" one.
            dimensions: Number of dimensions to keep, from the first one. None is all of the model, `model["hidden"]`.
            normalize: True makes the length of every row 1, after dimensions are left out.
            truncate: True cuts texts that are longer than the context. Otherwise they are an error.
            priority: Waiting requests of a higher priority begin first.

        Raises:
            OptionError: A text is empty or does not fit the context, or an argument is wrong.
            EngineError: The engine is closed, or failed.
            KeyboardInterrupt: The user pressed Ctrl-C. All texts end.
        """
        requests = [TextToEmbed(text, pooling, truncate, priority) for text in _requests.texts_of(texts)]
        rows = self._rows(len(requests), dimensions)
        pending: deque[_native.Run] = deque()
        begun = 0
        for row in range(len(requests)):
            while begun < len(requests) and len(pending) < self._texts_together:
                pending.append(requests[begun].submit(self._native))
                begun += 1
            collector = requests[row].collector()
            collector.add(pending.popleft().all())
            rows[row] = self._row(collector.answer, dimensions, normalize)
        return rows

    async def aembed(
        self,
        texts: Prompt | Iterable[Prompt],
        *,
        pooling: str = "mean",
        dimensions: int | None = None,
        normalize: bool = True,
        truncate: bool = False,
        priority: int = 0,
    ) -> Array:
        """Do the same as `embed` in an event loop. Cancelling the task ends all texts."""
        requests = [TextToEmbed(text, pooling, truncate, priority) for text in _requests.texts_of(texts)]
        rows = self._rows(len(requests), dimensions)
        room = asyncio.Semaphore(self._texts_together)

        async def one(row: int) -> None:
            async with room:
                state = await AsyncStream(self._native, requests[row]).whole()
                rows[row] = self._row(state, dimensions, normalize)

        await _together(one(row) for row in range(len(requests)))
        return rows

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Return the token ids of a text.

        Args:
            add_special: True adds the tokens that begin a text, if the model has them.
            parse_special: True reads names of special tokens in the text as these tokens.
        """
        return self._native.tokenize(text, add_special, parse_special)

    def detokenize(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Return the text of token ids. Bytes that are no UTF-8 become U+FFFD.

        Args:
            keep_special: True writes the names of special tokens.
        """
        return self._native.detokenize(list(ids), keep_special)

    def chat_prompt(self, messages: Messages, **options: Unpack[ChatOptions]) -> tuple[str, list[int]]:
        """Return the prompt that the chat template makes of messages, as text and as token ids."""
        request = _requests.chat(messages, options)
        return self._native.prompt(request.is_chat, request.body)

    def statistics(self) -> dict[str, Any]:
        """Return what the engine does and has done: requests, passes, memory in bytes, cache hits, rates per second.

        The engine collects them after a pass, at most four times per second.
        """
        return json.loads(self._native.statistics())

    def plan(self, **changes: Any) -> Plan:
        """Return the plan of this model with the options of this engine. `changes` replaces some, as `ram="8GiB"`.

        See `forebay.plan`.
        """
        return plan(self._path, **{**self._given, **changes})

    def assess(self, **changes: Any) -> Assessment:
        """Measure how small an expert cache can be for this model, with the options of this engine.

        It opens the model once more, so close this engine first if memory has no room for two. `changes` has the
        arguments of `forebay.assess`, and replaces options of this engine.
        """
        return assess(self._path, **{**self._given, **changes})

    @property
    def model(self) -> dict[str, Any]:
        """Description of the model: architecture, layers, experts, sizes in bytes."""
        return json.loads(self._native.model())

    @property
    def context(self) -> int:
        """Positions of context of a request: its prompt and its answer."""
        return self._native.context

    @property
    def parallel(self) -> int:
        """Most requests that run together."""
        return self._native.running_max

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the vocabulary."""
        return self._native.vocab_size

    @property
    def load_seconds(self) -> float:
        """Seconds that it took to open the model."""
        return self._native.load_seconds

    def close(self) -> None:
        """End all requests and free the memory. Does nothing if the engine is closed."""
        self._native.close()
        _log.deliver()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _texts_together(self) -> int:
        return min(_native.EMBEDDINGS_QUEUED, max(self._queue, 1))

    def _rows(self, texts: int, dimensions: int | None) -> Array:
        numpy = numpy_module()
        return numpy.empty((texts, self._native.dimensions(dimensions)), numpy.float32)

    def _row(self, state: bytes, dimensions: int | None, normalize: bool) -> Array:
        return numpy_module().frombuffer(self._native.embedding(state, dimensions, normalize), "=f4")

    def _submit(self, request: Request) -> _native.Run:
        return request.submit(self._native)

    def _stream(self, request: Request) -> Stream:
        return Stream(self._submit(request), request.collector())

    def _whole(self, request: Request) -> Answer:
        run = self._submit(request)
        collector = request.collector()
        collector.add(run.all())
        answer = collector.answer
        assert answer is not None, "all updates have come"
        return answer


async def _together(work: Iterable[Coroutine[Any, Any, Any]], return_exceptions: bool = False) -> list[Any]:
    """Wait for all of `work`, and cancel the rest if one fails."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks, return_exceptions=return_exceptions)
    finally:
        for task in tasks:
            task.cancel()


def _of_batch(given: Prompt | Mapping[str, Any], options: Mapping[str, Any]) -> Request:
    if not isinstance(given, Mapping):
        return _requests.completion(given, options)
    own = {**options, **given}
    if "messages" in own:
        return _requests.chat(own.pop("messages"), own)
    return _requests.completion(own.pop("prompt", ()), own)
