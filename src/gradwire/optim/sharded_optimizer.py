"""ShardedOptimizer: an optimizer whose step and state are divided over the ranks of a wrapper.

Parameters are planned into buckets, and each bucket into one shard per rank. An optimizer of the
given class steps copies of this rank's parts of parameters; then all ranks gather the shards.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from gradwire._containers import tensors_in
from gradwire._digest import digest
from gradwire._memory import advised
from gradwire._scope import runs_outside_contexts
from gradwire._torch import ALL_GATHER_SINGLE, ALL_TO_ALL_SINGLE, REDUCE_SCATTER_SINGLE
from gradwire.buckets import memory_strides, plan_buckets, views
from gradwire.ddp import DistributedDataParallel, FaultDomain, verify_same, wait_for_message
from gradwire.errors import (
    ArgumentError,
    ArgumentTypeError,
    NotSupportedError,
    PeerFailedError,
    ReductionError,
)
from gradwire.hooks import GradBucket, HookReturn, StatefulHook, after
from gradwire.optim.shards import Assignment, Piece, cut, distribute

Groups: TypeAlias = "Iterable[Tensor] | Iterable[dict[str, Any]]"
Specification: TypeAlias = "tuple[type[Optimizer], Groups, Mapping[str, Any]]"

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
"""Classes whose step treats each element by itself; all others step whole parameters."""
REFUSED = (torch.optim.LBFGS, torch.optim.SparseAdam)
_HOOKED = Optimizer.profile_hook_step(Optimizer.step).__code__
"""Code of the function by which PyTorch replaces the `step` of each class, to call hooks."""
BUCKET_BYTES = 25 << 20


class ShardedOptimizer(Optimizer):
    """Optimizer of a wrapped model whose step and state are divided over the ranks.

    After `loss.backward()` each rank steps its share of the parameters, and `step` ends when all
    ranks have all new parameters, with the same bits. Each rank keeps 1/W of the optimizer's state
    (ZeRO stage 1, Rajbhandari et al., 2020). Optimizers of PyTorch that treat each element by
    itself, such as Adam, step equal shares of the elements. All others, such as Muon, step whole
    parameters, divided so that each rank has about the same work.

    By default `param.grad` is the mean of all ranks, as without this class, and gradients may be
    clipped, logged or changed in the same way on all ranks before the step. With
    `reduce_scatter=True`, each rank receives the mean of its share of the gradients only. This
    sends less; `param.grad` is None after backward, so clip by this optimizer's methods. A step
    uses up the gradients.

    If a rank raises in `step`, or ends before or in it, all ranks raise, and all keep the
    parameters from before the step. The state may then be a step ahead: load a saved one to
    continue. If a rank ends after the last message of a step, all others complete the step.

    Within a step each rank needs memory for one more copy of the parameters; with
    `reduce_scatter`, the memory of its gradients serves for that where no padding is needed.
    `state` is empty but for `consolidate`: to change it, load a changed state.

    The step of a parameter must not depend on other parameters, except by options that it changes
    on all ranks in the same way.

    Args:
        model: The wrapped model.
        optimizer: Class of the optimizer, for all of the model's parameters that require a
            gradient; or a list of (class, parameters, options), as if each were constructed with
            them, in which parameters may be groups.
        reduce_scatter: If True, backward reduces each gradient to the rank that steps it. Between
            two steps there is then one backward that is reduced: accumulate gradients in
            `model.no_sync()`.
        options: Arguments of `optimizer` if it is a class, such as `lr`.

    Raises:
        ArgumentError: The model does not have one of the parameters, or two optimizers do.
        ArgumentTypeError: `model` is not wrapped, or `optimizer` is not a class or list of tuples.
        NotSupportedError: The optimizer needs all parameters together (LBFGS), or sparse gradients,
            or a parameter is a subclass; or `reduce_scatter` with a communication hook.
        MismatchError: Ranks differ in parameters, optimizers or `reduce_scatter`.

    Example:
        Both ranks step with the mean of the gradients, (1 + 2) / 2, half of the elements each.

        >>> import torch.distributed as dist
        >>> from gradwire.ddp import DistributedDataParallel
        >>> from gradwire.testing import run_ranks
        >>> def main():
        ...     net = DistributedDataParallel(torch.nn.Linear(1, 128, bias=False))
        ...     torch.nn.init.zeros_(net.module.weight)
        ...     optimizer = ShardedOptimizer(net, torch.optim.SGD, lr=0.5, momentum=0.9)
        ...     net(torch.tensor([[1.0 + dist.get_rank()]])).sum().backward()
        ...     optimizer.step()
        ...     held = sum(s["momentum_buffer"].numel() for s in optimizer.own_state().values())
        ...     return net.module.weight.unique().tolist(), held
        >>> run_ranks(main, world_size=2)
        [([-0.75], 64), ([-0.75], 64)]
    """

    @runs_outside_contexts
    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: type[Optimizer] | Sequence[Specification],
        *,
        reduce_scatter: bool = False,
        **options: Any,
    ) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise ArgumentTypeError(
                f"model is a {type(model).__name__}: pass a gradwire DistributedDataParallel"
            )
        if isinstance(optimizer, type):
            trained = [p for p in model.parameters() if p.requires_grad]
            specifications: Sequence[Specification] = [(optimizer, trained, options)]
        elif not isinstance(optimizer, list | tuple) or any(
            not isinstance(each, list | tuple) or len(each) != 3 for each in optimizer
        ):
            raise ArgumentTypeError(
                f"optimizer is a {type(optimizer).__name__}: pass a class, or a list of tuples "
                "(class, parameters, options)"
            )
        elif options:
            raise ArgumentError(f"options {[*options]} with a list: give each optimizer its own")
        else:
            specifications = optimizer
        self._model, self._reduce_scatter = model, reduce_scatter
        self._reducer, self._group = model.reducer, model.process_group
        self._hook: _ReduceScatter | None = None
        self._loads = [0] * self._group.size()
        # optimizers of this rank's parts; together they have the same groups as this one
        self._optimizers: list[Optimizer] = []
        self._buckets: list[_Bucket] = []
        self._names = dict(zip(self._reducer.parameters, self._reducer.names, strict=True))
        # of the parameters of each group, which must not change
        self._ids: list[list[int]] = []
        self._failed = self._consolidated = False
        # digest of the state that was loaded, which all ranks load
        self._loaded = ""
        wholes = [_with_defaults(*each) for each in specifications]
        self._specified = [(kind, given) for kind, _, given in specifications]
        groups = list(chain(*(whole.param_groups for whole in wholes)))
        self._check_parameters(groups)
        if not any(p.requires_grad for group in groups for p in group["params"]):
            raise ArgumentError("optimizer has no parameters that require gradients: pass some")
        self._check_same(self._describe(groups))
        super().__init__(groups, wholes[0].defaults if len(wholes) == 1 else {})
        for whole, (kind, given) in zip(wholes, self._specified, strict=True):
            self._shard(kind, whole.param_groups, given)
        self._device = self._buckets[0].parameters[0].device
        if self.own_state():  # as Adagrad's
            self._mark_state()
        if reduce_scatter:
            scattered = [bucket for bucket in self._buckets if bucket.numel]
            layout = [[self._names[p] for p in bucket.in_order()] for bucket in scattered]
            others = [n for n in self._names.values() if n not in {*chain(*layout)}]
            self._reducer.set_layout([*layout, *([n] for n in others)])
            self._hook = _ReduceScatter(self._group, scattered)
            self._model.register_comm_hook(None, self._hook)

    # -- construction ------------------------------------------------------------------------

    def _check_parameters(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise unless the wrapper reduces all parameters that require gradients, each once."""
        names, sparse = self._names, {*self._reducer.bucket_set.options.sparse}
        seen: set[Parameter] = set(chain(*(g["params"] for g in getattr(self, "param_groups", ()))))
        for number, parameter in enumerate(chain(*(group["params"] for group in groups))):
            what = f"parameter {number}, {names.get(parameter, tuple(parameter.shape))},"
            if parameter in seen:
                raise ArgumentError(f"{what} has two optimizers or groups: give it one")
            seen.add(parameter)
            if not parameter.requires_grad:
                continue  # never stepped
            if parameter not in names:
                raise ArgumentError(
                    f"{what} is not one that the model's wrapper reduces: optimize it by another "
                    "optimizer, or call refit() on the wrapper first"
                )
            if names[parameter] in sparse:
                raise NotSupportedError(f"{what} has sparse gradients: use a dense embedding")
            if type(parameter) is not Parameter:
                raise NotSupportedError(f"{what} is a {type(parameter).__name__}: use a Parameter")
        hook = self._reducer.launcher.hook
        if self._reduce_scatter and hook is not None:
            raise NotSupportedError(
                "reduce_scatter=True with a communication hook, which an earlier ShardedOptimizer "
                "may have registered: call register_comm_hook(None, None) first"
            )

    def _describe(self, groups: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
        """Describe what must be the same on all ranks."""
        described = [
            ("reduce_scatter", str(self._reduce_scatter)),
            ("classes", str([kind.__name__ for kind, _ in self._specified])),
            ("loaded state", self._loaded or "none"),
        ]
        for group in groups:
            held = [self._names.get(p, "") for p in group["params"]]
            described.append(("group", f"options {_options(group)}, parameters {held}"))
        return described

    def _check_same(self, described: list[tuple[str, str]]) -> None:
        """Raise on all ranks if theirs differ in their descriptions."""
        FaultDomain.of(self._group).before_others()
        remedy = "Construct, change and load the same on every rank"
        verify_same(self._group, described, "optimizers", remedy)

    def _shard(self, kind: Any, groups: list[dict[str, Any]], given: Mapping[str, Any]) -> None:
        """Plan the parameters of groups into buckets and shards, and make the inner optimizer."""
        options = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        params = [p for p in chain(*(g["params"] for g in groups)) if p.requires_grad][::-1]
        elementwise = kind in ELEMENTWISE
        cuts = [
            elementwise and p.dim() > 0 and p.numel() > 0 and memory_strides(p) is not None
            for p in params
        ]
        plan = plan_buckets(
            [p.numel() * p.element_size() for p in params],
            [(p.dtype, whole) for p, whole in zip(params, cuts, strict=True)],
            [p.device for p in params],
            self._reducer.bucket_set.options.caps or [BUCKET_BYTES],
        )
        inner: list[dict[str, Any]] = [{**group, "params": []} for group in groups]
        for members in plan.buckets:
            chosen = [params[i] for i in members]
            sizes = [p.numel() for p in chosen]
            if cuts[members[0]]:
                assignment = cut(sizes, len(self._loads))
            else:
                assignment = distribute(sizes, [_cost(kind, p) for p in chosen], self._loads)
            bucket = _Bucket(chosen, assignment, self._group.rank(), cut=cuts[members[0]])
            self._buckets.append(bucket)
            for piece, own in bucket.own:
                inner[options[id(chosen[piece.parameter])]]["params"].append(own)
        if not any(group["params"] for group in inner):
            # optimizers refuse to be empty, and Muon tensors that are not matrices
            shape = [0] * next((p.dim() for group in groups for p in group["params"]), 1)
            inner[0]["params"].append(Parameter(torch.empty(shape, dtype=torch.float32)))
        self._optimizers.append(kind(inner, **given))
        self._ids += [[*map(id, group["params"])] for group in groups]

    # -- step --------------------------------------------------------------------------------

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler asks, and would find no gradients
        if self._reduce_scatter:
            raise NotSupportedError("GradScaler with reduce_scatter=True: use bfloat16, or False")
        return False

    @torch.no_grad()
    @runs_outside_contexts
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step this rank's share of the parameters, and gather those of all ranks.

        Every rank calls this.

        Raises:
            NotSupportedError: `closure` is given, or in `join()`; or a parameter has another dtype,
                shape or memory format than at construction, or `param_groups` has others, or
                `state` was changed.
            MismatchError: Ranks have other options, such as `lr`, or have loaded another state.
            PeerFailedError: Another rank raised in its step.
            PeerLostError, CollectiveTimeoutError: Another rank has ended, or did not call in time.
            ReductionError: An earlier step failed, gradients were not reduced, or the wrapper has
                been refitted.
        """
        if closure is not None:
            raise NotSupportedError("closure is given: compute the loss before step()")
        if self._model._join_config.enable:
            raise NotSupportedError("step() of a ShardedOptimizer in join(): give all ranks input")
        self._check_usable("step()")
        FaultDomain.of(self._group).before_others()
        failure: Exception | None = None
        self._failed = True
        try:
            try:
                self._step_shards()
            except Exception as error:
                failure = error
            self._gather(failure)
        finally:
            self._release()
        self._failed = False

    def _step_shards(self) -> None:
        if [[*map(id, group["params"])] for group in self.param_groups] != self._ids:
            raise NotSupportedError(
                "param_groups has other parameters than this optimizer was given: use "
                "add_param_group(), or make a new ShardedOptimizer"
            )
        changed = any(self.state.values()) and not self._consolidated
        if changed or (not self.state and self.own_state()):
            raise NotSupportedError(
                "state was changed, but ranks keep their shares of it elsewhere: change the result "
                "of consolidate() and state_dict(), and load it"
            )
        unreduced = [self._reducer.names[i] for i in self._reducer.usage.accumulated]
        if unreduced or self._reducer.state.unfinished:
            raise ReductionError(
                f"the gradients of {unreduced or 'a backward'} are those of this rank: run the "
                "last backward before step() to its end, outside of no_sync()",
                unreduced,
            )
        self._mark_state()
        for bucket in self._buckets:
            bucket.load()
        self._copy_options()
        for inner in self._optimizers:
            step: Any = type(inner).step
            # without the hooks of all optimizers, which run with this one
            hooks = inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks
            bare = not hooks and getattr(step, "__code__", None) is _HOOKED
            (step.__wrapped__ if bare else step)(inner)
        self._copy_options(back=True)

    def _mark_state(self) -> None:
        # torch.distributed.checkpoint steps an optimizer whose state is empty, to make one
        self._consolidated = False
        self.state.clear()
        self.state.update((p, {}) for bucket in self._buckets for p in bucket.parameters)

    def _check_usable(self, what: str) -> None:
        model, reducer, hook = self._model, self._reducer, self._hook
        same = model.reducer is reducer and model.process_group is self._group
        if not same or (hook is not None and reducer.comm_hook is not hook):
            raise ReductionError(
                f"{what} after the wrapper was refitted, or got another group or another "
                "communication hook: make a new ShardedOptimizer"
            )
        if self._failed:
            raise ReductionError(
                f"{what} after a step() that failed, so that the ranks' states may differ: call "
                "load_state_dict() with a saved state on every rank"
            )

    def _gather(self, failure: Exception | None) -> None:
        """Gather all shards; change parameters only once all ranks have received everything."""
        group, rank = self._group, self._group.rank()
        on_cpu, since = self._device.type == "cpu", time.monotonic()
        wait = functools.partial(
            wait_for_message, group, what="step()", on_cpu=on_cpu, since=since, from_all=True
        )
        for work in chain(*[bucket.gather(group) for bucket in self._buckets]):
            wait(work)
        # A rank that failed is named. All must have stepped with the same options and gradients:
        # replicas that are equal would not show it.
        described = self._describe(self.param_groups)
        without = [self._names[p] for b in self._buckets for p in b.parameters if p.grad is None]
        described.append(("parameters without a gradient", str(without)))
        number = int.from_bytes(hashlib.sha256(repr(described).encode()).digest()[:7])
        sent = [0 if failure is None else rank + 1, number, -number]
        agreed = torch.tensor(sent, dtype=torch.int64, device=self._device)
        wait(dist.all_reduce(agreed, dist.ReduceOp.MAX, group, async_op=True))
        if failure is not None:
            raise failure
        failed, most, least = agreed.tolist()
        if failed:
            raise PeerFailedError(
                f"step() failed on rank {failed - 1}: the parameters are those before the step",
                [failed - 1],
            )
        if most != -least:
            self._check_same(described)
        for bucket in self._buckets:
            bucket.store()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard all gradients, of shards also; see `torch.optim.Optimizer.zero_grad`.

        Raises:
            NotSupportedError: `set_to_none` is False, with `reduce_scatter`.
        """
        if self._reduce_scatter and not set_to_none:
            raise NotSupportedError(
                "zero_grad(set_to_none=False) with reduce_scatter=True: use True"
            )
        super().zero_grad(set_to_none)
        self._release()

    def _release(self) -> None:
        for bucket in self._buckets:
            bucket.release()
        if self._hook is not None:
            self._hook.holds_gradients = False

    # -- clipping ----------------------------------------------------------------------------

    @torch.no_grad()
    @runs_outside_contexts
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; return the norm before.

        It is the norm of all gradients as one vector, the same on every rank, as
        `torch.nn.utils.clip_grad_norm_` computes it. Every rank calls this. With `reduce_scatter`
        it sends one small message.

        Raises:
            ArgumentError: `norm_type` is not above 0, with `reduce_scatter`.
        """
        self._check_usable("clip_grad_norm_()")
        if not self._reduce_scatter:
            params = list(chain(*(group["params"] for group in self.param_groups)))
            return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
        most = norm_type == float("inf")
        if not norm_type > 0:
            raise ArgumentError(f"norm_type is {norm_type}: with reduce_scatter, pass one above 0")
        own = [t for bucket in self._buckets for _, t in bucket.own]
        norms = [torch.zeros((), dtype=torch.float64, device=self._device)]
        for grad in (tensor.grad for tensor in own if tensor.grad is not None):
            wide = torch.promote_types(grad.dtype, torch.float32)
            norms.append(torch.linalg.vector_norm(grad, norm_type, dtype=wide).to(norms[0]))
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        op = dist.ReduceOp.MAX if most else dist.ReduceOp.SUM
        if not most:
            total.pow_(norm_type)
        FaultDomain.of(self._group).before_others()
        work = dist.all_reduce(total, op, self._group, async_op=True)
        what, on_cpu = "clip_grad_norm_()", total.is_cpu
        wait_for_message(self._group, work, what, on_cpu=on_cpu, from_all=True)
        if not most:
            total.pow_(1 / norm_type)
        dtypes = [bucket.parameters[0].dtype.to_real() for bucket in self._buckets]
        norm: Tensor = total.to(functools.reduce(torch.promote_types, dtypes))
        torch.nn.utils.clip_grads_with_norm_(own, max_norm, norm)
        return norm

    @torch.no_grad()
    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp each element of all gradients to at most `clip_value` in absolute value."""
        self._check_usable("clip_grad_value_()")
        if self._reduce_scatter:
            params = [t for bucket in self._buckets for _, t in bucket.own]
        else:
            params = list(chain(*(group["params"] for group in self.param_groups)))
        torch.nn.utils.clip_grad_value_(params, clip_value)

    # -- groups and state --------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters that the wrapper reduces. Every rank calls this.

        Raises:
            NotSupportedError: There are several optimizers, or `reduce_scatter` is True.
            ArgumentError: See the class.
        """
        if not self._optimizers:  # called by the base class, for the groups of construction
            super().add_param_group(param_group)
            return
        if len(self._specified) > 1 or self._reduce_scatter:
            raise NotSupportedError(
                "add_param_group() with several optimizers or reduce_scatter=True: give all groups "
                "at construction"
            )
        kind, given = self._specified[0]
        whole = _with_defaults(kind, [{**self.defaults, **param_group}], given)
        self._check_parameters(whole.param_groups)
        self._check_same(self._describe(whole.param_groups))
        super().add_param_group(whole.param_groups[0])
        self._shard(kind, whole.param_groups, given)

    def _copy_options(self, *, back: bool = False) -> None:
        """Copy options, which schedulers change, to the groups of this rank's parts, or back."""
        own = chain(*(inner.param_groups for inner in self._optimizers))
        for group, part in zip(self.param_groups, own, strict=True):
            source, target = (part, group) if back else (group, part)
            target.update((k, v) for k, v in source.items() if k not in ("params", "param_names"))

    def own_state(self) -> dict[Tensor, dict[str, Any]]:
        """Return the state of this rank's parts of parameters."""
        return {p: s for inner in self._optimizers for p, s in inner.state.items() if s}

    @torch.no_grad()
    @runs_outside_contexts
    def consolidate(self, to: int | None = None) -> None:
        """Gather the whole state for `state_dict`. Every rank calls this.

        The state is kept until the next step.

        Args:
            to: Rank in the group that receives it; None for all.

        Raises:
            ReductionError: An earlier step failed.
        """
        self._check_usable("consolidate()")
        FaultDomain.of(self._group).before_others()
        own = self.own_state()
        parts = [
            (number, piece, own[tensor])
            for number, bucket in enumerate(self._buckets)
            for piece, tensor in bucket.own
            if tensor in own
        ]
        everyones: list[Any] = [None] * self._group.size()
        if to is None:
            dist.all_gather_object(everyones, parts, self._group)
        else:
            received = everyones if self._group.rank() == to else None
            dist.gather_object(parts, received, group=self._group, group_dst=to)
        self._mark_state()
        self._consolidated = to is None or self._group.rank() == to
        if self._consolidated:
            self.state.clear()
        for number, piece, values in chain(*(part for part in everyones if part)):
            self._buckets[number].add_to(self.state, piece, values)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, as the plain optimizer has it, after `consolidate`.

        The plain optimizer loads it, and this one with any number of ranks. With a list of
        optimizers, groups and parameters are numbered through.

        Raises:
            ReductionError: `consolidate` was not called since the last step, or not for this rank.
        """
        state_dict = super().state_dict()  # with hooks, which may consolidate
        if not self._consolidated:
            raise ReductionError(
                "state_dict() needs the state of all ranks: call consolidate() on every rank first"
            )
        return state_dict

    def __getstate__(self) -> NoReturn:
        raise NotSupportedError("copy or pickle of a ShardedOptimizer: use its state_dict()")

    @torch.no_grad()
    @runs_outside_contexts
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the whole state, of this or of the plain optimizer. Every rank calls this."""
        super().load_state_dict(state_dict)
        self._loaded = digest(tensors_in([*self.state.values()])).hex()[:16]
        self._copy_options()
        for inner in self._optimizers:
            inner.state.clear()
        held = {p: i for i in self._optimizers for g in i.param_groups for p in g["params"]}
        for bucket in self._buckets:
            for piece, own in bucket.own:
                if state := self.state.get(bucket.parameters[piece.parameter]):
                    held[own].state[own] = bucket.part_of(state, piece)
        self._mark_state()
        self._failed = False


def _options(group: Mapping[str, Any]) -> str:
    """Describe a group's options: equal on all ranks if they are, without places in memory."""
    plain, described = (bool, int, float, complex, str, tuple, type(None)), {}
    for key, value in sorted(group.items()):
        # tensors, unless they would be waited for, and numbers of NumPy
        if hasattr(value, "tolist") and getattr(value, "is_cpu", True):
            described[key] = str(value.tolist())
        elif key != "params":
            described[key] = repr(value) if isinstance(value, plain) else type(value).__name__
    return str(described)


def _with_defaults(kind: Any, params: Groups, options: Mapping[str, Any]) -> Optimizer:
    """Construct the plain optimizer, which checks options, and has groups with all of them."""
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise ArgumentTypeError(f"optimizer is {kind!r}: pass a subclass of torch.optim.Optimizer")
    if issubclass(kind, REFUSED):
        raise NotSupportedError(
            f"optimizer is {kind.__name__}, whose step cannot be divided: use it by itself"
        )
    return kind(params, **options)


def _cost(kind: type[Optimizer], parameter: Tensor) -> int:
    """Return the relative cost of a step; Muon's products cost the smaller size per element."""
    muon = getattr(torch.optim, "Muon", None)
    by_size = muon is not None and issubclass(kind, muon) and parameter.dim() == 2
    return parameter.numel() * (min(parameter.shape) if by_size else 1)


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in memory order, as a 1-d view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


class _Bucket:
    """Parameters whose shards are gathered together, and this rank's shard."""

    def __init__(
        self, parameters: list[Parameter], assignment: Assignment, rank: int, *, cut: bool
    ) -> None:
        self.parameters, self._assignment, self._cut = parameters, assignment, cut
        self._layouts = [(p.dtype, p.shape, p.stride()) for p in parameters]
        self._rank, self._starts = rank, [0, *accumulate(assignment.lengths)]
        self._nbytes = [length * parameters[0].element_size() for length in assignment.lengths]
        self._places = [(r, p) for r, pieces in enumerate(assignment.pieces) for p in pieces]
        self.numel = self._starts[-1]
        # Within a step, the shards of all ranks. This rank's has copies of its parts of the
        # parameters, and those of others are received here: a step that fails has changed none.
        # With reduce_scatter, it is the memory of the gradients that were sent.
        self._shards: Tensor | None = None
        # this rank's pieces, with the parameters that the inner optimizer steps
        self.own = [
            (piece, Parameter(self._shape_only(piece))) for piece in assignment.pieces[rank]
        ]

    def _shape_only(self, piece: Piece) -> Tensor:
        """Return a tensor with the shape of a piece, in the memory of one element."""
        like = self.parameters[piece.parameter]
        shape = (piece.stop - piece.start,) if self._cut else like.shape
        return torch.empty((), dtype=like.dtype, device=like.device).expand(shape)

    def _allocated(self) -> Tensor:
        """Return the shards of all ranks, in new memory at first."""
        if self._shards is None:
            dtype, device = self._layouts[0][0], self.parameters[0].device
            self._shards = advised(torch.empty(self.numel, dtype=dtype, device=device))
        return self._shards

    def _view(self, shards: Tensor, piece: Piece, rank: int) -> Tensor:
        """Return a piece's elements in a tensor of shards; those of a whole parameter like it."""
        first = self._starts[rank] + piece.position
        view = shards[first : first + piece.stop - piece.start]
        return view if self._cut else views(view, [self.parameters[piece.parameter]])[0]

    def _part(self, tensor: Tensor, piece: Piece) -> Tensor:
        """Return a piece's elements of a tensor like its parameter."""
        if not self._cut:
            return tensor.detach()
        parameter = self.parameters[piece.parameter]
        if tensor.stride() != parameter.stride():
            tensor = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
        return _flat(tensor)[piece.start : piece.stop]

    def load(self) -> None:
        """Copy this rank's parts of parameters, and take those of gradients that are whole."""
        for parameter, layout in zip(self.parameters, self._layouts, strict=True):
            if (parameter.dtype, parameter.shape, parameter.stride()) != layout:
                raise NotSupportedError(
                    f"a parameter of shape {tuple(parameter.shape)} has another dtype, shape or "
                    "memory format than at construction: convert the module before wrapping it"
                )
        shards = self._allocated()
        for piece, own in self.own:
            parameter = self.parameters[piece.parameter]
            own.data = self._view(shards, piece, self._rank)
            own.copy_(self._part(parameter, piece))
            if parameter.grad is not None:
                own.grad = self._part(parameter.grad, piece)

    def gather(self, group: dist.ProcessGroup) -> list[dist.Work]:
        """Start to gather the shards of all ranks."""
        in_bytes = self._allocated().view(torch.uint8)  # new on a rank that has failed before
        shards = in_bytes.split(self._nbytes)
        if self._cut:
            return [getattr(group, ALL_GATHER_SINGLE)(in_bytes, shards[self._rank])]
        # of different lengths, as ranks have different parameters
        send = functools.partial(dist.broadcast, group=group, async_op=True)
        return [send(shard, group_src=r) for r, shard in enumerate(shards) if len(shard)]

    def store(self) -> None:
        """Copy the shards of all ranks to the parameters."""
        shards = self._allocated()
        torch._foreach_copy_(
            [self._part(self.parameters[piece.parameter], piece) for _, piece in self._places],
            [self._view(shards, piece, rank) for rank, piece in self._places],
        )

    def release(self) -> None:
        """Release the memory of the step, and the gradients."""
        for piece, own in self.own:
            own.grad = None
            if self._shards is not None:
                own.data = self._shape_only(piece)
        self._shards = None

    # -- reduce_scatter ----------------------------------------------------------------------

    def in_order(self) -> list[Parameter]:
        """Return the parameters in the order of their shards."""
        return [*dict.fromkeys(self.parameters[piece.parameter] for _, piece in self._places)]

    def reduce_scatter(
        self, group: dist.ProcessGroup, gradients: GradBucket
    ) -> tuple[dist.Work, Tensor, Tensor]:
        """Start to reduce gradients; what is received has rows, whose sum is the shard."""
        sent = gradients.buffer()
        if len(sent) != self.numel:  # shards have gaps, or a static graph leaves parameters out
            sent = advised(sent.new_empty(self.numel))
            given = dict(zip(gradients.parameters(), gradients.gradients(), strict=True))
            for rank, piece in self._places:
                gradient = given.get(self.parameters[piece.parameter])
                view = self._view(sent, piece, rank)
                view.zero_() if gradient is None else view.copy_(self._part(gradient, piece))
        sent.mul_(1 / group.size())
        own = self._assignment.lengths[self._rank]
        if self._cut and dist.get_backend(group) != "gloo":  # whose reduce_scatter has no future
            received = sent.new_empty(1, own)
            work = getattr(group, REDUCE_SCATTER_SINGLE)(received[0], sent)
        else:
            received = sent.new_empty(group.size(), own)
            in_bytes = received.flatten().view(torch.uint8), sent.view(torch.uint8)
            splits = [self._nbytes[self._rank]] * group.size(), self._nbytes
            work = getattr(group, ALL_TO_ALL_SINGLE)(*in_bytes, *splits)
        return work, sent, received

    def set_gradients(self, sent: Tensor, received: Tensor) -> None:
        """Set the gradients of this rank's pieces; those of parameters are not reduced."""
        self._shards, shard = sent, received[0] if len(received) == 1 else received.sum(0)
        for piece, own in self.own:
            gradient = self._view(shard, piece, 0)
            # what no rank uses has no gradient; another rank may use what this one does not
            if self.parameters[piece.parameter].grad is not None or gradient.any():
                own.grad = gradient
        for parameter in self.parameters:
            parameter.grad = None

    # -- state -------------------------------------------------------------------------------

    def part_of(self, state: Mapping[str, Any], piece: Piece) -> dict[str, Any]:
        """Return the state of a piece, from the state of its whole parameter."""
        like = self.parameters[piece.parameter]
        parts = dict(state)
        for key, value in state.items():
            if isinstance(value, Tensor):
                is_whole = value.dim() > 0 and value.shape == like.shape
                parts[key] = (self._part(value, piece) if is_whole else value).clone()
        return parts

    def add_to(
        self, whole: defaultdict[Tensor, Any], piece: Piece, values: Mapping[str, Any]
    ) -> None:
        """Add the state of a piece to the state of its whole parameter."""
        like = self.parameters[piece.parameter]
        state = whole[like]
        for key, value in values.items():
            if self._cut and isinstance(value, Tensor) and value.dim():
                if key not in state:
                    state[key] = torch.empty_like(like, dtype=value.dtype, requires_grad=False)
                _flat(state[key])[piece.start : piece.stop].copy_(value)
            else:
                state[key] = value


class _ReduceScatter(StatefulHook[dist.ProcessGroup]):
    """Hook that reduces each bucket of gradients to the ranks that step its parameters."""

    single_collective = True
    averages = True  # all ranks gather the same parameters

    def __init__(self, group: dist.ProcessGroup, buckets: Sequence[_Bucket]) -> None:
        super().__init__(group)
        self._buckets: dict[Tensor, _Bucket] = {p: b for b in buckets for p in b.parameters}
        self._received: list[tuple[_Bucket, Tensor, Tensor]] = []
        # True from a backward that was reduced to the step or zero_grad after it
        self.holds_gradients = False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # copies of the wrapper have no optimizer: they take the mean

    def run_hook(self, bucket: GradBucket) -> HookReturn:
        if self.holds_gradients:
            raise ReductionError(
                "two reduced backwards before one step: accumulate gradients in model.no_sync(), "
                "or call zero_grad() of the ShardedOptimizer to discard those of the first"
            )
        if bucket.index() == 0:  # a backward that failed may have left some
            self._received.clear()
        ranks, buffer = self.state.size(), bucket.buffer()
        mine = self._buckets.get(bucket.parameters()[0])
        if mine is None:  # of a parameter that is not optimized
            work = dist.all_reduce(buffer.mul_(1 / ranks), group=self.state, async_op=True)
        else:
            work, sent, received = mine.reduce_scatter(self.state, bucket)
            self._received.append((mine, sent, received))
        return after(work, lambda: buffer, buffer.device)

    def committed(self) -> None:
        self.holds_gradients = True
        while self._received:  # memory is released bucket by bucket
            bucket, sent, received = self._received.pop()
            bucket.set_gradients(sent, received)
