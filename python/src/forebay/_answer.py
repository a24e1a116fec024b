"""Answers, whole and in parts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with the logarithm of its probability before filters and temperature."""

    id: int
    bytes: bytes
    """Bytes of this token alone. They need not be whole characters."""
    logprob: float
    """Natural logarithm, at most 0."""
    likeliest: tuple[TokenLogprob, ...] = ()
    """The likeliest tokens in this place, likeliest first, as many as `logprobs` asked for."""

    @property
    def text(self) -> str:
        return self.bytes.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool."""

    id: str
    name: str
    arguments: str
    """Arguments as JSON."""

    def parsed(self) -> Any:
        """Return the arguments as Python objects."""
        return json.loads(self.arguments)


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of a call of a tool."""

    index: int
    """Number of the call in its answer, from 0."""
    name: str | None
    """Name of the tool, in the first part of a call."""
    arguments: str
    """More of the arguments, as JSON."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens."""

    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt whose keys and values were there already."""
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer."""

    text: str
    """Text without reasoning and tool calls. A text of `stop` is no part of it."""
    token_ids: list[int]
    """Ids of all generated tokens, without the end token."""
    finish_reason: str
    """ "stop" (the model ended, or a text of `stop` came), "length" (`max_tokens`, or the context is full) or
    "tool_calls"."""
    stop: str | None
    """The text of `stop` that ended the answer."""
    reasoning: str | None
    tool_calls: list[ToolCall]
    logprobs: list[TokenLogprob] | None
    """One for each generated token, if `logprobs` was given."""
    usage: Usage
    message: dict[str, Any]
    """The answer as a message, to append to those of `chat`."""
    statistics: dict[str, Any] = field(repr=False)
    """Times in seconds, and what the request needed of the weights, in bytes."""

    def parsed(self) -> Any:
        """Return the text as Python objects. With `schema`, it is JSON unless `finish_reason` is "length"."""
        return json.loads(self.text)


@dataclass(frozen=True, slots=True)
class Delta:
    """What one generated token adds to an answer. The last one of a stream has no token, and a `finish_reason`."""

    text: str = ""
    """More text. It is empty if the token only begins a character, or if the text may begin one of `stop`."""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    token_id: int | None = None
    logprob: TokenLogprob | None = None
    finish_reason: str | None = None


def logprob_of(given: tuple[int, bytes, float, list[tuple[int, bytes, float]]]) -> TokenLogprob:
    number, content, logprob, likeliest = given
    return TokenLogprob(number, content, logprob, tuple(TokenLogprob(*of) for of in likeliest))


class Collector:
    """Makes parts of updates, and an answer of all parts."""

    def __init__(self, stops: list[str], has_logprobs: bool) -> None:
        self._stops = stops
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = [] if has_logprobs else None
        self.answer: Answer | None = None

    def add(self, updates: list[Any]) -> None:
        """Take updates without making parts of them."""
        for token_id, _, rest in updates:
            if token_id is None:
                self._end(rest)
                continue
            self._ids.append(token_id)
            if self._logprobs is not None and rest is not None:
                self._logprobs.append(logprob_of(rest))

    def deltas(self, updates: list[Any]) -> list[Delta]:
        """Take updates and return parts."""
        deltas = []
        for token_id, pieces, rest in updates:
            text = reasoning = ""
            calls = []
            for kind, part, index in pieces:
                if kind == "content":
                    text += part
                elif kind == "reasoning":
                    reasoning += part
                elif kind == "call":
                    calls.append(ToolCallDelta(index, part, ""))
                else:
                    calls.append(ToolCallDelta(index, None, part))
            if token_id is None:
                finish_reason = self._end(rest)
                deltas.append(Delta(text, reasoning, tuple(calls), None, None, finish_reason))
                continue
            logprob = None
            self._ids.append(token_id)
            if self._logprobs is not None and rest is not None:
                logprob = logprob_of(rest)
                self._logprobs.append(logprob)
            deltas.append(Delta(text, reasoning, tuple(calls), token_id, logprob))
        return deltas

    def _end(self, end: tuple[str, str, int | None, str]) -> str:
        written, finish_reason, stop, statistics = end
        message = json.loads(written)
        counts = json.loads(statistics)
        calls = [
            ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls", [])
        ]
        self.answer = Answer(
            text=message["content"] or "",
            token_ids=self._ids,
            finish_reason=finish_reason,
            stop=None if stop is None else self._stops[stop],
            reasoning=message.get("reasoning_content"),
            tool_calls=calls,
            logprobs=self._logprobs,
            usage=Usage(counts["prompt_tokens"], counts["cached_tokens"], counts["generated_tokens"]),
            message=message,
            statistics=counts,
        )
        return finish_reason
