"""State of training, sent to a new member or saved in a checkpoint: all of it or nothing.

Large tensors are sent from their memory, one after the other. Everything else is one message that
`torch.load(weights_only=True)` reads, which only makes tensors and plain values. A receiver changes
nothing before it has all of them.

Checkpoints are written by one member and loaded by any number of members. They have the format of
torch.distributed.checkpoint: tensors by their names, and one entry for everything else.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from gradwire._processes import is_alive, this_process
from gradwire.ddp import broadcast_options
from gradwire.errors import (
    ArgumentError,
    CheckpointError,
    MismatchError,
    NotSupportedError,
)

PIECE_BYTES = 64 << 20
LARGE_BYTES = 64 << 10
MAX_ACCELERATORS = 128
"""Maximum number of accelerators of a sender's host."""
_TENSOR = "gradwire tensor"
"""Only key of the dict that takes the place of a tensor."""

PREFIX = "step-"
PARTIAL = ".partial "
"""Prefix of the folder of an incomplete checkpoint; its name ends with the writing process."""
ABOUT = "gradwire_run"
"""Entry of a checkpoint: its number of steps, and the states without their tensors."""
LINEAGE = "gradwire_lineage"
"""File in a checkpoint's folder with the name of its lineage."""


class Snapshot(NamedTuple):
    """State of the kept objects."""

    header: bytearray  # the state, with large tensors replaced by their numbers
    # large tensors of the CPU; on the sender they share memory with its objects
    tensors: list[Tensor]


def dump(kept: Mapping[str, Any], beside: Any = None) -> Snapshot:
    """Return the state of the kept objects, and a value beside it."""
    tensors: list[Tensor] = []

    def take_out(path: str, value: Any) -> Any:
        if type(value) is not Tensor or value.layout != torch.strided or value.is_quantized:
            return value
        if value.nbytes < LARGE_BYTES or value.device.type != "cpu":
            return value
        tensors.append(value.detach().resolve_conj().resolve_neg().contiguous())
        return {_TENSOR: len(tensors) - 1}

    states = {name: value.state_dict() for name, value in kept.items()}
    file = io.BytesIO()
    torch.save((_replaced(states, take_out), beside), file)
    return Snapshot(bytearray(file.getbuffer()), tensors)


def _replaced(value: Any, replace: Callable[[str, Any], Any], path: str = "") -> Any:
    """Return a copy of nested dicts, lists and tuples with replaced leaves, which have paths."""
    if isinstance(value, dict) and _TENSOR not in value:
        found = copy.copy(value)  # an OrderedDict of a module has attributes
        for key, entry in value.items():
            found[key] = _replaced(entry, replace, f"{path}.{key}" if path else str(key))
        return found
    if type(value) in (list, tuple):
        entries = enumerate(value)
        return type(value)(_replaced(entry, replace, f"{path}.{i}") for i, entry in entries)
    return replace(path, value)


def _filled(states: Any, tensor_at: Callable[[Any], Tensor]) -> Any:
    """Return states with their tensors, which have been taken out."""

    def fill(_: str, leaf: Any) -> Any:
        return tensor_at(leaf[_TENSOR]) if isinstance(leaf, dict) else leaf

    return _replaced(states, fill)


def locations() -> str | dict[str, str]:
    """Return where tensors are put: those of any accelerator on this member's current one."""
    own = torch.accelerator.current_accelerator()
    if own is None or not torch.accelerator.is_available():
        return "cpu"
    here = f"{own.type}:{torch.accelerator.current_device_index()}"
    # the sender's may have a number that this host does not have
    return {f"{own.type}:{number}": here for number in range(MAX_ACCELERATORS)}


