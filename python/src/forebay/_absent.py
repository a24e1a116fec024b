"""What stands for a weight while its elements are not in the device."""

from __future__ import annotations

from typing import Any

from ._convert import require
from ._errors import OptionError

torch = require("torch")


class Weight:
    """A parameter of one or several modules."""

    def __init__(self, parameter: Any):
        self.shape, self.strides, self.dtype = tuple(parameter.shape), parameter.stride(), parameter.dtype
        self.nbytes = parameter.numel() * parameter.element_size()
        self.requires_grad = parameter.requires_grad
        # A parameter may be of a class of its own, with facts about the elements.
        self.kind, self.facts = type(parameter), dict(parameter.__dict__)
        # The order of dimensions in which the elements are dense.
        self.order = sorted(range(len(self.shape)), key=lambda dim: (-self.strides[dim], dim))
        self.group = self.index = self.at = 0
        self.absent: Any = None
        # The parameter, if it takes no memory.
        self.original: Any = None
        # What was made of memory, by its place there, with the version that it had then.
        self.made: dict[int, tuple[Any, int]] = {}

    @staticmethod
    def can_be(parameter: Any) -> bool:
        """Return True if the elements are all that a parameter has, beside facts that are no tensors."""
        kind = type(parameter)
        is_plain = kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and isinstance(parameter, torch.nn.Parameter)
        has_tensors = any(isinstance(it, torch.Tensor) for it in parameter.__dict__.values())
        return is_plain and not has_tensors and (kind is torch.nn.Parameter or kind.__setattr__ is torch.nn.Parameter.__setattr__)

    def dense(self, parameter: Any) -> Any:
        """Return the elements as a contiguous tensor, in the order of their addresses."""
        with torch._C.DisableTorchFunctionSubclass():
            return parameter.detach().permute(self.order).contiguous()

    def of_bytes(self, flat: Any) -> Any:
        """Return the elements whose bytes these are."""
        shape = [self.shape[dim] for dim in self.order]
        inverse = [self.order.index(dim) for dim in range(len(self.order))]
        return flat.view(self.dtype).view(shape).permute(inverse)

    def view_of(self, memory: Any, at: int) -> Any:
        """Return the elements that begin at this byte of memory, which is of their type. Changes of other parts do not count as changes
        of it."""
        return memory.as_strided(self.shape, self.strides, at // self.dtype.itemsize).data

    def parameter(self, elements: Any) -> Any:
        """Return elements as a parameter of the same class, without gradients."""
        new = torch.Tensor._make_subclass(self.kind, elements, False)
        if self.facts:
            new.__dict__.update(self.facts)
        return new


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
# Changes of more than elements.
_OTHER_MEMORY = {"requires_grad_", "set_", "resize_", "resize_as_", "share_memory_", "apply_", "map_", "unsqueeze_", "squeeze_", "t_", "transpose_"}
_MOVES = {getattr(torch.Tensor, name) for name in ("to", "cuda", "cpu", "float", "half", "bfloat16", "double")}


class Absent(torch.nn.Parameter):
    """Stands for a parameter whose elements are not in the device. It tells shape, type and device. Whatever needs the elements brings
    them for as long as it takes."""

    _of: tuple[Any, Weight]

    @staticmethod
    def of(stream: Any, weight: Weight) -> Any:
        meta = torch.empty_strided(weight.shape, weight.strides, dtype=weight.dtype, device="meta")
        new = torch.Tensor._make_subclass(Absent, meta, False)
        new.__dict__.update(weight.facts)
        new._of = (stream, weight)
        return new

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], Absent) else None
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
            elif kind in _OTHER_MEMORY:
                raise OptionError(f"{kind} of a streamed weight is not possible: close the stream first")
            elif func is torch.Tensor.__repr__:
                return f"<streamed weight of shape {tuple(first._of[1].shape)}, {first._of[1].dtype}, on {device}>"
            elif func in _MOVES:
                return first._of[0]._moved(first, func, args[1:], kwargs)
        found: list[Absent] = []
        each(lambda of: found.append(of) if isinstance(of, Absent) else None, (args, kwargs))
        return found[0]._of[0]._with_elements(found, func, args, kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        raise OptionError("a streamed module cannot be copied: close the stream first")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OptionError("a streamed module cannot be pickled: close the stream first, or save its state_dict()")


def each(do: Any, of: Any) -> Any:
    """Return the same with each tensor in tuples, lists and dicts replaced by what `do` returns, unless that is None."""
    if isinstance(of, torch.Tensor):
        new = do(of)
        return of if new is None else new
    if isinstance(of, tuple) and hasattr(of, "_fields"):
        return type(of)(*(each(do, part) for part in of))
    if isinstance(of, (tuple, list)):
        return type(of)([each(do, part) for part in of])
    if isinstance(of, dict):
        return {key: each(do, part) for key, part in of.items()}
    return of
