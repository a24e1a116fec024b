"""`from_pretrained` of diffusers, for models and pipelines, with weights that forebay reads.

diffusers makes the model without memory for its weights. It then takes each tensor from forebay, which reads ahead in
the order in which diffusers asks. Everything else is done by diffusers: classes, device maps, types and quantisers.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from ._convert import require
from ._errors import OptionError
from ._mapped import MappedTensors
from ._ordered import LazyTensor, Reading, Tensors, device_name, new_reading, stream_options, streamed

if TYPE_CHECKING:
    import torch

__all__ = ["from_pretrained", "reading"]

_READING: ContextVar[Reading | None] = ContextVar("forebay_diffusers", default=None)


def from_pretrained(
    model: str | os.PathLike[str], *, model_class: Any = None, budget: int | str = "1GiB", stream: Any = None, **kwargs: Any
) -> Any:
    """Load a model or a pipeline of diffusers.

    Text encoders of a pipeline, which are models of transformers, are read by forebay, too.

    Args:
        model: A folder with safetensors files, or a name on the Hugging Face Hub.
        model_class: The class to make, such as `diffusers.FluxTransformer2DModel`. None means a pipeline if there is a
            `model_index.json`, else the class that the model's configuration names.
        budget: Bytes, or a text such as "512MiB". The load uses about so much memory of each device beside the model.
        stream: VRAM for the weights of all parts together, such as "8GiB", or a dict of arguments of `forebay.torch.stream`, such as
            `{"vram": "8GiB", "ram": "16GiB"}`. The weights then stay in their files until they are used. The attribute `forebay_stream` of
            the model or the pipeline is the stream.
        kwargs: As for diffusers' `from_pretrained`: `torch_dtype`, `device_map`, `subfolder`, `variant`...

    Returns:
        The model or the pipeline, as diffusers returns it.

    Raises:
        OptionError: The weights do not come from safetensors files, or an argument is wrong.
        FileNotFoundError, FormatError, ReadError, OutOfMemoryError, DeviceError: As for `forebay.load`.
    """
    if kwargs.get("use_safetensors") is False or kwargs.get("use_flashpack"):
        raise OptionError("forebay reads safetensors files: use_safetensors=False and use_flashpack are impossible")
    kwargs["use_safetensors"] = True
    # Some of its functions take no paths.
    model = os.fspath(model)
    options = stream_options(stream, kwargs)
    with reading(budget, maps=options is not None) as state:
        model_class = model_class or class_of(model, kwargs)
        loaded = model_class.from_pretrained(model, **kwargs)
    if state.loads == 0:
        raise OptionError(
            f"{model_class.__name__} has not read {model} through diffusers' loader, so forebay could not "
            "read it: use the class's own from_pretrained"
        )
    if options is not None:
        made = streamed(loaded, options)
        # Pipelines take no attributes beside their parts.
        object.__setattr__(loaded, "forebay_stream", made)
    return loaded


@contextlib.contextmanager
def reading(budget: int | str = "1GiB", maps: bool = False) -> Iterator[Reading]:
    """Let forebay read for every `from_pretrained` of diffusers and transformers in a `with` statement, in this thread.

    Args:
        budget: As for `from_pretrained`.
        maps: True if tensors are to be views of their files, which take no RAM until they are used.

    Raises:
        OptionError: The budget is no size, or too small.
    """
    state = new_reading(budget, maps)
    install()
    with contextlib.ExitStack() as stack:
        if importlib.util.find_spec("transformers") is not None:
            from . import transformers

            stack.enter_context(transformers.reading(budget, state))
        token = _READING.set(state)
        try:
            yield state
        finally:
            _READING.reset(token)


def class_of(model: str, kwargs: dict[str, Any]) -> Any:
    """Return the class of a pipeline, or the one that makes the class that a model's configuration names."""
    diffusers = require("diffusers")
    if kwargs.get("subfolder"):
        return diffusers.AutoModel
    hub = ("revision", "cache_dir", "token", "local_files_only", "proxies", "force_download")
    try:
        diffusers.DiffusionPipeline.load_config(model, **{name: kwargs[name] for name in hub if name in kwargs})
    except OSError:
        return diffusers.AutoModel
    return diffusers.DiffusionPipeline


