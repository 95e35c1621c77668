"""Kept objects, and their state, sent to a new member or saved: all of it or nothing.

Large tensors are sent from their memory, one after the other. Everything else is one message that
`torch.load(weights_only=True)` reads, which only makes tensors and plain values. A receiver changes
nothing before it has all of them.

Checkpoints are written by one member and loaded by any number of members. They have the format of
torch.distributed.checkpoint: tensors by their names, and one entry for everything else.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import os
import pickle
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote, unquote

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradwire._digest import digest
from gradwire._processes import is_alive, this_process, wait_until
from gradwire.ddp import DistributedDataParallel, broadcast_options
from gradwire.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    MismatchError,
    NotKeptWarning,
    NotSupportedError,
)

PIECE_BYTES = 64 << 20
LARGE_BYTES = 64 << 10
_TENSOR = "gradwire tensor"
"""Only key of the dict that takes the place of a tensor."""

PREFIX = "step-"
PARTIAL = ".partial "
"""Prefix of the folder of an incomplete checkpoint; its name ends with the writing process."""
ABOUT = "gradwire_run"
"""Entry of a checkpoint: its steps, the states without their tensors, and the order of samples."""
LINEAGE = "gradwire_lineage"
"""File in a checkpoint's folder with the name of its lineage."""
TURN_SECONDS = 300.0
CHECKSUMS = "gradwire_sha256"
"""File with the checksums of the others, for `sha256sum --check`, too."""


class Stepper(Protocol):
    """Object that is stepped once when a step is committed: an optimizer or a schedule."""

    def step(self) -> Any:
        """Advance by one step."""
        ...


