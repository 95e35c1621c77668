"""Transfer of the state of training to a new member, all of it or nothing.

Large tensors are sent from their memory, one after the other. Everything else is one message that
`torch.load(weights_only=True)` reads, which only makes tensors and plain values. A receiver changes
nothing before it has all of them.
"""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.optim import Optimizer

from gradwire.ddp import broadcast_options
from gradwire.errors import DistributedError, MismatchError, NotSupportedError

PIECE_BYTES = 64 << 20
MAX_BYTES = 1 << 42
LARGE_BYTES = 64 << 10
MAX_ACCELERATORS = 128
"""Maximum number of accelerators of a sender's host."""
_TENSOR = "gradwire tensor"
"""Only key of the dict that takes the place of a large tensor."""


class Snapshot(NamedTuple):
    """State of the kept objects.

    Args:
        header: The state, with large tensors replaced by their numbers.
        tensors: Large tensors of the CPU. On the sender they share memory with its objects.
    """

    header: bytearray
    tensors: list[Tensor]


def dump(kept: Mapping[str, Any], beside: Any = None) -> Snapshot:
    """Return the state of the kept objects, and a value beside it."""
    tensors: list[Tensor] = []

    def take_out(value: Any) -> Any:
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


def _replaced(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Return a copy of nested dicts, lists and tuples with replaced leaves."""
    if isinstance(value, dict) and _TENSOR not in value:
        found = copy.copy(value)  # an OrderedDict of a module has attributes
        for key, entry in value.items():
            found[key] = _replaced(entry, replace)
        return found
    if type(value) in (list, tuple):
        return type(value)(_replaced(entry, replace) for entry in value)
    return replace(value)


def locations() -> str | dict[str, str]:
    """Return where tensors are put: those of any accelerator on this member's current one.

    Their sender's may have a number that this host does not have.
    """
    own = torch.accelerator.current_accelerator()
    if own is None or not torch.accelerator.is_available():
        return "cpu"
    here = f"{own.type}:{torch.accelerator.current_device_index()}"
    return {f"{own.type}:{number}": here for number in range(MAX_ACCELERATORS)}


def load(kept: Mapping[str, Any], data: Snapshot) -> Any:
    """Load a state that `dump` returned into the kept objects, which take over its tensors.

    Returns:
        Value beside the state.

    Raises:
        MismatchError: Other objects are kept here, or a model differs.
        NotSupportedError: The state has other values than tensors and plain values.
    """
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

    def put_in(value: Any) -> Any:
        return data.tensors[value[_TENSOR]] if isinstance(value, dict) else value

    states = _replaced(states, put_in)
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
    """Load a state into an object, keeping the dtypes of an optimizer's state.

    `Optimizer.load_state_dict` casts it to the dtypes of the parameters.
    """
    value.load_state_dict(state)
    if not isinstance(value, Optimizer) or not {"state", "param_groups"} <= state.keys():
        return
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
    """Broadcast a state from rank 0, and return it.

    Raises:
        DistributedError: A member is lost, or the size is invalid.
    """

    def send(tensor: Tensor) -> None:
        for piece in tensor.view(-1).view(torch.uint8).split(PIECE_BYTES):
            wait(group.broadcast([piece], broadcast_options(0)))

    def send_bytes(data: bytearray | None) -> bytearray:
        length = torch.tensor([0 if data is None else len(data)], dtype=torch.int64)
        send(length)
        size = int(length)
        if not 0 < size <= MAX_BYTES:
            raise DistributedError(f"rank 0 sends a state of {size} bytes")
        memory = bytearray(size) if data is None else data
        send(torch.frombuffer(memory, dtype=torch.uint8))
        return memory

    text = None
    if own is not None:
        described = [(list(t.shape), str(t.dtype).removeprefix("torch.")) for t in own.tensors]
        text = bytearray(json.dumps(described).encode())
    found = json.loads(send_bytes(text))
    header = send_bytes(None if own is None else own.header)
    tensors = _new_tensors(found) if own is None else own.tensors
    for tensor in tensors:
        send(tensor)
    return Snapshot(header, tensors)


def _new_tensors(described: list[tuple[list[int], str]]) -> list[Tensor]:
    """Return memory for tensors of these shapes and dtypes.

    Raises:
        DistributedError: They are invalid, or too large.
    """
    found: list[tuple[list[int], Any]] = [(s, getattr(torch, name, None)) for s, name in described]
    valid = all(isinstance(d, torch.dtype) and all(n > 0 for n in shape) for shape, d in found)
    if not valid or sum(math.prod(shape) for shape, _ in found) > MAX_BYTES:
        raise DistributedError(f"rank 0 sends a state with tensors {described}")
    return [torch.empty(shape, dtype=dtype) for shape, dtype in found]
