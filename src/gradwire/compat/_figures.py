"""What PyTorch's `_get_ddp_logging_data` tells, from ours: the same names where there are such."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from gradwire.ddp import DistributedDataParallel

__all__ = ["logging_dict"]

C10_NAMES = {torch.float32: "float", torch.float64: "double"}


def logging_dict(net: DistributedDataParallel) -> dict[str, str | int]:
    """Figures of a wrapped module and its last step; times in ns."""
    told = net.logging_data()
    ignored = net.parameters_to_ignore
    named = [
        (n, p) for n, p in net.module.named_parameters() if p.requires_grad and n not in ignored
    ]
    numbers = {n: i for i, (n, _) in enumerate(named)}
    sizes = ", ".join(str(b.bytes) for b in told.buckets)
    dtypes = {C10_NAMES.get(p.dtype, str(p.dtype).removeprefix("torch.")) for _, p in named}
    members = (" ".join(str(numbers.get(n, -1)) for n in b.parameters) for b in told.buckets)
    figures: dict[str, str | int] = {
        "world_size": net.process_group.size(),
        "rank": net.process_group.rank(),
        "module_name": type(net.module).__name__,
        "backend_name": dist.get_backend(net.process_group),
        "iteration": max(0, told.steps - 1),
        "broadcast_buffers": int(net.broadcast_buffers),
        "find_unused_parameters": int(net.find_unused_parameters),
        "gradient_as_bucket_view": int(net.gradient_as_bucket_view),
        "static_graph": int(net.static_graph),
        "dtypes": ", ".join(sorted(dtypes)),
        "num_parameter_tensors": len(named),
        "total_parameter_size_bytes": sum(p.nbytes for _, p in named),
        "bucket_sizes": sizes,
        "num_buckets_reduced": told.buckets_sent,
        "has_rebuilt_buckets": int(told.rebuilt),
        "has_sync_bn": int(any(isinstance(m, torch.nn.SyncBatchNorm) for m in net.modules())),
        "forward_compute_time": int(told.forward_seconds * 1e9),
        "backward_compute_time": int(told.backward_seconds * 1e9),
        "backward_comm_time": int(told.communication_seconds * 1e9),
        "backward_compute_comm_overlap_time": int(
            max(0.0, told.communication_seconds - told.exposed_seconds) * 1e9
        ),
    }
    if told.rebuilt:
        figures["rebuilt_bucket_sizes"] = sizes
        figures["rebuilt_per_bucket_param_indices"] = ", ".join(members)
    if told.hook is not None:
        figures["comm_hook"] = told.hook
    return figures
