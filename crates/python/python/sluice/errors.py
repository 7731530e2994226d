"""Exceptions of this package. Their words are those of the command line."""


class Error(Exception):
    """Anything that goes wrong in Sluice."""


class ModelError(Error):
    """A model, or a file of one, that cannot be found, read or loaded. The message names the file, and the tensor or key in it."""


class RequestError(Error, ValueError):
    """A request that cannot be computed as it is: a parameter out of its range, a prompt that is too long, a grammar that does not compile."""

    def __init__(self, message: str = "", status: int = 400, param: "str | None" = None):
        super().__init__(message)
        #: The status that the server answers such a request with.
        self.status = status
        #: The field that is wrong, if it is one's fault.
        self.param = param


class EngineError(Error, RuntimeError):
    """An engine that does not work, or not any more: it was closed, it has failed, or it belongs to a process that this one is a fork of."""
