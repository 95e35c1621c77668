"""Checkpoints of an elastic run: written by one member, read by any number of them.

In the format of torch.distributed.checkpoint, so that other tools read them.
"""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import torch.distributed.checkpoint as dcp
from torch import Tensor

from gradwire.ddp.faults.liveness import is_alive, this_process
from gradwire.errors import ArgumentError

__all__ = ["latest", "load", "path_of", "save"]

PREFIX = "step-"
PARTIAL = ".partial "
"""What the names of folders begin with whose checkpoint is not whole; they end with the writer."""
VERSION = "gradwire_version"
NUMBER = "number "
WHOLE = "gradwire: as it is"
"""Begins a pair with a dict that the format would change, or leave out: a value, so it is not."""


def save(kept: Mapping[str, Any], version: int, folder: Path) -> Path:
    """Write what is kept; the checkpoint is there as a whole or not at all.

    Returns:
        Its path: `step-N` in the folder.
    """
    final = path_of(folder, version)
    if final.exists():
        return final  # another member wrote it before it was lost: the same bits
    folder.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder)
    partial = folder / f"{PARTIAL}{final.name} {quote(this_process(), safe='')}"
    try:
        state = {name: _named(value.state_dict()) for name, value in kept.items()}
        with warnings.catch_warnings():  # that it is one process which saves
            warnings.simplefilter("ignore", UserWarning)
            dcp.save({**state, VERSION: version}, checkpoint_id=partial, no_dist=True)
        try:
            partial.rename(final)
        except OSError:
            if not final.exists():  # another member was faster
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def _remove_abandoned(folder: Path) -> None:
    """Remove what processes of this host had written that died before it was whole."""
    for path in folder.glob(f"{PARTIAL}*"):
        with contextlib.suppress(ValueError, TypeError):  # the name is not of ours
            if not is_alive(unquote(path.name.rpartition(" ")[2])):
                shutil.rmtree(path, ignore_errors=True)


def path_of(folder: Path, version: int) -> Path:
    """Where the checkpoint of so many steps lies."""
    return folder / f"{PREFIX}{version:09d}"


def latest(folder: Path) -> Path | None:
    """The checkpoint of the most steps in a folder, if there is one."""
    found = sorted(folder.glob(f"{PREFIX}*"))
    return found[-1] if found else None


def load(kept: Mapping[str, Any], path: Path) -> int:
    """Put a checkpoint into what is kept.

    Returns:
        How many steps it has.

    Raises:
        ArgumentError: There is none at the path, or it is of something else.
    """
    try:
        state = _read(path)
    except (OSError, dcp.api.CheckpointException) as error:
        raise ArgumentError(f"{path} is no checkpoint of an elastic run: {error}") from error
    version = state.pop(VERSION, None)
    if not isinstance(version, int) or state.keys() != kept.keys():
        raise ArgumentError(
            f"{path} has {sorted(state)}, and run.keep has {sorted(kept)}: keep what was saved"
        )
    for name, value in kept.items():
        value.load_state_dict(_numbered(state[name]))
    return version


def _named(state: Any) -> Any:
    """The state as the format keeps it: which would leave out empty dicts, and knows no keys but
    strings.

    Raises:
        ArgumentError: A key beside a tensor is neither a string nor an int.
    """
    if isinstance(state, list):
        return [_named(value) for value in state]
    if not isinstance(state, Mapping):
        return state
    if not _has_tensors(state) and not (state and all(map(_is_name, state))):
        return (WHOLE, state)
    return {_name_of(key): _named(value) for key, value in state.items()}


def _name_of(key: object) -> str:
    if isinstance(key, int) and not isinstance(key, bool):
        return f"{NUMBER}{key}"
    if isinstance(key, str) and _is_name(key):
        return key
    raise ArgumentError(
        f"a state_dict of what is kept has the key {key!r} in a dict with tensors: a checkpoint "
        f"can have ints there, and strings that are not {NUMBER!r} and an int"
    )


def _is_name(key: object) -> bool:
    return isinstance(key, str) and not _is_number(key)


def _is_number(name: str) -> bool:
    return name.startswith(NUMBER) and name.removeprefix(NUMBER).lstrip("-").isdecimal()


def _has_tensors(state: Any) -> bool:
    if isinstance(state, Mapping):
        return any(map(_has_tensors, state.values()))
    return any(map(_has_tensors, state)) if isinstance(state, list) else isinstance(state, Tensor)


def _numbered(state: Any) -> Any:
    """What `_named` was given."""
    if isinstance(state, tuple) and len(state) == 2 and state[0] == WHOLE:
        return state[1]
    if isinstance(state, list):
        return [_numbered(value) for value in state]
    if not isinstance(state, Mapping):
        return state
    return {
        int(key.removeprefix(NUMBER)) if _is_number(key) else key: _numbered(value)
        for key, value in state.items()
    }


def _read(path: Path) -> dict[str, Any]:
    """All of a checkpoint, as it was saved."""
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    reader = dcp.FileSystemReader(path)
    _load_state_dict(
        state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    return state
