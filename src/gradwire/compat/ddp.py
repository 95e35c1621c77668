"""DistributedDataParallel with the additional attributes and methods of PyTorch's class.

Frameworks and training scripts use them, with and without an underscore. Attributes of PyTorch's
C++ reducer and logger are not provided.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.nn.parallel.distributed import _BufferCommHookLocation

from gradwire import ddp as ours
from gradwire import hooks
from gradwire._containers import map_tensors
from gradwire._torch import (
    BROADCAST_BUFFERS_DEPRECATED,
    TORCHS_DDP,
    narrowed_to_torchs_ddp,
    run_as_written,
)
from gradwire.compat.comm_hooks import BUCKET_TABLE, _broadcast_coalesced, adapt_hook
from gradwire.compat.replacements import (
    CHANGED,
    READY_TWICE,
    RefusedError,
    Replacement,
    constructor_error,
    unfinished_reduction,
    with_phrase,
)
from gradwire.errors import ArgumentError, ArgumentTypeError, ReductionError

BROADCAST_BYTES = 250 << 20
C10_NAMES = {torch.float32: "float", torch.float64: "double"}


class DistributedDataParallel(ours.DistributedDataParallel):
    """gradwire.ddp.DistributedDataParallel with the additional names of PyTorch's class."""

    _active_ddp_module: ClassVar[Any] = None

    @narrowed_to_torchs_ddp(ours.DistributedDataParallel.__init__)
    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        if arguments.get("broadcast_buffers") is not None and BROADCAST_BUFFERS_DEPRECATED:
            warnings.warn(
                "broadcast_buffers is deprecated in PyTorch: pass forward_sync_buffers",
                FutureWarning,
                stacklevel=3,
            )
        mesh = arguments.get("device_mesh")
        try:
            super().__init__(module, **arguments)
        except ArgumentError as error:
            group = arguments.get("process_group")
            raise constructor_error(error, module, group, mesh) from error
        first = next(module.parameters()).device
        self.device_ids = None if self.device is None else [first]
        self.output_device = None if self.device is None else first
        self.device_type = first.type
        self.device_mesh = mesh
        self.is_multi_device_module = len({p.device for p in module.parameters()}) > 1
        caps = arguments.get("bucket_cap_mb_list") or ()
        self.bucket_bytes_cap_list = [int(mb * (1 << 20)) for mb in caps]
        self.broadcast_bucket_size = BROADCAST_BYTES
        self._builtin_hook: dist.BuiltinCommHookType | None = None
        self._error = ""

    @property
    def weight(self) -> None:  # type: ignore[override]
        """Hide the method, as programs initialize modules with a `weight`; use `reducer.weight`."""
        raise AttributeError("weight")

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        """Mark parameters and buffers to be ignored, by name, before wrapping a module."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in params_and_buffers_to_ignore:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    @staticmethod
    def _get_data_parallel_params(
        module: nn.Module, named_params: bool = False
    ) -> Iterator[Parameter | tuple[str, Parameter]]:
        """Yield parameters that are not ignored, or pairs of name and parameter."""
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter

    @property
    def forward_sync_buffers(self) -> bool:
        """True if rank 0's buffers are broadcast in each training forward."""
        return self.broadcast_buffers

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """Buffers that are broadcast, by name."""
        return self._buffers_synced.named()

    @property
    def modules_buffers(self) -> list[Tensor]:
        """Buffers that are broadcast."""
        return list(self.named_module_buffers.values())

    def will_sync_module_buffers(self) -> bool:
        """Return True if the next training forward synchronizes buffers."""
        wanted = self.require_forward_param_sync and self.broadcast_buffers
        return wanted and bool(self._buffers_synced)

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        _broadcast_coalesced(self.process_group, tensors, buffer_size, authoritative_rank)

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """Broadcast one rank's values of the given buffers; by default, of `modules_buffers`."""
        self._distributed_broadcast_coalesced(
            self.modules_buffers if bufs is None else bufs,
            bucket_size or self.broadcast_bucket_size,
            authoritative_rank,
        )

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """See gradwire.ddp.DistributedDataParallel.register_comm_hook; only one hook is allowed.

        Raises:
            RefusedError: A hook is already registered, or this hook's annotations are wrong.
        """
        try:
            if hook is not None and self.reducer.comm_hook is not None:
                raise RefusedError(
                    "a hook is already registered: remove it with register_comm_hook(None, None) "
                    "(PyTorch's message: register_comm_hook or register_builtin_comm_hook can only "
                    "be called once.)"
                )
            super().register_comm_hook(state, adapt_hook(state, hook))
        except RefusedError as error:
            self._error = str(error)
            raise
        except ArgumentTypeError as error:
            self._error = f"{error} (PyTorch's message: Communication hook must be callable.)"
            raise ArgumentTypeError(self._error) from error
        self._builtin_hook = None

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        builtin = {
            dist.BuiltinCommHookType.ALLREDUCE: hooks.all_reduce,
            dist.BuiltinCommHookType.FP16_COMPRESS: hooks.fp16,
        }
        self.register_comm_hook(self.process_group, builtin[comm_hook_type])
        self._builtin_hook = comm_hook_type

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[[Any, dict[str, Tensor]], Any],
        comm_hook_location: _BufferCommHookLocation = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """See gradwire.ddp.DistributedDataParallel.register_buffer_hook."""
        self.register_buffer_hook(
            lambda buffers, group: hook(state, buffers),
            after_forward=comm_hook_location == _BufferCommHookLocation.POST_FORWARD,
        )

    def _register_fused_optim(
        self, optim: type, *args: Any, optim_params: Iterable[Tensor] | None = None, **kwargs: Any
    ) -> None:
        """Step parameters with an optimizer of this class as soon as their bucket is reduced."""
        from torch.distributed.algorithms._optimizer_overlap import _as_overlapped_optim

        _as_overlapped_optim(optim, optim_params, *args, **kwargs).register_ddp(self)

    def _update_process_group(self, new_process_group: ProcessGroup) -> None:
        self.process_group = new_process_group

    def _set_static_graph(self) -> None:
        """Set static_graph=True after construction, before training."""
        if self.static_graph:
            warnings.warn("static_graph is already set", stacklevel=2)
            return
        if self.logging_data().steps:
            self._error = "_set_static_graph() should be called before training loop starts"
            raise ReductionError(self._error)
        self.static_graph = True
        self._options = replace(self._options, static_graph=True)
        self._make_reducer(self.reducer.comm_hook)

    def _remove_autograd_hooks(self) -> None:
        """Stop reducing gradients."""
        self.reducer.close()

    @property
    def _authoritative_rank(self) -> int:
        """Rank whose parameters all ranks had after `join`; -1 before."""
        return -1 if self._uneven is None else self._uneven.root

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Do nothing: outputs are never cloned."""

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        """Return the module whose forward is running, of PyTorch's class or this one."""
        return cls._active_ddp_module or TORCHS_DDP._active_ddp_module

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Prepare a forward, for `replicate`, which runs the module itself."""
        self._began = self._before(self._syncing())
        if self.device is None:
            return inputs, kwargs
        return map_tensors(self._to_device, inputs), map_tensors(self._to_device, kwargs)

    def _post_forward(self, output: Any) -> Any:
        return self._after(output, self._syncing(), self._began)

    def _syncing(self) -> bool:
        return torch.is_grad_enabled() and self.require_backward_grad_sync

    @run_as_written
    def _before(self, syncing: bool) -> int:
        try:
            return super()._before(syncing)
        except ReductionError as error:
            rank, names = self.process_group.rank(), list(self._reduced_parameters())
            reworded = unfinished_reduction(error, rank, names, static=self.static_graph)
            self._error = str(reworded)
            raise reworded from error

    def _unexpected_gradient(self, error: ReductionError) -> ReductionError:
        phrase = CHANGED if self.static_graph else READY_TWICE
        self._error = with_phrase(str(error), phrase)
        return ReductionError(self._error, error.parameters)

    def _reduced_parameters(self) -> dict[str, Parameter]:
        """Return reduced parameters by name, in the order of PyTorch's parameter indices."""
        named = self.module.named_parameters()
        return {n: p for n, p in named if p.requires_grad and n not in self.parameters_to_ignore}

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Do nothing: times are measured in every step."""
        if sample_rate < 1:
            raise ArgumentError(f"sample_rate is {sample_rate}: give 1 or more")

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        """Return gradwire's logging_data of the last step under PyTorch's names, times in ns."""
        data = self.logging_data()
        named = self._reduced_parameters()
        numbers = {n: i for i, n in enumerate(named)}
        hidden = data.communication_seconds - data.exposed_seconds
        sizes = ", ".join(str(b.bytes) for b in data.buckets)
        dtypes = {
            C10_NAMES.get(p.dtype, str(p.dtype).removeprefix("torch.")) for p in named.values()
        }
        members = (" ".join(str(numbers.get(n, -1)) for n in b.parameters) for b in data.buckets)
        logged: dict[str, str | int] = {
            "world_size": self.process_group.size(),
            "rank": self.process_group.rank(),
            "module_name": type(self.module).__name__,
            "backend_name": self.process_group.name(),
            "iteration": max(0, data.steps - 1),
            "broadcast_buffers": int(self.broadcast_buffers),
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "dtypes": ", ".join(sorted(dtypes)),
            "num_parameter_tensors": len(named),
            "total_parameter_size_bytes": sum(p.nbytes for p in named.values()),
            "bucket_sizes": sizes,
            "num_buckets_reduced": data.buckets_sent,
            "has_rebuilt_buckets": int(data.rebuilt),
            "join_uneven_inputs": int(self._uneven is not None),
            "has_sync_bn": int(any(isinstance(m, torch.nn.SyncBatchNorm) for m in self.modules())),
            "forward_compute_time": int(data.forward_seconds * 1e9),
            "backward_compute_time": int(data.backward_seconds * 1e9),
            "backward_comm_time": int(data.communication_seconds * 1e9),
            "backward_compute_comm_overlap_time": int(max(0.0, hidden) * 1e9),
        }
        if data.rebuilt:
            logged["rebuilt_bucket_sizes"] = sizes
            logged["rebuilt_per_bucket_param_indices"] = ", ".join(members)
        if data.hook is not None:
            logged["comm_hook"] = str(
                data.hook if self._builtin_hook is None else self._builtin_hook
            )
        return logged | ({"has_error": 1, "error": self._error} if self._error else {})


TABLE = (
    Replacement(
        DistributedDataParallel,
        "DistributedDataParallel",
        ("torch.nn.parallel.distributed", "torch.nn.parallel"),
        wherever_loaded=True,
    ),
    *BUCKET_TABLE,
)
"""Replacements, and the modules of PyTorch that receive them."""
