"""The prompt cache on disk, looked at from outside of an engine: what ``sluice cache`` does."""

import json
import os
from typing import Any

from . import _sluice
from ._options import cache_folder


class PromptCache:
    """A folder of prompts that engines have kept (``prompt_cache=FOLDER``); by default that of the command line. It may be looked at while an engine uses it, and changed when none does.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     try:
    ...         PromptCache(folder).stat()
    ...     except sluice.ModelError as error:
    ...         folder in str(error)
    True
    """

    def __init__(self, folder: "str | os.PathLike[str] | None" = None, key_file: "str | os.PathLike[str] | None" = None):
        self.folder = os.fspath(folder) if folder is not None else os.path.join(cache_folder(), "prompt-cache")
        self._inner = _sluice.PromptCache(self.folder, key_file)

    def stat(self) -> "dict[str, Any]":
        """Totals: quota, bytes, entries and so on, and with ``models`` what is kept of which model."""
        return json.loads(self._inner.stat())

    def models(self) -> "list[dict[str, Any]]":
        """What is kept of which model: entries, tokens, bytes, hits and last use."""
        return self.stat()["models"]

    def verify(self) -> "dict[str, Any]":
        """Reads all of it and compares it with its checksums. What is ``wrong`` is removed."""
        return json.loads(self._inner.verify())

    def gc(self) -> "dict[str, Any]":
        """Gives back what is not needed."""
        return json.loads(self._inner.gc())

    def clear(self) -> None:
        """Removes all of it."""
        self._inner.clear()
