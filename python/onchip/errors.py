"""What onchip raises. Every message names the operator, the argument, what it got and what it
wanted."""


class Error(Exception):
    """Base of everything onchip raises by itself."""


class InvalidArgument(Error, ValueError):
    """The call breaks the contract: no backend could ever take it. Nothing was written."""


class Unsupported(Error, NotImplementedError):
    """A legal call that no backend (or not the forced one) takes; the message has each one's
    reason."""


class OutOfMemory(Error, MemoryError):
    """Host or device memory ran out."""


class CompileFailed(Error, RuntimeError):
    """A GPU kernel could not be compiled or loaded."""


class DeviceError(Error, RuntimeError):
    """The device's driver reported an error."""


class InternalError(Error, RuntimeError):
    """A fault of onchip itself."""