def take_over(kept: Mapping[str, Any], data: Snapshot) -> Any:
    """Load a state of `dump` into kept objects, which take over its tensors; return `beside`."""
    try:
        states, beside = torch.load(
            io.BytesIO(data.header), weights_only=True, map_location=locations()
        )
    except pickle.UnpicklingError as error:
        kind = re.search(r"GLOBAL (\S+)", str(error))
        raise NotSupportedError(
            f"the received state has a {kind[1] if kind else 'value'}, but only tensors and plain "
            "values can be sent: convert it, for example with float(lr), or leave it out of the "
            f"state_dict of the kept objects ({', '.join(sorted(kept))})"
        ) from error

    states = _filled(states, data.tensors.__getitem__)
    if states.keys() != kept.keys():
        raise MismatchError(
            f"run.keep got {sorted(kept)} here, but {sorted(states)} on the member that has the "
            "state: keep the same names on all members"
        )
    for name, state in states.items():
        try:
            put(kept[name], state)
        except (RuntimeError, ValueError, KeyError) as error:
            raise MismatchError(
                f"the state of {name!r} does not fit: {error}; build it alike on all members"
            ) from error
        for tensor in cast(name, kept[name].state_dict(), state):
            raise MismatchError(
                f"{tensor} on the member that has the state: use the same dtypes on all members, "
                "and keep each optimizer under its own name, so that its state keeps its dtype"
            )
    return beside


def put(value: Any, state: Any) -> None:
    """Load a state into an object, keeping the dtypes of an optimizer's state."""
    value.load_state_dict(state)
    if not isinstance(value, Optimizer) or not {"state", "param_groups"} <= state.keys():
        return
    # `Optimizer.load_state_dict` has cast the state to the dtypes of the parameters
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [p for group in value.param_groups for p in group["params"]]
    if len(numbers) == len(parameters):
        for number, parameter in zip(numbers, parameters, strict=True):
            loaded, received = value.state.get(parameter), state["state"].get(number)
            if isinstance(loaded, dict) and isinstance(received, dict):
                loaded.update(_received(loaded, received, parameter))


def _received(loaded: Any, received: Any, parameter: Tensor) -> Any:
    """Return a loaded value with the received dtypes and the strides of its parameter."""
    if isinstance(loaded, dict) and isinstance(received, Mapping):
        pairs = ((k, v, received.get(k)) for k, v in loaded.items())
        return {k: _received(v, other, parameter) for k, v, other in pairs}
    if isinstance(loaded, list) and isinstance(received, list) and len(loaded) == len(received):
        return [_received(v, o, parameter) for v, o in zip(loaded, received, strict=True)]
    if not isinstance(loaded, Tensor) or not isinstance(received, Tensor):
        return loaded
    if loaded.dtype != received.dtype:
        loaded = received.to(loaded.device)
    if loaded.shape == parameter.shape and loaded.stride() != parameter.stride():
        # fused optimizers read a parameter and its state in the order of memory
        loaded = torch.empty_like(parameter, dtype=loaded.dtype, requires_grad=False).copy_(loaded)
    return loaded


def cast(name: str, loaded: Any, received: Any) -> Iterator[str]:
    """Yield the tensors of a state whose dtype changed when it was loaded, with both dtypes."""
    if isinstance(loaded, Mapping) and isinstance(received, Mapping):
        for key in loaded.keys() & received.keys():
            yield from cast(f"{name}.{key}", loaded[key], received[key])
    elif isinstance(loaded, list | tuple) and isinstance(received, list | tuple):
        for index, (one, other) in enumerate(zip(loaded, received, strict=False)):
            yield from cast(f"{name}.{index}", one, other)
    elif isinstance(loaded, Tensor) and loaded.dtype != getattr(received, "dtype", loaded.dtype):
        yield f"{name} is {loaded.dtype} here, but {received.dtype}"