def install() -> None:
    """Let diffusers ask forebay for weights, where `reading` is active."""
    require("torch")
    require("diffusers")
    modeling = require("diffusers.models.modeling_utils")
    loading = require("diffusers.models.model_loading_utils")
    if modeling.HF_ENABLE_PARALLEL_LOADING:
        raise OptionError("forebay reads with several threads itself: unset HF_ENABLE_PARALLEL_LOADING")
    if getattr(modeling.load_state_dict, "is_of_forebay", False):
        return
    load_state_dict = modeling.load_state_dict
    load_into_meta = loading.load_model_dict_into_meta
    fix_names = modeling.ModelMixin._fix_state_dict_keys_on_load

    @functools.wraps(load_state_dict)
    def our_load_state_dict(checkpoint_file: Any, *args: Any, **kwargs: Any) -> Any:
        state = _READING.get()
        if state is None or isinstance(checkpoint_file, dict) or not str(checkpoint_file).endswith(".safetensors"):
            return load_state_dict(checkpoint_file, *args, **kwargs)
        state.loads += 1
        return StateDict(state.tensors([checkpoint_file]))

    @functools.wraps(load_into_meta)
    def our_load_into_meta(model: torch.nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state_dict, StateDict):
            return load_into_meta(model, state_dict, *args, **kwargs)
        # A quantiser also takes tensors that are no parameters.
        names = None if kwargs.get("hf_quantizer") is not None else set(model.state_dict())
        device_map = kwargs.get("device_map")

        def device_of(name: str) -> str:
            device = loading._determine_param_device(name, device_map)
            return "cpu" if device == "disk" else device_name(device)

        with state_dict.planned(names, device_of):
            return load_into_meta(model, state_dict, *args, **kwargs)

    @functools.wraps(fix_names)
    def our_fix_names(self: torch.nn.Module, state_dict: Any) -> None:
        if not isinstance(state_dict, StateDict):
            return fix_names(self, state_dict)
        with state_dict.renaming():
            return fix_names(self, state_dict)

    our_load_state_dict.is_of_forebay = True  # type: ignore[attr-defined]
    for module in (modeling, loading):
        module.load_state_dict = our_load_state_dict
    loading.load_model_dict_into_meta = our_load_into_meta
    modeling.ModelMixin._fix_state_dict_keys_on_load = our_fix_names


class StateDict(dict[str, Any]):
    """The tensors of a file, which are read when they are used. Names may be changed before.

    Only `keys`, `in` and the length need no reading.
    """

    def __init__(self, tensors: Tensors | MappedTensors) -> None:
        super().__init__({name: LazyTensor(tensors, name) for name in tensors.table.names()})
        self._tensors = tensors
        self._is_planned = False
        self._left_out: set[str] = set()
        self._is_renaming = False

    @contextlib.contextmanager
    def planned(self, names: set[str] | None, device_of: Callable[[str], str]) -> Iterator[None]:
        """Read ahead in the order of the names, in a `with` statement.

        Args:
            names: What is going to be taken. None means all. `items` has others as tensors that are not read.
            device_of: Returns the device to read to.
        """
        lazy = [(name, it.name) for name, it in super().items() if isinstance(it, LazyTensor)]
        self._left_out = set() if names is None else {name for name, _ in lazy if name not in names}
        self._tensors.plan([(inner, device_of(name)) for name, inner in lazy if name not in self._left_out])
        self._is_planned = True
        try:
            yield
        finally:
            self._tensors.close()

    @contextlib.contextmanager
    def renaming(self) -> Iterator[None]:
        """Let `pop` return tensors that are not read, in a `with` statement, because they only get other names."""
        self._is_renaming = True
        try:
            yield
        finally:
            self._is_renaming = False

    def _read(self, name: str, value: Any) -> Any:
        if not isinstance(value, LazyTensor):
            return value
        if not self._is_planned:
            self._tensors.plan([(it.name, "cpu") for it in super().values() if isinstance(it, LazyTensor)])
            self._is_planned = True
        return value[...]

    def __getitem__(self, name: str) -> Any:
        value = self._read(name, super().__getitem__(name))
        # Quantisers look at a tensor several times.
        super().__setitem__(name, value)
        return value

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default

    def pop(self, name: str, *default: Any) -> Any:
        value = super().pop(name, *default)
        return value if self._is_renaming else self._read(name, value)

    def items(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]
        for name in list(self):
            value = super().__getitem__(name)
            yield name, value if name in self._left_out else self._read(name, value)

    def values(self) -> Iterator[Any]:  # type: ignore[override]
        for _, value in self.items():
            yield value

    def copy(self) -> StateDict:
        copied = StateDict.__new__(StateDict)
        dict.__init__(copied)
        dict.update(copied, {name: dict.__getitem__(self, name) for name in self})
        copied.__dict__.update(self.__dict__)
        return copied
