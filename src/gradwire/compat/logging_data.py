"""PyTorch's `_get_ddp_logging_data` from ours: the same keys, where ours has their values."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gradwire.ddp import DistributedDataParallel

__all__ = ["logging_dict"]

C10_NAMES = {torch.float32: "float", torch.float64: "double"}


def logging_dict(net: DistributedDataParallel) -> dict[str, str | int]:
    """What PyTorch logs of a wrapped module and its last step; times in ns."""
    data = net.logging_data()
    ignored = net.parameters_to_ignore
    named = [
        (n, p) for n, p in net.module.named_parameters() if p.requires_grad and n not in ignored
    ]
    numbers = {n: i for i, (n, _) in enumerate(named)}
    sizes = ", ".join(str(b.bytes) for b in data.buckets)
    dtypes = {C10_NAMES.get(p.dtype, str(p.dtype).removeprefix("torch.")) for _, p in named}
    members = (" ".join(str(numbers.get(n, -1)) for n in b.parameters) for b in data.buckets)
    logged: dict[str, str | int] = {
        "world_size": net.process_group.size(),
        "rank": net.process_group.rank(),
        "module_name": type(net.module).__name__,
        "backend_name": dist.get_backend(net.process_group),
        "iteration": max(0, data.steps - 1),
        "broadcast_buffers": int(net.broadcast_buffers),
        "find_unused_parameters": int(net.find_unused_parameters),
        "gradient_as_bucket_view": int(net.gradient_as_bucket_view),
        "static_graph": int(net.static_graph),
        "dtypes": ", ".join(sorted(dtypes)),
        "num_parameter_tensors": len(named),
        "total_parameter_size_bytes": sum(p.nbytes for _, p in named),
        "bucket_sizes": sizes,
        "num_buckets_reduced": data.buckets_sent,
        "has_rebuilt_buckets": int(data.rebuilt),
        "has_sync_bn": int(any(isinstance(m, torch.nn.SyncBatchNorm) for m in net.modules())),
        "forward_compute_time": int(data.forward_seconds * 1e9),
        "backward_compute_time": int(data.backward_seconds * 1e9),
        "backward_comm_time": int(data.communication_seconds * 1e9),
        "backward_compute_comm_overlap_time": int(
            max(0.0, data.communication_seconds - data.exposed_seconds) * 1e9
        ),
    }
    if data.rebuilt:
        logged["rebuilt_bucket_sizes"] = sizes
        logged["rebuilt_per_bucket_param_indices"] = ", ".join(members)
    if data.hook is not None:
        logged["comm_hook"] = data.hook
    return logged
