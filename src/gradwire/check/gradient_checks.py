"""Checks of losses and gradients: what is averaged, where, and what happens to it before."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from math import isclose
from pathlib import Path
from typing import Any

from gradwire.check.records import Check, Event, Finding, Replicas, Run, differing

_WORLD_SIZE = ("world_size", "WORLD_SIZE", "num_processes", "nprocs")


class AroundWrapper(Check):
    """Calls of a wrapped module without its wrapper.

    The wrapped module was called with gradients, no forward of the wrapper was reduced since the
    last step, and the gradients differ between ranks at the next one.
    """

    name = "around-wrapper"
    finds = "the model is called around its wrapper, so that its gradients stay local"
    remedy = "Call the wrapper: model(x) instead of model.module(x)"
    explains = ("parameters-differ",)

    def conclude_on(self, run: Run, model: Replicas) -> Iterator[Finding]:
        calls = {rank: self._calls(run, model, rank) for rank in model.ranks}
        for events in run.steps("stepped", model):
            at = [
                calls[r].get((e["optimizer"], e["number"]))
                for r, e in zip(model.ranks, events, strict=True)
            ]
            name = differing(events, "gradients")
            if name is not None and None not in at and at[0] is not None:
                text = "the gradients differ between ranks"
                yield self.found(text, at[0], model.ranks, tensor=name)
                break

    def _calls(self, run: Run, model: Replicas, rank: int) -> dict[tuple[int, int], Event]:
        """Return the calls around the wrapper that each step's gradients come from alone."""
        found: dict[tuple[int, int], Event] = {}
        call, reduced = None, False
        for event in run.events[rank]:
            if event["kind"] == "around" and event["model"] == model.number:
                call = event
            elif event["kind"] == "forward" and event["model"] == model.number:
                reduced = reduced or event["syncs"]
            elif event["kind"] == "stepped" and str(model.number) in event["models"]:
                if call is not None and not reduced:
                    found[event["optimizer"], event["number"]] = call
                call, reduced = None, False
        return found


class GatherWithoutGradient(Check):
    """Gathered tensors in a loss whose gradients end at the gather.

    A tensor that needs a gradient was gathered, and the loss's graph holds the result without one.
    """

    name = "gather-without-gradient"
    finds = "the loss uses the result of an all_gather that has no gradient"
    remedy = (
        "Use gradwire.all_gather or torch.distributed.nn.all_gather, or put this rank's own tensor "
        "back into its place of the result"
    )

    def conclude(self, run: Run) -> Iterator[Finding]:
        found: dict[str, tuple[Event, set[int]]] = {}
        for rank in run.ranks:
            for event in run.of("gathered", rank):
                found.setdefault(event["line"], (event, set()))[1].add(rank)
        for at, ranks in found.values():
            tensor = f"gathered tensor of shape {at['shape']}"
            text = "the gradients of the other ranks' tensors are lost"
            yield self.found(text, at, sorted(ranks), tensor=tensor)


class MeanOfMeans(Check):
    """Means over different numbers of elements, whose mean is taken.

    In several steps, and not only at the end of a loader, the same term of the loss divides by
    different numbers on different ranks or micro-steps, nothing weights it, and no hook reduces the
    gradients.
    """

    name = "mean-of-means"
    finds = "the loss averages over different numbers of tokens or samples"
    remedy = (
        "Call model.weight(n) before backward with the number n of tokens or samples (gradwire), "
        "or divide the sum by the mean of n over ranks and micro-steps"
    )

    def conclude(self, run: Run) -> Iterator[Finding]:
        if run.any("weight"):
            return
        for model in run.replicas():
            reductions = [
                ranks
                for ranks in run.reductions(model)
                if not any(event["last"] for micro in ranks for event in micro)
            ]
            differing = [(r, counts) for r in reductions if (counts := self._counts(r))]
            if len(differing) >= max(2, 0.25 * len(reductions)):
                backwards, counts = differing[0]
                text = (
                    f"in {len(differing)} of {len(reductions)} steps; in the first of them the "
                    f"ranks divide by {counts}"
                )
                yield self.found(text, backwards[0][-1], model.ranks)

    def _counts(self, ranks: list[list[Event]]) -> list[Any] | None:
        """Return the different counts of a term, by rank and micro-step; None if they agree."""
        events = [event for micro in ranks for event in micro]
        if any(e["hooked"] for e in events) or len({len(e["terms"]) for e in events}) != 1:
            return None
        for term in range(len(events[0]["terms"])):
            terms = [e["terms"][term] for e in events]
            counts = [t["count"] for t in terms]
            first = terms[0]["factor"]
            same = all(isclose(t["factor"], first, rel_tol=1e-6) for t in terms)
            whole = all(t["builtin"] or (t["count"] == int(t["count"]) >= 1) for t in terms)
            if same and whole and min(counts) < 0.99 * max(counts):
                by_rank = [[int(e["terms"][term]["count"]) for e in micro] for micro in ranks]
                return [c[0] if len(c) == 1 else c for c in by_rank]
        return None


