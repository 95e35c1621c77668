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
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from gradwire.ddp.faults.liveness import is_alive, this_process
from gradwire.elastic.training.transfer import cast, put
from gradwire.errors import ArgumentError, CheckpointError

PREFIX = "step-"
PARTIAL = ".partial "
"""What the names of folders begin with whose checkpoint is not whole; they end with the writer."""
VERSION = "gradwire_version"
LINE = "gradwire_line"
"""File in a checkpoint's folder with the name of its line of training."""
NUMBER = "number "
WHOLE = "gradwire: as it is"
"""Begins a pair with a dict that the format would change, or leave out: a value, so it is not."""


def save(
    kept: Mapping[str, Any], version: int, folder: Path, *, line: str = "", keep: int | None = None
) -> Path:
    """Write what is kept; the checkpoint is there as a whole or not at all.

    Args:
        kept: Objects by name.
        version: How many steps they have.
        folder: Where the checkpoints of this training lie.
        line: Name of this line of training.
        keep: How many of its checkpoints to keep; None for all.

    Returns:
        Its path: `step-N` in the folder.

    Raises:
        ArgumentError: The folder has a checkpoint of as many steps or more of another training, or
            a key cannot be saved.
        CheckpointError: It could not be written; what was written of it is removed.
    """
    final = path_of(folder, version)
    _check_line(folder, final, line)
    try:
        if not final.exists():  # else another member wrote it before it was lost: the same bits
            _write(kept, version, final, line)
    except CheckpointException as error:  # not an Exception
        raised = next((e for e, _ in error.failures.values()), error)
        if not isinstance(raised, Exception):
            raise
        raise _not_written(final, raised) from raised
    except OSError as error:
        raise _not_written(final, error) from error
    if keep is not None:
        _remove_old(folder, final, line, keep)
    return final


def _not_written(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {path} could not be written, and nothing is left of it: {error!r}. "
        "Remove the cause, such as a full disk, or save to another folder"
    )


def _write(kept: Mapping[str, Any], version: int, final: Path, line: str) -> None:
    final.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(final.parent)
    partial = _partial(final)
    try:
        state = {name: _named(value.state_dict()) for name, value in kept.items()}
        with warnings.catch_warnings():  # that it is one process which saves
            warnings.simplefilter("ignore", UserWarning)
            dcp.save({**state, VERSION: version}, checkpoint_id=partial, no_dist=True)
        (partial / LINE).write_text(line)
        try:
            partial.rename(final)
        except OSError:
            if not final.exists():  # another member was faster
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _partial(final: Path) -> Path:
    """Folder of this process for a checkpoint that is not whole."""
    return final.parent / f"{PARTIAL}{final.name} {quote(this_process(), safe='')}"


def line_of(path: Path) -> str:
    """The line of training that a checkpoint is of; "" if that is not known."""
    try:
        return (path / LINE).read_text()
    except OSError:
        return ""


def _check_line(folder: Path, final: Path, line: str) -> None:
    """Raise if `latest` would find a checkpoint of another training, now or after this is saved."""
    for path in folder.glob(f"{PREFIX}*"):
        if path.name >= final.name and line_of(path) != line:
            raise ArgumentError(
                f"folder has {path.name}, which another training has saved: call run.load(folder) "
                f"before run.steps to go on with it, or pass another folder than {folder}"
            )


def _remove_old(folder: Path, final: Path, line: str, keep: int) -> None:
    """Remove all but the last of a line's checkpoints."""
    found = sorted(p for p in folder.glob(f"{PREFIX}*") if p.name <= final.name)
    for path in [p for p in found if line_of(p) == line][:-keep]:
        partial = _partial(path)
        try:
            path.rename(partial)  # who is killed meanwhile leaves no checkpoint that is not whole
            shutil.rmtree(partial)
        except FileNotFoundError:
            continue  # another member was faster
        except OSError as error:
            raise CheckpointError(
                f"{final} is written, but {path}, which keep={keep} is to remove, could not be "
                f"removed: {error!r}"
            ) from error


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
    except (OSError, CheckpointException) as error:
        raise ArgumentError(f"{path} is no checkpoint of an elastic run: {error}") from error
    version = state.pop(VERSION, None)
    if not isinstance(version, int) or state.keys() != kept.keys():
        raise ArgumentError(
            f"{path} has {sorted(state)}, and run.keep has {sorted(kept)}: keep what was saved"
        )
    states = {name: _numbered(state[name]) for name in kept}
    models = [(n, m) for n, m in kept.items() if isinstance(m, nn.Module)]
    converts = any(True for n, m in models for _ in cast(n, m.state_dict(), states[n]))
    for name, value in kept.items():
        if converts:  # to the dtypes that the models have now
            value.load_state_dict(states[name])
        else:
            put(value, states[name])
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
