"""Checkpoints of an elastic run: written by one member, loaded by any number of members.

They have the format of torch.distributed.checkpoint, so that other tools can read them.
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

from gradwire._processes import is_alive, this_process
from gradwire.elastic.transfer import cast, put
from gradwire.errors import ArgumentError, CheckpointError

PREFIX = "step-"
PARTIAL = ".partial "
"""Prefix of the folder of an incomplete checkpoint; its name ends with the writing process."""
STEP = "gradwire_version"
LINEAGE = "gradwire_line"
"""File in a checkpoint's folder with the name of its lineage."""
NUMBER = "number "
WHOLE = "gradwire: as it is"
"""First entry of a pair that protects a dict which the format would change or omit."""


def save(
    kept: Mapping[str, Any], step: int, folder: Path, *, lineage: str = "", keep: int | None = None
) -> Path:
    """Write a checkpoint of the kept objects, atomically.

    Args:
        kept: Objects by name.
        step: Number of committed steps.
        folder: Folder of the checkpoints of this training.
        lineage: Name of the lineage of this training.
        keep: Number of its checkpoints to keep; None for all.

    Returns:
        Path of the checkpoint: `step-N` in the folder.

    Raises:
        ArgumentError: The folder has a checkpoint of as many steps or more of another training, or
            a key cannot be saved.
        CheckpointError: Writing failed; partial files are removed.
    """
    final = path_of(folder, step)
    _check_lineage(folder, final, lineage)
    try:
        if not final.exists():  # otherwise a member that was lost wrote the same bits
            _write(kept, step, final, lineage)
    except CheckpointException as error:  # derives from BaseException
        raised = next((e for e, _ in error.failures.values()), error)
        if not isinstance(raised, Exception):
            raise
        raise _not_written(final, raised) from raised
    except OSError as error:
        raise _not_written(final, error) from error
    if keep is not None:
        _remove_old(folder, final, lineage, keep)
    return final


def _not_written(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {path} could not be written, and its partial files are removed: "
        f"{error!r}. Remove the cause, such as a full disk, or save to another folder"
    )


def _write(kept: Mapping[str, Any], step: int, final: Path, lineage: str) -> None:
    final.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(final.parent)
    partial = _partial(final)
    try:
        state = {name: _named(value.state_dict()) for name, value in kept.items()}
        with warnings.catch_warnings():  # about a single process that saves
            warnings.simplefilter("ignore", UserWarning)
            dcp.save({**state, STEP: step}, checkpoint_id=partial, no_dist=True)
        (partial / LINEAGE).write_text(lineage)
        try:
            partial.rename(final)
        except OSError:
            if not final.exists():  # another member was faster
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _partial(final: Path) -> Path:
    """Return the folder for an incomplete checkpoint of this process."""
    return final.parent / f"{PARTIAL}{final.name} {quote(this_process(), safe='')}"


def lineage_of(path: Path) -> str:
    """Return the lineage of a checkpoint; "" if unknown."""
    try:
        return (path / LINEAGE).read_text()
    except OSError:
        return ""


def _check_lineage(folder: Path, final: Path, lineage: str) -> None:
    """Raise if `latest` would find a checkpoint of another training.

    Now, or after this one is saved.
    """
    for path in folder.glob(f"{PREFIX}*"):
        if path.name >= final.name and lineage_of(path) != lineage:
            raise ArgumentError(
                f"folder {folder} has {path.name} of another training: call run.load(folder) "
                "before run.steps to continue that training, or pass another folder"
            )


def _remove_old(folder: Path, final: Path, lineage: str, keep: int) -> None:
    """Remove all but the last `keep` checkpoints of a lineage."""
    found = sorted(p for p in folder.glob(f"{PREFIX}*") if p.name <= final.name)
    for path in [p for p in found if lineage_of(p) == lineage][:-keep]:
        partial = _partial(path)
        try:
            path.rename(partial)  # a kill in between leaves no incomplete checkpoint
            shutil.rmtree(partial)
        except FileNotFoundError:
            continue  # another member was faster
        except OSError as error:
            raise CheckpointError(
                f"{final} is written, but {path}, which exceeds keep={keep}, could not be removed: "
                f"{error!r}"
            ) from error


def _remove_abandoned(folder: Path) -> None:
    """Remove incomplete checkpoints of dead processes of this host."""
    for path in folder.glob(f"{PARTIAL}*"):
        with contextlib.suppress(ValueError, TypeError):  # the name has another format
            if not is_alive(unquote(path.name.rpartition(" ")[2])):
                shutil.rmtree(path, ignore_errors=True)


def path_of(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint with `step` committed steps."""
    return folder / f"{PREFIX}{step:09d}"


def latest(folder: Path) -> Path | None:
    """Return the checkpoint with the most steps in a folder; None if there is none."""
    found = sorted(folder.glob(f"{PREFIX}*"))
    return found[-1] if found else None


def load(kept: Mapping[str, Any], path: Path) -> int:
    """Load a checkpoint into the kept objects.

    Returns:
        Number of committed steps.

    Raises:
        ArgumentError: There is no checkpoint at the path, or it holds other objects.
    """
    try:
        state = _read(path)
    except (OSError, CheckpointException) as error:
        raise ArgumentError(f"{path} is not a checkpoint of an elastic run: {error}") from error
    step = state.pop(STEP, None)
    if not isinstance(step, int) or state.keys() != kept.keys():
        raise ArgumentError(
            f"{path} has {sorted(state)}, and run.keep got {sorted(kept)}: keep the saved objects"
        )
    states = {name: _numbered(state[name]) for name in kept}
    models = [(n, m) for n, m in kept.items() if isinstance(m, nn.Module)]
    converts = any(True for n, m in models for _ in cast(n, m.state_dict(), states[n]))
    for name, value in kept.items():
        if converts:  # to the current dtypes of the models
            value.load_state_dict(states[name])
        else:
            put(value, states[name])
    return step


def _named(state: Any) -> Any:
    """Return a state in which the format keeps empty dicts and keys that are not strings.

    Raises:
        ArgumentError: A dict with tensors has a key that is neither a string nor an int.
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
        f"a kept state_dict has the key {key!r} in a dict with tensors: use ints, or strings other "
        f"than {NUMBER!r} followed by an int"
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
    """Invert `_named`."""
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
    """Return the whole state of a checkpoint, as it was saved."""
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    reader = dcp.FileSystemReader(path)
    _load_state_dict(
        state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    return state