class Kept:
    """Objects that `Run.keep` was given."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.models: list[DistributedDataParallel] = []
        self.parameters: list[Parameter] = []
        # of this training and its checkpoints; a member that receives or loads a state continues it
        self.lineage = secrets.token_hex(8)
        self._named: list[tuple[str, Parameter]] = []
        self._modules: list[nn.Module] = []
        self._warned_of: set[type] = set()
        self.first_buffers: list[Tensor] = []  # values at the beginning of the step
        self._first_step = -1

    def keep(self, name: str, value: Any) -> None:
        """Add an object."""
        if not all(callable(getattr(value, m, None)) for m in ("state_dict", "load_state_dict")):
            kind = type(value).__name__
            raise ArgumentTypeError(
                f"{name} is {kind}: pass an object with state_dict and load_state_dict"
            )
        self.objects[name] = value
        if isinstance(value, nn.Module):
            known = {*map(id, self.parameters), *map(id, self._modules)}
            own = value.named_parameters()
            self._named += [(f"{name}.{n}", p) for n, p in own if id(p) not in known]
            self.parameters = [p for _, p in self._named]
            self._modules += [m for m in value.modules() if id(m) not in known]
        if isinstance(value, DistributedDataParallel):
            self.models.append(value)

    def buffers(self) -> list[Tensor]:
        """Return the current buffers of all modules; forward may have replaced their tensors."""
        found = (b for m in self._modules for b in m._buffers.values())
        return [b for b in found if b is not None and b.numel()]

    def beside(self) -> list[Any]:
        """Return the state for a new member that `state_dict` does not contain."""
        return [[p.requires_grad for p in self.parameters], self._not_persistent(), self.lineage]

    @torch.no_grad()
    def put_beside(self, received: Sequence[Any]) -> None:
        """Load the values that `beside` returned on another member."""
        trained, values, lineage = received
        own = self._not_persistent()
        kinds = [[(tuple(b.shape), b.dtype) for b in buffers] for buffers in (own, values)]
        if len(trained) != len(self.parameters) or kinds[0] != kinds[1]:
            raise MismatchError(
                f"the models have {len(self.parameters)} parameters and non-persistent buffers of "
                f"{kinds[0]} here, but {len(trained)} and {kinds[1]} on the member that has the "
                "state: build the same models on all members"
            )
        self.lineage = lineage
        for parameter, is_trained in zip(self.parameters, trained, strict=True):
            parameter.requires_grad_(is_trained)
        for buffer, value in zip(own, values, strict=True):
            buffer.copy_(value)
        self._first_step = -1  # the values of buffers at its beginning are of another state

    def _not_persistent(self) -> list[Tensor]:
        return [
            buffer
            for module in self._modules
            for name, buffer in module.named_buffers(recurse=False)
            if name in module._non_persistent_buffers_set
        ]

    def warn_of_unkept(self, steppers: Iterable[object]) -> None:
        """Warn, once per type, of stepped objects with a state that are not kept."""
        for stepper in steppers:
            kind, kept = type(stepper), self.objects.values()
            if kind in self._warned_of or not hasattr(kind, "state_dict"):
                continue
            if any(stepper is part for value in kept for part in (value, *_parts(value))):
                continue
            self._warned_of.add(kind)
            warnings.warn(
                f"step.commit got a {kind.__name__} that was not passed to run.keep: a member that "
                "joins later would begin with a new one. Before run.steps, call "
                f"run.keep({kind.__name__.lower()}=...), or keep an object with it as an attribute",
                NotKeptWarning,
                stacklevel=4,  # the loop
            )

    def set_group(self, group: ProcessGroup) -> None:
        """Set the process group of the models."""
        for model in self.models:
            model.process_group = group

    def begin_step(self, step: int, *, sync: bool) -> None:
        """Clear gradients, and restore buffers to their values at the beginning of the step."""
        self.swap_gradients(repeat(None))
        for model in self.models:
            # set if DistributedDataParallel averages gradients and buffers itself
            model.require_backward_grad_sync = model.require_forward_param_sync = sync
        if self._first_step == step:
            self.put_buffers_back(step)
        else:
            self._first_step = step
            self.first_buffers = [b.detach().clone() for b in self.buffers()]

    def versions(self) -> dict[str, object]:
        """Return the version counters of the parameters."""
        return {name: None if p.is_inference() else p._version for name, p in self._named}

    def digests_of_frozen(self) -> dict[str, object]:
        """Return digests of the frozen parameters, which a write to their `.data` changes, too."""
        return {name: digest([p]) for name, p in self._named if not p.requires_grad}

    def trained(self) -> list[tuple[str, Parameter]]:
        """Return the parameters that are trained, and their names."""
        return [(name, p) for name, p in self._named if p.requires_grad]

    def swap_gradients(self, others: Iterable[Tensor | None]) -> list[Tensor | None]:
        """Set the gradients of all parameters, and return the previous ones."""
        taken = [parameter.grad for parameter in self.parameters]
        for parameter, gradient in zip(self.parameters, others, strict=False):
            parameter.grad = gradient
        return taken

    @torch.no_grad()
    def put_buffers_back(self, step: int) -> None:
        """Restore the buffers that forward has changed, if that step has begun here."""
        if self._first_step == step:
            for buffer, value in zip(self.buffers(), self.first_buffers, strict=True):
                buffer.copy_(value)


def _parts(value: object) -> Iterator[object]:
    """Yield the attributes of an object, and the entries of lists and dicts among them."""
    for name, part in getattr(value, "__dict__", {}).items():
        if name == "optimizer" and isinstance(value, LRScheduler):
            continue  # a schedule steps its optimizer, but does not save its state
        yield part
        if isinstance(part, list | tuple | dict):
            yield from part.values() if isinstance(part, dict) else part


class Snapshot(NamedTuple):
    """State of the kept objects."""

    header: bytearray  # the state, with large tensors replaced by their numbers
    # large tensors of the CPU; on the sender they share memory with its objects
    tensors: list[Tensor]


def dump(kept: Mapping[str, Any], beside: Any = None) -> Snapshot:
    """Return the state of the kept objects, and a value beside it."""
    tensors: list[Tensor] = []

    def take_out(path: str, value: Any) -> Any:
        plain = type(value) is Tensor and value.layout == torch.strided
        if not plain or value.is_quantized or value.nbytes < LARGE_BYTES or not value.is_cpu:
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


def take_over(kept: Mapping[str, Any], data: Snapshot) -> Any:
    """Load a state of `dump` into kept objects, which take over its tensors; return `beside`."""
    try:
        # to the CPU: this host may lack the sender's accelerator; models and optimizers copy
        file = io.BytesIO(data.header)
        states, beside = torch.load(file, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        kind = re.search(r"GLOBAL (\S+)", str(error))
        raise NotSupportedError(
            f"the received state has a {kind[1] if kind else 'value'}, but only tensors and plain "
            "values can be sent: convert it, for example with float(lr), or leave it out of the "
            f"state_dict of the kept objects ({', '.join(sorted(kept))})"
        ) from error

    # of the same names, which are compared with the settings of the first member
    for name, state in _filled(states, data.tensors.__getitem__).items():
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

    message = bytearray()
    if own is not None:
        described = [(list(t.shape), str(t.dtype).removeprefix("torch.")) for t in own.tensors]
        message = bytearray(json.dumps(described).encode() + b"\n" + own.header)
    length = torch.tensor([len(message)], dtype=torch.int64)
    send(length)
    message = message or bytearray(int(length))
    send(torch.frombuffer(message, dtype=torch.uint8))
    text, _, header = message.partition(b"\n")
    new = (torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in json.loads(text))
    tensors = list(new) if own is None else own.tensors
    for tensor in tensors:
        send(tensor)
    return Snapshot(header, tensors)


def save(
    kept: Mapping[str, Any],
    step: int,
    folder: Path,
    *,
    lineage: str = "",
    keep: int | None = None,
    order: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint of the kept objects, atomically; return its path, `folder/step-N`."""
    final = path_of(folder, step)
    _check_lineage(folder, final, lineage)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _turn(folder):
            if not final.exists():  # otherwise another member wrote the same bits
                _write(kept, (step, order or {}), final, lineage)
            if keep is not None:
                _remove_old(folder, final, lineage, keep)
    except (OSError, CheckpointException) as error:  # the latter derives from BaseException
        raised = _cause(error)
        if not isinstance(raised, Exception):
            raise
        found = "could not be written, and its partial files are removed"
        if final.exists():
            found = f"is written, but earlier ones, beyond keep={keep}, could not be removed"
        raise CheckpointError(
            f"the checkpoint {final} {found}: {raised!r}. Remove the cause, such as a full disk, "
            "or save to another folder"
        ) from raised
    return final


