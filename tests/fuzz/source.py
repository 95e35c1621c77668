"""The code of a plan's model, and the model.

The state `h` has R rows and C columns. What goes in is a batch `x` of 16 numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fuzz import pieces
from fuzz.plan import Op, Param, Plan, params_in

__all__ = ["build", "code_of"]

LINES = {
    "mul": "h = h * {0}",
    "row": "h = h * {0}",
    "scalar": "h = h * {0}",
    "flat": "h = (h.reshape(-1) + {0}).view(R, C)",
    "flat2": "h = h + ({0}.view(-1) + {1}.view(-1)).view(R, C)",
    "same2": "h = h + ({0}.view(-1) + {1}.view(-1)).view(R, C)",
    "stack": "h = h + torch.stack([{0}, {1}]).view(R, C)",
    "cat": "h = h + torch.cat([{0}, {1}])",
    "mixed": "h = h + ({0} + torch.cat([{1}, {2}]).view(-1)).view(R, C)",
    "batch1": "h = (h.unsqueeze(0) + {0}.unsqueeze(0)).squeeze(0)",
    "conj": ("h = h + {0}.conj()", "h = h * {0}.conj()"),
    "neg": "h = h + torch._neg_view({0})",
    "imag": "h = h + {0}.conj().imag.to(h.dtype)",
    "expand": "h = h + {0}.expand(R, C)",
    "expand_rows": "h = h + {0}.expand(R, C)",
    "transpose": "h = h + {0}.t()",
    "slice": "h = h + {0}[1:-1]",
    "slice_cols": "h = h + {0}[:, :C]",
    "part": "h = torch.cat([h[: R // 2] + {0}, h[R // 2 :]])",
    "linear": "h = F.linear(h, 0.3 * {0}, {1})",
    "large": (
        "h = h + F.linear(x.view(2, 8).to(h.dtype), {0}).mean()",
        "h = h + (x.view(2, 8).to(h.dtype) @ {0}.t()).sum() / R",
    ),
    "conv": "h = F.conv1d(h.t().unsqueeze(0), 0.2 * {0}, padding=1)[0].t()",
    "embedding": "h = h + F.embedding((x.detach() * 9).long().view(-1) % 10, {0}).mean(0)",
    "sparse": "h = h + self.{name}((x.detach() * 9).long().view(-1) % 10).mean(0)",
    "norm": "h = F.layer_norm(h, (C,), {0}, {1})",
    "cast": "h = h + as_like(h, like(h, {0}) * {0})",
    "none": "h = GivesNone.apply(h, {0})",
    "saved": "h = GivesSaved.apply(h, {0}, self.remember('saved', h.detach() + 1), {flag})",
    "same_for_both": "h = SameForBoth.apply(h, {0}, {1})",
    "same_gradient": "h = SameGradient.apply(h, {0}, {1}, {flag})",
    "spare": "pass",
    "tanh": "h = torch.tanh(h)",
    "fork": "h = h.view(-1).view(R, C) + 0.5 * h if h.is_contiguous() else h + h.t().t()",
    "reshape": ("h = h.t().contiguous().t()", "h = torch.cat(h.chunk(2))"),
    "watch": "self.watch('{name}', h)",
    "hook": "h.requires_grad and h.register_hook(lambda g: g * 1.5)",
    "square": "loss = loss + 0.1 * {0}.abs().square().sum()",
    "conj_square": "loss = loss + 0.1 * ({0}.conj() * 3).abs().square().sum()",
    "view_square": "loss = loss + 0.1 * {0}.view(-1).abs().square().sum()",
}


def like(h: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """The state in a parameter's dtype."""
    return h.real.to(p.dtype) if h.is_complex() and not p.is_complex() else h.to(p.dtype)


def as_like(h: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A value in the state's dtype."""
    return (value.real if value.is_complex() and not h.is_complex() else value).to(h.dtype)


class _Writer:
    def __init__(self) -> None:
        self.count = 0

    def ops(self, ops: tuple[Op, ...], indent: str) -> list[str]:
        lines = [line for op in ops for line in self.op(op, indent)]
        return lines or [f"{indent}pass"]

    def op(self, op: Op, indent: str) -> list[str]:
        if op.skip:
            return [
                f"{indent}if at not in {set(op.skip)}:",
                *self._plain(op, indent + "    "),
            ]
        return self._plain(op, indent)

    def _plain(self, op: Op, indent: str) -> list[str]:
        self.count += 1
        n = self.count
        if op.kind == "residual":
            return [
                f"{indent}r{n} = h", *self.ops(op.body, indent), f"{indent}h = 0.5 * (h + r{n})",
            ]  # fmt: skip
        if op.kind in ("checkpoint", "reentrant"):
            return [
                f"{indent}def part{n}(h):",
                *self.ops(op.body, indent + "    "),
                f"{indent}    return h",
                f"{indent}h = checkpoint(part{n}, h, use_reentrant={op.kind == 'reentrant'})",
            ]
        given = LINES[op.kind]
        line = given if isinstance(given, str) else given[op.flag]
        names = [f"self.{p.name}" for p in op.params]
        name = op.params[0].name if op.kind == "sparse" else str(n)
        return [indent + line.format(*names, name=name, flag=op.flag)]


def code_of(plan: Plan) -> str:
    """The model's code."""
    writer = _Writer()
    forward = writer.ops(plan.ops, "        ")
    declared = [
        f"        self.{p.name} = parameters[{p.name!r}]  # {p.shape}, {p.dtype}"
        for p in dict.fromkeys(params_in(plan.ops))
    ]
    loss = [line.replace("self.", "parameters.") for line in writer.ops(plan.loss, "    ")]
    lines = [
        f"R, C = {plan.shape}",
        "class Model(Base):",
        "    def __init__(self, parameters):",
        "        super().__init__()",
        *declared,
        "",
        "    def forward(self, h, x, at):",
        *forward,
        "        return h",
        "",
        "def extra(loss, parameters):",
        *loss,
        "    return loss",
    ]
    return "\n".join(lines)


def build(plan: Plan) -> tuple[nn.Module, Any, dict[str, nn.Parameter]]:
    """The model, the loss's addition, and the parameters by name."""
    generator = torch.Generator().manual_seed(plan.seed)
    parameters: dict[str, Any] = {}
    for p in dict.fromkeys([*params_in(plan.ops), *params_in(plan.loss)]):
        parameters[p.name] = _parameter(p, generator, plan.device)
    space: dict[str, Any] = {name: getattr(pieces, name) for name in pieces.__all__}
    space |= {"torch": torch, "F": nn.functional, "like": like, "as_like": as_like}
    space["checkpoint"] = torch.utils.checkpoint.checkpoint
    exec(compile(code_of(plan), f"<model {plan.seed}>", "exec"), space)
    flat = {n: m.weight if isinstance(m, nn.Module) else m for n, m in parameters.items()}
    return space["Model"](parameters), space["extra"], flat


def _parameter(p: Param, generator: torch.Generator, device: str) -> nn.Module | nn.Parameter:
    dtype = getattr(torch, p.dtype)
    value = torch.randn(p.shape, generator=generator, dtype=torch.float64)
    if dtype.is_complex:
        value = torch.complex(value, torch.randn(p.shape, generator=generator, dtype=value.dtype))
    value = (0.7 + 0.3 * value).to(device, dtype)
    if p.name.startswith("e"):
        return nn.Embedding(*p.shape, sparse=True, _weight=value)
    return nn.Parameter(value)