class ClippedBeforeReduce(Check):
    """Gradients that are clipped while they are one rank's own.

    In one step, clip_grad_norm_ or clip_grad_value_ reduced gradients after a backward under
    no_sync, or before an all_reduce of the same gradients.
    """

    name = "clipped-before-reduce"
    finds = "gradients are clipped before they are reduced"
    remedy = "Clip after the backward that reduces the gradients, or after the all_reduce"

    def conclude(self, run: Run) -> Iterator[Finding]:
        found: dict[str, tuple[Event, list[int], str]] = {}
        for rank in run.ranks:
            for clip, parameter in self._clips(run.events[rank]):
                found.setdefault(clip["line"], (clip, [], parameter))[1].append(rank)
        for clip, ranks, parameter in found.values():
            text = (
                f"{clip['function']} cut gradients of {clip['before']:.3g} to {clip['limit']:.3g} "
                "while they were this rank's own"
            )
            yield self.found(text, clip, sorted(set(ranks)), tensor=parameter)

    def _clips(self, events: Any) -> Iterator[tuple[Event, str]]:
        local, clip, reduced = False, None, False
        for event in events:
            kind = event["kind"]
            if kind == "backward":
                if event["syncs"] and clip is not None and local:
                    yield clip, ""
                local = not event["syncs"]
                clip, reduced = (clip, False) if local else (None, False)
            elif kind == "clipped" and local and not reduced:
                clip = event
            elif kind == "reduced":
                if clip is not None:
                    yield clip, event["parameter"]
                clip, reduced = None, True
            elif kind == "stepped":
                local, clip, reduced = False, None, False


class ScaledByWorldSize(Check):
    """Losses that are scaled by the world size although the wrapper takes the mean.

    PyTorch's own mean is scaled by exactly the number of ranks, accumulation does not explain it,
    and the function that calls backward scales a loss by the world size.
    """

    name = "scaled-by-world-size"
    finds = "the loss is scaled by the world size, although the wrapper averages gradients"
    remedy = "Leave the factor out: after backward, gradients are the mean over ranks"

    def conclude_on(self, run: Run, model: Replicas) -> Iterator[Finding]:
        reductions = [micro for ranks in run.reductions(model) for micro in ranks]
        events = [event for micro in reductions for event in micro]
        if not events or run.any("weight") or any(e["hooked"] for e in events):
            return
        steps = Counter(map(len, reductions)).most_common(1)[0][0]
        factors = {t["factor"] for e in events for t in e["terms"] if t["builtin"]}
        for factor in factors if len(factors) == 1 else ():
            division = self._is_scaled(abs(factor), steps, len(model.ranks))
            if division is None:
                continue
            line = _scaling_line(events[0]["line"], division)
            if line:
                text = f"a mean is {'divided' if division else 'multiplied'} by {len(model.ranks)}"
                yield self.found(text, events[0], model.ranks, line=line)

    def _is_scaled(self, factor: float, steps: int, ranks: int) -> bool | None:
        """Return True for a division by the ranks, False for a multiplication, None for neither."""
        if isclose(factor, 1.0) or isclose(factor * steps, 1.0):
            return None
        for scaled in (factor, factor * steps):
            if isclose(scaled, ranks, rel_tol=1e-6):
                return False
            if isclose(scaled * ranks, 1.0, rel_tol=1e-6):
                return True
        return None


def _scaling_line(near: str, division: bool) -> str:
    """Return the line of the function around a line that scales a loss by the world size, or ""."""
    path, _, number = near.rpartition(":")
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _means_world_size(node.value, set()):
            names.update(map(ast.unparse, getattr(node.targets[0], "elts", node.targets)))
    for node in _function_around(tree, int(number)):
        match node:
            case ast.AugAssign(target, op, value):
                sides: list[tuple[ast.expr, ast.expr]] = [(target, value)]
            case ast.BinOp(left, op, right):
                sides = [(left, right), (right, left)]
            case _:
                continue
        for loss, by in sides if isinstance(op, ast.Div if division else ast.Mult) else ():
            text = ast.unparse(loss).lower()
            local = "item(" in text or "detach(" in text  # a number to report
            if "loss" in text and not local and _means_world_size(by, names):
                return f"{path}:{loss.lineno}"
    return ""


def _function_around(tree: ast.AST, line: int) -> Iterator[ast.AST]:
    """Yield the nodes of the innermost function around a line, or of the module outside functions.

    A line elsewhere may scale something else.
    """
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    around = [n for n in ast.walk(tree) if isinstance(n, functions)]
    around = [n for n in around if n.lineno <= line <= (n.end_lineno or n.lineno)]
    waiting: list[ast.AST] = [max(around, key=lambda n: n.lineno) if around else tree]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [n for n in ast.iter_child_nodes(node) if not isinstance(n, functions)]


def _means_world_size(node: ast.expr, names: set[str]) -> bool:
    text = ast.unparse(node)
    plain = not any(isinstance(inner, ast.BinOp) for inner in ast.walk(node))
    return text in names or (plain and any(name in text for name in _WORLD_SIZE))


class SyncedMicroSteps(Check):
    """Accumulation that reduces the gradients in each micro-step.

    Several backwards of the same line were reduced before each step, each on top of the gradients
    of the one before.
    """

    name = "synced-micro-steps"
    finds = "gradient accumulation communicates in every micro-step"
    remedy = "Run all but the last micro-step in `with model.no_sync():`, its forward included"

    def conclude_on(self, run: Run, model: Replicas) -> Iterator[Finding]:
        windows = self._windows(run.events[model.ranks[0]], model)
        several = [w for w in windows if len(w) > 1 and len({e["line"] for e in w}) == 1]
        if len(several) >= 2 and len(several) >= len(windows) / 2:
            count = len(several[0])
            text = f"{count} reductions before each step, of which {count - 1} are not needed"
            yield self.found(text, several[0][0], model.ranks)

    def _windows(self, events: Any, model: Replicas) -> list[list[Event]]:
        """Return the reduced backwards before each step that add to the ones before them."""
        windows: list[list[Event]] = []
        current: list[Event] = []
        accumulates = False
        for event in events:
            if event["kind"] == "forward" and event["model"] == model.number:
                accumulates = event["accumulates"]
            elif event["kind"] == "backward" and model.number in event["models"]:
                if event["syncs"]:
                    current = [*current, event] if accumulates else [event]
            elif event["kind"] == "stepped" and str(model.number) in event["models"]:
                windows.append(current)
                current = []
        return windows