def exchange(group: ProcessGroup, own: Snapshot | None, wait: Callable[[Work], object]) -> Snapshot:
    """Broadcast a state from rank 0, and return it."""

    def send(tensor: Tensor) -> None:
        for piece in tensor.view(-1).view(torch.uint8).split(PIECE_BYTES):
            wait(group.broadcast([piece], broadcast_options(0)))

    def send_bytes(data: bytearray | None) -> bytearray:
        length = torch.tensor([0 if data is None else len(data)], dtype=torch.int64)
        send(length)
        memory = bytearray(int(length)) if data is None else data
        send(torch.frombuffer(memory, dtype=torch.uint8))
        return memory

    text = None
    if own is not None:
        described = [(list(t.shape), str(t.dtype).removeprefix("torch.")) for t in own.tensors]
        text = bytearray(json.dumps(described).encode())
    found = json.loads(send_bytes(text))
    header = send_bytes(None if own is None else own.header)
    new = (torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in found)
    tensors = list(new) if own is None else own.tensors
    for tensor in tensors:
        send(tensor)
    return Snapshot(header, tensors)


def save(
    kept: Mapping[str, Any], step: int, folder: Path, *, lineage: str = "", keep: int | None = None
) -> Path:
    """Write a checkpoint of the kept objects, atomically; return its path, `folder/step-N`."""
    final = path_of(folder, step)
    _check_lineage(folder, final, lineage)
    try:
        if not final.exists():  # otherwise a member that was lost wrote the same bits
            _write(kept, step, final, lineage)
    except (OSError, CheckpointException) as error:  # the latter derives from BaseException
        raised: BaseException = error
        if isinstance(error, CheckpointException):
            raised = next((e for e, _ in error.failures.values()), error)
        if not isinstance(raised, Exception):
            raise
        raise CheckpointError(
            f"the checkpoint {final} could not be written, and its partial files are removed: "
            f"{raised!r}. Remove the cause, such as a full disk, or save to another folder"
        ) from raised
    if keep is not None:  # a number of checkpoints of this lineage
        _remove_old(folder, final, lineage, keep)
    return final


def _write(kept: Mapping[str, Any], step: int, final: Path, lineage: str) -> None:
    final.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(final.parent)
    partial = _partial(final)
    tensors: dict[str, dict[str, Tensor]] = {}

    def take_out(path: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        name, _, rest = path.partition(".")
        of_object = tensors.setdefault(name, {})
        while rest in of_object:  # keys such as 1 and "1"
            rest += "'"
        of_object[rest] = value
        return {_TENSOR: (name, rest)}

    try:
        states = _replaced({n: value.state_dict() for n, value in kept.items()}, take_out)
        with warnings.catch_warnings():  # about a single process that saves
            warnings.simplefilter("ignore", UserWarning)
            # in a tuple, because the format would change keys of dicts, and omit empty ones
            dcp.save({**tensors, ABOUT: (step, states)}, checkpoint_id=partial, no_dist=True)
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
    """Raise if `latest` would find another training's checkpoint, now or after this save."""
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
    """Load a checkpoint into the kept objects; return its number of committed steps."""
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    found: dict[str, Any] = {}
    reader, planner = dcp.FileSystemReader(path), _EmptyStateDictLoadPlanner()
    try:
        _load_state_dict(found, storage_reader=reader, planner=planner, no_dist=True)
        step, states = found[ABOUT]
    except (OSError, CheckpointException, KeyError) as error:
        raise ArgumentError(f"{path} is not a checkpoint of an elastic run: {error}") from error
    if states.keys() != kept.keys():
        raise ArgumentError(
            f"{path} has {sorted(states)}, and run.keep got {sorted(kept)}: keep the saved objects"
        )
    states = _filled(states, lambda place: found[place[0]][place[1]])
    models = [(n, m) for n, m in kept.items() if isinstance(m, nn.Module)]
    converts = any(True for n, m in models for _ in cast(n, m.state_dict(), states[n]))
    for name, value in kept.items():
        if converts:  # to the current dtypes of the models
            value.load_state_dict(states[name])
        else:
            put(value, states[name])
    return int(step)
