"""Observation of wrappers, backward and optimizers."""

from __future__ import annotations

import inspect
import math
import os
import re
import sys
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._autograd import SavedTensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.join import Join
from torch.nn import utils
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils import clip_grad
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gradwire._torch import TORCHS_DDP, compile_callees_only
from gradwire.check.observer import (
    ALONE,
    Observer,
    bit_sum,
    digest,
    digest_all,
    drawn,
    is_plain,
    line_of,
    random_state,
    user_line,
)
from gradwire.ddp import DistributedDataParallel, Reducer, SyncBatchNorm
from gradwire.recorder import is_users

_NOT_BATCH_NORM = (nn.SyncBatchNorm, SyncBatchNorm)
_BATCH_NORM_STEPS = 3
"""Number of steps in which calls of batch norms are written."""
_NORM_STEPS = 8
"""Number of steps in which the program's sums are compared with norms of gradients."""
_SUMMED = 64
"""Number of elements of each gradient that enter a sum."""
_FEW_TOTALS = 16
"""Most elements of a sum over ranks that a loss may divide by."""
_GATHERING = ("all_gather", "all_gather_into_tensor", "all_gather_single")
_REDUCED = f"{__name__} reduced"
"""Mark of parameters that a wrapper knows."""


class Model:
    """A wrapped module."""

    def __init__(self, number: int, wrapper: nn.Module) -> None:
        self.number = number
        self._wrapper = weakref.ref(wrapper)
        self.forwards = 0
        self.backwards = 0  # that were reduced
        self.modules: set[int] = set()  # ids of the wrapped module and its parts
        self.buffers: list[tuple[str, nn.Module, str]] = []  # that only the program synchronizes
        self.constants: list[tuple[str, nn.Module, str, Any]] = []  # unregistered tensors
        self.seen: list[int | None] = []  # digests of parameters at the latest look, and its line
        self.seen_at = ""
        self.inputs = 0  # digest of the latest ones

    @property
    def wrapper(self) -> Any:
        """Wrapper; None once it was collected."""
        return self._wrapper()

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Return the names and parameters that require gradients now."""
        ignored = getattr(self.wrapper, "parameters_to_ignore", ())
        named = self.wrapper.module.named_parameters()
        return [(n, p) for n, p in named if p.requires_grad and n not in ignored]

    @property
    def hooked(self) -> bool:
        """True if the program's own hook replaces the mean of gradients."""
        wrapper = self.wrapper
        ours = getattr(wrapper, "reducer", None)
        return bool(getattr(wrapper, "_comm_hooks", None) or getattr(ours, "comm_hook", None))


