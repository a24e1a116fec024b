"""`from_pretrained` of transformers, with weights that forebay reads.

transformers makes the model without memory for its weights. It then takes each tensor from forebay, which reads ahead
in the order in which transformers asks. Everything else is done by transformers: classes, device maps, types,
quantisers, merged experts, tied weights and buffers.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from ._convert import require
from ._errors import OptionError
from ._ordered import LazyTensor, Reading, device_name, new_reading, stream_options, streamed

if TYPE_CHECKING:
    import torch

__all__ = ["from_pretrained", "reading"]


_READING: ContextVar[Reading | None] = ContextVar("forebay_transformers", default=None)


def from_pretrained(
    model: str | os.PathLike[str],
    *model_args: Any,
    model_class: Any = None,
    budget: int | str = "1GiB",
    stream: Any = None,
    **kwargs: Any,
) -> Any:
    """Load a model of transformers.

    Args:
        model: A folder with safetensors files, or a name on the Hugging Face Hub.
        model_args: As for transformers' `from_pretrained`.
        model_class: The class to make, such as `transformers.AutoModelForCausalLM`. None means the class that the
            model's configuration names.
        budget: Bytes, or a text such as "512MiB". The load uses about so much memory of each device beside the model.
        stream: VRAM for weights, such as "8GiB", or a dict of arguments of `forebay.torch.stream`, such as
            `{"vram": "8GiB", "ram": "16GiB"}`. The weights then stay in their files until they are used. The attribute `forebay_stream` of
            the model is the stream.
        kwargs: As for transformers' `from_pretrained`: `dtype`, `device_map`, `quantization_config`, `revision`...

    Returns:
        The model, as transformers returns it.

    Raises:
        OptionError: The weights do not come from safetensors files, or an argument is wrong.
        FileNotFoundError, FormatError, ReadError, OutOfMemoryError, DeviceError: As for `forebay.load`.
    """
    if kwargs.get("gguf_file") or kwargs.get("use_safetensors") is False or kwargs.get("state_dict") is not None:
        raise OptionError(
            "forebay reads safetensors files: gguf_file, state_dict and use_safetensors=False are impossible"
        )
    kwargs["use_safetensors"] = True
    if model_class is None:
        model_class = class_of(model, kwargs)
    options = stream_options(stream, kwargs)
    with reading(budget, new_reading(budget, maps=options is not None)) as state:
        loaded = model_class.from_pretrained(model, *model_args, **kwargs)
    if state.loads == 0:
        raise OptionError(
            f"{model_class.__name__} has not read {os.fspath(model)} through transformers' loader, so forebay could "
            "not read it: use the class's own from_pretrained"
        )
    if options is not None:
        loaded.forebay_stream = streamed(loaded, options)
    return loaded


@contextlib.contextmanager
def reading(budget: int | str = "1GiB", state: Reading | None = None) -> Iterator[Reading]:
    """Let forebay read for every `from_pretrained` of transformers in a `with` statement, in this thread.

    It is for code that calls `from_pretrained` itself, such as pipelines.

    Args:
        budget: As for `from_pretrained`.
        state: What counts the loads. None means a new one.

    Raises:
        OptionError: The budget is no size, or too small.
    """
    state = state or new_reading(budget)
    install()
    token = _READING.set(state)
    try:
        yield state
    finally:
        _READING.reset(token)


def class_of(model: str | os.PathLike[str], kwargs: dict[str, Any]) -> Any:
    """Return the class of transformers that a model's configuration names."""
    transformers = require("transformers")
    hub = ("revision", "cache_dir", "token", "subfolder", "trust_remote_code", "local_files_only", "code_revision")
    config = kwargs.get("config")
    if not isinstance(config, transformers.PreTrainedConfig):
        found = {name: kwargs[name] for name in hub if name in kwargs}
        config = transformers.AutoConfig.from_pretrained(config or model, **found)
    for name in getattr(config, "auto_map", None) or {}:
        if name.startswith("AutoModel") and hasattr(transformers, name):
            return getattr(transformers, name)
    for name in getattr(config, "architectures", None) or []:
        if hasattr(transformers, name):
            return getattr(transformers, name)
    return transformers.AutoModel


def install() -> None:
    """Let transformers ask forebay for weights, where `reading` is active."""
    require("torch")
    version = require("transformers").__version__
    if not version.startswith("5."):
        raise ImportError(f"forebay.transformers needs transformers 5, not {version}")
    modeling = require("transformers.modeling_utils")
    kind = modeling.PreTrainedModel
    original = kind._load_pretrained_model
    if getattr(original, "is_of_forebay", False):
        return

    def load_pretrained_model(
        model: torch.nn.Module, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        state = _READING.get()
        if state is None or state_dict is not None:
            return original(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
        if not checkpoint_files or not all(str(file).endswith(".safetensors") for file in checkpoint_files):
            raise OptionError(
                f"{type(model).__name__} has no safetensors files, which forebay needs: use its own from_pretrained"
            )
        if modeling.is_deepspeed_zero3_enabled():
            raise OptionError("forebay cannot load for ZeRO-3 of DeepSpeed: use the class's own from_pretrained")
        state.loads += 1
        with state.tensors(checkpoint_files) as tensors:
            tensors.plan(requests(model, tensors.table.names(), load_config))
            lazy = {name: LazyTensor(tensors, name) for name in tensors.table.names()}
            return original(model, lazy, checkpoint_files, load_config, *args, **kwargs)

    load_pretrained_model.is_of_forebay = True  # type: ignore[attr-defined]
    kind._load_pretrained_model = staticmethod(load_pretrained_model)


def requests(model: torch.nn.Module, names: list[str], load_config: Any) -> list[tuple[str, str]]:
    """Return the tensors that transformers is going to ask for, with their devices, in its order.

    If it asks for others, or in another order, these are read alone, which is slower.
    """
    core = require("transformers.core_model_loading")
    device_map = load_config.device_map or {"": "cpu"}
    quantizer = load_config.hf_quantizer
    # Names are matched by objects that remember what they have matched.
    mapping = copy.deepcopy(load_config.weight_mapping or [])
    renamings = [entry for entry in mapping if isinstance(entry, core.WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, core.WeightConverter)]
    pattern_to_converter = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    parameters = model.state_dict()
    prefix = model.base_model_prefix

    # Each parameter gets its tensors by the pattern that they match.
    groups: dict[str, dict[str, list[tuple[str, str]]]] = {}
    in_turn: list[tuple[str, str]] = []
    for name in sorted(names, key=core.dot_natural_key):
        renamed, pattern = core.rename_source_key(name, renamings, converters, prefix, parameters)
        if renamed not in parameters and name in parameters:
            renamed, pattern = core.rename_source_key(
                name, [], [], base_model_prefix=prefix, meta_state_dict=parameters
            )
        if renamed not in parameters or core.is_dtensor(parameters[renamed]):
            # It is not loaded, or in parts.
            continue
        device = core.get_device(device_map, renamed, valid_torch_device=True)
        if pattern is not None and getattr(pattern_to_converter[pattern], "force_cpu", False):
            device = "cpu"
        request = (name, device_name(device))
        in_turn.append(request)
        groups.setdefault(renamed, {}).setdefault(pattern or name, []).append(request)
    is_one_by_one = (
        core.is_env_variable_true("HF_DEACTIVATE_ASYNC_LOAD")
        or "disk" in device_map.values()
        or (quantizer is not None and not quantizer.pre_quantized)
    )
    if not is_one_by_one:
        return in_turn
    return [request for patterns in groups.values() for requests in patterns.values() for request in requests]