@contextlib.contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Wait until no other member writes in a folder, up to TURN_SECONDS."""
    import fcntl

    opened = os.open(folder, os.O_RDONLY)

    def is_locked() -> bool:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # without locks, all may write: one of them renames first
            return not isinstance(error, BlockingIOError)
        return True

    try:
        wait_until(is_locked, TURN_SECONDS)
        yield
    finally:
        with contextlib.suppress(OSError):  # without locks
            fcntl.flock(opened, fcntl.LOCK_UN)  # a forked child may have the descriptor, too
        os.close(opened)


def _cause(error: BaseException) -> BaseException:
    """Return the first failure of a CheckpointException, which has the tracebacks of all."""
    of_ranks = error.failures.values() if isinstance(error, CheckpointException) else ()
    return next((each for each, _ in of_ranks), error)


def _write(kept: Mapping[str, Any], about: tuple[int, Any], final: Path, lineage: str) -> None:
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
            entries = {**tensors, ABOUT: (states, *about)}
            dcp.save(entries, checkpoint_id=partial, no_dist=True)
        (partial / LINEAGE).write_text(lineage)
        (partial / CHECKSUMS).write_text("\n".join(_checksums(partial)) + "\n")
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


def _checksums(folder: Path) -> list[str]:
    found = []
    for path in sorted(folder.iterdir()):
        if path.name != CHECKSUMS:
            with path.open("rb") as file:
                found.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}")
    return found


def _damage(path: Path) -> str:
    """Return why a checkpoint cannot be used; "" if its files are as they were written."""
    try:
        stored = (path / CHECKSUMS).read_text(errors="replace").splitlines()
        found = _checksums(path)
    except OSError as error:
        return str(error)
    unfit = [line[66:] for line in stored if line not in found]  # names, after the digests
    if not unfit and stored and stored[-1].endswith(LINEAGE):
        return ""
    return f"{CHECKSUMS} does not fit {', '.join(unfit) or 'its files'}"


def lineage_of(path: Path) -> str:
    """Return the lineage of a checkpoint; "" if unknown."""
    try:
        return (path / LINEAGE).read_text(errors="replace")
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
        with contextlib.suppress(FileNotFoundError):  # another member was faster
            # a kill in between leaves no incomplete checkpoint
            shutil.rmtree(path.rename(_partial(path)))


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


def load(kept: Mapping[str, Any], path: Path) -> tuple[int, dict[str, Any]]:
    """Load a checkpoint into the kept objects; return its number of steps and order of samples."""
    if damage := _damage(path):
        earlier = [p for p in sorted(path.parent.glob(f"{PREFIX}*")) if p.name < path.name]
        usable = next((p.name for p in reversed(earlier) if not _damage(p)), None)
        then = f"run.load then uses {usable}" if usable else "there is no other one to use"
        raise CheckpointError(
            f"{path} is damaged, or is not a checkpoint of an elastic run ({damage}): remove it; "
            f"{then}"
        )
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    found: dict[str, Any] = {}
    reader, planner = dcp.FileSystemReader(path), _EmptyStateDictLoadPlanner()
    try:
        _load_state_dict(found, storage_reader=reader, planner=planner, no_dist=True)
        states, step, order = found[ABOUT]
    except (OSError, CheckpointException, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read: {_cause(error)!r}") from None
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
    return int(step), order