class Training:
    """Observation of a rank's training."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.optimizers: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()
        self._steps: dict[str, int] = {}
        self.models: dict[int, Model] = {}
        self._made = 0
        self.inside: list[Model] = []  # whose forward is running, innermost last
        self.in_backward = False
        # outputs and inputs of this step's gathers whose inputs need gradients
        self.gathered: list[tuple[list[Tensor], Tensor, str]] = []
        # since the last backward: forwards by wrappers, and calls around them, with their lines
        self._forwards: list[tuple[Model, bool, str]] = []
        self._around: dict[int, str] = {}
        self._sums: dict[str, float] = {}
        self._reduced_norm = False  # since the last step
        self._totals: dict[float, str] = {}  # sums over ranks since the last step, and their lines
        self._schedules = (0, "")  # number of schedulers' steps, and line of the latest
        for wrapper in (TORCHS_DDP, DistributedDataParallel):
            observer.around(wrapper, "__init__", after=self._wrapped)
            observer.patch(wrapper, "forward", self._make_forward)
        observer.around(DistributedDataParallel, "refit", after=self._write_model)
        observer.around(Reducer, "weight", before=lambda *_: observer.emit("weight"))
        observer.around(Join, "__enter__", before=lambda *_: observer.emit("join"))
        observer.patch(torch.autograd, "backward", self._make_backward)
        observer.around(
            Optimizer, "__init__", after=lambda _, own, *a, **k: self.optimizers.setdefault(own, "")
        )
        observer.around(
            nn.Module,
            "load_state_dict",
            before=lambda *_, **__: self._compare(),
            after=lambda *_, **__: self._compare(how="by load_state_dict"),
        )
        for scheduler in {c for c in vars(lr_scheduler).values() if isinstance(c, type)}:
            if issubclass(scheduler, lr_scheduler.LRScheduler) and "step" in vars(scheduler):
                observer.around(scheduler, "step", after=self._scheduled)
        for name in ("all_reduce", *_GATHERING):
            if hasattr(dist, name):
                observer.patch((dist, c10d), name, self._make_collective(name))
        for name in ("clip_grad_norm_", "clip_grad_value_", "get_total_norm"):
            observer.patch((utils, clip_grad), name, self._make_clip(name))
        observer.undo += [
            register_module_forward_pre_hook(self._called).remove,
            register_optimizer_step_pre_hook(lambda own, *_: observer.look(self._step, own)).remove,
            register_optimizer_step_post_hook(lambda own, *_: self._stepped(own)).remove,
        ]

    def _scheduled(self, *_: Any, **__: Any) -> None:
        self._schedules = (self._schedules[0] + 1, user_line())

    # -- wrappers ----------------------------------------------------------------------------

    def _wrapped(self, _: None, wrapper: Any, *__: Any, **___: Any) -> None:
        model = self.models.get(id(wrapper))
        if model is None or model.wrapper is not wrapper:  # else a subclass's
            model = self.models[id(wrapper)] = Model(self._made, wrapper)
            self._made += 1
            self._write_model(None, wrapper)
            self._compare([model])

    def _write_model(self, _: None, wrapper: Any) -> None:
        model = self.models[id(wrapper)]
        named = model.trainable()
        for _name, parameter in named:
            _notes(parameter)[_REDUCED] = True
        model.modules = set(map(id, wrapper.module.modules()))
        model.constants = [
            (f"{prefix}.{name} {tuple(value.shape)}", module, name, digest(value))
            for prefix, module in wrapper.module.named_modules()
            for name, value in vars(module).items()
            if is_plain(value) and value.is_floating_point() and value.numel() > 1
            if not value.requires_grad
        ]
        if not getattr(wrapper, "broadcast_buffers", True):
            model.buffers = [
                (f"{prefix}.{name}", module, name)
                for prefix, module in wrapper.module.named_modules()
                for name, buffer in module.named_buffers(recurse=False)
                if not isinstance(module, nn.modules.batchnorm._NormBase)
                and buffer.is_floating_point()
                and name not in module._non_persistent_buffers_set
            ]
        self._observer.emit(
            "model",
            model=model.number,
            ranks=torch.distributed.get_process_group_ranks(wrapper.process_group),
            names=[n for n, _ in named],
        )

    def _compare(self, models: Sequence[Model] | None = None, how: str = "") -> None:
        """Write that parameters have changed since they were last seen."""
        for model in self._living() if models is None else models:
            now = [digest(p) for _, p in model.trainable()]
            place = user_line()
            if model.seen and now != model.seen:
                fields = {"model": model.number, "after": model.seen_at, "how": how}
                self._observer.emit("changed", line=place, digest=_crc(now), **fields)
            model.seen, model.seen_at = now, place

    def _make_forward(self, original: Any) -> Any:
        @compile_callees_only
        def forward(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
            gradients = torch.is_grad_enabled()
            model = self._observer.look(self._forward, wrapper, args, kwargs, gradients)
            if model is None:
                return original(wrapper, *args, **kwargs)
            self.inside.append(model)
            try:
                return original(wrapper, *args, **kwargs)
            finally:
                self.inside.pop()
                if gradients:
                    self._observer.look(self._left, model)

        return forward

    def _forward(self, wrapper: Any, args: Any, kwargs: Any, gradients: bool) -> Model | None:
        model = self.models.get(id(wrapper))
        if self.in_backward or model is None or model.wrapper is not wrapper:
            return None  # recomputed in a checkpoint, or a copy
        syncs = bool(wrapper.require_backward_grad_sync) and gradients
        if gradients:
            self._forwards.append((model, syncs, user_line()))
            self._compare([model])
        model.inputs = digest_all((args, kwargs))
        self._observer.emit(
            "forward",
            model=model.number,
            gradients=gradients,
            training=wrapper.module.training,
            inputs=model.inputs,
        )
        model.forwards += gradients
        return model

    def _left(self, model: Model) -> None:
        """Write that a forward has changed parameters or the random state."""
        before, after = self._observer.random, random_state()
        self._observer.random = after
        states = drawn(before, after) if before is not None else None
        if states and model.wrapper.module.training:
            where, key = f"forward {model.number}", [model.forwards]
            self._observer.emit("drew", where=where, key=key, random=states, data=model.inputs)
        self._compare([model], "in the forward")

    def _called(self, module: nn.Module, args: Any) -> None:
        """Observe a call of a module: a wrapped one around its wrapper, or a batch norm."""
        if torch.compiler.is_compiling() or not self.models:
            return
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and self.inside:
            if module.training and not isinstance(module, _NOT_BATCH_NORM):
                self._observer.look(self._batch_norm, module, args)
        elif not self.inside and not self.in_backward and torch.is_grad_enabled():
            for model in self._living():
                if id(module) in model.modules and model.number not in self._around:
                    self._observer.look(self._called_around, model)

    def _called_around(self, model: Model) -> None:
        """Keep the line that calls a part of a model, from outside of its methods."""
        place, inner = "", True
        frame = sys._getframe(1)
        while frame is not None:
            own = frame.f_locals.get("self")
            if isinstance(own, nn.Module) and id(own) in model.modules:
                inner = True
            elif inner and is_users(frame.f_code.co_filename):
                place, inner = line_of(frame), False
            frame = frame.f_back  # type: ignore[assignment]
        self._around[model.number] = place

    def _batch_norm(self, module: nn.Module, args: Any) -> None:
        if self._observer.step < _BATCH_NORM_STEPS and args and isinstance(args[0], Tensor):
            model, size = self.inside[-1], len(args[0])
            name = next((n for n, m in model.wrapper.module.named_modules() if m is module), "")
            self._observer.emit("batch_norm", model=model.number, name=name, samples=size)

    # -- backward ----------------------------------------------------------------------------

    def _make_backward(self, original: Any) -> Any:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self.in_backward or torch.compiler.is_compiling():
                return original(tensors, *args, **kwargs)
            self._observer.look(self._backward, tensors)
            self.in_backward = True
            try:
                return original(tensors, *args, **kwargs)
            finally:
                self.in_backward = False
                self._observer.look(self._sum_gradients)

        return backward

    def _backward(self, tensors: Any) -> None:
        loss = tensors if isinstance(tensors, Tensor) else next(iter(tensors), None)
        terms = terms_of(loss)
        for term in terms:
            if not term["builtin"] and term["count"] in self._totals:
                term["mean"] = 1 / dist.get_world_size(), self._totals[term["count"]]
        for outputs, own, line in self.gathered:
            if uses(loss, outputs, own):
                self._observer.emit("gathered", line=line, shape=list(own.shape))
        living = [(m, s, line) for m, s, line in self._forwards if m.wrapper is not None]
        syncing = {model for model, syncs, _ in living if syncs}
        for model in syncing:
            model.backwards += 1
        self._observer.emit(
            "backward",
            models=sorted({m.number for m, _, _ in living}) or ([] if self._around else [ALONE]),
            syncs=[m.number for m in syncing],
            wants=[m.number for m, _, _ in living if m.wrapper.require_backward_grad_sync],
            forward=living[-1][2] if living else "",
            around=self._around,
            hooked=any(model.hooked for model, _, _ in living),
            gathers=bool(self.gathered),
            terms=terms,
        )
        self.gathered.clear()
        self._forwards.clear()
        self._around = {}

    def _sum_gradients(self) -> None:
        """Keep a sum of the gradients of each optimizer, before the program changes them."""
        self._sums = {self._key(o): weighted_sum(o) for o in list(self.optimizers)}

    # -- optimizers --------------------------------------------------------------------------

    def _key(self, optimizer: Any) -> str:
        """Return a name that is equal on all ranks: of the parameters that it has at first."""
        known = self.optimizers.get(optimizer)
        if not known:
            names = {id(p): [m.number, n] for m in self._living() for n, p in m.trainable()}
            owned = [names.get(id(p), list(p.shape)) for p in _parameters(optimizer)]
            known = f"{_crc(owned):x}"
            while known in self._steps:
                known += "'"
            self.optimizers[optimizer] = known
            self._steps[known] = 0
        return known

    def _step(self, optimizer: Any) -> None:
        key, own = self._key(optimizer), _ids(optimizer)
        self._compare()
        models: dict[Any, Any] = {}
        for model in self._living():
            named = model.trainable()
            if any(id(p) in own for _, p in named):
                models[model.number] = _parameter_digests(named)
        if alone := self._alone(optimizer):
            models[ALONE] = _parameter_digests(alone)
        self._observer.emit("step", optimizer=key, number=self._steps[key], models=models)

    def _alone(self, optimizer: Any) -> list[tuple[str, Tensor]]:
        """Return the parameters of an optimizer if no wrapped model has one of them."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return []
        owned = [(f"parameter {i}", p) for i, p in enumerate(_parameters(optimizer))]
        wrapped = {id(p) for m in self._living() for p in m.wrapper.module.parameters()}
        return [] if any(id(p) in wrapped for _, p in owned) else owned

    def _living(self) -> list[Model]:
        return [model for model in self.models.values() if model.wrapper is not None]

    def _stepped(self, optimizer: Any) -> None:
        if self._observer.active:
            self._observer.look(self._after_step, optimizer)
            self._observer.stepped()

    def _after_step(self, optimizer: Any) -> None:
        """Write the gradients only now: with a closure, the step begins before backward."""
        key, own = self._key(optimizer), _ids(optimizer)
        count = self._steps[key]
        self._steps[key] += 1
        everywhere = set().union(*map(_ids, self.optimizers))
        models: dict[Any, Any] = {}
        for model in self._living():
            named = model.trainable()
            if any(id(p) in own or id(p) not in everywhere for _, p in named):
                models[model.number] = self._state(model, named, own, everywhere)
            model.seen, model.seen_at = [digest(p) for _, p in named], user_line()
        if alone := self._alone(optimizer):
            models[ALONE] = _parameter_digests(alone) | {
                "owned": True,
                "hooked": False,
                "gradients": [None if p.grad is None else digest(p.grad) for _, p in alone],
            }
        norm = _total_norm(_gradients(optimizer)) if self._reduced_norm else None
        self._reduced_norm = False
        self._totals.clear()
        self._observer.emit(
            "stepped",
            optimizer=key,
            number=count,
            rates=[float(group.get("lr", 0.0)) for group in optimizer.param_groups],
            options=repr([_options(group) for group in optimizer.param_groups]),
            models=models,
            schedules=self._schedules[0],
            schedule=self._schedules[1],
            sums=[self._sums.pop(key, None), weighted_sum(optimizer)],
            norm=norm,
            # after steps 0, 1, 2, 4, …
            state=None if count & (count - 1) else _optimizer_state(optimizer),
        )
        self._observer.random = random_state()

    def _state(
        self, model: Model, named: Any, own: set[int], everywhere: set[int]
    ) -> dict[str, Any]:
        """Return digests of a model's parameters and gradients, and the parameters left out."""
        of_model = {id(p) for p in model.wrapper.module.parameters()}
        return _parameter_digests(named) | {
            "owned": any(id(p) in own for _, p in named),
            "gradients": [None if p.grad is None else digest(p.grad) for _, p in named],
            "buffers": [[name, digest(getattr(m, own))] for name, m, own in model.buffers]
            + [
                [n, code] for n, m, own, code in model.constants if digest(vars(m).get(own)) == code
            ],
            "late": [n for n, p in named if p.grad is not None and _REDUCED not in _notes(p)],
            "unowned": [
                n
                for n, p in named
                if id(p) not in everywhere and p.grad is not None and bool(p.grad.any())
            ],
            "foreign": sum(i not in of_model for i in own),
            "hooked": model.hooked,
            "reduced": model.backwards,
        }

    # -- the program's own collectives, clipping and saving ----------------------------------

    def _make_collective(self, name: str) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def called(*args: Any, **kwargs: Any) -> Any:
                # those of a wrapper, or of gradwire, are not observed
                own = self.inside or self.in_backward or torch.compiler.is_compiling()
                result = original(*args, **kwargs)
                if name in _GATHERING and not own:
                    self._observer.look(self._gathered, *args, *kwargs.values())
                elif not own:
                    self._observer.look(self._summed, *args, **kwargs)
                return result

            return called

        return make

    def _gathered(self, outputs: Any, own: Any = None, *_: Any) -> None:
        outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
        needed = isinstance(own, Tensor) and own.requires_grad
        if needed and not any(t.requires_grad for t in outputs):
            self.gathered.append((outputs, own, user_line()))

    def _summed(
        self, tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, *_: Any, **__: Any
    ) -> None:
        """Keep a sum that a loss may divide by; write that it is one of norms of gradients."""
        readable = is_plain(tensor) and not tensor.is_complex() and tensor.numel() <= _FEW_TOTALS
        if op != dist.ReduceOp.SUM or not readable:
            return
        if group in (None, dist.group.WORLD):
            self._totals |= dict.fromkeys(tensor.reshape(-1).tolist(), user_line())
        if tensor.numel() != 1 or self._observer.step > _NORM_STEPS:
            return
        mean = float(tensor) / dist.get_world_size(group)
        for optimizer in self.optimizers:
            gradients = _gradients(optimizer)
            norm = _total_norm(gradients)
            if any(norm and math.isclose(mean, norm**n, rel_tol=1e-4) for n in (1, 2)):
                self._reduced_norm = True
                self._observer.emit("norm", digest=_crc([digest(g) for g in gradients]))

    def _make_clip(self, name: str) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            signature = inspect.signature(original)

            def clip(*args: Any, **kwargs: Any) -> Any:
                bound = signature.bind(*args, **kwargs)
                first, *others = bound.arguments
                if not isinstance(bound.arguments[first], Tensor):
                    bound.arguments[first] = list(bound.arguments[first])  # it may be a generator
                limit = bound.arguments[others[0]] if others else math.inf
                write = self._observer.look(self._clipping, name, bound.arguments[first], limit)
                result = original(*bound.args, **bound.kwargs)
                if write is not None:
                    self._observer.look(write, result)
                return result

            return clip

        return make

    def _clipping(self, name: str, given: Any, limit: Any) -> Callable[[Any], None]:
        """Look at gradients before they are clipped; return a function that writes it."""
        is_norm, by_value = name == "get_total_norm", name == "clip_grad_value_"
        given = [given] if isinstance(given, Tensor) else given
        gradients = given if is_norm else [p.grad for p in given if p.grad is not None]
        largest = max((float(g.abs().max()) for g in gradients if by_value), default=0.0)
        sharded = any(getattr(o, "_reduce_scatter", False) for o in self.optimizers)
        seen: dict[str, Any] = {
            "digest": _crc([digest(grad) for grad in gradients]),
            "none": sharded and not gradients,
            "of": [k for o, k in self.optimizers.items() if {*map(id, given)} & _ids(o)],
            "limit": math.inf if is_norm else float(limit),
        }

        def write(result: Any) -> None:
            before = largest if by_value else float(result)
            self._observer.emit("clip", function=name, before=before, **seen)

        return write


