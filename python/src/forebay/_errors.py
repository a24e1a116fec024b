"""Exceptions of forebay. A missing file is a FileNotFoundError, and a forbidden one a PermissionError."""


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
