"""What a rank computes by itself, the same in the program and in its reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuzz.collectives_plan import Leaf, Plan, Step

__all__ = [
    "after", "bystander", "fit", "laid_out", "leaf_values", "loss_of", "pairing", "pieces_of",
    "tree_of",
]  # fmt: skip


def leaf_values(plan: Plan, index: int, rank: int) -> Tensor:
    """A leaf's values on a rank."""
    leaf = plan.leaves[index]
    generator = torch.Generator().manual_seed((plan.seed * 64 + index) * 8 + rank)
    value = _numbers(leaf, leaf.shapes[rank], generator)
    dtype = getattr(torch, leaf.dtype)
    if dtype.is_complex:
        value = torch.complex(value, _numbers(leaf, leaf.shapes[rank], generator))
    if not (dtype.is_floating_point or dtype.is_complex):
        value = (4 * value).round()
    return value.to(dtype)


def _numbers(leaf: Leaf, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    if leaf.grid:
        return torch.randint(-6, 7, tuple(shape), generator=generator).double() / 4
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)


def weights(seed: int, rank: int, like: Tensor) -> Tensor:
    """Numbers that differ by place and rank, as a loss multiplies with."""
    generator = torch.Generator().manual_seed(seed * 8 + rank)
    real = torch.float64
    value = torch.randint(1, 9, like.shape, generator=generator).to(real) / 4 - 1.125
    if like.is_complex():
        value = torch.complex(value, torch.randint(-4, 5, like.shape, generator=generator).to(real))
    return value.to(like.device, like.dtype)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In another dtype; of complex numbers the real part, where that is real."""
    return (x.real if x.is_complex() and not dtype.is_complex else x).to(dtype)


def fit(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """In any shape: the tensor itself where it has it, or its numbers over and over."""
    x = cast(x, dtype)
    if x.shape == tuple(shape):
        return x
    flat = x.reshape(-1)
    if not len(flat):
        return flat.new_zeros(tuple(shape)) + flat.sum().to(dtype)
    places = torch.arange(math.prod(shape), device=flat.device) % len(flat)
    return flat[places].reshape(tuple(shape))


def laid_out(x: Tensor, layout: str) -> Tensor:
    """In another layout; some of these change the values, in the reference too."""
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided":
        return torch.stack([x, x], -1)[..., 0]
    if layout == "expanded" and x.dim() and len(x):
        return x[:1].expand(x.shape)
    if layout == "offset" and x.dim():
        return torch.stack([x, x]).flatten(0, 1)[len(x) :]
    if layout == "conj":
        return x.conj()
    if layout == "neg" and (x.is_floating_point() or x.is_complex()):
        return torch._neg_view(x)
    if layout == "reversed" and x.dim():
        return x.flip(0)
    return x


def pieces_of(x: Tensor, step: Step) -> tuple[Tensor, ...]:
    """A list's tensors, which are views of one."""
    sizes = step.args["sizes"]
    if step.args.get("numbers") or step.args["form"] == "numbers":
        return x.unbind()
    return x.split(sizes, step.args["dim"])


def tree_of(x: Tensor, step: Step) -> dict[str, Any]:
    """The tensors of a coalesced step, which are made of one."""
    tree: dict[str, Any] = {"a": x, "b": [x * 2 if x.dtype != torch.bool else ~x]}
    if step.op == "reduce_scatter_coalesced":
        tree["b"].append(x.flatten(1)[:, :1] if x.dim() > 1 else x * 3)
    elif step.op != "all_gather_coalesced":
        tree["b"].append(x.reshape(-1)[:1].sum().to(x.dtype))
    if step.args["mixed"]:
        complex_one = x.is_complex() and step.args.get("op") not in ("max", "min")
        other = torch.complex128 if complex_one else torch.float64
        tree["c"] = cast(x, torch.float64).to(other) * 0.5
    return tree


def bystander(x: Tensor) -> Tensor:
    """A step's result on a rank outside its group."""
    y = x * 0.5 if x.is_floating_point() or x.is_complex() else x.clone()
    return y.contiguous()


def pairing(results: Sequence[Tensor], step: Step) -> Tensor:
    """One register of a step's results."""
    if len(results) == 1:
        return results[0]
    used = results[:1] + results[2:] if step.args.get("unused") else results
    widest = max((y.dtype for y in used), key=lambda d: (d.is_complex, d.itemsize))
    # cat's backward leaves empty tensors out, and this rank's with them what comes before.
    nothing = torch.stack([y.reshape(-1)[:0].to(widest).sum() for y in used]).sum()
    return torch.cat([y.reshape(-1).to(widest) for y in used]) + nothing.to(widest)


def after(y: Tensor, step: Step) -> Tensor:
    """What a step does with its register."""
    if step.post == "half":
        return y * 0.5
    if step.post == "in_place":
        return y.mul_(0.5)
    if step.post == "tanh":
        return (y * 0.4).tanh()
    return 0.3 * y * y if step.post == "square" else y


def loss_of(y: Tensor, kind: str, seed: int, rank: int) -> Tensor:
    """A register's part of a rank's loss."""
    w = weights(seed, rank, y)
    if kind == "sum":
        part = y.sum() * (1.5 + rank)
    elif kind == "transposed" and y.dim() > 1:
        part = (y.transpose(0, -1) * weights(seed, rank, y.transpose(0, -1))).sum()
    elif kind == "expanded" and y.dim():
        part = (y.sum(0, keepdim=True) * weights(seed, rank, y[:1])).sum()
    elif kind == "part":
        part = (y.reshape(-1)[::2] * w.reshape(-1)[::2]).sum()
    elif kind == "square":
        part = (y * y * w).sum()
    elif kind == "conj":
        part = (y.conj() * w).sum()
    elif kind == "twice":
        part = y.sum() * 0.5 + (y * w).sum()
    else:
        part = (y * w).sum()
    return cast(part, torch.float64)
