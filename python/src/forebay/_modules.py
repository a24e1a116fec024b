"""Weights of PyTorch's modules that are in the device a part at a time."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

from . import _native
from ._absent import Absent, Weight, each
from ._convert import memory_of, names_of_types, require, to_torch, torch_dtype
from ._errors import Error, OptionError, OutOfMemoryError
from ._load import bytes_of, open_table
from ._mapped import MappedTensors, can_map, file_of

torch = require("torch")

_GIB = 1 << 30
_NAMES = names_of_types()
# Types of packs whose elements are BF16.
_COMPACT = ("BF16_C256", "BF16_C2048")
# Memory for weights that wait in the device to be decoded: at most this, and at most this share of the weights.
_STAGE_MAX, _STAGE_SHARE = _GIB, 0.1
# Pinned memory. More is copied no faster.
_PINNED = 64 << 20


def _is_quantised(kind: str) -> bool:
    return kind not in _NAMES.values() and kind not in _COMPACT and _native.CodedModules.can_become(kind, "F32")


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
    decoded: int
    """Groups that stayed in the device coded, and were decoded for a use."""
    late_loads: int
    """Groups that a module waited for before they were on their way."""
    waited_seconds: float
    """Time for which modules waited until weights were on their way."""
    device_bytes: int
    """Bytes that are reserved in the device for weights, and for those that wait to be decoded. In RAM, the memory has the size of what is used."""
    pinned_bytes: int
    """Bytes of pinned RAM."""
    weight_bytes: int
    """Bytes of all weights."""
    ram_bytes: int
    """Bytes of weights in RAM, coded."""
    buffer_bytes: int
    """Bytes of RAM in which weights are read."""
    file_bytes: int
    """Bytes of the weights that are in files, as the files have them."""
    read_bytes: int
    """Bytes that were read from them since the stream began."""


class PassPlan(NamedTuple):
    """What a pass is expected to take, from the times and rates of earlier ones."""

    call: str
    """The class of the module and its method, such as "FluxTransformer2DModel.forward"."""
    seconds: float
    """Time of a pass."""
    compute_seconds: float
    """Time that the module itself needs, if all weights are there."""
    load_seconds: float
    """Time in which the weights that do not stay come from RAM into the device."""
    read_seconds: float
    """Time in which the weights that are not in RAM are read."""
    limit: str
    """What takes longest: "compute", "bus" or "disk"."""
    seconds_with_more_vram: float
    """Time of a pass with 1 GiB more of `vram`."""
    seconds_with_more_ram: float
    """Time of a pass with 1 GiB more of `ram`."""


class _Unit:
    """A module with weights of its own."""

    def __init__(self, module: Any, number: int):
        self.module, self.number, self.in_use = module, number, 0
        # Modules with parameters, their names there, and their weights: the module, and perhaps modules inside.
        self.names: list[tuple[Any, str, Weight]] = []
        self.groups: list[int] = []
        # The last places of its groups, what is installed then, and the versions.
        self.made: tuple[list[int], list[Any], list[Any]] | None = None


# These give weights of modules inside to functions of their own, which look at what they are before they compute.
_TOGETHER = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)


class ModuleStream:
    """The weights of modules, in RAM or in files, and in the device a part at a time. `forebay.torch.stream` makes one.

    Results of the modules equal those with all weights in the device. Use it in a `with` statement, or call `close`.
    """

    def __init__(self, modules: list[Any], device: Any, codes: bool):
        self.device = device
        self._modules, self._units = modules, list[_Unit]()
        self._closed, self._lock, self._here = False, threading.Lock(), threading.local()
        self._weights: list[Weight] = []
        self._stays: list[int] = []
        self._buffers: list[tuple[Any, str, Any]] = []
        self._hooks: list[Any] = []
        self._calls: list[tuple[Any, str, Any]] = []
        # Modules and the methods whose calls are passes.
        self._passes: list[tuple[Any, str]] = []
        self._pool: Any = None
        # The memory of the device as elements of each type.
        self._pools: dict[Any, Any] = {}
        self._last: ModuleStatistics | None = None
        self._native: Any = None
        self._codes = codes
        # Files with weights, and where those of parameters are.
        self._tables: list[_native.Table] = []
        self._places: dict[int, tuple[int, int, int, int]] = {}
        # Maps of these files, where the weights go at the end.
        self._maps: dict[int, MappedTensors | None] = {}
        # The types of those whose elements the file has in another form.
        self._kinds: dict[int, tuple[str, str | None]] = {}

    def _begin(self, sources: list[Any], vram: int, ram: int | None, pinned: int) -> None:
        for module, source in zip(self._modules, sources, strict=True):
            if source is not None:
                self._find(module, open_table(source))
        self._find_mapped()
        _check(self._modules, self._places)
        if ram is None and self._places:
            ram = _native.default_ram()
        self._coded = _native.CodedModules(max(1, len(os.sched_getaffinity(0))), self._codes, ram)
        try:
            for table in self._tables:
                self._coded.add_source(table)
            self._take()
            self._coded.finish()
            self._start(vram, pinned)
        except BaseException:
            self._give_back(failed=True)
            raise

    def _find(self, module: Any, table: _native.Table) -> None:
        """Find the weights of a module that has none, and its buffers, by their names."""
        source, names = len(self._tables), set(table.names())
        self._tables.append(table)
        is_quantised: bool | None = None
        missing: dict[int, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if parameter.device.type != "meta" or id(parameter) in self._places:
                continue
            if name not in names:
                missing.setdefault(id(parameter), name)
                continue
            missing.pop(id(parameter), None)
            kind, elements, stored, nbytes = table.facts(name)
            is_compact = kind in _COMPACT
            becomes = _NAMES.get(parameter.dtype, "")
            if kind != becomes and is_quantised is None:
                # All weights of such files may become other types.
                is_quantised = any(_is_quantised(table.facts(name)[0]) for name in names)
            if is_quantised and kind != becomes and _native.CodedModules.can_become(kind, becomes):
                dtype, shape = parameter.dtype, elements
                self._kinds[id(parameter)] = (kind, becomes)
            else:
                dtype, shape = (torch.bfloat16, elements) if is_compact else (torch_dtype(name, kind), stored)
            if (dtype, tuple(shape)) != (parameter.dtype, tuple(parameter.shape)):
                raise OptionError(
                    f"weight {name} is {parameter.dtype} of shape {tuple(parameter.shape)}, but {dtype} of shape {tuple(shape)} in "
                    f"its file, where its type is {kind}: make the module with the types of the file"
                )
            if not parameter.is_contiguous():
                raise OptionError(f"weight {name} is not contiguous, as those of files are")
            file, offset, _ = table.place(name)
            self._places[id(parameter)] = (source, file, offset, nbytes)
            if is_compact:
                self._kinds[id(parameter)] = (kind, None)
        missing = {key: name for key, name in missing.items() if key not in self._places}
        if missing:
            first = sorted(missing.values())[:3]
            raise OptionError(f"{len(missing)} weights are not in the source, such as {', '.join(first)}")
        for name, buffer in module.named_buffers():
            if buffer.device.type != "meta":
                continue
            if name not in names:
                raise OptionError(f"buffer {name} has no elements, and is not in the source: give it some before")
            owner, _, inner = name.rpartition(".")
            loaded = to_torch(_native.load(table, [name], None, "cpu", False, None)[0])
            module.get_submodule(owner)._buffers[inner] = loaded.to(buffer.dtype)

    def _find_mapped(self) -> None:
        """Find the weights that are views of mapped files."""
        numbers: dict[int, int] = {}
        for module in self._modules:
            for parameter in module.parameters():
                if parameter.device.type != "cpu" or not _is_dense(parameter) or parameter.numel() == 0:
                    continue
                nbytes = parameter.numel() * parameter.element_size()
                found = file_of(parameter.data_ptr(), nbytes)
                if found is None:
                    continue
                table, file, offset = found
                if id(table) not in numbers:
                    numbers[id(table)] = len(self._tables)
                    self._tables.append(table)
                self._places[id(parameter)] = (numbers[id(table)], file, offset, nbytes)

    def _take(self) -> None:
        """Take the weights of all modules over."""
        units = {id(module): module for root in self._modules for module in root.modules()}
        users: dict[int, int] = {}
        for module in units.values():
            for parameter in {id(it): it for it in module._parameters.values() if it is not None}.values():
                users[id(parameter)] = users.get(id(parameter), 0) + 1
        known: dict[int, tuple[Weight, Any]] = {}
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
            new: list[tuple[Weight, Any]] = []
            for it, name, parameter in named:
                if id(parameter) not in known:
                    known[id(parameter)] = (Weight(parameter), parameter)
                    new.append(known[id(parameter)])
                unit.names.append((it, name, known[id(parameter)][0]))
            # Weights of several modules come alone, so that each of these brings only its own besides.
            own = [it for it in new if users[id(it[1])] == 1]
            stays = len(together) == 1 and any(True for _ in module.children())
            for group in [own, *([it] for it in new if it not in own)]:
                if group:
                    self._code(group, stays)
            unit.groups = list(dict.fromkeys(weight.group for _, _, weight in unit.names))
            self._units.append(unit)
            # What is coded is freed, once all modules that share it have been seen.
            for it, name, weight in unit.names:
                if weight.absent is None:
                    weight.absent = Absent.of(self, weight)
                it._parameters[name] = weight.absent
            for _, parameter in own:
                del known[id(parameter)]
            del named, new, own, parameter
        self._weights = list(dict.fromkeys(weight for unit in self._units for _, _, weight in unit.names))
        if not self._weights:
            raise OptionError("the module has no weights")

    def _code(self, together: list[tuple[Weight, Any]], stays: bool) -> None:
        origins: list[tuple[Any, str, str | None]] = []
        kept = []
        for weight, parameter in together:
            origin: Any = self._places.get(id(parameter))
            if origin is None:
                dense = weight.dense(parameter)
                kept.append(dense)
                origin = memory_of(dense)
            else:
                # It takes no RAM.
                weight.original = parameter
            kind = _NAMES.get(weight.dtype) or str(weight.dtype)
            origins.append((origin, *self._kinds.get(id(parameter), (kind, None))))
        group, places = self._coded.add(origins)
        for index, ((weight, _), at) in enumerate(zip(together, places, strict=True)):
            weight.group, weight.index, weight.at = group, index, at
        if stays:
            self._stays.append(group)

    def _start(self, vram: int, pinned: int) -> None:
        groups = 1 + max(weight.group for weight in self._weights)
        # Weights that are used outside of their modules are units of their own.
        units = [unit.groups for unit in self._units] + [[group] for group in range(groups)]
        inside = {id(unit.module): unit.number for unit in self._units}
        self._passes = passes = [(root, name) for root in self._modules for name in _passes_of(root)]
        orders = [[inside[id(it)] for it in root.modules() if id(it) in inside] for root, _ in passes]
        for root in self._modules:
            for module in root.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None and buffer.device != self.device:
                        self._buffers.append((module, name, buffer))
                        module._buffers[name] = buffer.to(self.device)
        outside = self._coded.statistics()
        stage = min(_STAGE_MAX, int((outside["ram_bytes"] + outside["file_bytes"]) * _STAGE_SHARE))
        gpu = None if self.device.type == "cpu" else self.device.index
        self._native = _native.ModuleStream(self._coded, units, self._stays, orders, gpu, vram, stage, pinned)
        if gpu is not None:
            with torch.inference_mode(False):
                self._pool = torch.from_dlpack(self._native.memory(0))
        for unit in self._units:
            self._replace(unit.module, "forward", self._with_weights(unit, unit.module.forward))
            for module in {id(it): it for it, _, _ in unit.names}.values():
                self._hooks.append(module.register_state_dict_post_hook(functools.partial(self._save, unit)))
        for number, (root, name) in enumerate(passes):
            self._replace(root, name, self._as_pass(number, getattr(root, name)))

    def _replace(self, module: Any, name: str, call: Any) -> None:
        self._calls.append((module, name, module.__dict__.get(name)))
        setattr(module, name, torch.compiler.disable(call))

    def _queue(self) -> int:
        return 0 if self._pool is None else torch._C._cuda_getCurrentRawStream(self.device.index)

    def _as_pass(self, number: int, call: Any) -> Any:
        @functools.wraps(call)
        def passes(*args: Any, **kwargs: Any) -> Any:
            # A pass may call other methods that are passes.
            if getattr(self._here, "runs", False):
                return call(*args, **kwargs)
            self._native.begin(number)
            self._here.runs = True
            try:
                result = call(*args, **kwargs)
            finally:
                self._here.runs = False
            self._native.end()
            return result

        return passes

    def _with_weights(self, unit: _Unit, forward: Any) -> Any:
        acquire, release, lock, queue = self._acquire, self._native.release, self._lock, self._queue
        absent = [(module._parameters, name, weight.absent) for module, name, weight in unit.names]

        @functools.wraps(forward)
        def uses(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                each(_refuse_gradients, (args, kwargs))
            places = acquire(unit.number, queue())
            try:
                made = unit.made
                if made is None or made[0] != places:
                    made = self._make(unit, places)
                with lock:
                    unit.in_use += 1
                    for parameters, name, parameter in made[1]:
                        parameters[name] = parameter
                try:
                    return forward(*args, **kwargs)
                finally:
                    with lock:
                        unit.in_use -= 1
                        if unit.in_use == 0:
                            for parameters, name, parameter in absent:
                                parameters[name] = parameter
                    for weight, parameter, version in made[2]:
                        if parameter._version != version:
                            self._change(weight, parameter)
            finally:
                # What computes on another stream by now is ordered by the caller, as for any tensor.
                release(unit.number, queue())

        return uses

    def _acquire(self, unit: int, queue: int) -> list[int]:
        if self._closed:
            raise Error("the stream of the module's weights is closed")
        if self._pool is not None and torch._C._cuda_isCurrentStreamCapturing():
            raise OptionError("a CUDA graph cannot have a streamed module, whose weights are elsewhere in each pass: capture parts without it")
        return self._native.acquire(unit, queue)

    def _make(self, unit: _Unit, places: list[int]) -> tuple[list[int], list[Any], list[Any]]:
        """Return the parameters of a module whose groups are at these places, and their versions."""
        of_group = dict(zip(unit.groups, places, strict=True))
        memories: dict[int, Any] = {}
        # Outside of inference mode, so that calls without it may use what one within it made.
        with torch._C._InferenceMode(False):
            made = [(module, name, weight, *self._made(weight, of_group[weight.group], memories)) for module, name, weight in unit.names]
        install = [(module._parameters, name, parameter) for module, name, _, parameter, _ in made]
        all_made = (places, install, [(weight, parameter, version) for _, _, weight, parameter, version in made])
        # In RAM, a place does not tell which memory it is.
        unit.made = all_made if self._pool is not None else None
        return all_made

    def _change(self, weight: Weight, made: Any) -> None:
        """Code a weight again that was changed in the device."""
        with torch.inference_mode(False), torch.no_grad():
            dense = weight.dense(made).cpu()
        with self._lock:
            self._coded.change(weight.group, weight.index, memory_of(dense))
            self._native.change(weight.group)
            weight.original = None
            # Those of other places are views of other weights by now.
            weight.made.clear()
            for unit in self._units:
                unit.made = None

    def _made(self, weight: Weight, place: int, memories: dict[int, Any]) -> tuple[Any, int]:
        """Return the parameter with its elements, whose group is at this place, and its version. The caller has left inference mode."""
        made = weight.made.get(place)
        if made is not None:
            return made
        if self._pool is None:
            if weight.group not in memories:
                memories[weight.group] = torch.from_dlpack(self._native.memory(place))
            memory, at = _elements(memories[weight.group], weight.dtype), weight.at
        else:
            if weight.dtype not in self._pools:
                self._pools[weight.dtype] = _elements(self._pool, weight.dtype)
            memory, at = self._pools[weight.dtype], place + weight.at
        new = weight.parameter(weight.view_of(memory, at))
        made = (new, new._version)
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
                        with self._lock, torch._C._InferenceMode(False):
                            made[id(of)] = (of, *self._made(of._of[1], place, memories))
            real = lambda of: made[id(of)][1] if id(of) in made else None  # noqa: E731
            result = func(*each(real, args), **each(real, kwargs))
            for of, it, version in made.values():
                if it._version != version:
                    self._change(of._of[1], it)
            absent = {id(it): of for of, it, _ in made.values()}
            memory = {it.untyped_storage().data_ptr() for _, it, _ in made.values()}

            def lasting(of: Any) -> Any:
                if id(of) in absent:
                    return absent[id(of)]
                # A view would show other weights later.
                is_view = of.layout == torch.strided and of.untyped_storage().data_ptr() in memory
                return of.clone() if is_view else None

            return each(lasting, result)
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

    def _read(self, weight: Weight) -> Any:
        """Return the elements of a weight in RAM."""
        data = bytearray(self._coded.read(weight.group, weight.index))
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return weight.of_bytes(flat)

    def statistics(self) -> ModuleStatistics:
        """Return what the stream has done since it began."""
        if self._last is not None:
            return self._last
        return ModuleStatistics(**self._native.statistics(), **self._coded.statistics())

    def plan(self) -> list[PassPlan]:
        """Return what passes of each module are expected to take, for those that were called at least twice."""
        if self._closed:
            raise Error("the stream of the module's weights is closed")
        plans = []
        for root, (module, name) in enumerate(self._passes):
            found = self._native.predict(root, 0, 0)
            if found is None:
                continue
            seconds, *parts = found
            limit = ("compute", "bus", "disk")[parts.index(max(parts))]
            more = [self._native.predict(root, *extra) for extra in ((_GIB, 0), (0, _GIB))]
            with_more = [seconds if it is None else it[0] for it in more]
            plans.append(PassPlan(f"{type(module).__name__}.{name}", seconds, *parts, limit, *with_more))
        return plans

    def close(self) -> None:
        """Give the modules their weights back, as ordinary parameters in RAM. Those of safetensors and GGUF files are views of the mapped
        files, which take no RAM until they are used."""
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

    def _give_back(self, failed: bool = False) -> None:
        for module, name, before in reversed(self._calls):
            if name in module.__dict__:
                if before is None:
                    delattr(module, name)
                else:
                    setattr(module, name, before)
        for hook in self._hooks:
            hook.remove()
        back: dict[int, Any] = {}
        for unit in self._units:
            for module, name, weight in unit.names:
                if weight.absent is not None and module._parameters[name] is weight.absent:
                    if id(weight) not in back:
                        back[id(weight)] = self._ordinary(weight, failed)
                    module._parameters[name] = back[id(weight)]
        for module, name, buffer in self._buffers:
            module._buffers[name] = module._buffers[name].to(buffer.device)
        self._calls, self._hooks, self._buffers, self._pool, self._pools = [], [], [], None, {}
        for weight in self._weights:
            weight.made.clear()
        for unit in self._units:
            unit.made = None

    def _ordinary(self, weight: Weight, failed: bool) -> Any:
        """Return a weight as an ordinary parameter."""
        original = weight.original
        if original is not None and (failed or original.device.type != "meta"):
            return original
        if original is not None and id(original) not in self._kinds:
            source, *place = self._places[id(original)]
            if source not in self._maps:
                self._maps[source] = MappedTensors(self._tables[source]) if can_map(self._tables[source]) else None
            if self._maps[source] is not None:
                view = self._maps[source].view(place, weight.dtype, weight.shape)
                return weight.parameter(view).requires_grad_(weight.requires_grad)
        return weight.parameter(self._read(weight)).requires_grad_(weight.requires_grad)

    def __enter__(self) -> ModuleStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Methods of modules that are called instead of `forward`, such as those of autoencoders.
_PASSES = ("forward", "encode", "decode")


def _passes_of(module: Any) -> list[str]:
    return [name for name in _PASSES if callable(getattr(module, name, None))]


def _elements(memory: Any, dtype: Any) -> Any:
    """Return bytes as elements of a type, but for those at the end that are none."""
    return memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def _refuse_gradients(tensor: Any) -> None:
    if tensor.requires_grad:
        raise OptionError("a streamed module computes no gradients: call it under torch.no_grad() or torch.inference_mode()")


def _check(modules: list[Any], places: dict[int, Any]) -> None:
    for module in modules:
        if any(it.training for it in module.modules()):
            raise OptionError("a streamed module is not trained: call module.eval() first")
        for name, parameter in module.named_parameters():
            if isinstance(parameter, Absent):
                raise OptionError(f"weight {name} is streamed already")
            if not Weight.can_be(parameter):
                raise OptionError(f"weight {name} is of type {type(parameter).__name__}, which cannot be streamed")
            if id(parameter) in places:
                continue
            if parameter.device.type == "meta":
                raise OptionError(f"weight {name} has no elements: it is on the device meta, and not in a source")
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
    module: Any,
    device: Any = "cuda:0",
    vram: int | str = "8GiB",
    ram: int | str | None = None,
    source: Any = None,
    codec: str = "auto",
    pinned: int | str = "auto",
) -> ModuleStream:
    """Let a module use a device whose memory has no room for its weights.

    Weights in RAM are taken over: they are coded without loss (BF16, FP16 and FP8 become smaller by about a third), and come into the device a
    part at a time, ahead of their use. Weights of a source are read from its files instead, also ahead of their use, as far as RAM has no
    room for them. Results equal those of the module in the device, to the bit. Inputs must be in the device.

    Args:
        module: A module in evaluation mode, or several that share the memory, such as the parts of a pipeline. Its weights are in RAM, or
            on the device "meta".
        device: "cuda:N", or "cpu" to keep only a part of the weights decoded in RAM.
        vram: Memory of the device for weights, such as "8GiB" or a number of bytes. What the module computes needs more.
        ram: RAM for weights, and for reading them. None is three quarters of the free RAM, or, without files, as much as the weights need.
        source: What has the weights that are on "meta", by their names: safetensors files or their folder, a GGUF file, a pack, or URLs. For
            several modules, a list with one for each, or None.
        codec: "auto", or "none" to keep weights as they are.
        pinned: Pinned RAM for copies, at least 8 MiB. "auto" is 64 MiB.

    Raises:
        OptionError: The module is in training mode, or has weights that cannot be streamed or are not in the source.
        OutOfMemoryError: The memory has no room for the weights of one module, or RAM for those that are not in files.
        FileNotFoundError, FormatError, ReadError: As for `forebay.load`.
        DeviceError: The GPU cannot be used.
    """
    is_one = isinstance(module, torch.nn.Module) or not isinstance(module, Iterable)
    modules = [module] if is_one else list(module)
    sources = [source] if is_one else [None] * len(modules) if source is None else list(source)
    if len(sources) != len(modules):
        raise OptionError(f"there are {len(modules)} modules, but {len(sources)} sources: give one for each, or None")
    for it in modules:
        if not isinstance(it, torch.nn.Module):
            raise OptionError(f"{type(it).__name__} is no torch.nn.Module")
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
    made = ModuleStream(modules, place, codec != "none")
    made._begin(sources, memory, None if ram is None else bytes_of(ram), _PINNED if pinned == "auto" else bytes_of(pinned))
    return made
