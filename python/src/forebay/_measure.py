"""Plans, assessments of expert caches, and replays of routing traces."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import _native
from ._errors import OptionError
from ._load import Path, bytes_of
from ._progress import Progress, watched

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_PHASES = ("all", "prompt", "generate")
_SIZES = ("vram", "ram", "kv_vram", "kv_ram", "kv_disk_size", "kv_disk_writes_per_day")
_PATHS = ("kv_disk", "kv_disk_encrypt")


def numpy_module() -> Any:
    try:
        import numpy
    except ImportError as error:
        raise ImportError("results are arrays of NumPy, which is not installed: pip install numpy") from error
    return numpy


def engine_options(**given: Any) -> str:
    """Return options of an engine as the Rust part reads them."""
    usual: dict[str, Any] = {
        "device": "auto", "vram": None, "ram": None, "context": None, "threads": None, "parallel": None,
        "kv_tokens": None, "kv_type": "f16", "kv_vram": None, "kv_ram": None, "snapshot_every": None,
        "kv_disk": None, "kv_disk_size": "32GiB", "kv_disk_type": "as-cached", "kv_disk_writes_per_day": "100GiB",
        "kv_disk_encrypt": None, "cpu_experts": None, "cuda_graphs": True, "policy": None, "prefetch": False,
        "mtp": False, "io": None, "verify": True, "exact": False, "max_latency": None, "queue": 1024,
        "special_tokens_in_messages": False,
    }  # fmt: skip
    for name in given:
        if name not in usual:
            raise OptionError(f"there is no option {name!r}; options are {', '.join(usual)}")
    usual.update(given)
    for names, read in ((_SIZES, bytes_of), (_PATHS, os.fspath)):
        for name in names:
            usual[name] = None if usual[name] is None else read(usual[name])
    usual["device"] = str(usual["device"])
    return json.dumps(usual)


def _path(path: Path | None) -> str | None:
    return None if path is None else os.fspath(path)


@dataclass(frozen=True)
class Plan:
    """Where the weights of a model are for given budgets, and how fast it should run."""

    device: str
    """ "cpu" or "cuda"."""
    ram_bytes: int
    vram_bytes: int | None
    context: int
    tokens_per_second: float | None
    """Predicted rate of one request that generates. None if nothing is predicted."""
    prompt_tokens_per_second: float | None
    """Predicted rate of a prompt."""
    uncertain_because: str | None
    """Why nothing is predicted, or why the prediction is uncertain."""
    limit: str | None
    """What limits generating, such as "disk"."""
    sequences: Array
    """Numbers of requests together: int64, of shape [numbers]."""
    together_tokens_per_second: Array
    """Predicted rate of all of them: float64, of shape [numbers]. NaN if nothing is predicted."""
    best_sequences: int | None
    document: dict[str, Any] = field(repr=False)
    """What `forebay plan --json` prints."""


def plan(
    model: Path,
    *,
    profile: Path | None = None,
    routing: Path | None = None,
    prompt_tokens: int = 512,
    **options: Any,
) -> Plan:
    """Plan a model on this machine, without loading it.

    Args:
        model: A GGUF file, a pack, a folder of Hugging Face, or a name, as of `Engine`.
        profile: What `forebay doctor` wrote on another machine. None is this machine.
        routing: A routing trace whose hit rates are expected.
        prompt_tokens: Tokens of the prompt whose rate is predicted.
        options: `vram`, `ram`, `device`, `context` and others, as of `Engine`.

    Raises:
        ProfileError: `forebay doctor` has not measured this machine.
        OutOfMemoryError: A budget is too small.
        The other exceptions are those of `Engine`.
    """
    numpy = numpy_module()
    written = _native.plan(
        os.fspath(model), engine_options(**options), _path(profile), _path(routing), prompt_tokens
    )
    document = json.loads(written)
    chosen = document["plan"]
    prediction = chosen["prediction"]
    together = document["together"]
    return Plan(
        device=chosen["device"],
        ram_bytes=document["ram_bytes"],
        vram_bytes=document["vram_bytes"],
        context=document["context"],
        tokens_per_second=prediction["generate"]["tokens_per_second"],
        prompt_tokens_per_second=prediction["prompt"]["tokens_per_second"],
        uncertain_because=prediction["generate"]["uncertain_because"],
        limit=prediction["generate"]["limit"],
        sequences=numpy.array([of["sequences"] for of in together], dtype=numpy.int64),
        together_tokens_per_second=numpy.array([of["tokens_per_second"] for of in together], dtype=numpy.float64),
        best_sequences=document["best_sequences"],
        document=document,
    )


@dataclass(frozen=True)
class Replay:
    """What caches of several policies and capacities find of recorded routing."""

    policies: list[str]
    capacities: list[str]
    hit_rate: Array
    """Hits per lookup: float64, of shape [policies, capacities]."""
    lookups: Array
    """int64, of shape [policies, capacities]."""
    hits: Array
    """int64, of shape [policies, capacities]."""
    evictions: Array
    """int64, of shape [policies, capacities]."""
    generated_misses_per_token: Array
    """Misses per generated token, always of generated tokens: float64, of shape [policies, capacities]. NaN without
    generated tokens."""
    phase: str
    prompt_tokens: int
    generated_tokens: int
    experts_bytes: int
    """Bytes of all experts."""
    cycle_bytes: int
    """Bytes of the experts that one token uses in all layers."""
    model: str

    @property
    def misses(self) -> Array:
        """int64, of shape [policies, capacities]."""
        return self.lookups - self.hits


def _capacity(given: float | int | str) -> tuple[str, float, str]:
    """Return the kind, the number and the name of a capacity."""
    if isinstance(given, float):
        if not 0.0 <= given <= 1.0:
            raise OptionError(f"a capacity is {given}, but a share of the experts is from 0.0 to 1.0")
        return "share", given, f"{100 * given:g}%"
    if isinstance(given, str):
        if found := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", given):
            return _capacity(float(found[1]) / 100)
        if found := re.fullmatch(r"\s*(\d+)\s*/layer\s*", given):
            if int(found[1]) >= 2**32:
                raise OptionError(f"a capacity is {given!r}, but no layer has that many experts")
            return "experts", int(found[1]), f"{found[1]}/layer"
    return "bytes", bytes_of(given), str(given)


def replay(
    trace: Path,
    *,
    policies: Sequence[str] | None = None,
    capacities: Sequence[float | int | str] = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9),
    phase: str = "generate",
    keep_batches: bool = False,
) -> Replay:
    """Replay recorded routing through caches, with the engine's own cache.

    Args:
        trace: A file that `forebay run --trace-routing` or `assess(..., trace=...)` wrote, or routing as CSV.
        policies: Names of policies, such as "layer-lfu", "lru" or "belady". None is all.
        capacities: Shares of the experts (0.25 or "25%"), experts of each layer ("32/layer"), or bytes ("2GiB").
        phase: Tokens that are counted: "generate", "prompt" or "all". Prompts warm the cache in every case.
        keep_batches: True keeps a batch that is larger than the capacity until the next one, like the engine of
            published traces. False keeps to the capacity, like forebay's engine.

    Raises:
        FileNotFoundError: The trace does not exist.
        FormatError: It is no trace, or is damaged.
        OptionError: A policy, a capacity or the phase is not known.
    """
    numpy = numpy_module()
    if phase not in _PHASES:
        raise OptionError(f'phase is {phase!r}, but "generate", "prompt" or "all" is needed')
    chosen = [_capacity(given) for given in capacities]
    names = None if policies is None else list(policies)
    pairs = [(kind, float(number)) for kind, number, _ in chosen]
    document = json.loads(_native.replay(os.fspath(trace), names, pairs, keep_batches))
    shape = (len(document["policies"]), len(chosen), 3, 3)
    counters = numpy.array(document["counters"], dtype=numpy.int64).reshape(shape)
    lookups, hits, evictions = numpy.moveaxis(counters[:, :, _PHASES.index(phase)], -1, 0)
    generated = counters[:, :, _PHASES.index("generate")]
    with numpy.errstate(divide="ignore", invalid="ignore"):
        hit_rate = numpy.where(lookups > 0, hits / lookups, 0.0)
        faulted = (generated[:, :, 0] - generated[:, :, 1]) / numpy.float64(document["generated_tokens"])
    return Replay(
        policies=document["policies"],
        capacities=[name for _, _, name in chosen],
        hit_rate=hit_rate,
        lookups=lookups,
        hits=hits,
        evictions=evictions,
        generated_misses_per_token=faulted,
        phase=phase,
        prompt_tokens=document["prompt_tokens"],
        generated_tokens=document["generated_tokens"],
        experts_bytes=document["experts_bytes"],
        cycle_bytes=document["cycle_bytes"],
        model=document["model"],
    )


@dataclass(frozen=True)
class MissCurve:
    """What a policy finds at every capacity. Rates count generated tokens."""

    policy: str
    is_bound: bool
    """True if the policy must know the future or the whole recording."""
    share: Array
    """Kept experts as a share of all: float64, of shape [capacities]."""
    capacity_bytes: Array
    """int64, of shape [capacities]."""
    hit_rate: Array
    """float64, of shape [capacities]."""
    missed_bytes_per_token: Array
    """float64, of shape [capacities]."""


@dataclass(frozen=True)
class Assessment:
    """How small an expert cache can be for a model."""

    name: str
    curves: list[MissCurve]
    """All domains in turns, by policy."""
    domains: dict[str, list[MissCurve]]
    """The same for each domain alone."""
    misses_per_token: Array
    """Experts that each generated token missed, with the policy and the capacity that `document["residency"]` names:
    int64, of shape [tokens]."""
    verdict: list[str]
    document: dict[str, Any] = field(repr=False)
    """Everything that `forebay assess --json` prints for the model."""


def assess(
    model: Path,
    *,
    prompts: Path | None = None,
    tokens: int = 96,
    seed: int = 0,
    raw: bool = False,
    profile: Path | None = None,
    trace: Path | None = None,
    progress: Progress = None,
    **options: Any,
) -> Assessment:
    """Measure how small an expert cache can be for a model: record its routing on prompts, and replay it.

    Args:
        model: A GGUF file, a pack, a folder of Hugging Face, or a name, as of `Engine`. The model has experts.
        prompts: A file of prompts, one JSON object on each line. None takes those of forebay.
        tokens: Tokens that each prompt generates.
        seed: Seed of sampling.
        raw: True takes prompts without the chat template.
        profile: What `forebay doctor` wrote on another machine, for predicted speeds. None is this machine.
        trace: File to which the routing is written, for `replay`.
        progress: Called about 20 times per second with the tokens that are recorded and those in total. The total is 1
            while the model is read. True shows a bar (needs tqdm).
        options: `vram`, `ram`, `device`, `context` and others, as of `Engine`.

    Raises:
        Error: The model has no experts.
        The other exceptions are those of `Engine`.
    """
    numpy = numpy_module()
    with watched(progress, "Recording", " tokens") as update:
        written = _native.assess(
            os.fspath(model), engine_options(**options), _path(prompts), tokens, seed, raw, _path(profile),
            _path(trace), update,
        )  # fmt: skip
    document = json.loads(written)

    def curves(section: dict[str, Any]) -> list[MissCurve]:
        def column(curve: dict[str, Any], name: str, kind: Any) -> Array:
            return numpy.array([point[name] for point in curve["points"]], dtype=kind)

        return [
            MissCurve(
                policy=curve["policy"],
                is_bound=curve["is_bound"],
                share=column(curve, "share", numpy.float64),
                capacity_bytes=column(curve, "capacity_bytes", numpy.int64),
                hit_rate=column(curve, "hit_rate", numpy.float64),
                missed_bytes_per_token=column(curve, "missed_bytes_per_token", numpy.float64),
            )
            for curve in section["curves"]
        ]

    return Assessment(
        name=document["name"],
        curves=curves(document["mixed"]),
        domains={section["name"]: curves(section) for section in document["domains"]},
        misses_per_token=numpy.array(document["residency"]["misses_per_token"], dtype=numpy.int64),
        verdict=document["verdict"],
        document=document,
    )
