"""Loading of dumps: pickles that contain only plain containers and scalars.

A pickle can call any function while it is loaded, and a dump may come from somebody else. So the
unpickler rejects all names.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, ClassVar

from gradwire.errors import ArgumentError

MAX_BYTES = 1 << 28
"""Maximum size of a dump; dumps of 2,000 collectives take 2 MB."""


class _PlainUnpickler(pickle._Unpickler):
    """Unpickler in Python: the one in C allocates whatever size a damaged file specifies."""

    dispatch: ClassVar[dict[int, Any]] = {
        code: read
        for code, read in pickle._Unpickler.dispatch.items()
        if code != pickle.BYTEARRAY8[0]  # allocates likewise
    }

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it refers to {module}.{name}; dumps contain plain data only")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it has a persistent ID; dumps contain plain data only")


def loads(data: bytes) -> dict[str, Any]:
    """Load a dump from bytes.

    Raises:
        ArgumentError: The bytes are not a dump.
    """
    try:
        found = _PlainUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # damaged pickles raise errors of any type
        raise ArgumentError(f"not a dump of a flight recorder: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("entries", []), list):
        raise ArgumentError("not a dump of a flight recorder: it has no list of entries")
    return found


def load(path: Path) -> dict[str, Any]:
    """Load a dump from a file.

    Raises:
        ArgumentError: The file is not a dump.
    """
    if path.stat().st_size > MAX_BYTES:
        raise ArgumentError(f"{path} has {path.stat().st_size} bytes: not a flight recorder dump")
    try:
        return loads(path.read_bytes())
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {error}") from error
