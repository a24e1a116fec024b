"""Exceptions of forebay. A missing file is a FileNotFoundError, and a forbidden one a PermissionError."""

import re


class Error(Exception):
    """Base of all exceptions of forebay. The message names the file, the offset and the tensor, where there are any."""


class FormatError(Error, ValueError):
    """A file is damaged, or is in a format that forebay does not read."""


class OptionError(Error, ValueError):
    """An argument is wrong, or cannot be used with these files."""


class SharedMemoryError(OptionError, RuntimeError):
    """Tensors that are to be saved share memory."""


class TensorNotFoundError(Error, KeyError):
    """There is no tensor of this name."""

    def __str__(self) -> str:
        # KeyError would show the quoted message.
        return Exception.__str__(self)


class ReadError(Error, OSError):
    """A file could not be read to its end."""


class WriteError(Error, OSError):
    """A file could not be written. A file of the same name is as it was before."""


class OutOfMemoryError(Error, MemoryError):
    """The tensors do not fit into the memory of the host or of the GPU."""


class DeviceError(Error, RuntimeError):
    """The GPU cannot be used."""


class EngineError(Error, RuntimeError):
    """The engine is closed, or it failed while it computed."""


class QueueFullError(Error, RuntimeError):
    """Too many requests wait. Try again later."""


class ProfileError(Error, RuntimeError):
    """The speeds of this machine are not known: `forebay doctor` measures them."""


_ARGUMENTS = {
    "ctx": "context",
    "no-cpu-experts": "cpu_experts=False",
    "no-cuda-graph": "cuda_graphs=False",
    "no-verify": "verify=False",
    "routing": "trace",
    "trace-routing": "trace",
}
"""Options of the command line whose arguments have other names."""

_WORDS = {"on": "True", "off": "False"}

_OPTION = re.compile(
    r"""(?<![^\s(`'"])--([a-z][a-z0-9-]+[a-z0-9])        # not in the middle of a path
        (?:\ (on|off|auto|cpu|cuda(?::\d+)?|b?f16|\d[\w.]*\w|\d))?(?![\w])  # a value""",
    re.VERBOSE,
)

_COMMAND = re.compile(r"\bforebay [a-z]+ [^,;()]*$")
"""The beginning of a command line, whose options stay."""


def in_arguments(words: str) -> str:
    """Return words in which arguments such as `kv_ram="1GiB"` replace options such as `--kv-ram 1GiB`.

    The libraries below name options of the command line in their errors.
    """

    def argument(found: re.Match[str]) -> str:
        if _COMMAND.search(words[: found.start()]):
            return found[0]
        name, value = found[1], found[2]
        name = _ARGUMENTS.get(name, name.replace("-", "_"))
        if value is None:
            return name
        if not value.isdigit():
            value = _WORDS.get(value, f'"{value}"')
        return f"{name}={value}"

    return _OPTION.sub(argument, words)
