"""Requests in the form of the OpenAI API, which the Rust part reads."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

from . import _native
from ._answer import Collector
from ._errors import OptionError

Prompt = str | Sequence[int]
Messages = str | Iterable[Mapping[str, Any]]


class Options(TypedDict, total=False):
    """How an answer is made. All are optional."""

    max_tokens: int | None
    """Most tokens of the answer. None is the rest of the context."""
    temperature: float
    """0 always takes the likeliest token. Default: 0.8."""
    top_k: int
    """Choose among this number of the likeliest tokens. 0 is all. Default: 40."""
    top_p: float
    """Choose among the likeliest tokens that together have this probability. Default: 0.95."""
    min_p: float
    """Leave out tokens less likely than this share of the likeliest. Default: 0.05."""
    seed: int | None
    """The same seed, prompt and options give the same answer. None is a random one."""
    stop: str | Sequence[str]
    """Texts that end the answer, up to 16."""
    repetition_penalty: float
    """Logits of the last 64 tokens are divided by it. 1 is off, and the default."""
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    """Values from -100 to 100 that are added to the logits of tokens."""
    logprobs: int | None
    """Report the probability of every token, and those of this number of likeliest tokens (0 to 20)."""
    schema: Any
    """JSON schema that the answer follows: a dict, or a class of pydantic."""
    json_object: bool
    """The answer is a JSON object."""
    regex: str
    """Regular expression that the whole answer matches."""
    choice: Sequence[str]
    """Texts one of which is the answer."""
    grammar: str
    """Grammar in the form of Lark."""
    priority: int
    """Waiting requests of a higher priority begin first. Default: 0."""


class ChatOptions(Options, total=False):
    """How a message is answered. All are optional."""

    tools: Sequence[Mapping[str, Any]]
    """Tools that the answer may call, in the form of the OpenAI API."""
    tool_choice: str | Mapping[str, Any]
    """ "auto", "none", "required", or the function to call."""
    parallel_tool_calls: bool
    """False allows one call at most."""
    reasoning_effort: str
    """ "none", "low", "medium" or "high", as far as the model's template has them."""
    template_args: Mapping[str, Any]
    """Variables of the chat template."""


class Request(NamedTuple):
    """A request that is ready for the Rust part."""

    is_chat: bool
    body: str
    stops: list[str]
    has_logprobs: bool
    priority: int

    def collector(self) -> Collector:
        return Collector(self.stops, self.has_logprobs)

    def submit(self, engine: _native.Engine, wake: _native.Wake | None = None, number: int = 0) -> _native.Run:
        return engine.submit(self.is_chat, self.body, wake, number, self.priority)


class TextToEmbed(NamedTuple):
    """A text whose embedding is wanted."""

    text: str | list[int]
    pooling: str
    truncate: bool
    priority: int

    def collector(self) -> OneState:
        return OneState()

    def submit(self, engine: _native.Engine, wake: _native.Wake | None = None, number: int = 0) -> _native.Run:
        return engine.embed(self.text, self.pooling, self.truncate, wake, number, self.priority)


class OneState:
    """Takes the state of a text."""

    def __init__(self) -> None:
        self.answer: bytes | None = None

    def add(self, updates: list[bytes]) -> None:
        for state in updates:
            self.answer = state


def _ids(numbers: Iterable[int]) -> list[int]:
    ids = [operator.index(number) for number in numbers]
    for number in ids:
        if not 0 <= number < 2**32:
            raise OptionError(f"{number} is no token")
    return ids


def texts_of(texts: Prompt | Iterable[Prompt]) -> list[str | list[int]]:
    """Return texts, each as text or as token ids. One text, or its token ids, is a list of one."""
    if isinstance(texts, str):
        return [texts]
    given = list(texts)
    if given and all(hasattr(one, "__index__") for one in given):
        given = [given]
    try:
        return [one if isinstance(one, str) else _ids(one) for one in given]
    except TypeError:
        words = "texts is a text, a list of token ids, or a list of these, and not"
        raise OptionError(f"{words} {texts!r:.80}") from None


_DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
_COPIED = (
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias",
)  # fmt: skip
_CHAT_COPIED = ("tools", "tool_choice", "parallel_tool_calls", "reasoning_effort")
_FORMS = {"schema": "json", "json_object": "json_object", "regex": "regex", "choice": "choice", "grammar": "grammar"}
_OTHERS = ("stop", "logprobs", "priority")


def completion(prompt: Prompt, options: Mapping[str, Any]) -> Request:
    if not isinstance(prompt, str):
        try:
            prompt = [operator.index(number) for number in prompt]
        except TypeError:
            raise OptionError(f"prompt is {prompt!r}, but a text or a list of token ids is needed") from None
        if not prompt:
            raise OptionError("the prompt is empty")
    return _request(False, {"prompt": prompt}, options)


def chat(messages: Messages, options: Mapping[str, Any]) -> Request:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    body: dict[str, Any] = {"messages": [dict(message) for message in messages]}
    return _request(True, body, options)


def _request(is_chat: bool, body: dict[str, Any], options: Mapping[str, Any]) -> Request:
    left = {name: value for name, value in options.items() if value is not None}
    for name, value in _DEFAULTS.items():
        body[name] = value
    for name in _COPIED + (_CHAT_COPIED if is_chat else ()):
        if name in left:
            body[name] = left.pop(name)
    if is_chat and "template_args" in left:
        body["chat_template_kwargs"] = dict(left.pop("template_args"))
    stops = left.pop("stop", [])
    stops = [stops] if isinstance(stops, str) else list(stops)
    if "" in stops:
        raise OptionError("stop is an empty text")
    body["stop"] = stops
    likeliest = left.pop("logprobs", None)
    if likeliest is not None:
        likeliest = operator.index(likeliest)
        if is_chat:
            body["logprobs"], body["top_logprobs"] = True, likeliest
        else:
            body["logprobs"] = likeliest
    forms = {_FORMS[name]: left.pop(name) for name in _FORMS if name in left}
    if len(forms) > 1:
        raise OptionError("schema, json_object, regex, choice and grammar exclude each other: give one of them")
    if forms:
        if hasattr(forms.get("json"), "model_json_schema"):
            forms["json"] = forms["json"].model_json_schema()
        body["structured_outputs"] = forms
    priority = left.pop("priority", 0)
    if left:
        known = sorted({*_COPIED, *_FORMS, *_OTHERS, *((*_CHAT_COPIED, "template_args") if is_chat else ())})
        raise OptionError(f"there is no option {next(iter(left))!r}; options are {', '.join(known)}")
    try:
        text = json.dumps(body, default=_plain)
    except (TypeError, ValueError) as error:
        raise OptionError(f"an option cannot be written as JSON: {error}") from None
    return Request(is_chat, text, stops, likeliest is not None, priority)


def _plain(value: Any) -> Any:
    """Return numbers of NumPy, and sequences that JSON does not know, as those of Python."""
    for method in ("tolist", "items", "__iter__"):
        if hasattr(value, method):
            made = getattr(value, method)()
            return made if method == "tolist" else dict(made) if method == "items" else list(made)
    raise TypeError(f"{value!r} is no value of JSON")