def _notes(parameter: Tensor) -> Any:
    """Return what is kept with the node that accumulates a parameter's gradient."""
    # wrappers hold the nodes that they found; a parameter gets a new one when it is converted
    with torch._C.DisableTorchFunctionSubclass():
        return get_gradient_edge(parameter).node.metadata


def _crc(value: Any) -> int:
    return zlib.crc32(repr(value).encode())


def _parameter_digests(named: Any) -> dict[str, Any]:
    return {"names": [n for n, _ in named], "parameters": [digest(p) for _, p in named]}


def _parameters(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _ids(optimizer: Any) -> set[int]:
    return set(map(id, _parameters(optimizer)))


def _gradients(optimizer: Any) -> list[Tensor]:
    return [p.grad for p in _parameters(optimizer) if p.grad is not None]


def _total_norm(gradients: Sequence[Tensor]) -> float:
    return math.hypot(*(float(grad.norm()) for grad in gradients))


def weighted_sum(optimizer: Any) -> float:
    """Return a linear function of an optimizer's gradients, without cancellations."""
    total = 0.0
    for grad in filter(is_plain, _gradients(optimizer)):
        first = grad.reshape(-1)[:_SUMMED].to("cpu", torch.float64)
        total += float(first @ torch.arange(1, len(first) + 1, dtype=torch.float64).sqrt())
    return total


def _optimizer_state(optimizer: Any) -> list[list[Any]]:
    """Return parameter, name and digest of each tensor of an optimizer's state."""
    return [
        [index, key, digest(value)]
        for index, p in enumerate(_parameters(optimizer))
        for key, value in sorted(optimizer.state.get(p, {}).items())
        if isinstance(value, Tensor)
    ]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    kept = (bool, int, float, str, tuple, type(None))
    skipped = ("params", "lr", "param_names", "initial_lr")
    return {k: v for k, v in group.items() if k not in skipped and isinstance(v, kept)}


_THROUGH = (
    "View",
    "ReshapeAlias",
    "UnsafeView",
    "Squeeze",
    "Unsqueeze",
    "ToCopy",
    "Clone",
    "Alias",
    "_DDPSink",
    "Select",
)
"""Beginnings of names of nodes that neither average nor scale."""
_MOST_TERMS = 16
_MOST_NODES = 4000
_SUM, _MEAN = 2, 1  # values of `reduction` in PyTorch's nodes


def terms_of(loss: Any) -> list[dict[str, Any]]:
    """Return the means that a loss is a sum of; leave out other terms."""
    # count: the number that a mean divides by; factor: the number by which the loss multiplies it;
    # mean: the number of elements by count; scales: the parts of both, with their lines if PyTorch
    # recorded them; builtin: True if PyTorch's own function counted
    found: list[dict[str, Any]] = []
    if isinstance(loss, Tensor) and loss.grad_fn is not None and loss.numel() == 1:
        _walk((loss.grad_fn, loss.output_nr), [], found)
    return found


def _walk(at: tuple[Any, int], scales: list[tuple[float, str]], found: list[Any]) -> None:
    """Add the terms below a node's output."""
    node, output = at
    if node is None or len(scales) > 32 or len(found) >= _MOST_TERMS:
        return
    name, inputs = node.name().removeprefix("torch::autograd::"), node.next_functions
    if name.startswith(("Add", "Sub")) and len(inputs) == 2:
        alpha = float(getattr(node, "_saved_alpha", 1))
        signs = (1.0, alpha if name.startswith("Add") else -alpha)
        for inner, sign in zip(inputs, signs, strict=True):
            _walk(inner, [*scales, (sign, "")], found)
    elif name.startswith("Neg"):
        _walk(inputs[0], [*scales, (-1.0, "")], found)
    elif name.startswith("Mul"):
        variable = [i for i, (inner, _) in enumerate(inputs) if inner is not None]
        if len(variable) == 1:  # the other is a constant
            by = _number(node, "other" if variable == [0] else "self")
            if by is not None:
                _walk(inputs[variable[0]], [*scales, (by, _line_of_node(node))], found)
    elif name.startswith("Div"):
        constant = inputs[0][0] is not None and (len(inputs) < 2 or inputs[1][0] is None)
        by = _number(node, "other") if constant else None
        numel = _summed_numel(inputs[0][0], 0) if by else None
        if by and numel is not None:
            mean = (numel / by, _line_of_node(node))
            _add_term(by, scales, found, mean, builtin=False)
        elif by:
            _walk(inputs[0], [*scales, (1 / by, _line_of_node(node))], found)
    elif name.startswith(_THROUGH) and inputs:
        _walk(inputs[min(output, len(inputs) - 1)], [*scales, (1.0, "")], found)
    elif (count := _count(node, name)) is not None:
        _add_term(count, scales, found, (1.0, ""), builtin=True)


def _add_term(
    count: float, scales: Any, found: list[Any], mean: tuple[float, str], *, builtin: bool
) -> None:
    factor = math.prod(by for by, _ in scales)
    numbers = [scale for scale in scales if scale[0] != 1]
    term = {"count": count, "factor": factor, "scales": numbers, "builtin": builtin}
    found.append(term | {"mean": mean})


def _line_of_node(node: Any) -> str:
    """Return the line that made a node, with anomaly detection; otherwise ""."""
    lines = re.findall(r'File "(.*?)", line (\d+)', "".join(node.metadata.get("traceback_", [])))
    return next((f"{os.path.abspath(f)}:{n}" for f, n in reversed(lines) if is_users(f)), "")


def _summed_numel(node: Any, depth: int) -> float | None:
    """Return how many elements a node adds up, 0 if unknown; None if it is no sum of all."""
    if node is None or depth > 4:
        return None
    if node.name() == "SumBackward0":
        return float(math.prod(node._saved_self_sym_sizes))
    if getattr(node, "_saved_reduction", None) == _SUM:
        target = _saved(node, "target")
        return 0.0 if target is None else float(target.numel())
    through = node.name().startswith(("Neg", *_THROUGH))
    return _summed_numel(node.next_functions[0][0], depth + 1) if through else None


def _count(node: Any, name: str) -> float | None:
    """Return the number of elements of a mean of PyTorch's; None for another node."""
    if name == "MeanBackward0":
        numel = getattr(node, "_saved_self_sym_numel", None)
        return None if numel is None else float(numel)
    if getattr(node, "_saved_reduction", None) != _MEAN:
        return None
    if name.startswith("NllLoss"):
        weighted = _saved(node, "weight") is not None
        return None if weighted else _number(node, "total_weight")
    inner = _saved(node, "self")
    return None if inner is None else float(inner.numel())


def _saved(node: Any, name: str) -> Tensor | None:
    raw = getattr(node, f"_raw_saved_{name}", None)
    try:
        data = getattr(raw, "data", None) if isinstance(raw, SavedTensor) else None  # or a list
    except RuntimeError:  # released, or none was saved
        return None
    return data if isinstance(data, Tensor) else None


def _number(node: Any, name: str) -> float | None:
    """Return a saved tensor of one element, or a saved number."""
    saved = _saved(node, name)
    if saved is not None:
        return float(saved) if saved.numel() == 1 and is_plain(saved) else None
    if hasattr(node, f"_raw_saved_{name}"):
        return None
    value = getattr(node, f"_saved_{name}", None)
    return float(value) if isinstance(value, (int, float)) else None


def uses(loss: Any, gathered: Collection[Tensor], own: Tensor) -> bool:
    """Return True if a loss's graph saved gathered tensors without their gradients."""
    # the sum of bits is the same after concatenating or transposing
    sums = [(t.numel(), bit_sum(t)) for t in gathered]
    mask = (1 << 64) - 1
    looked_for = {(numel, total & mask) for numel, total in sums if numel > 1}
    looked_for.discard((own.numel(), bit_sum(own) & mask))
    looked_for.add((sum(n for n, _ in sums), sum(total for _, total in sums) & mask))
    sizes = {numel for numel, _ in looked_for}
    for saved in _saved_tensors(getattr(loss, "grad_fn", None)):
        candidate = saved.numel() in sizes and not saved.requires_grad and is_plain(saved)
        if candidate and (saved.numel(), bit_sum(saved) & mask) in looked_for:
            return True
    return False


def _saved_tensors(root: Any) -> Iterator[Tensor]:
    seen, waiting = {root}, [root]
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node is None:
            continue
        for name in dir(type(node)):
            if name.startswith("_raw_saved_") and (saved := _saved(node, name[11:])) is not None:
                yield saved
        for inner, _ in node.next_functions:
            if inner is not None and inner not in seen:
                seen.add(inner)
                waiting.append(inner)
