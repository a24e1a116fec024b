"""Weights of PyTorch's modules that are in the device a part at a time."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from . import _native
from ._convert import require
from ._errors import Error, OptionError, OutOfMemoryError
from ._load import bytes_of

torch = require("torch")

_GIB = 1 << 30
# Pinned memory: at most this, and at most this share of the weights.
_PINNED_MAX, _PINNED_SHARE = _GIB, 0.1


class ModuleStatistics(NamedTuple):
    """What a stream has done since it began."""

    passes: int
    """Passes that ended."""
    deviations: int
    """Uses of modules that were not the expected ones."""
    loads: int
    """Groups of weights that came into the device: those of one module."""
    loaded_bytes: int
    """Their bytes in the device."""
    late_loads: int
    """Groups that a module waited for before they were on their way."""
    waited_seconds: float
    """Time for which modules waited until weights were on their way."""
    weight_bytes: int
    """Bytes of all weights."""
    ram_bytes: int
    """Bytes of their coded form in RAM."""


class _Weight:
    """A parameter of one or several modules."""

    def __init__(self, parameter: Any):
        self.shape, self.strides, self.dtype = tuple(parameter.shape), parameter.stride(), parameter.dtype
        self.nbytes = parameter.numel() * parameter.element_size()
        self.requires_grad = parameter.requires_grad
        # The order of dimensions in which the elements are dense.
        self.order = sorted(range(len(self.shape)), key=lambda dim: (-self.strides[dim], dim))
        self.group = self.index = self.at = 0
        self.absent: Any = None
        self.made: dict[int, Any] = {}

    def dense(self, parameter: Any) -> Any:
        """Return the elements as a contiguous tensor, in the order of their addresses."""
        return parameter.detach().permute(self.order).contiguous()

    def of_bytes(self, flat: Any) -> Any:
        """Return the parameter whose bytes these are."""
        shape = [self.shape[dim] for dim in self.order]
        inverse = [self.order.index(dim) for dim in range(len(self.order))]
        return flat.view(self.dtype).view(shape).permute(inverse)


class _Unit:
    """A module with weights of its own."""

    def __init__(self, module: Any, number: int):
        self.module, self.number, self.in_use = module, number, 0
        # Modules with parameters, their names there, and their weights: the module, and perhaps modules inside.
        self.names: list[tuple[Any, str, _Weight]] = []
        self.groups: list[int] = []
        self.forward: Any = None


# These give weights of modules inside to functions of their own, which look at what they are before they compute.
_TOGETHER = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)

# Functions of tensors that need no elements.
_DESCRIBE = {
    getattr(torch.Tensor, name)
    for name in ("size", "stride", "numel", "nelement", "dim", "element_size", "is_floating_point", "is_complex", "is_contiguous",
                 "storage_offset", "__len__", "__hash__", "ndimension", "is_shared", "is_inference", "is_pinned",
                 "is_signed", "is_conj", "is_neg", "has_names")
    if hasattr(torch.Tensor, name)
}  # fmt: skip
# Attributes that are tensors with the elements.
_ELEMENTS = {"T", "mT", "H", "mH", "real", "imag"}
_MOVES = {getattr(torch.Tensor, name) for name in ("to", "cuda", "cpu", "float", "half", "bfloat16", "double")}


class _Absent(torch.nn.Parameter):
    """Stands for a parameter whose elements are not in the device. It tells shape, type and device. Whatever needs the elements brings
    them for as long as it takes."""

    _of: tuple[Any, _Weight]

    @staticmethod
    def of(stream: Any, weight: _Weight) -> Any:
        meta = torch.empty_strided(weight.shape, weight.strides, dtype=weight.dtype, device="meta")
        new = torch.Tensor._make_subclass(_Absent, meta, False)
        new._of = (stream, weight)
        return new

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], _Absent) else None
        if first is not None:
            name = getattr(getattr(func, "__self__", None), "__name__", "")
            kind = getattr(func, "__name__", "")
            device = first._of[0].device
            if kind == "__get__":
                if name in ("device", "is_cuda", "is_cpu", "is_meta"):
                    return device if name == "device" else name == f"is_{device.type}"
                if name == "data":
                    return first
                if name not in _ELEMENTS:
                    return super().__torch_function__(func, types, args, kwargs)
            elif kind == "__set__" and name in ("requires_grad", "grad", "data"):
                if name == "grad" or args[1] is first or args[1] is False:
                    return None
                raise OptionError(f"{name} of a streamed weight cannot be set: close the stream first")
            elif func in _DESCRIBE:
                return super().__torch_function__(func, types, args, kwargs)
            elif func is torch.Tensor.get_device:
                return -1 if device.type == "cpu" else device.index
            elif func is torch.Tensor.detach:
                return first
            elif func is torch.Tensor.requires_grad_ and not [*args[1:], *kwargs.values(), True][0]:
                return first
            elif func is torch.Tensor.__repr__:
                return f"<streamed weight of shape {tuple(first._of[1].shape)}, {first._of[1].dtype}, on {device}>"
            elif func in _MOVES:
                return first._of[0]._moved(first, func, args[1:], kwargs)
            elif kind.endswith("_") and not kind.endswith("__") or kind in ("__setitem__", "__iadd__", "__imul__"):
                raise OptionError("weights of a streamed module cannot be changed: close the stream first")
        found: list[_Absent] = []
        _each(lambda of: found.append(of) if isinstance(of, _Absent) else None, (args, kwargs))
        return found[0]._of[0]._with_elements(found, func, args, kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        raise OptionError("a streamed module cannot be copied: close the stream first")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OptionError("a streamed module cannot be pickled: close the stream first, or save its state_dict()")


def _each(do: Any, of: Any) -> Any:
    """Return the same with each tensor in tuples, lists and dicts replaced by what `do` returns, unless that is None."""
    if isinstance(of, torch.Tensor):
        new = do(of)
        return of if new is None else new
    if isinstance(of, tuple) and hasattr(of, "_fields"):
        return type(of)(*(_each(do, part) for part in of))
    if isinstance(of, (tuple, list)):
        return type(of)([_each(do, part) for part in of])
    if isinstance(of, dict):
        return {key: _each(do, part) for key, part in of.items()}
    return of


class ModuleStream:
    """The weights of modules, coded without loss in RAM, and in the device a part at a time. `forebay.torch.stream` makes one.

    Results of the modules equal those with all weights in the device. Use it in a `with` statement, or call `close`.
    """

    def __init__(self, modules: list[Any], device: Any, vram: int, codec: str, pinned: int | None):
        self.device = device
        self._modules, self._units = modules, list[_Unit]()
        self._closed, self._lock, self._here = False, threading.Lock(), threading.local()
        self._weights: list[_Weight] = []
        self._buffers: list[tuple[Any, str, Any]] = []
        self._hooks: list[Any] = []
        self._roots: list[tuple[Any, Any]] = []
        self._pool: Any = None
        self._last: ModuleStatistics | None = None
        self._native: Any = None
        _check(modules)
        self._coded = _native.CodedModules(max(1, len(os.sched_getaffinity(0))))
        try:
            self._take(codec != "none")
            self._start(vram, pinned)
        except BaseException:
            self._give_back()
            raise

    def _take(self, codes: bool) -> None:
        """Take the weights of all modules over."""
        units = {id(module): module for root in self._modules for module in root.modules()}
        users: dict[int, int] = {}
        for module in units.values():
            for parameter in {id(it): it for it in module._parameters.values() if it is not None}.values():
                users[id(parameter)] = users.get(id(parameter), 0) + 1
        known: dict[int, tuple[_Weight, Any]] = {}
        inside: set[int] = set()
        for module in units.values():
            if id(module) in inside:
                continue
            together = list(module.modules()) if isinstance(module, _TOGETHER) else [module]
            inside.update(id(it) for it in together)
            named = [(it, name, of) for it in together for name, of in it._parameters.items() if of is not None]
            if not named:
                continue
            unit = _Unit(module, len(self._units))
            new: list[tuple[_Weight, Any]] = []
            for it, name, parameter in named:
                if id(parameter) not in known:
                    known[id(parameter)] = (_Weight(parameter), parameter)
                    new.append(known[id(parameter)])
                unit.names.append((it, name, known[id(parameter)][0]))
            # Weights of several modules come alone, so that each of these brings only its own besides.
            own = [it for it in new if users[id(it[1])] == 1]
            stays = len(together) == 1 and any(True for _ in module.children())
            for group in [own, *([it] for it in new if it not in own)]:
                if group:
                    self._code(group, stays, codes)
            unit.groups = list(dict.fromkeys(weight.group for _, _, weight in unit.names))
            self._units.append(unit)
            # What is coded is freed, once all modules that share it have been seen.
            for it, name, weight in unit.names:
                if weight.absent is None:
                    weight.absent = _Absent.of(self, weight)
                it._parameters[name] = weight.absent
            for _, parameter in own:
                del known[id(parameter)]
            del named, new, own, parameter
        self._weights = list(dict.fromkeys(weight for unit in self._units for _, _, weight in unit.names))
        if not self._weights:
            raise OptionError("the module has no weights")

    def _code(self, together: list[tuple[_Weight, Any]], stays: bool, codes: bool) -> None:
        buffers = []
        kept = []
        for weight, parameter in together:
            dense = weight.dense(parameter)
            kept.append(dense)
            memory = (ctypes.c_uint8 * weight.nbytes).from_address(dense.data_ptr()) if weight.nbytes else b""
            buffers.append((memoryview(memory).cast("B"), str(weight.dtype).rpartition(".")[2]))
        group = self._coded.add(buffers, stays, codes)
        for index, ((weight, _), at) in enumerate(zip(together, self._coded.places(group), strict=True)):
            weight.group, weight.index, weight.at = group, index, at

    def _start(self, vram: int, pinned: int | None) -> None:
        groups = 1 + max(weight.group for weight in self._weights)
        # Weights that are used outside of their modules are units of their own.
        units = [unit.groups for unit in self._units] + [[group] for group in range(groups)]
        inside = {id(unit.module): unit.number for unit in self._units}
        orders = [[inside[id(it)] for it in root.modules() if id(it) in inside] for root in self._modules]
        for root in self._modules:
            for module in root.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None and buffer.device != self.device:
                        self._buffers.append((module, name, buffer))
                        module._buffers[name] = buffer.to(self.device)
        _, ram = self._coded.sizes()
        if pinned is None:
            pinned = min(_PINNED_MAX, int(ram * _PINNED_SHARE))
        gpu = None if self.device.type == "cpu" else self.device.index
        self._native = _native.ModuleStream(self._coded, units, orders, gpu, vram, pinned)
        if gpu is not None:
            with torch.inference_mode(False):
                self._pool = torch.from_dlpack(self._native.memory(0))
        for unit in self._units:
            unit.forward = unit.module.__dict__.get("forward")
            unit.module.forward = self._with_weights(unit, unit.module.forward)
            for module in {id(it): it for it, _, _ in unit.names}.values():
                self._hooks.append(module.register_state_dict_post_hook(functools.partial(self._save, unit)))
        for number, root in enumerate(self._modules):
            self._roots.append((root, root.__dict__.get("forward")))
            root.forward = self._as_pass(number, root.forward)

    def _queue(self) -> int:
        return 0 if self._pool is None else torch.cuda.current_stream(self.device).cuda_stream

    def _as_pass(self, number: int, forward: Any) -> Any:
        @functools.wraps(forward)
        def passes(*args: Any, **kwargs: Any) -> Any:
            self._native.begin(number)
            result = forward(*args, **kwargs)
            self._native.end()
            return result

        return passes

    def _with_weights(self, unit: _Unit, forward: Any) -> Any:
        @functools.wraps(forward)
        def uses(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                _each(_refuse_gradients, (args, kwargs))
            queue = self._queue()
            places = self._acquire(unit.number, queue)
            try:
                self._install(unit, dict(zip(unit.groups, places, strict=True)))
                try:
                    return forward(*args, **kwargs)
                finally:
                    self._uninstall(unit)
            finally:
                # What computes on another stream by now is ordered by the caller, as for any tensor.
                self._native.release(unit.number, self._queue())

        return uses

    def _acquire(self, unit: int, queue: int) -> list[int]:
        if self._closed:
            raise Error("the stream of the module's weights is closed")
        return self._native.acquire(unit, queue)

    def _install(self, unit: _Unit, places: dict[int, int]) -> None:
        memories: dict[int, Any] = {}
        with self._lock:
            for module, name, weight in unit.names:
                module._parameters[name] = self._made(weight, places[weight.group], memories)
            unit.in_use += 1

    def _uninstall(self, unit: _Unit) -> None:
        with self._lock:
            unit.in_use -= 1
            if unit.in_use == 0:
                for module, name, weight in unit.names:
                    module._parameters[name] = weight.absent

    def _made(self, weight: _Weight, place: int, memories: dict[int, Any]) -> Any:
        """Return the parameter with its elements, whose group is at this place."""
        made = weight.made.get(place)
        if made is not None:
            return made
        # Outside of inference mode, so that calls without it may use what one within it made.
        with torch.inference_mode(False), torch.no_grad():
            if self._pool is not None:
                flat = self._pool[place + weight.at : place + weight.at + weight.nbytes]
            else:
                if weight.group not in memories:
                    memories[weight.group] = torch.from_dlpack(self._native.memory(place))
                flat = memories[weight.group][weight.at : weight.at + weight.nbytes]
            made = torch.nn.Parameter(weight.of_bytes(flat), requires_grad=False)
        if self._pool is not None:
            # Groups come to few places, since those that are alike take each other's.
            if len(weight.made) >= 64:
                weight.made.clear()
            weight.made[place] = made
        return made

    def _with_elements(self, found: list[Any], func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function with weights outside of their modules."""
        queue, taken, made = self._queue(), [], {}
        try:
            for group in dict.fromkeys(of._of[1].group for of in found):
                unit = len(self._units) + group
                [place] = self._acquire(unit, queue)
                taken.append(unit)
                memories: dict[int, Any] = {}
                for of in found:
                    if of._of[1].group == group:
                        made[id(of)] = self._made(of._of[1], place, memories)
            memory = {it.untyped_storage().data_ptr() for it in made.values()}
            result = func(*_each(lambda of: made.get(id(of)), args), **_each(lambda of: made.get(id(of)), kwargs))
            # A view would show other weights later.
            is_view = lambda of: of.layout == torch.strided and of.untyped_storage().data_ptr() in memory  # noqa: E731
            return _each(lambda of: of.clone() if is_view(of) else None, result)
        finally:
            for unit in taken:
                self._native.release(unit, queue)

    def _moved(self, weight: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the weight itself, if it need not move, as `Module.to` asks for all of them."""
        meta = torch.empty((), dtype=weight._of[1].dtype, device=self.device)
        new = func(meta, *args, **kwargs)
        if new.device == self.device and new.dtype == meta.dtype:
            return weight
        raise OptionError(f"a streamed module stays on {self.device} with its types: close the stream first")

    def _save(self, unit: _Unit, module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        for owner, name, weight in unit.names:
            if owner is module and prefix + name in state:
                state[prefix + name] = self._read(weight)

    def _read(self, weight: _Weight) -> Any:
        """Return the elements of a weight in RAM."""
        data = bytearray(self._coded.read(weight.group, weight.index))
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return weight.of_bytes(flat)

    def statistics(self) -> ModuleStatistics:
        """Return what the stream has done since it began."""
        if self._last is not None:
            return self._last
        total, ram = self._coded.sizes()
        return ModuleStatistics(**self._native.statistics(), weight_bytes=total, ram_bytes=ram)

    def close(self) -> None:
        """Give the modules their weights back, in RAM, as ordinary parameters. Needs RAM for all of them."""
        if self._closed:
            return
        if any(unit.in_use for unit in self._units):
            raise Error("a module is in use: close the stream afterwards")
        self._last, self._closed = self.statistics(), True
        try:
            self._native.close()
        finally:
            self._give_back()
            self._native = self._coded = None

    def _give_back(self) -> None:
        for root, before in reversed(self._roots):
            _set_forward(root, before)
        for unit in self._units:
            if self._native is not None and "forward" in unit.module.__dict__:
                _set_forward(unit.module, unit.forward)
        for hook in self._hooks:
            hook.remove()
        back: dict[int, Any] = {}
        for unit in self._units:
            for module, name, weight in unit.names:
                if weight.absent is not None and module._parameters[name] is weight.absent:
                    if id(weight) not in back:
                        back[id(weight)] = torch.nn.Parameter(self._read(weight), requires_grad=weight.requires_grad)
                    module._parameters[name] = back[id(weight)]
        for module, name, buffer in self._buffers:
            module._buffers[name] = module._buffers[name].to(buffer.device)
        self._roots, self._hooks, self._buffers, self._pool = [], [], [], None
        for weight in self._weights:
            weight.made.clear()

    def __enter__(self) -> ModuleStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _set_forward(module: Any, before: Any) -> None:
    if before is None:
        del module.forward
    else:
        module.forward = before


def _refuse_gradients(tensor: Any) -> None:
    if tensor.requires_grad:
        raise OptionError("a streamed module computes no gradients: call it under torch.no_grad() or torch.inference_mode()")


def _check(modules: list[Any]) -> None:
    for module in modules:
        if not isinstance(module, torch.nn.Module):
            raise OptionError(f"{type(module).__name__} is no torch.nn.Module")
        if any(it.training for it in module.modules()):
            raise OptionError("a streamed module is not trained: call module.eval() first")
        for name, parameter in module.named_parameters():
            if isinstance(parameter, _Absent):
                raise OptionError(f"weight {name} is streamed already")
            if type(parameter) is not torch.nn.Parameter or type(parameter.data) is not torch.Tensor:
                raise OptionError(f"weight {name} is of type {type(parameter).__name__}, which cannot be streamed")
            if parameter.device.type == "meta":
                raise OptionError(f"weight {name} has no elements: it is on the device meta")
            if parameter.device.type != "cpu":
                raise OptionError(f"weight {name} is on {parameter.device}: stream a module whose weights are in RAM")
            if parameter.layout != torch.strided or not _is_dense(parameter):
                raise OptionError(f"weight {name} is sparse, or a view with gaps")


def _is_dense(tensor: Any) -> bool:
    """Return True if each element has an address of its own, and there are none between them."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda of: (of[1], of[0])):
        if size != 1 and stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def stream(
    module: Any, device: Any = "cuda:0", vram: int | str = "8GiB", codec: str = "auto", pinned: int | str = "auto"
) -> ModuleStream:
    """Let a module use a device whose memory has no room for its weights.

    The weights are taken over: they are in RAM, coded without loss (BF16, FP16 and FP8 by about a third), and come into the device a
    part at a time, ahead of their use. Results equal those of the module in the device, to the bit. Inputs must be in the device.

    Args:
        module: A module in evaluation mode whose weights are in RAM, or several that share the memory, such as the parts of a
            pipeline.
        device: "cuda:N", or "cpu" to keep only a part of the weights decoded in RAM.
        vram: Memory of the device for weights, such as "8GiB" or a number of bytes. What the module computes needs more.
        codec: "auto", or "none" to keep weights as they are.
        pinned: Pinned RAM for copies. "auto" is a tenth of the weights, at most 1 GiB.

    Raises:
        OptionError: The module is in training mode, or has weights that cannot be streamed.
        OutOfMemoryError: The memory has no room for the weights of one module.
        DeviceError: The GPU cannot be used.
    """
    modules = list(module) if isinstance(module, Iterable) and not isinstance(module, torch.nn.Module) else [module]
    if codec not in ("auto", "none"):
        raise OptionError(f'codec is {codec!r}, but "auto" or "none" is needed')
    place = torch.device(f"cuda:{device}" if type(device) is int else device)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    if place.type not in ("cuda", "cpu"):
        raise OptionError(f'device is {device!r}, but "cuda:N" or "cpu" is needed')
    memory = bytes_of(vram)
    if place.type == "cuda":
        free, _ = torch.cuda.mem_get_info(place)
        if memory > free:
            raise OutOfMemoryError(f"vram is {memory} bytes, but {place} has {free} bytes free")
    return ModuleStream(modules, place, memory, codec, None if pinned == "auto" else bytes_of(pinned))


def streamed(module: Any) -> Iterator[str]:
    """Return the names of the weights of a module that are streamed."""
    return (name for name, parameter in module.named_parameters() if isinstance(parameter, _Absent))
